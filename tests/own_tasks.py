"""Tasks as users write them, that tests share."""

from __future__ import annotations

import runpy
from pathlib import Path

import jax.numpy as jnp

import brax_concurrent as bc
from brax_concurrent.envs.task import ASSETS

HOPPER = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "own_task.py"))["MJCF"]
TORSO, FOOT = 1, 3


class Cheetah(bc.Task):
    """HalfCheetah-v5, as a user writes it."""

    model = str(ASSETS / "halfcheetah.xml")
    frame_skip = 5
    max_episode_steps = 6

    def observation(self, s):
        return jnp.concatenate([s.qpos[1:], s.qvel])

    def reward(self, s, before, action):
        parts = {
            "reward_forward": (s.qpos[0] - before.qpos[0]) / self.dt,
            "reward_ctrl": -0.1 * jnp.sum(action**2),
        }
        return sum(parts.values()), parts

    def reset(self, noise):
        return self.mj_model.qpos0 + noise.uniform(9, -0.1, 0.1), 0.1 * noise.normal(9)


class Ant(bc.Task):
    """Ant-v5, as a user writes it."""

    model = str(ASSETS / "ant.xml")
    frame_skip = 5
    max_episode_steps = 6

    def observation(self, s):
        return jnp.concatenate([s.qpos[2:], s.qvel, jnp.clip(s.cfrc_ext[1:], -1, 1).reshape(-1)])

    def reward(self, s, before, action):
        parts = {
            "reward_forward": (s.xpos[1, 0] - before.xpos[1, 0]) / self.dt,
            "reward_survive": jnp.where(self.terminated(s), 0.0, 1.0),
            "reward_ctrl": -0.5 * jnp.sum(action**2),
            "reward_contact": -5e-4 * jnp.sum(jnp.clip(s.cfrc_ext, -1, 1) ** 2),
        }
        return sum(parts.values()), parts

    def terminated(self, s):
        state = jnp.concatenate([s.qpos, s.qvel])
        return ~(jnp.all(jnp.isfinite(state)) & (s.qpos[2] >= 0.2) & (s.qpos[2] <= 1.0))

    def reset(self, noise):
        return self.mj_model.qpos0 + noise.uniform(15, -0.1, 0.1), 0.1 * noise.normal(14)


class Everything(bc.Task):
    """Asks for a bit of all that there is. One action, which leans the hopper's leg and pushes it."""

    model, frame_skip, max_episode_steps, action_size = HOPPER, 2, 40, 1

    def control(self, s, action):
        lean = 20.0 * (0.3 * action[0] - s.qpos[3]) - s.qvel[3] + 0.1 * jnp.sin(3.0 * s.time)
        return jnp.stack([lean / 50.0, jnp.where(s.memory["count"] > 3.0, action[0], 0.1)])

    def observation(self, s):
        return jnp.concatenate(
            [
                *(s.qpos[1:], jnp.cos(s.qpos[2:3]), s.qvel, s.xpos[FOOT], s.cvel[TORSO, 1:5], s.cfrc_ext[TORSO]),
                *(s.qacc, s.actuator_force, s.qfrc_bias, s.memory["last"], s.memory["target"].reshape(-1)),
                jnp.array([s.time, s.memory["count"], s.ncon[0]]),
            ]
        )

    def reward(self, s, before, action):
        moved = (s.xpos[FOOT] - before.xpos[FOOT]) / self.dt
        turned = s.xmat[TORSO].reshape(3, 3) @ s.memory["target"][1] - before.xmat[TORSO, 2]
        touched = s.ncon[0] - before.ncon[0]
        late = jnp.exp(-s.time) * (before.time + 1.0)
        total = (
            moved[0] - jnp.linalg.norm(turned) + 0.5 * touched + late - jnp.sum((action - before.memory["last"]) ** 2)
        )
        return total, {"late": late, "touched": touched}

    def terminated(self, s):
        return (s.xpos[TORSO, 2] < 0.55) | (jnp.abs(s.qpos[2]) > 0.7)

    def reset(self, noise):
        lean = noise.uniform(2, -0.3, 0.3)
        qpos = jnp.zeros(5).at[2:4].set(lean)
        target = jnp.stack([jnp.full(3, lean[0]), noise.normal(3)])
        return qpos, noise.normal(5) * 0.5, {"last": jnp.zeros(1), "count": 0.0, "target": target}

    def remember(self, s, before, action, noise):
        del noise
        target = before.memory["target"] * 0.99 + 0.001 * s.xpos[FOOT, 0]
        return {"last": action, "count": before.memory["count"] + (s.ncon[0] > 0), "target": target}
