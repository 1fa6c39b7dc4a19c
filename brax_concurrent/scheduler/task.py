"""The unit of scheduling: one launch of a kernel on some units, with the memory it touches."""

from __future__ import annotations

from dataclasses import dataclass

from brax_concurrent.scheduler.footprint import Footprint, Segment

PREDICATE_BYTES = 4  # of one of a predicate's int32


@dataclass(frozen=True)
class Task:
    """One "instruction" of a stream. Who runs it, and where, is the scheduler's business.

    kernel     name of the kernel
    units      what it works on: tiles, or output pieces of a network layer
    footprint  what it reads and writes, the predicate included
    predicate  int32s, one for all that the task works on or one for each: if all are 0 when the task would issue, it
               retires without running; None: it always runs

    Raises:
      ValueError: the predicate is no whole number of int32, or the footprint does not say that the task reads it; it
        could then issue before the predicate is known.
    """

    kernel: str
    units: range
    footprint: Footprint
    predicate: Segment | None = None

    def __post_init__(self) -> None:
        if self.predicate is None:
            return
        size = self.predicate.stop - self.predicate.start
        if size <= 0 or size % PREDICATE_BYTES:
            raise ValueError(f"task {self.kernel}: a predicate is int32s, of 4 bytes each, got {self.predicate}")
        if not self.footprint.everything and not any(
            read.buffer == self.predicate.buffer
            and read.start <= self.predicate.start
            and self.predicate.stop <= read.stop
            for read in self.footprint.reads
        ):
            raise ValueError(f"task {self.kernel}: its footprint does not read its predicate {self.predicate}")
