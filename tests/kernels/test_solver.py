"""solver.py against MuJoCo's Newton solver, on MuJoCo's own constraint rows."""

import dataclasses
from functools import cache

import contacts
import numpy as np
import physics
import pytest
from kernels.random_models import random_model

from brax_concurrent.kernels.collision import collision
from brax_concurrent.kernels.constraint import constraints
from brax_concurrent.kernels.contact_forces import rne_post_constraint
from brax_concurrent.kernels.kernel import Kernel
from brax_concurrent.kernels.solver import solve
from brax_concurrent.kernels.step import forward
from tests.lanes import run_compiled

DYNAMICS = ("qM", "qacc_smooth")

# Where the solver stops when an iteration improves the scaled cost by less than 1e-8, two solvers may stop apart.
UNCONVERGED = 1e-6

# MuJoCo's pyramid of friction mu is stiffer than its normal row alone by 1 / mu**2: 1e10 at the lowest mu there is.
STIFF = 1e-3


def run_on_mujocos_rows(robot, states, known):
    world = contacts.world_of(robot, states, DYNAMICS, known)
    contacts.put_rows(robot, world, known)
    world.poison("contact_jar", "contact_jv", *solve.writes)
    world.run(solve, robot.view)
    return contacts.Records(world)


def errors(robot, found, known):
    """The worst relative errors of qacc, qfrc_constraint and efc_force."""
    worst = dict.fromkeys(("qacc", "qfrc_constraint", "efc_force"), 0.0)
    for s, answer in enumerate(known):
        force = contacts.rows(robot, found, answer, s)["force"]
        pairs = {name: (getattr(found, name)[s], getattr(answer, name)) for name in ("qacc", "qfrc_constraint")}
        for name, (mine, mujocos) in (pairs | {"efc_force": (force, answer.force)}).items():
            worst[name] = max(worst[name], contacts.error(mine, mujocos))
    return worst


@pytest.mark.parametrize("name", physics.ROBOTS)
def test_solution_is_mujocos(name):
    robot = contacts.robot(name, prepare=contacts.converge)
    states = contacts.states_of(robot)
    known = contacts.answers(robot.mj, states)
    found = run_on_mujocos_rows(robot, states, known)
    physics.assert_agrees(errors(robot, found, known))
    assert sum(len(answer.force) for answer in known) > 2 * contacts.NUM_STATES


@pytest.mark.parametrize("name", physics.ROBOTS)
def test_solution_is_mujocos_as_the_file_has_it(name):
    robot = contacts.robot(name)
    states = contacts.states_of(robot, 400, seed=1)
    known = contacts.answers(robot.mj, states)
    found = run_on_mujocos_rows(robot, states, known)
    physics.assert_agrees(errors(robot, found, known), UNCONVERGED)
    iterations, mujocos = found.solver_niter[:, 0], np.array([answer.niter for answer in known])
    assert iterations.mean() <= mujocos.mean() + 0.05
    assert iterations.max() <= mujocos.max() + 2


@pytest.mark.parametrize("variant", contacts.VARIANTS)
def test_solution_with_other_parameters(variant):
    robot = contacts.robot(contacts.VARIANTS[variant], prepare=contacts.converge)
    states = contacts.states_of(robot, 100)
    known = contacts.answers(robot.mj, states)
    found = errors(robot, run_on_mujocos_rows(robot, states, known), known)
    physics.assert_agrees(found, STIFF if variant == "friction at its lower bound" else physics.TOLERANCE)


@pytest.mark.parametrize("seed", range(0, 50, 4))
def test_constraint_stages_of_random_models(seed):
    """From collision to contact wrenches, each stage on the one before."""
    robot = contacts.robot(random_model(seed), prepare=contacts.converge)
    states = contacts.states_of(robot, 24, seed)
    known = contacts.answers(robot.mj, states)
    fields = ("geom_xpos", "geom_xmat", "cdof", "subtree_com", *DYNAMICS)
    world = contacts.world_of(robot, states, fields)
    for kernel in (collision, constraints, solve, rne_post_constraint):
        world.run(kernel, robot.view)
    found = contacts.Records(world)
    worst = errors(robot, found, known)
    worst["cfrc_ext"] = physics.relative_error(found.cfrc_ext, np.array([answer.cfrc_ext for answer in known]))
    physics.assert_agrees(worst)


def test_without_active_rows_nothing_is_changed():
    robot = contacts.robot("ant")
    states = contacts.states_of(robot, 100)
    for q in robot.mj.jnt_qposadr[:1]:
        states.qpos[:, q + 2] = 5.0
    states.qpos[:, 7:] = np.radians([0, 50, 0, -50, 0, -50, 0, 50])
    known = contacts.answers(robot.mj, states)
    assert not any(len(answer.force) for answer in known)
    found = run_on_mujocos_rows(robot, states, known)
    np.testing.assert_array_equal(found.qacc, physics.mujoco_fields(robot.mj, states, ("qacc_smooth",))["qacc_smooth"])
    assert not found.qfrc_constraint.any()
    assert not found.solver_niter.any()


