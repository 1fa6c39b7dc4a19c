"""A state may be donated: no two of its leaves share a buffer, neither fresh nor after a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brax_concurrent as bc


@pytest.mark.parametrize("name", ["halfcheetah", "grasp"])
def test_states_can_be_donated(name: str) -> None:
    env = bc.make(name, num_envs=3, per_env=("geom_friction",))
    action = jnp.full((3, env.action_size), 0.25)
    step = jax.jit(env.step, donate_argnums=0)
    qpos = jnp.tile(jnp.asarray(env.model.qpos0, jnp.float32), (3, 1))
    for make in (env.reset, lambda key: env.reset_to(qpos, jnp.zeros((3, env.model.nv)), key)):
        kept = env.step(env.step(make(jax.random.key(1)), action), action)
        donated = step(step(make(jax.random.key(1)), action), action)
        for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(donated), strict=True):
            np.testing.assert_array_equal(a, b)


def test_leaves_have_their_own_buffers() -> None:
    env = bc.make("halfcheetah", num_envs=3)
    for state in (env.reset(jax.random.key(0)), env.reset_where(env.reset(jax.random.key(0)), jnp.ones(3, bool))):
        pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
        assert len(set(pointers)) == len(pointers)
