"""The scheduler hw of task streams on CUDA, the host's side: tables on the GPU, and one launch for a run.

What runs on the GPU is list_dispatcher.py; what it works through are the tables of list_tables.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator, Sequence
from ctypes import c_size_t, c_ubyte, c_uint64, c_void_p
from dataclasses import dataclass

import numpy as np

from brax_concurrent.backends import cuda_driver, list_layout, task_cuda, task_link
from brax_concurrent.backends.cuda_dispatch import E_CODE, E_OP, E_SLOT, ERROR_WORDS, NEVER_ENDED
from brax_concurrent.backends.cuda_driver import CudaError
from brax_concurrent.backends.list_layout import (
    BLOCK,
    P_COUNT,
    P_ENTRIES,
    P_ERRORS,
    P_FAILURE,
    P_ROOM,
    P_ROW_WORDS,
    P_ROWS,
    P_SKIPPED,
    P_SLOTS,
    P_STREAMS,
    P_STRIDE,
    P_TIMEOUT,
    P_TRACE,
    P_WAITING,
    P_WINDOWS,
    P_WORK,
    P_WORKERS,
    PARAMETERS,
    Q_BEGIN,
    Q_END,
    Q_PLACE,
    Q_WORD,
    SLOTS,
    TRACE_BYTES,
)
from brax_concurrent.backends.native import WORD, source_hash
from brax_concurrent.backends.task_cuda import DeviceBlock
from brax_concurrent.scheduler import list_dispatcher, list_report, list_worker
from brax_concurrent.scheduler.engine import timeout_ns
from brax_concurrent.scheduler.list_tables import Shape, Tables, shape_of
from brax_concurrent.scheduler.records import BEGIN, END, LANE, TASK
from brax_concurrent.scheduler.task_list import RECORD_COLUMNS
from brax_concurrent.scheduler.trace import SKIPPED

_free_cells: list[np.ndarray] = []
_lock = threading.Lock()


def load_program(functions: Sequence[task_link.UnitCode], compute_capability: tuple[int, int]) -> cuda_driver.Kernel:
    """The dispatcher with some units' functions, loaded into the driver.

    Raises:
        CudaError: the GPU refuses it.
        ValueError: there are too many functions.
    """
    program = link(functions, compute_capability)
    return cuda_driver.load_kernel("dispatcher", program.symbol, program.cubin)


def link(functions: Sequence[task_link.UnitCode], compute_capability: tuple[int, int]) -> task_link.Program:
    """The same as machine code; no GPU is needed."""
    from brax_concurrent.backends import cuda_device

    modules = (list_dispatcher, list_worker, list_report, cuda_device, list_layout)
    source = source_hash(*(str(module.__file__) for module in modules))
    return task_link.link_units(functions, list_dispatcher.run_list, list_worker.RUN_TASK, source, compute_capability)


@contextlib.contextmanager
def _error_cell() -> Iterator[np.ndarray]:
    """An error cell of one's own, all 0. A launch that was ended by force keeps it: it may write late."""
    with _lock:
        cell = _free_cells.pop() if _free_cells else None
    cell = cuda_driver.shared_words(ERROR_WORDS) if cell is None else cell
    cell[:] = 0
    yield cell
    with _lock:
        _free_cells.append(cell)


@dataclass(frozen=True, eq=False)
class _Room:
    """What runs with so many windows at most need: the shape, work memory, the launch's parameters and their places."""

    windows: int
    shape: Shape
    work: DeviceBlock
    words: np.ndarray
    pointers: ctypes.Array[c_void_p]


