"""Tasks score what Gymnasium scores: their kernel code, run by the NumPy reference on MuJoCo's own data."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import gymnasium
import jax
import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco import mujoco_env

from brax_concurrent.envs.random import Random, threefry
from brax_concurrent.envs.registry import TASKS, make_task
from brax_concurrent.envs.task import KernelTask
from brax_concurrent.kernels.kernel import Kernel
from brax_concurrent.kernels.layout import physics_fields
from brax_concurrent.kernels.model import load_model
from brax_concurrent.kernels.ops import int32
from brax_concurrent.kernels.reference import ReferenceWorld
from brax_concurrent.kernels.specialize import ModelView
from brax_concurrent.kernels.trace import trace

jax.config.update("jax_platforms", "cpu")

GYMNASIUM = {
    "ant": "Ant-v5",
    "halfcheetah": "HalfCheetah-v5",
    "walker2d": "Walker2d-v5",
    "humanoid": "Humanoid-v5",
}
ASSETS = Path(mujoco_env.__file__).parent / "assets"
DERIVED = ("xpos", "xipos", "cinert", "cvel", "qfrc_actuator", "cfrc_ext", "subtree_com")
TOLERANCE = 1e-9  # the arithmetic differs in its order only

# Every argument of every task has a value that is not its default, at least once.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "ant": [
        {
            "frame_skip": 3,
            "forward_reward_weight": 2.0,
            "ctrl_cost_weight": 0.125,
            "contact_cost_weight": 0.25,
            "healthy_reward": 0.5,
            "main_body": "front_left_leg",
            "terminate_when_unhealthy": False,
            "healthy_z_range": (0.5, 0.7),
            "contact_force_range": (-0.5, 0.25),
            "reset_noise_scale": 0.3,
            "exclude_current_positions_from_observation": False,
            "include_cfrc_ext_in_observation": False,
        },
        {
            "xml_file": str(ASSETS / "ant.xml"),
            "main_body": 13,
            "contact_force_range": (0.125, math.inf),
            "healthy_z_range": (-math.inf, math.inf),
        },
        {"contact_cost_weight": 0, "include_cfrc_ext_in_observation": False},
    ],
    "halfcheetah": [
        {
            "xml_file": str(ASSETS / "half_cheetah.xml"),
            "frame_skip": 2,
            "forward_reward_weight": -1.5,
            "ctrl_cost_weight": 0.5,
            "reset_noise_scale": 0.02,
            "exclude_current_positions_from_observation": False,
        }
    ],
    "walker2d": [
        {
            "frame_skip": 7,
            "forward_reward_weight": 3.0,
            "ctrl_cost_weight": 0.25,
            "healthy_reward": 2.0,
            "terminate_when_unhealthy": False,
            "healthy_z_range": (1.1, 1.5),
            "healthy_angle_range": (-0.1, 0.2),
            "reset_noise_scale": 0.05,
            "exclude_current_positions_from_observation": False,
        },
        {"xml_file": str(ASSETS / "walker2d_v5.xml"), "healthy_angle_range": (-math.inf, 0.1)},
    ],
    "humanoid": [
        {
            "frame_skip": 2,
            "forward_reward_weight": 0.5,
            "ctrl_cost_weight": 0.3,
            "contact_cost_weight": 1e-6,
            "contact_cost_range": (0.01, 0.5),
            "healthy_reward": 1.0,
            "terminate_when_unhealthy": False,
            "healthy_z_range": (1.2, 1.35),
            "reset_noise_scale": 0.1,
            "exclude_current_positions_from_observation": False,
            "include_cinert_in_observation": False,
        },
        {"xml_file": str(ASSETS / "humanoid.xml"), "include_cvel_in_observation": False},
        {
            "include_qfrc_actuator_in_observation": False,
            "include_cfrc_ext_in_observation": False,
            "contact_cost_weight": 0.0,
        },
    ],
}


@dataclasses.dataclass
class Recording:
    """Steps of Gymnasium's environment: physics data before and after, and what the step gave."""

    env: Any
    before: list[dict[str, np.ndarray]]
    after: list[dict[str, np.ndarray]]
    first: list[tuple[dict[str, np.ndarray], np.ndarray, dict[str, Any]]]
    action: np.ndarray
    result: list[tuple[np.ndarray, float, bool, dict[str, Any]]]


