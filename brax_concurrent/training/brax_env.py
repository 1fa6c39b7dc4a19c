"""A batch of environments behind Brax's interface, for Brax's trainers; needs the extra `brax`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from brax.envs.base import Env as BaseEnv
from brax.envs.base import State as BraxState

from brax_concurrent.envs import make
from brax_concurrent.envs.base import Env
from brax_concurrent.envs.own_task import AnyTask
from brax_concurrent.envs.state import State

ModelValues = Callable[[jax.Array], Mapping[str, Any]]


class BraxEnv(BaseEnv):
    """One robot's environments as a `brax.envs.base.Env` that is a batch by itself.

    Where Brax has one environment and makes a batch of it by `vmap`, here all are stepped at once: `reset` takes a key
    for each environment, and every array has the environment as its first axis. The number of environments is that of
    the keys. Episodes are counted, ended and reset inside `step`, each to a fresh random state, so none of Brax's
    wrappers is needed; a trainer is told so by its argument `wrap_env_fn`:

        patch_jax()
        ppo.train(BraxEnv("ant"), wrap_env_fn=wrap, episode_length=1000, num_envs=1024, ...)

    Actions are Brax's, from -1 to 1, which mean the ends of the robot's range.

    Of a State, `pipeline_state` is this package's State (with `qpos`, `qvel`, ...), `done` is 1.0 where an episode
    ended, and `obs` then is the first observation of the next one. `metrics` are the parts of the reward. `info` has
    the task's numbers and counters, `final_obs` (the last observation of an episode where it ended), and what Brax's
    wrappers give: `steps` since the episode's start, `truncation` and `time_out` (1.0 where the time limit ended it),
    `episode_done` and `episode_metrics` (sums over the episode so far, of an ended one over all of it).

    Args:
        name: one of `list_envs()`, or a Task.
        model_values: for domain randomisation: `model_values(keys)` gives the values of the quantities that `per_env`
            names, each (num_envs, ...), at every `reset` of all. In place of Brax's `randomization_fn`.
        make_arguments: further arguments of `make`: `max_episode_steps`, `per_env`, `backend` and the task's.

    Raises:
        TypeError, ValueError: as `make` says it.
    """

    def __init__(self, name: str | AnyTask, *, model_values: ModelValues | None = None, **make_arguments: Any):
        for argument in ("num_envs", "autoreset"):
            if argument in make_arguments:
                raise TypeError(f"{argument}: the keys say how many environments there are, and step resets them")
        self._name, self._model_values, self._make_arguments = name, model_values, make_arguments
        self._batches: dict[int, Env] = {}
        self._one = self.batch(1)
        low, high = (bound.astype(self._one.dtype) for bound in (self._one.action_low, self._one.action_high))
        bounded = np.isfinite(low).all() and np.isfinite(high).all()
        self._middle: np.ndarray = (low + high) / 2 if bounded else np.zeros_like(low)
        self._half: np.ndarray = (high - low) / 2 if bounded else np.ones_like(low)

    def batch(self, num_envs: int) -> Env:
        """The environments that are stepped when there are so many keys."""
        if num_envs not in self._batches:
            self._batches[num_envs] = make(self._name, num_envs, **self._make_arguments)
        return self._batches[num_envs]

    # ---- what Brax asks for

    @property
    def observation_size(self) -> int:
        """Entries of an observation."""
        return self._one.observation_size

    @property
    def action_size(self) -> int:
        """Entries of an action."""
        return self._one.action_size

    @property
    def backend(self) -> str:
        """The name of this package: its physics is none of Brax's."""
        return "brax_concurrent"

    @property
    def dt(self) -> float:
        """Duration of a control step, s."""
        return self._one.dt

    @property
    def episode_length(self) -> int:
        """Control steps until an episode is truncated."""
        return self._one.task.max_episode_steps

    def reset(self, rng: jax.Array) -> BraxState:
        """Fresh random states.

        Args:
            rng: a key for each environment: (num_envs,), or (num_envs, 2) of legacy keys.

        Raises:
            ValueError: it is one key, as within Brax's `vmap`.
        """
        if rng.ndim != (1 if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else 2):
            raise ValueError(
                f"rng: expected a key for each environment, got keys of shape {rng.shape}. This environment is a batch "
                "by itself, without Brax's vmap: give the trainer wrap_env_fn=brax_concurrent.training.brax_env.wrap"
            )
        env = self.batch(len(rng))
        values = None if self._model_values is None else self._model_values(rng)
        state = env.reset(rng, model=values)
        zero = jnp.zeros_like(state.reward)
        sums = dict.fromkeys(("sum_reward", "length", *env.task.metrics), zero)
        counts = {"steps": zero, "truncation": zero, "time_out": zero, "episode_done": zero, "episode_metrics": sums}
        return self._state(state, zero, counts)

    def step(self, state: BraxState, action: jax.Array) -> BraxState:
        """One control step of all environments.

        Args:
            state: from `reset` or `step`. What wrappers have added to `info` stays.
            action: (num_envs, action_size), from -1 to 1.

        Raises:
            TypeError, ValueError: a wrong type, shape or dtype.
        """
        before = state.pipeline_state
        new = self.batch(len(before.reward)).step(before, self._middle + self._half * action)
        going_on = 1 - state.info["episode_done"]
        gained = {"sum_reward": new.reward, "length": jnp.ones_like(new.reward), **new.metrics}
        sums = {name: going_on * state.info["episode_metrics"][name] + value for name, value in gained.items()}
        done = new.done.astype(new.reward.dtype)
        out_of_time = done * ~new.terminated
        counts = {"steps": going_on * state.info["steps"] + 1, "truncation": out_of_time, "time_out": out_of_time}
        counts |= {"episode_done": done, "episode_metrics": sums}
        return self._state(new, done, state.info | counts)

    def _state(self, state: State, done: jax.Array, info: Mapping[str, Any]) -> BraxState:
        told = {**info, **state.info, "final_obs": state.final_obs}
        mine = jax.tree.map(jnp.copy, (state.obs, state.reward, done, dict(state.metrics), told))
        return BraxState(state, *mine)  # no buffer is there twice: the whole may be donated


