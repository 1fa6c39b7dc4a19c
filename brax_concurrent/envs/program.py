"""Streams made runnable: specialised to the robot, compiled, and described to the backend's runner.

A stream that is made by this package's own code alone is kept on disk whole, under a hash of that code and of what was
asked for: a later process then neither traces nor compiles. Others are traced each time, and only their machine code is
kept, under a hash of the LLVM code it was made from. Nothing that is kept holds an address.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from brax_concurrent.backends import cpu, cuda, cuda_driver
from brax_concurrent.backends.cpu_program import ALWAYS, BufferSpec, CpuProgram
from brax_concurrent.backends.cuda_program import CudaProgram
from brax_concurrent.backends.native import TILE
from brax_concurrent.backends.objects import ObjectCache
from brax_concurrent.envs import program_cuda
from brax_concurrent.envs.stream import WORK, Array, Stream
from brax_concurrent.interop.jax_ffi import Program
from brax_concurrent.kernels.specialize import TileLayout as Layout
from brax_concurrent.kernels.specialize import specialize, touched
from brax_concurrent.scheduler.hw_tiles import compile_hw
from brax_concurrent.scheduler.schedule import Schedule
from brax_concurrent.scheduler.serial import (
    ArenaField,
    TileComposite,
    TileKernel,
    TileLayout,
    TileOp,
    TilePart,
    TileProgram,
    compile_composite,
    compile_serial,
)
from brax_concurrent.scheduler.streams import compile_window

if TYPE_CHECKING:
    from brax_concurrent.envs.base import Env
    from brax_concurrent.envs.policy import MlpPolicy

_PRECISIONS = {"float32": "f32", "float64": "f64"}


@cache
def source_fingerprint() -> str:
    """Hash of this package's source code."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def buffers_of(stream: Stream, dtype: str) -> tuple[BufferSpec, ...]:
    """The stream's arrays as the native runner knows them."""
    names = {"f": dtype, "i": "int32", "u": "uint32", "b": "bool"}
    return tuple(
        BufferSpec(name, _shape(a), names[a.dtype], a.access, not a.rows, a.per_step)  # type: ignore[arg-type]
        for name, a in stream.arrays.items()
    )


def _shape(array: Array) -> tuple[int, ...]:
    return (array.rows, array.columns) if array.rows else () if array.scalar else (array.columns,)


def compile_stream(
    make_stream: Callable[[], Stream],
    backend: str,
    dtype: str,
    threads: int,
    identity: str | None = None,
    schedule: Schedule | None = None,
) -> Program:
    """A stream as native code for a backend.

    Args:
        backend: "cpu" or "cuda".
        make_stream, dtype, threads, identity, schedule: see compile_cpu and compile_cuda.
    """
    if backend == "cuda":
        return compile_cuda(make_stream, dtype, identity, schedule)
    return compile_cpu(make_stream, dtype, threads, identity, schedule)


def compile_env(env: Env, kind: str, policy: MlpPolicy | None = None, steps: int = 1) -> Program:
    """One of an environment's streams as native code, scheduled as it asks for.

    Args:
        env: the environment.
        kind: "control_step", "reset_all", "reset_where", "restart" or "rollout".
        policy, steps: of a rollout, who acts and for how many control steps. On the CPU a tile goes through all of them
            in program order, whatever the schedule: other tiles do not wait for it, nor it for them.

    Raises:
        ValueError: a rollout on a GPU with another scheduler than "hw".
    """
    if kind == "rollout" and env.backend == "cuda":
        if env.scheduler != "hw":
            raise ValueError(
                "on a GPU a rollout is one stream with scheduler='hw' only; use bc.rollout(..., fused=False)"
            )
        # One tile has a multiprocessor, or few share it: parts of the policy keep its other gangs busy.
        # A policy in parts uses the gangs that are idle where a multiprocessor has one tile; with more there are none.
        few = env.num_envs <= TILE * cuda_driver.multiprocessors()
        make_stream, identity = env.stream(kind, policy, split=few)
        return program_cuda.dispatch_parts(
            [_functions(make_stream, env.dtype.name, identity)], env.schedule, steps=steps
        )
    if kind == "rollout":
        return compile_serial(replace(tile_program(env, kind, policy), steps=steps), threads=env._threads)
    if env.backend == "cpu":
        return _scheduled(scheduled_tiles(env, kind), env._threads, env.schedule)
    make_stream, identity = env.stream(kind)
    # What is done once in an episode is not worth a dispatcher of its own.
    schedule = env.schedule if env.scheduler != "hw" or kind == "control_step" else Schedule()
    return compile_cuda(make_stream, env.dtype.name, identity, schedule)


