"""Programs on CUDA streams: in program order on one, or through the out-of-order window onto several.

All of this is compiled. A *call* is one run of a program: a block of memory that says where the call's arrays are, unit
by unit. XLA's own stream is stream 0; what was put onto it before is finished before any task begins, and what is put
onto it afterwards begins when all tasks have finished. The others come from a pool (backends/cuda_pool.py).

**The window** (`sw`). Tasks enter in stream order: the first op of every unit, then the second, and so on. A newcomer
gets its upstream mask by the rules of window.py, and a CUDA stream by those of cuda_slots.py: a unit's tasks stay on
one stream. By stages a small robot's step is bound by what a task costs the host, on one stream or several.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from brax_concurrent.backends.cuda_calls import F_LAUNCH, launch_kernel
from brax_concurrent.backends.cuda_program import (
    DESC_CONTROL_BYTES,
    DESC_FIRST_PART,
    DESC_FUNCTIONS,
    DESC_MULTIPROCESSORS,
    DESC_PARAMETERS,
    DESC_PARTS,
    DESC_STREAMS,
    DESC_TIMEOUT,
    DESC_TRACE,
    DESC_WINDOW,
    MAX_WINDOW,
    OP_COUNT,
    OP_KERNEL,
    OP_KIND,
    OP_PARAMETERS,
    OP_WORDS,
    ORDER_BYTES,
    PART_ARENA_BYTES,
    PART_BLOCK,
    PART_BUFFERS,
    PART_ENVS,
    PART_FIRST_BUFFER,
    PART_FIRST_OP,
    PART_KINDS,
    PART_LANES,
    PART_OPS,
    PART_ROWS,
    PART_SHARE,
    PART_TABLE,
    PART_UNIT_TILES,
    PART_WORDS,
    PART_WORK,
    RECORD_ARENA,
    RECORD_FIRST_BUFFER,
    RECORD_LANES,
    RECORD_NUM_ENVS,
    RECORD_STAMP,
    WARP,
)
from brax_concurrent.backends.cuda_trace import next_stamp
from brax_concurrent.backends.intrinsics import load_i64, pointer, store_i64
from brax_concurrent.backends.native import TILE, WORD
from brax_concurrent.scheduler.cuda_slots import (
    OCCUPIED,
    STATE_WORDS,
    admit,
    fork,
    join,
    make_room,
    mark,
    new_window,
    row_at,
    stream_of,
)
from brax_concurrent.scheduler.window import upstream_mask_of_kind

# A call: int64 words. From CALL_FIRST_UNIT on the units, then pointers to a launch's parameters, then the window.
CALL_UNITS, CALL_STRIDE, CALL_POINTERS, CALL_WINDOW = 0, 1, 2, 3  # number, bytes of one; addresses
CALL_ERROR, CALL_OP, CALL_UNIT = 4, 5, 6  # what went wrong, and in which op of which unit
CALL_FIRST_UNIT = 8
UNIT_PART, UNIT_GRID, UNIT_BLOCK, UNIT_NUMBER, UNIT_RECORD = 0, 1, 2, 3, 4  # address; its place in the part; the record

_WINDOW_WORDS = STATE_WORDS + 3 * MAX_WINDOW


@njit
def part_envs(part: int, num_envs: int) -> int:
    """Environments of a part, given the call's number."""
    own = load_i64(part + WORD * PART_ENVS)
    return own if own != 0 else num_envs


@njit
def _units_of(part: int, num_envs: int) -> int:
    tiles = (part_envs(part, num_envs) + TILE - 1) // TILE
    size = load_i64(part + WORD * PART_UNIT_TILES)
    return 1 if size == 0 else (tiles + size - 1) // size


@njit
def scratch_bytes(desc: int, num_envs: int) -> int:
    """Bytes of the arenas of all tiles, and of what the dispatcher needs besides."""
    total = load_i64(desc + WORD * DESC_CONTROL_BYTES)
    for index in range(load_i64(desc + WORD * DESC_PARTS)):
        part = desc + WORD * (DESC_FIRST_PART + PART_WORDS * index)
        each = load_i64(part + WORD * PART_ARENA_BYTES) + (ORDER_BYTES if load_i64(part + WORD * PART_WORK) >= 0 else 0)
        total += (part_envs(part, num_envs) + TILE - 1) // TILE * each
    return total


@njit
def _unit_words(desc: int) -> int:
    most = 0
    for index in range(load_i64(desc + WORD * DESC_PARTS)):
        part = desc + WORD * (DESC_FIRST_PART + PART_WORDS * index)
        most = max(most, load_i64(part + WORD * PART_BUFFERS))
    return UNIT_RECORD + RECORD_FIRST_BUFFER + most


@njit
def count_units(desc: int, num_envs: int) -> int:
    """Units of a call for so many environments."""
    units = 0
    for index in range(load_i64(desc + WORD * DESC_PARTS)):
        units += _units_of(desc + WORD * (DESC_FIRST_PART + PART_WORDS * index), num_envs)
    return units


