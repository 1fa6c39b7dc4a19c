"""The tables of streams of tasks that the dispatcher on the GPU works through, see backends/list_layout.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from brax_concurrent.backends import list_layout as c
from brax_concurrent.backends.native import WORD
from brax_concurrent.scheduler.window import BUFFER, IS_WRITE, START, STOP, Encoded, segments_conflict, tasks_conflict

ENTRY = np.dtype(
    {
        "names": ["mask", "word", "predicate", "flag_mask", "chunks"],
        "formats": ["u8", "i8", "i8", "u8", "i4"],
        "offsets": [c.N_MASK, c.N_WORD, c.N_PREDICATE, c.N_FLAG_MASK, c.N_CHUNKS],
        "itemsize": c.ENTRY_BYTES,
    }
)
STREAM = np.dtype(
    {
        "names": ["first", "tasks", "chunks"],
        "formats": ["i4", "i4", "i4"],
        "offsets": [c.S_FIRST, c.S_TASKS, c.S_CHUNKS],
        "itemsize": c.STREAM_BYTES,
    }
)
_MOST = 1 << 30  # chunks of all tasks together


@dataclass(frozen=True, eq=False)
class Tables:
    """What runs. Tasks without units are in none of it: nobody waits for them.

    rows     (n,) int64 words, at the end as many more as the longest row has
    row_words    of the longest row
    entries  (tasks,) of ENTRY, stream after stream in program order
    streams  (streams,) of STREAM; those without any task that has units are left out
    tasks    (tasks,) int64 the number of each entry's task
    """

    rows: np.ndarray
    row_words: int
    entries: np.ndarray
    streams: np.ndarray
    tasks: np.ndarray

    @property
    def chunks(self) -> int:
        """Of all tasks together."""
        return int(self.entries["chunks"].sum())

    @property
    def widest(self) -> int:
        """A bound on the chunks that one window can have issued and not finished."""
        most = 0
        for stream in self.streams:
            first, count = int(stream["first"]), int(stream["tasks"])
            sums = np.concatenate(([0], np.cumsum(self.entries["chunks"][first : first + count], dtype=np.int64)))
            reach = min(c.REACH, count)
            most = max(most, int((sums[reach:] - sums[:-reach]).max()))
        return most


@dataclass(frozen=True)
class Shape:
    """How many of everything one launch has.

    windows  how many; the first so many blocks dispatch
    blocks   of the grid, those included
    workers  of a window at most
    room     words of a window's log for chunks
    stride   bytes of a window's part of the work memory
    """

    windows: int
    blocks: int
    workers: int
    room: int

    @property
    def log_words(self) -> int:
        """Words of a window's log: for chunks, and one for each worker to end with."""
        return self.room + self.workers

    @property
    def waiting(self) -> int:
        """Chunks of a window that may wait in workers: some are kept for what becomes ready meanwhile."""
        return self.workers - (self.workers + 7) // 8

    @property
    def stride(self) -> int:
        """Bytes of a window's part of the work memory."""
        return -(-(c.W_LOG + WORD * self.log_words) // 128) * 128

    @property
    def work_bytes(self) -> int:
        """Bytes of the work memory."""
        return c.W_WINDOWS + self.windows * self.stride


def chunks_of(units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For numbers of units, each above 0: units of a chunk, and chunks."""
    grain = c.BLOCK * -(-units // (c.BLOCK * c.MAX_CHUNKS))
    return grain, -(-units // grain)


def build_tables(
    encoded: Encoded,
    units: Sequence[int],
    functions: Sequence[int],
    parameters: Sequence[Sequence[int]],
    predicates: Sequence[int],
    flags: np.ndarray,
    lengths: Sequence[int],
) -> Tables:
    """The tables of independent streams.

    Args:
      encoded: the footprints of all tasks, stream after stream.
      units: of each task.
      functions: of each task the number in the program.
      parameters: of each task its function's, see `task_cuda.parameter_words`.
      predicates: of each task the address of an int32, or 0.
      flags: (tasks, 3) int64 where that is in the footprints: buffer, start, stop; stop is start: the task has none.
      lengths: tasks of each stream.

    Raises:
      ValueError: there are too many units.
    """
    counts = np.array(units, np.int64)
    tasks = np.flatnonzero(counts)
    grain, chunks = chunks_of(counts[tasks])
    if chunks.sum() > _MOST:
        raise ValueError(f"hw runs at most {_MOST} pieces of {c.BLOCK} units or more at once, got {chunks.sum()}")
    ends = np.cumsum(np.array(lengths, np.int64))
    owners = np.searchsorted(ends, tasks, side="right")
    entries = np.zeros(len(tasks), ENTRY)
    footprints = encoded.rows, encoded.offsets, encoded.everything
    entries["mask"] = distance_masks(*footprints, tasks, owners)
    entries["flag_mask"] = flag_masks(*footprints, tasks, entries["mask"], np.array(flags, np.int64).reshape(-1, 3))
    entries["predicate"] = np.array(predicates, np.int64)[tasks] if len(tasks) else 0
    entries["chunks"] = chunks
    words: list[int] = [0] * (c.ROW_BYTES // WORD)  # no row begins at 0
    longest = 0
    for index, task in enumerate(tasks.tolist()):
        place = WORD * len(words) // c.ROW_BYTES
        entries["word"][index] = functions[task] << c.LOG_FUNCTION | place
        row = [units[task], int(grain[index]), task, 0, *parameters[task]]
        words += row + [0] * (-len(row) % (c.ROW_BYTES // WORD))
        longest = max(longest, len(row))
    streams = np.zeros(len(np.unique(owners)), STREAM)
    for stream, owner in zip(streams, np.unique(owners), strict=True):
        own = np.flatnonzero(owners == owner)
        stream["first"], stream["tasks"], stream["chunks"] = own[0], len(own), chunks[own].sum()
    rows = np.array([word & (1 << 64) - 1 for word in words + [0] * longest], np.uint64).view(np.int64)
    return Tables(rows, longest, entries, streams, tasks)


@njit
def distance_masks(rows, offsets, everything, tasks, owners):
    """For each task a mask of the older ones of its stream that it conflicts with: bit d is d + 1 places before it.

    Args:
      rows, offsets, everything: see `Encoded`.
      tasks: those that count, in program order; places are theirs.
      owners: of each of them its stream's number.
    """
    masks = np.zeros(len(tasks), np.uint64)
    for place in range(len(tasks)):
        for before in range(max(0, place - c.REACH), place):
            if owners[before] == owners[place] and tasks_conflict(
                rows, offsets, everything, tasks[before], tasks[place]
            ):
                masks[place] |= np.uint64(1) << np.uint64(place - before - 1)
    return masks


@njit
def flag_masks(rows, offsets, everything, tasks, masks, flags):
    """For each task a mask of the older ones that may write its predicate, as `distance_masks` has it.

    Args:
      rows, offsets, everything: see `Encoded`.
      tasks: see `distance_masks`; masks: what it returned. A task reads its predicate, so the writers are in there.
      flags: see `build_tables`.
    """
    writers = np.zeros(len(tasks), np.uint64)
    for place in range(len(tasks)):
        buffer, start, stop = flags[tasks[place]]
        for distance in range(c.REACH if start < stop else 0):
            bit = np.uint64(1) << np.uint64(distance)
            if masks[place] & bit != np.uint64(0):
                older = tasks[place - distance - 1]
                writes = everything[older]
                for row in range(offsets[older], offsets[older + 1]):
                    writes = writes or segments_conflict(
                        buffer,
                        start,
                        stop,
                        0,
                        rows[row, BUFFER],
                        rows[row, START],
                        rows[row, STOP],
                        rows[row, IS_WRITE],
                    )
                if writes:
                    writers[place] |= bit
    return writers


def shape_of(tables: Tables, windows: int, resident: int) -> Shape:
    """The shape of a launch.

    A window takes streams as long as its log has room for them. If each log has room for its share of all chunks and
    for the largest stream, not all can be too full for one at once: they would hold more chunks than there are.

    Args:
      tables: what runs; there must be something.
      windows: how many at most.
      resident: blocks that the GPU can hold at once.

    Raises:
      ValueError: the GPU holds not even two.
    """
    if resident < 2:
        raise ValueError(f"hw needs two blocks of {c.BLOCK} threads on the GPU at once, it can hold {resident}")
    windows = max(1, min(windows, len(tables.streams), resident // 2))
    total = min(resident - windows, windows * tables.widest)
    largest = int(tables.streams["chunks"].max())
    room = tables.chunks if windows == 1 else -(-tables.chunks // windows) + largest
    return Shape(windows, windows + total, -(-total // windows), room)
