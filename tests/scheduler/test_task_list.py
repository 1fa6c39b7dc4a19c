"""Lists of tasks through the window: order, overlap, errors, predicates, records."""

import ctypes
import dataclasses
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import types
from random_streams import BUFFERS, BYTES, memory_of, streams, unhurried
from toy_programs import compiled

from brax_concurrent.backends.intrinsics import (
    atomic_add,
    atomic_load,
    give_way,
    load_i32,
    load_i64,
    monotonic_ns,
    store_i64,
)
from brax_concurrent.scheduler.footprint import Footprint, Segment
from brax_concurrent.scheduler.graph import dependencies
from brax_concurrent.scheduler.hw_list import SHARED
from brax_concurrent.scheduler.task import Task
from brax_concurrent.scheduler.task_list import ONE_THREAD_A_TASK, TaskTable, run_tasks
from brax_concurrent.scheduler.window import encode

SIGNATURE = types.int64(types.int64, types.int64, types.int64)
UNITS = 3  # of each task of a `Program`

engines = pytest.mark.parametrize("engine", [ONE_THREAD_A_TASK, SHARED], ids=["sw", "hw"])


def mix(args, first_unit, num_units):
    """Add up cells and write what comes of it to others; the task's last unit does it, the others take a while.

    args: two counts, the code, the task's number, how many units have run, then the cells' addresses.
    """
    atomic_add(args + 32, num_units)
    reads, writes, total = load_i64(args), load_i64(args + 8), load_i64(args + 24)
    if not first_unit <= total + UNITS - 1 < first_unit + num_units:
        for _ in range(first_unit & 7):
            give_way()
        return 0
    for index in range(reads):
        total = total * 31 + load_i64(load_i64(args + 8 * (5 + index)))
    for _ in range(total & 7):
        give_way()
    for index in range(writes):
        store_i64(load_i64(args + 8 * (5 + reads + index)), total * UNITS + index)
    return load_i64(args + 16)


class Program:
    """A stream as a table: each byte of its memory is a cell, each task mixes those that it reads into its writes."""

    def __init__(self, stream, codes=None):
        self.stream = stream
        self.cells = np.arange(len(BUFFERS) * BYTES, dtype=np.int64)
        self.flags = np.zeros(len(BUFFERS) * BYTES, np.int32)  # predicates: constants, some of them 0
        self.flags[::3] = 1
        place = {(buffer, byte): i for i, (buffer, byte) in enumerate((b, y) for b in BUFFERS for y in range(BYTES))}
        base, self.args = self.cells.ctypes.data, []
        for number, task in enumerate(stream):
            cells = [[base + 8 * place[at] for at in sorted(side)] for side in memory_of(task.footprint)]
            code = 0 if codes is None else codes.get(number, 0)
            self.args.append(np.array([len(cells[0]), len(cells[1]), code, number, 0, *cells[0], *cells[1]], np.int64))
        predicates = [
            0 if task.predicate is None
            else self.flags.ctypes.data + 4 * place[task.predicate.buffer, task.predicate.start]
            for task in stream
        ]  # fmt: skip
        column = [np.array(values, np.int64) for values in (
            [compiled(mix, SIGNATURE).address] * len(stream),
            [each.ctypes.data for each in self.args],
            range(len(stream)),
            [UNITS] * len(stream),
            predicates,
        )]  # fmt: skip
        self.table = TaskTable(*column, names=tuple(task.kernel for task in stream), owners=(self.args, self.flags))

    def run(self, **numbers):
        """What became of the cells, and what `run_tasks` returned."""
        start = self.cells.copy()
        result = run_tasks(self.table, encode(self.stream), **numbers)
        cells = self.cells.copy()
        self.cells[:] = start
        return cells, result


@engines
@unhurried
@given(stream=streams(40), threads=st.integers(1, 4), window=st.integers(1, 64))
def test_any_window_gives_the_bits_of_program_order(engine, stream, threads, window):
    program = Program(stream)
    expected, _ = program.run(threads=1, window=1)
    records = np.zeros((len(stream), 4), np.int64)
    for args in program.args:
        args[4] = 0
    cells, result = program.run(threads=threads, window=window, records=records, engine=engine)
    assert result is None
    assert cells.tobytes() == expected.tobytes()
    assert records[:, 0].tolist() == list(range(len(stream)))
    for task, older in enumerate(dependencies(stream)):
        assert all(records[each, 3] <= records[task, 2] for each in older)
    skipped = [i for i, predicate in enumerate(program.table.predicate.tolist()) if predicate and not flag(predicate)]
    assert np.flatnonzero(records[:, 1] < 0).tolist() == skipped
    assert [i for i, args in enumerate(program.args) if args[4] != UNITS] == skipped
    assert (records[skipped, 2] == records[skipped, 3]).all()
    assert (records[:, 1] < threads).all()
    if window == 1:
        assert (records[:-1, 3] <= records[1:, 2]).all()


