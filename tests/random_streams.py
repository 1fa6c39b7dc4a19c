"""Random streams for the scheduler's tests, and the plainest model of what must wait for what: sets of bytes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from brax_concurrent.scheduler.footprint import Footprint, Segment
from brax_concurrent.scheduler.task import PREDICATE_BYTES, Task

BUFFERS, BYTES = range(-1, 2), 16  # little memory, so that tasks meet often; -1 is a buffer like any other
LONGEST = 5
MEMORY = frozenset((buffer, byte) for buffer in BUFFERS for byte in range(BYTES))

unhurried = settings(deadline=None)  # a busy machine, or the compiler in the first example, is no failure

# One number each, because drawing is what takes the time. The least are the simplest: empty segments.
_SEGMENTS = [
    Segment(buffer, start, min(start + length, BYTES))
    for length in range(LONGEST + 1)
    for buffer in BUFFERS
    for start in range(BYTES)
]
_PREDICATES = [Segment(b, start, start + PREDICATE_BYTES) for b in BUFFERS for start in range(0, BYTES, 4)]


def segments() -> st.SearchStrategy[tuple[Segment, ...]]:
    """The segments that a task reads or writes: up to three, often overlapping, touching or empty."""
    return st.lists(st.integers(0, len(_SEGMENTS) - 1).map(_SEGMENTS.__getitem__), max_size=3).map(tuple)


def streams(max_size: int = 16) -> st.SearchStrategy[list[Task]]:
    """Tasks of all kinds: a quarter has a predicate, and one of ten an unknown footprint."""
    parts = st.tuples(segments(), segments(), st.integers(0, 4 * len(_PREDICATES) - 1), st.integers(0, 9))
    return st.lists(parts, max_size=max_size).map(lambda each: [_task(i, *part) for i, part in enumerate(each)])


def _task(number: int, reads: tuple[Segment, ...], writes: tuple[Segment, ...], condition: int, unknown: int) -> Task:
    predicate = _PREDICATES[condition % len(_PREDICATES)] if condition >= 3 * len(_PREDICATES) else None
    if predicate is not None:
        reads = (*reads, predicate)
    footprint = Footprint(reads, writes, everything=unknown == 9)  # whatever the segments say
    return Task(f"kernel_{number % 3}", range(number, number + 1), footprint, predicate)


Bytes = frozenset[tuple[int, int]]


def memory_of(footprint: Footprint) -> tuple[Bytes, Bytes]:
    """The bytes read and the bytes written."""
    if footprint.everything:
        return MEMORY, MEMORY
    return _bytes_of(footprint.reads), _bytes_of(footprint.writes)


def _bytes_of(parts: tuple[Segment, ...]) -> Bytes:
    return frozenset((part.buffer, byte) for part in parts for byte in range(part.start, part.stop))


def must_wait(older: Task, newer: Task) -> bool:
    """Whether the two touch a byte that one of them writes."""
    (old_reads, old_writes), (new_reads, new_writes) = memory_of(older.footprint), memory_of(newer.footprint)
    return bool(old_writes & new_reads or old_reads & new_writes or old_writes & new_writes)


def upstream_of(stream: list[Task]) -> list[set[int]]:
    """For each task, the older ones that it must wait for."""
    return [{j for j in range(i) if must_wait(stream[j], task)} for i, task in enumerate(stream)]
