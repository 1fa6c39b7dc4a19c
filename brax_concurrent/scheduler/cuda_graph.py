"""A call as a CUDA Graph: every task a kernel node, with the branches that footprints allow, built once and replayed.

A node waits for the earlier ops of its unit that it conflicts with and for nothing else. A graph holds addresses. A
program keeps graphs for up to GRAPHS calls that differ in number of environments, GPU or addresses: a call that fits
one replays it. Where half of them are for its number of environments and GPU, the one that was unused longest gets the
new addresses, in the nodes that use them; else a graph is built. `cost` counts both and their time, which is what a
changing stream costs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

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
    F_GRAPH_SET,
    add_kernel_node,
    create_graph,
    current_device,
    destroy_graph,
    instantiate_graph,
    launch_graph,
    set_kernel_node,
)
from brax_concurrent.backends.cuda_program import (
    DESC_BUFFERS,
    DESC_FUNCTIONS,
    DESC_GRAPHS,
    DESC_TRACE,
    OP_COUNT,
    OP_KERNEL,
    OP_PARAMETERS,
    OP_UPSTREAM,
    PART_FIRST_BUFFER,
    PART_OPS,
    RECORD_FIRST_BUFFER,
    RECORD_STAMP,
    CudaProgram,
)
from brax_concurrent.backends.cuda_trace import next_stamp
from brax_concurrent.backends.intrinsics import (
    allocate,
    compare_and_set,
    copy_bytes,
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
from brax_concurrent.scheduler.cuda_slots import NO_MEMORY
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
TABLE_LOCK, TABLE_CLOCK, TABLE_BUILDS, TABLE_UPDATES, TABLE_NANOSECONDS, TABLE_FIRST = 0, 1, 2, 3, 4, 5
# An entry: the instantiated graph, what it was made from, the nodes of that, when it was used last, what it fits; then
# the addresses of the buffers.
ENTRY_GRAPH, ENTRY_SOURCE, ENTRY_NODES, ENTRY_USED, ENTRY_ENVS, ENTRY_DEVICE, ENTRY_ARENA = 0, 1, 2, 3, 4, 5, 6
ENTRY_BUFFERS = 7
_NODE_BYTES = 72  # CUDA_KERNEL_NODE_PARAMS_v2


@dataclass(frozen=True)
class GraphCost:
    """What a program has spent on its graphs so far.

    Attributes:
        builds: graphs that were built. updates: graphs that got other addresses.
        seconds: of the host for both.
    """

    builds: int
    updates: int
    seconds: float


def new_table(buffers: int) -> np.ndarray:
    """An empty table for a program with so many buffers."""
    return np.zeros(TABLE_FIRST + GRAPHS * (ENTRY_BUFFERS + buffers), np.int64)


def cost(program: CudaProgram) -> GraphCost:
    """What the graphs of a program have cost.

    Raises:
        ValueError: it has none.
    """
    address = int(program.desc[DESC_GRAPHS])
    if address == 0:
        raise ValueError("program: expected one with scheduler 'graph'")
    table = (ctypes.c_int64 * TABLE_FIRST).from_address(address)
    return GraphCost(table[TABLE_BUILDS], table[TABLE_UPDATES], table[TABLE_NANOSECONDS] * 1e-9)


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
def _describe_launch(parameters: int, kernel: int, grid: int, block: int, pointers: int) -> None:
    """Write CUDA_KERNEL_NODE_PARAMS_v2 of a launch, see `launch_kernel`."""
    fill_bytes(parameters, 0, _NODE_BYTES)
    for axis in range(3):
        store_i32(parameters + 8 + 4 * axis, 1 if axis else grid)
        store_i32(parameters + 20 + 4 * axis, 1 if axis else block)
    store_i64(parameters + 40, pointers)
    store_i64(parameters + 56, kernel)


@njit
def _describe_node(desc: int, call: int, unit_index: int, op_index: int, trace: int, parameters: int) -> None:
    """Write the CUDA_KERNEL_NODE_PARAMS_v2 of a robot's task."""
    unit = unit_address(call, unit_index)
    op = op_address(desc, unit, op_index)
    stamp = next_stamp(trace, unit_index, op_index, 0) if trace != 0 else 0
    store_i64(unit + WORD * (UNIT_RECORD + RECORD_STAMP), stamp)
    kernel, pointers = load_i64(op + WORD * OP_KERNEL), set_parameters(desc, call, unit, op)
    grid, block = load_i64(unit + WORD * UNIT_GRID), load_i64(unit + WORD * UNIT_BLOCK)
    _describe_launch(parameters, kernel, grid, block, pointers)


