"""Running kernels compiled for the CPU on NumPy arrays, without environments or JAX: to test the language itself."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from brax_concurrent.backends import cpu
from brax_concurrent.kernels.kernel import Kernel
from brax_concurrent.kernels.layout import LANES, Field
from brax_concurrent.kernels.specialize import ModelView, Specialized, specialize

FLOAT = {"f32": np.float32, "f64": np.float64}
_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class NoModel:
    """A model without quantities."""


def kind(array: np.ndarray) -> str:
    return {"f": "f", "i": "i", "u": "i", "b": "b"}[array.dtype.kind]


def specialized(
    kernels: Sequence[Kernel],
    fields: Mapping[str, Field],
    arrays: Mapping[str, np.ndarray],
    precision: str,
    model: Any = None,
    shared: Mapping[str, np.ndarray] | None = None,
) -> Specialized:
    user = {name: (a.shape[1], kind(a)) for name, a in arrays.items()}
    user |= {name: (a.shape[1], kind(a), a.shape[0]) for name, a in (shared or {}).items()}
    return specialize(kernels, ModelView(model or NoModel()), fields, user, precision)


def run_compiled(
    kernels: Sequence[Kernel],
    fields: Mapping[str, Field],
    arrays: Mapping[str, np.ndarray],
    precision: str = "f32",
    model: Any = None,
    shared: Mapping[str, np.ndarray] | None = None,
    order: np.ndarray | None = None,
) -> Specialized:
    """Compile the kernels and run them, tile by tile in order, on arrays `(num_envs, columns)`, in place.

    `shared` are arrays `(rows, columns)` that all environments read. `order` are int32, which environment each lane of
    each tile gets; None: as they come.
    """
    shared = shared or {}
    special = specialized(kernels, fields, arrays, precision, model, shared)
    code = cpu.compile_programs(special, grouped=order is not None)
    arena = np.full(special.layout.arena_bytes + 4 * LANES + 64, 0xFF, np.uint8)  # NaN: what nobody wrote shows
    base = arena.ctypes.data + (-arena.ctypes.data) % 64
    every = [*arrays.values(), *shared.values()]
    pointers = (ctypes.c_void_p * len(every))(*(a.ctypes.data for a in every))
    num_envs = len(next(iter(arrays.values())))
    for first in range(0, num_envs, LANES):
        if order is not None:
            ctypes.memmove(base + special.layout.arena_bytes, order[first:].ctypes.data, 4 * LANES)
        for k in kernels:
            _SIGNATURE(code[k.name].address)(base, ctypes.addressof(pointers), first, num_envs)
    return special
