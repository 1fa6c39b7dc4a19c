"""Whole numbers in JAX functions: they wrap, divide and shift as JAX's do, known while tracing or at run time only."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import compiled, kernel

from brax_concurrent.backends import cuda
from brax_concurrent.envs.jaxpr import UnsupportedOperationError

jax.config.update("jax_platforms", "cpu")

NUMBERS = np.array([-(2**31), -(2**31) + 1, -65537, -7, -1, 0, 1, 2, 3, 7, 31, 32, 65536, 2**31 - 1], np.int32)
UNARY = {
    "neg": jnp.negative,
    "abs": jnp.abs,
    "square": jnp.square,
    "cube": lambda a: a**3,
    "not": jnp.invert,
    "sign": jnp.sign,
    "to float": lambda a: a.astype(jnp.float32).astype(jnp.int32),
}
BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jax.lax.div,
    "rem": jax.lax.rem,
    "//": jnp.floor_divide,
    "%": jnp.remainder,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "shift_left": jax.lax.shift_left,
    "shift_right_logical": jax.lax.shift_right_logical,
    "shift_right_arithmetic": jax.lax.shift_right_arithmetic,
    **{name: getattr(jax.lax, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
}
LACKING = {"uint32": ("neg", "abs", "square", "cube", "sign", "to float")}


def check(names, function, x):
    expected = np.asarray(jax.jit(jax.vmap(function))(x))
    got, _ = compiled(function, x, "f32")
    wrong = (got != expected).any(axis=0)
    assert {names[column] for column in np.flatnonzero(wrong)} == set()


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_an_operation_gives_what_jax_gives_whichever_numbers_are_known(dtype):
    """Of all pairs of numbers: both at run time, either known, both known."""
    known = np.array([-(2**31), -1, 0, 3, 32], np.int32).astype(dtype)
    names: list[str] = []

    def function(x):
        names.clear()
        results = []
        a, b = (x[i].astype(dtype) for i in range(2))

        def note(name, *arguments):
            results.append((UNARY | BINARY)[name](*arguments).astype(jnp.int32).reshape(-1))
            names.extend([name] * results[-1].size)

        for name in UNARY:
            if name not in LACKING.get(dtype, ()):
                note(name, a)
        for name in BINARY:
            note(name, a, b)
            note(name, jnp.broadcast_to(a, known.shape), known)
            note(name, known, jnp.broadcast_to(b, known.shape))
        return jnp.concatenate(results)

    check(names, function, np.array(list(itertools.product(NUMBERS, NUMBERS)), np.int32))


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_known_numbers_wrap_divide_and_shift_too(dtype):
    """Each with each."""
    some = NUMBERS[[0, 3, 4, 5, 8, 10, 13]]
    pairs = np.array(list(itertools.product(some, some)), np.int32).astype(dtype).T
    unary = [name for name in UNARY if name not in (*LACKING.get(dtype, ()), "to float")]  # that folds in float64

    def function(pairs):
        results = [UNARY[name](pairs[0]) for name in unary]
        results += [operation(*pairs) for operation in BINARY.values()]
        return jnp.concatenate([each.astype(jnp.int32) for each in results])

    names = [name for name in [*unary, *BINARY] for _ in range(pairs.shape[1])]
    expected = jax.jit(function)(pairs)  # as an argument: XLA does not survive the division of such constants
    got, _ = compiled(lambda x: x[0] + function(jnp.asarray(pairs)), np.zeros((1, 1), np.int32), "f32")
    assert {names[column] for column in np.flatnonzero(got[0] != expected)} == set()


def test_sums_products_and_dot_products_wrap():
    def function(x):
        known = jnp.asarray(NUMBERS)
        several = [known.sum(), known.prod(), known @ known[::-1], jnp.cumsum(known)[-1], x.sum(), x.prod(), x @ x]
        return jnp.stack([*several, x @ known, jnp.zeros(3, jnp.int32).at[1].add(known[-1]).at[1].add(known[-1])[1]])

    check([str(i) for i in range(9)], function, np.stack([NUMBERS, NUMBERS[::-1]]))


def test_a_float_beyond_the_integers_is_the_nearest_one():
    numbers = jnp.array([3e9, -3e9, 2.5, -2.5, np.inf, -np.inf, np.nan])

    def function(x):
        return jnp.concatenate([numbers.astype(jnp.int32), (x[0] + numbers).astype(jnp.int32)])

    check([str(i) for i in range(14)], function, np.zeros((1, 1), np.float32))


def test_known_numbers_of_64_bits_are_exact_and_meet_none_of_run_time():
    big = 2**40 + 1

    def fits(x):
        return x[0] + (jnp.int64(big) // jnp.int64(2**33) - (jnp.int64(big) * 2**10) % 1000)

    def does_not(x):
        return x[0] + jnp.int64(big)

    x = np.zeros((1, 1), np.int64)
    with jax.enable_x64(True):
        got, _ = compiled(fits, x.astype(np.int32), "f64")
        assert got[0] == fits(x[0])
        with pytest.raises(UnsupportedOperationError, match=f"the whole number {big}; those of kernels have 32 bits"):
            compiled(does_not, x.astype(np.int32), "f64")


def test_unsigned_numbers_have_no_further_operations():
    with pytest.raises(UnsupportedOperationError, match="'population_count'|of unsigned numbers has no counterpart"):
        compiled(lambda x: jnp.sign(x.astype(jnp.uint32)).astype(jnp.int32), np.zeros((1, 1), np.int32), "f32")


def test_they_compile_for_a_gpu():
    """Without one."""
    pytest.importorskip("cuda.bindings.nvvm", reason="numba-cuda with NVIDIA's compilers is not installed")

    def function(x):
        a, b, c = x[0], x[1], x.astype(jnp.uint32)
        several = [a // b, a % b, a << b, a >> b, jax.lax.shift_right_logical(a, b), c[0] // c[1], c[0] % c[1]]
        return jnp.stack([each.astype(jnp.int32) for each in several])

    ptx = cuda.compile_kernel(kernel(function, np.zeros((1, 2), np.int32))).ptx
    for operation in ("div.s32", "rem.s32", "shl.b32", "shr.s32", "shr.u32", "div.u32"):
        assert operation in ptx
