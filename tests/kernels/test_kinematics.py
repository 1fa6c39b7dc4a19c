"""kinematics.py against MuJoCo: where everything is, and the tree about its centre of mass."""

import numpy as np
import physics
import pytest

from brax_concurrent.kernels.kinematics import com, kinematics
from brax_concurrent.kernels.trace import trace

NUM_STATES = 1000


@pytest.mark.parametrize("kernel", [kinematics, com], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("name", physics.ROBOTS)
def test_fields_are_mujocos(name, kernel):
    robot = physics.robot(name)
    physics.assert_agrees(physics.stage_errors(robot, kernel, physics.random_states(robot.mj, NUM_STATES)))


def test_a_free_joints_quaternion_is_normalised_locally():
    robot = physics.robot("ant")
    states = physics.random_states(robot.mj, 10)
    world = physics.world_of(robot, states)
    world.run(kinematics, robot.view)
    assert np.abs(np.linalg.norm(states.qpos[:, 3:7], axis=1) - 1).max() > 0.1
    np.testing.assert_allclose(np.linalg.norm(world.get("xquat")[:, 1], axis=1), 1, rtol=1e-15)
    np.testing.assert_array_equal(world.get("qpos"), states.qpos)


def test_a_zero_quaternion_is_the_identity():
    robot = physics.robot("ant")
    states = physics.random_states(robot.mj, 2)
    states.qpos[0, 3:7] = 0
    physics.assert_agrees(physics.stage_errors(robot, kinematics, states))


@pytest.mark.parametrize("name", ["halfcheetah", "walker2d"])
def test_a_planar_robot_is_traced_in_the_plane(name):
    """Out of the plane all is constant: this is where the speed of planar robots comes from."""
    robot = physics.robot(name)
    facts = trace(kinematics, robot.view, robot.fields, {}, {}, "f64").facts
    facts |= trace(com, robot.view, robot.fields, {}, facts_of(facts), "f64").facts
    known = facts_of(facts)
    for b in range(1, robot.model.nbody):
        assert (known["xquat", 4 * b + 1], known["xquat", 4 * b + 3]) == (0, 0)
        assert [known["xmat", 9 * b + k] for k in (1, 3, 4, 5, 7)] == [0, 0, 1, 0, 0]
        assert ("xipos", 3 * b + 1) in known
        assert [known["cinert", 10 * b + k] for k in (3, 5, 7)] == [0, 0, 0]
    for i in range(robot.model.nv):
        assert [known["cdof", 6 * i + k] for k in (0, 2, 4)] == [0, 0, 0]


def facts_of(facts):
    return {place: value for place, value in facts.items() if isinstance(value, (int, float))}
