"""What an environment records of its control steps, when it is asked to (`make(..., trace="file.json")`)."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from brax_concurrent.backends import cuda_driver
from brax_concurrent.backends.cpu_program import CpuProgram, content_hash, cores
from brax_concurrent.backends.cuda_program import DESC_MODE, DESC_STREAMS, DISPATCHED, GRAPH, WINDOW, CudaProgram
from brax_concurrent.backends.cuda_trace import DispatchTrace, TraceBlock
from brax_concurrent.backends.native import DESC_INTERLEAVE, DESC_THREADS, DESC_WINDOW
from brax_concurrent.interop.jax_ffi import Program
from brax_concurrent.scheduler.records import END, Records, recordable, recording, set_apart
from brax_concurrent.scheduler.serial import TileComposite, TileProgram
from brax_concurrent.scheduler.task import Task
from brax_concurrent.scheduler.trace import Timeline, TracedTask, apart, checked_path
from brax_concurrent.scheduler.trace_streams import (
    cuda_rows,
    cuda_stream,
    dispatched_rows,
    dispatched_stream,
    tile_stream,
)

if TYPE_CHECKING:
    from brax_concurrent.envs.base import Env
    from brax_concurrent.envs.mixed import MixedEnv

ENVIRONMENT = "BRAX_CONCURRENT_TRACE"
"""Environment variable: a file for what environments record that are made without `trace`."""

CAPACITY = 1 << 16  # tasks that are kept, the first ones; the others are counted
_PATIENCE = 10.0  # seconds in which what has begun must end before the records are read

_numbers = itertools.count()
_asked_for = itertools.count(1)  # files that the environment variable has named
_unwritten: dict[int, Tracer] = {}  # by number, what is written at exit unless it was before


def make_tracer(trace: Any, name: str) -> Tracer | None:
    """What records an environment called `name`, given the `trace` argument of `make`; None: nobody.

    Raises:
        TypeError, ValueError: see `checked_path`; the message names the argument or the environment variable.
    """
    if trace is not None:
        return Tracer(checked_path("trace", trace), name)
    if not os.environ.get(ENVIRONMENT):
        return None
    path, number = checked_path(ENVIRONMENT, os.environ[ENVIRONMENT]), next(_asked_for)
    if number > 1:  # one file for each environment
        path = path.with_name(f"{path.stem}.{number}{path.suffix}")
    return Tracer(path, name)


class Tracer:
    """Records one program from its first call on, and writes the file.

    The environment need not live: what it recorded does, until the process ends.

    Args:
        path: the file.
        name: title of the trace.
    """

    def __init__(self, path: Path, name: str):
        self.path, self._name = path, name
        self._number = next(_numbers)
        self._source: _CpuSource | _CudaSource | _DispatchSource | None = None

    def attach(self, program: Program, num_envs: int, tiles: TileProgram | TileComposite | None) -> Program:
        """The program to call instead, whose calls are recorded from now on, and nobody else's.

        Args:
            program: of the control step.
            num_envs: with which it is called.
            tiles: what it was made of; None on CUDA.

        Raises:
            CudaError: there is no memory on the GPU for the times.
        """
        source: _CpuSource | _CudaSource | _DispatchSource
        if isinstance(program, CudaProgram) and program.desc[DESC_MODE] == DISPATCHED:
            source = _DispatchSource(program, num_envs, self._number)
        elif isinstance(program, CudaProgram):
            source = _CudaSource(program, num_envs, self._number)
        else:
            assert tiles is not None
            source = _CpuSource(program, num_envs, tiles, self._number)
        self._source = source
        _at_exit()
        _unwritten[self._number] = self
        return source.program

    def timeline(self) -> Timeline:
        """What was recorded so far, once what has begun has ended."""
        if self._source is None:  # no step was ever asked for
            return Timeline((), np.zeros((0, 5), np.int64), name=self._name)
        for array in jax.live_arrays("cpu" if isinstance(self._source, _CpuSource) else "gpu"):
            with contextlib.suppress(RuntimeError):  # deleted meanwhile, or what failed: whoever uses it is told
                array.block_until_ready()
        return replace(self._source.timeline(), name=self._name)

    def write(self) -> Timeline:
        """Write the file; returns what is in it.

        Raises:
            OSError: it cannot be written.
        """
        timeline = self.timeline()
        timeline.write(self.path)
        _unwritten.pop(self._number, None)
        return timeline


def write_trace(tracer: Tracer | None) -> Timeline:
    """`Tracer.write`; RuntimeError if there is no tracer."""
    if tracer is None:
        raise RuntimeError(f"there is no trace: make the environment with trace='file.json', or set {ENVIRONMENT}")
    return tracer.write()


def first_tasks(env: Env | MixedEnv, count: int) -> list[Task]:
    """The first tasks of the stream that an environment on the CPU records, with their footprints."""
    source = env._tracer._source if env._tracer is not None else None
    if not isinstance(source, _CpuSource):
        raise RuntimeError("env: expected one on the CPU that was made with trace= and has taken a step")
    return list(itertools.islice(source.tasks(), count))


@functools.cache
def _at_exit() -> None:
    atexit.register(_write_all)  # after JAX's own, and so called before JAX is gone


def _write_all() -> None:
    """At exit: write what nobody has written, and say so."""
    for number in sorted(_unwritten):
        tracer = _unwritten.pop(number)
        try:
            print(f"brax_concurrent: {tracer.path}: {tracer.write().summary()}", file=sys.stderr)
        except (OSError, RuntimeError) as error:
            print(f"brax_concurrent: {tracer.path} was not written: {error}", file=sys.stderr)


class _CpuSource:
    """Records of a program on the CPU."""

    def __init__(self, program: CpuProgram, num_envs: int, tiles: TileProgram | TileComposite, number: int):
        program = program if program.desc[DESC_WINDOW] else recordable(program)
        self.program = set_apart(program, number)
        self._tiles, self._num_envs, self._interleave = tiles, num_envs, int(program.desc[DESC_INTERLEAVE]) or 1
        self._stream: tuple[TracedTask, ...] = tile_stream(tiles, num_envs, self._interleave)
        # Never closed: a call that is under way must not lose the memory that it writes to.
        self._open = contextlib.ExitStack()
        self._records: Records = self._open.enter_context(recording(self.program, CAPACITY))

    def timeline(self) -> Timeline:
        records, until = self._records, time.monotonic() + _PATIENCE
        while records.count < records.runs * len(self._stream) and time.monotonic() < until:
            time.sleep(0.001)
        rows = records.rows
        rows = rows[rows[:, END] != 0]  # a row that is being written
        missing = records.runs * len(self._stream) - len(rows)
        lanes = int(self.program.desc[DESC_THREADS]) or cores()
        return Timeline(self._stream, apart(rows), lanes, missing, "thread")

    def tasks(self) -> Iterator[Task]:
        if isinstance(self._tiles, TileComposite):
            return self._tiles.tasks(self._interleave)
        return self._tiles.tasks(self._num_envs, self._interleave)


def _set_apart_on_cuda(program: CudaProgram, number: int) -> CudaProgram:
    """The program as one that nobody else calls, with a descriptor of its own.

    XLA must not capture its launches: what it replays would write to the first call's places.
    """
    fingerprint = content_hash("set apart", program.fingerprint, number)
    return replace(
        program, desc=program.desc.copy(), fingerprint=fingerprint, traced=True, owners=(program, *program.owners)
    )


class _DispatchSource:
    """Times of a program's tasks under the dispatcher of the first GPU, by its own clock."""

    def __init__(self, program: CudaProgram, num_envs: int, number: int):
        self.program, self._num_envs = _set_apart_on_cuda(program, number), num_envs
        self._stream = dispatched_stream(program, num_envs)
        with cuda_driver.primary_context():
            self._block = DispatchTrace(self.program, CAPACITY)
            self._block.start()

    def timeline(self) -> Timeline:
        with cuda_driver.primary_context():
            rows, late = self._block.read()
        return Timeline(self._stream, dispatched_rows(self.program, self._num_envs, rows), 0, late, "worker")


class _CudaSource:
    """Times of a program's launches on the first GPU, by its own clock."""

    def __init__(self, program: CudaProgram, num_envs: int, number: int):
        self.program = _set_apart_on_cuda(program, number)
        self._stream, self._num_envs = cuda_stream(program, num_envs), num_envs
        with cuda_driver.primary_context():
            self._block = TraceBlock(self.program, CAPACITY)
            self._block.start()

    def timeline(self) -> Timeline:
        with cuda_driver.primary_context():
            launches, times, late = self._block.read()
        rows = cuda_rows(self.program, self._num_envs, launches, times)
        missing, mode = late + len(launches) - len(rows), int(self.program.desc[DESC_MODE])
        if mode == GRAPH:
            return Timeline(self._stream, apart(rows), 0, missing, "branch")
        lanes = int(self.program.desc[DESC_STREAMS]) if mode == WINDOW else 1
        return Timeline(self._stream, rows, lanes, missing, "stream")
