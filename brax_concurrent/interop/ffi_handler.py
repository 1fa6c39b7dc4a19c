"""The XLA FFI handler for the CPU: compiled code that XLA calls where a program stands in a jitted function.

It runs the program on XLA's own thread pool. What it has in common with the GPU's handler is in ffi_frame.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from numba import njit

from brax_concurrent.backends import intrinsics, native
from brax_concurrent.backends.intrinsics import (
    allocate,
    atomic_add,
    call_address,
    copy_bytes,
    external_address,
    fill_bytes,
    format_message,
    load_i32,
    load_i64,
    release,
    stack_bytes,
    store_i64,
)
from brax_concurrent.backends.native import WORD
from brax_concurrent.interop import ffi_frame
from brax_concurrent.interop.ffi_frame import (
    API_NUM_THREADS,
    API_SCHEDULE,
    DEADLINE_EXCEEDED,
    FRAME_API,
    FRAME_CONTEXT,
    FRAME_STAGE,
    INTERNAL,
    INTERNAL_ERROR,
    INVALID_ARGUMENT,
    MESSAGE_BYTES,
    OTHER_VERSION,
    RESOURCE_EXHAUSTED,
    SIG_BUFFERS,
    SIG_DESC,
    STAGE_EXECUTE,
    TABLE_COPIES,
    TABLE_MAGIC,
    ProgramTable,
    answer_metadata,
    buffer_spec,
    expected_bytes,
    fail,
    gather_buffers,
    resolve_call,
    succeeded,
)

TABLE_SYMBOL = "brax_concurrent_program_table"
WRONG_TOTAL = "brax_concurrent: num_envs must be %lld, all environments of the composite, got %lld"
NO_ARENA = "brax_concurrent: no memory for an arena of %lld bytes"
NO_JOB = "brax_concurrent: no memory for a job"
UNFINISHED = "brax_concurrent: %lld of %lld tiles done, status %lld: the program is of another version"
ELSEWHERE = (
    "brax_concurrent: this program is for the CPU, but JAX runs the computation on a GPU: make it with backend='cuda', "
    "or use jax.default_device(jax.devices('cpu')[0])"
)


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
    return load_i64(count) if succeeded(frame, error) else 1


@njit
def _schedule(frame: int, task: int, data: int) -> bool:
    """Have XLA's pool call task(data) some time; False if it will not."""
    args = stack_bytes(40)
    store_i64(args, 40)
    store_i64(args + 8, 0)
    store_i64(args + 16, load_i64(frame + FRAME_CONTEXT))
    store_i64(args + 24, task)
    store_i64(args + 32, data)
    return succeeded(frame, call_address(load_i64(load_i64(frame + FRAME_API) + API_SCHEDULE), args))


@njit
def _run(frame: int, job: int, desc: int, num_envs: int) -> int:
    """Fill in the job, invite helpers, take part, and wait for those who came. 0 or an error."""
    tiles = native.count_tiles(desc, num_envs)
    threads = load_i64(desc + WORD * native.DESC_THREADS)
    tile_width, width = load_i64(desc + WORD * native.DESC_TILE_WIDTH), load_i64(desc + WORD * native.DESC_WIDTH)
    useful = native.useful_threads(tiles, tile_width, width)
    if threads != 1 and useful > 1:
        pool = _pool_threads(frame)
        threads = min(pool if threads == 0 else min(threads, pool), useful)
    else:
        threads = 1
    state = native.state_words(desc, tiles)
    store_i64(job + WORD * native.JOB_DESC, desc)
    store_i64(job + WORD * native.JOB_STATE, job + WORD * native.JOB_WORDS)
    fill_bytes(job + WORD * native.JOB_WORDS, 0, WORD * state)
    store_i64(job + WORD * native.JOB_BUFFERS, job + WORD * (native.JOB_WORDS + state))
    store_i64(job + WORD * native.JOB_MESSAGE, 0)
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
    # Who is stuck is not waited for.
    done = native.wait_for_claimed(job) if status != native.STUCK else 0
    error = 0 if done == tiles else _failure(frame, job, desc, done, status)
    native.drop_reference(job)
    return error


