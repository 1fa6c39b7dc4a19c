"""Programs on CUDA, whatever their scheduler: how they are made and how one call is run."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import njit, types

from brax_concurrent.backends import (
    cuda_calls,
    cuda_driver,
    cuda_pool,
    cuda_program,
    cuda_trace,
    intrinsics,
    native,
)
from brax_concurrent.backends import cuda_dispatch as dispatch_layout
from brax_concurrent.backends.cpu_program import content_hash
from brax_concurrent.backends.cuda_pool import unlock_pool
from brax_concurrent.backends.cuda_program import (
    DESC_FUNCTIONS,
    DESC_GANG,
    DESC_MODE,
    DESC_POLICY,
    DESC_POOLS,
    DESC_TIMEOUT,
    DESC_TRACE,
    DISPATCHED,
    GRAPH,
    WINDOW,
    CudaPart,
    CudaProgram,
    build_program,
)
from brax_concurrent.backends.cuda_trace import TRACE_RUN
from brax_concurrent.backends.intrinsics import allocate, atomic_add, load_i64, release
from brax_concurrent.backends.native import WORD, compile_callback, source_hash
from brax_concurrent.scheduler import cuda_dispatch, cuda_graph, cuda_slots, cuda_streams, window
from brax_concurrent.scheduler.cuda_dispatch import STUCK, Dispatch, launch_dispatched
from brax_concurrent.scheduler.cuda_graph import launch_as_graph
from brax_concurrent.scheduler.cuda_slots import NO_MEMORY, failure_text, take_pool
from brax_concurrent.scheduler.cuda_streams import (
    CALL_ERROR,
    CALL_OP,
    CALL_UNIT,
    fail_call,
    launch_serial,
    launch_window,
)
from brax_concurrent.scheduler.engine import timeout_ns

SOURCES = (
    *(cuda_calls, cuda_pool, cuda_program, cuda_trace, dispatch_layout, intrinsics, native),
    *(cuda_dispatch, cuda_graph, cuda_slots, cuda_streams, window),
)
"""What the compiled code is made of."""


def compile_cuda(
    parts: Sequence[CudaPart],
    scheduler: str = "serial",
    *,
    window: int = 32,
    streams: int = 4,
    multiprocessors: int = 0,
    functions: cuda_calls.Functions | None = None,
    pools: int | None = None,
    dispatch: Dispatch | None = None,
) -> CudaProgram:
    """A program that launches the parts' kernels.

    Args:
        parts: see `CudaPart`.
        scheduler: "serial", "sw", "graph" or "hw".
        window, streams: slots of the window and CUDA streams of "sw".
        multiprocessors: of the GPU, which says how large blocks are; 0: as large as they may be.
        functions, pools: instead of the CUDA driver's, for tests.
        dispatch: of "hw": the loaded program.

    Raises:
        ValueError: see `build_program`.
        CudaError: there is no GPU.
    """
    buffers = sum(len(part.buffers) for part in parts)
    table = cuda_graph.new_table(buffers) if scheduler == "graph" else None
    if scheduler == "sw" and pools is None:
        pools = cuda_pool.pools()
    settings: tuple[str | int, ...] = (scheduler, window, streams) if scheduler == "sw" else (scheduler,)
    if dispatch is not None:
        settings = (*settings, window, dispatch.kernel.symbol, dispatch.words[DESC_GANG], dispatch.words[DESC_POLICY])
    fingerprint = content_hash("cuda", settings, multiprocessors, tuple(part.content() for part in parts))
    return build_program(
        parts,
        fingerprint,
        mode=scheduler,
        window=window,
        streams=streams,
        multiprocessors=multiprocessors,
        timeout_ns=timeout_ns(),
        pools=pools or 0,
        graphs=0 if table is None else int(table.ctypes.data),
        functions=functions,
        owners=tuple(each for each in (table, dispatch) if each is not None),
        dispatch=None if dispatch is None else dispatch.words,
    )


# --- one call ---------------------------------------------------------------------------------------------------------


@njit
def launch_call(desc: int, call: int, stream: int, num_envs: int, arena: int, buffers: int) -> int:
    """Launch all tasks of a prepared call: 0 or an error, which is noted in the call."""
    mode = load_i64(desc + WORD * DESC_MODE)
    if mode == DISPATCHED:
        return launch_dispatched(desc, call, stream, num_envs, arena)
    trace = load_i64(desc + WORD * DESC_TRACE)
    if trace != 0:
        atomic_add(trace + WORD * TRACE_RUN, 1)
    if mode == GRAPH:
        return launch_as_graph(desc, call, stream, num_envs, arena, buffers)
    if mode != WINDOW:
        return launch_serial(desc, call, stream)
    functions, timeout = load_i64(desc + WORD * DESC_FUNCTIONS), load_i64(desc + WORD * DESC_TIMEOUT)
    pool, error = take_pool(load_i64(desc + WORD * DESC_POOLS), functions, timeout)
    if error != 0:
        return fail_call(call, error, 0, 0)
    error = launch_window(desc, call, stream, pool)
    unlock_pool(pool)
    return error


def _make_run(magic: int) -> Callable[..., int]:
    # As in native.py: `magic` is in Numba's cache key and ties the code to the content of the files it is of.
    def run(desc: int, num_envs: int, buffers: int, arena: int, stream: int, report: int) -> int:
        call = allocate(cuda_streams.call_bytes(desc, num_envs)) if magic != 0 else 0
        if call == 0:
            return NO_MEMORY
        cuda_streams.prepare_call(desc, num_envs, buffers, arena, call)
        error = launch_call(desc, call, stream, num_envs, arena, buffers)
        intrinsics.copy_bytes(report, call, WORD * cuda_streams.CALL_FIRST_UNIT)
        release(call)  # the driver has copied the parameters of all launches
        return error

    return run


@functools.cache
def _run() -> Any:
    magic = source_hash(__file__, *(module.__file__ for module in SOURCES))
    return compile_callback(_make_run(magic), types.int64(*[types.int64] * 6))


def launch_program(program: CudaProgram, addresses: Sequence[int], arena: int, num_envs: int, stream: int) -> None:
    """Launch a program without JAX. The arrays' context must be current; the result is not waited for.

    Args:
        program: what to run.
        addresses: device addresses of arrays for `program.buffers`, in that order.
        arena: device address of scratch memory of `program.scratch_bytes(num_envs)` bytes.
        num_envs: environments, at least 1.
        stream: a CUstream; 0 is the default stream.

    Raises:
        ValueError: the number of arrays or environments is wrong.
        CudaError: a launch failed, or the GPU freed no slot of the window in time; names the kernel.
    """
    if len(addresses) != len(program.buffers) or num_envs < 1:
        raise ValueError(
            f"expected {len(program.buffers)} addresses and at least 1 environment, got {len(addresses)} and {num_envs}"
        )
    if program.num_envs not in (None, num_envs):
        raise ValueError(f"num_envs must be {program.num_envs}, all environments of the parts, got {num_envs}")
    words, report = np.array(addresses, np.uint64), np.zeros(cuda_streams.CALL_FIRST_UNIT, np.int64)
    run = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)(_run().address)
    error = run(program.address, num_envs, words.ctypes.data, arena, stream, report.ctypes.data)
    if error != 0:
        report[CALL_ERROR] = error  # where there was no memory for a call, nothing was noted
        raise cuda_driver.CudaError(explain_failure(program, report, num_envs))


def explain_failure(program: CudaProgram, report: np.ndarray, num_envs: int) -> str:
    """What a call's report says."""
    error, op, unit = (int(report[word]) for word in (CALL_ERROR, CALL_OP, CALL_UNIT))
    if error == STUCK:
        (dispatch,) = (owner for owner in program.owners if isinstance(owner, Dispatch))
        return cuda_dispatch.explain(program.parts, dispatch.errors, int(program.desc[DESC_TIMEOUT]))
    part, number = _part_of(program, unit, num_envs)
    where = f"kernel {part.ops[op].kernel.name} (op {op} of {len(part.ops)}, unit {number})"
    where = f"{part.name}: {where}" if part.name else where
    words = (ctypes.c_int64 * (cuda_calls.F_EXPLAIN + 1)).from_address(int(program.desc[DESC_FUNCTIONS]))
    return failure_text(error, where, int(program.desc[DESC_TIMEOUT]), words[cuda_calls.F_EXPLAIN])


def _part_of(program: CudaProgram, unit: int, num_envs: int) -> tuple[CudaPart, int]:
    for part in program.parts:
        tiles = -(-(part.num_envs or num_envs) // native.TILE)
        units = -(-tiles // part.unit_tiles) if part.unit_tiles else 1
        if unit < units:
            return part, unit
        unit -= units
    return program.parts[-1], unit
