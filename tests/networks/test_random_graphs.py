"""Random networks, under every scheduler and in JAX: what nobody thought of putting together."""

import functools

import jax
import numpy as np
import pytest
from random_networks import random_graph

from brax_concurrent.networks import network as network_module
from brax_concurrent.networks.as_jax import as_jax
from brax_concurrent.networks.images import random_images
from brax_concurrent.networks.memory import plan_memory
from brax_concurrent.networks.network import Network
from brax_concurrent.networks.weights import seeded_weights

jax.config.update("jax_platforms", "cpu")

BATCH = 3
RUNS = (("serial", {}), ("sw", {"window": 8, "threads": 2}), ("hw", {"window": 64, "threads": 3}))


def check(seed, layers, **options):
    """One graph: the same bits under every scheduler, and JAX's results, whatever undefined memory holds."""
    graph = random_graph(seed, layers, **options)
    weights, images = seeded_weights(graph, seed), random_images(graph.input.shape, BATCH, seed)
    network, expected = Network(graph, weights, batch=BATCH, device="cpu"), jax.jit(as_jax(graph))
    first = None
    for scheduler, knobs in RUNS:
        for block in network._blocks:
            block[:] = np.nan
        found = network(images, scheduler, **knobs)
        first = first or found
        for name, array in found.items():
            np.testing.assert_array_equal(array, first[name], f"{graph.name} {scheduler} {name}")
    for index, image in enumerate(images):
        for name, wanted in expected(weights, image).items():
            got, wanted = first[name][index], np.asarray(wanted)
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), (graph.name, name)
            assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max(), (graph.name, name)


@pytest.fixture
def greedy_memory(monkeypatch):
    """Bytes are used again at once: more of them are shared, and more tasks wait for that."""
    monkeypatch.setattr(network_module, "plan_memory", functools.partial(plan_memory, distance=0))


@pytest.mark.parametrize("seed", range(4))
def test_a_random_network_gets_jaxs_results_under_every_scheduler(greedy_memory, seed):
    check(seed, layers=14)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_a_longer_random_network_does_too(greedy_memory, seed):
    check(seed, layers=40, activations=(None, "relu", "relu6", "swish", "sigmoid", "tanh"))
