"""The serial scheduler: everything in program order, the reference that the others equal bit for bit.

A *tile program* is the list of kernels that one control step runs on each tile. From it come
- the stream of tasks with their footprints (`TileProgram.tasks`), which windows reorder and tests examine,
  and
- the program that the native runner carries out in program order (`compile_serial`).

A *tile composite* is several tile programs in one stream, each on its own number of environments: different robots.
From it come the same two (`TileComposite.tasks`, `compile_composite`).

Kernels are opaque here: a name, the address of compiled code, a footprint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, repeat, zip_longest
from typing import TypeVar

from brax_concurrent.backends.composite import Part, build_composite
from brax_concurrent.backends.cpu_program import ALWAYS, BufferSpec, CpuProgram, build_program, content_hash
from brax_concurrent.backends.native import PREDICATE_ROW, TILE
from brax_concurrent.scheduler.footprint import EVERYTHING, Footprint, Segment, conflicts, merged, together, without
from brax_concurrent.scheduler.task import Task

ARENA = -1
"""Buffer id of the tiles' arenas, one after another. The user's buffers have their index as id.

This is the memory that the program speaks of. That the native runner gives each thread one arena and lets its
tiles take turns in it is register renaming: it removes no order that a footprint asks for.
"""

Span = str | tuple[int, int]
"""A place that every tile has: the name of a user's buffer (the tile's rows of it, or all of it if it has no
environments), or the bytes [start, stop) of the arena."""


Place = tuple[int, int, int]
"""Which task: (part, tile, op). A tile program has the part 0 only."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class ArenaField:
    """What lies in the bytes [start, stop) of every tile's arena; dtype is NumPy's name."""

    name: str
    start: int
    stop: int
    dtype: str = "float32"


@dataclass(frozen=True)
class TileLayout:
    """Where a tile's data lies.

    arena_bytes  scratch memory of one tile
    buffers      the user's arrays, in the kernels' order
    fields       names for parts of the arena, for messages and checks; any number
    """

    arena_bytes: int
    buffers: tuple[BufferSpec, ...]
    fields: tuple[ArenaField, ...] = ()

    def segment(self, span: Span, tile: int) -> Segment:
        """One tile's bytes of a span, as if the tile were full.

        Raises:
          ValueError: no buffer has that name, or the bytes are not in the arena.
        """
        if isinstance(span, tuple):
            start, stop = span
            if not 0 <= start <= stop <= self.arena_bytes:
                raise ValueError(f"arena bytes must be within [0, {self.arena_bytes}], got [{start}, {stop})")
            base = tile * self.arena_bytes
            return Segment(ARENA, base + start, base + stop)
        for index, spec in enumerate(self.buffers):
            if spec.name == span:
                if not spec.per_env:
                    return self.whole(index, 1)
                rows = TILE * spec.item_bytes
                return Segment(index, tile * rows, (tile + 1) * rows)
        raise ValueError(f"no buffer is called {span!r}; there are {[spec.name for spec in self.buffers]}")

    def whole(self, index: int, num_envs: int) -> Segment:
        """All bytes of a user's buffer, of one that has a part for each step those of the first."""
        spec = self.buffers[index]
        return Segment(index, 0, spec.item_bytes * (num_envs if spec.per_env else 1))

    def describe(self, segment: Segment) -> str:
        """A segment of tile 0's arena, or of a user's buffer, for messages."""
        names = f"buffer {self.buffers[segment.buffer].name}" if segment.buffer != ARENA else "the arena"
        if segment.buffer == ARENA:
            inside = [f.name for f in self.fields if max(f.start, segment.start) < min(f.stop, segment.stop)]
            names = f"field {', '.join(inside)} in the arena" if inside else names
        return f"bytes [{segment.start}, {segment.stop}) of {names}"

    def footprint(
        self, reads: Sequence[Span] = (), writes: Sequence[Span] = (), *, kernel: str = ""
    ) -> Callable[[int], Footprint]:
        """The footprint, a function of the tile, of a kernel that touches the same places in every tile.

        Raises:
          ValueError: a place that is not there, see `segment`; the message begins with `kernel`, its name.
        """
        for span in (*reads, *writes):
            try:
                self.segment(span, 0)  # a wrong name is reported here, where it was written
            except ValueError as error:
                raise ValueError(f"kernel {kernel}: {error}" if kernel else str(error)) from None

        def of_tile(tile: int) -> Footprint:
            return Footprint(
                merged(self.segment(span, tile) for span in reads),
                merged(self.segment(span, tile) for span in writes),
            )

        return of_tile


