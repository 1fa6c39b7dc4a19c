"""Counter-based random numbers inside kernels: Threefry-2x32 with 20 rounds.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), the generator of JAX's
default keys. A draw depends only on the environment's key, its counter and the draw's place in the kernel, so it does
not depend on how environments are grouped or scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from brax_concurrent.kernels.ops import int32, log, shift_right, sincos, sqrt, uniform01

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = int32(0x1BD11BDA)


def _rotate_left(x: Any, bits: int) -> Any:
    return (x << bits) | shift_right(x, 32 - bits)


def threefry(key: Sequence[Any], counter: Sequence[Any]) -> tuple[Any, Any]:
    """Two 32-bit words from a key of two and a counter of two."""
    k = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x, y = counter[0] + k[0], counter[1] + k[1]
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            x = x + y
            y = _rotate_left(y, bits) ^ x
        x = x + k[(group + 1) % 3]
        y = y + k[(group + 2) % 3] + (group + 1)
    return x, y


class Random:
    """A stream of draws for one environment.

    Args:
        key: two runtime integers.
        counter: a runtime integer that has a new value whenever numbers are drawn again.
    """

    def __init__(self, key: Sequence[Any], counter: Any):
        self._key, self._counter = key, counter
        self._draws = 0
        self._words: list[Any] = []
        self._normals: list[Any] = []

    def bits(self) -> Any:
        """32 random bits as a runtime integer."""
        if not self._words:
            self._words = list(threefry(self._key, (self._counter, self._counter * 0 + self._draws)))
            self._draws += 1
        return self._words.pop(0)

    def uniform(self, low: Any = 0.0, high: Any = 1.0) -> Any:
        """Uniform on (low, high), from 23 bits."""
        return low + (high - low) * uniform01(self.bits())

    def normal(self) -> Any:
        """Standard normal (Box and Muller, 1958)."""
        if not self._normals:
            radius = sqrt(-2.0 * log(uniform01(self.bits())))
            sine, cosine = sincos(6.283185307179586 * uniform01(self.bits()))
            self._normals = [radius * cosine, radius * sine]
        return self._normals.pop(0)
