"""What a policy scores with deterministic actions: here, and in Gymnasium's own environments on MuJoCo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from brax_concurrent.envs.base import Env
from brax_concurrent.training.policy import Policy

_AT_ONCE = 32  # Gymnasium's environments in one vector environment


class Scores(NamedTuple):
    """Of each episode: return and length in control steps, both (episodes,)."""

    returns: np.ndarray
    lengths: np.ndarray

    @property
    def mean(self) -> float:
        """Of the returns."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Sample standard deviation of the returns; NaN of one episode."""
        return float(self.returns.std(ddof=1)) if len(self.returns) > 1 else float("nan")

    @property
    def standard_error(self) -> float:
        """Of the mean."""
        return self.std / float(np.sqrt(len(self.returns)))


def make_evaluate(env: Env) -> jax.stages.Wrapped:
    """`evaluate(policy, key)`, jitted: return and length (num_envs,) of each environment's first episode.

    Raises:
        ValueError: env was not made with autoreset.
    """
    if not env.autoreset:
        raise ValueError("env: expected one with autoreset")

    def unfinished(carry: Any) -> jax.Array:
        return carry[2].any()

    def evaluate(policy: Policy, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(carry: Any) -> Any:
            state, returns, going, lengths = carry
            state = env.step(state, policy(state.obs))
            return state, returns + going * state.reward, going & ~state.done, lengths + going

        start = (jnp.zeros(env.num_envs), jnp.ones(env.num_envs, bool), jnp.zeros(env.num_envs, jnp.int32))
        _, returns, _, lengths = jax.lax.while_loop(unfinished, step, (env.reset(key), *start))
        return returns, lengths

    return jax.jit(evaluate)


def score(policy: Policy, env: Env, seed: int = 0) -> Scores:
    """A first episode in each of our environments.

    Raises:
        PolicyError: the policy is for other observations or actions.
    """
    policy.check_fits(env.observation_size, env.action_size, env.name)
    device = jax.local_devices(backend="cpu" if env.backend == "cpu" else "gpu")[0]
    with jax.default_device(device):
        return Scores(*map(np.asarray, make_evaluate(env)(policy, jax.random.key(seed))))


def gymnasium_id(robot: str) -> str:
    """The id of the task's counterpart in Gymnasium.

    Raises:
        ValueError: it has none.
        ModuleNotFoundError: Gymnasium is not installed.
    """
    from brax_concurrent.training.gymnasium import IDS

    found = {name: identifier.partition("/")[2] for identifier, name in IDS.items() if identifier.endswith("-v5")}
    if robot not in found:
        raise ValueError(f"robot: Gymnasium has no counterpart of {robot!r}, only of {', '.join(sorted(found))}")
    return found[robot]


def score_in_gymnasium(policy: Policy, episodes: int, seed: int = 0) -> Scores:
    """Episodes in Gymnasium's environment, which MuJoCo itself simulates; episode i starts from seed + i.

    Raises:
        PolicyError: the policy is for other observations or actions.
        ValueError: Gymnasium has no such task.
        ModuleNotFoundError: Gymnasium is not installed.
    """
    import gymnasium

    name = gymnasium_id(policy.robot)
    act = jax.jit(lambda obs: policy(obs.astype(jnp.float32)))
    returns, lengths = np.zeros(episodes), np.zeros(episodes, int)
    for first in range(0, episodes, _AT_ONCE):
        some = slice(first, min(first + _AT_ONCE, episodes))
        with _quiet_compiler():
            envs: Any = gymnasium.make_vec(name, num_envs=some.stop - first, vectorization_mode="sync")
        try:
            observation, action = envs.single_observation_space.shape, envs.single_action_space.shape
            policy.check_fits(observation[0], action[0], f"Gymnasium's {name}")
            _first_episodes(envs, act, seed + first, returns[some], lengths[some])
        finally:
            envs.close()
    return Scores(returns, lengths)


@contextlib.contextmanager
def _quiet_compiler() -> Iterator[None]:
    """Without MuJoCo's remark, for every environment, that Gymnasium's half_cheetah.xml uses what is deprecated."""
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


def _first_episodes(envs: Any, act: Callable[..., Any], seed: int, returns: np.ndarray, lengths: np.ndarray) -> None:
    """Add each environment's first episode to `returns` and `lengths`, which are zeros."""
    obs, _ = envs.reset(seed=seed)
    going = np.ones(len(returns), bool)
    while going.any():
        obs, reward, terminated, truncated, _ = envs.step(np.asarray(act(obs.astype(np.float32))))
        returns += going * reward
        lengths += going
        going &= ~(terminated | truncated)
