"""integrate.py against MuJoCo: whole steps without constraints, the integrators' rules, and divergence."""

import mujoco
import numpy as np
import physics
import pytest

from brax_concurrent.kernels.acceleration import acceleration
from brax_concurrent.kernels.actuation import actuation, passive
from brax_concurrent.kernels.bias import bias, velocity
from brax_concurrent.kernels.inertia import factor_inertia, inertia
from brax_concurrent.kernels.integrate import check_state, euler, rk4
from brax_concurrent.kernels.kernel import kernel
from brax_concurrent.kernels.kinematics import com, kinematics

NUM_STATES = 1000
STATE = ("qpos", "qvel", "qacc_warmstart")

# An asymmetric body that tumbles freely.
TUMBLER = """
<mujoco>
  <option timestep="{timestep}" integrator="RK4" gravity="0 0 -9.81"/>
  <worldbody>
    <body>
      <freejoint/>
      <geom size="0.1" contype="0" conaffinity="0" mass="0"/>
      <inertial pos="0.1 0.2 -0.1" mass="2" diaginertia="0.1 0.2 0.28"/>
    </body>
  </worldbody>
</mujoco>
"""


@kernel(reads=("qacc_smooth",), writes=("qacc", "qfrc_constraint"))
def unconstrained(m, w):
    for i in range(m.nv):
        w.qacc[i], w.qfrc_constraint[i] = w.qacc_smooth[i], 0.0


EVALUATE = (
    kinematics,
    com,
    inertia,
    factor_inertia,
    velocity,
    bias,
    passive,
    actuation,
    acceleration,
    unconstrained,
)


def step_kernels(robot, rotation="munthe-kaas"):
    if robot.model.opt.integrator == "euler":
        return [*EVALUATE, euler]
    return [k for advance in rk4(rotation) for k in (*EVALUATE, advance)]


def without_constraints(source, **options):
    mj = physics.compiled(source, **options)
    mj.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_CONSTRAINT
    return physics.robot(mj)


def step(robot, states, rotation="munthe-kaas"):
    world = physics.world_of(robot, states)
    for k in step_kernels(robot, rotation):
        world.run(k, robot.view)
    return world


@pytest.mark.parametrize("integrator", [mujoco.mjtIntegrator.mjINT_EULER, mujoco.mjtIntegrator.mjINT_RK4])
@pytest.mark.parametrize("name", physics.ROBOTS)
def test_a_step_without_constraints_is_mujocos(name, integrator):
    robot = without_constraints(name, integrator=integrator)
    states = physics.random_states(robot.mj, NUM_STATES)
    expected = physics.mujoco_fields(robot.mj, states, STATE, mujoco.mj_step)
    physics.assert_agrees(physics.errors(step(robot, states), expected))


@pytest.mark.parametrize("name", physics.ROBOTS)
def test_euler_from_mujocos_constraint_forces(name):
    """The damped solve and qacc_warmstart, with contacts and limits in play."""
    robot = physics.robot(physics.compiled(name, integrator=mujoco.mjtIntegrator.mjINT_EULER))
    states = physics.random_states(robot.mj, NUM_STATES)
    physics.assert_agrees(physics.stage_errors(robot, euler, states, after=mujoco.mj_step))


@pytest.mark.parametrize("flag", ["mjDSBL_EULERDAMP", "mjDSBL_DAMPER"])
def test_euler_without_implicit_damping(flag):
    robot = physics.robot(physics.compiled("halfcheetah", disableflags=int(getattr(mujoco.mjtDisableBit, flag))))
    states = physics.random_states(robot.mj, 100)
    physics.assert_agrees(physics.stage_errors(robot, euler, states, after=mujoco.mj_step))


