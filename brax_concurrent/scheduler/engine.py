"""A window at work on threads: what the engines for tiles (streams.py) and for lists of tasks (task_list.py) share.

A run's *state* lies in its job, so that threads of any kind can take part: a lock, the window of scheduler/window.py,
and a *lane* for each participant. Under the lock a participant retires what has finished, lets newcomers into the
window, and is granted the oldest ready task; it runs that without the lock.

Tasks may take less time than the lock does. So a grant is a *batch*: after its first task come further ones that wait
for none but those before them in the batch, in program order, in which the lane runs them. What a lane holds and has
not started is no secret: a participant that finds no task ready takes it back if it has become ready. It also sees,
without the lock, what other lanes have finished within a batch. Hence a batch delays no task that another thread could
run.

A participant that finds nothing counts retirements while it waits. When nothing retires for as long as the run allows,
a kernel does not end, and the run ends as STUCK. Nothing can interrupt the kernel itself; whoever runs it is stuck with
it, and the others report it.
"""

from __future__ import annotations

import os

import numpy as np
from numba import carray, njit

from brax_concurrent.backends.intrinsics import (
    atomic_add,
    atomic_exchange,
    atomic_load,
    atomic_store,
    compare_and_set,
    give_way,
    load_i64,
    lowest_bit,
    monotonic_ns,
    pointer,
    store_i64,
)
from brax_concurrent.backends.native import OK, STUCK, WORD
from brax_concurrent.scheduler.window import (
    ISSUED,
    MAX_SLOTS,
    NO_SLOT,
    WAITING,
    issue_slot,
    ready_mask,
    slot_bit,
)

# The state: int64 words, zeroed at the start. What threads fight over has cache lines of its own.
STATE_LOCK = 0
STATE_READY = 8  # mask of the ready tasks that nobody runs, all ones when it is time to leave; read without the lock
STATE_LANES = 9  # participants that have come; read without the lock
STATE_IDLE = 16  # participants that wait for a task
STATE_STATUS = 17  # OK, or why no more tasks issue
STATE_RETIRED = 18  # tasks that have finished or were skipped
STATE_TASK = 19  # the stream's next task
STATE_RUN = 20  # number of this run in the buffer of records
STATE_MASKS = 21  # `masks` of window.py, two words
STATE_ENGINE = 24  # 16 words for the engine's own use
STATE_UPSTREAM = 40  # `upstream` and `tasks` of window.py
STATE_TASKS = STATE_UPSTREAM + MAX_SLOTS
STATE_KINDS = STATE_TASKS + MAX_SLOTS  # what the engine keeps of the task in each slot
STATE_UNITS = STATE_KINDS + MAX_SLOTS  # what it works on
STATE_ENTRIES = STATE_UNITS + MAX_SLOTS
STATE_RAN = STATE_ENTRIES + MAX_SLOTS  # if the run is recorded: the lane, the begin and the end
STATE_BEGIN = STATE_RAN + MAX_SLOTS
STATE_END = STATE_BEGIN + MAX_SLOTS
STATE_MESSAGE = STATE_END + MAX_SLOTS  # a C string
STATE_LANE = STATE_MESSAGE + 64  # LANE_WORDS for each lane; a run has at most as many lanes as slots
MESSAGE_BYTES = 64 * WORD

LANE_LEFT = 0  # mask of the slots that the lane holds and has not started; who takes them back sets it to 0
LANE_DONE = 1  # mask of the slots that it has finished and nobody has retired
LANE_WORDS = 8

MOST = 16  # tasks of a batch
LEAVE = -1  # STATE_READY: all ones
NOBODY = -1  # the lane of a task that was skipped
_SPINS = 64  # looks at a word before giving way to another thread

DEFAULT_TIMEOUT = 120.0
TIMEOUT_VARIABLE = "BRAX_CONCURRENT_TIMEOUT"


def timeout_ns() -> int:
    """Nanoseconds in which some task of a run must finish: BRAX_CONCURRENT_TIMEOUT in seconds, or 120 s.

    Raises:
      ValueError: the variable is no positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text) if text else DEFAULT_TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"{TIMEOUT_VARIABLE} must be a positive number of seconds, got {text!r}")
    return max(int(seconds * 1e9), 1)


# --- memory ------------------------------------------------------------------------------------


@njit(nogil=True)
def masks_at(address: int, count: int) -> np.ndarray:
    """So many uint64 at an address as an array."""
    return carray(pointer(address), count, np.uint64)


@njit(nogil=True)
def words_at(address: int, count: int) -> np.ndarray:
    """So many int64 at an address as an array."""
    return carray(pointer(address), count, np.int64)


@njit(nogil=True)
def lock(state: int) -> None:
    """Wait until nobody else holds the state, and hold it."""
    spins = 0
    while atomic_load(state + WORD * STATE_LOCK) != 0 or compare_and_set(state + WORD * STATE_LOCK, 0, 1) == 0:
        spins += 1
        if spins >= _SPINS:  # the holder may have lost its core
            give_way()
            spins = 0


@njit(nogil=True)
def unlock(state: int) -> None:
    """Let others hold the state."""
    atomic_store(state + WORD * STATE_LOCK, 0)


@njit(nogil=True)
def lowest_slot(mask: np.uint64) -> int:
    """The first slot of a mask that is not empty."""
    return lowest_bit(np.int64(mask))


@njit(nogil=True)
def lane_at(state: int, lane: int) -> int:
    """Address of a lane's words."""
    return state + WORD * (STATE_LANE + LANE_WORDS * lane)


