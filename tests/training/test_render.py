"""Robots' motion as films and pages: what they show is where MuJoCo has the bodies."""

from __future__ import annotations

import base64
import itertools
import json
import re

import batches
import jax
import mujoco
import numpy as np
import pendulum
import physics
import pytest

from brax_concurrent.training import render as rendering
from brax_concurrent.training.render import render
from brax_concurrent.training.trajectory import trajectory

SHAPES = """
<mujoco>
  <worldbody>
    <camera name="near" pos="0 -2 1" xyaxes="1 0 0 0 0 1"/> <camera name="far" pos="0 -9 1" xyaxes="1 0 0 0 0 1"/>
    <geom type="plane" size="1 1 1" pos="0 0 0.25"/>
    <body pos="0 0 1"><freejoint/>
      <geom type="box" size="0.1 0.2 0.3" rgba="1 0 0 1"/> <geom type="sphere" size="0.4" rgba="0 1 0 0"/>
      <geom type="capsule" size="0.1 0.5" pos="1 0 0" quat="1 1 0 0"/> <geom type="sphere" size="0.2" pos="2 0 0"/>
    </body>
  </worldbody>
</mujoco>
"""


def swung(rows):
    """Positions of the pendulum."""
    return np.linspace(0, 3, rows)[:, None]


def scene(path):
    (found,) = re.findall(r"^const scene = (.*);$", path.read_text(), re.MULTILINE)
    told = json.loads(found)
    poses = np.frombuffer(base64.b64decode(told["poses"]), "<f4")
    return told, poses.reshape(told["frames"], len(told["geoms"]), 7)


# ---- Pages


def test_a_page_has_the_geoms_where_mujoco_has_them(tmp_path):
    rng = np.random.default_rng(0)
    qpos = rng.normal(size=(5, 7))
    qpos[:, 3:] /= np.linalg.norm(qpos[:, 3:], axis=1, keepdims=True)
    assert render(SHAPES, qpos, tmp_path / "a<b.html", dt=0.1) == tmp_path / "a<b.html"
    told, poses = scene(tmp_path / "a<b.html")
    assert "<title>a&lt;b</title>" in (tmp_path / "a<b.html").read_text()
    mj = mujoco.MjModel.from_xml_string(SHAPES)
    data, shown = mujoco.MjData(mj), [1, 3, 4]  # neither the plane nor what is transparent
    for row, pose in zip(qpos, poses, strict=True):
        data.qpos[:] = row
        mujoco.mj_forward(mj, data)
        np.testing.assert_allclose(pose[:, :3], data.geom_xpos[shown], atol=1e-6)
        for geom, quaternion in zip(shown, pose[:, 3:].astype(float), strict=True):
            matrix = np.empty(9)
            mujoco.mju_quat2Mat(matrix, quaternion)
            np.testing.assert_allclose(matrix, data.geom_xmat[geom], atol=1e-6)
    box, capsule, sphere = told["geoms"]
    assert (box["half"], box["centre"], box["rgb"]) == ([0.1, 0.2, 0.3], [0, 0, 0], [1, 0, 0])
    assert (capsule["radius"], capsule["length"], sphere["radius"], sphere["length"]) == (0.1, 0.5, 0.2, 0)
    assert (told["ground"], told["dt"]) == (0.25, 0.1)


@pytest.mark.parametrize("robot", physics.ROBOTS)
def test_every_robot_has_a_page(robot, tmp_path):
    qpos = batches.env(robot, 1).model.qpos0[None]
    told, poses = scene(render(robot, np.tile(qpos, (3, 1)), tmp_path / "robot.html"))
    assert len(told["geoms"]) > 5
    assert np.isfinite(poses).all()


