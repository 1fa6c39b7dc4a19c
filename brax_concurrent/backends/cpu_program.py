"""Programs for the native runner: what they are made of, and their descriptors. native.py says what runs them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from brax_concurrent.backends.native import (
    DESC_ARENA_BYTES,
    DESC_ARENAS,
    DESC_BUFFERS,
    DESC_FINGERPRINT,
    DESC_FIRST_OP,
    DESC_MAGIC,
    DESC_NUM_ENVS,
    DESC_OPS,
    DESC_PARTICIPATE,
    DESC_POISON,
    DESC_SCRATCH_BYTES,
    DESC_STEP_BYTES,
    DESC_STEPS,
    DESC_THREADS,
    PREDICATE_ROW,
    WORD,
    participate_callback,
)

ALWAYS = -1  # predicate offset of an op that is never skipped

Access = Literal["read", "write", "readwrite"]
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
    per_step  whether there is one for each environment in each step of the program: (steps, num_envs, *shape)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    access: Access
    per_env: bool = True
    per_step: bool = False

    def __post_init__(self) -> None:
        if self.access not in ("read", "write", "readwrite"):
            raise ValueError(f"buffer {self.name}: access must be read, write or readwrite, got {self.access!r}")
        if self.per_step and (not self.per_env or self.access == "readwrite"):
            what = "readwrite" if self.per_env else "shared by all environments"
            raise ValueError(f"buffer {self.name}: what there is for each step is read or written, but it is {what}")
        object.__setattr__(self, "dtype", np.dtype(self.dtype).name)

    def array_shape(self, num_envs: int, steps: int = 1) -> tuple[int, ...]:
        """Shape of the whole array, in a program of so many steps."""
        shape = (num_envs, *self.shape) if self.per_env else self.shape
        return (steps, *shape) if self.per_step else shape

    @property
    def item_bytes(self) -> int:
        """Bytes of one environment's part in one step, or of the whole array if not per_env."""
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
    def steps(self) -> int:
        """How often each tile runs the ops."""
        return int(self.desc[DESC_STEPS]) or 1

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
    steps: int = 1,
    owners: Sequence[object] = (),
) -> CpuProgram:
    """A program from its kernels.

    Args:
      ops: (kernel address, predicate offset) in program order. The offset is that of a row of 32 int32 in the
        tile's arena, one for each lane: when all are 0 as the op's turn comes, the op is skipped for this tile.
        ALWAYS (-1): never skipped. Arenas are reused and not cleared: an earlier op of the same tile must have
        written the predicate.
      arena_bytes: scratch memory of one tile.
      buffers: the user's arrays, in the kernels' order.
      fingerprint: a uint64 that says what the program does (`content_hash`), without addresses.
      threads: run on at most so many; 0: on all.
      poison: fill the arena with NaN before each tile and step, to find kernels that read what was never written.
      steps: a tile runs the ops so many times.
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
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    for index, (kernel, predicate) in enumerate(ops):
        if kernel == 0:
            raise ValueError(f"op {index} has no kernel: its address is 0")
        if predicate != ALWAYS and not (0 <= predicate <= arena_bytes - PREDICATE_ROW and predicate % 4 == 0):
            raise ValueError(
                f"op {index}: predicate offset must be {ALWAYS} or a multiple of 4 with {PREDICATE_ROW} bytes within "
                f"the arena of {arena_bytes}, got {predicate}"
            )
    words = {DESC_OPS: len(ops), DESC_ARENA_BYTES: arena_bytes, DESC_THREADS: threads, DESC_POISON: poison}
    moves = np.array([spec.item_bytes if spec.per_step else 0 for spec in buffers], np.int64)
    words |= {DESC_STEPS: steps, DESC_STEP_BYTES: int(moves.ctypes.data)}
    words[DESC_SCRATCH_BYTES] = WORD * (len(buffers) + 1) if steps > 1 else 0  # and up to a word to align them
    return assemble(words, ops, buffers, fingerprint, (moves, *owners))


def assemble(
    words: Mapping[int, int],
    pairs: Sequence[tuple[int, int]],
    buffers: Sequence[BufferSpec],
    fingerprint: int,
    owners: Sequence[object],
    runner: tuple[int, Any] | None = None,
) -> CpuProgram:
    """A program from what its descriptor says: `words` by index, and the pairs from DESC_FIRST_OP on. No checks.

    runner is the magic and the callback of what carries it out; None: `native.participate_callback`.
    """
    magic, participate = runner or participate_callback()
    spare_arenas = min(max(2 * (words[DESC_THREADS] or cores()), words.get(DESC_ARENAS, 4)), 256)
    desc = np.zeros(DESC_FIRST_OP + 2 * len(pairs) + spare_arenas, np.int64)
    desc[DESC_MAGIC] = magic
    desc[DESC_PARTICIPATE] = participate.address
    for word, value in words.items():
        desc[word] = value
    desc[DESC_BUFFERS] = len(buffers)
    desc[DESC_FINGERPRINT] = np.uint64(fingerprint).astype(np.int64)
    desc[DESC_ARENAS] = spare_arenas  # not what `words` asked for
    desc[DESC_FIRST_OP : DESC_FIRST_OP + 2 * len(pairs)] = np.asarray(pairs, np.int64).reshape(-1)
    program = CpuProgram(desc, fingerprint, tuple(buffers), (participate, *owners))
    weakref.finalize(program, _free_arenas, desc).atexit = False  # at exit a thread may still be running it
    return program


def with_runner(
    program: CpuProgram, runner: tuple[int, Any], words: Mapping[int, int], fingerprint: int, owners: Sequence[object]
) -> CpuProgram:
    """A program of the same kernels and arrays that is carried out by something else.

    Args:
      program: which kernels and arrays.
      runner: the magic and the callback of the function that every participant runs; see DESC_PARTICIPATE.
      words: of the new descriptor, by index, where they differ.
      fingerprint: of the new program.
      owners: what must stay alive besides.
    """
    ops = int(program.desc[DESC_OPS])
    first, last = program.desc[DESC_FIRST_OP : DESC_FIRST_OP + 2 * ops].reshape(-1, 2).T.tolist()
    kept = {word: int(program.desc[word]) for word in range(DESC_OPS, DESC_FIRST_OP) if word != DESC_ARENAS}
    return assemble(
        {**kept, **words}, list(zip(first, last, strict=True)), program.buffers, fingerprint, (program, *owners), runner
    )


def _free_arenas(desc: np.ndarray) -> None:
    free = ctypes.CDLL(None).free
    for cell in range(len(desc) - int(desc[DESC_ARENAS]), len(desc)):
        free(ctypes.c_void_p(int(desc[cell])))
        desc[cell] = 0


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
