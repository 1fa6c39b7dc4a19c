"""A CUDA driver of a few lines that needs no GPU: it records launches and can carry them out on the CPU.

A kernel's handle is the address of a C function of backends/native.py's signature, which gets the launch's parameters
as its first argument and a thread's number as its third; or any number, which is then recorded only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, types

from brax_concurrent.backends import cpu, cuda
from brax_concurrent.backends.cuda_driver import Kernel
from brax_concurrent.backends.cuda_program import CudaOp, Functions
from brax_concurrent.backends.intrinsics import call_kernel, copy_bytes, load_i64, store_i64
from brax_concurrent.backends.llvm import I8, I64

LAUNCH_WORDS = 16  # kernel, grid, block, product of the other dimensions, shared bytes, stream, extra, parameters
PARAMETERS = 7
CODE = 1 << 20  # handles from here on are addresses of code
INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE, of a handle of 0


@dataclass
class FakeDriver:
    """Functions with the driver's signatures.

    Attributes:
        functions: their addresses.
        log: what was recorded: in word 0 the number of launches, in word 1 that of copies.
    """

    functions: Functions
    log: np.ndarray
    owners: tuple[Any, ...] = field(repr=False, default=())

    @property
    def launches(self) -> list[list[int]]:
        """The recorded launches, LAUNCH_WORDS each."""
        return self.log[2 : 2 + int(self.log[0]) * LAUNCH_WORDS].reshape(-1, LAUNCH_WORDS).tolist()

    @property
    def copies(self) -> int:
        """How many copies were made."""
        return int(self.log[1])


def fake_driver(parameters: int = 2, most: int = 1000) -> FakeDriver:
    """A driver that records at most so many launches with so many of their parameters.

    The stream 7 is broken: a launch there fails with error 700, a copy with 701, which it explains.
    """
    log = np.zeros(2 + most * LAUNCH_WORDS, np.int64)
    message = np.frombuffer(b"the fake is broken\0", np.uint8)
    logged, text = log.ctypes.data, message.ctypes.data
    u32, word = types.uint32, types.intp

    @cfunc(types.int32(word, u32, u32, u32, u32, u32, u32, u32, word, word, word))
    def launch(kernel, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra):
        if stream == 7:
            return 700
        count = load_i64(logged)
        if kernel == 0 or count >= most:
            return INVALID_VALUE
        row = logged + 8 * (2 + LAUNCH_WORDS * count)
        rest = gy * gz * by * bz
        words = (kernel, types.int64(gx), types.int64(bx), types.int64(rest), types.int64(shared), stream, extra)
        for index in range(7):
            store_i64(row + 8 * index, words[index])
        for index in range(parameters):
            store_i64(row + 8 * (PARAMETERS + index), load_i64(load_i64(pointers + 8 * index)))
        store_i64(logged, count + 1)
        if kernel >= CODE:
            for thread in range(gx * bx):
                call_kernel(kernel, pointers, 0, thread, 0)
        return 0

    @cfunc(types.int32(word, word, types.uintp, word))
    def copy(target, source, size, stream):
        if stream == 7:
            return 701
        copy_bytes(target, source, size)
        store_i64(logged + 8, load_i64(logged + 8) + 1)
        return 0

    @cfunc(types.int32(types.int32, word))
    def explain(error, where):
        store_i64(where, text)
        return 0

    functions = Functions(launch.address, copy.address, explain.address)
    return FakeDriver(functions, log, (launch, copy, explain, message))


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
        addresses = {name: value(2 + index) for index, name in enumerate(names)}
        cuda.emit_lane(builder, program, arena, env, num_envs, addresses, gpu=False)
    builder.ret_void()
    code = cpu.Code(symbol, cpu._compile(str(module)))
    return CudaOp(Kernel(program.name, symbol, code.address), names)