@njit
def add_task_node(
    add: int, node: int, graph: int, older: int, count: int, kernel: int, grid: int, block: int, pointers: int
) -> int:
    """Add one launch to a graph; 0 or an error.

    Args:
        add: address of cuGraphAddKernelNode_v2.
        node: address that the node's handle is written to.
        graph: the graph.
        older: address of the handles of `count` nodes that it waits for.
        kernel, grid, block, pointers: see `launch_kernel`; the parameters are copied.
    """
    parameters = stack_bytes(_NODE_BYTES)
    _describe_launch(parameters, kernel, grid, block, pointers)
    return add_kernel_node(add, node, graph, older, count, parameters)


@njit
def seal_graph(functions: int, graph: int, error: int, executable: int) -> int:
    """Instantiate a described graph, if describing it gave no error, and forget the description; 0 or an error.

    The handle is written to the address `executable`.
    """
    if error == 0:
        error = instantiate_graph(load_i64(functions + WORD * F_GRAPH_INSTANTIATE), executable, graph)
    destroy_graph(load_i64(functions + WORD * F_GRAPH_DESTROY), graph)
    return error


@njit
def _add_nodes(desc: int, call: int, graph: int, nodes: int) -> int:
    """Add all tasks to an empty graph and write their nodes; 0 or an error."""
    add = load_i64(load_i64(desc + WORD * DESC_FUNCTIONS) + WORD * F_GRAPH_ADD)
    trace, parameters = load_i64(desc + WORD * DESC_TRACE), stack_bytes(_NODE_BYTES)
    upstream = nodes + WORD * _count_nodes(call)  # room for the nodes that one waits for
    for unit_index in range(load_i64(call + WORD * CALL_UNITS)):
        unit = unit_address(call, unit_index)
        ops = load_i64(load_i64(unit + WORD * UNIT_PART) + WORD * PART_OPS)
        for op_index in range(ops):
            _describe_node(desc, call, unit_index, op_index, trace, parameters)
            older = desc + load_i64(op_address(desc, unit, op_index) + WORD * OP_UPSTREAM)
            count = load_i64(older)
            for index in range(count):
                node = load_i64(nodes + WORD * load_i64(older + WORD * (1 + index)))
                store_i64(upstream + WORD * index, node)
            error = add_kernel_node(add, nodes + WORD * op_index, graph, upstream, count, parameters)
            if error != 0:
                return fail_call(call, error, op_index, unit_index)
        nodes += WORD * ops
    return 0


@njit
def _build(desc: int, call: int, entry: int) -> int:
    """Put the call's graph into an empty entry of the table; 0 or an error."""
    functions, handle = load_i64(desc + WORD * DESC_FUNCTIONS), stack_bytes(8)
    nodes = allocate(WORD * 2 * (_count_nodes(call) + 1))
    if nodes == 0:
        return fail_call(call, NO_MEMORY, 0, 0)
    error = create_graph(load_i64(functions + WORD * F_GRAPH_CREATE), handle)
    graph = load_i64(handle)
    if error == 0:
        error = _add_nodes(desc, call, graph, nodes)
        if error == 0:
            error = instantiate_graph(load_i64(functions + WORD * F_GRAPH_INSTANTIATE), handle, graph)
        if error == 0:
            store_i64(entry + WORD * ENTRY_GRAPH, load_i64(handle))
            store_i64(entry + WORD * ENTRY_SOURCE, graph)  # its nodes can be changed as long as it exists
            store_i64(entry + WORD * ENTRY_NODES, nodes)
        else:
            destroy_graph(load_i64(functions + WORD * F_GRAPH_DESTROY), graph)
    if error != 0:
        release(nodes)
        if load_i64(call + WORD * CALL_ERROR) == 0:
            fail_call(call, error, 0, 0)
    return error