def record(robot: str, episodes: int, max_steps: int, **arguments: Any) -> Recording:
    env = gymnasium.make(GYMNASIUM[robot], disable_env_checker=True, **arguments).unwrapped
    rng = np.random.default_rng(0)
    recording = Recording(env, [], [], [], np.zeros(0), [])
    actions = []
    for episode in range(episodes):
        obs, info = env.reset(seed=episode)
        data = snapshot(env.data)
        recording.first.append((data, obs, info))
        for _ in range(max_steps):
            # float64, because Gymnasium squares an action in the action's precision; beyond the bounds, too.
            actions.append(1.2 * rng.uniform(env.action_space.low, env.action_space.high))
            recording.before.append(data)
            obs, reward, terminated, _, info = env.step(actions[-1])
            data = snapshot(env.data)
            recording.after.append(data)
            recording.result.append((obs, float(reward), bool(terminated), info))
            if terminated:
                break
    recording.action = np.array(actions)
    env.close()
    return recording


def snapshot(data: mujoco.MjData) -> dict[str, np.ndarray]:
    return {name: getattr(data, name).copy() for name in ("qpos", "qvel", *DERIVED)}


def world_of(task: KernelTask, snapshots: list[dict[str, np.ndarray]]) -> tuple[ModelView, ReferenceWorld]:
    """The snapshots as one batch, one environment each."""
    model = load_model(task.model)
    world = ReferenceWorld(physics_fields(model), len(snapshots))
    for name in snapshots[0]:
        world.put(name, np.stack([s[name] for s in snapshots]))
    return ModelView(model), world


def stacked(scalars: Any, count: int) -> np.ndarray:
    return np.stack([np.broadcast_to(x, (count,)) for x in scalars], axis=-1)


def random_for(count: int, counter: int = 0) -> Random:
    words = np.random.default_rng(7).integers(-(2**31), 2**31, (2, count), np.int64).astype(np.int32)
    return Random((words[0], words[1]), np.full(count, counter, np.int32))


def compare(task: KernelTask, recording: Recording) -> None:
    """Observation, reward, termination, metrics and info of all recorded steps and resets."""
    count = len(recording.after)
    m, start = world_of(task, recording.before)
    _, end = world_of(task, recording.after)
    before = task.remember(m, start, {}, None)
    after = task.remember(m, end, before, None)
    assert {name: len(values) for name, values in after.items()} == task.memory
    outcome = task.outcome(m, end, list(recording.action.T), before, after)
    obs, reward, terminated, info = zip(*recording.result, strict=True)

    close(stacked(task.observation(m, end, after), count), np.stack(obs), "observation")
    close(np.broadcast_to(outcome.reward, (count,)), np.array(reward), "reward")
    np.testing.assert_array_equal(np.broadcast_to(outcome.terminated, (count,)), terminated)
    assert set(outcome.metrics) == set(task.metrics)
    assert set(outcome.info) == set(task.info)
    ours = {**outcome.metrics, **outcome.info}
    scalars = {name for name in info[0] if not name.startswith("tendon_")}
    assert {name for name in ours if not name.startswith("tendon_")} == scalars
    for name in scalars:
        close(np.broadcast_to(ours[name], (count,)), np.array([i[name] for i in info]), name)

    fresh, obs, _ = zip(*recording.first, strict=True)
    m, world = world_of(task, list(fresh))
    memory = task.remember_reset(m, world, None)
    close(stacked(task.observation(m, world, memory), len(fresh)), np.stack(obs), "observation at reset")


def close(ours: np.ndarray, theirs: np.ndarray, name: str) -> None:
    assert ours.shape == theirs.shape, name
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


# ---- Agreement with Gymnasium ------------------------------------------------------------------------------


@pytest.mark.parametrize("robot", GYMNASIUM)
def test_random_episodes_agree_with_gymnasium(robot):
    recording = record(robot, episodes=10, max_steps=300)
    task = make_task(robot)
    compare(task, recording)
    assert len(recording.after) > 150
    if robot != "halfcheetah":
        assert any(result[2] for result in recording.result)
    if robot in ("ant", "humanoid"):
        assert any(np.abs(data["cfrc_ext"]).max() > 1 for data in recording.after)


@pytest.mark.parametrize(("robot", "variant"), [(r, i) for r, vs in VARIANTS.items() for i in range(len(vs))])
def test_every_argument_means_what_it_means_in_gymnasium(robot, variant):
    arguments = VARIANTS[robot][variant]
    recording = record(robot, episodes=2, max_steps=300, **arguments)
    compare(make_task(robot, **arguments), recording)
    if arguments.get("terminate_when_unhealthy") is False:
        survived = [info["reward_survive"] for *_, info in recording.result]
        assert set(survived) == {0, arguments["healthy_reward"]}


