"""Each layer's kernel against the same layer of JAX's, on random images, under every scheduler."""

import jax
import numpy as np
import pytest

from brax_concurrent.networks.as_jax import as_jax
from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.network import Network
from brax_concurrent.networks.tensors import ACTIVATIONS
from brax_concurrent.networks.weights import seeded_weights

jax.config.update("jax_platforms", "cpu")

TOLERANCE = 1e-4  # of the largest value


def vector(g):
    return g.global_pool(g.input)


def flags_of(g, count):
    return g.gate(g.dense(vector(g), count))


def merged(g):
    x, scales, flags = g.conv(g.input, 4), g.dense(vector(g), 3, activation="tanh"), flags_of(g, 3)
    found = []
    for flag in flags:
        with g.when(flag):
            found.append(g.conv(x, 4, 3, activation="relu"))
    return g.merge(found, flags, scales=scales, activation="relu6")


def mixed(g, deep):
    routing = g.dense(vector(g), 4, activation="sigmoid")
    if deep:
        return g.mixed_depthwise(g.input, routing, 3, stride=2, activation="swish")
    return g.mixed_conv(g.input, routing, 6, 3, activation="swish")


def parts(g):
    """A concatenation of a concatenation, of a part twice, and of the image."""
    a, b = g.conv(g.input, 3), g.conv(g.input, 5, 3)
    inner = g.concat([a, b])
    return g.add(g.concat([inner, a, g.input]), g.concat([g.input, inner, a]))


def mixed_parts(g):
    """Mixed weights are one piece, and so no part of another tensor."""
    mixes = [g.mix(vector(g), (2, 3, n), 5, norm=False, name=f"mix{n}") for n in (4, 2)]
    return g.concat(mixes)


SHAPE = (9, 12, 5)
LAYERS = {
    "conv 1x1": lambda g: g.conv(g.input, 7),
    "conv 3x3": lambda g: g.conv(g.input, 8, 3, activation="relu"),
    "conv strided": lambda g: g.conv(g.input, 6, (3, 5), stride=2, activation="relu6"),
    "conv dilated": lambda g: g.conv(g.input, 6, 3, dilation=2, norm=False, bias=True),
    "conv valid": lambda g: g.conv(g.input, 6, 4, stride=3, padding="VALID", norm=False),
    "conv uneven": lambda g: g.conv(g.input, 6, 3, padding=((2, 0), (-1, 3))),
    "depthwise": lambda g: g.depthwise(g.input, 5, stride=2, activation="swish"),
    "depthwise dilated": lambda g: g.depthwise(g.input, 3, dilation=2, norm=False, padding=1),
    "separable": lambda g: g.separable(g.input, 6, 3, stride=2),
    "max_pool": lambda g: g.max_pool(g.input, 3, stride=2, padding=1),
    "avg_pool": lambda g: g.avg_pool(g.input, 3, stride=1, padding="SAME"),
    "crop": lambda g: g.avg_pool(g.input, 1, stride=2, padding=((-1, 0), (-1, 0))),
    "global_pool": vector,
    "dense": lambda g: g.dense(vector(g), 11, activation="sigmoid"),
    "add": lambda g: g.add(g.input, g.input, g.conv(g.input, 5), activation="tanh"),
    "weighted_sum": lambda g: g.weighted_sum([g.input, g.conv(g.input, 5), g.input]),
    "multiply": lambda g: g.multiply(g.input, vector(g)),
    "concat": parts,
    "concat of vectors": lambda g: g.concat([vector(g), g.dense(g.global_pool(g.input), 3)]),
    "resize linear": lambda g: g.resize(g.input, (18, 17)),
    "resize nearest": lambda g: g.resize(g.input, (20, 24), "nearest"),
    "softmax": lambda g: g.softmax(g.conv(g.input, 7)),
    "merge": merged,
    "mixed_conv": lambda g: mixed(g, deep=False),
    "mixed_depthwise": lambda g: mixed(g, deep=True),
    "concat of mixed weights": mixed_parts,
    **{name: lambda g, name=name: g.activation(g.input, name) for name in ACTIVATIONS},
}


