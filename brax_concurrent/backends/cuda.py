"""The CUDA backend: lane programs to GPU machine code, one thread per environment, kept on disk.

A compiled kernel takes (arena: uint64, num_envs: int64, lanes: int64, stamp: uint64, one uint64 device pointer per user
array that it touches) and is launched with any block size that is a multiple of 32. The first `lanes` threads of each
warp have an environment each, the others and those beyond `num_envs` end at once. The arena has
program.layout.arena_bytes for each tile of 32 environments. `stamp` is 0, or where the kernel's times go
(cuda_trace.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from brax_concurrent.backends import nvvm
from brax_concurrent.backends.llvm import I8, I64, TILE, Emitter
from brax_concurrent.backends.objects import ObjectCache
from brax_concurrent.backends.program import Store, Value, walk

DEFAULT_CAPABILITY = (9, 0)  # what is compiled for where there is no GPU
_SYMBOL = "kernel"


@dataclass(frozen=True)
class CudaKernel:
    """One kernel, compiled.

    Attributes:
        name: the kernel's name; entry: its symbol in the PTX and the machine code.
        ptx: what the assembler was given; cubin: the machine code that it made.
        arguments: the user arrays that it takes, in order.
        resources: what a thread of it needs.
    """

    name: str
    entry: str
    ptx: str
    cubin: bytes
    arguments: tuple[str, ...]
    resources: nvvm.Resources


@dataclass(frozen=True)
class Code:
    """A kernel's machine code.

    Attributes:
        symbol: its entry, a hash of what it was made from.
        cubin: the machine code.
        arguments: the user arrays that it takes, in order.
    """

    symbol: str
    cubin: bytes
    arguments: tuple[str, ...]


def touched_arrays(program: Any) -> tuple[str, ...]:
    """User arrays that a program reads or writes, in the stream's order."""
    names = set()
    for item in walk(program.root):
        place = item.place if isinstance(item, Store) else None
        if isinstance(item, Value) and item.op == "load":
            place = item.attr
        if place is not None and place.kind == "user":
            names.add(place.name)
    return tuple(name for name in program.user if name in names)


def kernel_ir(program: Any, symbol: str = _SYMBOL) -> str:
    """One kernel in NVVM's dialect of LLVM IR."""
    names = touched_arrays(program)
    module, function = nvvm.new_kernel(symbol, 4 + len(names))
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    arena, num_envs, lanes, stamp, *addresses = function.args

    def register(name: str) -> Any:
        return builder.sext(nvvm.special_register(builder, name), I64)

    thread = builder.add(builder.mul(register("ctaid.x"), register("ntid.x")), register("tid.x"))
    lane = builder.and_(thread, I64(TILE - 1))
    env = builder.add(builder.mul(builder.lshr(thread, I64(TILE.bit_length() - 1)), lanes), lane)
    idle = builder.or_(builder.icmp_signed(">=", lane, lanes), builder.icmp_signed(">=", env, num_envs))
    with builder.if_then(idle):
        nvvm.leave_kernel(builder)
    timed = builder.and_(builder.icmp_signed("==", lane, I64(0)), builder.icmp_signed("!=", stamp, I64(0)))
    with builder.if_then(timed, likely=False):
        nvvm.stamp_time(builder, "min", stamp)
    emit_lane(builder, program, arena, env, num_envs, dict(zip(names, addresses, strict=True)))
    with builder.if_then(timed, likely=False):
        nvvm.stamp_time(builder, "max", builder.add(stamp, I64(8)))
    builder.ret_void()
    return str(module)


def emit_lane(
    builder: Any, program: Any, arena: Any, env: Any, num_envs: Any, addresses: Mapping[str, Any], gpu: bool = True
) -> None:
    """Write a program for one environment, which exists, into a function.

    Args:
        builder: positioned where the program is to start.
        program: the LaneProgram.
        arena: i64 address of the arenas of all tiles. env, num_envs: i64.
        addresses: i64 addresses of the user arrays by name.
        gpu: whether the function is NVVM IR; False: the same for the CPU.
    """
    memory = ir.PointerType(I8, 1) if gpu else ir.PointerType(I8)
    lane = builder.and_(env, I64(TILE - 1))
    tile = builder.lshr(env, I64(TILE.bit_length() - 1))
    start = builder.add(arena, builder.mul(tile, I64(program.layout.arena_bytes)))
    user = {name: builder.inttoptr(address, memory) for name, address in addresses.items()}
    Emitter(builder, program, 1, builder.inttoptr(start, memory), lane, env, num_envs, user, gpu=gpu).emit()


def compile_kernel(program: Any, compute_capability: tuple[int, int] = DEFAULT_CAPABILITY) -> CudaKernel:
    """Compile one kernel, without the disk. No GPU is needed.

    Raises:
        ImportError: NVIDIA's compilers are not installed.
        CompileError: they refuse the kernel.
    """
    ptx = nvvm.compile_ptx(kernel_ir(program), program.name, compute_capability)
    cubin, resources = nvvm.assemble(ptx, program.name, compute_capability)
    return CudaKernel(program.name, _SYMBOL, ptx, cubin, touched_arrays(program), resources)


def target(compute_capability: tuple[int, int]) -> str:
    """What machine code depends on besides its source: the device and NVIDIA's compilers."""
    return f"sm_{compute_capability[0]}{compute_capability[1]}|{nvvm.toolchain()}"


def in_parallel(function: Any, items: Sequence[Any]) -> list[Any]:
    """The function's results for all items, on as many threads as there are cores: NVIDIA's compilers drop the GIL."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, items))


def compile_programs(
    specialized: Any,
    compute_capability: tuple[int, int] = DEFAULT_CAPABILITY,
    cache_directory: str | os.PathLike[str] | None = None,
) -> Mapping[str, Code]:
    """Machine code of all kernels of a specialised stream that do anything, compiled now or taken from the disk.

    Args:
        specialized: what kernels.specialize.specialize returned.
        compute_capability: of the device that it is for.
        cache_directory: where machine code is kept; None: the default (backends/objects.py).

    Raises:
        ImportError, CompileError: see compile_kernel.
    """
    store, made_for = ObjectCache(cache_directory), target(compute_capability)

    def build(program: Any) -> tuple[str, Code]:
        text = kernel_ir(program)
        symbol = "k" + hashlib.sha256((made_for + text).encode()).hexdigest()[:24]
        cubin = store.get(symbol)
        if cubin is None:
            text = text.replace(f'@"{_SYMBOL}"', f'@"{symbol}"')
            ptx = nvvm.compile_ptx(text, program.name, compute_capability)
            cubin, _ = nvvm.assemble(ptx, program.name, compute_capability)
            store.put(symbol, cubin)
        return program.name, Code(symbol, cubin, touched_arrays(program))

    # Long programs first: they decide how long several threads take.
    programs = [program for program in specialized.programs.values() if program.root.body]
    return dict(in_parallel(build, sorted(programs, key=lambda program: -len(program.root.body))))
