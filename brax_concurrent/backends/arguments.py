"""What a task's kernel is called with: arrays and scalars, as numbers that compiled code takes.

Both backends get the same description. How it is laid out for a call differs: see task_cpu.py and task_cuda.py.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numba
import numpy as np
from numba import types

Layout = Literal["C", "F", "A"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class ArgumentType:
    """What compiled code depends on: equal types share code.

    dtype     NumPy name
    ndim      dimensions of an array; None: a scalar
    layout    C: row-major and contiguous, F: column-major and contiguous, A: any strides
    readonly  a store into the array is an error of the compiler
    """

    dtype: str
    ndim: int | None = None
    layout: Layout = "C"
    readonly: bool = False

    def numba_type(self) -> Any:
        """The same as a type of Numba's."""
        item = numba.from_dtype(np.dtype(self.dtype))
        if self.ndim is None:
            return item
        return types.Array(item, self.ndim, self.layout, readonly=self.readonly)


@functools.cache
def _measures(dtype: str) -> tuple[int, int]:
    """Bytes and alignment of an item."""
    return np.dtype(dtype).itemsize, np.dtype(dtype).alignment


@dataclass(frozen=True, eq=False)
class ArrayArgument:
    """An array in somebody's memory.

    address, shape, strides  of its first element; in elements; in bytes, which may be negative or 0
    dtype                    NumPy name
    writable                 whether its memory may be written
    device                   where the memory is
    owner                    keeps it alive
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    writable: bool
    device: Device
    owner: object = None

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _measures(self.dtype)[0]

    @property
    def alignment(self) -> int:
        """What its address and strides are multiples of in compiled code."""
        return _measures(self.dtype)[1]

    @property
    def bounds(self) -> tuple[int, int]:
        """The first byte of all its elements, and that after the last; equal if there are none."""
        if self.size == 0:
            return self.address, self.address
        spans = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        first = self.address + sum(min(span, 0) for span in spans)
        return first, self.address + sum(max(span, 0) for span in spans) + self.itemsize

    @property
    def layout(self) -> Layout:
        """See `ArgumentType`; C where both C and F fit."""
        if self._contiguous(range(len(self.shape) - 1, -1, -1)):
            return "C"
        return "F" if self._contiguous(range(len(self.shape))) else "A"

    def _contiguous(self, fastest_first: range) -> bool:
        step = self.itemsize
        for i in fastest_first:
            if self.strides[i] != step and self.shape[i] != 1 and self.size != 0:
                return False
            step *= self.shape[i]
        return True

    def type(self, readonly: bool) -> ArgumentType:
        """Its type, for a kernel that does or does not store into it."""
        return ArgumentType(self.dtype, len(self.shape), self.layout, readonly)


@dataclass(frozen=True, eq=False)
class ScalarArgument:
    """A number, which every unit gets."""

    value: np.generic

    def type(self, readonly: bool = True) -> ArgumentType:
        """Its type."""
        return ArgumentType(self.value.dtype.name)


Argument = ArrayArgument | ScalarArgument


class KernelError(RuntimeError):
    """A kernel does not compile. The message is Numba's."""
