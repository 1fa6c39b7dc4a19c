"""Lists of tasks on CUDA, put onto a driver that is not one: what is sure to wait for what."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest
from fake_gpu import (
    BROKEN,
    LAUNCHED,
    NODE,
    PARAMETERS,
    READ,
    RECORDED,
    REPLAYED,
    SEEN,
    STUCK,
    WAITED,
    fake_driver,
    fake_pool,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_streams import streams as random_streams
from random_streams import upstream_of

from brax_concurrent.backends.cuda_driver import CudaError
from brax_concurrent.backends.cuda_pool import POOL_EVENTS, POOL_STREAMS
from brax_concurrent.scheduler.cuda_flags import MOST_BYTES, find_flags
from brax_concurrent.scheduler.cuda_list import ListGraph, launch_list
from brax_concurrent.scheduler.footprint import EVERYTHING, Footprint, Segment
from brax_concurrent.scheduler.graph import dependencies, reduced
from brax_concurrent.scheduler.task import Task
from brax_concurrent.scheduler.window import encode

HANDLE, STREAM = 100, 55  # of the kernel of task 0; the caller's stream


@dataclass(frozen=True, eq=False)
class Table:
    """What task_cuda.LaunchTable has that launching needs. A launch's only parameter is its task."""

    kernel: np.ndarray
    grid: np.ndarray
    block: np.ndarray
    parameters: np.ndarray
    names: tuple[str, ...]
    owners: tuple[object, ...]

    def __len__(self):
        return len(self.kernel)


def table_of(count, empty=(), broken=()):
    """Tasks of one block; some of no units, some whose launch fails."""
    numbers = np.arange(count, dtype=np.int64)
    pointers = numbers.ctypes.data + 8 * numbers
    kernel, grid = HANDLE + numbers, np.ones(count, np.int64)
    kernel[list(broken)], grid[list(empty)] = 0, 0
    names = tuple(f"k{i}" for i in range(count))
    parameters = pointers.ctypes.data + 8 * numbers
    return Table(kernel, grid, np.full(count, 128, np.int64), parameters, names, (numbers, pointers))


@functools.cache
def compiled_driver():
    return fake_driver(parameters=1)


def new_driver():
    """The driver, with nothing recorded. It is compiled once, and outlives all graphs."""
    compiled_driver().clear()
    return compiled_driver()


def launch(tasks, table=None, *, stream=STREAM, pool=None, **numbers):
    driver, (pools, owners) = new_driver(), pool or fake_pool()
    table = table or table_of(len(tasks))
    launch_list(table, encode(tasks), stream=stream, functions=driver.functions, pools=pools, **numbers)
    del owners
    return driver


def chain(count):
    return [Task("task", range(1), Footprint((), (Segment(0, 0, 8),))) for _ in range(count)]


def independent(count):
    return [Task("task", range(1), Footprint((), (Segment(i, 0, 8),))) for i in range(count)]


def launched(driver):
    """The tasks in the order of their launches."""
    return [each[PARAMETERS] for each in driver.launches]


settled = settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.generate))


@st.composite
def programs(draw):
    tasks = draw(random_streams(30))
    return tasks, draw(st.sets(st.integers(0, len(tasks) - 1), max_size=3)) if tasks else set()


def check_order(driver, tasks, empty=frozenset()):
    """Every task but the empty ones was launched once, in program order, and waits for those it conflicts with."""
    order = [i for i in range(len(tasks)) if i not in empty]
    assert launched(driver) == order
    assert [each[:3] for each in driver.launches] == [[HANDLE + i, 1, 128] for i in order]
    older, before = upstream_of(tasks), driver.before()
    for place, task in enumerate(order):
        assert {order.index(each) for each in older[task] - empty} <= before[place]


@settled
@given(programs(), st.integers(1, 64), st.integers(1, 16))
def test_every_conflicting_pair_is_ordered_and_every_task_is_launched_once(program, window, streams):
    tasks, empty = program
    driver = launch(tasks, table_of(len(tasks), empty), window=window, streams=streams)
    check_order(driver, tasks, empty)
    assert {row[2] for row in driver.rows if row[0] == LAUNCHED} <= {STREAM, *range(201, 200 + streams)}


