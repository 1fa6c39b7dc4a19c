"""SqueezeNet 1.1: fire modules, which squeeze an image's channels and expand them by two convolutions at once.

Iandola et al. 2016, SqueezeNet: AlexNet-level accuracy with 50x fewer parameters and <0.5MB model size, arXiv
1602.07360. This is version 1.1 of the authors' repository, forresti/SqueezeNet (SqueezeNet_v1.1/deploy.prototxt). As
in Caffe, poolings round sizes up. There is no batch norm: convolutions have biases. What differs: images of 224x224
(as in pytorch/vision), where the authors' file has 227x227, and the softmax is left off.
"""

from __future__ import annotations

from brax_concurrent.networks.arguments import check_counts
from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.published import Published
from brax_concurrent.networks.tensors import Tensor, image_shape

PUBLISHED = Published(
    parameters=1_235_496,
    multiply_adds=349_000_000,
    source="torchvision's squeezenet1_1, 224x224: num_params and _ops; the paper is of version 1.0",
)

# By blocks between poolings: the fire modules' squeezed channels, in units of the first's.
_BLOCKS = ((1, 1), (2, 2), (3, 3, 4, 4))
_EXPANSION = 4  # channels of each of the two expanding convolutions, for one squeezed channel


def squeezenet(*, image_size: int = 224, squeeze: int = 16, classes: int = 1000) -> Graph:
    """SqueezeNet 1.1; the defaults are as published.

    Args:
      image_size: height and width of the image, of 3 channels; 17 or more.
      squeeze: channels that the first fire module squeezes to; all others are in proportion.
      classes: of the output.

    Returns:
      A graph with the output `logits` (classes,).

    Raises:
      ValueError: a number is not whole or is too small.
    """
    check_counts("squeezenet", squeeze=squeeze, classes=classes)
    check_counts("squeezenet", 17, image_size=image_size)
    graph = Graph("squeezenet", (image_size, image_size, 3))
    x = graph.conv(
        graph.input, _EXPANSION * squeeze, 3,
        stride=2, padding="VALID", activation="relu", norm=False, bias=True, name="conv1",
    )  # fmt: skip
    fire = 2  # the authors count layers
    for block in _BLOCKS:
        x = _halve(graph, x, f"pool{fire - 1}")
        for units in block:
            x = _fire(graph, x, units * squeeze, f"fire{fire}")
            fire += 1
    x = graph.conv(x, classes, activation="relu", norm=False, bias=True, name="conv10")
    graph.output(logits=graph.global_pool(x, name="pool10"))
    return graph


def _halve(graph: Graph, x: Tensor, name: str) -> Tensor:
    """The largest of 3x3 at every second pixel, rounding up: the last window may lack a row and a column."""
    height, width, _ = image_shape(x)
    return graph.max_pool(x, 3, stride=2, padding=((0, 1 - height % 2), (0, 1 - width % 2)), name=name)


def _fire(graph: Graph, x: Tensor, squeeze: int, name: str) -> Tensor:
    squeezed = graph.conv(x, squeeze, activation="relu", norm=False, bias=True, name=f"{name}.squeeze1x1")
    expanded = [
        graph.conv(
            squeezed, _EXPANSION * squeeze, kernel,
            activation="relu", norm=False, bias=True, name=f"{name}.expand{kernel}x{kernel}",
        )
        for kernel in (1, 3)
    ]  # fmt: skip
    return graph.concat(expanded, name=f"{name}.concat")
