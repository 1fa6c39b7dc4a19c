"""Memory that a stream's tasks fill: which of its bytes a task before has written."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from brax_concurrent.backends.arguments import ArrayArgument


class Scratch:
    """Uninitialised memory and what tasks write there, byte by byte: exact for views of any strides.

    Args:
      array: the memory.
    """

    def __init__(self, array: ArrayArgument):
        self.array = array
        start, stop = array.bounds
        self._written: np.ndarray | None = np.zeros(stop - start, np.bool_)  # None: all of it

    def written(self, view: ArrayArgument) -> bool:
        """Whether all bytes of a view were written, as far as they are in this memory."""
        shadow = self._shadow(view)
        return shadow is None or bool(shadow.all())

    def write(self, view: ArrayArgument) -> None:
        """The bytes of a view are written."""
        shadow = self._shadow(view)
        if shadow is not None:
            shadow[...] = True
            if view.bounds == self.array.bounds and self._written is not None and self._written.all():
                self._written = None

    def write_all(self) -> None:
        """Every byte may be written: nothing is known of a task."""
        self._written = None

    def _shadow(self, view: ArrayArgument) -> np.ndarray | None:
        """The marks of a view's bytes; None if it has none in this memory, or all are written."""
        start, stop = self.array.bounds
        first, end = view.bounds
        if self._written is None or first == end or not (start <= first and end <= stop):
            return None
        marks = self._written[view.address - start :]
        return as_strided(marks, (*view.shape, view.itemsize), (*view.strides, 1))
