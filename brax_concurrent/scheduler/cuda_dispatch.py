"""The scheduler hw on CUDA, the host's side: how a program is made, and the one launch that runs a call.

What runs on the GPU is dispatcher.py. A call is one launch with a block for each multiprocessor, or fewer where there
are fewer bundles; where bundles are claimed from counters, these are set to 0 first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from brax_concurrent.backends import cuda_driver
from brax_concurrent.backends.cuda_calls import F_FILL, F_LAUNCH, fill_async, launch_kernel
from brax_concurrent.backends.cuda_dispatch import (
    C_COUNTERS,
    C_DYNAMIC,
    C_ERROR,
    C_FLIGHTS,
    C_GANG,
    C_POLICY,
    C_RUN,
    C_TIMEOUT,
    C_TRACE,
    C_WINDOW,
    CONTROL_WORDS,
    COUNTERS_BYTES,
    DEPTH_FIRST,
    E_BUNDLE,
    E_CODE,
    E_OP,
    E_PART,
    E_SLOT,
    E_STEP,
    ERROR_WORDS,
    MAX_PARTS,
    NEVER_ENDED,
    OLDEST,
    REGROUP_THREADS,
    SAME_KERNEL,
    SLOTS,
)
from brax_concurrent.backends.cuda_link import DispatchPart, compile_block_kernel, link_program, parameter_words
from brax_concurrent.backends.cuda_program import (
    DESC_CONTROL_BYTES,
    DESC_ERRORS,
    DESC_FIRST_PART,
    DESC_FUNCTIONS,
    DESC_GANG,
    DESC_KERNEL,
    DESC_MOST_GANG,
    DESC_MULTIPROCESSORS,
    DESC_PARAMETERS,
    DESC_PARTS,
    DESC_POLICY,
    DESC_REGROUP,
    DESC_RUN,
    DESC_TIMEOUT,
    DESC_TRACE,
    DESC_WARPS,
    DESC_WINDOW,
    ORDER_BYTES,
    PART_ARENA_BYTES,
    PART_BUFFERS,
    PART_OPS,
    PART_SHARE,
    PART_WORDS,
    PART_WORK,
    RECORD_FIRST_BUFFER,
    RECORD_NUM_ENVS,
    RECORD_ORDER,
    WARP,
    CudaPart,
    CudaProgram,
)
from brax_concurrent.backends.intrinsics import atomic_add, load_i32, load_i64, store_i64
from brax_concurrent.backends.native import TILE, WORD, source_hash
from brax_concurrent.scheduler.cuda_streams import (
    CALL_POINTERS,
    CALL_WINDOW,
    UNIT_RECORD,
    fail_call,
    part_envs,
    scratch_bytes,
    unit_address,
)

STUCK = -10  # instead of an error code of the driver: the watchdog ended an earlier call
LEAST_BUNDLES = 1.5  # of a multiprocessor, below which nothing is regrouped: the slowest bundle decides there
MAX_WARPS = 8  # of a block: with more, a thread has fewer than 255 registers
_POLICIES = {"oldest": OLDEST, "same_kernel": SAME_KERNEL, "depth_first": DEPTH_FIRST}
LARGE_CODE = 400_000  # bytes; the more code, the more warps should go through it together, and the longer they wait
_MOST_GANG, _LARGE_GANG = 4, 8
_PARTITIONS, _REGISTERS = 4, 16384  # of a multiprocessor, and 32-bit registers of each


@dataclass(frozen=True)
class Dispatch:
    """A program of the dispatcher, loaded.

    Attributes:
        kernel: the one kernel. large: whether its code is. words: what the program's descriptor has of it.
        errors: the error cell, int32 words, see cuda_dispatch.E_*.
    """

    kernel: cuda_driver.Kernel
    large: bool
    words: Mapping[int, int]
    errors: np.ndarray


def device_sources() -> tuple[str, ...]:
    """The files that the dispatcher's kernel is made of."""
    from brax_concurrent.backends import cuda_device, cuda_dispatch
    from brax_concurrent.scheduler import dispatcher, dispatcher_insert, dispatcher_report, dispatcher_work

    modules = (dispatcher, dispatcher_insert, dispatcher_report, dispatcher_work, cuda_device, cuda_dispatch)
    return tuple(str(module.__file__) for module in modules)


