"""What users get wrong with different robots in one batch: every message names the robot and what was expected."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brax_concurrent as bc
from brax_concurrent.envs.ant import Ant
from brax_concurrent.envs.halfcheetah import HalfCheetah
from brax_concurrent.envs.mixed import MixedEnv, MixedState

jax.config.update("jax_platforms", "cpu")


@pytest.fixture(scope="module")
def env() -> MixedEnv:
    return bc.make({"halfcheetah": 3, "walker2d": 2})


@pytest.fixture(scope="module")
def state(env: MixedEnv) -> MixedState:
    return env.reset(jax.random.key(0))


@pytest.mark.parametrize(
    ("robots", "error", "message"),
    [
        ({}, ValueError, "expected at least one robot in the dict, got none"),
        ({"ants": 4}, ValueError, "there is no task 'ants'; did you mean 'ant'?"),
        ({"mine": (4, {"frame_skip": 2})}, ValueError, "there is no task 'mine'"),
        ({3: 4}, TypeError, "expected the names of robots as keys, got 3"),
        ({"ant": 0}, ValueError, "ant: num_envs must be a whole number of at least 1, got 0"),
        ({"ant": (-1, {})}, ValueError, "ant: num_envs must be a whole number of at least 1, got -1"),
        ({"a": (True, Ant())}, ValueError, "a: num_envs must be a whole number of at least 1, got True"),
        ({"ant": 2.0}, ValueError, "ant: num_envs must be a whole number of at least 1, got 2.0"),
        ({"ant": "many"}, ValueError, "ant: num_envs must be a whole number of at least 1, got 'many'"),
        ({"ant": Ant()}, TypeError, "ant: expected num_envs, (num_envs, dict of task arguments) or (num_envs, Task)"),
        ({"ant": (4, 5)}, TypeError, "ant: expected num_envs, (num_envs, dict of task arguments) or (num_envs"),
        ({"ant": (4, {}, 5)}, TypeError, "ant: expected num_envs, (num_envs, dict of task arguments) or (num_envs"),
        ({"ant": ({}, 4)}, TypeError, "ant: expected num_envs, (num_envs, dict of task arguments) or (num_envs"),
        ({"ant": (4, {"frame_skp": 2})}, TypeError, "ant: there is no argument 'frame_skp' (did you mean 'frame_skip'"),
        ({"ant": (4, {"threads": 2})}, TypeError, "ant: threads is one for the whole batch, give it to make"),
        ({"ant": (4, {"dtype": "float64"})}, TypeError, "ant: dtype is one for the whole batch, give it to make"),
        ({"ant": (4, {"per_env": ("mass",)})}, ValueError, "'mass' is no real-valued quantity of the model"),
    ],
)
def test_a_dict_that_makes_no_sense_is_refused(robots, error, message):
    with pytest.raises(error, match=re.escape(message)):
        bc.make(robots)


def test_arguments_beside_a_dict_are_refused():
    with pytest.raises(TypeError, match=r"a dict has each robot's arguments, .*; got \['num_envs'\] beside it"):
        bc.make({"ant": 4}, 8)
    with pytest.raises(TypeError, match=r"a dict has each robot's arguments, .*; got \['frame_skip'\] beside it"):
        bc.make({"ant": 4}, frame_skip=2)
    with pytest.raises(ValueError, match="threads: expected a whole number of at least 0, got -1"):
        bc.make({"ant": 4}, threads=-1)
    with pytest.raises(TypeError, match=r"a Task has its arguments already, got \['nconmax'\]"):
        bc.make({"mine": (4, HalfCheetah())}, nconmax=3)


def test_environments_that_do_not_go_together_are_refused(env):
    with pytest.raises(ValueError, match="envs: expected at least one robot, got none"):
        MixedEnv({})
    with pytest.raises(TypeError, match="envs: expected environments by name, got 'a': int"):
        MixedEnv({"a": 3})
    with pytest.raises(TypeError, match="envs: expected environments by name, got 1: Env"):
        MixedEnv({1: env.envs["walker2d"]})
    other = bc.make("halfcheetah", 3)
    other.backend = "cuda"
    with pytest.raises(ValueError, match="envs: expected one backend for all, got {'a': 'cuda', 'b': 'cpu'}"):
        MixedEnv({"a": other, "b": env.envs["walker2d"]})
    with pytest.raises(TypeError, match="does not support item assignment"):
        env.envs["halfcheetah"] = other


GOOD = {"halfcheetah": np.zeros((3, 6), np.float32), "walker2d": np.zeros((2, 6), np.float32)}
ROBOTS = "['halfcheetah', 'walker2d']"


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (np.zeros((5, 6)), TypeError, f"action: expected a dict by robot {ROBOTS}, got ndarray"),
        (None, TypeError, f"action: expected a dict by robot {ROBOTS}, got NoneType"),
        ({}, ValueError, "action: nothing for robot 'halfcheetah', 'walker2d'"),
        ({"walker2d": GOOD["walker2d"]}, ValueError, f"action: nothing for robot 'halfcheetah'; expected {ROBOTS}"),
        (GOOD | {"ant": 0}, ValueError, f"action: there is no robot 'ant'; expected {ROBOTS}"),
        (GOOD | {"walker": 0}, ValueError, "action: there is no robot 'walker' (did you mean 'walker2d'?)"),
        (
            GOOD | {"walker2d": np.zeros((3, 6), np.float32)},
            ValueError,
            "action['walker2d']: expected float32[2, 6], got float32[3, 6]",
        ),
        (
            GOOD | {"halfcheetah": np.zeros((3, 6), np.int32)},
            ValueError,
            "action['halfcheetah']: expected float32[3, 6], got int32[3, 6]",
        ),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_actions_that_do_not_fit_are_refused(env, state, action, error, message, jit):
    step = jax.jit(env.step) if jit else env.step
    before = jax.tree.map(np.array, state)
    with pytest.raises(error, match=re.escape(message).replace("ndarray", r"\w+")):
        step(state, action)
    for old, now in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(old, now)
    env.step(state, GOOD)


def test_a_robots_name_is_a_string(env, state):
    with pytest.raises(ValueError, match=re.escape(f"action: there is no robot 7; expected {ROBOTS}")):
        env.step(state, GOOD | {7: 0})


def test_states_of_others_are_refused(env, state):
    single = env.envs["halfcheetah"].reset(jax.random.key(0))
    more = bc.make({"halfcheetah": 3, "walker2d": 2, "fast": (1, HalfCheetah(frame_skip=2))})
    larger = bc.make({"halfcheetah": 4, "walker2d": 2})
    for call in (lambda s: env.step(s, GOOD), lambda s: env.reset_where(s, s.done)):
        with pytest.raises(TypeError, match="state: expected a MixedState from .*, got State"):
            call(single)
        with pytest.raises(ValueError, match="state: there is no robot 'fast'; expected"):
            call(more.reset(jax.random.key(0)))
        with pytest.raises(ValueError, match="state: nothing for robot 'walker2d'; expected"):
            call(MixedState({"halfcheetah": single}))
        with pytest.raises(
            ValueError, match=r"state\['halfcheetah'\]: expected one of \w+\[3\].*, got one of \w+\[4\]"
        ):
            call(larger.reset(jax.random.key(0)))
    swapped = MixedState({"halfcheetah": state.states["walker2d"], "walker2d": state.states["halfcheetah"]})
    with pytest.raises(ValueError, match=r"state\['halfcheetah'\]: expected one of halfcheetah.* of walker2d"):
        env.step(swapped, GOOD)
    with pytest.raises(TypeError, match=r"state\['walker2d'\]: expected a State, got dict"):
        env.step(MixedState({**state.states, "walker2d": {}}), GOOD)


def test_physics_states_that_do_not_fit_are_refused(env, state):
    with pytest.raises(ValueError, match="qpos: nothing for robot 'walker2d'"):
        env.reset_to({"halfcheetah": state.qpos["halfcheetah"]}, state.qvel)
    wrong = {**state.qvel, "walker2d": state.qvel["walker2d"][:, :8]}
    with pytest.raises(ValueError, match=r"qvel\['walker2d'\]: expected float32\[2, 9\], got float32\[2, 8\]"):
        env.reset_to(state.qpos, wrong)
    with pytest.raises(ValueError, match=r"qpos\['halfcheetah'\]: expected float32\[3, 9\], got float32\[4, 9\]"):
        env.reset_to({**state.qpos, "halfcheetah": jnp.zeros((4, 9))}, state.qvel)
    with pytest.raises(ValueError, match="mask: nothing for robot 'halfcheetah'"):
        env.reset_where(state, {"walker2d": np.ones(2, bool)})
    with pytest.raises(ValueError, match=r"mask\['walker2d'\]: expected bool\[2\], got float32\[2\]"):
        env.reset_where(state, {"halfcheetah": np.ones(3, bool), "walker2d": jnp.ones(2)})


def test_keys_and_model_values_that_do_not_fit_are_refused(env):
    with pytest.raises(TypeError, match="key: expected a JAX random key such as jax.random.key.0., got int"):
        env.reset(3)
    with pytest.raises(ValueError, match="key: expected one key, got an array of keys"):
        env.reset(jax.random.split(jax.random.key(0), 2))
    with pytest.raises(ValueError, match=r"model: there is no robot 'walker' \(did you mean 'walker2d'\?\)"):
        env.reset(jax.random.key(0), {"walker": {}})
    with pytest.raises(TypeError, match="model: expected a dict by robot"):
        env.reset(jax.random.key(0), [3])
    with pytest.raises(ValueError, match=r"walker2d: model: \['qpos0'\] were not named in per_env=\(\)"):
        env.reset(jax.random.key(0), {"walker2d": {"qpos0": 0}})


def test_changes_of_robots_that_a_state_lacks_are_refused(state):
    with pytest.raises(ValueError, match=r"qpos: there is no robot 'halfcheeta' \(did you mean 'halfcheetah'\?\)"):
        state.replace(qpos={"halfcheeta": 0})
    with pytest.raises(TypeError, match="qpos: expected a dict by robot"):
        state.replace(qpos=jnp.zeros(3))


def answer(log_prob: Any) -> Any:
    return lambda params, obs, key: ({n: x[:, :6] for n, x in obs.items()}, log_prob(obs))


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (lambda p, o, k: 3, TypeError, "policy: expected a tuple (action, log_prob), got one value"),
        (answer(lambda o: o["walker2d"][:, 0]), ValueError, f"policy: expected log_prob of the robots {ROBOTS}, got "),
        (
            answer(lambda o: {"walker2d": o["walker2d"][:, 0]}),
            ValueError,
            f"policy: expected log_prob of the robots {ROBOTS}, got ['walker2d']",
        ),
        (
            answer(lambda o: {n: x[:1, 0] for n, x in o.items()}),
            ValueError,
            "policy: expected log_prob['halfcheetah'] of shape (3,), got (1,)",
        ),
        (
            lambda p, o, k: (o["walker2d"][:, :6], {n: x[:, 0] for n, x in o.items()}),
            TypeError,
            f"action: expected a dict by robot {ROBOTS}",
        ),
    ],
)
def test_policies_that_answer_wrongly_are_refused(env, state, policy, error, message):
    with pytest.raises(error, match=re.escape(message)):
        bc.rollout(env, policy, None, state, jax.random.key(0), 2)


def test_the_check_of_one_robots_policy_is_as_it_was():
    env = bc.make("halfcheetah", 3)
    with pytest.raises(ValueError, match=re.escape("policy: expected log_prob of shape (3,), got (3, 1)")):
        bc.rollout(env, lambda p, o, k: (o[:, :6], o[:, :1]), None, env.reset(jax.random.key(0)), jax.random.key(0), 2)
