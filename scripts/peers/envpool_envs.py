"""EnvPool's Gymnasium environments: MuJoCo C in a pool of threads, with its own auto-reset."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from peers import SECONDS, CannotRunError, Peer, Prepared, paced

TASKS = {"ant": "Ant", "halfcheetah": "HalfCheetah", "humanoid": "Humanoid", "walker2d": "Walker2d"}
ACTION_SETS = 16  # drawn before, taken in turn


def prepare(robot: str, num_envs: int, backend: str, threads: int) -> Prepared:
    """Synchronous steps of all environments: observations, rewards and resets as in Gymnasium."""
    if backend != "cpu":
        raise CannotRunError("EnvPool runs on the CPU")
    if robot not in TASKS:
        raise CannotRunError(f"EnvPool has no environment {robot!r}")
    import envpool

    start = time.perf_counter()
    version = "v5" if f"{TASKS[robot]}-v5" in envpool.list_all_envs() else "v4"
    threads = threads or len(os.sched_getaffinity(0))
    env = envpool.make_gymnasium(f"{TASKS[robot]}-{version}", num_envs=num_envs, num_threads=threads, seed=0)
    env.reset()
    low, high = env.action_space.low, env.action_space.high
    actions = np.random.default_rng(0).uniform(low, high, (ACTION_SETS, num_envs, *low.shape))
    last: dict[str, Any] = {"step": 0}

    def work(units: int) -> None:
        for _ in range(units):
            last["seen"] = env.step(actions[last["step"] % ACTION_SETS])[:2]
            last["step"] += 1

    def check() -> None:
        if not all(np.isfinite(array).all() for array in last["seen"]):
            raise RuntimeError("observations or rewards are not finite")

    work(1)
    compile_seconds = time.perf_counter() - start
    sample = paced(work, num_envs, SECONDS[backend])
    detail = {"task": f"{TASKS[robot]}-{version}", "threads": threads, "auto_reset": True, "observation": True}
    return Prepared(sample, check, num_envs, compile_seconds, detail)


PEERS = [Peer("envpool", "envpool", ("envpool",), prepare)]
