"""What a user's task can get wrong: the message names the class, the method, what was expected and what was given."""

from __future__ import annotations

import re

import batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pendulum import PENDULUM

import brax_concurrent as bc
from brax_concurrent.envs.jaxpr import UnsupportedOperationError
from brax_concurrent.kernels.model import UnsupportedModelError


class Good(bc.Task):
    model = PENDULUM

    def observation(self, s):
        return jnp.concatenate([s.qpos, s.qvel])

    def reward(self, s, before, action):
        return -(s.qpos[0] ** 2)

    def reset(self, noise):
        return jnp.zeros(1), jnp.zeros(1), {"goal": noise.uniform(2)}


def changed(name, value):
    """Good with another attribute or method."""
    return type("Changed", (Good,), {name: value})()


ATTRIBUTES = [
    ("model", "nowhere.xml", FileNotFoundError, "nowhere.xml"),
    ("model", 3, TypeError, "model: expected an MJCF path, MJCF text or a mujoco.MjModel, got int"),
    ("model", "<mujoco><worldbody/></mujocco>", ValueError, "model: MuJoCo cannot compile this MJCF text"),
    ("model", PENDULUM.replace('size="0.1"', 'size="nan"'), ValueError, "model: MuJoCo cannot compile this MJCF text"),
    ("model", PENDULUM.replace("<joint ", '<joint type="ball" '), UnsupportedModelError, "joint 'swing' type='ball'"),
    ("frame_skip", 0, ValueError, "Changed.frame_skip: expected a whole number of at least 1, got 0"),
    ("max_episode_steps", 2.5, ValueError, "Changed.max_episode_steps: expected a whole number of at least 1, got 2.5"),
    ("nconmax", 0, ValueError, "nconmax: expected at least 1, got 0"),
    ("action_size", 3, ValueError, "action_size: expected 1, one for each actuator, or a method control; got 3"),
    ("action_low", (0.0, 1.0), ValueError, "action_low: expected a number or 1 numbers, got (0.0, 1.0)"),
    ("action_high", "far", ValueError, "action_high: expected a number or 1 numbers, got 'far'"),
    ("action_low", 2.0, ValueError, "action_low: expected at most action_high, got [2.0]"),
    ("action_high", np.nan, ValueError, "action_low: expected at most action_high"),
]
METHODS = [
    ("observation", lambda self, s: s.qpo, AttributeError, "observation: s: 'qpo' is no field; nearest: ['qpos'"),
    ("reward", lambda self, s, b, a: b.xpo[0], AttributeError, "reward: before: 'xpo' is no field; nearest: ['xpos'"),
    ("observation", lambda self, s: s.memory["gaol"], KeyError, "gaol"),
    ("observation", lambda self, s: s.qpos[0], TypeError, "observation: expected a vector of numbers, got float32[]"),
    ("observation", lambda self, s: s.xpos, TypeError, "expected a vector of numbers, got float32[2, 3]"),
    ("observation", lambda self, s: [s.qpos, s.qvel], TypeError, "a vector of numbers, got (float32[1], float32[1])"),
    ("observation", lambda self, s: None, TypeError, "observation: expected a vector of numbers, got None"),
    ("observation", lambda self, s: jnp.zeros(0), TypeError, "a vector of numbers, got float32[0]"),
    ("reward", lambda self, s, b, a: s.qpos, TypeError, "reward: expected a scalar of numbers, got float32[1]"),
    ("reward", lambda self, s, b, a: (0.0, 1.0), TypeError, "expected a scalar or (scalar, dict), got (float32[], "),
    ("reward", lambda self, s, b, a: (0.0, {"x": a}), TypeError, "metrics['x']: expected a scalar of numbers, got fl"),
    ("reward", lambda self, s, b, a: (0.0, {1: 1.0}), TypeError, "metrics: expected names, got the key 1"),
    ("reward", lambda self, s: 0.0, TypeError, "takes 2 positional arguments"),
    ("terminated", lambda self, s: s.qpos[0], TypeError, "terminated: expected a scalar of booleans, got float32[]"),
    ("terminated", lambda self, s: s.qpos > 0, TypeError, "expected a scalar of booleans, got bool[1]"),
    (
        "control",
        lambda self, s, a: jnp.zeros(2),
        TypeError,
        "control: expected numbers of the shape [1], got float32[2]",
    ),
    ("control", lambda self, s, a: s.xpos[1, :1], AttributeError, "control: s: 'xpos' is no field; nearest: ['qpos'"),
    ("reset", lambda self, noise: jnp.zeros(1), TypeError, "reset: expected (qpos, qvel) or (qpos, qvel, memory), got"),
    ("reset", lambda self, noise: (jnp.zeros(2), jnp.zeros(1)), TypeError, "reset: qpos: expected numbers of the shap"),
    (
        "reset",
        lambda self, noise: (jnp.zeros(1), 0.0),
        TypeError,
        "reset: qvel: expected numbers of the shape [1], got",
    ),
    (
        "reset",
        lambda self, noise: (jnp.zeros(1), jnp.zeros(1), 3.0),
        TypeError,
        "memory: expected a dict of arrays by ",
    ),
    (
        "reset",
        lambda self, noise: (jnp.zeros(1), jnp.zeros(1), {"goal": jnp.arange(2)}),
        TypeError,
        "reset: memory['goal']: expected floating-point numbers, got int32[2]",
    ),
    (
        "reset",
        lambda self, noise: (jnp.zeros(1), jnp.zeros(1), {"my.goal": 1.0}),
        ValueError,
        "reset: memory: expected names, got the key 'my.goal'",
    ),
    (
        "reset",
        lambda self, noise: noise.uniform(1.5),
        TypeError,
        "noise.uniform: shape: expected whole numbers, got 1.5",
    ),
    (
        "reset",
        lambda self, noise: noise.normal((2, -1)),
        ValueError,
        "noise.normal: shape: expected no negative number",
    ),
    (
        "reset",
        lambda self, noise: noise.uniform((), jnp.zeros(2), 1.0),
        ValueError,
        "noise.uniform: expected bounds that fit the shape (), got (2,)",
    ),
    ("remember", lambda self, s, b, a, n: {}, TypeError, "remember: expected the memory of reset, ['goal'], got {}"),
    (
        "remember",
        lambda self, s, b, a, n: {"goal": a},
        TypeError,
        "remember: memory['goal']: expected floating-point numbers of the shape [2], got float32[1]",
    ),
    ("remember", lambda self, s, b, a, n: s.memory, AttributeError, "remember: s: 'memory' is no field"),
    (
        "observation",
        lambda self, s: s.qpos if s.qpos[0] > 0 else s.qvel,
        TypeError,
        "bool",
    ),
    (
        "observation",
        lambda self, s: jnp.array([np.sin(s.qpos[0])]),
        TypeError,
        "Changed.observation: NumPy needs numbers, and these are known in a step only: use jax.numpy's functions, and ",
    ),
    (
        "reward",
        lambda self, s, b, a: [0.0, 1.0][s.ncon[0]],
        TypeError,
        "Changed.reward: a list is indexed by a number that is known in a step only: use jnp.asarray(list)[i]",
    ),
    (
        "observation",
        lambda self, s: s.qpos[s.qpos > 0],
        TypeError,
        "Changed.observation: how many elements x[condition] has is known in a step only: use jnp.where(condition, x, ",
    ),
]


