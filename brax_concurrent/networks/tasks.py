"""Layers as tasks: which kernel, on what, in how many units."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from brax_concurrent.networks import generated, layers
from brax_concurrent.networks.generated import MOST_UNITS, MOST_WRITTEN_OUT
from brax_concurrent.networks.tensors import Flag, Layer, Tensor
from brax_concurrent.scheduler.kernel import Kernel
from brax_concurrent.scheduler.stream import TaskStream

_CHANNELS_OF_CPU = 4  # of a unit of a convolution: the vectors of a CPU


@dataclass(frozen=True)
class Memory:
    """The arrays of one image, and the weights.

    Attributes:
      array: (height, width, channels) of a tensor's memory, or the shape of mixed weights.
      flag: the one int32 of a flag, or all flags of a tensor.
      weights: by name.
      swapped: the same with the last two axes swapped; on a GPU.
      device: where they are.
      batch: images that are inferred at once.
    """

    array: Callable[[Tensor], Any]
    flag: Callable[[Flag], Any]
    flags: Callable[[Tensor], Any]
    weights: Mapping[str, Any]
    swapped: Callable[[str], Any]
    device: str
    batch: int


def add_layer(stream: TaskStream, layer: Layer, memory: Memory) -> None:
    """Record a layer's tasks: one, or none where nothing has to be moved."""
    _KINDS[layer.kind](_Recorder(stream, layer, memory))


@dataclass(frozen=True)
class _Recorder:
    stream: TaskStream
    layer: Layer
    memory: Memory

    def input(self, index: int = 0) -> Any:
        return self.memory.array(self.layer.inputs[index])

    def output(self) -> Any:
        return self.memory.array(self.layer.output)

    def weights(self) -> list[Any]:
        return [self.memory.weights[name] for name in self.layer.parameters]

    def filters(self) -> tuple[Any, list[Any]]:
        """A convolution's filters, mixed for the image or trained as they are, and its bias if it has one."""
        weights = self.weights()
        return (self.input(1), weights) if len(self.layer.inputs) > 1 else (weights[0], weights[1:])

    def number(self, name: str) -> np.int64:
        return np.int64(self.layer.attributes[name])

    def activation(self) -> str | None:
        return self.layer.attributes["activation"]

    def corner(self) -> dict[str, np.int64]:
        """Stride, and how far the first window begins outside of the image."""
        (top, _), (left, _) = self.layer.attributes["pads"]
        return {"stride": self.number("stride"), "top": np.int64(top), "left": np.int64(left)}

    def add(self, kernel: Kernel, units: int, **arguments: Any) -> None:
        if units > MOST_UNITS:
            raise ValueError(f"{self.layer.name}: expected at most {MOST_UNITS} pieces of work, got {units}")
        when = self.layer.when
        self.stream.add(kernel, units=units, predicate=None if when is None else self.memory.flag(when), **arguments)


def _conv(r: _Recorder) -> None:
    filters, bias = r.filters()
    swapped = None if len(r.layer.inputs) > 1 else lambda: r.memory.swapped(r.layer.parameters[0])
    _add_conv(r, filters, swapped, bias, dilation=r.number("dilation"), **r.corner())


def _dense(r: _Recorder) -> None:
    """A convolution of one pixel."""
    matrix, *bias = r.weights()

    def swapped() -> Any:
        other = r.memory.swapped(r.layer.parameters[0])
        return other.reshape((1, 1, *other.shape))

    zero, one = np.int64(0), np.int64(1)
    numbers = {"stride": one, "top": zero, "left": zero, "dilation": one}
    _add_conv(r, matrix.reshape((1, 1, *matrix.shape)), swapped, bias, **numbers)


