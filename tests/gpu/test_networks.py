"""Networks on a GPU: every scheduler's bits, JAX's results, each image on its own path."""

import jax
import numpy as np
import pytest

from brax_concurrent.networks.as_jax import as_jax
from brax_concurrent.networks.images import random_images
from brax_concurrent.networks.network import Network
from brax_concurrent.networks.registry import NETWORKS, list_networks, make_network
from brax_concurrent.networks.weights import seeded_weights
from brax_concurrent.scheduler.schedule import schedulers_on


@pytest.mark.parametrize("name", list_networks())
def test_schedulers_agree_and_results_are_jaxs(name):
    g = make_network(name, **NETWORKS[name].small)
    weights = seeded_weights(g)
    network, cpu = Network(g, weights, device="cuda"), jax.devices("cpu")[0]
    with jax.default_device(cpu):
        expected = jax.jit(as_jax(g))
        for image in random_images(g.input.shape, 3):
            wanted = {output: np.asarray(array) for output, array in expected(weights, image).items()}
            found = network(image, "serial")
            for scheduler in schedulers_on("cuda")[1:]:
                for output, array in network(image, scheduler).items():
                    np.testing.assert_array_equal(array, found[output], err_msg=f"{scheduler}, {output}")
            for output, array in wanted.items():
                assert np.abs(found[output] - array).max() <= 1e-4 * np.abs(array).max(), output


def test_a_batch_has_the_results_of_its_images_one_by_one():
    """To rounding: how convolutions are cut, and so the order of their sums, depends on the number of images."""
    g = make_network("instanas", **NETWORKS["instanas"].small)
    images = random_images(g.input.shape, 6, seed=1)
    single, batch = Network(g, device="cuda"), Network(g, batch=6, device="cuda")
    expected = [single(image, "serial") for image in images]
    bits = batch(images, "serial")
    for scheduler in schedulers_on("cuda")[1:]:
        for name, array in batch(images, scheduler).items():
            np.testing.assert_array_equal(array, bits[name], err_msg=scheduler)
    for name, array in bits.items():
        wanted = np.stack([each[name] for each in expected])
        assert np.abs(array - wanted).max() <= 1e-5 * np.abs(wanted).max(), name
    assert len({tuple(layer.name for layer in batch.ran(i)) for i in range(6)}) > 1
