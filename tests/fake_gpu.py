"""A CUDA driver of a few lines that needs no GPU: it records launches and can carry them out on the CPU.

A kernel's handle is the address of a C function of backends/native.py's signature, which gets the launch's parameters
as its first argument and a thread's number as its third; or any number, which is then recorded only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types

from brax_concurrent.backends import cpu, cuda
from brax_concurrent.backends.cuda_calls import NOT_READY, Functions
from brax_concurrent.backends.cuda_driver import Kernel
from brax_concurrent.backends.cuda_pool import POOL_FORK, POOL_STREAMS, POOL_WORDS
from brax_concurrent.backends.cuda_program import MAX_STREAMS, RECORD_FIRST_BUFFER, CudaOp
from brax_concurrent.backends.intrinsics import call_kernel, copy_bytes, load_i32, load_i64, store_i32, store_i64
from brax_concurrent.backends.llvm import I8, I64

LAUNCH_WORDS = 32  # kernel, grid, block, product of the other dimensions, shared bytes, stream, extra, parameters
PARAMETERS = 7
CODE = 1 << 20  # handles from here on are addresses of code
INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE, of a handle of 0
BROKEN = 7  # the stream on which a launch fails with error 700, a copy with 701
STUCK = 99  # an event that is never done

# The order of things: rows of what happened, and to what.
LAUNCHED, RECORDED, WAITED, NODE, REPLAYED, SEEN, CHANGED, FILLED, READ = range(9)
ROW_WORDS = 40  # kind, two numbers, then up to 37 more


@dataclass
class FakeDriver:
    """Functions with the driver's signatures.

    Attributes:
        functions: their addresses.
        log: what was recorded: in word 0 the number of launches, in word 1 that of copies.
        order: rows, see LAUNCHED; in word 0 their number, in word 1 how often an event was asked for.
    """

    functions: Functions
    log: np.ndarray
    order: np.ndarray
    owners: tuple[Any, ...] = field(repr=False, default=())

    @property
    def launches(self) -> list[list[int]]:
        """The recorded launches, LAUNCH_WORDS each."""
        return self.log[2 : 2 + int(self.log[0]) * LAUNCH_WORDS].reshape(-1, LAUNCH_WORDS).tolist()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.log[:] = 0
        self.order[:] = 0

    @property
    def copies(self) -> int:
        """How many copies were made."""
        return int(self.log[1])

    @property
    def rows(self) -> list[list[int]]:
        """What happened, in order: (LAUNCHED, launch, stream), (RECORDED, event, stream), (WAITED, stream, event),
        (NODE, launch, how many nodes it waits for, and which), (REPLAYED, graph, stream), (SEEN, event, 0): the host
        was told that the event is done, (CHANGED, graph, node), (FILLED, address, words), (READ, address, bytes)."""
        return self.order[2 : 2 + int(self.order[0]) * ROW_WORDS].reshape(-1, ROW_WORDS).tolist()

    def before(self) -> list[set[int]]:
        """For each launch those that have surely finished before it begins: by streams, events, graphs, the host."""
        happened: list[set[int]] = [set() for _ in self.launches]
        streams: dict[int, set[int]] = {}
        events: dict[int, set[int]] = {}
        seen: set[int] = set()
        for kind, a, b, *more in self.rows:
            if kind == LAUNCHED:
                happened[a] = streams.get(b, set()) | seen
                streams[b] = happened[a] | {a}
            elif kind == RECORDED:
                events[a] = set(streams.get(b, set()))
            elif kind == WAITED:
                streams[a] = streams.get(a, set()) | events.get(b, set())
            elif kind == SEEN:
                seen |= events.get(a, set())
            elif kind == NODE:
                for older in more[:b]:
                    happened[a] |= happened[older - 1] | {older - 1}
        return happened


def fake_driver(parameters: int = 2, most: int = 1000, patience: int = 2) -> FakeDriver:
    """A driver that records at most so many launches with so many of their parameters.

    An event is done when it was asked for `patience` times since any event was. A node's handle is its launch's number
    and one more.
    """
    log, order = np.zeros(2 + most * LAUNCH_WORDS, np.int64), np.zeros(2 + 20 * most * ROW_WORDS, np.int64)
    message = np.frombuffer(b"the fake is broken\0", np.uint8)
    logged, ordered, text = log.ctypes.data, order.ctypes.data, message.ctypes.data
    u32, word, code = types.uint32, types.intp, types.int32

    @njit
    def note(kind, a, b):
        row = ordered + 8 * (2 + ROW_WORDS * load_i64(ordered))
        store_i64(row, kind)
        store_i64(row + 8, a)
        store_i64(row + 16, b)
        store_i64(ordered, load_i64(ordered) + 1)
        return row + 24

    @njit
    def put(kernel, grid, block, rest, shared, stream, extra, pointers):
        count = load_i64(logged)
        if kernel == 0 or count >= most:
            return -1
        row = logged + 8 * (2 + LAUNCH_WORDS * count)
        words = (kernel, grid, block, rest, shared, stream, extra)
        for index in range(7):
            store_i64(row + 8 * index, words[index])
        for index in range(parameters):
            store_i64(row + 8 * (PARAMETERS + index), load_i64(load_i64(pointers + 8 * index)))
        store_i64(logged, count + 1)
        if kernel >= CODE:
            for thread in range(grid * block):
                call_kernel(kernel, pointers, 0, thread, 0)
        return count

    @cfunc(code(word, u32, u32, u32, u32, u32, u32, u32, word, word, word))
    def launch(kernel, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra):
        if stream == BROKEN:
            return 700
        rest = types.int64(gy * gz * by * bz)
        count = put(kernel, types.int64(gx), types.int64(bx), rest, types.int64(shared), stream, extra, pointers)
        if count < 0:
            return INVALID_VALUE
        note(LAUNCHED, count, stream)
        return 0

    @cfunc(code(word, word, types.uintp, word))
    def copy(target, source, size, stream):
        if stream == BROKEN:
            return 701
        copy_bytes(target, source, size)
        store_i64(logged + 8, load_i64(logged + 8) + 1)
        return 0

    @cfunc(code(code, word))
    def explain(error, where):
        store_i64(where, text)
        return 0

    @cfunc(code(word))
    def device(where):
        store_i32(where, 0)
        return 0

    @cfunc(code(word, word))
    def record(event, stream):
        note(RECORDED, event, stream)
        return 0

    @cfunc(code(word, word, u32))
    def wait(stream, event, flags):
        note(WAITED, stream, event)
        return 0

    @cfunc(code(word))
    def query(event):
        asked = load_i64(ordered + 8) + 1
        store_i64(ordered + 8, asked)
        if asked % patience != 0 or event == STUCK:
            return NOT_READY
        note(SEEN, event, 0)
        return 0

    @cfunc(code(word, u32))
    def graph_create(where, flags):
        store_i64(where, 1000 + load_i64(ordered))
        return 0

    @cfunc(code(word, word, word, types.uintp, word))
    def graph_add(where, graph, upstream, count, node):
        grid, block = load_i32(node + 8), load_i32(node + 20)
        rest = load_i32(node + 12) * load_i32(node + 16) * load_i32(node + 24) * load_i32(node + 28)
        pointers = load_i64(node + 40)
        index = put(load_i64(node + 56), grid, block, rest, load_i32(node + 32), graph, load_i64(node + 48), pointers)
        if index < 0:
            return INVALID_VALUE
        row = note(NODE, index, types.int64(count))
        for i in range(count):
            store_i64(row + 8 * i, load_i64(upstream + 8 * i))
        store_i64(where, index + 1)
        return 0

    @cfunc(code(word, word, types.uint64))
    def graph_instantiate(where, graph, flags):
        store_i64(where, graph)
        return 0

    @cfunc(code(word, word, word))
    def graph_set(graph, node, parameters):
        note(CHANGED, graph, node)
        return 0

    @cfunc(code(word, word))
    def graph_launch(graph, stream):
        if stream == BROKEN:
            return 700
        note(REPLAYED, graph, stream)
        return 0

    @cfunc(code(word))
    def destroy(graph):
        return 0

    @cfunc(code(word, u32, types.uintp, word))
    def fill(target, value, count, stream):
        if stream == BROKEN:
            return 702
        note(FILLED, target, types.int64(count))
        return 0

    @cfunc(code(word, word, types.uintp))
    def read(target, source, size):
        note(READ, source, types.int64(size))
        copy_bytes(target, source, size)
        return 0

    every = (launch, copy, explain, device, record, wait, query, graph_create, graph_add, graph_instantiate)
    every += (graph_set, graph_launch, destroy, destroy, fill, read)
    return FakeDriver(Functions(*(each.address for each in every)), log, order, (*every, message))


def fake_pool(streams: int = MAX_STREAMS) -> tuple[int, tuple[np.ndarray, ...]]:
    """The address of a table of pools whose only GPU has streams 201, 202, .. and events 301, 302, ..; its owners."""
    pool, table = np.zeros(POOL_WORDS, np.int64), np.zeros(64, np.int64)
    pool[POOL_STREAMS : POOL_STREAMS + streams] = range(200, 200 + streams)
    pool[POOL_FORK:POOL_WORDS] = range(300, 300 + POOL_WORDS - POOL_FORK)
    table[0] = pool.ctypes.data
    return int(table.ctypes.data), (pool, table)


def on_the_cpu(program: Any) -> CudaOp:
    """A kernel's scalar code, which a GPU's thread would run, as a function that FakeDriver calls."""
    names = cuda.touched_arrays(program)
    symbol = f"fake_{program.name}"
    module = ir.Module(name=symbol)
    pointer = ir.PointerType(I8)
    words = ir.PointerType(ir.PointerType(I64))
    kind = ir.FunctionType(ir.VoidType(), [pointer, ir.PointerType(pointer), I64, I64])
    function = ir.Function(module, kind, symbol)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    parameters = builder.bitcast(function.args[0], words)

    def value(index: int) -> Any:
        return builder.load(builder.load(builder.gep(parameters, [I64(index)])))

    arena, num_envs, env = value(0), value(1), function.args[2]
    with builder.if_then(builder.icmp_signed("<", env, num_envs)):
        addresses = {name: value(RECORD_FIRST_BUFFER + index) for index, name in enumerate(names)}
        cuda.emit_lane(builder, program, arena, env, num_envs, addresses, gpu=False)
    builder.ret_void()
    code = cpu.Code(symbol, cpu._compile(str(module)))
    return CudaOp(Kernel(program.name, symbol, code.address), names)
