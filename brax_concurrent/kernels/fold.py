"""What is known before a kernel runs: questions about scalars that may be constants of the robot.

A quantity that the user varies per environment is a runtime scalar, and every question about it is answered
"no"; the general formula then runs. So these decide only how much of a formula vanishes, never what it means.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_NOISE = 1e-14


def constant(*scalars: Any) -> bool:
    """Whether all scalars are plain numbers, known while tracing."""
    return all(isinstance(x, (int, float)) for x in scalars)


def zero(x: Any) -> bool:
    """Whether the scalar is known to be 0."""
    return constant(x) and x == 0


def known(scalars: Sequence[Any], expected: Sequence[float]) -> bool:
    """Whether the scalars are known to be these numbers."""
    return constant(*scalars) and list(scalars) == list(expected)


def tidy(scalars: Iterable[Any]) -> list[Any]:
    """Constants of order 1 (an axis, a quaternion, an offset in metres) without their rounding noise.

    MuJoCo's compiler and `quat_to_mat` leave 1e-17 where 0 is meant, and such a number would drag a planar
    robot into three dimensions. Numbers within 1e-14 of 0, 1 or -1 become these; runtime scalars pass.
    """
    return [_tidy(x) for x in scalars]


def _tidy(x: Any) -> Any:
    if constant(x):
        for whole in (0.0, 1.0, -1.0):
            if abs(x - whole) < _NOISE:
                return whole
        return float(x)
    return x
