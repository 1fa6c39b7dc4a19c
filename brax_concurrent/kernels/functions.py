"""Elementary functions on their whole range, for code that is not ours: tasks written in JAX (envs/jaxpr.py).

The physics' own functions (ops.py) leave out what the physics never asks for: overflow, zeros, NaN. These treat it as
NumPy does, up to the sign of zeros and to subnormal numbers, which single precision flushes. On Python numbers they
are NumPy's. tests/kernels/test_functions.py measures their errors: a few units in the last place if none is stated.

Sources: the arctangent's coefficients are Cephes' (S. Moshier); log1p is after Kahan (Goldberg, "What every computer
scientist should know about floating-point arithmetic", 1991, theorem 4).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from brax_concurrent.backends.program import Value
from brax_concurrent.kernels import ops
from brax_concurrent.kernels.ops import absolute, both, either, negate, rint, sqrt, to_int, where

_LN2 = 0.693147180559945286
# ln 2 in two pieces, the first short enough that its product with a whole number is exact.
_LN2_PIECES = {"f32": (0.693145751953125, 1.42860682030941723e-6), "f64": (0.6931471803691238, 1.9082149292705877e-10)}
_TERMS = {"f32": 8, "f64": 14}
_TAN_PI_8 = 0.41421356237309503
_ATAN = (-3.33329491539e-1, 1.99777106478e-1, -1.38776856032e-1, 8.05374449538e-2)
_ATAN_P = (
    -6.485021904942025371773e1,
    -1.228866684490136173410e2,
    -7.500855792314704667340e1,
    -1.615753718733365076637e1,
    -8.750608600031904122785e-1,
)
_ATAN_Q = (
    1.945506571482613964425e2,
    4.853903996359136964868e2,
    4.328810604912902668951e2,
    1.650270098316988542046e2,
    2.485846490142306297962e1,
    1.0,
)


def _or_numpy(exact: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function of traced values that is NumPy's `exact` where no argument is traced."""

    def decorate(traced: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(traced)
        def function(*args: Any) -> Any:
            if any(isinstance(a, Value) for a in args):
                return traced(*args)
            with np.errstate(all="ignore"):
                return exact(*(np.float64(a) for a in args)).item()

        return function

    return decorate


def _horner(x: Any, coefficients: Sequence[float]) -> Any:
    result: Any = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        result = ops.fma(result, x, c)
    return result


def _power_of_two(k: Any) -> Any:
    """2**k for a traced whole number from -126 to 127."""
    return k.tracer.emit("from_bits", ((to_int(k) + 127) << 23,), "f")


def _within(x: Any, low: float, high: float) -> Any:
    """`x` limited to a range; NaN stays."""
    x = where(x < low, low, x)
    return where(x > high, high, x)


def _reduced(x: Any) -> tuple[Any, Any]:
    """(k, exp(r) - 1) where x = k ln 2 + r, |r| < 0.35."""
    k = rint(x * 1.44269504088896341)
    first, second = _LN2_PIECES[x.tracer.precision]
    r = ops.fma(k, -second, ops.fma(k, -first, x))
    coefficients = [1.0 / math.factorial(i) for i in range(1, _TERMS[x.tracer.precision] + 1)]
    return k, r * _horner(r, coefficients)


@_or_numpy(np.exp)
def exp(x: Any) -> Any:
    """Exponential. In double precision it is infinite above 700 and 0 below -690."""
    if x.tracer.precision == "f32":
        k, rest = _reduced(_within(x, -104.0, 89.0))
        half = rint(k * 0.5)  # 2**k in two factors: k may be beyond one number's exponent
        return (1.0 + rest) * _power_of_two(half) * _power_of_two(k - half)
    k, rest = _reduced(_within(x, -690.0, 700.0))
    eighth = rint(k * 0.125)
    scale = _power_of_two(eighth)
    for _ in range(3):
        scale = scale * scale
    result = (1.0 + rest) * _power_of_two(k - 8.0 * eighth) * scale
    return where(x > 700.0, math.inf, where(x < -690.0, 0.0, result))


@_or_numpy(np.expm1)
def expm1(x: Any) -> Any:
    """exp(x) - 1 without cancellation near 0."""
    k, rest = _reduced(_within(x, -40.0, 40.0))
    scale = _power_of_two(k)
    return where(absolute(x) > 40.0, exp(x) - 1.0, ops.fma(scale, rest, scale - 1.0))


@_or_numpy(np.log)
def log(x: Any) -> Any:
    """Natural logarithm; -inf at 0, NaN below."""
    smallest, shift, y = 1.1754943508222875e-38, 0.0, x
    if x.tracer.precision == "f64":  # ops.log has the exponents of single precision
        smallest = 2.2250738585072014e-308
        for bits in (512, 256, 128, 64):
            large, small = y > 2.0**bits, y < 2.0**-bits
            y = where(large, y * 2.0**-bits, where(small, y * 2.0**bits, y))
            shift = where(large, shift + bits, where(small, shift - bits, shift))
    regular = both(x >= smallest, x < math.inf)
    result = shift * _LN2 + ops.log(where(regular, y, 1.0))
    zero = both(x > -smallest, x < smallest)
    return where(regular, result, where(zero, -math.inf, where(x > 0.0, x, math.nan)))


@_or_numpy(np.log1p)
def log1p(x: Any) -> Any:
    """log(1 + x) without loss near 0."""
    u = 1.0 + x
    small = u - 1.0
    one = small == 0.0
    good = both(negate(one), both(x > -1.0, x < 1e10))
    return where(one, x, where(good, log(u) * (x / where(good, small, 1.0)), log(u)))


@_or_numpy(np.tanh)
def tanh(x: Any) -> Any:
    """Hyperbolic tangent."""
    size = absolute(x)
    e = expm1(2.0 * where(size > 20.0, 20.0, size))
    t = e / (e + 2.0)
    return where(x < 0.0, -t, t)


def logistic(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return divide(1.0, 1.0 + exp(-x))


@_or_numpy(np.arctan2)
def arctan2(y: Any, x: Any) -> Any:
    """The angle of the point (x, y), rad, from -pi to pi. Zeros have signs, and infinities are of one size."""
    a, b = absolute(y), absolute(x)
    steep = a > b
    large, small = where(steep, a, b), where(steep, b, a)
    t = where(both(a == math.inf, b == math.inf), 1.0, small / where(large == 0.0, 1.0, large))
    upper = t > _TAN_PI_8
    z = where(upper, (t - 1.0) / (t + 1.0), t)
    square = z * z
    if (y if isinstance(y, Value) else x).tracer.precision == "f32":
        ratio = _horner(square, _ATAN)
    else:
        ratio = _horner(square, _ATAN_P) / _horner(square, _ATAN_Q)
    angle = ops.fma(z * square, ratio, z) + where(upper, math.pi / 4, 0.0)
    angle = where(steep, math.pi / 2 - angle, angle)
    angle = where(_has_minus(x), math.pi - angle, angle)
    return where(_has_minus(y), -angle, angle)


def _has_minus(x: Any) -> Any:
    """Whether x is below 0, or the zero that is."""
    return x.tracer.emit("bits", (x,), "i") < 0 if isinstance(x, Value) else math.copysign(1.0, x) < 0


def arctan(x: Any) -> Any:
    """Arctangent, rad."""
    return arctan2(x, 1.0)


def arcsin(x: Any) -> Any:
    """Arcsine, rad; NaN outside [-1, 1]."""
    return arctan2(x, _leg(x))


def arccos(x: Any) -> Any:
    """Arccosine, rad; NaN outside [-1, 1]."""
    return arctan2(_leg(x), x)


def _leg(x: Any) -> Any:
    """sqrt(1 - x * x); an argument that is rounded at neither end."""
    square = (1.0 - x) * (1.0 + x)
    return sqrt(square) if isinstance(x, Value) or square >= 0 else math.nan


@_or_numpy(np.power)
def power(x: Any, y: Any) -> Any:
    """`x ** y`; NaN where x is below 0 and y no whole number.

    A constant whole y up to 64 costs multiplications. Else it is exp(y log(x)), with an error of about |y log(x)| units
    in the last place.
    """
    if not isinstance(y, Value) and math.isfinite(y):
        if y == int(y) and abs(y) <= 64:
            return integer_power(x, int(y))
        if y == 0.5:
            return sqrt(x)
    size = absolute(x)
    positive = size > 0.0
    result = exp(y * log(where(positive, size, 1.0)))
    result = where(positive, result, where(y > 0.0, 0.0, where(y < 0.0, math.inf, math.nan)))
    half = 0.5 * y
    odd, whole = negate(_is_whole(half)), _is_whole(y)
    result = where(x < 0.0, where(whole, where(odd, -result, result), math.nan), result)
    return where(either(y == 0.0, x == 1.0), 1.0, where(x != x, x, result))


def _is_whole(x: Any) -> Any:
    return (rint(x) if isinstance(x, Value) else float(np.rint(x))) == x


def integer_power(x: Any, n: int) -> Any:
    """`x ** n` by repeated squaring."""
    if n < 0:
        return divide(1.0, integer_power(x, -n))
    result: Any = None
    while n:
        if n & 1:
            result = x if result is None else result * x
        x, n = x * x if n > 1 else x, n >> 1
    return 1.0 if result is None else result


def divide(a: Any, b: Any) -> Any:
    """The quotient of floating-point numbers; that of constants may be infinite or NaN."""
    if isinstance(a, Value) or isinstance(b, Value):
        return a / b
    with np.errstate(all="ignore"):
        return (np.float64(a) / np.float64(b)).item()


@_or_numpy(np.floor)
def floor(x: Any) -> Any:
    """The largest whole number that is not above x."""
    near = rint(x)
    return where(near > x, near - 1.0, near)


@_or_numpy(np.ceil)
def ceil(x: Any) -> Any:
    """The smallest whole number that is not below x."""
    near = rint(x)
    return where(near < x, near + 1.0, near)


@_or_numpy(np.fmod)
def remainder(x: Any, y: Any) -> Any:
    """The remainder of x / y with x's sign, as C's fmod; exact while x / y has fewer digits than a number holds."""
    size, step = absolute(x), absolute(y)
    count = floor(size / step)
    rest = ops.fma(-count, step, size)  # rounding may have made the quotient a whole number
    rest = where(rest < 0.0, rest + step, where(rest >= step, rest - step, rest))
    rest = where(both(step == math.inf, size < math.inf), size, rest)
    return where(step == 0.0, math.nan, where(x < 0.0, -rest, rest))


def maximum(a: Any, b: Any) -> Any:
    """The larger one; NaN where one is."""
    return _extreme(a, b, lambda x, y: x > y)


def minimum(a: Any, b: Any) -> Any:
    """The smaller one; NaN where one is."""
    return _extreme(a, b, lambda x, y: x < y)


def _extreme(a: Any, b: Any, before: Callable[[Any, Any], Any]) -> Any:
    if isinstance(a, Value) and not isinstance(b, Value):
        a, b = b, a
    wins = before(a, b)
    if isinstance(a, Value) and a.dtype == "f":
        wins = either(wins, a != a)
    elif not isinstance(a, Value) and a != a:
        return a
    return where(wins, a, b)


def sign(x: Any) -> Any:
    """-1, 0 or 1; NaN of NaN."""
    one = 1.0 if isinstance(x, float) or (isinstance(x, Value) and x.dtype == "f") else 1
    return where(x > 0, one, where(x < 0, -one, x))


# ---- Whole numbers. Known ones are of any size: whoever calls wraps them.


def whole_quotient(a: Any, b: Any) -> Any:
    """The quotient of integers, truncated toward 0; as in JAX -1 where b is 0."""
    if isinstance(a, Value) or isinstance(b, Value):
        return where(b == 0, -1, where(b == -1, -a, _divided("quotient", a, b)))
    size = abs(a) // abs(b) if b else 1
    return size if (a < 0) == (b < 0) and b else -size


def whole_remainder(a: Any, b: Any) -> Any:
    """The remainder of integers with a's sign; as in JAX a itself where b is 0."""
    if isinstance(a, Value) or isinstance(b, Value):
        return where(b == 0, a, where(b == -1, 0, _divided("remainder", a, b)))
    size = abs(a) % abs(b) if b else abs(a)
    return -size if a < 0 else size


def _divided(op: str, a: Any, b: Any) -> Any:
    """What a processor does; by 1 where its division would trap, in lanes that are not asked for too."""
    tracer = (a if isinstance(a, Value) else b).tracer
    return tracer.emit(op, (a, where(either(b == 0, b == -1), 1, b)), "i")


def shift_left(a: Any, bits: Any, width: int = 32) -> Any:
    """`a << bits`; 0 if that is no number of bits from 0 to `width` - 1. Of traced values, whose width is 32."""
    return _shifted("shl", lambda: a << bits, 0, a, bits, width)


def shift_right_logical(a: Any, bits: Any, width: int = 32) -> Any:
    """`a >> bits` with zeros from the left; 0 if that is no number of bits from 0 to `width` - 1."""
    return _shifted("lshr", lambda: (a % (1 << width)) >> bits, 0, a, bits, width)


def shift_right_arithmetic(a: Any, bits: Any, width: int = 32) -> Any:
    """`a >> bits` with copies of the sign from the left; all of them if that is no number of bits below `width`."""
    return _shifted("ashr", lambda: a >> bits, where(a < 0, -1, 0), a, bits, width)


def _shifted(op: str, known: Callable[[], int], beyond: Any, a: Any, bits: Any, width: int) -> Any:
    if not isinstance(a, Value) and not isinstance(bits, Value):
        return known() if 0 <= bits < width else beyond
    inside = both(bits >= 0, bits < 32)
    tracer = (a if isinstance(a, Value) else bits).tracer
    return where(inside, tracer.binary(op, a, where(inside, bits, 0)), beyond)
