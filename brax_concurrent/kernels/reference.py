"""The reference: kernels run as plain NumPy in float64, every scalar an array with one element per environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from brax_concurrent.kernels.layout import Field
from brax_concurrent.kernels.ops import bit_words, is_lane_integer


class ReferenceWorld:
    """Fields of `num_envs` environments as NumPy arrays of shape `(*field shape, num_envs)`.

    Args:
        fields: what the stream knows (kernels/layout.py).
        num_envs: number of environments.
        user: the user's arrays by name, each `(num_envs, n)`, written in place.
        shared: those that all environments share, `(rows, columns)`.

    Unwritten fields are NaN (integers: -1), so reading what nobody wrote shows.
    """

    def __init__(
        self,
        fields: Mapping[str, Field],
        num_envs: int,
        user: Mapping[str, np.ndarray] | None = None,
        shared: Mapping[str, np.ndarray] | None = None,
    ):
        self.precision = "f64"
        self._num_envs = num_envs
        self._mask: np.ndarray = np.ones(num_envs, bool)
        self._loops: list[np.ndarray | None] = []  # whose environments go on; None: of a loop that none leaves
        self._views: dict[str, _FieldView] = {}
        self.user = _UserArrays(self, dict(user or {}), dict(shared or {}))
        for name, field in fields.items():
            fill, dtype = (np.nan, np.float64) if field.dtype == "f" else (-1, np.int32)
            self._views[name] = _FieldView(self, np.full((*field.shape, num_envs), fill, dtype))

    def __getattr__(self, name: str) -> _FieldView:
        try:
            return self.__dict__["_views"][name]
        except KeyError:
            raise AttributeError(f"no field named {name!r}") from None

    def field(self, name: str) -> _FieldView:
        """The field by name, for names that are no Python attribute."""
        return self._views[name]

    def get(self, name: str) -> np.ndarray:
        """The field as `(num_envs, *shape)` (a copy)."""
        return np.moveaxis(self._views[name].data, -1, 0).copy()

    def put(self, name: str, value: Any) -> None:
        """Set the field from `(num_envs, *shape)`."""
        data = self._views[name].data
        data[...] = np.moveaxis(np.asarray(value), 0, -1)

    def poison(self, *names: str) -> None:
        """Fill fields with NaN (integers: -1), so that a test sees whether a kernel writes them."""
        for name in names:
            data = self._views[name].data
            data[...] = np.nan if data.dtype.kind == "f" else -1

    def run(self, kernel: Any, m: Any) -> None:
        """Run one kernel on all environments. Arithmetic warnings are silent: inactive lanes may divide by zero."""
        with np.errstate(all="ignore"):
            kernel(m, self)

    def enter_stage(self, kernel: Any) -> None:
        """Nothing to do: every value goes through memory here."""

    def range(self, count: Any, rolled: bool = False) -> Iterator[np.ndarray]:
        counts = np.broadcast_to(np.asarray(count), (self._num_envs,))
        most = int(counts.max(initial=0, where=self._mask)) if self._mask.any() else 0
        yield from self._loop(most, lambda k: k < counts)

    def set_bits(self, words: Sequence[Any]) -> Iterator[np.ndarray]:
        bits = [np.broadcast_to(np.asarray(word, np.int32), (self._num_envs,)) for word in bit_words(words)]
        yield from self._loop(32 * len(bits), lambda k: (bits[k // 32] >> k % 32) & 1 == 1, leaves=False)

    def _loop(self, count: int, active: Callable[[int], np.ndarray], leaves: bool = True) -> Iterator[np.ndarray]:
        outer, going = self._mask, np.ones(self._num_envs, bool)
        self._loops.append(going if leaves else None)
        try:
            for k in range(count):
                if not (outer & going).any():
                    break
                self._mask = outer & active(k) & going
                if self._mask.any():
                    yield np.full(self._num_envs, k, np.int32)
        finally:
            self._loops.pop()
            self._mask = outer

    def break_where(self, cond: Any) -> None:
        going = self._loops[-1] if self._loops else None
        if going is None:
            raise ValueError("break_where must stand directly in the body of a w.range loop")
        going &= ~(np.asarray(cond) & self._mask)
        self._mask = self._mask & going

    @contextmanager
    def when(self, cond: Any) -> Iterator[None]:
        outer = self._mask
        self._mask = outer & np.broadcast_to(np.asarray(cond), outer.shape)
        try:
            yield
        finally:
            self._mask = outer

    def barrier(self) -> None:
        """Nothing: all environments go through a kernel side by side."""

    def var(self, initial: Any) -> _Variable:
        return _Variable(self, initial)

    def array(self, length: int, initial: Any = 0.0) -> _FieldView:
        dtype = np.int32 if isinstance(initial, int) and not isinstance(initial, bool) else np.float64
        return _FieldView(self, np.full((length, self._num_envs), initial, dtype))

    def table(self, constants: Any) -> np.ndarray:
        values = np.asarray(constants)
        return values.astype(np.int32 if values.dtype.kind in "iub" else np.float64)

    def store(self, target: np.ndarray, value: Any) -> None:
        np.copyto(target, value, where=self._mask, casting="unsafe")


class _FieldView:
    def __init__(self, world: ReferenceWorld, data: np.ndarray):
        self.world, self.data = world, data

    def _gather(self, index: tuple[Any, ...]) -> tuple[Any, ...]:
        mask = self.world._mask
        safe = (np.where(mask, i, 0) if is_lane_integer(i) else int(i) for i in index)
        return (*safe, ..., np.arange(self.world._num_envs))

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        if any(is_lane_integer(i) for i in index):
            free = self.data.ndim - 1 - len(index)
            if free == 0:
                return self.data[tuple(i for i in self._gather(index) if i is not ...)]
            return [self[(*index, i)] for i in range(self.data.shape[len(index)])]
        return _as_lists(self.data[index], self.data.ndim - 1 - len(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) < self.data.ndim - 1:
            if len(value) != self.data.shape[len(index)]:
                raise ValueError(f"expected {self.data.shape[len(index)]} components, got {len(value)}")
            for i, item in enumerate(value):
                self[(*index, i)] = item
        elif any(is_lane_integer(i) for i in index):
            mask, where = self.world._mask, tuple(i for i in self._gather(index) if i is not ...)
            lanes = np.flatnonzero(mask)
            where = tuple(i[lanes] if isinstance(i, np.ndarray) else i for i in where)
            self.data[where] = np.broadcast_to(value, mask.shape)[lanes]
        else:
            self.world.store(self.data[index], value)


def _as_lists(data: np.ndarray, depth: int) -> Any:
    return data.copy() if depth == 0 else [_as_lists(row, depth - 1) for row in data]


class _Variable:
    def __init__(self, world: ReferenceWorld, initial: Any):
        self._world = world
        value = np.asarray(initial)
        dtype = bool if value.dtype == bool else np.int32 if value.dtype.kind in "iu" else np.float64
        self._data = np.array(np.broadcast_to(value, (world._num_envs,)), dtype)

    @property
    def value(self) -> np.ndarray:
        return self._data.copy()

    @value.setter
    def value(self, new: Any) -> None:
        self._world.store(self._data, new)


class _UserArrays:
    def __init__(self, world: ReferenceWorld, arrays: dict[str, np.ndarray], shared: dict[str, np.ndarray]):
        self.__dict__["_columns"] = {name: _UserArray(world, array) for name, array in arrays.items()}
        self.__dict__["_columns"] |= {name: _SharedArray(world, array) for name, array in shared.items()}

    def __getattr__(self, name: str) -> _UserArray | _SharedArray:
        try:
            return self.__dict__["_columns"][name]
        except KeyError:
            raise AttributeError(f"no user array named {name!r}") from None


class _UserArray:
    def __init__(self, world: ReferenceWorld, array: np.ndarray):
        self._world, self._array = world, array

    def __getitem__(self, index: int) -> np.ndarray:
        column = self._array[:, index] if self._array.ndim == 2 else self._array
        return column.astype(np.float64 if column.dtype.kind == "f" else np.int32)

    def __setitem__(self, index: int, value: Any) -> None:
        self._world.store(self._array[:, index] if self._array.ndim == 2 else self._array, value)


class _SharedArray:
    def __init__(self, world: ReferenceWorld, array: np.ndarray):
        self._world, self._array = world, array.astype(np.float64 if array.dtype.kind == "f" else np.int32)

    def __getitem__(self, index: tuple[Any, int]) -> np.ndarray:
        row, column = index
        if is_lane_integer(row):
            row = np.where(self._world._mask, row, 0)
        return np.broadcast_to(self._array[row, column], (self._world._num_envs,)).copy()
