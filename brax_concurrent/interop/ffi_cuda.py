"""The XLA FFI handler for CUDA: it launches a program's kernels on XLA's stream and waits for nothing.

Scratch memory is the last result of the call: XLA owns it, reuses it for other things between calls, and frees it. What
this handler has in common with the CPU's is in ffi_frame.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from numba import njit

from brax_concurrent.backends import cuda_program, intrinsics, native
from brax_concurrent.backends.cuda_program import (
    CALL_ARENA,
    CALL_FIRST_BUFFER,
    CALL_NUM_ENVS,
    DESC_ARENA_BYTES,
    DESC_CALL_BYTES,
    DESC_COPY,
    DESC_EXPLAIN,
    DESC_FIRST_OP,
    OP_NAME,
    OP_WORDS,
    copy_async,
    explain_error,
    launch_ops,
)
from brax_concurrent.backends.intrinsics import (
    allocate,
    atomic_add,
    call_address,
    external_address,
    format_message,
    load_i32,
    load_i64,
    release,
    stack_bytes,
    store_i64,
)
from brax_concurrent.backends.native import TILE, WORD
from brax_concurrent.interop import ffi_frame
from brax_concurrent.interop.ffi_frame import (
    API_STREAM_GET,
    BUFFER_DATA,
    BUFFER_DTYPE,
    CAPTURABLE,
    FRAME_API,
    FRAME_CONTEXT,
    FRAME_RETS,
    FRAME_STAGE,
    INTERNAL,
    INTERNAL_ERROR,
    INVALID_ARGUMENT,
    MESSAGE_BYTES,
    OTHER_VERSION,
    RESOURCE_EXHAUSTED,
    SIG_BUFFERS,
    SIG_DESC,
    SIG_NAME,
    SIG_RETS,
    STAGE_EXECUTE,
    TABLE_COPIES,
    TABLE_MAGIC,
    TABLE_TRAITS,
    U8,
    ProgramTable,
    answer_metadata,
    buffer_spec,
    bytes_of,
    expected_bytes,
    fail,
    gather_buffers,
    resolve_call,
)

ENVIRONMENT = "BRAX_CONCURRENT_COMMAND_BUFFERS"
"""Environment variable: "0" tells XLA that programs must not be captured into command buffers (CUDA graphs)."""

TABLE_SYMBOL = "brax_concurrent_cuda_program_table"
NO_CALL = "brax_concurrent: no memory for a call"
WRONG_SCRATCH = "brax_concurrent: expected %lld bytes of scratch memory, got %lld of XLA data type %lld"
NO_LAUNCH = "brax_concurrent: launch of kernel %s (op %lld): %s (CUDA error %lld)"
NO_COPY = "brax_concurrent: copy of buffer %s: %s (CUDA error %lld)"
ELSEWHERE = (
    "brax_concurrent: this program is for CUDA, but JAX runs the computation on another device: make it with "
    "backend='cpu', or put the arrays on a GPU"
)


@njit
def _explain(desc: int, error: int) -> int:
    """Address of the driver's text for an error code."""
    text = stack_bytes(8)
    store_i64(text, 0)
    explain_error(load_i64(desc + WORD * DESC_EXPLAIN), error, text)
    return load_i64(text)


@njit
def _copy_carried(frame: int, signature: int, num_envs: int, targets: int, sources: int, stream: int) -> int:
    """Copy the arrays that XLA did not give in place; 0 or an error."""
    desc = load_i64(signature + WORD * SIG_DESC)
    for index in range(load_i64(signature + WORD * SIG_BUFFERS)):
        source = load_i64(sources + WORD * index)
        if source != 0:
            spec = buffer_spec(signature, index)
            target, size = load_i64(targets + WORD * index), expected_bytes(spec, num_envs)
            error = copy_async(load_i64(desc + WORD * DESC_COPY), target, source, size, stream)
            if error != 0:
                text = stack_bytes(MESSAGE_BYTES)
                name = load_i64(spec + WORD * SIG_NAME)
                format_message(text, MESSAGE_BYTES, NO_COPY, name, _explain(desc, error), error, 0)
                return fail(frame, INTERNAL, text)
            atomic_add(external_address(TABLE_SYMBOL) + WORD * TABLE_COPIES, 1)
    return 0


@njit
def _scratch(frame: int, signature: int, num_envs: int, call: int) -> int:
    """Write the address of the arenas to the call record; 0 or an error."""
    desc = load_i64(signature + WORD * SIG_DESC)
    last = load_i64(signature + WORD * SIG_RETS) - 1
    buffer = load_i64(load_i64(frame + FRAME_RETS) + WORD * last)
    expected = (num_envs + TILE - 1) // TILE * load_i64(desc + WORD * DESC_ARENA_BYTES)
    given, dtype = bytes_of(buffer, 1), load_i32(buffer + BUFFER_DTYPE)
    if given != expected or dtype != U8:
        text = stack_bytes(MESSAGE_BYTES)
        format_message(text, MESSAGE_BYTES, WRONG_SCRATCH, expected, given, dtype, 0)
        return fail(frame, INVALID_ARGUMENT, text)
    store_i64(call + WORD * CALL_ARENA, load_i64(buffer + BUFFER_DATA))
    store_i64(call + WORD * CALL_NUM_ENVS, num_envs)
    return 0


