"""Streams of tasks on a GPU: what the CPU computes, on arrays of Numba's and JAX's."""

from __future__ import annotations

import jax.numpy as jnp
import numba
import numpy as np
import pytest
from numba import cuda
from task_kernels import axpy, copy, count, fallible, fill

import brax_concurrent as bc


@numba.njit
def twice(x):
    return 2 * x


@bc.kernel(reads=("x",), writes=("y",))
def doubled(unit, x, y):
    y[unit] = twice(x[unit])


SCHEDULERS = ("serial", "sw", "hw", "graph")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_tasks_run_in_program_order_and_again(scheduler):
    x, y, stream = cuda.to_device(np.arange(1000.0)), cuda.to_device(np.zeros(1000)), bc.TaskStream()
    stream.add(axpy, units=1000, a=2.0, x=x, y=y)
    stream.add(copy, units=1000, x=y, y=x)
    stream.run(scheduler)
    stream.run(scheduler)
    assert np.array_equal(x.copy_to_host(), 6 * np.arange(1000.0))


@pytest.mark.parametrize("scheduler", ["sw", "hw"])
@pytest.mark.parametrize("dtype", ["bool", "int16", "uint64", "float32", "complex64", "complex128"])
def test_items_and_scalars_of_many_dtypes(dtype, scheduler):
    y, stream = cuda.to_device(np.zeros((3, 2), dtype)), bc.TaskStream()
    stream.add(fill, units=2, value=np.ones(1, dtype)[0], y=y[:, 1])
    stream.run(scheduler)
    assert np.array_equal(y.copy_to_host(), np.array([[0, 1], [0, 1], [0, 0]], dtype))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_predicates_are_read_when_the_turn_comes(scheduler):
    y, flag, stream = cuda.to_device(np.zeros(2)), cuda.to_device(np.ones(1, np.int32)), bc.TaskStream()
    stream.add(fill, units=1, value=1.0, y=y[:1], predicate=flag)
    stream.add(fill, units=1, value=np.int32(0), y=flag)
    stream.add(fill, units=1, value=2.0, y=y[1:], predicate=flag)
    stream.run(scheduler)
    assert np.array_equal(y.copy_to_host(), [1, 0])


def test_jax_arrays_are_read_and_never_written():
    x, y, stream = jnp.arange(300, dtype=jnp.float32), cuda.device_array(300, np.float32), bc.TaskStream()
    stream.add(copy, units=300, x=x + 1, y=y)
    stream.run()
    assert np.array_equal(y.copy_to_host(), np.arange(1, 301))
    with pytest.raises(ValueError, match="argument y: the kernel writes it, but the array is read-only .JAX arrays"):
        stream.add(copy, units=300, x=y, y=x)


@pytest.mark.parametrize("scheduler", ["sw", "hw"])
def test_scratch_memory_and_helpers(scheduler):
    stream, y = bc.TaskStream(), cuda.to_device(np.zeros(4))
    scratch = stream.empty((4, 2), np.float64, device="cuda")
    stream.add(count, units=4, first=1.0, y=scratch[:, 1])
    stream.add(doubled, units=4, x=scratch[:, 1], y=y)
    stream.run(scheduler)
    assert np.array_equal(y.copy_to_host(), [2, 4, 6, 8])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_kernel_that_raises_stops_what_waits_for_it(scheduler):
    x, y, z = (cuda.to_device(np.array(value)) for value in ([4.0, 4, -1, 4], [0.0] * 4, [0.0]))
    stream = bc.TaskStream()
    stream.add(fallible, units=4, x=x, y=y)
    stream.add(copy, units=1, x=y, y=z)
    stream.add(fill, units=1, value=1.0, y=z)
    for _ in range(2):
        with pytest.raises(
            bc.TaskError, match=r"task 0, kernel fallible on the arrays \(x, y\), unit 2: raised an exception"
        ):
            stream.run(scheduler)
        assert z.copy_to_host()[0] == 0
    x.copy_to_device(np.array([4.0, 4, 1, 4]))
    stream.run(scheduler)
    assert z.copy_to_host()[0] == 1


@bc.kernel(reads=("x", "y"), writes=("y",))
def blend(unit, a, x, y):
    for _ in range(200):  # long enough that launches overlap
        y[unit] = a * y[unit] + x[unit]


def random_stream(seed, tasks=150, vectors=12, size=700):
    """A stream of blends of random vectors on the GPU, of which a third has a predicate that others write."""
    rng = np.random.default_rng(seed)
    memory = cuda.to_device(rng.uniform(-1, 1, (vectors, size)))
    flags, stream = cuda.to_device(rng.integers(0, 2, 3).astype(np.int32)), bc.TaskStream()
    for _ in range(tasks):
        if rng.random() < 0.1:
            flag = int(rng.integers(3))
            stream.add(fill, units=1, value=np.int32(rng.integers(2)), y=flags[flag : flag + 1])
            continue
        source, target = rng.choice(vectors, 2, replace=False)
        flag = int(rng.integers(9))
        predicate = flags[flag : flag + 1] if flag < 3 else None
        units = int(rng.choice([0, 1, 300, size]))
        stream.add(
            blend, units=units, a=rng.uniform(-0.9, 0.9), x=memory[source], y=memory[target], predicate=predicate
        )
    return stream, memory, flags


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("scheduler", "numbers"),
    [
        ("sw", {}),
        ("sw", {"window": 1}),
        ("sw", {"window": 5, "streams": 3}),
        ("sw", {"window": 64, "streams": 16}),
        ("sw", {"streams": 1}),
        ("hw", {}),
        ("hw", {"window": 1}),
        ("hw", {"window": 5}),
        ("hw", {"window": 64}),
        ("graph", {}),
    ],
)
def test_any_scheduler_gives_the_bits_of_program_order(seed, scheduler, numbers):
    expected, found = random_stream(seed), random_stream(seed)
    for _ in range(3):
        expected[0].run("serial")
        found[0].run(scheduler, **numbers)
        for one, other in zip(expected[1:], found[1:], strict=True):
            assert one.copy_to_host().tobytes() == other.copy_to_host().tobytes()


@pytest.mark.parametrize("scheduler", ["graph", "hw"])
def test_what_was_made_of_a_stream_follows_tasks_that_are_added(scheduler):
    x, y, stream = cuda.to_device(np.arange(10.0)), cuda.to_device(np.zeros(10)), bc.TaskStream()
    stream.add(axpy, units=10, a=1.0, x=x, y=y)
    stream.run(scheduler)
    stream.add(axpy, units=10, a=10.0, x=x, y=y)
    stream.run(scheduler)
    assert np.array_equal(y.copy_to_host(), 12 * np.arange(10.0))
