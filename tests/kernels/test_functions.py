"""Elementary functions on their whole range: NumPy's to a few units in the last place, its special cases included."""

from __future__ import annotations

import re

import numpy as np
import pytest

from brax_concurrent.backends import cuda
from brax_concurrent.kernels import functions
from brax_concurrent.kernels.kernel import Kernel
from brax_concurrent.kernels.ops import where
from tests.lanes import FLOAT, run_compiled, specialized

INF = np.inf
SPECIAL = np.array([0.0, 1.0, -1.0, INF, -INF, np.nan, 2.0, -2.0])

# By name: the exact function, the range of arguments in single and in double precision, units in the last place.
UNARY = {
    "exp": (np.exp, (-80, 88), (-650, 690), 3),
    "expm1": (np.expm1, (-2, 60), (-2, 300), 4),
    "log": (np.log, (1e-30, 1e30), (1e-250, 1e250), 3),
    "log1p": (np.log1p, (-0.999, 1e9), (-0.999, 1e9), 4),
    "tanh": (np.tanh, (-12, 12), (-22, 22), 5),
    "logistic": (lambda x: 1 / (1 + np.exp(-x)), (-60, 60), (-300, 300), 6),
    "arctan": (np.arctan, (-50, 50), (-50, 50), 3),
    "arcsin": (np.arcsin, (-1, 1), (-1, 1), 4),
    "arccos": (np.arccos, (-1, 1), (-1, 1), 4),
    "floor": (np.floor, (-9, 9), (-9, 9), 0),
    "ceil": (np.ceil, (-9, 9), (-9, 9), 0),
    "sign": (np.sign, (-9, 9), (-9, 9), 0),
}
BINARY = {
    "arctan2": (np.arctan2, (-3, 3), 3),
    "power": (np.power, (0.1, 9), 40),
    "remainder": (np.fmod, (-40, 40), 0),
    "maximum": (np.maximum, (-3, 3), 0),
    "minimum": (np.minimum, (-3, 3), 0),
}


def compiled(function, *columns: np.ndarray, precision: str) -> np.ndarray:
    """The function of each row, computed by a compiled kernel."""
    dtype = FLOAT[precision]
    x = np.ascontiguousarray(np.stack(columns, 1), dtype)
    arrays = {"x": x, "y": np.zeros((len(x), 1), dtype)}

    def body(m, w):
        w.user.y[0] = function(*(w.user.x[i] for i in range(x.shape[1])))

    run_compiled([Kernel("k", body, ("user.x",), ("user.y",))], {}, arrays, precision)
    return arrays["y"][:, 0]


def ulps(got: np.ndarray, expected: np.ndarray) -> float:
    spacing = np.spacing(np.maximum(np.abs(expected).astype(got.dtype), np.finfo(got.dtype).tiny))
    return float(np.max(np.abs(got.astype(np.longdouble) - expected) / spacing.astype(np.longdouble)))


def spread(low: float, high: float, dtype) -> np.ndarray:
    """Numbers over a range, evenly and, where it is wide, also by magnitude."""
    rng = np.random.default_rng(0)
    even = rng.uniform(low, high, 3000)
    size = min(abs(low) or 1.0, high) if low > 0 else 1e-6
    powers = np.exp(rng.uniform(np.log(max(size, 1e-290)), np.log(high), 3000))
    return np.concatenate([even, powers, -powers[-powers > low] if low < 0 else powers]).astype(dtype)


@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize("name", UNARY)
def test_a_function_of_one_number_is_numpys(name, precision):
    exact, single, double, limit = UNARY[name]
    x = spread(*(single if precision == "f32" else double), FLOAT[precision])
    assert ulps(compiled(getattr(functions, name), x, precision=precision), exact(x.astype(np.longdouble))) <= limit


@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize("name", BINARY)
def test_a_function_of_two_numbers_is_numpys(name, precision):
    exact, (low, high), limit = BINARY[name]
    x, y = np.random.default_rng(1).uniform(low, high, (2, 5000)).astype(FLOAT[precision])
    got = compiled(getattr(functions, name), x, y, precision=precision)
    assert ulps(got, exact(x.astype(np.longdouble), y.astype(np.longdouble))) <= limit


