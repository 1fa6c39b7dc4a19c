"""One run on a GPU that says whether the CUDA backend computes what the CPU does, and how fast it is.

    python scripts/gpu_smoke.py
    python scripts/gpu_smoke.py --robots ant --envs 4096 --parts speed kernels --granularity stage step

Its parts, in this order:
agreement   resets and 20 control steps on both backends from the same state with the same actions, compared bit by bit
speed       control steps a second in a jitted scan that draws random actions, compile time apart
kernels     the time of each kernel of a control step, and of all of them, launched without JAX
captured    speed again, with the scan's body captured into command buffers (CUDA graphs)

Results are printed and appended, as benchmarks/README.md describes, to files in $OUT if it is set, else in benchmarks/.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import _records
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import brax_concurrent as bc
from brax_concurrent.backends import cuda_driver, cuda_program, nvvm
from brax_concurrent.backends.cuda_program import CudaOp, CudaPart, CudaProgram
from brax_concurrent.envs import program as env_program
from brax_concurrent.envs import program_cuda
from brax_concurrent.envs.stream import StreamBuilder
from brax_concurrent.scheduler.cuda import compile_cuda, launch_program

PARTS = ("agreement", "speed", "kernels", "captured")
COMPARED = ("qpos", "qvel", "obs", "reward", "terminated", "truncated")
CAPTURE_ALL = {"xla_gpu_graph_min_graph_size": 1}


# --- agreement --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How far two arrays are apart.

    Attributes:
        differing: numbers that differ; 0 and -0 do not, nor do two NaNs.
        first: index of the first that does, None if none.
        largest: the largest absolute difference.
    """

    differing: int
    first: tuple[int, ...] | None
    largest: float

    def __str__(self) -> str:
        return (
            "equal"
            if self.first is None
            else f"{self.differing} differ, first {self.first}, by up to {self.largest:.3g}"
        )


def difference(a: Any, b: Any) -> Difference:
    """Compare two arrays number by number."""
    a, b = np.asarray(a), np.asarray(b)
    unequal = a != b
    if a.dtype.kind == "f":
        unequal &= ~(np.isnan(a) & np.isnan(b))
    if not unequal.any():
        return Difference(0, None, 0.0)
    gap = np.abs(a.astype(np.float64) - b.astype(np.float64))[unequal]
    first = tuple(int(i) for i in np.argwhere(unequal)[0])
    return Difference(int(unequal.sum()), first, float(np.nanmax(gap)) if np.isfinite(gap).any() else float("nan"))


def device_of(backend: str) -> jax.Device:
    """Where a backend's arrays lie."""
    return jax.devices("cpu" if backend == "cpu" else "gpu")[0]


def random_actions(env: bc.envs.Env, steps: int, seed: int = 1) -> np.ndarray:
    """(steps, num_envs, action_size) between the bounds."""
    shape = (steps, env.num_envs, env.action_size)
    uniform = np.random.default_rng(seed).uniform(env.action_low, env.action_high, shape)
    return uniform.astype(env.dtype)