@njit
def _moved(desc: int, unit: int, op: int, entry: int, buffers: int) -> bool:
    """Whether a buffer that an op takes lies elsewhere than when the entry's graph got its addresses."""
    first = load_i64(load_i64(unit + WORD * UNIT_PART) + WORD * PART_FIRST_BUFFER)
    places = desc + load_i64(op + WORD * OP_PARAMETERS)
    for index in range(load_i64(op + WORD * OP_COUNT)):
        buffer = load_i64(places + WORD * index) - RECORD_FIRST_BUFFER
        if buffer >= 0:
            known = load_i64(entry + WORD * (ENTRY_BUFFERS + first + buffer))
            if known != load_i64(buffers + WORD * (first + buffer)):
                return True
    return False


@njit
def _update(desc: int, call: int, entry: int, arena: int, buffers: int) -> int:
    """Give the nodes of an entry's graph the call's addresses; 0 or an error."""
    change = load_i64(load_i64(desc + WORD * DESC_FUNCTIONS) + WORD * F_GRAPH_SET)
    parameters, trace = stack_bytes(_NODE_BYTES), load_i64(desc + WORD * DESC_TRACE)
    graph, node = load_i64(entry + WORD * ENTRY_GRAPH), load_i64(entry + WORD * ENTRY_NODES)
    everything = load_i64(entry + WORD * ENTRY_ARENA) != arena
    for unit_index in range(load_i64(call + WORD * CALL_UNITS)):
        unit = unit_address(call, unit_index)
        for op_index in range(load_i64(load_i64(unit + WORD * UNIT_PART) + WORD * PART_OPS)):
            if everything or _moved(desc, unit, op_address(desc, unit, op_index), entry, buffers):
                _describe_node(desc, call, unit_index, op_index, trace, parameters)
                error = set_kernel_node(change, graph, load_i64(node), parameters)
                if error != 0:
                    store_i64(entry + WORD * ENTRY_ENVS, 0)  # some of its nodes are changed: it fits nothing
                    return fail_call(call, error, op_index, unit_index)
            node += WORD
    return 0


@njit
def _choose_entry(table: int, stride: int, num_envs: int, device: int) -> int:
    """Address of the entry to change for a call that none fits."""
    oldest, oldest_like = 0, 0
    alike, entry = 0, table + WORD * TABLE_FIRST
    for _ in range(GRAPHS):
        used = load_i64(entry + WORD * ENTRY_USED)
        if oldest == 0 or used < load_i64(oldest + WORD * ENTRY_USED):
            oldest = entry
        like = load_i64(entry + WORD * ENTRY_ENVS) == num_envs and load_i64(entry + WORD * ENTRY_DEVICE) == device
        if load_i64(entry + WORD * ENTRY_GRAPH) != 0 and like:
            alike += 1
            if oldest_like == 0 or used < load_i64(oldest_like + WORD * ENTRY_USED):
                oldest_like = entry
        entry += stride
    return oldest_like if alike >= GRAPHS // 2 else oldest


