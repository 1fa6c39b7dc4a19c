"""The window: which tasks of a stream may issue, as a processor decides it for instructions.

The window holds the oldest unfinished tasks of a stream, each in a *slot*. A newcomer's *upstream mask* has a bit for
every occupied slot whose task it conflicts with: read after write, write after read and write after write. It may issue
when that mask is empty; as it retires, its bit is cleared from every slot.

All of this is functions of integers and arrays, without threads and devices. Called from Python they are plain Python;
called from code that Numba compiles, for the CPU or for CUDA, they are compiled into it. So every scheduler runs these
very lines: the host's windows keep the arrays in memory, while a warp's 32 lanes are 32 slots, each lane holds its own
element, and a ballot over `tasks_conflict` is `upstream_mask`. `Window` wraps them with checks, for tests and models.

Masks are np.uint64 throughout: arithmetic that mixes them with signed integers would turn to floating point in Numba.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numba.extending import register_jitable

from brax_concurrent.scheduler.footprint import Footprint, conflicts, merged
from brax_concurrent.scheduler.task import Task

MAX_SLOTS = 64  # bits of a mask
NO_SLOT = -1

WAITING, ISSUED = 0, 1  # the places of `masks`
BUFFER, START, STOP, IS_WRITE = range(4)  # the columns of `rows`


# --- footprints as numbers ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Encoded:
    """The footprints of a stream as arrays.

    rows        (segments, 4) int64: buffer, start, stop, 1 if written else 0. Those of one task are sorted, not empty
                and share no byte: a byte that is read and written is in a written segment only
    offsets     (tasks + 1,) int64: task i has rows[offsets[i]:offsets[i + 1]]
    everything  (tasks,) bool: the task may touch all memory, and has no rows
    """

    rows: np.ndarray
    offsets: np.ndarray
    everything: np.ndarray

    def __len__(self) -> int:
        return len(self.everything)


def encode(tasks: Iterable[Task]) -> Encoded:
    """The footprints of tasks, in their order, as arrays.

    What a task reads of its own writes is left out: whoever meets those bytes meets the write. That and the order let
    two tasks be compared in one walk along both, rather than every segment with every other.
    """
    rows: list[tuple[int, int, int, int]] = []
    offsets, everything = [0], []
    for task in tasks:
        everything.append(task.footprint.everything)
        if not task.footprint.everything:
            rows += _pieces(task.footprint)
        offsets.append(len(rows))
    return Encoded(np.array(rows, np.int64).reshape(-1, 4), np.array(offsets, np.int64), np.array(everything, np.bool_))


def _pieces(footprint: Footprint) -> list[tuple[int, int, int, int]]:
    """The rows of one footprint: its writes, and its reads without the written bytes."""
    writes = merged(footprint.writes)
    pieces = [(write.buffer, write.start, write.stop, 1) for write in writes]
    for read in merged(footprint.reads):
        start = read.start
        for write in writes:
            if write.overlaps(read):
                if start < write.start:
                    pieces.append((read.buffer, start, write.start, 0))
                start = write.stop
        if start < read.stop:
            pieces.append((read.buffer, start, read.stop, 0))
    return sorted(pieces)


# --- conflicts: shared by Python, Numba and CUDA -----------------------------------------------


@register_jitable
def segments_conflict(
    buffer_a: int, start_a: int, stop_a: int, write_a: int, buffer_b: int, start_b: int, stop_b: int, write_b: int
) -> bool:
    """Whether two segments share a byte that one of them writes. Neither may be empty."""
    return buffer_a == buffer_b and start_a < stop_b and start_b < stop_a and (write_a | write_b) != 0


@register_jitable
def tasks_conflict(rows: np.ndarray, offsets: np.ndarray, everything: np.ndarray, one: int, other: int) -> bool:
    """Whether two tasks of an `Encoded` stream must run in program order."""
    # Unsigned, or Numba would test every index for being counted from the end.
    a, a_stop = np.uint64(offsets[one]), np.uint64(offsets[one + 1])
    b, b_stop = np.uint64(offsets[other]), np.uint64(offsets[other + 1])
    if everything[one] or everything[other]:  # all memory meets whatever holds a byte
        return bool((everything[one] or a < a_stop) and (everything[other] or b < b_stop))
    while a < a_stop and b < b_stop:
        if segments_conflict(
            rows[a, BUFFER], rows[a, START], rows[a, STOP], rows[a, IS_WRITE],
            rows[b, BUFFER], rows[b, START], rows[b, STOP], rows[b, IS_WRITE],
        ):  # fmt: skip
            return True
        # What ends first meets nothing further on.
        if rows[a, BUFFER] < rows[b, BUFFER] or (rows[a, BUFFER] == rows[b, BUFFER] and rows[a, STOP] <= rows[b, STOP]):
            a += np.uint64(1)
        else:
            b += np.uint64(1)
    return False


def conflict_table(footprints: Sequence[Footprint]) -> np.ndarray:
    """Which kinds of tasks conflict: (kinds, kinds) bool, symmetric, from a footprint of each kind on one unit.

    In a stream that runs the same kernels on many units, such as a tile program, pairs of kernels are compared here
    once instead of in every window. See `upstream_mask_of_kind`.
    """
    table = np.zeros((len(footprints), len(footprints)), np.bool_)
    for i, one in enumerate(footprints):
        for j, other in enumerate(footprints[: i + 1]):
            table[i, j] = table[j, i] = conflicts(other, one)
    return table


# --- the window's rules: shared by Python, Numba and CUDA --------------------------------------


@register_jitable
def slot_bit(slot: int) -> np.uint64:
    """The mask of one slot."""
    return np.uint64(1) << np.uint64(slot)


@register_jitable
def upstream_mask(
    rows: np.ndarray, offsets: np.ndarray, everything: np.ndarray, tasks: np.ndarray, occupied: np.uint64, task: int
) -> np.uint64:
    """The occupied slots whose tasks a newcomer conflicts with. All of them are older than it.

    Args:
      rows, offsets, everything: see `Encoded`.
      tasks: (size,) the task in each slot.
      occupied: mask of the slots that hold an unfinished task.
      task: the newcomer.
    """
    mask = np.uint64(0)
    for slot in range(len(tasks)):
        bit = slot_bit(slot)
        if occupied & bit != np.uint64(0) and tasks_conflict(rows, offsets, everything, tasks[slot], task):
            mask |= bit
    return mask


@register_jitable
def upstream_mask_of_kind(
    table: np.ndarray, kinds: np.ndarray, units: np.ndarray, occupied: np.uint64, kind: int, unit: int
) -> np.uint64:
    """`upstream_mask` by table, for tasks that conflict only if they work on the same unit.

    That is for the caller to know; of a tile program, `TileProgram.tiles_are_independent` says it.

    Args:
      table: see `conflict_table`.
      kinds: (size,) the kind of the task in each slot; units: (size,) what it works on, e.g. its tile.
      occupied: mask of the slots that hold an unfinished task.
      kind, unit: those of the newcomer.
    """
    mask = np.uint64(0)
    for slot in range(len(units)):
        bit = slot_bit(slot)
        if units[slot] == unit and occupied & bit != np.uint64(0) and table[kinds[slot], kind]:
            mask |= bit
    return mask


@register_jitable
def direct_mask(upstream: np.ndarray, mask: np.uint64) -> np.uint64:
    """A newcomer's upstream mask without the slots that another slot in it waits for: those to wait for explicitly."""
    implied = np.uint64(0)
    for slot in range(len(upstream)):
        if mask & slot_bit(slot) != np.uint64(0):
            implied |= upstream[slot]
    return mask & ~implied


