import network_checks
import pytest

from brax_concurrent.networks.nasnet import NORMAL, PUBLISHED, REDUCTION, nasnet

SMALL = {"filters": 16, "stem_filters": 6, "repeats": 1, "classes": 5}


def test_it_has_the_published_numbers():
    graph = nasnet()
    assert graph.parameter_count == 5_289_978  # published: 5.3 millions; it is what Keras' NASNetMobile trains
    assert graph.multiply_adds == 563_638_816
    assert round(graph.parameter_count, -5) == PUBLISHED.parameters
    assert round(graph.multiply_adds, -6) == PUBLISHED.multiply_adds


def test_sizes_are_those_of_the_authors_code():
    shapes = {layer.name: layer.output.shape for layer in nasnet().layers}
    assert shapes["stem"] == (111, 111, 32)
    assert shapes["stem_0"] == (56, 56, 4 * 11)
    assert shapes["stem_1"] == (28, 28, 4 * 22)
    assert shapes["cell_3"] == (28, 28, 6 * 44)
    assert shapes["reduction_0"] == (14, 14, 4 * 88)
    assert shapes["reduction_1"] == (7, 7, 4 * 176)
    assert shapes["cell_11"] == (7, 7, 1056)


def test_cells_use_every_state():
    for cell in (NORMAL, REDUCTION):
        read = {state for step in cell.steps for _, state in step}
        assert read | set(cell.outputs) == set(range(7))


def test_a_small_one():
    graph = nasnet(image_size=32, **SMALL)
    assert {layer.when for layer in graph.layers} == {None}
    found = network_checks.check_range(graph, 1e-3, 30.0)
    assert found["logits"].shape == (5,)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"image_size": 2}, "nasnet: image_size: expected a whole number from 3 on, got 2"),
        ({"filters": 15}, "nasnet: filters: expected a whole number from 16 on, got 15"),
        ({"repeats": 0}, "nasnet: repeats: expected a whole number from 1 on, got 0"),
        ({"stem_filters": "32"}, "nasnet: stem_filters: expected a whole number from 1 on, got '32'"),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        nasnet(**wrong)