def test_what_is_changed_below_is_good():
    env = batches.env_of(Good(), 2)
    assert env.reset(jax.random.key(0)).obs.shape == (2, 2)


@pytest.mark.parametrize(("name", "value", "error", "message"), [*ATTRIBUTES, *METHODS])
def test_what_is_wrong_is_said_when_the_environment_is_made(name, value, error, message):
    with pytest.raises(error, match=re.escape(message)):
        batches.env_of(changed(name, value), 2)


def unsupported(self, s):
    return jnp.sort(s.qpos)


def test_an_operation_that_kernels_lack_is_named_with_its_method_and_line():
    line = unsupported.__code__.co_firstlineno + 1
    place = f"Changed.observation, {__file__}:{line}"
    message = f"{place}: jnp.sort: JAX's 'sort' has no counterpart in kernels (docs/tasks.md says what has); jnp.max, "
    with pytest.raises(UnsupportedOperationError, match=re.escape(message)):
        batches.env_of(changed("observation", unsupported), 2)


@pytest.mark.parametrize("name", ["observation", "reward"])
def test_a_method_without_a_default_is_asked_for(name):
    with pytest.raises(TypeError, match=f"Changed: expected a method {name}, got none"):
        batches.env_of(changed(name, getattr(bc.Task, name)), 2)


def test_a_task_without_a_robot_says_so():
    class Empty(bc.Task):
        observation, reward = Good.observation, Good.reward

    with pytest.raises(TypeError, match="Empty.model: expected an MJCF path, MJCF text or a mujoco.MjModel, got none"):
        batches.env_of(Empty(), 2)


def test_make_takes_an_instance_and_no_arguments_of_it():
    with pytest.raises(
        TypeError, match=re.escape("name: expected an instance of a Task, such as Good(), got the class")
    ):
        batches.env_of(Good, 2)
    with pytest.raises(TypeError, match=re.escape("a Task has its arguments already, got ['frame_skip']")):
        batches.env_of(Good(), 2, frame_skip=3)