def unknown_footprint(tile: int) -> Footprint:
    """The footprint of a kernel that declares none: all memory."""
    return EVERYTHING


@dataclass(frozen=True, eq=False)
class TileKernel:
    """A compiled kernel as schedulers see it.

    name         what traces and messages call it
    address      of its code, `void kernel(char *arena, char **buffers, int64_t first_env, int64_t num_envs)`
    fingerprint  says what the code does, the same in every process; not its address
    footprint    from a tile's index to what the kernel reads and writes there
    owner        keeps the code alive
    """

    name: str
    address: int
    fingerprint: str
    footprint: Callable[[int], Footprint] = unknown_footprint
    owner: object = None


@dataclass(frozen=True)
class TileOp:
    """A kernel's place in a tile program.

    predicate  offset in the arena of a row of 32 int32, one for each lane; if all are 0 as the op's turn comes, this
               tile skips the op
    """

    kernel: TileKernel
    predicate: int = ALWAYS


@dataclass(frozen=True)
class TileProgram:
    """What every tile runs in a control step: `ops` in program order, kernels any number of times.

    layout, ops  the memory and the kernels
    steps        the ops are run so many times, each time on the next part of the arrays that have one for each step.
                 Footprints are those of the first
    work         a buffer, int32 for each environment, by which "hw" puts environments of similar work into the same
                 tiles. Kernels then take a tile's environments from 32 int32 behind its arena, and no other scheduler
                 can run them. Who is in which lane is renaming: footprints are as if tile n had the 32 from 32 n on, as
                 it has where this is ""

    Raises:
      ValueError: steps < 1, no buffer is called `work`, or a kernel's footprint has a buffer that is not there, bytes
        beyond one that all tiles share, or writes to one whose access is "read".
    """

    layout: TileLayout
    ops: tuple[TileOp, ...]
    steps: int = 1
    work: str = ""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.work:
            self.layout.segment(self.work, 0)
        for kernel in dict.fromkeys(op.kernel for op in self.ops):
            footprint = kernel.footprint(0)
            for does, segments in (("reads", footprint.reads), ("writes", footprint.writes)):
                for segment in segments:
                    self._check(f"kernel {kernel.name} {does}", segment, does == "writes")

    def _check(self, what: str, segment: Segment, written: bool) -> None:
        if segment.buffer == ARENA:
            return
        if not 0 <= segment.buffer < len(self.layout.buffers):
            raise ValueError(f"{what} buffer {segment.buffer}; there are {len(self.layout.buffers)} buffers")
        spec = self.layout.buffers[segment.buffer]
        if written and spec.access == "read":
            raise ValueError(f"{what} buffer {spec.name}, whose access is read")
        if not spec.per_env and segment.stop > spec.item_bytes:
            raise ValueError(f"{what} {self.layout.describe(segment)}, which has {spec.item_bytes} bytes")

    @property
    def tiles_are_independent(self) -> bool:
        """Whether the footprints allow tiles to run at once. One unknown footprint forbids it."""
        first, second = (together(op.kernel.footprint(tile) for op in self.ops) for tile in (0, 1))
        return not conflicts(first, second)

    def tasks(self, num_envs: int, interleave: int = 1) -> Iterator[Task]:
        """The stream of one control step, a task per op and tile.

        Args:
          num_envs: environments; the last tile may be partly filled.
          interleave: tiles that go through the program side by side. 1 is the order of the native runner: a
            tile runs all ops before the next begins. More brings independent tasks closer together in the
            stream, so that a window of few tasks sees them.

        Raises:
          ValueError: an argument is not positive.
        """
        tiles = [self.tasks_of_tile(tile, num_envs) for tile in self._tiles(num_envs, interleave)]
        return _side_by_side(tiles, interleave)

    def places(self, num_envs: int, interleave: int = 1) -> Iterator[Place]:
        """For each task of `tasks`, which op it is of which tile, without its footprint: (0, tile, op)."""
        ops = [*range(len(self.ops))] * self.steps
        tiles = self._tiles(num_envs, interleave)
        return _side_by_side([zip(repeat(0), repeat(tile), ops) for tile in tiles], interleave)

    def _tiles(self, num_envs: int, interleave: int) -> range:
        if num_envs < 1 or interleave < 1:
            raise ValueError(f"num_envs and interleave must be at least 1, got {num_envs} and {interleave}")
        return range(-(-num_envs // TILE))

    def tasks_of_tile(self, tile: int, num_envs: int) -> Iterator[Task]:
        """The tasks of one tile."""
        return (self._task(op, tile, num_envs, step) for step in range(self.steps) for op in self.ops)

    def _task(self, op: TileOp, tile: int, num_envs: int, step: int) -> Task:
        footprint = op.kernel.footprint(tile)
        predicate = None
        if op.predicate != ALWAYS:
            predicate = self.layout.segment((op.predicate, op.predicate + PREDICATE_ROW), tile)
        if not footprint.everything:
            reads = footprint.reads if predicate is None else (*footprint.reads, predicate)
            footprint = Footprint(self._cut(reads, num_envs, step), self._cut(footprint.writes, num_envs, step))
        return Task(op.kernel.name, range(tile, tile + 1), footprint, predicate)

    def _cut(self, segments: Sequence[Segment], num_envs: int, step: int) -> tuple[Segment, ...]:
        """Without the rows that a partly filled tile does not have, in the step's part of an array that has parts."""
        kept = []
        for segment in segments:
            if segment.buffer != ARENA:
                end = self.layout.whole(segment.buffer, num_envs).stop
                moved = end * step if self.layout.buffers[segment.buffer].per_step else 0
                segment = Segment(segment.buffer, min(segment.start, end) + moved, min(segment.stop, end) + moved)
            kept.append(segment)
        return merged(kept)


@dataclass(frozen=True)
class TilePart:
    """A tile program's place in a composite: its name, unlike the others', and its number of environments."""

    name: str
    program: TileProgram
    num_envs: int


@dataclass(frozen=True)
class TileComposite:
    """Several tile programs in one stream, dealt in the order of `parts`; see backends/composite.py.

    Parts share no memory. The buffers of a part follow those of the parts before it, so their ids count on; its arenas
    are the buffer ARENA - (index of the part).
    """

    parts: tuple[TilePart, ...]

    def tasks(self, interleave: int = 1) -> Iterator[Task]:
        """The stream of one control step of all parts. A kernel is called PART.KERNEL, its units are the part's tiles.

        Args:
          interleave: tiles that go through their programs side by side. 1 is the order of the native runner: part after
            part, tile after tile. With more, the tiles of all parts are mixed evenly, so that a window of few tasks
            sees those of different robots.

        Raises:
          ValueError: interleave or a part's num_envs is not positive.
        """
        first_buffers = [0, *accumulate(len(part.program.layout.buffers) for part in self.parts)]
        tiles = self._tiles(interleave)
        return _side_by_side([self._tasks_of_tile(part, first_buffers[part], tile) for part, tile in tiles], interleave)

    def places(self, interleave: int = 1) -> Iterator[Place]:
        """For each task of `tasks`, which op it is of which tile of which part, without its footprint."""
        ops = [[*range(len(part.program.ops))] * part.program.steps for part in self.parts]
        tiles = self._tiles(interleave)
        return _side_by_side([zip(repeat(part), repeat(tile), ops[part]) for part, tile in tiles], interleave)

    def _tiles(self, interleave: int) -> list[tuple[int, int]]:
        """(part, tile) in the order of the stream."""
        for part in self.parts:
            if part.num_envs < 1:
                raise ValueError(f"part {part.name}: num_envs must be at least 1, got {part.num_envs}")
        if interleave < 1:
            raise ValueError(f"interleave must be at least 1, got {interleave}")
        tiles = []
        for index, part in enumerate(self.parts):
            count = -(-part.num_envs // TILE)
            for tile in range(count):
                place = (tile + 0.5) / count if interleave > 1 else 0.0  # the sort is stable
                tiles.append((place, index, tile))
        return [(index, tile) for _, index, tile in sorted(tiles, key=lambda item: item[0])]

    def _tasks_of_tile(self, index: int, first_buffer: int, tile: int) -> Iterator[Task]:
        part = self.parts[index]

        def moved(segment: Segment) -> Segment:
            buffer = ARENA - index if segment.buffer == ARENA else first_buffer + segment.buffer
            return replace(segment, buffer=buffer)

        for task in part.program.tasks_of_tile(tile, part.num_envs):
            footprint = replace(
                task.footprint,
                reads=tuple(moved(segment) for segment in task.footprint.reads),
                writes=tuple(moved(segment) for segment in task.footprint.writes),
            )
            predicate = None if task.predicate is None else moved(task.predicate)
            yield replace(task, kernel=f"{part.name}.{task.kernel}", footprint=footprint, predicate=predicate)


def check_written(program: TileProgram) -> None:
    """Raise ValueError if a kernel reads what nobody wrote: the arena, or a buffer whose access is "write".

    Both hold anything when a tile's first op runs. So what an op reads of them, an earlier op of the tile must declare
    to write, or the op itself, which then reads what it wrote. A predicate is read before its op runs. Whether an op
    writes all that it declares cannot be told from footprints; `check.py` and poisoned arenas find it by running.
    """
    layout = program.layout
    scratch = {ARENA, *(i for i, spec in enumerate(layout.buffers) if spec.access == "write")}
    written: tuple[Segment, ...] = ()
    for index, task in enumerate(program.tasks_of_tile(0, TILE)):
        everything, own = task.footprint.everything, task.footprint.writes
        predicate = () if task.predicate is None else (task.predicate,)
        reads = [segment for segment in task.footprint.reads if segment.buffer in scratch]
        missing = without(predicate, written) or (() if everything else without(reads, (*written, *own)))
        if missing:
            what = ", ".join(layout.describe(segment) for segment in missing)
            raise ValueError(f"kernel {task.kernel} (op {index}) reads {what}, which no op before it writes")
        if everything:
            return  # it may have written all the rest
        if without(own, written):
            written = merged((*written, *own))


def _side_by_side(tiles: Sequence[Iterator[_T]], interleave: int) -> Iterator[_T]:
    """The tasks of tiles, of which `interleave` at a time take turns, a task each."""
    for first in range(0, len(tiles), interleave):
        for row in zip_longest(*tiles[first : first + interleave]):
            yield from (task for task in row if task is not None)


def compile_composite(composite: TileComposite, *, threads: int = 0, poison: bool = False) -> CpuProgram:
    """The program for the native runner: all parts in one job.

    Args:
      composite, threads, poison: see `compile_serial`. If the tiles of one part depend on each other, all run in order
        on one thread.

    Raises:
      ValueError: see `compile_serial`, the message then begins with the part's name, and `build_composite`.
    """
    parts = []
    for part in composite.parts:
        try:
            compiled = compile_serial(part.program, threads=threads, poison=poison)
        except ValueError as error:
            raise ValueError(f"part {part.name}: {error}") from error
        parts.append(Part(part.name, compiled, part.num_envs))
    return build_composite(parts)


def compile_serial(program: TileProgram, *, threads: int = 0, poison: bool = False) -> CpuProgram:
    """The program for the native runner: each tile's ops in program order, the tiles on several threads.

    Args:
      program: what to run.
      threads: on at most so many threads; 0: on all that there are. Never changes a bit of the result: unless
        the footprints say that tiles are independent, they run in order on one thread.
      poison: fill the arena with NaN before each tile and step, to find kernels that read what was never written.

    Raises:
      ValueError: the program has `work`, or see `check_written` and `build_program`.
    """
    if program.work:
        raise ValueError(f"program: only compile_hw orders environments by {program.work}, as its kernels expect")
    layout = program.layout
    buffers = tuple((s.name, s.shape, s.dtype, s.access, s.per_env, s.per_step) for s in layout.buffers)
    threads = threads if program.tiles_are_independent else 1
    ops = tuple((op.kernel.fingerprint, op.predicate) for op in program.ops)
    native = build_program(
        [(op.kernel.address, op.predicate) for op in program.ops],
        layout.arena_bytes,
        layout.buffers,
        content_hash("serial", TILE, layout.arena_bytes, buffers, ops, threads, poison, program.steps),
        threads=threads,
        poison=poison,
        steps=program.steps,
        owners=[op.kernel.owner for op in program.ops],
    )
    check_written(program)  # after build_program, which refuses predicates that are not in the arena
    return native
