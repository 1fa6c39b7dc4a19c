"""The scheduler `sw` on the CPU: the window on threads. Independent tasks run at once, dependent ones wait.

`compile_window` makes a program that is used like that of `compile_serial` and computes the same bits. Its participants
do not claim tiles but tasks, from one window (engine.py). The stream is that of `TileProgram.tasks` or
`TileComposite.tasks`, made task by task from the program as the window has room.

A tile has an arena from its first task to its last. So memory follows the tiles in flight, not the batch; a participant
that finishes a tile keeps its arena for the tile that it begins next, as the arena lies in its core's cache.

Conflicts between tasks of one tile are looked up in a table, which is made of the footprints of the first tile: kernels
touch the same places in every tile. Tasks of different tiles conflict never, or, if `tiles_are_independent` does not
hold for a program or for one of a composite's parts, always: each tile then waits for those before it, as it does when
the program runs serially. A kernel of unknown footprint is among these.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import njit

from brax_concurrent.backends import intrinsics, native
from brax_concurrent.backends.cpu_program import CpuProgram, content_hash, cores, with_runner
from brax_concurrent.backends.intrinsics import (
    atomic_add,
    atomic_store,
    call_kernel,
    fill_bytes,
    format_message,
    load_i64,
    monotonic_ns,
    stack_bytes,
    store_i64,
)
from brax_concurrent.backends.native import (
    DESC_ARENA_BYTES,
    DESC_ARENAS,
    DESC_CAPACITY,
    DESC_FIRST_OP,
    DESC_INTERLEAVE,
    DESC_MAGIC,
    DESC_ORDERED,
    DESC_PLAN,
    DESC_POISON,
    DESC_RECORDS,
    DESC_STATE_TILE_WORDS,
    DESC_STATE_TILES,
    DESC_STATE_WORDS,
    DESC_THREADS,
    DESC_TILE_WIDTH,
    DESC_TIMEOUT,
    DESC_WIDTH,
    DESC_WINDOW,
    JOB_DESC,
    JOB_DONE,
    JOB_MESSAGE,
    JOB_NEXT,
    JOB_STATE,
    NO_MEMORY,
    OK,
    STUCK,
    TILE,
    WORD,
    WRONG_VERSION,
    compile_callback,
    drop_reference,
    give_back_arena,
    some_lane_wants,
    source_hash,
    take_arena,
)
from brax_concurrent.scheduler import engine, tile_stream, window
from brax_concurrent.scheduler.engine import (
    LANE_WORDS,
    MESSAGE_BYTES,
    MOST,
    NOBODY,
    RECORD_RUNS,
    STATE_ENTRIES,
    STATE_KINDS,
    STATE_LANE,
    STATE_LANES,
    STATE_MASKS,
    STATE_MESSAGE,
    STATE_RETIRED,
    STATE_RUN,
    STATE_STATUS,
    STATE_TASK,
    STATE_TASKS,
    STATE_UNITS,
    STATE_UPSTREAM,
    choose,
    enter,
    finish,
    finished,
    grant,
    is_over,
    lock,
    lowest_slot,
    masks_at,
    note,
    record,
    start_next,
    stop,
    timeout_ns,
    unlock,
    wait,
    words_at,
)
from brax_concurrent.scheduler.serial import TileComposite, TileProgram, compile_composite, compile_serial
from brax_concurrent.scheduler.tile_stream import (
    ENTRY_ARENA,
    ENTRY_BUFFERS,
    ENTRY_DESC,
    ENTRY_LEFT,
    ENTRY_NUM_ENVS,
    ENTRY_TILE,
    ENTRY_UNIT,
    ENTRY_WORDS,
    GROUP_KIND,
    PLAN_NAMES,
    PLAN_TABLE,
    PLAN_WORDS,
    conflicts_of,
    name_of,
    next_task,
    release_arenas,
)
from brax_concurrent.scheduler.window import (
    ISSUED,
    MAX_SLOTS,
    NO_SLOT,
    WAITING,
    conflict_table,
    retire_slots,
    slot_bit,
    upstream_mask_of_kind,
)

NOTHING_ENDED = "brax_concurrent: nothing finished for %lld ms; it waits for "
FIRST_TASK = "kernel %s of tile %lld"
NEXT_TASK = ", kernel %s of tile %lld"
AND_OTHERS = " and others"
BATCH_BYTES, QUEUE_BYTES = WORD * MOST, WORD * MAX_SLOTS
_SHOWN = 3  # tasks that a message names


# --- the window --------------------------------------------------------------------------------


@njit(nogil=True)
def _fill(
    job: int,
    desc: int,
    state: int,
    upstream: np.ndarray,
    tasks: np.ndarray,
    kinds: np.ndarray,
    units: np.ndarray,
    entries: np.ndarray,
    masks: np.ndarray,
) -> None:
    """Let the stream's next tasks into the free slots."""
    ordered = load_i64(desc + WORD * DESC_ORDERED) != 0
    while True:
        occupied = masks[WAITING] | masks[ISSUED]
        slot = lowest_slot(~occupied) if ~occupied != np.uint64(0) else MAX_SLOTS
        if slot >= len(tasks):
            return
        entry = next_task(job, desc, state)
        if entry == 0:
            return
        kind, unit = load_i64(state + WORD * GROUP_KIND), load_i64(entry + WORD * ENTRY_UNIT)
        table = conflicts_of(desc, entry)
        mask = upstream_mask_of_kind(table, kinds, units, occupied, kind, unit)
        if ordered:
            for other in range(len(units)):
                if units[other] != unit:
                    mask |= slot_bit(other) & occupied
        upstream[slot], kinds[slot], units[slot], entries[slot] = mask, kind, unit, entry
        tasks[slot] = load_i64(state + WORD * STATE_TASK)
        store_i64(state + WORD * STATE_TASK, tasks[slot] + 1)
        masks[WAITING] |= slot_bit(slot)


