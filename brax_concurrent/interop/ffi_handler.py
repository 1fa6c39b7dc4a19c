"""The XLA FFI handler for the CPU: compiled code that XLA calls where a program stands in a jitted function.

There is ONE handler for all programs. A call carries a program's content hash and the number of environments
as attributes; the handler looks the program up in a table of this process, takes the buffers' addresses from
XLA's call frame and runs the program on XLA's own thread pool. No Python runs, no GIL is taken. An attribute
is never an address: XLA's executables outlive the process in JAX's persistent compilation cache.

The table is reached through a symbol that the loader binds (`external_address`), for an address compiled into
the code would be stale when a later process loads it from Numba's cache.

Offsets are those of xla/ffi/api/c_api.h (`jax.ffi.include_dir()`), FFI 0.1 to 0.5, 64-bit.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba import njit

from brax_concurrent.backends import intrinsics, native
from brax_concurrent.backends.intrinsics import (
    allocate,
    atomic_add,
    call_address,
    call_address_void,
    copy_bytes,
    external_address,
    format_message,
    load_i32,
    load_i64,
    release,
    stack_bytes,
    store_i32,
    store_i64,
)
from brax_concurrent.backends.native import WORD

# XLA_FFI_CallFrame, XLA_FFI_Buffer, XLA_FFI_Scalar
FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_STAGE = 8, 16, 24, 32
FRAME_ARGS_SIZE, FRAME_ARGS, FRAME_RETS_SIZE, FRAME_RETS = 56, 72, 96, 112
FRAME_ATTRS_SIZE, FRAME_ATTR_TYPES, FRAME_ATTRS = 136, 144, 160
BUFFER_DTYPE, BUFFER_DATA, BUFFER_RANK, BUFFER_DIMS = 16, 24, 32, 40
SCALAR_DTYPE, SCALAR_VALUE = 0, 8
STAGE_EXECUTE, ATTRIBUTE_SCALAR = 3, 3
# XLA_FFI_Extension_Base, XLA_FFI_Metadata
EXTENSION_TYPE, EXTENSION_NEXT, EXTENSION_METADATA, TYPE_METADATA = 8, 16, 24, 1
METADATA_MAJOR, METADATA_MINOR, METADATA_TRAITS = 24, 28, 32
# XLA_FFI_Api
API_ERROR_CREATE, API_ERROR_DESTROY, API_SCHEDULE, API_NUM_THREADS = 48, 64, 136, 144
# XLA_FFI_Error_Code
INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED, INTERNAL = 3, 5, 8, 13
# XLA_FFI_DataType, and bytes of one item, by NumPy name
S64 = 5
DTYPES = {
    "bool": (1, 1),
    "uint8": (6, 1),
    "int32": (4, 4),
    "uint32": (8, 4),
    "float32": (11, 4),
    "float64": (12, 8),
}

# How a program's buffers meet XLA's: int64 words, SIG_BUFFER_WORDS for each buffer from SIG_FIRST_BUFFER on.
SIG_DESC, SIG_ARGS, SIG_RETS, SIG_BUFFERS, SIG_FIRST_BUFFER = 0, 1, 2, 3, 4
SIG_ARG, SIG_RET = 0, 1  # index among XLA's arguments and results, -1: not there
SIG_ENV_BYTES, SIG_FIXED_BYTES = 2, 3  # expected: env_bytes * num_envs + fixed_bytes
SIG_DTYPE, SIG_ITEM_BYTES = 4, 5  # XLA's code; bytes of one item
SIG_NAME = 6  # address of the name, a C string
SIG_BUFFER_WORDS = 7

# The table of programs: a header, then pairs (program, address of its signature), open addressing, 0 = free.
TABLE_MAGIC = 0  # which version of the sources made it
TABLE_COPIES = 1  # carried buffers that XLA did not give in place
TABLE_FIRST = 2
TABLE_PAIRS = 1 << 16  # half of them are used at most; memory is only touched where a program lies
TABLE_SYMBOL = "brax_concurrent_program_table"

MESSAGE_BYTES = 320
WRONG_DTYPE = "brax_concurrent: buffer %s: expected XLA data type %lld, got %lld"
WRONG_SIZE = "brax_concurrent: buffer %s: expected %lld bytes for %lld environments, got %lld"
WRONG_COUNT = "brax_concurrent: expected %lld inputs and %lld outputs, got %lld and %lld"
WRONG_ENVS = "brax_concurrent: num_envs must be at least 1, got %lld"
WRONG_ATTRIBUTES = "brax_concurrent: expected the attributes num_envs and program, two int64, of %lld given"
UNKNOWN_PROGRAM = "brax_concurrent: unknown program %016llx: make its environment in this process first"
NO_ARENA = "brax_concurrent: no memory for an arena of %lld bytes"
NO_JOB = "brax_concurrent: no memory for a job"
UNFINISHED = "brax_concurrent: %lld of %lld tiles done, status %lld: the program is of another version"
OTHER_VERSION = "brax_concurrent: the table of programs is of another version"
INTERNAL_ERROR = "brax_concurrent: internal error in the handler"


@njit
def _fail(frame: int, code: int, text: int) -> int:
    """An XLA_FFI_Error with a copy of the C string `text`."""
    args = stack_bytes(32)
    store_i64(args, 28)
    store_i64(args + 8, 0)
    store_i64(args + 16, text)
    store_i32(args + 24, code)
    return call_address(load_i64(load_i64(frame + FRAME_API) + API_ERROR_CREATE), args)


@njit
def _answer_metadata(frame: int) -> int:
    """XLA asks at registration which version of the interface this is: 1 if that is what the call was."""
    extension = load_i64(frame + FRAME_EXTENSION)
    while extension != 0:
        if load_i32(extension + EXTENSION_TYPE) == TYPE_METADATA:
            metadata = load_i64(extension + EXTENSION_METADATA)
            store_i32(metadata + METADATA_MAJOR, 0)
            store_i32(metadata + METADATA_MINOR, 1)
            store_i32(metadata + METADATA_TRAITS, 0)
            return 1
        extension = load_i64(extension + EXTENSION_NEXT)
    return 0


@njit
def _find_program(program: int) -> int:
    """Address of the signature of a program, 0 if this process has none of that hash."""
    table = external_address(TABLE_SYMBOL)
    index = program & (TABLE_PAIRS - 1)
    while True:
        pair = table + WORD * (TABLE_FIRST + 2 * index)
        key = load_i64(pair)
        if key == program:
            return load_i64(pair + WORD)
        if key == 0:
            return 0
        index = (index + 1) & (TABLE_PAIRS - 1)


@njit
def _scalar(frame: int, index: int, dtype: int) -> int:
    """Address of the value of scalar attribute `index`, 0 if it is something else."""
    if load_i32(load_i64(frame + FRAME_ATTR_TYPES) + 4 * index) != ATTRIBUTE_SCALAR:
        return 0
    scalar = load_i64(load_i64(frame + FRAME_ATTRS) + WORD * index)
    return load_i64(scalar + SCALAR_VALUE) if load_i32(scalar + SCALAR_DTYPE) == dtype else 0


@njit
def _check_buffer(frame: int, spec: int, buffer: int, num_envs: int) -> int:
    """0 if XLA's buffer is what the signature says, else an error."""
    name, text = load_i64(spec + WORD * SIG_NAME), stack_bytes(MESSAGE_BYTES)
    expected, given = load_i64(spec + WORD * SIG_DTYPE), load_i32(buffer + BUFFER_DTYPE)
    if given != expected:
        format_message(text, MESSAGE_BYTES, WRONG_DTYPE, name, expected, given, 0)
        return _fail(frame, INVALID_ARGUMENT, text)
    expected = load_i64(spec + WORD * SIG_ENV_BYTES) * num_envs + load_i64(spec + WORD * SIG_FIXED_BYTES)
    given = load_i64(spec + WORD * SIG_ITEM_BYTES)
    dims = load_i64(buffer + BUFFER_DIMS)
    for axis in range(load_i64(buffer + BUFFER_RANK)):
        given *= load_i64(dims + WORD * axis)
    if given != expected:
        format_message(text, MESSAGE_BYTES, WRONG_SIZE, name, expected, num_envs, given)
        return _fail(frame, INVALID_ARGUMENT, text)
    return 0


