"""Transcendental functions of traced values, as polynomials in multiply-adds.

Sources: range reduction by Cody and Waite (Software Manual for the Elementary Functions, 1980); minimax coefficients of
sine and cosine from Cephes (S. Moshier; single) and fdlibm (Sun Microsystems; double); logarithm as the series of
2 artanh((m - 1) / (m + 1)); exponential as its Taylor series after reduction by ln 2; hyperbolic tangent from Eigen
(G. Guennebaud, B. Jacob et al., MathFunctionsImpl.h; single) and Cephes (tanh.c; double).
"""

from __future__ import annotations

from typing import Any

from brax_concurrent.backends.program import Value

_SIN = {
    "f32": (-1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4),
    "f64": (
        -1.66666666666666324348e-01,
        8.33333333332248946124e-03,
        -1.98412698298579493134e-04,
        2.75573137070700676789e-06,
        -2.50507602534068634195e-08,
        1.58969099521155010221e-10,
    ),
}
_COS = {
    "f32": (4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5),
    "f64": (
        4.16666666666666019037e-02,
        -1.38888888888741095749e-03,
        2.48015872894767294178e-05,
        -2.75573143513906633035e-07,
        2.08757232129817482790e-09,
        -1.13596475577881948265e-11,
    ),
}
# pi / 2 in pieces, each short enough that its product with a small whole number is exact or nearly so.
_HALF_PI = {
    "f32": (1.5703125, 4.837512969970703125e-4, 7.54978995489188216e-8),
    "f64": (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21),
}
# tanh(x) = x P(x**2) / Q(x**2) for |x| <= _TANH_LIMIT, beyond which it is 1 in single precision.
_TANH_LIMIT = 7.90531110763549805
_TANH_P = (
    4.89352455891786e-03,
    6.37261928875436e-04,
    1.48572235717979e-05,
    5.12229709037114e-08,
    -8.60467152213735e-11,
    2.00018790482477e-13,
    -2.76076847742355e-16,
)
_TANH_Q = (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06)
# tanh(x) = x + x**3 P(x**2) / Q(x**2) for |x| < 0.625, in double precision.
_TANH_SMALL_P = (-1.61468768441708447952e3, -9.92877231001918586564e1, -9.64399179425052238628e-1)
_TANH_SMALL_Q = (4.84406305325125486048e3, 2.23548839060100448583e3, 1.12811678491632931402e2, 1.0)


def _horner(x: Any, coefficients: tuple[float, ...]) -> Any:
    result: Any = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        result = x.tracer.fma(result, x, c)
    return result


def sincos(x: Value) -> tuple[Any, Any]:
    """Sine and cosine; the quadrant is found by rounding x * 2 / pi."""
    t = x.tracer
    quadrant = t.unary("rint", x * 0.636619772367581343)
    r: Any = x
    for piece in _HALF_PI[t.precision]:
        r = t.fma(quadrant, -piece, r)
    r2 = r * r
    sine = t.fma(r2 * r, _horner(r2, _SIN[t.precision]), r)
    cosine = t.fma(r2 * r2, _horner(r2, _COS[t.precision]), 1.0 - 0.5 * r2)
    q = t.convert("i", quadrant)
    swap = (q & 1) == 1
    sin_part, cos_part = t.select(swap, cosine, sine), t.select(swap, sine, cosine)
    return t.select((q & 2) == 2, -sin_part, sin_part), t.select(((q + 1) & 2) == 2, -cos_part, cos_part)


def log(x: Value) -> Any:
    """Natural logarithm: exponent from the bits (taken in single precision, so any normal float32 magnitude)."""
    t = x.tracer
    bits = t.emit("bits", (x,), "i")
    exponent = t.binary("lshr", bits, 23) - 127
    m = x * t.emit("from_bits", ((127 - exponent) << 23,), "f")
    large = m > 1.4142135623730951
    m = t.select(large, m * 0.5, m)
    e = t.convert("f", exponent) + t.select(large, 1.0, 0.0)
    s = (m - 1.0) / (m + 1.0)
    terms = 5 if t.precision == "f32" else 11
    series = _horner(s * s, tuple(2.0 / (2 * i + 1) for i in range(terms)))
    return t.fma(e, 0.693147180559945286, s * series)


def exp(x: Value) -> Any:
    """Exponential: 2**k times the Taylor series of the rest."""
    t = x.tracer
    k = t.unary("rint", x * 1.44269504088896341)
    r = t.fma(k, -1.42860682030941723e-6, t.fma(k, -0.693145751953125, x))
    terms, coefficients, factorial = (8 if t.precision == "f32" else 14), [], 1.0
    for i in range(terms):
        factorial *= max(i, 1)
        coefficients.append(1.0 / factorial)
    return _horner(r, tuple(coefficients)) * t.emit("from_bits", ((t.convert("i", k) + 127) << 23,), "f")


def tanh(x: Value) -> Any:
    """Hyperbolic tangent: a rational function of the clamped argument; in double precision that or from exp."""
    t = x.tracer
    if t.precision == "f32":
        limit = _TANH_LIMIT
        x = t.select(x > limit, limit, t.select(x < -limit, -limit, x))  # leaves NaN
        r2 = x * x
        return x * _horner(r2, _TANH_P) / _horner(r2, _TANH_Q)
    size = t.unary("abs", x)
    clamped = t.select(size > 20.0, 20.0, size)
    large = 1.0 - 2.0 / (exp(2.0 * clamped) + 1.0)
    r2 = x * x
    small = t.fma(x * r2, _horner(r2, _TANH_SMALL_P) / _horner(r2, _TANH_SMALL_Q), x)
    return t.select(size < 0.625, small, t.select(x < 0.0, -large, large))


def sigmoid(x: Value) -> Any:
    """The logistic function 1 / (1 + exp(-x))."""
    t = x.tracer
    x = t.select(x > 80.0, 80.0, t.select(x < -80.0, -80.0, x))  # leaves NaN
    return 1.0 / (1.0 + exp(-x))
