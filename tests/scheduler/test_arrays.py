"""Anybody's arrays as arguments: what is shared, and which bytes they cover."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_kernels import Exported, Interface, bytes_of, on_gpu

from brax_concurrent.scheduler.arrays import DTYPES, MAX_SEGMENTS, as_argument, segments

OLD_DLPACK = np.lib.NumpyVersion(np.__version__) < "2.1.0"  # takes everything for read-only
BASE = np.zeros((6, 8, 4), np.float32)


def covered(array):
    return {address for each in segments(as_argument(array, "x")) for address in range(each.start, each.stop)}


@pytest.mark.parametrize(
    ("view", "pieces"),
    [
        (BASE, 1),
        (BASE[2], 1),
        (BASE[:, :, 1:3], 48),
        (BASE[::2], 3),
        (BASE[1:3, 2:5], 2),
        (BASE[::-1], 1),
        (BASE[::-1, ::-2, ::-1], 24),
        (BASE.T, 1),
        (BASE[3, 4, 2:3], 1),
        (BASE[0, 0, 0], 1),
        (BASE[:0], 0),
        (np.broadcast_to(BASE[0], (9, 8, 4)), 1),
        (np.lib.stride_tricks.as_strided(BASE, (5, 4), (8, 4)), 1),  # rows overlap
        (np.lib.stride_tricks.as_strided(BASE, (2, 3, 2), (20, 16, 4)), 4),  # rows interleave
    ],
)
def test_segments_are_the_bytes_of_the_view(view, pieces):
    view = np.asarray(view)
    assert covered(view) == bytes_of(view)
    assert len(segments(as_argument(view, "x"))) == pieces


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8), st.sampled_from([-3, -1, 1, 2])), min_size=3, max_size=3),
    st.permutations(range(3)),
)
def test_segments_are_the_bytes_of_any_slice(cuts, order):
    view = BASE[tuple(slice(a, a + n) if step > 0 else slice(a + n, a, step) for a, n, step in cuts)].transpose(order)
    assert covered(view) == bytes_of(view)


def test_beyond_the_cap_all_bytes_between_count():
    columns = np.zeros((MAX_SEGMENTS + 1, 3))
    assert covered(columns[:-1, :1]) == bytes_of(columns[:-1, :1])
    (whole,) = segments(as_argument(columns[:, :1], "x"))
    assert (whole.start, whole.stop) == (columns.ctypes.data, columns[-1, 1:].ctypes.data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_taken(dtype):
    argument = as_argument(np.zeros(3, dtype), "x")
    assert (argument.dtype, argument.shape, argument.writable) == (dtype, (3,), True)


def test_memory_is_shared_whatever_the_library():
    array = np.arange(6.0).reshape(2, 3)[:, ::2]
    described = dict(array.__array_interface__)
    host = {"numpy": array, "dlpack": Exported(array), "interface": Interface("__array_interface__", described)}
    jax = jnp.arange(4)
    for name, each in host.items():
        argument = as_argument(each, "x")
        assert (argument.address, argument.shape, argument.strides) == (array.ctypes.data, (2, 2), (24, 16))
        assert (argument.device, argument.layout) == ("cpu", "A")
        assert argument.writable or (name == "dlpack" and OLD_DLPACK)
    argument = as_argument(jax, "x")
    assert argument.address == jax.unsafe_buffer_pointer()
    assert not argument.writable


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_an_array_on_a_gpu_is_described_by_its_interface(shape):
    array = np.zeros(shape, np.float32)
    for strides in (True, False):
        argument = as_argument(on_gpu(array, strides=strides), "x")
        assert (argument.address, argument.shape, argument.strides) == (array.ctypes.data, shape, array.strides)
        assert (argument.device, argument.dtype, argument.writable) == ("cuda", "float32", True)
    assert not as_argument(on_gpu(array, readonly=True), "x").writable


def test_a_tensor_of_torch_may_be_written():
    class Tensor(Exported):
        def numpy(self):
            return self.array

    Tensor.__module__ = "torch"
    array = np.zeros(2)
    argument = as_argument(Tensor(array), "x")
    assert (argument.address, argument.writable) == (array.ctypes.data, True)


def test_an_array_that_is_not_on_a_gpu_may_raise_what_it_likes():
    class Torch(Exported):
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("not on a GPU")

    assert as_argument(Torch(np.zeros(2)), "x").device == "cpu"


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, "bool"),
        (2, "int64"),
        (2.5, "float64"),
        (1j, "complex128"),
        (np.float32(1), "float32"),
        (np.uint8(3), "uint8"),
    ],
)
def test_a_number_keeps_its_type(value, dtype):
    argument = as_argument(value, "x")
    assert argument.value == value
    assert argument.value.dtype.name == dtype


@pytest.mark.parametrize(
    ("array", "layout"),
    [(BASE, "C"), (BASE.T, "F"), (BASE[0, 0], "C"), (BASE[:, :, 0], "A"), (BASE[:1], "C"), (BASE[::-1], "A")],
)
def test_layout(array, layout):
    assert as_argument(array, "x").layout == layout
