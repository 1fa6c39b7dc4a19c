"""The native runner: the kernels of a control step, tile by tile, on several threads, without Python.

A *kernel* is compiled code with the C signature

    void kernel(char *arena, char **buffers, int64_t first_env, int64_t num_envs)

that does its part of the work of ONE tile, the 32 environments from `first_env` on; it masks lanes at or
beyond `num_envs` itself. `arena` is scratch memory, 64-byte aligned, for what passes between the kernels of a
tile; `buffers` are the addresses of the user's row-major arrays, which are aligned to their items only.

A *program* is the list of kernels of one control step. Each thread has one arena and takes one tile after
another through the whole list. The arena is thereby renamed rather than allocated per tile: it stays in that
core's cache, and memory does not grow with the number of environments. Tiles are independent, so the number
of threads cannot change a bit of the result.

A *job* is one run of a program. Whoever takes part (`participate`, a C function of the job's address) claims
tiles from a shared counter until none are left. Nobody waits for a participant who has not started: the
starter works too, and a latecomer finds the tiles gone and leaves. The job's memory is counted, the last one
out frees it.

A *composite* (composite.py) is several programs in one, each for its own number of environments. Its job deals
the tiles of all of them, one part's after the other's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
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
)

TILE = 32  # environments per tile
ALWAYS = -1  # predicate offset of an op that is never skipped
WORD = 8  # bytes of one int64, the unit of descriptors and jobs

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
DESC_FIRST_OP = 16

# A job: int64 words. The counters that threads fight over have a cache line each.
JOB_DESC = 0  # address of the descriptor
JOB_BUFFERS = 1  # address of the array of buffer addresses
JOB_NUM_ENVS = 2
JOB_TILES = 3
JOB_CHUNK = 4  # tiles claimed at once
JOB_NEXT = 8  # the first tile that nobody has claimed
JOB_DONE = 16  # tiles finished
JOB_REFERENCES = 24  # the job is freed when this falls to 0
JOB_WORDS = 32

OK, NO_MEMORY, WRONG_VERSION = 0, 1, 2  # what `participate` returns
_CLOSED = 1 << 40  # added to JOB_NEXT: beyond every tile

_SIGNATURE = types.int64(types.int64)
Access = Literal["read", "write", "readwrite"]


# --- compiled code -----------------------------------------------------------------------------


@njit(nogil=True)
def _take_arena(desc: int) -> int:
    """An arena of the program: one that was used before, or a new one; 0 if there is no memory."""
    cell = desc + WORD * (DESC_FIRST_OP + 2 * load_i64(desc + WORD * DESC_OPS))
    for index in range(load_i64(desc + WORD * DESC_ARENAS)):
        if load_i64(cell + WORD * index) != 0:
            arena = atomic_exchange(cell + WORD * index, 0)
            if arena != 0:
                return arena
    return allocate(max(load_i64(desc + WORD * DESC_ARENA_BYTES), CACHE_LINE))


@njit(nogil=True)
def _give_back_arena(desc: int, arena: int) -> None:
    """Keep the arena for a later job, or free it when there are enough."""
    cell = desc + WORD * (DESC_FIRST_OP + 2 * load_i64(desc + WORD * DESC_OPS))
    for index in range(load_i64(desc + WORD * DESC_ARENAS)):
        if load_i64(cell + WORD * index) == 0 and compare_and_set(cell + WORD * index, 0, arena) == 1:
            return
    release(arena)


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
            predicate = load_i64(op + WORD)
            if predicate < 0 or load_i32(arena + predicate) != 0:
                call_kernel(load_i64(op), arena, buffers, tile * TILE, num_envs)
            op += 2 * WORD


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
    run_tiles(load_i64(part), arena, buffers, num_envs, tile, tile + 1)


@njit(nogil=True)
def _work(job: int) -> int:
    """Claim and run tiles until none are left."""
    tiles = load_i64(job + WORD * JOB_TILES)
    if atomic_load(job + WORD * JOB_NEXT) >= tiles:
        return OK  # late: touch nothing but the job
    desc = load_i64(job + WORD * JOB_DESC)
    arena = _take_arena(desc)
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
            run_tiles(desc, arena, buffers, num_envs, first, stop)
        atomic_add(job + WORD * JOB_DONE, stop - first)
        first = atomic_add(job + WORD * JOB_NEXT, chunk)
    _give_back_arena(desc, arena)
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
def _participate() -> tuple[int, Any]:
    """The magic of this version, and its compiled `participate`."""
    magic = source_hash(__file__, intrinsics.__file__)
    return magic, compile_callback(_make_participate(magic))


# --- programs ----------------------------------------------------------------------------------


Plain = str | int | float | bool | bytes | None
"""What `content_hash` takes: values whose `repr` is the same in every process. None may be an address."""


def content_hash(*parts: Plain | tuple[Any, ...]) -> int:
    """A nonzero uint64 of plain values and nested tuples of them, the same in every process.

    Raises:
      TypeError: a part's `repr` may differ between processes or leave out some of its content.
    """

    def text(part: object) -> str:
        if isinstance(part, tuple):
            return f"({','.join(text(item) for item in part)})"
        if type(part) not in (str, int, float, bool, bytes, type(None)):
            raise TypeError(f"content_hash takes plain values, got {type(part).__name__}")
        return repr(part)

    return int.from_bytes(hashlib.sha256(text(parts).encode()).digest()[:8], "little") or 1


@dataclass(frozen=True)
class BufferSpec:
    """One of the user's row-major arrays.

    name      what messages call it
    shape     of one environment, the array being (num_envs, *shape); the whole shape if not per_env
    dtype     NumPy name: float32, float64, int32, uint32, bool, uint8
    access    read: an input; write: an output, wholly written by the program; readwrite: a carried
              array, input and output in one memory, which the program updates in place
    per_env   whether there is one for each environment
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    access: Access
    per_env: bool = True

    def __post_init__(self) -> None:
        if self.access not in ("read", "write", "readwrite"):
            raise ValueError(f"buffer {self.name}: access must be read, write or readwrite, got {self.access!r}")
        object.__setattr__(self, "dtype", np.dtype(self.dtype).name)

    def array_shape(self, num_envs: int) -> tuple[int, ...]:
        """Shape of the whole array."""
        return (num_envs, *self.shape) if self.per_env else self.shape

    @property
    def item_bytes(self) -> int:
        """Bytes of one environment's part, or of the whole array if not per_env."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, eq=False)
class CpuProgram:
    """A program ready to run. Make it with `build_program`, or several into one with `build_composite`.

    desc         (words,) int64: the descriptor, see DESC_*; its address is what native code holds
    fingerprint  uint64 content hash: equal means that the program does the same, in any process
    buffers      in the order in which kernels get them
    owners       what must stay alive as long as the kernels' code is used
    """

    desc: np.ndarray
    fingerprint: int
    buffers: tuple[BufferSpec, ...]
    owners: tuple[object, ...] = ()

    @property
    def address(self) -> int:
        """Address of the descriptor."""
        return int(self.desc.__array_interface__["data"][0])

    @property
    def num_envs(self) -> int | None:
        """The number of environments that a composite is for; None: any number."""
        return int(self.desc[DESC_NUM_ENVS]) or None

    @property
    def inputs(self) -> tuple[BufferSpec, ...]:
        """Buffers that a caller passes."""
        return tuple(spec for spec in self.buffers if spec.access != "write")

    @property
    def outputs(self) -> tuple[BufferSpec, ...]:
        """Buffers that a caller gets back."""
        return tuple(spec for spec in self.buffers if spec.access != "read")


def build_program(
    ops: Sequence[tuple[int, int]],
    arena_bytes: int,
    buffers: Sequence[BufferSpec],
    fingerprint: int,
    *,
    threads: int = 0,
    poison: bool = False,
    owners: Sequence[object] = (),
) -> CpuProgram:
    """A program from its kernels.

    Args:
      ops: (kernel address, predicate offset) in program order. The offset is that of an int32 in the tile's
        arena: when it is 0 as the op's turn comes, the op is skipped for this tile. ALWAYS (-1): never
        skipped. Arenas are reused and not cleared: an earlier op of the same tile must have written the
        predicate.
      arena_bytes: scratch memory of one tile.
      buffers: the user's arrays, in the kernels' order.
      fingerprint: a uint64 that says what the program does (`content_hash`), without addresses.
      threads: run on at most so many; 0: on all.
      poison: fill the arena with NaN before each tile, to find kernels that read what was never written.
      owners: objects that own the kernels' code.

    Raises:
      ValueError: an op without an address, a predicate outside the arena, or a number out of range.
    """
    if not 0 < fingerprint < 1 << 64:
        raise ValueError(f"fingerprint must be a nonzero uint64, got {fingerprint}")
    for spec in buffers:
        if spec.access != "read" and not spec.per_env:
            raise ValueError(
                f"buffer {spec.name}: all tiles would write it at once; only per_env buffers may be written"
            )
    if len({spec.name for spec in buffers}) != len(buffers):
        raise ValueError(f"buffer names must differ, got {[spec.name for spec in buffers]}")
    if threads < 0 or arena_bytes < 0:
        raise ValueError(f"threads and arena_bytes must not be negative, got {threads} and {arena_bytes}")
    for index, (kernel, predicate) in enumerate(ops):
        if kernel == 0:
            raise ValueError(f"op {index} has no kernel: its address is 0")
        if predicate != ALWAYS and not (0 <= predicate <= arena_bytes - 4 and predicate % 4 == 0):
            raise ValueError(
                f"op {index}: predicate offset must be {ALWAYS} or a multiple of 4 within the arena of "
                f"{arena_bytes} bytes, got {predicate}"
            )
    words = {DESC_OPS: len(ops), DESC_ARENA_BYTES: arena_bytes, DESC_THREADS: threads, DESC_POISON: poison}
    return assemble(words, ops, buffers, fingerprint, owners)


def assemble(
    words: Mapping[int, int],
    pairs: Sequence[tuple[int, int]],
    buffers: Sequence[BufferSpec],
    fingerprint: int,
    owners: Sequence[object],
) -> CpuProgram:
    """A program from what its descriptor says: `words` by index, and the pairs from DESC_FIRST_OP on. No checks."""
    magic, participate = _participate()
    spare_arenas = min(max(2 * (words[DESC_THREADS] or _cores()), 4), 256)
    desc = np.zeros(DESC_FIRST_OP + 2 * len(pairs) + spare_arenas, np.int64)
    desc[DESC_MAGIC] = magic
    desc[DESC_PARTICIPATE] = participate.address
    for word, value in words.items():
        desc[word] = value
    desc[DESC_BUFFERS] = len(buffers)
    desc[DESC_FINGERPRINT] = np.uint64(fingerprint).astype(np.int64)
    desc[DESC_ARENAS] = spare_arenas
    desc[DESC_FIRST_OP : DESC_FIRST_OP + 2 * len(pairs)] = np.asarray(pairs, np.int64).reshape(-1)
    program = CpuProgram(desc, fingerprint, tuple(buffers), (participate, *owners))
    weakref.finalize(program, _free_arenas, desc).atexit = False  # at exit a thread may still be running it
    return program


def _free_arenas(desc: np.ndarray) -> None:
    free = ctypes.CDLL(None).free
    for cell in range(len(desc) - int(desc[DESC_ARENAS]), len(desc)):
        free(ctypes.c_void_p(int(desc[cell])))
        desc[cell] = 0


# --- running without JAX -----------------------------------------------------------------------


def _checked_address(spec: BufferSpec, array: np.ndarray, num_envs: int) -> int:
    shape = spec.array_shape(num_envs)
    if array.shape != shape or array.dtype != spec.dtype:
        raise ValueError(
            f"buffer {spec.name}: expected {spec.dtype}{list(shape)}, got {array.dtype}{list(array.shape)}"
        )
    if not array.flags.c_contiguous:
        raise ValueError(f"buffer {spec.name}: expected a row-major contiguous array, got strides {array.strides}")
    if spec.access != "read" and not array.flags.writeable:
        raise ValueError(f"buffer {spec.name}: the program writes it, but the array is read-only")
    return int(array.__array_interface__["data"][0])


def _cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="brax_concurrent")


os.register_at_fork(after_in_child=_thread_pool.cache_clear)  # a child has none of its parent's threads


def run_program(program: CpuProgram, buffers: Sequence[np.ndarray], num_envs: int, threads: int | None = None) -> None:
    """Run a program on NumPy arrays, in place, without JAX and without the GIL.

    Args:
      program: what to run.
      buffers: one C-contiguous array per `program.buffers`, in that order, of exactly that shape and dtype.
      num_envs: environments, at least 1; a composite's own number.
      threads: at most so many threads; 0: on all cores; None: the program's number.

    Raises:
      ValueError: a number is out of range, or an array does not fit its specification.
      MemoryError: no memory for the arenas; the arrays are then partly updated.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, got {num_envs}")
    if program.num_envs not in (None, num_envs):
        raise ValueError(f"num_envs must be {program.num_envs}, all environments of the composite, got {num_envs}")
    if len(buffers) != len(program.buffers):
        names = ", ".join(spec.name for spec in program.buffers)
        raise ValueError(f"expected {len(program.buffers)} buffers ({names}), got {len(buffers)}")
    addresses = np.array(
        [_checked_address(spec, array, num_envs) for spec, array in zip(program.buffers, buffers, strict=True)],
        np.int64,
    )
    tiles = int(program.desc[DESC_TILES]) or -(-num_envs // TILE)
    wanted = int(program.desc[DESC_THREADS]) if threads is None else threads
    if wanted < 0:
        raise ValueError(f"threads must not be negative, got {threads}")
    threads = min(wanted or _cores(), tiles)
    job = np.zeros(JOB_WORDS, np.int64)
    job[JOB_DESC] = program.address
    job[JOB_BUFFERS] = addresses.ctypes.data
    job[JOB_NUM_ENVS] = num_envs
    job[JOB_TILES] = tiles
    job[JOB_CHUNK] = tiles_per_claim.py_func(tiles, threads)
    job[JOB_REFERENCES] = threads + 1  # one more than participants: this array is not theirs to free
    participate = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(int(program.desc[DESC_PARTICIPATE]))
    helpers = [_thread_pool(threads - 1).submit(participate, job.ctypes.data) for _ in range(threads - 1)]
    statuses = [participate(job.ctypes.data), *(helper.result() for helper in helpers)]
    if job[JOB_DONE] != tiles:
        failure = RuntimeError if WRONG_VERSION in statuses else MemoryError
        raise failure(f"the program stopped after {job[JOB_DONE]} of {tiles} tiles, statuses {statuses}")
