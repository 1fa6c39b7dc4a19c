"""A network's weights: drawn from a seed, or read from a file, and held against the network."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from brax_concurrent.networks.arguments import is_whole
from brax_concurrent.networks.graph import Graph


def seeded_weights(graph: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by name, float32, drawn from the normal distributions that the graph names.

    Each array depends on the seed and its place among the graph's parameters, by NumPy's Philox.

    Raises:
      ValueError: the seed is no whole number from 0 on of 63 bits.
    """
    if not is_whole(seed) or not 0 <= seed < 1 << 63:
        raise ValueError(f"seed: expected a whole number from 0 to {(1 << 63) - 1}, got {seed!r}")
    found = {}
    for index, (name, each) in enumerate(graph.parameters.items()):
        random = np.random.Generator(np.random.Philox(key=[seed, index]))
        found[name] = each.mean + each.std * random.standard_normal(each.shape, np.float32)
    return {name: np.asarray(array, np.float32) for name, array in found.items()}


def checked_weights(graph: Graph, weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The graph's weights as float32 arrays.

    Raises:
      ValueError: names, shapes or dtypes do not fit; all that do not are listed.
    """
    wrong = [f"{name}: missing" for name in graph.parameters if name not in weights]
    wrong += [f"{name}: the network has none" for name in weights if name not in graph.parameters]
    found = {}
    for name, parameter in graph.parameters.items():
        if name in weights:
            array = np.asarray(weights[name])
            if array.shape != parameter.shape:
                wrong.append(f"{name}: expected the shape {parameter.shape}, got {array.shape}")
            elif array.dtype != np.float32:
                wrong.append(f"{name}: expected float32, got {array.dtype}")
            found[name] = array
    if wrong:
        raise ValueError("\n  ".join([f"weights do not fit {graph.name}:", *wrong]))
    return {name: np.require(array, requirements=["C", "A"]) for name, array in found.items()}


def load_weights(graph: Graph, path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Weights from an .npz file, as `numpy.savez` writes it, with the names of `graph.parameters`.

    Raises:
      TypeError: it is no path.
      ValueError: the file is none, or what is in it does not fit; see `checked_weights`.
      OSError: it cannot be read.
    """
    if not isinstance(path, (str, os.PathLike)):  # a number would be a file that the process has open
        raise TypeError(f"weights: expected arrays by name or the path of an .npz file, got {type(path).__name__}")
    if not os.path.exists(path):
        raise FileNotFoundError(f"weights: there is no file {os.fspath(path)}")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"weights: {os.fspath(path)}: expected an .npz file, as numpy.savez writes it")
    with np.load(path, allow_pickle=False) as file:
        return checked_weights(graph, dict(file))
