"""Streams of tasks on plain arrays: what is recorded, and what comes out."""

from __future__ import annotations

import re
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from task_kernels import Exported, anything, axpy, copy, count, fallible, fill, on_gpu, shifted, talkative

import brax_concurrent as bc
from brax_concurrent.scheduler import graph
from brax_concurrent.scheduler.footprint import Hazard, hazards
from brax_concurrent.scheduler.graph import dependencies
from brax_concurrent.scheduler.schedule import schedulers_on


def span(array):
    """Of a contiguous array, as a segment's numbers."""
    start = array.__array_interface__["data"][0]
    return 0, start, start + array.nbytes


def test_tasks_run_in_program_order_and_again():
    x, y, stream = np.arange(5.0), np.zeros(5), bc.TaskStream()
    assert stream.add(axpy, units=5, a=2.0, x=x, y=y) == 0
    assert stream.add(copy, units=5, x=y, y=x) == 1
    stream.run()
    assert np.array_equal(y, 2 * np.arange(5.0))
    assert np.array_equal(x, y)
    stream.run()
    assert np.array_equal(x, 6 * np.arange(5.0))
    stream.add(fill, units=2, value=7.0, y=y[3:])
    stream.run("serial")
    assert np.array_equal(y, [0, 18, 36, 7, 7])
    assert len(stream) == 3


def test_footprints_are_the_arrays_and_tell_views_apart():
    base, x = np.zeros(8), np.zeros(4)
    stream = bc.TaskStream()
    stream.add(copy, units=4, x=x, y=base[:4])
    stream.add(copy, units=4, x=x, y=base[4:])
    stream.add(axpy, units=2, a=1.0, x=base[3:5], y=x[:2])
    first, second, third = stream.tasks
    assert [(s.buffer, s.start, s.stop) for s in first.footprint.reads] == [span(x)]
    assert [(s.buffer, s.start, s.stop) for s in first.footprint.writes] == [span(base[:4])]
    assert (first.kernel, first.units) == ("copy", range(4))
    assert hazards(first.footprint, second.footprint) is Hazard.NONE
    assert hazards(first.footprint, third.footprint) == Hazard.RAW | Hazard.WAR
    assert dependencies(stream.tasks) == [set(), set(), {0, 1}]
    assert re.findall(r"t\d -> t\d", stream.to_dot()) == ["t0 -> t2", "t1 -> t2"]


def test_an_undeclared_kernel_may_touch_everything():
    x, y, other, stream = np.ones(2), np.zeros(2), np.zeros(2), bc.TaskStream()
    stream.add(fill, units=2, value=3.0, y=other)
    stream.add(anything, units=2, x=x, y=y)
    stream.add(fill, units=2, value=4.0, y=other)
    assert stream.tasks[1].footprint.everything
    assert dependencies(stream.tasks) == [set(), {0}, {0, 1}]
    stream.run()
    assert np.array_equal(y, [-1, -1])


