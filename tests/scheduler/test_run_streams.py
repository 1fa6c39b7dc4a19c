"""Several independent streams at once, on the CPU; on a GPU that is none see test_cuda_list_hw.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_streams import must_wait, unhurried
from random_streams import streams as random_streams
from task_kernels import anything, axpy, copy, count, fallible, fill, on_gpu

import brax_concurrent as bc
from brax_concurrent.backends.arguments import KernelError
from brax_concurrent.scheduler import run_streams
from brax_concurrent.scheduler.window import encode


def image(seed, weights, size=20):
    """A stream that reads what all share and writes to memory of its own."""
    x, y, stream = np.arange(size) + 10.0 * seed, np.zeros(size), bc.TaskStream()
    stream.add(axpy, units=size, a=2.0, x=weights, y=y)
    stream.add(axpy, units=size, a=1.0, x=x, y=y)
    if seed % 2:
        stream.add(copy, units=size, x=y, y=x)
    return stream, x, y


@pytest.mark.parametrize("scheduler", ["serial", "sw", "hw"])
def test_streams_give_what_each_gives_alone(scheduler):
    weights = np.linspace(-1, 1, 20)
    images, expected = [image(seed, weights) for seed in range(5)], [image(seed, weights) for seed in range(5)]
    for _ in range(2):
        bc.run_streams([stream for stream, _, _ in images], scheduler, window=7, threads=2)
        for stream, _, _ in expected:
            stream.run("serial")
        for one, other in zip(images, expected, strict=True):
            assert np.array_equal(one[1], other[1])
            assert np.array_equal(one[2], other[2])


def test_tasks_take_turns():
    streams = [bc.TaskStream() for _ in range(3)]
    for tasks, stream in zip((3, 1, 2), streams, strict=True):
        for _ in range(tasks):
            stream.add(fill, units=1, value=1.0, y=np.zeros(1))
    joined = run_streams._join(tuple(streams), interleaved=True)
    assert joined.places == ((0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2))
    assert [task is streams[s].tasks[t] for task, (s, t) in zip(joined.whole.tasks, joined.places, strict=True)] == [
        True
    ] * 6
    assert run_streams._join(tuple(streams), interleaved=True) is joined
    apart = run_streams._join(tuple(streams), interleaved=False)
    assert apart.places == ((0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1))


def test_one_stream_is_as_its_run_and_none_is_nothing():
    assert bc.run_streams([]) is None
    stream, x, y = image(1, np.ones(20))
    bc.run_streams([stream])
    assert np.array_equal(y, 2 + np.arange(20) + 10.0)
    assert np.array_equal(x, y)
    bc.run_streams([bc.TaskStream(), bc.TaskStream()])


def test_streams_may_grow():
    y, stream, other = np.zeros(3), bc.TaskStream(), bc.TaskStream()
    for _ in range(2):
        stream.add(axpy, units=3, a=1.0, x=np.ones(3), y=y)
        bc.run_streams([stream, other])
    assert np.array_equal(y, [3, 3, 3])
    other.add(fill, units=1, value=9.0, y=y)
    with pytest.raises(ValueError, match="task 0 of stream 0, kernel axpy, and task 0 of stream 1, kernel fill, touch"):
        bc.run_streams([stream, other])


def writes(part):
    return lambda stream, x: stream.add(fill, units=1, value=1.0, y=x[part])


def writes_nothing(stream, x):
    stream.add(fill, units=0, value=1.0, y=x)


def reads(stream, x):
    stream.add(copy, units=1, x=x, y=np.zeros(9))


def may_touch_all(stream, x):
    stream.add(anything, units=1, x=np.ones(1), y=np.ones(1))


@pytest.mark.parametrize(
    ("first", "second", "meet"),
    [
        (writes(slice(0, 2)), writes(slice(1, 9)), True),
        (writes(slice(0, 2)), writes(slice(2, 9)), False),
        (reads, writes(slice(3, 9)), True),
        (reads, reads, False),
        (may_touch_all, writes(slice(0, 1)), True),
        (may_touch_all, may_touch_all, True),
        (may_touch_all, lambda stream, x: None, False),
        (writes_nothing, writes(slice(0, 9)), False),
    ],
)
def test_what_meets(first, second, meet):
    x, streams = np.zeros(9), [bc.TaskStream(), bc.TaskStream(), bc.TaskStream()]
    first(streams[0], x)
    second(streams[2], x)
    if not meet:
        bc.run_streams(streams)
        return
    with pytest.raises(
        ValueError, match="streams: expected none to write .* task 0 of stream 0, .* task 0 of stream 2, "
    ):
        bc.run_streams(streams)


@unhurried
@given(random_streams(8), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_segments_that_meet_are_found(tasks, owners):
    """Against comparing all pairs."""
    known = [task for task in tasks if not task.footprint.everything]
    encoded, own = encode(known), np.array(owners[: len(known)], np.int64)
    rows = np.repeat(own, np.diff(encoded.offsets))
    order = np.lexsort((encoded.rows[:, 1], encoded.rows[:, 0]))
    one, other = run_streams.first_meeting(encoded.rows[order], rows[order])
    pairs = [(a, b) for a in range(len(known)) for b in range(a) if own[a] != own[b]]
    assert (one >= 0) == any(must_wait(known[b], known[a]) for a, b in pairs)
    if one >= 0:
        (a, b), part = (encoded.rows[order[each]] for each in (one, other)), rows[order]
        assert part[one] != part[other]
        assert a[0] == b[0]
        assert a[1] < b[2]
        assert b[1] < a[2]
        assert a[3] | b[3]


def test_an_exception_names_the_stream():
    good, bad = bc.TaskStream(), bc.TaskStream()
    good.add(count, units=2, first=1.0, y=np.zeros(2))
    y = np.zeros(1)
    bad.add(fill, units=1, value=1.0, y=y)
    bad.add(fallible, units=1, x=np.array([-1.0]), y=y)
    with pytest.raises(bc.TaskError, match="^stream 1, task 1, kernel fallible on the arrays") as raised:
        bc.run_streams([good, bad], "serial")
    error = raised.value
    assert (error.stream, error.task, error.kernel, error.unit) == (1, 1, "fallible", 0)
    assert isinstance(error.__cause__, ValueError)


def test_a_kernel_that_does_not_compile_names_the_stream():
    @bc.kernel(writes=("y",))
    def broken(unit, y):
        y[unit] = missing(unit)  # noqa: F821

    good, bad = bc.TaskStream(), bc.TaskStream()
    good.add(fill, units=1, value=1.0, y=np.zeros(1))
    bad.add(broken, units=1, y=np.zeros(1))
    with pytest.raises(KernelError, match="stream 1, task 0, kernel broken: "):
        bc.run_streams([good, bad])


def test_misuse():
    stream = bc.TaskStream()
    with pytest.raises(TypeError, match="streams: expected streams of tasks, got int at 1"):
        bc.run_streams([stream, 3])
    with pytest.raises(ValueError, match="windows must not be negative, got -1"):
        bc.run_streams([stream], windows=-1)
    with pytest.raises(TypeError, match="windows: expected a whole number, got 1.5"):
        bc.run_streams([stream], windows=1.5)
    with pytest.raises(ValueError, match="streams: expected different streams, got one twice"):
        bc.run_streams([stream, stream])
    with pytest.raises(
        ValueError, match="scheduler: expected one of serial, sw, hw for arrays on the cpu, got 'graph'"
    ):
        bc.run_streams([stream], "graph")
    other = bc.TaskStream()
    stream.add(fill, units=1, value=1.0, y=np.zeros(1))
    other.add(fill, units=1, value=1.0, y=on_gpu(np.zeros(1)))
    with pytest.raises(ValueError, match=r"streams: expected all on one device, got some on each of \['cpu', 'cuda'\]"):
        bc.run_streams([stream, other])
    unwritten = bc.TaskStream()
    unwritten.add(copy, units=1, x=unwritten.empty(1), y=np.zeros(1))
    with pytest.raises(
        ValueError, match="stream 0, task 0, kernel copy: argument x: reads memory of TaskStream.empty that"
    ):
        bc.run_streams([unwritten])


def test_streams_may_come_from_a_generator_and_one_alone_is_no_sequence():
    @bc.kernel(reads=("y",), writes=("y",))
    def count(unit, y):
        y[unit] += 1

    arrays, streams = [np.zeros(2) for _ in range(3)], [bc.TaskStream() for _ in range(3)]
    for stream, y in zip(streams, arrays, strict=True):
        stream.add(count, units=2, y=y)
    bc.run_streams((stream for stream in streams), "serial")
    assert [y.tolist() for y in arrays] == [[1.0, 1.0]] * 3
    for wrong in (streams[0], None):
        with pytest.raises(TypeError, match="streams: expected a sequence of streams, got"):
            bc.run_streams(wrong)
