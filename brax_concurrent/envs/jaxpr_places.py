"""Gathers, scatters and slices at places that may be known at run time only, on arrays of scalars (envs/jaxpr.py)."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from brax_concurrent.backends.program import Value
from brax_concurrent.envs.jaxpr_operations import Scalars, each, filled
from brax_concurrent.kernels import functions, ops

SCATTERS: dict[str, Callable[[Any, Any], Any]] = {
    "scatter": lambda old, new: new,
    "scatter-add": operator.add,
    "scatter-mul": operator.mul,
    "scatter-max": functions.maximum,
    "scatter-min": functions.minimum,
}
"""By JAX's names: what stands at a place after an update."""


def dynamic_slice(sizes: Sequence[int], x: Scalars, *starts: Scalars) -> Scalars:
    """A slice. From starts that are known at run time only: looked up in constants, else chosen among all."""
    open_axes: list[tuple[int, int, int, Any]] = []  # axis, size, last start, start
    for axis, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        last, index = x.shape[axis] - size, start.item()
        if isinstance(index, Value):
            open_axes.append((axis, size, last, index))
        else:
            first = min(max(int(index), 0), last)
            x = np.take(x, range(first, first + size), axis)
    kinds = {type(element) for element in x.flat}
    if open_axes and len(kinds) == 1 and kinds <= {float, int}:
        return _table_slice(x, open_axes)
    for axis, size, last, index in open_axes:
        slices = [np.take(x, range(i, i + size), axis) for i in range(last + 1)]
        x = slices[last]
        for i in reversed(range(last)):
            x = each(functools.partial(ops.where, index <= i), slices[i], x)
    return x


def _table_slice(x: Scalars, open_axes: Sequence[tuple[int, int, int, Any]]) -> Scalars:
    """A slice of constants: each element looked up in those that it may be."""
    place: Any = 0
    for _, _, last, index in open_axes:
        place = place * (last + 1) + _limited(index, last)
    slices = []
    for first in itertools.product(*(range(last + 1) for _, _, last, _ in open_axes)):
        where = [slice(None)] * x.ndim
        for (axis, size, _, _), start in zip(open_axes, first, strict=True):
            where[axis] = slice(start, start + size)
        slices.append(x[tuple(where)])
    rows = np.stack(slices, axis=-1).reshape(-1, len(slices))
    return filled([_look_up(place, tuple(row)) for row in rows], slices[0].shape)


def _limited(index: Any, last: int) -> Any:
    return functions.minimum(functions.maximum(index, 0), last)


def _look_up(place: Any, constants: tuple[Any, ...]) -> Any:
    if not isinstance(place, Value):
        return constants[place]
    if all(c == constants[0] for c in constants):
        return constants[0]
    return place.tracer.emit("table", (place,), "f" if isinstance(constants[0], float) else "i", constants)


def gather(p: Any, fill: Any, shape: Sequence[int], x: Scalars, indices: Scalars) -> Scalars:
    """`lax.gather`: a slice for each index; `fill` is what a slice that is not inside the array consists of."""
    d, sizes = p["dimension_numbers"], p["slice_sizes"]
    result = np.empty(shape, object)
    for batch in np.ndindex(indices.shape[:-1]):
        starts: list[Any] = [0] * x.ndim
        for axis, of_batch in zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True):
            starts[axis] = batch[of_batch]
        for axis, start in zip(d.start_index_map, indices[batch], strict=True):
            starts[axis] = start
        found = dynamic_slice(sizes, x, *map(_array, starts))
        if p["mode"] == GatherScatterMode.FILL_OR_DROP:
            for start, size, length in zip(starts, sizes, x.shape, strict=True):
                inside = ops.both(start >= 0, start <= length - size)
                found = each(functools.partial(ops.where, inside), found, np.full(found.shape, fill, object))
        found = found.squeeze((*d.collapsed_slice_dims, *d.operand_batching_dims))
        rest = iter(batch)
        where = (slice(None) if axis in d.offset_dims else next(rest) for axis in range(len(shape)))
        result[(*where, ...)] = found
    return result


def scatter(p: Any, combine: Callable[[Any, Any], Any], x: Scalars, indices: Scalars, updates: Scalars) -> Scalars:
    """`lax.scatter` and its like; updates of one place follow each other in the order of their indices."""
    d, x = p["dimension_numbers"], x.copy()
    windows = iter(updates.shape[axis] for axis in d.update_window_dims)
    single = (*d.inserted_window_dims, *d.operand_batching_dims)
    sizes = [1 if axis in single else next(windows) for axis in range(x.ndim)]
    for batch in np.ndindex(indices.shape[:-1]):
        starts: list[Any] = [0] * x.ndim
        for axis, of_batch in zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True):
            starts[axis] = batch[of_batch]
        for axis, start in zip(d.scatter_dims_to_operand_dims, indices[batch], strict=True):
            starts[axis] = (
                _limited(start, x.shape[axis] - sizes[axis]) if p["mode"] == GatherScatterMode.CLIP else start
            )
        rest = iter(batch)
        where = (slice(None) if axis in d.update_window_dims else next(rest) for axis in range(updates.ndim))
        _update(x, starts, updates[(*where, ...)].reshape(sizes), combine)
    return x


def dynamic_update_slice(x: Scalars, update: Scalars, *starts: Scalars) -> Scalars:
    """A slice replaced; one that would reach beyond the array is moved inside."""
    x, lasts = x.copy(), np.subtract(x.shape, update.shape).tolist()
    _update(x, [_limited(start.item(), last) for start, last in zip(starts, lasts, strict=True)], update, _second)
    return x


def _second(old: Any, new: Any) -> Any:
    return new


def _update(x: Scalars, starts: Sequence[Any], update: Scalars, combine: Callable[[Any, Any], Any]) -> None:
    """Change `x` where a window that starts at `starts` is, if it is inside."""
    for first, here in _windows(starts, np.subtract(x.shape, update.shape).tolist()):
        for index in np.ndindex(update.shape):
            place = tuple(map(operator.add, first, index))
            x[place] = ops.where(here, combine(x[place], update[index]), x[place])


def _windows(starts: Sequence[Any], lasts: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Where a window may start inside an array, and whether it does."""
    candidates = [
        range(last + 1) if isinstance(start, Value) else [start] * (0 <= start <= last)
        for start, last in zip(starts, lasts, strict=True)
    ]
    for first in itertools.product(*candidates):
        chosen = [start == i for start, i in zip(starts, first, strict=True) if isinstance(start, Value)]
        yield first, functools.reduce(ops.both, chosen, True)


def _array(x: Any) -> Scalars:
    return np.array(x, object)
