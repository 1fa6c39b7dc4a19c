"""Programs of the dispatcher as machine code: the kernels of all parts, the dispatcher, and what joins them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from brax_concurrent.backends import nvvm
from brax_concurrent.backends.cuda import TASK_TYPES, Function, target
from brax_concurrent.backends.cuda_dispatch import (
    CONTROL,
    CONTROL_WORDS,
    MAX_KINDS,
    MAX_OPS,
    OP_CONFLICTS,
    OP_FUNCTION,
    OP_KIND,
    OP_ROW_WORDS,
    OP_WHEN,
    RUN_TASK,
    SHARES,
    T_ARENA_BYTES,
    T_FIRST_OP,
    T_OPS,
    T_RECORD,
    T_SHARE,
    T_STEPS,
    T_WORDS,
    TABLE_FIRST_PART,
)
from brax_concurrent.backends.cuda_program import RECORD_FIRST_BUFFER
from brax_concurrent.backends.native import WORD
from brax_concurrent.backends.objects import ObjectCache

MAX_PARAMETERS = 500  # words of a kernel's parameters, of which there are 4096 bytes
_I32, _I64 = ir.IntType(32), ir.IntType(64)


@dataclass(frozen=True)
class DispatchPart:
    """The control step of one robot as the dispatcher has it.

    Attributes:
        ops: in program order, the functions.
        whens: of each op, where in a tile's arena a row of 32 int32 lies, all 0 where the op is not needed; -1: it
            always is.
        conflicts: pairs of symbols that must run in program order within a tile; None: all.
        buffers: how many arrays it has.
        arena_bytes: scratch memory of one tile.
        steps: how often a call repeats the ops.
        share: how much of the grid its blocks are, of all parts' sum.
    """

    ops: tuple[Function, ...]
    whens: tuple[int, ...]
    conflicts: frozenset[tuple[str, str]] | None
    buffers: int
    arena_bytes: int
    steps: int = 1
    share: float = 1.0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The distinct functions by symbol."""
        return tuple(dict.fromkeys(op.symbol for op in self.ops))


def parameter_words(parts: Sequence[DispatchPart]) -> int:
    """Parameters of the kernel: control words, and a record for each part."""
    return CONTROL_WORDS + sum(RECORD_FIRST_BUFFER + part.buffers for part in parts)


def tables(parts: Sequence[DispatchPart]) -> tuple[list[int], list[Function]]:
    """A program's tables, see cuda_dispatch.TABLE_*, and the functions in the order of their numbers.

    Raises:
        ValueError: there is too much of something.
    """
    functions = list({op.symbol: op for part in parts for op in part.ops}.values())
    numbers = {function.symbol: number for number, function in enumerate(functions)}
    words = [0] * (TABLE_FIRST_PART + T_WORDS * len(parts))
    words[0] = len(parts)
    record, share, total = CONTROL + WORD * CONTROL_WORDS, 0.0, sum(part.share for part in parts)
    for index, part in enumerate(parts):
        kinds = part.kinds
        if len(kinds) > MAX_KINDS or len(part.ops) > MAX_OPS:
            raise ValueError(f"at most {MAX_KINDS} kernels and {MAX_OPS} ops, got {len(kinds)} and {len(part.ops)}")
        share += part.share
        own = {
            T_OPS: len(part.ops),
            T_STEPS: part.steps,
            T_RECORD: record,
            T_ARENA_BYTES: part.arena_bytes,
            T_SHARE: round(SHARES * share / total),
            T_FIRST_OP: len(words),
        }
        masks = {kind: sum(1 << i for i, other in enumerate(kinds) if _meet(part, kind, other)) for kind in kinds}
        for op, when in zip(part.ops, part.whens, strict=True):
            row, mask = [0] * OP_ROW_WORDS, masks[op.symbol]
            row[OP_FUNCTION], row[OP_KIND], row[OP_WHEN] = numbers[op.symbol], kinds.index(op.symbol), when
            row[OP_CONFLICTS : OP_CONFLICTS + 2] = mask & 0xFFFFFFFF, mask >> 32
            words += row
        for word, value in own.items():
            words[TABLE_FIRST_PART + T_WORDS * index + word] = value
        record += WORD * (RECORD_FIRST_BUFFER + part.buffers)
    return words, functions