@cache
def _busy(name="ant"):
    robot = contacts.robot(name, prepare=contacts.converge)
    states = contacts.states_of(robot, 100)
    return robot, states, contacts.answers(robot.mj, states)


def test_a_warm_start_at_the_solution_needs_at_most_one_iteration():
    robot, states, known = _busy()
    cold = run_on_mujocos_rows(robot, states, known).solver_niter
    warm = dataclasses.replace(states, qacc_warmstart=np.array([answer.qacc for answer in known]))
    found = run_on_mujocos_rows(robot, warm, known)
    assert found.solver_niter.max() == 1
    assert cold.max() > 3
    physics.assert_agrees(errors(robot, found, known))


@pytest.mark.parametrize("size", [1e8, np.nan])
def test_a_bad_warm_start_is_not_used(size):
    robot, states, known = _busy()
    bad = dataclasses.replace(states, qacc_warmstart=np.full_like(states.qacc_warmstart, size))
    physics.assert_agrees(errors(robot, run_on_mujocos_rows(robot, bad, known), known))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_lane_that_diverged_ends_and_disturbs_no_other(bad):
    robot, states, known = _busy()
    world = contacts.world_of(robot, states, DYNAMICS, known)
    contacts.put_rows(robot, world, known)
    smooth = world.get("qacc_smooth")
    smooth[::2] = bad
    world.put("qacc_smooth", smooth)
    world.run(solve, robot.view)
    found = contacts.Records(world)
    assert found.solver_niter[::2].max() <= (0 if np.isnan(bad) else 1)
    for s in range(1, len(states), 2):
        assert contacts.error(found.qacc[s], known[s].qacc) < physics.TOLERANCE


@pytest.mark.parametrize("tolerance", [1e2, 1e4, 1e6])
def test_forces_belong_to_the_acceleration_wherever_the_solver_stops(tolerance):
    robot = contacts.robot("ant", prepare=lambda mj: setattr(mj.opt, "tolerance", tolerance))
    _, states, known = _busy()
    found = run_on_mujocos_rows(robot, states, known)
    off = 0
    for s, answer in enumerate(known):
        expected = -answer.D * np.minimum(answer.J @ found.qacc[s] - answer.aref, 0)
        assert contacts.error(contacts.rows(robot, found, answer, s)["force"], expected, 1.0) < physics.TOLERANCE
        assert contacts.error(found.qfrc_constraint[s], answer.J.T @ expected, 1.0) < physics.TOLERANCE
        off += contacts.error(found.qacc[s], answer.qacc) > 1e-6
    assert off > 3


def compiled(robot, states, precision, outputs):
    """Outputs of all stages up to the solver, compiled for the CPU."""
    inputs = {name: value for name, value in states.items() if value.size and name in ("qpos", "qvel", "ctrl")}
    inputs["qacc_warmstart"] = states.qacc_warmstart
    shapes = {name: robot.fields[name].shape for name in outputs}

    def load(_, w):
        for name, value in inputs.items():
            for i in range(value.shape[1]):
                getattr(w, name)[i] = getattr(w.user, name)[i]

    def store(_, w):
        for name, shape in shapes.items():
            for i, index in enumerate(np.ndindex(shape)):
                getattr(w.user, f"out_{name}")[i] = getattr(w, name)[index]

    kernels = [
        Kernel("load", load, tuple(f"user.{name}" for name in inputs), tuple(inputs)),
        *forward(robot.model),
        Kernel("store", store, tuple(outputs), tuple(f"user.out_{name}" for name in outputs)),
    ]
    dtype = {"f32": np.float32, "f64": np.float64}[precision]
    arrays = {name: np.ascontiguousarray(value, dtype) for name, value in inputs.items()}
    for name, shape in shapes.items():
        kind = np.int32 if robot.fields[name].dtype == "i" else dtype
        arrays[f"out_{name}"] = np.zeros((len(states), int(np.prod(shape))), kind)
    run_compiled(kernels, robot.fields, arrays, precision, robot.model)
    return {name: arrays[f"out_{name}"] for name in outputs}


@pytest.mark.parametrize("name", ["ant", "halfcheetah", "walker2d"])
def test_single_precision_converges_as_double_does(name):
    """The tolerance, 1e-8, is below what single precision resolves: neither endless iterations nor early ends."""
    robot = contacts.robot(name, nconmax=25)
    states = contacts.states_of(robot, 1024, seed=2)
    known = contacts.answers(robot.mj, states)
    found = compiled(robot, states, "f32", ("qacc", "solver_niter", "ncon"))
    same = found["ncon"][:, 0] == [len(answer.dist) for answer in known]
    assert same.mean() > 0.995  # in the others a contact is within rounding of its margin
    size = np.array([np.abs(answer.qacc).max() for answer in known])
    error = np.abs(found["qacc"] - [answer.qacc for answer in known]).max(axis=1) / size
    assert np.median(error[same]) < 1e-5
    assert np.quantile(error[same], 0.99) < 1e-3
    iterations, mujocos = found["solver_niter"][:, 0], np.array([answer.niter for answer in known])
    assert iterations.max() <= mujocos.max() + 2
    assert abs(iterations.mean() - mujocos.mean()) < 0.05
