"""Random networks: layers of any kind on any tensors that came before, with gates, branches and parts of parts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.tensors import Flag, Tensor

_SIDES = (1, 2, 3, 5, 8)


def random_graph(seed: int, layers: int = 16, activations: tuple[str | None, ...] = (None, "relu")) -> Graph:
    """A graph of about so many layers; the same for the same arguments."""
    random = np.random.default_rng(seed)
    sides = random.choice(_SIDES, 2)
    graph = Graph(f"random_{seed}", (int(sides[0]), int(sides[1]), int(random.integers(1, 5))))
    builder = _Builder(graph, random, activations)
    while len(graph.layers) < layers:
        builder.step()
    builder.outputs()
    return graph


@dataclass
class _Builder:
    graph: Graph
    random: np.random.Generator
    activations: tuple[str | None, ...]
    known: list[Tensor] = field(default_factory=list)  # written whatever the image
    local: list[Tensor] = field(default_factory=list)  # written under the flag of the block that is open
    flags: list[Flag] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = [self.graph.input]

    def chance(self, of: float) -> bool:
        return bool(self.random.random() < of)

    def pick(self, images: bool | None = None) -> Tensor:
        """A tensor, mostly a recent one."""
        known = [*self.known, *self.local]
        if images is not None:
            known = [x for x in known if (len(x.shape) == 3) == images]
        if not known:
            return self.vector()
        back = min(int(self.random.exponential(4)), len(known) - 1)
        return known[-1 - back]

    def vector(self) -> Tensor:
        return self.keep(self.graph.global_pool(self.pick(images=True)))

    def keep(self, tensor: Tensor) -> Tensor:
        (self.known if self.graph._when is None else self.local).append(tensor)
        return tensor

    def like(self, x: Tensor, count: int) -> list[Tensor]:
        """Tensors of x's shape, maybe x more than once."""
        same = [each for each in (*self.known, *self.local) if each.shape == x.shape]
        return [x, *(same[self.random.integers(len(same))] for _ in range(count - 1))]

    def activation(self) -> str | None:
        return self.activations[self.random.integers(len(self.activations))]

    def step(self) -> None:
        if self.chance(0.15):
            self.branches()
        elif self.chance(0.1):
            self.gates()
        else:
            self.layer()

    def layer(self) -> Tensor:
        images = (self.conv, self.depthwise, self.pool, self.resize, self.multiply, self.mixed)
        vectors = (self.dense, self.softmax)
        any_of = (self.add, self.concat, self.concat, self.weighted, self.vector)
        kinds = (*images, *vectors, *any_of)
        return self.keep(kinds[self.random.integers(len(kinds))]())

    def conv(self) -> Tensor:
        n = self.random.integers
        x, size = self.pick(images=True), (int(n(1, 4)), int(n(1, 4)))
        return self.graph.conv(
            x, int(n(1, 7)), size, stride=int(n(1, 3)), dilation=int(n(1, 3)), norm=self.chance(0.5),
            activation=self.activation(),
        )  # fmt: skip

    def depthwise(self) -> Tensor:
        n = self.random.integers
        return self.graph.depthwise(self.pick(images=True), int(n(1, 4)), stride=int(n(1, 4)))

    def pool(self) -> Tensor:
        n, kind = self.random.integers, self.graph.max_pool if self.chance(0.5) else self.graph.avg_pool
        return kind(self.pick(images=True), int(n(1, 4)), stride=int(n(1, 3)), padding="SAME")

    def resize(self) -> Tensor:
        x = self.pick(images=True)
        size = tuple(min(n + int(self.random.integers(0, 4)), 18) if n < 18 else n for n in x.shape[:2])
        return self.graph.resize(x, size, "linear" if self.chance(0.5) else "nearest")

    def multiply(self) -> Tensor:
        x = self.pick(images=True)
        return self.graph.multiply(x, self.graph.dense(self.pick(images=False), x.channels, activation="sigmoid"))

    def mixed(self) -> Tensor:
        routing = self.graph.dense(self.pick(images=False), int(self.random.integers(1, 4)), activation="sigmoid")
        x = self.pick(images=True)
        if self.chance(0.5):
            return self.graph.mixed_depthwise(x, routing, 3, stride=int(self.random.integers(1, 3)))
        return self.graph.mixed_conv(x, routing, int(self.random.integers(1, 6)), int(self.random.integers(1, 3)))

    def dense(self) -> Tensor:
        return self.graph.dense(
            self.pick(images=False),
            int(self.random.integers(1, 7)),
            bias=self.chance(0.5),
            activation=self.activation(),
        )

    def softmax(self) -> Tensor:
        return self.graph.softmax(self.pick())

    def add(self) -> Tensor:
        return self.graph.add(*self.like(self.pick(), int(self.random.integers(1, 4))), activation=self.activation())

    def weighted(self) -> Tensor:
        return self.graph.weighted_sum(self.like(self.pick(), int(self.random.integers(1, 3))))

    def concat(self) -> Tensor:
        x, count = self.pick(), int(self.random.integers(1, 4))
        same = [each for each in (*self.known, *self.local) if each.shape[:-1] == x.shape[:-1] and each.channels < 9]
        xs = [x, *(same[self.random.integers(len(same))] for _ in range(count - 1) if same)]
        return self.graph.concat([xs[i] for i in self.random.permutation(len(xs))])

    def gates(self) -> None:
        groups = int(self.random.integers(0, 4))
        count = max(groups, 1) * int(self.random.integers(1, 4))
        found = self.graph.gate(self.graph.dense(self.pick(images=False), count, gain=2.0), groups=groups)
        self.flags += found
        if self.chance(0.4):
            some = [self.flags[i] for i in self.random.integers(len(self.flags), size=3)]
            self.flags.append((self.graph.any if self.chance(0.5) else self.graph.none)(some))

    def branches(self) -> None:
        """Some layers under some flags, and their sum."""
        if not self.flags:
            self.gates()
        count, x = int(self.random.integers(1, 4)), self.pick()
        chosen = [self.flags[i] for i in self.random.integers(len(self.flags), size=count)]
        found = []
        for flag in chosen:
            with self.graph.when(flag):
                self.local = []
                for _ in range(int(self.random.integers(0, 3))):
                    self.layer()
                found.append(self.branch(x))
                if self.chance(0.3):  # gates of the branch's own
                    inner = self.graph.gate(self.graph.dense(self.pick(images=False), 2))
                    found[-1] = self.graph.merge([found[-1], x], inner)
            self.local = []
        if self.chance(0.2):  # the same twice
            found.append(found[0])
            chosen.append(chosen[0])
        scales = self.graph.dense(self.pick(images=False), len(found)) if self.chance(0.3) else None
        self.keep(self.graph.merge(found, chosen, scales=scales, activation=self.activation()))

    def branch(self, x: Tensor) -> Tensor:
        """Something of x's shape."""
        if len(x.shape) == 1:
            return self.graph.dense(self.pick(images=False), x.channels)
        return self.graph.conv(x, x.channels, int(self.random.integers(1, 4)), activation=self.activation())

    def outputs(self) -> None:
        count = min(len(self.known), int(self.random.integers(1, 5)))
        found = {f"y{i}": self.known[-1 - i * 2] for i in range(count) if 2 * i < len(self.known)}
        if self.chance(0.3):
            found["again"] = found["y0"]
        if self.chance(0.2):
            found["image"] = self.graph.input
        if self.flags and self.chance(0.5):
            found["flags"] = self.flags[-1].tensor
        self.graph.output(**found)
