from random import Random

import jax
import network_checks
import numpy as np
import pytest

from brax_concurrent.networks.images import random_images
from brax_concurrent.networks.randomwire import PUBLISHED, randomwire, watts_strogatz
from brax_concurrent.networks.weights import seeded_weights

SMALL = {"image_size": 32, "channels": 6, "nodes": 8, "features": 10, "classes": 5}


def test_it_has_the_published_numbers():
    graph = randomwire()
    assert graph.parameter_count == 5_651_918  # published: 5.6 ± 0.1 millions
    assert graph.multiply_adds == 578_715_404  # published: 583 ± 6.2 millions
    others = [randomwire(seed=seed) for seed in range(10)]
    assert round(np.mean([each.parameter_count for each in others]), -5) == PUBLISHED.parameters
    assert np.mean([each.multiply_adds for each in others]) == pytest.approx(PUBLISHED.multiply_adds, rel=0.01)


def test_sizes_are_those_of_the_papers_table():
    shapes = {layer.name: layer.output.shape for layer in randomwire().layers}
    assert shapes["conv1"] == (112, 112, 39)
    assert shapes["conv2"] == (56, 56, 78)
    assert shapes["conv3"] == (28, 28, 78)
    assert shapes["conv4"] == (14, 14, 156)
    assert shapes["conv5"] == (7, 7, 312)
    assert shapes["features"] == (7, 7, 1280)


def test_without_rewiring_the_graph_is_a_ring():
    assert watts_strogatz(7, 4, 0.0, Random(0)) == ((), (0,), (0, 1), (1, 2), (2, 3), (0, 3, 4), (0, 1, 4, 5))


@pytest.mark.parametrize("rewiring", [0.75, 1.0])
def test_rewiring_keeps_edges_and_leads_so_many_elsewhere(rewiring):
    nodes, degree, kept = 32, 4, 0
    for seed in range(50):
        wiring = watts_strogatz(nodes, degree, rewiring, Random(seed))
        edges = {(source, node) for node, sources in enumerate(wiring) for source in sources}
        assert len(edges) == sum(map(len, wiring)) == nodes * degree // 2
        assert all(source < node for source, node in edges)
        kept += sum(min(node - source, nodes - node + source) <= degree // 2 for source, node in edges)
    share = kept / (50 * nodes * degree // 2)
    # Of those led elsewhere, some come to lie where an edge of the ring has been.
    assert 1 - rewiring <= share < 1 - rewiring + 0.15


def test_a_complete_graph_has_nothing_to_rewire_to():
    assert watts_strogatz(5, 4, 1.0, Random(0)) == tuple(tuple(range(node)) for node in range(5))


def test_wirings_depend_on_the_seed_alone():
    assert watts_strogatz(8, 4, 0.75, Random(3)) == (
        (), (), (1,), (0, 1), (0, 1), (0, 1, 2), (2, 3, 4, 5), (3, 4, 5, 6),
    )  # fmt: skip
    first, again, other = (randomwire(seed=seed) for seed in (1, 1, 2))
    assert [layer.name for layer in first.layers] == [layer.name for layer in again.layers]
    assert [layer.name for layer in first.layers] != [layer.name for layer in other.layers]


def test_values_stay_in_range():
    graph = randomwire(**SMALL)
    assert {layer.when for layer in graph.layers} == {None}
    found = network_checks.check_range(graph, 1e-3, 30.0)
    assert found["logits"].shape == (5,)


def test_it_computes_what_the_paper_says():
    graph = randomwire(**SMALL, seed=5)
    weights = seeded_weights(graph)

    def conv(x, name, stride=1, padding=1, groups=1):
        filters = weights[f"{name}.weight"]
        filters = filters if groups == 1 else filters[:, :, None]
        y = jax.lax.conv_general_dilated(
            x[None], filters, (stride, stride), [(padding, padding)] * 2,
            feature_group_count=groups, dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )[0]  # fmt: skip
        return np.asarray(y) + weights.get(f"{name}.bias", 0)

    def relu(x):
        return np.maximum(x, 0)

    random, terms = Random(5), 1
    x = conv(relu(conv(random_images((32, 32, 3), 1)[0], "conv1", 2)), "conv2", 2)
    for stage in ("conv3", "conv4", "conv5"):
        wiring = watts_strogatz(8, 4, 0.75, random)
        values = []
        for node, sources in enumerate(wiring):
            name = f"{stage}.{node}"
            if len(sources) > 1:
                shares = 1 / (1 + np.exp(-weights[f"{name}.sum.weight"]))
                entry = sum(share * values[source] for share, source in zip(shares, sources, strict=True))
            else:
                entry = values[sources[0]] if sources else terms * x  # the weights have been divided by `terms`
            deep = conv(relu(entry), f"{name}.depthwise", 1 if sources else 2, groups=entry.shape[-1])
            values.append(conv(deep, f"{name}.pointwise", padding=0))
        ends = [value for node, value in enumerate(values) if not any(node in sources for sources in wiring)]
        x, terms = np.mean(ends, axis=0), len(ends)
    x = relu(conv(relu(terms * x), "features", padding=0)).mean(axis=(0, 1))
    expected = x @ weights["logits.weight"] + weights["logits.bias"]
    np.testing.assert_allclose(network_checks.results(graph)["logits"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"channels": 1}, "randomwire: channels: expected a whole number from 2 on, got 1"),
        ({"nodes": 0}, "randomwire: nodes: expected a whole number from 1 on, got 0"),
        ({"seed": -1}, "randomwire: seed: expected a whole number from 0 on, got -1"),
        ({"degree": 3}, "watts_strogatz: degree: expected an even number from 2 to 31, got 3"),
        ({"degree": 32}, "watts_strogatz: degree: expected an even number from 2 to 31, got 32"),
        ({"rewiring": 1.5}, "watts_strogatz: rewiring: expected a probability, got 1.5"),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        randomwire(**wrong)
