"""Timelines: which task was in flight when and on which lane, what that comes to, and as a file for Perfetto."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from brax_concurrent.scheduler.records import BEGIN, END, LANE, RUN, TASK

SKIPPED = -1  # the lane of a task whose predicate was false
_COLUMNS = 5


@dataclass(frozen=True)
class TracedTask:
    """A task of a stream as traces show it.

    kernel     its name
    units      what it worked on: tiles, or the units of an application's kernel
    waits_for  the older tasks that it waits for, by their place in the stream, without those that one of them waits for
    """

    kernel: str
    units: range
    waits_for: tuple[int, ...] = ()


@dataclass(frozen=True)
class Interval:
    """One task in one run.

    task       its place in the stream
    name       of its kernel
    units      see `TracedTask`
    lane       the thread or CUDA stream that it ran on, SKIPPED if it did not run
    begin, end nanoseconds of the device's clock; equal if it was skipped
    run        which of the runs, from 0 on
    skipped    its predicate was false
    waits_for  see `TracedTask`; tasks of the same run
    """

    task: int
    name: str
    units: range
    lane: int
    begin: int
    end: int
    run: int
    skipped: bool
    waits_for: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Timeline:
    """What was recorded of the runs of one stream.

    stream     its tasks in program order
    rows       (n, 5) int64 [task, lane, begin, end, run], see `records.py`
    lanes      how many there were to run on; 0: as many as were used
    missing    tasks that ran and are not in `rows`
    lane_name  what a lane is: "thread", "stream"
    name       title in the file
    worked     where a task has several workers at once: for how many nanoseconds all of them worked, and how many there
               are; None: a task is one lane's

    Raises:
      ValueError: rows of another shape, of a task that is not in the stream, or that end before they begin.
    """

    stream: tuple[TracedTask, ...]
    rows: np.ndarray
    lanes: int = 0
    missing: int = 0
    lane_name: str = "lane"
    name: str = "stream"
    worked: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rows.shape[1] != _COLUMNS:
            raise ValueError(f"rows: expected shape (n, {_COLUMNS}), got {self.rows.shape}")
        task, begin, end = self.rows[:, TASK], self.rows[:, BEGIN], self.rows[:, END]
        if len(task) and not (task.min() >= 0 and task.max() < len(self.stream)):
            raise ValueError(f"rows: expected tasks from 0 to {len(self.stream) - 1}, got {task.min()} to {task.max()}")
        if (end < begin).any():
            row = self.rows[np.argmax(end < begin)]
            raise ValueError(f"rows: task {row[TASK]} of run {row[RUN]} ends at {row[END]}, before it begins")

    # -- what there is -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def intervals(self) -> list[Interval]:
        """The rows, each with what is known of its task."""
        found = []
        for task, lane, begin, end, run in self.rows.tolist():
            what = self.stream[task]
            skipped = lane == SKIPPED
            found.append(Interval(task, what.kernel, what.units, lane, begin, end, run, skipped, what.waits_for))
        return found

    @property
    def runs(self) -> int:
        """How many runs are in it."""
        return len(np.unique(self.rows[:, RUN]))

    @property
    def skipped(self) -> int:
        """How many tasks were skipped."""
        return int((self.rows[:, LANE] == SKIPPED).sum())

    @property
    def num_lanes(self) -> int:
        """Lanes that there were, or that were used if that is more."""
        return max(self.lanes, len(np.unique(self._ran[:, LANE])))

    @property
    def _ran(self) -> np.ndarray:
        return self.rows[self.rows[:, LANE] != SKIPPED]

    # -- what it comes to --------------------------------------------------------------------------------------------

    @property
    def makespan(self) -> int:
        """Nanoseconds in which a run was going on, from its first task's beginning to its last one's end.

        What lies between two runs is the caller's time and not in it.
        """
        if not len(self.rows):
            return 0
        runs, index = np.unique(self.rows[:, RUN], return_inverse=True)
        begin, end = np.full(len(runs), np.iinfo(np.int64).max), np.full(len(runs), np.iinfo(np.int64).min)
        np.minimum.at(begin, index, self.rows[:, BEGIN])
        np.maximum.at(end, index, self.rows[:, END])
        return _covered(begin, end)

    @property
    def busy(self) -> int:
        """Nanoseconds in which lanes had a task, all lanes together."""
        rows = self._ran
        own = (rows[rows[:, LANE] == lane] for lane in np.unique(rows[:, LANE]))
        return sum(_covered(each[:, BEGIN], each[:, END]) for each in own)

    @property
    def occupancy(self) -> float:
        """The part of the workers' time in which they had a task, over the makespan; 0 if there is no time."""
        busy, workers = self.worked or (self.busy, self.num_lanes)
        available = workers * self.makespan
        return busy / available if available else 0.0

    @property
    def concurrency(self) -> float:
        """How many tasks were in flight on average, over the makespan; 0 if there is no time."""
        rows, makespan = self._ran, self.makespan
        return float((rows[:, END] - rows[:, BEGIN]).sum()) / makespan if makespan else 0.0

    def overlaps(self) -> int:
        """How many pairs of tasks were in flight together."""
        rows = self.rows[self.rows[:, BEGIN] < self.rows[:, END]]
        rows = rows[np.argsort(rows[:, BEGIN], kind="stable")]
        later = np.searchsorted(rows[:, BEGIN], rows[:, END]) - np.arange(len(rows)) - 1  # those that began meanwhile
        return int(later.sum())

    def summary(self) -> str:
        """All of that in a line."""
        skipped = f", {self.skipped:,} of them skipped" if self.skipped else ""
        missing = f", {self.missing:,} more not recorded" if self.missing else ""
        tasks, runs = _counted(len(self), "task"), _counted(self.runs, "run")
        count = self.worked[1] if self.worked else self.num_lanes
        lanes = _counted(count, self.lane_name, "es" if self.lane_name.endswith("ch") else "s")
        return (
            f"{tasks} in {runs}{skipped}{missing}: "
            f"makespan {self.makespan * 1e-6:.3f} ms, occupancy {self.occupancy:.1%} of {lanes}, "
            f"concurrency {self.concurrency:.2f}"
        )

    # -- the file ----------------------------------------------------------------------------------------------------

    def events(self) -> Iterator[dict[str, Any]]:
        """The events of Chrome's trace format; times in microseconds since the first beginning.

        A task is a complete event ("X") in the row of its lane, a skipped one an instant ("i") in a row of its own. An
        arrow ("s" to "f") leads to a task from each that it waits for, where both ran and both are recorded.
        """
        lanes = np.unique(self._ran[:, LANE]).tolist()
        aside = max(lanes, default=-1) + 1
        yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": self.name}}
        names = {lane: f"{self.lane_name} {lane}" for lane in lanes} | ({aside: "skipped"} if self.skipped else {})
        for lane, name in names.items():
            yield {"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", "pid": 0, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}}
        origin = int(self.rows[:, BEGIN].min()) if len(self.rows) else 0
        intervals, arrows = self.intervals, 0
        ran = {(row.run, row.task): row for row in intervals if not row.skipped}
        for row in intervals:
            units = row.units.start if len(row.units) == 1 else f"{row.units.start} to {row.units.stop - 1}"
            arguments = {"task": row.task, "units": units, "run": row.run, "waits for": list(row.waits_for)}
            common = {"name": row.name, "cat": "task", "pid": 0, "ts": (row.begin - origin) / 1000, "args": arguments}
            if row.skipped:
                yield {**common, "ph": "i", "tid": aside, "s": "t"}
                continue
            yield {**common, "ph": "X", "tid": row.lane, "dur": (row.end - row.begin) / 1000}
            for older in row.waits_for:
                source = ran.get((row.run, older))
                if source is None:
                    continue
                arrow = {"name": "waits for", "cat": "dependency", "pid": 0, "id": arrows}
                at = max(source.begin, source.end - 1)  # inside the older task, or the arrow belongs to the next one
                yield {**arrow, "ph": "s", "tid": source.lane, "ts": (at - origin) / 1000}
                yield {**arrow, "ph": "f", "bp": "e", "tid": row.lane, "ts": (row.begin - origin) / 1000}
                arrows += 1

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file for https://ui.perfetto.dev or chrome://tracing, whole or not at all.

        Raises:
          OSError: it cannot be written.
        """
        target = Path(path)
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in self.events())
        about = json.dumps({"summary": self.summary(), "missing": self.missing})
        text = f'{{"displayTimeUnit":"ns","otherData":{about},"traceEvents":[\n{lines}\n]}}\n'
        temporary = target.absolute().with_name(f".{target.name}.{os.getpid()}")
        try:
            temporary.write_text(text)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def checked_path(argument: str, value: Any) -> Path:
    """`value` as the path of a file to write.

    Raises:
      TypeError: it is no path.
      ValueError: it is a folder, or its folder is not there or cannot be written to.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{argument}: expected the path of a file to write, got {value!r}")
    if not os.fspath(value):
        raise ValueError(f"{argument}: expected the path of a file to write, got an empty one")
    path = Path(value).absolute()  # as it is meant now: the process may change its folder before it is written
    if path.is_dir():
        raise ValueError(f"{argument}: expected the path of a file to write, got the folder {path}")
    if not path.parent.is_dir():
        raise ValueError(f"{argument}: cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{argument}: cannot write {path}: the folder {path.parent} cannot be written to")
    return path


def apart(rows: np.ndarray) -> np.ndarray:
    """Rows in which no two tasks of a lane are in flight together: what is too much for a lane gets further ones.

    Lanes are numbered by run, so those of runs at once may coincide, and the branches of a CUDA graph have none.
    """
    rows = rows.copy()
    free = int(rows[:, LANE].max(initial=SKIPPED)) + 1
    ends: dict[int, dict[int, int]] = {}  # by lane, its lanes and when each is free again
    for index in np.lexsort((rows[:, END], rows[:, BEGIN])).tolist():
        _, lane, begin, end, _ = rows[index].tolist()
        if lane == SKIPPED:
            continue
        own = ends.setdefault(lane, {lane: begin})
        chosen = next((each for each, until in own.items() if until <= begin), free)
        if chosen == free:
            free += 1
        own[chosen] = end
        rows[index, LANE] = chosen
    return rows


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _covered(begin: np.ndarray, end: np.ndarray) -> int:
    """How much time some intervals cover together."""
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    gaps = np.maximum(begin[1:] - reach[:-1], 0).sum()
    return int(reach[-1] - begin[0] - gaps) if len(begin) else 0
