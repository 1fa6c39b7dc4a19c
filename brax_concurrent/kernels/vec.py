"""Vectors and quaternions as lists of scalars. Quaternions are (w, x, y, z); matrices are 9 scalars, row-major."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from brax_concurrent.kernels.ops import sqrt, where

Vec = Sequence[Any]


def add(a: Vec, b: Vec) -> list[Any]:
    return [x + y for x, y in zip(a, b, strict=True)]


def sub(a: Vec, b: Vec) -> list[Any]:
    return [x - y for x, y in zip(a, b, strict=True)]


def scale(a: Vec, s: Any) -> list[Any]:
    return [x * s for x in a]


def add_scaled(a: Vec, b: Vec, s: Any) -> list[Any]:
    """a + b * s."""
    return [x + y * s for x, y in zip(a, b, strict=True)]


def dot(a: Vec, b: Vec) -> Any:
    """Inner product, summed in index order."""
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = total + x * y
    return total


def cross(a: Vec, b: Vec) -> list[Any]:
    return [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]]


def norm(a: Vec) -> Any:
    return sqrt(dot(a, a))


def normalize(a: Vec, fallback: Vec) -> tuple[list[Any], Any]:
    """(a / |a|, |a|); `fallback` instead of a / |a| where |a| < 1e-15 (MuJoCo's mjMINVAL)."""
    length = norm(a)
    small = length < 1e-15
    inverse = 1.0 / where(small, 1.0, length)
    return [where(small, f, x * inverse) for x, f in zip(a, fallback, strict=True)], length


def quat_mul(a: Vec, b: Vec) -> list[Any]:
    return [
        a[0] * b[0] - a[1] * b[1] - a[2] * b[2] - a[3] * b[3],
        a[0] * b[1] + a[1] * b[0] + a[2] * b[3] - a[3] * b[2],
        a[0] * b[2] - a[1] * b[3] + a[2] * b[0] + a[3] * b[1],
        a[0] * b[3] + a[1] * b[2] - a[2] * b[1] + a[3] * b[0],
    ]


def quat_to_mat(q: Vec) -> list[Any]:
    """Rotation matrix of a unit quaternion. The diagonal is 1 - 2(..), so that a planar rotation folds to constants."""
    w, x, y, z = q
    return [
        1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y - w * z), 2.0 * (x * z + w * y),
        2.0 * (x * y + w * z), 1.0 - 2.0 * (x * x + z * z), 2.0 * (y * z - w * x),
        2.0 * (x * z - w * y), 2.0 * (y * z + w * x), 1.0 - 2.0 * (x * x + y * y),
    ]  # fmt: skip


def mat_vec(m: Vec, v: Vec) -> list[Any]:
    return [dot(m[3 * i : 3 * i + 3], v) for i in range(3)]


def mat_t_vec(m: Vec, v: Vec) -> list[Any]:
    """Transpose of m, times v."""
    return [m[i] * v[0] + m[3 + i] * v[1] + m[6 + i] * v[2] for i in range(3)]


def rotate(q: Vec, v: Vec) -> list[Any]:
    """v rotated by the unit quaternion q: v + 2 w (u x v) + 2 u x (u x v)."""
    u = q[1:]
    t = scale(cross(u, v), 2.0)
    return [a + q[0] * b + c for a, b, c in zip(v, t, cross(u, t), strict=True)]
