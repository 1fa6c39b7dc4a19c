"""Scalar functions that kernels may use: on Python numbers, NumPy arrays (the reference) and traced values.

Traced transcendental functions are polynomials written in terms of multiply-adds, so that they run in SIMD lanes on the
CPU and give the same bits on a GPU. Errors against the correctly rounded result, measured by tests/kernels/test_ops.py,
are stated with each function, in units in the last place (ulp).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from brax_concurrent.backends.program import Value
from brax_concurrent.kernels import polynomials

Scalar = Any  # a Python number, a NumPy array or a traced Value


def _value(*args: Scalar) -> Value | None:
    return next((a for a in args if isinstance(a, Value)), None)


def is_lane_integer(x: Any) -> bool:
    """Whether `x` is a runtime integer (an array or traced value) rather than a Python int."""
    return isinstance(x, Value) or (isinstance(x, np.ndarray) and x.ndim > 0)


def sqrt(x: Scalar) -> Scalar:
    """Square root, correctly rounded."""
    if isinstance(x, Value):
        return x.tracer.unary("sqrt", x)
    return np.sqrt(x) if isinstance(x, np.ndarray) else math.sqrt(x)


def absolute(x: Scalar) -> Scalar:
    """Absolute value."""
    return x.tracer.unary("abs", x) if isinstance(x, Value) else abs(x)


def minimum(a: Scalar, b: Scalar) -> Scalar:
    """The smaller one; `b` where the comparison is undefined (NaN)."""
    return where(a < b, a, b)


def maximum(a: Scalar, b: Scalar) -> Scalar:
    """The larger one; `b` where the comparison is undefined (NaN)."""
    return where(a > b, a, b)


def clip(x: Scalar, low: Scalar, high: Scalar) -> Scalar:
    """`x` limited to [low, high]; NaN becomes `low`."""
    return minimum(maximum(x, low), high)


def where(cond: Scalar, a: Scalar, b: Scalar) -> Scalar:
    """`a` where `cond` holds, else `b`; both are evaluated."""
    v = _value(cond, a, b)
    if v is not None:
        return v.tracer.select(cond, a, b)
    if isinstance(cond, (bool, np.bool_)):
        return a if cond else b
    return np.where(cond, a, b)


def both(a: Scalar, b: Scalar) -> Scalar:
    """Logical and of two booleans."""
    v = _value(a, b)
    return v.tracer.logical("and", a, b) if v is not None else np.logical_and(a, b)


def either(a: Scalar, b: Scalar) -> Scalar:
    """Logical or of two booleans."""
    v = _value(a, b)
    return v.tracer.logical("or", a, b) if v is not None else np.logical_or(a, b)


def negate(a: Scalar) -> Scalar:
    """Logical not of a boolean."""
    return a.tracer.logical_not(a) if isinstance(a, Value) else np.logical_not(a)


def isfinite(x: Scalar) -> Scalar:
    """Whether `x` is neither NaN nor infinite."""
    return absolute(x) < math.inf


def to_float(i: Scalar) -> Scalar:
    """An integer or boolean as a floating-point number."""
    if isinstance(i, Value):
        return i.tracer.convert("f", i)
    return i.astype(np.float64) if isinstance(i, np.ndarray) else float(i)


def to_int(x: Scalar) -> Scalar:
    """A floating-point number truncated toward zero, or a boolean as 0 or 1; |x| < 2**31."""
    if isinstance(x, Value):
        return x.tracer.convert("i", x)
    return x.astype(np.int32) if isinstance(x, np.ndarray) else int(x)


def rint(x: Scalar) -> Scalar:
    """The nearest whole number, ties to even."""
    if isinstance(x, Value):
        return x.tracer.unary("rint", x)
    return np.rint(x) if isinstance(x, np.ndarray) else float(round(x))


def shift_right(i: Scalar, bits: int) -> Scalar:
    """Logical right shift of a 32-bit integer."""
    if isinstance(i, Value):
        return i.tracer.binary("lshr", i, bits)
    return (np.asarray(i, np.int32).view(np.uint32) >> np.uint32(bits)).view(np.int32)


def sign_bit(x: Scalar) -> Scalar:
    """1 where a floating-point number is negative or -0, else 0; for NaN either."""
    if isinstance(x, Value):
        return shift_right(x.tracer.emit("bits", (x,), "i"), 31)
    return np.signbit(x).astype(np.int32) if isinstance(x, np.ndarray) else int(math.copysign(1.0, x) < 0)


def int32(i: int) -> int:
    """A 32-bit pattern as the two's complement integer that kernels use."""
    return (i & 0xFFFFFFFF) - ((i & 0x80000000) << 1)