@njit
def call_bytes(desc: int, num_envs: int) -> int:
    """Size of a call."""
    units = count_units(desc, num_envs) * _unit_words(desc)
    return WORD * (CALL_FIRST_UNIT + units + load_i64(desc + WORD * DESC_PARAMETERS) + _WINDOW_WORDS)


@njit
def launch_block(part: int, envs: int, multiprocessors: int) -> int:
    """Threads of a block: as few as let each block have a multiprocessor of its own.

    What limits a long kernel is the fetching of its instructions. The warps of a block go through it together
    (kernels/fuse.py) and fetch them once; two blocks on one multiprocessor fetch them twice and take twice as long.
    """
    most, block = load_i64(part + WORD * PART_BLOCK), WARP
    warps = (envs + load_i64(part + WORD * PART_LANES) - 1) // load_i64(part + WORD * PART_LANES)
    share = load_i64(part + WORD * PART_SHARE)
    share = multiprocessors if share == 0 else share
    while 2 * block <= most and warps * WARP > block * share:
        block *= 2
    return block


@njit
def prepare_call(desc: int, num_envs: int, buffers: int, arena: int, call: int) -> None:
    """Write the units of a call.

    Args:
        desc: address of the program's descriptor.
        num_envs: environments of the call.
        buffers: address of the addresses of the user's arrays.
        arena: address of the arenas of all tiles, on the GPU.
        call: address of `call_bytes` bytes.
    """
    stride = WORD * _unit_words(desc)
    count = count_units(desc, num_envs)
    pointers = call + WORD * CALL_FIRST_UNIT + stride * count
    store_i64(call + WORD * CALL_UNITS, count)
    store_i64(call + WORD * CALL_STRIDE, stride)
    store_i64(call + WORD * CALL_POINTERS, pointers)
    store_i64(call + WORD * CALL_WINDOW, pointers + WORD * load_i64(desc + WORD * DESC_PARAMETERS))
    store_i64(call + WORD * CALL_ERROR, 0)
    unit = call + WORD * CALL_FIRST_UNIT
    for index in range(load_i64(desc + WORD * DESC_PARTS)):
        part = desc + WORD * (DESC_FIRST_PART + PART_WORDS * index)
        envs = part_envs(part, num_envs)
        tiles, arena_bytes = (envs + TILE - 1) // TILE, load_i64(part + WORD * PART_ARENA_BYTES)
        units = _units_of(part, num_envs)
        size = tiles if units == 1 else load_i64(part + WORD * PART_UNIT_TILES)
        lanes = load_i64(part + WORD * PART_LANES)
        block = launch_block(part, envs, load_i64(desc + WORD * DESC_MULTIPROCESSORS))
        rows = desc + load_i64(part + WORD * PART_ROWS)
        own = buffers + WORD * load_i64(part + WORD * PART_FIRST_BUFFER)
        for number in range(units):
            first = number * size
            some = min(envs - first * TILE, size * TILE)
            per_block = block // WARP * lanes
            store_i64(unit + WORD * UNIT_PART, part)
            store_i64(unit + WORD * UNIT_GRID, (some + per_block - 1) // per_block)
            store_i64(unit + WORD * UNIT_BLOCK, block)
            store_i64(unit + WORD * UNIT_NUMBER, number)
            record = unit + WORD * UNIT_RECORD
            store_i64(record + WORD * RECORD_ARENA, arena + first * arena_bytes)
            store_i64(record + WORD * RECORD_NUM_ENVS, some)
            store_i64(record + WORD * RECORD_LANES, lanes)
            store_i64(record + WORD * RECORD_STAMP, 0)
            for buffer in range(load_i64(part + WORD * PART_BUFFERS)):
                start = load_i64(own + WORD * buffer) + first * TILE * load_i64(rows + WORD * buffer)
                store_i64(record + WORD * (RECORD_FIRST_BUFFER + buffer), start)
            unit += stride
        arena += tiles * arena_bytes


# --- tasks ------------------------------------------------------------------------------------------------------------


@njit
def unit_address(call: int, index: int) -> int:
    """Address of one of a call's units."""
    return call + WORD * CALL_FIRST_UNIT + load_i64(call + WORD * CALL_STRIDE) * index


@njit
def op_address(desc: int, unit: int, index: int) -> int:
    """Address of an op of a unit's part."""
    return desc + load_i64(load_i64(unit + WORD * UNIT_PART) + WORD * PART_FIRST_OP) + WORD * OP_WORDS * index


@njit
def most_ops(desc: int) -> int:
    """Ops of the part that has most."""
    most = 0
    for index in range(load_i64(desc + WORD * DESC_PARTS)):
        most = max(most, load_i64(desc + WORD * (DESC_FIRST_PART + PART_WORDS * index + PART_OPS)))
    return most


@njit
def set_parameters(desc: int, call: int, unit: int, op: int) -> int:
    """Point to the parameters of an op on a unit; the address of the pointers, which `cuLaunchKernel` reads at once."""
    pointers, record = load_i64(call + WORD * CALL_POINTERS), unit + WORD * UNIT_RECORD
    places = desc + load_i64(op + WORD * OP_PARAMETERS)
    for i in range(load_i64(op + WORD * OP_COUNT)):
        store_i64(pointers + WORD * i, record + WORD * load_i64(places + WORD * i))
    return pointers


@njit
def fail_call(call: int, error: int, op: int, unit: int) -> int:
    """Note what went wrong where; returns the error."""
    store_i64(call + WORD * CALL_ERROR, error)
    store_i64(call + WORD * CALL_OP, op)
    store_i64(call + WORD * CALL_UNIT, unit)
    return error


@njit
def _launch(desc: int, call: int, unit_index: int, op_index: int, lane: int, stream: int) -> int:
    """Put one task onto a stream; 0 or an error, which is noted."""
    unit = unit_address(call, unit_index)
    op = op_address(desc, unit, op_index)
    trace = load_i64(desc + WORD * DESC_TRACE)
    if trace != 0:
        store_i64(unit + WORD * (UNIT_RECORD + RECORD_STAMP), next_stamp(trace, unit_index, op_index, lane))
    error = launch_kernel(
        load_i64(load_i64(desc + WORD * DESC_FUNCTIONS) + WORD * F_LAUNCH),
        load_i64(op + WORD * OP_KERNEL),
        load_i64(unit + WORD * UNIT_GRID),
        load_i64(unit + WORD * UNIT_BLOCK),
        stream,
        set_parameters(desc, call, unit, op),
    )
    return fail_call(call, error, op_index, unit_index) if error != 0 else 0


@njit
def launch_serial(desc: int, call: int, stream: int) -> int:
    """Launch all tasks in program order on one stream, unit after unit; 0 or an error."""
    for unit_index in range(load_i64(call + WORD * CALL_UNITS)):
        part = load_i64(unit_address(call, unit_index) + WORD * UNIT_PART)
        for op_index in range(load_i64(part + WORD * PART_OPS)):
            error = _launch(desc, call, unit_index, op_index, 0, stream)
            if error != 0:
                return error
    return 0


# --- the window -------------------------------------------------------------------------------------------------------


@njit
def _issue(desc: int, call: int, pool: int, window: Any, tasks: Any, unit_index: int, op_index: int) -> int:
    """Put the next task into a free slot and onto a stream; 0 or an error, which is noted."""
    _, _, _, _, masks = window
    kinds, ops, units = tasks
    functions = load_i64(desc + WORD * DESC_FUNCTIONS)
    unit = unit_address(call, unit_index)
    part = load_i64(unit + WORD * UNIT_PART)
    kind, many = load_i64(op_address(desc, unit, op_index) + WORD * OP_KIND), load_i64(part + WORD * PART_KINDS)
    table = carray(pointer(load_i64(part + WORD * PART_TABLE)), (many, many), np.uint8)
    mask = upstream_mask_of_kind(table, kinds, units, masks[OCCUPIED], kind, unit_index)
    slot, error = admit(functions, pool, window, mask, True)
    kinds[slot], ops[slot], units[slot] = kind, op_index, unit_index
    if error == 0:
        error = _launch(desc, call, unit_index, op_index, window[0][slot], stream_of(pool, window, slot))
    if error == 0:
        error = mark(functions, pool, window, slot)
    return fail_call(call, error, op_index, unit_index) if error != 0 else 0


@njit
def launch_window(desc: int, call: int, stream: int, pool: int) -> int:
    """Launch all tasks through the window; 0 or an error. Nobody else may use the pool meanwhile."""
    size, functions = load_i64(desc + WORD * DESC_WINDOW), load_i64(desc + WORD * DESC_FUNCTIONS)
    state = load_i64(call + WORD * CALL_WINDOW)
    window, own = new_window(state, size, load_i64(desc + WORD * DESC_STREAMS)), state + WORD * STATE_WORDS
    tasks = (row_at(own, 0, size), row_at(own, 1, size), row_at(own, 2, size))  # of each slot: kind, op, unit
    error = fork(functions, pool, window, stream)
    if error != 0:
        fail_call(call, error, 0, 0)
    for op_index in range(most_ops(desc)):
        for unit_index in range(load_i64(call + WORD * CALL_UNITS)):
            part = load_i64(unit_address(call, unit_index) + WORD * UNIT_PART)
            if error != 0 or op_index >= load_i64(part + WORD * PART_OPS):
                continue
            slow, error = make_room(functions, pool, window, load_i64(desc + WORD * DESC_TIMEOUT))
            if error != 0:
                fail_call(call, error, tasks[1][slow], tasks[2][slow])
            else:
                error = _issue(desc, call, pool, window, tasks, unit_index, op_index)
    late = join(functions, pool, window, stream)
    if late != 0 and error == 0:
        error = fail_call(call, late, 0, 0)
    return error