@register_jitable
def ready_mask(upstream: np.ndarray, waiting: np.uint64) -> np.uint64:
    """The waiting slots that wait for nobody any more."""
    mask = np.uint64(0)
    for slot in range(len(upstream)):
        if upstream[slot] == np.uint64(0):
            mask |= slot_bit(slot)
    return mask & waiting


@register_jitable
def retire_mask(upstream: np.ndarray, done: np.uint64) -> None:
    """Clear the bits of finished slots from every slot's upstream mask."""
    for slot in range(len(upstream)):
        upstream[slot] &= ~done


@register_jitable
def free_slot(occupied: np.uint64, size: int) -> int:
    """The first of `size` slots that is free, or NO_SLOT."""
    for slot in range(size):
        if occupied & slot_bit(slot) == np.uint64(0):
            return slot
    return NO_SLOT


@register_jitable
def oldest_slot(tasks: np.ndarray, mask: np.uint64) -> int:
    """The slot of a mask whose task comes first in the stream, or NO_SLOT. Slots are reused: their order is no age."""
    oldest = NO_SLOT
    for slot in range(len(tasks)):
        if mask & slot_bit(slot) != np.uint64(0) and (oldest == NO_SLOT or tasks[slot] < tasks[oldest]):
            oldest = slot
    return oldest


# What happens to a window. Its state is
#   upstream (size,) uint64   whom each slot waits for
#   tasks    (size,) int64    the task in each slot, by its place in the stream: smaller is older
#   masks    (2,) uint64      [WAITING]: slots whose task has not issued; [ISSUED]: those whose task has


@register_jitable
def insert_task(
    rows: np.ndarray,
    offsets: np.ndarray,
    everything: np.ndarray,
    upstream: np.ndarray,
    tasks: np.ndarray,
    masks: np.ndarray,
    task: int,
) -> int:
    """Put the stream's next task into a free slot and return that, or NO_SLOT if the window is full."""
    occupied = masks[WAITING] | masks[ISSUED]
    slot = free_slot(occupied, len(tasks))
    if slot != NO_SLOT:
        upstream[slot] = upstream_mask(rows, offsets, everything, tasks, occupied, task)
        tasks[slot] = task
        masks[WAITING] |= slot_bit(slot)
    return slot


