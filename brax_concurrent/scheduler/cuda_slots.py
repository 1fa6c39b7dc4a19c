"""CUDA streams as the lanes of a window, whatever its tasks are: slots, streams, and the events between them.

A newcomer is put onto a CUDA stream at once: the stream that ends with a task it waits for, where the order is there
already, or else the stream that has been idle longest, with an event for every other task that it waits for. So the
GPU, not the host, waits. An event costs the host as much as a third of a launch: one is recorded only where another
stream waits for it, and behind every few tasks of a stream. When an event is done, so is all that came before it on its
stream, and those slots are free. When none is free the host polls; that is the only wait, and it ends with an error
after a time that the caller sets.

A *window* here is the tuple of arrays that `new_window` makes. Streams and events come from a pool
(backends/cuda_pool.py); lane 0 is the caller's own stream. All of this is compiled. An error is the driver's code, or
one of those below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from brax_concurrent.backends.cuda_calls import (
    F_QUERY,
    F_RECORD,
    F_WAIT,
    NOT_READY,
    error_text,
    query_event,
    record_event,
    wait_event,
)
from brax_concurrent.backends.cuda_pool import (
    POOL_EVENTS,
    POOL_FORK,
    POOL_JOINS,
    POOL_STREAMS,
    find_pool,
    lock_pool,
)
from brax_concurrent.backends.cuda_program import MAX_STREAMS, MAX_WINDOW
from brax_concurrent.backends.intrinsics import give_way, load_i64, monotonic_ns, pointer, store_i64
from brax_concurrent.backends.native import WORD
from brax_concurrent.scheduler.engine import TIMEOUT_VARIABLE
from brax_concurrent.scheduler.window import NO_SLOT, direct_mask, free_slot, oldest_slot, retire_mask, slot_bit

TIMED_OUT, NO_MEMORY, NO_POOL, BUSY_POOL = -1, -2, -3, -4  # beside the driver's error codes, which are positive

# A window's state: int64 words, first rows of MAX_WINDOW words.
ROW_LANES, ROW_ORDERS, ROW_UPSTREAM = 0, 1, 2
_TAILS = 3 * MAX_WINDOW
_MASKS = _TAILS + MAX_STREAMS
STATE_WORDS = _MASKS + 8
OCCUPIED, MARKED, FORKED = 0, 1, 2  # of the masks: slots with a task; those with an event behind it; streams in use
_MARKS = 4  # events that are recorded anyway while a window fills once


def failure_text(error: int, where: str, timeout: int, explain: int) -> str:
    """What an error says to a user.

    Args:
        error: a code.
        where: the task that it came up with.
        timeout: nanoseconds that were waited, if the host waited.
        explain: address of cuGetErrorString.
    """
    if error == NO_MEMORY:
        return "no memory for a call"
    if error == NO_POOL:
        return "there are no CUDA streams for the current GPU: it was not in use when the program was made"
    seconds = timeout * 1e-9
    if error == BUSY_POOL:
        return f"another call kept the CUDA streams for {seconds:g} s"
    if error == TIMED_OUT:
        return f"{where} did not end within {seconds:g} s ({TIMEOUT_VARIABLE})"
    return f"launch of {where}: {error_text(explain, error)} (error {error})"


@njit
def row_at(state: int, row: int, count: int) -> np.ndarray:
    """The first words of one of a state's rows."""
    return carray(pointer(state + WORD * MAX_WINDOW * row), (count,), np.int64)


@njit
def new_window(state: int, size: int, streams: int) -> Any:
    """An empty window of so many slots on so many streams, in STATE_WORDS words.

    Returns:
        lanes (size,) int64: the stream of each slot's task. orders (size,) int64: how many were put in before it.
        upstream (size,) uint64: whom it waits for, see window.py. tails (streams,) int64: the order of each stream's
        last task if that may be unfinished, or -1. masks (3,) uint64.
    """
    lanes, orders = row_at(state, ROW_LANES, size), row_at(state, ROW_ORDERS, size)
    upstream = row_at(state, ROW_UPSTREAM, size).view(np.uint64)
    tails = carray(pointer(state + WORD * _TAILS), (streams,), np.int64)
    masks = carray(pointer(state + WORD * _MASKS), (3,), np.uint64)
    lanes[:], orders[:], upstream[:], tails[:], masks[:] = 0, -1, 0, -1, 0
    return lanes, orders, upstream, tails, masks