@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_special_numbers_give_what_numpy_gives(name, precision):
    exact = (UNARY.get(name) or BINARY.get(name))[0]
    columns = [SPECIAL] if name in UNARY else [a.ravel() for a in np.meshgrid(SPECIAL, SPECIAL)]
    if name == "power":  # of what is infinite nothing is said
        columns = [c[np.isfinite(columns[0]) & np.isfinite(columns[1])] for c in columns]
    with np.errstate(all="ignore"):
        expected = exact(*columns)
        constants = [getattr(functions, name)(*map(float, row)) for row in zip(*columns, strict=True)]
    np.testing.assert_allclose(compiled(getattr(functions, name), *columns, precision=precision), expected, rtol=1e-6)
    np.testing.assert_allclose(constants, expected, rtol=1e-12)


def bits(x):
    """Without the signs of NaN, but with those of zeros."""
    return np.where(np.isnan(x), np.nan, x), np.signbit(x) & ~np.isnan(x)


@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_the_arctangent_knows_infinities_and_the_signs_of_zeros(precision):
    """As in NumPy and in JAX: with neither, either or both arguments known while tracing."""
    numbers = np.array([0.0, -0.0, 1.0, -1.0, INF, -INF, np.nan], FLOAT[precision])
    y, x = (a.ravel() for a in np.meshgrid(numbers, numbers))
    expected, signs = bits(np.arctan2(y, x))

    def check(got, where=slice(None)):
        found, found_signs = bits(np.asarray(got))
        np.testing.assert_allclose(found, expected[where], rtol=1e-6)
        np.testing.assert_array_equal(found_signs, signs[where])

    check(compiled(functions.arctan2, y, x, precision=precision))
    check([functions.arctan2(float(a), float(b)) for a, b in zip(y, x, strict=True)])
    for i, c in enumerate(map(float, numbers)):
        row, column = slice(i * len(numbers), (i + 1) * len(numbers)), slice(i, None, len(numbers))
        check(compiled(lambda a, c=c: functions.arctan2(a, c), numbers, precision=precision), row)
        check(compiled(lambda a, c=c: functions.arctan2(c, a), numbers, precision=precision), column)


def test_constants_that_are_zeros_of_either_sign_are_two():
    x = np.array([1.0, -1.0])
    chosen = compiled(lambda v: where(v > 0.0, 0.0, -0.0), x, precision="f64")
    np.testing.assert_array_equal(np.signbit(chosen), [False, True])
    found = compiled(lambda v: where(v > 0.0, v, 0.0) / 1.5 - 2.0 / where(v > 0.0, v, -0.0), x, precision="f64")
    np.testing.assert_array_equal(found, [1 / 1.5 - 2.0, INF])


@pytest.mark.parametrize("n", [-3, -1, 0, 1, 2, 7, 64])
def test_a_whole_power_takes_any_base(n):
    x = np.array([-1.5, -1.0, 0.5, 2.0])
    np.testing.assert_allclose(compiled(lambda v: functions.power(v, float(n)), x, precision="f64"), x**n, rtol=1e-14)
    np.testing.assert_allclose(compiled(lambda v: functions.integer_power(v, n), x, precision="f64"), x**n, rtol=1e-14)


@pytest.mark.parametrize("function", [functions.maximum, functions.minimum])
def test_nan_wins_over_a_constant(function):
    x = np.array([np.nan, -1.0, 1.0])
    for a in (0.0, np.nan):
        exact = np.maximum if function is functions.maximum else np.minimum
        np.testing.assert_array_equal(compiled(lambda v, a=a: function(v, a), x, precision="f64"), exact(x, a))
        np.testing.assert_array_equal(compiled(lambda v, a=a: function(a, v), x, precision="f64"), exact(a, x))


@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_all_of_them_compile_for_a_gpu(precision):
    """Without one: with infinities and NaN as constants, and in the asked precision throughout."""
    pytest.importorskip("cuda.bindings.nvvm", reason="numba-cuda with NVIDIA's compilers is not installed")
    dtype = FLOAT[precision]
    arrays = {"x": np.zeros((1, 2), dtype), "y": np.zeros((1, len(UNARY) + len(BINARY)), dtype)}

    def body(m, w):
        for i, name in enumerate([*UNARY, *BINARY]):
            w.user.y[i] = getattr(functions, name)(*(w.user.x[j] for j in range(1 if name in UNARY else 2)))

    special = specialized([Kernel("k", body, ("user.x",), ("user.y",))], {}, arrays, precision)
    ptx = cuda.compile_kernel(special.programs["k"]).ptx
    arithmetic = set(re.findall(r"\b(?:add|sub|mul|mad|fma|div|rcp|sqrt)\.[\w.]*f\d\d", ptx))
    ending = ".rn.ftz.f32" if precision == "f32" else ".rn.f64"
    assert {operation for operation in arithmetic if not operation.endswith(ending)} == set()
