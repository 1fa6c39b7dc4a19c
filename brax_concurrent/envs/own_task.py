"""Tasks of users, written as JAX functions: what a subclass gives, and what its methods are given."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from brax_concurrent.envs.fields import unknown
from brax_concurrent.envs.task import KernelTask
from brax_concurrent.kernels.model import compile_mjcf


class Task:
    """A task of your own: an MJCF, and JAX functions that say how it is observed, scored, ended and reset.

    `make` compiles the methods into the same native step as the physics, the reset included. They are about ONE
    environment and are traced once: pure functions of small arrays, with `jnp.where` or `jax.lax.cond` where Python
    has `if`. docs/tasks.md has an example and says which operations of JAX there are; examples/own_task.py is a whole
    program.

    Attributes:
        model: MJCF path, MJCF text or a mujoco.MjModel. What physics it may need is in docs/physics.md.
        name: default: the class's name.
        frame_skip: physics steps per control step, at least 1.
        max_episode_steps: control steps until an episode is truncated.
        nconmax: contacts kept per environment; None: the model's default.
        action_size: entries of an action; None: one for each actuator.
        action_low, action_high: bounds that the action space states, numbers or `(action_size,)`; None: the actuators'
            ranges, and -1 and 1 where `control` is overridden. Actions outside are not refused.
    """

    model: str | os.PathLike[str] | mujoco.MjModel
    name: str = ""
    frame_skip: int = 1
    max_episode_steps: int = 1000
    nconmax: int | None = None
    action_size: int | None = None
    action_low: Any = None
    action_high: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @functools.cached_property
    def mj_model(self) -> mujoco.MjModel:
        """The compiled model, for ids and constants: `self.mj_model.body("foot").id`, `self.mj_model.qpos0`."""
        if not hasattr(self, "model"):
            raise TypeError(
                f"{type(self).__name__}.model: expected an MJCF path, MJCF text or a mujoco.MjModel, got none"
            )
        return compile_mjcf(self.model)[0]

    @property
    def dt(self) -> float:
        """Duration of a control step, s."""
        return float(self.mj_model.opt.timestep) * self.frame_skip

    def observation(self, s: Fields) -> jax.Array:
        """A vector of what the policy sees.

        After a step the derived fields (xpos, cvel, contacts, ...) are those of the physics' last evaluation, as in
        MuJoCo and in Gymnasium: with Euler of the state one physics step before qpos and qvel, with Runge-Kutta of an
        estimate of them. After a reset they are those of the new state with `ctrl` 0, and cfrc_ext is 0.
        """
        raise NotImplementedError

    def reward(self, s: Fields, before: Fields, action: jax.Array) -> Any:
        """A scalar, or (scalar, dict of scalars by name): the parts are then in `state.metrics`.

        Args:
            s: after the step.
            before: before the step: what a field held at its end of the previous step or reset.
            action: `(action_size,)`, as given; zeros where an entry was not finite.
        """
        raise NotImplementedError

    def terminated(self, s: Fields) -> Any:
        """A boolean scalar: whether the episode ends here for good. Default: never."""
        return False

    def reset(self, noise: Noise) -> Any:
        """A start: (qpos, qvel), or (qpos, qvel, memory). Default: qpos0 at rest.

        Args:
            noise: draws fresh random numbers for every reset of every environment.

        Returns:
            qpos: `(nq,)`. qvel: `(nv,)`. memory: what one step leaves to the next beside the physics, a dict of
            floating-point arrays by name, such as a target: `s.memory["target"]`.
        """
        return self.mj_model.qpos0, np.zeros(self.mj_model.nv)

    def remember(self, s: Fields, before: Fields, action: jax.Array, noise: Noise) -> Mapping[str, Any]:
        """The memory after a step, of the same names and shapes as `reset` gives. Default: what it was.

        Args:
            s: after the step, without memory, which this gives.
            before, action: as in reward.
            noise: draws fresh random numbers in every step.
        """
        return before.memory

    def control(self, s: Fields, action: jax.Array) -> jax.Array:
        """`(nu,)` controls for the physics steps of a control step. Default: the action.

        Args:
            s: before the step: qpos, qvel, time and memory.
            action: `(action_size,)`.
        """
        return action


AnyTask = Task | KernelTask
"""What `make` makes environments of."""


class Fields:
    """The simulator's fields of one environment, by MuJoCo's names and of its shapes: `s.qpos`, `s.xpos[3]`.

    The names are those of `Simulator.known_fields`, and besides

    - `time`: seconds since the episode began, a multiple of the control step;
    - `memory`: what `Task.reset` and `Task.remember` gave.

    What is used is computed; nothing else is.
    """

    def __init__(self, values: Mapping[str, jax.Array], memory: Mapping[str, jax.Array] | None, label: str):
        self._values, self._label = values, label
        if memory is not None:
            self.memory = memory

    def __getattr__(self, name: str) -> jax.Array:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self.__dict__.get("_values", {}):
            return self._values[name]
        raise AttributeError(f"{self.__dict__.get('_label')}: {unknown(name, self.__dict__.get('_values', {}))}")


class Noise:
    """Random numbers of one environment, drawn by the compiled kernels (a counter-based generator, envs/random.py)."""

    def __init__(self, drawn: Sequence[jax.Array] | None, dtype: Any):
        self._drawn, self._dtype = drawn, dtype
        self.requests: list[tuple[str, tuple[int, ...]]] = []  # what was drawn, in order

    def uniform(self, shape: Sequence[int] | int = (), minval: Any = 0.0, maxval: Any = 1.0) -> jax.Array:
        """Uniform on (minval, maxval), each with 23 random bits; shape and bounds as in `jax.random.uniform`."""
        low, high = (x if isinstance(x, (int, float)) else jnp.asarray(x, self._dtype) for x in (minval, maxval))
        drawn = self._draw("uniform", shape)
        result = low + (high - low) * drawn
        if result.shape != drawn.shape:
            raise ValueError(f"noise.uniform: expected bounds that fit the shape {drawn.shape}, got {result.shape}")
        return result

    def normal(self, shape: Sequence[int] | int = ()) -> jax.Array:
        """Standard normal."""
        return self._draw("normal", shape)

    def _draw(self, kind: str, shape: Any) -> jax.Array:
        try:
            dims = tuple(operator.index(n) for n in (shape if isinstance(shape, (tuple, list)) else (shape,)))
        except TypeError:
            raise TypeError(f"noise.{kind}: shape: expected whole numbers, got {shape!r}") from None
        if any(n < 0 for n in dims):
            raise ValueError(f"noise.{kind}: shape: expected no negative number, got {shape!r}")
        self.requests.append((kind, dims))
        if self._drawn is None:
            return jnp.zeros(dims, self._dtype)
        return self._drawn[len(self.requests) - 1]
