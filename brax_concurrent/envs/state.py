"""The state of a batch of environments: a pytree of arrays whose first axis is the environment."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class State:
    """What `reset` and `step` return. All arrays are `(num_envs, ...)`, floating-point ones of the environment's dtype.

    Attributes:
        qpos: (num_envs, nq) positions, m, rad or quaternions.
        qvel: (num_envs, nv) velocities, m/s or rad/s.
        obs: (num_envs, observation_size); of the fresh state where an episode ended and was reset.
        reward: (num_envs,).
        terminated: (num_envs,) bool: the task's end was reached (or the physics diverged).
        truncated: (num_envs,) bool: the time limit was reached.
        final_obs: (num_envs, observation_size) observation at the end of the step, before any reset.
        info: task quantities (num_envs,) by Gymnasium's names, and counters since `reset` (int32): `contacts_lost`
            (contacts beyond the declared capacity), `diverged` (steps that ended with physics beyond MuJoCo's
            limits), `bad_actions` (steps whose action was not finite and was replaced by zeros).
        metrics: parts of the reward (num_envs,) by Gymnasium's names.
        model: per-environment model quantities, where the environment was made with `per_env`.
        internal: what the engine carries along: solver warm start, random key and counter, steps since the episode's
            start (`elapsed`), what the solver had to do in the last step (`work`), the task's memory.
        env: fingerprint of the environment that made it.
    """

    qpos: jax.Array
    qvel: jax.Array
    obs: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: jax.Array
    info: dict[str, jax.Array]
    metrics: dict[str, jax.Array]
    model: dict[str, jax.Array]
    internal: dict[str, jax.Array]
    env: str = ""

    @property
    def done(self) -> jax.Array:
        """(num_envs,) bool: terminated or truncated."""
        return self.terminated | self.truncated

    def replace(self, **changes: Any) -> State:
        """A copy with some attributes changed."""
        return dataclasses.replace(self, **changes)


jax.tree_util.register_dataclass(
    State,
    data_fields=[f.name for f in dataclasses.fields(State) if f.name != "env"],
    meta_fields=["env"],
)
