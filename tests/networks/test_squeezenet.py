import network_checks
import numpy as np
import pytest

from brax_concurrent.networks.squeezenet import PUBLISHED, squeezenet


def test_it_has_the_published_numbers():
    graph = squeezenet()
    assert graph.parameter_count == PUBLISHED.parameters
    assert graph.multiply_adds == 349_151_936  # published: 0.349 thousand millions
    assert round(graph.multiply_adds, -6) == PUBLISHED.multiply_adds


def test_sizes_are_those_of_caffe():
    shapes = {layer.name: layer.output.shape for layer in squeezenet().layers}
    assert shapes["conv1"] == (111, 111, 64)
    assert shapes["pool1"] == (55, 55, 64)
    assert shapes["pool3"] == (27, 27, 128)
    assert shapes["pool5"] == (13, 13, 256)
    assert shapes["fire9.concat"] == (13, 13, 512)


@pytest.mark.parametrize("image_size", [17, 32])  # for 17, the last windows of all poolings lack a row and a column
def test_a_small_one(image_size):
    small = {"image_size": image_size, "squeeze": 3, "classes": 5}
    found = network_checks.check_range(squeezenet(**small), 0.05, 20.0)
    assert found["logits"].shape == (5,)
    conditional = network_checks.results(squeezenet(**small), "cond")
    np.testing.assert_allclose(conditional["logits"], found["logits"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"image_size": 16}, "squeezenet: image_size: expected a whole number from 17 on, got 16"),
        ({"squeeze": 0}, "squeezenet: squeeze: expected a whole number from 1 on, got 0"),
        ({"classes": 2.5}, "squeezenet: classes: expected a whole number from 1 on, got 2.5"),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        squeezenet(**wrong)
