"""What XLA FFI handlers share: XLA's call frame, the table of programs, and how a call's buffers are found and checked.

There is ONE handler for all programs of a backend. A call carries a program's content hash and the number of
environments as attributes; the handler looks the program up in a table of this process and takes the buffers' addresses
from XLA's call frame. No Python runs, no GIL is taken. An attribute is never an address: XLA's executables outlive the
process in JAX's persistent compilation cache.

The table is reached through a symbol that the loader binds (`external_address`), for an address compiled into the code
would be stale when a later process loads it from Numba's cache.

Offsets are those of xla/ffi/api/c_api.h (`jax.ffi.include_dir()`), FFI 0.1 to 0.5, 64-bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numba import njit

from brax_concurrent.backends.intrinsics import (
    call_address,
    call_address_void,
    format_message,
    load_i32,
    load_i64,
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
CAPTURABLE = 1  # trait: may be captured into a command buffer (a CUDA graph)
# XLA_FFI_Api
API_ERROR_CREATE, API_ERROR_DESTROY, API_STREAM_GET, API_SCHEDULE, API_NUM_THREADS = 48, 64, 80, 136, 144
# XLA_FFI_Error_Code
INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND = 3, 4, 5
RESOURCE_EXHAUSTED, FAILED_PRECONDITION, INTERNAL = 8, 9, 13
# XLA_FFI_DataType, and bytes of one item, by NumPy name
S64, U8 = 5, 6
DTYPES = {
    "bool": (1, 1),
    "uint8": (6, 1),
    "int32": (4, 4),
    "uint32": (8, 4),
    "float32": (11, 4),
    "float64": (12, 8),
}

# How a program's buffers meet XLA's: int64 words, SIG_BUFFER_WORDS for each buffer from SIG_FIRST_BUFFER on.
SIG_DESC, SIG_ARGS, SIG_RETS, SIG_BUFFERS, SIG_FIRST_BUFFER = 0, 1, 2, 3, 4  # the program's descriptor; counts
SIG_ARG, SIG_RET = 0, 1  # index among XLA's arguments and results, -1: not there
SIG_ENV_BYTES, SIG_FIXED_BYTES = 2, 3  # expected: env_bytes * num_envs + fixed_bytes
SIG_DTYPE, SIG_ITEM_BYTES = 4, 5  # XLA's code; bytes of one item
SIG_NAME = 6  # address of the name, a C string
SIG_BUFFER_WORDS = 7

# The table of programs: a header, then pairs (program, address of its signature), open addressing, 0 = free.
TABLE_MAGIC = 0  # which version of the sources made it
TABLE_COPIES = 1  # carried buffers that XLA did not give in place
TABLE_TRAITS = 2  # what the handler answers when XLA asks for its traits
TABLE_FIRST = 3
TABLE_PAIRS = 1 << 16  # half of them are used at most; memory is only touched where a program lies

MESSAGE_BYTES = 320
WRONG_DTYPE = "brax_concurrent: buffer %s: expected XLA data type %lld, got %lld"
WRONG_SIZE = "brax_concurrent: buffer %s: expected %lld bytes for %lld environments, got %lld"
WRONG_COUNT = "brax_concurrent: expected %lld inputs and %lld outputs, got %lld and %lld"
WRONG_ENVS = "brax_concurrent: num_envs must be at least 1, got %lld"
WRONG_ATTRIBUTES = "brax_concurrent: expected the attributes num_envs and program, two int64, of %lld given"
UNKNOWN_PROGRAM = "brax_concurrent: unknown program %016llx: make its environment in this process first"
OTHER_VERSION = "brax_concurrent: the table of programs is of another version"
INTERNAL_ERROR = "brax_concurrent: internal error in the handler"


@njit
def fail(frame: int, code: int, text: int) -> int:
    """An XLA_FFI_Error with a copy of the C string `text`."""
    args = stack_bytes(32)
    store_i64(args, 28)
    store_i64(args + 8, 0)
    store_i64(args + 16, text)
    store_i32(args + 24, code)
    return call_address(load_i64(load_i64(frame + FRAME_API) + API_ERROR_CREATE), args)


@njit
def answer_metadata(frame: int, traits: int) -> int:
    """XLA asks at registration which version of the interface this is: 1 if that is what the call was."""
    extension = load_i64(frame + FRAME_EXTENSION)
    while extension != 0:
        if load_i32(extension + EXTENSION_TYPE) == TYPE_METADATA:
            metadata = load_i64(extension + EXTENSION_METADATA)
            store_i32(metadata + METADATA_MAJOR, 0)
            store_i32(metadata + METADATA_MINOR, 1)
            store_i32(metadata + METADATA_TRAITS, traits)
            return 1
        extension = load_i64(extension + EXTENSION_NEXT)
    return 0


@njit
def find_program(table: int, program: int) -> int:
    """Address of the signature of a program, 0 if this process has none of that hash."""
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
def scalar_address(frame: int, index: int, dtype: int) -> int:
    """Address of the value of scalar attribute `index`, 0 if it is something else."""
    if load_i32(load_i64(frame + FRAME_ATTR_TYPES) + 4 * index) != ATTRIBUTE_SCALAR:
        return 0
    scalar = load_i64(load_i64(frame + FRAME_ATTRS) + WORD * index)
    return load_i64(scalar + SCALAR_VALUE) if load_i32(scalar + SCALAR_DTYPE) == dtype else 0


@njit
def bytes_of(buffer: int, item_bytes: int) -> int:
    """Size of one of XLA's buffers."""
    dims = load_i64(buffer + BUFFER_DIMS)
    for axis in range(load_i64(buffer + BUFFER_RANK)):
        item_bytes *= load_i64(dims + WORD * axis)
    return item_bytes


