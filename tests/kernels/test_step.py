"""step.py against MuJoCo: whole steps with contacts and limits."""

import mujoco
import numpy as np
import physics
import pytest
from kernels.random_models import random_model
from kernels.test_integrate import STATE

from brax_concurrent.kernels.layout import Field
from brax_concurrent.kernels.reference import ReferenceWorld
from brax_concurrent.kernels.specialize import ModelView
from brax_concurrent.kernels.step import physics_step

# Both solvers run until rounding stops them, so that no stopping rule is compared.
EXACT = {
    "solver": mujoco.mjtSolver.mjSOL_NEWTON,
    "tolerance": 0,
    "iterations": 100,
    "ls_iterations": 100,
    "ls_tolerance": 1e-10,
}


def step_errors(source, num_states):
    robot = physics.robot(physics.compiled(source, **EXACT), nconmax=64)
    states = physics.random_states(robot.mj, num_states)
    world = physics.world_of(robot, states)
    world.put("diverged", np.zeros((num_states, 1)))
    for kernel in physics_step(robot.model):
        world.run(kernel, robot.view)
    expected = physics.mujoco_fields(robot.mj, states, (*STATE, "ncon"), mujoco.mj_step)
    assert world.get("diverged").max() == 0
    return physics.errors(world, expected), expected["ncon"].max()


@pytest.mark.parametrize("name", physics.ROBOTS)
def test_a_step_is_mujocos(name):
    found, ncon = step_errors(name, 100)
    assert ncon >= 3, "the states should make contacts"
    physics.assert_agrees(found)


@pytest.mark.parametrize("seed", range(0, 50, 3))
def test_a_step_of_a_random_robot_is_mujocos(seed):
    physics.assert_agrees(step_errors(random_model(seed), 8)[0])


@pytest.mark.parametrize("name", ["ant", "walker2d", "grasp"])
def test_a_step_with_quantities_that_differ_by_environment(name):
    """Each environment against MuJoCo with its own model: no formula may use the common number instead."""
    mj = physics.compiled(name, **EXACT)
    model = physics.robot(mj, nconmax=64).model
    rng = np.random.default_rng(0)
    num, scalars = 12, ("dof_damping", "dof_armature", "jnt_stiffness", "body_mass", "body_inertia")
    own = {f: getattr(mj, f) * rng.uniform(0.8, 1.2, (num, *getattr(mj, f).shape)) for f in scalars}
    own["body_subtreemass"] = _subtree_masses(mj, own["body_mass"])
    own["actuator_gear"] = mj.actuator_gear * rng.uniform(0.5, 1.5, (num, mj.nu, 1))
    own["geom_friction"] = mj.geom_friction * rng.uniform(0.5, 1.5, (num, mj.ngeom, 1))
    own["body_pos"] = mj.body_pos + rng.normal(size=(num, mj.nbody, 3)) * 0.01
    own["jnt_pos"] = mj.jnt_pos + rng.normal(size=(num, mj.njnt, 3)) * 0.01 * (mj.jnt_type != 0)[:, None]
    # MuJoCo takes the inertia matrix of a single free body from the compiled model.
    fixed = mj.dof_bodyid[mj.dof_simplenum > 0]
    own["body_mass"][:, fixed], own["body_inertia"][:, fixed] = mj.body_mass[fixed], mj.body_inertia[fixed]
    states = physics.random_states(mj, num)
    fields = physics.physics_fields(model) | {f"model.{f}": Field(v.shape[1:], f) for f, v in own.items()}
    world = ReferenceWorld(fields, num)
    for field, value in (*states.items(), *((f"model.{f}", v) for f, v in own.items())):
        if value.size:
            world.put(field, value)
    view = ModelView(model, tuple(own)).bind(world)
    for kernel in physics_step(model):
        world.run(kernel, view)
    rows = []
    for s in range(num):
        for field, value in own.items():
            getattr(mj, field)[:] = value[s]
        one = physics.States(*(value[s : s + 1] for _, value in states.items()))
        rows.append(physics.mujoco_fields(mj, one, STATE, mujoco.mj_step))
    physics.assert_agrees(physics.errors(world, {f: np.concatenate([r[f] for r in rows]) for f in STATE}))


def _subtree_masses(mj, masses):
    total = masses.copy()
    for b in range(mj.nbody - 1, 0, -1):
        total[:, mj.body_parentid[b]] += total[:, b]
    return total


def test_the_last_evaluation_is_of_the_step_that_ends():
    """As in MuJoCo, positions are those of the state before the step (Euler): observations rely on it."""
    robot = physics.robot("halfcheetah")
    states = physics.random_states(robot.mj, 10)
    world = physics.world_of(robot, states)
    for kernel in physics_step(robot.model):
        world.run(kernel, robot.view)
    expected = physics.mujoco_fields(robot.mj, states, ("xpos", "cvel", "qfrc_actuator"), mujoco.mj_step)
    physics.assert_agrees(physics.errors(world, expected))
