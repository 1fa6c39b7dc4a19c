"""actuation.py and acceleration.py against MuJoCo: springs, dampers, actuators, and what they accelerate."""

import numpy as np
import physics
import pytest

from brax_concurrent.kernels.acceleration import acceleration
from brax_concurrent.kernels.actuation import actuation, passive

NUM_STATES = 1000

SERVOS = """
<mujoco>
  <option><flag {flags}/></option>
  <worldbody>
    <body>
      <joint name="a" axis="0 1 0" stiffness="7" springref="0.3" damping="2" ref="0.2"/>
      <geom size="0.1"/>
      <body pos="0.5 0 0">
        <joint name="b" type="slide" axis="1 0 0" stiffness="3" damping="1"/>
        <geom size="0.1"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <motor joint="a" gear="-3" ctrlrange="-0.5 1"/>
    <motor joint="a" gear="2" forcerange="-0.2 0.4"/>
    <position joint="b" kp="20" kv="2" gear="1.5" ctrlrange="-1 1" forcerange="-9 4"/>
    <velocity joint="b" kv="4"/>
    <general joint="a" gear="2" gainprm="5" biastype="affine" biasprm="1 -2 -3" group="1"/>
    <general joint="b" gainprm="5" biastype="none" biasprm="1 -2 -3"/>
  </actuator>
</mujoco>
"""


@pytest.mark.parametrize("kernel", [passive, actuation, acceleration], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("name", physics.ROBOTS)
def test_fields_are_mujocos(name, kernel):
    robot = physics.robot(name)
    physics.assert_agrees(physics.stage_errors(robot, kernel, physics.random_states(robot.mj, NUM_STATES)))


@pytest.mark.parametrize(
    "flags", ["", 'clampctrl="disable"', 'actuation="disable"', 'spring="disable"', 'damper="disable"']
)
def test_every_kind_of_actuator(flags):
    robot = physics.robot(SERVOS.format(flags=flags))
    states = physics.random_states(robot.mj, 300)
    for kernel in (passive, actuation, acceleration):
        physics.assert_agrees(physics.stage_errors(robot, kernel, states))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e10])
@pytest.mark.parametrize("index", [0, 1], ids=["limited", "unlimited"])
def test_a_bad_control_switches_all_off_unless_its_range_mends_it(bad, index, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warnings into a file
    robot = physics.robot(SERVOS.format(flags=""))
    states = physics.random_states(robot.mj, 4)
    states.ctrl[:2, index] = bad
    physics.assert_agrees(physics.stage_errors(robot, actuation, states))
