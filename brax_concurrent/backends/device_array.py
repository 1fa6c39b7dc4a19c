"""Arrays in the memory of a GPU that are cheap to cut and to pass on: nothing here computes, or waits for anything.

A stream of tasks names an array for each argument of each task. Slices of Numba's own arrays take as long as recording
a task; these are an address, a shape and strides.
"""

from __future__ import annotations

import math
from ctypes import c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from brax_concurrent.backends import cuda_driver


@dataclass(frozen=True, eq=False)
class DeviceArray:
    """A part of an array on a GPU, for whoever takes `__cuda_array_interface__`.

    address  of its first element
    shape, strides    elements; bytes from one to the next
    dtype    of its elements
    owner    keeps the memory
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    owner: Any

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
        }

    def __getitem__(self, key: slice | tuple[slice, ...]) -> DeviceArray:
        """The elements of slices without steps, of the first dimensions.

        Raises:
          TypeError: something else is asked for.
        """
        slices = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(each, slice) and each.step is None for each in slices) or len(slices) > len(self.shape):
            raise TypeError(f"expected at most {len(self.shape)} slices without steps, got {key!r}")
        address, shape = self.address, list(self.shape)
        for axis, each in enumerate(slices):
            start, stop, _ = each.indices(self.shape[axis])
            address += start * self.strides[axis]
            shape[axis] = max(stop - start, 0)
        return DeviceArray(address, tuple(shape), self.strides, self.dtype, self.owner)

    def reshape(self, shape: int | tuple[int, ...]) -> DeviceArray:
        """The same elements in another shape.

        Raises:
          ValueError: they are not one behind the other, or the shape has not as many.
        """
        new = (shape,) if isinstance(shape, int) else tuple(shape)
        if self.strides != _strides(self.shape, self.dtype) or math.prod(new) != self.size:
            raise ValueError(f"cannot make {new} of an array of {self.shape} with strides {self.strides}")
        return DeviceArray(self.address, new, _strides(new, self.dtype), self.dtype, self.owner)

    def copy_to_device(self, values: np.ndarray) -> None:
        """Write all elements. It waits until `values` may be changed again.

        Raises:
          ValueError: shapes or dtypes differ, or the elements are not one behind the other.
          CudaError: the driver refuses.
        """
        self._check_whole()
        if values.shape != self.shape or values.dtype != self.dtype:
            raise ValueError(f"expected {self.dtype}{self.shape}, got {values.dtype}{values.shape}")
        source = np.ascontiguousarray(values)
        size = c_size_t(source.nbytes)
        with self._context():
            cuda_driver.call("cuMemcpyHtoD_v2", c_uint64(self.address), c_void_p(source.ctypes.data), size)

    def copy_to_host(self) -> np.ndarray:
        """All elements, when what was launched on the default stream has finished.

        Raises:
          ValueError: the elements are not one behind the other.
          CudaError: the driver refuses.
        """
        self._check_whole()
        found = np.empty(self.shape, self.dtype)
        size = c_size_t(found.nbytes)
        with self._context():
            cuda_driver.call("cuMemcpyDtoH_v2", c_void_p(found.ctypes.data), c_uint64(self.address), size)
        return found

    def _context(self) -> Any:
        """Makes the memory's GPU current in a `with` block."""
        from brax_concurrent.backends import task_cuda  # needs numba-cuda

        return cuda_driver.primary_context(task_cuda.device_of((self.address,)))

    def _check_whole(self) -> None:
        if self.strides != _strides(self.shape, self.dtype):
            raise ValueError(f"expected elements one behind the other, got {self.shape} with strides {self.strides}")


def empty(shape: tuple[int, ...], dtype: Any) -> DeviceArray:
    """A new array on the current GPU, or the first one, not initialised.

    Raises:
      CudaError: there is no GPU, or no memory.
    """
    from brax_concurrent.backends import task_cuda  # needs numba-cuda

    if cuda_driver.device_count() == 0:
        raise cuda_driver.CudaError("device: expected cpu, for there is no GPU, got 'cuda'")
    kind = np.dtype(dtype)
    with cuda_driver.primary_context():
        block = task_cuda.DeviceBlock(max(math.prod(shape) * kind.itemsize, 1))
    return DeviceArray(block.address, tuple(shape), _strides(shape, kind), kind, block)


def _strides(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    strides, step = [], dtype.itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
