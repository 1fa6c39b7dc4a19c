"""Programs on the GPU: what compiled code reads to launch the kernels of a control step.

A *kernel* is one of backends/cuda.py. A *part* is the list of kernels of one robot's control step with its buffers; a
program has one part or, for different robots in one batch, several. A part's tiles are dealt into *units*, runs of
neighbouring tiles: a task is one launch of one kernel on one unit. Who launches which task when is the scheduler's
business (scheduler/cuda_streams.py, scheduler/cuda_graph.py). The arenas of all tiles lie in one block of memory that
the caller provides; nothing is allocated on the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from brax_concurrent.backends import cuda_driver
from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.cuda_calls import Functions
from brax_concurrent.backends.native import TILE, WORD

MODES = ("serial", "sw", "graph", "hw")
SERIAL, WINDOW, GRAPH, DISPATCHED = range(4)  # their places

# A program's descriptor: int64 words. Lists lie behind the parts; who refers to one gives its offset in bytes.
DESC_MODE = 0  # SERIAL, WINDOW, GRAPH or DISPATCHED
DESC_PARTS = 1  # number of parts
DESC_TOTAL_ENVS = 2  # environments of all parts, 0: one part for any number
DESC_FUNCTIONS = 3  # address of the driver's functions, see cuda_calls.Functions
DESC_WINDOW, DESC_STREAMS = 4, 5  # slots of the window, CUDA streams
DESC_POOLS = 6  # address of the pools of streams and events by GPU (cuda_pool.py), 0: needs none
DESC_GRAPHS = 7  # address of the table of graphs (scheduler/cuda_graph.py), 0: needs none
DESC_TRACE = 8  # address of a block of trace rows (cuda_trace.py), 0: nothing is recorded
DESC_MULTIPROCESSORS = 9
DESC_TIMEOUT = 10  # nanoseconds that the host waits for the GPU to free a slot
DESC_BUFFERS, DESC_PARAMETERS = 11, 12  # of all parts; most of one launch
# Of a program of the dispatcher (scheduler/cuda_dispatch.py):
DESC_KERNEL = 13  # handle of its one kernel
DESC_WARPS = 14  # most warps of a block
DESC_GANG = 15  # warps of a gang, 0: by the number of tiles
DESC_POLICY = 16
DESC_CONTROL_BYTES = 17  # of scratch memory, behind the arenas
DESC_ERRORS = 18  # address of its error cell, which the host and the GPU see
DESC_REGROUP = 19  # handle of the kernel that orders environments by their work
DESC_MOST_GANG = 20  # warps of a gang at most, where DESC_GANG is 0
DESC_RUN = 21  # of a program that is recorded, how many calls there were
DESC_FIRST_PART = 24
PART_ENVS = 0  # 0: those of the call
PART_OPS, PART_FIRST_OP = 1, 2  # number of ops; offset of the first
PART_ARENA_BYTES = 3  # of one tile
PART_BLOCK, PART_LANES = 4, 5  # most threads of a block, environments of a warp
PART_UNIT_TILES = 6  # tiles of a unit, 0: all
PART_BUFFERS, PART_FIRST_BUFFER, PART_ROWS = 7, 8, 9  # their number, the first's index; offset of their bytes a row
PART_KINDS, PART_TABLE = 10, 11  # number of distinct kernels; address of (kinds, kinds) bytes: which of them conflict
PART_SHARE = 12  # multiprocessors for its blocks, 0: the GPU's
PART_WORK = 13  # which of its buffers says how much work an environment had; -1: environments are not regrouped
PART_WORDS = 14
OP_KERNEL, OP_NAME = 0, 1  # handle; address of its name, a C string
OP_COUNT, OP_PARAMETERS = 2, 3  # length and offset of the list of its parameters, places in a unit's record
OP_KIND = 4
OP_UPSTREAM = 5  # offset of a list: a number, and so many earlier ops that it waits for
OP_WORDS = 6

# A unit's record: the values of parameters, int64 words. From RECORD_FIRST_BUFFER on the buffers' addresses.
RECORD_ARENA, RECORD_NUM_ENVS, RECORD_LANES, RECORD_STAMP, RECORD_FIRST_BUFFER = 0, 1, 2, 3, 4
RECORD_ORDER = RECORD_LANES  # under hw: address of an int32 for each environment, or 0; see scheduler/dispatcher.py

ORDER_BYTES = 4 * TILE  # of a tile: which environments its lanes have, where they are regrouped
WARP, DEFAULT_BLOCK, MAX_BLOCK = 32, 128, 1024
MAX_WINDOW, MAX_STREAMS = 64, 16


@dataclass(frozen=True)
class CudaOp:
    """One kernel's place in a part: the kernel, and the names of the buffers that it takes.

    Attributes:
        kernel: what is launched. arguments: names of buffers, after the fixed parameters.
    """

    kernel: cuda_driver.Kernel
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class CudaPart:
    """The kernels of one robot's control step.

    Attributes:
        ops: in program order.
        arena_bytes: scratch memory of one tile.
        buffers: the user's arrays.
        upstream: for each op the earlier ops of its unit that it waits for, without the implied; None: the one before.
        conflicts: by kernel symbol, pairs that must run in program order within a unit; None: all.
        name: prefix of the buffers' names in a program of several parts.
        num_envs: environments; None: any number.
        block: most threads of a block, a multiple of 32. lanes: environments of a warp, 1 to 32.
        unit_tiles: tiles of a unit; 0: all, one launch for each op.
        share: multiprocessors that its blocks should fit on, while other parts use the others; 0: the GPU's.
        steps: how often a call repeats the ops, under the dispatcher.
        work: the buffer that says how much work an environment had, where the dispatcher regroups them by it.
    """

    ops: tuple[CudaOp, ...]
    arena_bytes: int
    buffers: tuple[BufferSpec, ...]
    upstream: tuple[tuple[int, ...], ...] | None = None
    conflicts: frozenset[tuple[str, str]] | None = None
    name: str = ""
    num_envs: int | None = None
    block: int = DEFAULT_BLOCK
    lanes: int = WARP
    unit_tiles: int = 0
    share: int = 0
    steps: int = 1
    work: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The distinct kernels by symbol, in order of their first use."""
        return tuple(dict.fromkeys(op.kernel.symbol for op in self.ops))

    def outer_buffers(self) -> tuple[BufferSpec, ...]:
        """The buffers as a program of several parts has them: of fixed shape, called NAME.BUFFER."""
        if self.num_envs is None:
            return self.buffers
        return tuple(
            replace(spec, name=f"{self.name}.{spec.name}", shape=spec.array_shape(self.num_envs), per_env=False)
            for spec in self.buffers
        )

    def content(self) -> tuple[object, ...]:
        """All that a part is, without addresses."""
        ops = tuple((op.kernel.symbol, op.arguments) for op in self.ops)
        conflicts = None if self.conflicts is None else tuple(sorted(self.conflicts))
        buffers = tuple((b.name, b.shape, b.dtype, b.access, b.per_env, b.per_step) for b in self.buffers)
        shape = (
            self.arena_bytes,
            self.block,
            self.lanes,
            self.unit_tiles,
            self.share,
            self.num_envs,
            self.name,
            self.work,
        )
        return ops, buffers, self.upstream, conflicts, shape


