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

from brax_concurrent.backends.cuda_calls import F_COPY, F_EXPLAIN, copy_async, explain_error
from brax_concurrent.backends.cuda_dispatch import E_SLOT
from brax_concurrent.backends.cuda_program import (
    DESC_ERRORS,
    DESC_FUNCTIONS,
    DESC_TIMEOUT,
    DESC_TOTAL_ENVS,
    OP_NAME,
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
from brax_concurrent.backends.native import WORD, compile_callback, source_hash
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
from brax_concurrent.scheduler import cuda as cuda_scheduler
from brax_concurrent.scheduler.cuda import launch_call
from brax_concurrent.scheduler.cuda_dispatch import STUCK
from brax_concurrent.scheduler.cuda_slots import BUSY_POOL, NO_MEMORY, NO_POOL, TIMED_OUT
from brax_concurrent.scheduler.cuda_streams import (
    CALL_ERROR,
    CALL_OP,
    CALL_UNIT,
    UNIT_NUMBER,
    call_bytes,
    op_address,
    prepare_call,
    scratch_bytes,
    unit_address,
)

ENVIRONMENT = "BRAX_CONCURRENT_COMMAND_BUFFERS"
"""Environment variable: "0" tells XLA that programs must not be captured into command buffers (CUDA graphs)."""

TABLE_SYMBOL = "brax_concurrent_cuda_program_table"
NO_CALL = "brax_concurrent: no memory for a call"
WRONG_SCRATCH = "brax_concurrent: expected %lld bytes of scratch memory, got %lld of XLA data type %lld"
NO_LAUNCH = "brax_concurrent: launch of kernel %s (op %lld): %s (CUDA error %lld)"
TOO_LATE = "brax_concurrent: kernel %s (op %lld, unit %lld) did not end within %lld ms"
NO_STREAMS = "brax_concurrent: there are no CUDA streams for this GPU: it was not in use when the program was made"
STOPPED = "brax_concurrent: an earlier call was ended: kernel %s (op %lld, slot %lld) was not done within %lld ms"
BUSY = "brax_concurrent: another call kept the CUDA streams for %lld ms"
WRONG_TOTAL = "brax_concurrent: num_envs must be %lld, all environments of the parts, got %lld"
NO_COPY = "brax_concurrent: copy of buffer %s: %s (CUDA error %lld)"
ELSEWHERE = (
    "brax_concurrent: this program is for CUDA, but JAX runs the computation on another device: make it with "
    "backend='cpu', or put the arrays on a GPU"
)


@njit
def _function(desc: int, which: int) -> int:
    return load_i64(load_i64(desc + WORD * DESC_FUNCTIONS) + WORD * which)


@njit
def _explain(desc: int, error: int) -> int:
    """Address of the driver's text for an error code."""
    text = stack_bytes(8)
    store_i64(text, 0)
    explain_error(_function(desc, F_EXPLAIN), error, text)
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
            error = copy_async(_function(desc, F_COPY), target, source, size, stream)
            if error != 0:
                text = stack_bytes(MESSAGE_BYTES)
                name = load_i64(spec + WORD * SIG_NAME)
                format_message(text, MESSAGE_BYTES, NO_COPY, name, _explain(desc, error), error, 0)
                return fail(frame, INTERNAL, text)
            atomic_add(external_address(TABLE_SYMBOL) + WORD * TABLE_COPIES, 1)
    return 0


@njit
def _scratch(frame: int, signature: int, num_envs: int, arena_at: int) -> int:
    """Write the address of the arenas there; 0 or an error."""
    desc = load_i64(signature + WORD * SIG_DESC)
    last = load_i64(signature + WORD * SIG_RETS) - 1
    buffer = load_i64(load_i64(frame + FRAME_RETS) + WORD * last)
    expected = scratch_bytes(desc, num_envs)
    given, dtype = bytes_of(buffer, 1), load_i32(buffer + BUFFER_DTYPE)
    if given != expected or dtype != U8:
        text = stack_bytes(MESSAGE_BYTES)
        format_message(text, MESSAGE_BYTES, WRONG_SCRATCH, expected, given, dtype, 0)
        return fail(frame, INVALID_ARGUMENT, text)
    store_i64(arena_at, load_i64(buffer + BUFFER_DATA))
    return 0


@njit
def _stream(frame: int, stream_at: int) -> int:
    """Write XLA's stream there; 0 or an error."""
    args = stack_bytes(32)  # XLA_FFI_Stream_Get_Args
    store_i64(args, 4 * WORD)
    store_i64(args + WORD, 0)
    store_i64(args + 2 * WORD, load_i64(frame + FRAME_CONTEXT))
    store_i64(args + 3 * WORD, 0)
    error = call_address(load_i64(load_i64(frame + FRAME_API) + API_STREAM_GET), args)
    store_i64(stream_at, load_i64(args + 3 * WORD))
    return error


@njit
def _report(frame: int, desc: int, call: int) -> int:
    """The error that a call noted, for XLA."""
    text, error, op = stack_bytes(MESSAGE_BYTES), load_i64(call + WORD * CALL_ERROR), load_i64(call + WORD * CALL_OP)
    unit = unit_address(call, load_i64(call + WORD * CALL_UNIT))
    name, milliseconds = load_i64(op_address(desc, unit, op) + WORD * OP_NAME), load_i64(desc + WORD * DESC_TIMEOUT)
    milliseconds //= 1000000
    if error == TIMED_OUT:
        number = load_i64(unit + WORD * UNIT_NUMBER)
        format_message(text, MESSAGE_BYTES, TOO_LATE, name, op, number, milliseconds)
    elif error == STUCK:
        slot = load_i32(load_i64(desc + WORD * DESC_ERRORS) + 4 * E_SLOT)
        format_message(text, MESSAGE_BYTES, STOPPED, name, op, slot, milliseconds)
    elif error == NO_POOL:
        format_message(text, MESSAGE_BYTES, NO_STREAMS, 0, 0, 0, 0)
    elif error == BUSY_POOL:
        format_message(text, MESSAGE_BYTES, BUSY, milliseconds, 0, 0, 0)
    elif error == NO_MEMORY:
        format_message(text, MESSAGE_BYTES, NO_CALL, 0, 0, 0, 0)
    else:
        format_message(text, MESSAGE_BYTES, NO_LAUNCH, name, op, _explain(desc, error), error)
    return fail(frame, INTERNAL, text)


@njit
def _run(frame: int, signature: int, num_envs: int, call: int, targets: int, sources: int) -> int:
    """Fill in the call and launch: 0 or an error."""
    desc, found = load_i64(signature + WORD * SIG_DESC), stack_bytes(16)
    error = gather_buffers(frame, signature, num_envs, targets, sources)
    if error == 0:
        error = _scratch(frame, signature, num_envs, found)
    if error == 0:
        error = _stream(frame, found + WORD)
    if error != 0:
        return error
    arena, stream = load_i64(found), load_i64(found + WORD)
    error = _copy_carried(frame, signature, num_envs, targets, sources, stream)
    if error != 0:
        return error
    prepare_call(desc, num_envs, targets, arena, call)
    if launch_call(desc, call, stream, num_envs, arena, targets) == 0:
        return 0
    return _report(frame, desc, call)


@njit
def _execute(frame: int) -> int:
    """Carry out one call: 0 or an XLA_FFI_Error."""
    found, text = stack_bytes(16), stack_bytes(MESSAGE_BYTES)
    error = resolve_call(frame, external_address(TABLE_SYMBOL), found, found + WORD)
    if error != 0:
        return error
    signature, num_envs = load_i64(found), load_i64(found + WORD)
    desc = load_i64(signature + WORD * SIG_DESC)
    total = load_i64(desc + WORD * DESC_TOTAL_ENVS)
    if total != 0 and total != num_envs:
        format_message(text, MESSAGE_BYTES, WRONG_TOTAL, total, num_envs, 0, 0)
        return fail(frame, INVALID_ARGUMENT, text)
    size, buffers = call_bytes(desc, num_envs), WORD * load_i64(signature + WORD * SIG_BUFFERS)
    call = allocate(size + 2 * buffers)
    if call == 0:
        format_message(text, MESSAGE_BYTES, NO_CALL, 0, 0, 0, 0)
        return fail(frame, RESOURCE_EXHAUSTED, text)
    error = _run(frame, signature, num_envs, call, call + size, call + size + buffers)
    release(call)  # the driver has copied the parameters of all launches
    return error


def _make_handler(magic: int, captured: bool) -> Callable[[int], int]:
    # As in native.py: `magic` is in Numba's cache key and ties the code to the content of the files it is of.
    def handler(frame: int) -> int:
        table = external_address(TABLE_SYMBOL)
        if answer_metadata(frame, load_i64(table + WORD * TABLE_TRAITS) if captured else 0) != 0:
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
    """The traits that XLA is told of at registration, for programs that are launched in program order.

    All that the handler does to the GPU are kernels, loaded before, and copies on XLA's stream: that may be captured.
    """
    return 0 if os.environ.get(ENVIRONMENT) == "0" else CAPTURABLE


@functools.cache
def _table() -> tuple[int, ProgramTable]:
    """What the code is made of as a number, and the table of programs, which all handlers read."""
    files = (__file__, ffi_frame.__file__, cuda_scheduler.__file__, *(m.__file__ for m in cuda_scheduler.SOURCES))
    magic = source_hash(*files)
    table = ProgramTable(magic, wanted_traits())
    llvm.add_symbol(TABLE_SYMBOL, table.address)  # before the code is loaded
    return magic, table


@functools.cache
def handler(captured: bool = True) -> tuple[str, Any, ProgramTable]:
    """The handler's name, its compiled code and the table that it reads.

    The name has a content hash: JAX's persistent compilation cache knows a handler by its name only.

    Args:
        captured: whether XLA may capture calls into command buffers. It may not where the host asks the GPU how far it
            is, or replays a graph of its own.
    """
    magic, table = _table()
    name = f"brax_concurrent_cuda_{'' if captured else 'host_'}{magic:016x}"
    return name, compile_callback(_make_handler(magic, captured)), table


@functools.cache
def refusal() -> Any:
    """What is registered under the handlers' names for the CPU."""
    return compile_callback(ffi_frame.make_refusal(ELSEWHERE))