@njit
def _run(frame: int, signature: int, num_envs: int, call: int, sources: int) -> int:
    """Fill in the call record and launch: 0 or an error."""
    desc = load_i64(signature + WORD * SIG_DESC)
    targets = call + WORD * CALL_FIRST_BUFFER
    error = gather_buffers(frame, signature, num_envs, targets, sources)
    if error != 0:
        return error
    error = _scratch(frame, signature, num_envs, call)
    if error != 0:
        return error
    args = stack_bytes(32)  # XLA_FFI_Stream_Get_Args
    store_i64(args, 4 * WORD)
    store_i64(args + WORD, 0)
    store_i64(args + 2 * WORD, load_i64(frame + FRAME_CONTEXT))
    store_i64(args + 3 * WORD, 0)
    error = call_address(load_i64(load_i64(frame + FRAME_API) + API_STREAM_GET), args)
    if error != 0:
        return error
    stream = load_i64(args + 3 * WORD)
    error = _copy_carried(frame, signature, num_envs, targets, sources, stream)
    if error != 0:
        return error
    result = launch_ops(desc, call, stream)
    if result == 0:
        return 0
    text = stack_bytes(MESSAGE_BYTES)
    op, code = (result >> 32) - 1, result & 0xFFFFFFFF
    name = load_i64(desc + WORD * (DESC_FIRST_OP + OP_WORDS * op + OP_NAME))
    format_message(text, MESSAGE_BYTES, NO_LAUNCH, name, op, _explain(desc, code), code)
    return fail(frame, INTERNAL, text)


@njit
def _execute(frame: int) -> int:
    """Carry out one call: 0 or an XLA_FFI_Error."""
    found = stack_bytes(16)
    error = resolve_call(frame, external_address(TABLE_SYMBOL), found, found + WORD)
    if error != 0:
        return error
    signature, num_envs = load_i64(found), load_i64(found + WORD)
    size = load_i64(load_i64(signature + WORD * SIG_DESC) + WORD * DESC_CALL_BYTES)
    call = allocate(size + WORD * load_i64(signature + WORD * SIG_BUFFERS))
    if call == 0:
        text = stack_bytes(MESSAGE_BYTES)
        format_message(text, MESSAGE_BYTES, NO_CALL, 0, 0, 0, 0)
        return fail(frame, RESOURCE_EXHAUSTED, text)
    error = _run(frame, signature, num_envs, call, call + size)
    release(call)  # the driver has copied the parameters of all launches
    return error


def _make_handler(magic: int) -> Callable[[int], int]:
    # As in native.py: `magic` is in Numba's cache key and ties the code to the content of the files it is of.
    def handler(frame: int) -> int:
        table = external_address(TABLE_SYMBOL)
        if answer_metadata(frame, load_i64(table + WORD * TABLE_TRAITS)) != 0:
            return 0
        if load_i32(frame + FRAME_STAGE) != STAGE_EXECUTE:
            return 0
        text = stack_bytes(MESSAGE_BYTES)
        try:
            if load_i64(table + WORD * TABLE_MAGIC) == magic:
                return _execute(frame)
            format_message(text, MESSAGE_BYTES, OTHER_VERSION, 0, 0, 0, 0)
        except Exception:  # one that left a callback would be printed and taken for success
            format_message(text, MESSAGE_BYTES, INTERNAL_ERROR, 0, 0, 0, 0)
        return fail(frame, INTERNAL, text)

    return handler


def wanted_traits() -> int:
    """The traits that XLA is told of at registration.

    All that the handler does to the GPU are kernels, loaded before, and copies on XLA's stream: that may be captured.
    """
    return 0 if os.environ.get(ENVIRONMENT) == "0" else CAPTURABLE


@functools.cache
def handler() -> tuple[str, Any, ProgramTable]:
    """The handler's name, its compiled code and the table that it reads.

    The name has a content hash: JAX's persistent compilation cache knows a handler by its name only.
    """
    files = (ffi_frame, cuda_program, native, intrinsics)
    magic = native.source_hash(__file__, *(module.__file__ for module in files))
    table = ProgramTable(magic, wanted_traits())
    llvm.add_symbol(TABLE_SYMBOL, table.address)  # before the code is loaded
    return f"brax_concurrent_cuda_{magic:016x}", native.compile_callback(_make_handler(magic)), table


@functools.cache
def refusal() -> Any:
    """What is registered under the handler's name for the CPU."""
    return native.compile_callback(ffi_frame.make_refusal(ELSEWHERE))
