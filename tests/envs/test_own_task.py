"""Tasks of users: the same as MuJoCo C with the task around it in NumPy, and as our own tasks written the other way."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import batches
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from own_tasks import FOOT, HOPPER, TORSO, Ant, Cheetah, Everything
from pendulum import PENDULUM

import brax_concurrent as bc
from brax_concurrent.backends import objects
from brax_concurrent.envs import program
from brax_concurrent.envs.footprints import check_environment

jax.config.update("jax_platforms", "cpu")

KEY = jax.random.key(5)


class Reference:
    """The same around MuJoCo C, in NumPy, for one environment."""

    def __init__(self):
        self.model = mujoco.MjModel.from_xml_string(HOPPER)
        self.data = mujoco.MjData(self.model)

    def start(self, qpos, qvel, target):
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:], self.data.qvel[:] = qpos, qvel
        mujoco.mj_forward(self.model, self.data)
        self.data.cfrc_ext[:] = 0
        self.steps, self.last, self.count, self.target = 0, np.zeros(1), 0.0, target
        return self.observation()

    def observation(self):
        d = self.data
        parts = [d.qpos[1:], np.cos(d.qpos[2:3]), d.qvel, d.xpos[FOOT], d.cvel[TORSO, 1:5], d.cfrc_ext[TORSO]]
        parts += [d.qacc, d.actuator_force, d.qfrc_bias, self.last, self.target.ravel()]
        return np.concatenate([*parts, [self.steps * 0.01, self.count, d.ncon]])

    def step(self, action):
        d, time = self.data, self.steps * 0.01
        foot, turn, touching = d.xpos[FOOT].copy(), d.xmat[TORSO, 2], d.ncon
        d.ctrl[0] = (20.0 * (0.3 * action[0] - d.qpos[3]) - d.qvel[3] + 0.1 * np.sin(3.0 * time)) / 50.0
        d.ctrl[1] = action[0] if self.count > 3 else 0.1
        mujoco.mj_step(self.model, d, 2)
        mujoco.mj_rnePostConstraint(self.model, d)
        self.steps += 1
        self.target = self.target * 0.99 + 0.001 * d.xpos[FOOT, 0]
        self.count += d.ncon > 0
        touched, late = d.ncon - touching, np.exp(-self.steps * 0.01) * (time + 1.0)
        turned = d.xmat[TORSO].reshape(3, 3) @ self.target[1] - turn
        reward = (d.xpos[FOOT, 0] - foot[0]) / 0.01 - np.linalg.norm(turned) + 0.5 * touched + late
        reward -= np.sum((action - self.last) ** 2)
        self.last = action
        terminated = d.xpos[TORSO, 2] < 0.55 or abs(d.qpos[2]) > 0.7
        return reward, terminated, self.steps >= 40, {"late": late, "touched": touched}


@pytest.mark.slow
def test_a_task_is_what_mujoco_and_numpy_make_of_it():
    """Over episodes with resets, in double precision. Only what a reset draws is taken over."""
    with batches.precision("float64"):
        env = batches.env_of(Everything(), 3, "float64")
        state, references = jax.tree.map(np.asarray, env.reset(KEY)), [Reference() for _ in range(3)]
        ends = np.zeros(2, int)

        def start(i):
            target = state.internal["memory.target"][i].reshape(2, 3)
            first = references[i].start(state.qpos[i], state.qvel[i], target)
            np.testing.assert_allclose(target[0], state.qpos[i, 2])  # one draw for both
            np.testing.assert_allclose(state.obs[i], first, rtol=1e-9, atol=1e-9)

        for i in range(3):
            start(i)
        for action in batches.random_actions(env, 130, seed=3):
            state = jax.tree.map(np.asarray, env.step(state, action))
            for i, reference in enumerate(references):
                reward, terminated, truncated, metrics = reference.step(action[i])
                np.testing.assert_allclose(state.final_obs[i], reference.observation(), rtol=1e-9, atol=1e-9)
                np.testing.assert_allclose(state.reward[i], reward, rtol=1e-9, atol=1e-9)
                assert (state.terminated[i], state.truncated[i]) == (terminated, truncated)
                assert {name: value[i] for name, value in state.metrics.items()} == pytest.approx(metrics)
                ends += terminated, truncated
                if terminated or truncated:
                    start(i)
                else:
                    np.testing.assert_array_equal(state.obs[i], state.final_obs[i])
    assert (ends > 1).all(), ends


def rollout(env, steps):
    """Everything that steps of random actions give, jitted from the first call on."""

    @jax.jit
    def run(key):
        def one(state, action):
            state = env.step(state, action)
            return state, (state.obs, state.reward, state.terminated, state.truncated, state.final_obs, state.metrics)

        return jax.lax.scan(one, env.reset(key), batches.random_actions(env, steps))[1]

    return run(KEY)


@pytest.mark.slow
@pytest.mark.parametrize(("robot", "task"), [("halfcheetah", Cheetah()), ("ant", Ant())])
def test_a_robot_of_ours_written_again_gives_the_same_bits(robot, task):
    ours, theirs = batches.env_of(task, 40), batches.env(robot, 40, max_episode_steps=6)
    batches.assert_same_bits(rollout(ours, 16), rollout(theirs, 16))
    sizes = [program.tile_program(env).layout.arena_bytes for env in (ours, theirs)]
    assert sizes[0] <= sizes[1]  # no field is kept that nobody asks for


def test_of_what_was_before_only_what_is_used_is_carried():
    assert batches.env_of(Ant(), 1).task.memory == {"before.xpos": 1}
    assert batches.env_of(Cheetah(), 1).task.memory == {}


@pytest.fixture(scope="module")
def expected():
    return rollout(batches.env_of(Everything(), 40), 45)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"granularity": "step"}, {"scheduler": "sw", "granularity": "stage"}])
def test_how_the_work_is_cut_changes_no_bit(settings, expected, monkeypatch, tmp_path):
    monkeypatch.setenv(objects.ENVIRONMENT, str(tmp_path))  # traced here, inside of jit
    batches.assert_same_bits(rollout(batches.env_of(Everything(), 40, **settings), 45), expected)


@pytest.mark.slow
def test_kernels_keep_to_their_footprints():
    for checked in check_environment(batches.env_of(Everything(), 40)):
        assert checked.checker.violations == ()


class Walk(bc.Task):
    """A robot that stands still, and a random walk beside it."""

    model = PENDULUM

    def observation(self, s):
        return jnp.concatenate([s.memory["place"], s.memory["drawn"]])

    def reward(self, s, before, action):
        return 1

    def terminated(self, s):
        return s.memory["place"][0] > 2.0

    def reset(self, noise):
        return jnp.zeros(1), jnp.zeros(1), {"place": jnp.zeros(2), "drawn": noise.uniform((2,), 5.0, [6.0, 7.0])}

    def remember(self, s, before, action, noise):
        drawn = jnp.stack([noise.normal(), noise.uniform()])
        return {"place": before.memory["place"] + drawn, "drawn": drawn}


def test_every_step_and_environment_draws_its_own_numbers():
    env = batches.env_of(Walk(), 300)
    obs, reward, terminated, _, final_obs, _ = map(np.asarray, rollout(env, 40)[:6])
    first = np.asarray(env.reset(KEY).obs)
    drawn = final_obs[..., 2:].reshape(-1, 2)
    assert len(np.unique(drawn[:, 0])) > 0.99 * len(drawn)
    np.testing.assert_allclose([drawn.mean(0), drawn.std(0)], [[0, 0.5], [1, 12**-0.5]], atol=0.05)
    before = np.concatenate([first[None], obs[:-1]])
    np.testing.assert_allclose(final_obs[..., :2], before[..., :2] + final_obs[..., 2:], atol=1e-6)
    np.testing.assert_array_equal(terminated, final_obs[..., 0] > 2)
    assert (reward == 1).all()
    started = np.concatenate([first, obs[terminated]])
    assert (started[:, :2] == 0).all()
    assert len(started) > 500
    assert ((started[:, 2:] > 5) & (started[:, 2:] < [6, 7])).all()
    assert started[:, 3].max() > 6.9


class Least(bc.Task):
    model = PENDULUM

    def observation(self, s):
        return s.qpos

    def reward(self, s, before, action):
        return 0.0


class Everywhere(Least):
    model = HOPPER  # its actuators have no range


class Bounded(Everywhere):
    action_high = (0.5, 3.0)


def test_what_is_left_out_has_a_default():
    env = batches.env_of(Least(), 2)
    state = env.reset(KEY)
    np.testing.assert_array_equal(state.obs, np.zeros((2, 1)))
    assert (env.name, env.action_size, env.dt, env.task.max_episode_steps) == ("Least", 1, 0.002, 1000)
    assert not env.step(state, jnp.zeros((2, 1))).terminated.any()
    assert env.action_low == [-1.0]  # the actuator's


@pytest.mark.parametrize(
    ("task", "high"), [(Everything(), [1.0]), (Everywhere(), [np.inf, np.inf]), (Bounded(), [0.5, 3.0])]
)
def test_an_action_has_the_bounds_that_the_task_says_or_the_actuators_or_1(task, high):
    assert batches.env_of(task, 1).action_high.tolist() == high


def test_it_is_one_robot_of_a_batch_and_takes_other_models_quantities():
    mixed = bc.make({"walk": (3, Walk()), "least": (2, Least())}, backend="cpu")
    state = mixed.reset(KEY)
    assert {name: obs.shape for name, obs in state.obs.items()} == {"walk": (3, 4), "least": (2, 1)}
    env = batches.env_of(Least(), 3, per_env=("body_mass",), autoreset=False)
    masses = np.tile(env.model.body_mass, (3, 1)).astype(np.float32) * np.array([[1], [1], [2]], np.float32)
    state = env.reset_to(np.zeros((3, 1), np.float32), np.ones((3, 1), np.float32), model={"body_mass": masses})
    obs = np.asarray(env.step(state, jnp.ones((3, 1))).obs)
    assert obs[0] == obs[1] != obs[2]


def test_gymnasium_takes_it():
    gymnasium_env = pytest.importorskip("brax_concurrent.training.gymnasium_env")
    envs = gymnasium_env.GymVectorEnv(Parts(), 3, backend="cpu")
    envs.reset(seed=0)
    observations, rewards, *_, infos = envs.step(envs.action_space.sample())
    assert (observations.shape, rewards.shape) == ((3, 1), (3,))
    np.testing.assert_array_equal(infos["part"], 2 * rewards)


class Parts(Least):
    def reward(self, s, before, action):
        return s.qvel[0], {"part": 2 * s.qvel[0]}


# ---- Kept on disk


@dataclasses.dataclass
class Weighted(bc.Task):
    """A task with arguments and a table."""

    weight: float = 1.0
    table: tuple = (0.0,) * 2000
    frame_skip: int = 1
    max_episode_steps: int = 1000
    model = PENDULUM

    def observation(self, s):
        return s.qpos * jnp.asarray(self.table)[995:1000]

    def reward(self, s, before, action):
        return self.weight * s.qvel[0]


VARIANTS = {
    "a constant": {"weight": float(np.nextafter(np.float32(1.0), np.float32(2.0)))},
    "an entry of a table": {"table": (*[0.0] * 997, 1.0, *[0.0] * 1002)},
    "an attribute": {"max_episode_steps": 999},
}


@pytest.mark.parametrize("what", VARIANTS)
def test_a_task_is_kept_on_disk_and_another_is_another(what, tmp_path, monkeypatch):
    monkeypatch.setenv(objects.ENVIRONMENT, str(tmp_path))
    calls, original = [], program.specialize
    monkeypatch.setattr(program, "specialize", lambda *args: calls.append(args) or original(*args))
    for arguments, count in (({}, 1), ({}, 1), (VARIANTS[what], 2), (VARIANTS[what], 2), ({}, 2)):
        env = batches.env_of(Weighted(**arguments), 2)
        program.tile_program(env)
        assert len(calls) == count


def test_a_state_of_another_task_is_refused():
    state = batches.env_of(Weighted(), 2).reset(KEY)
    with pytest.raises(ValueError, match="state: expected one of Weighted"):
        batches.env_of(Weighted(weight=2.0), 2).step(state, jnp.zeros((2, 1)))


def test_the_documentations_example_runs():
    text = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    names = {}
    exec(compile(block.replace("4096", "4"), "<tasks.md>", "exec"), names)
    state = names["env"].reset(KEY)
    assert (np.asarray(state.obs[:, 2]) < -0.99).all()  # hanging
    assert names["env"].step(state, jnp.ones((4, 1))).metrics["upright"].shape == (4,)
