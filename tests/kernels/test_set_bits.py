"""Loops over the bits of a lane's own words: in vectors, in scalar code and in the reference."""

from __future__ import annotations

import numpy as np
import pytest

from brax_concurrent.backends import cpu
from brax_concurrent.kernels import ops
from brax_concurrent.kernels.kernel import Kernel
from brax_concurrent.kernels.layout import Field
from brax_concurrent.kernels.reference import ReferenceWorld
from tests.lanes import NoModel, run_compiled, specialized

MOST = 5  # words; 64 bits are gone through at a time
FIELDS = {"square": Field((32 * MOST,), "of a number"), "list": Field((32 * MOST,), "the numbers found", "i")}


def listing(words: int, under: bool) -> Kernel:
    """Lists the bits of `words` words in order, as k and as (k + 1)^2 from a table and a field; sums what a loop sees.

    With `under` only lanes whose last number is even look at all.
    """

    def function(m, w):
        found, total = w.var(0), w.var(0.0)
        for k in range(32 * MOST):
            w.square[k] = w.user.x[0] * float(k + 1) ** 2
            w.list[k] = -1
        table = w.table([k + 1 for k in range(32 * MOST)])
        with w.when((w.user.bits[MOST] & 1) == 0 if under else True):
            for k in w.set_bits([w.user.bits[i] for i in range(words)]):
                w.list[found.value] = k
                found.value = found.value + 1
                for turn in w.range(w.user.bits[MOST] & 3):
                    total.value = total.value + w.square[k] * ops.to_float(turn + 1)
                with w.when((k & 3) == 1):
                    total.value = total.value - ops.to_float(table[k])
        w.user.n[0], w.user.total[0] = found.value, total.value
        for k in range(32 * MOST):
            w.user.found[k] = w.list[k]

    reads = ("square", "list", "user.x", "user.bits")
    return Kernel("listing", function, reads, ("square", "list", "user.n", "user.total", "user.found"))


def arrays_for(num: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    bits = rng.integers(-(2**31), 2**31, (num, MOST + 1))
    # Few bits, none, all, and single ones at the ends of words.
    bits[1::3] &= bits[2::3][: len(bits[1::3])] & 0x11111111
    bits[::7, :MOST] = 0
    bits[3], bits[5, :MOST], bits[6, :MOST] = -1, -(2**31), 1
    return {
        "x": rng.normal(size=(num, 1)),
        "bits": bits.astype(np.int32),
        "n": np.zeros((num, 1), np.int32),
        "total": np.zeros((num, 1)),
        "found": np.zeros((num, 32 * MOST), np.int32),
    }


@pytest.mark.parametrize("under", [False, True])
@pytest.mark.parametrize("words", range(1, MOST + 1))
@pytest.mark.parametrize("lanes", [None, 1, 32])
def test_bits_are_numbers_in_order(words, under, lanes, monkeypatch):
    if lanes is not None:
        monkeypatch.setattr(cpu, "vector_lanes", lambda precision: lanes)
    compiled, reference = arrays_for(75), arrays_for(75)
    k = listing(words, under)
    run_compiled([k], FIELDS, compiled, "f64")
    ReferenceWorld(FIELDS, 75, reference).run(k, NoModel())
    for row, found in zip(compiled["bits"], compiled["found"], strict=True):
        bits = np.unpackbits(row[:words].astype("<i4").view(np.uint8), bitorder="little")
        expected = np.flatnonzero(bits) if not (under and row[MOST] & 1) else np.array([])
        np.testing.assert_array_equal(found[: len(expected)], expected)
        assert (found[len(expected) :] == -1).all()
    for name in ("n", "found"):
        np.testing.assert_array_equal(compiled[name], reference[name])
    np.testing.assert_allclose(compiled["total"], reference["total"], rtol=1e-12)


def test_known_words():
    def function(m, w):
        total = w.var(0)
        for words in ([], [0], [0b101], [0, 0 & w.user.bits[0], -1], [0, 0, 2**32 - 1]):
            for k in w.set_bits(words):
                total.value = total.value + k
        w.user.n[0] = total.value

    arrays = {name: array for name, array in arrays_for(12).items() if name in ("bits", "n")}
    k = Kernel("known", function, ("user.bits",), ("user.n",))
    run_compiled([k], {}, arrays)
    assert (arrays["n"] == 2 + 2 * sum(range(64, 96))).all()
    arrays["n"][:] = 0
    ReferenceWorld({}, 12, arrays).run(k, NoModel())
    assert (arrays["n"] == 2 + 2 * sum(range(64, 96))).all()


def test_a_lane_cannot_leave_early():
    def function(m, w):
        for _ in w.set_bits([w.user.bits[0]]):
            w.break_where(w.user.bits[1] == 0)

    k, arrays = Kernel("leaving", function, ("user.bits",), ()), {"bits": np.ones((3, 2), np.int32)}
    with pytest.raises(ValueError, match=r"w\.range"):
        specialized([k], {}, arrays, "f32")
    with pytest.raises(ValueError, match=r"w\.range"):
        ReferenceWorld({}, 3, arrays).run(k, NoModel())


def test_words_are_integers():
    def function(m, w):
        for _ in w.set_bits([w.user.x[0]]):
            w.user.x[0] = 0.0

    k = Kernel("floats", function, ("user.x",), ("user.x",))
    with pytest.raises(TypeError, match="set_bits: expected a value of type 'i'"):
        specialized([k], {}, {"x": np.zeros((3, 1), np.float32)}, "f32")


@pytest.mark.parametrize("words", [3, 0, [1.0], [1, 0.5], None, "user"])
def test_words_are_a_list_of_integers(words):
    def function(m, w):
        for _ in w.set_bits(w.user.bits[0] if words == "user" else words):
            w.user.bits[0] = 0

    k, arrays = Kernel("misused", function, ("user.bits",), ("user.bits",)), {"bits": np.zeros((3, 1), np.int32)}
    with pytest.raises(TypeError, match="set_bits: expected"):
        specialized([k], {}, arrays, "f32")
    with pytest.raises(TypeError, match="set_bits: expected"):
        ReferenceWorld({}, 3, arrays).run(k, NoModel())
