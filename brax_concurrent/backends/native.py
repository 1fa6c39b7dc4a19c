"""The native runner: the kernels of a control step, tile by tile, on several threads, without Python.

A *kernel* is compiled code with the C signature

    void kernel(char *arena, char **buffers, int64_t first_env, int64_t num_envs)

that does its part of the work of ONE tile, the 32 environments from `first_env` on; it masks lanes at or
beyond `num_envs` itself. `arena` is scratch memory, 64-byte aligned, for what passes between the kernels of a
tile; `buffers` are the addresses of the user's row-major arrays, which are aligned to their items only.

A *program* is the list of kernels of one control step. One may have a *predicate*, an int32 for each of a
tile's lanes: where all of them are 0 it is skipped. Each thread has one arena and takes one tile after
another through the whole list. The arena is thereby renamed rather than allocated per tile: it stays in that
core's cache, and memory does not grow with the number of environments. Tiles are independent, so the number
of threads cannot change a bit of the result.

A program of several *steps* runs its list so many times on a tile, one time after the other, before the thread takes
another tile: several control steps with no barrier between them, in which a tile waits for none that is behind. Arrays
that have a part for each step (BufferSpec.per_step) are (steps, num_envs, ...); kernels get the address of the step's.

A *job* is one run of a program. Whoever takes part (`participate`, a C function of the job's address) claims
tiles from a shared counter until none are left. Nobody waits for a participant who has not started: the
starter works too, and a latecomer finds the tiles gone and leaves. The job's memory is counted, the last one
out frees it.

Programs are made in cpu_program.py, and run without JAX by cpu_run.py.

A *composite* (composite.py) is several programs in one, each for its own number of environments. Its job deals
the tiles of all of them, one part's after the other's.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import cfunc, njit, types

from brax_concurrent.backends import intrinsics
from brax_concurrent.backends.intrinsics import (
    CACHE_LINE,
    allocate,
    atomic_add,
    atomic_exchange,
    atomic_load,
    call_kernel,
    compare_and_set,
    fill_bytes,
    give_way,
    load_i32,
    load_i64,
    release,
    store_i64,
)

TILE = 32  # environments per tile
WORD = 8  # bytes of one int64, the unit of descriptors and jobs
PREDICATE_ROW = 4 * TILE  # bytes of an op's predicate: an int32 for each lane

# A program's descriptor: int64 words. From DESC_FIRST_OP on, pairs (kernel address, predicate offset), one
# for each op, or, in a composite, (address of a part's descriptor, the part's num_envs); then DESC_ARENAS cells,
# each 0 or the address of an arena that no thread is using.
DESC_MAGIC = 0  # which version of this file made it
DESC_PARTICIPATE = 1  # address of the C function that every participant of a job runs
DESC_OPS = 2  # number of ops
DESC_ARENA_BYTES = 3
DESC_THREADS = 4  # at most so many participants; 0 = as many as there are
DESC_BUFFERS = 5  # number of buffers
DESC_POISON = 6  # 1: fill the arena with NaN before each tile (finds reads of what was never written)
DESC_FINGERPRINT = 7  # content hash, the bits of a uint64
DESC_ARENAS = 8  # number of cells
DESC_NUM_ENVS = 9  # of a composite: environments of all its parts; 0: an ordinary program, for any number
DESC_TILES = 10  # of a composite: tiles of all its parts
DESC_STATE_WORDS = 11  # zeroed words that a job needs besides JOB_WORDS,
DESC_STATE_TILE_WORDS = 12  # and for each tile,
DESC_STATE_TILES = 13  # but for no more tiles than these
DESC_TILE_WIDTH = 14  # participants that one tile has work for; 0: one
DESC_WIDTH = 15  # participants that the whole program has work for; 0: no limit
# Of a program that a window runs: see scheduler/streams.py.
DESC_WINDOW = 16  # slots; 0: tiles are run in program order
DESC_INTERLEAVE = 17  # tiles that go through the program side by side
DESC_ORDERED = 18  # 1: a tile waits for all tiles before it
DESC_TIMEOUT = 19  # nanoseconds in which something must finish
DESC_PLAN = 20  # address of what it knows of each part
DESC_RECORDS = 21  # address of a buffer for what is recorded, 0: none
DESC_CAPACITY = 22  # rows that it has
DESC_RECORDABLE = 23  # 1: it runs in program order and can be recorded, see scheduler/records.py
DESC_GROUP = 24  # tiles that a participant has in its own window at most, see scheduler/hw_tiles.py
DESC_STEPS = 25  # how often a tile runs the ops; 0: once; of a composite: the most of any part
DESC_STEP_BYTES = 26  # address of a word for each buffer: bytes per environment by which it moves on from step to step
DESC_SCRATCH_BYTES = 27  # behind the arena, for the addresses of a step's buffers
DESC_FIRST_OP = 32

# A job: int64 words. The counters that threads fight over have a cache line each.
JOB_DESC = 0  # address of the descriptor
JOB_BUFFERS = 1  # address of the array of buffer addresses
JOB_NUM_ENVS = 2
JOB_TILES = 3
JOB_CHUNK = 4  # tiles claimed at once
JOB_STATE = 5  # address of the words that the descriptor asks for, zeroed at the start
JOB_MESSAGE = 6  # address of a C string that says why the job failed, 0: its status says it
JOB_NEXT = 8  # the first tile that nobody has claimed
JOB_DONE = 16  # tiles finished
JOB_REFERENCES = 24  # the job is freed when this falls to 0
JOB_WORDS = 32

OK, NO_MEMORY, WRONG_VERSION, STUCK = 0, 1, 2, 3  # what `participate` returns
_CLOSED = 1 << 40  # added to JOB_NEXT: beyond every tile

_SIGNATURE = types.int64(types.int64)


# --- compiled code -----------------------------------------------------------------------------


@njit(nogil=True)
def take_arena(desc: int) -> int:
    """An arena of the program: one that was used before, or a new one; 0 if there is no memory."""
    cell = desc + WORD * (DESC_FIRST_OP + 2 * load_i64(desc + WORD * DESC_OPS))
    for index in range(load_i64(desc + WORD * DESC_ARENAS)):
        if load_i64(cell + WORD * index) != 0:
            arena = atomic_exchange(cell + WORD * index, 0)
            if arena != 0:
                return arena
    size = load_i64(desc + WORD * DESC_ARENA_BYTES) + load_i64(desc + WORD * DESC_SCRATCH_BYTES)
    return allocate(max(size, CACHE_LINE))


@njit(nogil=True)
def give_back_arena(desc: int, arena: int) -> None:
    """Keep the arena for a later job, or free it when there are enough."""
    cell = desc + WORD * (DESC_FIRST_OP + 2 * load_i64(desc + WORD * DESC_OPS))
    for index in range(load_i64(desc + WORD * DESC_ARENAS)):
        if load_i64(cell + WORD * index) == 0 and compare_and_set(cell + WORD * index, 0, arena) == 1:
            return
    release(arena)


@njit(nogil=True)
def some_lane_wants(arena: int, predicate: int, environments: int) -> bool:
    """Whether an op runs: it has no predicate (-1), or the row of int32 at that offset is not all 0.

    environments counts from the tile's first to the batch's last. Kernels may leave lanes beyond it unwritten.
    """
    if predicate < 0:
        return True
    some = 0
    for lane in range(min(TILE, environments)):
        some |= load_i32(arena + predicate + 4 * lane)
    return some != 0


@njit(nogil=True)
def run_tiles(desc: int, arena: int, buffers: int, num_envs: int, first_tile: int, stop_tile: int) -> None:
    """Run the program's ops in order on one tile after another of [first_tile, stop_tile), in one arena.

    desc is the address of the descriptor, buffers that of the array of buffer addresses.
    """
    ops = load_i64(desc + WORD * DESC_OPS)
    poison = load_i64(desc + WORD * DESC_POISON)
    for tile in range(first_tile, stop_tile):
        if poison != 0:
            fill_bytes(arena, 255, load_i64(desc + WORD * DESC_ARENA_BYTES))
        op = desc + WORD * DESC_FIRST_OP
        for _ in range(ops):
            if some_lane_wants(arena, load_i64(op + WORD), num_envs - tile * TILE):
                call_kernel(load_i64(op), arena, buffers, tile * TILE, num_envs)
            op += 2 * WORD


@njit(nogil=True)
def run_steps(desc: int, arena: int, buffers: int, num_envs: int, first_tile: int, stop_tile: int) -> None:
    """Run all steps of the program on one tile after another: `run_tiles` once for each step."""
    steps = load_i64(desc + WORD * DESC_STEPS)
    if steps <= 1:
        run_tiles(desc, arena, buffers, num_envs, first_tile, stop_tile)
        return
    count, moves = load_i64(desc + WORD * DESC_BUFFERS), load_i64(desc + WORD * DESC_STEP_BYTES)
    # The caller's addresses serve all threads, so each has a copy that it changes, behind its arena.
    own = arena + (load_i64(desc + WORD * DESC_ARENA_BYTES) + WORD - 1) // WORD * WORD
    for tile in range(first_tile, stop_tile):
        for step in range(steps):
            for index in range(count):
                moved = load_i64(moves + WORD * index) * num_envs * step
                store_i64(own + WORD * index, load_i64(buffers + WORD * index) + moved)
            run_tiles(desc, arena, own, num_envs, tile, tile + 1)


@njit(nogil=True)
def run_composite_tile(desc: int, arena: int, buffers: int, tile: int) -> None:
    """Run one of a composite's tiles: `tile` counts on from part to part.

    A part's kernels get its own slice of the buffers, its own num_envs, and the arena, which has room for any.
    """
    part = desc + WORD * DESC_FIRST_OP
    num_envs = load_i64(part + WORD)
    while tile * TILE >= num_envs:
        tile -= (num_envs + TILE - 1) // TILE
        buffers += WORD * load_i64(load_i64(part) + WORD * DESC_BUFFERS)
        part += 2 * WORD
        num_envs = load_i64(part + WORD)
    run_steps(load_i64(part), arena, buffers, num_envs, tile, tile + 1)


@njit(nogil=True)
def _work(job: int) -> int:
    """Claim and run tiles until none are left."""
    tiles = load_i64(job + WORD * JOB_TILES)
    if atomic_load(job + WORD * JOB_NEXT) >= tiles:
        return OK  # late: touch nothing but the job
    desc = load_i64(job + WORD * JOB_DESC)
    arena = take_arena(desc)
    if arena == 0:
        return NO_MEMORY
    buffers = load_i64(job + WORD * JOB_BUFFERS)
    num_envs = load_i64(job + WORD * JOB_NUM_ENVS)
    composite = load_i64(desc + WORD * DESC_NUM_ENVS) != 0
    # A composite's tiles are claimed one by one: one part's may take twenty times as long as another's.
    chunk = 1 if composite else load_i64(job + WORD * JOB_CHUNK)
    first = atomic_add(job + WORD * JOB_NEXT, chunk)
    while first < tiles:
        stop = min(first + chunk, tiles)
        if composite:
            run_composite_tile(desc, arena, buffers, first)
        else:
            run_steps(desc, arena, buffers, num_envs, first, stop)
        atomic_add(job + WORD * JOB_DONE, stop - first)
        first = atomic_add(job + WORD * JOB_NEXT, chunk)
    give_back_arena(desc, arena)
    return OK


@njit(nogil=True)
def drop_reference(job: int) -> None:
    """Give up one reference to the job; the last one frees it."""
    if atomic_add(job + WORD * JOB_REFERENCES, -1) == 1:
        release(job)


@njit(nogil=True)
def wait_for_claimed(job: int) -> int:
    """Let no more tiles be claimed and wait for the claimed ones: all of them, unless a participant failed.

    Only participants that are running are waited for, so this ends whatever the thread pool does.
    """
    claimed = min(atomic_add(job + WORD * JOB_NEXT, _CLOSED), load_i64(job + WORD * JOB_TILES))
    while atomic_load(job + WORD * JOB_DONE) < claimed:
        give_way()
    return claimed


@njit(nogil=True)
def count_tiles(desc: int, num_envs: int) -> int:
    """Tiles of a job for num_envs environments; 0 if the program is a composite for another number."""
    composite = load_i64(desc + WORD * DESC_NUM_ENVS)
    if composite == 0:
        return (num_envs + TILE - 1) // TILE
    return load_i64(desc + WORD * DESC_TILES) if composite == num_envs else 0


@njit(nogil=True)
def state_words(desc: int, tiles: int) -> int:
    """Words that a job of so many tiles needs besides JOB_WORDS."""
    counted = min(tiles, load_i64(desc + WORD * DESC_STATE_TILES))
    return load_i64(desc + WORD * DESC_STATE_WORDS) + counted * load_i64(desc + WORD * DESC_STATE_TILE_WORDS)


@njit(nogil=True)
def useful_threads(tiles: int, tile_width: int, width: int) -> int:
    """Participants that so many tiles have work for; the rest is DESC_TILE_WIDTH and DESC_WIDTH."""
    threads = tiles * max(tile_width, 1)
    return threads if width == 0 else min(threads, width)


@njit(nogil=True)
def tiles_per_claim(tiles: int, threads: int) -> int:
    """Neighbouring tiles share pages and prefetches; eight claims per thread are left to even out the end."""
    return min(max(tiles // (8 * threads), 1), 16)


def _make_participate(magic: int) -> Callable[[int], int]:
    # A value of the closure is part of Numba's cache key, the content of imported files is not: `magic`
    # keeps code compiled from an older version of them from being loaded.
    def participate(job: int) -> int:
        current = load_i64(load_i64(job + WORD * JOB_DESC) + WORD * DESC_MAGIC) == magic
        status = _work(job) if current else WRONG_VERSION
        drop_reference(job)
        return status

    return participate


def source_hash(*files: str | None) -> int:
    """A positive int63 of the content of source files; random, which defeats caching, if unreadable."""
    digest = hashlib.sha256()
    for file in files:
        try:
            digest.update(Path(str(file)).read_bytes())
        except OSError:
            digest.update(os.urandom(16))
    return int.from_bytes(digest.digest()[:8], "little") >> 1 or 1


def compile_callback(function: Callable[..., Any], signature: Any = _SIGNATURE) -> Any:
    """Compile to a C function, or load it from Numba's on-disk cache. Keep the result: it owns the code."""
    try:
        return cfunc(signature, cache=True, error_model="numpy")(function)
    except Exception:  # no writable cache directory, a damaged file: the cache is a convenience
        return cfunc(signature, error_model="numpy")(function)


@functools.cache
def participate_callback() -> tuple[int, Any]:
    """The magic of this version, and its compiled `participate`."""
    magic = source_hash(__file__, intrinsics.__file__)
    return magic, compile_callback(_make_participate(magic))
