"""Lists of tasks through one window for all threads, which share the units of a task: the scheduler `hw` on the CPU.

Nobody only dispatches. Whoever has finished takes the window's lock, retires what it has completed, lets newcomers in,
and takes the next ready task itself; so what waited for a task usually starts on the thread that finished it. A thread
that finds no task ready helps with one that runs: under the lock it becomes one of that task's workers, and then all
of them take units from the task's counter without the lock, at first many and towards the end few, until there are no
more. The worker that leaves last retires the task.

A worker has a copy of a task's arguments, as the code notes the failed unit there. Of several units that fail, the
first is told: units are handed out in order, and who has taken some before it goes on to where they fail.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from brax_concurrent.backends.intrinsics import (
    atomic_load,
    atomic_store,
    call_task,
    compare_and_set,
    copy_bytes,
    give_way,
    load_i32,
    load_i64,
    monotonic_ns,
    store_i64,
)
from brax_concurrent.backends.native import OK, STUCK, WORD, WRONG_VERSION
from brax_concurrent.backends.task_cpu import ARGS_UNIT
from brax_concurrent.scheduler.engine import (
    LANE_DONE,
    LANE_LEFT,
    NOBODY,
    STATE_BEGIN,
    STATE_IDLE,
    STATE_LANES,
    STATE_MASKS,
    STATE_RAN,
    STATE_READY,
    STATE_RETIRED,
    STATE_STATUS,
    STATE_TASK,
    STATE_TASKS,
    STATE_UPSTREAM,
    lane_at,
    lock,
    masks_at,
    note,
    unlock,
    words_at,
)
from brax_concurrent.scheduler.task_list import (
    FAILED,
    JOB_ARGS,
    JOB_ARGS_WORDS,
    JOB_CODE,
    JOB_FAILED_CODE,
    JOB_FAILED_TASK,
    JOB_FAILED_UNIT,
    JOB_FIRST_UNIT,
    JOB_HALT,
    JOB_NUM_UNITS,
    JOB_PREDICATE,
    JOB_RECORDS,
    JOB_SCRATCH,
    JOB_SCRATCH_WORDS,
    JOB_STUCK,
    JOB_STUCK_TASKS,
    JOB_TASKS,
    JOB_THREADS,
    JOB_TIMEOUT,
    JOB_WINDOW,
    JOB_WORDS,
    Engine,
    Entry,
    fill_window,
    record_task,
)
from brax_concurrent.scheduler.window import (
    ISSUED,
    NO_SLOT,
    WAITING,
    issue_slot,
    oldest_slot,
    ready_mask,
    retire_slots,
    slot_bit,
)

# The state is that of engine.py, but for what is its lanes: here it is what is known of each slot's task.
SLOT_NEXT = LANE_LEFT  # units that workers have taken
SLOT_WORKERS = LANE_DONE  # how many there are; who waits for the run sees by it that something goes on
STATE_EPOCH = STATE_READY  # changes when there may be something to do for those who wait; read without the lock
_SPINS = 64  # looks at a word before giving way to another thread


@njit(nogil=True)
def _column(job: int, column: int, task: int) -> int:
    return load_i64(load_i64(job + WORD * column) + WORD * task)


@njit(nogil=True)
def _call_others(state: int) -> None:
    """There may be something to do for those who wait."""
    atomic_store(state + WORD * STATE_EPOCH, load_i64(state + WORD * STATE_EPOCH) + 1)


# --- under the lock ----------------------------------------------------------------------------


@njit(nogil=True)
def _retire(job: int, state: int, upstream: np.ndarray, tasks: np.ndarray, masks: np.ndarray, slot: int) -> None:
    """The task in a slot has finished or was skipped."""
    retire_slots(upstream, masks, slot_bit(slot))
    store_i64(state + WORD * STATE_RETIRED, load_i64(state + WORD * STATE_RETIRED) + 1)
    record_task(job, state, slot, tasks[slot])


@njit(nogil=True)
def _skip(job: int, state: int, upstream: np.ndarray, tasks: np.ndarray, masks: np.ndarray) -> bool:
    """Retire the ready tasks whose predicate is 0; whether there were any."""
    ready, found = ready_mask(upstream, masks[WAITING]), False
    for slot in range(len(tasks)):
        if ready & slot_bit(slot) != np.uint64(0):
            predicate = _column(job, JOB_PREDICATE, tasks[slot])
            if predicate != 0 and load_i32(predicate) == 0:
                if load_i64(job + WORD * JOB_RECORDS) != 0:
                    now = monotonic_ns()
                    note(state, slot, NOBODY, now, now)
                _retire(job, state, upstream, tasks, masks, slot)
                found = True
    return found


@njit(nogil=True)
def _pick(job: int, state: int, upstream: np.ndarray, tasks: np.ndarray, masks: np.ndarray, lane: int) -> int:
    """Become a worker of the oldest ready task, or else of the oldest that has units left; its slot, or NO_SLOT."""
    ready = ready_mask(upstream, masks[WAITING])
    slot = oldest_slot(tasks, ready)
    if slot != NO_SLOT:
        issue_slot(masks, slot)
        store_i64(lane_at(state, slot) + WORD * SLOT_NEXT, 0)
        store_i64(lane_at(state, slot) + WORD * SLOT_WORKERS, 1)
        if load_i64(job + WORD * JOB_RECORDS) != 0:
            note(state, slot, lane, monotonic_ns(), 0)
        more = ready != slot_bit(slot) or _column(job, JOB_NUM_UNITS, tasks[slot]) > 1
        if more and load_i64(state + WORD * STATE_IDLE) != 0:
            _call_others(state)
        return slot
    wanting = np.uint64(0)
    for other in range(len(tasks)):
        if masks[ISSUED] & slot_bit(other) != np.uint64(0):
            taken = atomic_load(lane_at(state, other) + WORD * SLOT_NEXT)
            if taken < _column(job, JOB_NUM_UNITS, tasks[other]):
                wanting |= slot_bit(other)
    slot = oldest_slot(tasks, wanting)
    if slot != NO_SLOT:
        workers = lane_at(state, slot) + WORD * SLOT_WORKERS
        store_i64(workers, load_i64(workers) + 1)
    return slot


@njit(nogil=True)
def _leave(job: int, state: int, upstream: np.ndarray, tasks: np.ndarray, masks: np.ndarray, slot: int) -> None:
    """A worker has found no more units of the task in a slot. The last one retires it."""
    workers = lane_at(state, slot) + WORD * SLOT_WORKERS
    left = load_i64(workers) - 1
    store_i64(workers, left)
    if left == 0:
        if load_i64(job + WORD * JOB_RECORDS) != 0:
            begin = load_i64(state + WORD * (STATE_BEGIN + slot))
            note(state, slot, load_i64(state + WORD * (STATE_RAN + slot)), begin, monotonic_ns())
        _retire(job, state, upstream, tasks, masks, slot)


@njit(nogil=True)
def _fail(job: int, state: int, task: int, unit: int, code: int) -> None:
    """A unit of a task has returned an error: no more tasks issue."""
    if load_i64(state + WORD * STATE_STATUS) == OK:
        store_i64(state + WORD * STATE_STATUS, FAILED)
    failed, first = load_i64(job + WORD * JOB_FAILED_TASK), load_i64(job + WORD * JOB_FAILED_UNIT)
    if failed < 0 or task < failed or (task == failed and unit < first):
        store_i64(job + WORD * JOB_FAILED_TASK, task)
        store_i64(job + WORD * JOB_FAILED_UNIT, unit)
        store_i64(job + WORD * JOB_FAILED_CODE, code)


@njit(nogil=True)
def _give_up(job: int, state: int, tasks: np.ndarray, masks: np.ndarray) -> None:
    """End the run as STUCK, and write down what runs, or else what waits."""
    store_i64(state + WORD * STATE_STATUS, STUCK)
    named = masks[ISSUED] if masks[ISSUED] != np.uint64(0) else masks[WAITING]
    store_i64(job + WORD * JOB_STUCK, np.int64(named))
    for slot in range(len(tasks)):
        store_i64(job + WORD * (JOB_STUCK_TASKS + slot), tasks[slot])
    _call_others(state)


@njit(nogil=True)
def _is_over(job: int, state: int, masks: np.ndarray) -> bool:
    """Whether a participant that found nothing to run should leave."""
    status = load_i64(state + WORD * STATE_STATUS)
    if status == OK:
        left = load_i64(state + WORD * STATE_TASK) < load_i64(job + WORD * JOB_TASKS)
        return not left and masks[ISSUED] == np.uint64(0) and masks[WAITING] == np.uint64(0)
    return status == STUCK or masks[ISSUED] == np.uint64(0)


@njit(nogil=True)
def _wait(state: int, timeout: int) -> bool:
    """Let go of the lock until there may be something to do; False if nothing has retired for `timeout` ns."""
    epoch, retired = load_i64(state + WORD * STATE_EPOCH), load_i64(state + WORD * STATE_RETIRED)
    store_i64(state + WORD * STATE_IDLE, load_i64(state + WORD * STATE_IDLE) + 1)
    unlock(state)
    before, waited, spins = monotonic_ns(), 0, 0
    while atomic_load(state + WORD * STATE_EPOCH) == epoch and waited <= timeout:
        spins += 1
        if spins == _SPINS:
            spins = 0
            give_way()
            now = monotonic_ns()
            waited += min(now - before, timeout // 16 + 1)  # a process that was stopped for a while has not waited
            before = now
    lock(state)
    store_i64(state + WORD * STATE_IDLE, load_i64(state + WORD * STATE_IDLE) - 1)
    return waited <= timeout or load_i64(state + WORD * STATE_RETIRED) != retired


# --- without the lock --------------------------------------------------------------------------


@njit(nogil=True)
def _take_units(slot: int, units: int, threads: int) -> tuple[int, int]:
    """The first of some units that nobody has taken, and how many: a thread's share of what is left; 0 if none."""
    while True:
        taken = atomic_load(slot + WORD * SLOT_NEXT)
        left = units - taken
        if left <= 0:
            return 0, 0
        count = (left + threads - 1) // threads
        if compare_and_set(slot + WORD * SLOT_NEXT, taken, taken + count) == 1:
            return taken, count


