"""constraint.py against MuJoCo, row by row."""

import contacts
import numpy as np
import physics
import pytest

from brax_concurrent.kernels.collision import collision
from brax_concurrent.kernels.constraint import constraints
from brax_concurrent.kernels.contact_parameters import dof_signs
from brax_concurrent.kernels.kernel import Kernel
from brax_concurrent.kernels.kinematics import com, kinematics
from brax_concurrent.kernels.specialize import specialize

FIELDS = ("cdof", "subtree_com")


def assert_rows_are_mujocos(robot, states, known, view=None):
    """J and aref to their size in the state, D row by row. Returns the number of rows."""
    world = contacts.world_of(robot, states, FIELDS, known)
    world.poison(*constraints.writes)
    world.run(constraints, view or robot.view)
    world.put("limit_force", np.zeros((len(states), robot.mj.njnt)))  # no part of this stage
    found, total = contacts.Records(world), 0
    for s, answer in enumerate(known):
        rows = contacts.rows(robot, found, answer, s)
        assert contacts.error(rows["J"], answer.J) < physics.TOLERANCE
        assert contacts.error(rows["aref"], answer.aref) < physics.TOLERANCE
        np.testing.assert_allclose(rows["D"], answer.D, rtol=physics.TOLERANCE, atol=0)
        mu = found.contact_mu[s, : len(answer.dist)]
        np.testing.assert_allclose(mu, answer.friction * (answer.dim == 3)[:, None], rtol=1e-15)
        total += len(answer.D)
    return total


@pytest.mark.parametrize("name", physics.ROBOTS)
def test_rows_are_mujocos(name):
    robot = contacts.robot(name)
    states = contacts.states_of(robot)
    known = contacts.answers(robot.mj, states)
    assert assert_rows_are_mujocos(robot, states, known) > 2 * contacts.NUM_STATES
    limits = [answer.type == 3 for answer in known]
    assert max(mask.sum() for mask in limits) > 2
    assert min(mask.sum() for mask in limits) == 0


@pytest.mark.parametrize("variant", contacts.VARIANTS)
def test_parameters_are_mujocos(variant):
    robot = contacts.robot(contacts.VARIANTS[variant])
    states = contacts.states_of(robot, 200)
    total = assert_rows_are_mujocos(robot, states, contacts.answers(robot.mj, states))
    assert total > 50 or (variant == "no constraints" and total == 0)


class PerEnvironment:
    """A view of a model some of whose numbers differ from environment to environment."""

    def __init__(self, view, values):
        self._view, self._values = view, {name: np.moveaxis(value, 0, -1) for name, value in values.items()}

    def __getattr__(self, name):
        return self._values[name] if name in self._values else getattr(self._view, name)


@pytest.mark.parametrize(
    "names",
    [
        ("geom_friction",),
        ("geom_solref", "geom_solimp", "geom_solmix"),
        ("body_invweight0", "dof_invweight0"),
        ("jnt_range", "jnt_margin", "jnt_solref", "jnt_solimp"),
        ("pair_friction", "pair_solref", "pair_solimp"),
    ],
    ids=lambda names: names[0],
)
def test_parameters_may_differ_by_environment(names):
    robot = contacts.robot(contacts.VARIANTS["explicit pairs"])
    states = contacts.states_of(robot, 100)
    rng = np.random.default_rng(0)
    values = {
        name: getattr(robot.mj, name) * rng.uniform(0.7, 1.3, (len(states), *getattr(robot.mj, name).shape))
        for name in names
    }

    def change(mj, s):
        for name, value in values.items():
            getattr(mj, name)[:] = value[s]

    known = contacts.answers(robot.mj, states, change)
    assert assert_rows_are_mujocos(robot, states, known, PerEnvironment(robot.view, values)) > 100


def test_more_sets_of_dofs_than_bits_in_a_word():
    bodies = '<body><freejoint/><geom size="0.2"/></body>' * 20
    plane = '<geom type="plane" size="1 1 1"/>'
    robot = contacts.robot(f'<mujoco><option jacobian="dense"/><worldbody>{plane}{bodies}</worldbody></mujoco>')
    states = contacts.states_of(robot, 10)
    for q in robot.mj.jnt_qposadr:
        states.qpos[:, q : q + 3] = np.random.default_rng(q).uniform(-0.8, 0.8, (10, 3))
    assert assert_rows_are_mujocos(robot, states, contacts.answers(robot.mj, states)) > 500


def test_dofs_that_carry_both_bodies_have_no_sign():
    robot = contacts.robot("humanoid")
    m, signs = robot.model, np.array(dof_signs(robot.view))
    floor = m.geom_type[m.pair_geom[:, 0]] == 0
    assert (signs[:6, floor] == 1).all()
    assert (signs[:6, ~floor] == 0).all()
    assert (signs[:, ~floor] == -1).any()


def stored_components(robot, name):
    """What the constraint stage stores of a contact's record, by index within the record, if all of it is read."""
    m, shape = robot.model, robot.fields[name].shape

    def load(_, w):
        for i in range(m.nq):
            w.qpos[i] = w.user.qpos[i]
        for i in range(m.nv):
            w.qvel[i] = w.user.qvel[i]

    def store(_, w):
        for c, index in enumerate(np.ndindex(shape)):
            w.user.out[c] = getattr(w, name)[index]

    kernels = [
        Kernel("load", load, ("user.qpos", "user.qvel"), ("qpos", "qvel")),
        *(kinematics, com, collision, constraints),
        Kernel("store", store, (name,), ("user.out",)),
    ]
    user = {"qpos": (m.nq, "f"), "qvel": (m.nv, "f"), "out": (int(np.prod(shape)), "f")}
    rows = specialize(kernels, robot.view, robot.fields, user).layout.rows
    return {tuple(int(i) for i in np.unravel_index(c, shape)[1:]) for field, c in rows if field == name}


def test_what_all_contacts_share_is_not_stored():
    """A planar robot: the normal is constant, nothing points out of the plane, friction is one number."""
    robot = contacts.robot("halfcheetah")
    assert stored_components(robot, "contact_mu") == set()
    assert stored_components(robot, "contact_frame") == {(3,)}
    assert {row for row, _ in stored_components(robot, "contact_J")} == {0, 1}
    assert stored_components(robot, "contact_aref") == {(0,), (1,)}
