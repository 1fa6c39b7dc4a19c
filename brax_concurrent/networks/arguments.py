"""What networks' arguments are held against before a graph is built."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any


def is_whole(value: Any) -> bool:
    """A whole number, of Python's or NumPy's, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_counts(network: str, least: int = 1, **counts: int) -> None:
    """Each is a whole number from `least` on.

    Raises:
      ValueError: one is not; it and the network are named.
    """
    for name, count in counts.items():
        if not is_whole(count) or count < least:
            raise ValueError(f"{network}: {name}: expected a whole number from {least} on, got {count!r}")


def check_number(network: str, **numbers: Any) -> None:
    """Each is a real number; a TypeError if one is not."""
    for name, number in numbers.items():
        if not isinstance(number, Real):
            raise TypeError(f"{network}: {name}: expected a number, got {number!r}")


def checked_shape(network: str, name: str, shape: Any, lengths: tuple[int, ...], expected: str) -> tuple[int, ...]:
    """A tuple of whole numbers from 1 on, of one of these lengths; a ValueError if it is none."""
    found = tuple(shape) if isinstance(shape, (tuple, list)) else ()
    if len(found) not in lengths or not all(is_whole(n) and n >= 1 for n in found):
        raise ValueError(f"{network}: {name}: expected {expected} from 1 on, got {shape!r}")
    return tuple(int(n) for n in found)