def trajectory(env: Any, state: Any, actions: np.ndarray) -> dict[str, np.ndarray]:
    """What a jitted scan of steps gives, `(steps, num_envs, ...)`, on the environment's own device."""

    def one(carry: Any, action: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        new = env.step(carry, action)
        return new, {name: getattr(new, name) for name in COMPARED}

    state, placed = jax.device_put((state, actions), device_of(env.backend))
    return jax.device_get(jax.jit(lambda s, a: lax.scan(one, s, a))(state, placed)[1])


def agreement(
    robot: str | bc.Task,
    num_envs: int = 512,
    steps: int = 20,
    actions: np.ndarray | None = None,
    **arguments: Any,
) -> dict[str, Difference]:
    """Compare the backends: a reset from the same key, then steps from the same state with the same actions.

    Args:
        robot: one of `bc.list_envs()`, or a task. num_envs, steps: how many.
        actions: (steps, num_envs, action_size); None: random ones.
        arguments: of `bc.make`.
    """
    gpu = bc.make(robot, num_envs, backend="cuda", **arguments)
    cpu = bc.make(robot, num_envs, backend="cpu", **{n: v for n, v in arguments.items() if n != "scheduler"})
    first, second = (env.reset(jax.random.key(0)) for env in (cpu, gpu))
    found = {
        f"reset {name}": difference(getattr(first, name), getattr(second, name)) for name in ("qpos", "qvel", "obs")
    }
    chosen = random_actions(cpu, steps) if actions is None else actions
    ours, theirs = (trajectory(env, first, chosen) for env in (cpu, gpu))
    return found | {name: difference(ours[name], theirs[name]) for name in COMPARED}


# --- speed ------------------------------------------------------------------------------------------------------------


def scan_length(num_envs: int) -> int:
    """Steps of a scan: fewer where one takes long."""
    return min(max((1 << 18) // num_envs, 8), 128)


def timed_scan(env: Any, repeats: int, options: dict[str, Any] | None) -> tuple[list[float], float]:
    """(environment steps a second of each repetition, seconds that XLA took to compile)."""
    length = scan_length(env.num_envs)

    def one(carry: tuple[Any, jax.Array], _: None) -> tuple[tuple[Any, jax.Array], None]:
        state, key = carry
        key, draw = jax.random.split(key)
        shape = (env.num_envs, env.action_size)
        action = jax.random.uniform(draw, shape, env.dtype, minval=-1.0, maxval=1.0)
        return (env.step(state, action), key), None

    def run(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        return lax.scan(one, (state, key), length=length)[0]

    state, key = jax.tree.map(jnp.copy, env.reset(jax.random.key(0))), jax.random.key(1)
    start = time.perf_counter()
    compiled = jax.jit(run, donate_argnums=0).lower(state, key).compile(compiler_options=options)
    compile_seconds = time.perf_counter() - start
    samples = []
    for turn in range(repeats + 1):
        start = time.perf_counter()
        state, key = jax.block_until_ready(compiled(state, key))
        if turn > 0:  # the first one warms up
            samples.append(length * env.num_envs / (time.perf_counter() - start))
    return samples, compile_seconds


def measure_speed(robot: str, num_envs: int, granularity: str, repeats: int, captured: bool) -> None:
    """Print and record control steps a second."""
    start = time.perf_counter()
    env = bc.make(robot, num_envs, backend="cuda", granularity=granularity)
    jax.block_until_ready(env.step(env.reset(jax.random.key(0)), jnp.zeros((num_envs, env.action_size), env.dtype)))
    first_seconds = time.perf_counter() - start
    samples, seconds = timed_scan(env, repeats, CAPTURE_ALL if captured else None)
    result = _records.summary(samples)
    name = "captured" if captured else "speed"
    print(
        f"{name:9} {robot:12} {num_envs:6} envs, {env.granularity:7} {result['value'] / 1e6:9.3f} M env steps/s "
        f"(+-{result['spread'] / result['value']:.1%}), {1e6 * num_envs / result['value']:9.1f} us a step; "
        f"first step {first_seconds:.1f} s, XLA {seconds:.1f} s",
        flush=True,
    )
    settings = {"backend": "cuda", "scheduler": "serial", "granularity": env.granularity, "num_envs": num_envs}
    detail = {"command_buffers": "all" if captured else "default"}
    record("throughput", robot, **result, unit="env steps/s", detail=detail, **settings)
    if not captured:
        record("throughput", robot, first_seconds, "s to first step", 0.0, 1, detail=detail, **settings)


# --- kernels ----------------------------------------------------------------------------------------------------------


SPIN = """
.version 7.8
.target sm_{0}{1}
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{{
    .reg .u64 %t<4>;
    .reg .pred %p;
    ld.param.u64 %t0, [nanoseconds];
    mov.u64 %t1, %globaltimer;
again:
    mov.u64 %t2, %globaltimer;
    sub.u64 %t3, %t2, %t1;
    setp.lt.u64 %p, %t3, %t0;
    @%p bra again;
    ret;
}}
"""


@functools.cache
def spin_kernel() -> cuda_driver.Kernel:
    """A kernel that lasts as long as its argument says."""
    capability = cuda_driver.compute_capability()
    return cuda_driver.load_kernel("spin", "spin", nvvm.assemble(SPIN.format(*capability), "spin", capability)[0])


class Stream:
    """A CUDA stream of our own, for launches without JAX; use it inside `cuda_driver.primary_context()`."""

    def __init__(self) -> None:
        self._stream, self._events = ctypes.c_void_p(), [ctypes.c_void_p(), ctypes.c_void_p()]
        cuda_driver.call("cuStreamCreate", ctypes.byref(self._stream), 1)
        for event in self._events:
            cuda_driver.call("cuEventCreate", ctypes.byref(event), 0)

    @property
    def handle(self) -> int:
        """The CUstream."""
        return self._stream.value or 0

    def microseconds(self, work: Callable[[], None], launches: int) -> float:
        """How long the GPU takes for the launches that `work` puts onto the stream.

        The stream is kept busy until they are queued, or the time of launching would be measured.
        """
        before, after = self._events
        nanoseconds = ctypes.c_uint64(100_000 + 10_000 * launches)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(nanoseconds))
        kernel = ctypes.c_void_p(spin_kernel().handle)
        cuda_driver.call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, self._stream, parameters, None)
        cuda_driver.call("cuEventRecord", before, self._stream)
        work()
        cuda_driver.call("cuEventRecord", after, self._stream)
        cuda_driver.call("cuStreamSynchronize", self._stream)
        milliseconds = ctypes.c_float()
        cuda_driver.call("cuEventElapsedTime", ctypes.byref(milliseconds), before, after)
        return 1000 * milliseconds.value

    def copy(self, target: jax.Array, source: jax.Array) -> None:
        """Copy one array over another of its shape."""
        pointers = [ctypes.c_uint64(array.unsafe_buffer_pointer()) for array in (target, source)]
        cuda_driver.call("cuMemcpyDtoDAsync_v2", *pointers, ctypes.c_size_t(source.nbytes), self._stream)


def step_part(env: Any, granularity: str, block: int) -> CudaPart:
    """The kernels of a control step, cut as asked for."""
    stream, precision = StreamBuilder(env.task, env.model).control_step(granularity), {4: "f32", 8: "f64"}
    buffers = env_program.buffers_of(stream, env.dtype.name)
    capability = cuda_driver.compute_capability()
    packed = program_cuda.pack(stream, precision[env.dtype.itemsize], buffers, capability)
    return program_cuda.load_part(packed, block=block)


def in_order(part: CudaPart, ops: Sequence[CudaOp] | None = None) -> CudaProgram:
    """A program of a part, or of some of its ops, one after another."""
    part = part if ops is None else replace(part, ops=tuple(ops), upstream=None)
    return compile_cuda([part], multiprocessors=cuda_driver.multiprocessors())


def kernel_times(
    robot: str, num_envs: int, granularity: str, *, block: int, launches: int = 50, repeats: int = 5
) -> tuple[dict[str, float], float, CudaProgram]:
    """Microseconds of one launch of each kernel, launched back to back, and of the whole control step.

    The kernels work on a state that 20 random steps have led to. A kernel that is launched again and again does the
    same each time or, as integrators do, goes on: so the state is put back before the next kernel's turn.
    """
    env = bc.make(robot, num_envs, backend="cuda")
    part = step_part(env, granularity, block)
    program = in_order(part)
    state = env.reset(jax.random.key(0))
    for action in random_actions(env, 20):
        state = env.step(state, jnp.asarray(action))
    given = env._arrays(state, action=jnp.asarray(random_actions(env, 1)[0]))
    kept = [
        given[spec.name] if spec.access != "write" else jnp.zeros(spec.array_shape(num_envs), spec.dtype)
        for spec in program.buffers
    ]
    used = [jnp.array(array, copy=True) for array in kept]
    arena = jnp.zeros(program.scratch_bytes(num_envs), jnp.uint8)
    jax.block_until_ready((kept, used, arena))
    pointers = [array.unsafe_buffer_pointer() for array in used]

    with cuda_driver.primary_context():
        stream = Stream()

        def launch(which: CudaProgram) -> None:
            launch_program(which, pointers, arena.unsafe_buffer_pointer(), num_envs, stream.handle)

        def put_back() -> None:
            for target, source in zip(used, kept, strict=True):
                stream.copy(target, source)

        times = {}
        for op in {op.kernel.name: op for op in program.ops}.values():
            put_back()
            launch(program)
            many = in_order(part, [op] * launches)
            samples = [stream.microseconds(functools.partial(launch, many), launches) for _ in range(repeats + 1)]
            times[op.kernel.name] = statistics.median(samples[1:]) / launches
        put_back()
        work, count = functools.partial(launch, program), len(program.ops)
        whole = statistics.median([stream.microseconds(work, count) for _ in range(repeats + 1)][1:])
    return times, whole, program


def measure_kernels(robot: str, num_envs: int, granularity: str, block: int) -> None:
    """Print and record the kernels' times."""
    times, whole, program = kernel_times(robot, num_envs, granularity, block=block)
    counts = Counter(op.kernel.name for op in program.ops)
    kernels = {op.kernel.name: op.kernel for op in program.ops}
    total = sum(times[name] * count for name, count in counts.items())
    print(
        f"kernels   {robot:12} {num_envs:6} envs, {granularity}, blocks of {block}: {len(program.ops)} launches take "
        f"{whole:.1f} us, the kernels on their own {total:.1f} us",
        flush=True,
    )
    settings = {"backend": "cuda", "scheduler": "serial", "granularity": granularity, "num_envs": num_envs}
    record("dispatch", robot, whole, "us/control step", 0.0, 5, detail={"block": block}, **settings)
    for name in sorted(times, key=lambda name: -times[name] * counts[name]):
        kernel, share = kernels[name], times[name] * counts[name] / total
        registers, local_bytes = kernel.registers(), kernel.local_bytes()
        print(
            f"    {name:22} {times[name]:9.2f} us x {counts[name]:3} {share:6.1%}, {registers:3} registers, "
            f"{local_bytes:5} bytes of local memory"
        )
        detail = {"kernel": name, "block": block, "registers": registers, "local_bytes": local_bytes}
        record("dispatch", robot, times[name], "us/launch", 0.0, 5, detail=detail, **settings)


# --- the run ----------------------------------------------------------------------------------------------------------


def record(*arguments: Any, **settings: Any) -> None:
    """Append a record to where this run's go."""
    _records.append(*arguments, directory=os.environ.get("OUT"), **settings)


def attempt(what: str, work: Callable[[], None]) -> bool:
    """Do one piece of work; a failure is printed, so that the rest is measured all the same."""
    try:
        work()
    except Exception as error:
        print(f"FAILED    {what}: {type(error).__name__}: {error}", flush=True)
        return False
    return True


def compare(robot: str, num_envs: int) -> None:
    """Print how the backends agree."""
    start = time.perf_counter()
    found = agreement(robot, num_envs)
    wrong = {name: each for name, each in found.items() if each.first is not None}
    said = "; ".join(f"{name} {each}" for name, each in wrong.items()) or "every bit is equal"
    print(f"agreement {robot:12} {num_envs:6} envs: {said} ({time.perf_counter() - start:.1f} s)", flush=True)
    settings = {"backend": "cuda", "scheduler": "serial", "granularity": "step", "num_envs": num_envs}
    differing = float(max(each.differing for each in found.values()))
    record("accuracy", robot, differing, "numbers that differ from the CPU's", 0.0, 1, detail={"steps": 20}, **settings)
    if wrong:
        raise AssertionError(f"{robot}: {', '.join(wrong)} differ")


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robots", nargs="+", default=bc.list_envs(), choices=bc.list_envs())
    parser.add_argument("--envs", nargs="+", type=int, default=[1024, 4096, 16384, 65536])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--granularity", nargs="+", default=["stage", "substep", "step"])
    parser.add_argument("--block", nargs="+", type=int, default=[cuda_program.DEFAULT_BLOCK], help="for kernels")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    where = _records.provenance("cuda")
    print(where["device"], "driver", where["driver"], where["versions"], where["commit"], flush=True)
    done = [attempt(str(work.args), work) for work in plan(given)]
    raise SystemExit(0 if all(done) else 1)


def plan(given: argparse.Namespace) -> Iterator[functools.partial[None]]:
    """The pieces of work, in their order."""
    for part in given.parts:
        for robot in given.robots:
            if part == "agreement":
                yield functools.partial(compare, robot, 512)
            elif part == "kernels":
                for arguments in itertools.product(given.envs, given.granularity, given.block):
                    yield functools.partial(measure_kernels, robot, *arguments)
            else:
                for num_envs, granularity in itertools.product(given.envs, given.granularity):
                    yield functools.partial(
                        measure_speed, robot, num_envs, granularity, given.repeats, part == "captured"
                    )


if __name__ == "__main__":
    main()