def compile_mixed(parts: Sequence[tuple[str, Env, float]], kind: str, threads: int) -> Program:
    """A stream of several environments as one program.

    Args:
        parts: (name, environment, a guess at how its work compares), in the order of their tasks, all with the first
            one's backend and schedule.
        kind: see compile_env.
        threads: CPU threads at most; 0: as many as the environments allow.
    """
    _, first, _ = parts[0]
    if first.backend == "cpu":
        limits = [limit for limit in (threads, *(env._threads for _, env, _ in parts)) if limit]
        return _scheduled(tile_composite(parts, kind), min(limits, default=0), first.schedule)
    if first.schedule.scheduler == "hw" and kind == "control_step":
        return _dispatch_mixed(parts, kind)
    schedule = first.schedule if first.schedule.scheduler != "hw" else Schedule("sw")
    cuda_parts = []
    for name, env, _ in parts:
        own = env.program(kind)
        assert isinstance(own, CudaProgram)
        cuda_parts.append(replace(own.parts[0], name=name, num_envs=env.num_envs))
    work = [work for *_, work in parts]
    return program_cuda.schedule_parts(cuda_parts, schedule, cuda_driver.multiprocessors(), work)


def _dispatch_mixed(parts: Sequence[tuple[str, Env, float]], kind: str) -> CudaProgram:
    loaded = []
    for name, env, _ in parts:
        make_stream, identity = env.stream(kind)
        own = _functions(make_stream, env.dtype.name, identity)
        loaded.append(replace(own, part=replace(own.part, name=name, num_envs=env.num_envs)))
    return program_cuda.dispatch_parts(loaded, parts[0][1].schedule, [work for *_, work in parts])


def tile_composite(parts: Sequence[tuple[str, Env, float]], kind: str) -> TileComposite:
    """A stream of several environments on the CPU as schedulers see it; `parts` and `kind` as for compile_mixed."""
    return TileComposite(tuple(TilePart(name, scheduled_tiles(env, kind), env.num_envs) for name, env, _ in parts))


def scheduled_tiles(env: Env, kind: str) -> TileProgram:
    """What an environment's program is made of on the CPU: `tile_program` with kernels as its schedule needs them."""
    return tile_program(env, kind, grouped=kind == "control_step" and _groups(env.schedule))


def _groups(schedule: Schedule) -> bool:
    return schedule.scheduler == "hw" and schedule.regroup is True


def _scheduled(tiles: TileProgram | TileComposite, threads: int, schedule: Schedule) -> CpuProgram:
    if schedule.scheduler == "sw":
        return compile_window(tiles, threads=threads, window=schedule.window)
    if schedule.scheduler == "hw":
        return compile_hw(tiles, threads=threads, window=schedule.window, policy=schedule.policy)
    if isinstance(tiles, TileComposite):
        return compile_composite(tiles, threads=threads)
    return compile_serial(tiles, threads=threads)


def compile_cpu(
    make_stream: Callable[[], Stream],
    dtype: str,
    threads: int,
    identity: str | None = None,
    schedule: Schedule | None = None,
) -> CpuProgram:
    """A stream as native code for the CPU.

    Args:
        make_stream: builds the stream; not called when it is on disk.
        dtype: "float32" or "float64".
        threads: at most so many; 0: all.
        identity: says what the stream is, given this package's source; None: it is not kept whole.
        schedule: how it is scheduled; None: in program order.
    """
    schedule = schedule or Schedule()
    packed = _packed(make_stream, dtype, identity, _groups(schedule))
    return _scheduled(_tile_program(packed), threads, schedule)


def tile_program(
    env: Env,
    kind: str = "control_step",
    policy: MlpPolicy | None = None,
    split: bool = False,
    grouped: bool = False,
) -> TileProgram:
    """A program of an environment on the CPU as schedulers see it: kernels, footprints, program order.

    Args:
        env: the environment; its granularity is that of the control step.
        kind: "control_step", "reset_all", "reset_where", "restart" or "rollout".
        policy: of a rollout, who acts. The program is that of one step; kernels do not depend on how many there are.
        split: whether the policy is several kernels, as it is for the dispatcher of a GPU.
        grouped: whether its kernels take environments in an order that "hw" makes by their work; of robots that touch
            nothing they never do.

    Returns:
        The program; `layout.fields` says where fields lie in its arena.
    """
    key = (kind, policy, split, grouped)
    if key not in env.tile_programs:
        make_stream, identity = env.stream(kind, policy, split)
        env.tile_programs[key] = _tile_program(_packed(make_stream, env.dtype.name, identity, grouped))
    return env.tile_programs[key]


