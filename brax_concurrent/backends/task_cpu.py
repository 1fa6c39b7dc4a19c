"""Tasks on the CPU: a scalar function of one unit becomes native code, and a table of tasks runs without Python.

A *task's code* is a C function

    int64_t task(char *args, int64_t first_unit, int64_t num_units)

that calls the scalar function for the units from `first_unit` on. `args` is a block of int64 words that belongs to one
task: first ARGS_UNIT, where the code notes the unit that failed, then the arguments. An array is its address, its shape
and its strides in bytes; a scalar is its bytes. Any number of tasks may run the same code at once.

It returns 0, or when a unit raised an exception the address of Numba's record of it (`exception_of`). The units after
that one have not run.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils, config, serialize
from numba.extending import intrinsic
from numba.np import arrayobj

from brax_concurrent.backends import intrinsics, task_objects
from brax_concurrent.backends.arguments import Argument, ArgumentType, KernelError, ScalarArgument
from brax_concurrent.backends.intrinsics import call_task, load_i32, load_i64, store_i64
from brax_concurrent.backends.native import WORD, compile_callback, source_hash

ARGS_UNIT = 0  # word of the unit that failed
ARGS_FIRST = 1  # word of the first argument

_I64 = ir.IntType(64)


@dataclass(frozen=True, eq=False)
class TaskTable:
    """What to run, in program order: arrays with an element for each task, all int64.

    code        addresses of the tasks' code
    args        addresses of their argument blocks
    first_unit  the first units that they work on
    num_units   how many units they work on
    predicate   addresses of int32s: a task whose predicate is 0 when its turn comes is skipped; address 0: never
    args_words  how many words the argument blocks have; None: not said
    owners      what must stay alive as long as the table is used
    """

    code: np.ndarray
    args: np.ndarray
    first_unit: np.ndarray
    num_units: np.ndarray
    predicate: np.ndarray
    owners: tuple[object, ...] = ()
    args_words: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("code", "args", "first_unit", "num_units", "predicate", "args_words"):
            array = getattr(self, name)
            if array is None:
                continue
            if array.dtype != np.int64 or array.shape != self.code.shape or not array.flags.c_contiguous:
                raise ValueError(
                    f"{name}: expected int64[{len(self.code)}], contiguous, got {array.dtype}{list(array.shape)}"
                )

    def __len__(self) -> int:
        return len(self.code)


@dataclass(frozen=True, eq=False)
class TaskCode:
    """Compiled code of one kernel for arguments of some types. `owner` keeps it alive."""

    address: int
    owner: object


# --- compiling ----------------------------------------------------------------------------------


def compile_task(
    function: Callable[..., Any],
    arguments: Sequence[ArgumentType],
    *,
    boundscheck: bool = False,
    fastmath: bool = False,
) -> TaskCode:
    """Native code of a scalar function `function(unit, *arguments)`.

    Args:
      function: Python that Numba compiles. Division by zero raises, as in Python.
      arguments: their types.
      boundscheck: an index out of range raises an IndexError; otherwise only if Numba is told so by NUMBA_BOUNDSCHECK.
      fastmath: floating-point operations may be reordered.

    Raises:
      KernelError: Numba cannot compile it, it stores into a read-only array, or it returns something.
    """
    options = (boundscheck, fastmath, *_numba_options())
    code = task_objects.kept(function, arguments, options)
    if code is not None:
        return TaskCode(code.address, code)
    kinds = (types.int64, *(each.numba_type() for each in arguments))
    try:
        compiled = njit(error_model="python", boundscheck=boundscheck or None, fastmath=fastmath)(function)
        compiled.compile(kinds)
    except Exception as error:  # Numba also fails in other ways than by its own exceptions
        raise KernelError(str(error)) from error
    result = compiled.overloads[kinds]
    if result.signature.return_type != types.none:
        raise KernelError(f"it returns {result.signature.return_type}: a kernel returns nothing, it stores into arrays")
    run_units = _run_units(result, kinds[1:])

    @cfunc(types.int64(types.int64, types.int64, types.int64))
    def task(args, first, units):
        return run_units(args, first, units)

    code = task_objects.keep(function, arguments, options, task.native_name, task._library.get_llvm_str())
    return TaskCode(task.address, (task, compiled)) if code is None else TaskCode(code.address, code)


def _numba_options() -> tuple[object, ...]:
    """Numba's settings that code depends on, from the environment; and whether it calls Intel's library for vectors."""
    names = ("BOUNDSCHECK", "OPT", "CPU_NAME", "CPU_FEATURES", "DEBUGINFO_DEFAULT", "USING_SVML")
    return tuple(getattr(config, name) for name in names)


def _run_units(result: Any, kinds: Sequence[Any]) -> Any:
    """An intrinsic (args, first, units): the loop over units, which needs what a call's status says."""

    @intrinsic
    def run_units(typingctx, args, first, units):
        def codegen(context, builder, signature, values):
            words = builder.inttoptr(values[0], _I64.as_pointer())
            arguments = _load_arguments(context, builder, words, kinds)
            context.active_code_library.add_linking_library(result.library)
            code = cgutils.alloca_once_value(builder, _I64(0))
            with cgutils.for_range(builder, values[2]) as loop:
                unit = builder.add(values[1], loop.index)
                status, _ = context.call_internal_no_propagate(
                    builder, result.fndesc, result.signature, [unit, *arguments]
                )
                with builder.if_then(status.is_error, likely=False):
                    record = builder.ptrtoint(status.excinfoptr, _I64)
                    other = builder.sext(status.code, _I64)
                    builder.store(builder.select(status.is_user_exc, record, other), code)
                    builder.store(unit, builder.gep(words, [_I64(ARGS_UNIT)]))
                    loop.do_break()
            return builder.load(code)

        return types.int64(types.int64, types.int64, types.int64), codegen

    return run_units


