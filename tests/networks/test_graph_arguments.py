"""What graphs say of arguments that do not fit, and that they are left as they were."""

import jax
import numpy as np
import pytest

from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.network import Network
from brax_concurrent.networks.tensors import Flag

jax.config.update("jax_platforms", "cpu")

SHAPE = (5, 6, 3)


def graph():
    return Graph("toy", SHAPE)


def vector(g):
    return g.global_pool(g.input)


def foreign():
    g = graph()
    return g.conv(g.input, 3, name="theirs"), g.gate(vector(g))


def under(g, flag):
    with g.when(flag):
        return g.conv(g.input, 3)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda g: g.conv(foreign()[0], 3), ValueError, "theirs is a tensor of another graph"),
        (lambda g: g.output(y=foreign()[0]), ValueError, "output: theirs is a tensor of another graph"),
        (lambda g: under(g, foreign()[1][0]), ValueError, "when: .* is a tensor of another graph"),
        (lambda g: g.any(foreign()[1]), ValueError, "any: .* is a tensor of another graph"),
        (lambda g: g.merge([g.input], foreign()[1][:1]), ValueError, "merge: .* is a tensor of another graph"),
        (lambda g: g.conv(np.zeros(SHAPE, np.float32), 3), TypeError, "expected a tensor of the graph, got ndarray"),
        (lambda g: g.output(y=g.gate(vector(g))[0]), TypeError, "got Flag: its tensor is flag.tensor"),
        (lambda g: g.dense(g.gate(vector(g))[0].tensor, 4), ValueError, r"expected images or vectors, got int32\[3\]"),
        (lambda g: g.concat([g.gate(vector(g))[0].tensor]), ValueError, "expected images or vectors, got int32"),
        (lambda g: under(g, 1), TypeError, "when: expected flags, as gate returns them, got int"),
        (lambda g: under(g, vector(g)), TypeError, "when: expected flags, as gate returns them, got Tensor"),
        (lambda g: g.any([Flag(vector(g), 0)]), ValueError, "has no flag 0"),
        (lambda g: g.any([Flag(g.gate(vector(g))[0].tensor, 3)]), ValueError, "gate_3 has no flag 3"),
        (lambda g: g.any([]), ValueError, "any: expected flags, got none"),
        (lambda g: g.none(5), TypeError, "none: expected flags"),
        (lambda g: g.concat(g.input), TypeError, "concat: expected a sequence of tensors, got Tensor"),
        (lambda g: g.weighted_sum(g.input), TypeError, "weighted_sum: expected a sequence of tensors, got Tensor"),
        (lambda g: g.conv(g.input, 2.0), ValueError, "channels: expected a whole number from 1 on, got 2.0"),
        (lambda g: g.dense(vector(g), True), ValueError, "channels: expected a whole number from 1 on, got True"),
        (lambda g: g.conv(g.input, 3, 0), ValueError, "kernel: expected a whole number from 1 on.*, got 0"),
        (lambda g: g.depthwise(g.input, (3, 3, 3)), ValueError, r"kernel: expected .*, got \(3, 3, 3\)"),
        (lambda g: g.max_pool(g.input, -1), ValueError, "kernel: expected a whole number from 1 on.*, got -1"),
        (lambda g: g.conv(g.input, 3, stride=0), ValueError, "stride: expected a whole number from 1 on, got 0"),
        (lambda g: g.conv(g.input, 3, stride=(1, 2)), ValueError, r"stride: expected .*, got \(1, 2\)"),
        (lambda g: g.conv(g.input, 3, dilation=0), ValueError, "dilation: expected a whole number from 1 on, got 0"),
        (lambda g: g.conv(g.input, 3, padding=(1, 1)), ValueError, r"padding: expected SAME, VALID.*got \(1, 1\)"),
        (lambda g: g.conv(g.input, 3, padding=True), ValueError, "padding: expected SAME, VALID.*got True"),
        (lambda g: g.conv(g.input, 3, padding=((-9, 9), (0, 0))), ValueError, "crops more than there is"),
        (lambda g: g.resize(g.input, 8), ValueError, r"size: expected \(height, width\) from 1 on, got 8"),
        (lambda g: g.resize(g.input, (8.0, 9)), ValueError, r"size: expected \(height, width\)"),
        (lambda g: g.gate(vector(g), groups=1.0), ValueError, "groups: expected a divisor of 3"),
        (lambda g: g.gate(vector(g), threshold="0"), TypeError, "threshold: expected a number, got '0'"),
        (lambda g: g.conv(g.input, 3, name=5), TypeError, "name: expected a string, got 5"),
        (
            lambda g: g.mix(vector(g), (2, 2, 2, 2, 2), 4, norm=False, name="m"),
            ValueError,
            "shape: expected one to four",
        ),
        (
            lambda g: g.add(g.mix(vector(g), (1, 1, 2, 2), 4, norm=False, name="m")),
            ValueError,
            r"expected images or vectors, got float32\[1, 1, 2, 2\]",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(build, error, message):
    with pytest.raises(error, match=message):
        build(graph())


@pytest.mark.parametrize("shape", [5, None, "abc", (1, 1), (0, 1, 1), (1, 1, 1.0), (True, 1, 1)])
def test_shapes_that_are_none_are_refused(shape):
    with pytest.raises(ValueError, match="toy: input_shape: expected"):
        Graph("toy", shape)


@pytest.mark.parametrize(
    "refused",
    [
        lambda g, x, v: g.conv(x, 4, activation="gelu"),
        lambda g, x, v: g.separable(x, 4, 3, activation="gelu"),
        lambda g, x, v: g.mixed_conv(x, v, 4, activation="gelu"),
        lambda g, x, v: g.weighted_sum([g.input, x]),
        lambda g, x, v: g.output(y=x, z=5),
    ],
)
def test_a_graph_is_what_it_was_after_an_error(refused):
    g = graph()
    x, v = g.conv(g.input, 4), g.dense(vector(g), 2)
    g.output(x=x)

    def state():
        return list(g.layers), dict(g.parameters), dict(g.outputs), g.batch_norms

    before = state()
    with pytest.raises((ValueError, TypeError)):
        refused(g, x, v)
    assert state() == before


def test_a_refused_layer_may_be_added_again_under_its_name():
    g = graph()
    for activation in ("gelu", "relu6x"):
        with pytest.raises(ValueError, match="activation"):
            g.conv(g.input, 4, activation=activation, name="stem")
    g.output(y=g.conv(g.input, 4, activation="relu", name="stem"))
    assert list(g.parameters) == ["stem.weight", "stem.bias"]
    assert g.batch_norms == 4
    assert Network(g, device="cpu")(np.zeros(SHAPE, np.float32), "serial")["y"].shape == (5, 6, 4)


def test_names_that_are_made_up_avoid_those_that_are_given():
    g = graph()
    x = g.conv(g.input, 3, name="conv_1")
    assert g.conv(x, 3).name == "conv_2"


def test_flags_of_branches_are_for_those_branches():
    """Elsewhere they would be what another image has left there."""
    g = graph()
    (flag,) = g.gate(g.dense(vector(g), 1))
    with g.when(flag):
        inner = g.gate(g.dense(vector(g), 2))
        g.merge([g.input, g.input], [g.any(inner), inner[0]])
    message = "is computed under a flag itself"
    with pytest.raises(ValueError, match=message):
        under(g, inner[0])
    with pytest.raises(ValueError, match=message):
        g.any(inner)
    with pytest.raises(ValueError, match=message):
        g.merge([g.input], inner[:1])


def branches():
    g = Graph("toy", (4, 4, 3))
    flags = g.gate(g.global_pool(g.input), groups=0)
    found = []
    for flag in flags:
        with g.when(flag):
            found.append(g.conv(g.input, 3))
    return g, flags, found


@pytest.mark.parametrize(
    "read",
    [
        lambda g, flags, xs: g.conv(xs[0], 3),
        lambda g, flags, xs: g.output(y=xs[0]),
        lambda g, flags, xs: g.merge(xs, flags[::-1]),
        lambda g, flags, xs: g.merge([xs[0]], [g.any(flags)]),
        lambda g, flags, xs: g.conv(g.concat([xs[0], g.input]), 3),
        lambda g, flags, xs: g.output(y=g.concat(xs)),
    ],
)
def test_what_may_not_have_been_computed_is_not_read(read):
    with pytest.raises(ValueError, match="is computed under a flag, and undefined where that is 0"):
        read(*branches())


def test_what_has_been_computed_wherever_it_is_read_may_be():
    g, flags, xs = branches()
    some = g.any([g.any(flags[:2]), flags[2]])
    with g.when(some):
        y = g.conv(g.input, 3)
    with g.when(flags[0]):
        inside = [g.conv(xs[0], 3), g.conv(y, 3), g.concat([xs[0], y])]
    g.output(y=g.merge([*inside[:2], y], [flags[0], flags[0], flags[1]]), z=g.merge([inside[2]], [flags[0]]))