@njit(nogil=True)
def _give_arena(job: int, desc: int, state: int, masks: np.ndarray, entry: int, arena: int) -> int:
    """Let a tile that begins have an arena: `arena`, if that is one. Returns the arena that the caller has left."""
    if load_i64(entry + WORD * ENTRY_ARENA) != 0:
        return arena
    if arena == 0:
        arena = take_arena(desc)
    if arena == 0:
        _stop(job, state, masks, NO_MEMORY)
        return 0
    program = load_i64(entry + WORD * ENTRY_DESC)
    if load_i64(program + WORD * DESC_POISON) != 0:
        fill_bytes(arena, 255, load_i64(program + WORD * DESC_ARENA_BYTES))
    store_i64(entry + WORD * ENTRY_ARENA, arena)
    return 0


@njit(nogil=True)
def _retire(
    job: int,
    desc: int,
    state: int,
    upstream: np.ndarray,
    tasks: np.ndarray,
    entries: np.ndarray,
    masks: np.ndarray,
    arena: int,
) -> int:
    """Retire what has finished, tasks and tiles. Returns the arena that the caller has then: `arena`, or a tile's."""
    done = finished(state)
    if done == np.uint64(0):
        return arena
    retire_slots(upstream, masks, done)
    recorded = load_i64(desc + WORD * DESC_RECORDS) != 0 and load_i64(state + WORD * STATE_STATUS) != STUCK
    while done != np.uint64(0):
        slot = lowest_slot(done)
        done &= ~slot_bit(slot)
        store_i64(state + WORD * STATE_RETIRED, load_i64(state + WORD * STATE_RETIRED) + 1)
        if recorded:
            buffer, capacity = load_i64(desc + WORD * DESC_RECORDS), load_i64(desc + WORD * DESC_CAPACITY)
            record(state, slot, tasks[slot], buffer, capacity)
        entry = entries[slot]
        left = load_i64(entry + WORD * ENTRY_LEFT) - 1
        store_i64(entry + WORD * ENTRY_LEFT, left)
        if left == 0:
            if arena != 0:
                give_back_arena(desc, arena)
            arena = load_i64(entry + WORD * ENTRY_ARENA)
            store_i64(entry + WORD * ENTRY_ARENA, 0)
            atomic_add(job + WORD * JOB_DONE, 1)
    return arena


