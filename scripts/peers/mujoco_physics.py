"""MuJoCo C's multi-threaded batch stepping, `mujoco.rollout`."""

from __future__ import annotations

import os
import time

import numpy as np

from peers import SECONDS, CannotRunError, Peer, Prepared, models, paced

CHUNK = 4  # control steps of one call: the states after all physics steps are returned, so not many


def prepare(robot: str, num_envs: int, backend: str, threads: int) -> Prepared:
    """Physics alone under random controls; nothing is observed, and what falls stays down."""
    if backend != "cpu":
        raise CannotRunError("MuJoCo C runs on the CPU")
    import mujoco
    import mujoco.rollout

    start = time.perf_counter()
    model, skip = models.load(robot, pgs=True), models.frame_skip(robot)
    threads = threads or len(os.sched_getaffinity(0))
    datas = [mujoco.MjData(model) for _ in range(threads)]
    roll = mujoco.rollout.Rollout(nthread=threads)
    kind = mujoco.mjtState.mjSTATE_FULLPHYSICS
    states = np.zeros((num_envs, mujoco.mj_stateSize(model, kind)))
    mujoco.mj_getState(model, datas[0], states[0], kind)
    states[:] = states[0]
    low, high = model.actuator_ctrlrange.T
    drawn = np.random.default_rng(0).uniform(low, high, (num_envs, CHUNK, model.nu))
    controls = np.repeat(drawn, skip, axis=1)

    def work(units: int) -> None:
        for _ in range(units):
            after, _ = roll.rollout(model, datas, states, controls)
            states[:] = np.asarray(after)[:, -1]
            controls[:] = np.roll(controls, 1, axis=0)  # another environment's, so that none repeats itself

    def check() -> None:
        if not np.isfinite(states).all():
            raise RuntimeError("states are not finite")

    work(1)
    compile_seconds = time.perf_counter() - start
    sample = paced(work, CHUNK * num_envs, SECONDS[backend])
    detail = {**models.detail(model, robot, "none"), "threads": threads}
    return Prepared(sample, check, num_envs, compile_seconds, detail)


PEERS = [Peer("mujoco", "mujoco", ("mujoco.rollout",), prepare)]
