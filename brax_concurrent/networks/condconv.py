"""EfficientNet with conditional convolutions.

Yang et al., "CondConv: Conditionally Parameterized Convolutions for Efficient Inference", NeurIPS 2019, on the network
of Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", ICML 2019; the graph follows
tensorflow/tpu, models/official/efficientnet and its condconv.

All convolutions but the first and the last are in seven stages of blocks. A block widens by a 1x1 convolution, filters
each channel by itself, scales each channel by what the whole image shows (squeeze and excitation), narrows by a 1x1
convolution, and adds its input if shapes agree. In the blocks of the last three stages the three convolutions have
several experts: the mean over pixels of the block's input gives a weight from 0 to 1 for each expert, and convolutions
run with the weighted sum of the experts' filters. So each image has its own filters.

Where it differs: the published models are of EfficientNet-B0's size. The default here is of B4's, with the same stages
conditional, and nothing is published of it. With B0's size it has the published parameters, and 1.4 % fewer
multiply-adds: convolutions, matrices and mixtures are counted here, and there presumably also means over pixels and the
scaling of channels, which make the difference. Without experts its parameters are EfficientNet-B0's and B4's.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from brax_concurrent.networks.arguments import check_counts
from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.published import Published
from brax_concurrent.networks.tensors import Tensor

PUBLISHED = Published(
    None,
    None,
    "Yang et al., CondConv: Conditionally Parameterized Convolutions for Efficient Inference, NeurIPS 2019, on "
    "EfficientNet-B4 in place of B0",
)
PUBLISHED_B0 = Published(
    13_300_000, 402_000_000, "tensorflow/tpu, efficientnet/condconv: EfficientNet-CondConv-B0 with 4 experts"
)


@dataclass(frozen=True)
class _Stage:
    """Blocks of as many channels, before the network is scaled. The first block has the stride."""

    repeats: int
    kernel: int
    stride: int
    expansion: int
    outputs: int


_STAGES = (
    _Stage(1, 3, 1, 1, 16),
    _Stage(2, 3, 2, 6, 24),
    _Stage(2, 5, 2, 6, 40),
    _Stage(3, 3, 2, 6, 80),
    _Stage(3, 5, 1, 6, 112),
    _Stage(4, 5, 2, 6, 192),
    _Stage(1, 3, 1, 6, 320),
)
_SQUEEZE = 4  # a block's input has so many times the channels of its squeezed vector

# Of seeded weights: with these, images differ in the experts that they use and in their logits, and values stay between
# 1e-2 and 1e4. Nothing normalises them, and activations, excitation and routing all let more through where values are
# larger; so blocks add little to their inputs.
_ROUTING_GAIN = 1.0
_EXCITE_GAIN = 0.15
_PROJECT_GAIN = 1.5  # makes up for what activations and excitation take
_RESIDUAL_GAIN = 0.2  # the same where a block's input is added
_BIAS_STD = 0.01


def condconv(
    *,
    image_size: int = 380,
    width: float = 1.4,
    depth: float = 1.8,
    experts: int = 4,
    conditional: int = 3,
    classes: int = 1000,
) -> Graph:
    """EfficientNet with conditional convolutions; the defaults are B4's sizes and the published experts and stages.

    The published CondConv-B0 has image_size 224, width 1 and depth 1.

    Args:
      image_size: height and width of the image.
      width: channels are B0's times this, as multiples of 8.
      depth: blocks in a stage are B0's times this, rounded up.
      experts: of each conditional convolution.
      conditional: so many stages are, the last ones; 0: it is the plain EfficientNet.
      classes: of images.

    Returns:
      A graph with the output `logits` (classes,).

    Raises:
      ValueError: a number is too small, or one that counts is not whole.
    """
    _check(image_size, width, depth, experts, conditional, classes)
    g = Graph("condconv", (image_size, image_size, 3))
    x = g.conv(g.input, _channels(32, width), 3, stride=2, activation="swish", name="stem")
    for index, stage in enumerate(_STAGES):
        mixed = experts if index >= len(_STAGES) - conditional else 0
        for block in range(math.ceil(depth * stage.repeats)):
            x = _block(g, f"stage{index}.block{block}", x, stage, width, block == 0, mixed)
    x = g.conv(x, _channels(1280, width), activation="swish", name="head")
    g.output(logits=g.dense(g.global_pool(x), classes, name="logits"))
    for name, each in g.parameters.items():
        if name.endswith(".bias"):
            g.parameters[name] = dataclasses.replace(each, std=_BIAS_STD)
    return g


def _block(g: Graph, name: str, x: Tensor, stage: _Stage, width: float, first: bool, experts: int) -> Tensor:
    convolutions = _Convolutions(g, name, x, experts)
    stride = stage.stride if first else 1
    y = x
    if stage.expansion > 1:
        y = convolutions.conv("expand", y, stage.expansion * x.channels, "swish")
    y = convolutions.depthwise("filter", y, stage.kernel, stride)
    y = _excite(g, name, y, max(1, x.channels // _SQUEEZE))
    channels = _channels(stage.outputs, width)
    if (*y.shape[:2], channels) != x.shape:
        return convolutions.conv("project", y, channels, None, gain=_PROJECT_GAIN)
    return g.add(convolutions.conv("project", y, channels, None, gain=_RESIDUAL_GAIN), x, name=f"{name}.sum")


class _Convolutions:
    """A block's convolutions, with or without experts.

    Attributes:
      routing: the experts' weights; None: there are none.
    """

    def __init__(self, graph: Graph, name: str, x: Tensor, experts: int):
        self.graph, self.name = graph, name
        self.routing: Tensor | None = None
        if experts:
            self.routing = graph.dense(
                graph.global_pool(x), experts, activation="sigmoid", gain=_ROUTING_GAIN, name=f"{name}.routing"
            )

    def conv(self, name: str, x: Tensor, channels: int, activation: str | None, gain: float = 1.0) -> Tensor:
        """A convolution of 1x1."""
        name = f"{self.name}.{name}"
        if self.routing is None:
            return self.graph.conv(x, channels, activation=activation, gain=gain, name=name)
        y = self.graph.mixed_conv(x, self.routing, channels, activation=activation, name=name)
        filters = self.graph.parameters[f"{name}.mix.weight"]
        self.graph.parameters[f"{name}.mix.weight"] = dataclasses.replace(filters, std=gain * filters.std)
        return y

    def depthwise(self, name: str, x: Tensor, kernel: int, stride: int) -> Tensor:
        """A convolution of each channel by itself."""
        name = f"{self.name}.{name}"
        if self.routing is None:
            return self.graph.depthwise(x, kernel, stride=stride, activation="swish", name=name)
        return self.graph.mixed_depthwise(x, self.routing, kernel, stride=stride, activation="swish", name=name)


def _excite(g: Graph, name: str, x: Tensor, squeezed: int) -> Tensor:
    """Each channel scaled by what the whole image shows."""
    seen = g.dense(g.global_pool(x), squeezed, activation="swish", name=f"{name}.squeeze")
    scales = g.dense(seen, x.channels, activation="sigmoid", gain=_EXCITE_GAIN, name=f"{name}.excite")
    return g.multiply(x, scales, name=f"{name}.scaled")


def _channels(count: int, width: float) -> int:
    """B0's channels times the width, as the nearest multiple of 8 that loses no more than a tenth."""
    wanted = count * width
    found = max(8, int(wanted + 4) // 8 * 8)
    return found + 8 if found < 0.9 * wanted else found


def _check(image_size: int, width: float, depth: float, experts: int, conditional: int, classes: int) -> None:
    check_counts("condconv", image_size=image_size, experts=experts, classes=classes)
    check_counts("condconv", 0, conditional=conditional)
    if conditional > len(_STAGES):
        raise ValueError(f"condconv: conditional: expected at most {len(_STAGES)}, got {conditional}")
    for name, value in {"width": width, "depth": depth}.items():
        if not value > 0:
            raise ValueError(f"condconv: {name}: expected more than 0, got {value}")
