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
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from brax_concurrent.backends import nvvm
from brax_concurrent.backends.cuda_program import RECORD_FIRST_BUFFER, RECORD_NUM_ENVS
from brax_concurrent.backends.llvm import I8, I32, I64, TILE, Emitter
from brax_concurrent.backends.native import WORD
from brax_concurrent.backends.objects import ObjectCache
from brax_concurrent.backends.program import touched_arrays

DEFAULT_CAPABILITY = (9, 0)  # what is compiled for where there is no GPU
_SYMBOL = "kernel"
_LOAD_SHARED = ir.FunctionType(I64, [I64])
TASK_TYPES = (I64, I64, I32, I64, I32, I32, I32, I32)  # what a kernel as a function takes, see function_ir


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


def function_ir(program: Any, symbol: str = _SYMBOL, per_step: Collection[str] = ()) -> str:
    """One kernel as a function that the dispatcher calls (scheduler/dispatcher.py), in NVVM's dialect of LLVM IR.

    It takes (record: int64 offset in shared memory, arena: int64 address of the tile's, lane: int32, env: int64, there:
    int32, step: int32, barrier: int32, threads: int32); see cuda_dispatch.py for what they are.

    Args:
        program: the LaneProgram.
        symbol: what the function is called.
        per_step: the arrays of which each step has its own, one behind the other.
    """
    module = nvvm.new_module(symbol)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), TASK_TYPES), symbol)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    record, arena, lane, env, there, step, meeting, threads = function.args

    memory = ir.PointerType(I8, 1)
    arrays = _Arrays(builder, program, record, step, per_step)
    Emitter(
        *(builder, program, 1, builder.inttoptr(arena, memory), builder.sext(lane, I64), env, None, arrays),
        gpu=True,
        valid=builder.icmp_signed("!=", there, I32(0)),
        meeting=(meeting, threads),
    ).emit()
    builder.ret_void()
    return str(module)


class _Arrays:
    """Where a function finds the user's arrays: their addresses are loaded where they are used.

    All at the start would take two registers each for as long as the function runs.
    """

    def __init__(self, builder: Any, program: Any, record: Any, step: Any, per_step: Collection[str]):
        self._builder, self._program, self._record, self._step = builder, program, record, step
        self._per_step, self._known = per_step, dict[tuple[Any, str], Any]()
        self._places = {name: index for index, name in enumerate(program.user)}

    def __getitem__(self, name: str) -> Any:
        key = (self._builder.block, name)
        if key not in self._known:
            address = self._word(RECORD_FIRST_BUFFER + self._places[name])
            if name in self._per_step:
                columns, dtype = self._program.user[name][:2]
                item = {"b": 1, "i": 4, "f": 4 if self._program.layout.precision == "f32" else 8}[dtype]
                rows = self._builder.mul(self._builder.sext(self._step, I64), self._word(RECORD_NUM_ENVS))
                address = self._builder.add(address, self._builder.mul(rows, I64(columns * item)))
            self._known[key] = self._builder.inttoptr(address, ir.PointerType(I8, 1))
        return self._known[key]

    def _word(self, index: int) -> Any:
        address = self._builder.add(self._record, I64(WORD * index))
        return self._builder.asm(_LOAD_SHARED, "ld.volatile.shared.b64 $0, [$1];", "=l,l", [address], True)


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


@dataclass(frozen=True)
class Function:
    """A kernel as a function of a larger program.

    Attributes:
        symbol: what it is called, a hash of what it was made from. text: its code in NVVM's dialect of LLVM IR.
    """

    symbol: str
    text: str


def functions(specialized: Any, per_step: Collection[str] = ()) -> Mapping[str, Function]:
    """All kernels of a specialised stream that do anything as functions, by name.

    Args:
        specialized: what kernels.specialize.specialize returned.
        per_step: the arrays of which each step has its own.
    """
    found = {}
    for program in specialized.programs.values():
        if program.root.body:
            text = function_ir(program, per_step=per_step)
            symbol = "f" + hashlib.sha256(text.encode()).hexdigest()[:24]
            found[program.name] = Function(symbol, text.replace(f'@"{_SYMBOL}"', f'@"{symbol}"'))
    return found


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
