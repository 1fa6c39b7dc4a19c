"""What it costs the host to put tasks onto a GPU, by scheduler.

    python scripts/bench_dispatch.py
    python scripts/bench_dispatch.py --robots ant --num-envs 32 1024

The tasks are those of a control step by stages, with its dependencies, but each launches the step's shortest kernel, so
that the window does not wait for the GPU. A call is launched without JAX; the time until it returns, which is before
the GPU has finished, divided by its tasks, is what the host spends on a task, the window included. Records go to
dispatch.jsonl in $OUT if it is set, else in benchmarks/.
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

import brax_concurrent as bc
from brax_concurrent.backends import cuda_driver
from brax_concurrent.backends.cuda_program import CudaOp, CudaPart, CudaProgram
from brax_concurrent.scheduler.cuda import compile_cuda, launch_program

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


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robots", nargs="+", default=["halfcheetah"], choices=bc.list_envs())
    parser.add_argument("--num-envs", nargs="+", type=int, default=[32])
    parser.add_argument("--repeats", type=int, default=21)
    given = parser.parse_args()
    for robot in given.robots:
        env = bc.make(robot, 32, backend="cuda")
        part = short_tasks(gpu_smoke.step_part(env, "stage", 128))
        for num_envs in given.num_envs:
            measure(robot, part, num_envs, given.repeats)


if __name__ == "__main__":
    main()