@njit(nogil=True)
def _run_units(job: int, state: int, slot: int, task: int, scratch: int) -> tuple[int, int]:
    """Run units of a task until there are none left, or one fails; (0, 0), or its error code and its number."""
    units, first = _column(job, JOB_NUM_UNITS, task), _column(job, JOB_FIRST_UNIT, task)
    code, args, threads = _column(job, JOB_CODE, task), _column(job, JOB_ARGS, task), load_i64(job + WORD * JOB_THREADS)
    if scratch != 0:
        copy_bytes(scratch, args, WORD * _column(job, JOB_ARGS_WORDS, task))
        args = scratch
    while atomic_load(state + WORD * STATE_STATUS) != STUCK:
        begin, count = _take_units(slot, units, threads)
        if count == 0:
            break
        error = call_task(code, args, first + begin, count)
        if error != 0:
            atomic_store(slot + WORD * SLOT_NEXT, units)
            return error, load_i64(scratch + WORD * ARGS_UNIT) if scratch != 0 else first + begin
    return 0, 0


@njit(nogil=True)
def _participate(job: int) -> int:
    """Take part in a run until it is over."""
    state, size = job + WORD * JOB_WORDS, load_i64(job + WORD * JOB_WINDOW)
    masks, upstream = masks_at(state + WORD * STATE_MASKS, 2), masks_at(state + WORD * STATE_UPSTREAM, size)
    tasks, scratch = words_at(state + WORD * STATE_TASKS, size), load_i64(job + WORD * JOB_SCRATCH)
    lock(state)
    lane = load_i64(state + WORD * STATE_LANES)
    store_i64(state + WORD * STATE_LANES, lane + 1)
    if scratch != 0:
        scratch += WORD * load_i64(job + WORD * JOB_SCRATCH_WORDS) * lane
    while True:
        slot = NO_SLOT
        if load_i64(state + WORD * STATE_STATUS) == OK:
            fill_window(job, state, upstream, tasks, masks)
            while _skip(job, state, upstream, tasks, masks):
                fill_window(job, state, upstream, tasks, masks)
            slot = _pick(job, state, upstream, tasks, masks, lane)
        if slot != NO_SLOT:
            task = tasks[slot]
            unlock(state)
            code, unit = _run_units(job, state, lane_at(state, slot), task, scratch)
            lock(state)
            if load_i64(state + WORD * STATE_STATUS) != STUCK:  # the records may be gone then
                if code != 0:
                    _fail(job, state, task, unit, code)
                _leave(job, state, upstream, tasks, masks, slot)
        elif _is_over(job, state, masks):
            break
        elif not _wait(state, load_i64(job + WORD * JOB_TIMEOUT)) and load_i64(state + WORD * STATE_STATUS) != STUCK:
            _give_up(job, state, tasks, masks)
    status = load_i64(state + WORD * STATE_STATUS)
    _call_others(state)
    unlock(state)
    return status


@njit(nogil=True)
def _halt(job: int) -> int:
    """End a run from outside."""
    state, size = job + WORD * JOB_WORDS, load_i64(job + WORD * JOB_WINDOW)
    masks, tasks = masks_at(state + WORD * STATE_MASKS, 2), words_at(state + WORD * STATE_TASKS, size)
    lock(state)
    status, wanted = load_i64(state + WORD * STATE_STATUS), load_i64(job + WORD * JOB_HALT)
    if wanted == STUCK and status != STUCK:
        _give_up(job, state, tasks, masks)
    elif status == OK:
        store_i64(state + WORD * STATE_STATUS, wanted)
        _call_others(state)
    unlock(state)
    return OK


def _make_participate(magic: int) -> Entry:
    # As in native.py: `magic` is in Numba's cache key and ties the code to the content of the files it is of.
    def participate(job: int) -> int:
        return _participate(job) if magic != 0 else WRONG_VERSION

    return participate


def _make_halt(magic: int) -> Entry:
    def halt(job: int) -> int:
        return _halt(job) if magic != 0 else WRONG_VERSION

    return halt


SHARED = Engine(_make_participate, _make_halt, __file__, shares_units=True)
"""The engine for `task_list.run_tasks` in which several threads may run units of one task."""