@njit
def expected_bytes(spec: int, num_envs: int) -> int:
    """Size that the signature's words `spec` of a buffer ask for."""
    return load_i64(spec + WORD * SIG_ENV_BYTES) * num_envs + load_i64(spec + WORD * SIG_FIXED_BYTES)


@njit
def _check_buffer(frame: int, spec: int, buffer: int, num_envs: int) -> int:
    """0 if XLA's buffer is what the signature says, else an error."""
    name, text = load_i64(spec + WORD * SIG_NAME), stack_bytes(MESSAGE_BYTES)
    expected, given = load_i64(spec + WORD * SIG_DTYPE), load_i32(buffer + BUFFER_DTYPE)
    if given != expected:
        format_message(text, MESSAGE_BYTES, WRONG_DTYPE, name, expected, given, 0)
        return fail(frame, INVALID_ARGUMENT, text)
    expected, given = expected_bytes(spec, num_envs), bytes_of(buffer, load_i64(spec + WORD * SIG_ITEM_BYTES))
    if given != expected:
        format_message(text, MESSAGE_BYTES, WRONG_SIZE, name, expected, num_envs, given)
        return fail(frame, INVALID_ARGUMENT, text)
    return 0


@njit
def buffer_spec(signature: int, index: int) -> int:
    """Address of the signature's words of a buffer."""
    return signature + WORD * (SIG_FIRST_BUFFER + SIG_BUFFER_WORDS * index)


@njit
def gather_buffers(frame: int, signature: int, num_envs: int, targets: int, sources: int) -> int:
    """Write the buffers' addresses, in the program's order, to `targets`; 0 or an error.

    A carried buffer is an argument and a result. XLA gives both the same memory; should it not, the program works on
    the result, to which the argument must be copied first so that the caller's argument stays what it was: then its
    address is written to `sources`, else 0.
    """
    args, rets = load_i64(frame + FRAME_ARGS), load_i64(frame + FRAME_RETS)
    for index in range(load_i64(signature + WORD * SIG_BUFFERS)):
        spec = buffer_spec(signature, index)
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
        store_i64(targets + WORD * index, target)
        store_i64(sources + WORD * index, source if source != target else 0)
    return 0


@njit
def succeeded(frame: int, error: int) -> bool:
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
def resolve_call(frame: int, table: int, signature_at: int, num_envs_at: int) -> int:
    """Find out what is to be run: write its signature and the number of environments there; 0 or an error."""
    text = stack_bytes(MESSAGE_BYTES)
    envs, hashed = 0, 0
    if load_i64(frame + FRAME_ATTRS_SIZE) == 2:  # XLA sorts them by name: num_envs, program
        envs, hashed = scalar_address(frame, 0, S64), scalar_address(frame, 1, S64)
    if envs == 0 or hashed == 0:
        format_message(text, MESSAGE_BYTES, WRONG_ATTRIBUTES, load_i64(frame + FRAME_ATTRS_SIZE), 0, 0, 0)
        return fail(frame, INVALID_ARGUMENT, text)
    num_envs, program = load_i64(envs), load_i64(hashed)
    signature = find_program(table, program) if program != 0 else 0
    if signature == 0:
        format_message(text, MESSAGE_BYTES, UNKNOWN_PROGRAM, program, 0, 0, 0)
        return fail(frame, NOT_FOUND, text)
    if num_envs < 1:
        format_message(text, MESSAGE_BYTES, WRONG_ENVS, num_envs, 0, 0, 0)
        return fail(frame, INVALID_ARGUMENT, text)
    args, rets = load_i64(signature + WORD * SIG_ARGS), load_i64(signature + WORD * SIG_RETS)
    given_args, given_rets = load_i64(frame + FRAME_ARGS_SIZE), load_i64(frame + FRAME_RETS_SIZE)
    if args != given_args or rets != given_rets:
        format_message(text, MESSAGE_BYTES, WRONG_COUNT, args, rets, given_args, given_rets)
        return fail(frame, INVALID_ARGUMENT, text)
    store_i64(signature_at, signature)
    store_i64(num_envs_at, num_envs)
    return 0


def make_refusal(message: str) -> Callable[[int], int]:
    """A handler that fails with a message, registered where a program of another backend cannot run."""

    def refuse(frame: int) -> int:
        if answer_metadata(frame, 0) != 0 or load_i32(frame + FRAME_STAGE) != STAGE_EXECUTE:
            return 0
        text = stack_bytes(MESSAGE_BYTES)
        format_message(text, MESSAGE_BYTES, message, 0, 0, 0, 0)
        return fail(frame, FAILED_PRECONDITION, text)

    return refuse


def as_int64(fingerprint: int) -> int:
    """The bits of a uint64 as an int64, as which it travels: JAX cannot write a large uint64 attribute."""
    return ctypes.c_int64(fingerprint).value


class ProgramTable:
    """The programs of this process, for compiled code: never forgets, and never moves.

    `put` is called under its owner's lock. Readers need none: a program is looked up only by executables that
    were compiled or loaded after `put` returned.
    """

    def __init__(self, magic: int, traits: int = 0) -> None:
        self._words = np.zeros(TABLE_FIRST + 2 * TABLE_PAIRS, np.int64)
        self._words[TABLE_MAGIC] = magic
        self._words[TABLE_TRAITS] = traits
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
