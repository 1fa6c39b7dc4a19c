"""InstaNAS: a controller chooses for each image which candidates of each cell compute it.

Cheng, Lin, Juan, Wei and Sun, "InstaNAS: Instance-aware Neural Architecture Search", AAAI 2020 (arXiv 1811.10201), as
in the code of the repository AnjieCheng/InstaNAS, folder search, model InstaMobile_C10, for one image
(`forward_single`):

- MobileNetV2's 17 cells, with stride 1 where the image would become too small for CIFAR-10. Each has five candidates:
  MobileNetV2's inverted bottleneck, with filters of 3x3 or 5x5 and six or three times the channels inside; and two
  plain convolutions. The result is the sum of those chosen, any number of them. Within a stage, bottlenecks add their
  input to their result.
- Where none is chosen, the cell's input is its result; in the first cell of a stage, whose result has another shape,
  the plain convolutions compute it.
- The controller is a small ResNet on the same image: three blocks, 85 logits. A candidate is chosen where its logit is
  above 0, which is a probability above one half.

What differs from that code:

- A logit of exactly 0 chooses there, and does not here.
- The code constructs, but does not use, 1x1 convolutions beside bottlenecks that change the number of channels; they
  are left out. 236,608 of its 9,889,743 trained numbers are theirs. Its README compares errors and latencies only.
- The mean over pixels before the classifier is over all of them: 4x4, for which the code of the search says 7, which is
  ImageNet's, and the code of the training before it 4.
- In the controller's ResNet, what halves height and width also doubles channels, with zeros for the new ones in what
  passes by. Here the convolution beside it is two with half of the channels each, and the second has nothing added.
- A bottleneck's input is added in the sum over candidates, once for each that is chosen, rather than before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.published import Published
from brax_concurrent.networks.tensors import Flag, Tensor

PUBLISHED = Published(
    parameters=9_889_743,
    multiply_adds=None,
    source="AnjieCheng/InstaNAS: the parameters of its modules MobileNet and Policy32, unused ones too",
)


class Stage(NamedTuple):
    """Cells with the same number of channels.

    Attributes:
      channels: of each cell's result.
      cells: how many.
      stride: of the first one.
    """

    channels: int
    cells: int
    stride: int


STAGES = (
    Stage(16, 1, 1),
    Stage(24, 2, 1),
    Stage(32, 3, 2),
    Stage(64, 4, 2),
    Stage(96, 3, 1),
    Stage(160, 3, 2),
    Stage(320, 1, 1),
)

_BOTTLENECKS = {"3x3_6": (3, 6), "3x3_3": (3, 3), "5x5_6": (5, 6), "5x5_3": (5, 3)}  # filter, times the channels
_PLAIN = "plain"
CANDIDATES = (*_BOTTLENECKS, _PLAIN)

# Of seeded weights. A cell within a stage adds its input once for each bottleneck chosen, so values grow from cell to
# cell; what is added to it is kept smaller, and the first convolutions of the next stage take the growth out again.
_GROWTH = 1.7
_RESIDUAL_GAIN = 0.4
# Of a ResNet with other random weights, logits would differ between candidates far more than between images. Biases
# that leave few of its features above 0 make images differ.
_CONTROLLER_BIAS = -0.75
_LOGIT_GAIN = 4.0
_LOGIT_BIAS = -0.4  # 40% or so are above 0


def instanas(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
    *,
    stem: int = 32,
    stages: Sequence[tuple[int, int, int]] = STAGES,
    head: int = 1280,
    controller: tuple[int, int, int] = (16, 32, 64),
) -> Graph:
    """The network; with its defaults as published for CIFAR-10.

    Args:
      input_shape: (height, width, channels) of the image. The controller halves height and width twice.
      classes: that it tells apart.
      stem: channels before the first cell.
      stages: of cells, each (channels, cells, stride).
      head: channels after the last cell.
      controller: channels of its three blocks: each as many as the one before, or twice as many.

    Returns:
      A graph with the outputs `logits` (classes,) and `choices`, int32 (5 x cells,): 1 for each candidate chosen, those
      of the first cell first; see `chosen`.

    Raises:
      ValueError: height or width is no multiple of 4; there is no stage, or one without cells; the controller's
        channels are others.
    """
    if input_shape[0] % 4 or input_shape[1] % 4:
        raise ValueError(f"instanas: input_shape: expected multiples of 4 for height and width, got {input_shape}")
    graph, checked = Graph("instanas", input_shape), _checked(stages)
    flags = _controller(graph, controller, sum(stage.cells for stage in checked))
    paths = _paths(graph, flags, checked)
    x = graph.conv(graph.input, stem, 3, padding=1, activation="relu", name="stem")
    number, growth = 0, 1.0
    for stage in checked:
        for _ in range(stage.cells):
            own, none = paths[number]
            name = f"cell{number}"
            x = _first_cell(graph, x, stage, own, growth, name) if none is None else _cell(graph, x, own, none, name)
            number += 1
        growth = _GROWTH ** (stage.cells - 1)
    x = graph.conv(x, head, 1, activation="relu", gain=1 / growth, name="head")
    graph.output(logits=graph.dense(graph.global_pool(x), classes, name="classifier"), choices=flags[0].tensor)
    return graph


def chosen(
    choices: Sequence[int] | np.ndarray, stages: Sequence[tuple[int, int, int]] = STAGES
) -> dict[str, tuple[str, ...]]:
    """Which candidates computed an image.

    Args:
      choices: the network's output of that name, for one image.
      stages: as the network has them.

    Returns:
      For each cell, "cell0" on, the names of its candidates that ran, in the order of CANDIDATES; () where its input
      was its result.

    Raises:
      ValueError: choices has not five flags for each cell.
    """
    firsts = [index == 0 for stage in _checked(stages) for index in range(stage.cells)]
    flags = np.asarray(choices)
    if flags.shape != (len(firsts) * len(CANDIDATES),):
        raise ValueError(
            f"chosen: choices: expected {len(CANDIDATES)} flags for each of {len(firsts)} cells, got {flags.shape}"
        )
    found = {}
    for number, (first, row) in enumerate(zip(firsts, flags.reshape(len(firsts), -1), strict=True)):
        ran = tuple(name for name, flag in zip(CANDIDATES, row, strict=True) if flag)
        found[f"cell{number}"] = (_PLAIN,) if first and not ran else ran
    return found


def _checked(stages: Sequence[tuple[int, int, int]]) -> list[Stage]:
    if not stages or any(len(stage) != 3 or stage[1] < 1 for stage in stages):
        raise ValueError(f"stages: expected one or more of (channels, cells, stride), each with cells, got {stages!r}")
    return [Stage(*stage) for stage in stages]


def _controller(graph: Graph, channels: tuple[int, int, int], cells: int) -> tuple[Flag, ...]:
    """Flags for candidates, those of the first cell first."""
    name, bias = "controller", _CONTROLLER_BIAS
    x = graph.conv(graph.input, channels[0], 3, padding=1, activation="relu", bias_mean=bias, name=f"{name}.stem")
    for index, count in enumerate(channels):
        block, stride = f"{name}.block{index}", 1 if index == 0 else 2
        inside = graph.conv(
            x, count, 3, stride=stride, padding=1, activation="relu", bias_mean=bias, name=f"{block}.conv0"
        )
        by = x if stride == 1 else graph.avg_pool(x, 2, stride=2, name=f"{block}.pool")
        if count not in (x.channels, 2 * x.channels):
            raise ValueError(f"instanas: controller: expected as many channels as before, or twice, got {channels}")
        result = graph.conv(inside, x.channels, 3, padding=1, activation="relu6", bias_mean=bias, name=f"{block}.conv1")
        result = graph.add(result, by, name=f"{block}.add")  # neither is negative: ReLU would change nothing
        if count > x.channels:
            more = graph.conv(
                inside, x.channels, 3, padding=1, activation="relu6", bias_mean=bias, name=f"{block}.conv1b"
            )
            result = graph.concat([result, more], name=f"{block}.concat")
        x = result
    pooled = graph.global_pool(x, name=f"{name}.pool")
    logits = graph.dense(
        pooled, cells * len(CANDIDATES), gain=_LOGIT_GAIN, bias_mean=_LOGIT_BIAS, name=f"{name}.logits"
    )
    return graph.gate(logits, groups=0, name="choices")


def _paths(graph: Graph, flags: Sequence[Flag], stages: Sequence[Stage]) -> list[tuple[tuple[Flag, ...], Flag | None]]:
    """For each cell the flags of its candidates, and that of its input by itself; None for a stage's first cell.

    All of them before the first cell: who reads flags on the host has them all when it has one.
    """
    found: list[tuple[tuple[Flag, ...], Flag | None]] = []
    for index in (index for stage in stages for index in range(stage.cells)):
        own, name = tuple(flags[len(CANDIDATES) * len(found) :][: len(CANDIDATES)]), f"cell{len(found)}"
        if index:
            found.append((own, graph.none(own, name=f"{name}.none")))
        else:  # the plain convolutions run where they are chosen or no other is
            no_other = graph.none(own[:-1], name=f"{name}.no_other")
            found.append(((*own[:-1], graph.any([own[-1], no_other], name=f"{name}.plain_flag")), None))
    return found


def _first_cell(graph: Graph, x: Tensor, stage: Stage, flags: Sequence[Flag], growth: float, name: str) -> Tensor:
    """A stage's first cell: where none is chosen, the plain convolutions are."""
    results = _candidates(graph, x, stage.channels, stage.stride, flags, (1 / growth, 0.7), name)
    return graph.merge(results, flags, name=name)