# --- under the lock ----------------------------------------------------------------------------


@njit(nogil=True)
def enter(state: int) -> int:
    """A participant has come; returns its lane."""
    lane = load_i64(state + WORD * STATE_LANES)
    atomic_store(state + WORD * STATE_LANES, lane + 1)
    return lane


@njit(nogil=True)
def finished(state: int) -> np.uint64:
    """The slots whose tasks have finished since somebody asked last."""
    done = np.uint64(0)
    for lane in range(load_i64(state + WORD * STATE_LANES)):
        word = lane_at(state, lane) + WORD * LANE_DONE
        if atomic_load(word) != 0:
            done |= np.uint64(atomic_exchange(word, 0))
    return done


@njit(nogil=True)
def take_back(state: int, masks: np.ndarray, lane: int) -> None:
    """What a lane has not started waits again."""
    left = np.uint64(atomic_exchange(lane_at(state, lane) + WORD * LANE_LEFT, 0))
    masks[ISSUED] &= ~left
    masks[WAITING] |= left


@njit(nogil=True)
def stop(state: int, masks: np.ndarray, status: int) -> None:
    """No more tasks issue. What runs, runs on."""
    store_i64(state + WORD * STATE_STATUS, status)
    for lane in range(load_i64(state + WORD * STATE_LANES)):
        take_back(state, masks, lane)


@njit(nogil=True)
def _oldest(tasks: np.ndarray, units: np.ndarray, left: np.uint64, unit: int) -> int:
    """The oldest of a mask's slots, those of `unit` first; NO_SLOT if there are none."""
    oldest, oldest_same = NO_SLOT, NO_SLOT
    while left != np.uint64(0):
        slot = lowest_slot(left)
        left &= ~slot_bit(slot)
        if oldest == NO_SLOT or tasks[slot] < tasks[oldest]:
            oldest = slot
        if units[slot] == unit and (oldest_same == NO_SLOT or tasks[slot] < tasks[oldest_same]):
            oldest_same = slot
    return oldest if oldest_same == NO_SLOT else oldest_same


@njit(nogil=True)
def _held(state: int, lane: int) -> np.uint64:
    """What lanes but this one hold and have not started."""
    held = np.uint64(0)
    for other in range(load_i64(state + WORD * STATE_LANES)):
        if other != lane:
            held |= np.uint64(atomic_load(lane_at(state, other) + WORD * LANE_LEFT))
    return held


@njit(nogil=True)
def choose(
    state: int, upstream: np.ndarray, tasks: np.ndarray, units: np.ndarray, masks: np.ndarray, lane: int, unit: int
) -> int:
    """The slot of the ready task that a lane runs next, or NO_SLOT: the oldest of `unit`, if there is one, or of all.

    What a thread has just worked on lies in its core's cache.
    """
    ready = ready_mask(upstream, masks[WAITING])
    if ready == np.uint64(0) and masks[ISSUED] != np.uint64(0):
        ready = ready_mask(upstream, masks[ISSUED]) & _held(state, lane)
        for other in range(load_i64(state + WORD * STATE_LANES)):
            if np.uint64(atomic_load(lane_at(state, other) + WORD * LANE_LEFT)) & ready != np.uint64(0):
                take_back(state, masks, other)
        ready &= masks[WAITING]
    return _oldest(tasks, units, ready, unit)


@njit(nogil=True)
def _sort(tasks: np.ndarray, left: np.uint64, queue: np.ndarray) -> int:
    """Write the slots of a mask to `queue`, the oldest task first; returns how many."""
    count = 0
    while left != np.uint64(0):
        slot = lowest_slot(left)
        left &= ~slot_bit(slot)
        place = count
        while place > 0 and tasks[queue[place - 1]] > tasks[slot]:  # seldom: slots are filled from the first on
            queue[place] = queue[place - 1]
            place -= 1
        queue[place] = slot
        count += 1
    return count


