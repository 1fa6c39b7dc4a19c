"""What goes wrong while it runs ends, or is mended, where it happens, and is counted there: nothing is silent."""

from __future__ import annotations

import batches
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

# A sledge on three runners, that moves up and down.
SLEDGE = """
<mujoco>
  <option integrator="{integrator}"/>
  <worldbody>
    <geom type="plane" size="1 1 1"/>
    <body>
      <joint name="lift" type="slide" axis="0 0 1"/>
      <geom size="0.1" pos="-0.3 0 0.1"/><geom size="0.1" pos="0 0 0.1"/><geom size="0.1" pos="0.3 0 0.1"/>
    </body>
  </worldbody>
  <actuator><motor joint="lift" ctrlrange="-1 1"/></actuator>
</mujoco>
"""
# On the ground, in the air, on the ground but for the first evaluation in the air, falling onto the ground.
QPOS = np.array([[-0.01], [0.5], [-0.01], [0.001]], np.float32)
QVEL = np.array([[0.0], [0.0], [20.0], [-1.0]], np.float32)
NCONMAX = 1


def sledge(integrator="Euler"):
    return SLEDGE.format(integrator=integrator)


def contacts_in_mujoco(integrator):
    """Contacts of each state."""
    model = mujoco.MjModel.from_xml_string(sledge(integrator))
    data = mujoco.MjData(model)
    counts = []
    for qpos, qvel in zip(QPOS, QVEL, strict=True):
        data.qpos[:], data.qvel[:] = qpos, qvel
        mujoco.mj_forward(model, data)
        counts.append(data.ncon)
    return np.array(counts)


def test_contacts_beyond_the_capacity_are_counted():
    sim = batches.simulator(sledge(), 4, ("ncon", "ncon_lost"), "float32", nconmax=NCONMAX)
    expected = contacts_in_mujoco("Euler") - NCONMAX
    np.testing.assert_array_equal(expected, [2, -1, 2, -1])
    state = sim.reset_to(QPOS, QVEL)
    np.testing.assert_array_equal(state.ncon[:, 0], [1, 0, 1, 0])
    np.testing.assert_array_equal(state.ncon_lost[:, 0], np.maximum(expected, 0))
    np.testing.assert_array_equal(state.contacts_lost, np.maximum(expected, 0))
    for _ in range(2):
        before, state = state.contacts_lost, sim.step(state)
        np.testing.assert_array_equal(state.contacts_lost - before, state.ncon_lost[:, 0])
    assert int(state.contacts_lost[0]) == 3 * 2  # one evaluation at the start and one in each step
    assert np.asarray(state.contacts_lost)[1] == 0


@pytest.mark.parametrize("integrator", ["Euler", "RK4"])
def test_so_they_are_in_all_evaluations_of_a_control_step(integrator):
    """Not only those of the last one: the third sledge has left the ground by then."""
    env = batches.env("halfcheetah", 4, xml_file=sledge(integrator), nconmax=NCONMAX)
    start = env.reset_to(QPOS, QVEL)
    action = np.zeros((4, 1), np.float32)
    state = env.step(start, action)
    evaluations = env.task.frame_skip * (4 if integrator == "RK4" else 1)
    lost = np.asarray(state.info["contacts_lost"])
    np.testing.assert_array_equal(lost[:3], [2 * evaluations, 0, 2])
    assert 0 < lost[3] < 2 * evaluations
    again = env.step(state, action)
    np.testing.assert_array_equal(np.asarray(again.info["contacts_lost"])[:3], [4 * evaluations, 0, 2])
    roomy = batches.env("halfcheetah", 4, xml_file=sledge(integrator))
    assert not np.asarray(roomy.step(roomy.reset_to(QPOS, QVEL), action).info["contacts_lost"]).any()


@pytest.fixture(scope="module")
def sledges():
    return batches.env("halfcheetah", 40, xml_file=sledge())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_actions_that_are_not_finite_are_zeros_and_counted(sledges, bad):
    state = sledges.reset(jax.random.key(0))
    action = np.full((40, 1), 0.5, np.float32)
    action[[3, 39]] = 0
    expected = sledges.step(state, action)
    action[[3, 39]] = bad
    found = sledges.step(state, action)
    np.testing.assert_array_equal(np.flatnonzero(found.info["bad_actions"]), [3, 39])
    np.testing.assert_array_equal(found.qpos, expected.qpos)
    np.testing.assert_array_equal(found.reward, expected.reward)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e11])
@pytest.mark.parametrize("place", ["qpos", "qvel"])
def test_physics_that_diverges_ends_the_episode_and_is_counted(sledges, bad, place):
    sound = sledges.reset(jax.random.key(0))
    broken = np.array(getattr(sound, place))
    broken[[3, 39]] = bad
    action = np.full((40, 1), 0.5, np.float32)
    expected, found = sledges.step(sound, action), sledges.step(sound.replace(**{place: jnp.asarray(broken)}), action)
    np.testing.assert_array_equal(np.flatnonzero(found.terminated), [3, 39])
    np.testing.assert_array_equal(np.flatnonzero(found.info["diverged"]), [3, 39])
    assert np.isfinite(found.obs).all()
    others = np.setdiff1d(np.arange(40), [3, 39])
    batches.assert_same_bits(batches.rows(found, others), batches.rows(expected, others))
