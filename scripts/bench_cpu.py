"""Physics steps per second on the CPU: this engine against MuJoCo C's multi-threaded batch stepping, in one run.

Both step the same model (options, integrator and all) from the same states with the same controls, on the same number
of threads, turn and turn about. Before timing, both take the same five steps and the results are compared.

    python scripts/bench_cpu.py [--robots ant humanoid] [--num-envs 1024] [--threads 2] [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import _records
import jax
import mujoco
import mujoco.rollout
import numpy as np
from jax import lax

from brax_concurrent.envs.simulator import Simulator, SimulatorState
from brax_concurrent.envs.task import ASSETS

ROBOTS = ("halfcheetah", "walker2d", "ant", "humanoid", "grasp")
CHECK_STEPS = 5


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--robots", nargs="+", default=ROBOTS, choices=ROBOTS)
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--solver", choices=("file", "newton"), default="newton", help="of MuJoCo; ours is Newton")
    return parser.parse_args()


def load(robot: str, solver: str) -> mujoco.MjModel:
    mj = mujoco.MjModel.from_xml_path(str(ASSETS / f"{robot}.xml"))
    if solver == "newton" and mj.opt.solver != mujoco.mjtSolver.mjSOL_NEWTON:
        mj.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
        mj.opt.iterations = 100  # MuJoCo's default for Newton
    return mj


def controls(mj: mujoco.MjModel, rng: np.random.Generator, num_envs: int, steps: int) -> np.ndarray:
    """(num_envs, steps, nu) uniform in the actuators' ranges, float32."""
    low, high = mj.actuator_ctrlrange.T
    return rng.uniform(low, high, (num_envs, steps, mj.nu)).astype(np.float32)


def settled_states(mj: mujoco.MjModel, roll: Any, datas: list[Any], num_envs: int, seed: int) -> np.ndarray:
    """(num_envs, nstate) states after 100 random steps from a disturbed start: in the air, on the ground, falling."""
    rng = np.random.default_rng(seed)
    data = mujoco.MjData(mj)
    spec = mujoco.mjtState.mjSTATE_FULLPHYSICS
    initial = np.zeros((num_envs, mujoco.mj_stateSize(mj, spec)))
    for state in initial:
        mujoco.mj_resetData(mj, data)
        data.qpos[:] += rng.uniform(-0.1, 0.1, mj.nq)
        data.qvel[:] = rng.normal(0, 0.1, mj.nv)
        mujoco.mj_getState(mj, data, state, spec)
    states, _ = roll.rollout(mj, datas, initial, controls(mj, rng, num_envs, 100).astype(np.float64))
    return np.asarray(states)[:, -1].copy()


def split_state(mj: mujoco.MjModel, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """qpos and qvel of FULLPHYSICS states (time first)."""
    return state[:, 1 : 1 + mj.nq], state[:, 1 + mj.nq : 1 + mj.nq + mj.nv]


def ours(sim: Simulator) -> Callable[[SimulatorState, Any], SimulatorState]:
    def many(state: SimulatorState, ctrl: jax.Array) -> SimulatorState:
        return lax.scan(lambda s, c: (sim.step(s, c), None), state, ctrl)[0]

    return jax.jit(many)


def measure(robot: str, arguments: argparse.Namespace) -> None:
    num_envs, threads = arguments.num_envs, arguments.threads
    mj = load(robot, arguments.solver)
    rng = np.random.default_rng(1)
    datas = [mujoco.MjData(mj) for _ in range(threads)]
    with mujoco.rollout.Rollout(nthread=threads) as roll:
        states = settled_states(mj, roll, datas, num_envs, seed=0)
        qpos, qvel = split_state(mj, states)
        start = time.perf_counter()
        sim = Simulator(mj, num_envs, threads=threads)
        state = sim.reset_to(qpos.astype(np.float32), qvel.astype(np.float32))
        advance = ours(sim)
        few = controls(mj, rng, num_envs, CHECK_STEPS)
        after = jax.block_until_ready(advance(state, few.swapaxes(0, 1)))
        compile_seconds = time.perf_counter() - start
        theirs, _ = roll.rollout(mj, datas, states, few.astype(np.float64))
        error = np.abs(np.asarray(after.qpos) - split_state(mj, np.asarray(theirs)[:, -1])[0]).max(1)
        steps = {"halfcheetah": 40, "walker2d": 20, "grasp": 20}.get(robot, 10)
        mujoco_rates, our_rates = [], []
        for _ in range(arguments.repeats):
            ctrl = controls(mj, rng, num_envs, steps)
            ctrl64 = ctrl.astype(np.float64)
            begin = time.perf_counter()
            roll.rollout(mj, datas, states, ctrl64)
            mujoco_rates.append(num_envs * steps / (time.perf_counter() - begin))
            longer = np.tile(ctrl.swapaxes(0, 1), (10, 1, 1))  # ten times the steps: ours is that much faster
            jax.block_until_ready(advance(state, longer))
            begin = time.perf_counter()
            jax.block_until_ready(advance(state, longer))
            our_rates.append(10 * num_envs * steps / (time.perf_counter() - begin))
    report(robot, arguments, mujoco_rates, our_rates, error, compile_seconds)


def report(robot: str, arguments: argparse.Namespace, theirs: list[float], ours_: list[float], error: np.ndarray,
           compile_seconds: float) -> None:  # fmt: skip
    ratios = [a / b for a, b in zip(ours_, theirs, strict=True)]
    detail = {
        "threads": arguments.threads,
        "dtype": "float32",
        "mujoco_solver": arguments.solver,
        "first_step_seconds": round(compile_seconds, 2),
        "qpos_error_median": float(np.median(error)),
        "qpos_error_p99": float(np.quantile(error, 0.99)),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }
    common = {"backend": "cpu", "num_envs": arguments.num_envs, "unit": "physics steps/s", "detail": detail}
    mujoco_median = float(np.median(theirs))
    _records.append("cpu", robot, scheduler="mujoco", **_records.summary(theirs), **common)
    _records.append(
        "cpu",
        robot,
        scheduler="serial",
        baseline="mujoco",
        ratio=float(np.median(ratios)),
        **_records.summary(ours_),
        **common,
    )
    print(
        f"{robot:12s} MuJoCo {mujoco_median:10.3g}/s, ours {np.median(ours_):10.3g}/s: {np.median(ratios):6.1f}x "
        f"({min(ratios):.1f} to {max(ratios):.1f}); qpos after {CHECK_STEPS} steps differs by "
        f"{np.median(error):.1e} (median), {np.quantile(error, 0.99):.1e} (99%)"
    )


def main() -> None:
    arguments = parse_arguments()
    for robot in arguments.robots:
        measure(robot, arguments)


if __name__ == "__main__":
    main()