def load_dispatch(
    parts: Sequence[DispatchPart], compute_capability: tuple[int, int], gang: int = 0, policy: str = "oldest"
) -> Dispatch:
    """Compile a program of the dispatcher, or take it from the disk, and load it into the driver.

    Args:
        parts: what it runs.
        compute_capability: of the GPU.
        gang: warps of a gang, a power of 2 up to MAX_WARPS; 0: by the number of tiles.
        policy: one of hw_order.POLICIES.

    Raises:
        CudaError: there is no GPU, or it refuses the code.
        ValueError: there are too many parts or arrays, or `gang` has no such value.
    """
    if len(parts) > MAX_PARTS:
        raise ValueError(f"hw runs at most {MAX_PARTS} robots in one batch, got {len(parts)}")
    if gang and (gang & (gang - 1) or not 1 <= gang <= MAX_WARPS):
        raise ValueError(f"a task of hw has 1, 2, 4 or {MAX_WARPS} tiles of {TILE} environments, got {gang}")
    # What runs on a GPU needs numba-cuda, which is not installed where there is none.
    from brax_concurrent.backends import cuda_device
    from brax_concurrent.scheduler import dispatcher, regroup

    source = source_hash(*device_sources())
    symbol, cubin = link_program(parts, dispatcher.dispatch, source, MAX_WARPS * WARP, compute_capability)
    kernel = cuda_driver.load_kernel("dispatcher", symbol, cubin)
    cuda_driver.make_resident([kernel])
    errors = cuda_driver.shared_words(ERROR_WORDS)
    capability = compute_capability
    made_of = source_hash(regroup.__file__, cuda_device.__file__)
    entry, code = compile_block_kernel(regroup.regroup, made_of, regroup.SHARED_WORDS, regroup.THREADS, capability)
    order = cuda_driver.load_kernel("regroup", entry, code)
    cuda_driver.make_resident([order])
    registers = (kernel.registers() + 7) // 8 * 8
    warps = min(_REGISTERS // (registers * WARP) * _PARTITIONS, MAX_WARPS)
    words = {
        DESC_KERNEL: kernel.handle,
        DESC_WARPS: warps,
        DESC_GANG: min(gang, warps),
        DESC_MOST_GANG: min(_LARGE_GANG if len(cubin) > LARGE_CODE else _MOST_GANG, warps),
        DESC_POLICY: _POLICIES[policy],
        DESC_REGROUP: order.handle,
        DESC_CONTROL_BYTES: COUNTERS_BYTES,
        DESC_ERRORS: int(errors.ctypes.data),
        DESC_PARAMETERS: parameter_words(parts),
    }
    return Dispatch(kernel, len(cubin) > LARGE_CODE, words, errors)


# --- one call ---------------------------------------------------------------------------------------------------------


@njit
def _tiles(desc: int, part: int, num_envs: int) -> int:
    return (part_envs(desc + WORD * (DESC_FIRST_PART + PART_WORDS * part), num_envs) + TILE - 1) // TILE


@njit
def _gang(desc: int, num_envs: int) -> int:
    """Warps of a gang, as a power of 2: as few as let each bundle have a multiprocessor of its own.

    Of several parts, those of the one that has the most multiprocessors: it is at work the longest.
    """
    given, shift = load_i64(desc + WORD * DESC_GANG), 0
    if given != 0:
        while (1 << shift) < given:
            shift += 1
        return shift
    tiles, most = 0, 0
    for part in range(load_i64(desc + WORD * DESC_PARTS)):
        share = load_i64(desc + WORD * (DESC_FIRST_PART + PART_WORDS * part + PART_SHARE))
        share = load_i64(desc + WORD * DESC_MULTIPROCESSORS) if share == 0 else share
        if share > most:
            tiles, most = _tiles(desc, part, num_envs), share
    while (2 << shift) <= load_i64(desc + WORD * DESC_MOST_GANG) and tiles > most << shift:
        shift += 1
    return shift


@njit
def _regroup(desc: int, call: int, stream: int, num_envs: int, arena: int) -> int:
    """Launch what orders the environments of parts that are regrouped, and note where; 0 or an error."""
    error, order = 0, arena
    for part in range(load_i64(desc + WORD * DESC_PARTS)):
        words = desc + WORD * (DESC_FIRST_PART + PART_WORDS * part)
        order += _tiles(desc, part, num_envs) * load_i64(words + WORD * PART_ARENA_BYTES)
    for part in range(load_i64(desc + WORD * DESC_PARTS)):
        work = load_i64(desc + WORD * (DESC_FIRST_PART + PART_WORDS * part + PART_WORK))
        record, tiles = unit_address(call, part) + WORD * UNIT_RECORD, _tiles(desc, part, num_envs)
        bundles = tiles >> _gang(desc, num_envs)
        paid = work >= 0 and bundles >= LEAST_BUNDLES * load_i64(desc + WORD * DESC_MULTIPROCESSORS)
        store_i64(record + WORD * RECORD_ORDER, order if paid else 0)
        if work >= 0:
            order += ORDER_BYTES * tiles
        if paid and error == 0:
            pointers = load_i64(call + WORD * CALL_POINTERS)
            store_i64(pointers, record + WORD * (RECORD_FIRST_BUFFER + work))
            store_i64(pointers + WORD, record + WORD * RECORD_NUM_ENVS)
            store_i64(pointers + 2 * WORD, record + WORD * RECORD_ORDER)
            launch = load_i64(load_i64(desc + WORD * DESC_FUNCTIONS) + WORD * F_LAUNCH)
            kernel = load_i64(desc + WORD * DESC_REGROUP)
            error = launch_kernel(launch, kernel, 1, REGROUP_THREADS, stream, pointers)
    return error


@njit
def launch_dispatched(desc: int, call: int, stream: int, num_envs: int, arena: int) -> int:
    """Launch a prepared call: 0 or an error, which is noted in the call. That of an earlier call is one, too."""
    cell = load_i64(desc + WORD * DESC_ERRORS)
    if load_i32(cell + 4 * E_CODE) != 0:
        return fail_call(call, STUCK, load_i32(cell + 4 * E_OP), load_i32(cell + 4 * E_PART))
    parts, blocks = load_i64(desc + WORD * DESC_PARTS), load_i64(desc + WORD * DESC_MULTIPROCESSORS)
    shift, warps = _gang(desc, num_envs), load_i64(desc + WORD * DESC_WARPS)
    size = 1 << shift
    bundles, ops = 0, 0
    for part in range(parts):
        bundles += (_tiles(desc, part, num_envs) + size - 1) // size
        ops = max(ops, load_i64(desc + WORD * (DESC_FIRST_PART + PART_WORDS * part + PART_OPS)))
    blocks = min(blocks, bundles)
    each = (bundles + blocks - 1) // blocks  # bundles of a block
    whole_steps = ops == 1
    gangs = max(warps // size, 1)
    if whole_steps and parts == 1:  # a bundle keeps no more than one gang busy
        gangs = min(gangs, each)
    flights = gangs if whole_steps else min(2 * gangs, SLOTS)
    dynamic = parts > 1 or each > flights
    control = load_i64(call + WORD * CALL_WINDOW)
    counters = arena + scratch_bytes(desc, num_envs) - COUNTERS_BYTES
    functions = load_i64(desc + WORD * DESC_FUNCTIONS)
    if dynamic:
        fill = load_i64(functions + WORD * F_FILL)
        error = fill_async(fill, counters, 0, COUNTERS_BYTES // 4, stream)
        if error != 0:
            return fail_call(call, error, 0, 0)
    store_i64(control + WORD * C_COUNTERS, counters)
    store_i64(control + WORD * C_ERROR, load_i64(desc + WORD * DESC_ERRORS))
    store_i64(control + WORD * C_TRACE, load_i64(desc + WORD * DESC_TRACE))
    store_i64(control + WORD * C_RUN, atomic_add(desc + WORD * DESC_RUN, 1))
    store_i64(control + WORD * C_TIMEOUT, load_i64(desc + WORD * DESC_TIMEOUT))
    store_i64(control + WORD * C_GANG, shift)
    store_i64(control + WORD * C_FLIGHTS, flights)
    store_i64(control + WORD * C_POLICY, load_i64(desc + WORD * DESC_POLICY))
    store_i64(control + WORD * C_DYNAMIC, 1 if dynamic else 0)
    store_i64(control + WORD * C_WINDOW, min(load_i64(desc + WORD * DESC_WINDOW), SLOTS))
    error = _regroup(desc, call, stream, num_envs, arena)
    if error != 0:
        return fail_call(call, error, 0, 0)
    pointer = load_i64(call + WORD * CALL_POINTERS)
    for word in range(CONTROL_WORDS):
        store_i64(pointer, control + WORD * word)
        pointer += WORD
    for part in range(parts):
        record = unit_address(call, part) + WORD * UNIT_RECORD
        buffers = load_i64(desc + WORD * (DESC_FIRST_PART + PART_WORDS * part + PART_BUFFERS))
        for word in range(RECORD_FIRST_BUFFER + buffers):
            store_i64(pointer, record + WORD * word)
            pointer += WORD
    error = launch_kernel(
        load_i64(functions + WORD * F_LAUNCH),
        load_i64(desc + WORD * DESC_KERNEL),
        blocks,
        gangs * size * WARP,
        stream,
        load_i64(call + WORD * CALL_POINTERS),
    )
    return fail_call(call, error, 0, 0) if error != 0 else 0


def bundle_tiles(program: CudaProgram, num_envs: int) -> int:
    """Tiles of a bundle in a call for so many environments."""
    return 1 << int(_gang(program.address, num_envs))


def explain(parts: Sequence[CudaPart], errors: np.ndarray, timeout_ns: int) -> str:
    """What an error cell says."""
    part = parts[int(errors[E_PART])]
    kernel = part.ops[int(errors[E_OP])].kernel.name
    did = "did not end" if errors[E_CODE] == NEVER_ENDED else "never became ready"
    where = f"kernel {kernel} (op {errors[E_OP]} of {len(part.ops)}, step {errors[E_STEP]}, bundle {errors[E_BUNDLE]})"
    where = f"{part.name}: {where}" if part.name else where
    return f"{where} in slot {errors[E_SLOT]} of the window {did} within {timeout_ns // 1_000_000} ms"