@njit
def _failure(frame: int, job: int, desc: int, done: int, status: int) -> int:
    """The XLA_FFI_Error of a job that ended before its tiles did."""
    text, tiles = stack_bytes(MESSAGE_BYTES), load_i64(job + WORD * native.JOB_TILES)
    if status == native.STUCK:
        return fail(frame, DEADLINE_EXCEEDED, load_i64(job + WORD * native.JOB_MESSAGE))
    if status == native.NO_MEMORY:
        format_message(text, MESSAGE_BYTES, NO_ARENA, load_i64(desc + WORD * native.DESC_ARENA_BYTES), 0, 0, 0)
        return fail(frame, RESOURCE_EXHAUSTED, text)
    format_message(text, MESSAGE_BYTES, UNFINISHED, done, tiles, status, 0)
    return fail(frame, INTERNAL, text)


@njit
def _execute(frame: int) -> int:
    """Carry out one call: 0 or an XLA_FFI_Error."""
    found = stack_bytes(16)
    error = resolve_call(frame, external_address(TABLE_SYMBOL), found, found + WORD)
    if error != 0:
        return error
    signature, num_envs = load_i64(found), load_i64(found + WORD)
    desc = load_i64(signature + WORD * SIG_DESC)
    if native.count_tiles(desc, num_envs) == 0:
        text = stack_bytes(MESSAGE_BYTES)
        format_message(text, MESSAGE_BYTES, WRONG_TOTAL, load_i64(desc + WORD * native.DESC_NUM_ENVS), num_envs, 0, 0)
        return fail(frame, INVALID_ARGUMENT, text)
    buffers = load_i64(signature + WORD * SIG_BUFFERS)
    state = native.state_words(desc, native.count_tiles(desc, num_envs))
    job = allocate(WORD * (native.JOB_WORDS + state + 2 * buffers))
    if job == 0:
        text = stack_bytes(MESSAGE_BYTES)
        format_message(text, MESSAGE_BYTES, NO_JOB, 0, 0, 0, 0)
        return fail(frame, RESOURCE_EXHAUSTED, text)
    targets = job + WORD * (native.JOB_WORDS + state)
    sources = targets + WORD * buffers
    error = gather_buffers(frame, signature, num_envs, targets, sources)
    if error != 0:
        release(job)
        return error
    for index in range(buffers):
        source = load_i64(sources + WORD * index)
        if source != 0:
            size = expected_bytes(buffer_spec(signature, index), num_envs)
            copy_bytes(load_i64(targets + WORD * index), source, size)
            atomic_add(external_address(TABLE_SYMBOL) + WORD * TABLE_COPIES, 1)
    return _run(frame, job, desc, num_envs)


def _make_handler(magic: int) -> Callable[[int], int]:
    # As in native.py: `magic` is in Numba's cache key and ties the code to the content of the files it is of.
    def handler(frame: int) -> int:
        if answer_metadata(frame, 0) != 0 or load_i32(frame + FRAME_STAGE) != STAGE_EXECUTE:
            return 0
        text = stack_bytes(MESSAGE_BYTES)
        try:
            if load_i64(external_address(TABLE_SYMBOL) + WORD * TABLE_MAGIC) == magic:
                return _execute(frame)
            format_message(text, MESSAGE_BYTES, OTHER_VERSION, 0, 0, 0, 0)
        except Exception:  # one that left a callback would be printed and taken for success
            format_message(text, MESSAGE_BYTES, INTERNAL_ERROR, 0, 0, 0, 0)
        return fail(frame, INTERNAL, text)

    return handler


@functools.cache
def handler() -> tuple[str, Any, ProgramTable]:
    """The handler's name, its compiled code and the table that it reads.

    The name has a content hash: JAX's persistent compilation cache knows a handler by its name only.
    """
    magic = native.source_hash(__file__, ffi_frame.__file__, native.__file__, intrinsics.__file__)
    table = ProgramTable(magic)
    llvm.add_symbol(TABLE_SYMBOL, table.address)  # before the code is loaded
    return f"brax_concurrent_cpu_{magic:016x}", native.compile_callback(_make_handler(magic)), table


@functools.cache
def refusal() -> Any:
    """What is registered under the handler's name for GPUs."""
    return native.compile_callback(ffi_frame.make_refusal(ELSEWHERE))
