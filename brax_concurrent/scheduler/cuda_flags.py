"""Predicates of a list of tasks on CUDA, as the host reads them: where they lie, and which tasks write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from brax_concurrent.scheduler.window import BUFFER, IS_WRITE, START, STOP, Encoded

MOST_BYTES = 1 << 16  # from the first flag to the last: all of it is copied each time
_FLAG = 4  # bytes


@dataclass(frozen=True, eq=False)
class Flags:
    """The predicates of a list of tasks, which lie in one block of memory.

    address  of the block
    size     its bytes
    places   (tasks,) int64 where in the block a task's predicate is, in bytes; -1: it has none
    writers  (tasks,) int64 the last task before it that may write its predicate; -1: none
    writes   (tasks,) int64 not 0: the task may write a predicate
    """

    address: int
    size: int
    places: np.ndarray
    writers: np.ndarray
    writes: np.ndarray


def find_flags(predicates: Sequence[int], encoded: Encoded) -> Flags | None:
    """The flags of tasks, or None where the host had better not read them: there are none, or they lie far apart.

    Args:
      predicates: of each task the address of an int32, or 0.
      encoded: the tasks' footprints. Segments are addresses.
    """
    addresses = np.array(predicates, np.int64)
    used = addresses[addresses != 0]
    if not len(used) or used.max() + _FLAG - used.min() > MOST_BYTES:
        return None
    first, stop = int(used.min()), int(used.max()) + _FLAG
    rows, tasks = encoded.rows, np.arange(len(encoded))
    owners = np.repeat(tasks, np.diff(encoded.offsets))
    writing = (rows[:, IS_WRITE] != 0) & (rows[:, START] < stop) & (rows[:, STOP] > first) & (rows[:, BUFFER] == 0)
    writes = encoded.everything.copy()
    writes[owners[writing]] = True
    latest = np.full((stop - first) // _FLAG + 1, -1, np.int64)  # by flag: the last task so far that may write it
    writers = np.full(len(addresses), -1, np.int64)
    for task in np.flatnonzero(writes | (addresses != 0)):
        if addresses[task]:
            writers[task] = latest[(addresses[task] - first) // _FLAG]
        if encoded.everything[task]:
            latest[:] = task
        elif writes[task]:
            for row in rows[encoded.offsets[task] : encoded.offsets[task + 1]]:
                if row[IS_WRITE] and row[START] < stop and row[STOP] > first:
                    begin, end = max(int(row[START]) - first, 0), min(int(row[STOP]), stop) - first
                    latest[begin // _FLAG : -(-end // _FLAG)] = task
    places = np.where(addresses != 0, addresses - first, -1)
    return Flags(first, stop - first, places, writers, writes.astype(np.int64))
