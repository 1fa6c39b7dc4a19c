"""Dynamic Routing: its size, its paths, and what the authors' code would compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from brax_concurrent.networks.as_jax import as_jax
from brax_concurrent.networks.dynamic_routing import PUBLISHED, dynamic_routing
from brax_concurrent.networks.images import random_images
from brax_concurrent.networks.weights import seeded_weights

QUICK = {"xla_backend_optimization_level": 0}  # compiling takes longer than running
SMALL = {"image_size": (64, 64), "layers": 6, "channels": 16, "classes": 5}


def test_parameters_and_multiply_adds():
    graph = dynamic_routing()
    assert graph.parameter_count == 17_784_968
    assert graph.parameter_count == pytest.approx(PUBLISHED.parameters, rel=0.001)
    # With all paths open, without activations and batch norms, which the publication counts.
    assert graph.multiply_adds == 117_908_855_072
    assert graph.multiply_adds == pytest.approx(PUBLISHED.multiply_adds, rel=0.02)
    assert graph.outputs["logits"].shape == (1024, 2048, 19)


def test_33_layers():
    assert dynamic_routing(layers=33).multiply_adds == pytest.approx(242_300_000_000, rel=0.01)  # in the same table


@pytest.fixture(scope="module")
def small():
    """Weights and images of a small network, what it makes of them, and which paths it opens."""
    graph = dynamic_routing(**SMALL)
    gates = {each.name: each.output for each in graph.layers if each.kind == "gate"}
    graph.output(**gates)
    weights, images = seeded_weights(graph), random_images((64, 64, 3), 20)
    infer = jax.jit(jax.vmap(as_jax(graph), (None, 0)), compiler_options=QUICK)
    found = {name: np.asarray(each) for name, each in infer(weights, images).items()}
    opened = np.concatenate([found[name] for name in gates], axis=1)
    return weights, images, found["logits"], opened


def test_paths_depend_on_the_image(small):
    *_, opened = small
    assert len(np.unique(opened, axis=0)) >= 15
    assert 0.2 < opened.mean() < 0.7


class _Reference:
    """The authors' forward pass, with Python's own branches: a float is what has not been computed."""

    def __init__(self, weights, image, layers):
        self.weights, self.layers = weights, layers
        self.skipped = self.missing = 0
        x = self._relu(self._conv("stem.first", image, 2, 0))
        x = self._relu(self._separable("stem.second", x))
        self.x = self._relu(self._separable("stem.third", x, 2))

    def logits(self):
        outs = [self._cell("initial", self.x, up=False, down=True)]
        for layer in range(self.layers):
            inputs = []
            for scale in range(min(layer + 2, 4)):
                parts = [outs[scale - 1][2]] if scale > 0 else []
                parts += [outs[scale][1]] if scale < len(outs) else []
                parts += [outs[scale + 1][0]] if scale + 1 < len(outs) else []
                inputs.append(sum(parts))
            last = layer == self.layers - 1
            outs = [
                self._cell(f"layer{layer}.scale{scale}", x, scale > 0 and not last, scale < 3 and not last)
                for scale, x in enumerate(inputs)
            ]
        return self._decode([out[1] for out in outs])

    def _decode(self, features):
        x = 0.0
        for scale in (3, 2, 1, 0):
            x = self._relu(self._conv(f"decoder{scale}", features[scale] + x))
            x = self._enlarge(x, 2) if scale else x
        return self._enlarge(self._conv("predictor", x, 1, 1), 4)

    def _cell(self, name, x, up, down):
        if isinstance(x, float):
            self.missing += 1
            return 0.0, x, 0.0
        pooled = self._relu(self._conv(f"{name}.look", x)).mean(axis=(0, 1))
        gates = {path: self._gate(f"{name}.{path}.gate", pooled) for path in self._paths(up, down)}
        if sum(gates.values()) < 1e-4:
            self.skipped += 1
            return 0.0, x, 0.0
        first = self._relu(self._separable(f"{name}.first", x))
        y = self._relu(x + self._separable(f"{name}.second", first))
        keep = gates["keep"] * y
        finer = self._enlarge(self._relu(self._conv(f"{name}.up.conv", y)), 2) * gates["up"] if up else 0.0
        coarser = self._relu(self._conv(f"{name}.down.conv", y, 2)) * gates["down"] if down else 0.0
        return finer, keep, coarser

    @staticmethod
    def _paths(up, down):
        return ["keep", *(["up"] if up else []), *(["down"] if down else [])]

    def _gate(self, name, pooled):
        return max(0.0, float(jnp.tanh(pooled @ self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"])[0]))

    def _separable(self, name, x, stride=1):
        filters = self.weights[f"{name}.depthwise.weight"][:, :, None, :]
        return self._conv(f"{name}.pointwise", self._slide(x, filters, stride, 1, x.shape[-1]))

    def _conv(self, name, x, stride=1, pad=0):
        return self._slide(x, self.weights[f"{name}.weight"], stride, pad, 1) + self.weights[f"{name}.bias"]

    @staticmethod
    def _slide(x, filters, stride, pad, groups):
        pads, numbers = [(pad, pad)] * 2, ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x[None],
            filters,
            (stride, stride),
            pads,
            dimension_numbers=numbers,
            feature_group_count=groups,
            precision=lax.Precision.HIGHEST,
        )[0]

    @staticmethod
    def _enlarge(x, factor):
        return jax.image.resize(x, (x.shape[0] * factor, x.shape[1] * factor, x.shape[2]), "linear")

    @staticmethod
    def _relu(x):
        return jnp.maximum(x, 0)


def test_as_the_authors_code_computes_it(small):
    weights, images, found, _ = small
    references = [_Reference(weights, image, SMALL["layers"]) for image in images[:8]]
    for reference, each in zip(references, found, strict=False):
        expected = np.asarray(reference.logits())
        assert each.shape == expected.shape == (64, 64, 5)
        np.testing.assert_allclose(each, expected, atol=1e-4 * np.abs(expected).max())
    assert sum(each.skipped for each in references) > 0  # all paths of a cell are closed
    assert sum(each.missing for each in references) > 0  # nothing has been led into a cell


def test_branches_change_nothing():
    graph = dynamic_routing(image_size=(32, 64), layers=3, channels=4, classes=3)
    weights, (image,) = seeded_weights(graph), random_images((32, 64, 3), 1)
    mask, cond = (
        jax.jit(as_jax(graph, branches=each), compiler_options=QUICK)(weights, image)["logits"]
        for each in ("mask", "cond")
    )
    assert mask.shape == (32, 64, 3)
    assert np.isfinite(mask).all()
    np.testing.assert_allclose(mask, cond, atol=1e-5 * np.abs(mask).max())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": (64, 100)}, r"image_size: expected multiples of 32, got \(64, 100\)"),
        ({"image_size": (64,)}, r"image_size: expected a height and a width, got \(64,\)"),
        ({"image_size": (64, 0)}, "width: expected a whole number from 32 on, got 0"),
        ({"layers": 2}, "layers: expected a whole number from 3 on, got 2"),
        ({"channels": 7}, "channels: expected an even number, got 7"),
        ({"classes": 0}, "classes: expected a whole number from 1 on, got 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=f"dynamic_routing: {message}"):
        dynamic_routing(**arguments)
