"""A network of your own whose layers depend on the image: two branches, a gate that opens one or both, their sum."""

from collections import Counter

import jax
import numpy as np

from brax_concurrent.networks.as_jax import as_jax
from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.images import random_images
from brax_concurrent.networks.network import Network
from brax_concurrent.networks.weights import seeded_weights

BRANCHES = ("fine", "coarse")


def two_branches(size, channels):
    """A branch for detail, one for what is large, and a gate that has seen the image at a quarter of its size."""
    g = Graph("two_branches", (size, size, 3))  # height, width, channels
    glance = g.conv(g.avg_pool(g.input, 4, stride=4), 16, 3, activation="relu")
    flags = g.gate(g.dense(g.global_pool(glance), len(BRANCHES)), groups=1)  # those above 0, or the largest

    x = g.conv(g.input, channels, 3, stride=2, activation="relu")
    with g.when(flags[0]):  # runs for images whose flag is 1
        y = g.separable(x, channels, 3, activation="relu")
        fine = g.separable(y, channels, 3)
    with g.when(flags[1]):
        y = g.separable(g.max_pool(x, 2, stride=2), channels, 5)
        coarse = g.resize(y, x.shape[:2])
    x = g.merge([fine, coarse], flags, activation="relu")  # the sum of what has run

    g.output(scores=g.dense(g.global_pool(x), 10), opened=flags[0].tensor)
    return g


def main(batch=16, size=64, channels=32, seed=8):
    """Infer a batch, say which branches each image took, and compare with the same graph in JAX."""
    graph = two_branches(size, channels)
    weights = seeded_weights(graph, seed)  # or trained ones, by the names in graph.parameters
    network, images = Network(graph, weights, batch=batch), random_images(graph.input.shape, batch)
    found = network(images)

    tasks = sum(len(stream) for stream in network.streams)
    print(f"{graph.name}: {graph.parameter_count:,} parameters, {tasks} tasks for {batch} images")
    names = [" and ".join(np.array(BRANCHES)[flags != 0]) for flags in found["opened"]]
    for branches, count in sorted(Counter(names).items()):
        print(f"{count} took {branches}")
    wanted = jax.jit(jax.vmap(as_jax(graph), (None, 0)))(weights, images)["scores"]
    print(f"largest difference from JAX: {np.abs(found['scores'] - wanted).max() / np.abs(wanted).max():.0e}")


if __name__ == "__main__":
    main()
