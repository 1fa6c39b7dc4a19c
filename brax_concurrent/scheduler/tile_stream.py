"""The stream of a tile program in compiled code, task by task: the order of `TileProgram.tasks`, without a table.

Tiles in flight have an *entry* each, which says what their tasks need to run. All of this is done under the lock of
engine.py, in the state of a run.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from brax_concurrent.backends.intrinsics import atomic_add, atomic_store, load_i64, pointer, store_i64
from brax_concurrent.backends.native import (
    DESC_BUFFERS,
    DESC_FIRST_OP,
    DESC_INTERLEAVE,
    DESC_NUM_ENVS,
    DESC_OPS,
    DESC_PLAN,
    DESC_WINDOW,
    JOB_BUFFERS,
    JOB_DONE,
    JOB_NEXT,
    JOB_NUM_ENVS,
    JOB_TILES,
    TILE,
    WORD,
    give_back_arena,
)
from brax_concurrent.scheduler.engine import LANE_WORDS, STATE_ENGINE, STATE_LANE

# The engine's own words: where the stream is. Tiles go through it in groups, whose tasks take turns.
GROUP_TILES = STATE_ENGINE
GROUP_TASKS = STATE_ENGINE + 1  # tasks of the group that are still to come
GROUP_AT = STATE_ENGINE + 2  # whose turn it is in the group
GROUP_KIND = STATE_ENGINE + 3  # the op that it is for
# After the lanes: for each part, its next tile; the entries of tiles in flight; the addresses of the group's.
ENTRY_ARENA = 0  # 0: none yet
ENTRY_LEFT = 1  # tasks that have not retired; 0: the entry is free
ENTRY_UNIT = 2  # the tile's place in the stream
ENTRY_DESC = 3  # address of its program's descriptor
ENTRY_PART = 4
ENTRY_TILE = 5  # among the part's
ENTRY_BUFFERS = 6  # address of its part's buffer addresses
ENTRY_NUM_ENVS = 7
ENTRY_WORDS = 8
# The plan: for each part
PLAN_TABLE = 0  # address of its table of conflicts
PLAN_NAMES = 1  # address of the addresses of its ops' names, C strings
PLAN_WORDS = 2


@njit(nogil=True)
def side(desc: int, tiles: int) -> int:
    """Tiles of a group."""
    return min(load_i64(desc + WORD * DESC_INTERLEAVE), tiles)


@njit(nogil=True)
def parts(desc: int) -> int:
    return load_i64(desc + WORD * DESC_OPS) if load_i64(desc + WORD * DESC_NUM_ENVS) != 0 else 1


@njit(nogil=True)
def _first_part(desc: int) -> int:
    """The word of the state that counts the first part's tiles."""
    return STATE_LANE + LANE_WORDS * load_i64(desc + WORD * DESC_WINDOW)


