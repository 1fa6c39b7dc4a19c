"""Operations of JAX on uint32 numbers of run time, such as the places that `jnp.searchsorted` counts with.

Kernels hold them as the int32 numbers of the same bits, so that most operations are those of integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from brax_concurrent.backends.program import Value
from brax_concurrent.envs.jaxpr_operations import ELEMENTWISE, RefusedError
from brax_concurrent.kernels import functions, ops

_AS_SIGNED = (
    *("add", "sub", "mul", "and", "or", "xor", "not", "eq", "ne", "select_n", "copy", "copy_p", "stop_gradient"),
    *("shift_left", "shift_right_logical"),
)


def elementwise(name: str, params: Any, dtype: np.dtype) -> Callable[..., Any]:
    """The function of one or several uint32 numbers; `dtype` is that of the result.

    Raises:
        RefusedError: there is none.
    """
    if name in _AS_SIGNED:
        return ELEMENTWISE[name](params, dtype)
    if name == "convert_element_type" and dtype.kind in "iu":
        return _itself
    if name == "convert_element_type" and dtype.kind == "f":
        return _to_float
    if name not in _OPERATIONS:
        raise RefusedError("of unsigned numbers has no counterpart in kernels: convert them to int32")
    return _OPERATIONS[name]


def place(index: Any) -> Any:
    """An index with the top bit as the largest that a signed one can be: both are beyond any array."""
    return ops.where(index < 0, 2**31 - 1, index) if isinstance(index, Value) else index


def _itself(x: Any) -> Any:
    return x


def _to_float(x: Any) -> Any:
    if not isinstance(x, Value):
        return float(x)
    half = ops.shift_right(x, 1) | (x & 1)  # rounds as the whole would
    return ops.where(x < 0, 2.0 * ops.to_float(half), ops.to_float(x))


def _ordered(x: Any) -> Any:
    """What is ordered as signed numbers are."""
    return x ^ -(2**31) if isinstance(x, Value) else x - 2**31


def _less(a: Any, b: Any) -> Any:
    return _ordered(a) < _ordered(b)


def _less_or_equal(a: Any, b: Any) -> Any:
    return _ordered(a) <= _ordered(b)


def _divided(op: str, a: Any, b: Any, by_zero: Any) -> Any:
    values = [x for x in (a, b) if isinstance(x, Value)]
    if not values:
        return (a // b if op == "quotient" else a % b) if b else by_zero
    zero = b == 0
    return ops.where(zero, by_zero, values[0].tracer.emit(f"unsigned {op}", (a, ops.where(zero, 1, b)), "i"))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "lt": _less,
    "le": _less_or_equal,
    "gt": lambda a, b: _less(b, a),
    "ge": lambda a, b: _less_or_equal(b, a),
    "max": lambda a, b: ops.where(_less(a, b), b, a),
    "min": lambda a, b: ops.where(_less(a, b), a, b),
    "div": lambda a, b: _divided("quotient", a, b, 2**32 - 1),
    "rem": lambda a, b: _divided("remainder", a, b, a),
    "shift_right_arithmetic": lambda a, bits: functions.shift_right_arithmetic(
        a if isinstance(a, Value) else ops.int32(a), bits
    ),
}
