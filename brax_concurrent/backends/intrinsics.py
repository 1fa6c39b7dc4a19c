"""What native code needs and Numba has no word for: raw memory, atomics, function pointers, libc.

Every address is an int64, as in the arrays these functions work on. Nothing here allocates through Numba,
raises, or needs the GIL, so all of it may run on any thread, Python's or not. Sizes are in bytes.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
BYTES = I8.as_pointer()

CACHE_LINE = 64  # bytes; also the alignment of every block from `allocate`

Codegen = Callable[[Any, ir.IRBuilder, Any, Any], Any]


def _define(name: str, doc: str, n_args: int, emit: Callable[[ir.IRBuilder, Any], Any], returns: bool = True) -> Any:
    """An intrinsic of `n_args` int64 arguments; `emit(builder, args)` writes its instructions."""
    result = types.int64 if returns else types.void

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        value = emit(builder, args)
        return value if returns else context.get_dummy_value()

    def typer(typingctx: Any, *args: Any) -> tuple[Any, Codegen]:
        return result(*([types.int64] * n_args)), codegen

    # Numba binds call arguments by the parameters of the typer: name them, it cannot pass starred ones.
    names = ["typingctx", *"abcde"[:n_args]]
    parameters = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in names]
    typer.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    typer.__name__ = typer.__qualname__ = name
    typer.__doc__ = doc
    return intrinsic(typer)


def _at(builder: ir.IRBuilder, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _libc(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Type], variadic: bool = False) -> Any:
    """A C library function, by name: the loader of the compiled code finds it in every process anew."""
    kind = ir.FunctionType(result, arguments, var_arg=variadic)
    return cgutils.get_or_insert_function(builder.module, kind, name)


def _call_address(builder: ir.IRBuilder, address: Any, result: ir.Type, args: list[Any]) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.inttoptr(address, kind.as_pointer()), args)


def _load_i32(builder: ir.IRBuilder, args: Any) -> Any:
    return builder.sext(builder.load(_at(builder, args[0], I32)), I64)


def _store_i32(builder: ir.IRBuilder, args: Any) -> None:
    builder.store(builder.trunc(args[1], I32), _at(builder, args[0], I32))


def _compare_and_set(builder: ir.IRBuilder, args: Any) -> Any:
    pair = builder.cmpxchg(_at(builder, args[0], I64), args[1], args[2], "seq_cst")
    return builder.zext(builder.extract_value(pair, 1), I64)


def _copy(builder: ir.IRBuilder, args: Any) -> None:
    cgutils.raw_memcpy(builder, _at(builder, args[0], I8), _at(builder, args[1], I8), args[2], 1)


def _fill(builder: ir.IRBuilder, args: Any) -> None:
    cgutils.memset(builder, _at(builder, args[0], I8), args[2], builder.trunc(args[1], I8))


def _allocate(builder: ir.IRBuilder, args: Any) -> Any:
    function = _libc(builder, "aligned_alloc", BYTES, [I64, I64])
    mask = ir.Constant(I64, CACHE_LINE - 1)
    size = builder.and_(builder.add(args[0], mask), builder.not_(mask))  # C11: a multiple of the alignment
    return builder.ptrtoint(builder.call(function, [ir.Constant(I64, CACHE_LINE), size]), I64)


def _release(builder: ir.IRBuilder, args: Any) -> None:
    builder.call(_libc(builder, "free", ir.VoidType(), [BYTES]), [_at(builder, args[0], I8)])


def _give_way(builder: ir.IRBuilder, args: Any) -> None:
    builder.call(_libc(builder, "sched_yield", I32, []), [])


def _monotonic_ns(builder: ir.IRBuilder, args: Any) -> Any:
    pair = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))  # timespec: seconds, nanoseconds
    function = _libc(builder, "clock_gettime", I32, [I32, BYTES])
    builder.call(function, [ir.Constant(I32, time.CLOCK_MONOTONIC), builder.bitcast(pair, BYTES)])
    seconds, rest = (builder.load(cgutils.gep_inbounds(builder, pair, 0, index)) for index in range(2))
    return builder.add(builder.mul(seconds, ir.Constant(I64, 10**9)), rest)


def _call_kernel(builder: ir.IRBuilder, args: Any) -> None:
    pointers = [_at(builder, args[1], I8), builder.inttoptr(args[2], BYTES.as_pointer())]
    _call_address(builder, args[0], ir.VoidType(), [*pointers, args[3], args[4]])


load_i64 = _define("load_i64", "The int64 at address a.", 1, lambda b, v: b.load(_at(b, v[0], I64)))
store_i64 = _define("store_i64", "Write int64 b to address a.", 2, lambda b, v: b.store(v[1], _at(b, v[0], I64)), False)
load_i32 = _define("load_i32", "The int32 at address a, widened.", 1, _load_i32)
store_i32 = _define("store_i32", "Write the low 32 bits of b to address a.", 2, _store_i32, False)

atomic_load = _define(
    "atomic_load", "The int64 at a; sees all that its writer did before.", 1,
    lambda b, v: b.load_atomic(_at(b, v[0], I64), "acquire", 8),
)  # fmt: skip
atomic_store = _define(
    "atomic_store", "Write int64 b to a; who sees it with `atomic_load` sees all that came before.", 2,
    lambda b, v: b.store_atomic(v[1], _at(b, v[0], I64), "release", 8), False,
)  # fmt: skip
atomic_add = _define(
    "atomic_add", "Add b to the int64 at a; returns the value before.", 2,
    lambda b, v: b.atomic_rmw("add", _at(b, v[0], I64), v[1], "acq_rel"),
)  # fmt: skip
atomic_exchange = _define(
    "atomic_exchange", "Put b at a; returns the value before.", 2,
    lambda b, v: b.atomic_rmw("xchg", _at(b, v[0], I64), v[1], "acq_rel"),
)  # fmt: skip
compare_and_set = _define("compare_and_set", "Put c at a if b is there; 1 if it was, else 0.", 3, _compare_and_set)

lowest_bit = _define(
    "lowest_bit", "The place of the lowest 1 among the bits of a; 64 if there is none.", 1,
    lambda b, v: b.cttz(v[0], ir.Constant(ir.IntType(1), 0)),
)  # fmt: skip
copy_bytes = _define("copy_bytes", "Copy c bytes to a from b; the two must not overlap.", 3, _copy, False)
fill_bytes = _define("fill_bytes", "Set c bytes from a on to the byte b.", 3, _fill, False)
allocate = _define("allocate", "A block of a bytes, aligned to CACHE_LINE, contents unknown; 0 if none.", 1, _allocate)
release = _define("release", "Free a block from `allocate`.", 1, _release, False)
monotonic_ns = _define("monotonic_ns", "Nanoseconds of the clock of `time.monotonic_ns`.", 0, _monotonic_ns)
give_way = _define("give_way", "Let another thread run on this core.", 0, _give_way, False)
monotonic_ns = _define("monotonic_ns", "Nanoseconds of the clock of `time.monotonic_ns`.", 0, _monotonic_ns)

call_kernel = _define("call_kernel", "Kernel a(arena b, buffers c, first_env d, num_envs e).", 5, _call_kernel, False)
call_task = _define(
    "call_task", "int64 task a(args b, first_unit c, num_units d).", 4,
    lambda b, v: _call_address(b, v[0], I64, [_at(b, v[1], I8), v[2], v[3]]),
)  # fmt: skip
call_address = _define(
    "call_address", "int64 a(b): call the C function at a with one pointer.", 2,
    lambda b, v: _call_address(b, v[0], I64, [v[1]]),
)  # fmt: skip
call_address_void = _define(
    "call_address_void", "void a(b): call the C function at a with one pointer.", 2,
    lambda b, v: _call_address(b, v[0], ir.VoidType(), [v[1]]), False,
)  # fmt: skip


@intrinsic
def pointer(typingctx, address):
    """The pointer to `address`, for `numba.carray`."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], BYTES)

    return types.voidptr(types.int64), codegen


