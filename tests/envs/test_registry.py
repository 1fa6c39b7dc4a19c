"""Tasks by name, and what their constructors refuse."""

from __future__ import annotations

import math

import mujoco
import numpy as np
import pytest

from brax_concurrent.envs.ant import Ant
from brax_concurrent.envs.grasp import Grasp
from brax_concurrent.envs.halfcheetah import HalfCheetah
from brax_concurrent.envs.humanoid import Humanoid
from brax_concurrent.envs.registry import list_envs, make_task
from brax_concurrent.envs.task import ASSETS
from brax_concurrent.envs.walker2d import Walker2d
from brax_concurrent.kernels.model import load_model

SLIDE = """<mujoco><worldbody><body name="cart"><joint name="x" type="slide" axis="1 0 0"/>
<geom name="cart" size="0.1"/></body></worldbody></mujoco>"""


def test_tasks_by_name():
    assert list_envs() == ["ant", "grasp", "halfcheetah", "humanoid", "walker2d"]
    classes = {
        "ant": Ant,
        "grasp": Grasp,
        "halfcheetah": HalfCheetah,
        "humanoid": Humanoid,
        "walker2d": Walker2d,
    }
    for name, task in classes.items():
        assert type(make_task(name)) is task
        assert make_task(name).name == name
    assert type(make_task("cheetah", frame_skip=2)) is HalfCheetah
    assert make_task("cheetah", frame_skip=2).frame_skip == 2


NEAR = {
    "ants": "ant",
    "Ant-v5": "ant",
    "half_cheetah": "halfcheetah",
    "HalfCheetah-v5": "halfcheetah",
    "walker": "walker2d",
    "Humanoid": "humanoid",
}


@pytest.mark.parametrize("name", NEAR)
def test_an_unknown_name_gets_the_near_ones(name):
    with pytest.raises(ValueError, match=f"there is no task '{name}'; did you mean '{NEAR[name]}'"):
        make_task(name)


def test_a_name_that_is_near_to_none_gets_them_all():
    with pytest.raises(ValueError, match="'xyz'; known: ant, grasp, halfcheetah, humanoid, walker2d, cheetah"):
        make_task("xyz")
    with pytest.raises(TypeError, match="name: expected the name of a task, got 3"):
        make_task(3)  # type: ignore[arg-type]


def test_an_unknown_argument_gets_the_valid_ones():
    with pytest.raises(TypeError, match="ant: there is no argument 'ctrl_cost'.*'ctrl_cost_weight'.*known: xml_file"):
        make_task("ant", ctrl_cost=1)
    with pytest.raises(TypeError, match="'render_mode' .it is about rendering"):
        make_task("walker2d", render_mode="human")


REFUSED = [
    ("ant", {"frame_skip": 0}, ValueError, "frame_skip: expected at least 1, got 0"),
    ("ant", {"frame_skip": 2.5}, TypeError, "frame_skip: expected a whole number, got 2.5"),
    ("ant", {"frame_skip": True}, TypeError, "frame_skip: expected a whole number, got True"),
    ("ant", {"ctrl_cost_weight": "a"}, TypeError, "ctrl_cost_weight: expected a number, got 'a'"),
    ("ant", {"healthy_reward": math.nan}, ValueError, "healthy_reward: expected a finite number, got nan"),
    ("ant", {"healthy_z_range": (1, 0)}, ValueError, r"healthy_z_range: expected low <= high, got \(1, 0\)"),
    ("ant", {"healthy_z_range": (0, math.nan)}, ValueError, "healthy_z_range: expected low <= high"),
    ("ant", {"healthy_z_range": 0.2}, TypeError, r"healthy_z_range: expected two numbers \(low, high\)"),
    ("ant", {"terminate_when_unhealthy": 1}, TypeError, "terminate_when_unhealthy: expected True or False"),
    ("ant", {"reset_noise_scale": -1}, ValueError, "reset_noise_scale: expected at least 0, got -1"),
    ("ant", {"main_body": "tail"}, ValueError, "main_body: expected one of world, torso, .* got 'tail'"),
    ("ant", {"main_body": 14}, ValueError, "main_body: expected a body id from 0 to 13, got 14"),
    ("ant", {"main_body": 1.0}, TypeError, "main_body: expected the name or id of a body, got 1.0"),
    ("ant", {"xml_file": "no.xml"}, FileNotFoundError, "xml_file: expected 'ant.xml' .* got 'no.xml'"),
    ("ant", {"xml_file": "<mujoco><a/></mujoco>"}, ValueError, "MuJoCo cannot compile this MJCF text"),
    ("ant", {"xml_file": 3}, TypeError, "xml_file: expected an MJCF path, .* got int"),
    ("ant", {"xml_file": SLIDE}, ValueError, "xml_file: expected a model whose first joint is free"),
    ("walker2d", {"xml_file": "walker2d.xml"}, FileNotFoundError, "xml_file: expected 'walker2d_v5.xml'"),
    ("walker2d", {"xml_file": SLIDE}, ValueError, "xml_file: expected a model with joints for x, z"),
    ("grasp", {"xml_file": SLIDE}, ValueError, "xml_file: expected one of world, cart, got 'object'"),
    ("grasp", {"target_radius": -1.0}, ValueError, "target_radius: expected at least 0, got -1.0"),
]


@pytest.mark.parametrize(("robot", "arguments", "error", "said"), REFUSED)
def test_a_wrong_argument_is_named(robot, arguments, error, said):
    with pytest.raises(error, match=said):
        make_task(robot, **arguments)


def test_a_model_may_be_text_a_path_or_compiled(tmp_path):
    heavier = (ASSETS / "ant.xml").read_text().replace('density="5"', 'density="10"')
    (tmp_path / "heavier.xml").write_text(heavier)
    own = load_model(make_task("ant").model).body_mass
    for source in (heavier, tmp_path / "heavier.xml", mujoco.MjModel.from_xml_string(heavier)):
        np.testing.assert_allclose(load_model(make_task("ant", xml_file=source).model).body_mass, 2 * own)


def test_actuators_without_a_range_have_an_unbounded_action():
    motor = SLIDE.replace("</mujoco>", '<actuator><motor joint="x"/></actuator></mujoco>')
    task = make_task("halfcheetah", xml_file=motor)
    assert (task.action_low, task.action_high) == (-math.inf, math.inf)
    assert task.action_low.dtype == np.float32
