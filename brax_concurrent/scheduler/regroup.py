"""Tiles of environments that have similar work: the order in which the dispatcher deals them to lanes.

A warp goes on until its last lane has finished, so that one environment with many contacts keeps 31 others waiting.
What an environment's solver did in its last control step says well what it will do in the next. A counting sort by
that, the heaviest first, is one launch of one block. It changes nothing in any environment's numbers, and nobody sees
it.
"""

from __future__ import annotations

from brax_concurrent.backends.cuda_device import (
    add_shared,
    barrier,
    load_global,
    load_shared,
    max_shared,
    store_global,
    store_shared,
    thread_index,
)
from brax_concurrent.backends.cuda_dispatch import REGROUP_THREADS

THREADS = REGROUP_THREADS
BUCKETS = THREADS
SHARED_WORDS = 2 * BUCKETS + 1
_MOST = 4 * 2 * BUCKETS


def regroup(base: int, work: int, envs: int, order: int) -> int:
    """Write the environments by falling work.

    Args:
        base: offset of SHARED_WORDS int32 of shared memory.
        work: address of (envs,) int32, at least 0.
        envs: their number.
        order: address of (envs,) int32, to which the environments' numbers are written.
    """
    thread = thread_index()
    store_shared(base + 4 * thread, 0)
    store_shared(base + _MOST, 0)
    barrier(0, THREADS)
    most = 0
    for env in range(thread, envs, THREADS):
        most = max(most, load_global(work + 4 * env))
    max_shared(base + _MOST, most)
    barrier(0, THREADS)
    most, shift = load_shared(base + _MOST), 0
    while (most >> shift) >= BUCKETS:
        shift += 1
    for env in range(thread, envs, THREADS):
        add_shared(base + 4 * (BUCKETS - 1 - (load_global(work + 4 * env) >> shift)), 1)
    barrier(0, THREADS)
    # Where each bucket begins: the sum of those before it, in ten rounds between two halves of the memory.
    own, here, there = load_shared(base + 4 * thread), 0, BUCKETS
    distance = 1
    while distance < BUCKETS:
        total = load_shared(base + 4 * (here + thread))
        if thread >= distance:
            total += load_shared(base + 4 * (here + thread - distance))
        store_shared(base + 4 * (there + thread), total)
        here, there, distance = there, here, 2 * distance
        barrier(0, THREADS)
    start = load_shared(base + 4 * (here + thread)) - own
    barrier(0, THREADS)
    store_shared(base + 4 * thread, start)
    barrier(0, THREADS)
    for env in range(thread, envs, THREADS):
        place = add_shared(base + 4 * (BUCKETS - 1 - (load_global(work + 4 * env) >> shift)), 1)
        store_global(order + 4 * place, env)
    return 0
