"""The language of kernels: compiled code does what the reference does, lane by lane."""

from __future__ import annotations

import numpy as np
import pytest

from brax_concurrent.backends import cpu
from brax_concurrent.backends.program import walk
from brax_concurrent.kernels import ops
from brax_concurrent.kernels.kernel import Kernel, kernel
from brax_concurrent.kernels.layout import Field
from brax_concurrent.kernels.reference import ReferenceWorld
from brax_concurrent.kernels.trace import UndeclaredAccessError
from tests.lanes import FLOAT, NoModel, run_compiled, specialized

FIELDS = {"a": Field((4, 3), "test"), "b": Field((5,), "test"), "n": Field((2,), "test", "i")}


def random_kernel(seed: int) -> Kernel:
    """A kernel of random arithmetic, loops, conditions, breaks, variables, arrays and runtime rows."""

    def function(m, w):
        rng = np.random.default_rng(seed)
        x = [w.user.x[i] for i in range(4)]
        i0 = w.user.i[0]
        for r in range(4):
            for c in range(3):
                w.a[r, c] = x[(r + c) % 4] * (0.5 + r)
        for j in range(5):
            w.b[j] = x[j % 4] - 0.25 * j
        w.n[0], w.n[1] = i0, i0 * 3 + 1
        numbers = [w.var(x[0]), w.var(0.5)]
        cells = w.array(3, 0.125)

        def some():
            pick = rng.integers(5)
            if pick == 0:
                return numbers[rng.integers(2)].value
            if pick == 1:
                return cells[int(rng.integers(3))]
            if pick == 2:
                return w.a[int(rng.integers(4)), int(rng.integers(3))]
            if pick == 3:
                return w.b[int(rng.integers(5))]
            return float(rng.choice([0.0, 1.0, -1.0, 0.75, 2.0]))

        def term():
            p, q = some(), some()
            return [
                lambda: p + q,
                lambda: p - q,
                lambda: p * q + some(),
                lambda: some() - p * q,
                lambda: ops.sqrt(ops.absolute(p) + 1.0),
                lambda: p / (1.0 + q * q),
                lambda: ops.where(p < q, p, some()),
                lambda: ops.clip(p, -2.0, 2.0),
                lambda: ops.sin(ops.clip(p, -9.0, 9.0)),
            ][rng.integers(9)]()

        def put(value, row=None):
            value = ops.clip(value, -50.0, 50.0)
            pick = rng.integers(5)
            if pick == 0:
                numbers[rng.integers(2)].value = value
            elif pick == 1:
                cells[int(rng.integers(3))] = value
            elif pick == 2:
                w.a[int(rng.integers(4)), int(rng.integers(3))] = value
            elif pick == 3:
                w.a[i0 if row is None or rng.integers(2) else row, int(rng.integers(3))] = value
            else:
                w.b[int(rng.integers(5))] = value

        def block(depth, row=None):
            nonlocal rng
            for _ in range(rng.integers(2, 5)):
                pick = rng.integers(6)
                if pick < 3 or depth == 0:
                    put(term(), row)
                elif pick == 3:
                    with w.when(ops.both(some() < some(), ops.negate(some() < -1.0))):
                        block(depth - 1, row)
                elif pick == 4:
                    outer, inner_seed = rng, int(rng.integers(1 << 30))
                    for k in w.range(i0 + 1 if rng.integers(2) else 4):
                        rng = np.random.default_rng(inner_seed)  # the reference runs the body more than once
                        put(w.a[k, int(rng.integers(3))] * 0.5, k)
                        if rng.integers(2):
                            w.break_where(some() < some())
                        block(depth - 1, k)
                    rng = outer
                else:
                    inner = w.var(term())
                    with w.when(inner.value > some()):
                        inner.value = inner.value + 1.0
                    put(inner.value + w.table([1.0, 2.0, 3.0, 4.0])[w.n[0]], row)

        block(3)
        out = [*(v.value for v in numbers), *(cells[j] for j in range(3)), *(w.b[j] for j in range(5))]
        out += [w.a[r, c] for r in range(4) for c in range(3)]
        for j, value in enumerate(out):
            w.user.y[j] = value
        w.user.k[0] = w.n[1] ^ (i0 << 3)
        w.user.flag[0] = out[0] < out[1]

    names = ("a", "b", "n")
    return Kernel(f"random_{seed}", function, (*names, "user.x", "user.i"), (*names, "user.y", "user.k", "user.flag"))


