"""Episodes under random actions, freely running with automatic resets, have the statistics of Gymnasium's.

Single trajectories cannot be compared: contacts make of a rounding error another trajectory within a second.
"""

from __future__ import annotations

import batches
import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

pytestmark = [pytest.mark.xdist_group("locomotion"), pytest.mark.slow]

GYMNASIUM = {
    "ant": "Ant-v5",
    "halfcheetah": "HalfCheetah-v5",
    "humanoid": "Humanoid-v5",
    "walker2d": "Walker2d-v5",
}
EPISODES = 200
STEPS = 100  # after which we look away: HalfCheetah's episodes never end, and some of Ant's last long
NUM_ENVS, EACH = 500, 2  # our episodes: the second of each environment begins with an automatic reset

# The means of n episodes differ by a standard error of sqrt(var / n) from the truth. 4 of them happen by chance once in
# 16,000 comparisons, of which there are 16 here; the seeds are fixed. Distributions are compared by Kolmogorov and
# Smirnov's distance D, which is above 2.2 sqrt(1 / n + 1 / m) by chance once in 8,000.
ERRORS, DISTANCE = 4.0, 2.2

Episode = dict[str, float]


def summary(rewards: np.ndarray, heights: np.ndarray, touching: np.ndarray) -> Episode:
    """One episode; `touching`: contacts after each step but the last."""
    return {
        "return": float(rewards.sum()),
        "length": float(len(rewards)),
        "height": float(heights.mean()),
        "contacts": float(touching.mean()) if len(touching) else 0.0,
    }


def contact_counter(robot: str):
    """A function from qpos to the number of contacts there."""
    env = gymnasium.make(GYMNASIUM[robot], disable_env_checker=True)
    model = env.unwrapped.model
    env.close()
    data = mujoco.MjData(model)

    def count(qpos: np.ndarray) -> int:
        data.qpos[:] = qpos
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_collision(model, data)
        return data.ncon

    return count


def gymnasiums(robot: str) -> list[Episode]:
    env = gymnasium.make(GYMNASIUM[robot], disable_env_checker=True, max_episode_steps=STEPS)
    rng, count, found = np.random.default_rng(0), contact_counter(robot), []
    low, high = env.action_space.low, env.action_space.high
    for episode in range(EPISODES):
        env.reset(seed=episode)
        rewards, heights, touching, done = [], [], [], False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(rng.uniform(low, high))
            done = terminated or truncated
            rewards.append(reward)
            heights.append(obs[0])
            touching.append(count(env.unwrapped.data.qpos))
        found.append(summary(np.array(rewards), np.array(heights), np.array(touching[:-1])))
    env.close()
    return found


def ours(robot: str) -> list[list[Episode]]:
    """The first episodes of all environments, the second ones, ..."""
    env = batches.env(robot, NUM_ENVS)

    @jax.jit
    def run(key):
        def one(state, key):
            action = jax.random.uniform(key, (NUM_ENVS, env.action_size), minval=env.action_low, maxval=env.action_high)
            state = env.step(state, action)
            return state, (state.reward, state.final_obs[:, 0], state.qpos, state.done)

        reset, steps = jax.random.split(key)
        start = env.reset(reset)
        late = start.internal | {"elapsed": jnp.full(NUM_ENVS, 1000 - STEPS, jnp.int32)}
        final, history = jax.lax.scan(one, start.replace(internal=late), jax.random.split(steps, EACH * STEPS))
        return history, jnp.stack([final.info[name] for name in ("diverged", "contacts_lost", "bad_actions")])

    history, counters = jax.tree.map(np.asarray, run(jax.random.key(0)))
    assert not counters.any()
    rewards, heights, qpos, done = history
    count, found = contact_counter(robot), [[] for _ in range(EACH)]
    for i in range(NUM_ENVS):
        start = 0
        for episodes in found:
            done_at = start + np.flatnonzero(done[start:, i]) + 1
            end = min([*done_at[:1], start + STEPS])
            touching = np.array([count(q) for q in qpos[start : end - 1, i]])
            episodes.append(summary(rewards[start:end, i], heights[start:end, i], touching))
            start = end
    return found


def assert_alike(found: np.ndarray, expected: np.ndarray, name: str) -> None:
    error = np.sqrt(found.var(ddof=1) / len(found) + expected.var(ddof=1) / len(expected))
    assert abs(found.mean() - expected.mean()) <= ERRORS * error + 1e-6, (name, found.mean(), expected.mean(), error)
    both = np.sort(np.concatenate([found, expected])) + 1e-6
    below = [np.searchsorted(np.sort(x), both, side="right") / len(x) for x in (found, expected)]
    bound = DISTANCE * np.sqrt(1 / len(found) + 1 / len(expected))
    assert np.abs(below[0] - below[1]).max() <= bound, f"{name}: the distributions differ"


@pytest.mark.parametrize("robot", GYMNASIUM)
def test_random_episodes_are_like_gymnasiums(robot):
    first, second = ours(robot)
    expected = gymnasiums(robot)
    for name in expected[0]:
        theirs, *own = (np.array([e[name] for e in episodes]) for episodes in (expected, first, second))
        assert_alike(np.concatenate(own), theirs, name)
        assert_alike(own[1], own[0], f"{name} after an automatic reset")