@pytest.mark.parametrize("robot", GYMNASIUM)
def test_the_constructor_has_gymnasiums_arguments_and_defaults(robot):
    env = gymnasium.make(GYMNASIUM[robot], disable_env_checker=True).unwrapped
    code, defaults = type(env).__init__.__code__, type(env).__init__.__defaults__
    names = code.co_varnames[1 : code.co_argcount]
    theirs = {n: d for n, d in zip(names, defaults, strict=True) if n != "default_camera_config"}
    ours = {field.name: field.default for field in dataclasses.fields(TASKS[robot])}
    assert ours == theirs
    assert set(ours) == set().union(*VARIANTS[robot])

    task = make_task(robot)
    assert task.frame_skip == env.frame_skip
    assert task.observation_size == env.observation_space.shape[0]
    assert task.observation_structure == env.observation_structure
    np.testing.assert_array_equal(task.action_low, env.action_space.low)
    np.testing.assert_array_equal(task.action_high, env.action_space.high)
    assert task.max_episode_steps == gymnasium.spec(GYMNASIUM[robot]).max_episode_steps
    env.close()


def test_humanoid_tendons_are_those_of_the_new_state():
    recording = record("humanoid", episodes=2, max_steps=10)
    task = make_task("humanoid")
    env, data = recording.env, mujoco.MjData(recording.env.model)
    m, world = world_of(task, recording.after)
    memory = task.remember(m, world, {}, None)
    info = task.outcome(m, world, list(recording.action.T), memory, memory).info
    for step, after in enumerate(recording.after):
        data.qpos[:], data.qvel[:] = after["qpos"], after["qvel"]
        mujoco.mj_forward(env.model, data)
        for t in range(2):
            assert info[f"tendon_length[{t}]"][step] == pytest.approx(data.ten_length[t], abs=1e-12)
            assert info[f"tendon_velocity[{t}]"][step] == pytest.approx(data.ten_velocity[t], abs=1e-12)
        theirs = recording.result[step][3]["tendon_length"]
        assert np.abs(theirs - data.ten_length).max() < 0.01  # less than a physics step's motion


def test_ant_ends_where_the_state_is_not_finite():
    task = make_task("ant")
    sound = record("ant", episodes=1, max_steps=1)
    broken = []
    for name, index, value in (("qpos", 9, np.nan), ("qvel", 3, np.inf), ("qpos", 2, np.nan)):
        data = {k: v.copy() for k, v in sound.after[0].items()}
        data[name][index] = value
        broken.append(data)
    m, world = world_of(task, [*sound.after, *broken])
    memory = task.remember(m, world, {}, None)
    outcome = task.outcome(m, world, [np.zeros(4)] * 8, memory, memory)
    assert outcome.terminated.tolist() == [False, True, True, True]
    assert outcome.metrics["reward_survive"].tolist() == [1, 0, 0, 0]


def test_humanoid_centre_of_mass_follows_masses_that_differ_by_environment():
    task = make_task("humanoid")
    model = load_model(task.model)
    world = ReferenceWorld(physics_fields(model), 2)
    xipos, mass = np.random.default_rng(0).normal(size=(2, 2, model.nbody, 3))
    world.put("xipos", xipos)
    mass = np.abs(mass[..., 0])

    class Varied:
        nbody, body_mass = model.nbody, list(mass.T)

    ours = stacked(task.remember(Varied(), world, {}, None)["centre_of_mass"], 2)
    weights = mass[:, 1:] / mass[:, 1:].sum(1, keepdims=True)
    np.testing.assert_allclose(ours, np.einsum("nb,nbi->ni", weights, xipos[:, 1:])[:, :2], rtol=1e-12)


# ---- Reset -------------------------------------------------------------------------------------------------

DRAWS = 2000


def reset_states(task: KernelTask, counter: int = 0) -> tuple[Any, np.ndarray, np.ndarray]:
    model = load_model(task.model)
    world = ReferenceWorld(physics_fields(model), DRAWS)
    task.reset(ModelView(model), world, random_for(DRAWS, counter))
    return model, world.get("qpos"), world.get("qvel")


def looks_uniform(x: np.ndarray, scale: float) -> None:
    """Bounds, mean, spread and independence of columns, each within 5 standard errors or so."""
    assert np.abs(x).max() < scale
    assert np.abs(x).max(0).min() > 0.98 * scale
    assert np.abs(x.mean(0)).max() < 5 * scale / math.sqrt(3 * DRAWS)
    np.testing.assert_allclose(x.std(0), scale / math.sqrt(3), rtol=0.06)
    independent(x)


def looks_normal(x: np.ndarray, scale: float) -> None:
    assert np.abs(x.mean(0)).max() < 5 * scale / math.sqrt(DRAWS)
    np.testing.assert_allclose(x.std(0), scale, rtol=0.08)
    for sigmas, share in ((1, 0.6827), (2, 0.9545)):
        assert abs((np.abs(x) < sigmas * scale).mean() - share) < 0.01
    assert (np.abs(x) > 3 * scale).any()
    independent(x)