def compile_cuda(
    make_stream: Callable[[], Stream], dtype: str, identity: str | None = None, schedule: Schedule | None = None
) -> CudaProgram:
    """A stream as native code for the first GPU of this process, loaded into the driver.

    Args:
        make_stream, dtype, identity: see compile_cpu.
        schedule: how it is scheduled; None: in program order.

    Raises:
        CudaError: there is no GPU, or it refuses the code.
        ImportError: the code is not on disk, and NVIDIA's compilers are not installed.
    """
    schedule = schedule or Schedule()
    if schedule.scheduler == "hw":
        return program_cuda.dispatch_parts([_functions(make_stream, dtype, identity)], schedule)
    capability = cuda_driver.compute_capability()

    def make() -> bytes:
        stream = make_stream()
        return program_cuda.pack(stream, _PRECISIONS[dtype], buffers_of(stream, dtype), capability)

    part = program_cuda.load_part(_kept(identity, dtype, cuda.target(capability), make))
    return program_cuda.schedule_parts([part], schedule, cuda_driver.multiprocessors())


def _functions(make_stream: Callable[[], Stream], dtype: str, identity: str | None) -> program_cuda.Functions:
    """A stream as functions for the dispatcher."""

    def make() -> bytes:
        stream = make_stream()
        return program_cuda.pack_functions(stream, _PRECISIONS[dtype], buffers_of(stream, dtype))

    return program_cuda.load_functions(_kept(identity, dtype, "functions", make))


def _kept(identity: str | None, dtype: str, target: str, make: Callable[[], bytes]) -> bytes:
    """What `make` returns, from the disk if it was kept there; `target` is what else it depends on."""
    if identity is None:
        return make()
    store, parts = ObjectCache(), (source_fingerprint(), identity, dtype, target)
    key = "s" + hashlib.sha256(repr(parts).encode()).hexdigest()[:40]
    packed = store.get(key)
    if packed is None:
        packed = make()
        store.put(key, packed)
    return packed


def _packed(make_stream: Callable[[], Stream], dtype: str, identity: str | None, grouped: bool) -> bytes:
    target = f"{cpu.target()}{' grouped' * grouped}"
    return _kept(identity, dtype, target, lambda: _pack(make_stream(), dtype, grouped))


def _pack(stream: Stream, dtype: str, grouped: bool = False) -> bytes:
    """A compiled stream as a line of JSON and the kernels' object code; `grouped` as for tile_program."""
    special = specialize(stream.kernels, stream.view, stream.fields, stream.user, _PRECISIONS[dtype])
    code = cpu.compile_programs(special, grouped=grouped and WORK in stream.arrays)
    kept = [k.name for k in stream.kernels if special.programs[k.name].root.body]
    ops = [code[name].symbol for name in kept]
    objects = {code[name].symbol: code[name].object for name in code if code[name].symbol in ops}
    names = {code[name].symbol: name for name in code}
    header = {
        "ops": ops,
        "when": [special.programs[name].when for name in kept],
        "kernels": {symbol: (names[symbol], *touched(special.programs[names[symbol]])) for symbol in objects},
        "arena_bytes": special.layout.arena_bytes,
        "work": WORK if grouped and WORK in stream.arrays else "",
        "buffers": [asdict(b) for b in buffers_of(stream, dtype)],
        "fields": _fields(special.layout, stream, dtype),
        "sizes": {symbol: len(data) for symbol, data in objects.items()},
    }
    return json.dumps(header).encode() + b"\n" + b"".join(objects.values())


def _fields(layout: Layout, stream: Stream, dtype: str) -> dict[str, tuple[int, int, str]]:
    """By field, its bytes [start, stop) of the arena, where its rows lie side by side, and its dtype."""
    rows: dict[str, list[int]] = {}
    for (name, _), row in layout.rows.items():
        rows.setdefault(name, []).append(row)
    types = {"f": dtype, "i": "int32"}
    size = layout.row_bytes
    return {name: (min(r) * size, (max(r) + 1) * size, types[stream.fields[name].dtype]) for name, r in rows.items()}


def _tile_program(packed: bytes) -> TileProgram:
    """What `_pack` packed, as the schedulers see it: kernels with their footprints, in program order."""
    line, _, objects = packed.partition(b"\n")
    header = json.loads(line)
    buffers = tuple(BufferSpec(**{**b, "shape": tuple(b["shape"])}) for b in header["buffers"])
    fields = tuple(ArenaField(name, *what) for name, what in header["fields"].items())
    layout = TileLayout(header["arena_bytes"], buffers, fields)
    kernels, start = {}, 0
    for symbol, size in header["sizes"].items():
        name, *spans = header["kernels"][symbol]
        reads, writes = ([s if isinstance(s, str) else (s[0], s[1]) for s in side] for side in spans)
        address = cpu.Code(symbol, objects[start : start + size]).address
        kernels[symbol] = TileKernel(name, address, symbol, layout.footprint(reads, writes, kernel=name))
        start += size
    predicates = (ALWAYS if when is None else when for when in header["when"])
    ops = tuple(map(TileOp, (kernels[symbol] for symbol in header["ops"]), predicates))
    return TileProgram(layout, ops, work=header["work"])
