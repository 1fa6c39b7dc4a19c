"""A call as a CUDA Graph: every task a kernel node, with the branches that footprints allow, built once and replayed.

A node waits for the earlier ops of its unit that it conflicts with and for nothing else. A graph holds addresses: it
serves calls whose arrays lie where they lay when it was built. A program keeps the graphs of its last GRAPHS calls that
differed in number of environments, GPU or addresses; a call that fits none builds one. `builds` counts them and their
time, which is what a changing stream costs.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from brax_concurrent.backends.cuda_calls import (
    F_DEVICE,
    F_GRAPH_ADD,
    F_GRAPH_CREATE,
    F_GRAPH_DESTROY,
    F_GRAPH_DROP,
    F_GRAPH_INSTANTIATE,
    F_GRAPH_LAUNCH,
    add_kernel_node,
    create_graph,
    current_device,
    destroy_graph,
    instantiate_graph,
    launch_graph,
)
from brax_concurrent.backends.cuda_program import (
    DESC_BUFFERS,
    DESC_FUNCTIONS,
    DESC_GRAPHS,
    DESC_TRACE,
    OP_KERNEL,
    OP_UPSTREAM,
    PART_OPS,
    RECORD_STAMP,
    CudaProgram,
)
from brax_concurrent.backends.cuda_trace import next_stamp
from brax_concurrent.backends.intrinsics import (
    allocate,
    compare_and_set,
    fill_bytes,
    give_way,
    load_i32,
    load_i64,
    monotonic_ns,
    release,
    stack_bytes,
    store_i32,
    store_i64,
)
from brax_concurrent.backends.native import WORD
from brax_concurrent.scheduler.cuda_streams import (
    CALL_ERROR,
    CALL_UNITS,
    UNIT_BLOCK,
    UNIT_GRID,
    UNIT_PART,
    UNIT_RECORD,
    fail_call,
    op_address,
    set_parameters,
    unit_address,
)

GRAPHS = 8  # that a program keeps
# A program's table of graphs: int64 words; behind the counters GRAPHS entries.
TABLE_LOCK, TABLE_CLOCK, TABLE_BUILDS, TABLE_NANOSECONDS, TABLE_FIRST = 0, 1, 2, 3, 4
ENTRY_GRAPH, ENTRY_USED, ENTRY_ENVS, ENTRY_DEVICE, ENTRY_ARENA, ENTRY_BUFFERS = 0, 1, 2, 3, 4, 5  # then the buffers
NO_MEMORY = -2  # beside the driver's error codes and cuda_streams.TIMED_OUT
_NODE_BYTES = 72  # CUDA_KERNEL_NODE_PARAMS_v2


def new_table(buffers: int) -> np.ndarray:
    """An empty table for a program with so many buffers."""
    return np.zeros(TABLE_FIRST + GRAPHS * (ENTRY_BUFFERS + buffers), np.int64)


def builds(program: CudaProgram, table: np.ndarray) -> tuple[int, float]:
    """How many graphs a program has built so far, and the seconds that it took."""
    assert int(program.desc[DESC_GRAPHS]) == table.ctypes.data
    return int(table[TABLE_BUILDS]), float(table[TABLE_NANOSECONDS]) * 1e-9


@njit
def _fits(entry: int, num_envs: int, device: int, arena: int, buffers: int, count: int) -> bool:
    if load_i64(entry + WORD * ENTRY_GRAPH) == 0 or load_i64(entry + WORD * ENTRY_ENVS) != num_envs:
        return False
    if load_i64(entry + WORD * ENTRY_DEVICE) != device or load_i64(entry + WORD * ENTRY_ARENA) != arena:
        return False
    for index in range(count):
        if load_i64(entry + WORD * (ENTRY_BUFFERS + index)) != load_i64(buffers + WORD * index):
            return False
    return True


@njit
def _count_nodes(call: int) -> int:
    nodes = 0
    for index in range(load_i64(call + WORD * CALL_UNITS)):
        nodes += load_i64(load_i64(unit_address(call, index) + WORD * UNIT_PART) + WORD * PART_OPS)
    return nodes


@njit
def _add_nodes(desc: int, call: int, graph: int, nodes: int) -> int:
    """Add all tasks to an empty graph; `nodes` has a word for each and one more. 0 or an error."""
    add = load_i64(load_i64(desc + WORD * DESC_FUNCTIONS) + WORD * F_GRAPH_ADD)
    trace, parameters = load_i64(desc + WORD * DESC_TRACE), stack_bytes(_NODE_BYTES)
    upstream = nodes + WORD * (_count_nodes(call) + 1)  # room for the nodes that one waits for
    first = nodes
    for unit_index in range(load_i64(call + WORD * CALL_UNITS)):
        unit = unit_address(call, unit_index)
        ops = load_i64(load_i64(unit + WORD * UNIT_PART) + WORD * PART_OPS)
        for op_index in range(ops):
            op = op_address(desc, unit, op_index)
            if trace != 0:
                store_i64(unit + WORD * (UNIT_RECORD + RECORD_STAMP), next_stamp(trace, unit_index, op_index, 0))
            fill_bytes(parameters, 0, _NODE_BYTES)
            for axis in range(3):
                store_i32(parameters + 8 + 4 * axis, 1 if axis else load_i64(unit + WORD * UNIT_GRID))
                store_i32(parameters + 20 + 4 * axis, 1 if axis else load_i64(unit + WORD * UNIT_BLOCK))
            store_i64(parameters + 40, set_parameters(desc, call, unit, op))
            store_i64(parameters + 56, load_i64(op + WORD * OP_KERNEL))
            older = desc + load_i64(op + WORD * OP_UPSTREAM)
            count = load_i64(older)
            for index in range(count):
                node = load_i64(first + WORD * load_i64(older + WORD * (1 + index)))
                store_i64(upstream + WORD * index, node)
            error = add_kernel_node(add, first + WORD * op_index, graph, upstream, count, parameters)
            if error != 0:
                return fail_call(call, error, op_index, unit_index)
        first += WORD * ops
    return 0


@njit
def _build(desc: int, call: int, entry: int) -> int:
    """Put the call's graph into an entry of the table; 0 or an error."""
    functions, handle = load_i64(desc + WORD * DESC_FUNCTIONS), stack_bytes(8)
    count = _count_nodes(call)
    nodes = allocate(WORD * 2 * (count + 1))
    if nodes == 0:
        return fail_call(call, NO_MEMORY, 0, 0)
    error = create_graph(load_i64(functions + WORD * F_GRAPH_CREATE), handle)
    graph = load_i64(handle)
    if error == 0:
        error = _add_nodes(desc, call, graph, nodes)
        if error == 0:
            error = instantiate_graph(load_i64(functions + WORD * F_GRAPH_INSTANTIATE), handle, graph)
            store_i64(entry + WORD * ENTRY_GRAPH, load_i64(handle) if error == 0 else 0)
        destroy_graph(load_i64(functions + WORD * F_GRAPH_DESTROY), graph)
    release(nodes)
    if error != 0 and load_i64(call + WORD * CALL_ERROR) == 0:
        fail_call(call, error, 0, 0)
    return error


