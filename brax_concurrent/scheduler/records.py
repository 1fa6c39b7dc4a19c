"""What a program did when: a row for each task, written by the threads that ran them.

Programs of `compile_window` record themselves. Those that run in program order do not, to spend nothing on it; what
`recordable` makes of one is run by the code below instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numba import njit

from brax_concurrent.backends import intrinsics, native
from brax_concurrent.backends.cpu_program import CpuProgram, content_hash, with_runner
from brax_concurrent.backends.intrinsics import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_kernel,
    fill_bytes,
    give_way,
    load_i64,
    monotonic_ns,
    store_i64,
)
from brax_concurrent.backends.native import (
    DESC_ARENA_BYTES,
    DESC_BUFFERS,
    DESC_CAPACITY,
    DESC_FIRST_OP,
    DESC_MAGIC,
    DESC_NUM_ENVS,
    DESC_OPS,
    DESC_POISON,
    DESC_RECORDABLE,
    DESC_RECORDS,
    DESC_STATE_WORDS,
    DESC_WINDOW,
    JOB_BUFFERS,
    JOB_CHUNK,
    JOB_DESC,
    JOB_DONE,
    JOB_NEXT,
    JOB_NUM_ENVS,
    JOB_STATE,
    JOB_TILES,
    NO_MEMORY,
    OK,
    TILE,
    WORD,
    WRONG_VERSION,
    compile_callback,
    drop_reference,
    give_back_arena,
    some_lane_wants,
    source_hash,
    take_arena,
)
from brax_concurrent.scheduler import engine
from brax_concurrent.scheduler.engine import RECORD_COUNT, RECORD_HEADER, RECORD_RUNS, RECORD_WORDS

TASK, LANE, BEGIN, END, RUN = range(RECORD_WORDS)  # the columns of a row


@dataclass(frozen=True, eq=False)
class Records:
    """The buffer that a program writes to. `rows` is what there is in it; look when the program is idle."""

    buffer: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """(n, 5) int64, in the order in which tasks retired.

        [task, lane, begin, end, run]: the task's place in the stream, the participant that ran it, nanoseconds of
        `time.monotonic_ns`, and which of the runs it belongs to, from 0 on. Tasks that were skipped have lane -1 and
        begin == end.
        """
        rows = self.buffer[RECORD_HEADER:].reshape(-1, RECORD_WORDS)
        return rows[: min(int(self.buffer[RECORD_COUNT]), len(rows))].copy()

    @property
    def count(self) -> int:
        """Rows that there are or for which there was no room."""
        return int(self.buffer[RECORD_COUNT])

    @property
    def missing(self) -> int:
        """Rows that found no room."""
        capacity = (len(self.buffer) - RECORD_HEADER) // RECORD_WORDS
        return max(int(self.buffer[RECORD_COUNT]) - capacity, 0)

    @property
    def runs(self) -> int:
        """How many runs have begun."""
        return int(self.buffer[RECORD_RUNS])


@contextmanager
def recording(program: CpuProgram, capacity: int) -> Iterator[Records]:
    """Record what a program does, while it is called inside a `with` statement.

    The program must be idle at the beginning and at the end: wait for what JAX was asked to compute.

    Args:
      program: made by `compile_window` or `recordable`. A call from JAX runs the first program of its fingerprint, see
        `jax_ffi.serving`.
      capacity: rows to make room for, 40 bytes each.

    Raises:
      ValueError: the capacity is below 1, or the program is of another kind.
      RuntimeError: the program is being recorded already.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    if program.desc[DESC_WINDOW] == 0 and program.desc[DESC_RECORDABLE] == 0:
        raise ValueError("program: this runs in program order and cannot be recorded; make it recordable")
    if program.desc[DESC_RECORDS] != 0:
        raise RuntimeError("the program is being recorded already")
    records = Records(np.zeros(RECORD_HEADER + RECORD_WORDS * capacity, np.int64))
    program.desc[DESC_CAPACITY] = capacity
    program.desc[DESC_RECORDS] = records.buffer.ctypes.data
    try:
        yield records
    finally:
        program.desc[DESC_RECORDS] = 0


def set_apart(program: CpuProgram, number: int) -> CpuProgram:
    """The same program on the same descriptor, with a fingerprint that nothing but it has.

    Programs of one fingerprint are one to JAX (`jax_ffi.serving`): without this, a recording has the calls of others.
    """
    fingerprint = content_hash("set apart", program.fingerprint, number)
    return replace(program, fingerprint=fingerprint, owners=(program, *program.owners))


# --- programs in program order -----------------------------------------------------------------

STATE_LANES, STATE_RUN, STATE_WORDS = 0, 1, 8  # participants so far; 1 + the run, 0: not known yet


@njit(nogil=True)
def add_row(desc: int, records: int, task: int, lane: int, begin: int, end: int, run: int) -> None:
    """Add a row to a buffer of records, if there is room."""
    index = atomic_add(records + WORD * RECORD_COUNT, 1)
    if index < load_i64(desc + WORD * DESC_CAPACITY):
        row = records + WORD * (RECORD_HEADER + RECORD_WORDS * index)
        store_i64(row, task)
        store_i64(row + WORD, lane)
        store_i64(row + 2 * WORD, begin)
        store_i64(row + 3 * WORD, end)
        store_i64(row + 4 * WORD, run)


