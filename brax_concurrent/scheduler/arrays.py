"""Anybody's arrays as arguments of tasks, and the memory that they cover.

Memory is one buffer whose bytes are counted by address, so views of one array, or of one memory by two libraries,
overlap where they do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from brax_concurrent.backends.arguments import Argument, ArrayArgument, Device, ScalarArgument
from brax_concurrent.scheduler.footprint import Segment, merged
from brax_concurrent.scheduler.schedule import whole

MEMORY = 0
"""Buffer id of all memory. Segments in it are addresses."""

MAX_SEGMENTS = 256
"""A view that is in more pieces than this counts as all bytes from its first to its last: tasks may then wait for each
other without need, never the other way round."""

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float32", "float64", "complex64", "complex128"),
)
"""Of arrays and scalars that kernels take."""

_HOST = (1, 3)  # DLPack: kDLCPU, kDLCUDAHost


def as_argument(value: Any, what: str) -> Argument:
    """A scalar or an array as kernels get it. Nothing is copied.

    Args:
      value: a Python or NumPy number; a NumPy array; anything with `__cuda_array_interface__`, `__array_interface__` or
        `__dlpack__`.
      what: how errors call it.

    Raises:
      TypeError: it is neither, or its dtype is none of DTYPES.
      ValueError: it is not aligned to its items, or an integer that has no 64 bits.
    """
    if isinstance(value, (bool, int, float, complex, np.generic)):
        return _scalar(value, what)
    argument = (None if isinstance(value, np.ndarray) else _of_cuda(value, what)) or _of_host(value, what)
    if argument.size > 0 and any(number % argument.alignment for number in (argument.address, *argument.strides)):
        raise ValueError(
            f"{what}: expected an address and strides that are multiples of {argument.alignment}, as its dtype "
            f"{argument.dtype} asks for, got {argument.address} and {argument.strides}"
        )
    return argument


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    """The shape of an array to be made; errors name the argument.

    Raises:
      TypeError: it is no whole number or tuple of them.
      ValueError: it is negative.
    """
    sizes = tuple(whole(name, size) for size in (shape if isinstance(shape, (tuple, list)) else (shape,)))
    if min(sizes, default=0) < 0:
        raise ValueError(f"{name}: expected sizes of 0 or more, got {shape!r}")
    return sizes


def checked_dtype(name: str, dtype: Any) -> np.dtype:
    """The dtype of an array to be made; errors name the argument.

    Raises:
      TypeError: it is none of DTYPES.
    """
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: expected a dtype of {', '.join(DTYPES)}, got {dtype!r}") from error
    _dtype_name(found, name)
    return found


def _scalar(value: Any, what: str) -> ScalarArgument:
    scalar: np.generic
    try:
        if isinstance(value, np.generic):
            scalar = value
        else:
            scalar = np.int64(value) if type(value) is int else np.asarray(value).dtype.type(value)
    except OverflowError as error:
        raise ValueError(f"{what}: expected an integer of 64 bits, got {value}") from error
    _dtype_name(scalar.dtype, what)
    return ScalarArgument(scalar)


_NAMES = {np.dtype(name): name for name in DTYPES}  # NumPy makes up a dtype's name each time


def _dtype_name(dtype: np.dtype, what: str) -> str:
    try:
        return _NAMES[dtype]
    except KeyError as error:
        raise TypeError(f"{what}: expected a dtype of {', '.join(DTYPES)}, got {dtype}") from error


def _of_cuda(value: Any, what: str) -> ArrayArgument | None:
    """An array on a GPU, if it is one."""
    try:
        described = value.__cuda_array_interface__
    except Exception:  # libraries raise what they like where an array is not on a GPU
        return None
    dtype = np.dtype(described["typestr"])
    dtype_name = _dtype_name(dtype, what)
    shape = tuple(described["shape"])
    strides = described.get("strides")
    if strides is None:
        steps = np.cumprod((1, *shape[:0:-1]), dtype=np.int64)[::-1][: len(shape)] * dtype.itemsize
        strides = tuple(int(step) for step in steps)
    address, readonly = described["data"]
    _wait(value)
    return ArrayArgument(
        int(address or 0), shape, tuple(strides), dtype_name, not (readonly or is_jax(value)), "cuda", value
    )


def _of_host(value: Any, what: str) -> ArrayArgument:
    """An array in the memory of the CPU."""
    array = value
    if not isinstance(value, np.ndarray):
        got = type(value).__name__
        try:
            shared = _shared(value)
        except Exception as error:  # each library has its own reasons and exceptions
            raise TypeError(f"{what}: {got} does not give its memory: {error}") from error
        if shared is None:
            interfaces = "__array_interface__, __dlpack__ (on the CPU) or __cuda_array_interface__"
            raise TypeError(f"{what}: expected a number, or an array with {interfaces}, got {got}")
        array = shared
    dtype = _dtype_name(array.dtype, what)
    address = int(array.__array_interface__["data"][0])
    return ArrayArgument(address, array.shape, array.strides, dtype, array.flags.writeable, "cpu", array)


def _shared(value: Any) -> np.ndarray | None:
    """The same memory as a NumPy array; None if there is no way to it."""
    if hasattr(value, "__array_interface__"):
        return np.asarray(value, copy=False)
    if _library(value) == "torch":  # through DLPack before 1.0 NumPy takes memory for read-only
        return value.numpy()
    if hasattr(value, "__dlpack__") and value.__dlpack_device__()[0] in _HOST:
        return np.from_dlpack(value)
    return None


def _wait(value: Any) -> None:
    """Until a JAX array has been computed: its memory is known before."""
    if is_jax(value):
        value.block_until_ready()


def is_jax(value: Any) -> bool:
    """Whether it is an array of JAX's, which are never to be written, without importing JAX."""
    return _library(value) in ("jax", "jaxlib")


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def segments(array: ArrayArgument) -> tuple[Segment, ...]:
    """The bytes of an array's elements: exact if they are in at most MAX_SEGMENTS pieces."""
    first, stop = array.bounds
    if first == stop:
        return ()
    if stop - first == array.size * array.itemsize and array.layout != "A":
        return (Segment(MEMORY, first, stop),)
    # Every dimension counted upwards, the smallest step first. Steps of 0 and single elements add no bytes.
    steps = sorted((abs(step), n) for step, n in zip(array.strides, array.shape, strict=True) if step != 0 and n != 1)
    solid = array.itemsize  # bytes without a gap from each start on
    starts = np.zeros(1, np.int64)
    for step, n in steps:
        if len(starts) == 1 and step <= solid:
            solid += step * (n - 1)
        elif len(starts) * n > MAX_SEGMENTS:
            return (Segment(MEMORY, first, stop),)
        else:
            starts = (starts[:, None] + step * np.arange(n)).ravel()
    return merged(Segment(MEMORY, first + int(start), first + int(start) + solid) for start in starts)


def devices(arguments: dict[str, Argument]) -> dict[str, Device]:
    """Where arrays are, by the names of the arguments; scalars are nowhere."""
    return {name: each.device for name, each in arguments.items() if isinstance(each, ArrayArgument)}
