"""What the task numbers of a recording mean: the streams of tile programs, of CUDA programs and of lists of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from numba import njit

from brax_concurrent.backends import cuda_dispatch
from brax_concurrent.backends.cuda_program import DESC_MODE, WINDOW, CudaPart, CudaProgram
from brax_concurrent.backends.cuda_trace import ROW_LANE, ROW_OP, ROW_RUN, ROW_UNIT
from brax_concurrent.backends.native import TILE
from brax_concurrent.scheduler.cuda_dispatch import bundle_tiles
from brax_concurrent.scheduler.graph import Upstream, reduced
from brax_concurrent.scheduler.serial import TileComposite, TileProgram
from brax_concurrent.scheduler.streams import op_conflicts
from brax_concurrent.scheduler.task import Task
from brax_concurrent.scheduler.trace import TracedTask
from brax_concurrent.scheduler.window import Encoded, encode, tasks_conflict


def tile_stream(tiles: TileProgram | TileComposite, num_envs: int, interleave: int = 1) -> tuple[TracedTask, ...]:
    """The tasks of a tile program; what waits for what is found once for a tile, and is the same in all.

    Args:
      tiles: the program, or the composite, which has its own num_envs.
      num_envs: environments.
      interleave: of the stream, see `TileProgram.tasks`.
    """
    if isinstance(tiles, TileComposite):
        programs, names = [part.program for part in tiles.parts], [f"{part.name}." for part in tiles.parts]
    else:
        programs, names = [tiles], [""]
    if not all(program.tiles_are_independent for program in programs):
        tasks = tiles.tasks(interleave) if isinstance(tiles, TileComposite) else tiles.tasks(num_envs, interleave)
        return list_stream(list(tasks))
    places = tiles.places(interleave) if isinstance(tiles, TileComposite) else tiles.places(num_envs, interleave)
    kernels = [[name + op.kernel.name for op in program.ops] for name, program in zip(names, programs, strict=True)]
    return _numbered(list(places), kernels, [_of_tile(program) for program in programs])


def _of_tile(program: TileProgram) -> list[frozenset[int]]:
    """For each op of a tile those that it waits for."""
    table = op_conflicts(program)
    return reduced([frozenset(np.flatnonzero(table[:op, op]).tolist()) for op in range(len(table))])


def _numbered(
    places: Sequence[tuple[int, int, int]], kernels: Sequence[Sequence[str]], upstream: Sequence[Upstream]
) -> tuple[TracedTask, ...]:
    at = {place: index for index, place in enumerate(places)}
    return tuple(
        TracedTask(
            kernels[part][op],
            range(tile, tile + 1),
            tuple(sorted(at[part, tile, older] for older in upstream[part][op])),
        )
        for part, tile, op in places
    )


# --- CUDA --------------------------------------------------------------------------------------


def cuda_stream(program: CudaProgram, num_envs: int) -> tuple[TracedTask, ...]:
    """The launches of one call in the order of `cuda_streams.py`; a task's units are tiles of its part."""
    units = _units(program, num_envs)
    at = {place: index for index, place in enumerate(_cuda_places(program, num_envs))}
    stream = []
    for unit, op in at:
        part, tiles = units[unit]
        older = ((op - 1,) if op else ()) if part.upstream is None else part.upstream[op]
        name = part.ops[op].kernel.name
        waits_for = tuple(sorted(at[unit, each] for each in older))
        stream.append(TracedTask(f"{part.name}.{name}" if part.name else name, tiles, waits_for))
    return tuple(stream)


