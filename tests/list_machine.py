"""Streams of random tasks under the GPU's dispatcher of lists, emulated: what runs, and what memory holds.

Tasks work on the bytes of tests/random_streams.py. Memory is as weak as a GPU's: a block sees its own stores at once,
others may see them late, and what a multiprocessor has read once it may read again, until there is a fence.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
from random_streams import BUFFERS, BYTES, memory_of, must_wait
from warp_emulator import Machine, as_coroutines

from brax_concurrent.backends import cuda_dispatch as errors
from brax_concurrent.backends import list_layout as c
from brax_concurrent.scheduler import list_dispatcher, list_report, list_tables, list_worker
from brax_concurrent.scheduler.task import Task
from brax_concurrent.scheduler.window import encode

MODULES = [list_dispatcher, list_worker, list_report]
BLOCK = 2  # threads of a worker here, each a warp
LINE = 8  # bytes that are read at once, and kept
LONG = 1 << 40  # a timeout that does not come


class WeakMemory:
    """Cells that blocks see late. A predicate is an int32 for each four cells: whether their sum is odd."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.cells = {(buffer, byte): 0 for buffer in BUFFERS for byte in range(BYTES)}
        self.flags = np.zeros((len(BUFFERS), BYTES // 4), np.int32)
        self.unseen: dict[int, dict[Any, int]] = {}
        self.copies: dict[int, dict[Any, int]] = {}  # of a multiprocessor, which has two blocks

    def address(self, task: Task) -> int:
        """Of a task's predicate; 0: it has none."""
        if task.predicate is None:
            return 0
        where = self.flags[task.predicate.buffer - BUFFERS.start, task.predicate.start // 4 :]
        return int(where.__array_interface__["data"][0])

    def load(self, block: int, cell: Any) -> int:
        """What a block sees."""
        own, copies = self.unseen.setdefault(block, {}), self.copies.setdefault(block // 2, {})
        if cell in own:
            return own[cell]
        buffer, first = cell[0], cell[1] // LINE * LINE
        if cell not in copies:
            copies.update({(buffer, byte): self.cells[buffer, byte] for byte in range(first, first + LINE)})
        return copies[cell]

    def store(self, block: int, cell: Any, value: int) -> None:
        """Write, to be seen by others some time until the next release."""
        own = self.unseen.setdefault(block, {})
        own[cell] = value
        if self.random.random() < 0.3:
            self._show(own, self.random.choice(sorted(own)))

    def release(self, block: int) -> None:
        """All that the block has written is seen."""
        own = self.unseen.setdefault(block, {})
        for cell in list(own):
            self._show(own, cell)

    def acquire(self, block: int) -> None:
        """It reads anew."""
        self.copies[block // 2] = {}

    def _show(self, own: dict[Any, int], cell: Any) -> None:
        self.cells[cell] = own.pop(cell)
        buffer, first = cell[0], cell[1] // 4 * 4
        total = sum(self.cells[buffer, byte] for byte in range(first, first + 4))
        self.flags[buffer - BUFFERS.start, first // 4] = total & 1


def run_unit_on(load: Any, store: Any, task: Task, number: int, unit: int, units: int) -> None:
    """What a unit does: a hash of all that it may read goes to its share of what the task writes."""
    reads, writes = memory_of(task.footprint)
    share = sorted(writes)[unit::units]
    seen = [load(cell) for cell in sorted((reads - writes) | set(share))]
    for index, cell in enumerate(share):
        store(cell, hash((number, index, *seen)) & 0xFFFF)


def in_program_order(tasks: list[Task], units: list[int]) -> tuple[dict[Any, int], set[int]]:
    """What memory holds in the end, and the tasks that are skipped."""
    memory, skipped = WeakMemory(0), set()
    for number, task in enumerate(tasks):
        if units[number] == 0:
            continue
        if task.predicate is not None and not memory.flags.ravel()[_flag(task)]:
            skipped.add(number)
            continue
        for unit in range(units[number]):
            run_unit_on(
                lambda cell: memory.load(0, cell),
                lambda cell, value: memory.store(0, cell, value),
                task, number, unit, units[number],
            )  # fmt: skip
        memory.release(0)
        memory.acquire(0)
    return memory.cells, skipped


def _flag(task: Task) -> int:
    assert task.predicate is not None
    return (task.predicate.buffer - BUFFERS.start) * (BYTES // 4) + task.predicate.start // 4


class Run:
    """One launch on emulated blocks.

    Args:
      streams: lists of tasks; those of different streams must not meet.
      units: of each task, stream after stream.
      seed: of the order of everything.
      window, windows, resident: slots, windows at most, blocks that the GPU can hold.
      grain: units of a chunk.
      edit: plants a mistake in the device code.
      timeout: of the watchdog, in moves or so. endless: a task that does not end, or if `named` not before
        the watchdog has named one.
      fails: (task, unit) that raises an exception. late, sleepy: see Machine.
      slow: moves that a unit takes at least, by (task, unit).
      trace: whether times are recorded.
      waiting: gives, for a shape, how many chunks may wait in workers.
    """

    def __init__(
        self, streams, units, seed, *, window=32, windows=1, resident=5, grain=BLOCK, edit=None, timeout=LONG,
        endless=-1, fails=None, late=None, slow=None, sleepy=0.002, trace=False, worker_threads=BLOCK,
        waiting=lambda shape: shape.workers >> 1, named=False,
    ):  # fmt: skip
        self.tasks = [task for stream in streams for task in stream]
        self.units, self.endless, self.fails, self.slow, self.named = units, endless, fails, slow or {}, named
        self.memory, self.machine = WeakMemory(seed), Machine(seed, late=late or {}, sleepy=sleepy)
        self.began: dict[tuple[int, int], int] = {}
        self.ended: dict[int, int] = {}
        self.over: set[int] = set()
        layout = SimpleNamespace(**{name: value for name, value in vars(c).items() if name.isupper()})
        layout.BLOCK, layout.LANES = worker_threads, 1
        primitives = {**self.machine.primitives(), "c": layout, "run_unit": self.run_unit}
        entry = as_coroutines(MODULES, primitives, edit)["run_list"]
        self.tables = tables = list_tables.build_tables(
            encode(self.tasks), units, [0] * len(self.tasks), [[i] for i in range(len(self.tasks))],
            [self.memory.address(task) for task in self.tasks],
            np.array([(0, 0, 0) if (flag := task.predicate) is None else (flag.buffer, flag.start, flag.stop)
                      for task in self.tasks]), [len(stream) for stream in streams],
        )  # fmt: skip
        self._cut(grain)
        self.shape = shape = list_tables.shape_of(tables, windows, resident)
        self.work = np.zeros(shape.work_bytes, np.uint8)
        self.failure, self.errors = np.zeros(3, np.int64), np.zeros(errors.ERROR_WORDS, np.int32)
        self.trace = np.zeros((shape.windows * shape.log_words, c.TRACE_BYTES // 8), np.int64)
        self.skipped = np.zeros(len(tables.tasks), np.int64)
        arrays = [tables.rows, tables.entries, tables.streams, self.work, self.failure, self.errors, self.trace,
                  self.skipped]  # fmt: skip
        held = [array.__array_interface__["data"][0] for array in arrays]
        self.machine.regions = [(at, at + array.nbytes) for at, array in zip(held, arrays, strict=True)]
        at_flags = self.memory.flags.ctypes.data
        self.machine.regions.append((at_flags, at_flags + self.memory.flags.nbytes))
        self.machine.at_release.append(self.memory.release)
        self.machine.at_acquire.append(self.memory.acquire)
        if not trace:
            held[6] = 0
        numbers = (timeout, shape.windows, window, len(tables.streams), shape.stride, shape.room, shape.workers,
                   tables.row_words, waiting(shape))  # fmt: skip
        threads = lambda block: 32 if block < shape.windows else worker_threads  # noqa: E731
        warp = lambda block: 32 if block < shape.windows else 1  # noqa: E731
        self.machine.launch(entry, shape.blocks, threads, (0, *held, *numbers), warp)

    def _cut(self, grain: int) -> None:
        """Chunks of `grain` units, instead of what real blocks get."""
        places = self.tables.entries["word"] & 0xFFFFFFFF
        for index, place in enumerate(places.tolist()):
            row = self.tables.rows[c.ROW_BYTES // 8 * place :]
            row[c.R_GRAIN // 8] = grain
            self.tables.entries["chunks"][index] = -(-row[c.R_UNITS // 8] // grain)
        for stream in self.tables.streams:
            own = slice(stream["first"], stream["first"] + stream["tasks"])
            stream["chunks"] = self.tables.entries["chunks"][own].sum()

    def run_unit(self, function, parameters, unit):
        """The program's function: the one parameter is the task's number."""
        yield
        number = self.machine.shared_word(self.machine.current.block, parameters)
        assert 0 <= number < len(self.tasks), "a unit begins before its parameters are there"
        assert function == 0
        assert (number, unit) not in self.began, f"unit {unit} of task {number} runs twice"
        self.began[number, unit] = self.machine.moves
        for older in range(number):
            waits = self.units[older] and must_wait(self.tasks[older], self.tasks[number])
            assert not waits or self._same_stream(older, number) is False or older in self.over or self._skipped(older)
        yield
        memory, block, cells = self.memory, self.machine.current.block, {}
        run_unit_on(
            lambda cell: memory.load(block, cell), cells.__setitem__, self.tasks[number], number, unit,
            self.units[number],
        )  # fmt: skip
        until = self.machine.moves + self.slow.get((number, unit), 0)
        while number == self.endless and not (self.named and self.errors[errors.E_CODE]):
            yield
        while self.machine.moves < until:
            yield
        if self.fails == (number, unit):
            return 7
        for cell, value in cells.items():
            yield
            memory.store(block, cell, value)
        self.ended[number] = self.ended.get(number, 0) + 1
        if self.ended[number] == self.units[number]:
            self.over.add(number)
        return 0

    def _same_stream(self, one: int, other: int) -> bool:
        entry = {task: place for place, task in enumerate(self.tables.tasks.tolist())}
        stream = np.searchsorted(self.tables.streams["first"], [entry[one], entry[other]], side="right")
        return bool(stream[0] == stream[1])

    def _skipped(self, number: int) -> bool:
        return self.tasks[number].predicate is not None and not any(task == number for task, _ in self.began)

    def check(self) -> None:
        """Every unit ran once, or its task was skipped as in program order, and so is memory."""
        expected, skipped = in_program_order(self.tasks, self.units)
        runs = {(task, unit) for task, count in enumerate(self.units) for unit in range(count) if task not in skipped}
        assert set(self.began) == runs
        for block in list(self.memory.unseen):
            self.memory.release(block)  # as the end of the kernel does
        assert self.memory.cells == expected