def bit_words(words: Any) -> tuple[Scalar, ...]:
    """The words of `w.set_bits`, Python ints among them as kernels have integers.

    Raises:
        TypeError: `words` is no sequence, or has a word that is a Python number but no whole one.
    """
    if not isinstance(words, Sequence):
        raise TypeError(f"set_bits: expected a sequence of integers of 32 bits, got {words!r}")
    for word in words:
        if not is_lane_integer(word) and not isinstance(word, (int, np.integer)):
            raise TypeError(f"set_bits: expected integers of 32 bits, got {word!r}")
    return tuple(word if is_lane_integer(word) else int32(int(word)) for word in words)


def uniform01(i: Scalar) -> Scalar:
    """A 32-bit random integer as a number in (0, 1): (2 * (top 23 bits) + 1) / 2**24."""
    return (to_float(shift_right(i, 9)) * 2.0 + 1.0) * 2.0**-24


def fma(a: Scalar, b: Scalar, c: Scalar) -> Scalar:
    """a * b + c; traced: rounded once."""
    v = _value(a, b, c)
    return v.tracer.fma(a, b, c) if v is not None else a * b + c


def sincos(x: Scalar) -> tuple[Scalar, Scalar]:
    """Sine and cosine of an angle in radians. Traced: under 2 ulp for |x| <= 1000, error grows beyond."""
    if isinstance(x, Value):
        return polynomials.sincos(x)
    return (np.sin(x), np.cos(x)) if isinstance(x, np.ndarray) else (math.sin(x), math.cos(x))


def sin(x: Scalar) -> Scalar:
    """Sine of an angle in radians; see sincos."""
    return sincos(x)[0]


def cos(x: Scalar) -> Scalar:
    """Cosine of an angle in radians; see sincos."""
    return sincos(x)[1]


def log(x: Scalar) -> Scalar:
    """Natural logarithm of a normal positive number."""
    if isinstance(x, Value):
        return polynomials.log(x)
    return np.log(x) if isinstance(x, np.ndarray) else math.log(x)


def exp(x: Scalar) -> Scalar:
    """Exponential for |x| <= 80."""
    if isinstance(x, Value):
        return polynomials.exp(x)
    return np.exp(x) if isinstance(x, np.ndarray) else math.exp(x)


def tanh(x: Scalar) -> Scalar:
    """Hyperbolic tangent. Traced: under 5 ulp in single precision, under 2 in double; NaN stays NaN."""
    if isinstance(x, Value):
        return polynomials.tanh(x)
    return np.tanh(x) if isinstance(x, np.ndarray) else math.tanh(x)


def sigmoid(x: Scalar) -> Scalar:
    """The logistic function 1 / (1 + exp(-x)). Traced: under 3 ulp for x >= -80, 1.8e-35 below; NaN stays NaN."""
    if isinstance(x, Value):
        return polynomials.sigmoid(x)
    return 1.0 / (1.0 + np.exp(-x)) if isinstance(x, np.ndarray) else 1.0 / (1.0 + math.exp(-x))


def power(x: Scalar, exponent: float) -> Scalar:
    """`x ** exponent` for x >= 0 and a constant exponent; whole exponents up to 8 by multiplication."""
    if not isinstance(x, Value):
        return x**exponent
    if exponent == int(exponent) and 1 <= exponent <= 8:
        result = x
        for _ in range(int(exponent) - 1):
            result = result * x
        return result
    tiny = 1e-30
    return where(x > tiny, exp(exponent * log(maximum(x, tiny))), 0.0)
