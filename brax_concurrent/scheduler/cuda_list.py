"""Lists of tasks on CUDA: through the out-of-order window onto several streams, or as a graph that is replayed.

What is launched is a table (backends/task_cuda.py); what waits for what follows from the tasks' footprints. A task
without units is no launch, and nobody waits for it.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import carray, njit, types

from brax_concurrent.backends import cuda_calls, cuda_pool, cuda_program, intrinsics, native
from brax_concurrent.backends.cuda_calls import (
    F_GRAPH_ADD,
    F_GRAPH_CREATE,
    F_LAUNCH,
    F_READ,
    Functions,
    create_graph,
    launch_kernel,
    read_memory,
)
from brax_concurrent.backends.cuda_driver import CudaError
from brax_concurrent.backends.cuda_pool import unlock_pool
from brax_concurrent.backends.cuda_program import MAX_STREAMS, MAX_WINDOW
from brax_concurrent.backends.intrinsics import load_i32, load_i64, pointer, stack_bytes, store_i64
from brax_concurrent.backends.list_layout import REACH
from brax_concurrent.backends.native import WORD, compile_callback, source_hash
from brax_concurrent.scheduler import cuda_graph, cuda_slots, window
from brax_concurrent.scheduler.cuda_graph import add_task_node, seal_graph
from brax_concurrent.scheduler.cuda_slots import (
    OCCUPIED,
    STATE_WORDS,
    admit,
    await_slot,
    failure_text,
    fork,
    join,
    make_room,
    mark,
    new_window,
    row_at,
    stream_of,
    take_pool,
)
from brax_concurrent.scheduler.engine import timeout_ns
from brax_concurrent.scheduler.list_tables import distance_masks
from brax_concurrent.scheduler.window import MAX_SLOTS, Encoded, slot_bit, tasks_conflict

if TYPE_CHECKING:  # task_cuda needs numba-cuda
    from brax_concurrent.backends.task_cuda import LaunchTable
    from brax_concurrent.scheduler.cuda_flags import Flags

# The job: int64 words.
JOB_FUNCTIONS = 0  # address of the driver's functions
JOB_TASKS = 1  # how many there are
JOB_KERNEL, JOB_GRID, JOB_BLOCK, JOB_PARAMETERS = 2, 3, 4, 5  # addresses of the table's columns
JOB_ROWS, JOB_SEGMENTS, JOB_OFFSETS, JOB_EVERYTHING = 6, 7, 8, 9  # of `Encoded`: addresses, and how many rows
JOB_FAILED = 10  # the task that something went wrong with, or -1
JOB_POOLS, JOB_WINDOW, JOB_STREAMS, JOB_STREAM, JOB_TIMEOUT = 11, 12, 13, 14, 15  # of the window
JOB_GRAPH, JOB_NODES, JOB_OLDER, JOB_BEFORE = 11, 12, 13, 14  # of the graph: the result; addresses, see `_build`
JOB_FLAGS, JOB_PLACES, JOB_WRITERS, JOB_WRITES = 16, 17, 18, 19  # of `Flags`: addresses; 0: there are none
JOB_MIRROR, JOB_BYTES, JOB_KNOWN = 20, 21, 22  # the host's copy of the flags; what of it is known, see `_wanted`
JOB_NEAR = 23  # address of each task's distance mask
JOB_WORDS = 24
_WINDOW_WORDS = STATE_WORDS + MAX_WINDOW  # behind a window's job: its state, and the task in each slot

_COLUMNS = ("kernel", "grid", "block", "parameters")


@njit
def _column(job: int, which: int, task: int) -> int:
    return load_i64(load_i64(job + WORD * which) + WORD * task)


@njit
def _function(job: int, which: int) -> int:
    return load_i64(load_i64(job + WORD * JOB_FUNCTIONS) + WORD * which)


@njit
def _footprints(job: int) -> Any:
    """`rows`, `offsets` and `everything` of `Encoded`."""
    tasks = load_i64(job + WORD * JOB_TASKS)
    rows = carray(pointer(load_i64(job + WORD * JOB_ROWS)), (load_i64(job + WORD * JOB_SEGMENTS), 4), np.int64)
    offsets = carray(pointer(load_i64(job + WORD * JOB_OFFSETS)), (tasks + 1,), np.int64)
    return rows, offsets, carray(pointer(load_i64(job + WORD * JOB_EVERYTHING)), (tasks,), np.bool_)


@njit
def _fail(job: int, error: int, task: int) -> int:
    """Note whom an error came up with; returns the error."""
    if error != 0:
        store_i64(job + WORD * JOB_FAILED, task)
    return error


# --- the window -------------------------------------------------------------------------------------------------------


@njit
def _upstream_mask(job: int, tasks: Any, occupied: Any, task: int) -> Any:
    """The occupied slots whose tasks a newcomer conflicts with. Only those that came long before it are compared."""
    rows, offsets, everything = _footprints(job)
    near, mask = np.uint64(_column(job, JOB_NEAR, task)), np.uint64(0)
    for slot in range(len(tasks)):
        if occupied & slot_bit(slot) != np.uint64(0):
            distance = task - tasks[slot]
            if distance > REACH:
                meets = tasks_conflict(rows, offsets, everything, tasks[slot], task)
            else:
                meets = near & slot_bit(distance - 1) != np.uint64(0)
            if meets:
                mask |= slot_bit(slot)
    return mask


@njit
def _issue(job: int, pool: int, state: Any, tasks: Any, task: int) -> int:
    """Put the next task into a free slot and onto a stream; 0 or an error."""
    functions, mask = load_i64(job + WORD * JOB_FUNCTIONS), _upstream_mask(job, tasks, state[4][OCCUPIED], task)
    slot, error = admit(functions, pool, state, mask, False)
    tasks[slot] = task
    if error == 0:
        error = launch_kernel(
            _function(job, F_LAUNCH),
            _column(job, JOB_KERNEL, task),
            _column(job, JOB_GRID, task),
            _column(job, JOB_BLOCK, task),
            stream_of(pool, state, slot),
            _column(job, JOB_PARAMETERS, task),
        )
    return mark(functions, pool, state, slot) if error == 0 else error


@njit
def _wanted(job: int, pool: int, state: Any, tasks: Any, task: int) -> Any:
    """(whether a task's flag is not 0, and 0 or an error).

    The host has a copy of all flags. If the task that writes this one came after the copy was made, it waits for all in
    the window that write flags, and copies again.
    """
    place, functions = _column(job, JOB_PLACES, task), load_i64(job + WORD * JOB_FUNCTIONS)
    if place < 0:
        return True, 0
    mirror, masks = load_i64(job + WORD * JOB_MIRROR), state[4]
    if _column(job, JOB_WRITERS, task) >= load_i64(job + WORD * JOB_KNOWN):
        for slot in range(len(tasks)):
            if masks[OCCUPIED] & slot_bit(slot) != np.uint64(0) and _column(job, JOB_WRITES, tasks[slot]) != 0:
                slow, error = await_slot(functions, pool, state, slot, load_i64(job + WORD * JOB_TIMEOUT))
                if error != 0:
                    return False, _fail(job, error, tasks[slow])
        error = read_memory(
            _function(job, F_READ), mirror, load_i64(job + WORD * JOB_FLAGS), load_i64(job + WORD * JOB_BYTES)
        )
        if error != 0:
            return False, _fail(job, error, task)
        store_i64(job + WORD * JOB_KNOWN, task)
    return load_i32(mirror + place) != 0, 0


@njit
def _launch_window(job: int, pool: int) -> int:
    """Launch all tasks through the window; 0 or an error. Nobody else may use the pool meanwhile."""
    functions, size = load_i64(job + WORD * JOB_FUNCTIONS), load_i64(job + WORD * JOB_WINDOW)
    stream, timeout = load_i64(job + WORD * JOB_STREAM), load_i64(job + WORD * JOB_TIMEOUT)
    memory = job + WORD * JOB_WORDS
    state = new_window(memory, size, load_i64(job + WORD * JOB_STREAMS))
    tasks = row_at(memory + WORD * STATE_WORDS, 0, size)
    error = fork(functions, pool, state, stream)
    for task in range(load_i64(job + WORD * JOB_TASKS)):
        if error != 0:
            break
        wanted = _column(job, JOB_GRID, task) != 0
        if wanted and load_i64(job + WORD * JOB_FLAGS) != 0:
            wanted, error = _wanted(job, pool, state, tasks, task)
        if wanted and error == 0:
            slow, error = make_room(functions, pool, state, timeout)
            if error != 0:
                _fail(job, error, tasks[slow])
            else:
                error = _fail(job, _issue(job, pool, state, tasks, task), task)
    late = join(functions, pool, state, stream)
    return late if error == 0 else error


def _make_launch(magic: int) -> Callable[[int], int]:
    # As in native.py: `magic` is in Numba's cache key and ties the code to the content of the files it is of.
    def launch(job: int) -> int:
        pools, functions = load_i64(job + WORD * JOB_POOLS), load_i64(job + WORD * JOB_FUNCTIONS)
        pool, error = take_pool(pools, functions, load_i64(job + WORD * JOB_TIMEOUT)) if magic != 0 else (0, -1)
        if error == 0:
            error = _launch_window(job, pool)
            unlock_pool(pool)
        return error

    return launch


# --- the graph --------------------------------------------------------------------------------------------------------


@njit
def _upstream(job: int, task: int) -> int:
    """Write the nodes that a task waits for to JOB_OLDER, without those that another of them waits for; their number.

    Row i of JOB_BEFORE has a bit for every task that task i waits for, directly or not. Tasks are asked from the newest
    on: whoever is in the row by then is waited for already.
    """
    rows, offsets, everything = _footprints(job)
    words = (load_i64(job + WORD * JOB_TASKS) + 63) // 64
    before = carray(pointer(load_i64(job + WORD * JOB_BEFORE)), (task + 1, words), np.uint64)
    own, older, count = before[task], load_i64(job + WORD * JOB_OLDER), 0
    for word in range(task // 64, -1, -1):
        if own[word] == ~np.uint64(0):
            continue
        for other in range(min(64 * word + 63, task - 1), 64 * word - 1, -1):
            bit = slot_bit(other - 64 * word)
            if own[word] & bit != np.uint64(0) or _column(job, JOB_GRID, other) == 0:
                continue
            if tasks_conflict(rows, offsets, everything, other, task):
                store_i64(older + WORD * count, _column(job, JOB_NODES, other))
                count += 1
                own[word] |= bit
                for each in range(word + 1):
                    own[each] |= before[other, each]
    return count


@njit
def _add_nodes(job: int, graph: int) -> int:
    """Add all tasks to an empty graph; 0 or an error."""
    nodes, older = load_i64(job + WORD * JOB_NODES), load_i64(job + WORD * JOB_OLDER)
    for task in range(load_i64(job + WORD * JOB_TASKS)):
        grid = _column(job, JOB_GRID, task)
        if grid == 0:
            continue
        error = add_task_node(
            _function(job, F_GRAPH_ADD),
            nodes + WORD * task,
            graph,
            older,
            _upstream(job, task),
            _column(job, JOB_KERNEL, task),
            grid,
            _column(job, JOB_BLOCK, task),
            _column(job, JOB_PARAMETERS, task),
        )
        if error != 0:
            return _fail(job, error, task)
    return 0


def _make_build(magic: int) -> Callable[[int], int]:
    def build(job: int) -> int:
        handle = stack_bytes(8)
        error = create_graph(_function(job, F_GRAPH_CREATE), handle) if magic != 0 else -1
        if error == 0:
            graph = load_i64(handle)
            result = job + WORD * JOB_GRAPH
            error = seal_graph(load_i64(job + WORD * JOB_FUNCTIONS), graph, _add_nodes(job, graph), result)
        return error

    return build


# --- from Python ------------------------------------------------------------------------------------------------------


@functools.cache
def _compiled(make: Callable[[int], Callable[[int], int]]) -> Any:
    modules = (cuda_calls, cuda_pool, cuda_program, intrinsics, native, cuda_graph, cuda_slots, window)
    magic = source_hash(__file__, *(module.__file__ for module in modules))
    return compile_callback(make(magic), types.int64(types.int64))


def _run(make: Callable[[int], Callable[[int], int]], job: np.ndarray, names: tuple[str, ...], explain: int) -> None:
    """Run compiled code on a job.

    Raises:
      CudaError: it returned an error; names the task.
    """
    error = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(_compiled(make).address)(job.ctypes.data)
    if error != 0:
        task = int(job[JOB_FAILED])
        where = "the tasks" if task < 0 else f"task {task}, kernel {names[task]}"
        raise CudaError(failure_text(error, where, int(job[JOB_TIMEOUT]), explain))


def _new_job(table: LaunchTable, encoded: Encoded, functions: Functions, extra: int) -> tuple[np.ndarray, list[Any]]:
    """A job with so many words behind it, and what must live as long as it is used.

    Raises:
      ValueError: there are not as many footprints as tasks.
    """
    if len(encoded) != len(table):
        raise ValueError(f"encoded: expected the footprints of {len(table)} tasks, got {len(encoded)}")
    job, words = np.zeros(JOB_WORDS + extra, np.int64), functions.words()
    kept = [np.ascontiguousarray(each) for each in (encoded.rows, encoded.offsets, encoded.everything)]
    job[JOB_FUNCTIONS], job[JOB_TASKS], job[JOB_FAILED] = words.ctypes.data, len(table), -1
    for word, name in enumerate(_COLUMNS, JOB_KERNEL):
        job[word] = getattr(table, name).ctypes.data
    job[[JOB_ROWS, JOB_OFFSETS, JOB_EVERYTHING]] = [each.ctypes.data for each in kept]
    job[JOB_SEGMENTS] = len(encoded.rows)
    return job, [words, *kept]


def near_masks(encoded: Encoded) -> np.ndarray:
    """(tasks,) uint64 of each task whom it conflicts with: bit d is the one d + 1 places before it."""
    every = np.arange(len(encoded))
    return distance_masks(encoded.rows, encoded.offsets, encoded.everything, every, np.zeros_like(every))


def launch_list(
    table: LaunchTable,
    encoded: Encoded,
    *,
    near: np.ndarray | None = None,
    window: int = 32,
    streams: int = 4,
    stream: int = 0,
    flags: Flags | None = None,
    functions: Functions | None = None,
    pools: int | None = None,
) -> None:
    """Launch all tasks through the window. The GPU is waited for when no slot of the window is free, and for flags.

    Args:
      table: the tasks; their GPU's context must be current.
      encoded: their footprints, see `window.encode`; a task's predicate is among what it reads.
      near: `near_masks(encoded)`, for who launches them again; None: made now.
      window: how many unfinished tasks there may be, 1 to 64. With 1 they run in program order, and the host waits for
        each.
      streams: CUDA streams, 1 to 16.
      stream: a CUstream, one of them; 0 is the default stream. What it was given before is finished before any task
        begins, and what it is given afterwards begins when all tasks have finished.
      flags: the tasks' predicates, which the host reads then: a task that is skipped is not launched. None: all tasks
        are launched, and a task's threads look at its predicate themselves.
      functions, pools: instead of the CUDA driver's, for tests.

    Raises:
      ValueError: a number is out of range, or there are not as many footprints as tasks.
      CudaError: a launch failed, or the GPU freed no slot for 120 seconds, or BRAX_CONCURRENT_TIMEOUT seconds if that
        is set in the environment; names the task. What was launched until then runs on.
    """
    for name, value, most in (("window", window, MAX_SLOTS), ("streams", streams, MAX_STREAMS)):
        if not 1 <= operator.index(value) <= most:
            raise ValueError(f"{name} must be from 1 to {most}, got {value}")
    timeout, functions = timeout_ns(), functions or Functions.of_driver()
    job, kept = _new_job(table, encoded, functions, _WINDOW_WORDS)
    job[JOB_POOLS] = cuda_pool.pools() if pools is None else pools
    job[[JOB_WINDOW, JOB_STREAMS, JOB_STREAM, JOB_TIMEOUT]] = window, streams, stream, timeout
    near = near_masks(encoded) if near is None else near
    job[JOB_NEAR] = near.ctypes.data
    kept.append(near)
    if flags is not None:
        mirror = np.zeros(flags.size, np.uint8)
        job[[JOB_FLAGS, JOB_BYTES, JOB_MIRROR, JOB_KNOWN]] = flags.address, flags.size, mirror.ctypes.data, -1
        columns = (flags.places, flags.writers, flags.writes)
        job[[JOB_PLACES, JOB_WRITERS, JOB_WRITES]] = [each.ctypes.data for each in columns]
        kept.append(mirror)
    _run(_make_launch, job, table.names, functions.explain)
    del kept


class ListGraph:
    """A list of tasks as a CUDA graph, instantiated: a kernel node for each, which waits for what footprints demand.

    To find that takes time and memory that grow with the square of the number of tasks. The graph holds addresses: the
    table must stay as it is as long as it is used. It is freed with this object.

    Args:
      table: the tasks; their GPU's context must be current.
      encoded: their footprints, see `window.encode`.
      functions: instead of the CUDA driver's, for tests.

    Raises:
      ValueError: there are not as many footprints as tasks.
      CudaError: the driver refuses; names the task.
    """

    def __init__(self, table: LaunchTable, encoded: Encoded, functions: Functions | None = None):
        self._functions, self._table, self._handle = functions or Functions.of_driver(), table, 0
        count = len(table)
        job, kept = _new_job(table, encoded, self._functions, 0)
        nodes, older = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
        before = np.zeros((count + 1, (count + 63) // 64), np.uint64)
        job[[JOB_NODES, JOB_OLDER, JOB_BEFORE]] = [each.ctypes.data for each in (nodes, older, before)]
        _run(_make_build, job, table.names, self._functions.explain)
        self._handle = int(job[JOB_GRAPH])
        del kept

    def launch(self, stream: int = 0) -> None:
        """Replay the graph on a CUDA stream; 0 is the default stream. Nothing is waited for.

        Raises:
          CudaError: the driver refuses.
        """
        replay = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self._functions.graph_launch)
        error = replay(self._handle, stream)
        if error != 0:
            said = cuda_calls.error_text(self._functions.explain, error)
            raise CudaError(f"launch of the graph of {len(self._table)} tasks: {said} (error {error})")

    def __del__(self) -> None:
        try:
            if self._handle != 0:
                ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._functions.graph_drop)(self._handle)
        except Exception:  # at exit the driver may be gone, and so may contextlib
            pass
