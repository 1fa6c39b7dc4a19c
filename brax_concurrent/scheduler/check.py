"""Whether kernels touch only the memory that their footprints declare, found by running them.

Schedulers believe footprints. `FootprintChecker` runs a tile program op by op and does not believe them:

- **Undeclared writes.** Whatever an op changes outside its declared writes, also beyond the ends of arrays and in other
  tiles' memory.
- **Undeclared reads.** The op runs again from memory in which everything but its declared reads holds something else.
  If it then writes other bits, it read some of that. What it declares to write counts as unknown before it runs, unless
  it declares to read it too. Bytes that it leaves as they are, or copies onto themselves, tell nothing: two ops that
  write one place never run at once.

A run shows what a kernel does on that state only: a branch that no state takes is not examined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from brax_concurrent.backends.native import TILE
from brax_concurrent.scheduler.check_memory import Memory, Place
from brax_concurrent.scheduler.serial import ArenaField, TileOp, TileProgram

_ROW = 64  # bytes; undeclared reads are told to this precision

Access = Literal["read", "write"]
_DONE = {"read": "reads", "write": "writes"}


@dataclass(frozen=True)
class Violation:
    """A kernel touched what its footprint does not declare.

    kernel  its name
    op      where in the program it was seen first
    tile    for which tile it ran
    access  "read" or "write"
    place   what it touched: a field, a buffer, another tile's part of one, or what lies before or behind
    spans   bytes [start, stop), counted from the start of the arena or of the buffer; to 4 bytes, of reads to 64.
            Empty: only several places together made a difference
    """

    kernel: str
    op: int
    tile: int
    access: Access
    place: str
    spans: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        spans = ", ".join(f"[{start}, {stop})" for start, stop in self.spans)
        where = f"{self.place}, bytes {spans}" if spans else self.place
        return f"kernel {self.kernel} {_DONE[self.access]} {where}, undeclared (op {self.op}, tile {self.tile})"


@dataclass(frozen=True)
class Unused:
    """A kernel declares a place that no run saw it need: no error, but others may wait for it in vain.

    Reading what the kernel itself wrote before is no need, nor is writing what was there already.
    """

    kernel: str
    access: Access
    place: str

    def __str__(self) -> str:
        return f"kernel {self.kernel} was not seen to {self.access} {self.place}, which it declares"


def check_footprints(
    program: TileProgram, buffers: Sequence[np.ndarray], num_envs: int, *, names: Sequence[ArenaField] | None = None
) -> tuple[Violation, ...]:
    """Run a program once and say what its kernels touched without declaring it.

    Args:
      program: what to run, on this thread.
      buffers: one array per `program.layout.buffers`, updated in place as `run_program` would.
      num_envs: environments. With a number that is no multiple of 32 the last tile is partly filled.
      names: the arena's fields: for the messages, and to know which are floats. What has no name is taken for integers.
        None: those of the program's layout.

    Raises:
      ValueError: see `FootprintChecker`.
    """
    checker = FootprintChecker(program, num_envs, names=names)
    checker.run(buffers)
    return checker.violations


class FootprintChecker:
    """Runs a program on one state after another and collects what its kernels do against their declarations.

    Attributes:
      op_counts: by kernel, how often it ran: ops times tiles, without those that predicates skipped.

    Args:
      program, num_envs, names: see `check_footprints`.

    Raises:
      ValueError: num_envs < 1, a program of several steps (whose ops are those of one), or a field lies outside the
        arena or over another one.
    """

    def __init__(self, program: TileProgram, num_envs: int, *, names: Sequence[ArenaField] | None = None):
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        if program.steps != 1:
            raise ValueError(f"program: a program of one step is checked, got one of {program.steps}")
        self._program, self._num_envs = program, num_envs
        self._memory = Memory(program, num_envs, program.layout.fields if names is None else names)
        self._found: dict[tuple[str, Access, str], Violation] = {}
        self._declared: dict[tuple[str, Access, str], None] = {}
        self._used: set[tuple[str, Access, str]] = set()
        self.op_counts: Counter[str] = Counter({op.kernel.name: 0 for op in program.ops})

    @property
    def violations(self) -> tuple[Violation, ...]:
        """What was found: each kind of access of a kernel to a place once, where it was seen first."""
        return tuple(self._found.values())

    @property
    def unused(self) -> tuple[Unused, ...]:
        """What kernels that ran declare and were not seen to touch."""
        return tuple(Unused(*key) for key in self._declared if key not in self._used)

    def run(self, buffers: Sequence[np.ndarray]) -> None:
        """Run the program on the buffers, in place, and examine every op.

        Raises:
          ValueError: the buffers do not fit the program.
        """
        self._memory.take(buffers)
        for tile in range(-(-self._num_envs // TILE)):
            for index, op in enumerate(self._program.ops):
                if self._memory.allows(op, tile):
                    self.op_counts[op.kernel.name] += 1
                    _Examination(self, index, op, tile).run()
        self._memory.give(buffers)

    def _note(self, violation: Violation) -> None:
        self._found.setdefault((violation.kernel, violation.access, violation.place), violation)


class _Examination:
    """One op on one tile: see `run`."""

    def __init__(self, checker: FootprintChecker, index: int, op: TileOp, tile: int):
        self._checker, self._memory = checker, checker._memory
        self._index, self._op, self._tile = index, op, tile
        self._name = op.kernel.name
        self._turn = checker.op_counts[self._name]
        self._places = self._memory.places(tile)
        reads, writes = self._memory.declared(op.kernel.footprint(tile))
        self._note_declared(reads, writes)
        # What was found once is taken as declared from then on, so that the next thing can be found.
        self._reads, self._writes = self._with_found("read", reads), self._with_found("write", writes)

    def run(self) -> None:
        """Examine the op, and leave the memory as one run of it does."""
        memory = self._memory
        self._before = memory.bytes.copy()
        self._after = self._result(self._before)
        self._check_writes(self._before, self._after)
        honest = True
        for other in memory.others(self._before, self._turn):
            start = np.where(self._reads, self._before, other)
            after = self._result(start)
            self._note_written(start, after)
            if self._differs(start, after):
                honest = False
                self._locate_reads(other)
            elif honest:  # else it may write there because of what it should not have read
                self._check_writes(start, after)
        self._find_used_reads()
        memory.bytes[:] = self._after

    def _result(self, start: np.ndarray) -> np.ndarray:
        self._memory.bytes[:] = start
        self._memory.call(self._op, self._tile)
        return self._memory.bytes.copy()

    def _differs(self, start: np.ndarray, after: np.ndarray) -> bool:
        """Whether declared writes are others than in the first run, left aside what neither run changed."""
        kept = (after == start) & (self._after == self._before)
        return bool(np.any(self._writes & (after != self._after) & ~kept))

    def _check_writes(self, start: np.ndarray, after: np.ndarray) -> None:
        self._note_written(start, after)
        changed = (after != start) & ~self._writes
        if not changed.any():
            return
        for place in self._places:
            words = np.flatnonzero(changed[place.start : place.stop]) // 4 * 4
            if len(words):
                offsets = np.unique(words[:, None] + np.arange(4))
                self._report("write", place, place.start + offsets[offsets < place.stop - place.start])
                self._writes[place.start : place.stop] = True

    def _locate_reads(self, other: np.ndarray) -> None:
        """Which place it is whose contents make a difference."""

        def matters(offsets: np.ndarray) -> bool:
            start = self._before.copy()
            start[offsets] = other[offsets]
            return self._differs(start, self._result(start))

        found = False
        for place in self._places:
            offsets = place.start + np.flatnonzero(~self._reads[place.start : place.stop])
            if len(offsets) and matters(offsets):
                found = True
                self._report("read", place, np.concatenate(list(_narrowed(offsets, matters))))
                self._reads[place.start : place.stop] = True
        if not found:
            text = "several places outside its footprint together"
            self._checker._note(Violation(self._name, self._index, self._tile, "read", text, ()))

    def _report(self, access: Access, place: Place, offsets: np.ndarray) -> None:
        runs = np.split(offsets, np.flatnonzero(np.diff(offsets) > 1) + 1)
        spans = tuple((int(run[0]) - place.origin, int(run[-1]) + 1 - place.origin) for run in runs)
        self._checker._note(Violation(self._name, self._index, self._tile, access, place.label, spans))

    def _with_found(self, access: Access, declared: np.ndarray) -> np.ndarray:
        for place in self._places:
            if (self._name, access, place.label) in self._checker._found:
                declared[place.start : place.stop] = True
        return declared

    # -- what is declared and not touched

    def _note_declared(self, reads: np.ndarray, writes: np.ndarray) -> None:
        if self._op.kernel.footprint(self._tile).everything:
            return
        sides: tuple[tuple[Access, np.ndarray], ...] = (("read", reads), ("write", writes))
        for access, mask in sides:
            for place in self._places:
                if mask[place.start : place.stop].any():
                    self._checker._declared.setdefault((self._name, access, place.label))

    def _unused(self, access: Access) -> Iterator[Place]:
        for place in self._places:
            key = (self._name, access, place.label)
            if key in self._checker._declared and key not in self._checker._used:
                yield place

    def _note_written(self, start: np.ndarray, after: np.ndarray) -> None:
        for place in self._unused("write"):
            if np.any(after[place.start : place.stop] != start[place.start : place.stop]):
                self._checker._used.add((self._name, "write", place.label))

    def _find_used_reads(self) -> None:
        for place in self._unused("read"):
            for other in self._memory.others(self._before, self._turn):
                start = self._before.copy()
                inside = self._reads[place.start : place.stop]
                start[place.start : place.stop][inside] = other[place.start : place.stop][inside]
                if self._differs(start, self._result(start)):
                    self._checker._used.add((self._name, "read", place.label))
                    break


def _narrowed(offsets: np.ndarray, matters: Callable[[np.ndarray], bool]) -> Iterator[np.ndarray]:
    """The parts of `offsets` that matter, by halving; all of them where no half does alone."""
    if len(offsets) <= _ROW:
        yield offsets
        return
    middle = -(-len(offsets) // 2 // _ROW) * _ROW
    halves = [half for half in (offsets[:middle], offsets[middle:]) if matters(half)]
    if not halves:
        yield offsets
    for half in halves:
        yield from _narrowed(half, matters)
