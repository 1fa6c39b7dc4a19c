"""InstaNAS: its numbers, what a choice of candidates computes, and that images choose differently."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brax_concurrent.networks.as_jax import as_jax
from brax_concurrent.networks.images import random_images
from brax_concurrent.networks.instanas import CANDIDATES, PUBLISHED, STAGES, chosen, instanas
from brax_concurrent.networks.network import Network
from brax_concurrent.networks.weights import seeded_weights

jax.config.update("jax_platforms", "cpu")

_SMALL = ((8, 2, 2),)
_INSIDE = ("3x3_6.project", "5x5_3.project", "plain.conv1")


@pytest.fixture(scope="module")
def small():
    """A small network, of which some values inside are outputs too."""
    graph = instanas((8, 8, 3), 7, stem=4, stages=_SMALL, head=16)
    names = {"cell0", "cell1", *(f"cell{cell}.{each}" for cell in (0, 1) for each in _INSIDE)}
    graph.outputs.update(
        {layer.name: layer.output for layer in graph.layers if layer.name in names}
    )  # also such as are computed under a flag only
    return graph, jax.jit(as_jax(graph))


def _forced(graph, *wanted):
    """Weights with which every image chooses those (cell, candidate) alone."""
    weights = seeded_weights(graph)
    logits = np.full(weights["controller.logits.bias"].shape, -1e6, np.float32)
    for cell, candidate in wanted:
        logits[cell * len(CANDIDATES) + CANDIDATES.index(candidate)] = 1e6
    return {**weights, "controller.logits.bias": logits}


def test_counts_are_those_of_the_published_modules():
    graph = instanas()
    channels, unused = 32, 0
    for stage in STAGES:  # a 1x1 convolution and its batch norm, in each of a stage's first four bottlenecks
        unused += 4 * (channels + 2) * stage.channels if stage.stride == 1 and channels != stage.channels else 0
        channels = stage.channels
    assert PUBLISHED.parameters is not None
    assert (graph.parameter_count, unused) == (9_653_135, 236_608)
    assert graph.parameter_count == PUBLISHED.parameters - unused
    assert graph.multiply_adds == 442_691_392  # with all candidates, 12,244,288 of them the controller's
    controller = [layer for layer in graph.layers if layer.name.startswith("controller")]
    assert sum(layer.multiply_adds for layer in controller) == 12_244_288
    assert [cell.output.shape for cell in graph.layers if cell.name in ("cell0", "cell2", "cell5", "cell9", "cell16")] \
        == [(32, 32, 16), (32, 32, 24), (16, 16, 32), (8, 8, 64), (4, 4, 320)]  # fmt: skip


def test_masks_and_branches_agree(small):
    graph, mask = small
    weights, images = seeded_weights(graph), random_images(graph.input.shape, 6)
    graph = instanas((8, 8, 3), 7, stem=4, stages=_SMALL, head=16)
    cond = jax.jit(as_jax(graph, branches="cond"))
    for image in images:
        one, other = mask(weights, image), cond(weights, image)
        assert one["logits"].shape == (7,)
        assert (one["choices"].shape, one["choices"].dtype) == ((10,), jnp.int32)
        assert np.isfinite(one["logits"]).all()
        np.testing.assert_array_equal(one["choices"], other["choices"])
        np.testing.assert_allclose(one["logits"], other["logits"], rtol=1e-5, atol=1e-5)


def test_images_choose_differently():
    graph = instanas()
    del graph.outputs["logits"]  # the controller alone is compiled then
    found = jax.jit(jax.vmap(as_jax(graph), (None, 0)))(seeded_weights(graph), random_images(graph.input.shape, 20))
    choices = np.asarray(found["choices"])
    assert len({each.tobytes() for each in choices}) >= 15
    cells = choices.reshape(20, 17, 5)
    assert 1.2 <= cells.sum(axis=2).mean() <= 2.5
    assert all(len({each.tobytes() for each in cells[:, cell]}) > 1 for cell in range(17))
    named = [chosen(each) for each in choices]
    assert len({str(each) for each in named}) >= 15
    assert any(() in each.values() for each in named)  # some cells pass their input on


def test_where_none_is_chosen_plain_convolutions_come_first_and_then_nothing(small):
    graph, infer = small
    image = random_images(graph.input.shape, 1)[0]
    none, plain = infer(_forced(graph), image), infer(_forced(graph, (0, "plain")), image)
    assert (none["choices"].sum(), plain["choices"].sum()) == (0, 1)
    for name in ("cell0", "cell1", "logits"):
        np.testing.assert_array_equal(none[name], plain[name])
    np.testing.assert_array_equal(none["cell0"], none["cell0.plain.conv1"])
    np.testing.assert_array_equal(none["cell1"], none["cell0"])
    assert chosen(none["choices"], _SMALL) == chosen(plain["choices"], _SMALL) == {"cell0": ("plain",), "cell1": ()}


def test_a_cell_is_the_sum_of_those_chosen_and_bottlenecks_add_their_input(small):
    graph, infer = small
    three = ("3x3_6", "5x5_3", "plain")
    wanted = [(cell, candidate) for cell in (0, 1) for candidate in three]
    found = infer(_forced(graph, *wanted), random_images(graph.input.shape, 1)[0])
    inside = [sum(found[f"cell{cell}.{each}"] for each in _INSIDE) for cell in (0, 1)]
    np.testing.assert_allclose(found["cell0"], inside[0], rtol=1e-5, atol=1e-5)  # a stage's first: no input added
    np.testing.assert_allclose(found["cell1"], 2 * found["cell0"] + inside[1], rtol=1e-5, atol=1e-5)
    assert chosen(found["choices"], _SMALL) == {"cell0": three, "cell1": three}


@pytest.mark.slow
def test_what_runs_is_what_is_chosen(small):
    graph, infer = small
    weights, images = seeded_weights(graph), random_images(graph.input.shape, 6)
    network = Network(graph, weights, batch=6, device="cpu")
    found = network(images)
    for number, image in enumerate(images):
        for name, expected in infer(weights, image).items():
            if name in ("logits", "choices"):
                assert np.abs(found[name][number] - expected).max() <= 1e-4 * np.abs(expected).max()
        ran = {layer.name.rsplit(".", 1)[0] for layer in network.ran(number) if layer.when is not None}
        named = chosen(found["choices"][number], _SMALL)
        assert ran == {f"{cell}.{candidate}" for cell, names in named.items() for candidate in names}


@pytest.mark.slow
def test_seeded_values_neither_vanish_nor_explode():
    graph = instanas()
    cells = {f"cell{number}" for number in range(17)} | {"stem", "head", "classifier"}
    graph.outputs.update({layer.name: layer.output for layer in graph.layers if layer.name in cells})
    found = jax.jit(jax.vmap(as_jax(graph), (None, 0)))(seeded_weights(graph), random_images(graph.input.shape, 4))
    for name in cells:
        scale = np.sqrt((np.asarray(found[name]).reshape(4, -1) ** 2).mean(axis=1))
        assert scale.min() > 0.03, name
        assert scale.max() < 300, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (30, 32, 3)}, r"input_shape: expected multiples of 4 .* got \(30, 32, 3\)"),
        ({"stages": ()}, r"stages: expected one or more of \(channels, cells, stride\), each with cells, got \(\)"),
        ({"stages": ((8, 0, 1),)}, r"each with cells, got \(\(8, 0, 1\),\)"),
        ({"stages": ((8, 1),)}, r"expected one or more of \(channels, cells, stride\)"),
        (
            {"controller": (16, 48, 64)},
            r"controller: expected as many channels as before, or twice, got \(16, 48, 64\)",
        ),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        instanas(**arguments)


def test_wrong_choices():
    with pytest.raises(ValueError, match=r"choices: expected 5 flags for each of 17 cells, got \(20,\)"):
        chosen(np.zeros(20, np.int32))