@dataclass(frozen=True, eq=False)
class CudaProgram:
    """A program ready to run. Make it with `build_program`.

    Attributes:
        desc: (words,) int64, the descriptor, see DESC_*; its address is what native code holds.
        fingerprint: uint64 content hash: equal means that the program does the same, in any process.
        buffers: the user's arrays.
        parts: what it launches.
        owners: what must stay alive as long as the program is used.
        traced: its launches are recorded, each at a place of its own.
    """

    desc: np.ndarray
    fingerprint: int
    buffers: tuple[BufferSpec, ...]
    parts: tuple[CudaPart, ...]
    owners: tuple[object, ...] = ()
    traced: bool = False

    @property
    def address(self) -> int:
        """Address of the descriptor."""
        return int(self.desc.ctypes.data)

    @property
    def num_envs(self) -> int | None:
        """The number of environments that a program of several parts is for; None: any number."""
        return int(self.desc[DESC_TOTAL_ENVS]) or None

    @property
    def steps(self) -> int:
        """How often a call repeats the ops."""
        return max(part.steps for part in self.parts)

    @property
    def ops(self) -> tuple[CudaOp, ...]:
        """The kernels of all parts."""
        return tuple(op for part in self.parts for op in part.ops)

    @property
    def captured(self) -> bool:
        """Whether XLA may capture its launches into a command buffer."""
        return int(self.desc[DESC_MODE]) in (SERIAL, DISPATCHED) and not self.traced

    @property
    def inputs(self) -> tuple[BufferSpec, ...]:
        """Buffers that a caller passes."""
        return tuple(spec for spec in self.buffers if spec.access != "write")

    @property
    def outputs(self) -> tuple[BufferSpec, ...]:
        """Buffers that a caller gets back."""
        return tuple(spec for spec in self.buffers if spec.access != "read")

    def scratch_bytes(self, num_envs: int) -> int:
        """Bytes of all arenas, and of what the dispatcher counts with."""
        total = int(self.desc[DESC_CONTROL_BYTES])
        for part in self.parts:
            tiles = -(-(part.num_envs or num_envs) // TILE)
            total += tiles * (part.arena_bytes + (ORDER_BYTES if part.work else 0))
        return total

    def content(self) -> tuple[object, ...]:
        """What must be equal in programs of one fingerprint: all but addresses."""
        mode = int(self.desc[DESC_MODE])
        knobs = {WINDOW: [DESC_WINDOW, DESC_STREAMS], DISPATCHED: [DESC_WINDOW, DESC_GANG, DESC_POLICY]}.get(mode, [])
        settings = self.desc[[DESC_MODE, DESC_TOTAL_ENVS, DESC_MULTIPROCESSORS, *knobs]].tolist()
        return tuple(part.content() for part in self.parts), tuple(settings)


def build_program(
    parts: Sequence[CudaPart],
    fingerprint: int,
    *,
    mode: str = "serial",
    window: int = 32,
    streams: int = 4,
    multiprocessors: int = 0,
    timeout_ns: int = 0,
    pools: int = 0,
    graphs: int = 0,
    functions: Functions | None = None,
    owners: Sequence[object] = (),
    dispatch: Mapping[int, int] | None = None,
) -> CudaProgram:
    """A program from its parts.

    Args:
        parts: one for any number of environments, or several with `num_envs`.
        fingerprint: a uint64 that says what the program does (`content_hash`), without addresses.
        mode: one of MODES.
        window, streams: slots of the window and CUDA streams of mode "sw".
        multiprocessors: of the GPU: with no more warps than that a block is one warp. 0: blocks have their full size.
        timeout_ns: how long the host waits for the GPU to free a slot.
        pools, graphs: addresses for DESC_POOLS and DESC_GRAPHS.
        functions: what to launch and copy with; None: the CUDA driver.
        owners: what must stay alive as long as the program is used.
        dispatch: of mode "hw": words DESC_KERNEL to DESC_ERRORS, and DESC_PARAMETERS, by their places.

    Raises:
        ValueError: a number is out of range, a buffer is not known, or one is written that all environments share.
    """
    if not 0 < fingerprint < 1 << 64:
        raise ValueError(f"fingerprint must be a nonzero uint64, got {fingerprint}")
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
    if not 1 <= window <= MAX_WINDOW:
        raise ValueError(f"window must be from 1 to {MAX_WINDOW}, got {window}")
    if not 1 <= streams <= MAX_STREAMS:
        raise ValueError(f"streams must be from 1 to {MAX_STREAMS}, got {streams}")
    if not parts:
        raise ValueError("parts: expected at least one, got none")
    for part in parts:
        _check_part(part, alone=len(parts) == 1)
    buffers = tuple(spec for part in parts for spec in part.outer_buffers())
    names = [spec.name for spec in buffers]
    if len(set(names)) != len(names):
        raise ValueError(f"buffer names must differ, got {names}")
    table = (functions or Functions.of_driver()).words()
    words = {
        DESC_MODE: MODES.index(mode),
        DESC_PARTS: len(parts),
        DESC_TOTAL_ENVS: sum(part.num_envs or 0 for part in parts),
        DESC_FUNCTIONS: int(table.ctypes.data),
        DESC_WINDOW: window,
        DESC_STREAMS: streams,
        DESC_POOLS: pools,
        DESC_GRAPHS: graphs,
        DESC_MULTIPROCESSORS: multiprocessors,
        DESC_TIMEOUT: timeout_ns,
        DESC_BUFFERS: len(buffers),
        DESC_PARAMETERS: max((RECORD_FIRST_BUFFER + len(op.arguments) for p in parts for op in p.ops), default=0),
        **(dispatch or {}),
    }
    desc, kept = _Writer(parts).write(words)
    return CudaProgram(desc, fingerprint, buffers, tuple(parts), (table, *kept, *owners))


def _check_part(part: CudaPart, alone: bool) -> None:
    if part.block % WARP != 0 or not WARP <= part.block <= MAX_BLOCK:
        raise ValueError(f"block must be a multiple of {WARP} of at most {MAX_BLOCK}, got {part.block}")
    if not 1 <= part.lanes <= WARP:
        raise ValueError(f"lanes must be from 1 to {WARP}, got {part.lanes}")
    for name in ("arena_bytes", "unit_tiles", "share"):
        if getattr(part, name) < 0:
            raise ValueError(f"{name} must not be negative, got {getattr(part, name)}")
    if part.num_envs is None and not alone:
        raise ValueError(f"part {part.name!r}: one of several parts needs num_envs")
    if part.num_envs is not None and part.num_envs < 1:
        raise ValueError(f"part {part.name!r}: num_envs must be at least 1, got {part.num_envs}")
    for spec in part.buffers:
        if spec.access != "read" and not spec.per_env:
            raise ValueError(
                f"buffer {spec.name}: all environments would write it at once; only per_env buffers may be written"
            )
    names = [spec.name for spec in part.buffers]
    for op in part.ops:
        unknown = [name for name in op.arguments if name not in names]
        if unknown:
            raise ValueError(f"kernel {op.kernel.name} takes {unknown}, which are no buffers; there are {names}")


class _Writer:
    """Writes the words of a descriptor: the header, the parts, and behind them lists."""

    def __init__(self, parts: Sequence[CudaPart]):
        self._parts = parts
        self._lists: list[int] = []
        self._first_list = DESC_FIRST_PART + PART_WORDS * len(parts)
        self._kept: list[np.ndarray] = []

    def write(self, header: Mapping[int, int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """The descriptor, and what it has the addresses of."""
        words = [header.get(word, 0) for word in range(DESC_FIRST_PART)]
        first_buffer = 0
        for part in self._parts:
            words += self._part(part, first_buffer)
            first_buffer += len(part.buffers)
        everything = [np.uint64(word & 0xFFFFFFFFFFFFFFFF) for word in words + self._lists]
        return np.array(everything, np.uint64).view(np.int64), self._kept

    def _put(self, items: Sequence[int]) -> int:
        """Write a list; its offset in bytes."""
        offset = WORD * (self._first_list + len(self._lists))
        self._lists += items
        return offset

    def _keep(self, array: np.ndarray) -> int:
        self._kept.append(array)
        return int(array.ctypes.data)

    def _part(self, part: CudaPart, first_buffer: int) -> list[int]:
        names = [spec.name for spec in part.buffers]
        kinds = part.kinds
        places: dict[tuple[str, ...], int] = {}
        strings: dict[str, int] = {}
        ops: list[int] = []
        for index, op in enumerate(part.ops):
            if op.arguments not in places:
                fixed = [RECORD_ARENA, RECORD_NUM_ENVS, RECORD_LANES, RECORD_STAMP]
                places[op.arguments] = self._put(
                    [*fixed, *(RECORD_FIRST_BUFFER + names.index(name) for name in op.arguments)]
                )
            name = op.kernel.name
            if name not in strings:
                strings[name] = self._keep(np.frombuffer(name.encode() + b"\0", np.uint8))
            older = ((index - 1,) if index else ()) if part.upstream is None else part.upstream[index]
            upstream = self._put([len(older), *older])
            count, kind = RECORD_FIRST_BUFFER + len(op.arguments), kinds.index(op.kernel.symbol)
            ops += [op.kernel.handle, strings[name], count, places[op.arguments], kind, upstream]
        table = np.ones((len(kinds), len(kinds)), np.uint8)
        if part.conflicts is not None:
            for i, one in enumerate(kinds):
                for j, other in enumerate(kinds):
                    table[i, j] = (one, other) in part.conflicts or (other, one) in part.conflicts
        rows = self._put([spec.item_bytes if spec.per_env else 0 for spec in part.buffers])
        words = {
            PART_ENVS: part.num_envs or 0,
            PART_OPS: len(part.ops),
            PART_FIRST_OP: self._put(ops),
            PART_ARENA_BYTES: part.arena_bytes,
            PART_BLOCK: part.block,
            PART_LANES: part.lanes,
            PART_UNIT_TILES: part.unit_tiles,
            PART_BUFFERS: len(part.buffers),
            PART_FIRST_BUFFER: first_buffer,
            PART_ROWS: rows,
            PART_KINDS: len(kinds),
            PART_TABLE: self._keep(table),
            PART_SHARE: part.share,
            PART_WORK: names.index(part.work) if part.work else -1,
        }
        return [words[word] for word in range(PART_WORDS)]
