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


def test_tasks_run_in_program_order_and_again():
    x, y, stream = cuda.to_device(np.arange(1000.0)), cuda.to_device(np.zeros(1000)), bc.TaskStream()
    stream.add(axpy, units=1000, a=2.0, x=x, y=y)
    stream.add(copy, units=1000, x=y, y=x)
    stream.run()
    stream.run()
    assert np.array_equal(x.copy_to_host(), 6 * np.arange(1000.0))


@pytest.mark.parametrize("dtype", ["bool", "int16", "uint64", "float32", "complex64", "complex128"])
def test_items_and_scalars_of_many_dtypes(dtype):
    y, stream = cuda.to_device(np.zeros((3, 2), dtype)), bc.TaskStream()
    stream.add(fill, units=2, value=np.ones(1, dtype)[0], y=y[:, 1])
    stream.run()
    assert np.array_equal(y.copy_to_host(), np.array([[0, 1], [0, 1], [0, 0]], dtype))


def test_predicates_are_read_when_the_turn_comes():
    y, flag, stream = cuda.to_device(np.zeros(2)), cuda.to_device(np.ones(1, np.int32)), bc.TaskStream()
    stream.add(fill, units=1, value=1.0, y=y[:1], predicate=flag)
    stream.add(fill, units=1, value=np.int32(0), y=flag)
    stream.add(fill, units=1, value=2.0, y=y[1:], predicate=flag)
    stream.run()
    assert np.array_equal(y.copy_to_host(), [1, 0])


def test_jax_arrays_are_read_and_never_written():
    x, y, stream = jnp.arange(300, dtype=jnp.float32), cuda.device_array(300, np.float32), bc.TaskStream()
    stream.add(copy, units=300, x=x + 1, y=y)
    stream.run()
    assert np.array_equal(y.copy_to_host(), np.arange(1, 301))
    with pytest.raises(ValueError, match="argument y: the kernel writes it, but the array is read-only .JAX arrays"):
        stream.add(copy, units=300, x=y, y=x)


def test_scratch_memory_and_helpers():
    stream, y = bc.TaskStream(), cuda.to_device(np.zeros(4))
    scratch = stream.empty((4, 2), np.float64, device="cuda")
    stream.add(count, units=4, first=1.0, y=scratch[:, 1])
    stream.add(doubled, units=4, x=scratch[:, 1], y=y)
    stream.run()
    assert np.array_equal(y.copy_to_host(), [2, 4, 6, 8])


def test_a_kernel_that_raises_stops_the_stream():
    x, y, z = (cuda.to_device(np.array(value)) for value in ([4.0, 4, -1, 4], [0.0] * 4, [0.0]))
    stream = bc.TaskStream()
    stream.add(fallible, units=4, x=x, y=y)
    stream.add(fill, units=1, value=1.0, y=z)
    for _ in range(2):
        with pytest.raises(
            bc.TaskError, match=r"task 0, kernel fallible on the arrays \(x, y\), unit 2: raised an exception"
        ):
            stream.run()
        assert z.copy_to_host()[0] == 0