def cuda_rows(program: CudaProgram, num_envs: int, launches: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Rows of a timeline from those of a trace block.

    Args:
      program, num_envs: what was called.
      launches: (n, 4) int64, see `cuda_trace.ROW_RUN`.
      times: (n, 2) int64, begin and end of each; what has no end has not run, and is left out.
    """
    at = {place: index for index, place in enumerate(_cuda_places(program, num_envs))}
    ran = (times[:, 0] >= 0) & (times[:, 1] > 0)
    launches, times = launches[ran], times[ran]
    _, runs = np.unique(launches[:, ROW_RUN], return_inverse=True)
    tasks = [at[unit, op] for unit, op in launches[:, [ROW_UNIT, ROW_OP]].tolist()]
    columns = (np.array(tasks, np.int64), launches[:, ROW_LANE], times[:, 0], times[:, 1], runs.reshape(-1))
    return np.stack(columns, axis=1).astype(np.int64)


def _units(program: CudaProgram, num_envs: int) -> list[tuple[CudaPart, range]]:
    """For each unit of a call its part and its tiles."""
    units = []
    for part in program.parts:
        tiles = -(-(part.num_envs or num_envs) // TILE)
        size = part.unit_tiles or tiles
        units += [(part, range(first, min(first + size, tiles))) for first in range(0, tiles, size)]
    return units


def _cuda_places(program: CudaProgram, num_envs: int) -> list[tuple[int, int]]:
    """(unit, op) in the order in which they are launched."""
    units = [[(unit, op) for op in range(len(part.ops))] for unit, (part, _) in enumerate(_units(program, num_envs))]
    if int(program.desc[DESC_MODE]) != WINDOW:
        return [place for own in units for place in own]
    return [place for row in zip_longest(*units) for place in row if place is not None]


def dispatched_stream(program: CudaProgram, num_envs: int) -> tuple[TracedTask, ...]:
    """The tasks of one call under the dispatcher: all of a bundle's, bundle by bundle; units are tiles of its part."""
    stream: list[TracedTask] = []
    for part, tiles in _bundles(program, num_envs):
        first = len(stream)
        for op, each in enumerate(part.ops):
            older = ((op - 1,) if op else ()) if part.upstream is None else part.upstream[op]
            name = f"{part.name}.{each.kernel.name}" if part.name else each.kernel.name
            stream.append(TracedTask(name, tiles, tuple(first + place for place in older)))
    return tuple(stream)


def dispatched_rows(program: CudaProgram, num_envs: int, rows: np.ndarray) -> np.ndarray:
    """Rows of a timeline from those of a DispatchTrace; a lane is a multiprocessor's gang."""
    bundles = _bundles(program, num_envs)
    starts = np.cumsum([0, *(len(part.ops) for part, _ in bundles)])
    parts = [part for part, _ in bundles]
    firsts = np.array([next(i for i, own in enumerate(parts) if own is part) for part in program.parts])
    tasks = starts[firsts[rows["part"]] + rows["bundle"]] + rows["op"]
    places, lanes = np.unique(rows["place"], return_inverse=True)
    lanes = lanes.reshape(-1) - (len(places) > 0 and places[0] == cuda_dispatch.SKIPPED_PLACE)  # SKIPPED sorts first
    return np.stack((tasks, lanes, rows["begin"], rows["end"], rows["run"]), axis=1).astype(np.int64)


def _bundles(program: CudaProgram, num_envs: int) -> list[tuple[CudaPart, range]]:
    """For each bundle of a call its part and its tiles."""
    size, bundles = bundle_tiles(program, num_envs), []
    for part in program.parts:
        tiles = -(-(part.num_envs or num_envs) // TILE)
        bundles += [(part, range(first, min(first + size, tiles))) for first in range(0, tiles, size)]
    return bundles


# --- lists -------------------------------------------------------------------------------------


def list_stream(tasks: Sequence[Task], encoded: Encoded | None = None) -> tuple[TracedTask, ...]:
    """Tasks of any kind: all pairs are compared that no other order implies.

    Args:
      tasks: the stream.
      encoded: its footprints, see `window.encode`; None: those of `tasks`.
    """
    encoded = encode(tasks) if encoded is None else encoded
    older, offsets = _edges(encoded.rows, encoded.offsets, encoded.everything)
    ends = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    upstream = [tuple(sorted(older[first:end].tolist())) for first, end in ends]
    return tuple(TracedTask(task.kernel, task.units, own) for task, own in zip(tasks, upstream, strict=True))


@njit(nogil=True)
def _edges(rows, offsets, everything):
    """The transitive reduction by columns: for each task the older ones that it waits for."""
    count = len(everything)
    words = (count + 63) // 64
    before = np.zeros((count, words), np.uint64)  # all that a task waits for, directly or not
    older, ends = np.zeros(16, np.int64), np.zeros(count + 1, np.int64)
    used = 0
    for task in range(count):
        for other in range(task - 1, -1, -1):  # the path that makes an edge superfluous leads over a newer task
            word, bit = other // 64, np.uint64(1) << np.uint64(other % 64)
            if before[task, word] & bit == np.uint64(0) and tasks_conflict(rows, offsets, everything, other, task):
                before[task] |= before[other]
                before[task, word] |= bit
                if used == len(older):
                    older = np.concatenate((older, np.zeros(used, np.int64)))
                older[used] = other
                used += 1
        ends[task + 1] = used
    return older[:used], ends
