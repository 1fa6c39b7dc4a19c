"""collision.py against MuJoCo: which geoms touch, where, how deep and in which frame."""

import contacts
import mujoco
import numpy as np
import physics
import pytest
from kernels.test_solver import compiled

from brax_concurrent.kernels.collision import collision

POSITIONS = ("geom_xpos", "geom_xmat")

# Distances and positions, in metres, of bodies about a metre in size.
TOLERANCE = 1e-12
# A tangent is the part of a capsule's axis in the plane: as little as a thousandth of it in a random state.
FRAME_TOLERANCE = 1e-10

SHAPES = {"sphere": 'type="sphere" size="0.15"', "capsule": 'type="capsule" size="0.1 0.2"'}


def scene(shapes, plane='zaxis="0.2 -0.1 1"', options=""):
    """Free bodies of these shapes above a tilted plane."""
    bodies = "".join(f"<body><freejoint/><geom {SHAPES.get(shape, shape)}/></body>" for shape in shapes)
    floor = f'<geom type="plane" size="1 1 1" {plane}/>' if plane is not None else ""
    return f"<mujoco>{options}<worldbody>{floor}{bodies}</worldbody></mujoco>"


def crowd(mj, num, seed=0):
    """States of free bodies close together, partly below the plane."""
    rng = np.random.default_rng(seed)
    states = physics.random_states(mj, num, seed)
    for q in mj.jnt_qposadr:
        states.qpos[:, q : q + 3] = rng.uniform(-0.3, 0.3, (num, 3))
    return states


def collide(robot, states):
    world = contacts.world_of(robot, states, POSITIONS)
    world.run(collision, robot.view)
    return contacts.Records(world)


