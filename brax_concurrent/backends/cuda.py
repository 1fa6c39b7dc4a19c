"""The CUDA backend: lane programs to PTX through numba-cuda, one thread per environment.

A compiled kernel takes (arena: uint64, num_envs: int64, one uint64 device pointer per user array that it touches) and
is launched with any block size that is a multiple of 32, one thread per environment, at least one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from brax_concurrent.backends.llvm import I8, I32, I64, TILE, Emitter
from brax_concurrent.backends.program import Store, Value, walk


@dataclass(frozen=True)
class CudaKernel:
    """PTX of one kernel.

    Attributes:
        name: the kernel's name; entry: its symbol in the PTX.
        arguments: the user arrays that it takes, in order.
    """

    name: str
    entry: str
    ptx: str
    arguments: tuple[str, ...]


def touched_arrays(program: Any) -> tuple[str, ...]:
    """User arrays that a program reads or writes, in the stream's order."""
    names = set()
    for item in walk(program.root):
        place = (
            item.place
            if isinstance(item, Store)
            else item.attr
            if isinstance(item, Value) and item.op == "load"
            else None
        )
        if place is not None and place.kind == "user":
            names.add(place.name)
    return tuple(name for name in program.user if name in names)


def _python_kernel(program: Any, names: Sequence[str]) -> tuple[Any, Any]:
    """A Python function whose body is the program, and its Numba signature."""
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    pointers = types.UniTuple(types.uint64, max(len(names), 1))
    signature = types.void(types.uint64, types.int64, pointers)

    @intrinsic
    def body(typing_context: Any, arena: Any, num_envs: Any, addresses: Any) -> Any:
        def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
            _emit(builder, program, names, *args)
            return context.get_dummy_value()

        return signature, generate

    def kernel(arena: int, num_envs: int, addresses: tuple[int, ...]) -> None:
        body(arena, num_envs, addresses)

    kernel.__name__ = kernel.__qualname__ = program.name
    return kernel, signature


def _emit(builder: Any, program: Any, names: Sequence[str], arena: Any, num_envs: Any, addresses: Any) -> None:
    from llvmlite import ir

    def special_register(name: str) -> Any:
        symbol = f"llvm.nvvm.read.ptx.sreg.{name}"
        known = builder.module.globals.get(symbol) or ir.Function(builder.module, ir.FunctionType(I32, []), symbol)
        return builder.sext(builder.call(known, []), I64)

    global_bytes = ir.PointerType(I8, 1)
    env = builder.add(builder.mul(special_register("ctaid.x"), special_register("ntid.x")), special_register("tid.x"))
    lane = builder.and_(env, I64(TILE - 1))
    tile = builder.lshr(env, I64(5))
    start = builder.add(arena, builder.mul(tile, I64(program.layout.arena_bytes)))
    user = {name: builder.inttoptr(builder.extract_value(addresses, i), global_bytes) for i, name in enumerate(names)}
    with builder.if_then(builder.icmp_signed("<", builder.sub(env, lane), num_envs)):
        Emitter(builder, program, 1, builder.inttoptr(start, global_bytes), lane, env, num_envs, user, gpu=True).emit()


def compile_ptx(program: Any, compute_capability: tuple[int, int] = (9, 0)) -> CudaKernel:
    """PTX of one kernel; needs numba-cuda but no GPU.

    Raises:
        ImportError: numba-cuda is not installed.
    """
    from numba import cuda

    names = touched_arrays(program)
    kernel, signature = _python_kernel(program, names)
    ptx, _ = cuda.compile(kernel, signature, device=False, cc=compute_capability, abi="numba")
    entry = next(line.split("(")[0].split()[-1] for line in ptx.splitlines() if ".entry" in line)
    return CudaKernel(program.name, entry, ptx, names)