def independent(x: np.ndarray) -> None:
    correlation = np.corrcoef(x.T) - np.eye(x.shape[1])
    assert np.abs(correlation).max() < 5.5 / math.sqrt(DRAWS)


@pytest.mark.parametrize(
    ("robot", "velocity"),
    [("ant", "normal"), ("halfcheetah", "normal"), ("walker2d", "uniform"), ("humanoid", "uniform")],
)
@pytest.mark.parametrize("scale", [None, 0.25])
def test_reset_noise_has_gymnasiums_distribution(robot, velocity, scale):
    task = make_task(robot, **({} if scale is None else {"reset_noise_scale": scale}))
    model, qpos, qvel = reset_states(task)
    looks_uniform(qpos - model.qpos0, task.reset_noise_scale)
    (looks_normal if velocity == "normal" else looks_uniform)(qvel, task.reset_noise_scale)
    independent(np.hstack([qpos, qvel]))
    if robot in ("ant", "humanoid"):
        length = np.linalg.norm(qpos[:, 3:7], axis=1)
        assert length.std() > 0.3 * task.reset_noise_scale  # not normalised


def test_reset_without_noise_is_qpos0():
    model, qpos, qvel = reset_states(make_task("walker2d", reset_noise_scale=0))
    np.testing.assert_array_equal(qpos, np.broadcast_to(model.qpos0, qpos.shape))
    assert not qvel.any()


def test_resets_differ_between_environments_and_times():
    task = make_task("halfcheetah")
    _, first, _ = reset_states(task, 1)
    _, second, _ = reset_states(task, 2)
    _, again, _ = reset_states(task, 1)
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(np.vstack([first, second]), axis=0)) == 2 * DRAWS


# ---- Random numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [  # the known answers of Random123 for threefry2x32, 20 rounds
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers(key, counter, expected):
    lanes = [[np.array([int32(word)], np.int32) for word in pair] for pair in (key, counter)]
    x, y = threefry(*lanes)
    assert (int(x[0]) & 0xFFFFFFFF, int(y[0]) & 0xFFFFFFFF) == expected


def test_threefry_is_jaxs():
    from jax.extend.random import threefry_2x32

    words = np.random.default_rng(0).integers(0, 2**32, (4, 50), np.uint32)
    ours = threefry(*[[row.view(np.int32) for row in pair] for pair in (words[:2], words[2:])])
    for i in range(50):
        theirs = np.asarray(threefry_2x32(words[:2, i], words[2:, i]))
        assert [int(x[i]) & 0xFFFFFFFF for x in ours] == theirs.tolist()


def test_draws_are_uniform_and_normal():
    random = random_for(DRAWS)
    looks_uniform(np.stack([2 * random.uniform(2.0, 3.0) - 5 for _ in range(7)], 1), 1.0)
    looks_normal(np.stack([random.normal() for _ in range(7)], 1), 1.0)


# ---- The language of kernels -------------------------------------------------------------------------------


@pytest.mark.parametrize("robot", sorted(TASKS))
def test_task_methods_can_be_traced(robot):
    task = make_task(robot)
    model = load_model(task.model)
    fields = physics_fields(model)
    named = {"action": task.action_size, "obs": task.observation_size, "key": 2, "tick": 1, "reward": 1}
    user = {name: (n, "i" if name in ("key", "tick") else "f") for name, n in (named | task.memory).items()}
    user["terminated"] = (1, "b")

    def keep(w: Any, name: str, values: list[Any]) -> None:
        assert len(values) == user[name][0]
        for i, x in enumerate(values):
            getattr(w.user, name)[i] = x

    def whole(m: Any, w: Any) -> None:
        random = Random([w.user.key[0], w.user.key[1]], w.user.tick[0])
        action = [w.user.action[i] for i in range(task.action_size)]
        before = {name: [getattr(w.user, name)[i] for i in range(n)] for name, n in task.memory.items()}
        task.control(m, w, action, before)
        after = task.remember(m, w, before, random)
        outcome = task.outcome(m, w, action, before, after)
        keep(w, "reward", [outcome.reward])
        keep(w, "terminated", [outcome.terminated])
        keep(w, "obs", task.observation(m, w, after))
        with w.when(w.user.reward[0] > 0):
            task.reset(m, w, random)
            memory = task.remember_reset(m, w, random)
            for name in task.memory:
                keep(w, name, memory[name])
            keep(w, "obs", task.observation(m, w, memory))

    everything = (*fields, *("user." + name for name in user))
    program = trace(Kernel(robot, whole, everything, everything), ModelView(model), fields, user, {}, "f32")
    assert program.root.body
