"""A batch of environments as a `gymnasium.vector.VectorEnv`; needs the extra `gym`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import error
from gymnasium.spaces import Box
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from brax_concurrent.envs import make
from brax_concurrent.envs.arrays import checked
from brax_concurrent.envs.base import Env
from brax_concurrent.envs.own_task import AnyTask
from brax_concurrent.envs.state import State


class GymVectorEnv(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """A batch of one robot's environments behind Gymnasium's interface, with the semantics of its SyncVectorEnv.

    A step is one jitted call, which updates the physics in place. Observations, rewards and flags are of the
    environment's dtype, float32 by default. On the CPU they are read-only views of JAX's own arrays, not copies, which
    later steps leave as they are; copy them to write to them. On a GPU they are copied to the host.

    Infos have Gymnasium's vector form: for each NAME an array (num_envs, ...) and the mask `_NAME` of the environments
    that it holds for; elsewhere it is 0. After a step they are the task's `info` and `metrics`, a vector's entries in
    one array, and the counters `contacts_lost`, `diverged` and `bad_actions`. A reset has only the counters.

    Args:
        env_or_name: the name of a robot or a Task, from which `make` makes the environments; or an Env, made with
            `autoreset=True` for SAME_STEP and `autoreset=False` for the other modes.
        num_envs: environments in the batch; None: an Env's own, else 1.
        autoreset_mode: gymnasium.vector.AutoresetMode or its value. NEXT_STEP: the step after an episode's end resets
            that environment, ignores its action and gives reward 0. SAME_STEP: the step that ends the episode
            resets it; `infos["final_obs"]` and `infos["final_info"]` hold its end. DISABLED: the caller resets, with
            `reset(options={"reset_mask": mask})`.
        seed: of the first `reset` if that is given none; None: a random one.
        make_arguments: further arguments of `make`, the task's among them; not with an Env.

    Raises:
        TypeError, ValueError: an argument is not what it should be; the message names it.
    """

    def __init__(
        self,
        env_or_name: str | AnyTask | Env,
        num_envs: int | None = None,
        *,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        seed: int | None = None,
        **make_arguments: Any,
    ):
        self.autoreset_mode = _mode(autoreset_mode)
        self.metadata = {"autoreset_mode": self.autoreset_mode, "render_modes": []}
        self._np_random, self._np_random_seed = seeding.np_random(_checked_seed(seed))
        same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        self.env = env = _env(env_or_name, num_envs, same_step, make_arguments)
        _check_names(env)
        self.num_envs = env.num_envs
        dtype = env.dtype.type
        low, high = (bound.astype(env.dtype) for bound in (env.action_low, env.action_high))
        self.single_action_space = Box(low, high, dtype=dtype)
        self.single_observation_space = Box(-np.inf, np.inf, (env.observation_size,), dtype=dtype)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

        self._reset_all = jax.jit(env.reset)
        self._step, self._step_or_reset, self._reset_where, self._reseed_where = (
            _in_place(functools.partial(change, env))
            for change in (Env.step, _step_or_reset, _reset_where, _reseed_where)
        )
        self._state: State | None = None  # nobody else has it: the next call takes parts of it

    @property
    def state(self) -> State:
        """A copy of what `reset` or `step` left, the physics included."""
        return jax.tree.map(jnp.copy, self._current())

    def _current(self) -> State:
        if self.closed:
            raise error.ClosedEnvironmentError("the environment is closed")
        if self._state is None:
            raise error.ResetNeeded("call reset() before step() and before reset() with a reset_mask")
        return self._state

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Fresh random states.

        Args:
            seed: of this reset and of all random numbers after it; None: they go on from those before.
            options: None, or {"reset_mask": (num_envs,) NumPy array of bool}, the environments to reset.

        Returns:
            Observations (num_envs, observation_size), of environments that were not reset their last ones; infos.

        Raises:
            TypeError, ValueError: seed or options are not what they should be; the message names it.
            gymnasium.error.ResetNeeded: a reset_mask before the first reset of all.
            gymnasium.error.ClosedEnvironmentError: the environment is closed.
        """
        mask = _reset_mask(options, self.num_envs)
        if self.closed:
            raise error.ClosedEnvironmentError("the environment is closed")
        before = None if mask is None else self._current()
        super().reset(seed=_checked_seed(seed))
        if before is None:
            state = self._reset_all(self._key())
        elif seed is None:
            state = self._reset_where(before, mask)
        else:
            state = self._reseed_where(before, mask, self._key())
        self._state = state
        infos: dict[str, Any] = {}
        _add(infos, self._counters(state), np.ones(self.num_envs, bool) if mask is None else mask)
        return np.asarray(state.obs), infos

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One control step of all environments.

        Args:
            actions: (num_envs, action_size).

        Returns:
            Observations (num_envs, observation_size); rewards, terminations and truncations (num_envs,); infos.

        Raises:
            TypeError, ValueError: actions of another type, shape or dtype.
            gymnasium.error.ResetNeeded: there was no reset, or with DISABLED an environment's episode has ended.
            gymnasium.error.ClosedEnvironmentError: the environment is closed.
        """
        before = self._current()
        given = _checked_actions(actions, (self.num_envs, self.env.action_size), self.env.dtype)
        stepped, advance = np.ones(self.num_envs, bool), self._step
        if self.autoreset_mode is not AutoresetMode.SAME_STEP and (ended := _done(before)).any():
            if self.autoreset_mode is AutoresetMode.DISABLED:
                which = np.flatnonzero(ended).tolist()
                raise error.ResetNeeded(f"reset_mask: the episodes of environments {which} ended and were not reset")
            stepped, advance = ~ended, self._step_or_reset
        self._state = state = advance(before, given)
        infos: dict[str, Any] = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and (ended := _done(state)).any():
            self._add_final(infos, state, ended)
            stepped &= ~ended
        _add(infos, self._quantities(state), stepped)
        _add(infos, self._counters(state), np.ones(self.num_envs, bool))
        flags = np.asarray(state.terminated), np.asarray(state.truncated)
        return np.asarray(state.obs), np.asarray(state.reward), *flags, infos

    def close_extras(self, **kwargs: Any) -> None:
        """Let go of the state."""
        self._state = None

    def _key(self) -> jax.Array:
        return jax.random.key(int(self.np_random.integers(1 << 31)))

    def _counters(self, state: State) -> dict[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in state.info.items() if name not in self.env.task.info}

    def _quantities(self, state: State) -> dict[str, np.ndarray]:
        """The task's info and metrics; NAME[0], NAME[1], ... as one array."""
        quantities: dict[str, Any] = {}
        for name, value in ({n: state.info[n] for n in self.env.task.info} | state.metrics).items():
            vector, bracket, _ = name.partition("[")
            if bracket:
                quantities.setdefault(vector, []).append(value)
            else:
                quantities[name] = np.asarray(value)
        return {n: np.stack(v, axis=1) if isinstance(v, list) else v for n, v in quantities.items()}

    def _add_final(self, infos: dict[str, Any], state: State, ended: np.ndarray) -> None:
        """What the episodes that this step ended came to, in the form that SyncVectorEnv gives it."""
        final_obs = np.full(self.num_envs, None, dtype=object)
        observations = np.asarray(state.final_obs)
        for i in np.flatnonzero(ended):
            final_obs[i] = observations[i]
        final_info: dict[str, Any] = {}
        _add(final_info, self._quantities(state) | self._counters(state), ended)
        infos |= {"final_obs": final_obs, "_final_obs": ended.copy()}
        infos |= {"final_info": final_info, "_final_info": ended.copy()}