@njit(nogil=True)
def entries(desc: int, state: int) -> int:
    """Where the entries are; there are as many as the window has slots and a group has tiles."""
    return state + WORD * ((_first_part(desc) + parts(desc) + ENTRY_WORDS - 1) // ENTRY_WORDS * ENTRY_WORDS)


@njit(nogil=True)
def _next_part(desc: int, state: int) -> int:
    """The part whose tile is the stream's next: as in `TileComposite.tasks`."""
    spread = load_i64(desc + WORD * DESC_INTERLEAVE) > 1
    best, best_place = 0, 2.0
    for part in range(parts(desc)):
        num_envs = load_i64(desc + WORD * (DESC_FIRST_OP + 2 * part + 1))
        count, tile = (num_envs + TILE - 1) // TILE, load_i64(state + WORD * (_first_part(desc) + part))
        if tile < count:
            place = (tile + 0.5) / count if spread else 0.0
            if place < best_place:
                best, best_place = part, place
    return best


@njit(nogil=True)
def _begin_tile(job: int, desc: int, state: int, entry: int) -> int:
    """Fill in the entry of the stream's next tile; returns how many tasks it has."""
    unit = load_i64(job + WORD * JOB_NEXT)
    part, program = 0, desc
    num_envs, buffers = load_i64(job + WORD * JOB_NUM_ENVS), load_i64(job + WORD * JOB_BUFFERS)
    if load_i64(desc + WORD * DESC_NUM_ENVS) != 0:
        part = _next_part(desc, state)
        pair = desc + WORD * DESC_FIRST_OP
        for _ in range(part):
            buffers += WORD * load_i64(load_i64(pair) + WORD * DESC_BUFFERS)
            pair += 2 * WORD
        program, num_envs = load_i64(pair), load_i64(pair + WORD)
    counter = state + WORD * (_first_part(desc) + part)
    tile = load_i64(counter)
    store_i64(counter, tile + 1)
    tasks = load_i64(program + WORD * DESC_OPS)
    store_i64(entry + WORD * ENTRY_ARENA, 0)
    store_i64(entry + WORD * ENTRY_LEFT, tasks)
    store_i64(entry + WORD * ENTRY_UNIT, unit)
    store_i64(entry + WORD * ENTRY_DESC, program)
    store_i64(entry + WORD * ENTRY_PART, part)
    store_i64(entry + WORD * ENTRY_TILE, tile)
    store_i64(entry + WORD * ENTRY_BUFFERS, buffers)
    store_i64(entry + WORD * ENTRY_NUM_ENVS, num_envs)
    atomic_store(job + WORD * JOB_NEXT, unit + 1)
    if tasks == 0:
        atomic_add(job + WORD * JOB_DONE, 1)
    return tasks


@njit(nogil=True)
def _begin_group(job: int, desc: int, state: int) -> None:
    """Have the next tiles of the stream take turns."""
    tiles = load_i64(job + WORD * JOB_TILES)
    size = min(side(desc, tiles), tiles - load_i64(job + WORD * JOB_NEXT))
    entry = entries(desc, state)
    group = entry + WORD * ENTRY_WORDS * (load_i64(desc + WORD * DESC_WINDOW) + side(desc, tiles))
    members, tasks = 0, 0
    for _ in range(size):
        while load_i64(entry + WORD * ENTRY_LEFT) != 0:
            entry += WORD * ENTRY_WORDS
        ops = _begin_tile(job, desc, state, entry)
        if ops != 0:
            store_i64(group + WORD * members, entry)
            members += 1
            tasks += ops
    store_i64(state + WORD * GROUP_TILES, members)
    store_i64(state + WORD * GROUP_TASKS, tasks)
    store_i64(state + WORD * GROUP_AT, 0)
    store_i64(state + WORD * GROUP_KIND, 0)


@njit(nogil=True)
def next_task(job: int, desc: int, state: int) -> int:
    """The entry whose turn it is, with op GROUP_KIND; 0 at the stream's end."""
    tiles = load_i64(job + WORD * JOB_TILES)
    while load_i64(state + WORD * GROUP_TASKS) == 0:
        if load_i64(job + WORD * JOB_NEXT) >= tiles:
            return 0
        _begin_group(job, desc, state)
    group = entries(desc, state) + WORD * ENTRY_WORDS * (load_i64(desc + WORD * DESC_WINDOW) + side(desc, tiles))
    at, kind = load_i64(state + WORD * GROUP_AT), load_i64(state + WORD * GROUP_KIND)
    while True:
        if at == load_i64(state + WORD * GROUP_TILES):
            at, kind = 0, kind + 1
        entry = load_i64(group + WORD * at)
        at += 1
        if kind < load_i64(load_i64(entry + WORD * ENTRY_DESC) + WORD * DESC_OPS):
            break
    store_i64(state + WORD * GROUP_AT, at)
    store_i64(state + WORD * GROUP_KIND, kind)
    store_i64(state + WORD * GROUP_TASKS, load_i64(state + WORD * GROUP_TASKS) - 1)
    return entry


@njit(nogil=True)
def conflicts_of(desc: int, entry: int) -> np.ndarray:
    """The table of conflicts between the ops of an entry's program, see `conflict_table`."""
    ops = load_i64(load_i64(entry + WORD * ENTRY_DESC) + WORD * DESC_OPS)
    plan = load_i64(desc + WORD * DESC_PLAN) + WORD * PLAN_WORDS * load_i64(entry + WORD * ENTRY_PART)
    return carray(pointer(load_i64(plan + WORD * PLAN_TABLE)), (ops, ops), np.bool_)


@njit(nogil=True)
def name_of(desc: int, entry: int, kind: int) -> int:
    """The address of the name of an op, a C string."""
    plan = load_i64(desc + WORD * DESC_PLAN) + WORD * PLAN_WORDS * load_i64(entry + WORD * ENTRY_PART)
    return load_i64(load_i64(plan + WORD * PLAN_NAMES) + WORD * kind)


@njit(nogil=True)
def release_arenas(job: int, desc: int, state: int) -> None:
    """Give back the arenas of the tiles that a failed run leaves unfinished."""
    entry = entries(desc, state)
    for _ in range(load_i64(desc + WORD * DESC_WINDOW) + side(desc, load_i64(job + WORD * JOB_TILES))):
        arena = load_i64(entry + WORD * ENTRY_ARENA)
        if arena != 0:
            store_i64(entry + WORD * ENTRY_ARENA, 0)
            give_back_arena(desc, arena)
        entry += WORD * ENTRY_WORDS
