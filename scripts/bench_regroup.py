"""Environment steps per second where environments have unlike work: in program order, under hw, and under hw regrouped.

    python scripts/bench_regroup.py
    python scripts/bench_regroup.py --robots humanoid --num-envs 32768 --work half_in_the_air

Work "as_it_comes" is random actions with resets, 200 control steps after the start. "half_in_the_air" is without
resets: after those steps half of the robots, drawn at random, are high above the ground, where nothing touches, and the
others where they have got to. All are timed turn and turn about in one process, each from the same state, and must end
in the same one. Records go to dispatch.jsonl in $OUT if it is set, else in benchmarks/.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from typing import Any

import _records
import jax
import jax.numpy as jnp
import numpy as np

import brax_concurrent as bc
from brax_concurrent.backends.cpu_program import cores
from brax_concurrent.envs.arrays import resolve_backend
from brax_concurrent.training.measure import random_actions

HEIGHT = {"ant": 2, "humanoid": 2, "halfcheetah": 1, "walker2d": 1}  # which entry of qpos is the root's, by robot
ALTITUDE = 1000.0  # m
WORK = ("as_it_comes", "half_in_the_air")
SETTLED = 200  # control steps before
WAYS: dict[str, dict[str, Any]] = {
    "serial": {"scheduler": "serial"},
    "hw": {"scheduler": "hw", "regroup": False},
    "hw regrouped": {"scheduler": "hw", "regroup": True},
}


def arguments_of(robot: str, work: str) -> dict[str, Any]:
    """Arguments of `make` for a kind of work."""
    if work == "as_it_comes":
        return {}
    never_ends = {"max_episode_steps": 10**6}
    return never_ends if robot == "halfcheetah" else {**never_ends, "terminate_when_unhealthy": False}


class Turns:
    """One way of stepping, timed again and again from the same state."""

    def __init__(self, env: bc.Env, steps: int, state: Any):
        def one(carry: Any, key: jax.Array) -> tuple[Any, None]:
            return env.step(carry, random_actions(env, key)), None

        self._run = jax.jit(lambda state, key: jax.lax.scan(one, state, jax.random.split(key, steps))[0])
        self._env, self._steps, self._state = env, steps, state
        self.samples: list[float] = []
        self.last = self.run(0)

    def run(self, turn: int) -> Any:
        """The state after the turn's steps."""
        return jax.block_until_ready(self._run(self._state, jax.random.key(turn)))

    def sample(self, turn: int) -> None:
        """Time a turn."""
        start = time.perf_counter()
        self.last = self.run(turn)
        self.samples.append(self._steps * self._env.num_envs / (time.perf_counter() - start))


def prepared(env: bc.Env, work: str) -> Any:
    """The state that all begin with, of an environment in program order."""
    state = Turns(env, SETTLED, env.reset(jax.random.key(1))).last
    if work == "as_it_comes":
        return state
    up = np.random.default_rng(0).random(env.num_envs) < 0.5
    height = state.qpos[:, HEIGHT[env.name]]
    qpos = state.qpos.at[:, HEIGHT[env.name]].set(jnp.where(up, height + ALTITUDE, height))
    return env.reset_to(qpos, state.qvel, jax.random.key(2))


def measure(robot: str, num_envs: int, work: str, given: argparse.Namespace) -> None:
    """Measure one robot's three ways, and write their records."""
    common = {"backend": given.backend, "granularity": given.granularity, "threads": given.threads}
    envs = {way: bc.make(robot, num_envs, **how, **common, **arguments_of(robot, work)) for way, how in WAYS.items()}
    state = prepared(envs["serial"], work)
    steps = max(1, math.ceil(given.seconds / _seconds(envs["serial"], state)))
    turns = {way: Turns(env, steps, state) for way, env in envs.items()}
    for turn in range(given.repeats):
        for way in WAYS:
            turns[way].sample(turn)
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(turns["serial"].last)]
    for way in WAYS:
        found = [np.asarray(leaf) for leaf in jax.tree.leaves(turns[way].last)]
        if not all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True)):
            raise RuntimeError(f"{way}, {robot}: ended in another state than program order")
    for way, own in turns.items():
        ratio = statistics.median(a / b for a, b in zip(own.samples, turns["serial"].samples, strict=True))
        record(robot, work, way, own.samples, envs[way], steps, ratio)


def _seconds(env: bc.Env, state: Any) -> float:
    """Of one control step, roughly."""
    probe = Turns(env, 4, state)
    probe.sample(0)
    return env.num_envs / probe.samples[-1]


def record(robot: str, work: str, way: str, samples: list[float], env: bc.Env, steps: int, ratio: float) -> None:
    """Print and record one way's result."""
    values = _records.summary(samples)
    threads = {"threads": env._threads or cores()} if env.backend == "cpu" else {}
    _records.append(
        "dispatch",
        robot,
        **values,
        unit="env steps/s",
        num_envs=env.num_envs,
        backend=env.backend,
        scheduler=env.scheduler,
        granularity=env.granularity,
        baseline=None if way == "serial" else "serial",
        ratio=None if way == "serial" else ratio,
        detail={"work": work, "regroup": way == "hw regrouped", "steps": steps, **threads},
        directory=os.environ.get("OUT"),
    )
    print(f"{robot} {env.num_envs} {work} {way}: {values['value']:,.0f} env steps/s, {ratio:.3f}x serial", flush=True)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robots", nargs="+", default=list(HEIGHT), choices=HEIGHT)
    parser.add_argument("--num-envs", nargs="+", type=int, default=[1024])
    parser.add_argument("--work", nargs="+", default=list(WORK), choices=WORK)
    parser.add_argument("--granularity", default="auto")
    parser.add_argument("--backend", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0: all")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn, at least")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    given.backend = resolve_backend(given.backend)
    for robot in given.robots:
        for num_envs in given.num_envs:
            for work in given.work:
                measure(robot, num_envs, work, given)


if __name__ == "__main__":
    main()