@njit(nogil=True)
def _run_tile(
    desc: int, part: int, arena: int, buffers: int, num_envs: int, tile: int, first: int, lane: int, run: int
) -> None:
    """`native.run_tiles` on one tile, recorded; its first task is the stream's `first`."""
    records, op = load_i64(desc + WORD * DESC_RECORDS), part + WORD * DESC_FIRST_OP
    if load_i64(part + WORD * DESC_POISON) != 0:
        fill_bytes(arena, 255, load_i64(part + WORD * DESC_ARENA_BYTES))
    for index in range(load_i64(part + WORD * DESC_OPS)):
        runs = some_lane_wants(arena, load_i64(op + WORD), num_envs - tile * TILE)
        begin = monotonic_ns() if records != 0 else 0
        if runs:
            call_kernel(load_i64(op), arena, buffers, tile * TILE, num_envs)
        if records != 0:
            add_row(desc, records, first + index, lane if runs else -1, begin, monotonic_ns() if runs else begin, run)
        op += 2 * WORD


@njit(nogil=True)
def _run_any_tile(job: int, desc: int, arena: int, tile: int, lane: int, run: int) -> None:
    """A tile of a program or, counted on from part to part, of a composite."""
    buffers, num_envs = load_i64(job + WORD * JOB_BUFFERS), load_i64(job + WORD * JOB_NUM_ENVS)
    part, first = desc, 0
    if load_i64(desc + WORD * DESC_NUM_ENVS) != 0:
        pair = desc + WORD * DESC_FIRST_OP
        part, num_envs = load_i64(pair), load_i64(pair + WORD)
        while tile * TILE >= num_envs:
            tiles = (num_envs + TILE - 1) // TILE
            tile -= tiles
            first += tiles * load_i64(part + WORD * DESC_OPS)
            buffers += WORD * load_i64(part + WORD * DESC_BUFFERS)
            pair += 2 * WORD
            part, num_envs = load_i64(pair), load_i64(pair + WORD)
    first += tile * load_i64(part + WORD * DESC_OPS)
    _run_tile(desc, part, arena, buffers, num_envs, tile, first, lane, run)


@njit(nogil=True)
def number_run(desc: int, state: int, lane: int) -> int:
    """Which run this is, for each lane of a state; 0 if nothing is recorded."""
    records = load_i64(desc + WORD * DESC_RECORDS)
    if records == 0:
        return 0
    if lane == 0:
        run = atomic_add(records + WORD * RECORD_RUNS, 1)
        atomic_store(state + WORD * STATE_RUN, run + 1)
        return run
    while atomic_load(state + WORD * STATE_RUN) == 0:
        give_way()
    return atomic_load(state + WORD * STATE_RUN) - 1


@njit(nogil=True)
def _work(job: int) -> int:
    """Claim and run tiles until none are left, as in native.py. Who has claimed one keeps the run from ending."""
    tiles = load_i64(job + WORD * JOB_TILES)
    if atomic_load(job + WORD * JOB_NEXT) >= tiles:
        return OK
    desc, state = load_i64(job + WORD * JOB_DESC), load_i64(job + WORD * JOB_STATE)
    arena = take_arena(desc)
    if arena == 0:
        return NO_MEMORY
    chunk = 1 if load_i64(desc + WORD * DESC_NUM_ENVS) != 0 else load_i64(job + WORD * JOB_CHUNK)
    first = atomic_add(job + WORD * JOB_NEXT, chunk)
    lane, run = 0, 0
    if first < tiles:
        lane = atomic_add(state + WORD * STATE_LANES, 1)
        run = number_run(desc, state, lane)
    while first < tiles:
        stop = min(first + chunk, tiles)
        for tile in range(first, stop):
            _run_any_tile(job, desc, arena, tile, lane, run)
        atomic_add(job + WORD * JOB_DONE, stop - first)
        first = atomic_add(job + WORD * JOB_NEXT, chunk)
    give_back_arena(desc, arena)
    return OK


def _make_participate(magic: int) -> Callable[[int], int]:
    # As in native.py: `magic` is in Numba's cache key and ties the code to the content of the files it is of.
    def participate(job: int) -> int:
        current = load_i64(load_i64(job + WORD * JOB_DESC) + WORD * DESC_MAGIC) == magic
        status = _work(job) if current else WRONG_VERSION
        drop_reference(job)
        return status

    return participate


@functools.cache
def _participate() -> tuple[int, Any]:
    """The magic of this version, and its compiled `participate`."""
    magic = source_hash(__file__, engine.__file__, native.__file__, intrinsics.__file__)
    return magic, compile_callback(_make_participate(magic))


def recordable(program: CpuProgram) -> CpuProgram:
    """A program of `compile_serial` or `compile_composite` that can be recorded; it reads the clock for each task then.

    Rows have the tasks of `TileProgram.tasks` or `TileComposite.tasks` without interleave. Tasks of a tile run in
    program order on one lane, tiles at once.

    Raises:
      ValueError: the program has several steps.
    """
    if program.steps > 1:
        raise ValueError(f"program: only a program of one step can be recorded, got one of {program.steps}")
    words = {DESC_RECORDABLE: 1, DESC_STATE_WORDS: STATE_WORDS}
    return with_runner(program, _participate(), words, content_hash("recordable", program.fingerprint), ())
