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
from itertools import zip_longest

from brax_concurrent.backends.composite import Part, build_composite
from brax_concurrent.backends.cpu_program import ALWAYS, BufferSpec, CpuProgram, build_program, content_hash
from brax_concurrent.backends.native import TILE
from brax_concurrent.scheduler.footprint import EVERYTHING, Footprint, Segment, conflicts, merged, together
from brax_concurrent.scheduler.task import PREDICATE_BYTES, Task

ARENA = -1
"""Buffer id of the tiles' arenas, one after another. The user's buffers have their index as id.

This is the memory that the program speaks of. That the native runner gives each thread one arena and lets its
tiles take turns in it is register renaming: it removes no order that a footprint asks for.
"""

Span = str | tuple[int, int]
"""A place that every tile has: the name of a user's buffer (the tile's rows of it, or all of it if it has no
environments), or the bytes [start, stop) of the arena."""


@dataclass(frozen=True)
class TileLayout:
    """Where a tile's data lies.

    arena_bytes  scratch memory of one tile
    buffers      the user's arrays, in the kernels' order
    """

    arena_bytes: int
    buffers: tuple[BufferSpec, ...]

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
        """All bytes of a user's buffer."""
        spec = self.buffers[index]
        return Segment(index, 0, spec.item_bytes * (num_envs if spec.per_env else 1))

    def footprint(self, reads: Sequence[Span] = (), writes: Sequence[Span] = ()) -> Callable[[int], Footprint]:
        """The footprint, a function of the tile, of a kernel that touches the same places in every tile."""
        for span in (*reads, *writes):
            self.segment(span, 0)  # a wrong name is reported here, where it was written

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

    predicate  offset in the arena of an int32; if it is 0 as the op's turn comes, this tile skips the op
    """

    kernel: TileKernel
    predicate: int = ALWAYS


@dataclass(frozen=True)
class TileProgram:
    """What every tile runs in a control step: `ops` in program order, kernels any number of times.

    Raises:
      ValueError: a kernel says that it writes a buffer whose access is "read".
    """

    layout: TileLayout
    ops: tuple[TileOp, ...]

    def __post_init__(self) -> None:
        for op in self.ops:
            for segment in op.kernel.footprint(0).writes:
                spec = self.layout.buffers[segment.buffer] if segment.buffer != ARENA else None
                if spec is not None and spec.access == "read":
                    raise ValueError(f"kernel {op.kernel.name} writes buffer {spec.name}, whose access is read")

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
        if num_envs < 1 or interleave < 1:
            raise ValueError(f"num_envs and interleave must be at least 1, got {num_envs} and {interleave}")
        tiles = [self.tasks_of_tile(tile, num_envs) for tile in range(-(-num_envs // TILE))]
        return _side_by_side(tiles, interleave)

    def tasks_of_tile(self, tile: int, num_envs: int) -> Iterator[Task]:
        """The tasks of one tile."""
        return (self._task(op, tile, num_envs) for op in self.ops)

    def _task(self, op: TileOp, tile: int, num_envs: int) -> Task:
        footprint = op.kernel.footprint(tile)
        predicate = None
        if op.predicate != ALWAYS:
            predicate = self.layout.segment((op.predicate, op.predicate + PREDICATE_BYTES), tile)
        if not footprint.everything:
            reads = footprint.reads if predicate is None else (*footprint.reads, predicate)
            footprint = Footprint(self._cut(reads, num_envs), self._cut(footprint.writes, num_envs))
        return Task(op.kernel.name, range(tile, tile + 1), footprint, predicate)

    def _cut(self, segments: Sequence[Segment], num_envs: int) -> tuple[Segment, ...]:
        """Without the rows that a partly filled tile does not have."""
        kept = []
        for segment in segments:
            if segment.buffer != ARENA:
                end = self.layout.whole(segment.buffer, num_envs).stop
                segment = Segment(segment.buffer, min(segment.start, end), min(segment.stop, end))
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
        for part in self.parts:
            if part.num_envs < 1:
                raise ValueError(f"part {part.name}: num_envs must be at least 1, got {part.num_envs}")
        if interleave < 1:
            raise ValueError(f"interleave must be at least 1, got {interleave}")
        tiles, first_buffer = [], 0
        for index, part in enumerate(self.parts):
            count = -(-part.num_envs // TILE)
            for tile in range(count):
                place = (tile + 0.5) / count if interleave > 1 else 0.0  # the sort is stable
                tiles.append((place, self._tasks_of_tile(index, first_buffer, tile)))
            first_buffer += len(part.program.layout.buffers)
        return _side_by_side([tasks for _, tasks in sorted(tiles, key=lambda item: item[0])], interleave)

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


def _side_by_side(tiles: Sequence[Iterator[Task]], interleave: int) -> Iterator[Task]:
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
      ValueError: see `build_program` and `build_composite`.
    """
    parts = [
        Part(part.name, compile_serial(part.program, threads=threads, poison=poison), part.num_envs)
        for part in composite.parts
    ]
    return build_composite(parts)


def compile_serial(program: TileProgram, *, threads: int = 0, poison: bool = False) -> CpuProgram:
    """The program for the native runner: each tile's ops in program order, the tiles on several threads.

    Args:
      program: what to run.
      threads: on at most so many threads; 0: on all that there are. Never changes a bit of the result: unless
        the footprints say that tiles are independent, they run in order on one thread.
      poison: fill the arena with NaN before each tile, to find kernels that read what was never written.

    Raises:
      ValueError: see `build_program`.
    """
    layout = program.layout
    buffers = tuple((spec.name, spec.shape, spec.dtype, spec.access, spec.per_env) for spec in layout.buffers)
    threads = threads if program.tiles_are_independent else 1
    ops = tuple((op.kernel.fingerprint, op.predicate) for op in program.ops)
    return build_program(
        [(op.kernel.address, op.predicate) for op in program.ops],
        layout.arena_bytes,
        layout.buffers,
        content_hash("serial", TILE, layout.arena_bytes, buffers, ops, threads, poison),
        threads=threads,
        poison=poison,
        owners=[op.kernel.owner for op in program.ops],
    )
