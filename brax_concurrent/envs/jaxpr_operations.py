"""The operations of JAX that kernels have: each on arrays of traced values and Python numbers (envs/jaxpr.py)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from brax_concurrent.backends.program import Value
from brax_concurrent.kernels import functions, ops

Scalars = np.ndarray
"""An array of dtype object: traced values and Python numbers."""


class RefusedError(Exception):
    """An operation is not there for these parameters or this type."""


def scalars(array: Any) -> Scalars:
    """Numbers as an array of Python numbers."""
    return np.asarray(array).astype(object)


def filled(values: Sequence[Any], shape: Sequence[int]) -> Scalars:
    """An array of these elements in row-major order."""
    array = np.empty(len(values), object)
    for i, value in enumerate(values):
        array[i] = value
    return array.reshape(shape)


def is_known(array: Scalars) -> bool:
    """Whether all of an array is known while tracing."""
    return not any(isinstance(x, Value) for x in array.flat)


# ---- Element by element --------------------------------------------------------------------------------------------


def each(function: Callable[..., Any], *args: Scalars) -> Scalars:
    return np.asarray(np.frompyfunc(function, len(args), 1)(*args), dtype=object)


def _plain(function: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    return lambda params, dtype: function


def _real(function: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """An operation that there is for floating-point numbers only, and for known ones."""

    def choose(params: Any, dtype: np.dtype) -> Callable[..., Any]:
        if dtype.kind == "f":
            return function
        raise RefusedError("is there for floating-point numbers only")

    return choose


def _quotient(params: Any, dtype: np.dtype) -> Callable[..., Any]:
    return functions.divide if dtype.kind == "f" else functions.whole_quotient


def _rest(params: Any, dtype: np.dtype) -> Callable[..., Any]:
    return functions.remainder if dtype.kind == "f" else functions.whole_remainder


def _shift(function: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    return lambda params, dtype: functools.partial(function, width=8 * dtype.itemsize)


def _not(x: Any) -> Any:
    if isinstance(x, Value):
        return x.tracer.logical_not(x) if x.dtype == "b" else x ^ -1
    return not x if _is_bool(x) else ~x


def _convert(params: Any, dtype: np.dtype) -> Callable[[Any], Any]:
    if dtype.kind == "b":
        return lambda x: x if _is_bool(x) else x != 0
    if dtype.kind == "f":
        return ops.to_float
    return functools.partial(_whole_number, width=8 * dtype.itemsize)


def _whole_number(x: Any, width: int) -> Any:
    """Truncated toward 0; the nearest integer of that many bits beyond those, at run time of 32 bits; 0 for NaN."""
    if not isinstance(x, float) and not (isinstance(x, Value) and x.dtype == "f"):
        return ops.to_int(x)
    limit = 2 ** (31 if isinstance(x, Value) else width - 1)
    inside = ops.absolute(x) < float(limit)
    beyond = ops.where(x > 0.0, limit - 1, ops.where(x < 0.0, -limit, 0))
    return ops.where(inside, ops.to_int(ops.where(inside, x, 0.0)), beyond)


def wrapped(array: Scalars, dtype: np.dtype) -> Scalars:
    """Known whole numbers as those of `dtype`: modulo a power of two."""
    least, count = int(np.iinfo(dtype).min), 1 << (8 * dtype.itemsize)
    if all(isinstance(x, Value) or (type(x) is int and 0 <= x - least < count) for x in array.flat):
        return array
    return each(lambda x: x if isinstance(x, Value) else (int(x) - least) % count + least, array)


def _is_bool(x: Any) -> bool:
    return x.dtype == "b" if isinstance(x, Value) else isinstance(x, (bool, np.bool_))


def _round(params: Any, dtype: np.dtype) -> Callable[[Any], Any]:
    if int(params["rounding_method"]) == 1:  # ties to even
        return lambda x: ops.rint(x) if isinstance(x, Value) else float(np.rint(x))
    return lambda x: functions.sign(x) * functions.floor(ops.absolute(x) + 0.5)


def select(which: Any, *cases: Any) -> Any:
    if _is_bool(which):
        return ops.where(which, cases[1], cases[0])
    result = cases[-1]
    for i in reversed(range(len(cases) - 1)):
        result = ops.where(which <= i, cases[i], result)
    return result


def _commutative(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`function` with a traced value first: the operators of these know no other order."""
    return lambda a, b: function(b, a) if isinstance(b, Value) else function(a, b)


def _less(a: Any, b: Any) -> Any:
    return ops.both(ops.negate(a), b) if _is_bool(a) else a < b


def _less_or_equal(a: Any, b: Any) -> Any:
    return ops.either(ops.negate(a), b) if _is_bool(a) else a <= b


