"""Arrays, keys and states that do not fit are refused before anything runs, in the caller's terms."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pendulum
import pytest

import brax_concurrent as bc

ZERO = jnp.zeros((4, 1))
WRONG = [
    (jnp.zeros(4), r"expected float32\[4, 1\], got float32\[4\]"),
    (jnp.zeros((3, 1)), r"expected float32\[4, 1\], got float32\[3, 1\]"),
    (jnp.zeros((4, 2)), r"expected float32\[4, 1\], got float32\[4, 2\]"),
    (jnp.zeros((1, 4, 1)), r"expected float32\[4, 1\], got float32\[1, 4, 1\]"),
    (jnp.zeros((4, 1), jnp.int32), r"expected float32\[4, 1\], got int32\[4, 1\]"),
    (jnp.zeros((4, 1), jnp.bfloat16), r"expected float32\[4, 1\], got bfloat16\[4, 1\]"),
    (np.zeros((4, 1), int), r"expected float32\[4, 1\], got int32\[4, 1\]"),
    ([[0.0], [0.0], [0.0], [0.0, 1.0]], r"expected float32\[4, 1\], got list"),
    ("left", r"expected float32\[4, 1\], got str"),
]


@pytest.fixture(scope="module")
def env():
    return pendulum.env()


@pytest.fixture(scope="module")
def state(env):
    return env.reset(jax.random.key(0))


@pytest.fixture(scope="module")
def sim():
    return pendulum.simulator("xpos")


@pytest.mark.parametrize(("value", "message"), WRONG)
def test_actions_and_states_of_a_wrong_shape_or_dtype(env, state, sim, value, message):
    calls = {
        "action": lambda: env.step(state, value),
        "qpos": lambda: env.reset_to(value, ZERO),
        "qvel": lambda: env.reset_to(ZERO, value),
    }
    simulated = {
        "ctrl": lambda: sim.step(sim.reset(), value),
        "qpos": lambda: sim.reset_to(value, ZERO),
        "qvel": lambda: sim.reset_to(ZERO, value),
    }
    for name, call in (*calls.items(), *simulated.items()):
        with pytest.raises((ValueError, TypeError), match=f"{name}: {message}"):
            call()


def test_so_it_is_inside_jit(env, state):
    with pytest.raises(ValueError, match=r"action: expected float32\[4, 1\], got float32\[4\]"):
        jax.jit(env.step)(state, jnp.zeros(4))


def test_what_numpy_and_python_call_a_number_is_taken(env, state):
    expected = env.step(state, ZERO)
    for action in (np.zeros((4, 1)), np.zeros((4, 1), np.float32), [[0.0]] * 4):
        np.testing.assert_array_equal(env.step(state, action).obs, expected.obs)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (0, "got int"),
        (None, "got NoneType"),
        (jnp.zeros(2), r"got float32\[2\]"),
        (jnp.zeros(3, jnp.uint32), r"got uint32\[3\]"),
        (np.zeros((3, 2), np.uint32), r"got uint32\[3, 2\]"),
        (jnp.zeros(4), r"got float32\[4\]"),
    ],
)
def test_what_is_no_key(env, key, message):
    with pytest.raises(TypeError, match=rf"key: expected a JAX random key such as jax.random.key\(0\), {message}"):
        env.reset(key)


@pytest.mark.parametrize("shape", [(3,), (4, 1), (2, 4)])
def test_keys_for_other_environments(env, shape):
    with pytest.raises(
        ValueError, match=re.escape(f"expected one key or 4, one for each environment, got keys of shape {shape}")
    ):
        env.reset(jax.random.split(jax.random.key(0), shape))


def test_masks_are_booleans(env, state):
    for mask, got in ((jnp.zeros(4), r"float32\[4\]"), (jnp.zeros(3, bool), r"bool\[3\]"), (True, r"bool\[\]")):
        with pytest.raises(ValueError, match=rf"mask: expected bool\[4\], got {got}"):
            env.reset_where(state, mask)


def test_a_state_of_another_environment(env, state):
    others = {
        "size": pendulum.env(5),
        "argument": pendulum.env(ctrl_cost_weight=0.5),
        "per_env": pendulum.env(per_env=("body_mass",)),
    }
    for what, other in others.items():
        with pytest.raises(
            ValueError, match=rf"state: expected one of {env.fingerprint[:11]}\[4\]/.*, got one of "
        ) as e:
            env.step(other.reset(jax.random.key(0)), ZERO)
        assert str(e.value).endswith(other.fingerprint), what
        with pytest.raises(ValueError, match="state: expected one of"):
            env.reset_where(other.reset(jax.random.key(0)), jnp.zeros(other.num_envs, bool))
    with pytest.raises(ValueError, match="got one of no environment"):
        env.step(state.replace(env=""), ZERO)


@pytest.mark.parametrize("thing", [None, 3, {}, "state", ZERO])
def test_what_is_no_state(env, sim, thing):
    with pytest.raises(TypeError, match=f"state: expected a State .*, got {type(thing).__name__}"):
        env.step(thing, ZERO)
    with pytest.raises(TypeError, match=f"state: expected a SimulatorState, got {type(thing).__name__}"):
        sim.step(thing)


def test_a_state_that_was_changed_into_what_does_not_fit(env, state):
    with pytest.raises(ValueError, match=r"qpos: expected float32\[4, 1\], got float32\[4, 3\]"):
        env.step(state.replace(qpos=jnp.zeros((4, 3))), ZERO)


def test_a_state_of_another_simulator(sim, state):
    others = [pendulum.simulator(), pendulum.simulator("xpos", num_envs=5), pendulum.simulator("xpos", nconmax=1)]
    others += [pendulum.simulator("xpos", per_env=("body_mass",)), pendulum.simulator("xpos", dtype="float64")]
    differ = [other for other in others if other.fingerprint != sim.fingerprint]
    assert len(differ) == len(others) - 1  # a pendulum has one contact at most anyway
    with pytest.raises(ValueError, match="state: expected one of .*, got one of "):
        sim.step(others[0].reset())
    with pytest.raises(TypeError, match="expected a SimulatorState, got State"):
        sim.step(state)


def test_mocap_bodies_that_there_are_not(sim):
    with pytest.raises(ValueError, match=r"mocap_pos: expected float32\[4, 0, 3\], got float32\[4, 1, 3\]"):
        sim.step(sim.reset(), mocap_pos=jnp.zeros((4, 1, 3)))


def test_quantities_per_environment():
    env, sim = pendulum.env(per_env=("body_mass",)), pendulum.simulator("xpos", per_env=("body_mass",))
    for reset in (lambda model: env.reset(jax.random.key(0), model), lambda model: sim.reset(model)):
        with pytest.raises(ValueError, match=r"model\['body_mass'\]: expected float32\[4, 2\], got float32\[2\]"):
            reset({"body_mass": jnp.ones(2)})
        with pytest.raises(ValueError, match="model: .*'geom_size'.* not named in per_env"):
            reset({"geom_size": jnp.ones((4, 2, 3))})


def test_rollouts(env, state):
    def rollout(policy, length=2):
        return bc.rollout(env, policy, None, state, jax.random.key(0), length)

    with pytest.raises(ValueError, match="length: expected a whole number of at least 1, got 0"):
        rollout(lambda params, obs, key: (ZERO, jnp.zeros(4)), 0)
    with pytest.raises(TypeError, match=r"policy: expected a tuple \(action, log_prob\), got one value"):
        rollout(lambda params, obs, key: ZERO)
    with pytest.raises(ValueError, match=r"policy: expected log_prob of shape \(4,\), got \(3,\)"):
        rollout(lambda params, obs, key: (ZERO, jnp.zeros(3)))
    with pytest.raises(TypeError, match=r"policy: expected log_prob as an array of shape \(4,\), got None"):
        rollout(lambda params, obs, key: (ZERO, None))
    with pytest.raises(TypeError, match="key: expected a JAX random key"):
        bc.rollout(env, lambda params, obs, key: (ZERO, jnp.zeros(4)), None, state, 1, 2)
    with pytest.raises(ValueError, match=r"action: expected float32\[4, 1\], got float32\[2, 1\]"):
        rollout(lambda params, obs, key: (ZERO[:2], jnp.zeros(4)))
    with pytest.raises(TypeError, match=r"env: expected what bc.make returns, got object"):
        bc.rollout(object(), None, None, state, jax.random.key(0), 1)