@njit
def _gather_buffers(frame: int, signature: int, num_envs: int, addresses: int) -> int:
    """Write the buffers' addresses, in the kernels' order, to `addresses`; 0 or an error.

    A carried buffer is an argument and a result. XLA gives both the same memory; should it not, the program
    works on the result after copying the argument there, so that the caller's argument stays what it was.
    """
    args, rets = load_i64(frame + FRAME_ARGS), load_i64(frame + FRAME_RETS)
    for index in range(load_i64(signature + WORD * SIG_BUFFERS)):
        spec = signature + WORD * (SIG_FIRST_BUFFER + SIG_BUFFER_WORDS * index)
        arg, ret = load_i64(spec + WORD * SIG_ARG), load_i64(spec + WORD * SIG_RET)
        source, target = 0, 0
        if arg >= 0:
            buffer = load_i64(args + WORD * arg)
            error = _check_buffer(frame, spec, buffer, num_envs)
            if error != 0:
                return error
            source = target = load_i64(buffer + BUFFER_DATA)
        if ret >= 0:
            buffer = load_i64(rets + WORD * ret)
            error = _check_buffer(frame, spec, buffer, num_envs)
            if error != 0:
                return error
            target = load_i64(buffer + BUFFER_DATA)
        if source != 0 and source != target:
            size = load_i64(spec + WORD * SIG_ENV_BYTES) * num_envs + load_i64(spec + WORD * SIG_FIXED_BYTES)
            copy_bytes(target, source, size)
            atomic_add(external_address(TABLE_SYMBOL) + WORD * TABLE_COPIES, 1)
        store_i64(addresses + WORD * index, target)
    return 0