def _before(a: Any, b: Any) -> Any:
    """The order that sorting and searching go by: NaN comes last."""
    kind = next((x.dtype for x in (a, b) if isinstance(x, Value)), "f" if isinstance(a, float) else "i")
    return ops.either(a < b, ops.both(b != b, a == a)) if kind == "f" else _less(a, b)


def _greater(a: Any, b: Any) -> Any:
    return _less(b, a)


def _maximum(a: Any, b: Any) -> Any:
    return ops.either(a, b) if _is_bool(a) else functions.maximum(a, b)


def _minimum(a: Any, b: Any) -> Any:
    return ops.both(a, b) if _is_bool(a) else functions.minimum(a, b)


def _clamp(low: Any, x: Any, high: Any) -> Any:
    return _minimum(_maximum(x, low), high)


def _sqrt(x: Any) -> Any:
    return ops.sqrt(x) if isinstance(x, Value) or x >= 0 else float("nan")


def _absolute(x: Any) -> Any:
    if isinstance(x, Value) and x.dtype == "i":
        return ops.where(x < 0, -x, x)
    return ops.absolute(x)


def _power(x: Any, y: Any) -> Any:
    return functions.power(x, y if isinstance(y, float) else ops.to_float(y))


_and, _or, _xor = _commutative(operator.and_), _commutative(operator.or_), _commutative(operator.xor)

ELEMENTWISE: dict[str, Callable[[Any, np.dtype], Callable[..., Any]]] = {
    "add": _plain(operator.add),
    "add_any": _plain(operator.add),
    "sub": _plain(operator.sub),
    "mul": _plain(operator.mul),
    "neg": _plain(operator.neg),
    "div": _quotient,
    "rem": _rest,
    "max": _plain(_maximum),
    "min": _plain(_minimum),
    "abs": _plain(_absolute),
    "sign": _plain(functions.sign),
    "floor": _plain(functions.floor),
    "ceil": _plain(functions.ceil),
    "round": _round,
    "sqrt": _plain(_sqrt),
    "rsqrt": _plain(lambda x: functions.divide(1.0, _sqrt(x))),
    "square": _plain(lambda x: x * x),
    "integer_pow": lambda params, dtype: functools.partial(_integer_power, n=params["y"]),
    "pow": _real(_power),
    "exp": _plain(functions.exp),
    "exp2": _plain(lambda x: functions.exp(x * 0.693147180559945286)),
    "expm1": _plain(functions.expm1),
    "log": _plain(functions.log),
    "log1p": _plain(functions.log1p),
    "tanh": _plain(functions.tanh),
    "logistic": _plain(functions.logistic),
    "sinh": _plain(lambda x: 0.5 * (functions.expm1(x) - functions.expm1(-x))),
    "cosh": _plain(lambda x: 0.5 * (functions.exp(x) + functions.exp(-x))),
    "sin": _plain(ops.sin),
    "cos": _plain(ops.cos),
    "tan": _plain(lambda x: functions.divide(ops.sin(x), ops.cos(x))),
    "atan": _plain(functions.arctan),
    "atan2": _plain(functions.arctan2),
    "asin": _plain(functions.arcsin),
    "acos": _plain(functions.arccos),
    "is_finite": _plain(ops.isfinite),
    "lt": _plain(_less),
    "le": _plain(_less_or_equal),
    "gt": _plain(_greater),
    "ge": _plain(lambda a, b: _less_or_equal(b, a)),
    "lt_to": _plain(_before),
    "le_to": _plain(lambda a, b: ops.negate(_before(b, a))),
    "eq": _plain(operator.eq),
    "ne": _plain(operator.ne),
    "and": _plain(_and),
    "or": _plain(_or),
    "xor": _plain(_xor),
    "not": _plain(_not),
    "shift_left": _shift(functions.shift_left),
    "shift_right_logical": _shift(functions.shift_right_logical),
    "shift_right_arithmetic": _shift(functions.shift_right_arithmetic),
    "select_n": _plain(select),
    "clamp": _plain(_clamp),
    "convert_element_type": _convert,
    "stop_gradient": _plain(lambda x: x),
    "copy": _plain(lambda x: x),
    "copy_p": _plain(lambda x: x),
}


def _integer_power(x: Any, n: int) -> Any:
    return functions.integer_power(x, n)


# ---- Whole arrays --------------------------------------------------------------------------------------------------