@njit
def take_pool(table: int, functions: int, timeout: int) -> Any:
    """(the current GPU's pool, locked, and 0), or (0, an error). Give it back with `unlock_pool`."""
    pool = find_pool(table, functions)
    if pool == 0:
        return 0, NO_POOL
    if not lock_pool(pool, timeout):
        return 0, BUSY_POOL
    return pool, 0


@njit
def fork(functions: int, pool: int, window: Any, stream: int) -> int:
    """Make the caller's stream lane 0: what is on it now is finished before any task begins. 0 or an error."""
    masks = window[4]
    masks[FORKED] = slot_bit(0)
    store_i64(pool + WORD * POOL_STREAMS, stream)
    return record_event(load_i64(functions + WORD * F_RECORD), load_i64(pool + WORD * POOL_FORK), stream)


@njit
def join(functions: int, pool: int, window: Any, stream: int) -> int:
    """Let the caller's stream wait for the others, also after an error; 0 or the first error."""
    record, wait = load_i64(functions + WORD * F_RECORD), load_i64(functions + WORD * F_WAIT)
    tails, masks, error = window[3], window[4], 0
    for lane in range(1, len(tails)):
        if masks[FORKED] & slot_bit(lane) != np.uint64(0):
            event = load_i64(pool + WORD * (POOL_JOINS + lane))
            late = record_event(record, event, load_i64(pool + WORD * (POOL_STREAMS + lane)))
            late = wait_event(wait, stream, event) if late == 0 else late
            error = late if error == 0 else error
    return error


@njit
def stream_of(pool: int, window: Any, slot: int) -> int:
    """The CUDA stream of a slot's task."""
    return load_i64(pool + WORD * (POOL_STREAMS + window[0][slot]))


@njit
def _last_of_lane(window: Any, lane: int) -> int:
    """The slot of the newest task of a stream."""
    lanes, orders, _, _, masks = window
    last = NO_SLOT
    for slot in range(len(orders)):
        ours = masks[OCCUPIED] & slot_bit(slot) != np.uint64(0) and lanes[slot] == lane
        if ours and (last == NO_SLOT or orders[slot] > orders[last]):
            last = slot
    return last


@njit
def _await_slots(functions: int, pool: int, window: Any, chosen: int, timeout: int) -> Any:
    """(slots whose tasks have finished, and 0), or (those that were waited for, an error).

    The host waits for the event behind the chosen slot's task; if there is none it records one behind its stream.
    """
    lanes, orders, _, _, masks = window
    error = NOT_READY
    if masks[MARKED] & slot_bit(chosen) == np.uint64(0):
        chosen = _last_of_lane(window, lanes[chosen])
        event = load_i64(pool + WORD * (POOL_EVENTS + chosen))
        late = record_event(load_i64(functions + WORD * F_RECORD), event, stream_of(pool, window, chosen))
        error = late if late != 0 else NOT_READY
    done = np.uint64(0)
    for slot in range(len(orders)):
        if lanes[slot] == lanes[chosen] and orders[slot] <= orders[chosen]:
            done |= slot_bit(slot)
    done &= masks[OCCUPIED]
    event, start = load_i64(pool + WORD * (POOL_EVENTS + chosen)), np.int64(0)
    while error == NOT_READY:
        error = query_event(load_i64(functions + WORD * F_QUERY), event)
        if error == NOT_READY:
            now = monotonic_ns()
            start = now if start == 0 else start
            if now - start > timeout:
                error = TIMED_OUT
            give_way()
    return done, error


@njit
def make_room(functions: int, pool: int, window: Any, timeout: int) -> Any:
    """(NO_SLOT, 0) when at least one slot is free, or (the slot of the oldest task waited for, an error).

    `timeout` is in nanoseconds.
    """
    orders, masks = window[1], window[4]
    if free_slot(masks[OCCUPIED], len(orders)) != NO_SLOT:
        return NO_SLOT, 0
    chosen = oldest_slot(orders, masks[OCCUPIED] & masks[MARKED])
    if chosen == NO_SLOT:
        chosen = oldest_slot(orders, masks[OCCUPIED])
    return await_slot(functions, pool, window, chosen, timeout)


