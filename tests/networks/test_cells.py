"""Networks of cells against the rules of the authors' code, written down once more: nothing shared, nothing fused."""

import jax
import jax.numpy as jnp
import network_checks
import numpy as np
import pytest

from brax_concurrent.networks import amoebanet, nasnet
from brax_concurrent.networks.images import random_images
from brax_concurrent.networks.weights import seeded_weights

FILTERS = 16


class Reference:
    def __init__(self, weights):
        self.weights = weights

    def conv(self, x, name, strides=(1, 1), padding="SAME", groups=1):
        filters = self.weights[f"{name}.weight"]
        y = jax.lax.conv_general_dilated(
            x[None], filters if groups == 1 else filters[:, :, None], strides, padding,
            feature_group_count=groups, dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )[0]  # fmt: skip
        return y + self.weights.get(f"{name}.bias", 0)

    def relu_conv(self, x, name, strides=(1, 1)):
        return self.conv(jax.nn.relu(x), name, strides)

    def pool(self, x, operation, stride):
        start, reduce = (-jnp.inf, jax.lax.max) if operation.startswith("max") else (0.0, jax.lax.add)
        window = (3, 3, 1), (stride, stride, 1), "SAME"
        y = jax.lax.reduce_window(x, start, reduce, *window)
        if operation.startswith("max"):
            return y
        return y / jax.lax.reduce_window(jnp.ones(x.shape), start, reduce, *window)

    def operation(self, x, operation, stride, filters, name):
        if operation == "none":
            return x
        if operation == "1x7_7x1":
            y = self.relu_conv(self.relu_conv(x, f"{name}.pre"), f"{name}.1x7", (1, stride))
            return self.relu_conv(self.relu_conv(y, f"{name}.7x1", (stride, 1)), f"{name}.post")
        if operation.startswith("separable"):
            for part, step in (("1", stride), ("2", 1)):
                deep = self.conv(jax.nn.relu(x), f"{name}.{part}.depthwise", (step, step), groups=x.shape[-1])
                x = self.conv(deep, f"{name}.{part}.pointwise")
            return x
        y = self.pool(x, operation, stride)
        return y if y.shape[-1] == filters else self.conv(y, f"{name}.1x1")

    def previous(self, x, net, filters, name):
        if x is None:
            return net
        if x.shape[:2] == net.shape[:2]:
            return x if x.shape[-1] == filters else self.relu_conv(x, name)
        x = jax.nn.relu(x)
        shifted = jnp.pad(x, ((0, 1), (0, 1), (0, 0)))[1:, 1:]
        halves = ((x[::2, ::2], f"{name}.path1"), (shifted[::2, ::2], f"{name}.path2"))
        return jnp.concatenate([self.conv(half, path) for half, path in halves], axis=-1)

    def cell(self, cell, net, previous, stride, filters, name):
        states = [self.relu_conv(net, f"{name}.net"), self.previous(previous, net, filters, f"{name}.previous")]
        for index, step in enumerate(cell.steps, 2):
            states.append(
                sum(
                    self.operation(
                        states[read], operation, stride if read < 2 else 1, filters, f"{name}.{index}.{side}"
                    )
                    for (operation, read), side in zip(step, ("left", "right"), strict=True)
                )
            )
        return jnp.concatenate([states[index] for index in cell.outputs], axis=-1)

    def network(self, image, module):
        cells = [("stem_0", module.REDUCTION, 1 / 4), ("stem_1", module.REDUCTION, 1 / 2), ("cell_0", module.NORMAL, 1)]
        cells += [("reduction_0", module.REDUCTION, 2), ("cell_1", module.NORMAL, 2)]
        cells += [("reduction_1", module.REDUCTION, 4), ("cell_2", module.NORMAL, 4)]
        previous, net = None, self.conv(image, "stem", (2, 2), "VALID")
        for name, cell, scale in cells:
            stride = 2 if cell is module.REDUCTION else 1
            previous, net = net, self.cell(cell, net, previous, stride, int(FILTERS * scale), name)
        mean = jax.nn.relu(net).mean(axis=(0, 1))
        return mean @ self.weights["logits.weight"] + self.weights["logits.bias"]


@pytest.mark.parametrize("module", [nasnet, amoebanet], ids=["nasnet", "amoebanet"])
def test_networks_compute_what_the_authors_code_says(module):
    image_size = 38  # cells see 18x18, 9x9, 5x5 and 3x3 pixels
    build = module.nasnet if module is nasnet else module.amoebanet
    graph = build(image_size=image_size, filters=FILTERS, stem_filters=6, repeats=1, classes=5)
    image, weights = random_images((image_size, image_size, 3), 1)[0], seeded_weights(graph)
    expected = network_checks.run(lambda weights, image: Reference(weights).network(image, module), weights, image)
    np.testing.assert_allclose(network_checks.results(graph)["logits"], expected, rtol=1e-4, atol=1e-4)
