"""RandWire: each stage's layers are wired as a random graph, so many of them can run at once.

Xie et al. 2019, Exploring Randomly Wired Neural Networks for Image Recognition, arXiv 1904.01569: the generator WS(4,
0.75) of Watts and Strogatz, in the small computation regime, with 32 nodes a stage and C = 78. A node sums up what
comes in, each times the sigmoid of a trained number, and does a ReLU, a separable 3x3 convolution (nothing between
depthwise and pointwise) and a batch norm. Nodes without predecessors read the stage's input, with stride 2; the
stage's output is the mean of nodes without successors.

The authors' code is not public. Where the paper leaves something open, JiaminRen/RandWireNN is followed: a node with
one predecessor has no trained number for it, which the batch norm's scale would make superfluous, and between the last
convolution and the mean over pixels there is a ReLU. The first two convolutions are whole ones, as the paper's table
has it and its multiply-adds show.

What differs computes the same: of a stage's mean there is only the sum, since what reads it is linear after its ReLU,
so that the division is part of the weights, as normalisation is. ReLUs are part of the layer before, where only they
read it. Dropout and the softmax are left off.
"""

from __future__ import annotations

import math
from random import Random

from brax_concurrent.networks.arguments import check_counts
from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.published import Published
from brax_concurrent.networks.tensors import Tensor

PUBLISHED = Published(
    parameters=5_600_000,
    multiply_adds=583_000_000,
    source="Xie et al. 2019, table 2, RandWire-WS, small regime, 224x224; over wirings ± 0.1 and 6.2 millions",
)

Wiring = tuple[tuple[int, ...], ...]  # by node, the nodes that it reads, ascending; all come before it

_STAGES = (1, 2, 4)  # channels, in units of the first's


def watts_strogatz(nodes: int, degree: int, rewiring: float, random: Random) -> Wiring:
    """A small-world graph by Watts and Strogatz 1998, directed from earlier to later nodes.

    Nodes on a ring are joined to `degree / 2` neighbours on each side. Then, for the nearest neighbours first and
    clockwise, each edge from a node to a next one is led, with a probability, to another node: any to which there is
    none yet.

    Args:
      nodes: how many.
      degree: edges at a node, on average; even, and less than `nodes`.
      rewiring: the probability.
      random: what is drawn from.

    Raises:
      ValueError: the degree or the probability is not as said.
    """
    if degree < 2 or degree % 2 or degree >= nodes:
        raise ValueError(f"watts_strogatz: degree: expected an even number from 2 to {nodes - 1}, got {degree}")
    if not 0.0 <= rewiring <= 1.0:
        raise ValueError(f"watts_strogatz: rewiring: expected a probability, got {rewiring!r}")
    steps = range(1, degree // 2 + 1)
    joined = [{(node + way * step) % nodes for step in steps for way in (1, -1)} for node in range(nodes)]
    for step in steps:
        for node in range(nodes):
            if random.random() >= rewiring:
                continue
            others = [other for other in range(nodes) if other != node and other not in joined[node]]
            if not others:
                continue
            old, new = (node + step) % nodes, others[int(random.random() * len(others))]
            joined[node] ^= {old, new}
            joined[old].remove(node)
            joined[new].add(node)
    return tuple(tuple(sorted(other for other in joined[node] if other < node)) for node in range(nodes))


def randomwire(
    *,
    image_size: int = 224,
    channels: int = 78,
    nodes: int = 32,
    degree: int = 4,
    rewiring: float = 0.75,
    features: int = 1280,
    classes: int = 1000,
    seed: int = 0,
) -> Graph:
    """RandWire-WS in the small regime; the defaults are as published, but for the seed.

    Args:
      image_size: height and width of the image, of 3 channels.
      channels: of the first stage's nodes; each later one of the three doubles them.
      nodes: of each stage.
      degree, rewiring: see `watts_strogatz`.
      features: of the last convolution.
      classes: of the output.
      seed: of the wiring: for one, all machines and versions draw the same.

    Returns:
      A graph with the output `logits` (classes,).

    Raises:
      ValueError: an argument is out of range.
    """
    check_counts("randomwire", image_size=image_size, nodes=nodes, features=features, classes=classes)
    check_counts("randomwire", 2, channels=channels)
    check_counts("randomwire", 0, seed=seed)
    random = Random(seed)
    graph = Graph("randomwire", (image_size, image_size, 3))
    x = graph.conv(graph.input, channels // 2, 3, stride=2, padding=1, activation="relu", name="conv1")
    x = graph.conv(x, channels, 3, stride=2, padding=1, activation="relu", name="conv2")
    summands = 1  # of the sum that stands for a mean
    for index, units in enumerate(_STAGES, 3):
        wiring = watts_strogatz(nodes, degree, rewiring, random)
        x = _stage(graph, x, summands, units * channels, wiring, f"conv{index}")
        summands = len(_last(wiring))
    x = graph.conv(x, features, activation="relu", gain=1 / math.sqrt(summands), name="features")
    graph.output(logits=graph.dense(graph.global_pool(x, name="mean"), classes, name="logits"))
    return graph


def _last(wiring: Wiring) -> tuple[int, ...]:
    """Nodes without successors."""
    read = {source for sources in wiring for source in sources}
    return tuple(node for node in range(len(wiring)) if node not in read)


def _stage(graph: Graph, x: Tensor, summands: int, channels: int, wiring: Wiring, name: str) -> Tensor:
    """A stage's nodes.

    Args:
      graph: what they are added to.
      x: the stage's input, rectified.
      summands: it is the sum of so many, where the paper has their mean.
      channels: of all nodes.
      wiring: of the nodes.
      name: of the stage.

    Returns:
      The sum of its last nodes, rectified.
    """
    last = _last(wiring)
    # Nodes that are read only where a ReLU follows at once.
    summed = {source for sources in wiring if len(sources) > 1 for source in sources}
    rectified: dict[int, Tensor] = {}
    values: list[Tensor] = []
    for node, sources in enumerate(wiring):
        label = f"{name}.{node}"
        if len(sources) > 1:
            entry = graph.weighted_sum([values[i] for i in sources], activation="relu", name=f"{label}.sum")
        elif sources:
            (source,) = sources
            if source not in rectified:
                rectified[source] = graph.activation(values[source], "relu", name=f"{name}.{source}.relu")
            entry = rectified[source]
        else:
            entry = x
        alone = node not in summed and node not in last
        deep = graph.depthwise(
            entry, 3, stride=1 if sources else 2, padding=1, norm=False,
            gain=1.0 if sources else 1 / math.sqrt(summands), name=f"{label}.depthwise",
        )  # fmt: skip
        gain = 1.2 / math.sqrt(max(2, len(sources)))  # as batch norms would, seeded weights keep a node's values near 1
        value = graph.conv(deep, channels, activation="relu" if alone else None, gain=gain, name=f"{label}.pointwise")
        values.append(value)
        if alone:
            rectified[node] = value
    return graph.add(*(values[node] for node in last), activation="relu", name=name)
