"""Grasp against its rules, written out again here in plain NumPy on MuJoCo's data."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import pytest

from brax_concurrent.envs.random import Random
from brax_concurrent.envs.registry import make_task
from brax_concurrent.envs.task import ASSETS, KernelTask
from brax_concurrent.kernels.layout import physics_fields
from brax_concurrent.kernels.model import Model, load_model
from brax_concurrent.kernels.reference import ReferenceWorld
from brax_concurrent.kernels.specialize import ModelView

DT = 0.02
LINKS = [f"{link}_{finger}" for finger in "1234" for link in ("proximal", "middle", "distal")]
TARGET = np.array([3.0, -2.0, 4.0])


@pytest.fixture(scope="module")
def mj() -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_path(str(ASSETS / "grasp.xml"))


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(make_task("grasp").model)


def world_of(model: Model, snapshots: list[mujoco.MjData]) -> ReferenceWorld:
    """Physics data as one batch, contacts included."""
    world = ReferenceWorld(physics_fields(model), len(snapshots))
    for name in ("qpos", "qvel", "xipos", "cvel", "subtree_com", "mocap_pos"):
        world.put(name, np.stack([getattr(d, name) for d in snapshots]))
    world.put("ncon", [[d.ncon] for d in snapshots])
    pairs = [tuple(sorted(pair)) for pair in model.pair_geom.tolist()]
    index = np.full((len(snapshots), model.nconmax), -1)
    for row, d in zip(index, snapshots, strict=True):
        row[: d.ncon] = [pairs.index(tuple(sorted(geoms))) for geoms in d.contact.geom.tolist()]
    world.put("contact_pair", index)
    return world


def random_for(count: int, counter: int = 0) -> Random:
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (2, count), np.int64).astype(np.int32)
    return Random((words[0], words[1]), np.full(count, counter, np.int32))


def rows(values: list[Any], count: int) -> np.ndarray:
    return np.stack([np.broadcast_to(x, (count,)) for x in values], axis=-1)


def memory_of(**values: np.ndarray) -> dict[str, list[np.ndarray]]:
    return {name: list(np.atleast_2d(value).T) for name, value in values.items()}


# ---- The rules in NumPy ------------------------------------------------------------------------------------


def velocity(mj: mujoco.MjModel, d: mujoco.MjData, body: str) -> np.ndarray:
    """Of the centre of mass, world axes."""
    spatial = np.zeros(6)
    # mjOBJ_BODY is at the centre of mass.
    mujoco.mj_objectVelocity(mj, d, int(mujoco.mjtObj.mjOBJ_BODY), mj.body(body).id, spatial, 0)
    return spatial[3:]


def polar(v: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(v)
    return np.array([length, *(v / (1e-6 + length))])


def touches(mj: mujoco.MjModel, d: mujoco.MjData) -> np.ndarray:
    touching = {frozenset(mj.geom(g).name for g in geoms) for geoms in d.contact.geom}
    return np.array([float({"object", f"distal_{f}"} in touching) for f in "1234"])


def observation(mj: mujoco.MjModel, d: mujoco.MjData, target: np.ndarray, palm_velocity: np.ndarray) -> np.ndarray:
    ball, palm = d.body("object").xipos, d.mocap_pos[0]
    ball_velocity = velocity(mj, d, "object")
    to_ball, to_target, ball_to_target = (polar(v) for v in (ball - palm, target - palm, target - ball))
    parts = [to_ball, to_target, palm, ball - palm]
    parts += [d.body(link).xipos - palm for link in LINKS]
    parts += [target - palm, ball_velocity]
    parts += [velocity(mj, d, link) for link in LINKS]
    parts += [palm_velocity, [palm_velocity @ to_ball[1:]]]
    parts += [ball_to_target, [ball_velocity @ ball_to_target[1:]], touches(mj, d)]
    return np.concatenate(parts)


def rewards(mj: mujoco.MjModel, d: mujoco.MjData, target: np.ndarray, palm_velocity: np.ndarray) -> dict[str, float]:
    to_target, to_ball = target - d.body("object").xipos, d.body("object").xipos - d.mocap_pos[0]
    return {
        "reward_hit": 5.0 * (np.linalg.norm(to_target) < 1.1),
        "reward_ball_to_target": 1.5 * DT * velocity(mj, d, "object") @ polar(to_target)[1:],
        "reward_palm_to_ball": 0.1 * DT * palm_velocity @ polar(to_ball)[1:],
        "reward_close": 0.1 * DT / (1 + np.hypot(*to_ball[:2])),
        "reward_touch": 0.2 * DT * touches(mj, d).sum(),
    }


def moved_palm(palm: np.ndarray, action: np.ndarray) -> np.ndarray:
    goal = np.array([-10, -10, 3.5]) + np.array([20, 20, 10]) * (np.clip(action, -1, 1) + 1) / 2
    way = goal - palm
    return palm + 0.15 * min(1.0, 2.0 / np.linalg.norm(way)) * way


# ---- Tests -------------------------------------------------------------------------------------------------


def grasping_run(mj: mujoco.MjModel) -> tuple[list[mujoco.MjData], np.ndarray, np.ndarray]:
    """(data, palm's velocity, action) of 250 control steps, in which all distal links touch the ball."""
    d = mujoco.MjData(mj)
    rng = np.random.default_rng(0)
    snapshots, velocities, actions = [], [], []
    inwards = np.array([-1, 0, -1, 0, *[1, 0, 1, -1] * 3])  # curl, twist, middle, distal of each finger
    for step in range(250):
        palm_action = [0.02, -0.01, -1 + 0.004 * max(step - 100, 0)]
        actions.append(np.array([*np.clip(inwards + 0.2 * rng.normal(size=16), -1, 1), *palm_action]))
        low, high = mj.actuator_ctrlrange.T
        d.ctrl[:] = low + (high - low) * (actions[-1][:16] + 1) / 2
        before = d.mocap_pos[0].copy()
        d.mocap_pos[0] = moved_palm(before, actions[-1][16:])
        velocities.append((d.mocap_pos[0] - before) / DT)
        for _ in range(4):
            mujoco.mj_step(mj, d)
        snapshots.append(mujoco.MjData(mj))
        mujoco.mj_copyData(snapshots[-1], mj, d)
    return snapshots, np.array(velocities), np.array(actions)


def test_observation_reward_and_info_follow_the_rules(mj, model):
    task = make_task("grasp")
    snapshots, velocities, actions = grasping_run(mj)
    count = len(snapshots)
    world = world_of(model, snapshots)
    targets = np.random.default_rng(3).uniform([-4, -4, 0], [4, 4, 4], (count, 3))
    palms = np.stack([d.mocap_pos[0] for d in snapshots])
    before = memory_of(
        target=targets,
        palm=palms - DT * velocities,
        palm_velocity=np.full((count, 3), np.nan),
        touch=np.zeros((count, 4)),
    )
    m = ModelView(model)
    with np.errstate(all="raise"):
        after = task.remember(m, world, before, random_for(count))
        outcome = task.outcome(m, world, list(actions.T), before, after)
        seen = rows(task.observation(m, world, {**after, "target": before["target"]}), count)
        seen_after = rows(task.observation(m, world, after), count)
    assert {name: len(values) for name, values in after.items()} == task.memory

    expected = np.stack([observation(mj, *row) for row in zip(snapshots, targets, velocities, strict=True)])
    assert seen.shape == (count, task.observation_size) == (count, 105)
    np.testing.assert_allclose(seen, expected, rtol=1e-9, atol=1e-9)
    terms = [rewards(mj, *row) for row in zip(snapshots, targets, velocities, strict=True)]
    for name in task.metrics:
        np.testing.assert_allclose(outcome.metrics[name], [t[name] for t in terms], rtol=1e-9, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(outcome.reward, [sum(t.values()) for t in terms], rtol=1e-9, atol=1e-12)
    assert outcome.terminated is False

    hit = np.array([t["reward_hit"] > 0 for t in terms])
    assert 0 < hit.sum() < count
    np.testing.assert_array_equal(outcome.info["hit"], hit)
    np.testing.assert_array_equal(outcome.info["touches"], expected[:, -4:].sum(1))
    assert set(outcome.info["touches"]) >= {0, 4}  # nobody, everybody
    np.testing.assert_array_equal(outcome.info["ball_height"], [d.body("object").xipos[2] for d in snapshots])
    np.testing.assert_allclose(outcome.info["target_distance"], expected[:, 96], rtol=1e-12)
    moved = rows(after["target"], count) != targets
    np.testing.assert_array_equal(moved, np.repeat(hit[:, None], 3, axis=1))
    np.testing.assert_allclose(seen_after[:, 50:53], rows(after["target"], count) - palms, rtol=1e-12)


@pytest.mark.parametrize(
    "weight", ["hit_reward", "ball_to_target_weight", "palm_to_ball_weight", "close_weight", "touch_weight"]
)
def test_each_weight_scales_its_term_only(mj, model, weight):
    d = mujoco.MjData(mj)
    d.qvel[:3] = 1, 2, 3
    mujoco.mj_forward(mj, d)
    world = world_of(model, [d])
    world.put("contact_pair", [[0, 1, 2, 3, 4, 5]])  # hand-made: everything touches the ball
    world.put("ncon", [[6]])
    before = memory_of(
        target=[0.5, 0.5, 1.0],
        palm=d.mocap_pos[0] - [0.1, 0.0, 0.2],
        palm_velocity=[0.0] * 3,
        touch=[0.0] * 4,
    )
    term = {"hit_reward": "reward_hit"}.get(weight, "reward_" + weight.removesuffix("_weight"))

    def terms(task: KernelTask) -> dict[str, Any]:
        after = task.remember(ModelView(model), world, before, random_for(1))
        return dict(task.outcome(ModelView(model), world, [0.0] * 19, before, after).metrics)

    plain, double = (
        terms(make_task("grasp")),
        terms(make_task("grasp", **{weight: 2 * getattr(make_task("grasp"), weight)})),
    )
    assert all(value[0] != 0 for value in plain.values())
    for name, value in plain.items():
        assert double[name][0] == pytest.approx(value[0] * (2 if name == term else 1), rel=1e-12)


def test_control_maps_servos_to_their_ranges_and_moves_the_palm(model):
    task = make_task("grasp")
    count = 400
    rng = np.random.default_rng(0)
    action, palm = (
        rng.uniform(-1.3, 1.3, (count, 19)),
        rng.uniform([-10, -10, 3.5], [10, 10, 13.5], (count, 3)),
    )
    action[0], action[1] = -1, 1
    palm[2], action[2, 16:] = (0, 0, 8.5), 0  # where it wants to be already
    palm[3], action[3, 16:] = (0, 0, 8.0), 0  # nearer than 2 m
    world = ReferenceWorld(physics_fields(model), count)
    task.control(ModelView(model), world, list(action.T), memory_of(palm=palm))
    ctrl, moved = world.get("ctrl"), world.get("mocap_pos")[:, 0]
    np.testing.assert_allclose(ctrl[0], model.actuator_ctrlrange[:, 0], atol=1e-15)
    np.testing.assert_allclose(ctrl[1], model.actuator_ctrlrange[:, 1], atol=1e-15)
    middle = model.actuator_ctrlrange.mean(1)
    np.testing.assert_allclose(ctrl - middle, action[:, :16] * (model.actuator_ctrlrange[:, 1] - middle), atol=1e-14)
    np.testing.assert_array_equal(moved[2], palm[2])
    np.testing.assert_allclose(moved[3], [0, 0, 8.075], atol=1e-14)
    others = np.delete(np.arange(count), 2)
    np.testing.assert_allclose(moved[others], [moved_palm(palm[i], action[i, 16:]) for i in others], atol=1e-13)
    assert np.linalg.norm(moved - palm, axis=1).max() == pytest.approx(0.3)
    assert (moved > [-10.001, -10.001, 3.499]).all()
    assert (moved < [10.001, 10.001, 13.501]).all()


def test_reset_is_the_starting_pose_with_noise_and_a_random_target(model):
    task, count = make_task("grasp", reset_noise_scale=0.1), 2000
    world = ReferenceWorld(physics_fields(model), count)
    random = random_for(count)
    task.reset(ModelView(model), world, random)
    noise = world.get("qpos") - model.qpos0
    still = [2, 3, 4, 5, 6]  # the ball's height and orientation
    assert not noise[:, still].any()
    assert not world.get("qvel").any()
    noise = np.delete(noise, still, axis=1)
    assert np.abs(noise).max() < 0.1
    np.testing.assert_allclose(noise.std(0), 0.1 / np.sqrt(3), rtol=0.06)
    np.testing.assert_array_equal(world.get("mocap_pos")[:, 0], np.tile([0, 0, 3.3107], (count, 1)))

    memory = task.remember_reset(ModelView(model), world, random)
    assert {name: len(values) for name, values in memory.items()} == task.memory
    np.testing.assert_array_equal(rows(memory["palm"], count), world.get("mocap_pos")[:, 0])
    assert not np.any([*memory["touch"], *memory["palm_velocity"]])
    random_targets(rows(memory["target"], count))


def random_targets(target: np.ndarray) -> None:
    distance, height = np.hypot(target[:, 0], target[:, 1]), target[:, 2]
    angle = np.arctan2(target[:, 1], target[:, 0])
    for x, low, high in ((distance, 1.1, 11.1), (height, 0, 8), (angle, -np.pi, np.pi)):
        assert low < x.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < x.max() < high
        assert x.mean() == pytest.approx((low + high) / 2, abs=0.03 * (high - low))
        assert x.std() == pytest.approx((high - low) / np.sqrt(12), rel=0.06)
    assert np.abs(np.corrcoef([distance, height, angle]) - np.eye(3)).max() < 0.1


def test_targets_after_hits_are_random_and_new_each_time(mj, model):
    task, count = make_task("grasp"), 2000
    d = mujoco.MjData(mj)
    mujoco.mj_forward(mj, d)
    world = world_of(model, [d] * count)
    before = memory_of(
        target=np.tile(d.body("object").xipos, (count, 1)),
        palm=np.tile(d.mocap_pos[0], (count, 1)),
        palm_velocity=np.zeros((count, 3)),
        touch=np.zeros((count, 4)),
    )
    first, second = (
        rows(task.remember(ModelView(model), world, before, random_for(count, counter))["target"], count)
        for counter in (0, 1)
    )
    random_targets(first)
    random_targets(second)
    assert len(np.unique(np.vstack([first, second]), axis=0)) == 2 * count


def test_brax_v1_reset_begins_with_a_hit(mj, model):
    task = make_task("grasp", reset_noise_scale=0, random_target_at_reset=False)
    world = ReferenceWorld(physics_fields(model), 1)
    task.reset(ModelView(model), world, random_for(1))
    np.testing.assert_array_equal(world.get("qpos")[0], model.qpos0)
    memory = task.remember_reset(ModelView(model), world, random_for(1))
    assert memory["target"] == [0.0, 0.0, 1.1]
    d = mujoco.MjData(mj)
    mujoco.mj_forward(mj, d)
    world = world_of(model, [d])
    after = task.remember(ModelView(model), world, memory, random_for(1))
    outcome = task.outcome(ModelView(model), world, [0.0] * 19, memory, after)
    assert outcome.metrics["reward_hit"][0] == 5
    assert rows(after["target"], 1)[0].tolist() != memory["target"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('mocap="true"', "", "expected 'palm' to be a mocap body"),
        ('<freejoint name="object"/>', '<joint name="object"/>', "expected 'object' to have a free joint"),
        ('<body name="middle_3"', '<body name="other"', "expected one of world, object, .* got 'middle_3'"),
        (
            '<geom name="distal_2" class="tip"',
            '<geom name="distal_2"',
            "expected geoms that can touch: distal_2 and object",
        ),
    ],
)
def test_a_model_without_the_parts_is_refused(old, new, said):
    text = (ASSETS / "grasp.xml").read_text()
    assert old in text
    with pytest.raises(ValueError, match="xml_file: " + said):
        make_task("grasp", xml_file=text.replace(old, new))