def _add_conv(
    r: _Recorder, filters: Any, swapped: Callable[[], Any] | None, bias: list[Any], **numbers: np.int64
) -> None:
    """A convolution's task; `swapped` gives the filters with the input channels last, if there can be such."""
    x, y = r.input(), r.output()
    height, width, count = y.shape
    if r.memory.device == "cpu":
        kernel = generated.conv(_CHANNELS_OF_CPU, bool(bias), r.activation())
        units = height * width * -(-count // _CHANNELS_OF_CPU)
    else:
        from brax_concurrent.networks import generated_cuda  # needs numba-cuda

        vector = _vector(x)
        block = generated_cuda.block_for(y.shape, x.shape[2], r.memory.batch, vector, swapped is not None)
        kernel, units = generated_cuda.conv(block, bool(bias), r.activation()), block.units(height, width, count)
        if block.swapped and swapped is not None:
            filters = swapped()
    biased = {"b": bias[0]} if bias else {}
    r.add(kernel, units, x=x, w=filters, y=y, **biased, **numbers)


def _depthwise(r: _Recorder) -> None:
    filters, bias = r.filters()
    biased, x, y = {"b": bias[0]} if bias else {}, r.input(), r.output()
    kernel, units = generated.depthwise(bool(bias), r.activation()), r.layer.output.size
    if r.memory.device != "cpu" and math.prod(filters.shape[:2]) <= MOST_WRITTEN_OUT:
        from brax_concurrent.networks import generated_cuda  # needs numba-cuda

        vector = _vector(x, y)
        while vector * math.prod(filters.shape[:2]) > generated_cuda.MOST_PRODUCTS:
            vector //= 2
        kernel = generated_cuda.depthwise(*filters.shape[:2], bool(bias), r.activation(), vector)
        units //= vector
    r.add(kernel, units, x=x, w=filters, y=y, dilation=r.number("dilation"), **biased, **r.corner())


def _vector(*arrays: Any) -> int:
    """How many channels a GPU loads and stores at once, of images that all have as many."""
    from brax_concurrent.networks.generated_cuda import vector_of  # needs numba-cuda

    return min(vector_of(*_place(array), array.shape[2]) for array in arrays)


def _pool(r: _Recorder) -> None:
    height, width = r.layer.attributes["size"]
    kernel = layers.max_pool if r.layer.kind == "max_pool" else layers.avg_pool
    size = {"height": np.int64(height), "width": np.int64(width)}
    r.add(kernel, r.layer.output.size, x=r.input(), y=r.output(), **size, **r.corner())


def _sum(r: _Recorder) -> None:
    a, count = r.layer.attributes, len(r.layer.inputs)
    arguments = {f"x{i}": r.input(i) for i in range(count)}
    arguments |= {f"flag{i}": r.memory.flag(flag) for i, flag in enumerate(a["flags"])}
    if a["scales"] is not None:
        arguments["scale"] = r.memory.array(a["scales"])
    for weights in r.weights():
        arguments["weight"] = weights
    forms = bool(a["flags"]), a["scales"] is not None, bool(r.layer.parameters)
    y = r.output()
    if r.memory.device == "cpu":
        kernel, units = generated.add(count, *forms, r.activation()), r.layer.output.size
    else:
        from brax_concurrent.networks import generated_cuda  # needs numba-cuda

        vector = _vector(y, *(arguments[f"x{i}"] for i in range(count)))
        kernel, units = generated_cuda.add(count, *forms, r.activation(), vector), r.layer.output.size // vector
    r.add(kernel, units, y=y, **arguments)


def _multiply(r: _Recorder) -> None:
    r.add(layers.multiply, r.layer.output.size, x=r.input(0), scale=r.input(1), y=r.output())


def _concat(r: _Recorder) -> None:
    """Copies what does not lie in its part of the result already."""
    y, channel = r.output(), 0
    for index, tensor in enumerate(r.layer.inputs):
        x, part = r.input(index), y[:, :, channel : channel + tensor.channels]
        _copy(r, x, part)
        channel += tensor.channels


def _view(r: _Recorder) -> None:
    _copy(r, r.input(), r.output())


def _copy(r: _Recorder, x: Any, y: Any) -> None:
    if _address(x) == _address(y):
        return
    kernel, units = layers.copy, math.prod(x.shape)
    if r.memory.device != "cpu":
        from brax_concurrent.networks import generated_cuda  # needs numba-cuda

        vector = _vector(x, y)
        kernel, units = generated_cuda.copy(vector), units // vector
    r.add(kernel, units, x=x, y=y)


def _address(array: Any) -> int:
    return _place(array)[0]


def _place(array: Any) -> tuple[int, tuple[int, ...]]:
    """Address and strides, in bytes."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    shape, strides = interface["shape"], interface["strides"]
    contiguous = tuple(array.dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return interface["data"][0], strides or contiguous


def _resize(r: _Recorder) -> None:
    kernel = layers.resize_linear if r.layer.attributes["method"] == "linear" else layers.resize_nearest
    r.add(kernel, r.layer.output.size, x=r.input(), y=r.output())


def _softmax(r: _Recorder) -> None:
    r.add(layers.softmax, r.layer.output.size, x=r.input(), y=r.output())


def _gate(r: _Recorder) -> None:
    count, groups = r.layer.output.size, r.layer.attributes["groups"]
    r.add(
        layers.gate,
        groups or count,
        x=r.input(),
        flags=r.memory.flags(r.layer.output),
        threshold=np.float32(r.layer.attributes["threshold"]),
        size=np.int64(count // (groups or count)),
        fallback=np.int64(groups != 0),
    )


def _any(r: _Recorder) -> None:
    pairs = zip(r.layer.inputs, r.layer.attributes["indices"], strict=True)
    flags = {f"flag{i}": r.memory.flag(Flag(tensor, index)) for i, (tensor, index) in enumerate(pairs)}
    r.add(generated.some(len(flags), r.layer.kind == "none"), 1, y=r.memory.flags(r.layer.output), **flags)


def _mix(r: _Recorder) -> None:
    (experts,) = r.weights()
    y = r.output()
    flat = y.reshape(r.layer.output.size)
    r.add(
        layers.mix,
        r.layer.output.size,
        routing=r.input(),
        w=experts.reshape((experts.shape[0], r.layer.output.size)),
        y=flat,
    )


_KINDS: dict[str, Callable[[_Recorder], None]] = {
    "conv": _conv,
    "depthwise": _depthwise,
    "dense": _dense,
    "max_pool": _pool,
    "avg_pool": _pool,
    "view": _view,
    "sum": _sum,
    "multiply": _multiply,
    "concat": _concat,
    "resize": _resize,
    "softmax": _softmax,
    "gate": _gate,
    "any": _any,
    "none": _any,
    "mix": _mix,
}