# ---- What is jitted

_HIDDEN = ("qpos", "qvel", "model", "internal")
_SEEN = ("obs", "reward", "terminated", "truncated", "final_obs", "info", "metrics")


def _in_place(change: Callable[..., State]) -> Callable[..., State]:
    """`change(state, *more)`, jitted to overwrite what of the state the caller never sees, and to leave the rest."""

    @functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
    def changed(hidden: dict[str, Any], seen: dict[str, Any], env: str, *more: Any) -> State:
        return change(State(**hidden, **seen, env=env), *more)

    def call(state: State, *more: Any) -> State:
        parts = vars(state)
        hidden, seen = ({name: parts[name] for name in names} for names in (_HIDDEN, _SEEN))
        return changed(hidden, seen, state.env, *more)

    return call


def _step_or_reset(env: Env, state: State, actions: jax.Array) -> State:
    """A step where the episode goes on; a reset, with reward 0, where it ended."""
    ended = state.done
    return _chosen(ended, _reset_where(env, state, ended), env.step(state, actions))


def _reset_where(env: Env, state: State, mask: jax.Array) -> State:
    state = env.reset_where(state, mask)
    return state.replace(
        reward=jnp.where(mask, 0, state.reward),
        terminated=state.terminated & ~mask,
        truncated=state.truncated & ~mask,
    )


