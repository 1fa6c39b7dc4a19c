"""What it costs the host to put tasks onto a GPU, by scheduler.

    python scripts/bench_dispatch.py
    python scripts/bench_dispatch.py --robots ant --num-envs 32 1024

The tasks are those of a control step by stages, with its dependencies, but each launches the step's shortest kernel, so
that the window does not wait for the GPU. A call is launched without JAX; the time until it returns, which is before
the GPU has finished, divided by its tasks, is what the host spends on a task, the window included.

The dispatcher that stays on the GPU costs the host one launch. What it costs the GPU is measured with kernels that do
nothing, on all multiprocessors: the time of a launch until the GPU has finished, less that of a launch with half as
many tasks, divided by the tasks between them. Independent tasks, which several gangs take at once, give the time of a
task and multiprocessor; tasks of which each waits for the one before, the time from the end of a task to the end of its
dependent. A CUDA Graph that is a chain of such kernels is measured in the same way.

So are lists of tasks (bc.TaskStream), of one block each, under "hw", whose one window serves all multiprocessors, and
under "graph": what independent ones cost, those of a chain, and those that a predicate skips. A dependent starts on
another multiprocessor, as a rule: on that of the worker that has waited longest.

Records go to dispatch.jsonl in $OUT if it is set, else in benchmarks/.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from dataclasses import replace
from typing import Any

import _records
import gpu_smoke
import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

import brax_concurrent as bc
from brax_concurrent.backends import cuda_driver, nvvm
from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.cuda import TASK_TYPES, Function
from brax_concurrent.backends.cuda_link import DispatchPart
from brax_concurrent.backends.cuda_program import CudaOp, CudaPart, CudaProgram
from brax_concurrent.scheduler.cuda import compile_cuda, launch_program
from brax_concurrent.scheduler.cuda_dispatch import load_dispatch

SCHEDULES: tuple[dict[str, Any], ...] = (
    {"scheduler": "serial"},
    {"scheduler": "graph"},
    {"scheduler": "sw", "streams": 1},
    {"scheduler": "sw", "streams": 4},
    {"scheduler": "sw", "streams": 4, "window": 8},
    {"scheduler": "sw", "streams": 4, "window": 64},
)


def host_times(program: CudaProgram, num_envs: int, repeats: int) -> list[float]:
    """Microseconds of the host for each task, by call. Every call works on the same zeros."""
    arrays = [jnp.zeros(spec.array_shape(num_envs), spec.dtype) for spec in program.buffers]
    arena = jnp.zeros(program.scratch_bytes(num_envs), jnp.uint8)
    jax.block_until_ready((arrays, arena))
    addresses = [array.unsafe_buffer_pointer() for array in arrays]
    times = []
    with cuda_driver.primary_context():
        stream = gpu_smoke.Stream()
        for _ in range(repeats + 3):
            start = time.perf_counter()
            launch_program(program, addresses, arena.unsafe_buffer_pointer(), num_envs, stream.handle)
            times.append(1e6 * (time.perf_counter() - start) / len(program.ops))
            cuda_driver.call("cuStreamSynchronize", ctypes.c_void_p(stream.handle))
    return times[3:]


def short_tasks(part: CudaPart) -> CudaPart:
    """The part with the kernel `load` in place of every other: as many tasks, that depend on each other as before."""
    short = next(op for op in part.ops if op.kernel.name == "load")
    ops = [CudaOp(replace(op.kernel, handle=short.kernel.handle), short.arguments) for op in part.ops]
    return replace(part, ops=tuple(ops))


def measure(robot: str, part: CudaPart, num_envs: int, repeats: int) -> None:
    """Print and record the cost of a task under every scheduler."""
    for schedule in SCHEDULES:
        program = compile_cuda([part], multiprocessors=cuda_driver.multiprocessors(), **schedule)
        samples = host_times(program, num_envs, repeats)
        median, spread = statistics.median(samples), max(samples) - min(samples)
        said = ", ".join(f"{name} {value}" for name, value in schedule.items())
        print(f"{robot:12} {num_envs:6} envs, {len(program.ops)} tasks, {said:40} {median:7.2f} us a task", flush=True)
        _records.append(
            *("dispatch", robot, median, "us of the host/task", spread, len(samples)),
            backend="cuda",
            scheduler=schedule["scheduler"],
            granularity="stage",
            num_envs=num_envs,
            detail={name: value for name, value in schedule.items() if name != "scheduler"},
            directory=os.environ.get("OUT"),
        )


# --- the dispatcher ---------------------------------------------------------------------------------------------------


def idle_functions(count: int) -> tuple[Function, ...]:
    """Kernels of different names that do nothing."""
    found = []
    for number in range(count):
        module = nvvm.new_module(f"idle{number}")
        made = ir.Function(module, ir.FunctionType(ir.VoidType(), TASK_TYPES), f"idle{number}")
        ir.IRBuilder(made.append_basic_block("entry")).ret_void()
        found.append(Function(made.name, str(module)))
    return tuple(found)


def idle_program(steps: int, conflicts: frozenset[tuple[str, str]] | None) -> CudaProgram:
    """A program of the dispatcher: one tile on each multiprocessor, eight kernels that do nothing, so many times."""
    functions, blocks = idle_functions(8), cuda_driver.multiprocessors()
    buffers = (BufferSpec("x", (1,), "float32", "readwrite"),)
    part = DispatchPart(functions, (-1,) * len(functions), conflicts, len(buffers), 128, steps)
    loaded = load_dispatch([part], cuda_driver.compute_capability())
    ops = tuple(CudaOp(cuda_driver.Kernel(f.symbol, f.symbol, 0), ()) for f in functions)
    own = CudaPart(ops, 128, buffers, steps=steps)
    return compile_cuda([own], "hw", multiprocessors=blocks, dispatch=loaded)


def wall_times(program: CudaProgram, num_envs: int, repeats: int, calls: int = 1) -> list[float]:
    """Nanoseconds of so many calls until the GPU has finished."""
    arrays = [jnp.zeros(spec.array_shape(num_envs), spec.dtype) for spec in program.buffers]
    arena = jnp.zeros(program.scratch_bytes(num_envs), jnp.uint8)
    jax.block_until_ready((arrays, arena))
    addresses, times = [array.unsafe_buffer_pointer() for array in arrays], []
    with cuda_driver.primary_context():
        stream = gpu_smoke.Stream()
        for _ in range(repeats + 3):
            start = time.perf_counter()
            for _ in range(calls):
                launch_program(program, addresses, arena.unsafe_buffer_pointer(), num_envs, stream.handle)
            cuda_driver.call("cuStreamSynchronize", ctypes.c_void_p(stream.handle))
            times.append(1e9 * (time.perf_counter() - start))
    return times[3:]


def measure_dispatcher(repeats: int) -> None:
    """Print and record what a task costs the GPU, through the dispatcher and as a node of a graph."""
    num_envs, few, many = 32 * cuda_driver.multiprocessors(), 1000, 2000
    node = graph_node_times(repeats)
    for what, conflicts in (("independent", frozenset[tuple[str, str]]()), ("dependent", None)):
        short, long = (wall_times(idle_program(steps, conflicts), num_envs, repeats) for steps in (few, many))
        samples = [(b - a) / (8 * (many - few)) for a, b in zip(short, long, strict=True)]
        against: dict[str, Any] = (
            {}
            if what == "independent"
            else {"baseline": "graph", "ratio": statistics.median(node) / statistics.median(samples)}
        )
        record_gpu(what, "hw", samples, **against)
    record_gpu("dependent", "graph", node)


def graph_node_times(repeats: int) -> list[float]:
    """Nanoseconds of a node in a chain of kernels that do nothing, replayed as a CUDA Graph."""
    env = bc.make("halfcheetah", 32, backend="cuda")
    part = short_tasks(gpu_smoke.step_part(env, "stage", 128))
    program = compile_cuda([replace(part, upstream=None)], "graph", multiprocessors=cuda_driver.multiprocessors())
    short, long = (wall_times(program, 32, repeats, calls) for calls in (20, 40))
    return [(b - a) / (20 * len(program.ops)) for a, b in zip(short, long, strict=True)]


@bc.kernel(reads=("y",), writes=("y",))
def idle(unit: int, y: Any) -> None:
    """What a task of a list does: nothing."""


def idle_list(tasks: int, what: str) -> bc.TaskStream:
    """So many tasks of one block.

    Each is on a cell of its own, all are on the same if they are "dependent"; if they are "skipped", their predicate is
    0.
    """
    stream, other = bc.TaskStream(), bc.TaskStream()  # memory of another stream: nobody has to write it first
    memory = other.empty(2 * tasks, np.float32, device="cuda")
    flag = other.empty(1, np.int32, device="cuda")
    flag.copy_to_device(np.zeros(1, np.int32))
    for task in range(tasks):
        place = 0 if what == "dependent" else 2 * task
        stream.add(idle, units=1, y=memory[place : place + 1], predicate=flag if what == "skipped" else None)
    return stream


def list_times(tasks: int, what: str, scheduler: str, repeats: int) -> list[float]:
    """Nanoseconds of a list's runs."""
    stream, times = idle_list(tasks, what), []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        stream.run(scheduler)
        times.append(1e9 * (time.perf_counter() - start))
    return times[3:]


