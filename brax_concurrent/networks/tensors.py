"""What networks are made of: tensors, flags, weights and layers, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from brax_concurrent.networks.arguments import is_whole

Pads = tuple[tuple[int, int], tuple[int, int]]
Padding = str | int | Pads
ACTIVATIONS = ("relu", "relu6", "swish", "sigmoid", "tanh")
RESIZES = ("linear", "nearest")


@dataclass(frozen=True, eq=False)
class Tensor:
    """What passes between layers, for one image.

    Attributes:
      name: that of the layer it comes from, or "input".
      shape: (height, width, channels) or (channels,).
      dtype: "float32", or "int32" for flags.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def channels(self) -> int:
        """Its last dimension."""
        return self.shape[-1]


@dataclass(frozen=True)
class Flag:
    """One element of a tensor of flags: layers under it run where it is not 0."""

    tensor: Tensor
    index: int


@dataclass(frozen=True)
class Parameter:
    """An array of weights.

    Attributes:
      shape: convolutions have (height, width, in, out), depthwise ones (height, width, channels), matrices (in, out);
        with experts, these behind the number of experts.
      mean, std: of the normal distribution that seeded weights are drawn from.
    """

    shape: tuple[int, ...]
    mean: float
    std: float

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer on one image.

    Attributes:
      kind: see layers.py, which has a kernel for each.
      name: unique in its network.
      inputs, output: tensors.
      parameters: names of its weights, in the kernel's order.
      attributes: what else the kernel needs: strides, paddings, what is applied to the result.
      when: it runs where this flag is not 0; None: always.
      multiply_adds: how many it does.
    """

    kind: str
    name: str
    inputs: tuple[Tensor, ...]
    output: Tensor
    parameters: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    when: Flag | None = None
    multiply_adds: int = 0

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """All tensors that it looks at, flags too."""
        flags = self.attributes.get("flags", ()) + (() if self.when is None else (self.when,))
        scales = self.attributes.get("scales")
        return (*self.inputs, *(() if scales is None else (scales,)), *(flag.tensor for flag in flags))


def as_pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width of a filter; a ValueError if it is none."""
    pair: Any = (value, value) if is_whole(value) else value
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(is_whole(n) and n >= 1 for n in pair):
        raise ValueError(f"kernel: expected a whole number from 1 on, or (height, width) of such, got {value!r}")
    return int(pair[0]), int(pair[1])


def as_activation(name: str | None) -> str | None:
    """A checked activation."""
    if name is not None and name not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, or None, got {name!r}")
    return name


def check_tensor(x: Any) -> None:
    """A TypeError if it is none."""
    if not isinstance(x, Tensor):
        hint = ": its tensor is flag.tensor" if isinstance(x, Flag) else ""
        raise TypeError(f"expected a tensor of the graph, got {type(x).__name__}{hint}")


def image_shape(x: Tensor) -> tuple[int, int, int]:
    """Height, width and channels of an image; a ValueError if it is none, a TypeError if it is no tensor."""
    check_tensor(x)
    if len(x.shape) != 3:
        raise ValueError(f"{x.name}: expected an image (height, width, channels), got {x.shape}")
    return x.shape[0], x.shape[1], x.shape[2]


def vector_size(x: Tensor) -> int:
    """Elements of a vector; a ValueError if it is none, a TypeError if it is no tensor."""
    check_tensor(x)
    if len(x.shape) != 1:
        raise ValueError(f"{x.name}: expected a vector, got {x.shape}")
    return x.shape[0]


def explicit_pads(padding: Padding, sizes: Sequence[int], spans: Sequence[int], stride: int) -> Pads:
    """Padding as ((top, bottom), (left, right)); a ValueError if it is none of what `Padding` may be."""
    if padding == "VALID":
        return ((0, 0), (0, 0))
    if padding == "SAME":
        totals = [max((-(-n // stride) - 1) * stride + span - n, 0) for n, span in zip(sizes, spans, strict=True)]
        return ((totals[0] // 2, totals[0] - totals[0] // 2), (totals[1] // 2, totals[1] - totals[1] // 2))
    sides: Any = ((padding, padding), (padding, padding)) if is_whole(padding) else padding
    if _is_pair(sides) and all(_is_pair(side) and is_whole(side[0]) and is_whole(side[1]) for side in sides):
        (top, bottom), (left, right) = sides
        return (int(top), int(bottom)), (int(left), int(right))
    raise ValueError(f"padding: expected SAME, VALID, a number or ((top, bottom), (left, right)), got {padding!r}")


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2
