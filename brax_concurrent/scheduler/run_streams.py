"""Several independent streams of tasks at once, such as one for each image of a batch."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from brax_concurrent.backends.arguments import KernelError
from brax_concurrent.scheduler.schedule import whole
from brax_concurrent.scheduler.stream import TaskError, TaskStream
from brax_concurrent.scheduler.trace import Timeline
from brax_concurrent.scheduler.window import BUFFER, IS_WRITE, START, STOP, Encoded


@dataclass(frozen=True, eq=False)
class _Joined:
    """Streams as one.

    streams, lengths  of which, and how many tasks each had then
    interleaved       whether their tasks take turns, or come stream after stream
    whole             the one stream
    places            of each of its tasks the stream and the place there
    """

    streams: tuple[TaskStream, ...]
    lengths: tuple[int, ...]
    interleaved: bool
    whole: TaskStream
    places: tuple[tuple[int, int], ...]


def run_streams(
    streams: Sequence[TaskStream],
    scheduler: str = "hw",
    *,
    windows: int = 0,
    window: int = 32,
    cuda_streams: int = 4,
    threads: int = 0,
    trace: str | os.PathLike[str] | None = None,
) -> Timeline | None:
    """Run independent streams at once; returns when all their tasks have finished.

    The results are those of running one after the other, bit for bit.

    With "hw" on a GPU each of several windows takes the next stream that none has taken, and so on. In all other cases
    the streams are run as one, in which their tasks take turns: the first of each, the second of each, ...

    Whether streams are independent is looked at in the first run of the same streams; so is what waits for what.

    Args:
      streams: none may write what another reads or writes. They are on one device.
      scheduler: see `TaskStream.run`.
      windows: of "hw" on a GPU: how many at most. 0: one for each stream, but no more than multiprocessors.
      window, threads: see `TaskStream.run`; `window` is the size of each.
      cuda_streams: the `streams` of `TaskStream.run`.
      trace: see `TaskStream.run`. Tasks are numbered as in the stream that they are run as.

    Returns:
      The timeline if there is a trace, else None.

    Raises:
      TypeError: `streams` are no streams, or a number is no whole one.
      ValueError: two tasks of different streams meet, a stream is there twice, the streams are on several devices,
        `windows` is negative; else see `TaskStream.run`.
      TaskError: a kernel raised an exception; its `stream` says in which stream.
      Others: see `TaskStream.run`.
    """
    if isinstance(streams, TaskStream) or not isinstance(streams, Iterable):
        raise TypeError(f"streams: expected a sequence of streams, got {type(streams).__name__}")
    streams = tuple(streams)
    for index, stream in enumerate(streams):
        if not isinstance(stream, TaskStream):
            raise TypeError(f"streams: expected streams of tasks, got {type(stream).__name__} at {index}")
    if whole("windows", windows) < 0:
        raise ValueError(f"windows must not be negative, got {windows}")
    if not streams:
        return None
    for index, stream in enumerate(streams):
        try:
            stream._check_scratch()
        except ValueError as error:
            raise ValueError(f"stream {index}, {error}") from None
    on_gpu = any(stream.device == "cuda" for stream in streams)
    joined = _join(streams, interleaved=not (scheduler == "hw" and on_gpu))
    try:
        return joined.whole._run(scheduler, window, cuda_streams, threads, trace, windows)
    except TaskError as error:
        number, place = joined.places[error.task]
        said = _renamed(str(error), joined)
        raise TaskError(said, place, error.kernel, error.unit, number) from (error.__cause__ or error)
    except KernelError as error:
        raise KernelError(_renamed(str(error), joined)) from error
    except RuntimeError as error:
        raise type(error)(_renamed(str(error), joined)) from error


def _renamed(message: str, joined: _Joined) -> str:
    """A message about a task of the joined stream, as one about a task of its own."""

    def name(match: re.Match[str]) -> str:
        number, place = joined.places[int(match[1])]
        return f"stream {number}, task {place}"

    return re.sub(r"\btask (\d+)\b", name, message)


def _join(streams: tuple[TaskStream, ...], interleaved: bool) -> _Joined:
    """The streams as one, that of the last call if they are the same."""
    lengths = tuple(len(stream) for stream in streams)
    known: _Joined | None = streams[0]._joined
    if (
        known is not None
        and (known.lengths, known.interleaved) == (lengths, interleaved)
        and all(one is other for one, other in zip(known.streams, streams, strict=True))
    ):
        return known
    if len({id(stream) for stream in streams}) < len(streams):
        raise ValueError("streams: expected different streams, got one twice")
    devices = sorted({stream.device for stream in streams if stream.device is not None})
    if len(devices) > 1:
        raise ValueError(f"streams: expected all on one device, got some on each of {devices}")
    places = [(number, place) for number, length in enumerate(lengths) for place in range(length)]
    if interleaved:
        places.sort(key=lambda each: each[::-1])
    encoded = [stream._footprints() for stream in streams]
    _check_apart(streams, encoded)
    joined = TaskStream()
    joined._device = devices[0] if devices else None
    joined._tasks = [streams[number]._tasks[place] for number, place in places]
    joined._calls = [streams[number]._calls[place] for number, place in places]
    joined._lengths = () if interleaved else lengths
    streams[0]._joined = _Joined(streams, lengths, interleaved, joined, tuple(places))
    found: _Joined = streams[0]._joined
    return found


def _check_apart(streams: Sequence[TaskStream], encoded: Sequence[Encoded]) -> None:
    """Hold streams against each other.

    Raises:
      ValueError: two tasks of different streams conflict; names them.
    """
    owners = np.repeat(np.arange(len(streams)), [len(each.rows) for each in encoded])
    tasks = np.concatenate([np.repeat(np.arange(len(each)), np.diff(each.offsets)) for each in encoded])
    has_units = [np.array([len(task.units) > 0 for task in stream._tasks], np.bool_) for stream in streams]
    counted = np.concatenate([own[np.repeat(np.arange(len(own)), np.diff(each.offsets))]
                              for own, each in zip(has_units, encoded, strict=True)])  # fmt: skip
    rows, owners, tasks = (np.concatenate([e.rows for e in encoded])[counted], owners[counted], tasks[counted])
    unknown = [(number, int(place)) for number, each in enumerate(encoded)
               for place in np.flatnonzero(each.everything & has_units[number])]  # fmt: skip
    order = np.lexsort((rows[:, START], rows[:, BUFFER]))
    one, other = first_meeting(rows[order], owners[order])
    pair = None
    if one >= 0:
        pair = tuple((int(owners[order[each]]), int(tasks[order[each]])) for each in (one, other))
    elif unknown:
        touched = dict.fromkeys([*zip(owners.tolist(), tasks.tolist(), strict=True), *unknown])
        pair = next(
            ((theirs, mine) for mine, theirs in itertools.product(unknown, touched) if mine[0] != theirs[0]), None
        )
    if pair is not None:
        said = [f"task {task} of stream {number}, kernel {streams[number]._tasks[task].kernel}"
                for number, task in sorted(pair)]  # fmt: skip
        raise ValueError(f"streams: expected none to write what another touches, but {said[0]}, and {said[1]}, "
                         "touch the same memory")  # fmt: skip


@njit
def first_meeting(rows: Any, owners: Any) -> tuple[int, int]:
    """Two segments of different owners that share a byte that one of them writes, by their places; -1, -1: none.

    Args:
      rows: of `Encoded`, sorted by buffer and start.
      owners: of each row.
    """
    # Of all rows so far, and of those that are written, the one that ends last, and the one that does so among those of
    # other owners: whoever begins before their end meets them.
    last = np.full((2, 2), -1, np.int64)
    for row in range(len(rows)):
        if row > 0 and rows[row, BUFFER] != rows[row - 1, BUFFER]:
            last[:] = -1
        for written in range(2):
            if written == 0 and rows[row, IS_WRITE] == 0:  # what is only read meets only writes
                continue
            for rank in range(2):
                other = last[written, rank]
                if other >= 0 and owners[other] != owners[row] and rows[other, STOP] > rows[row, START]:
                    return other, row
        for written in range(2):
            if written == 1 and rows[row, IS_WRITE] == 0:
                continue
            first, second = last[written]
            if first < 0 or rows[row, STOP] > rows[first, STOP]:
                if first >= 0 and owners[first] != owners[row]:
                    last[written, 1] = first
                last[written, 0] = row
            elif owners[row] != owners[first] and (second < 0 or rows[row, STOP] > rows[second, STOP]):
                last[written, 1] = row
    return -1, -1
