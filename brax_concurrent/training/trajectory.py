"""The positions that one environment goes through under a policy, to be rendered."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from brax_concurrent.envs.base import Env
from brax_concurrent.envs.state import State
from brax_concurrent.training.rollout import Policy


def trajectory(env: Env, policy: Policy, params: Any, key: jax.Array, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Let a policy act in the first environment of a batch; see `render`, which shows what comes of it.

    Args:
        env: the environments; the others are simulated too.
        policy, params: as in `rollout`.
        key: random key of the reset and of the policy's draws.
        steps: control steps, at least 1.

    Returns:
        qpos (steps + 1, nq), from the reset on; an episode that ends goes over into the next. And mocap_pos
        (steps + 1, nmocap, 3), m: what the task remembers by the mocap body's name, as Grasp does its palm, else the
        model's.

    Raises:
        ValueError: steps < 1.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps: expected a whole number of at least 1, got {steps!r}")
    qpos, mocap_pos = _scan(env, policy, steps, params, key)
    return np.asarray(qpos), np.asarray(mocap_pos)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _scan(env: Env, policy: Policy, steps: int, params: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    def one(state: State, step_key: jax.Array) -> tuple[State, tuple[jax.Array, jax.Array]]:
        action, _ = policy(params, state.obs, step_key)
        new = env.step(state, action)
        return new, _positions(env, new)

    reset_key, policy_key = jax.random.split(key)
    start = env.reset(reset_key)
    _, rest = lax.scan(one, start, jax.random.split(policy_key, steps))
    return jax.tree.map(lambda first, others: jnp.concatenate([first[None], others]), _positions(env, start), rest)


def _positions(env: Env, state: State) -> tuple[jax.Array, jax.Array]:
    m = env.model
    places = []
    for body in sorted((b for b in range(m.nbody) if m.body_mocapid[b] >= 0), key=lambda b: m.body_mocapid[b]):
        remembered = state.internal.get(f"memory.{m.body_names[body]}")
        if remembered is not None and remembered.shape[1:] == (3,):
            places.append(remembered[0])
        else:
            places.append(jnp.asarray(m.body_pos[body], env.dtype))
    return state.qpos[0], jnp.stack(places) if places else jnp.zeros((0, 3), env.dtype)