def test_strided_and_reversed_views():
    base, x = np.zeros((4, 3)), np.arange(4.0)
    stream = bc.TaskStream()
    stream.add(copy, units=4, x=x[::-1], y=base[:, 1])
    stream.add(copy, units=2, x=base[::2, 1], y=base[1, ::2])
    stream.run()
    assert np.array_equal(base, [[0, 3, 0], [3, 2, 1], [0, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize("dtype", ["bool", "int16", "uint64", "float32", "complex64", "complex128"])
def test_items_and_scalars_of_many_dtypes(dtype):
    y, value = np.zeros(3, dtype), np.ones(1, dtype)[0]
    stream = bc.TaskStream()
    stream.add(fill, units=2, value=value, y=y)
    stream.run()
    assert np.array_equal(y, np.array([1, 1, 0], dtype))


def test_a_false_predicate_skips_its_task_when_its_turn_comes():
    y, flags, stream = np.zeros(2), np.array([0, 1], np.int32), bc.TaskStream()
    stream.add(fill, units=1, value=1.0, y=y[:1], predicate=flags[:1])
    stream.add(fill, units=1, value=2.0, y=y[1:], predicate=flags[1:])
    assert [task.predicate.start for task in stream.tasks] == [flags.ctypes.data, flags.ctypes.data + 4]
    assert stream.tasks[0].predicate in stream.tasks[0].footprint.reads
    stream.run()
    assert np.array_equal(y, [0, 2])
    flags[:] = 1, 0
    y[:] = 0
    stream.add(fill, units=1, value=np.int32(0), y=flags[:1])
    stream.add(fill, units=1, value=3.0, y=y[:1], predicate=flags[:1])
    assert 2 in dependencies(stream.tasks)[3]
    stream.run()
    assert np.array_equal(y, [1, 0])


def test_scratch_memory_is_written_before_it_is_read():
    stream, y = bc.TaskStream(), np.zeros((3, 2))
    scratch = stream.empty((3, 4), np.float64)
    for row in range(3):
        stream.add(count, units=2, first=10.0 * row, y=scratch[row, ::2])
        stream.add(copy, units=2, x=scratch[row, ::2], y=y[row])
    stream.run()
    assert np.array_equal(y, [[0, 1], [10, 11], [20, 21]])
    stream.add(copy, units=2, x=scratch[1, ::3], y=y[0])
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"task 6, kernel copy: argument x: reads memory of TaskStream.empty that no"
        ):
            stream.run()


def test_jax_arrays_and_others_can_be_read():
    y, stream = np.zeros(3), bc.TaskStream()
    stream.add(copy, units=3, x=jnp.arange(3, dtype=jnp.float32), y=y)
    stream.run()
    assert np.array_equal(y, [0, 1, 2])
    stream.add(axpy, units=3, a=1.0, x=Exported(np.ones(3)), y=y)
    stream.run()
    assert np.array_equal(y, [1, 2, 3])


def test_arrays_live_as_long_as_the_stream():
    y, stream = np.zeros(1000), bc.TaskStream()
    stream.add(copy, units=1000, x=np.full(1000, 3.0), y=y)
    _ = [np.full(1000, 5.0) for _ in range(10)]
    stream.run()
    assert (y == 3).all()


def test_nothing_to_do():
    stream = bc.TaskStream()
    stream.run()
    assert (stream.tasks, stream.device) == ((), None)
    stream.add(fill, units=0, value=1.0, y=np.zeros(0))
    stream.run()
    assert stream.tasks[0].footprint.writes == ()


def test_a_stream_is_shown_in_a_line():
    stream = bc.TaskStream()
    assert repr(stream) == "TaskStream(tasks=0, device=None)"
    stream.add(axpy, units=2, a=1.0, x=np.ones(2), y=np.ones(2))
    assert repr(stream) == "TaskStream(tasks=1, device='cpu')"


def test_a_kernel_is_still_a_function():
    y = np.zeros(2)
    axpy(1, 2.0, np.ones(2), y)
    assert np.array_equal(y, [0, 2])
    assert (axpy.name, axpy.parameters) == ("axpy", ("a", "x", "y"))


def test_a_kernel_that_raises_stops_the_stream():
    x, y, z, stream = np.array([4.0, -1, 4]), np.zeros(3), np.zeros(1), bc.TaskStream()
    stream.add(fallible, units=3, x=np.ones(3), y=y)
    stream.add(fallible, units=3, x=x, y=y)
    stream.add(fill, units=1, value=1.0, y=z)
    with pytest.raises(
        bc.TaskError, match=r"task 1, kernel fallible on the arrays \(x, y\), unit 1: ValueError: neg"
    ) as got:
        stream.run()
    assert re.search(r"task_kernels.py:\d+\)$", str(got.value))
    assert (got.value.task, got.value.kernel, got.value.unit) == (1, "fallible", 1)
    assert isinstance(got.value.__cause__, ValueError)
    assert np.array_equal(y, [0.5, 1, 1])  # units before it have run, those after it not
    assert z[0] == 0
    x[1] = 0
    with pytest.raises(bc.TaskError, match="task 1.*unit 1: ZeroDivisionError: division by zero"):
        stream.run()
    x[1] = 1
    stream.run()
    assert z[0] == 1


def test_an_index_out_of_range_is_found_if_asked_for():
    stream = bc.TaskStream()
    stream.add(shifted, units=3, x=np.zeros(4), y=np.zeros(3))
    with pytest.raises(bc.TaskError, match="kernel shifted .*unit 2: IndexError: index is out of bounds"):
        stream.run()


def test_the_example_of_the_documentation():
    (block,) = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/streams.md").read_text(), re.DOTALL
    )
    scope = {}
    exec(compile(block, "<streams.md>", "exec"), scope)
    assert len(scope["stream"]) == 64
    assert (scope["c"] == 256).all()


def test_what_an_exception_says_at_run_time_is_left_out():
    stream = bc.TaskStream()
    stream.add(talkative, units=1, x=np.array([-1.0]), y=np.zeros(1))
    with pytest.raises(bc.TaskError, match=r"unit 0: ValueError: negative \(.*task_kernels.py:\d+\)$"):
        stream.run()


class PickyError(Exception):
    """An exception that cannot be made again."""

    def __init__(self, *arguments):
        raise KeyError(f"no exception of {arguments}")


@bc.kernel(writes=("y",))
def raises_picky(unit, y):
    if unit == 2:
        raise PickyError
    y[unit] = 1


@bc.kernel(writes=("y",))
def raises_again(unit, y):
    if unit == 2:
        raise
    y[unit] = 1


@pytest.mark.parametrize("scheduler", schedulers_on("cpu"))
@pytest.mark.parametrize(
    ("kernel", "said"), [(raises_picky, "PickyError"), (raises_again, "an exception raised again")]
)
def test_an_exception_that_cannot_be_made_is_told_in_words(scheduler, kernel, said):
    stream = bc.TaskStream()
    stream.add(kernel, units=4, y=np.zeros(4))
    with pytest.raises(
        bc.TaskError, match=rf"task 0, kernel {kernel.name} .*, unit 2: RuntimeError: {said} \(.*:\d+\)$"
    ):
        stream.run(scheduler)


@bc.kernel(writes=("y",))
def raises_often(unit, y):
    if unit % 7 == 5:
        raise ValueError("here")
    y[unit] = 1


@pytest.mark.parametrize("scheduler", schedulers_on("cpu"))
def test_of_several_units_that_fail_the_first_is_told(scheduler):
    for _ in range(20):
        stream, y = bc.TaskStream(), np.zeros(1000)
        stream.add(raises_often, units=1000, y=y)
        with pytest.raises(bc.TaskError, match=r"task 0, kernel raises_often .*, unit 5: ValueError: here"):
            stream.run(scheduler, threads=4)
        assert y[:5].all()


def random_stream(rng, memory, flags):
    """A stream on views of one memory, and the same calls as (kernel, units, arguments, predicate)."""
    stream, calls = bc.TaskStream(), []
    for _ in range(60):
        n = int(rng.integers(0, 6))
        first, second = (int(rng.integers(half, half + 15)) for half in (0, 25))
        step = int(rng.integers(1, 3))
        x, y = memory[first : first + step * n : step][:n], memory[second : second + n]
        if rng.random() < 0.5:
            x, y = y, x
        kernel, arguments = [
            (copy, {"x": x, "y": y}),
            (axpy, {"a": float(rng.integers(-2, 3)), "x": x, "y": y}),
            (fill, {"value": float(rng.integers(9)), "y": y}),
            (anything, {"x": x, "y": y}),
        ][rng.choice(4, p=[0.4, 0.4, 0.15, 0.05])]
        predicate = flags[int(rng.integers(4)) :][:1] if rng.random() < 0.3 else None
        if rng.random() < 0.1:
            kernel, arguments, n = fill, {"value": np.int32(rng.integers(2)), "y": flags[int(rng.integers(4)) :][:1]}, 1
            predicate = None
        stream.add(kernel, units=n, predicate=predicate, **arguments)
        calls.append((kernel, n, arguments, predicate))
    return stream, calls


def in_python(calls, order):
    """Carry calls out one after another, without compiling them."""
    for kernel, units, arguments, predicate in (calls[i] for i in order):
        if predicate is None or predicate[0]:
            for unit in range(units):
                kernel(unit, **arguments)


def latest_first(tasks):
    """As far from program order as the footprints allow: of the tasks that may run, always the newest."""
    older, waiting, order = dependencies(tasks), set(range(len(tasks))), []
    while waiting:
        order.append(max(i for i in waiting if not older[i] & waiting))
        waiting.remove(order[-1])
    return order


def start(seed):
    rng = np.random.default_rng(seed)
    memory, flags = rng.integers(-9, 10, 50).astype(np.float64), np.ones(4, np.int32)
    return memory, flags, memory.copy(), *random_stream(rng, memory, flags)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scheduler", schedulers_on("cpu"))
def test_the_results_are_those_of_plain_python_in_program_order(scheduler, seed):
    memory, flags, before, stream, calls = start(seed)
    in_python(calls, range(len(calls)))
    expected = memory.copy(), flags.copy()
    memory[:], flags[:] = before, 1
    stream.run(scheduler)
    assert np.array_equal(memory, expected[0])
    assert np.array_equal(flags, expected[1])
    assert not np.array_equal(memory, before)


@pytest.mark.parametrize("seed", range(5))
def test_any_order_that_the_footprints_allow_gives_the_same_bits(seed):
    memory, flags, before, stream, calls = start(seed)
    stream.run("serial")
    expected = memory.copy(), flags.copy()
    memory[:], flags[:] = before, 1
    order = latest_first(stream.tasks)
    assert order != sorted(order)
    in_python(calls, order)
    assert np.array_equal(memory, expected[0])
    assert np.array_equal(flags, expected[1])


@pytest.mark.parametrize("seed", range(5))
def test_the_graph_is_drawn_as_if_every_pair_were_compared(seed):
    stream = start(seed)[3]
    plain = graph.reduced(graph.dependencies(stream.tasks))
    assert stream.to_dot("name") == graph.to_dot(stream.tasks, plain, name="name")


def test_the_graph_of_a_long_stream_takes_seconds():
    rows, stream, rng = np.zeros((200, 4)), bc.TaskStream(), np.random.default_rng(0)
    for one, other in rng.integers(0, 200, (3000, 2)):
        stream.add(copy, units=4, x=rows[one], y=rows[other])
    assert bc.TaskStream().to_dot().startswith("digraph")  # compiles what the next line runs
    begin = time.monotonic()
    stream.to_dot()
    assert time.monotonic() - begin < 8  # it takes 0.4 s; comparing every pair in Python took 18 s


def test_a_stream_on_a_gpu_is_recorded_without_one():
    x, y, stream = np.zeros(4, np.float32), np.zeros(4, np.float32), bc.TaskStream()
    stream.add(copy, units=4, x=on_gpu(x), y=on_gpu(y))
    stream.add(copy, units=2, x=on_gpu(y[2:]), y=on_gpu(x[:2]))
    assert stream.device == "cuda"
    assert dependencies(stream.tasks) == [set(), {0}]