def graph_of(build, shape=SHAPE):
    g = Graph("toy", shape)
    g.output(y=build(g))
    return g


def images(count, shape=SHAPE, seed=0):
    return np.random.default_rng(seed).normal(0.3, 1.5, (count, *shape)).astype(np.float32)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_jaxs(name):
    g = graph_of(LAYERS[name])
    weights = seeded_weights(g, 1)
    network, expected = Network(g, weights), jax.jit(as_jax(g))
    for image in images(3):
        wanted = np.asarray(expected(weights, image)["y"])
        found = network(image, "serial")["y"]
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()
        for scheduler in ("sw", "hw"):
            np.testing.assert_array_equal(network(image, scheduler, threads=2)["y"], found)


def test_a_layer_under_a_flag_writes_nothing_where_the_flag_is_0():
    g = Graph("toy", (4, 4, 2))
    (flag,) = g.gate(g.dense(vector(g), 1, norm=False))
    with g.when(flag):
        y = g.conv(g.input, 3)
    g.output(z=g.merge([y], [flag]))
    weights = {name: np.ones(each.shape, np.float32) for name, each in g.parameters.items()}
    network = Network(g, weights)
    before = network(np.ones((4, 4, 2), np.float32), "serial")
    assert network.flag(flag) == 1
    assert before["z"].all()
    written = network._read(0, y)
    after = network(-np.ones((4, 4, 2), np.float32), "serial")
    assert network.flag(flag) == 0
    np.testing.assert_array_equal(network._read(0, y), written)  # what was there before
    assert not after["z"].any()


@pytest.mark.parametrize(
    ("logits", "groups", "expected"),
    [
        ([1.0, -1.0, 0.0, 2.0], 1, [1, 0, 0, 1]),
        ([-1.0, -3.0, -0.5, -2.0], 1, [0, 0, 1, 0]),
        ([-1.0, -3.0, -0.5, -2.0], 0, [0, 0, 0, 0]),
        ([-1.0, -3.0, 0.5, -2.0], 2, [1, 0, 1, 0]),
        ([np.nan, -3.0, -4.0, np.nan], 1, [0, 1, 0, 0]),
        ([np.nan, np.nan, np.nan, 1.0], 2, [1, 0, 0, 1]),
        ([-1.0, -1.0, -np.inf, -np.inf], 2, [1, 0, 1, 0]),
        ([np.nan, -np.inf, -np.inf, np.nan], 2, [0, 1, 1, 0]),
    ],
)
def test_gates_open_what_exceeds_the_threshold_or_else_the_largest_of_a_group(logits, groups, expected):
    g = Graph("toy", (1, 1, 4))
    flags = g.gate(vector(g), groups=groups)
    g.output(flags=flags[0].tensor)
    image = np.array(logits, np.float32).reshape(1, 1, 4)
    assert Network(g)(image, "serial")["flags"].tolist() == expected
    assert np.asarray(as_jax(g)({}, image)["flags"]).tolist() == expected


def test_a_flag_of_several_is_1_where_one_of_them_is_or_none():
    g = Graph("toy", (1, 1, 3))
    flags = g.gate(vector(g), groups=0)
    some, none = g.any([flags[0], flags[2]]), g.none([flags[0], flags[2]])
    g.output(some=some.tensor, none=none.tensor)
    network = Network(g)
    for logits, expected in (([-1, 1, -1], 0), ([1, -1, -1], 1), ([-1, -1, 1], 1), ([1, -1, 1], 1)):
        image = np.array(logits, np.float32).reshape(1, 1, 3)
        for found in (network(image, "serial"), as_jax(g)({}, image)):
            assert (found["some"].tolist(), found["none"].tolist()) == ([expected], [1 - expected])
            assert found["none"].dtype == np.int32


def test_what_is_not_a_number_stays_so():
    for name in ("conv 3x3", "max_pool", "add", "relu6", "softmax"):
        g = graph_of(LAYERS[name])
        image = images(1)[0]
        image[4, 4, 2] = np.nan
        assert np.isnan(Network(g)(image, "serial")["y"]).any(), name
