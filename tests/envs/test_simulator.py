"""The compiled simulator against MuJoCo C: all fields by name, whole steps, on our robots and on random ones."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import batches
import contacts
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import physics
import pytest
from kernels.random_models import random_model

pytestmark = pytest.mark.xdist_group("simulator")

POSITION = ("xpos", "xquat", "xmat", "xipos", "ximat", "xanchor", "xaxis", "geom_xpos", "geom_xmat", "subtree_com")
INERTIA = ("cinert", "cdof", "qM", "qLD", "qLDiagInv")
VELOCITY = ("cvel", "cdof_dot", "qfrc_passive", "qfrc_bias", "actuator_force", "qfrc_actuator")
SMOOTH = (*POSITION, *INERTIA, *VELOCITY, "qfrc_smooth", "qacc_smooth")
SOLVED = ("qacc", "qfrc_constraint", "cfrc_ext")
CONTACT = ("dist", "pos", "frame", "pair", "mu", "J", "D", "aref", "force")
LIMIT = ("sign", "D", "aref", "force")
INTEGER = ("ncon", "ncon_lost", "contact_pair")
FIELDS = (*SMOOTH, *SOLVED, "ncon", "ncon_lost", *(f"contact_{n}" for n in CONTACT), *(f"limit_{n}" for n in LIMIT))

RANDOM = (6, 12, 13, 16, 17, 47)  # both integrators; with and without mocap bodies, actuators, limits
WITH_JACOBIANS = ("grasp", "halfcheetah", "walker2d", 6, 47)
SOLVER = 1e-6  # where two solvers stop that improve by less than 1e-8 of the cost

# Single precision, relative to the field's size in the state as physics.relative_error has it, in 99% of the states. No
# field needs a looser one. In single states more is lost: a limit's or contact's stiffness and reference depend on how
# far it is inside its margin, a small difference of large numbers, and so do the forces and accelerations it causes.
SINGLE, SINGLE_WORST = 1e-4, 5e-3


@dataclasses.dataclass(frozen=True)
class Case:
    """States of a robot, what MuJoCo says of them, and our batch of them."""

    robot: physics.Robot
    states: physics.States
    expected: dict[str, np.ndarray]
    answers: list[contacts.Answer]
    sim: Any


@cache
def case(source: str | int, dtype: str, num: int) -> Case:
    """One of physics.ROBOTS or a random model, as its file has it but for Newton's method instead of PGS."""
    robot = contacts.robot(random_model(source) if isinstance(source, int) else source)
    states = contacts.states_of(robot, num)
    if dtype == "float32":  # both get the same numbers
        states = physics.States(**{name: value.astype(np.float32).astype(float) for name, value in states.items()})
    answers = contacts.answers(robot.mj, states)
    names = [name for name in SMOOTH if robot.mj.nu or name != "actuator_force"]
    expected = physics.mujoco_fields(robot.mj, states, names)
    expected |= {name: np.array([getattr(answer, name) for answer in answers]) for name in SOLVED}
    room = max(len(answer.dist) for answer in answers)  # more would only cost time to compile
    # The Jacobians take as long to compile as all the rest. What they do shows in qfrc_constraint and cfrc_ext.
    whole = dtype == "float64" and source in WITH_JACOBIANS
    names = FIELDS if whole else tuple(name for name in FIELDS if name != "contact_J")
    sim = batches.simulator(robot.mj, num, names, dtype, nconmax=max(room, 1))
    return Case(robot, states, expected, answers, sim)


def prepared(sim: Any, states: physics.States) -> tuple[Any, Any, dict[str, Any]]:
    """Our state before an evaluation, the controls, and the mocap bodies' poses."""
    dtype = sim.dtype
    state = sim.reset_to(states.qpos.astype(dtype), states.qvel.astype(dtype))
    state = state.replace(internal={"qacc_warmstart": jnp.asarray(states.qacc_warmstart, dtype)})
    mocap = {name: getattr(states, name).astype(dtype) for name in ("mocap_pos", "mocap_quat")}
    return state, states.ctrl.astype(dtype), mocap


