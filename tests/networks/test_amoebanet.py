import network_checks
import pytest

from brax_concurrent.networks.amoebanet import NORMAL, PUBLISHED, REDUCTION, amoebanet

SMALL = {"filters": 16, "stem_filters": 6, "repeats": 1, "classes": 5}


def test_it_has_the_published_numbers():
    graph = amoebanet()
    assert graph.parameter_count == 5_086_930
    assert round(graph.parameter_count, -5) == PUBLISHED.parameters
    assert graph.multiply_adds == 558_896_955
    # Done at every pixel of a row, of which a stride of (1, 2) would take every second.
    rows = [layer for layer in graph.layers if layer.name.endswith(".1x7")]
    halves = {layer.inputs[0]: layer.output.shape for layer in graph.layers if layer.name.endswith(".7x1")}
    more = sum(row.multiply_adds - row.multiply_adds // row.output.shape[1] * halves[row.output][1] for row in rows)
    assert graph.multiply_adds - more == 554_687_204
    assert round(graph.multiply_adds - more, -6) == PUBLISHED.multiply_adds


def test_sizes_are_those_of_the_authors_code():
    shapes = {layer.name: layer.output.shape for layer in amoebanet().layers}
    assert shapes["stem_0"] == (56, 56, 5 * 12)
    assert shapes["stem_1"] == (28, 28, 5 * 25)
    assert shapes["cell_3"] == (28, 28, 4 * 50)
    assert shapes["cell_11"] == (7, 7, 4 * 200)


def test_cells_use_every_state():
    for cell in (NORMAL, REDUCTION):
        read = {state for step in cell.steps for _, state in step}
        assert read | set(cell.outputs) == set(range(7))


def test_a_small_one():
    graph = amoebanet(image_size=32, **SMALL)
    assert {layer.when for layer in graph.layers} == {None}
    found = network_checks.check_range(graph, 1e-3, 30.0)
    assert found["logits"].shape == (5,)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"image_size": 2}, "amoebanet: image_size: expected a whole number from 3 on, got 2"),
        ({"filters": 15}, "amoebanet: filters: expected a whole number from 16 on, got 15"),
        ({"classes": True}, "amoebanet: classes: expected a whole number from 1 on, got True"),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        amoebanet(**wrong)
