"""What tests of networks share: a network's results for a random image, and what must hold of any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from brax_concurrent.networks.as_jax import as_jax
from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.images import random_images
from brax_concurrent.networks.weights import seeded_weights


def run(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of JAX returns, compiled without optimisation: compiling takes longer than all else here."""
    return jax.jit(function).lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})(*args)


def results(graph: Graph, branches: str = "mask", seed: int = 0) -> dict[str, np.ndarray]:
    """Outputs by name, for seeded weights and a random image."""
    image = random_images(graph.input.shape, 1, seed)[0]
    found = run(as_jax(graph, branches=branches), seeded_weights(graph), image)
    return {name: np.asarray(value) for name, value in found.items()}


def check_range(graph: Graph, low: float, high: float) -> dict[str, np.ndarray]:
    """Every layer's result is finite, and how far it is from 0 (root mean square) lies between; the outputs by name.

    Outside of it float32 would still do, but errors could not be held against one tolerance.
    """
    names = dict(graph.outputs)
    graph.outputs.update({layer.name: layer.output for layer in graph.layers})
    found = results(graph)
    for layer in graph.layers:
        size = np.sqrt(np.mean(np.square(found[layer.name], dtype=np.float64)))
        assert low < size < high, f"{layer.name}: {size}"
    return {name: found[name] for name in names}


class OnGpu:
    """Memory of the process that says it is on a GPU."""

    def __init__(self, array):
        self.array, self.shape, self.size, self.dtype = array, array.shape, array.size, array.dtype

    @property
    def __cuda_array_interface__(self):
        return {**self.array.__array_interface__, "version": 3, "strides": self.array.strides}

    def __getitem__(self, index):
        return OnGpu(self.array[index])

    def reshape(self, shape):
        return OnGpu(self.array.reshape(shape))

    def copy_to_device(self, values):
        self.array[...] = values

    def copy_to_host(self):
        return self.array.copy()
