"""Streams as machine code for GPUs: compiled without one, kept on disk as bytes, and loaded as parts of a program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from brax_concurrent.backends import cuda, cuda_driver
from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.cuda_dispatch import SLOTS
from brax_concurrent.backends.cuda_link import DispatchPart
from brax_concurrent.backends.cuda_program import WARP, CudaOp, CudaPart, CudaProgram
from brax_concurrent.backends.native import TILE
from brax_concurrent.envs.stream import WORK, Stream
from brax_concurrent.kernels.specialize import specialize, touched
from brax_concurrent.scheduler.cuda import compile_cuda
from brax_concurrent.scheduler.cuda_dispatch import LARGE_CODE, load_dispatch
from brax_concurrent.scheduler.footprint import conflicts
from brax_concurrent.scheduler.graph import reduced
from brax_concurrent.scheduler.schedule import Schedule
from brax_concurrent.scheduler.serial import TileLayout

_BLOCK, _LARGE_BLOCK = 128, 256


def pack(stream: Stream, dtype: str, buffers: Sequence[BufferSpec], compute_capability: tuple[int, int]) -> bytes:
    """A stream compiled for GPUs as a line of JSON and the kernels' machine code; needs no GPU.

    Args:
        stream: what to compile.
        dtype: "f32" or "f64".
        buffers: its arrays.
        compute_capability: of the GPU.
    """
    special = specialize(stream.kernels, stream.view, stream.fields, stream.user, dtype)
    code = cuda.compile_programs(special, compute_capability)
    cubins = {each.symbol: each.cubin for each in code.values()}
    header = {
        "kernels": {n: [each.symbol, each.arguments, *touched(special.programs[n])] for n, each in code.items()},
        "ops": [k.name for k in stream.kernels if k.name in code],
        "arena_bytes": special.layout.arena_bytes,
        "buffers": [asdict(b) for b in buffers],
        "sizes": {symbol: len(data) for symbol, data in cubins.items()},
    }
    return json.dumps(header).encode() + b"\n" + b"".join(cubins.values())


def load_part(packed: bytes, *, block: int = 0, lanes: int = WARP) -> CudaPart:
    """Load what `pack` made into the driver.

    Args:
        packed: see `pack`.
        block: threads of a block at most; 0: by the size of the code.
        lanes: environments of a warp.
    """
    line, _, data = packed.partition(b"\n")
    header = json.loads(line)
    cubins, start = {}, 0
    for symbol, size in header["sizes"].items():
        cubins[symbol] = data[start : start + size]
        start += size
    kernels = {}
    for name, (symbol, arguments, *_) in header["kernels"].items():
        kernels[name] = CudaOp(cuda_driver.load_kernel(name, symbol, cubins[symbol]), tuple(arguments))
    cuda_driver.make_resident(op.kernel for op in kernels.values())
    buffers = tuple(BufferSpec(**{**b, "shape": tuple(b["shape"])}) for b in header["buffers"])
    pairs, upstream = _dependencies(header, TileLayout(header["arena_bytes"], buffers))
    largest = max(map(len, cubins.values()), default=0)
    return CudaPart(
        ops=tuple(kernels[name] for name in header["ops"]),
        arena_bytes=header["arena_bytes"],
        buffers=buffers,
        upstream=upstream,
        conflicts=pairs,
        block=block or (_LARGE_BLOCK if largest > LARGE_CODE else _BLOCK),
        lanes=lanes,
    )


def pack_functions(stream: Stream, dtype: str, buffers: Sequence[BufferSpec]) -> bytes:
    """A stream as functions that the dispatcher calls, as a line of JSON; needs no GPU. See `pack`."""
    special = specialize(stream.kernels, stream.view, stream.fields, stream.user, dtype)
    code = cuda.functions(special, [b.name for b in buffers if b.per_step])
    header = {
        "kernels": {n: [each.symbol, [], *touched(special.programs[n])] for n, each in code.items()},
        "ops": [k.name for k in stream.kernels if k.name in code],
        "arena_bytes": special.layout.arena_bytes,
        "buffers": [asdict(b) for b in buffers],
        "whens": {name: special.programs[name].when for name in code},
        "code": {each.symbol: each.text for each in code.values()},
    }
    return json.dumps(header).encode()


@dataclass(frozen=True)
class Functions:
    """A stream as functions for the dispatcher: what the dispatcher needs, and the part that a program has."""

    dispatched: DispatchPart
    part: CudaPart


def load_functions(packed: bytes) -> Functions:
    """What `pack_functions` made."""
    header = json.loads(packed)
    buffers = tuple(BufferSpec(**{**b, "shape": tuple(b["shape"])}) for b in header["buffers"])
    pairs, upstream = _dependencies(header, TileLayout(header["arena_bytes"], buffers))
    symbols = {name: value[0] for name, value in header["kernels"].items()}
    functions = tuple(cuda.Function(symbols[name], header["code"][symbols[name]]) for name in header["ops"])
    whens = tuple(-1 if header["whens"][name] is None else header["whens"][name] for name in header["ops"])
    dispatched = DispatchPart(functions, whens, pairs, len(buffers), header["arena_bytes"])
    ops = tuple(CudaOp(cuda_driver.Kernel(name, symbols[name], 0), ()) for name in header["ops"])
    return Functions(dispatched, CudaPart(ops, header["arena_bytes"], buffers, upstream, pairs))


def dispatch_parts(
    parts: Sequence[Functions], schedule: Schedule, work: Sequence[float] = (1.0,), steps: int = 1
) -> CudaProgram:
    """A program of the dispatcher that repeats its ops `steps` times; `work` as for schedule_parts."""
    shared = [replace(each.dispatched, share=share, steps=steps) for each, share in zip(parts, work, strict=True)]
    loaded = load_dispatch(
        shared, cuda_driver.compute_capability(), gang=schedule.envs_per_task // TILE, policy=schedule.policy
    )
    own = _shared_out([replace(each.part, steps=steps) for each in parts], cuda_driver.multiprocessors(), work)
    if loaded.large if schedule.regroup is None else schedule.regroup:
        own = [replace(part, work=WORK if any(b.name == WORK for b in part.buffers) else "") for part in own]
    return compile_cuda(
        own,
        "hw",
        window=min(schedule.window, SLOTS),
        multiprocessors=cuda_driver.multiprocessors(),
        dispatch=loaded,
    )


def _dependencies(
    header: Mapping[str, Any], layout: TileLayout
) -> tuple[frozenset[tuple[str, str]], tuple[tuple[int, ...], ...]]:
    """Which kernels conflict within a tile, by symbol, and for each op those that it waits for directly."""
    footprints = {}
    for name, (_, _, reads, writes) in header["kernels"].items():
        spans = ([s if isinstance(s, str) else (s[0], s[1]) for s in side] for side in (reads, writes))
        footprints[name] = layout.footprint(*spans)(0)
    meet = {(a, b): conflicts(one, other) for a, one in footprints.items() for b, other in footprints.items()}
    symbols = {name: value[0] for name, value in header["kernels"].items()}
    pairs = frozenset((symbols[a], symbols[b]) for (a, b), found in meet.items() if found)
    ops = header["ops"]
    older = [frozenset(j for j in range(i) if meet[ops[j], ops[i]]) for i in range(len(ops))]
    return pairs, tuple(tuple(sorted(each)) for each in reduced(older))


def _shared_out(parts: Sequence[CudaPart], multiprocessors: int, work: Sequence[float]) -> list[CudaPart]:
    """Parts that run at once, with the multiprocessors divided among them by their work."""
    if len(parts) == 1:
        return list(parts)
    shares = [max(int(multiprocessors * each / sum(work)), 1) for each in work]
    return [replace(part, share=share) for part, share in zip(parts, shares, strict=True)]


def schedule_parts(
    parts: Sequence[CudaPart], schedule: Schedule, multiprocessors: int, work: Sequence[float] = ()
) -> CudaProgram:
    """A program of parts, cut and scheduled as asked for.

    Args:
        parts: what to run.
        schedule: how.
        multiprocessors: of the GPU.
        work: how the parts' work compares. Those that may run at once divide the multiprocessors among them like that;
            on one that two robots share, each robot's instructions push out the other's.
    """
    cut = [replace(part, unit_tiles=schedule.envs_per_task // TILE) for part in parts]
    if schedule.scheduler != "serial":
        cut = _shared_out(cut, multiprocessors, work)
    return compile_cuda(
        cut,
        schedule.scheduler,
        window=schedule.window,
        streams=schedule.streams,
        multiprocessors=multiprocessors,
    )