def evaluated(c: Case, dtype: str) -> dict[str, np.ndarray]:
    """All fields after `forward`."""
    with batches.precision(dtype):
        state, ctrl, mocap = prepared(c.sim, c.states)
        new = c.sim.forward(state, ctrl, **mocap)
    np.testing.assert_array_equal(new.qpos, c.states.qpos)
    found = {name: np.asarray(value) for name, value in new.fields.items()}
    assert found.keys() == set(c.sim.fields)
    assert all(value.dtype == (np.int32 if name in INTEGER else dtype) for name, value in found.items())
    assert not found["ncon_lost"].any()
    np.testing.assert_array_equal(found["ncon"][:, 0], [len(answer.dist) for answer in c.answers])
    return found


def state_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """physics.relative_error of each state. Fields have at least one component, even where MuJoCo has none."""
    found, expected = (x.reshape(len(x), -1) for x in (found, expected))
    size = np.abs(expected).max(axis=1, initial=0.0)
    size = np.maximum(size, 1e-3 * size.max())
    error = np.abs(found[:, : expected.shape[1]] - expected).max(axis=1, initial=0.0)
    return np.nan_to_num(error / np.where(size > 0, size, 1.0), nan=np.inf)


class Records:
    """Fields as contacts.rows expects them."""

    def __init__(self, fields: dict[str, np.ndarray]):
        self.__dict__.update(fields)