def _cell(graph: Graph, x: Tensor, flags: Sequence[Flag], none: Flag, name: str) -> Tensor:
    """One of the cells after it: where none is chosen, its result is its input."""
    results = _candidates(graph, x, x.channels, 1, flags, (1.0, _RESIDUAL_GAIN), name)
    # The input by itself, and once for each bottleneck chosen.
    by = [*flags[:-1], none]
    return graph.merge([*results, *[x] * len(by)], [*flags, *by], name=name)


def _candidates(
    graph: Graph,
    x: Tensor,
    channels: int,
    stride: int,
    flags: Sequence[Flag],
    gains: tuple[float, float],
    cell: str,
) -> list[Tensor]:
    """What each candidate makes of an image, under its flag; bottlenecks without their input added."""
    first, last = gains
    results = []
    for (candidate, (kernel, times)), flag in zip(_BOTTLENECKS.items(), flags[:-1], strict=True):
        name = f"{cell}.{candidate}"
        with graph.when(flag):
            y = graph.conv(x, times * x.channels, 1, activation="relu", gain=first, name=f"{name}.expand")
            y = graph.depthwise(
                y, kernel, stride=stride, padding=kernel // 2, activation="relu", name=f"{name}.depthwise"
            )
            results.append(graph.conv(y, channels, 1, gain=last, name=f"{name}.project"))
    with graph.when(flags[-1]):
        name = f"{cell}.{_PLAIN}"
        y = graph.conv(x, channels, 3, stride=stride, padding=1, activation="relu", gain=first, name=f"{name}.conv0")
        results.append(graph.conv(y, channels, 3, padding=1, activation="relu6", gain=last, name=f"{name}.conv1"))
    return results
