"""The window on threads, for a list of tasks: programs that are no tile programs, such as linear algebra and networks.

The stream is a table, and its conflicts are those of its footprints. The engine of the scheduler sw is that of
streams.py (engine.py): a task is one thread's. That of hw is in hw_list.py: threads share its units.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray, njit

from brax_concurrent.backends import helpers, intrinsics, native
from brax_concurrent.backends.cpu_program import cores
from brax_concurrent.backends.cpu_run import aligned_words
from brax_concurrent.backends.intrinsics import (
    call_task,
    load_i32,
    load_i64,
    monotonic_ns,
    pointer,
    stack_bytes,
    store_i64,
)
from brax_concurrent.backends.native import OK, STUCK, WORD, WRONG_VERSION, compile_callback, source_hash
from brax_concurrent.scheduler import engine as engine_module
from brax_concurrent.scheduler import window
from brax_concurrent.scheduler.engine import (
    LANE_DONE,
    LANE_WORDS,
    MOST,
    NOBODY,
    STATE_BEGIN,
    STATE_END,
    STATE_LANE,
    STATE_LANES,
    STATE_MASKS,
    STATE_RAN,
    STATE_RETIRED,
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
    start_next,
    stop,
    timeout_ns,
    unlock,
    wait,
    words_at,
)
from brax_concurrent.scheduler.schedule import whole
from brax_concurrent.scheduler.window import (
    ISSUED,
    MAX_SLOTS,
    NO_SLOT,
    Encoded,
    insert_task,
    retire_slots,
    slot_bit,
)

# The job: int64 words, then the state.
JOB_WINDOW = 0  # slots
JOB_TIMEOUT = 1  # nanoseconds in which something must finish
JOB_TASKS = 2  # how many there are
JOB_CODE, JOB_ARGS, JOB_FIRST_UNIT, JOB_NUM_UNITS, JOB_PREDICATE = 3, 4, 5, 6, 7  # addresses of the table's columns
JOB_ROWS, JOB_SEGMENTS, JOB_OFFSETS, JOB_EVERYTHING = 8, 9, 10, 11  # of `Encoded`: addresses, and how many rows
JOB_RECORDS = 12  # address of the records, 0: none
JOB_FAILED_TASK, JOB_FAILED_CODE = 13, 14  # of the tasks that returned an error, the first in program order
JOB_STUCK = 15  # mask of the slots whose tasks ran when the run was given up
JOB_HALT = 16  # for `halt`: the status that the run shall end with
JOB_THREADS = 17  # how many participants there are at most
JOB_ARGS_WORDS = 18  # address of the column of that name
JOB_SCRATCH, JOB_SCRATCH_WORDS = 19, 20  # memory for a copy of a task's arguments, and how much each participant has
JOB_FAILED_UNIT = 21  # of JOB_FAILED_TASK, the first that failed
JOB_STUCK_TASKS = 24  # the task in each slot when the run was given up
JOB_WORDS = JOB_STUCK_TASKS + MAX_SLOTS

FAILED = 4  # a status besides those of native.py: a task returned an error
RECORD_COLUMNS = 4  # task, lane, begin, end
_SLICE = 0.1  # seconds after which a caller that waits looks at the run, and Python at its signals
BATCH_BYTES, QUEUE_BYTES = WORD * MOST, WORD * MAX_SLOTS

_COLUMNS: tuple[str, ...] = ("code", "args", "first_unit", "num_units", "predicate")


@dataclass(frozen=True, eq=False)
class TaskTable:
    """Tasks in program order, by columns: contiguous (tasks,) int64 arrays.

    code        address of `int64_t task(char *args, int64_t first_unit, int64_t num_units)`, which returns 0 or an
                error code
    args        its first argument, an address
    first_unit  the first unit that it works on
    num_units   how many units it works on
    predicate   address of an int32: if that is 0 when the task would issue, the task is skipped; 0: it always runs
    args_words  how many int64 `args` has, so that each thread can have a copy of its own, in whose first word the code
                notes which unit failed; None: threads share `args`, and the code writes nothing there
    names       what messages call each task; empty: by number
    owners      what must stay alive as long as the addresses are used

    Raises:
      TypeError: a column is no contiguous array of int64.
      ValueError: columns or names differ in length, or a task has no code.
    """

    code: np.ndarray
    args: np.ndarray
    first_unit: np.ndarray
    num_units: np.ndarray
    predicate: np.ndarray
    names: tuple[str, ...] = ()
    owners: tuple[object, ...] = ()
    args_words: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in (*_COLUMNS, *([] if self.args_words is None else ["args_words"])):
            column = getattr(self, name)
            if not isinstance(column, np.ndarray) or column.dtype != np.int64 or not column.flags.c_contiguous:
                found = f"{column.dtype} array" if isinstance(column, np.ndarray) else type(column).__name__
                raise TypeError(f"{name}: expected a contiguous int64 array, got {found}")
            if column.shape != (len(self),):
                raise ValueError(f"{name}: expected shape ({len(self)},) as that of code, got {column.shape}")
        if len(self.names) not in (0, len(self)):
            raise ValueError(f"names: expected none or one for each of {len(self)} tasks, got {len(self.names)}")
        if not self.code.all():
            raise ValueError(f"code: task {int(np.argmin(self.code != 0))} has none, its address is 0")

    def __len__(self) -> int:
        return self.code.size

    def name(self, task: int) -> str:
        """What messages call a task."""
        return f"task {task} ({self.names[task]})" if self.names else f"task {task}"


# --- compiled code -----------------------------------------------------------------------------


@njit(nogil=True)
def fill_window(job: int, state: int, upstream: np.ndarray, tasks: np.ndarray, masks: np.ndarray) -> None:
    """Let the next tasks into the free slots."""
    count = load_i64(job + WORD * JOB_TASKS)
    rows = carray(pointer(load_i64(job + WORD * JOB_ROWS)), (load_i64(job + WORD * JOB_SEGMENTS), 4), np.int64)
    offsets = words_at(load_i64(job + WORD * JOB_OFFSETS), count + 1)
    everything = carray(pointer(load_i64(job + WORD * JOB_EVERYTHING)), count, np.bool_)
    task = load_i64(state + WORD * STATE_TASK)
    while task < count and insert_task(rows, offsets, everything, upstream, tasks, masks, task) != NO_SLOT:
        task += 1
    store_i64(state + WORD * STATE_TASK, task)


@njit(nogil=True)
def record_task(job: int, state: int, slot: int, task: int) -> None:
    """Write the row of a task that retires, if the run is recorded: what was noted of it in its slot."""
    records = load_i64(job + WORD * JOB_RECORDS)
    if records != 0:
        row = records + WORD * RECORD_COLUMNS * task
        store_i64(row, task)
        store_i64(row + WORD, load_i64(state + WORD * (STATE_RAN + slot)))
        store_i64(row + 2 * WORD, load_i64(state + WORD * (STATE_BEGIN + slot)))
        store_i64(row + 3 * WORD, load_i64(state + WORD * (STATE_END + slot)))


@njit(nogil=True)
def _retire(job: int, state: int, upstream: np.ndarray, tasks: np.ndarray, masks: np.ndarray) -> None:
    """Retire what has finished."""
    done = finished(state)
    retire_slots(upstream, masks, done)
    while done != np.uint64(0):
        slot = lowest_slot(done)
        done &= ~slot_bit(slot)
        store_i64(state + WORD * STATE_RETIRED, load_i64(state + WORD * STATE_RETIRED) + 1)
        record_task(job, state, slot, tasks[slot])


@njit(nogil=True)
def _run_batch(job: int, state: int, tasks: np.ndarray, order: np.ndarray, lane: int) -> tuple[int, int]:
    """Run the tasks that were granted to a lane, until someone takes the rest back; (task, code) of the last."""
    recorded, task, code = load_i64(job + WORD * JOB_RECORDS) != 0, 0, 0
    for index in range(len(order)):
        slot = order[index]
        if index != 0 and not start_next(state, lane, slot):
            break
        task = tasks[slot]
        predicate = load_i64(load_i64(job + WORD * JOB_PREDICATE) + WORD * task)
        begin = monotonic_ns() if recorded else 0
        end, ran = begin, NOBODY
        if predicate == 0 or load_i32(predicate) != 0:
            code = call_task(
                load_i64(load_i64(job + WORD * JOB_CODE) + WORD * task),
                load_i64(load_i64(job + WORD * JOB_ARGS) + WORD * task),
                load_i64(load_i64(job + WORD * JOB_FIRST_UNIT) + WORD * task),
                load_i64(load_i64(job + WORD * JOB_NUM_UNITS) + WORD * task),
            )
            end, ran = monotonic_ns() if recorded else 0, lane
        if recorded:
            note(state, slot, ran, begin, end)
        if code != 0:
            break  # it finishes when no task can issue any more
        finish(state, lane, slot)
    return task, code


@njit(nogil=True)
def _fail(job: int, state: int, tasks: np.ndarray, masks: np.ndarray, lane: int, task: int, code: int) -> None:
    """A task has returned an error."""
    if load_i64(state + WORD * STATE_STATUS) == OK:
        stop(state, masks, FAILED)
    failed = load_i64(job + WORD * JOB_FAILED_TASK)
    if failed < 0 or task < failed:
        store_i64(job + WORD * JOB_FAILED_TASK, task)
        store_i64(job + WORD * JOB_FAILED_CODE, code)
    for slot in range(len(tasks)):
        if masks[ISSUED] & slot_bit(slot) != np.uint64(0) and tasks[slot] == task:
            finish(state, lane, slot)


@njit(nogil=True)
def _give_up(job: int, state: int, tasks: np.ndarray, masks: np.ndarray) -> None:
    """End the run as STUCK, and write down what runs."""
    stop(state, masks, STUCK)
    store_i64(job + WORD * JOB_STUCK, np.int64(masks[ISSUED]))
    for slot in range(len(tasks)):
        store_i64(job + WORD * (JOB_STUCK_TASKS + slot), tasks[slot])


@njit(nogil=True)
def _participate(job: int) -> int:
    """Take part in a run until it is over."""
    state, size = job + WORD * JOB_WORDS, load_i64(job + WORD * JOB_WINDOW)
    masks, upstream = masks_at(state + WORD * STATE_MASKS, 2), masks_at(state + WORD * STATE_UPSTREAM, size)
    tasks, units = words_at(state + WORD * STATE_TASKS, size), words_at(state + WORD * STATE_UNITS, size)
    order = words_at(stack_bytes(BATCH_BYTES), MOST)
    queue = words_at(stack_bytes(QUEUE_BYTES), size)
    lock(state)
    lane = load_i64(state + WORD * STATE_LANES)
    if lane >= size:  # there is no work for more
        unlock(state)
        return OK
    enter(state)
    while True:
        if load_i64(state + WORD * STATE_STATUS) != STUCK:  # the records may be gone then
            _retire(job, state, upstream, tasks, masks)
        slot = NO_SLOT
        if load_i64(state + WORD * STATE_STATUS) == OK:
            fill_window(job, state, upstream, tasks, masks)
            slot = choose(state, upstream, tasks, units, masks, lane, 0)
        if slot != NO_SLOT:
            count = grant(state, upstream, tasks, units, masks, order, queue, lane, slot)
            unlock(state)
            task, code = _run_batch(job, state, tasks, order[:count], lane)
            lock(state)
            if code != 0:
                _fail(job, state, tasks, masks, lane, task, code)
        elif is_over(state, masks):
            break
        elif not wait(state, load_i64(job + WORD * JOB_TIMEOUT)) and load_i64(state + WORD * STATE_STATUS) != STUCK:
            _give_up(job, state, tasks, masks)
    status = load_i64(state + WORD * STATE_STATUS)
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
        stop(state, masks, wanted)
    is_over(state, masks)
    unlock(state)
    return OK


Entry = Callable[[int], int]


@dataclass(frozen=True)
class Engine:
    """Who gets which task, as functions that make a function of a job's address, given a number.

    participate, halt  what each participant calls, and what ends a run from outside with the status in JOB_HALT
    source             the file that they are in
    shares_units       several threads may run units of one task
    """

    participate: Callable[[int], Entry]
    halt: Callable[[int], Entry]
    source: str
    shares_units: bool = False


def _make_participate(magic: int) -> Entry:
    # As in native.py: `magic` is in Numba's cache key and ties the code to the content of the files it is of.
    def participate(job: int) -> int:
        return _participate(job) if magic != 0 else WRONG_VERSION

    return participate


def _make_halt(magic: int) -> Entry:
    def halt(job: int) -> int:
        return _halt(job) if magic != 0 else WRONG_VERSION

    return halt


ONE_THREAD_A_TASK = Engine(_make_participate, _make_halt, __file__)


@functools.cache
def _callback(engine: Engine, halts: bool) -> tuple[Entry, Any]:
    """A compiled function of a job, to call without the GIL, and what keeps its code alive."""
    magic = source_hash(
        *(module.__file__ for module in (engine_module, window, native, intrinsics)), __file__, engine.source
    )
    code = compile_callback((engine.halt if halts else engine.participate)(magic))
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address), code


# --- running -----------------------------------------------------------------------------------


def run_tasks(
    table: TaskTable,
    encoded: Encoded,
    *,
    threads: int = 0,
    window: int = 32,
    records: np.ndarray | None = None,
    engine: Engine = ONE_THREAD_A_TASK,
) -> tuple[int, int] | None:
    """Run tasks, out of order where their footprints allow it, on threads besides the calling one, without the GIL.

    The results are those of program order, bit for bit, whatever the numbers below.

    Args:
      table: the tasks.
      encoded: their footprints, see `window.encode`; a task's predicate is among what it reads.
      threads: at most so many; 0: on all cores.
      window: how many unfinished tasks to choose from, 1 to 64. With 1 they run in program order.
      records: (tasks, 4) int64, row i to become [i, lane, begin, end] of task i in nanoseconds of `time.monotonic_ns`;
        lane -1 and begin == end if it was skipped; all -1 if it has not run. If threads share units, the lane is that
        of the first of them, and the end that of the last.
      engine: who gets which task: ONE_THREAD_A_TASK, or `hw_list.SHARED`.

    Returns:
      None, or (task, code) if a task has returned an error code. Then no further tasks are started, those that run are
      waited for, and of several that failed this is the first in program order.

    Raises:
      TypeError: a number is no whole one.
      ValueError: a number is out of range, or lengths or shapes do not fit.
      RuntimeError: no task ended for 120 seconds, or for BRAX_CONCURRENT_TIMEOUT seconds if that is set in the
        environment. The message names the tasks that were waited for; those go on running, and keep what the table
        owns alive.
      KeyboardInterrupt: after those tasks have ended that ran when it came; it can be repeated.
    """
    threads, window = whole("threads", threads), whole("window", window)
    if not 1 <= window <= MAX_SLOTS:
        raise ValueError(f"window must be from 1 to {MAX_SLOTS}, got {window}")
    if threads < 0:
        raise ValueError(f"threads must not be negative, got {threads}")
    if len(encoded) != len(table):
        raise ValueError(f"encoded: expected the footprints of {len(table)} tasks, got {len(encoded)}")
    if records is not None:
        shape = (len(table), RECORD_COLUMNS)
        if records.shape != shape or records.dtype != np.int64 or not records.flags.c_contiguous:
            raise ValueError(f"records: expected a contiguous int64 array of shape {shape}, got {records.dtype} array "
                             f"of shape {records.shape}")  # fmt: skip
        records.fill(-1)
    timeout = timeout_ns()
    if len(table) == 0:
        return None
    job, participants, kept = _make_job(table, encoded, threads or cores(), window, records, engine)
    job[JOB_TIMEOUT] = timeout
    status = _participate_all(engine, job, participants, (table, kept), timeout)
    if status == STUCK:
        stuck = [int(job[JOB_STUCK_TASKS + slot]) for slot in range(window) if int(job[JOB_STUCK]) >> slot & 1]
        names = ", ".join(table.name(task) for task in sorted(stuck))
        raise RuntimeError(f"no task ended for {timeout // 10**6} ms; waited for {names}")
    if status == OK:
        return None
    failed = int(job[JOB_FAILED_TASK])
    if job[JOB_SCRATCH]:
        ctypes.c_int64.from_address(int(table.args[failed])).value = int(job[JOB_FAILED_UNIT])
    return failed, int(job[JOB_FAILED_CODE])


def _make_job(
    table: TaskTable, encoded: Encoded, threads: int, window: int, records: np.ndarray | None, engine: Engine
) -> tuple[np.ndarray, int, object]:
    """The job of a run, how many participants it has work for, and what must live as long as it does."""
    job = aligned_words(JOB_WORDS + STATE_LANE + LANE_WORDS * window)
    job[[JOB_WINDOW, JOB_TASKS, JOB_SEGMENTS]] = window, len(table), len(encoded.rows)
    for word, name in enumerate(_COLUMNS, JOB_CODE):
        job[word] = getattr(table, name).ctypes.data
    rows, offsets, everything = map(np.ascontiguousarray, (encoded.rows, encoded.offsets, encoded.everything))
    job[[JOB_ROWS, JOB_OFFSETS, JOB_EVERYTHING]] = rows.ctypes.data, offsets.ctypes.data, everything.ctypes.data
    job[JOB_RECORDS] = 0 if records is None else records.ctypes.data
    job[JOB_FAILED_TASK] = -1
    participants, scratch = min(threads, window, len(table)), None
    if engine.shares_units:
        participants = min(threads, max(len(table), int(table.num_units.max())))
        if table.args_words is not None and participants > 1:
            scratch = np.zeros((participants, int(table.args_words.max())), np.int64)
            job[[JOB_SCRATCH, JOB_SCRATCH_WORDS]] = scratch.ctypes.data, scratch.shape[1]
            job[JOB_ARGS_WORDS] = table.args_words.ctypes.data
    job[JOB_THREADS] = participants
    return job, participants, (rows, offsets, everything, records, scratch)


def _participate_all(engine: Engine, job: np.ndarray, threads: int, kept: object, timeout: int) -> int:
    """Have so many threads take part in a job, and wait for them; returns its status.

    The calling thread is none of them: it can give up when all of them are stuck, and be interrupted. Each holds on to
    `job` and to what `kept` refers to until it ends. Where no thread can start, the calling thread does the work.
    """
    (participate, _), (halt, _) = _callback(engine, False), _callback(engine, True)

    def take_part(_: object = kept) -> int:
        return participate(job.ctypes.data)

    def end(status: int) -> None:
        job[JOB_HALT] = status
        halt(job.ctypes.data)

    started: list[Future[int]] = []
    try:
        try:
            for _ in range(threads):
                started.append(helpers.start(take_part))
        except RuntimeError:  # no more threads, or the interpreter shuts down: fewer will do
            if not started:
                return take_part()
        if not _wait_bounded(job, started, timeout):
            end(STUCK)
    except BaseException:  # KeyboardInterrupt, or whatever a handler of a signal raises
        end(FAILED)
        try:
            if not _wait_bounded(job, started, timeout):
                end(STUCK)
        except BaseException:  # once more: leave those that run behind
            end(STUCK)
            raise
        raise
    return int(job[JOB_WORDS + STATE_STATUS])


def _wait_bounded(job: np.ndarray, started: list[Future[int]], timeout: int) -> bool:
    """Wait until all participants have left; False if no task ends for `timeout` ns, or one of them says so."""
    done_words = JOB_WORDS + STATE_LANE + LANE_DONE + LANE_WORDS * np.arange(int(job[JOB_WINDOW]))
    places = np.concatenate(([JOB_WORDS + STATE_RETIRED], done_words))
    waited, before, seen = 0, time.monotonic_ns(), job[places]
    while waited <= timeout and job[JOB_WORDS + STATE_STATUS] != STUCK:
        if wait_for(started, min(_SLICE, timeout / 16e9), FIRST_COMPLETED).done:
            # Who has left has seen that nothing is left to do. Nobody waits for those that have not begun.
            started = [each for each in started if not each.done() and not each.cancel()]
            if not started:
                return bool(job[JOB_WORDS + STATE_STATUS] != STUCK)
        now, found = time.monotonic_ns(), job[places]
        # As in engine.py: a process that was stopped for a while has not waited.
        waited = waited + min(now - before, timeout // 16 + 1) if np.array_equal(found, seen) else 0
        before, seen = now, found
    return False
