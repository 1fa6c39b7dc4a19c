"""Small kernels that tests of task streams share: each is compiled once per process."""

import math

import numpy as np

import brax_concurrent as bc
from brax_concurrent.backends.arguments import ArgumentType


@bc.kernel(reads=("x", "y"), writes=("y",))
def axpy(unit, a, x, y):
    y[unit] += a * x[unit]


@bc.kernel(reads=("x",), writes=("y",))
def copy(unit, x, y):
    y[unit] = x[unit]


@bc.kernel(writes=("y",))
def fill(unit, value, y):
    y[unit] = value


@bc.kernel(writes=("y",))
def count(unit, first, y):
    y[unit] = first + unit


@bc.kernel
def anything(unit, x, y):
    y[unit] = -x[unit]


@bc.kernel(reads=("x",), writes=("y",))
def fallible(unit, x, y):
    if x[unit] < 0:
        raise ValueError("negative")
    y[unit] = math.sqrt(x[unit]) / x[unit]


@bc.kernel(reads=("x",), writes=("y",))
def talkative(unit, x, y):
    if x[unit] < 0:
        raise ValueError("negative", unit)
    y[unit] = x[unit]


@bc.kernel(reads=("x",), writes=("y",), boundscheck=True)
def shifted(unit, x, y):
    y[unit] = x[unit + 2]


@bc.kernel(reads=("x", "z"), writes=("y",))
def undeclared(unit, x, y, z):
    y[unit] = x[unit]
    z[unit] = x[unit]


@bc.kernel(reads=("x",), writes=("y",))
def through_a_view(unit, x, y):
    x[1:][unit] = 0
    y[unit] = 0


@bc.kernel(writes=("y",))
def answers(unit, y):
    y[unit] = 1
    return unit


@bc.kernel(writes=("y",))
def unknown_name(unit, y):
    y[unit] = missing(unit)  # noqa: F821


class Interface:
    """Something with one of the interfaces, and nothing else."""

    def __init__(self, name, value):
        setattr(self, name, value)


def on_gpu(array, readonly=False, strides=True):
    """An array that says it is on a GPU, at its own address on the CPU."""
    described = {
        "shape": array.shape,
        "typestr": array.dtype.str,
        "data": (array.ctypes.data, readonly),
        "strides": array.strides if strides else None,
        "version": 3,
    }
    stand_in = Interface("__cuda_array_interface__", described)
    stand_in.array = array
    return stand_in


class Exported:
    """An array that can be had through DLPack only."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def bytes_of(array):
    """The addresses of an array's bytes, found by walking it: what its segments must cover."""
    first = np.zeros(array.shape, np.int64) + array.__array_interface__["data"][0]
    for axis, (n, step) in enumerate(zip(array.shape, array.strides, strict=True)):
        shape = [1] * array.ndim
        shape[axis] = n
        first += (np.arange(n) * step).reshape(shape)
    return {int(address) + i for address in first.ravel() for i in range(array.itemsize)}


def every_kind(unit, a, x, y, flag, z):
    """Arguments of every kind: a function for EVERY_KIND's types."""
    if flag:
        y[unit, 0] = a * x[unit] + z.real


EVERY_KIND = (
    ArgumentType("float32"),
    ArgumentType("float64", 1, readonly=True),
    ArgumentType("int16", 2, "A"),
    ArgumentType("bool"),
    ArgumentType("complex64"),
)
