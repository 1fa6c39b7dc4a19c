"""Dynamic Routing for semantic segmentation.

Li et al., "Learning Dynamic Routing for Semantic Segmentation", CVPR 2020; the graph follows the authors' repository
yanwei-li/DynamicRouting, its model Seg.Layer16 ("Dynamic-Raw").

Behind a stem that leaves a quarter of the image come layers of cells, one cell for each of four scales (the first
layers do not have all yet). A cell looks at its input and computes a gate for each path that leaves it: up to the next
finer scale, keep, and down to the next coarser one. Each gate is max(0, tanh(...)); where it is 0 the path is closed.
Where all of a cell's paths are closed, its operation (two separable convolutions and the identity) is not computed and
its input is kept as it is. A cell into which nothing has been led, by any layer so far, does not exist for this image:
neither its gates nor its operation are computed. A decoder adds up the four scales.

Where it differs:
  - A path whose gate is 0 is not computed, as the paper says. The authors' code computes it where another path of the
    cell is open, and multiplies it by 0, which comes to the same.
  - That code takes a cell's paths for closed where their gates' sum is below 1e-4; here it must be 0.
  - A scale that does not exist adds zeros to the decoder. The authors' code fails if that is the coarsest.
  - There, biases of gates start at 1.5, so that training starts with all paths open. Seeded weights here are to open
    different paths for different images; see the constants.
  - Pixels' logits are enlarged to the image's size as there; which class is the largest is left to the caller.

Parameters are as published. Multiply-adds are counted with all paths open; the publication gives the mean over images,
which open nearly all (119.5e9; its repository measured 114.9e9), and counts batch norms and activations too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from brax_concurrent.networks.arguments import check_counts
from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.published import Published
from brax_concurrent.networks.tensors import Flag, Tensor

PUBLISHED = Published(
    17_800_000,
    119_500_000_000,
    "Li et al., Learning Dynamic Routing for Semantic Segmentation, CVPR 2020, Dynamic-Raw: parameters; multiply-adds, "
    "activations and batch norms of the paths that are open in a mean image of Cityscapes, 1024x2048",
)

_SCALES = 4  # 1/4, 1/8, 1/16 and 1/32 of the image

# Of seeded weights: with these, images differ in the paths that they open, of which about 55 % are open, and what the
# cells compute neither grows nor shrinks much from layer to layer.
_GATE_GAIN = 8.0
_GATE_BIAS = (0.5, 1.0)  # mean and standard deviation
_LOOK_BIAS = (-0.3, 0.1)
_OPERATION_GAIN = 0.25
_PATH_GAIN = 0.5


@dataclass(frozen=True)
class _Path:
    """What leaves a cell in one direction: it flows where the flag is not 0, and counts times its scale, one number."""

    x: Tensor
    flag: Flag
    scale: Tensor


@dataclass(frozen=True)
class _Cell:
    """What the next layer needs of a cell.

    Attributes:
      exists: something has been led into it; None: always.
      runs: one of its paths is open.
      up, keep, down: its paths, where it has them.
      passed: its input, which flows where all of them are closed.
    """

    exists: Flag | None
    runs: Flag
    up: _Path | None
    keep: _Path
    down: _Path | None
    passed: _Path


def dynamic_routing(
    *, image_size: tuple[int, int] = (1024, 2048), layers: int = 16, channels: int = 64, classes: int = 19
) -> Graph:
    """Dynamic Routing; the defaults are those of Dynamic-Raw with 16 layers on Cityscapes.

    Args:
      image_size: height and width of the image, multiples of 32.
      layers: of cells, from 3 on: fewer do not reach the coarsest scale. Published are 16 and 33.
      channels: at a quarter of the image's size; each halving of the size doubles them.
      classes: of pixels.

    Returns:
      A graph with the output `logits` (height, width, classes).

    Raises:
      ValueError: a number is not whole or is too small, sizes are no multiples of 32, or channels are odd.
    """
    _check(image_size, layers, channels, classes)
    g = Graph("dynamic_routing", (*image_size, 3))
    builder = _Builder(g)
    cells = [builder.cell("initial", _stem(g, channels), None, up=False, down=True)]
    for index in range(layers):
        last = index == layers - 1
        cells = [
            builder.cell(
                f"layer{index}.scale{scale}",
                *builder.arrivals(f"layer{index}.scale{scale}", cells, scale),
                up=scale > 0 and not last,
                down=scale < _SCALES - 1 and not last,
            )
            for scale in range(min(index + 2, _SCALES))
        ]
    features = [builder.kept(f"feature{scale}", cell) for scale, cell in enumerate(cells)]
    g.output(logits=_decoder(g, features, image_size, classes))
    return g


class _Builder:
    """Adds cells to a graph.

    Attributes:
      graph: what is added to.
      one: a constant, (1,): the scale of what is passed on as it is.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.one: Tensor | None = None

    def cell(self, name: str, x: Tensor, exists: Flag | None, *, up: bool, down: bool) -> _Cell:
        """A cell with its gates, its operation and its paths."""
        g = self.graph
        names = ["keep", *(["up"] if up else []), *(["down"] if down else [])]
        scales = self._gates(name, x, exists, names)
        gates = g.concat(scales, name=f"{name}.gates")
        if exists is not None:
            gates = g.merge([gates], [exists], name=f"{name}.gates.existing")
        flags = g.gate(gates, groups=0, name=f"{name}.gate")
        runs = g.any(flags, name=f"{name}.runs") if len(flags) > 1 else flags[0]
        closed = g.none(flags, name=f"{name}.closed")
        if self.one is None:
            self.one = g.softmax(scales[0], name="one")  # of one element it is 1; no layer gives constants
        with g.when(runs):
            y = self._operation(name, x)
        paths = {}
        for path, flag, scale in zip(names, flags, scales, strict=True):
            with g.when(flag):
                paths[path] = _Path(self._lead(f"{name}.{path}", y, path), flag, scale)
        return _Cell(exists, runs, paths.get("up"), paths["keep"], paths.get("down"), _Path(x, closed, self.one))

    def arrivals(self, name: str, cells: Sequence[_Cell], scale: int) -> tuple[Tensor, Flag | None]:
        """The input of a cell of the next layer: the sum of what flows into it, and whether it exists."""
        finer, here, coarser = (cells[i] if 0 <= i < len(cells) else None for i in (scale - 1, scale, scale + 1))
        paths = [finer.down if finer else None, here.keep if here else None, coarser.up if coarser else None]
        paths.append(here.passed if here else None)
        x = self._sum(f"{name}.input", [path for path in paths if path is not None])
        if here is not None and here.exists is None:
            return x, None
        origins = [finer.runs if finer else None, here.exists if here else None, coarser.runs if coarser else None]
        flags = [flag for flag in origins if flag is not None]
        return x, self.graph.any(flags, name=f"{name}.exists") if len(flags) > 1 else flags[0]

    def kept(self, name: str, cell: _Cell) -> Tensor:
        """What comes out of a cell of the last layer."""
        return self._sum(name, [cell.keep, cell.passed])

    def _sum(self, name: str, paths: Sequence[_Path]) -> Tensor:
        scales = self.graph.concat([path.scale for path in paths], name=f"{name}.scales")
        return self.graph.merge([path.x for path in paths], [path.flag for path in paths], scales=scales, name=name)

    def _gates(self, name: str, x: Tensor, exists: Flag | None, names: Sequence[str]) -> list[Tensor]:
        """The tangents, each (1,): a gate is the larger of 0 and its tangent, so a path that flows is scaled by it."""
        g = self.graph
        with g.when(exists) if exists is not None else contextlib.nullcontext():
            pooled = g.global_pool(g.conv(x, x.channels // 2, activation="relu", name=f"{name}.look"))
            self._seed_bias(f"{name}.look", *_LOOK_BIAS)
            found = []
            for path in names:
                layer = f"{name}.{path}.gate"
                found.append(g.dense(pooled, 1, activation="tanh", gain=_GATE_GAIN, name=layer))
                self._seed_bias(layer, *_GATE_BIAS)
        return found

    def _seed_bias(self, layer: str, mean: float, std: float) -> None:
        self.graph.parameters[f"{layer}.bias"] = dataclasses.replace(
            self.graph.parameters[f"{layer}.bias"], mean=mean, std=std
        )

    def _operation(self, name: str, x: Tensor) -> Tensor:
        """Two separable convolutions and the identity; all paths begin with the same ReLU, which is here too."""
        g = self.graph
        y = g.separable(x, x.channels, 3, padding=1, activation="relu", name=f"{name}.first")
        y = g.depthwise(y, 3, padding=1, norm=False, name=f"{name}.second.depthwise")
        y = g.conv(y, x.channels, gain=_OPERATION_GAIN, name=f"{name}.second.pointwise")
        return g.add(x, y, activation="relu", name=f"{name}.sum")

    def _lead(self, name: str, y: Tensor, path: str) -> Tensor:
        """What a cell has computed, at the scale that a path leads to."""
        g = self.graph
        if path == "up":
            finer = g.conv(y, y.channels // 2, activation="relu", gain=_PATH_GAIN, name=f"{name}.conv")
            return g.resize(finer, (2 * y.shape[0], 2 * y.shape[1]), name=f"{name}.resize")
        if path == "down":
            channels = 2 * y.channels
            return g.conv(y, channels, stride=2, padding=0, activation="relu", gain=_PATH_GAIN, name=f"{name}.conv")
        return y


def _stem(g: Graph, channels: int) -> Tensor:
    """A quarter of the image's height and width."""
    x = g.conv(g.input, channels, 3, stride=2, padding=0, activation="relu", name="stem.first")
    x = g.separable(x, channels, 3, padding=1, activation="relu", name="stem.second")
    return g.separable(x, channels, 3, stride=2, padding=1, activation="relu", name="stem.third")


def _decoder(g: Graph, features: Sequence[Tensor], size: tuple[int, int], classes: int) -> Tensor:
    """From coarse to fine: the sum so far is projected to the next scale's channels, enlarged and added to it."""
    x = features[-1]
    for scale in range(len(features) - 1, 0, -1):
        x = g.conv(x, x.channels // 2, activation="relu", name=f"decoder{scale}")
        x = g.resize(x, (2 * x.shape[0], 2 * x.shape[1]), name=f"decoder{scale}.resize")
        x = g.add(x, features[scale - 1], name=f"decoder{scale}.sum")
    x = g.conv(x, x.channels, activation="relu", name="decoder0")
    x = g.conv(x, classes, 3, padding=1, norm=False, bias=True, name="predictor")
    return g.resize(x, size, name="logits")


def _check(image_size: tuple[int, int], layers: int, channels: int, classes: int) -> None:
    name = "dynamic_routing"
    if len(image_size) != 2:
        raise ValueError(f"{name}: image_size: expected a height and a width, got {image_size!r}")
    if any(n % 32 for n in image_size):
        raise ValueError(f"{name}: image_size: expected multiples of 32, got {image_size!r}")
    check_counts(name, 32, height=image_size[0], width=image_size[1])
    check_counts(name, 3, layers=layers)
    check_counts(name, channels=channels, classes=classes)
    if channels % 2:
        raise ValueError(f"{name}: channels: expected an even number, got {channels}")