def flag(address):
    return ctypes.c_int32.from_address(address).value


def independent(count):
    return [Task(f"task_{i}", range(i, i + 1), Footprint((), (Segment(i, 0, 1),))) for i in range(count)]


def chain(count):
    return [Task(f"task_{i}", range(i, i + 1), Footprint((), (Segment(0, 0, 1),))) for i in range(count)]


def table_of(function, args, count, **others):
    columns = [
        np.full(count, value, np.int64)
        for value in (compiled(function, SIGNATURE).address, args.ctypes.data, 0, 1, 0)
    ]  # fmt: skip
    columns[2][:] = np.arange(count)
    return TaskTable(*columns, owners=(args,), **others)


def meet(args, first_unit, num_units):
    """Wait for the other, at most 20 s."""
    atomic_add(args, 1)
    begin = monotonic_ns()
    while atomic_load(args) < 2:
        give_way()
        if monotonic_ns() - begin > 20 * 10**9:
            return 1
    return 0


@engines
@pytest.mark.parametrize("repeat", range(10))
def test_independent_tasks_run_at_once(engine, repeat):
    args = np.zeros(1, np.int64)
    assert run_tasks(table_of(meet, args, 2), encode(independent(2)), threads=2, engine=engine) is None


@pytest.mark.parametrize("window", [1, 8])
def test_threads_share_the_units_of_a_task(window):
    """Two units that wait for each other, in a chain: the next task begins when both have ended."""
    args = np.zeros(1, np.int64)
    table = table_of(meet_in_pairs, args, 20)
    table = dataclasses.replace(table, first_unit=np.zeros(20, np.int64), num_units=np.full(20, 2))
    assert run_tasks(table, encode(chain(20)), threads=2, window=window, engine=SHARED) is None
    assert args[0] == 40


def meet_in_pairs(args, first_unit, num_units):
    """Wait for the task's other unit, at most 20 s."""
    number, begin = atomic_add(args, 1), monotonic_ns()
    while atomic_load(args) < number + 2 - (number & 1):
        give_way()
        if monotonic_ns() - begin > 20 * 10**9:
            return 1
    return 0


def fail_third(args, first_unit, num_units):
    atomic_add(args, 1)
    return 77 if first_unit == 3 else 0


@engines
@pytest.mark.parametrize("window", [1, 8, 64])
def test_after_an_error_nothing_starts(engine, window):
    args = np.zeros(1, np.int64)
    records = np.zeros((50, 4), np.int64)
    table = table_of(fail_third, args, 50)
    assert run_tasks(table, encode(chain(50)), threads=2, window=window, records=records, engine=engine) == (3, 77)
    assert args[0] == 4
    assert records[:4, 0].tolist() == [0, 1, 2, 3]
    assert (records[4:] == -1).all()


def fail_both(args, first_unit, num_units):
    """Two that fail at once, the older one later."""
    atomic_add(args, 1)
    while atomic_load(args) < 2:
        give_way()
    if first_unit == 0:
        while atomic_load(args) < 3:
            give_way()
    else:
        atomic_add(args, 1)
    return 10 + first_unit


@engines
def test_of_several_errors_the_first_in_program_order_is_told(engine):
    args = np.zeros(1, np.int64)
    assert run_tasks(table_of(fail_both, args, 2), encode(independent(2)), threads=2, engine=engine) == (0, 10)


def hold(args, first_unit, num_units):
    """Do not end, for 20 s, until the second word is set. The first one counts who is held."""
    begin = monotonic_ns()
    atomic_add(args, 1)
    while atomic_load(args + 8) == 0 and monotonic_ns() - begin < 20 * 10**9:
        give_way()
    atomic_add(args, -1)
    return 0


def let_go(args):
    """Wait until nobody is held."""
    args[1] = 1
    deadline = time.monotonic() + 20
    while args[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@engines
@pytest.mark.parametrize(
    ("threads", "count", "names"),
    [(1, 1, r"task 0 \(t0\)"), (2, 2, r"task 0 \(t0\), task 1 \(t1\)"), (3, 1, r"task 0 \(t0\)")],
)
def test_a_task_that_never_ends_is_named_whoever_runs_it(monkeypatch, engine, threads, count, names):
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", "0.3")
    args = np.zeros(2, np.int64)
    table = table_of(hold, args, count, names=tuple(f"t{i}" for i in range(count)))
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=f"no task ended for 300 ms; waited for {names}$"):
        run_tasks(table, encode(independent(count)), threads=threads, engine=engine)
    assert 0.3 < time.monotonic() - begin < 10
    assert args[0] == count
    # Threads that are held are nobody's loss.
    free = np.zeros(1, np.int64)
    assert run_tasks(table_of(meet, free, 2), encode(independent(2)), threads=2, engine=engine) is None
    let_go(args)