def _meet(part: DispatchPart, one: str, other: str) -> bool:
    return part.conflicts is None or (one, other) in part.conflicts or (other, one) in part.conflicts


def frame_ir(parts: Sequence[DispatchPart], symbol: str, dispatcher: str, threads: int) -> str:
    """The kernel around the dispatcher, and its tables, in NVVM's dialect of LLVM IR.

    Args:
        parts: the program.
        symbol: the kernel's entry.
        dispatcher: the dispatcher's symbol.
        threads: of a block at most, which says how many registers a thread may have.
    """
    words, _ = tables(parts)
    module = nvvm.new_module(symbol)
    count = parameter_words(parts)
    if count > MAX_PARAMETERS:
        raise ValueError(f"the arrays of all robots together: expected at most {MAX_PARAMETERS}, got {count}")
    kind = ir.ArrayType(_I32, len(words))
    table = ir.GlobalVariable(module, kind, "tables", addrspace=1)
    table.global_constant, table.linkage = True, "internal"
    table.initializer = ir.Constant(kind, [_I32(_signed(word)) for word in words])
    bytes_of_state = ir.ArrayType(_I64, CONTROL // WORD + count)
    shared = ir.GlobalVariable(module, bytes_of_state, "state", addrspace=3)
    shared.linkage, shared.initializer = "internal", ir.Constant(bytes_of_state, ir.Undefined)

    kernel = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * count), symbol)
    nvvm.mark_kernel(kernel, threads)
    builder = ir.IRBuilder(kernel.append_basic_block("entry"))
    base = builder.ptrtoint(shared, _I64)
    first = builder.icmp_signed("==", nvvm.special_register(builder, "tid.x"), _I32(0))
    with builder.if_then(first):
        for index, argument in enumerate(kernel.args):
            place = builder.add(base, _I64(CONTROL + WORD * index))
            builder.store(argument, builder.inttoptr(place, ir.PointerType(_I64, 3)))
    dispatch = ir.Function(module, ir.FunctionType(_I32, [ir.PointerType(_I32), _I64, _I64]), dispatcher)
    builder.call(dispatch, [builder.alloca(_I32), base, builder.ptrtoint(table, _I64)])
    builder.ret_void()
    return str(module)


def choice_ir(functions: Sequence[Function]) -> str:
    """A module with the function `run_task` of scheduler/dispatcher.py: it calls a kernel by its number."""
    module = nvvm.new_module(RUN_TASK)
    task = ir.FunctionType(ir.VoidType(), TASK_TYPES)
    run = ir.Function(module, ir.FunctionType(_I32, [_I32, *TASK_TYPES]), RUN_TASK)
    builder = ir.IRBuilder(run.append_basic_block("entry"))
    done = run.append_basic_block("done")
    choice = builder.switch(run.args[0], done)
    for number, function in enumerate(functions):
        block = run.append_basic_block(f"task.{number}")
        choice.add_case(_I32(number), block)
        builder.position_at_end(block)
        builder.call(ir.Function(module, task, function.symbol), run.args[1:])
        builder.branch(done)
    builder.position_at_end(done)
    builder.ret(_I32(0))
    return nvvm.inlined(str(module), RUN_TASK)