@settled
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 3, 6, 9, 13, 20]), st.sampled_from([2, 3, 5, 16]))
def test_slots_that_are_used_again_and_again(seed, window, streams):
    """Many tasks of which few conflict: most orders are by events and by what the host has seen, not by streams."""
    rng, tasks = np.random.default_rng(seed), []
    for _ in range(100):
        one, other = (Segment(int(cell), 0, 8) for cell in rng.choice(25, 2, replace=False))
        tasks.append(Task("task", range(1), Footprint((one,), (other,) if rng.random() < 0.7 else ())))
    check_order(launch(tasks, window=window, streams=streams), tasks)


@settled
@given(programs())
def test_a_graph_has_the_reduced_edges_and_no_others(program):
    tasks, empty = program
    driver = new_driver()
    graph = ListGraph(table_of(len(tasks), empty), encode(tasks), driver.functions)
    order = [i for i in range(len(tasks)) if i not in empty]
    assert launched(driver) == order
    edges = [{node - 1 for node in row[3 : 3 + row[2]]} for row in driver.rows if row[0] == NODE]
    assert edges == reduced(dependencies([tasks[i] for i in order]))
    assert sum(row[2] for row in driver.rows if row[0] == NODE) == sum(map(len, edges))  # none twice
    graph.launch(STREAM)
    graph.launch(STREAM)
    assert [row[::2][:2] for row in driver.rows if row[0] == REPLAYED] == [[REPLAYED, STREAM]] * 2
    assert len(driver.launches) == len(order)


def test_a_graph_of_more_tasks_than_a_word_has_bits():
    """Rows, columns and diagonals: who is waited for through others lies up to 200 tasks back."""
    tasks = []
    for i in range(200):
        reads = tuple(Segment(j, 0, 8) for j in (i - 1, i - 64, i - 130) if j >= 0 and i % 7 != 0)
        tasks.append(Task("task", range(1), Footprint(reads, (Segment(i, 0, 8),))))
    tasks.insert(150, Task("task", range(1), EVERYTHING))
    driver = new_driver()
    ListGraph(table_of(len(tasks)), encode(tasks), driver.functions)
    rows = [row for row in driver.rows if row[0] == NODE]
    expected = reduced(dependencies(tasks))
    assert [row[2] for row in rows] == [len(each) for each in expected]
    few = [i for i, each in enumerate(expected) if len(each) <= 37]  # that is what the driver records
    assert len(few) >= 199
    assert all({node - 1 for node in rows[i][3 : 3 + rows[i][2]]} == expected[i] for i in few)


@pytest.mark.parametrize("between", [10, 62, 63, 64, 65, 75])
def test_a_task_that_came_long_before_is_waited_for(between):
    """It stays in the window while all others come and go on another stream."""
    first, last, newest = Segment(1, 0, 8), Segment(0, 0, 8), Segment(2, 0, 8)
    tasks = [Task("task", range(1), Footprint((), (first,))), *chain(between)]
    tasks.append(Task("task", range(1), Footprint((), (last, newest))))
    tasks.append(Task("task", range(1), Footprint((first,), (newest,))))  # goes where the one before it is
    driver = launch(tasks, window=64, streams=2)
    check_order(driver, tasks)
    assert len({row[2] for row in driver.rows if row[0] == LAUNCHED}) == 2  # streams


def test_independent_tasks_are_not_ordered():
    """Two chains side by side: on two streams neither waits for the other, nor in a graph."""
    tasks = [Task("task", range(1), Footprint((), (Segment(i % 2, 0, 8),))) for i in range(6)]
    own = [{j for j in range(i) if j % 2 == i % 2} for i in range(6)]
    assert launch(tasks, streams=2).before() == own
    driver = new_driver()
    ListGraph(table_of(6), encode(tasks), driver.functions)
    assert driver.before() == own
    assert launch(independent(4)).before() == [set()] * 4


def test_what_comes_before_and_after_is_ordered_with_all_streams():
    driver = launch(independent(3), streams=3)
    kinds = [(row[0], row[1]) for row in driver.rows]
    fork, streams = driver.rows[0], {row[2] for row in driver.rows if row[0] == LAUNCHED}
    assert (fork[0], fork[2], streams) == (RECORDED, STREAM, {STREAM, 201, 202})
    assert {(row[1], row[2]) for row in driver.rows if row[0] == WAITED and row[1] != STREAM} == {
        (201, fork[1]),
        (202, fork[1]),
    }
    last = [row for row in driver.rows if row[0] == WAITED][-2:]
    assert [row[1] for row in last] == [STREAM, STREAM]
    joined = {row[2] for row in driver.rows if row[0] == RECORDED and row[1] in {each[2] for each in last}}
    assert joined == {201, 202}
    assert kinds.index((LAUNCHED, 2)) < kinds.index((RECORDED, last[0][2]))