@register_jitable
def issue_slot(masks: np.ndarray, slot: int) -> None:
    """The slot's task is being run."""
    masks[WAITING] &= ~slot_bit(slot)
    masks[ISSUED] |= slot_bit(slot)


@register_jitable
def retire_slots(upstream: np.ndarray, masks: np.ndarray, done: np.uint64) -> None:
    """The tasks in the slots of `done` have finished, or their predicates were false: the slots are free again."""
    masks[WAITING] &= ~done
    masks[ISSUED] &= ~done
    retire_mask(upstream, done)


# --- the reference -----------------------------------------------------------------------------


class Window:
    """A window on an encoded stream, that refuses to be misused.

    Args:
      stream: see `encode`.
      size: slots, 1 to 64. In a window of 1 tasks run in program order.

    Raises:
      ValueError: the size is out of range.
    """

    def __init__(self, stream: Encoded, size: int = 32):
        if not 1 <= operator.index(size) <= MAX_SLOTS:
            raise ValueError(f"window size must be from 1 to {MAX_SLOTS}, got {size}")
        self.stream, self.size = stream, size
        self._upstream = np.zeros(size, np.uint64)
        self._tasks = np.zeros(size, np.int64)
        self._masks = np.zeros(2, np.uint64)
        self._newest = -1

    # -- what is in it --

    @property
    def waiting(self) -> int:
        """Mask of the slots whose task has not issued."""
        return int(self._masks[WAITING])

    @property
    def issued(self) -> int:
        """Mask of the slots whose task runs."""
        return int(self._masks[ISSUED])

    @property
    def occupied(self) -> int:
        """Mask of the slots that hold a task."""
        return self.waiting | self.issued

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return self.occupied == (1 << self.size) - 1

    @property
    def ready(self) -> int:
        """Mask of the slots whose task may issue."""
        return int(ready_mask(self._upstream, self._masks[WAITING]))

    def upstream(self, slot: int) -> int:
        """Mask of the slots that the task in a slot waits for."""
        self._held(slot, "look into")
        return int(self._upstream[slot])

    def task(self, slot: int) -> int:
        """The task in a slot, by its place in the stream."""
        self._held(slot, "look into")
        return int(self._tasks[slot])

    def by_age(self, mask: int) -> list[int]:
        """The slots of a mask, the oldest task first."""
        return sorted((slot for slot in range(self.size) if mask >> slot & 1), key=self._tasks.__getitem__)

    # -- what happens to it --

    def insert(self, task: int) -> int:
        """Take in the stream's next task; returns its slot.

        Raises:
          RuntimeError: the window is full, or a newer task is or was in it.
          ValueError: the stream has no such task.
        """
        if not 0 <= task < len(self.stream):
            raise ValueError(f"task must be from 0 to {len(self.stream) - 1}, got {task}")
        if task <= self._newest:
            raise RuntimeError(f"cannot insert task {task}: it comes after {self._newest}, against program order")
        s = self.stream
        slot = insert_task(s.rows, s.offsets, s.everything, self._upstream, self._tasks, self._masks, task)
        if slot == NO_SLOT:
            raise RuntimeError(f"cannot insert task {task}: the window of {self.size} slots is full")
        self._newest = task
        return slot

    def issue(self, slot: int) -> None:
        """The task in a slot begins to run.

        Raises:
          RuntimeError: the slot is free, or its task runs already or has to wait.
          ValueError: the window has no such slot.
        """
        self._ready(slot, "issue")
        issue_slot(self._masks, slot)

    def skip(self, slot: int) -> None:
        """The predicate of the task in a slot is false: it retires instead of running.

        Raises:
          RuntimeError: as for `issue`; until the task may issue, its predicate is not known.
          ValueError: the window has no such slot.
        """
        self._ready(slot, "skip")
        retire_slots(self._upstream, self._masks, slot_bit(slot))

    def retire(self, slot: int) -> None:
        """The task in a slot has finished.

        Raises:
          RuntimeError: the slot is free (was it retired before?), or its task has not issued.
          ValueError: the window has no such slot.
        """
        self._held(slot, "retire")
        if not self.issued >> slot & 1:
            raise RuntimeError(f"cannot retire slot {slot}: its task {self._tasks[slot]} was not issued")
        retire_slots(self._upstream, self._masks, slot_bit(slot))

    def _held(self, slot: int, what: str) -> None:
        if not 0 <= slot < self.size:
            raise ValueError(f"slot must be from 0 to {self.size - 1}, got {slot}")
        if not self.occupied >> slot & 1:
            raise RuntimeError(f"cannot {what} slot {slot}: it is free")

    def _ready(self, slot: int, what: str) -> None:
        self._held(slot, what)
        task = self._tasks[slot]
        if self.issued >> slot & 1:
            raise RuntimeError(f"cannot {what} slot {slot}: its task {task} runs already")
        if not self.ready >> slot & 1:
            older = [int(self._tasks[each]) for each in self.by_age(int(self._upstream[slot]))]
            raise RuntimeError(f"cannot {what} slot {slot}: its task {task} waits for tasks {older}")