@njit
def await_slot(functions: int, pool: int, window: Any, chosen: int, timeout: int) -> Any:
    """Wait for a slot's task, and free the slots of all that have finished then; what it returns is `make_room`'s."""
    lanes, orders, upstream, tails, masks = window
    done, error = _await_slots(functions, pool, window, chosen, timeout)
    if error != 0:
        return oldest_slot(orders, done), error
    for slot in range(len(orders)):
        if done & slot_bit(slot) != np.uint64(0) and tails[lanes[slot]] == orders[slot]:
            tails[lanes[slot]] = -1
    retire_mask(upstream, done)
    masks[OCCUPIED] &= ~done
    masks[MARKED] &= ~done
    return NO_SLOT, 0


@njit
def _choose_lane(window: Any, direct: Any, near: bool) -> int:
    """The stream for a task: one that ends with a task it waits for, the newest, else the one that is idle longest.

    With `near`, the stream of the newest task that it waits for, whatever came behind that.
    """
    lanes, orders, _, tails, _ = window
    chosen, newest = -1, -1
    for slot in range(len(orders)):
        last = near or tails[lanes[slot]] == orders[slot]
        if direct & slot_bit(slot) != np.uint64(0) and last and orders[slot] > newest:
            chosen, newest = lanes[slot], orders[slot]
    if chosen >= 0:
        return chosen
    best = 0
    for lane in range(1, len(tails)):
        if tails[lane] < tails[best]:
            best = lane
    return best


@njit
def admit(functions: int, pool: int, window: Any, mask: Any, near: bool) -> Any:
    """Give the next task a free slot and a stream, and let the stream wait for what the task waits for.

    Args:
        mask: its upstream mask.
        near: whether to stay on the stream of the newest task that it waits for, which needs the fewest events, or to
            leave it where something else has come behind that task.

    Returns:
        The slot, and 0 or an error. The task is to be launched on `stream_of` the slot.
    """
    lanes, orders, upstream, tails, masks = window
    record, wait = load_i64(functions + WORD * F_RECORD), load_i64(functions + WORD * F_WAIT)
    direct = direct_mask(upstream, mask)
    lane = _choose_lane(window, direct, near)
    stream = load_i64(pool + WORD * (POOL_STREAMS + lane))
    slot, error = free_slot(masks[OCCUPIED], len(orders)), np.int64(0)
    if masks[FORKED] & slot_bit(lane) == np.uint64(0):
        error = wait_event(wait, stream, load_i64(pool + WORD * POOL_FORK))
    for old in range(len(orders)):
        if direct & slot_bit(old) != np.uint64(0) and lanes[old] != lane and error == 0:
            event = load_i64(pool + WORD * (POOL_EVENTS + old))
            if masks[MARKED] & slot_bit(old) == np.uint64(0):  # behind whatever its stream was given since
                error = record_event(record, event, load_i64(pool + WORD * (POOL_STREAMS + lanes[old])))
                masks[MARKED] |= slot_bit(old)
            error = wait_event(wait, stream, event) if error == 0 else error
    order = orders.max() + 1
    lanes[slot], orders[slot], upstream[slot], tails[lane] = lane, order, mask, order
    masks[OCCUPIED] |= slot_bit(slot)
    masks[FORKED] |= slot_bit(lane)
    return slot, error


@njit
def mark(functions: int, pool: int, window: Any, slot: int) -> int:
    """The slot's task has been launched: record an event behind it if it is time for one. 0 or an error."""
    _, orders, _, _, masks = window
    if (orders[slot] + 1) % max(len(orders) // _MARKS, 1) != 0:
        return 0
    masks[MARKED] |= slot_bit(slot)
    event = load_i64(pool + WORD * (POOL_EVENTS + slot))
    return record_event(load_i64(functions + WORD * F_RECORD), event, stream_of(pool, window, slot))
