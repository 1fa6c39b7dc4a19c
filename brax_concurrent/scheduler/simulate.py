"""A window at work, on paper: when each task of a stream would run, given how long it takes.

A discrete-event simulation with the rules of scheduler/window.py and no machine. Tests compare it with the dependency
graph; it also predicts what more lanes or a larger window could gain.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from brax_concurrent.scheduler.task import Task
from brax_concurrent.scheduler.window import Window, encode

Policy = Callable[[Sequence[int], int, int | None], int]
"""Chooses among the ready tasks: policy(ready, lane, last) gives one of `ready`, which are the places of tasks in the
stream, the oldest first. The lane is idle and ran the task `last` before, if any."""

NO_LANE = -1


def oldest_first(ready: Sequence[int], lane: int, last: int | None) -> int:
    """The ready task that comes first in the stream."""
    return ready[0]


@dataclass(frozen=True)
class Schedule:
    """When and where each task of a stream ran. Times are in the unit of the durations, from 0 on.

    entered  when the task came into the window
    begin    when it issued
    end      when it retired; for a task that was skipped, the same as its begin
    lane     what ran it: a worker or a CUDA stream; NO_LANE for a task that was skipped
    lanes    how many there are
    """

    entered: tuple[float, ...]
    begin: tuple[float, ...]
    end: tuple[float, ...]
    lane: tuple[int, ...]
    lanes: int

    @property
    def makespan(self) -> float:
        """When the last task ended."""
        return max(self.end, default=0)

    @property
    def concurrency(self) -> float:
        """Tasks that ran at once, on average over the makespan."""
        busy = sum(self.end) - sum(self.begin)
        return busy / self.makespan if self.makespan else 0.0

    @property
    def occupancy(self) -> float:
        """Busy time of the lanes over the time that they had."""
        return self.concurrency / self.lanes


def simulate(
    tasks: Sequence[Task],
    durations: Sequence[float],
    *,
    lanes: int,
    window: int = 32,
    policy: Policy = oldest_first,
    skipped: Collection[int] = (),
) -> Schedule:
    """Run a stream through a window onto lanes that each run one task at a time.

    Scheduling takes no time: at every instant finished tasks retire, the window is filled, what is ready and has a
    false predicate retires, and each idle lane in turn is given a ready task, if there is one.

    Args:
      tasks: the stream.
      durations: how long each task takes, 0 or more.
      lanes: workers or CUDA streams, at least 1.
      window: slots of the window, 1 to 64.
      policy: which ready task an idle lane gets.
      skipped: the tasks whose predicate is false as they would issue.

    Raises:
      ValueError: an argument is out of range, a skipped task has no predicate, or the policy chose a task that is not
        ready.
      RuntimeError: nothing runs and nothing is ready, though tasks are left. The window's rules never let that happen.
    """
    if lanes < 1:
        raise ValueError(f"lanes must be at least 1, got {lanes}")
    if len(durations) != len(tasks):
        raise ValueError(f"durations: expected one for each of {len(tasks)} tasks, got {len(durations)}")
    for i, time in enumerate(durations):
        if not 0 <= time < math.inf:
            raise ValueError(f"durations must be 0 or more and finite, got {time} for task {i} ({tasks[i].kernel})")
    for i in skipped:
        if not 0 <= i < len(tasks) or tasks[i].predicate is None:
            raise ValueError(f"skipped: there is no task {i} with a predicate")
    run = _Run(tasks, durations, lanes, window, policy, frozenset(skipped))
    while run.advance():
        pass
    return Schedule(tuple(run.entered), tuple(run.begin), tuple(run.end), tuple(run.lane), lanes)


class _Run:
    """The state of one simulation."""

    def __init__(
        self,
        tasks: Sequence[Task],
        durations: Sequence[float],
        lanes: int,
        size: int,
        policy: Policy,
        skipped: frozenset[int],
    ):
        self._tasks, self._durations, self._policy, self._skipped = tasks, durations, policy, skipped
        self._window = Window(encode(tasks), size)
        self._clock: float = 0
        self._running: list[tuple[float, int, int]] = []  # end, task, slot: a heap
        self._idle = list(range(lanes))  # a heap too: the first idle lane is served first
        self._last: list[int | None] = [None] * lanes
        self.entered: list[float] = []
        self.begin, self.end = [0.0] * len(tasks), [0.0] * len(tasks)
        self.lane = [NO_LANE] * len(tasks)

    def advance(self) -> bool:
        """All that happens at one instant, then go to the next; False when nothing is left."""
        self._fill()
        while self._skip():
            self._fill()
        while self._idle and self._window.ready:
            self._issue()
        if not self._running:
            if self._window.occupied:
                raise RuntimeError(f"the window is stuck: {self._stuck()}")
            return False
        self._clock = self._running[0][0]
        while self._running and self._running[0][0] == self._clock:
            _, i, slot = heapq.heappop(self._running)
            self._window.retire(slot)
            heapq.heappush(self._idle, self.lane[i])
        return True

    def _fill(self) -> None:
        while len(self.entered) < len(self._tasks) and not self._window.full:
            self._window.insert(len(self.entered))
            self.entered.append(self._clock)

    def _skip(self) -> bool:
        """Retire the ready tasks whose predicate is false; whether there were any."""
        found = False
        for slot in self._window.by_age(self._window.ready):
            i = self._window.task(slot)
            if i in self._skipped:
                self._window.skip(slot)
                self.begin[i] = self.end[i] = self._clock
                found = True
        return found

    def _issue(self) -> None:
        slots = {self._window.task(slot): slot for slot in self._window.by_age(self._window.ready)}
        lane = heapq.heappop(self._idle)
        i = self._policy(tuple(slots), lane, self._last[lane])
        if i not in slots:
            raise ValueError(f"policy must choose one of the ready tasks {tuple(slots)}, got {i}")
        self._window.issue(slots[i])
        self.lane[i], self._last[lane] = lane, i
        self.begin[i], self.end[i] = self._clock, self._clock + self._durations[i]
        heapq.heappush(self._running, (self.end[i], i, slots[i]))

    def _stuck(self) -> str:
        waits = []
        for slot in self._window.by_age(self._window.occupied):
            i = self._window.task(slot)
            older = [other for other in range(self._window.size) if self._window.upstream(slot) >> other & 1]
            waits.append(f"slot {slot} (task {i}, {self._tasks[i].kernel}) waits for slots {older}")
        return "; ".join(waits)
