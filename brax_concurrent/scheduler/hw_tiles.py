"""The scheduler `hw` on the CPU: a window for each thread, so that nobody waits for a lock.

`compile_hw` makes a program that is used like that of `compile_serial` and computes the same bits. A participant claims
a group of neighbouring tiles from the job's counter, and their tasks go through a window that is the participant's own.
Tiles of a group have an arena each and go through the program side by side, so that a kernel runs on all of them while
its code is in the instruction cache. On the one processor that was measured, a Xeon, that gained nothing: a group of
one was as fast as any for large robots and up to a tenth faster for small ones, as what a tile's kernels pass on then
stays in the first-level cache.

Of a program with `work` a participant claims more tiles at a time, and puts environments of similar work into the same
of them: hw_regroup.py. These tiles go one after another through the program.

What such a window issues when is known before: hw_order.py. So a task costs no more than in program order, but for a
word that says what the participant is at. By these words the others see, when no tile is left for them, whether those
that still work get on. When nothing begins for as long as the run allows, a kernel does not end, and the run is STUCK:
see engine.py.

Tiles that depend on each other go one after another on one thread, as they do serially.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numba import njit

from brax_concurrent.backends import intrinsics, native
from brax_concurrent.backends.cpu_program import CpuProgram, content_hash, cores, with_runner
from brax_concurrent.backends.intrinsics import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_kernel,
    compare_and_set,
    copy_bytes,
    fill_bytes,
    format_message,
    give_way,
    load_i64,
    monotonic_ns,
    stack_bytes,
    store_i64,
)
from brax_concurrent.backends.native import (
    DESC_ARENA_BYTES,
    DESC_ARENAS,
    DESC_BUFFERS,
    DESC_FIRST_OP,
    DESC_GROUP,
    DESC_INTERLEAVE,
    DESC_MAGIC,
    DESC_NUM_ENVS,
    DESC_OPS,
    DESC_PLAN,
    DESC_POISON,
    DESC_RECORDS,
    DESC_SCRATCH_BYTES,
    DESC_STATE_TILE_WORDS,
    DESC_STATE_TILES,
    DESC_STATE_WORDS,
    DESC_THREADS,
    DESC_TIMEOUT,
    DESC_WIDTH,
    DESC_WINDOW,
    JOB_BUFFERS,
    JOB_DESC,
    JOB_DONE,
    JOB_MESSAGE,
    JOB_NEXT,
    JOB_NUM_ENVS,
    JOB_REFERENCES,
    JOB_STATE,
    JOB_TILES,
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
from brax_concurrent.scheduler import hw_regroup, records
from brax_concurrent.scheduler.engine import timeout_ns
from brax_concurrent.scheduler.hw_order import POLICIES, TILE_BITS, issue_order
from brax_concurrent.scheduler.hw_regroup import GROUP_TILES, ORDER_BYTES, SCRATCH_BYTES, deal
from brax_concurrent.scheduler.records import add_row, number_run
from brax_concurrent.scheduler.serial import TileComposite, TileProgram
from brax_concurrent.scheduler.streams import (
    AND_OTHERS,
    FIRST_TASK,
    NEXT_TASK,
    NOTHING_ENDED,
    in_program_order,
    kernel_names,
    op_conflicts,
)
from brax_concurrent.scheduler.window import MAX_SLOTS

MOST_TILES = 16  # of a group
MOST_THREADS = 256

# A run's state: int64 words, zeroed at the start. The first two are those of records.py.
STATE_LANES = records.STATE_LANES  # participants so far
STATE_STATUS = 8  # OK, or _ENDING and STUCK
STATE_MESSAGE = 16  # a C string
STATE_LANE = 80  # LANE_WORDS for each participant
MESSAGE_BYTES = WORD * (STATE_LANE - STATE_MESSAGE)
LANE_AT = 0  # the task that it is at: part, op, 1 + the tile; 0: none
LANE_WORDS = 8
_AT_PART, _AT_OP = 48, 32  # the places of these in the word
_ENDING = 5  # a status: somebody writes the message
# The plan: for each part
PLAN_ORDERS = 0  # address of the orders of groups of 1, 2, .. tiles, one after another
PLAN_NAMES = 1  # address of the addresses of its ops' names, C strings
PLAN_WORK = 2  # which of its buffers environments are regrouped by; -1: they are not
PLAN_WORDS = 3
# What a participant has claimed, on its stack
OWN_PART, OWN_DESC, OWN_BUFFERS, OWN_NUM_ENVS = 0, 1, 2, 3
OWN_TILE = 4  # the first, among the part's
OWN_TASK = 5  # the first, in the stream
OWN_TILES = 6  # how many
OWN_LANE, OWN_RUN = 7, 8
OWN_ARENAS = 9  # addresses
OWN_BYTES = WORD * (OWN_ARENAS + MOST_TILES)

_SPINS = 64  # looks at a word before giving way to another thread
_SHOWN = 3  # tasks that a message names


# --- compiled code -----------------------------------------------------------------------------


@njit(nogil=True)
def _find_part(job: int, desc: int, own: int, tile: int) -> int:
    """Say of which part a tile is, counted on from part to part; returns how many tiles of it are left from there."""
    buffers, num_envs = load_i64(job + WORD * JOB_BUFFERS), load_i64(job + WORD * JOB_NUM_ENVS)
    part, program, task = 0, desc, 0
    if load_i64(desc + WORD * DESC_NUM_ENVS) != 0:
        pair = desc + WORD * DESC_FIRST_OP
        program, num_envs = load_i64(pair), load_i64(pair + WORD)
        while tile * TILE >= num_envs:
            tiles = (num_envs + TILE - 1) // TILE
            tile -= tiles
            task += tiles * load_i64(program + WORD * DESC_OPS)
            buffers += WORD * load_i64(program + WORD * DESC_BUFFERS)
            part += 1
            pair += 2 * WORD
            program, num_envs = load_i64(pair), load_i64(pair + WORD)
    store_i64(own + WORD * OWN_PART, part)
    store_i64(own + WORD * OWN_DESC, program)
    store_i64(own + WORD * OWN_BUFFERS, buffers)
    store_i64(own + WORD * OWN_NUM_ENVS, num_envs)
    store_i64(own + WORD * OWN_TILE, tile)
    store_i64(own + WORD * OWN_TASK, task + tile * load_i64(program + WORD * DESC_OPS))
    return (num_envs + TILE - 1) // TILE - tile


@njit(nogil=True)
def _claim(job: int, desc: int, own: int, arenas: int) -> bool:
    """Take the next group of tiles, of one part, no more than there is memory for; False if none are left.

    Towards the end groups are smaller, so that participants end together.
    """
    tiles = load_i64(job + WORD * JOB_TILES)
    while True:
        first = atomic_load(job + WORD * JOB_NEXT)
        if first >= tiles:
            return False
        left, part = _find_part(job, desc, own, first), load_i64(own + WORD * OWN_PART)
        regrouped = load_i64(load_i64(desc + WORD * DESC_PLAN) + WORD * (PLAN_WORDS * part + PLAN_WORK)) >= 0
        count = min(left, GROUP_TILES if regrouped else arenas)
        participants = max(atomic_load(job + WORD * JOB_REFERENCES) - 1, 1)
        count = min(count, max((tiles - first) // (2 * participants), 1))
        if compare_and_set(job + WORD * JOB_NEXT, first, first + count) == 1:
            store_i64(own + WORD * OWN_TILES, count)
            return True


@njit(nogil=True)
def _run_group(desc: int, state: int, own: int) -> bool:
    """Run the tasks of the claimed tiles in the order in which the window issues them; False if the run is over."""
    program, tiles = load_i64(own + WORD * OWN_DESC), load_i64(own + WORD * OWN_TILES)
    ops = load_i64(program + WORD * DESC_OPS)
    plan = load_i64(desc + WORD * DESC_PLAN) + WORD * PLAN_WORDS * load_i64(own + WORD * OWN_PART)
    if load_i64(plan + WORD * PLAN_WORK) >= 0:
        return _run_regrouped(desc, state, own, plan)
    order = load_i64(plan + WORD * PLAN_ORDERS) + WORD * ops * (tiles * (tiles - 1) // 2)
    for place in range(tiles):
        _poison(program, load_i64(own + WORD * (OWN_ARENAS + place)))
    return _run_tasks(desc, state, own, order, order + WORD * ops * tiles, 0, own + WORD * OWN_ARENAS)


@njit(nogil=True)
def _run_regrouped(desc: int, state: int, own: int, plan: int) -> bool:
    """The same with environments of similar work in the same tiles, which share one arena."""
    program, buffers = load_i64(own + WORD * OWN_DESC), load_i64(own + WORD * OWN_BUFFERS)
    tiles, first_env = load_i64(own + WORD * OWN_TILES), TILE * load_i64(own + WORD * OWN_TILE)
    arenas, order = own + WORD * OWN_ARENAS, load_i64(plan + WORD * PLAN_ORDERS)
    stop = order + WORD * load_i64(program + WORD * DESC_OPS)
    environments = load_i64(arenas) + load_i64(program + WORD * DESC_ARENA_BYTES)
    envs = min(TILE * tiles, load_i64(own + WORD * OWN_NUM_ENVS) - first_env)
    work = load_i64(buffers + WORD * load_i64(plan + WORD * PLAN_WORK))
    deal(work, first_env, envs, environments + ORDER_BYTES)
    for place in range(tiles):
        _poison(program, load_i64(arenas))
        copy_bytes(environments, environments + ORDER_BYTES * (1 + place), ORDER_BYTES)
        if not _run_tasks(desc, state, own, order, stop, place, arenas):
            return False
    return True


@njit(nogil=True)
def _poison(program: int, arena: int) -> None:
    if load_i64(program + WORD * DESC_POISON) != 0:
        fill_bytes(arena, 255, load_i64(program + WORD * DESC_ARENA_BYTES))


@njit(nogil=True)
def _run_tasks(desc: int, state: int, own: int, order: int, stop: int, first_place: int, arenas: int) -> bool:
    """Run the tasks of an order, from the address `order` to `stop`; False if the run is over.

    The order counts the group's tiles from `first_place` on; `arenas` has an arena's address for each of these.
    """
    program, part = load_i64(own + WORD * OWN_DESC), load_i64(own + WORD * OWN_PART)
    lane = load_i64(own + WORD * OWN_LANE)
    buffers, num_envs = load_i64(own + WORD * OWN_BUFFERS), load_i64(own + WORD * OWN_NUM_ENVS)
    ops, pairs = load_i64(program + WORD * DESC_OPS), program + WORD * DESC_FIRST_OP
    first = load_i64(own + WORD * OWN_TILE)
    here = state + WORD * (STATE_LANE + LANE_WORDS * lane + LANE_AT)
    buffer = load_i64(desc + WORD * DESC_RECORDS)
    while order != stop:
        word = load_i64(order)
        order += WORD
        op, own_place = word >> TILE_BITS, word & ((1 << TILE_BITS) - 1)
        arena, place = load_i64(arenas + WORD * own_place), first_place + own_place
        atomic_store(here, (part << _AT_PART) + (op << _AT_OP) + first + place + 1)
        if atomic_load(state + WORD * STATE_STATUS) != OK:
            return False
        kernel, predicate = load_i64(pairs + 2 * WORD * op), load_i64(pairs + 2 * WORD * op + WORD)
        runs = predicate < 0 or some_lane_wants(arena, predicate, num_envs - TILE * (first + place))
        begin = monotonic_ns() if buffer != 0 else 0
        if runs:
            call_kernel(kernel, arena, buffers, TILE * (first + place), num_envs)
        if buffer != 0 and atomic_load(state + WORD * STATE_STATUS) == OK:  # else it may be gone
            task, end = load_i64(own + WORD * OWN_TASK) + place * ops + op, monotonic_ns() if runs else begin
            add_row(desc, buffer, task, lane if runs else -1, begin, end, load_i64(own + WORD * OWN_RUN))
    return True


@njit(nogil=True)
def _progress(state: int) -> int:
    """A number that is another one as soon as a participant is at another task."""
    mixed = 0
    for lane in range(min(atomic_load(state + WORD * STATE_LANES), MOST_THREADS)):
        mixed = mixed * 31 + atomic_load(state + WORD * (STATE_LANE + LANE_WORDS * lane + LANE_AT))
    return mixed


@njit(nogil=True)
def _wait_for_others(job: int, desc: int, state: int) -> int:
    """Wait until all tiles are finished, or the run is over; its status."""
    tiles, timeout = load_i64(job + WORD * JOB_TILES), load_i64(desc + WORD * DESC_TIMEOUT)
    waited, spins, seen, before = 0, 0, -1, 0
    while atomic_load(job + WORD * JOB_DONE) < tiles:
        status = atomic_load(state + WORD * STATE_STATUS)
        if status == STUCK:
            return STUCK
        spins += 1
        if spins < _SPINS:
            continue
        spins = 0
        give_way()
        now, progress = monotonic_ns(), _progress(state)
        # As in engine.py: a process that was stopped for a while has not waited.
        waited = waited + min(now - before, timeout // 16 + 1) if progress == seen else 0
        before, seen = now, progress
        if waited > timeout and compare_and_set(state + WORD * STATE_STATUS, OK, _ENDING) == 1:
            _say_what_runs(job, desc, state)
            atomic_store(state + WORD * STATE_STATUS, STUCK)
    return OK


@njit(nogil=True)
def _say_what_runs(job: int, desc: int, state: int) -> None:
    """Write the message of a run that is given up, with the tasks that participants are at."""
    text = state + WORD * STATE_MESSAGE
    length = format_message(text, MESSAGE_BYTES, NOTHING_ENDED, load_i64(desc + WORD * DESC_TIMEOUT) // 10**6, 0, 0, 0)
    shown = 0
    for lane in range(min(atomic_load(state + WORD * STATE_LANES), MOST_THREADS)):
        at = atomic_load(state + WORD * (STATE_LANE + LANE_WORDS * lane + LANE_AT))
        if at == 0 or length >= MESSAGE_BYTES:
            continue
        end, room, tile = text + length, MESSAGE_BYTES - length, (at & ((1 << _AT_OP) - 1)) - 1
        plan = load_i64(desc + WORD * DESC_PLAN) + WORD * PLAN_WORDS * (at >> _AT_PART)
        op = (at >> _AT_OP) & ((1 << (_AT_PART - _AT_OP)) - 1)
        name = load_i64(load_i64(plan + WORD * PLAN_NAMES) + WORD * op)
        if shown == 0:
            length += format_message(end, room, FIRST_TASK, name, tile, 0, 0)
        elif shown < _SHOWN:
            length += format_message(end, room, NEXT_TASK, name, tile, 0, 0)
        elif shown == _SHOWN:
            length += format_message(end, room, AND_OTHERS, 0, 0, 0, 0)
        shown += 1
    atomic_store(job + WORD * JOB_MESSAGE, text)


@njit(nogil=True)
def _take_arenas(job: int, desc: int, own: int) -> int:
    """An arena for each tile of a group, or as many as there is memory for."""
    wanted = min(load_i64(desc + WORD * DESC_GROUP), load_i64(job + WORD * JOB_TILES))
    for place in range(wanted):
        arena = take_arena(desc)
        if arena == 0:
            return place
        store_i64(own + WORD * (OWN_ARENAS + place), arena)
    return wanted


@njit(nogil=True)
def _work(job: int) -> int:
    """Claim groups of tiles and run them until none are left, then wait for those that others have claimed."""
    if atomic_load(job + WORD * JOB_NEXT) >= load_i64(job + WORD * JOB_TILES):
        return OK  # late: touch nothing but the job
    desc, state, own = load_i64(job + WORD * JOB_DESC), load_i64(job + WORD * JOB_STATE), stack_bytes(OWN_BYTES)
    arenas = _take_arenas(job, desc, own)
    if arenas == 0:
        return NO_MEMORY
    more = _claim(job, desc, own, arenas)
    if more:
        lane = atomic_add(state + WORD * STATE_LANES, 1)
        store_i64(own + WORD * OWN_LANE, lane)
        store_i64(own + WORD * OWN_RUN, number_run(desc, state, lane))
        while more:
            if not _run_group(desc, state, own):
                break
            atomic_add(job + WORD * JOB_DONE, load_i64(own + WORD * OWN_TILES))
            more = _claim(job, desc, own, arenas)
        atomic_store(state + WORD * (STATE_LANE + LANE_WORDS * lane + LANE_AT), 0)
    for place in range(arenas):
        give_back_arena(desc, load_i64(own + WORD * (OWN_ARENAS + place)))
    return _wait_for_others(job, desc, state)


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
    magic = source_hash(records.__file__, native.__file__, intrinsics.__file__, hw_regroup.__file__, __file__)
    return magic, compile_callback(_make_participate(magic))


# --- programs ----------------------------------------------------------------------------------


def compile_hw(
    program: TileProgram | TileComposite,
    *,
    threads: int = 0,
    window: int = 32,
    policy: str = "oldest",
    tiles: int = 1,
    poison: bool = False,
) -> CpuProgram:
    """The program for the native runner, whose threads have a window each.

    The results are those of `compile_serial` or `compile_composite`, bit for bit, whatever the numbers below.

    Args:
      program: what to run. By `work`, if it has that, environments are regrouped.
      threads: on at most so many threads; 0: on all that there are.
      window: how many unfinished tasks to choose from, 1 to 64.
      policy: which of the ready tasks issues, see `hw_order.POLICIES`.
      tiles: in a thread's window at once, 1 to 16; where environments are regrouped 1.
      poison: fill the arena with NaN before each tile, to find kernels that read what was never written.

    A run fails if nothing begins for 120 seconds while a thread waits for the others, or for BRAX_CONCURRENT_TIMEOUT
    seconds if that is set in the environment when the program is made. The error names the kernels and tiles that it
    waited for; those go on running, and writing to the arrays. A kernel that the calling thread itself runs cannot be
    given up.

    Raises:
      ValueError: an argument is out of range, the program has several steps or regroups environments of tiles that
        depend on each other, or see `build_program` and `build_composite`.
    """
    threads, window, tiles = (operator.index(number) for number in (threads, window, tiles))
    if not 1 <= window <= MAX_SLOTS:
        raise ValueError(f"window must be from 1 to {MAX_SLOTS}, got {window}")
    if not 1 <= tiles <= MOST_TILES:
        raise ValueError(f"tiles must be from 1 to {MOST_TILES}, got {tiles}")
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    works = [part.program.work for part in program.parts] if isinstance(program, TileComposite) else [program.work]
    parts, serial = in_program_order(_without_work(program), threads, poison)
    ordered = not all(part.tiles_are_independent for part, _ in parts)
    if ordered and any(works):
        raise ValueError("program: its tiles depend on each other, so that environments cannot be regrouped")
    group = 1 if ordered else tiles
    plan, owners = _plan(parts, works, group, window, policy)
    timeout = timeout_ns()
    words = {
        DESC_ARENAS: 2 * group * (threads or cores()),
        DESC_STATE_WORDS: STATE_LANE,
        DESC_STATE_TILE_WORDS: LANE_WORDS,
        DESC_STATE_TILES: MOST_THREADS,
        DESC_WIDTH: MOST_THREADS,
        DESC_WINDOW: window,
        DESC_INTERLEAVE: 1,  # by which tasks are numbered
        DESC_GROUP: group,
        DESC_TIMEOUT: timeout,
        DESC_PLAN: int(plan.ctypes.data),
        DESC_SCRATCH_BYTES: SCRATCH_BYTES if any(works) else 0,
    }
    content = (serial.fingerprint, int(serial.desc[DESC_THREADS]), window, policy, group, timeout, *works)
    return with_runner(serial, _participate(), words, content_hash("hw", content), [plan, *owners])


def _without_work(program: TileProgram | TileComposite) -> TileProgram | TileComposite:
    if isinstance(program, TileProgram):
        return replace(program, work="")
    return replace(
        program, parts=tuple(replace(part, program=replace(part.program, work="")) for part in program.parts)
    )


def _plan(
    parts: Sequence[tuple[TileProgram, str]], works: Sequence[str], group: int, window: int, policy: str
) -> tuple[np.ndarray, list[object]]:
    """The PLAN_* words, and what they point to."""
    plan, owners = np.zeros((len(parts), PLAN_WORDS), np.int64), list[object]()
    for words, (program, prefix), work in zip(plan, parts, works, strict=True):
        table, kernels = op_conflicts(program), [op.kernel.fingerprint for op in program.ops]
        orders = [issue_order(table, kernels, tiles, window, policy) for tiles in range(1, group + 1)]
        order = np.concatenate(orders)
        addresses, names = kernel_names(program, prefix)
        words[[PLAN_ORDERS, PLAN_NAMES]] = order.ctypes.data, addresses.ctypes.data
        words[PLAN_WORK] = [spec.name for spec in program.layout.buffers].index(work) if work else -1
        owners += [order, addresses, *names]
    return plan, owners
