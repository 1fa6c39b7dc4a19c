"""Physics steps per second on the CPU: this engine against MuJoCo C's multi-threaded batch stepping, in one run.

Both step the same model (options, integrator and all) from the same states with the same controls, on the same number
of threads, turn and turn about, each after an untimed run; ours ten times one after another, since it is that much
faster. It is measured twice,
in program order and with simulations regrouped by their solvers' work. Before timing, all take the same five steps and
the results are compared.

    python scripts/bench_cpu.py [--robots ant humanoid] [--num-envs 1024] [--threads 2] [--repeats 5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import _records
import jax
import mujoco
import mujoco.rollout
import numpy as np
from jax import lax

from brax_concurrent.backends.cpu_program import cores
from brax_concurrent.envs.simulator import Simulator, SimulatorState
from brax_concurrent.envs.task import ASSETS

ROBOTS = ("halfcheetah", "walker2d", "ant", "humanoid", "grasp")
CHECK_STEPS = 5
TIMES = 10


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--robots", nargs="+", default=ROBOTS, choices=ROBOTS)
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=cores())
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
        few = controls(mj, rng, num_envs, CHECK_STEPS)
        theirs, _ = roll.rollout(mj, datas, states, few.astype(np.float64))
        expected = split_state(mj, np.asarray(theirs)[:, -1])[0]
        ways = {name: Ours(mj, states, arguments, regroup, few) for name, regroup in (("serial", False), ("hw", True))}
        steps = {"halfcheetah": 40, "walker2d": 20, "grasp": 20}.get(robot, 10)
        rates = []
        for _ in range(arguments.repeats):
            ctrl = controls(mj, rng, num_envs, steps)
            ctrl64 = ctrl.astype(np.float64)
            roll.rollout(mj, datas, states, ctrl64)
            begin = time.perf_counter()
            roll.rollout(mj, datas, states, ctrl64)
            rates.append(num_envs * steps / (time.perf_counter() - begin))
            for way in ways.values():
                way.sample(ctrl)
    if not all(np.array_equal(*pair) for pair in zip(ways["serial"].ends, ways["hw"].ends, strict=True)):
        raise RuntimeError(f"{robot}: regrouped simulations end in another state")
    report(robot, arguments, rates, ways, np.abs(ways["serial"].ends[0] - expected).max(1))


class Ours:
    """This engine, in program order or regrouped.

    Attributes:
        compile_seconds: until the first steps were taken.
        ends: positions (num_envs, nq) and velocities (num_envs, nv) after the steps of `few`, and after each sample.
        rates: of each sample, physics steps per second.
    """

    def __init__(
        self, mj: mujoco.MjModel, states: np.ndarray, arguments: argparse.Namespace, regroup: bool, few: np.ndarray
    ):
        start = time.perf_counter()
        sim = Simulator(mj, arguments.num_envs, threads=arguments.threads, regroup=regroup)
        qpos, qvel = split_state(mj, states)
        self._advance, self._state = ours(sim), sim.reset_to(qpos.astype(np.float32), qvel.astype(np.float32))
        self.ends: list[np.ndarray] = []
        self._run(few.swapaxes(0, 1), 1)
        self.compile_seconds = time.perf_counter() - start
        self.rates: list[float] = []

    def _run(self, ctrl: Any, times: int) -> None:
        for _ in range(times):
            end = jax.block_until_ready(self._advance(self._state, ctrl))
        self.ends += [np.asarray(end.qpos), np.asarray(end.qvel)]

    def sample(self, ctrl: np.ndarray) -> None:
        """Take the steps of (num_envs, steps, nu) controls ten times, each time from the first state."""
        inputs = jax.numpy.asarray(ctrl.swapaxes(0, 1))
        self._run(inputs, 1)
        begin = time.perf_counter()
        self._run(inputs, TIMES)
        self.rates.append(TIMES * ctrl.shape[0] * ctrl.shape[1] / (time.perf_counter() - begin))


def report(
    robot: str, arguments: argparse.Namespace, theirs: list[float], ways: dict[str, Ours], error: np.ndarray
) -> None:
    """Print and record one robot's results."""
    detail = {"threads": arguments.threads, "dtype": "float32", "mujoco_solver": arguments.solver}
    common: dict[str, Any] = {"backend": "cpu", "num_envs": arguments.num_envs, "unit": "physics steps/s"}
    _records.append("cpu", robot, scheduler="mujoco", **_records.summary(theirs), **common, detail=detail)
    print(f"{robot:12s} MuJoCo {np.median(theirs):10.3g}/s")
    for name, way in ways.items():
        ratios = [a / b for a, b in zip(way.rates, theirs, strict=True)]
        ratio = float(np.median(ratios))
        own = {
            "first_step_seconds": round(way.compile_seconds, 2),
            "qpos_error_median": float(np.median(error)),
            "qpos_error_p99": float(np.quantile(error, 0.99)),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
        values = _records.summary(way.rates)
        _records.append(
            "cpu", robot, scheduler=name, baseline="mujoco", ratio=ratio, **values, **common, detail=detail | own
        )
        print(
            f"{robot:12s} {name:6s} {np.median(way.rates):10.3g}/s: {ratio:6.1f}x ({min(ratios):.1f} to "
            f"{max(ratios):.1f}); qpos after {CHECK_STEPS} steps differs by {own['qpos_error_median']:.1e} (median), "
            f"{own['qpos_error_p99']:.1e} (99%)"
        )


def main() -> None:
    arguments = parse_arguments()
    for robot in arguments.robots:
        measure(robot, arguments)


if __name__ == "__main__":
    main()
