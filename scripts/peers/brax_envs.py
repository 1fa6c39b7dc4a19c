"""Brax's own environments, on each of its physics pipelines, wrapped as its training agents wrap them."""

from __future__ import annotations

import functools
import time
from typing import Any

from peers import SECONDS, CannotRunError, Peer, Prepared, paced

ROBOTS = ("ant", "halfcheetah", "humanoid", "walker2d")
EPISODE_LENGTH = 1000
SCAN_STEPS = 10  # of one jitted call; calls follow each other without waiting


def prepare(robot: str, num_envs: int, backend: str, threads: int, *, pipeline: str) -> Prepared:
    """A jitted scan of steps with random actions: observations, rewards, auto-reset and all."""
    if robot not in ROBOTS:
        raise CannotRunError(f"Brax has no environment {robot!r}")
    import jax
    from brax import envs

    device = jax.local_devices(backend="cpu" if backend == "cpu" else "gpu")[0]
    base = envs.get_environment(robot, backend=pipeline)
    env = envs.training.wrap(base, episode_length=EPISODE_LENGTH)

    def one(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
        state, key = carry
        key, draw = jax.random.split(key)
        action = jax.random.uniform(draw, (num_envs, env.action_size), minval=-1.0, maxval=1.0)
        return (env.step(state, action), key), None

    def scan(state: Any, key: Any) -> tuple[Any, Any]:
        return jax.lax.scan(one, (state, key), length=SCAN_STEPS)[0]

    start = time.perf_counter()
    with jax.default_device(device):
        state = jax.jit(env.reset)(jax.random.split(jax.random.PRNGKey(0), num_envs))  # Brax reads its shape
    now = [jax.device_put((state, jax.random.key(1)), device)]
    compiled = jax.jit(scan).lower(*now[0]).compile()  # a call of the jitted function might compile again
    compile_seconds = time.perf_counter() - start

    def work(units: int) -> None:
        for _ in range(units):
            now[0] = compiled(*now[0])
        jax.block_until_ready(now[0])

    def check() -> None:
        state = now[0][0]
        if not all(bool(jax.numpy.isfinite(array).all()) for array in (state.obs, state.reward)):
            raise RuntimeError("observations or rewards are not finite")
        if float(state.info["steps"].max()) < 1:
            raise RuntimeError("episodes do not go on")

    sample = paced(work, SCAN_STEPS * num_envs, SECONDS[backend])
    options = base.sys.opt
    detail = {
        "pipeline": pipeline,
        "timestep": f"{float(options.timestep):g}",
        "frame_skip": int(base._n_frames),
        "auto_reset": True,
        "observation": True,
    }
    return Prepared(sample, check, num_envs, compile_seconds, detail)


def _peer(pipeline: str) -> Peer:
    needed = ("brax", "mujoco.mjx")  # Brax imports MJX whatever the pipeline
    return Peer(f"brax-{pipeline}", "brax", needed, functools.partial(prepare, pipeline=pipeline))


PEERS = [_peer(pipeline) for pipeline in ("spring", "generalized", "positional", "mjx")]
