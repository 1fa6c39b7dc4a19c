"""Transcendental functions of traced values, as polynomials in multiply-adds.

Sources: range reduction by Cody and Waite (Software Manual for the Elementary Functions, 1980); minimax coefficients of
sine and cosine from Cephes (S. Moshier; single) and fdlibm (Sun Microsystems; double); logarithm as the series of
2 artanh((m - 1) / (m + 1)); exponential as its Taylor series after reduction by ln 2.
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
