"""What the dispatcher's workers do: claim bundles, look at predicates, run kernels. See dispatcher.py."""

from __future__ import annotations

from brax_concurrent.backends import cuda_dispatch as c
from brax_concurrent.backends.cuda_device import (
    add_global,
    ballot,
    block_index,
    clock,
    device_function,
    external,
    from_lane,
    grid_blocks,
    join_warp,
    load_global,
    load_shared,
    load_shared_word,
    load_table,
    multiprocessor,
    store_shared,
    uniform,
    words,
)
from brax_concurrent.backends.cuda_program import RECORD_ARENA, RECORD_NUM_ENVS, RECORD_ORDER
from brax_concurrent.backends.native import TILE, WORD
from brax_concurrent.scheduler.dispatcher_report import write_trace

_I32, _I64 = words()
_LANES = 32
_NONE = 0x7FFFFFFF
_OFFSET = (1 << c.PART_SHIFT) - 1
_TILE_BITS = TILE.bit_length() - 1

run_task = external(c.RUN_TASK, _I32, (_I32, _I64, _I64, _I32, _I64, _I32, _I32, _I32, _I32))
"""(function, record, arena of the tile, lane, environment, whether there is one, step, barrier, its threads)."""


# --- tables and records -----------------------------------------------------------------------------------------------


@device_function
def part_word(table, part, word):
    """A word of a part's, whose number and 1 is given."""
    return load_table(table + 4 * (c.TABLE_FIRST_PART + c.T_WORDS * (part - 1) + word))


@device_function
def op_word(table, part, op, word):
    """A word of an op's."""
    return load_table(table + 4 * (part_word(table, part, c.T_FIRST_OP) + c.OP_ROW_WORDS * op + word))


@device_function
def record_of(base, table, part):
    """Where a part's record lies in shared memory."""
    return base + part_word(table, part, c.T_RECORD)


@device_function
def tiles_of(record):
    """Tiles of a part."""
    return _tiles(load_shared_word(record + WORD * RECORD_NUM_ENVS))


@device_function
def _tiles(envs):
    """Tiles of so many environments: a shift, since a division of what may be negative takes more."""
    return (envs + TILE - 1) >> _TILE_BITS


@device_function
def bundles_of(base, table, part):
    """Bundles of a part."""
    shift = load_shared(base + c.CONTROL + WORD * c.C_GANG)
    return (tiles_of(record_of(base, table, part)) + (1 << shift) - 1) >> shift


@device_function
def share_end(table, part, blocks):
    """The block at which a part's own blocks end; the part's number is given."""
    share = load_table(table + 4 * (c.TABLE_FIRST_PART + c.T_WORDS * part + c.T_SHARE))
    return (blocks * share + c.SHARES // 2) // c.SHARES


# --- claiming ---------------------------------------------------------------------------------------------------------


@device_function
def claim(base, table, lane, busy):
    """Another bundle for this block: (the part's number and 1, the bundle's number), 0: there is none now.

    A part's bundles are dealt to the blocks that are its own: either all in turn, there and back again so that each
    gets early and late ones, or the first to each and the others by a counter. A block whose part has none left helps
    the next part when it has nothing else to do (`busy` is 0): two robots' kernels on one multiprocessor push each
    other's instructions out.
    """
    parts = load_table(table + 4 * c.TABLE_PARTS)
    blocks, block = grid_blocks(), block_index()
    home = 0
    while home < parts - 1 and block >= share_end(table, home, blocks):
        home += 1
    visits, claims = load_shared(base + c.VISITS), load_shared(base + c.CLAIMS)
    dynamic = load_shared(base + c.CONTROL + WORD * c.C_DYNAMIC)
    found, number = 0, 0
    while found == 0 and visits < parts and (visits == 0 or busy == 0):
        part = home + visits
        part = part - parts if part >= parts else part
        first = share_end(table, part - 1, blocks) if part > 0 else 0
        width = share_end(table, part, blocks) - first
        if visits == 0 and (claims == 0 or dynamic == 0):
            number = claims * width + (block - first if claims & 1 == 0 else first + width - 1 - block)
        elif dynamic == 0:
            number = _NONE
        else:
            taken = 0
            if lane == 0:
                taken = add_global(load_shared_word(base + c.CONTROL + WORD * c.C_COUNTERS) + 4 * part, 1)
            number = from_lane(taken, 0) + width
        claims += 1
        if number < bundles_of(base, table, part + 1):
            found = part + 1
        elif not (visits == 0 and claims == 1 and dynamic != 0):
            visits += 1
    join_warp()
    if lane == 0:
        store_shared(base + c.VISITS, visits)
        store_shared(base + c.CLAIMS, claims)
        store_shared(base + c.ENDED, 1 if visits == parts else 0)
    join_warp()
    return found, number


# --- tasks ------------------------------------------------------------------------------------------------------------


@device_function
def needed(base, table, slot, op, lane):
    """Whether the predicate of a slot's task holds: whether any environment of its tiles has a nonzero there."""
    word, bundle = load_shared(base + c.SLOT_RECORD + 4 * slot), load_shared(base + c.SLOT_BUNDLE + 4 * slot)
    part, record = word >> c.PART_SHIFT, base + (word & _OFFSET)
    size = 1 << load_shared(base + c.CONTROL + WORD * c.C_GANG)
    arena, some = load_shared_word(record + WORD * RECORD_ARENA) + op_word(table, part, op, c.OP_WHEN), 0
    for tile in range(bundle * size, min((bundle + 1) * size, tiles_of(record))):
        some |= load_global(arena + tile * part_word(table, part, c.T_ARENA_BYTES) + 4 * lane)
    return ballot(some) != 0


@device_function
def run(base, table, slot, gang, member, lane, size):
    """Run a gang's task: each warp the kernel on its tile. In the last bundle some may have none.

    A lane without an environment computes what the last environment does, and stores nothing of it.
    """
    word, bundle = load_shared(base + c.SLOT_RECORD + 4 * slot), load_shared(base + c.SLOT_BUNDLE + 4 * slot)
    step, function = load_shared(base + c.SLOT_STEP + 4 * slot), load_shared(base + c.SLOT_FUNCTION + 4 * slot)
    record = base + (word & _OFFSET)
    envs, order = load_shared(record + WORD * RECORD_NUM_ENVS), load_shared_word(record + WORD * RECORD_ORDER)
    arena = load_shared_word(record + WORD * RECORD_ARENA)
    tracing = load_shared_word(base + c.CONTROL + WORD * c.C_TRACE) != 0
    stride = part_word(table, word >> c.PART_SHIFT, c.T_ARENA_BYTES)
    function, ordered = uniform(function), uniform(order != 0)
    first = _I32(bundle * size)
    active = uniform(_I32(min(size, _I32(_tiles(envs)) - first)))
    begin = clock() if tracing else 0
    if member < active:
        tile = _I32(first + member)
        index = _I32(tile * TILE + lane)
        there = index < envs
        env = _I32(index if there else envs - 1)
        if ordered:
            env = load_global(order + 4 * env)
        meeting = gang + 8 if size > 1 else gang
        run_task(function, record, arena + tile * stride, lane, env, there, step, meeting, active * _LANES)
    if tracing and lane == 0 and member == 0:
        place = multiprocessor() << c.PLACE_GANG_BITS | gang
        write_trace(base, slot, load_shared(base + c.SLOT_TASK + 4 * slot) >> c.TASK_OP, place, begin)