def test_a_window_of_one_keeps_program_order():
    driver = launch(independent(5), window=1, streams=4)
    assert driver.before() == [set(range(i)) for i in range(5)]
    assert int(driver.order[1]) >= 4  # before each task but the first the host waits for the one before it


def test_a_chain_needs_no_events_but_for_slots():
    driver = launch(chain(8), window=32, streams=4)
    assert {row[2] for row in driver.rows if row[0] == LAUNCHED} == {STREAM}
    assert not [row for row in driver.rows if row[0] == WAITED]


def test_no_tasks_are_no_work():
    assert launch([]).launches == []
    assert launch(independent(2), table_of(2, empty=(0, 1))).launches == []
    driver = new_driver()
    ListGraph(table_of(0), encode([]), driver.functions).launch()
    assert [row[0] for row in driver.rows] == [REPLAYED]


def test_failures_name_the_task():
    said = r"launch of task 2, kernel k2: the fake is broken \(error 1\)"
    table = table_of(4, broken=(2,))
    with pytest.raises(CudaError, match=said):
        launch(chain(4), table)
    assert launched(compiled_driver()) == [0, 1]
    driver = new_driver()
    with pytest.raises(CudaError, match=said):
        ListGraph(table, encode(chain(4)), driver.functions)
    assert launched(driver) == [0, 1]
    with pytest.raises(CudaError, match=r"launch of task 0, kernel k0: the fake is broken \(error 700\)"):
        launch(chain(4), stream=BROKEN, streams=1)
    graph = ListGraph(table_of(4), encode(chain(4)), driver.functions)
    with pytest.raises(CudaError, match=r"launch of the graph of 4 tasks: the fake is broken \(error 700\)"):
        graph.launch(BROKEN)


def test_after_a_failed_launch_the_streams_are_joined_and_the_pool_is_free():
    pool = fake_pool()
    with pytest.raises(CudaError, match="launch of task 3, kernel k3"):
        launch(independent(5), table_of(5, broken=(3,)), pool=pool, streams=3)
    waits = [row for row in compiled_driver().rows if row[0] == WAITED]
    assert [row[1] for row in waits[-2:]] == [STREAM, STREAM]
    assert pool[1][0][0] == 0
    assert launched(launch(independent(5), pool=pool)) == list(range(5))


@pytest.mark.parametrize(("first", "window", "task"), [(0, 4, 0), (1, 4, 1), (1, 8, 1)])
def test_a_task_that_never_ends_is_named(monkeypatch, first, window, task):
    """The stuck events are those of the slots from `first` on. Of 8 slots every second has an event behind it."""
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", "0.05")
    pool = fake_pool()
    pool[1][0][POOL_EVENTS + first :] = STUCK
    with pytest.raises(CudaError, match=rf"^task {task}, kernel k{task} did not end within 0.05 s \(BRAX_CON"):
        launch(independent(9), pool=pool, window=window, streams=4)
    assert pool[1][0][0] == 0  # the lock is free again


def test_a_pool_that_another_call_keeps_or_that_is_missing(monkeypatch):
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", "0.05")
    pool = fake_pool()
    pool[1][0][0] = 1
    with pytest.raises(CudaError, match=r"another call kept the CUDA streams for 0.05 s"):
        launch(chain(2), pool=pool)
    none = np.zeros(64, np.int64)
    with pytest.raises(CudaError, match="no CUDA streams for the current GPU"):
        launch(chain(2), pool=(none.ctypes.data, none))


