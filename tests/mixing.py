"""Kernels whose results show in which order they ran, and tile programs made of them, for the schedulers' tests.

A tile has five numbers in its arena, which kernels mix; how long they take depends on the numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from toy_programs import ADDRESSES, compiled

from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.intrinsics import (
    atomic_add,
    atomic_load,
    give_way,
    load_i64,
    monotonic_ns,
    store_i32,
    store_i64,
)
from brax_concurrent.scheduler.serial import TileKernel, TileLayout, TileOp, TileProgram, unknown_footprint

A, B, C, D = ((start, start + 8) for start in range(0, 32, 8))
FLAG = (32, 160)  # an int32 for each lane
LAYOUT = TileLayout(
    160,
    (
        BufferSpec("numbers", (2,), "int32", "readwrite"),
        BufferSpec("out", (2,), "int32", "readwrite"),
        BufferSpec("shared", (16,), "int32", "read", per_env=False),  # no kernel says that it writes it
    ),
)


@njit
def dawdle(number):
    """Take a while, that depends on the number."""
    for _ in range(number & 7):
        give_way()


def load(arena, buffers, first_env, num_envs):
    for place in range(20):
        number = load_i64(load_i64(buffers) + 8 * first_env) * (place + 1)
        store_i64(arena + 8 * place, number if place < 5 else 0)


def mix_ab(arena, buffers, first_env, num_envs):
    store_i64(arena, load_i64(arena) * 3 + load_i64(arena + 8))
    dawdle(load_i64(arena))


def mix_cd(arena, buffers, first_env, num_envs):
    store_i64(arena + 16, load_i64(arena + 16) * 5 + load_i64(arena + 24))
    dawdle(load_i64(arena + 16))


def copy_ad(arena, buffers, first_env, num_envs):
    dawdle(load_i64(arena))
    store_i64(arena + 24, load_i64(arena) + 1)


def copy_cb(arena, buffers, first_env, num_envs):
    dawdle(load_i64(arena + 16))
    store_i64(arena + 8, load_i64(arena + 16) + 2)


def set_flag(arena, buffers, first_env, num_envs):
    for lane in range(32):
        store_i32(arena + 32 + 4 * lane, (load_i64(arena) >> 1) & 1 if lane == load_i64(arena) & 31 else 0)


def add_out(arena, buffers, first_env, num_envs):
    out = load_i64(buffers + 8) + 8 * first_env
    store_i64(out, load_i64(out) * 7 + load_i64(arena + 16))


def store(arena, buffers, first_env, num_envs):
    store_i64(load_i64(buffers) + 8 * first_env, load_i64(arena) * 31 + load_i64(arena + 8) * 17 + load_i64(arena + 24))


def log(arena, buffers, first_env, num_envs):
    """Continue a number that all tiles share: who comes when shows in it."""
    shared = load_i64(buffers + 16)
    store_i64(shared, load_i64(shared) * 31 + load_i64(arena) + first_env)


def meet(arena, buffers, first_env, num_envs):
    """Wait until two have come, at most 20 s; count those who met."""
    shared = load_i64(buffers + 16)
    atomic_add(shared, 1)
    begin = monotonic_ns()
    while atomic_load(shared) < 2:
        give_way()
        if monotonic_ns() - begin > 20 * 10**9:
            return
    atomic_add(shared + 8, 1)


def meet_too(arena, buffers, first_env, num_envs):
    meet_compiled(arena, buffers, first_env, num_envs)


meet_compiled = njit(meet)

FOOTPRINTS: dict[Any, tuple[Sequence[Any], Sequence[Any]]] = {
    load: (("numbers",), (A, B, C, D, FLAG)),
    mix_ab: ((A, B), (A,)),
    mix_cd: ((C, D), (C,)),
    copy_ad: ((A,), (D,)),
    copy_cb: ((C,), (B,)),
    set_flag: ((A,), (FLAG,)),
    add_out: ((C, "out"), ("out",)),
    store: ((A, B, D), ("numbers",)),
    meet: ((A,), (C,)),
    meet_too: ((A,), (D,)),
}
MIXERS = (mix_ab, mix_cd, copy_ad, copy_cb, set_flag, add_out, store, load)


@functools.cache
def mixing_kernel(function: Any) -> TileKernel:
    code = compiled(function, ADDRESSES)
    footprint = LAYOUT.footprint(*FOOTPRINTS[function]) if function in FOOTPRINTS else unknown_footprint
    return TileKernel(function.__name__, code.address, f"mixing {function.__name__} 1", footprint, code)


def mixing(*functions: Any) -> TileProgram:
    """Load, then these in order; (function, True) only if a flag of the tile is set."""
    pairs = [each if isinstance(each, tuple) else (each, False) for each in functions]
    ops = [TileOp(mixing_kernel(function), FLAG[0] if conditional else -1) for function, conditional in pairs]
    return TileProgram(LAYOUT, (TileOp(mixing_kernel(load)), *ops))


def mixing_arrays(num_envs: int, seed: int = 1) -> list[np.ndarray]:
    """numbers, out, shared."""
    numbers = np.random.default_rng(seed).integers(0, 1000, (num_envs, 2)).astype(np.int32)
    return [numbers, np.zeros((num_envs, 2), np.int32), np.zeros(16, np.int32)]