def compile_block_kernel(
    function: Callable[..., int],
    source: int,
    shared_words: int,
    threads: int,
    compute_capability: tuple[int, int],
    cache_directory: str | os.PathLike[str] | None = None,
) -> tuple[str, bytes]:
    """A kernel of one block whose threads run a Python function: its entry, and the machine code.

    Args:
        function: (offset of shared memory, three int64) -> 0; Numba compiles it.
        source: a hash of what it is made of.
        shared_words: int32 of shared memory that it needs.
        threads: of the block.
        compute_capability, cache_directory: see link_program.
    """
    store, made_for = ObjectCache(cache_directory), f"{target(compute_capability)}|{source}|{function.__name__}"
    symbol = "b" + hashlib.sha256(made_for.encode()).hexdigest()[:24]
    cubin = store.get(symbol)
    if cubin is None:
        name, body = device_module(function, 4, made_for, compute_capability, store)
        module = nvvm.new_module(symbol)
        kind = ir.ArrayType(_I32, shared_words)
        shared = ir.GlobalVariable(module, kind, "state", addrspace=3)
        shared.linkage, shared.initializer = "internal", ir.Constant(kind, ir.Undefined)
        kernel = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * 3), symbol)
        nvvm.mark_kernel(kernel, threads)
        builder = ir.IRBuilder(kernel.append_basic_block("entry"))
        callee = ir.Function(module, ir.FunctionType(_I32, [ir.PointerType(_I32), *[_I64] * 4]), name)
        builder.call(callee, [builder.alloca(_I32), builder.ptrtoint(shared, _I64), *kernel.args])
        builder.ret_void()
        ptx = nvvm.compile_ptx([str(module), body], function.__name__, compute_capability)
        cubin, _ = nvvm.assemble(ptx, function.__name__, compute_capability)
        store.put(symbol, cubin)
    return symbol, cubin


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def link_program(
    parts: Sequence[DispatchPart],
    dispatcher: Callable[..., int],
    source: int,
    threads: int,
    compute_capability: tuple[int, int],
    cache_directory: str | os.PathLike[str] | None = None,
) -> tuple[str, bytes]:
    """The machine code of a program: its entry, and the code; made now or taken from the disk.

    Args:
        parts: the program.
        dispatcher: the Python function that Numba compiles, scheduler/dispatcher.py's.
        source: a hash of what that function is made of.
        threads: see frame_ir.
        compute_capability: of the device that it is for.
        cache_directory: where machine code is kept; None: the default.

    Raises:
        ImportError, CompileError: see nvvm.assemble.
        ValueError: see `tables`.
    """
    store, made_for = ObjectCache(cache_directory), f"{target(compute_capability)}|{source}"
    _, functions = tables(parts)
    content = (made_for, frame_ir(parts, "frame", "dispatcher", threads), *(f.symbol for f in functions))
    symbol = "d" + hashlib.sha256(repr(content).encode()).hexdigest()[:24]
    cubin = store.get(symbol)
    if cubin is None:
        name, body = device_module(dispatcher, 2, made_for, compute_capability, store)
        texts = [frame_ir(parts, symbol, name, threads), body, choice_ir(functions)]
        texts += [nvvm.inlined(function.text, function.symbol) for function in functions]
        ptx = nvvm.compile_ptx(texts, "dispatcher", compute_capability)
        cubin, _ = nvvm.assemble(ptx, "dispatcher", compute_capability)
        store.put(symbol, cubin)
    return symbol, cubin


def device_module(
    function: Callable[..., int], arguments: int, made_for: str, compute_capability: tuple[int, int], store: ObjectCache
) -> tuple[str, str]:
    """The symbol and the module of a function of so many int64, which Numba takes seconds to make."""
    key = "n" + hashlib.sha256(f"{made_for}|{function.__name__}".encode()).hexdigest()[:24]
    kept = store.get(key)
    if kept is None:
        from brax_concurrent.backends import cuda_device  # needs numba-cuda, which is not installed where no GPU is

        name, text = cuda_device.device_ir(function, (cuda_device.words()[1],) * arguments, compute_capability)
        kept = f"{name}\n{nvvm.inlined(text, name)}".encode()
        store.put(key, kept)
    name, _, text = kept.decode().partition("\n")
    return name, text