@njit
def _renew_entry(desc: int, call: int, entry: int, num_envs: int, device: int, arena: int, buffers: int) -> int:
    """Make an entry fit the call, by an update or a new graph; 0 or an error."""
    functions, table = load_i64(desc + WORD * DESC_FUNCTIONS), load_i64(desc + WORD * DESC_GRAPHS)
    like = load_i64(entry + WORD * ENTRY_ENVS) == num_envs and load_i64(entry + WORD * ENTRY_DEVICE) == device
    start, counter = monotonic_ns(), TABLE_UPDATES
    if load_i64(entry + WORD * ENTRY_GRAPH) != 0 and like:
        error = _update(desc, call, entry, arena, buffers)
    else:
        counter = TABLE_BUILDS
        if load_i64(entry + WORD * ENTRY_GRAPH) != 0:
            destroy_graph(load_i64(functions + WORD * F_GRAPH_DROP), load_i64(entry + WORD * ENTRY_GRAPH))
            destroy_graph(load_i64(functions + WORD * F_GRAPH_DESTROY), load_i64(entry + WORD * ENTRY_SOURCE))
            release(load_i64(entry + WORD * ENTRY_NODES))
            store_i64(entry + WORD * ENTRY_GRAPH, 0)
        error = _build(desc, call, entry)
    if error != 0:
        return error
    store_i64(table + WORD * counter, load_i64(table + WORD * counter) + 1)
    spent = load_i64(table + WORD * TABLE_NANOSECONDS) + monotonic_ns() - start
    store_i64(table + WORD * TABLE_NANOSECONDS, spent)
    store_i64(entry + WORD * ENTRY_ENVS, num_envs)
    store_i64(entry + WORD * ENTRY_DEVICE, device)
    store_i64(entry + WORD * ENTRY_ARENA, arena)
    copy_bytes(entry + WORD * ENTRY_BUFFERS, buffers, WORD * load_i64(desc + WORD * DESC_BUFFERS))
    return 0


@njit
def _find_entry(desc: int, call: int, num_envs: int, arena: int, buffers: int) -> int:
    """Address of the entry whose graph fits the call; 0 after an error, which is noted."""
    functions, table = load_i64(desc + WORD * DESC_FUNCTIONS), load_i64(desc + WORD * DESC_GRAPHS)
    device_at = stack_bytes(8)
    error = current_device(load_i64(functions + WORD * F_DEVICE), device_at)
    if error != 0:
        fail_call(call, error, 0, 0)
        return 0
    device, count = load_i32(device_at), load_i64(desc + WORD * DESC_BUFFERS)
    stride, entry = WORD * (ENTRY_BUFFERS + count), table + WORD * TABLE_FIRST
    for _ in range(GRAPHS):
        if _fits(entry, num_envs, device, arena, buffers, count):
            return entry
        entry += stride
    entry = _choose_entry(table, stride, num_envs, device)
    return entry if _renew_entry(desc, call, entry, num_envs, device, arena, buffers) == 0 else 0


@njit
def launch_as_graph(desc: int, call: int, stream: int, num_envs: int, arena: int, buffers: int) -> int:
    """Replay the call's graph on a stream, made to fit first if none does; 0 or an error."""
    table = load_i64(desc + WORD * DESC_GRAPHS)
    while compare_and_set(table + WORD * TABLE_LOCK, 0, 1) == 0:  # held for a build at most
        give_way()
    # The stamps of a traced call are addresses, too, and each call has its own: no graph fits it, before or after.
    key = arena if load_i64(desc + WORD * DESC_TRACE) == 0 else -1
    entry, error = _find_entry(desc, call, num_envs, key, buffers), 1
    if entry != 0:
        used = load_i64(table + WORD * TABLE_CLOCK) + 1
        store_i64(table + WORD * TABLE_CLOCK, used)
        store_i64(entry + WORD * ENTRY_USED, used)
        launch = load_i64(load_i64(desc + WORD * DESC_FUNCTIONS) + WORD * F_GRAPH_LAUNCH)
        error = launch_graph(launch, load_i64(entry + WORD * ENTRY_GRAPH), stream)
        if key == -1:
            store_i64(entry + WORD * ENTRY_ARENA, -2)
        if error != 0:
            fail_call(call, error, 0, 0)
    compare_and_set(table + WORD * TABLE_LOCK, 1, 0)
    return error
