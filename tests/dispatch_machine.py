"""Random programs under the GPU's dispatcher of robots, emulated: what runs, when, and what is skipped."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from warp_emulator import LANES, Machine, as_coroutines

from brax_concurrent.backends import cuda_dispatch as c
from brax_concurrent.backends.cuda import Function
from brax_concurrent.backends.cuda_link import DispatchPart, tables
from brax_concurrent.backends.cuda_program import (
    RECORD_ARENA,
    RECORD_FIRST_BUFFER,
    RECORD_NUM_ENVS,
    RECORD_ORDER,
)
from brax_concurrent.backends.native import TILE, WORD
from brax_concurrent.scheduler import dispatcher, dispatcher_insert, dispatcher_report, dispatcher_work

MODULES = [dispatcher, dispatcher_insert, dispatcher_work, dispatcher_report]
ROWS, ROW_BYTES = 2, 4 * TILE  # of an arena: what predicates look at
LONG = 1 << 40  # a timeout that does not come


@dataclass
class Part:
    """A part, and which row an op writes, if any."""

    dispatched: DispatchPart
    num_envs: int
    writes: dict[int, int] = field(default_factory=dict)

    @property
    def tiles(self) -> int:
        return -(-self.num_envs // TILE)

    def meet(self, one: int, other: int) -> bool:
        """Whether two ops must run in program order."""
        first, second = (self.dispatched.ops[op].symbol for op in (one, other))
        pairs = self.dispatched.conflicts
        return pairs is None or (first, second) in pairs or (second, first) in pairs


def random_part(rng: random.Random, name: str, most_tiles: int = 4) -> Part:
    """Ops with random conflicts, of which some write the rows that others look at."""
    count = rng.choice([1, 2, 3, 8, 13])
    kinds = [f"{name}{i}" for i in range(rng.choice([1, count, count, 40]))]
    names = [rng.choice(kinds) for _ in range(count)]
    ops = [rng.choice([None, None, *range(ROWS)]) for _ in range(count)]  # the row that an op has to do with
    writes = {op: row for op, row in enumerate(ops) if row is not None and rng.random() < 0.5}
    whens = tuple(-1 if row is None or op in writes else row * ROW_BYTES for op, row in enumerate(ops))
    likely = rng.choice([0.0, 0.2, 0.6, 1.0])
    pairs = {(a, b) for a in names for b in names if rng.random() < likely}
    pairs |= {(a, a) for a in names if names.count(a) > 1}  # else nobody could tell which of them ran
    pairs |= {(names[a], names[b]) for a, row in writes.items() for b in range(count) if ops[b] == row}
    part = DispatchPart(
        tuple(Function(each, "") for each in names), whens, None if likely == 1 else frozenset(pairs), 1,
        ROWS * ROW_BYTES, steps=rng.choice([1, 2, 4]),
    )  # fmt: skip
    return Part(part, rng.randrange(1, most_tiles * TILE + 1), writes)


def written(op: int, step: int, tile: int) -> int:
    """What an op writes to its row, for one environment of a tile."""
    return hash((op, step, tile)) & 1


class Run:
    """One launch on emulated blocks.

    Args:
      parts: the program.
      seed: of the order of everything.
      gangs, shift: gangs of a block; a gang has 1 << shift warps.
      window, flights, policy, dynamic: see cuda_dispatch.C_*.
      grid: blocks.
      edit: plants a mistake in the device code.
      endless: an op of the first part that takes so many moves, `lasts`.
      timeout: of the watchdog, in moves or so.
      trace: whether times are recorded.
    """

    def __init__(
        self, parts, seed, *, gangs=2, shift=0, window=32, flights=4, policy=c.OLDEST, dynamic=0, grid=1, edit=None,
        endless=-1, lasts=LONG, timeout=LONG, trace=False,
    ):  # fmt: skip
        self.parts, self.size, self.endless, self.lasts = parts, 1 << shift, endless, lasts
        self.machine = Machine(seed, sleepy=0.001)
        self.began: dict[Any, int] = {}
        self.ended: dict[Any, int] = {}
        self.ran: dict[Any, int] = defaultdict(int)
        self.random = random.Random(seed)
        words, functions = tables([part.dispatched for part in parts])
        self.names = [function.symbol for function in functions]
        self.table = np.array([word & 0xFFFFFFFF for word in words], np.uint32)
        self.arenas = [np.zeros((part.tiles, ROWS, TILE), np.int32) for part in parts]
        self.counters = np.zeros(c.MAX_PARTS, np.int32)
        self.errors = np.zeros(c.ERROR_WORDS, np.int32)
        rows = sum(-(-part.tiles // self.size) * len(part.dispatched.ops) * part.dispatched.steps for part in parts)
        self.trace = np.zeros(c.TRACE_FIRST // 4 + c.R_BYTES // 4 * rows, np.int32)
        self.trace[c.TRACE_CAPACITY // 4] = rows
        held = [self.table, self.counters, self.errors, self.trace, *self.arenas]
        self.machine.regions = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in held]
        control = {
            c.C_COUNTERS: self.counters.ctypes.data, c.C_ERROR: self.errors.ctypes.data, c.C_TIMEOUT: timeout,
            c.C_TRACE: self.trace.ctypes.data if trace else 0, c.C_RUN: 5, c.C_GANG: shift, c.C_FLIGHTS: flights,
            c.C_POLICY: policy, c.C_DYNAMIC: dynamic, c.C_WINDOW: window,
        }  # fmt: skip
        for block in range(grid):
            for word, value in control.items():
                self.machine.set_shared_word(block, c.CONTROL + WORD * word, value)
            for number, part in enumerate(parts):
                values = {RECORD_NUM_ENVS: part.num_envs, RECORD_ORDER: 0, RECORD_FIRST_BUFFER: 0}
                values[RECORD_ARENA] = self.arenas[number].ctypes.data
                at = words[c.TABLE_FIRST_PART + c.T_WORDS * number + c.T_RECORD]
                for word, value in values.items():
                    self.machine.set_shared_word(block, at + WORD * word, value)
        primitives = {**self.machine.primitives(), "c": c, "run_task": self.run_task}
        entry = as_coroutines(MODULES, primitives, edit)["dispatch"]
        threads = gangs * self.size * LANES
        self.machine.launch(entry, grid, lambda _: threads, (0, self.table.ctypes.data), lambda _: LANES)

    def run_task(self, function, record, arena, lane, env, there, step, meeting, threads):
        """The program's functions: what a lane of a task does."""
        number = next(i for i, a in enumerate(self.arenas) if 0 <= arena - a.ctypes.data < a.nbytes)
        part, name = self.parts[number], self.names[function]
        tile = (arena - self.arenas[number].ctypes.data) // (ROWS * ROW_BYTES)
        assert env == min(tile * TILE + lane, part.num_envs - 1)
        assert there == (env == tile * TILE + lane)
        once = self.ran[number, tile, step, name, lane]
        self.ran[number, tile, step, name, lane] += 1
        ops = [op for op, each in enumerate(part.dispatched.ops) if each.symbol == name]
        ops = [op for op in ops if not self._skipped(number, tile // self.size, step, op)]
        assert once < len(ops), f"{name} of tile {tile} runs too often in step {step}"
        task = (number, tile // self.size, step, ops[once])
        self.began.setdefault(task, self.machine.moves)
        for _ in range(self.random.randrange(4)):
            yield
        while number == 0 and ops[once] == self.endless and self.machine.moves < self.began[task] + self.lasts:
            yield
        row = part.writes.get(ops[once])
        if row is not None:
            self.arenas[number][tile, row, lane] = written(ops[once], step, tile) if lane == 3 else 0
            self.machine.wrote()
        self.ended[task] = self.machine.moves
        return 0

    def _skipped(self, number: int, bundle: int, step: int, op: int) -> bool:
        """Whether program order skips a task: what its row holds then is from the last op that has written it."""
        part = self.parts[number]
        when = part.dispatched.whens[op]
        if when < 0:
            return False
        older = [(s, o) for s in range(step + 1) for o, row in part.writes.items()
                 if row == when // ROW_BYTES and (s, o) < (step, op)]  # fmt: skip
        if not older:
            return True
        last_step, last = max(older)
        tiles = range(bundle * self.size, min((bundle + 1) * self.size, part.tiles))
        return not any(written(last, last_step, tile) for tile in tiles)

    def tasks(self) -> list[tuple[int, int, int, int]]:
        """(part, bundle, step, op) of all, in program order."""
        return [
            (number, bundle, step, op)
            for number, part in enumerate(self.parts)
            for bundle in range(-(-part.tiles // self.size))
            for step in range(part.dispatched.steps)
            for op in range(len(part.dispatched.ops))
        ]

    def check(self) -> None:
        """Every task ran once, or was skipped, and after all before it that it conflicts with."""
        tasks = [task for task in self.tasks() if not self._skipped(*task)]
        assert set(self.began) == set(tasks)
        for place, later in enumerate(tasks):
            for older in tasks[:place]:
                if older[:2] == later[:2] and self.parts[older[0]].meet(older[3], later[3]):
                    assert self.ended[older] < self.began[later], (older, later)
        expected = defaultdict(int)
        for number, bundle, step, op in tasks:
            part = self.parts[number]
            for tile in range(bundle * self.size, min((bundle + 1) * self.size, part.tiles)):
                for lane in range(LANES):
                    expected[number, tile, step, part.dispatched.ops[op].symbol, lane] += 1
        assert self.ran == expected