@njit(nogil=True)
def _stop(job: int, state: int, masks: np.ndarray, status: int) -> None:
    """The run has failed: no more tasks issue, and nobody waits for the tiles that are left."""
    stop(state, masks, status)
    atomic_store(job + WORD * JOB_NEXT, load_i64(job + WORD * JOB_DONE))


@njit(nogil=True)
def _give_up(job: int, desc: int, state: int, kinds: np.ndarray, entries: np.ndarray, masks: np.ndarray) -> None:
    """End the run as STUCK, with a message that names the tasks that run."""
    _stop(job, state, masks, STUCK)
    text = state + WORD * STATE_MESSAGE
    store_i64(job + WORD * JOB_MESSAGE, text)
    length = format_message(text, MESSAGE_BYTES, NOTHING_ENDED, load_i64(desc + WORD * DESC_TIMEOUT) // 10**6, 0, 0, 0)
    running, shown = masks[ISSUED], 0
    while running != np.uint64(0) and length < MESSAGE_BYTES:
        slot = lowest_slot(running)
        running &= ~slot_bit(slot)
        entry, end, room = entries[slot], text + length, MESSAGE_BYTES - length
        name, tile = name_of(desc, entry, kinds[slot]), load_i64(entry + WORD * ENTRY_TILE)
        if shown == 0:
            length += format_message(end, room, FIRST_TASK, name, tile, 0, 0)
        elif shown < _SHOWN:
            length += format_message(end, room, NEXT_TASK, name, tile, 0, 0)
        elif shown == _SHOWN:
            length += format_message(end, room, AND_OTHERS, 0, 0, 0, 0)
        shown += 1


@njit(nogil=True)
def _run_batch(desc: int, state: int, kinds: np.ndarray, entries: np.ndarray, order: np.ndarray, lane: int) -> None:
    """Run the tasks that were granted to a lane, until someone takes the rest back."""
    recorded, begin = load_i64(desc + WORD * DESC_RECORDS) != 0, 0
    for index in range(len(order)):
        slot = order[index]
        if index != 0 and not start_next(state, lane, slot):
            return
        entry = entries[slot]
        op = load_i64(entry + WORD * ENTRY_DESC) + WORD * (DESC_FIRST_OP + 2 * kinds[slot])
        arena = load_i64(entry + WORD * ENTRY_ARENA)
        num_envs, first_env = load_i64(entry + WORD * ENTRY_NUM_ENVS), TILE * load_i64(entry + WORD * ENTRY_TILE)
        runs = some_lane_wants(arena, load_i64(op + WORD), num_envs - first_env)
        if recorded:
            begin = monotonic_ns()
        if runs:
            call_kernel(load_i64(op), arena, load_i64(entry + WORD * ENTRY_BUFFERS), first_env, num_envs)
        if recorded:
            note(state, slot, lane if runs else NOBODY, begin, monotonic_ns() if runs else begin)
        finish(state, lane, slot)


@njit(nogil=True)
def _work(job: int) -> int:
    """Take part in a run until it is over."""
    desc, state = load_i64(job + WORD * JOB_DESC), load_i64(job + WORD * JOB_STATE)
    size, masks = load_i64(desc + WORD * DESC_WINDOW), masks_at(state + WORD * STATE_MASKS, 2)
    upstream, tasks = masks_at(state + WORD * STATE_UPSTREAM, size), words_at(state + WORD * STATE_TASKS, size)
    kinds, units = words_at(state + WORD * STATE_KINDS, size), words_at(state + WORD * STATE_UNITS, size)
    entries, order = words_at(state + WORD * STATE_ENTRIES, size), words_at(stack_bytes(BATCH_BYTES), MOST)
    queue = words_at(stack_bytes(QUEUE_BYTES), size)
    records, unit, arena = load_i64(desc + WORD * DESC_RECORDS), -1, 0
    lock(state)
    lane = load_i64(state + WORD * STATE_LANES)
    if lane >= size:  # there is no work for more
        unlock(state)
        return OK
    enter(state)
    if lane == 0 and records != 0:
        store_i64(state + WORD * STATE_RUN, atomic_add(records + WORD * RECORD_RUNS, 1))
    while True:
        arena = _retire(job, desc, state, upstream, tasks, entries, masks, arena)
        slot = NO_SLOT
        if load_i64(state + WORD * STATE_STATUS) == OK:
            _fill(job, desc, state, upstream, tasks, kinds, units, entries, masks)
            slot = choose(state, upstream, tasks, units, masks, lane, unit)
        if slot != NO_SLOT:
            arena = _give_arena(job, desc, state, masks, entries[slot], arena)
            if load_i64(state + WORD * STATE_STATUS) != OK:
                continue
            unit = units[slot]
            count = grant(state, upstream, tasks, units, masks, order, queue, lane, slot)
            unlock(state)
            _run_batch(desc, state, kinds, entries, order[:count], lane)
            lock(state)
        elif is_over(state, masks):
            break
        elif not wait(state, load_i64(desc + WORD * DESC_TIMEOUT)) and load_i64(state + WORD * STATE_STATUS) != STUCK:
            _give_up(job, desc, state, kinds, entries, masks)
    status = load_i64(state + WORD * STATE_STATUS)
    if status != OK and masks[ISSUED] == np.uint64(0):
        release_arenas(job, desc, state)
    unlock(state)
    if arena != 0:
        give_back_arena(desc, arena)
    return status


def _make_participate(magic: int) -> Callable[[int], int]:
    # As in native.py: `magic` is in Numba's cache key and ties the code to the content of the files it is of.
    def participate(job: int) -> int:
        current = load_i64(load_i64(job + WORD * JOB_DESC) + WORD * DESC_MAGIC) == magic
        status = _work(job) if current else WRONG_VERSION
        drop_reference(job)
        return status

    return participate


@functools.cache
def _participate() -> tuple[int, Any]:
    """The magic of this version, and its compiled `participate`."""
    magic = source_hash(*(module.__file__ for module in (engine, tile_stream, window, native, intrinsics)), __file__)
    return magic, compile_callback(_make_participate(magic))


# --- programs ----------------------------------------------------------------------------------


def compile_window(
    program: TileProgram | TileComposite,
    *,
    threads: int = 0,
    window: int = 32,
    interleave: int = 0,
    poison: bool = False,
) -> CpuProgram:
    """The program for the native runner, whose tasks run out of order where their footprints allow it.

    The results are those of `compile_serial` or `compile_composite`, bit for bit, whatever the numbers below.

    Args:
      program: what to run.
      threads: on at most so many threads; 0: on all that there are.
      window: how many unfinished tasks to choose from, 1 to 64. With 1 they run in program order.
      interleave: tiles that go through the program side by side, see `TileProgram.tasks`; 0: as many as threads, but no
        more than the window has slots. Tiles that depend on each other go one after another, whatever it is.
      poison: fill the arena with NaN before each tile, to find kernels that read what was never written.

    A run fails if none of its kernels ends for 120 seconds, or for BRAX_CONCURRENT_TIMEOUT seconds if that is set in
    the environment when the program is made. The error names the kernels and tiles that it waited for; those go on
    running, and writing to the arrays. A kernel that the calling thread itself runs cannot be given up.

    Raises:
      ValueError: a number is out of range, the program has several steps, or see `build_program` and `build_composite`.
    """
    threads, window, interleave = (operator.index(number) for number in (threads, window, interleave))
    if not 1 <= window <= MAX_SLOTS:
        raise ValueError(f"window must be from 1 to {MAX_SLOTS}, got {window}")
    if interleave < 0:
        raise ValueError(f"interleave must not be negative, got {interleave}")
    parts, serial = in_program_order(program, threads, poison)
    ordered = not all(part.tiles_are_independent for part, _ in parts)
    if ordered:
        interleave = 1
    interleave = interleave or min(threads or cores(), window)
    tables = [op_conflicts(part) for part, _ in parts]
    plan, owners = _plan(parts, tables)
    tile_width = max((_width(table) for table in tables), default=1)
    timeout = timeout_ns()
    words = {
        DESC_THREADS: threads,
        DESC_ARENAS: 2 * (interleave + window),
        DESC_STATE_WORDS: STATE_LANE + LANE_WORDS * window + len(parts) + ENTRY_WORDS * (window + 1),
        DESC_STATE_TILE_WORDS: ENTRY_WORDS + 1,
        DESC_STATE_TILES: interleave,
        DESC_TILE_WIDTH: tile_width,
        DESC_WIDTH: min(tile_width, window) if ordered else window,
        DESC_WINDOW: window,
        DESC_INTERLEAVE: interleave,
        DESC_ORDERED: ordered,
        DESC_TIMEOUT: timeout,
        DESC_PLAN: int(plan.ctypes.data),
    }
    content = (serial.fingerprint, threads, window, interleave, ordered, timeout)
    fingerprint = content_hash("window", content, tuple(table.tobytes() for table in tables))
    return with_runner(serial, _participate(), words, fingerprint, [plan, *owners])


def in_program_order(
    program: TileProgram | TileComposite, threads: int, poison: bool
) -> tuple[list[tuple[TileProgram, str]], CpuProgram]:
    """What a window is made from: the parts, each with the prefix of its kernels' names, and the same in program order.

    Raises:
      ValueError: the program has several steps, or see `build_program` and `build_composite`.
    """
    if isinstance(program, TileComposite):
        parts = [(part.program, f"{part.name}.") for part in program.parts]
        serial = compile_composite(program, threads=threads, poison=poison)
    else:
        parts = [(program, "")]
        serial = compile_serial(program, threads=threads, poison=poison)
    if serial.steps > 1:
        raise ValueError(f"program: a window has one step of a program, got one of {serial.steps}")
    return parts, serial


def kernel_names(program: TileProgram, prefix: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """The addresses of the ops' names as C strings, and the strings."""
    names = [np.frombuffer(f"{prefix}{op.kernel.name}".encode() + b"\0", np.uint8) for op in program.ops]
    return np.array([name.ctypes.data for name in names], np.int64), names


def op_conflicts(program: TileProgram) -> np.ndarray:
    """Which ops of a tile must run in program order: (ops, ops) bool. Ops of equal footprints are compared once."""
    footprints = [task.footprint for task in program.tasks_of_tile(0, TILE)]
    place = {footprint: index for index, footprint in enumerate(dict.fromkeys(footprints))}
    index = np.array([place[footprint] for footprint in footprints], np.intp)
    return np.ascontiguousarray(conflict_table(list(place))[np.ix_(index, index)])


def _plan(parts: Sequence[tuple[TileProgram, str]], tables: Sequence[np.ndarray]) -> tuple[np.ndarray, list[object]]:
    """The PLAN_* words, and what they point to."""
    plan, owners = np.zeros((len(parts), PLAN_WORDS), np.int64), list[object](tables)
    for words, (program, prefix), table in zip(plan, parts, tables, strict=True):
        addresses, names = kernel_names(program, prefix)
        words[PLAN_TABLE], words[PLAN_NAMES] = table.ctypes.data, addresses.ctypes.data
        owners += [addresses, *names]
    return plan, owners


def _width(table: np.ndarray) -> int:
    """How many ops of a tile come equally late, at most: if there are more threads, the tile has no work for them."""
    levels: list[int] = []
    for index in range(len(table)):
        levels.append(1 + max((levels[older] for older in range(index) if table[older, index]), default=0))
    return max((levels.count(level) for level in set(levels)), default=1)