STATION = """
<mujoco>
  <worldbody>
    <camera name="front" pos="4 0 2" xyaxes="0 1 0 -0.6 0 0.8"/>
    <geom type="sphere" size="0.5" pos="-3 0 1"/>
    <body pos="0 0 1"><joint name="slide" type="slide" axis="1 0 0"/> <geom type="box" size="1.5 1 1"/></body>
    <body pos="0 9 1"><freejoint/> <geom type="sphere" size="0.1" density="1e6"/></body>
  </worldbody>
  <actuator><motor joint="slide"/></actuator>
</mujoco>
"""


def test_a_page_follows_the_robot_and_shows_all_of_it(tmp_path):
    """Not what stands beside it or lies about, however far the robot goes and however heavy the rest is."""
    qpos = np.zeros((41, 8))
    qpos[:, 0], qpos[:, 4] = np.linspace(0, 40, 41), 1
    told, _ = scene(render(STATION, qpos, tmp_path / "a.html", dt=0.1))
    np.testing.assert_allclose(told["targets"], [[x, 0, 1] for x in qpos[:, 0]], atol=1e-4)
    half_a_view = np.arctan(0.5 / 1.2)  # the angle that the script draws
    assert told["distance"] * np.sin(half_a_view) > np.linalg.norm([1.5, 1, 1])
    assert told["distance"] < 4 * np.linalg.norm([1.5, 1, 1])


def test_a_page_of_what_swings_stays_where_it_hangs(tmp_path):
    told, poses = scene(render(pendulum.PENDULUM, swung(20), tmp_path / "a.html", dt=0.1))
    assert np.ptp(told["targets"], axis=0).max() == 0
    assert np.ptp(poses[:, :, 0]) > 0.3


def test_a_page_does_not_bob_with_the_robot(tmp_path):
    qpos = np.zeros((80, 9))
    qpos[:, 1] = 0.2 * np.sin(np.pi / 4 * np.arange(80))  # its height
    told, _ = scene(render("halfcheetah", qpos, tmp_path / "a.html"))
    assert np.ptp(np.array(told["targets"])[10:-10, 2]) < 0.1


def test_a_page_begins_with_the_view_of_a_camera(tmp_path):
    qpos = np.tile([0.0, 0, 0, 0, 1, 0, 0, 0], (3, 1))
    told, _ = scene(render(STATION, qpos, tmp_path / "a.html", camera="front"))
    found = [told[name] for name in ("azimuth", "elevation", "distance")]
    np.testing.assert_allclose(found, [0, np.arcsin(0.6), [4, 0, 1] @ np.array([0.8, 0, 0.6])], atol=1e-6)
    with pytest.raises(ValueError, match=r"camera: expected one of \['front'\] or a number below 1, got 'side'"):
        render(STATION, qpos, tmp_path / "a.html", camera="side")


def test_motion_is_shown_in_real_time():
    assert rendering._chosen_rows(5, 0.05) == ([0, 1, 2, 3, 4], 20)
    assert rendering._chosen_rows(11, 0.004) == ([0, 5, 10], 50)
    assert rendering._chosen_rows(1, 0.004) == ([0], 50)
    rows, fps = rendering._chosen_rows(1000, 0.015)
    assert fps == 50
    assert len(rows) == 750
    assert rows[-1] == 999


def test_a_trajectory_is_what_the_environment_does(tmp_path):
    env = batches.env("grasp", 3)

    def policy(params, obs, key):
        return jax.numpy.full((3, env.action_size), params), obs[:, 0]

    qpos, mocap_pos = trajectory(env, policy, 0.5, jax.random.key(0), 4)
    assert (qpos.shape, mocap_pos.shape) == ((5, env.model.nq), (5, 1, 3))
    state = env.reset(jax.random.split(jax.random.key(0))[0])
    for row, palm in zip(qpos, mocap_pos, strict=True):
        np.testing.assert_array_equal(row, state.qpos[0])
        np.testing.assert_array_equal(palm[0], state.internal["memory.palm"][0])
        state = env.step(state, np.full((3, env.action_size), 0.5, np.float32))
    assert len(np.unique(mocap_pos[:, 0, 0])) == 5
    _, poses = scene(render("grasp", qpos, tmp_path / "grasp.html", mocap_pos=mocap_pos))
    center = np.median(poses[:, :, :3], axis=1)
    assert center[-1, 0] - center[0, 0] > 0.5  # the hand goes with its palm
    with pytest.raises(ValueError, match="steps: expected a whole number of at least 1, got 0"):
        trajectory(env, policy, 0.5, jax.random.key(0), 0)