class HwList:
    """Streams of tasks as the GPU's dispatcher runs them: their tables, in its memory. Freed with this object.

    Args:
        kernel: see `load_program`.
        tables: what runs. Arrays and predicates that they name must live as long as this object.
        names: of all tasks' kernels, by the tasks' numbers.

    Raises:
        CudaError: there is no memory.
    """

    def __init__(self, kernel: cuda_driver.Kernel, tables: Tables, names: Sequence[str]):
        self._kernel, self._tables, self._names = kernel, tables, tuple(names)
        self._uploaded = [_upload(each) for each in (tables.rows, tables.entries, tables.streams)]
        self._failure = task_cuda.failure_cell()
        self._room: _Room | None = None
        self.worked: tuple[int, int] | None = None  # of the last run that was recorded, see Timeline

    @property
    def failure(self) -> int:
        """Address of the failure cell, on the GPU."""
        return int(self._failure.address)

    def run(self, window: int, windows: int, records: bool = False) -> tuple[tuple[int, int, int] | None, np.ndarray]:
        """Run all tasks once, and wait for them.

        Args:
            window: slots; more than 32 are 32.
            windows: how many at most; 0: one for each stream, up to the number of multiprocessors.
            records: whether to record what ran when.

        Returns:
            None or (code, task, unit) of the unit that raised an exception first; and rows as of `Records` without the
            run, if asked for: a task's lane is the block that had its first chunk.

        Raises:
            CudaError: the driver refuses something, or no task ended for too long; names it.
        """
        if not len(self._tables.tasks):
            return None, np.zeros((0, RECORD_COLUMNS), np.int64)
        room, timeout = self._room_for(windows), timeout_ns()
        shape, count = room.shape, len(self._tables.tasks)
        trace = DeviceBlock(shape.windows * shape.log_words * TRACE_BYTES + WORD * count) if records else None
        with _error_cell() as errors:
            launch = functools.partial(self._launch, room, min(window, SLOTS), errors, timeout, trace)
            try:
                failure = task_cuda.run_table(self.failure, launch)
            except CudaError as error:
                if errors[E_CODE] != 0:
                    raise CudaError(self._explain(errors, timeout)) from error
                raise
            if errors[E_CODE] != 0:
                raise CudaError(self._explain(errors, timeout))
        return failure, self._rows(trace, shape)

    def _room_for(self, windows: int) -> _Room:
        """The room for so many windows, that of the last run if it is the same."""
        if self._room is None or self._room.windows != windows:
            self._room = None  # frees it
            self._room = self._new_room(windows)
        return self._room

    def _new_room(self, windows: int) -> _Room:
        multiprocessors = cuda_driver.multiprocessors(cuda_driver.current_device())
        resident = cuda_driver.resident_blocks(self._kernel, BLOCK) * multiprocessors
        shape = shape_of(self._tables, windows or multiprocessors, resident)
        work, words = DeviceBlock(shape.work_bytes), np.zeros(PARAMETERS, np.int64)
        words[[P_ROWS, P_ENTRIES, P_STREAMS]] = [each.address for each in self._uploaded]
        words[P_WORK], words[P_FAILURE] = work.address, self.failure
        words[[P_WINDOWS, P_COUNT, P_STRIDE]] = shape.windows, len(self._tables.streams), shape.stride
        words[[P_ROOM, P_WORKERS, P_WAITING]] = shape.room, shape.workers, shape.waiting
        words[P_ROW_WORDS] = self._tables.row_words
        pointers = (c_void_p * PARAMETERS)(*(words.ctypes.data + WORD * i for i in range(PARAMETERS)))
        return _Room(windows, shape, work, words, pointers)

    def _launch(self, room: _Room, window: int, errors: np.ndarray, timeout: int, trace: DeviceBlock | None) -> None:
        shape, words = room.shape, room.words
        _clear(room.work, shape.work_bytes)
        words[P_ERRORS], words[P_TIMEOUT], words[P_SLOTS] = errors.ctypes.data, timeout, window
        words[P_TRACE], words[P_SKIPPED] = 0, 0
        if trace is not None:
            rows = shape.windows * shape.log_words * TRACE_BYTES
            words[P_TRACE], words[P_SKIPPED] = trace.address, trace.address + rows
            _clear(trace, rows + WORD * len(self._tables.tasks))
        sizes = (shape.blocks, 1, 1, BLOCK, 1, 1, 0)
        what = f"launching the dispatcher for {len(self._tables.tasks)} tasks"
        cuda_driver.call("cuLaunchKernel", c_void_p(self._kernel.handle), *sizes, None, room.pointers, None, doing=what)

    def _explain(self, errors: np.ndarray, timeout: int) -> str:
        task = int(self._tables.tasks[errors[E_OP]])
        did = "did not end" if errors[E_CODE] == NEVER_ENDED else "never became ready"
        where = f"task {task}, kernel {self._names[task]}, in slot {errors[E_SLOT]} of the window"
        return f"{where} {did} within {timeout // 1_000_000} ms, nor did any other"

    def _rows(self, trace: DeviceBlock | None, shape: Shape) -> np.ndarray:
        if trace is None:
            return np.zeros((0, RECORD_COLUMNS), np.int64)
        chunks = shape.windows * shape.log_words
        words = np.zeros(chunks * TRACE_BYTES // WORD + len(self._tables.tasks), np.int64)
        cuda_driver.call(
            "cuMemcpyDtoH_v2", c_void_p(words.ctypes.data), c_uint64(trace.address), c_size_t(words.nbytes)
        )
        split = chunks * TRACE_BYTES // WORD
        rows = words[:split].reshape(chunks, -1)
        ran = rows[rows[:, Q_END // WORD] > 0]
        busy = int((ran[:, Q_END // WORD] - ran[:, Q_BEGIN // WORD]).sum())
        self.worked = busy, shape.blocks - shape.windows
        return task_rows(self._tables, rows, words[split:])


def task_rows(tables: Tables, chunks: np.ndarray, skipped: np.ndarray) -> np.ndarray:
    """What a trace says of each task.

    Args:
        tables: what ran.
        chunks: (n, 4) int64, see list_layout.Q_BEGIN; rows without an end are none.
        skipped: (tasks,) int64 when each was skipped, 0: it was not.

    Returns:
        (tasks, 4) int64 [task, lane, begin, end] of those that ran or were skipped.
    """
    ran = chunks[chunks[:, Q_END // WORD] > 0]
    places = tables.entries["word"] & 0xFFFFFFFF  # they grow
    entries = np.searchsorted(places, ran[:, Q_WORD // WORD] & 0xFFFFFFFF)
    order = np.lexsort((ran[:, Q_BEGIN // WORD], entries))
    found, first = np.unique(entries[order], return_index=True)
    begun = ran[order[first]]
    rows = np.zeros((len(found), RECORD_COLUMNS), np.int64)
    rows[:, TASK], rows[:, LANE] = tables.tasks[found], begun[:, Q_PLACE // WORD]
    rows[:, BEGIN] = begun[:, Q_BEGIN // WORD]
    if len(found):
        rows[:, END] = np.maximum.reduceat(ran[order, Q_END // WORD], first)
    left_out = np.flatnonzero(skipped)
    aside = np.zeros((len(left_out), RECORD_COLUMNS), np.int64)
    aside[:, TASK], aside[:, LANE] = tables.tasks[left_out], SKIPPED
    aside[:, BEGIN] = aside[:, END] = skipped[left_out]
    return np.concatenate((rows, aside))


def _upload(array: np.ndarray) -> DeviceBlock:
    block = DeviceBlock(max(array.nbytes, 1))
    source = np.ascontiguousarray(array)
    cuda_driver.call("cuMemcpyHtoD_v2", c_uint64(block.address), c_void_p(source.ctypes.data), c_size_t(source.nbytes))
    return block


def _clear(block: DeviceBlock, size: int) -> None:
    """Zeros, when the default stream comes to it."""
    cuda_driver.call("cuMemsetD8_v2", c_uint64(block.address), c_ubyte(0), c_size_t(size))
