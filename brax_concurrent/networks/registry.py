"""The networks by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.published import Published


@dataclass(frozen=True)
class Entry:
    """A network that has a name.

    Attributes:
      module: of this package; its function of the same name makes the graph.
      dynamic: whether what it computes depends on the image.
      small: arguments for a version that a CPU infers in a moment, to try it and to test it.
    """

    module: str
    dynamic: bool
    small: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def build(self) -> Callable[..., Graph]:
        """The function that makes the graph."""
        return getattr(self._loaded(), self.module)

    @property
    def published(self) -> Published:
        """What its publication says."""
        return self._loaded().PUBLISHED

    def _loaded(self) -> Any:
        return import_module(f"{__package__}.{self.module}")


def _entry(module: str, dynamic: bool, **small: Any) -> Entry:
    return Entry(module, dynamic, MappingProxyType(small))


NETWORKS: dict[str, Entry] = {
    "instanas": _entry("instanas", True, input_shape=(16, 16, 3), stem=8, head=32, stages=((8, 2, 1), (12, 2, 2))),
    "dynamic_routing": _entry("dynamic_routing", True, image_size=(64, 64), layers=6, channels=16, classes=5),
    "condconv": _entry("condconv", False, image_size=48, width=0.25, depth=0.5, classes=10),
    "squeezenet": _entry("squeezenet", False, image_size=64, squeeze=4, classes=10),
    "randomwire": _entry("randomwire", False, image_size=64, channels=8, nodes=10, features=64, classes=10),
    "nasnet": _entry("nasnet", False, image_size=64, filters=16, stem_filters=8, repeats=1, classes=10),
    "amoebanet": _entry("amoebanet", False, image_size=64, filters=16, stem_filters=8, repeats=1, classes=10),
}


def list_networks() -> list[str]:
    """The names that `make_network` knows."""
    return sorted(NETWORKS)


def make_network(name: str, **arguments: Any) -> Graph:
    """A network's graph by its name, for `Network`.

    Args:
      name: one of `list_networks()`.
      arguments: of the function that makes it, such as the size of the image; without any it is the published one.

    Raises:
      ValueError: there is no such network, or an argument does not fit.
      TypeError: it takes no such argument; the message has those that it takes.
    """
    build = entry_of(name).build
    valid = list(inspect.signature(build).parameters)
    for argument in arguments:
        if argument not in valid:
            raise TypeError(f"{name}: expected arguments among {', '.join(valid)}, got {argument!r}")
    return build(**arguments)


def entry_of(name: str) -> Entry:
    """What is known of a network; a ValueError with the names that are near if it is not known."""
    if name in NETWORKS:
        return NETWORKS[name]
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), NETWORKS, n=2)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ValueError(f"network: there is no {name!r}; {hint}known: {', '.join(list_networks())}")