def test_the_callers_stream_is_the_first():
    pool = fake_pool()
    driver = launch(chain(2), pool=pool, stream=0)
    assert pool[1][0][POOL_STREAMS] == 0
    assert {row[2] for row in driver.rows if row[0] == LAUNCHED} == {0}


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"window": 0}, "window must be from 1 to 64, got 0"),
        ({"window": 65}, "window must be from 1 to 64, got 65"),
        ({"streams": 0}, "streams must be from 1 to 16, got 0"),
        ({"streams": 17}, "streams must be from 1 to 16, got 17"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        launch(chain(2), **numbers)


def test_footprints_of_another_list_are_refused():
    driver, (pools, owners) = new_driver(), fake_pool()
    with pytest.raises(ValueError, match="encoded: expected the footprints of 2 tasks, got 3"):
        launch_list(table_of(2), encode(chain(3)), functions=driver.functions, pools=pools)
    with pytest.raises(ValueError, match="encoded: expected the footprints of 2 tasks, got 3"):
        ListGraph(table_of(2), encode(chain(3)), driver.functions)
    del owners


# --- predicates that the host reads -----------------------------------------------------------------------------------


def flagged(flags, writers, wanting):
    """Tasks of which some write flags and others are under them, and the predicates' addresses.

    Args:
        flags: (n,) int32, the memory that flags are read from.
        writers: {task: flags that it writes}.
        wanting: {task: the flag that it is under}.
    """
    base, count = flags.ctypes.data, max([*writers, *wanting]) + 1
    segment = {flag: Segment(0, base + 4 * flag, base + 4 * flag + 4) for flag in range(len(flags))}
    tasks = []
    for task in range(count):
        reads = (segment[wanting[task]],) if task in wanting else ()
        own = Segment(0, 8 * task, 8 * task + 8)
        tasks.append(Task("task", range(1), Footprint(reads, (own, *(segment[f] for f in writers.get(task, ()))))))
    return tasks, [base + 4 * wanting[task] if task in wanting else 0 for task in range(count)]


def test_tasks_whose_flag_is_0_are_not_launched_and_flags_are_read_after_their_writers():
    flags = np.array([1, 0, 0, 1, 0], np.int32)
    writers, wanting = {0: (0, 1), 1: (2,), 7: (3, 4)}, {3: 0, 4: 1, 5: 2, 6: 0, 8: 3, 9: 4, 10: 1}
    tasks, predicates = flagged(flags, writers, wanting)
    found = find_flags(predicates, encode(tasks))
    assert found.writers[[3, 4, 5, 8, 10]].tolist() == [0, 0, 1, 7, 0]
    for window in (1, 3, 32):
        driver = launch(tasks, flags=found, window=window, streams=3)
        assert launched(driver) == [0, 1, 2, 3, 6, 7, 8]
        reads = [index for index, row in enumerate(driver.rows) if row[0] == READ]
        assert len(reads) == 2  # one serves all flags that had been written by then
        done, launches = set(), [each[PARAMETERS] for each in driver.launches]
        for index in reads:  # what the driver said to the host until then
            seen, events, streams = set(), {}, {}
            for kind, a, b, *_ in driver.rows[:index]:
                if kind == LAUNCHED:
                    streams.setdefault(b, set()).add(launches[a])
                elif kind == RECORDED:
                    events[a] = set(streams.get(b, ()))
                elif kind == SEEN:
                    seen |= events.get(a, set())
            done = seen
            assert {0, 1} <= done
        assert 7 in done


def test_a_flag_that_no_task_writes_is_read_once():
    flags = np.array([0, 1], np.int32)
    tasks, predicates = flagged(flags, {}, {0: 0, 1: 1, 2: 0, 3: 1})
    driver = launch(tasks, flags=find_flags(predicates, encode(tasks)))
    assert launched(driver) == [1, 3]
    assert sum(row[0] == READ for row in driver.rows) == 1


def test_flags_are_written_by_tasks_of_which_nothing_is_known():
    flags = np.ones(1, np.int32)
    tasks, predicates = flagged(flags, {}, {0: 0, 2: 0})
    tasks[1] = Task("task", range(1), EVERYTHING)
    assert find_flags(predicates, encode(tasks)).writers.tolist() == [-1, -1, 1]


def test_flags_that_lie_far_apart_are_left_to_the_gpu():
    far = np.zeros(MOST_BYTES // 4 + 1, np.int32)
    tasks, predicates = flagged(far[:1], {}, {0: 0, 1: 0})
    assert find_flags([0, 0], encode(tasks)) is None
    assert find_flags([predicates[0], far[-2:].ctypes.data], encode(tasks)) is not None
    assert find_flags([predicates[0], far[-1:].ctypes.data], encode(tasks)) is None


def test_a_writer_that_does_not_end_is_named(monkeypatch):
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", "0.05")
    flags = np.ones(1, np.int32)
    tasks, predicates = flagged(flags, {1: (0,)}, {2: 0})
    pools, owners = fake_pool()
    owners[0][POOL_EVENTS:] = STUCK
    with pytest.raises(CudaError, match="task 1, kernel k1 did not end"):
        launch(tasks, flags=find_flags(predicates, encode(tasks)), pool=(pools, owners))
