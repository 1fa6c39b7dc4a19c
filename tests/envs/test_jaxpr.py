"""JAX functions as kernel code: compiled, they compute what JAX computes."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import compiled

from brax_concurrent.envs.jaxpr import UnsupportedOperationError, supported_operations

jax.config.update("jax_platforms", "cpu")

TABLE = np.array([3.0, 1.0, 4.0, 1.0, 5.0])


@jax.custom_vjp
def doubled(x):
    return 2.0 * x


doubled.defvjp(lambda x: (2.0 * x, None), lambda _, g: (2.0 * g,))

# Each of a vector of four numbers.
FUNCTIONS = {
    # structure
    "indexing": lambda x: x[jnp.array([1, 2])] + x[1:3] + x[0] * x[-1],
    "a matrix": lambda x: x.reshape(2, 2).T[::-1].reshape(-1) + x[::2].repeat(2),
    "stacking": lambda x: jnp.stack([x, 2 * x], axis=1).reshape(-1),
    "concatenation": lambda x: jnp.concatenate([x, jnp.zeros(2), jnp.array([x[0], 1.0])]),
    "tiles": lambda x: jnp.tile(x, (2, 2)).reshape(-1),
    "splitting": lambda x: jnp.split(x, [1, 3])[1],
    "padding": lambda x: jnp.pad(x, (1, 2), constant_values=3.0),
    "rolling": lambda x: jnp.roll(x, 1) - jnp.flip(x),
    "set": lambda x: x.at[0].set(3.0),
    "set at places": lambda x: jnp.zeros(6).at[jnp.array([5, 0, 2, 3])].set(x),
    "add at places": lambda x: x.at[jnp.array([0, 3])].add(x[:2]),
    "taking with a fill": lambda x: jnp.take(x, jnp.array([0, 3, 9]), mode="fill", fill_value=7.0),
    "taking without": lambda x: jnp.take(x, jnp.array([0, 3, 9]), mode="fill"),
    "taking at places of run time": lambda x: (
        jnp.take(jnp.asarray(TABLE), (3 * x).astype(int)) + jnp.take(x, jnp.argmax(x))
    ),
    "taking clipped": lambda x: jnp.take(x, (3 * x).astype(int), mode="clip"),
    "taking along an axis": lambda x: jnp.take_along_axis(x.reshape(2, 2), (x[:2, None] > 0).astype(int), 1).reshape(
        -1
    ),
    "a window of a matrix": lambda x: jax.vmap(lambda i: jax.lax.dynamic_slice(jnp.outer(x, x), (i, i), (2, 2)))(
        (2 * x).astype(int)
    ).reshape(-1),
    "of two places in a table": lambda x: jnp.outer(TABLE, TABLE)[(3 * x).astype(int), jnp.argmin(x)],
    "of two places": lambda x: jnp.outer(TABLE, x)[(3 * x).astype(int), jnp.argmin(x)],
    "interpolating": lambda x: jnp.interp(x, jnp.array([-1.0, 0.0, 0.5, 2.0]), jnp.asarray(TABLE)[:4], left=-9.0),
    "interpolating in what is known at run time": lambda x: jnp.interp(0.3, jnp.cumsum(jnp.abs(x)), x),
    "searching": lambda x: jnp.searchsorted(jnp.array([-0.5, 0.0, 0.7]), x) + 10 * jnp.digitize(x, jnp.cumsum(x**2)),
    "setting at a place of run time": lambda x: (
        x.at[jnp.argmax(x)].set(7.0) + jnp.zeros(4).at[(2 * x).astype(int)].set(1.0)
    ),
    "adding at places of run time": lambda x: jnp.zeros(3).at[(2 * x).astype(int)].add(x, mode="clip"),
    "adding at equal places": lambda x: x.at[jnp.array([0, 0, 3])].add(x[1:]),
    "changing at places": lambda x: x.at[1].mul(x[0]).at[2].max(0.1).at[jnp.argmin(x)].min(-1.0).at[9].set(5.0),
    "adding rows at places of run time": lambda x: (
        jnp.zeros((3, 2)).at[(x[:2] > 0).astype(int)].add(x.reshape(2, 2)).reshape(-1)
    ),
    "updating a slice at run time": lambda x: jax.lax.dynamic_update_slice(x, x[:2], (jnp.argmax(x),)),
    "rolling at run time": lambda x: jnp.roll(x, jnp.argmax(x)),
    "updating a slice": lambda x: jax.lax.dynamic_update_slice(x, x[:2], (2,)),
    "a place chosen at run time": lambda x: x[jnp.argmax(x)] + jnp.asarray(TABLE)[jnp.argmin(x)],
    # arithmetic
    "rational": lambda x: (x + 1.0) / (2.0 + x * x) - 3.0 / (1.0 + abs(x)) + x**3 - x**-2,
    "powers": lambda x: abs(x) ** 0.5 + abs(x) ** 1.7 + jnp.sqrt(abs(x)) + jax.lax.rsqrt(1.0 + x * x),
    "of any exponent": lambda x: (1.5 + jnp.tanh(x)) ** x[::-1] + (2 + jnp.tanh(x)) ** (3 * x).astype(int),
    "rounding": lambda x: jnp.floor(x) + 10 * jnp.ceil(x) + 100 * jnp.round(x) + 1000 * jnp.trunc(x),
    "an angle wrapped": lambda x: jnp.mod(5 * x + jnp.pi, 2 * jnp.pi) - jnp.pi,
    "whole division": lambda x: x // 0.7 + jnp.fmod(x, 0.7),
    "trigonometry": lambda x: jnp.sin(x) + jnp.cos(x) * jnp.tan(0.4 * jnp.tanh(x)) + jnp.sinh(x) - jnp.cosh(x),
    "inverse trigonometry": lambda x: jnp.arctan2(x, x[::-1]) + jnp.arctan(x) + jnp.arcsin(jnp.tanh(x)),
    "arccosine": lambda x: jnp.arccos(jnp.clip(x, -1, 1)),
    "exponentials": lambda x: jnp.exp(-(x**2)) + jnp.expm1(x) + jnp.log1p(abs(x)) + jnp.log(1 + x * x) + jnp.exp2(x),
    "activations": lambda x: jax.nn.relu(x) + jax.nn.softplus(x) + jax.nn.sigmoid(x) + jax.nn.elu(x) + jax.nn.silu(x),
    "softmax": jax.nn.softmax,
    "more of NumPy's": lambda x: jnp.hypot(x, x[0]) + jnp.logaddexp(x, 0.1) + jnp.sinc(x) + jnp.heaviside(x, 0.5),
    "extremes": lambda x: jnp.clip(x, -0.5, 0.5) + jnp.maximum(x, x[0]) * jnp.minimum(x, 0.1) + jnp.sign(x),
    "clamping": lambda x: jax.lax.clamp(-0.3, x, 0.4),
    # logic and integers
    "comparisons": lambda x: (x > 0) & ~(x >= 1) | (x != x[0]) ^ (x <= -1),
    "an order of booleans": lambda x: ((x > 0) < (x > 1)) ^ ((x > 0) >= (x < 1)) ^ ((x > -1) > (x > 0)),
    "extremes of booleans": lambda x: jnp.maximum(x > 0, x < 1) ^ jnp.minimum(x > 0, x[0] < 1) ^ jnp.max(x > 1),
    "known booleans": lambda x: jnp.isfinite(jnp.inf / TABLE[1:]) & ~(TABLE[1:] > jnp.max(x)) | jnp.array([True] * 4),
    "an order of known booleans": lambda x: (jnp.array([True, False] * 2) > (x > 1)) ^ jnp.array([True, False] * 2),
    "the first that holds": lambda x: jnp.argmax(x > 0) + 10 * jnp.argmin(x > 0),
    "select": lambda x: jnp.select([x > 1, x > 0], [x, 2 * x], 0.5),
    "bits": lambda x: (((9 * x).astype(int) & 3) | 4) ^ ~(9 * x).astype(int),
    "choices": lambda x: jnp.where(x > 0, x, jnp.where(x < -1, 1.0, x**2)),
    "counting": lambda x: jnp.sum(x > 0) + jnp.where(x[0] > 0, 2, -1) * jnp.abs(jnp.sum(x < 1)),
    "numbers from booleans": lambda x: (x > 0) * x + (x < 0).astype(x.dtype),
    "truncation": lambda x: (3 * x).astype(jnp.int32),
    "whole arithmetic": lambda x: jnp.maximum((9 * x).astype(int), 2) * 3 - jnp.sign((9 * x).astype(int)),
    "finite": lambda x: jnp.isfinite(1 / jnp.maximum(x, 0.0)) | jnp.isnan(x),
    "nan_to_num": lambda x: jnp.nan_to_num(x / jnp.where(x > 0, x, 0.0), posinf=1.0, neginf=2.0, nan=3.0),
    # sums
    "sums": lambda x: jnp.sum(x) + jnp.mean(x) + jnp.prod(x) + jnp.var(x) + jnp.max(x) - jnp.min(x),
    "sums over axes": lambda x: jnp.outer(x, x).reshape(2, 2, 4).sum(axis=(0, 2)),
    "any and all": lambda x: jnp.any(x > 1) | jnp.all(x > 0),
    "cumulative": lambda x: jnp.cumsum(x) + jnp.cumprod(x[::-1]) + jax.lax.cummax(x) - jax.lax.cummin(x, reverse=True),
    "norms": lambda x: jnp.linalg.norm(x) + jnp.linalg.norm(x.reshape(2, 2), axis=1),
    "products": lambda x: x @ x + jnp.dot(x.reshape(2, 2), x[:2]) + jnp.asarray(TABLE)[:2] @ x.reshape(2, 2),
    "einsum": lambda x: jnp.einsum("bij,bjk->bik", x.reshape(2, 1, 2), jnp.ones((2, 2, 3))).reshape(-1),
    "a cross product": lambda x: jnp.cross(x[:3], x[1:]),
    # control flow and transformations
    "cond": lambda x: jax.lax.cond(x[0] > 0, lambda: 2 * x, lambda: -x),
    "switch": lambda x: jax.lax.switch((2 * x[0]).astype(int), [lambda: x, lambda: 2 * x, lambda: -x]),
    "a known switch": lambda x: jax.lax.switch(1, [lambda: x, lambda: 2 * x, lambda: -x]),
    "fori_loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c * 0.5 + x[i], 0.0),
    "scan": lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), 0.0, x, reverse=True)[1],
    "while": lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x[1]), (0, 1.0))[1],
    "jit and vmap": jax.jit(lambda x: jax.vmap(lambda y: y * x[0])(x)),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(x) * x),
    "a gradient": jax.grad(lambda x: jnp.sum(x**3) + jnp.prod(x)),
    "rules of one's own": lambda x: doubled(x) + jax.grad(lambda y: jnp.sum(doubled(y)))(x),
    "unsigned numbers": lambda x: ((7 * x).astype(int).astype(jnp.uint32) >> 3).astype(jnp.float32),
    "whole division of whole numbers": lambda x: (9 * x).astype(int) // 2 + 100 * ((9 * x).astype(int) % -3),
    "shifts": lambda x: ((9 * x).astype(int) << 3) + ((99 * x).astype(int) >> 2) + (1 << jnp.argmax(x)),
    "unsigned constants": lambda x: x + ((jnp.arange(4, dtype=jnp.uint32) - 3) * 7919 >> 20) / 4096,
    "constants": lambda x: x + jnp.asarray(TABLE)[1:] * np.float64(0.5) + jnp.arange(4) + jnp.linspace(0, 1, 4),
}


def rows(dtype) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(70, 4)).astype(dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_computes_what_jax_computes(name):
    x = rows(np.float32)
    expected = np.asarray(jax.jit(jax.vmap(FUNCTIONS[name]))(x)).reshape(len(x), -1)
    got, _ = compiled(FUNCTIONS[name], x, "f32")
    if got.dtype.kind != "f":
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_allclose(got, expected, rtol=3e-5, atol=2e-6)


UNARY = {
    "f": "abs acos asin atan ceil cosh exp expm1 floor is_finite log log1p logistic neg round rsqrt sign sinh sqrt "
    "square tanh",
    "i": "abs bitwise_not neg sign",
    "b": "bitwise_not",
}
BINARY = {
    "f": "add atan2 div eq ge gt le lt max min mul ne pow rem sub",
    "i": "add bitwise_and bitwise_or bitwise_xor eq ge gt le lt max min mul ne sub",
    "b": "bitwise_and bitwise_or bitwise_xor eq ge gt le lt max min ne",
}
REDUCTIONS = "all any argmax argmin cumsum max min prod sum"
CONSTANTS = {  # a constant 0 in a product is 0 whatever it meets
    "f": np.array([2.0, 1.0, -1.5, np.nan], np.float32),
    "i": np.array([0, 1, -3, 5], np.int32),
    "b": np.array([True, False, True, True]),
}


def of_kind(x, kind):
    return {"f": x, "i": (3 * x).astype(jnp.int32), "b": x > 0.3}[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", "fib")
def test_every_operation_takes_known_numbers_special_ones_and_those_of_run_time(kind):
    """Everything as one function; where two numbers meet, either may be known."""
    names, numbers = [], rows(np.float32)
    numbers[:3] = [[0, 1, -1, 2], [np.inf, -np.inf, np.nan, 0], [-0.5, 0.5, 1, -2]]

    def function(x):
        names.clear()
        known, value, other = jnp.asarray(CONSTANTS[kind]), of_kind(x, kind), of_kind(x[::-1], kind)
        results = []

        def note(name, result):
            names.extend([name] * result.size)
            results.append(result.reshape(-1).astype(x.dtype))

        for name in UNARY[kind].split():
            for argument in (known, value):
                note(name, getattr(jax.lax, name)(argument))
        for name in BINARY[kind].split():
            for pair in ((value, other), (value, known), (known, value), (known, known[::-1])):
                note(name, getattr(jax.lax, name)(*pair))
        for name in REDUCTIONS.split():
            for argument in (known, value):
                note(name, getattr(jnp, name)(argument))
        for target in (jnp.float32, jnp.int32, bool):
            for argument in (known, value):
                note(f"to {target.__name__}", argument.astype(target))
        note("where", jnp.where(x > 0, value, known))
        return jnp.concatenate(results)

    expected = np.asarray(jax.jit(jax.vmap(function))(numbers))
    got, _ = compiled(function, numbers, "f32")
    wrong = ~np.isclose(got, expected, rtol=5e-5, atol=3e-6, equal_nan=True)
    assert {names[column] for column in np.flatnonzero(wrong.any(axis=0))} == set()


def test_in_double_precision_constants_keep_their_digits():
    x = rows(np.float64)
    with jax.enable_x64(True):
        got, _ = compiled(lambda x: x * 0.1 + jnp.asarray(TABLE)[1:] / 3 + jnp.sin(x), x, "f64")
    np.testing.assert_allclose(got, x * 0.1 + TABLE[1:] / 3 + np.sin(x), rtol=1e-14)


def test_structure_and_known_numbers_leave_no_code():
    def function(x):
        weights = jnp.asarray(TABLE)[1:].reshape(2, 2)
        return jnp.concatenate([x[::-1], jnp.sin(weights[0]), jnp.zeros(1)]) * jnp.array([1, 1, 1, 1, 2, 2, 0.5])

    _, values = compiled(function, rows(np.float32), "f32")
    assert values == 4  # loads


def test_a_place_in_a_map_is_looked_up():
    """Of heights, for example: of two places at once."""
    heights = np.random.default_rng(0).normal(size=(40, 30)).astype(np.float32)
    x = (20 + 9 * rows(np.float32)).clip(0, 39)
    got, values = compiled(lambda x: jnp.asarray(heights)[x[0].astype(int), x[1].astype(int)], x, "f32")
    np.testing.assert_array_equal(got[:, 0], heights[x[:, 0].astype(int), x[:, 1].astype(int).clip(0, 29)])
    assert values < 60


def test_a_place_in_a_long_table_is_looked_up():
    table = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    x = (500 + 300 * rows(np.float32)).clip(-50, 1050)
    got, values = compiled(lambda x: jnp.asarray(table)[x[0].astype(int)], x, "f32")
    index = x[:, 0].astype(int)
    np.testing.assert_array_equal(got, table[np.where(index < 0, index + 1000, index).clip(0, 999)])
    assert values < 30


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda x: jnp.sort(x), "jnp.sort: JAX's 'sort' has no counterpart in kernels .*; jnp.max, "),
        (
            lambda x: jnp.linalg.inv(x.reshape(2, 2)),
            "jnp.linalg.inv: JAX's 'lu' has no counterpart .*; write a small inverse",
        ),
        (lambda x: jax.scipy.special.erf(x), "jax.scipy.special.erf: JAX's 'erf' has no counterpart"),
        (lambda x: x.astype(jnp.uint32).max().astype(int), "'reduce_max' of unsigned numbers"),
        (lambda x: x.astype(jnp.float16) * 2, "gives float16 numbers"),
        (lambda x: jax.lax.while_loop(lambda c: c[0] < x[0], lambda c: c + 1, x)[0], "'while' needs a condition"),
        (lambda x: jax.lax.fori_loop(0, 10**6, lambda i, c: c + 1.0, x[0]), "has 1000000 turns"),
        (lambda x: jax.random.normal(jax.random.key(x[0].astype(int)), (4,)), "has no counterpart"),
        (
            lambda x: x + jax.random.normal(jax.random.key(0), (4,)),
            "jax.random.key: .* makes random keys, .*; draw from `noise`",
        ),
    ],
)
def test_what_kernels_lack_is_refused_with_its_line(function, operation):
    line = function.__code__.co_firstlineno
    with pytest.raises(UnsupportedOperationError, match=f"{operation}") as raised:
        compiled(function, rows(np.float32), "f32")
    assert raised.value.place == f"{__file__}:{line}"


def test_what_a_users_function_lacks_is_named_where_it_is():
    """Not as what it is inside of: a function under jit, the body of a loop."""

    def helper(x):
        return jnp.linalg.inv(x)

    def function(x):
        return jax.lax.fori_loop(0, 2, lambda i, m: jax.jit(helper)(m), x.reshape(2, 2))

    with pytest.raises(UnsupportedOperationError, match="jnp.linalg.inv: JAX's 'lu' has no counterpart") as raised:
        compiled(function, rows(np.float32), "f32")
    assert raised.value.place == f"{__file__}:{helper.__code__.co_firstlineno + 1}"


def test_every_operation_is_tried():
    """By one of the functions above, or it is listed here as an alias or a by-product."""
    tried = set()

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            tried.add(eqn.primitive.name)
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                visit(inner)

    for function in FUNCTIONS.values():
        visit(jax.make_jaxpr(function)(jnp.zeros(4)).jaxpr)
    rare = {"add_any", "copy", "copy_p", "expand_dims", "optimization_barrier", "stop_gradient"}
    rare |= {"stack"}  # what jnp.stack is in newer versions of JAX only
    assert set(supported_operations()) - tried <= rare


def test_the_operations_are_those_that_the_documentation_lists():
    text = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    assert " ".join(re.findall(r"^> (.*)$", text, re.MULTILINE)).split() == supported_operations()