def _reseed_where(env: Env, state: State, mask: jax.Array, key: jax.Array) -> State:
    fresh = env.reset(key)
    return _chosen(mask, fresh.replace(model=state.model), state)


def _chosen(mask: jax.Array, there: State, elsewhere: State) -> State:
    """Environment by environment one state or the other."""

    def chosen(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(chosen, there, elsewhere)


# ---- Infos


def _done(state: State) -> np.ndarray:
    return np.asarray(state.terminated) | np.asarray(state.truncated)


def _add(infos: dict[str, Any], values: Mapping[str, np.ndarray], mask: np.ndarray) -> None:
    """Add values to Gymnasium's vector infos, for the environments in the mask; nothing if there is none."""
    if not mask.any():
        return
    everywhere = mask.all()
    for name, value in values.items():
        where = mask.reshape(-1, *[1] * (value.ndim - 1))
        infos[name] = value if everywhere else np.where(where, value, np.zeros((), value.dtype))
        infos["_" + name] = mask.copy()


# ---- Checks


def _mode(mode: str | AutoresetMode) -> AutoresetMode:
    try:
        return AutoresetMode(mode)
    except ValueError:
        known = ", ".join(f"AutoresetMode.{each.name} or {each.value!r}" for each in AutoresetMode)
        raise ValueError(f"autoreset_mode: expected {known}, got {mode!r}") from None


def _env(source: str | AnyTask | Env, num_envs: int | None, autoreset: bool, arguments: Mapping[str, Any]) -> Env:
    """The environments that `GymVectorEnv` was asked for."""
    if isinstance(source, Env):
        if arguments:
            raise TypeError(f"env_or_name: an Env has its arguments already, got {list(arguments)} beside it")
        if num_envs not in (None, source.num_envs):
            raise ValueError(f"num_envs: expected that of the Env, {source.num_envs}, got {num_envs!r}")
        if source.autoreset is not autoreset:
            raise ValueError(
                f"env_or_name: expected an Env made with autoreset={autoreset}, "
                f"as autoreset_mode asks for, got one with autoreset={source.autoreset}"
            )
        return source
    if not isinstance(source, str | AnyTask):
        raise TypeError(f"env_or_name: expected the name of a robot, a Task or an Env, got {type(source).__name__}")
    if "autoreset" in arguments:
        raise TypeError("autoreset: autoreset_mode says it")
    return make(source, 1 if num_envs is None else num_envs, autoreset=autoreset, **arguments)


def _check_names(env: Env) -> None:
    both = sorted(set(env.task.info) & set(env.task.metrics))
    if both:
        raise ValueError(f"env_or_name: Gymnasium's infos hold info and metrics, but the task has {both} in both")


def _checked_actions(actions: Any, shape: tuple[int, int], dtype: np.dtype) -> Any:
    """NumPy's array stays as it is, if it is right: a jitted call converts it faster than `checked` does."""
    if isinstance(actions, np.ndarray) and actions.shape == shape and actions.dtype == dtype:
        return actions
    return checked("actions", actions, shape, dtype)


def _checked_seed(seed: Any) -> int | None:
    if seed is None:
        return None
    if isinstance(seed, (bool, np.bool_)) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed: expected one whole number for the batch or None, got {seed!r}")
    if seed < 0:
        raise ValueError(f"seed: expected a whole number of at least 0, got {seed}")
    return int(seed)


def _reset_mask(options: dict[str, Any] | None, num_envs: int) -> np.ndarray | None:
    """The environments that `options` of `reset` names; None: all."""
    if not options:
        return None
    if set(options) != {"reset_mask"}:
        raise ValueError(f"options: expected no others than 'reset_mask', got {list(options)}")
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        got = f"one of {mask.dtype}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise TypeError(f"options['reset_mask']: expected a NumPy array of bool, got {got}")
    if mask.shape != (num_envs,):
        raise ValueError(f"options['reset_mask']: expected the shape ({num_envs},), got {mask.shape}")
    if not mask.any():
        raise ValueError("options['reset_mask']: expected at least one True, got none")
    return mask