def arrays_for(num_envs: int, dtype: type, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(num_envs, 4)).astype(dtype),
        "i": rng.integers(0, 4, (num_envs, 1)).astype(np.int32),
        "y": np.full((num_envs, 22), 77, dtype),
        "k": np.zeros((num_envs, 1), np.int32),
        "flag": np.zeros((num_envs, 1), bool),
    }


@pytest.mark.parametrize("seed", range(40))
def test_random_kernels_agree_with_the_reference(seed: int) -> None:
    k = random_kernel(seed)
    compiled, reference = arrays_for(75, np.float64, seed), arrays_for(75, np.float64, seed)
    run_compiled([k], FIELDS, compiled, "f64")
    ReferenceWorld(FIELDS, 75, reference).run(k, NoModel())
    for name in ("y", "k", "flag"):
        np.testing.assert_allclose(compiled[name], reference[name], rtol=1e-11, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("seed", range(40, 52))
def test_bits_do_not_depend_on_neighbours(seed: int) -> None:
    """Another order, and NaN in every third environment, change nothing in the others."""
    k = random_kernel(seed)
    plain, mixed = arrays_for(70, np.float32, seed), arrays_for(70, np.float32, seed)
    run_compiled([k], FIELDS, plain)
    order = np.random.default_rng(seed).permutation(70)
    for name in mixed:
        mixed[name] = mixed[name][order].copy()
    mixed["x"][::3] = np.nan
    run_compiled([k], FIELDS, mixed)
    keep = np.arange(70) % 3 != 0
    for name in ("y", "k", "flag"):
        np.testing.assert_array_equal(mixed[name][keep], plain[name][order][keep])


def test_environments_beyond_the_last_are_not_written() -> None:
    k = random_kernel(1)
    small = arrays_for(40, np.float32)
    guarded = {name: np.concatenate([a, np.full_like(a[:7], 9)]) for name, a in small.items()}
    run_compiled([k], FIELDS, small)
    views = {name: a[:40] for name, a in guarded.items()}
    run_compiled([k], FIELDS, views)
    for name in ("y", "k", "flag"):
        np.testing.assert_array_equal(guarded[name][:40], small[name])
        assert (guarded[name][40:] == np.asarray(9, guarded[name].dtype)).all()


FUNCTIONS = [
    (ops.sin, np.sin, (-1000, 1000), 3),
    (ops.cos, np.cos, (-1000, 1000), 3),
    (ops.sin, np.sin, (-3, 3), 2),
    (ops.log, np.log, (1e-7, 50), 3),
    (ops.exp, np.exp, (-80, 80), 3),
    (ops.sqrt, np.sqrt, (0, 9), 0.5),
    (ops.tanh, np.tanh, (-10, 10), 5),
    (ops.tanh, np.tanh, (-0.7, 0.7), 5),
    (ops.sigmoid, lambda x: 1 / (1 + np.exp(-x)), (-30, 30), 3),
]


@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize(("function", "exact", "span", "ulps"), FUNCTIONS)
def test_functions_are_accurate(function, exact, span, ulps, precision) -> None:
    dtype = FLOAT[precision]
    x = np.random.default_rng(0).uniform(*span, (4096, 1)).astype(dtype)
    y = np.zeros_like(x)

    def body(m, w):
        w.user.y[0] = function(w.user.x[0])

    run_compiled([Kernel("f", body, ("user.x",), ("user.y",))], {}, {"x": x, "y": y}, precision)
    expected = exact(x.astype(np.longdouble))
    # Near its zeros the sine of a large angle is known to the rounding of the reduced angle only.
    unit = np.maximum(
        np.spacing(np.abs(expected).astype(dtype)), np.finfo(dtype).eps * (0.02 if exact is not np.exp else 0)
    )
    assert np.max(np.abs(y - expected) / unit) <= ulps + 0.51


@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_activations_at_their_ends(precision) -> None:
    dtype = FLOAT[precision]
    x = np.array([[0.0], [-0.0], [1e4], [-1e4], [np.inf], [-np.inf], [np.nan]], dtype)
    y = np.zeros((len(x), 2), dtype)

    def body(m, w):
        w.user.y[0], w.user.y[1] = ops.tanh(w.user.x[0]), ops.sigmoid(w.user.x[0])

    run_compiled([Kernel("ends", body, ("user.x",), ("user.y",))], {}, {"x": x, "y": y}, precision)
    np.testing.assert_allclose(y[:, 0], [0, 0, 1, -1, 1, -1, np.nan], rtol=5 * np.finfo(dtype).eps)
    np.testing.assert_allclose(y[:, 1], [0.5, 0.5, 1, 0, 1, 0, np.nan], rtol=np.finfo(dtype).eps, atol=1e-34)


@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize("lanes", [None, 1])
def test_tables_that_python_takes_for_equal(precision, lanes, monkeypatch) -> None:
    """At one index: integers and floating-point numbers of the same values, and zeros of both signs."""
    if lanes is not None:
        monkeypatch.setattr(cpu, "vector_lanes", lambda precision: lanes)
    tables = ([0, 1, 2], [-0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [False, True, True], [-0.0, 0.0, 0.0])

    def body(m, w):
        for column, numbers in enumerate(tables):
            number = w.table(numbers)[w.user.i[0]]
            w.user.y[column] = number if isinstance(numbers[0], float) else ops.to_float(number)

    i = np.array([[0], [1], [2]], np.int32)
    y, expected = np.full((3, len(tables)), np.nan, FLOAT[precision]), np.array(tables, float).T
    run_compiled([Kernel("tables", body, ("user.i",), ("user.y",))], {}, {"i": i, "y": y}, precision)
    np.testing.assert_array_equal(y, expected)
    signs = np.signbit(y)
    assert signs[0].tolist() == [False, True, False, False, True]
    assert not signs[1:].any()


def test_constants_may_stand_on_either_side_of_bits() -> None:
    def body(m, w):
        x = w.user.x[0]
        w.user.y[0], w.user.y[1], w.user.y[2] = 12 & x, 12 | x, 12 ^ x

    x, y = np.array([[10], [-1]], np.int32), np.zeros((2, 3), np.int32)
    run_compiled([Kernel("bits", body, ("user.x",), ("user.y",))], {}, {"x": x, "y": y})
    np.testing.assert_array_equal(y, np.hstack([12 & x, 12 | x, 12 ^ x]))


@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_lanes_have_the_environments_that_an_order_names(precision) -> None:
    """What it leaves out is not touched, nor what it names in lanes beyond the last environment."""

    def body(m, w):
        w.user.number[0] = ops.to_int(w.user.x[0])
        w.user.flag[0] = w.user.x[0] > 7.0
        for i in range(3):
            w.user.row[i] = w.user.rows[i] + w.user.x[0]

    rng = np.random.default_rng(0)
    order = np.concatenate([rng.choice(np.arange(0, 40, 2), 40), np.full(24, 33)]).astype(np.int32)
    x, rows = np.arange(40, dtype=FLOAT[precision])[:, None], rng.random((40, 3)).astype(FLOAT[precision])
    results = {"number": np.full((40, 1), -1, np.int32), "flag": np.zeros((40, 1), bool), "row": np.full_like(rows, -1)}
    expected = {name: array.copy() for name, array in results.items()}
    named = np.unique(order[:40])
    for name, values in (("number", x), ("flag", x > 7), ("row", rows + x)):
        expected[name][named] = values[named]
    reads, writes = ("user.x", "user.rows"), tuple(f"user.{name}" for name in results)
    run_compiled([Kernel("ordered", body, reads, writes)], {}, {"x": x, "rows": rows} | results, precision, order=order)
    for name, array in results.items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_sign_bits(precision) -> None:
    dtype = FLOAT[precision]
    x = np.array([[1.0], [-1.0], [0.0], [-0.0], [1e-30], [-1e-30], [np.inf], [-np.inf]], dtype)
    y = np.zeros((len(x), 1), np.int32)

    def body(m, w):
        w.user.y[0] = ops.sign_bit(w.user.x[0])

    run_compiled([Kernel("signs", body, ("user.x",), ("user.y",))], {}, {"x": x, "y": y}, precision)
    np.testing.assert_array_equal(y, np.signbit(x))
    np.testing.assert_array_equal(ops.sign_bit(x), np.signbit(x))
    assert [ops.sign_bit(float(a)) for a in x[:, 0]] == np.signbit(x[:, 0]).tolist()


def test_constants_cross_kernels_and_are_not_stored() -> None:
    @kernel(reads=("user.x",), writes=("a",))
    def first(m, w):
        for r in range(4):
            w.a[r] = (w.user.x[r], 0.0, 2.0)

    @kernel(reads=("a",), writes=("user.y",))
    def second(m, w):
        for k in w.range(4):
            w.user.y[0] = w.a[k, 0] + w.a[k, 1] * 5.0 + w.a[k, 2]

    arrays = {"x": np.ones((3, 4), np.float32), "y": np.zeros((3, 1), np.float32)}
    special = run_compiled([first, second], FIELDS, arrays)
    assert (arrays["y"] == 3).all()
    assert {c for _, c in special.layout.rows} == {0, 3, 6, 9}
    assert not any(getattr(v, "op", "") == "mul" for v in walk(special.programs["second"].root))


def test_a_constant_that_one_kernel_breaks_is_stored() -> None:
    @kernel(writes=("b",))
    def first(m, w):
        w.b[0] = 1.0

    @kernel(reads=("b",), writes=("user.y",))
    def second(m, w):
        w.user.y[0] = w.b[0]

    @kernel(reads=("user.x",), writes=("b",))
    def third(m, w):
        w.b[0] = w.user.x[0]

    arrays = {"x": np.full((3, 1), 5, np.float32), "y": np.zeros((3, 1), np.float32)}
    run_compiled([first, second, third, second], FIELDS, arrays)
    assert (arrays["y"] == 5).all()


def test_undeclared_access_is_refused_by_name() -> None:
    @kernel(reads=("user.x",), writes=("user.y",))
    def sneaky(m, w):
        w.user.y[0] = w.user.x[0]
        w.b[0] = 1.0

    arrays = {"x": np.ones((3, 1), np.float32), "y": np.zeros((3, 1), np.float32)}
    with pytest.raises(UndeclaredAccessError, match="'sneaky' writes field 'b'"):
        specialized([sneaky], FIELDS, arrays, "f32")


def test_a_field_that_nobody_writes_is_refused() -> None:
    @kernel(reads=("b",), writes=("user.y",))
    def reader(m, w):
        w.user.y[0] = w.b[2]

    with pytest.raises(ValueError, match="'b' is read, but no kernel"):
        specialized([reader], FIELDS, {"y": np.zeros((3, 1), np.float32)}, "f32")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda w, x: bool(x > 0.0), "Python `if`"),
        (lambda w, x: [1, 2][ops.to_int(x)], "index a Python sequence"),
        (lambda w, x: _escape(w, x), "outside the w.range or w.when block"),
        (lambda w, x: ops.to_int(x) + x, "operands of different types"),
        (lambda w, x: w.break_where(x > 0.0), "directly in the body"),
        (lambda w, x: w.b[9], "outside 0..4"),
    ],
)
def test_misuse_is_explained(body, message) -> None:
    def function(m, w):
        body(w, w.user.x[0])

    k = Kernel("misuse", function, ("user.x", "b"), ("user.y",))
    with pytest.raises((TypeError, ValueError, IndexError), match=message):
        specialized([k], FIELDS, {"x": np.ones((3, 1), np.float32), "y": np.zeros((3, 1), np.float32)}, "f32")


def _escape(w, x):
    with w.when(x > 0.0):
        y = x * 2.0
    w.user.y[0] = y + 1.0


@pytest.mark.parametrize("lanes", [4, 8, 32])
def test_bits_do_not_depend_on_the_vector_width(lanes: int, monkeypatch) -> None:
    from brax_concurrent.backends import cpu

    k = random_kernel(7)
    native, other = arrays_for(45, np.float32, 7), arrays_for(45, np.float32, 7)
    run_compiled([k], FIELDS, native)
    monkeypatch.setattr(cpu, "vector_lanes", lambda precision: lanes)
    run_compiled([k], FIELDS, other)
    for name in ("y", "k", "flag"):
        np.testing.assert_array_equal(other[name], native[name])
