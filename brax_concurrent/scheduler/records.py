"""What a program of `compile_window` did when: a row for each task, written by the threads that ran them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from brax_concurrent.backends.cpu_program import CpuProgram
from brax_concurrent.backends.native import DESC_CAPACITY, DESC_RECORDS, DESC_WINDOW
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
      program: made by `compile_window`. A call from JAX runs the first program of its fingerprint, see
        `jax_ffi.serving`.
      capacity: rows to make room for, 40 bytes each.

    Raises:
      ValueError: the capacity is below 1, or the program is of another kind.
      RuntimeError: the program is being recorded already.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    if program.desc[DESC_WINDOW] == 0:
        raise ValueError("program: only what compile_window makes can be recorded, this runs in program order")
    if program.desc[DESC_RECORDS] != 0:
        raise RuntimeError("the program is being recorded already")
    records = Records(np.zeros(RECORD_HEADER + RECORD_WORDS * capacity, np.int64))
    program.desc[DESC_CAPACITY] = capacity
    program.desc[DESC_RECORDS] = records.buffer.ctypes.data
    try:
        yield records
    finally:
        program.desc[DESC_RECORDS] = 0