def test_what_runge_kutta_expects_of_the_next_evaluation():
    """That qacc changes over half a step as it did over the last: from the middle of this step or of the one before."""
    robot = without_constraints("ant")
    world = physics.world_of(robot, physics.random_states(robot.mj, 3))
    world.precision = "f32"
    world.put("rk4_trend", np.zeros_like(world.get("rk4_trend")))
    found, expected = [], [world.get("qacc_warmstart")]
    for _ in range(2):
        for k in step_kernels(robot):
            world.run(k, robot.view)
            if k is EVALUATE[-1]:
                found.append(world.get("qacc"))
            elif k not in EVALUATE:
                expected.append(world.get("qacc_warmstart"))
    a, b = found[:4], found[4:]
    wanted = [a[0], a[1], a[2] + a[1] - a[0], a[3], b[0] + a[3] - a[2], b[1], b[2] + b[1] - b[0], b[3]]
    np.testing.assert_allclose(expected[1:], wanted, rtol=1e-12, atol=1e-9)


def test_in_double_precision_all_evaluations_start_where_mujocos_do():
    robot = without_constraints("ant")
    world = physics.world_of(robot, physics.random_states(robot.mj, 3))
    before, seen = world.get("qacc_warmstart"), []
    for k in step_kernels(robot):
        world.run(k, robot.view)
        if k is EVALUATE[-1]:
            np.testing.assert_array_equal(world.get("qacc_warmstart"), before)
            seen.append(world.get("qacc"))
    assert len(seen) == 4
    np.testing.assert_array_equal(world.get("qacc_warmstart"), seen[-1])


@pytest.mark.parametrize("speed", [1e-3, 10, 300])
def test_the_munthe_kaas_rotation_at_all_speeds(speed):
    """300 rad/s is half a turn per step and more: the way back to the start is the other way round."""
    robot = physics.robot(TUMBLER.format(timestep=0.01))
    states = physics.random_states(robot.mj, NUM_STATES)
    states.qvel[:] = np.random.default_rng(0).normal(size=states.qvel.shape) * speed
    expected = physics.mujoco_fields(robot.mj, states, STATE, mujoco.mj_step)
    physics.assert_agrees(physics.errors(step(robot, states), expected))


def turned_after(timestep, rotation, time=0.4):
    """Orientation of the tumbler after some time, by the kernels or, with rotation None, by MuJoCo."""
    robot = physics.robot(TUMBLER.format(timestep=timestep))
    states = physics.random_states(robot.mj, 1)
    states.qvel[0] = [0, 0, 0, 8, 1, -3]
    data = mujoco.MjData(robot.mj)
    data.qpos[:], data.qvel[:] = states.qpos[0], states.qvel[0]
    world = physics.world_of(robot, states)
    for _ in range(round(time / timestep)):
        if rotation is None:
            mujoco.mj_step(robot.mj, data)
        else:
            for k in step_kernels(robot, rotation):
                world.run(k, robot.view)
    return data.qpos[3:7] if rotation is None else world.get("qpos")[0, 3:7]


def test_only_the_munthe_kaas_rotation_is_of_fourth_order():
    exact = turned_after(0.0002, None)
    error = {
        (rotation, h): np.abs(turned_after(h, rotation) - exact).max()
        for rotation in ("munthe-kaas", "plain")
        for h in (0.02, 0.01)
    }
    assert error["munthe-kaas", 0.02] / error["munthe-kaas", 0.01] > 12
    assert error["plain", 0.02] / error["plain", 0.01] < 9
    assert error["plain", 0.01] > 10 * error["munthe-kaas", 0.01]


def test_rotation_rules_have_their_own_kernel_names():
    assert not {k.name for k in rk4()} & {k.name for k in rk4("plain")}
    with pytest.raises(ValueError, match="rotation: expected one of .*munthe-kaas.*, got 'euler'"):
        rk4("euler")


@pytest.mark.parametrize("field", ["qpos", "qvel", "qacc"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1.1e10, -1.1e10])
def test_divergence_is_noticed_and_remembered(field, bad):
    robot = physics.robot("walker2d")
    states = physics.random_states(robot.mj, 3)
    world = physics.world_of(robot, states)
    world.put("qacc", states.qvel)
    world.put("diverged", np.array([[0], [0], [1]]))
    value = world.get(field)
    value[:, 0] = 9e9
    value[1, -1] = bad
    world.put(field, value)
    world.run(check_state, robot.view)
    np.testing.assert_array_equal(world.get("diverged")[:, 0], [0, 1, 1])