def _broadcast(p: Any, x: Scalars) -> Scalars:
    shape = [1] * len(p["shape"])
    for axis, size in zip(p["broadcast_dimensions"], x.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(x.reshape(shape), p["shape"])


def _slice(p: Any, x: Scalars) -> Scalars:
    strides = p["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, p["start_indices"], p["limit_indices"], strides))]


def _split(p: Any, x: Scalars) -> list[Scalars]:
    return np.split(x, np.cumsum(p["sizes"])[:-1], axis=p["axis"])


def _dot(p: Any, a: Scalars, b: Scalars) -> Scalars:
    """`lax.dot_general`, each sum in index order."""
    (over_a, over_b), (batch_a, batch_b) = p["dimension_numbers"]
    free_a = [i for i in range(a.ndim) if i not in (*over_a, *batch_a)]
    free_b = [i for i in range(b.ndim) if i not in (*over_b, *batch_b)]
    shape = [*(a.shape[i] for i in (*batch_a, *free_a)), *(b.shape[i] for i in free_b)]
    count = int(np.prod([a.shape[i] for i in over_a], dtype=int))
    batches = int(np.prod([a.shape[i] for i in batch_a], dtype=int))
    left = a.transpose([*batch_a, *free_a, *over_a]).reshape(batches, -1, count) if a.size else a.reshape(batches, 0, 0)
    right = (
        b.transpose([*batch_b, *free_b, *over_b]).reshape(batches, -1, count) if b.size else b.reshape(batches, 0, 0)
    )
    result = [
        _sum([x * y for x, y in zip(r, c, strict=True)]) for k in range(batches) for r in left[k] for c in right[k]
    ]
    return filled(result, shape)


def _sum(values: Sequence[Any]) -> Any:
    return functools.reduce(operator.add, values) if len(values) else 0.0


def _accumulated(function: Callable[[Any, Any], Any]) -> Callable[..., Scalars]:
    def run(p: Any, x: Scalars) -> Scalars:
        rows = np.moveaxis(x, p["axis"], 0)
        order = range(len(rows))[:: -1 if p["reverse"] else 1]
        result, total = np.empty_like(rows), None
        for i in order:
            total = rows[i, ...] if total is None else each(function, total, rows[i, ...])
            result[i, ...] = total
        return np.moveaxis(result, 0, p["axis"])

    return run


def reduce(function: Callable[[Sequence[Any]], Any], x: Scalars, axes: Sequence[int]) -> Scalars:
    """Reduce over axes, each row in index order."""
    kept = [i for i in range(x.ndim) if i not in axes]
    shape = [x.shape[i] for i in kept]
    rows = x.transpose([*kept, *axes]).reshape(int(np.prod(shape, dtype=int)), -1) if x.size else np.empty((0, 0))
    if not x.size:
        return filled([function([])] * int(np.prod(shape, dtype=int)), shape)
    return filled([function(list(row)) for row in rows], shape)


def _over(function: Callable[[Any, Any], Any], empty: Any) -> Callable[[Sequence[Any]], Any]:
    return lambda values: functools.reduce(function, values) if len(values) else empty


def _first(wins: Callable[[Any, Any], Any]) -> Callable[[Sequence[Any]], Any]:
    """The index of the first extreme element."""

    def run(values: Sequence[Any]) -> Any:
        best, index = values[0], 0
        for i, x in enumerate(values[1:], 1):
            better = wins(x, best)
            if isinstance(x, float) or (isinstance(x, Value) and x.dtype == "f"):
                better = ops.either(better, ops.both(x != x, best == best))  # as in NumPy, NaN counts as extreme
            best, index = ops.where(better, x, best), ops.where(better, i, index)
        return index

    return run


ARRAYS: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": lambda p, x: x.reshape(p["new_sizes"]),
    "squeeze": lambda p, x: x.squeeze(tuple(p["dimensions"])),
    "expand_dims": lambda p, x: np.expand_dims(x, p["dimensions"]),
    "transpose": lambda p, x: x.transpose(p["permutation"]),
    "slice": _slice,
    "rev": lambda p, x: np.flip(x, p["dimensions"]),
    "concatenate": lambda p, *xs: np.concatenate(xs, axis=p["dimension"]),
    "stack": lambda p, *xs: np.stack(xs, axis=p["axis"]),
    "tile": lambda p, x: np.tile(x, p["reps"]),
    "split": _split,
    "dot_general": _dot,
    "cumsum": _accumulated(operator.add),
    "cumprod": _accumulated(operator.mul),
    "cummax": _accumulated(_maximum),
    "cummin": _accumulated(_minimum),
    "optimization_barrier": lambda p, *xs: list(xs),
}
REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "reduce_sum": _sum,
    "reduce_prod": _over(operator.mul, 1.0),
    "reduce_max": _over(_maximum, float("-inf")),
    "reduce_min": _over(_minimum, float("inf")),
    "reduce_and": _over(_and, True),
    "reduce_or": _over(_or, False),
    "argmax": _first(_greater),
    "argmin": _first(_less),
}
