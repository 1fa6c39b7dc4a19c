"""Programs for the CPU run on NumPy arrays, without JAX."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from brax_concurrent.backends.cpu_program import BufferSpec, CpuProgram, cores
from brax_concurrent.backends.intrinsics import CACHE_LINE
from brax_concurrent.backends.native import (
    DESC_PARTICIPATE,
    DESC_STATE_TILE_WORDS,
    DESC_STATE_TILES,
    DESC_STATE_WORDS,
    DESC_THREADS,
    DESC_TILE_WIDTH,
    DESC_TILES,
    DESC_WIDTH,
    JOB_BUFFERS,
    JOB_CHUNK,
    JOB_DESC,
    JOB_DONE,
    JOB_MESSAGE,
    JOB_NUM_ENVS,
    JOB_REFERENCES,
    JOB_STATE,
    JOB_TILES,
    JOB_WORDS,
    STUCK,
    TILE,
    WORD,
    WRONG_VERSION,
    tiles_per_claim,
    useful_threads,
)


def _checked_address(spec: BufferSpec, array: np.ndarray, num_envs: int, steps: int) -> int:
    shape = spec.array_shape(num_envs, steps)
    if array.shape != shape or array.dtype != spec.dtype:
        raise ValueError(
            f"buffer {spec.name}: expected {spec.dtype}{list(shape)}, got {array.dtype}{list(array.shape)}"
        )
    if not array.flags.c_contiguous:
        raise ValueError(f"buffer {spec.name}: expected a row-major contiguous array, got strides {array.strides}")
    if spec.access != "read" and not array.flags.writeable:
        raise ValueError(f"buffer {spec.name}: the program writes it, but the array is read-only")
    return int(array.__array_interface__["data"][0])


@functools.cache
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="brax_concurrent")


os.register_at_fork(after_in_child=_thread_pool.cache_clear)  # a child has none of its parent's threads


def run_program(program: CpuProgram, buffers: Sequence[np.ndarray], num_envs: int, threads: int | None = None) -> None:
    """Run a program on NumPy arrays, in place, without JAX and without the GIL.

    Args:
      program: what to run.
      buffers: one C-contiguous array per `program.buffers`, in that order, of exactly that shape and dtype.
      num_envs: environments, at least 1; a composite's own number.
      threads: at most so many threads; 0: on all cores; None: the program's number.

    Raises:
      ValueError: a number is out of range, or an array does not fit its specification.
      MemoryError: no memory for the arenas; the arrays are then partly updated.
      RuntimeError: the program was made by another version of this package, or waits in vain for a kernel to end, which
        may then still be writing to the arrays.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, got {num_envs}")
    if program.num_envs not in (None, num_envs):
        raise ValueError(f"num_envs must be {program.num_envs}, all environments of the composite, got {num_envs}")
    if len(buffers) != len(program.buffers):
        names = ", ".join(spec.name for spec in program.buffers)
        raise ValueError(f"expected {len(program.buffers)} buffers ({names}), got {len(buffers)}")
    addresses = np.array(
        [
            _checked_address(spec, array, num_envs, program.steps)
            for spec, array in zip(program.buffers, buffers, strict=True)
        ],
        np.int64,
    )
    tiles = int(program.desc[DESC_TILES]) or -(-num_envs // TILE)
    wanted = int(program.desc[DESC_THREADS]) if threads is None else threads
    if wanted < 0:
        raise ValueError(f"threads must not be negative, got {threads}")
    tile_width, width = int(program.desc[DESC_TILE_WIDTH]), int(program.desc[DESC_WIDTH])
    threads = min(wanted or cores(), useful_threads.py_func(tiles, tile_width, width))
    desc = program.desc
    counted = min(tiles, int(desc[DESC_STATE_TILES]))
    job = aligned_words(JOB_WORDS + int(desc[DESC_STATE_WORDS]) + counted * int(desc[DESC_STATE_TILE_WORDS]))
    job[JOB_DESC] = program.address
    job[JOB_BUFFERS] = addresses.ctypes.data
    job[JOB_NUM_ENVS] = num_envs
    job[JOB_TILES] = tiles
    job[JOB_CHUNK] = tiles_per_claim.py_func(tiles, threads)
    job[JOB_STATE] = job.ctypes.data + WORD * JOB_WORDS
    job[JOB_REFERENCES] = threads + 1  # one more than participants: this array is not theirs to free
    statuses = participate_all(int(desc[DESC_PARTICIPATE]), job, threads, (program, addresses, buffers))
    if statuses[0] == STUCK:
        raise RuntimeError(ctypes.string_at(int(job[JOB_MESSAGE])).decode())
    if job[JOB_DONE] != tiles:
        failure = RuntimeError if WRONG_VERSION in statuses else MemoryError
        raise failure(f"the program stopped after {job[JOB_DONE]} of {tiles} tiles, statuses {statuses}")


def aligned_words(count: int) -> np.ndarray:
    """So many int64 zeros that begin at a cache line."""
    block = np.zeros(count + CACHE_LINE // WORD, np.int64)
    skipped = -block.ctypes.data % CACHE_LINE // WORD
    return block[skipped : skipped + count]


def participate_all(entry: int, job: np.ndarray, threads: int, kept: object) -> list[int]:
    """Have this thread and threads - 1 helpers take part in a job.

    Nobody waits for a helper that has not started, nor, if the job is stuck, for one that runs: it holds on to `job`
    and to what `kept` refers to for as long as it does.

    Args:
      entry: address of `int64_t participate(int64_t job)`.
      job: its argument.
      threads: participants, at least 1.
      kept: what participants use.

    Returns:
      What they returned, this thread first.
    """
    participate = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(entry)

    def help_out(_: object) -> int:
        return participate(job.ctypes.data)

    helpers = [_thread_pool(threads - 1).submit(help_out, kept) for _ in range(threads - 1)]
    statuses = [participate(job.ctypes.data)]
    started = [helper for helper in helpers if not helper.cancel()]
    return statuses if statuses[0] == STUCK else statuses + [helper.result() for helper in started]
