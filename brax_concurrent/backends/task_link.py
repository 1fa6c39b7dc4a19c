"""Programs of the dispatcher of task streams as machine code: units' functions, the dispatcher, and what joins them.

Numba compiles a unit's function to LLVM IR; with a few instructions around it that load its arguments from shared
memory, it becomes a function (offset of its parameters, unit). All of a program's functions are written into one
kernel. The parameters are those words of `task_cuda.parameter_words`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.cuda.compiler import compile_cuda
from numba.cuda.cudadrv.libs import open_libdevice
from numba.cuda.cudadrv.nvvm import llvm_replace
from numba.cuda.extending import intrinsic

from brax_concurrent.backends import nvvm, task_cuda
from brax_concurrent.backends.arguments import ArgumentType, KernelError
from brax_concurrent.backends.cuda import target
from brax_concurrent.backends.cuda_driver import CudaError
from brax_concurrent.backends.cuda_link import device_module
from brax_concurrent.backends.list_layout import BLOCK, H_ROW, MAX_FUNCTIONS, PARAMETERS, R_PARAMETERS
from brax_concurrent.backends.native import WORD, source_hash
from brax_concurrent.backends.objects import ObjectCache
from brax_concurrent.backends.task_cuda import call_unit_of
from brax_concurrent.backends.task_objects import task_key

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_GLOBAL, _SHARED = 1, 3  # address spaces
_MOST_WORDS = 1500  # of a function's parameters: what shared memory holds of four blocks, and then some
# Blocks that must fit a multiprocessor. A kernel's parameters are operands of instructions if it is launched by itself;
# here they are loaded into registers. Networks' convolutions need 160 to 200 then, which leaves three blocks. For four
# about 100 bytes are spilled, for five 500, for eight 1900.
WORKERS = 4
_CALLER = str(task_cuda.__file__)
_FAST = ("-ftz=1", "-prec-div=0", "-prec-sqrt=0")  # as Numba's fastmath on a GPU


@dataclass(frozen=True)
class UnitCode:
    """A unit's function for a program.

    name      what messages call it
    symbol    a hash of what follows
    texts     its modules of LLVM IR, the function first; equal for equal code in every process
    fastmath  floating-point operations may be reordered and approximated
    words     of its parameters
    """

    name: str
    symbol: str
    texts: tuple[str, ...]
    fastmath: bool
    words: int


@dataclass(frozen=True)
class Program:
    """A program: its entry, its machine code, and what a thread needs; None if it came from the disk."""

    symbol: str
    cubin: bytes
    resources: nvvm.Resources | None


# --- units' functions ---------------------------------------------------------------------------


def compile_unit(
    function: Callable[..., Any],
    arguments: Sequence[ArgumentType],
    compute_capability: tuple[int, int],
    *,
    fastmath: bool = False,
) -> UnitCode:
    """The code of a scalar function `function(unit, *arguments)`; for the rest see `task_cuda.compile_task`."""
    key = task_key(function, arguments, (target(compute_capability), fastmath, source_hash(__file__, _CALLER)))
    kept = None if key is None else ObjectCache().get(f"i{key}")
    if kept is not None:
        symbol, *texts = json.loads(kept)
        return UnitCode(function.__name__, symbol, tuple(texts), fastmath, _words(arguments))
    code = _compile_unit(function, arguments, compute_capability, fastmath)
    if key is not None:
        ObjectCache().put(f"i{key}", json.dumps([code.symbol, *code.texts]).encode())
    return code


def _compile_unit(
    function: Callable[..., Any],
    arguments: Sequence[ArgumentType],
    compute_capability: tuple[int, int],
    fastmath: bool,
) -> UnitCode:
    kinds = tuple(each.numba_type() for each in arguments)
    try:
        result = compile_cuda(function, None, (types.int64, *kinds), fastmath=fastmath, cc=compute_capability)
        if result.signature.return_type != types.none:
            returned = result.signature.return_type
            raise KernelError(f"it returns {returned}: a kernel returns nothing, it stores into arrays")
        call_unit, arguments_at = call_unit_of(result, len(kinds)), _arguments_at(kinds)

        def unit_from_memory(parameters: int, unit: int) -> int:
            return call_unit(unit, arguments_at(parameters))

        caller = compile_cuda(
            unit_from_memory, types.int64, (types.int64, types.int64), fastmath=fastmath, cc=compute_capability
        )
    except (ImportError, CudaError, KernelError):
        raise
    except Exception as error:  # Numba also fails in other ways than by its own exceptions
        raise KernelError(str(error)) from error
    entries = (caller.fndesc.mangled_name, result.fndesc.mangled_name)
    symbol, texts = _canonical([llvm_replace(text) for text in caller.library.llvm_strs], entries, fastmath)
    return UnitCode(function.__name__, symbol, texts, fastmath, _words(arguments))


def _words(arguments: Sequence[ArgumentType]) -> int:
    """64-bit words of such arguments, see `task_cuda.parameter_words`."""
    scalars = (1 + (np.dtype(each.dtype).kind == "c") for each in arguments if each.ndim is None)
    return sum(scalars) + sum(5 + 2 * each.ndim for each in arguments if each.ndim is not None)


def _arguments_at(kinds: tuple[Any, ...]) -> Any:
    """An intrinsic (offset): the arguments whose words lie there in shared memory, as a tuple."""

    @intrinsic
    def arguments_at(typingctx, address):
        def codegen(context, builder, signature, values):
            packer, parts = context.get_arg_packer(kinds), []
            for index, kind in enumerate(packer.argument_types):
                place = builder.add(values[0], _I64(WORD * index))
                if isinstance(kind, ir.PointerType):  # to global memory: generic loads are slower
                    word = builder.load(builder.inttoptr(place, ir.PointerType(_I64, _SHARED)))
                    near = builder.inttoptr(word, ir.PointerType(kind.pointee, _GLOBAL))
                    parts.append(builder.addrspacecast(near, kind))
                else:
                    parts.append(builder.load(builder.inttoptr(place, ir.PointerType(kind, _SHARED))))
            unpacked = packer.from_arguments(builder, tuple(parts))
            return context.make_tuple(builder, signature.return_type, unpacked)

        return types.Tuple(kinds)(address), codegen

    return arguments_at


_DEFINED = re.compile(r'^(?:define [^@\n]*@|@)"([^"\n]+)"', re.MULTILINE)


def _canonical(texts: list[str], entries: tuple[str, str], fastmath: bool) -> tuple[str, tuple[str, ...]]:
    """The function's symbol, and Numba's modules with names that follow from their contents.

    Numba numbers functions as a process compiles them. Code that is kept on disk must neither depend on that, nor be
    taken for another function that got the same number in another process.
    """
    defined = dict.fromkeys(found for text in texts for found in _DEFINED.findall(text))
    numbers = {found: index for index, found in enumerate(defined)}
    quoted = re.compile(r'@"([^"\n]+)"')

    def renamed(text: str, prefix: str) -> str:
        return quoted.sub(lambda m: f'@"{prefix}{numbers[m[1]]}"' if m[1] in numbers else m[0], text)

    plain = [re.sub(r"^; ModuleID.*$", "", text, flags=re.MULTILINE) for text in texts]
    content = repr((fastmath, [renamed(text, "f") for text in plain]))
    symbol = f"u{hashlib.sha256(content.encode()).hexdigest()[:24]}"
    prefix, inlined = f"{symbol}_", []
    for text in plain:
        text = renamed(text, prefix)
        for entry in entries:  # both are written into the place of their one call
            head = re.escape(f'@"{prefix}{numbers[entry]}"')
            text = re.sub(
                rf"^define (?:linkonce_odr )?(\w+ {head}\([^)]*\))",
                r"define linkonce_odr \1 alwaysinline",
                text,
                flags=re.MULTILINE,
            )
        inlined.append(text)
    first = prefix + str(numbers[entries[0]])
    return symbol, tuple(text.replace(f'"{first}"', f'"{symbol}"') for text in inlined)


# --- programs -----------------------------------------------------------------------------------


def choice_ir(functions: Sequence[UnitCode], symbol: str) -> str:
    """A module with the function `run_unit` of scheduler/list_worker.py: it calls a unit's function by its number."""
    module = nvvm.new_module(symbol)
    unit = ir.FunctionType(_I32, [ir.PointerType(_I64), _I64, _I64])
    run = ir.Function(module, ir.FunctionType(_I64, [_I32, _I64, _I64]), symbol)
    builder = ir.IRBuilder(run.append_basic_block("entry"))
    code = builder.alloca(_I64)
    builder.store(_I64(0), code)
    done = run.append_basic_block("done")
    choice = builder.switch(run.args[0], done)
    for number, function in enumerate(functions):
        block = run.append_basic_block(f"unit.{number}")
        choice.add_case(_I32(number), block)
        builder.position_at_end(block)
        builder.call(ir.Function(module, unit, function.symbol), [code, *run.args[1:]])
        builder.branch(done)
    builder.position_at_end(done)
    builder.ret(builder.load(code))
    return nvvm.inlined(str(module), symbol)