def assert_contacts_are_mujocos(robot, states, in_order=False):
    """Returns how many contacts were compared."""
    found, total = collide(robot, states), 0
    assert not found.ncon_lost.any()
    for s, answer in enumerate(contacts.answers(robot.mj, states)):
        order = contacts.contact_order(robot, found, answer, s)
        total += len(order)
        assert not in_order or (order == np.arange(len(order))).all()
        frame = found.contact_frame[s, order]
        np.testing.assert_allclose(found.contact_dist[s, order], answer.dist, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(found.contact_pos[s, order], answer.pos, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(frame, answer.frame[:, :6], rtol=0, atol=FRAME_TOLERANCE)
    return total


@pytest.mark.parametrize("name", physics.ROBOTS)
def test_contacts_are_mujocos(name):
    robot = contacts.robot(name)
    # All pairs of the other robots are with the floor, or stand alone.
    total = assert_contacts_are_mujocos(robot, contacts.states_of(robot), in_order=name != "humanoid")
    assert total > contacts.NUM_STATES / 2


@pytest.mark.parametrize(
    "shapes", [("sphere", "sphere"), ("sphere", "capsule"), ("capsule", "sphere"), ("capsule", "capsule")]
)
@pytest.mark.parametrize("copies", [1, 3], ids=["unrolled", "looped"])
def test_every_pair_of_shapes(shapes, copies):
    robot = contacts.robot(scene(shapes * copies))
    assert assert_contacts_are_mujocos(robot, crowd(robot.mj, 300)) > 300


def test_sizes_differ_within_a_loop():
    sizes = [
        'type="capsule" size="0.1 0.2"',
        'type="capsule" size="0.05 0.4"',
        'type="capsule" size="0.2 0.1" margin="0.1"',
    ]
    robot = contacts.robot(scene([*sizes, "sphere", 'type="sphere" size="0.3"'], plane=None))
    assert assert_contacts_are_mujocos(robot, crowd(robot.mj, 300)) > 300


def test_sizes_that_are_the_geoms_numbers():
    """They are found by one index, as integers and as floating-point numbers."""
    robot = contacts.robot(scene([f'type="sphere" size="{size}"' for size in ("0.5", "1", "2", "3")], plane=None))
    states = crowd(robot.mj, 50)
    for i, q in enumerate(robot.mj.jnt_qposadr):
        states.qpos[:, q] += 3 * i
    assert assert_contacts_are_mujocos(robot, states) > 50
    for precision in ("f32", "f64"):
        ncon = compiled(robot, states, precision, ("ncon",))["ncon"]
        np.testing.assert_array_equal(ncon, collide(robot, states).ncon)


@pytest.mark.parametrize("angle", [0.0, 1e-12, 1e-6, 0.9e-4, 1.1e-4, 1e-3])
@pytest.mark.parametrize("halves", [(0.2, 0.2), (0.2, 0.05), (0.1, 0.3)])
def test_nearly_parallel_capsules(halves, angle):
    """Side by side at 0.19 m, shifted against each other so far that some face each other at a point only."""
    robot = contacts.robot(scene([f'type="capsule" size="0.1 {half}"' for half in halves], plane=None))
    states, rng = crowd(robot.mj, 200), np.random.default_rng(1)
    for qpos in states.qpos:
        quat, tilt, mat = rng.normal(size=4), np.zeros(4), np.zeros(9)
        quat /= np.linalg.norm(quat)
        mujoco.mju_quat2Mat(mat, quat)
        axis = mat[2::3]
        aside = np.cross(axis, rng.normal(size=3))
        turn = angle / 2 * np.array([1.0, 0, 0]) * rng.choice([-1, 1])
        mujoco.mju_mulQuat(tilt, quat, np.array([np.cos(angle / 2), *turn]))
        qpos[3:7], qpos[10:14] = quat, tilt * rng.choice([-1, 1])
        if rng.random() < 0.5:  # the other way round
            mujoco.mju_mulQuat(qpos[10:14], tilt, np.array([0.0, 1, 0, 0]))
        qpos[7:10] = qpos[:3] + aside * (0.19 / np.linalg.norm(aside)) + axis * rng.uniform(-0.6, 0.6)
    assert assert_contacts_are_mujocos(robot, states) > 80
    two = sum(len(answer.dist) == 2 for answer in contacts.answers(robot.mj, states))
    assert two > 80 if angle < 1e-4 else two == 0


@pytest.mark.parametrize("shapes", [("sphere", "sphere"), ("sphere", "capsule"), ("capsule", "capsule")])
@pytest.mark.parametrize("turned", [False, True], ids=["parallel axes", "crossed axes"])
def test_coinciding_centres(shapes, turned):
    robot = contacts.robot(scene(shapes, plane=None))
    states = crowd(robot.mj, 3)
    states.qpos[:, :7] = states.qpos[:, 7:] = [0.1, 0.2, 0.3, 1, 0, 0, 0]
    if turned:
        states.qpos[:, 10:14] = [1, 0, 1, 0]
    assert assert_contacts_are_mujocos(robot, states) >= 3


@pytest.mark.parametrize("quat", [(1, 0, 0, 0), (0, 1, 0, 0)])
def test_a_capsule_that_stands_upright(quat):
    robot = contacts.robot(scene(["capsule"], plane=""))
    states = crowd(robot.mj, 4)
    states.qpos[:] = (0.3, -0.1, 0.25, *quat)
    assert assert_contacts_are_mujocos(robot, states) == 4


@pytest.mark.parametrize("margin", [-0.02, 0.0, 0.05])
@pytest.mark.parametrize("gap", [0.0, 0.1])
def test_margins_and_gaps(margin, gap):
    """A contact is one where it exerts force: MuJoCo also lists those in the gap, without rows."""
    shapes = [f'{shape} margin="{margin}" gap="{gap}"' for shape in SHAPES.values()] * 2
    robot = contacts.robot(scene(shapes))
    states = crowd(robot.mj, 200)
    assert assert_contacts_are_mujocos(robot, states) > 100
    found = collide(robot, states)
    kept = np.arange(robot.model.nconmax) < found.ncon
    assert (found.contact_dist[kept] < max(margin, 2 * margin)).all()
    assert (found.contact_dist[kept] > margin).any() == (margin > 0)


def test_a_margin_may_leave_less_than_nothing_of_the_radii():
    robot = contacts.robot(scene([f'{shape} margin="-0.3"' for shape in SHAPES.values()] * 2))
    assert_contacts_are_mujocos(robot, crowd(robot.mj, 100))


@pytest.mark.parametrize("nconmax", [1, 3])
def test_contacts_without_room_are_counted(nconmax):
    full, small = (contacts.robot("ant", nconmax=n) for n in (contacts.NCONMAX, nconmax))
    states = contacts.states_of(full, 200)
    expected, found = collide(full, states), collide(small, states)
    assert small.model.nconmax == nconmax
    assert (found.ncon == np.minimum(expected.ncon, nconmax)).all()
    assert (found.ncon + found.ncon_lost == expected.ncon).all()
    assert found.ncon_lost.max() > 3
    kept = np.arange(nconmax) < found.ncon
    for name in ("dist", "pos", "frame", "pair"):
        mine, first = (getattr(x, f"contact_{name}")[:, :nconmax] for x in (found, expected))
        np.testing.assert_array_equal(mine[kept], first[kept])


@pytest.mark.parametrize("flag", ["contact", "constraint"])
def test_no_contacts_when_disabled(flag):
    robot = contacts.robot(scene(["sphere", "capsule"], options=f'<option><flag {flag}="disable"/></option>'))
    found = collide(robot, crowd(robot.mj, 20))
    assert not found.ncon.any()
    assert not found.ncon_lost.any()
