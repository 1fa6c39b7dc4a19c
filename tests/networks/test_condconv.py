"""EfficientNet with conditional convolutions: its size, its experts, and what it is without them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from brax_concurrent.networks.as_jax import as_jax
from brax_concurrent.networks.condconv import PUBLISHED_B0, condconv
from brax_concurrent.networks.images import random_images
from brax_concurrent.networks.weights import checked_weights, seeded_weights

QUICK = {"xla_backend_optimization_level": 0}  # compiling takes longer than running
B0 = {"image_size": 224, "width": 1.0, "depth": 1.0}
SMALL = {"image_size": 48, "width": 0.25, "depth": 0.5, "classes": 10}
COUNT = 8  # images


def test_parameters_and_multiply_adds():
    graph = condconv()
    assert graph.parameter_count == 56_607_248
    assert graph.multiply_adds == 4_443_453_520
    assert graph.outputs["logits"].shape == (1000,)
    assert all(layer.when is None for layer in graph.layers)  # images differ in weights, not in paths


def test_b0_as_published():
    graph = condconv(**B0)
    assert graph.parameter_count == 13_314_116
    assert graph.parameter_count == pytest.approx(PUBLISHED_B0.parameters, rel=0.002)
    assert graph.multiply_adds == 396_513_888
    assert graph.multiply_adds == pytest.approx(PUBLISHED_B0.multiply_adds, rel=0.014)


@pytest.mark.parametrize(
    ("arguments", "parameters", "multiply_adds"),
    [
        (B0 | {"experts": 8}, 24_000_000, 413_000_000),
        (B0 | {"experts": 8, "depth": 1.1}, 39_700_000, 614_000_000),
        (B0 | {"conditional": 0}, 5_288_548, 391_000_000),
        ({"conditional": 0}, 19_341_616, 4_200_000_000),  # EfficientNet-B4, whose publication rounds
    ],
)
def test_other_published_sizes(arguments, parameters, multiply_adds):
    graph = condconv(**arguments)
    assert graph.parameter_count == pytest.approx(parameters, rel=0.001)
    assert graph.multiply_adds == pytest.approx(multiply_adds, rel=0.05 if multiply_adds > 1e9 else 0.015)


def _infer(graph, weights, images):
    found = jax.jit(jax.vmap(as_jax(graph), (None, 0)), compiler_options=QUICK)(weights, images)
    return {name: np.asarray(each) for name, each in found.items()}


@pytest.fixture(scope="module")
def small():
    """A small network whose outputs are the experts' weights too, its weights and images."""
    graph = condconv(**SMALL)
    graph.output(**{each.name: each.output for each in graph.layers if each.name.endswith(".routing")})
    return graph, seeded_weights(graph), random_images((48, 48, 3), COUNT)


def test_each_image_has_experts_of_its_own(small):
    found = _infer(*small)
    logits = found.pop("logits")
    assert logits.shape == (COUNT, 10)
    assert np.isfinite(logits).all()
    assert len(found) == 5  # blocks of the last three stages: 2, 2 and 1
    for routing in found.values():
        assert routing.shape == (COUNT, 4)
        assert ((routing > 0) & (routing < 1)).all()
        assert routing.std(axis=0).max() > 0.03


def test_with_equal_routing_it_is_the_plain_network_with_mean_experts(small):
    graph, weights, images = small
    even = {name: 0 * each if ".routing" in name else each for name, each in weights.items()}  # sigmoid(0) is a half
    plain = condconv(**SMALL, conditional=0)
    mixed = {
        name.replace(".mix", ""): 0.5 * each.sum(axis=0) if ".mix" in name else each
        for name, each in even.items()
        if ".routing" not in name
    }
    expected = _infer(plain, checked_weights(plain, mixed), images)["logits"]
    found = _infer(graph, even, images)["logits"]
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 0}, "image_size: expected a whole number from 1 on, got 0"),
        ({"width": 0.0}, "width: expected more than 0, got 0.0"),
        ({"depth": -1.0}, "depth: expected more than 0, got -1.0"),
        ({"experts": 0}, "experts: expected a whole number from 1 on, got 0"),
        ({"conditional": 8}, "conditional: expected at most 7, got 8"),
        ({"classes": 0}, "classes: expected a whole number from 1 on, got 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=f"condconv: {message}"):
        condconv(**arguments)
