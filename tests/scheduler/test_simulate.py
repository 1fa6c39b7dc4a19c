"""Schedules of a window, against the dependency graph of sets of bytes."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_streams import streams, unhurried, upstream_of

from brax_concurrent.scheduler import simulate as module
from brax_concurrent.scheduler.footprint import EVERYTHING, Footprint, Segment
from brax_concurrent.scheduler.graph import critical_path, dependencies
from brax_concurrent.scheduler.simulate import NO_LANE, simulate
from brax_concurrent.scheduler.task import Task
from brax_concurrent.scheduler.window import MAX_SLOTS

WINDOWS = st.integers(1, 6) | st.just(32) | st.just(MAX_SLOTS)
LANES = st.integers(1, 5)


@st.composite
def work(draw, max_size=16):
    """A stream, durations (integers, so that times are exact), and the tasks whose predicate is false."""
    stream = draw(streams(max_size))
    size = len(stream)
    durations, outcomes = (
        draw(st.lists(part, min_size=size, max_size=size)) for part in (st.integers(0, 4), st.booleans())
    )
    return stream, durations, {i for i, task in enumerate(stream) if task.predicate and outcomes[i]}


def random_policy(choose):
    return lambda ready, lane, last: choose.choice(ready)


def independent(count, buffer=0):
    return [Task("k", range(i, i + 1), Footprint(writes=(Segment(buffer, i, i + 1),))) for i in range(count)]


@unhurried
@given(work(), LANES, WINDOWS, st.none() | st.randoms(use_true_random=False))
def test_conflicting_tasks_run_in_order_and_never_at_once(given_work, lanes, window, choose):
    stream, durations, skipped = given_work
    policy = random_policy(choose) if choose else module.oldest_first
    schedule = simulate(stream, durations, lanes=lanes, window=window, policy=policy, skipped=skipped)
    for i, older in enumerate(upstream_of(stream)):
        for j in older:
            assert schedule.end[j] <= schedule.begin[i]


@unhurried
@given(work(), LANES, WINDOWS, st.none() | st.randoms(use_true_random=False))
def test_every_task_runs_once_on_one_lane_or_is_skipped(given_work, lanes, window, choose):
    stream, durations, skipped = given_work
    policy = random_policy(choose) if choose else module.oldest_first
    schedule = simulate(stream, durations, lanes=lanes, window=window, policy=policy, skipped=skipped)
    parts = schedule.entered, schedule.begin, schedule.end, schedule.lane
    assert {len(part) for part in parts} == {len(stream)}
    for i, (entered, begin, end, lane) in enumerate(zip(*parts, strict=True)):
        assert 0 <= entered <= begin
        if i in skipped:
            assert (end, lane) == (begin, NO_LANE)
        else:
            assert end == begin + durations[i]
            assert 0 <= lane < lanes
    for lane in range(lanes):
        spans = sorted((b, e) for b, e, where in zip(*parts[1:], strict=True) if where == lane)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert schedule.makespan == max(schedule.end, default=0)
    busy = sum(time for i, time in enumerate(durations) if i not in skipped)
    assert math.isclose(schedule.occupancy * schedule.makespan * lanes, busy)
    assert schedule.concurrency <= lanes


@unhurried
@given(work(), LANES, WINDOWS, st.none() | st.randoms(use_true_random=False))
def test_nothing_ready_waits_while_a_lane_is_idle(given_work, lanes, window, choose):
    stream, durations, skipped = given_work
    policy = random_policy(choose) if choose else module.oldest_first
    schedule = simulate(stream, durations, lanes=lanes, window=window, policy=policy, skipped=skipped)
    begin, end = schedule.begin, schedule.end
    for i, older in enumerate(upstream_of(stream)):
        # It is in the window once fewer than `window` older tasks are unfinished.
        order = sorted((end[j] for j in range(i)), reverse=True)
        entered = order[window - 1] if len(order) >= window else 0
        assert schedule.entered[i] == entered
        ready = max([entered, *(end[j] for j in older)])
        if i in skipped:
            assert begin[i] == ready
            continue
        # Something runs on every lane from then until it begins; times are whole numbers.
        for time in range(ready, begin[i]):
            running = sum(begin[j] <= time < end[j] for j in range(len(stream)))
            assert running == lanes, (i, time)


@unhurried
@given(work(), LANES, WINDOWS)
def test_the_oldest_ready_task_goes_first(given_work, lanes, window):
    stream, durations, skipped = given_work
    schedule = simulate(stream, durations, lanes=lanes, window=window, skipped=skipped)
    older = upstream_of(stream)
    for i in range(len(stream)):
        ready = max([schedule.entered[i], *(schedule.end[j] for j in older[i])])
        for j in range(i + 1, len(stream)):
            overtook = ready < schedule.begin[j] < schedule.begin[i]
            assert not overtook or j in skipped


@unhurried
@given(work(), LANES)
def test_a_window_of_one_is_program_order(given_work, lanes):
    stream, durations, skipped = given_work
    schedule = simulate(stream, durations, lanes=lanes, window=1, skipped=skipped)
    expected = [0, *itertools.accumulate(0 if i in skipped else time for i, time in enumerate(durations))]
    assert list(schedule.begin) == expected[:-1]
    assert list(schedule.end) == expected[1:]


@unhurried
@given(work())
def test_with_enough_of_everything_the_critical_path_decides(given_work):
    stream, durations, _ = given_work
    schedule = simulate(stream, durations, lanes=max(len(stream), 1), window=MAX_SLOTS)
    length, path = critical_path(dependencies(stream), durations)
    assert schedule.makespan == length
    assert sum(durations[i] for i in path) == length


@unhurried
@given(work(max_size=6), LANES)
def test_no_window_is_too_large_or_too_small(given_work, lanes):
    stream, durations, skipped = given_work
    ends = [
        simulate(stream, durations, lanes=lanes, window=size, skipped=skipped).makespan
        for size in (*range(1, 9), 31, 32, 33, 63, MAX_SLOTS)
    ]
    assert len(set(ends[len(stream) :])) <= 1  # more slots than tasks change nothing
    assert max(ends) <= sum(durations)


@unhurried
@given(work(), LANES, st.integers(2, 8))
def test_policies_see_the_ready_tasks_by_age_and_what_the_lane_ran(given_work, lanes, window):
    stream, durations, skipped = given_work
    seen = []

    def newest(ready, lane, last):
        seen.append((ready, lane, last))
        return ready[-1]

    schedule = simulate(stream, durations, lanes=lanes, window=window, policy=newest, skipped=skipped)
    ran: dict[int, int] = {}
    for ready, lane, last in seen:
        assert list(ready) == sorted(ready)
        assert skipped.isdisjoint(ready)
        assert ran.get(lane) == last
        assert schedule.lane[ready[-1]] == lane
        ran[lane] = ready[-1]
    assert len(seen) == len(stream) - len(skipped)


def test_more_slots_let_more_run_at_once():
    chain = [Task("k", range(1), Footprint(writes=(Segment(9, 0, 1),)))] * 3
    stream = [*chain, *independent(6)]
    lengths = {size: simulate(stream, [1] * 9, lanes=4, window=size).makespan for size in (1, 2, 3, 4, 9)}
    assert lengths == {1: 9, 2: 6, 3: 4, 4: 3, 9: 3}


def test_all_that_ends_at_one_instant_retires_before_anything_issues():
    written = Footprint(writes=(Segment(9, 0, 1),))
    stream = [*independent(2), Task("older", range(1), written), *independent(2, buffer=1)]
    stream[1] = Task("two", range(1), written)
    schedule = simulate(stream, [1] * 5, lanes=2)
    assert schedule.begin == (0, 0, 1, 1, 2)
    assert schedule.lane == (0, 1, 0, 1, 0)  # the older task was ready as the first lane was given


def test_a_false_predicate_costs_nothing_but_its_turn():
    predicate = Segment(0, 0, 4)
    stream = [
        Task("find", range(1), Footprint(writes=(predicate,))),
        Task("solve", range(1), Footprint((predicate,), (Segment(1, 0, 4),)), predicate),
        Task("use", range(1), Footprint(reads=(Segment(1, 0, 4),))),
    ]
    run = simulate(stream, [2, 5, 1], lanes=1)
    assert (run.begin, run.end) == ((0, 2, 7), (2, 7, 8))
    skip = simulate(stream, [2, 5, 1], lanes=1, skipped={1})
    assert (skip.begin, skip.end, skip.lane) == ((0, 2, 2), (2, 2, 3), (0, NO_LANE, 0))
    assert (skip.makespan, skip.concurrency, skip.occupancy) == (3, 1, 1)


def test_nothing_to_do():
    for schedule in (simulate([], [], lanes=2), simulate(independent(3), [0] * 3, lanes=2)):
        assert (schedule.makespan, schedule.concurrency, schedule.occupancy) == (0, 0, 0)


def test_an_unknown_footprint_is_a_barrier():
    stream = [*independent(3), Task("any", range(1), EVERYTHING), *independent(3)]
    schedule = simulate(stream, [1, 2, 3, 1, 1, 1, 1], lanes=8)
    assert schedule.begin == (0, 0, 0, 3, 4, 4, 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lanes": 0}, "lanes must be at least 1, got 0"),
        ({"window": 0}, "window size must be from 1 to 64, got 0"),
        ({"window": 65}, "window size must be from 1 to 64, got 65"),
        ({"durations": [1, 1]}, "durations: expected one for each of 3 tasks, got 2"),
        ({"durations": [1, -1, 1]}, r"durations must be 0 or more and finite, got -1 for task 1 \(k\)"),
        ({"durations": [1, math.nan, 1]}, "durations must be 0 or more and finite, got nan"),
        ({"durations": [1, 1, math.inf]}, "durations must be 0 or more and finite, got inf"),
        ({"skipped": [1]}, "skipped: there is no task 1 with a predicate"),
        ({"skipped": [3]}, "skipped: there is no task 3 with a predicate"),
        ({"policy": lambda ready, lane, last: 7}, r"policy must choose one of the ready tasks \(0, 1, 2\), got 7"),
    ],
)
def test_mistakes_are_named(changes, said):
    arguments = {"durations": [1, 1, 1], "lanes": 2, **changes}
    with pytest.raises(ValueError, match=said):
        simulate(independent(3), arguments.pop("durations"), **arguments)


def test_a_window_that_is_stuck_says_so(monkeypatch):
    """Which the rules never let happen: here finished tasks stay in the others' upstream masks."""

    class Forgetful(module.Window):
        def retire(self, slot):
            kept = self._upstream.copy()
            super().retire(slot)
            self._upstream[:] = kept

    monkeypatch.setattr(module, "Window", Forgetful)
    stream = [Task("one", range(1), EVERYTHING), Task("two", range(1), EVERYTHING)]
    with pytest.raises(RuntimeError, match=r"the window is stuck: slot 1 \(task 1, two\) waits for slots \[0\]"):
        simulate(stream, [1, 1], lanes=1)


@unhurried
@given(work(), LANES, WINDOWS)
def test_the_same_stream_always_runs_the_same_way(given_work, lanes, window):
    stream, durations, skipped = given_work
    first, again = (simulate(stream, durations, lanes=lanes, window=window, skipped=skipped) for _ in range(2))
    assert first == again