def wrap(
    env: BraxEnv, episode_length: int = 1000, action_repeat: int = 1, randomization_fn: Callable[..., Any] | None = None
) -> BraxEnv:
    """What Brax's trainers take as `wrap_env_fn`, in place of brax.envs.training.wrap: they give all the arguments.

    Args:
        env: what the trainer was given.
        episode_length: control steps until an episode is truncated.
        action_repeat: 1. For control steps that are longer give the task `frame_skip`.
        randomization_fn: None. See `model_values` of BraxEnv.

    Returns:
        The environment with this episode length.

    Raises:
        TypeError, ValueError: an argument is another.
    """
    if not isinstance(env, BraxEnv):
        raise TypeError(f"env: expected a BraxEnv, got {type(env).__name__}")
    if action_repeat != 1:
        raise ValueError(f"action_repeat: expected 1, got {action_repeat}; for longer control steps give frame_skip")
    if randomization_fn is not None:
        raise ValueError("randomization_fn: it changes a System of Brax's; BraxEnv's model_values is in its place")
    return env if episode_length == env.episode_length else _with_length(env, episode_length)


@functools.lru_cache(maxsize=16)  # the trainer wraps for training and for evaluation: one of both
def _with_length(env: BraxEnv, episode_length: int) -> BraxEnv:
    arguments = env._make_arguments | {"max_episode_steps": episode_length}
    return BraxEnv(env._name, model_values=env._model_values, **arguments)


def patch_jax() -> None:
    """Give JAX back a function that Brax's trainers call and JAX has taken out.

    The PPO, SAC and APG of Brax 0.14.2 call `jax.device_put_replicated`, without which they stop before the first step.
    Does nothing where JAX has it.
    """
    if not hasattr(jax, "device_put_replicated"):
        jax.device_put_replicated = _device_put_replicated


def _device_put_replicated(x: Any, devices: Sequence[jax.Device]) -> Any:
    """Every array once for each device, along a new first axis; see JAX's guide on the migration of pmap."""
    mesh = jax.sharding.Mesh(np.array(devices), ("devices",))
    parts = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
    return jax.tree.map(lambda array: jax.device_put(jnp.stack([array] * len(devices)), parts), x)