def _load_arguments(context: Any, builder: Any, words: Any, kinds: Sequence[Any]) -> list[Any]:
    """The arguments as values of Numba's, from the block at `words`."""
    values, word = [], ARGS_FIRST
    for kind in kinds:
        if isinstance(kind, types.Array):
            numbers = [builder.load(builder.gep(words, [_I64(word + i)])) for i in range(1 + 2 * kind.ndim)]
            array = arrayobj.make_array(kind)(context, builder)
            data = builder.inttoptr(numbers[0], array.data.type)
            itemsize = context.get_abi_sizeof(context.get_data_type(kind.dtype))
            arrayobj.populate_array(array, data, numbers[1 : 1 + kind.ndim], numbers[1 + kind.ndim :], itemsize, None)
            values.append(array._getvalue())
            word += len(numbers)
        else:
            data_type = context.get_data_type(kind)
            place = builder.bitcast(builder.gep(words, [_I64(word)]), data_type.as_pointer())
            values.append(context.unpack_value(builder, kind, place))
            word += -(-context.get_abi_sizeof(data_type) // WORD)
    return values


def argument_words(arguments: Sequence[Argument]) -> list[int]:
    """A task's argument block, as `compile_task`'s code reads it."""
    words = [0] * ARGS_FIRST
    for each in arguments:
        if isinstance(each, ScalarArgument):
            data = each.value.tobytes()
            words += np.frombuffer(data + b"\0" * (-len(data) % WORD), np.int64).tolist()
        else:
            words += [each.address, *each.shape, *each.strides]
    return words


def build_table(
    codes: Sequence[TaskCode], arguments: Sequence[Sequence[Argument]], units: Sequence[int], predicates: Sequence[int]
) -> TaskTable:
    """The table of tasks in program order.

    Args:
      codes: of each task.
      arguments: of each task. Their arrays must live as long as the table is used.
      units: how many each has, from 0 on.
      predicates: the address of each one's int32, or 0.
    """
    blocks = [argument_words(each) for each in arguments]
    words = np.array([word for block in blocks for word in block], np.int64)
    lengths = np.array([len(block) for block in blocks], np.int64)
    return TaskTable(
        np.array([code.address for code in codes], np.int64),
        words.ctypes.data + WORD * (np.cumsum(lengths) - lengths),
        np.zeros(len(codes), np.int64),
        np.array(units, np.int64),
        np.array(predicates, np.int64),
        (words, *codes),
        lengths,
    )


def failed_unit(table: TaskTable, task: int) -> int:
    """The unit at which a task failed."""
    return ctypes.c_int64.from_address(int(table.args[task]) + WORD * ARGS_UNIT).value


# --- running ------------------------------------------------------------------------------------


# The table of a run in program order: int64 words. The last one is written where a task fails.
_COUNT, _CODE, _ARGS, _FIRST, _UNITS, _PREDICATE, _FAILED, _WORDS = range(8)


@njit(nogil=True)
def _run(table: int) -> int:
    for task in range(load_i64(table + WORD * _COUNT)):
        offset = WORD * task
        predicate = load_i64(load_i64(table + WORD * _PREDICATE) + offset)
        if predicate == 0 or load_i32(predicate) != 0:
            code = call_task(
                load_i64(load_i64(table + WORD * _CODE) + offset),
                load_i64(load_i64(table + WORD * _ARGS) + offset),
                load_i64(load_i64(table + WORD * _FIRST) + offset),
                load_i64(load_i64(table + WORD * _UNITS) + offset),
            )
            if code != 0:
                store_i64(table + WORD * _FAILED, task)
                return code
    return 0


def _make_run(magic: int) -> Callable[[int], int]:
    # As in native.py: `magic` is in Numba's cache key and ties the code to the content of the files it is of.
    def run(table: int) -> int:
        return _run(table) if magic != 0 else -1

    return run


@functools.cache
def _compiled_run() -> Any:
    return compile_callback(_make_run(source_hash(__file__, intrinsics.__file__)))


def run_in_order(table: TaskTable) -> tuple[int, int] | None:
    """Run all tasks in program order on the calling thread, without the GIL.

    Returns:
      None, or the first task that failed and what its code returned; no task after it has run.
    """
    words = np.zeros(_WORDS, np.int64)
    words[_COUNT] = len(table)
    arrays = (table.code, table.args, table.first_unit, table.num_units, table.predicate)
    words[_CODE:_FAILED] = [array.ctypes.data for array in arrays]
    code = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(_compiled_run().address)(words.ctypes.data)
    return None if code == 0 else (int(words[_FAILED]), code)


class _ExceptionRecord(ctypes.Structure):
    """Numba's `excinfo_t`: a pickled (class, arguments, (function, file, line) or None)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int32),
        ("digest", ctypes.c_void_p),
        ("unwrap", ctypes.c_void_p),
        ("allocated", ctypes.c_int32),
    )


def exception_of(code: int) -> tuple[BaseException, str]:
    """What a task's code that returned `code` raised, and "file:line" or "".

    Arguments that were not constants in the source are left out of the exception.
    """
    if -(1 << 31) <= code < 1 << 31:
        return RuntimeError(f"Numba's error {code}"), ""
    record = _ExceptionRecord.from_address(code)
    kind, arguments, place = serialize.loads(ctypes.string_at(record.data, record.size))
    constants = [each for each in arguments or () if not isinstance(each, ir.Value)]
    exception: BaseException
    if kind is None:  # `raise` by itself: Numba does not say what it raises again
        exception = RuntimeError("an exception raised again")
    else:
        try:
            exception = kind(*constants)
        except Exception:  # it asks for the arguments left out, or refuses those that it gets
            exception = RuntimeError(kind.__name__)
    return exception, f"{place[1]}:{place[2]}" if place else ""
