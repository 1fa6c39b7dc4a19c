"""What a graph has, and whether what its methods are given is of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from brax_concurrent.networks.arguments import checked_shape
from brax_concurrent.networks.tensors import Flag, Layer, Parameter, Tensor, check_tensor


class GraphBase:
    """Layers, tensors, names and weights, see Graph; its methods add some."""

    def __init__(self, name: str, input_shape: tuple[int, int, int]):
        self.name = name
        self.input = Tensor("input", checked_shape(name, "input_shape", input_shape, (3,), "(height, width, channels)"))
        self.layers: list[Layer] = []
        self.parameters: dict[str, Parameter] = {}
        self.outputs: dict[str, Tensor] = {}
        self.batch_norms = 0
        self._when: Flag | None = None
        self._names: dict[str, None] = {"input": None}
        self._made: dict[Tensor, Flag | None] = {self.input: None}  # and under which flag
        self._needs: dict[Tensor, tuple[Flag, ...]] = {self.input: ()}  # undefined where one of these is 0
        self._any_of: dict[Tensor, tuple[Flag, ...]] = {}  # flags that are 1 where one of these is

    def __repr__(self) -> str:
        about = f"layers={len(self.layers)}, parameters={self.parameter_count}"
        return f"Graph({self.name!r}, input_shape={self.input.shape}, {about})"

    # -- what it comes to --

    @property
    def parameter_count(self) -> int:
        """Trained numbers, as publications count them: with two for each channel that is normalised."""
        return sum(each.size for each in self.parameters.values()) + self.batch_norms

    @property
    def multiply_adds(self) -> int:
        """Of an inference in which every layer runs."""
        return sum(layer.multiply_adds for layer in self.layers)

    def _new_name(self, kind: str, name: str | None) -> str:
        if name is None:
            made_up = (f"{kind}_{number}" for number in itertools.count(len(self.layers)))
            name = next(each for each in made_up if each not in self._names)
        if not isinstance(name, str):
            raise TypeError(f"{self.name}: name: expected a string, got {name!r}")
        if name in self._names:
            raise ValueError(f"{self.name}: name: {name!r} is taken")
        self._names[name] = None
        return name

    def _lists(self) -> tuple[Any, ...]:
        """What grows as layers are added, see undo.py."""
        return self.layers, self.parameters, self.outputs, self._names, self._made, self._needs, self._any_of

    def _check_own(self, what: str, x: Any) -> None:
        try:
            check_tensor(x)
        except TypeError as error:
            raise TypeError(f"{self.name}: {what}: {error}") from None
        if x not in self._made:
            raise ValueError(f"{self.name}: {what}: {x.name} is a tensor of another graph")

    def _check_named(self, unnamed: tuple[Any, ...]) -> None:
        if unnamed:
            raise TypeError(f"{self.name}: output: expected tensors by name, such as output(scores=x), got one without")

    def _check_defined(self, what: str, x: Tensor, when: Flag | None) -> None:
        """Whether a tensor has been computed wherever a flag is not 0; None: everywhere."""
        if not all(when is not None and self._implies(when, flag) for flag in self._needs[x]):
            raise ValueError(
                f"{self.name}: {what}: {x.name} is computed under a flag, and undefined where that is 0: read it under "
                "the same flag, or by merge with it"
            )

    def _implies(self, flag: Flag, other: Flag) -> bool:
        """Whether another flag is not 0 wherever a flag is not: they are the same, or the other is any of some."""
        return flag == other or any(self._implies(flag, each) for each in self._any_of.get(other.tensor, ()))

    def _tensors(self, what: str, xs: Any) -> tuple[Tensor, ...]:
        """Tensors of this graph."""
        if isinstance(xs, Tensor) or not isinstance(xs, Iterable):
            raise TypeError(f"{self.name}: {what}: expected a sequence of tensors, got {type(xs).__name__}")
        found = tuple(xs)
        for x in found:
            self._check_own(what, x)
        return found

    def _flags(self, what: str, flags: Any) -> tuple[Flag, ...]:
        """Flags of this graph that have been computed wherever the next layer runs."""
        found = tuple(flags) if isinstance(flags, Iterable) else (None,)
        for flag in found:
            if not isinstance(flag, Flag):
                got = type(flags if flag is None else flag).__name__
                raise TypeError(f"{self.name}: {what}: expected flags, as gate returns them, got {got}")
            self._check_own(what, flag.tensor)
            if flag.tensor.dtype != "int32" or not 0 <= flag.index < flag.tensor.size:
                raise ValueError(f"{self.name}: {what}: {flag.tensor.name} has no flag {flag.index}")
            if self._made[flag.tensor] not in (None, self._when):
                raise ValueError(
                    f"{self.name}: {what}: {flag.tensor.name} is computed under a flag itself, and undefined where "
                    "that is 0. Let the gate look at a merge behind that block: merge of nothing is zeros"
                )
        return found
