"""A network as a list of layers in program order, with the tensors between them: plain data, without arrays.

Its methods add layers. Tensors have no batch: a layer works on one image. An image is (height, width, channels), a
vector is (channels,).

What an inference computes may depend on its input: layers added under `when(flag)` run only where the flag is not 0,
and `merge` adds up those of its inputs that have been computed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

from brax_concurrent.networks.arguments import check_counts, check_number, checked_shape, is_whole
from brax_concurrent.networks.graph_base import GraphBase
from brax_concurrent.networks.tensors import (
    RESIZES,
    Flag,
    Layer,
    Padding,
    Pads,
    Parameter,
    Tensor,
    as_activation,
    as_pair,
    explicit_pads,
    image_shape,
    vector_size,
)
from brax_concurrent.networks.undo import undo_on_error


@undo_on_error(
    *("conv", "depthwise", "separable", "max_pool", "avg_pool", "global_pool", "dense", "activation", "add"),
    *("weighted_sum", "multiply", "concat", "resize", "softmax", "mix", "mixed_conv", "mixed_depthwise"),
    *("gate", "any", "none", "merge", "output"),
)
class Graph(GraphBase):
    """Layers in program order; see the module.

    A method that raises an exception has added nothing.

    Args:
      name: what messages call it.
      input_shape: (height, width, channels) of the image.

    Attributes:
      input: the image.
      layers: in program order.
      parameters: weights by name.
      outputs: what an inference returns, by name.
      batch_norms: channels that are normalised. Normalisation is folded into weights and biases, as for inference:
        of its two trained numbers for each channel only one is left, the bias.
    """

    # -- layers --

    def conv(
        self,
        x: Tensor,
        channels: int,
        kernel: int | tuple[int, int] = 1,
        *,
        stride: int = 1,
        padding: Padding = "SAME",
        dilation: int = 1,
        activation: str | None = None,
        norm: bool = True,
        bias: bool = False,
        gain: float = 1.0,
        bias_mean: float = 0.0,
        name: str | None = None,
    ) -> Tensor:
        """Convolution, with bias or batch norm, and what is applied to the result.

        Args:
          x: an image.
          channels: of the result.
          kernel: height and width of the filters.
          stride, dilation: the same in both directions.
          padding: with zeros: "SAME" and "VALID" as XLA has it; a number on all sides; or ((top, bottom), (left,
            right)), where negative numbers crop.
          activation: one of ACTIVATIONS, or None.
          norm: there is a batch norm behind it, folded into weights and a bias.
          bias: there is a bias of its own.
          gain: of seeded weights: how much their standard deviation differs from He's, sqrt(2 / inputs).
          bias_mean: of a seeded bias.
          name: of the layer; None: one is made up.
        """
        size = as_pair(kernel)
        check_counts(self.name, channels=channels)
        window = self._window(x, size, stride, padding, dilation)
        inputs = size[0] * size[1] * x.channels
        name = self._new_name("conv", name)
        weights = self._weights(name, (*size, x.channels, channels), inputs, gain, norm or bias, norm, bias_mean)
        return self._convolve("conv", name, (x,), window, channels, inputs, weights, (stride, dilation), activation)

    def depthwise(
        self,
        x: Tensor,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: Padding = "SAME",
        dilation: int = 1,
        activation: str | None = None,
        norm: bool = True,
        bias: bool = False,
        gain: float = 1.0,
        name: str | None = None,
    ) -> Tensor:
        """Convolution of each channel by itself; arguments as in `conv`."""
        size = as_pair(kernel)
        window = self._window(x, size, stride, padding, dilation)
        inputs = math.prod(size)
        name = self._new_name("depthwise", name)
        weights = self._weights(name, (*size, x.channels), inputs, gain, norm or bias, norm)
        return self._convolve(
            "depthwise", name, (x,), window, x.channels, inputs, weights, (stride, dilation), activation
        )

    def separable(
        self,
        x: Tensor,
        channels: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: Padding = "SAME",
        dilation: int = 1,
        activation: str | None = None,
        norm: bool = True,
        name: str | None = None,
    ) -> Tensor:
        """A depthwise convolution without bias, and one of 1x1 with what `conv` says: two layers."""
        name = self._new_name("separable", name)
        deep = self.depthwise(
            x, kernel, stride=stride, padding=padding, dilation=dilation, norm=False, name=f"{name}.depthwise"
        )
        return self.conv(deep, channels, activation=activation, norm=norm, name=f"{name}.pointwise")

    def max_pool(
        self,
        x: Tensor,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: Padding = "VALID",
        name: str | None = None,
    ) -> Tensor:
        """The largest value of each window; what is outside of the image does not count."""
        return self._pool("max_pool", x, as_pair(kernel), stride, padding, name)

    def avg_pool(
        self,
        x: Tensor,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: Padding = "VALID",
        name: str | None = None,
    ) -> Tensor:
        """The mean of each window's values; what is outside of the image does not count. With kernel 1 it crops."""
        return self._pool("avg_pool", x, as_pair(kernel), stride, padding, name)

    def global_pool(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """The mean over all pixels: a vector. Two layers: over columns, then over rows."""
        name, (height, width, channels) = self._new_name("global_pool", name), image_shape(x)
        rows = self.avg_pool(x, (1, width), name=f"{name}.rows") if width > 1 else x
        mean = self.avg_pool(rows, (height, 1), name=f"{name}.columns") if height > 1 else rows
        return self._add("view", name, (mean,), (channels,))

    def dense(
        self,
        x: Tensor,
        channels: int,
        *,
        activation: str | None = None,
        norm: bool = False,
        bias: bool = True,
        gain: float = 1.0,
        bias_mean: float = 0.0,
        name: str | None = None,
    ) -> Tensor:
        """A matrix times a vector; arguments as in `conv`."""
        vector_size(x)
        check_counts(self.name, channels=channels)
        name = self._new_name("dense", name)
        weights = self._weights(name, (x.channels, channels), x.channels, gain, norm or bias, norm, bias_mean)
        return self._add(
            "dense", name, (x,), (channels,), weights, x.channels * channels, activation=as_activation(activation)
        )

    def activation(self, x: Tensor, function: str, *, name: str | None = None) -> Tensor:
        """One of ACTIVATIONS of each element."""
        return self._sum("activation", (x,), function, name)

    def add(self, *xs: Tensor, activation: str | None = None, name: str | None = None) -> Tensor:
        """The sum of tensors of one shape."""
        return self._sum("add", xs, activation, name)

    def weighted_sum(self, xs: Sequence[Tensor], *, activation: str | None = None, name: str | None = None) -> Tensor:
        """The sum of tensors of one shape, each times the sigmoid of a trained number."""
        name, xs = self._new_name("weighted_sum", name), self._tensors("weighted_sum", xs)
        self.parameters[f"{name}.weight"] = Parameter((len(xs),), 0.0, 1.0)
        return self._sum("weighted_sum", xs, activation, name, weights=(f"{name}.weight",), named=True)

    def multiply(self, x: Tensor, scale: Tensor, *, name: str | None = None) -> Tensor:
        """An image, each of its channels times an element of a vector."""
        if image_shape(x)[2] != vector_size(scale):
            raise ValueError(f"{self.name}: multiply: expected {x.channels} scales, got a tensor of {scale.shape}")
        return self._add("multiply", self._new_name("multiply", name), (x, scale), x.shape)

    def concat(self, xs: Sequence[Tensor], *, name: str | None = None) -> Tensor:
        """Tensors behind each other along their channels. No layer, where they can be written into one memory."""
        xs = self._tensors("concat", xs)
        if len({x.shape[:-1] for x in xs}) != 1:
            raise ValueError(f"{self.name}: concat: expected equal heights and widths, got {[x.shape for x in xs]}")
        shape = (*xs[0].shape[:-1], sum(x.channels for x in xs))
        return self._add("concat", self._new_name("concat", name), xs, shape)

    def resize(self, x: Tensor, size: tuple[int, int], method: str = "linear", *, name: str | None = None) -> Tensor:
        """An image enlarged to a height and a width: "linear" or "nearest", with pixels as squares."""
        if method not in RESIZES:
            raise ValueError(f"{self.name}: resize: method: expected one of {', '.join(RESIZES)}, got {method!r}")
        size = cast(tuple[int, int], checked_shape(self.name, "size", size, (2,), "(height, width)"))
        height, width, channels = image_shape(x)
        if size[0] < height or size[1] < width:
            raise ValueError(f"{self.name}: resize: expected at least {(height, width)}, got {size}: it only enlarges")
        return self._add("resize", self._new_name("resize", name), (x,), (*size, channels), method=method)

    def softmax(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Along the channels."""
        return self._add("softmax", self._new_name("softmax", name), (x,), x.shape)

    # -- experts --

    def mix(self, routing: Tensor, shape: tuple[int, ...], inputs: int, *, norm: bool, name: str) -> Tensor:
        """Weights for one image: the sum of experts' weights of that shape, each times its element of a vector.

        Args:
          routing: a vector with an element for each expert.
          shape: of an expert's weights.
          inputs: values that go into one result, for the standard deviation of seeded weights.
          norm: a batch norm is folded in.
          name: of the layer, which is that of the weights.
        """
        shape = checked_shape(self.name, "shape", shape, (1, 2, 3, 4), "one to four numbers")
        check_counts(self.name, inputs=inputs)
        experts, name = vector_size(routing), self._new_name("mix", name)
        self.parameters[f"{name}.weight"] = Parameter((experts, *shape), 0.0, math.sqrt(2.0 / inputs))
        self.batch_norms += shape[-1] if norm else 0  # its scale; its shift is a bias
        return self._add("mix", name, (routing,), shape, (f"{name}.weight",), experts * math.prod(shape), weights=True)

    def mixed_conv(
        self,
        x: Tensor,
        routing: Tensor,
        channels: int,
        kernel: int | tuple[int, int] = 1,
        *,
        stride: int = 1,
        padding: Padding = "SAME",
        activation: str | None = None,
        name: str | None = None,
    ) -> Tensor:
        """Convolution and batch norm with an image's own weights, mixed of experts': two layers; see `mix`."""
        size, name = as_pair(kernel), self._new_name("mixed_conv", name)
        check_counts(self.name, channels=channels)
        window = self._window(x, size, stride, padding, 1)
        inputs = size[0] * size[1] * x.channels
        weights = self.mix(routing, (*size, x.channels, channels), inputs, norm=True, name=f"{name}.mix")
        bias = self._bias(name, channels)
        return self._convolve("conv", name, (x, weights), window, channels, inputs, bias, (stride, 1), activation)

    def mixed_depthwise(
        self,
        x: Tensor,
        routing: Tensor,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: Padding = "SAME",
        activation: str | None = None,
        name: str | None = None,
    ) -> Tensor:
        """The same for each channel by itself."""
        size, name = as_pair(kernel), self._new_name("mixed_depthwise", name)
        window = self._window(x, size, stride, padding, 1)
        inputs = math.prod(size)
        weights = self.mix(routing, (*size, x.channels), inputs, norm=True, name=f"{name}.mix")
        bias = self._bias(name, x.channels)
        return self._convolve(
            "depthwise", name, (x, weights), window, x.channels, inputs, bias, (stride, 1), activation
        )

    # -- what depends on the input --

    def gate(self, x: Tensor, *, threshold: float = 0.0, groups: int = 0, name: str | None = None) -> tuple[Flag, ...]:
        """Flags of a vector's elements: 1 where they exceed the threshold. NaN does not.

        Args:
          x: a vector.
          threshold: what they are compared with.
          groups: the vector is so many equal parts behind each other. Where no element of one exceeds the threshold,
            its largest has 1, the first of several that are equal and of NaNs; 0: there is no such rule.
          name: of the layer.
        """
        count = vector_size(x)
        if not is_whole(groups) or groups < 0 or (groups and count % groups):
            raise ValueError(f"{self.name}: gate: groups: expected a divisor of {count}, or 0, got {groups}")
        check_number(self.name, threshold=threshold)
        flags = self._add(
            "gate", self._new_name("gate", name), (x,), (count,), dtype="int32", threshold=threshold, groups=groups
        )
        return tuple(Flag(flags, index) for index in range(count))

    def any(self, flags: Sequence[Flag], *, name: str | None = None) -> Flag:
        """A flag that is 1 where one of those is not 0."""
        return self._flag("any", flags, name)

    def none(self, flags: Sequence[Flag], *, name: str | None = None) -> Flag:
        """A flag that is 1 where all of those are 0."""
        return self._flag("none", flags, name)

    @contextlib.contextmanager
    def when(self, flag: Flag) -> Iterator[None]:
        """Layers added inside the block run only where the flag is not 0; what they would write is undefined else.

        Raises:
          TypeError: it is no flag of the graph.
          ValueError: it is inside another such block, or the flag is computed in one. Make one flag of both instead.
        """
        if self._when is not None:
            raise ValueError(f"{self.name}: when: blocks do not nest")
        self._flags("when", (flag,))
        self._when = flag
        try:
            yield
        finally:
            self._when = None

    def merge(
        self,
        xs: Sequence[Tensor],
        flags: Sequence[Flag],
        *,
        scales: Tensor | None = None,
        activation: str | None = None,
        name: str | None = None,
    ) -> Tensor:
        """The sum of those tensors whose flag is not 0, each times its element of `scales`; zeros if there is none."""
        xs, flags = self._tensors("merge", xs), self._flags("merge", flags)
        if len(xs) != len(flags) or not xs:
            raise ValueError(f"{self.name}: merge: expected a flag for each tensor, got {len(xs)} and {len(flags)}")
        if scales is not None and vector_size(scales) != len(xs):
            raise ValueError(f"{self.name}: merge: expected {len(xs)} scales, got a tensor of {scales.shape}")
        return self._sum("merge", xs, activation, name, flags=flags, scales=scales)

    def output(self, *unnamed: Tensor, **tensors: Tensor) -> None:
        """What an inference returns, by name: `output(scores=x)`."""
        self._check_named(unnamed)
        for tensor in tensors.values():
            self._check_own("output", tensor)
            self._check_defined("output", tensor, None)
        self.outputs.update(tensors)

    # -- inside --

    def _add(
        self,
        kind: str,
        name: str,
        inputs: tuple[Tensor, ...],
        shape: tuple[int, ...],
        parameters: tuple[str, ...] = (),
        multiply_adds: int = 0,
        dtype: str = "float32",
        **attributes: Any,
    ) -> Tensor:
        if any(n < 1 for n in shape):
            raise ValueError(f"{self.name}: {name}: nothing is left of {[x.shape for x in inputs]}: it makes {shape}")
        flags = attributes.get("flags") or (self._when,) * len(inputs)  # where each input is read
        for index, x in enumerate(inputs if kind not in ("any", "none") else ()):
            self._check_own(name, x)
            if kind != "concat":  # whose parts may be undefined for themselves, as scales of a merge are
                self._check_defined(name, x, flags[index] if self._when is None else self._when)
            weights = index == 1 and kind in ("conv", "depthwise")
            if x.dtype != "float32" or (len(x.shape) not in (1, 3) and not weights):
                raise ValueError(f"{self.name}: {name}: expected images or vectors, got {x.dtype}{list(x.shape)}")
        output = Tensor(name, shape, dtype)
        self._made[output] = self._when
        parts = (flag for x in inputs for flag in self._needs[x]) if kind == "concat" else ()
        self._needs[output] = tuple(dict.fromkeys((*parts, *([] if self._when is None else [self._when]))))
        self.layers.append(Layer(kind, name, inputs, output, parameters, attributes, self._when, multiply_adds))
        return output

    def _weights(
        self,
        name: str,
        shape: tuple[int, ...],
        inputs: int,
        gain: float,
        bias: bool,
        norm: bool,
        bias_mean: float = 0.0,
    ) -> tuple[str, ...]:
        self.parameters[f"{name}.weight"] = Parameter(shape, 0.0, gain * math.sqrt(2.0 / inputs))
        if norm:  # scale and shift; the shift is the bias
            self.batch_norms += shape[-1]
        return (f"{name}.weight", *(self._bias(name, shape[-1], bias_mean) if bias else ()))

    def _bias(self, name: str, channels: int, mean: float = 0.0) -> tuple[str, ...]:
        self.parameters[f"{name}.bias"] = Parameter((channels,), mean, 0.1)
        return (f"{name}.bias",)

    def _window(
        self, x: Tensor, size: tuple[int, int], stride: int, padding: Padding, dilation: int
    ) -> tuple[int, int, Pads]:
        """Height and width of what a sliding window makes of an image, and the padding in numbers."""
        check_counts(self.name, stride=stride, dilation=dilation)
        height, width, _ = image_shape(x)
        spans = [(n - 1) * dilation + 1 for n in size]
        pads = explicit_pads(padding, (height, width), spans, stride)
        if any(n + min(low, 0) + min(high, 0) < 0 for n, (low, high) in zip((height, width), pads, strict=True)):
            raise ValueError(f"{self.name}: padding: {pads} crops more than there is of {x.shape}")
        counts = [
            (n + sum(pad) - span) // stride + 1 for n, span, pad in zip((height, width), spans, pads, strict=True)
        ]
        return counts[0], counts[1], pads

    def _flag(self, kind: str, flags: Sequence[Flag], name: str | None) -> Flag:
        flags = self._flags(kind, flags)
        if not flags:
            raise ValueError(f"{self.name}: {kind}: expected flags, got none")
        indices, tensors = tuple(flag.index for flag in flags), tuple(flag.tensor for flag in flags)
        found = self._add(kind, self._new_name(kind, name), tensors, (1,), dtype="int32", indices=indices)
        if kind == "any":
            self._any_of[found] = flags
        return Flag(found, 0)

    def _convolve(
        self,
        kind: str,
        name: str,
        xs: tuple[Tensor, ...],
        window: tuple[int, int, Pads],
        channels: int,
        inputs: int,
        parameters: tuple[str, ...],
        slide: tuple[int, int],
        activation: str | None,
    ) -> Tensor:
        """A convolution of either kind.

        Args:
          window: what `_window` says.
          inputs: how many go into one result.
          slide: stride and dilation.
        """
        height, width, pads = window
        return self._add(
            kind, name, xs, (height, width, channels), parameters, height * width * channels * inputs,
            stride=slide[0], pads=pads, dilation=slide[1], activation=as_activation(activation),
        )  # fmt: skip

    def _pool(
        self, kind: str, x: Tensor, size: tuple[int, int], stride: int, padding: Padding, name: str | None
    ) -> Tensor:
        height, width, pads = self._window(x, size, stride, padding, 1)
        for count, n, span, (low, _) in zip((height, width), x.shape, size, pads, strict=False):
            if low >= span or (count - 1) * stride - low >= n:
                raise ValueError(f"{self.name}: {kind}: with padding {pads} a window lies outside of {x.shape}")
        return self._add(
            kind, self._new_name(kind, name), (x,), (height, width, x.channels), size=size, stride=stride, pads=pads
        )

    def _sum(
        self,
        kind: str,
        xs: tuple[Tensor, ...],
        activation: str | None,
        name: str | None,
        *,
        weights: tuple[str, ...] = (),
        flags: tuple[Flag, ...] = (),
        scales: Tensor | None = None,
        named: bool = False,
    ) -> Tensor:
        xs = self._tensors(kind, xs)
        if not xs or len({x.shape for x in xs}) != 1:
            raise ValueError(f"{self.name}: {kind}: expected tensors of one shape, got {[x.shape for x in xs]}")
        new = name if named and name is not None else self._new_name(kind, name)
        return self._add(
            "sum", new, xs, xs[0].shape, weights, flags=flags, scales=scales, activation=as_activation(activation)
        )