@njit
def _succeeded(frame: int, error: int) -> bool:
    """Whether a call of XLA's interface succeeded; frees its error if not."""
    if error == 0:
        return True
    args = stack_bytes(24)
    store_i64(args, 24)
    store_i64(args + 8, 0)
    store_i64(args + 16, error)
    call_address_void(load_i64(load_i64(frame + FRAME_API) + API_ERROR_DESTROY), args)
    return False


@njit
def _pool_threads(frame: int) -> int:
    """Threads of XLA's pool, 1 if it has none."""
    args, count = stack_bytes(32), stack_bytes(8)
    store_i64(count, 1)
    store_i64(args, 32)
    store_i64(args + 8, 0)
    store_i64(args + 16, load_i64(frame + FRAME_CONTEXT))
    store_i64(args + 24, count)
    error = call_address(load_i64(load_i64(frame + FRAME_API) + API_NUM_THREADS), args)
    return load_i64(count) if _succeeded(frame, error) else 1


@njit
def _schedule(frame: int, task: int, data: int) -> bool:
    """Have XLA's pool call task(data) some time; False if it will not."""
    args = stack_bytes(40)
    store_i64(args, 40)
    store_i64(args + 8, 0)
    store_i64(args + 16, load_i64(frame + FRAME_CONTEXT))
    store_i64(args + 24, task)
    store_i64(args + 32, data)
    return _succeeded(frame, call_address(load_i64(load_i64(frame + FRAME_API) + API_SCHEDULE), args))


@njit
def _run(frame: int, job: int, desc: int, num_envs: int) -> int:
    """Fill in the job, invite helpers, take part, and wait for those who came. 0 or an error."""
    tiles = (num_envs + native.TILE - 1) // native.TILE
    threads = load_i64(desc + WORD * native.DESC_THREADS)
    if threads != 1 and tiles > 1:
        pool = _pool_threads(frame)
        threads = min(pool if threads == 0 else min(threads, pool), tiles)
    else:
        threads = 1
    store_i64(job + WORD * native.JOB_DESC, desc)
    store_i64(job + WORD * native.JOB_BUFFERS, job + WORD * native.JOB_WORDS)
    store_i64(job + WORD * native.JOB_NUM_ENVS, num_envs)
    store_i64(job + WORD * native.JOB_TILES, tiles)
    store_i64(job + WORD * native.JOB_CHUNK, native.tiles_per_claim(tiles, threads))
    store_i64(job + WORD * native.JOB_NEXT, 0)
    store_i64(job + WORD * native.JOB_DONE, 0)
    # One reference for each participant and one for this function, which looks at the job after its own part.
    store_i64(job + WORD * native.JOB_REFERENCES, threads + 1)
    participate = load_i64(desc + WORD * native.DESC_PARTICIPATE)
    for _ in range(threads - 1):
        if not _schedule(frame, participate, job):
            native.drop_reference(job)
    status = call_address(participate, job)
    done = native.wait_for_claimed(job)
    native.drop_reference(job)
    if done == tiles:
        return 0
    text = stack_bytes(MESSAGE_BYTES)
    if status == native.NO_MEMORY:
        format_message(text, MESSAGE_BYTES, NO_ARENA, load_i64(desc + WORD * native.DESC_ARENA_BYTES), 0, 0, 0)
        return _fail(frame, RESOURCE_EXHAUSTED, text)
    format_message(text, MESSAGE_BYTES, UNFINISHED, done, tiles, status, 0)
    return _fail(frame, INTERNAL, text)


