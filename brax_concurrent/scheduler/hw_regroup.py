"""Tiles of environments that have similar work, on the CPU: which environment each lane gets.

A machine vector goes on until its last lane has finished, so that one environment with many contacts keeps 15 others
waiting. What an environment's solver did in its last control step says what it will do in the next. So a participant
sorts the environments of the tiles that it has claimed by that, and deals them to the tiles' lanes, the heaviest first.
Nobody waits for another participant. It changes nothing in any environment's numbers, and nobody sees it.

A GPU regroups in regroup.py.
"""

from __future__ import annotations

from numba import njit

from brax_concurrent.backends.intrinsics import fill_bytes, load_i32, load_i64, stack_bytes, store_i32, store_i64
from brax_concurrent.backends.native import TILE, WORD

GROUP_TILES = 16  # that are sorted together, at most
ORDER_BYTES = 4 * TILE  # of a tile: which environments its lanes have
SCRATCH_BYTES = ORDER_BYTES * (1 + GROUP_TILES)  # behind the arena: the order of the tile at hand, and the group's

_BUCKETS = 1024  # more work than this is as good as this
_BUCKET_BYTES = WORD * _BUCKETS


@njit(nogil=True)
def deal(work: int, first_env: int, envs: int, order: int) -> None:
    """Write the environments of neighbouring tiles by falling work, those of equal work as they are.

    Args:
        work: address of int32, what each environment of the batch had to do.
        first_env: the first of these tiles' environments.
        envs: how many they have, at least 1.
        order: address of int32 for all lanes of the tiles; those without an environment get one that another lane has.
    """
    starts, own, most = stack_bytes(_BUCKET_BYTES), work + 4 * first_env, 0
    for env in range(envs):
        most = max(most, _bucket(load_i32(own + 4 * env)))
    fill_bytes(starts, 0, WORD * (most + 1))
    for env in range(envs):
        cell = starts + WORD * _bucket(load_i32(own + 4 * env))
        store_i64(cell, load_i64(cell) + 1)
    start = 0
    for bucket in range(most, -1, -1):
        count = load_i64(starts + WORD * bucket)
        store_i64(starts + WORD * bucket, start)
        start += count
    for env in range(envs):
        cell = starts + WORD * _bucket(load_i32(own + 4 * env))
        place = load_i64(cell)
        store_i32(order + 4 * place, first_env + env)
        store_i64(cell, place + 1)
    for lane in range(envs, (envs + TILE - 1) // TILE * TILE):
        store_i32(order + 4 * lane, load_i32(order + 4 * (envs - 1)))


@njit(nogil=True)
def _bucket(work: int) -> int:
    return min(max(work, 0), _BUCKETS - 1)