@njit
def _find_entry(desc: int, call: int, num_envs: int, arena: int, buffers: int) -> int:
    """Address of the entry whose graph fits the call, made now if there is none; 0 after an error, which is noted."""
    functions, table = load_i64(desc + WORD * DESC_FUNCTIONS), load_i64(desc + WORD * DESC_GRAPHS)
    device_at = stack_bytes(8)
    error = current_device(load_i64(functions + WORD * F_DEVICE), device_at)
    if error != 0:
        fail_call(call, error, 0, 0)
        return 0
    device, count = load_i32(device_at), load_i64(desc + WORD * DESC_BUFFERS)
    stride = WORD * (ENTRY_BUFFERS + count)
    oldest = entry = table + WORD * TABLE_FIRST
    for _ in range(GRAPHS):
        if _fits(entry, num_envs, device, arena, buffers, count):
            return entry
        if load_i64(entry + WORD * ENTRY_USED) < load_i64(oldest + WORD * ENTRY_USED):
            oldest = entry
        entry += stride
    if load_i64(oldest + WORD * ENTRY_GRAPH) != 0:
        destroy_graph(load_i64(functions + WORD * F_GRAPH_DROP), load_i64(oldest + WORD * ENTRY_GRAPH))
        store_i64(oldest + WORD * ENTRY_GRAPH, 0)
    start = monotonic_ns()
    if _build(desc, call, oldest) != 0:
        return 0
    store_i64(table + WORD * TABLE_BUILDS, load_i64(table + WORD * TABLE_BUILDS) + 1)
    spent = load_i64(table + WORD * TABLE_NANOSECONDS) + monotonic_ns() - start
    store_i64(table + WORD * TABLE_NANOSECONDS, spent)
    store_i64(oldest + WORD * ENTRY_ENVS, num_envs)
    store_i64(oldest + WORD * ENTRY_DEVICE, device)
    store_i64(oldest + WORD * ENTRY_ARENA, arena)
    for index in range(count):
        store_i64(oldest + WORD * (ENTRY_BUFFERS + index), load_i64(buffers + WORD * index))
    return oldest


@njit
def launch_as_graph(desc: int, call: int, stream: int, num_envs: int, arena: int, buffers: int) -> int:
    """Replay the call's graph on a stream, built first if there is none; 0 or an error."""
    table = load_i64(desc + WORD * DESC_GRAPHS)
    while compare_and_set(table + WORD * TABLE_LOCK, 0, 1) == 0:  # held for a build at most
        give_way()
    # Stamps are addresses, too: a traced call has a graph of its own.
    arena_key = arena if load_i64(desc + WORD * DESC_TRACE) == 0 else -arena
    entry = _find_entry(desc, call, num_envs, arena_key, buffers)
    error = 0
    if entry != 0:
        used = load_i64(table + WORD * TABLE_CLOCK) + 1
        store_i64(table + WORD * TABLE_CLOCK, used)
        store_i64(entry + WORD * ENTRY_USED, used)
        launch = load_i64(load_i64(desc + WORD * DESC_FUNCTIONS) + WORD * F_GRAPH_LAUNCH)
        error = launch_graph(launch, load_i64(entry + WORD * ENTRY_GRAPH), stream)
        if arena_key < 0:  # the next traced call has other stamps
            store_i64(entry + WORD * ENTRY_ARENA, 0)
        if error != 0:
            fail_call(call, error, 0, 0)
    else:
        error = 1
    compare_and_set(table + WORD * TABLE_LOCK, 1, 0)
    return error
