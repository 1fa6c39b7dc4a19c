"""The compiled environments against Gymnasium's own: each step of its episodes, started from its state."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import batches
import gymnasium
import mujoco
import numpy as np
import pytest

pytestmark = pytest.mark.xdist_group("locomotion")

GYMNASIUM = {
    "ant": "Ant-v5",
    "halfcheetah": "HalfCheetah-v5",
    "humanoid": "Humanoid-v5",
    "walker2d": "Walker2d-v5",
}
EPISODES = 10

# Single precision: a control step evaluates the physics up to 20 times, each with errors of some 1e-7 of the largest
# force, and stiff contacts (time constants of 0.02 s) turn these into accelerations. The worst states are those where a
# contact begins: there a force starts from 0, and the entries that it moves are small beside it.
TYPICAL, WORST = 2e-4, 5e-3  # of 1 + |entry|, for the worst entry of 99% of the states and of all of them


@dataclasses.dataclass(frozen=True)
class Steps:
    """Steps of Gymnasium's environment, each array (num, ...): what the step started from and what it gave.

    Attributes:
        qpos, qvel, qacc_warmstart, memory, elapsed, action: before the step.
        obs, reward, terminated, truncated, after: what the step gave, and qpos after it.
        info: by Gymnasium's names.
        first: the first observation of each episode; start: (qpos, qvel) there.
    """

    qpos: np.ndarray
    qvel: np.ndarray
    qacc_warmstart: np.ndarray
    memory: np.ndarray
    elapsed: np.ndarray
    action: np.ndarray
    obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    after: np.ndarray
    info: dict[str, np.ndarray]
    first: np.ndarray
    start: np.ndarray


def remembered(robot: str, model: mujoco.MjModel, data: mujoco.MjData) -> np.ndarray:
    """What Gymnasium measures its velocity from: MuJoCo's derived data, which lag behind qpos."""
    if robot == "ant":
        return data.body("torso").xpos[:2].copy()
    if robot == "humanoid":
        return (model.body_mass @ data.xipos)[:2] / model.body_mass.sum()
    return data.qpos[:1].copy()


@cache
def episodes(robot: str) -> Steps:
    """Random actions until an episode ends; Humanoid's contacts solved by Newton's method."""
    env = gymnasium.make(GYMNASIUM[robot], disable_env_checker=True)
    model, data = env.unwrapped.model, env.unwrapped.data
    if robot == "humanoid":
        model.opt.solver, model.opt.iterations = mujoco.mjtSolver.mjSOL_NEWTON, 100
    rng = np.random.default_rng(1)
    rows: dict[str, list[Any]] = {f.name: [] for f in dataclasses.fields(Steps)}
    for episode in range(EPISODES):
        rows["first"].append(env.reset(seed=episode)[0])
        rows["start"].append(np.concatenate([data.qpos, data.qvel]))
        done, elapsed = False, 0
        while not done:
            # float64, because Gymnasium squares an action in the action's precision; beyond the bounds, too.
            action = 1.2 * rng.uniform(env.action_space.low, env.action_space.high)
            before = {name: getattr(data, name).copy() for name in ("qpos", "qvel", "qacc_warmstart")}
            before |= {"memory": remembered(robot, model, data), "elapsed": elapsed, "action": action}
            obs, reward, terminated, truncated, info = env.step(action)
            step = before | {"obs": obs, "reward": reward, "terminated": terminated, "truncated": truncated}
            for name, value in (step | {"after": data.qpos.copy(), "info": info}).items():
                rows[name].append(value)
            done, elapsed = terminated or truncated, elapsed + 1
    env.close()
    infos = rows.pop("info")
    by_name = {name: np.array([i[name] for i in infos]) for name in infos[0] if not name.startswith("tendon")}
    return Steps(info=by_name, **{name: np.array(values) for name, values in rows.items()})


def steps_of_ours(robot: str, dtype: str) -> tuple[Any, Steps]:
    """One step of our environment from each of Gymnasium's states."""
    steps = episodes(robot)
    env = batches.env(robot, len(steps.qpos), dtype)
    with batches.precision(dtype):
        state = env.reset_to(steps.qpos.astype(dtype), steps.qvel.astype(dtype))
        (memory,) = (name for name in state.internal if name.startswith("memory."))
        lagging = {memory: steps.memory, "qacc_warmstart": steps.qacc_warmstart}
        internal = state.internal | {name: value.astype(dtype) for name, value in lagging.items()}
        internal |= {"elapsed": steps.elapsed.astype(np.int32)}
        new = env.step(state.replace(internal=internal), steps.action.astype(dtype))
    return new, steps


def largest(found: Any, expected: np.ndarray) -> float:
    found = np.asarray(found)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("robot", GYMNASIUM)
def test_each_step_of_gymnasiums_episodes_is_ours_in_float64(robot):
    new, steps = steps_of_ours(robot, "float64")
    assert largest(new.final_obs, steps.obs) < 1e-6
    assert largest(new.reward, steps.reward) < 1e-6
    np.testing.assert_array_equal(new.terminated, steps.terminated)
    np.testing.assert_array_equal(new.truncated, steps.truncated)
    for name, value in steps.info.items():
        ours = new.metrics if name in new.metrics else new.info
        assert largest(ours[name], value) < 1e-6, name
    going_on = ~(steps.terminated | steps.truncated)
    assert largest(np.asarray(new.qpos)[going_on], steps.after[going_on]) < 1e-6
    assert largest(np.asarray(new.obs)[going_on], steps.obs[going_on]) < 1e-6


def test_the_episodes_have_what_they_should_test():
    ends = {robot: (episodes(robot).terminated.sum(), episodes(robot).truncated.sum()) for robot in GYMNASIUM}
    assert ends["halfcheetah"] == (0, EPISODES)
    assert ends["humanoid"] == ends["walker2d"] == (EPISODES, 0)
    assert sum(ends["ant"]) == EPISODES
    assert (np.abs(episodes("ant").obs[:, 27:]) == 1).any()
    assert np.abs(episodes("humanoid").obs[:, -78:]).max() > 10


@pytest.mark.parametrize("robot", GYMNASIUM)
def test_the_first_observation_is_gymnasiums(robot):
    steps = episodes(robot)
    env = batches.env(robot, len(steps.first), "float64")
    with batches.precision("float64"):
        state = env.reset_to(*np.split(steps.start, [env.model.nq], axis=1))
    assert largest(state.obs, steps.first) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("robot", GYMNASIUM)
def test_each_step_of_gymnasiums_episodes_is_ours_in_float32(robot):
    new, steps = steps_of_ours(robot, "float32")
    for name in ("final_obs", "reward"):
        ours, theirs = (
            x.reshape(len(steps.obs), -1)
            for x in (np.asarray(getattr(new, name)), getattr(steps, name.removeprefix("final_")))
        )
        error = (np.abs(ours - theirs) / (1 + np.abs(theirs))).max(axis=1)
        assert np.percentile(error, 99) < TYPICAL, name
        assert error.max() < WORST, name
    np.testing.assert_array_equal(new.terminated, steps.terminated)
    np.testing.assert_array_equal(new.truncated, steps.truncated)