def constraint_errors(c: Case, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Relative errors of contacts and constraint rows in each state; AssertionError where other pairs touch."""
    whole = "contact_J" in found
    records = Records(
        found if whole else found | {"contact_J": np.zeros((*found["contact_aref"].shape, c.robot.mj.nv))}
    )
    errors = []
    for s, answer in enumerate(c.answers):
        order = contacts.contact_order(c.robot, records, answer, s)
        pairs = {
            "contact_dist": (found["contact_dist"][s, order], answer.dist),
            "contact_pos": (found["contact_pos"][s, order], answer.pos),
            "contact_frame": (found["contact_frame"][s, order], answer.frame[:, :6]),
            "contact_mu": (found["contact_mu"][s, order], answer.friction * (answer.dim != 1)[:, None]),
        }
        rows = contacts.rows(c.robot, records, answer, s)
        names = ("J", "D", "aref", "force") if whole else ("D", "aref", "force")
        pairs |= {f"efc_{name}": (rows[name], getattr(answer, name)) for name in names}
        # Distances are differences of positions, whose digits are those of the poses.
        floors = {"contact_dist": 0.1, "contact_pos": 1.0}
        errors.append({name: contacts.error(*both, floors.get(name, 0.0)) for name, both in pairs.items()})
    return {name: np.array([row[name] for row in errors]) for name in errors[0]}


def all_errors(c: Case, dtype: str) -> dict[str, np.ndarray]:
    """Relative errors by name in each state: the fields, and contacts and rows from those that have them."""
    found = evaluated(c, dtype)
    fields = {name: state_errors(found[name], expected) for name, expected in c.expected.items()}
    return fields | constraint_errors(c, found)


# ---- Fields


@pytest.mark.slow
@pytest.mark.parametrize(("source", "num"), [*((name, 1000) for name in physics.ROBOTS), *((s, 60) for s in RANDOM)])
def test_fields_are_mujocos_in_float64(source, num):
    found = {name: errors.max() for name, errors in all_errors(case(source, "float64", num), "float64").items()}
    solved = {name: found.pop(name) for name in (*SOLVED, "efc_force")}
    physics.assert_agrees(found)
    physics.assert_agrees(solved, SOLVER)


@pytest.mark.slow
@pytest.mark.parametrize("source", physics.ROBOTS)
def test_fields_are_mujocos_in_float32(source):
    found = all_errors(case(source, "float32", 1000), "float32")
    physics.assert_agrees({name: np.percentile(errors, 99) for name, errors in found.items()}, SINGLE)
    physics.assert_agrees({name: errors.max() for name, errors in found.items()}, SINGLE_WORST)


def test_the_states_have_contacts_and_limits():
    for source in (*physics.ROBOTS, *RANDOM):
        c = case(source, "float64", 60 if isinstance(source, int) else 1000)
        assert sum(len(answer.dist) for answer in c.answers) > len(c.states) / 6
    assert sum(robot_has_limits(source) for source in RANDOM) >= 4
    assert max(len(answer.dist) for answer in case("humanoid", "float64", 1000).answers) > 20


def robot_has_limits(source: int) -> bool:
    c = case(source, "float64", 60)
    return any(len(answer.force) > sum(np.where(answer.dim == 3, 4, 1)) for answer in c.answers)


@pytest.mark.slow
def test_what_a_model_has_nothing_of_is_zero():
    """All known fields can be asked for, and none holds garbage where no stage writes."""
    pendulum = "<mujoco><worldbody><body><joint/><geom size='0.1' pos='0 1 0'/></body></worldbody></mujoco>"
    for source in (pendulum, random_model(4)):
        sim = batches.simulator(source, 3, dtype="float32")
        names = tuple(sim.known_fields)
        assert {"qpos", "ctrl", "mocap_pos", "contact_J", "limit_force", "solver_niter"} <= set(names)
        assert not [name for name in names if name.startswith("rk4_")]
        sim = batches.simulator(source, 3, names, "float32")
        state = sim.reset()
        assert set(state.fields) == set(names)
        for name, value in state.fields.items():
            assert value.shape == (3, *physics.physics_fields(sim.model)[name].shape)
            assert np.isfinite(value).all(), name
            if name.startswith("contact_"):
                beyond = np.arange(value.shape[1]) >= np.asarray(state.ncon)
                assert not np.asarray(value)[beyond].any(), name
        if source is pendulum:
            assert not any(np.asarray(state.fields[name]).any() for name in ("ctrl", "mocap_pos", "limit_D"))


# ---- Steps


STEPPED = ("grasp", "halfcheetah", "walker2d")  # test_gymnasium.py has steps of the others
AFTER = ("xpos", "cvel", "qM", "qfrc_bias", "qfrc_actuator", "qacc", "cfrc_ext")


@pytest.mark.slow
@pytest.mark.parametrize(("source", "num"), [*((name, 300) for name in STEPPED), *((s, 60) for s in RANDOM)])
def test_steps_are_mujocos(source, num):
    """One step, and three. With some robots also the fields, which are those of the last evaluation, as in MuJoCo."""
    names = AFTER if source in ("halfcheetah", "walker2d") else ()
    robot = contacts.robot(random_model(source) if isinstance(source, int) else source)
    states = contacts.states_of(robot, num)
    sim = batches.simulator(robot.mj, num, names, nconmax=contacts.NCONMAX)
    # After a Runge-Kutta step MuJoCo's qacc is the stages' mean, but its qacc_warmstart the last stage's.
    compared = ("qpos", "qvel", "qacc_warmstart", *(n for n in names if n != "qacc" or source == "halfcheetah"))
    with batches.precision("float64"):
        start, ctrl, mocap = prepared(sim, states)
        state = sim.step(start, ctrl, **mocap)
        third = sim.step(sim.step(state, ctrl, **mocap), ctrl, **mocap)
    for count, found, tolerance in ((1, state, SOLVER), (3, third, 1e-4)):  # contacts make of a difference a larger one
        expected = physics.mujoco_fields(
            robot.mj, states, compared, lambda mj, data, n=count: mujoco_steps(mj, data, n)
        )
        ours = {"qpos": found.qpos, "qvel": found.qvel, **found.internal, **found.fields}
        found = {name: physics.relative_error(np.asarray(ours[name]), value) for name, value in expected.items()}
        physics.assert_agrees(found, tolerance)
    assert set(state.fields) == set(names)
    assert not any(np.asarray(getattr(third, name)).any() for name in ("diverged", "contacts_lost", "bad_controls"))


def mujoco_steps(mj: mujoco.MjModel, data: mujoco.MjData, count: int) -> None:
    for _ in range(count):
        mujoco.mj_step(mj, data)
    mujoco.mj_rnePostConstraint(mj, data)


def test_mocap_bodies_are_where_the_model_has_them_unless_told():
    with batches.precision("float64"):
        sim = batches.simulator("grasp", 2, ("xpos",))
        palm = sim.model.body_names.index("palm")
        state = sim.reset()
        own = sim.model.body_pos[palm]
        np.testing.assert_array_equal(np.asarray(state.xpos)[:, palm], [own, own])
        moved = np.array([[[1.0, 2.0, 5.0]], [[-1.0, 0.5, 7.0]]])
        np.testing.assert_array_equal(np.asarray(sim.forward(state, mocap_pos=moved).xpos)[:, palm], moved[:, 0])


# ---- As functions


@pytest.fixture(scope="module")
def cheetahs():
    return batches.simulator("halfcheetah", 33, ("xpos", "ncon"), "float32")


def test_eager_jit_and_scan_give_the_same_bits(cheetahs):
    start = cheetahs.reset()
    ctrl = np.random.default_rng(0).uniform(-1, 1, (30, 33, cheetahs.model.nu)).astype(np.float32)
    state, jitted, step = start, start, jax.jit(cheetahs.step)
    for now in ctrl:
        before, state = batches.leaves(state), cheetahs.step(state, now)
        jitted = step(jitted, now)
    batches.assert_same_bits(jitted, state)
    scan = jax.jit(lambda s, cs: jax.lax.scan(lambda s, c: (cheetahs.step(s, c), s.qpos), s, cs))
    last, qpos = scan(start, ctrl)
    batches.assert_same_bits(last, state)
    np.testing.assert_array_equal(qpos[-1], before[".qpos"])
    assert np.ptp(state.qpos[:, 0]) > 0.1
    assert state.xpos.shape == (33, cheetahs.model.nbody, 3)
    with pytest.raises(AttributeError, match=r"no attribute 'xquat'; the fields asked for are \['ncon', 'xpos'\]"):
        state.xquat  # noqa: B018


def test_a_simulation_that_diverges_is_put_back_and_counted(cheetahs):
    sound = cheetahs.reset()
    qvel = np.array(sound.qvel)
    qvel[5], qvel[32, 2] = np.nan, 1e11
    broken = sound.replace(qvel=jnp.asarray(qvel))
    ctrl = np.full((33, cheetahs.model.nu), 0.5, np.float32)
    clean, hurt = cheetahs.step(sound, ctrl), cheetahs.step(broken, ctrl)
    bad = [5, 32]
    others = np.setdiff1d(np.arange(33), bad)
    np.testing.assert_array_equal(np.flatnonzero(hurt.diverged), bad)
    np.testing.assert_array_equal(np.asarray(hurt.qpos)[bad], np.tile(cheetahs.model.qpos0.astype(np.float32), (2, 1)))
    assert not np.asarray(hurt.qvel)[bad].any()
    assert not np.asarray(hurt.internal["qacc_warmstart"])[bad].any()
    batches.assert_same_bits(batches.rows(hurt, others), batches.rows(clean, others))
    later = cheetahs.step(hurt)
    np.testing.assert_array_equal(later.diverged, hurt.diverged)
    assert np.isfinite(later.qpos).all()


def test_controls_that_are_not_finite_count_and_mean_zeros(cheetahs):
    start = cheetahs.reset()
    ctrl = np.full((33, cheetahs.model.nu), 0.5, np.float32)
    zeros = ctrl.copy()
    zeros[[7, 32]] = 0
    ctrl[7, 1], ctrl[32, 0] = np.nan, -np.inf
    bad, expected = cheetahs.step(start, ctrl), cheetahs.step(start, zeros)
    np.testing.assert_array_equal(np.flatnonzero(bad.bad_controls), [7, 32])
    batches.assert_same_bits(bad.replace(bad_controls=expected.bad_controls), expected)
