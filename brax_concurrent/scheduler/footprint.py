"""What memory a task reads and writes, and when two tasks may not be exchanged.

A *segment* is a half-open range of bytes of one buffer; a *footprint* is the segments that a task reads and
those that it writes. Two tasks conflict when one writes a byte that the other reads or writes. Nobody states
an order by hand: it follows from the footprints and the program order. All of this is plain data, without
devices or threads.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Hazard(enum.Flag):
    """Why a newer task must wait for an older one, in the words of computer architecture."""

    NONE = 0
    RAW = enum.auto()  # read after write: it needs the older one's result
    WAR = enum.auto()  # write after read: the older one may not have read yet
    WAW = enum.auto()  # write after write: the older one's value would come last


@dataclass(frozen=True, order=True)
class Segment:
    """The bytes [start, stop) of a buffer. Buffers are told apart by an integer and never overlap each other.

    Raises:
      ValueError: start is negative or beyond stop. An empty segment (start == stop) is fine: a robot
        without actuators has an empty `ctrl`.
    """

    buffer: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"segment of buffer {self.buffer}: 0 <= start <= stop, got [{self.start}, {self.stop})")

    def overlaps(self, other: Segment) -> bool:
        """Whether both hold some byte. Segments that only touch do not overlap, nor does an empty one."""
        return self.buffer == other.buffer and max(self.start, other.start) < min(self.stop, other.stop)


def merged(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """The same bytes in the fewest segments, sorted."""
    result: list[Segment] = []
    for segment in sorted(segments):
        if segment.start == segment.stop:
            continue
        last = result[-1] if result else None
        if last is not None and last.buffer == segment.buffer and segment.start <= last.stop:
            result[-1] = Segment(last.buffer, last.start, max(last.stop, segment.stop))
        else:
            result.append(segment)
    return tuple(result)


def without(segments: Iterable[Segment], covered: Iterable[Segment]) -> tuple[Segment, ...]:
    """The bytes of `segments` that `covered` does not hold, in the fewest segments, sorted."""
    held = merged(covered)
    left = []
    for segment in merged(segments):
        start = segment.start
        for other in held:
            if other.buffer == segment.buffer and other.stop > start and other.start < segment.stop:
                if start < other.start:
                    left.append(Segment(segment.buffer, start, other.start))
                start = other.stop
        if start < segment.stop:
            left.append(Segment(segment.buffer, start, segment.stop))
    return tuple(left)


@dataclass(frozen=True)
class Footprint:
    """The memory that a task reads and writes.

    reads       segments it may read
    writes      segments it may write
    everything  nothing is known of the task: it may read and write all memory, whatever the segments say
    """

    reads: tuple[Segment, ...] = ()
    writes: tuple[Segment, ...] = ()
    everything: bool = False

    def normal(self) -> Footprint:
        """The same footprint in the fewest segments: fewer comparisons for whoever keeps it."""
        return self if self.everything else Footprint(merged(self.reads), merged(self.writes))


EVERYTHING = Footprint(everything=True)
"""The footprint of a task that declares none."""


def together(footprints: Iterable[Footprint]) -> Footprint:
    """The footprint of one task that does the work of several."""
    parts = list(footprints)
    if any(part.everything for part in parts):
        return EVERYTHING
    return Footprint(
        merged(segment for part in parts for segment in part.reads),
        merged(segment for part in parts for segment in part.writes),
    )


def _meet(mine: tuple[Segment, ...], all_mine: bool, theirs: tuple[Segment, ...], all_theirs: bool) -> bool:
    """Whether two sets of segments, or all memory in place of one or both, share a byte."""
    if all_mine and all_theirs:
        return True
    if all_mine or all_theirs:
        return any(segment.start < segment.stop for segment in (theirs if all_mine else mine))
    return any(a.overlaps(b) for a in mine for b in theirs)


def hazards(older: Footprint, newer: Footprint) -> Hazard:
    """Every reason for `newer` to wait for `older`, which comes before it in program order."""
    everything = older.everything, newer.everything
    found = Hazard.NONE
    if _meet(older.writes, everything[0], newer.reads, everything[1]):
        found |= Hazard.RAW
    if _meet(older.reads, everything[0], newer.writes, everything[1]):
        found |= Hazard.WAR
    if _meet(older.writes, everything[0], newer.writes, everything[1]):
        found |= Hazard.WAW
    return found


def conflicts(older: Footprint, newer: Footprint) -> bool:
    """Whether the two must run in program order."""
    return hazards(older, newer) is not Hazard.NONE
