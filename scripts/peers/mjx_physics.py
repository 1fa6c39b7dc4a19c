"""MJX, MuJoCo in JAX (its JAX implementation), on the robots' own MJCF files."""

from __future__ import annotations

import time
from typing import Any

from peers import SECONDS, Peer, Prepared, models, paced

SCAN_STEPS = 4  # control steps of one jitted call; calls follow each other without waiting


def prepare(robot: str, num_envs: int, backend: str, threads: int) -> Prepared:
    """A jitted scan under random controls; worlds that fell start again at qpos0; nothing is observed."""
    import jax
    from jax import numpy as jnp
    from mujoco import mjx

    device = jax.local_devices(backend="cpu" if backend == "cpu" else "gpu")[0]
    model, skip, healthy = models.load(robot, pgs=False), models.frame_skip(robot), models.healthy_height(robot)
    start = time.perf_counter()
    with jax.default_device(device):
        m = mjx.put_model(model, device=device, impl="jax")
        first = mjx.make_data(model, device=device, impl="jax")
        worlds = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_envs, *x.shape)), first)
        low, high = (jnp.asarray(bound, jnp.float32) for bound in model.actuator_ctrlrange.T)

    def one(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
        data, key = carry
        key, draw = jax.random.split(key)
        data = data.replace(ctrl=jax.random.uniform(draw, (num_envs, model.nu), minval=low, maxval=high))
        data, _ = jax.lax.scan(lambda d, _: (jax.vmap(mjx.step, (None, 0))(m, d), None), data, length=skip)
        if healthy is not None:
            root, lowest, highest = healthy
            fallen = ((data.qpos[:, root] < lowest) | (data.qpos[:, root] > highest))[:, None]
            fresh = {name: getattr(first, name) for name in ("qpos", "qvel", "qacc_warmstart")}
            data = data.replace(**{n: jnp.where(fallen, value, getattr(data, n)) for n, value in fresh.items()})
        return (data, key), None

    def scan(data: Any, key: Any) -> tuple[Any, Any]:
        return jax.lax.scan(one, (data, key), length=SCAN_STEPS)[0]

    now = [jax.device_put((worlds, jax.random.key(1)), device)]
    compiled = jax.jit(scan).lower(*now[0]).compile()  # a call of the jitted function might compile again
    compile_seconds = time.perf_counter() - start

    def work(units: int) -> None:
        for _ in range(units):
            now[0] = compiled(*now[0])
        jax.block_until_ready(now[0])

    def check() -> None:
        data = now[0][0]
        if not bool(jnp.isfinite(data.qpos).all() & jnp.isfinite(data.qvel).all()):
            raise RuntimeError("qpos or qvel are not finite")

    sample = paced(work, SCAN_STEPS * num_envs, SECONDS[backend])
    reset = "none" if healthy is None else "root height"
    return Prepared(sample, check, num_envs, compile_seconds, models.detail(model, robot, reset))


PEERS = [Peer("mjx", "mujoco-mjx", ("mujoco.mjx",), prepare)]
