"""bias.py against MuJoCo: body velocities, and Coriolis, centrifugal and gravity forces."""

import numpy as np
import physics
import pytest

from brax_concurrent.kernels.bias import bias, velocity

NUM_STATES = 1000


@pytest.mark.parametrize("kernel", [velocity, bias], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("name", physics.ROBOTS)
def test_fields_are_mujocos(name, kernel):
    robot = physics.robot(name)
    physics.assert_agrees(physics.stage_errors(robot, kernel, physics.random_states(robot.mj, NUM_STATES)))


def test_without_gravity_and_at_rest_there_is_no_force():
    robot = physics.robot(physics.compiled("humanoid", gravity=[0, 0, 0]))
    states = physics.random_states(robot.mj, 10)
    states.qvel[:] = 0
    world = physics.world_of(robot, states)
    for field, value in physics.mujoco_fields(robot.mj, states, ("cdof", "cinert", "cvel")).items():
        world.put(field, value)
    world.run(bias, robot.view)
    np.testing.assert_array_equal(world.get("qfrc_bias"), 0)
