"""Networks of stacked cells, as NASNet and AmoebaNet: what a search has found is two cells, given here as data.

Zoph et al. 2018, Learning Transferable Architectures for Scalable Image Recognition, arXiv 1707.07012. Followed is
the authors' code: tensorflow/models, research/slim/nets/nasnet, and tensorflow/tpu, models/official/amoeba_net, which
has grown out of it. A cell sees the outputs of the two cells before it. It brings both to its own channels (states 0
and 1), adds five more states, each the sum of two operations on earlier ones, and concatenates some. Reduction cells
halve height and width: operations on states 0 and 1 have stride 2.

What differs from that code computes the same:
- A ReLU is done once for all that read it, and where only ReLUs read a layer's result, it is part of that layer.
- A pooling that a cell has twice is done once.
- Taking every second pixel before a 1x1 convolution is that convolution's stride.
- 1x7 and 7x1 convolutions with stride 2 in one direction each: the first is done at every pixel of a row, and the
  second takes every second.
Drop path, dropout and the auxiliary head are for training only and left off, and so is the final softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

from brax_concurrent.networks.arguments import check_counts
from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.tensors import Tensor, explicit_pads, image_shape

# Seeded weights: cells add up states, which would grow from cell to cell with He's standard deviation.
_GAIN = 0.7
_BOTTLENECK = 4  # 1x7 and 7x1 convolutions work on this part of the channels

Operand = tuple[str, int]  # an operation and the state that it is done to


@dataclass(frozen=True)
class Cell:
    """What a search has found.

    Attributes:
      steps: the two operations that are added up to states 2 to 6. "none" leaves a state as it is, where its shape
        fits; "separable_5x5" is two separable convolutions; "avg_pool_3x3" and "max_pool_3x3"; "1x7_7x1".
      outputs: the states that are concatenated.
    """

    steps: tuple[tuple[Operand, Operand], ...]
    outputs: tuple[int, ...]

    def only_rectified(self, state: int) -> bool:
        """All operations on a state begin with a ReLU."""
        return all(_begins_with_relu(operation) for step in self.steps for operation, read in step if read == state)


def _begins_with_relu(operation: str) -> bool:
    return operation.startswith("separable") or operation == "1x7_7x1"


def cell_network(
    name: str,
    normal: Cell,
    reduction: Cell,
    *,
    image_size: int,
    filters: int,
    stem_filters: int,
    repeats: int,
    classes: int,
) -> Graph:
    """Two reduction cells as stem, then three times `repeats` normal cells, with reduction cells between.

    Args:
      name: of the network.
      normal, reduction: its cells.
      image_size: height and width of the image, of 3 channels.
      filters: channels of the first normal cells' states, from 16 on: the stem's first cell has a quarter of
        them, and each reduction cell between normal ones doubles them.
      stem_filters: of the first convolution.
      repeats: normal cells of one size, the publications' N.
      classes: of the output.

    Returns:
      A graph with the output `logits` (classes,).

    Raises:
      ValueError: a number is not whole or is too small.
    """
    check_counts(name, stem_filters=stem_filters, repeats=repeats, classes=classes)
    check_counts(name, 3, image_size=image_size)
    check_counts(name, 16, filters=filters)
    graph = Graph(name, (image_size, image_size, 3))
    build = _Builder(graph)
    cells = [_Placed("stem_0", reduction, filters // 4, 2), _Placed("stem_1", reduction, filters // 2, 2)]
    for stage in range(3):
        if stage:
            cells.append(_Placed(f"reduction_{stage - 1}", reduction, filters << stage, 2))
        cells += [_Placed(f"cell_{stage * repeats + i}", normal, filters << stage, 1) for i in range(repeats)]
    net = graph.conv(graph.input, stem_filters, 3, stride=2, padding="VALID", gain=_GAIN, name="stem")
    previous: Tensor | None = None
    for index, placed in enumerate(cells):
        rectify = not _fits(placed, net.shape[0], cells[index + 1 : index + 3])
        previous, net = net, build.cell(placed, net, previous, rectify)
    graph.output(logits=graph.dense(graph.global_pool(build.relu(net), name="mean"), classes, name="logits"))
    return graph


@dataclass(frozen=True)
class _Placed:
    """A cell in a network: its name, what it does, channels of its states, and its stride."""

    name: str
    cell: Cell
    filters: int
    stride: int


def _fits(placed: _Placed, size: int, after: list[_Placed]) -> bool:
    """The cell after the next takes this one's output as it is, without a ReLU: its size and channels fit."""
    if len(after) < 2:
        return False
    following, reader = after
    size = -(-size // placed.stride)
    return size == -(-size // following.stride) and placed.filters * len(placed.cell.outputs) == reader.filters


class _Builder:
    """Cells of one graph. Remembers what has been pooled and rectified, and which tensors are rectified already."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._rectified: dict[Tensor, Tensor] = {}
        self._pooled: dict[tuple[Tensor, str, int], Tensor] = {}

    def relu(self, x: Tensor) -> Tensor:
        if x not in self._rectified:
            self._rectified[x] = self.graph.activation(x, "relu", name=f"{x.name}.relu")
        return self._rectified[x]

    def cell(self, placed: _Placed, net: Tensor, previous: Tensor | None, rectify: bool) -> Tensor:
        """A cell's output, rectified or not."""
        name, cell, filters, stride = placed.name, placed.cell, placed.filters, placed.stride
        only = [
            cell.only_rectified(state) and (rectify or state not in cell.outputs)
            for state in range(2 + len(cell.steps))
        ]
        states = [
            self.point(self.relu(net), filters, f"{name}.net", rectify=only[0]),
            net if previous is None else self._fit(previous, net, filters, f"{name}.previous", rectify=only[1]),
        ]
        for index, step in enumerate(cell.steps, 2):
            terms = [
                self._operation(operation, states[read], filters, stride if read < 2 else 1, f"{name}.{index}.{side}")
                for (operation, read), side in zip(step, ("left", "right"), strict=True)
            ]
            total = self.graph.add(*terms, activation="relu" if only[index] else None, name=f"{name}.{index}")
            states.append(self._mark(total, only[index]))
        outputs = [self.relu(states[index]) if rectify else states[index] for index in cell.outputs]
        return self._mark(self.graph.concat(outputs, name=name), rectify)

    def point(self, x: Tensor, filters: int, name: str, *, stride: int = 1, rectify: bool = False) -> Tensor:
        """A 1x1 convolution and its batch norm."""
        y = self.graph.conv(x, filters, stride=stride, activation="relu" if rectify else None, gain=_GAIN, name=name)
        return self._mark(y, rectify)

    def _mark(self, x: Tensor, rectified: bool) -> Tensor:
        if rectified:
            self._rectified[x] = x
        return x

    def _fit(self, previous: Tensor, net: Tensor, filters: int, name: str, *, rectify: bool) -> Tensor:
        """The output before the last, in the last's size and with the cell's channels."""
        if previous.shape[:2] != net.shape[:2]:
            return self._factorized_reduction(self.relu(previous), filters, name, rectify=rectify)
        if previous.channels != filters:
            return self.point(self.relu(previous), filters, name, rectify=rectify)
        return previous

    def _factorized_reduction(self, x: Tensor, filters: int, name: str, *, rectify: bool) -> Tensor:
        """Every second pixel to one half of the channels, and those right below them to the other.

        Behind the last row and column are zeros.
        """
        activation = "relu" if rectify else None
        shifted = ((-1, 1), (-1, 1))
        halves = [
            self.graph.conv(
                x, count, stride=2, padding=padding, activation=activation, gain=_GAIN, name=f"{name}.{path}"
            )
            for count, padding, path in (
                (filters // 2, "VALID", "path1"),
                (filters - filters // 2, shifted, "path2"),
            )
        ]  # fmt: skip
        return self._mark(self.graph.concat(halves, name=name), rectify)

    def _operation(self, operation: str, x: Tensor, filters: int, stride: int, name: str) -> Tensor:
        if operation == "none":
            fits = stride == 1 and x.channels == filters
            return x if fits else self.point(self.relu(x), filters, name, stride=stride)
        if operation == "1x7_7x1":
            return self._row_and_column(x, filters, stride, name)
        kernel = int(operation[-1])
        if operation.startswith("separable"):
            y = self._separable(self.relu(x), filters, kernel, stride, f"{name}.1", activation="relu")
            return self._separable(y, filters, kernel, 1, f"{name}.2", activation=None)
        y = self._pool(operation, x, kernel, stride, name)
        return y if y.channels == filters else self.point(y, filters, f"{name}.1x1")

    def _pool(self, operation: str, x: Tensor, kernel: int, stride: int, name: str) -> Tensor:
        found = self._pooled.get((x, operation, stride))
        if found is None:
            pool = {"avg": self.graph.avg_pool, "max": self.graph.max_pool}[operation[:3]]
            found = pool(x, kernel, stride=stride, padding="SAME", name=name)
            self._pooled[x, operation, stride] = found
        return found

    def _separable(
        self, x: Tensor, filters: int, kernel: int, stride: int, name: str, *, activation: str | None
    ) -> Tensor:
        deep = self.graph.depthwise(x, kernel, stride=stride, norm=False, name=f"{name}.depthwise")
        return self.graph.conv(deep, filters, activation=activation, gain=_GAIN, name=f"{name}.pointwise")

    def _row_and_column(self, x: Tensor, filters: int, stride: int, name: str) -> Tensor:
        """A bottleneck of 1x1, 1x7, 7x1 and 1x1 convolutions, each behind a ReLU."""
        narrow = filters // _BOTTLENECK
        x = self.graph.conv(self.relu(x), narrow, activation="relu", name=f"{name}.pre")
        x = self.graph.conv(x, narrow, (1, 7), activation="relu", name=f"{name}.1x7")
        # Rows are padded as "SAME" has it. Columns are taken where a 1x7 convolution with this stride would be centred:
        # its first window hangs out by `left`, so it is centred 3 - left pixels from the border.
        height, width, _ = image_shape(x)
        rows, (left, _) = explicit_pads("SAME", (height, width), (7, 7), stride)
        x = self.graph.conv(
            x, narrow, (7, 1), stride=stride, padding=(rows, (left - 3, 0)), activation="relu", name=f"{name}.7x1"
        )
        return self.point(x, filters, f"{name}.post")