@njit
def _execute(frame: int) -> int:
    """Carry out one call: 0 or an XLA_FFI_Error."""
    text = stack_bytes(MESSAGE_BYTES)
    num_envs_at, program_at = 0, 0
    if load_i64(frame + FRAME_ATTRS_SIZE) == 2:  # XLA sorts them by name: num_envs, program
        num_envs_at, program_at = _scalar(frame, 0, S64), _scalar(frame, 1, S64)
    if num_envs_at == 0 or program_at == 0:
        format_message(text, MESSAGE_BYTES, WRONG_ATTRIBUTES, load_i64(frame + FRAME_ATTRS_SIZE), 0, 0, 0)
        return _fail(frame, INVALID_ARGUMENT, text)
    num_envs, program = load_i64(num_envs_at), load_i64(program_at)
    signature = _find_program(program) if program != 0 else 0
    if signature == 0:
        format_message(text, MESSAGE_BYTES, UNKNOWN_PROGRAM, program, 0, 0, 0)
        return _fail(frame, NOT_FOUND, text)
    if num_envs < 1:
        format_message(text, MESSAGE_BYTES, WRONG_ENVS, num_envs, 0, 0, 0)
        return _fail(frame, INVALID_ARGUMENT, text)
    args, rets = load_i64(signature + WORD * SIG_ARGS), load_i64(signature + WORD * SIG_RETS)
    given_args, given_rets = load_i64(frame + FRAME_ARGS_SIZE), load_i64(frame + FRAME_RETS_SIZE)
    if args != given_args or rets != given_rets:
        format_message(text, MESSAGE_BYTES, WRONG_COUNT, args, rets, given_args, given_rets)
        return _fail(frame, INVALID_ARGUMENT, text)
    job = allocate(WORD * (native.JOB_WORDS + load_i64(signature + WORD * SIG_BUFFERS)))
    if job == 0:
        format_message(text, MESSAGE_BYTES, NO_JOB, 0, 0, 0, 0)
        return _fail(frame, RESOURCE_EXHAUSTED, text)
    error = _gather_buffers(frame, signature, num_envs, job + WORD * native.JOB_WORDS)
    if error != 0:
        release(job)
        return error
    return _run(frame, job, load_i64(signature + WORD * SIG_DESC), num_envs)


def _make_handler(magic: int) -> Callable[[int], int]:
    # As in native.py: `magic` is in Numba's cache key and ties the code to the content of the files it is of.
    def handler(frame: int) -> int:
        if _answer_metadata(frame) != 0 or load_i32(frame + FRAME_STAGE) != STAGE_EXECUTE:
            return 0
        text = stack_bytes(MESSAGE_BYTES)
        try:
            if load_i64(external_address(TABLE_SYMBOL) + WORD * TABLE_MAGIC) == magic:
                return _execute(frame)
            format_message(text, MESSAGE_BYTES, OTHER_VERSION, 0, 0, 0, 0)
        except Exception:  # one that left a callback would be printed and taken for success
            format_message(text, MESSAGE_BYTES, INTERNAL_ERROR, 0, 0, 0, 0)
        return _fail(frame, INTERNAL, text)

    return handler


def as_int64(fingerprint: int) -> int:
    """The bits of a uint64 as an int64, as which it travels: JAX cannot write a large uint64 attribute."""
    return ctypes.c_int64(fingerprint).value


class ProgramTable:
    """The programs of this process, for compiled code: never forgets, and never moves.

    `put` is called under its owner's lock. Readers need none: a program is looked up only by executables that
    were compiled or loaded after `put` returned.
    """

    def __init__(self, magic: int) -> None:
        self._words = np.zeros(TABLE_FIRST + 2 * TABLE_PAIRS, np.int64)
        self._words[TABLE_MAGIC] = magic
        self._programs = 0

    @property
    def address(self) -> int:
        """Where compiled code finds it."""
        return int(self._words.ctypes.data)

    @property
    def copies(self) -> int:
        """How often a carried array was copied because XLA gave its input and its output different memory."""
        return int(self._words[TABLE_COPIES])

    def put(self, program: int, signature: int) -> None:
        """Make the fingerprint `program` find the address `signature`; a program is put once.

        Raises:
          RuntimeError: the table is full.
        """
        if self._programs == TABLE_PAIRS // 2:
            raise RuntimeError(f"a process can have {self._programs} different programs, this would be one more")
        self._programs += 1
        key = as_int64(program)
        index = key & (TABLE_PAIRS - 1)
        while self._words[TABLE_FIRST + 2 * index] != 0:
            index = (index + 1) & (TABLE_PAIRS - 1)
        self._words[TABLE_FIRST + 2 * index + 1] = signature
        self._words[TABLE_FIRST + 2 * index] = key


@functools.cache
def handler() -> tuple[str, Any, ProgramTable]:
    """The handler's name, its compiled code and the table that it reads.

    The name has a content hash: JAX's persistent compilation cache knows a handler by its name only.
    """
    magic = native.source_hash(__file__, native.__file__, intrinsics.__file__)
    table = ProgramTable(magic)
    llvm.add_symbol(TABLE_SYMBOL, table.address)  # before the code is loaded
    return f"brax_concurrent_cpu_{magic:016x}", native.compile_callback(_make_handler(magic)), table
