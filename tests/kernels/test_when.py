"""Kernels that say when they have nothing to do: where the specialiser finds the field, and what it refuses."""

import numpy as np
import pytest

from brax_concurrent.kernels import ops
from brax_concurrent.kernels.kernel import Kernel
from brax_concurrent.kernels.layout import Field
from tests.lanes import specialized

FIELDS = {
    "x": Field((1,), "test"),
    "wanted": Field((1,), "test", "i"),
    "pair": Field((2,), "test", "i"),
}
NAMES = tuple(FIELDS)


def load(m, w):
    w.x[0] = w.user.x[0]
    w.wanted[0] = w.user.i[0]
    w.pair[0], w.pair[1] = 0, 1


def specialize_with(function, when="wanted", first=load, precision="f32"):
    kernels = [
        Kernel("load", first, ("user.x", "user.i"), NAMES),
        Kernel("sometimes", function, (*NAMES, "user.y"), (*NAMES, "user.y"), when),
    ]
    arrays = {"x": np.zeros((1, 1)), "i": np.zeros((1, 1), np.int32), "y": np.zeros((1, 1))}
    return specialized(kernels, FIELDS, arrays, precision)


def masked(m, w):
    with w.when(w.wanted[0] == 1):
        w.user.y[0] = w.x[0]


def masked_otherwise(m, w):
    with w.when(ops.both(ops.negate(w.wanted[0] == 0), w.x[0] > 0.0)):
        w.user.y[0] = w.x[0]


@pytest.mark.parametrize("function", [masked, masked_otherwise])
@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_the_field_is_found_in_the_arena(function, precision):
    special = specialize_with(function, precision=precision)
    assert special.programs["load"].when is None
    assert special.programs["sometimes"].when == special.layout.rows["wanted", 0] * special.layout.row_bytes


def test_where_the_field_is_known_nothing_is_asked():
    def always(m, w):
        w.x[0] = w.user.x[0]
        w.wanted[0] = 1

    program = specialize_with(masked, first=always).programs["sometimes"]
    assert program.when is None
    assert program.root.body


def unmasked(m, w):
    w.user.y[0] = ops.where(w.wanted[0] == 1, w.x[0], 2.0)


def masked_by_0(m, w):
    with w.when(w.wanted[0] == 0):
        w.user.y[0] = w.x[0]


def masked_by_either(m, w):
    with w.when(ops.either(w.wanted[0] == 1, w.x[0] > 0.0)):
        w.user.y[0] = w.x[0]


@pytest.mark.parametrize("function", [unmasked, masked_by_0, masked_by_either])
def test_a_kernel_that_does_something_where_its_field_is_0_is_refused(function):
    with pytest.raises(ValueError, match=r"kernel sometimes: when: expected all .* under w.when\(wanted == 1\)"):
        specialize_with(function)


@pytest.mark.parametrize("when", ["x", "pair", "nothing"])
def test_a_field_that_is_no_predicate_is_refused(when):
    with pytest.raises(ValueError, match=f"expected the name of an int field of one number, got '{when}'"):
        specialize_with(masked, when)