def frame_ir(symbol: str, dispatcher: str, words: int) -> str:
    """The kernel around the dispatcher's function, for functions of so many words of parameters."""
    module = nvvm.new_module(symbol)
    kind = ir.ArrayType(_I64, (H_ROW + R_PARAMETERS) // WORD + words)
    shared = ir.GlobalVariable(module, kind, "state", addrspace=3)
    shared.linkage, shared.initializer = "internal", ir.Constant(kind, ir.Undefined)
    kernel = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * PARAMETERS), symbol)
    nvvm.mark_kernel(kernel, BLOCK, WORKERS)
    builder = ir.IRBuilder(kernel.append_basic_block("entry"))
    dispatch = ir.Function(
        module, ir.FunctionType(_I32, [ir.PointerType(_I32), *[_I64] * (1 + PARAMETERS)]), dispatcher
    )
    builder.call(dispatch, [builder.alloca(_I32), builder.ptrtoint(shared, _I64), *kernel.args])
    builder.ret_void()
    return str(module)


def link_units(
    functions: Sequence[UnitCode],
    dispatcher: Callable[..., int],
    run_unit: str,
    source: int,
    compute_capability: tuple[int, int],
    cache_directory: str | os.PathLike[str] | None = None,
) -> Program:
    """The machine code of a program, made now or taken from the disk.

    Args:
        functions: what it can run, in the order of their numbers. If all are for fast arithmetic, so is the program.
        dispatcher: scheduler/list_dispatcher.py's function, which Numba compiles.
        run_unit: the symbol by which that calls a unit's function.
        source: a hash of what `dispatcher` is made of.
        compute_capability: of the device that it is for.
        cache_directory: where machine code is kept; None: the default.

    Raises:
        ImportError, CompileError: see nvvm.assemble.
        ValueError: there are too many functions, or one has too many arguments.
    """
    if len(functions) > MAX_FUNCTIONS:
        raise ValueError(f"hw runs at most {MAX_FUNCTIONS} kernels, counted by types of arguments, in one stream, "
                         f"got {len(functions)}")  # fmt: skip
    words = max((function.words for function in functions), default=0)
    for function in functions:
        if function.words > _MOST_WORDS:
            raise ValueError(f"kernel {function.name}: its arguments take {function.words} words of 8 bytes; under hw "
                             f"there may be {_MOST_WORDS}")  # fmt: skip
    store, made_for = ObjectCache(cache_directory), f"{target(compute_capability)}|{source}"
    fast = all(function.fastmath for function in functions)
    content = (made_for, frame_ir("frame", "dispatcher", words), fast, *(function.symbol for function in functions))
    symbol = "l" + hashlib.sha256(repr(content).encode()).hexdigest()[:24]
    cubin = store.get(symbol)
    if cubin is not None:
        return Program(symbol, cubin, None)
    ptx = program_ptx(functions, dispatcher, run_unit, made_for, compute_capability, symbol, store)
    cubin, resources = nvvm.assemble(ptx, "dispatcher", compute_capability)
    store.put(symbol, cubin)
    return Program(symbol, cubin, resources)


def program_ptx(
    functions: Sequence[UnitCode],
    dispatcher: Callable[..., int],
    run_unit: str,
    made_for: str,
    compute_capability: tuple[int, int],
    symbol: str,
    store: ObjectCache,
) -> str:
    """PTX of a program, whose entry is `symbol`."""
    name, body = device_module(dispatcher, 1 + PARAMETERS, made_for, compute_capability, store)
    words = max((function.words for function in functions), default=0)
    texts = [frame_ir(symbol, name, words), body, choice_ir(functions, run_unit)]
    texts += [text for function in functions for text in function.texts]
    options = _FAST if all(function.fastmath for function in functions) else ()
    return nvvm.compile_ptx(texts, "dispatcher", compute_capability, options, _libdevice())


@functools.cache
def _libdevice() -> bytes:
    return bytes(open_libdevice())