@intrinsic(prefer_literal=True)
def stack_bytes(typingctx, size):
    """The address of `size` (a literal) bytes, 16-aligned, on the calling function's stack, unset."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    count = size.literal_value

    def codegen(context, builder, signature, args):
        block = cgutils.alloca_once(builder, ir.ArrayType(I64, -(-count // 8)))
        block.align = 16
        return builder.ptrtoint(block, I64)

    return types.int64(size), codegen


@intrinsic(prefer_literal=True)
def external_address(typingctx, name):
    """The address that the process registered under the symbol `name` (a literal).

    It is looked up by name when the code is loaded, so code from an on-disk cache finds this process's
    address. `llvmlite.binding.add_symbol(name, address)` must come first.
    """
    if not isinstance(name, types.StringLiteral):
        return None
    symbol = name.literal_value

    def codegen(context, builder, signature, args):
        variable = builder.module.globals.get(symbol)
        if variable is None:
            variable = ir.GlobalVariable(builder.module, I64, symbol)
            variable.linkage = "external"
        return builder.ptrtoint(variable, I64)

    return types.int64(name), codegen


@intrinsic(prefer_literal=True)
def format_message(typingctx, buffer, size, template, a, b, c, d):
    """C's snprintf of the literal `template` with four int64 into `buffer` of `size` bytes.

    The template takes them as %lld, %llx or, for the address of a C string, %s. Returns the length that
    the full text has.
    """
    if not isinstance(template, types.StringLiteral):
        return None
    text = template.literal_value

    def codegen(context, builder, signature, args):
        # The array's type depends on the number of arguments, not its own: pass the text as a constant.
        constant = context.insert_const_string(builder.module, text)
        function = _libc(builder, "snprintf", I32, [BYTES, I64, BYTES], variadic=True)
        values = [_at(builder, args[0], I8), args[1], constant, *args[3:7]]
        return builder.sext(builder.call(function, values), I64)

    return types.int64(types.int64, types.int64, template, *([types.int64] * 4)), codegen