@njit(nogil=True)
def grant(
    state: int,
    upstream: np.ndarray,
    tasks: np.ndarray,
    units: np.ndarray,
    masks: np.ndarray,
    order: np.ndarray,
    queue: np.ndarray,
    lane: int,
    head: int,
) -> int:
    """Issue a batch that begins with the ready task in slot `head`; write its slots to `order`, return how many.

    queue has room for all slots.
    """
    issue_slot(masks, head)
    order[0], batch, count = head, slot_bit(head), 1
    share = load_i64(state + WORD * STATE_IDLE) != 0  # others have nothing: leave them what is ready
    left = np.uint64(0)
    for slot in range(len(units)):
        if units[slot] == units[head]:
            left |= slot_bit(slot)
    left &= masks[WAITING]
    for index in range(_sort(tasks, left, queue)):
        slot = queue[index]
        if upstream[slot] & ~batch == np.uint64(0) and not (share and upstream[slot] == np.uint64(0)):
            issue_slot(masks, slot)
            order[count] = slot
            batch |= slot_bit(slot)
            count += 1
            if count == len(order):
                break
    atomic_store(lane_at(state, lane) + WORD * LANE_LEFT, np.int64(batch & ~slot_bit(head)))
    ready = ready_mask(upstream, masks[WAITING])
    if share:
        ready |= _held(state, lane) & ready_mask(upstream, masks[ISSUED])
    atomic_store(state + WORD * STATE_READY, np.int64(ready))
    return count


@njit(nogil=True)
def is_over(state: int, masks: np.ndarray) -> bool:
    """Whether a participant that found nothing to run should leave. Says so to those who wait."""
    status = load_i64(state + WORD * STATE_STATUS)
    waiting = status == OK and masks[WAITING] != np.uint64(0)
    over = status == STUCK or (masks[ISSUED] == np.uint64(0) and not waiting)
    atomic_store(state + WORD * STATE_READY, LEAVE if over else 0)
    return over


@njit(nogil=True)
def wait(state: int, timeout: int) -> bool:
    """Let go of the lock until there may be something to do; False if nothing has retired for `timeout` ns."""
    retired = load_i64(state + WORD * STATE_RETIRED)
    store_i64(state + WORD * STATE_IDLE, load_i64(state + WORD * STATE_IDLE) + 1)
    unlock(state)
    moved = _wait_for_change(state, timeout)
    lock(state)
    store_i64(state + WORD * STATE_IDLE, load_i64(state + WORD * STATE_IDLE) - 1)
    return moved or _news(state) or load_i64(state + WORD * STATE_RETIRED) != retired


# --- without the lock --------------------------------------------------------------------------


@njit(nogil=True)
def _news(state: int) -> bool:
    """Whether a task has finished that nobody has retired."""
    for lane in range(atomic_load(state + WORD * STATE_LANES)):
        if atomic_load(lane_at(state, lane) + WORD * LANE_DONE) != 0:
            return True
    return False


@njit(nogil=True)
def _wait_for_change(state: int, timeout: int) -> bool:
    """Wait until a task is ready or has finished, or the run is over; False if that takes more than `timeout` ns."""
    before, waited, spins = monotonic_ns(), 0, 0
    while atomic_load(state + WORD * STATE_READY) == 0 and not _news(state):
        spins += 1
        if spins == _SPINS:
            spins = 0
            give_way()
            now = monotonic_ns()
            waited += min(now - before, timeout // 16 + 1)  # a process that was stopped for a while has not waited
            before = now
            if waited > timeout:
                return False
    return True


@njit(nogil=True)
def start_next(state: int, lane: int, slot: int) -> bool:
    """Whether the lane may start the next task of its batch: nobody has taken it back."""
    word = lane_at(state, lane) + WORD * LANE_LEFT
    left = np.uint64(atomic_load(word))
    bit = slot_bit(slot)
    return left & bit != np.uint64(0) and compare_and_set(word, np.int64(left), np.int64(left & ~bit)) == 1


@njit(nogil=True)
def finish(state: int, lane: int, slot: int) -> None:
    """The lane's task in a slot has finished or was skipped."""
    atomic_add(lane_at(state, lane) + WORD * LANE_DONE, np.int64(slot_bit(slot)))


# --- records -----------------------------------------------------------------------------------

# A buffer of records for tile programs: a header, then rows. Several runs may write to it at once.
RECORD_COUNT = 0  # rows that were to be written; those beyond the capacity were not
RECORD_RUNS = 1  # runs that have begun
RECORD_HEADER = 8
RECORD_WORDS = 5  # of a row: task, lane, begin, end, run


@njit(nogil=True)
def note(state: int, slot: int, lane: int, begin: int, end: int) -> None:
    """Keep what is to be recorded of the task in a slot until it retires."""
    store_i64(state + WORD * (STATE_RAN + slot), lane)
    store_i64(state + WORD * (STATE_BEGIN + slot), begin)
    store_i64(state + WORD * (STATE_END + slot), end)


@njit(nogil=True)
def record(state: int, slot: int, task: int, buffer: int, capacity: int) -> None:
    """Add a row for the task in a slot, if there is room."""
    index = atomic_add(buffer + WORD * RECORD_COUNT, 1)
    if index < capacity:
        row = buffer + WORD * (RECORD_HEADER + RECORD_WORDS * index)
        store_i64(row, task)
        for column in range(3):
            store_i64(row + WORD * (1 + column), load_i64(state + WORD * (STATE_RAN + MAX_SLOTS * column + slot)))
        store_i64(row + 4 * WORD, load_i64(state + WORD * STATE_RUN))
