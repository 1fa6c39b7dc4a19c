"""contact_forces.py against MuJoCo."""

import contacts
import numpy as np
import physics
import pytest

from brax_concurrent.kernels.contact_forces import rne_post_constraint


def wrenches(robot, states, known):
    """cfrc_ext from MuJoCo's contacts and forces."""
    world = contacts.world_of(robot, states, ("subtree_com",), known)
    world.poison("cfrc_ext")
    world.run(rne_post_constraint, robot.view)
    return world.get("cfrc_ext")


@pytest.mark.parametrize("name", physics.ROBOTS)
def test_wrenches_are_mujocos(name):
    robot = contacts.robot(name)
    states = contacts.states_of(robot)
    known = contacts.answers(robot.mj, states)
    found = wrenches(robot, states, known)
    for s, answer in enumerate(known):
        assert contacts.error(found[s], answer.cfrc_ext) < physics.TOLERANCE
    assert (found[:, 0] == 0).all()
    assert np.abs(found).max() > 1


@pytest.mark.parametrize("variant", contacts.VARIANTS)
def test_wrenches_with_other_parameters(variant):
    robot = contacts.robot(contacts.VARIANTS[variant])
    states = contacts.states_of(robot, 200)
    known = contacts.answers(robot.mj, states)
    for found, answer in zip(wrenches(robot, states, known), known, strict=True):
        assert contacts.error(found, answer.cfrc_ext) < physics.TOLERANCE


def test_inner_contacts_leave_the_whole_robot_alone():
    """What two bodies of a tree do to each other sums to nothing: same force, and about the same point."""
    robot = contacts.robot("humanoid")
    states = contacts.states_of(robot, 300)
    states.qpos[:, 2] = 5.0
    known = contacts.answers(robot.mj, states)
    found = wrenches(robot, states, known)
    size = np.abs(found).max(axis=(1, 2))
    assert (size > 1).sum() > 50
    assert (np.abs(found.sum(axis=1)).max(axis=1) <= 1e-12 * (1 + size)).all()