# ---- Films


@pytest.fixture
def opengl(monkeypatch):
    """Skips where films cannot be made."""
    pytest.importorskip("av")
    imageio = pytest.importorskip("imageio.v3")
    try:
        context, own = rendering._opengl(mujoco.MjModel.from_xml_string(pendulum.PENDULUM), 16, 16)
    except RuntimeError as error:
        pytest.skip(str(error))
    own.free()
    context.free()
    return imageio


def test_films(opengl, tmp_path):
    qpos, size = swung(6), {"width": 80, "height": 48}
    options = {"dt": 0.1, **size}
    for name, plugin in (("swing.mp4", "pyav"), ("swing.gif", "pillow")):
        path = render(pendulum.PENDULUM, qpos, tmp_path / name, **options)
        frames = opengl.imread(path, plugin=plugin)
        assert frames.shape == (6, 48, 80, 3)
        changes = [np.abs(a.astype(float) - b).max() for a, b in itertools.pairwise(frames)]
        assert min(changes) > 30
    assert opengl.immeta(tmp_path / "swing.mp4", plugin="pyav")["fps"] == 10
    assert opengl.immeta(tmp_path / "swing.gif", plugin="pillow")["duration"] == 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["swing.gif", "swing.mp4"]


def test_cameras(opengl, tmp_path):
    def size(camera):
        qpos = [[0, 0, 1, 1, 0, 0, 0]]
        path = render(SHAPES, qpos, tmp_path / "a.gif", width=80, height=60, camera=camera)
        red = opengl.imread(path, plugin="pillow")[0].astype(int)
        return (red[..., 0] - red[..., 1:].max(axis=-1) > 50).sum()

    assert size(None) == size("near") == size(0) > 4 * size("far") > 0


def test_without_opengl_the_error_says_what_was_tried(monkeypatch, tmp_path):
    pytest.importorskip("av")
    monkeypatch.setenv("MUJOCO_GL", "nothing")
    with pytest.raises(RuntimeError, match=r"none works here \(nothing: ModuleNotFoundError.*ends in .html needs none"):
        render(pendulum.PENDULUM, swung(2), tmp_path / "a.mp4")
    assert list(tmp_path.iterdir()) == []


# ---- Arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"path": "a.avi"}, "path: expected a name that ends in one of ('.mp4', '.gif', '.html'), got 'a.avi'"),
        ({"robot": "antt"}, "name: there is no task 'antt'; did you mean 'ant'"),
        ({"robot": "no/robot.xml"}, "model: expected MJCF text or the path of an MJCF file, found nothing"),
        ({"qpos": np.zeros((3, 2))}, "qpos: expected (T, 1) positions, T at least 1, got (3, 2)"),
        ({"qpos": np.zeros((0, 1))}, "qpos: expected (T, 1) positions, T at least 1, got (0, 1)"),
        ({"qpos": [[0.0], [np.nan]]}, "qpos: expected finite numbers, got others in row 1"),
        ({"mocap_pos": np.zeros((2, 1, 3))}, "mocap_pos: expected (2, 0, 3), got (2, 1, 3)"),
        ({"dt": 0}, "dt: expected a positive number of seconds, got 0"),
        ({"path": "a.gif", "width": 63}, "width: expected an even number of pixels of at least 2, got 63"),
        ({"path": "a.gif", "camera": "side"}, "camera: expected one of [] or a number below 0, got 'side'"),
    ],
)
def test_a_wrong_argument_is_named(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"robot": pendulum.PENDULUM, "qpos": swung(2), "path": "a.html", **arguments}
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(said)):
        render(**given)
    assert list(tmp_path.iterdir()) == []
