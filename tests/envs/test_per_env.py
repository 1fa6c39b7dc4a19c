"""Model quantities that differ by environment, against MuJoCo models that were changed in the same way."""

from __future__ import annotations

import batches
import contacts
import mujoco
import numpy as np
import physics
import pytest

pytestmark = [pytest.mark.xdist_group("locomotion"), pytest.mark.slow]

NUM = 40
VARIED = ("body_mass", "geom_friction")
SOLVER = 1e-6  # where two solvers stop that improve by less than 1e-8 of the cost


def walker():
    """A robot, states with contacts, and what each environment's model has of its own."""
    robot = contacts.robot("walker2d")
    rng = np.random.default_rng(3)
    own = {
        name: getattr(robot.mj, name) * rng.uniform(0.5, 1.5, (NUM, *getattr(robot.mj, name).shape)) for name in VARIED
    }
    return robot, contacts.states_of(robot, NUM, seed=3), own


def mujocos(robot, states, own, names, call):
    """Fields after `call` on each state, each with its own model."""
    model, rows = robot.mj, []
    kept = {name: getattr(model, name).copy() for name in own}
    for s in range(NUM):
        for name, values in own.items():
            getattr(model, name)[:] = values[s]
        one = physics.States(*(value[s : s + 1] for _, value in states.items()))
        rows.append(physics.mujoco_fields(model, one, names, call))
    for name, values in kept.items():
        getattr(model, name)[:] = values
    return {name: np.concatenate([row[name] for row in rows]) for name in names}


def errors(found, expected):
    return {name: physics.relative_error(np.asarray(found[name]), value) for name, value in expected.items()}


def test_a_physics_step():
    robot, states, own = walker()
    with batches.precision("float64"):
        sim = batches.simulator(robot.mj, NUM, ("qacc",), per_env=VARIED)
        state = sim.reset_to(states.qpos, states.qvel, states.ctrl, model=own)
        state = sim.forward(state.replace(internal={"qacc_warmstart": states.qacc_warmstart}), states.ctrl)
        stepped = sim.step(state, states.ctrl)
    expected = mujocos(robot, states, own, ("qacc",), mujoco.mj_forward)
    physics.assert_agrees(errors(state.fields, expected), SOLVER)
    expected = mujocos(robot, states, own, ("qpos", "qvel"), mujoco.mj_step)
    physics.assert_agrees(errors({"qpos": stepped.qpos, "qvel": stepped.qvel}, expected), SOLVER)
    # Each of the two matters.
    for name in VARIED:
        plain = mujocos(robot, states, {n: v for n, v in own.items() if n != name}, ("qvel",), mujoco.mj_step)
        assert physics.relative_error(plain["qvel"], expected["qvel"]) > 1e-3


def test_a_control_step_of_an_environment():
    robot, states, own = walker()
    env = batches.env("walker2d", NUM, "float64", per_env=VARIED)
    rng = np.random.default_rng(0)
    action = rng.uniform(-1, 1, (NUM, env.action_size))
    states = physics.States(**dict(states.items()) | {"ctrl": action, "qacc_warmstart": 0 * states.qacc_warmstart})
    with batches.precision("float64"):
        state = env.reset_to(states.qpos, states.qvel, model=own)
        new = env.step(state, action)

    def control_step(model, data):
        for _ in range(env.task.frame_skip):
            mujoco.mj_step(model, data)

    expected = mujocos(robot, states, own, ("qpos", "qvel"), control_step)
    final = np.asarray(new.final_obs)
    physics.assert_agrees(
        errors(
            {"qpos": final[:, : env.model.nq - 1], "qvel": final[:, env.model.nq - 1 :]},
            {"qpos": expected["qpos"][:, 1:], "qvel": np.clip(expected["qvel"], -10, 10)},
        ),
        1e-5,  # four steps of the solver
    )
    for name in VARIED:  # they stay, through resets too
        np.testing.assert_array_equal(new.model[name], own[name])
    assert np.asarray(new.done).any()


def test_left_out_they_are_the_models_own():
    plain, varied = batches.env("walker2d", NUM, "float64"), batches.env("walker2d", NUM, "float64", per_env=VARIED)
    _, states, _ = walker()
    action = batches.random_actions(plain)
    with batches.precision("float64"):
        first, second = (env.step(env.reset_to(states.qpos, states.qvel), action) for env in (plain, varied))
    np.testing.assert_allclose(second.final_obs, first.final_obs, rtol=1e-9, atol=1e-9)
    for name in VARIED:
        np.testing.assert_array_equal(second.model[name][3], getattr(plain.model, name))
