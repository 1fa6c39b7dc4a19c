"""Arrays on a GPU, as far as they need none: where their elements are, as NumPy has it."""

import numpy as np
import pytest

from brax_concurrent.backends.device_array import DeviceArray, empty
from brax_concurrent.scheduler.arrays import as_argument


def like(array):
    """An array on a GPU whose elements are where NumPy's are."""
    address = array.__array_interface__["data"][0]
    return DeviceArray(address, array.shape, array.strides, array.dtype, array)


def assert_same(found, wanted):
    described = found.__cuda_array_interface__
    assert (described["shape"], described["strides"]) == (wanted.shape, wanted.strides)
    assert found.size == wanted.size
    if wanted.size:
        assert described["data"][0] == wanted.__array_interface__["data"][0]


@pytest.mark.parametrize(
    "key",
    [
        np.s_[2:5],
        np.s_[:, 1:3],
        np.s_[:, :, 4:6],
        np.s_[1:, -2:, :-1],
        np.s_[3:3],
        np.s_[:9, 5:2],
    ],
)
def test_slices_are_numpys(key):
    array = np.zeros((6, 4, 8), np.float32)
    assert_same(like(array)[key], array[key])
    assert_same(like(array)[1:][key], array[1:][key])


def test_shapes_are_numpys():
    array = np.zeros((6, 4, 8), np.float32)
    for shape in (192, (6, 32), (1, 1, 192), (2, 3, 2, 2, 8)):
        assert_same(like(array).reshape(shape), array.reshape(shape))
    with pytest.raises(ValueError, match="cannot make"):
        like(array).reshape(191)
    with pytest.raises(ValueError, match="cannot make"):
        like(array)[:, :, :4].reshape(96)


def test_streams_take_them():
    array = np.zeros((6, 8), np.float32)
    found = as_argument(like(array)[:, 2:4], "x")
    assert (found.device, found.shape, found.strides, found.dtype) == ("cuda", (6, 2), (32, 4), "float32")
    assert found.writable
    assert found.address == array.ctypes.data + 8


@pytest.mark.parametrize("key", [3, np.s_[::2], np.s_[..., 1], np.s_[:, :, :], None])
def test_other_indices_are_refused(key):
    with pytest.raises(TypeError, match="expected at most 2 slices"):
        like(np.zeros((3, 4)))[key]


def test_what_is_copied_must_fit():
    found = like(np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match=r"expected float32\(3, 4\), got float64\(3, 4\)"):
        found.copy_to_device(np.zeros((3, 4)))
    with pytest.raises(ValueError, match="one behind the other"):
        found[:, 1:].copy_to_host()


def test_without_a_gpu_there_is_none(monkeypatch):
    from brax_concurrent.backends import cuda_driver

    pytest.importorskip("cuda.bindings.nvvm", reason="numba-cuda with NVIDIA's compilers is not installed")
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 0)
    with pytest.raises(cuda_driver.CudaError, match="there is no GPU"):
        empty((3,), np.float32)