def measure_lists(repeats: int) -> None:
    """Print and record what a task of a list costs the GPU, with one window for all multiprocessors and as a graph."""
    few, many = 1000, 3000
    for what in ("independent", "dependent", "skipped"):
        found = {}
        for scheduler in ("graph", "hw"):
            short, long = (list_times(tasks, what, scheduler, repeats) for tasks in (few, many))
            found[scheduler] = [(b - a) / (many - few) for a, b in zip(short, long, strict=True)]
        ratio = statistics.median(found["graph"]) / statistics.median(found["hw"])
        record_gpu(what, "graph", found["graph"], True)
        record_gpu(what, "hw", found["hw"], True, baseline="graph", ratio=ratio)


def record_gpu(what: str, scheduler: str, samples: list[float], is_list: bool = False, **against: Any) -> None:
    """Print and record the time of a task on the GPU."""
    median, name = statistics.median(samples), "list" if is_list else "idle"
    print(f"{name:5} {what:12} {scheduler:6} {median:7.1f} ns a task", flush=True)
    alone = scheduler == "graph" and not is_list
    detail = {"tasks": what, "multiprocessors": 1 if alone else cuda_driver.multiprocessors()}
    _records.append(
        *("dispatch", name, median, "ns of the GPU/task", (max(samples) - min(samples)) / 2, len(samples)),
        **against,
        backend="cuda",
        scheduler=scheduler,
        num_envs=None if is_list else 32,
        batch=1 if is_list else None,
        granularity=None if is_list else "stage",
        detail=detail,
        directory=os.environ.get("OUT"),
    )


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robots", nargs="+", default=["halfcheetah"], choices=bc.list_envs())
    parser.add_argument("--num-envs", nargs="+", type=int, default=[32])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--only", choices=("host", "gpu"), help="instead of both")
    given = parser.parse_args()
    if given.only != "host":
        measure_dispatcher(given.repeats)
        measure_lists(given.repeats)
    for robot in given.robots if given.only != "gpu" else ():
        env = bc.make(robot, 32, backend="cuda")
        part = short_tasks(gpu_smoke.step_part(env, "stage", 128))
        for num_envs in given.num_envs:
            measure(robot, part, num_envs, given.repeats)


if __name__ == "__main__":
    main()