@engines
def test_tasks_that_never_become_ready_are_not_named(monkeypatch, engine):
    """Those are that they wait for."""
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", "0.3")
    args = np.zeros(2, np.int64)
    with pytest.raises(RuntimeError, match="no task ended for 300 ms; waited for task 0$"):
        run_tasks(table_of(hold, args, 5), encode(chain(5)), threads=2, engine=engine)
    let_go(args)
    time.sleep(0.05)
    assert args[0] == 0  # nobody has begun the next


@engines
def test_a_long_chain_is_no_task_that_never_ends(monkeypatch, engine):
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", "0.5")
    args = np.zeros(1, np.int64)
    assert run_tasks(table_of(linger, args, 60), encode(chain(60)), threads=1, engine=engine) is None
    assert args[0] == 60


def linger(args, first_unit, num_units):
    """Take 20 ms."""
    begin = monotonic_ns()
    while monotonic_ns() - begin < 20 * 10**6:
        give_way()
    atomic_add(args, 1)
    return 0


def after(seconds, function):
    """Call a function on another thread."""
    timer = threading.Timer(seconds, function)
    timer.start()
    return timer


@engines
def test_an_interrupt_stops_the_run_when_the_running_tasks_have_ended(engine):
    args = np.zeros(1, np.int64)
    run_tasks(table_of(linger, args, 1), encode(chain(1)), engine=engine)  # compiles
    after(0.2, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run_tasks(table_of(linger, args, 200), encode(chain(200)), threads=2, engine=engine)
    ran = int(args[0])
    assert 1 < ran < 200
    time.sleep(0.1)
    assert args[0] == ran


@engines
def test_a_second_interrupt_leaves_a_task_behind(engine):
    args = np.zeros(2, np.int64)
    run_tasks(table_of(linger, np.zeros(1, np.int64), 1), encode(chain(1)), engine=engine)  # compiles
    for seconds in (0.2, 0.6):
        after(seconds, lambda: signal.raise_signal(signal.SIGINT))
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_tasks(table_of(hold, args, 1), encode(chain(1)), engine=engine)
    assert 0.5 < time.monotonic() - begin < 10
    assert args[0] == 1
    let_go(args)


def set_cell(args, first_unit, num_units):
    """The first sets the predicate of the others to what is in the second word."""
    if first_unit == 0:
        store_i64(args, load_i64(args + 8))
    else:
        atomic_add(args + 16, 1)
    return load_i32(args) * 0


@engines
@pytest.mark.parametrize("value", [0, 1, -1])
def test_a_predicate_is_read_when_the_task_would_issue(engine, value):
    args = np.array([1 - abs(value), value, 0], np.int64)
    predicate = Segment(0, 0, 4)
    stream = [
        Task("set", range(1), Footprint((), (predicate,))),
        *(Task("count", range(1, 2), Footprint((predicate,), (Segment(1, 0, 8),)), predicate) for _ in range(5)),
    ]
    table = table_of(set_cell, args, 6)
    table = dataclasses.replace(table, predicate=np.array([0] + [args.ctypes.data] * 5, np.int64))
    assert run_tasks(table, encode(stream), threads=2, engine=engine) is None
    assert args[2] == (5 if value else 0)


def test_no_tasks_are_no_work():
    empty = np.zeros(0, np.int64)
    assert run_tasks(TaskTable(empty, empty, empty, empty, empty), encode([])) is None


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"window": 0}, "window must be from 1 to 64, got 0"),
        ({"window": 65}, "window must be from 1 to 64, got 65"),
        ({"threads": -1}, "threads must not be negative, got -1"),
        ({"records": np.zeros((3, 4), np.int64)}, r"records: expected .* shape \(2, 4\), got int64 .* \(3, 4\)"),
        ({"records": np.zeros((2, 4))}, r"records: expected .* int64 .* got float64"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        run_tasks(table_of(meet, np.zeros(1, np.int64), 2), encode(independent(2)), **numbers)


def test_tables_that_do_not_fit_are_refused():
    table = table_of(meet, np.zeros(1, np.int64), 2)
    with pytest.raises(ValueError, match="encoded: expected the footprints of 2 tasks, got 3"):
        run_tasks(table, encode(independent(3)))
    with pytest.raises(ValueError, match=r"args: expected shape \(2,\) as that of code, got \(3,\)"):
        dataclasses.replace(table, args=np.zeros(3, np.int64))
    with pytest.raises(TypeError, match="args: expected a contiguous int64 array, got float64 array"):
        dataclasses.replace(table, args=np.zeros(2))
    with pytest.raises(ValueError, match="code: task 1 has none"):
        dataclasses.replace(table, code=np.array([8, 0]))
    with pytest.raises(ValueError, match="names: expected none or one for each of 2 tasks, got 1"):
        dataclasses.replace(table, names=("one",))
