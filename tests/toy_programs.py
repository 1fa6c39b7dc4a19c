"""Small kernels with the signature of the real ones, and programs made of them, for tests without physics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cfunc, types

from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.native import TILE
from brax_concurrent.scheduler.serial import TileKernel, TileLayout, TileOp, TileProgram

FLOATS = types.CPointer(types.float32)
SIGNATURE = types.void(FLOATS, types.CPointer(FLOATS), types.int64, types.int64)
ADDRESSES = types.void(types.int64, types.int64, types.int64, types.int64)

# The pendulum's arena: one lane row each, then the predicate.
ACCELERATION, ENERGY, ANY_FAST = 0, 128, 256
ARENA_BYTES = 384
PENDULUM = TileLayout(
    ARENA_BYTES,
    (
        BufferSpec("q", (), "float32", "readwrite"),
        BufferSpec("gravity", (1,), "float32", "read", per_env=False),
        BufferSpec("energy", (), "float32", "write"),
        BufferSpec("slowed", (), "float32", "readwrite"),
    ),
)


def accelerate(arena, buffers, first_env, num_envs):
    """Arena acceleration = -gravity q + q^3/6, whose rounding depends on the order of operations."""
    for env in range(first_env, min(first_env + 32, num_envs)):
        q = buffers[0][env]
        arena[env - first_env] = np.float32(-buffers[1][0] * q + q * q * q / np.float32(6))


def find_fast(arena, buffers, first_env, num_envs):
    """Arena energy = q^2 + acceleration^2; the predicate says of each lane whether that exceeds 1."""
    for lane in range(32):
        arena[64 + lane] = np.float32(0)
    for env in range(first_env, min(first_env + 32, num_envs)):
        q, acceleration = buffers[0][env], arena[env - first_env]
        arena[32 + env - first_env] = q * q + acceleration * acceleration
        if arena[32 + env - first_env] > np.float32(1):
            arena[64 + env - first_env] = np.float32(1.4e-45)  # the bits of the integer 1


def slow_down(arena, buffers, first_env, num_envs):
    """Halve the acceleration and count it; runs in tiles with a fast environment."""
    for env in range(first_env, min(first_env + 32, num_envs)):
        arena[env - first_env] *= np.float32(0.5)
        buffers[3][env] += np.float32(1)


def integrate(arena, buffers, first_env, num_envs):
    """q += 0.01 acceleration; the energy goes to the user."""
    for env in range(first_env, min(first_env + 32, num_envs)):
        buffers[0][env] += np.float32(0.01) * arena[env - first_env]
        buffers[2][env] = arena[32 + env - first_env]


@functools.cache
def compiled(function: Callable[..., None], signature: Any = SIGNATURE) -> Any:
    return cfunc(signature)(function)


def kernel(function: Callable[..., None], reads=(), writes=(), layout: TileLayout = PENDULUM) -> TileKernel:
    code = compiled(function)
    footprint = layout.footprint(reads, writes)
    return TileKernel(function.__name__, code.address, f"toy {function.__name__} 1", footprint, code)


@functools.cache
def pendulum() -> TileProgram:
    """Four kernels that depend on each other through the arena, one of them predicated, twice in a row."""
    acceleration, energy = (ACCELERATION, ACCELERATION + 128), (ENERGY, ENERGY + 128)
    any_fast = (ANY_FAST, ANY_FAST + 128)
    step = (
        TileOp(kernel(accelerate, ("q", "gravity"), (acceleration,))),
        TileOp(kernel(find_fast, ("q", acceleration), (energy, any_fast))),
        TileOp(kernel(slow_down, (acceleration, "slowed"), (acceleration, "slowed")), predicate=ANY_FAST),
        TileOp(kernel(integrate, (acceleration, energy, "q"), ("q", "energy"))),
    )
    return TileProgram(PENDULUM, step + step)


def pendulum_arrays(num_envs: int, seed: int = 42) -> list[np.ndarray]:
    """q, gravity, energy, slowed: some tiles have fast environments, some have none."""
    generator = np.random.default_rng(seed)
    q = generator.uniform(-0.5, 0.5, num_envs).astype(np.float32)
    tile = np.arange(num_envs) // TILE
    q[(tile % 2 == 1) & (np.arange(num_envs) % 5 == 0)] *= 8
    gravity = np.array([0.7], np.float32)
    return [q, gravity, np.full(num_envs, np.nan, np.float32), np.zeros(num_envs, np.float32)]


def pendulum_reference(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The same in NumPy float32, operation for operation; what the kernels' bits must be."""
    q, gravity, _, slowed = (array.copy() for array in arrays)
    tile = np.arange(len(q)) // TILE
    for _ in range(2):
        acceleration = -gravity[0] * q + q * q * q / np.float32(6)
        energy = q * q + acceleration * acceleration
        fast = np.isin(tile, tile[energy > 1])
        acceleration[fast] *= np.float32(0.5)
        slowed[fast] += 1
        q = q + np.float32(0.01) * acceleration
    return [q, gravity, energy, slowed]
