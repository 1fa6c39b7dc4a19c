"""Collecting experience: one jitted scan of policy and environment."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax

from brax_concurrent.envs.base import Env, checked_key
from brax_concurrent.envs.mixed import MixedEnv, MixedState
from brax_concurrent.envs.policy import MlpPolicy, applied_rows, step_keys
from brax_concurrent.envs.state import State

Policy = Callable[[Any, Any, jax.Array], tuple[Any, Any]]
"""`policy(params, obs, key) -> (action, log_prob)`: obs (num_envs, observation_size), log_prob (num_envs,). With
different robots in one batch all three are dicts of such arrays by robot."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A batch of transitions, time first: `(length, num_envs, ...)`; of a MixedEnv, dicts of such arrays by robot.

    Attributes:
        obs: what the policy saw. action, log_prob: what it answered.
        reward, terminated, truncated: what the step gave.
        final_obs: observation at the end of the step, before any reset: bootstrap from it where `truncated`.
        state: the environment's state after the last step, to go on from.
    """

    obs: Any
    action: Any
    log_prob: Any
    reward: Any
    terminated: Any
    truncated: Any
    final_obs: Any
    state: Any


jax.tree_util.register_dataclass(Rollout, data_fields=[f.name for f in dataclasses.fields(Rollout)], meta_fields=[])


def rollout(
    env: Env | MixedEnv,
    policy: Policy,
    params: Any,
    state: State | MixedState,
    key: jax.Array,
    length: int,
    fused: bool | None = None,
    applied: Callable[[Any], Any] | None = None,
) -> Rollout:
    """Let a policy act for `length` control steps in all environments.

    The whole loop is one jitted `lax.scan`, or with `fused` one native call; calling again with the same `env`,
    `policy`, `length` and `applied` reuses it.

    Args:
        env: the environments.
        policy: `policy(params, obs, key) -> (action, log_prob)`, with obs (num_envs, observation_size), action
            (num_envs, action_size) and log_prob (num_envs,); with different robots in one batch all three are dicts by
            robot. Must be hashable (a function is) and traceable. Clip actions there, or by `applied`, if the task
            charges for them.
        params: the policy's parameters, any pytree.
        state: where to start.
        key: random key for the policy's draws.
        length: control steps, at least 1.
        fused: whether the policy is a kernel of the environment's stream. Then nobody waits between the steps for the
            slowest environment, and each tile of 32 goes on by itself. For an `MlpPolicy` and one robot, without a
            window or a CUDA graph, and without `trace`. The same normal numbers are drawn either way, so the results
            are the same up to the rounding of the policy's arithmetic. On a CPU it does not regroup environments. None:
            where the scheduler is "hw" and the rest allows it.
        applied: makes of the policy's action the one that the environment gets, such as a clipped one, where the
            batch is to keep the policy's own, which `log_prob` is of. Hashable and traceable. None: it gets the
            policy's own.

    Returns:
        A Rollout: obs, action, log_prob, reward, terminated, truncated and final_obs, each with time first, `(length,
        num_envs, ...)`, and `state` to go on from.

    Raises:
        TypeError: `env` is no environment of this package, `key` is no key, the policy returns something else, or is
            no MlpPolicy and `fused` is True.
        ValueError: length < 1, the policy returns arrays of a wrong shape, or `fused` is True and cannot be.
    """
    if not isinstance(env, (Env, MixedEnv)):
        raise TypeError(f"env: expected what bc.make returns, got {type(env).__name__}")
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"length: expected a whole number of at least 1, got {length!r}")
    if _is_fused(env, policy, fused, applied):
        return _stream(env, policy, length, params, state, checked_key(key))
    return _scan(env, policy, length, applied, params, state, checked_key(key))


def _is_fused(env: Env | MixedEnv, policy: Policy, fused: bool | None, applied: Any) -> bool:
    """Whether the policy is to be a kernel of the stream; TypeError or ValueError if it was asked to and cannot."""
    if fused not in (None, False, True):
        raise TypeError(f"fused: expected True, False or None, got {fused!r}")
    if not isinstance(policy, MlpPolicy):
        if fused:
            raise TypeError(f"fused: only an MlpPolicy can be part of the stream, got {type(policy).__name__}")
        return False
    if not isinstance(env, Env):
        hindrance = "several robots in one batch"
    elif applied is not None:
        hindrance = "an `applied` function"
    elif env._tracer is not None:
        hindrance = "an environment that records its control steps"
    elif env.scheduler in ("sw", "graph"):
        hindrance = f"scheduler {env.scheduler!r}, which puts one control step in order"
    else:
        return env.scheduler == "hw" if fused is None else fused
    if fused:
        raise ValueError(f"fused: not with {hindrance}")
    return False


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _stream(env: Env, policy: MlpPolicy, length: int, params: Any, state: State, key: jax.Array) -> Rollout:
    final, kept = env.unroll(policy, params, state, key, length)
    return Rollout(**kept, state=final)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _scan(
    env: Any,
    policy: Policy,
    length: int,
    applied: Callable[[Any], Any] | None,
    params: Any,
    state: Any,
    key: jax.Array,
) -> Rollout:
    def one(carry: Any, step_key: jax.Array) -> tuple[Any, tuple[Any, ...]]:
        answer: Any = policy(params, carry.obs, step_key)
        if not isinstance(answer, tuple) or len(answer) != 2:
            got = f"{len(answer)} values" if isinstance(answer, tuple) else "one value"
            raise TypeError(f"policy: expected a tuple (action, log_prob), got {got}")
        action, log_prob = answer
        _check_log_prob(env, log_prob)
        acted = applied_rows(policy, env.task, action) if isinstance(policy, MlpPolicy) else action
        new = env.step(carry, acted if applied is None else applied(acted))
        kept = (carry.obs, action, log_prob, new.reward, new.terminated, new.truncated, new.final_obs)
        return new, kept

    final, (obs, action, log_prob, reward, terminated, truncated, final_obs) = lax.scan(
        one, state, step_keys(key, length) if isinstance(policy, MlpPolicy) else jax.random.split(key, length)
    )
    return Rollout(obs, action, log_prob, reward, terminated, truncated, final_obs, final)


def _check_log_prob(env: Env | MixedEnv, log_prob: Any) -> None:
    if isinstance(env, Env):
        expected, got = {"log_prob": env.num_envs}, {"log_prob": log_prob}
    else:
        if not isinstance(log_prob, Mapping) or set(log_prob) != set(env.envs):
            got_robots = list(log_prob) if isinstance(log_prob, Mapping) else type(log_prob).__name__
            raise ValueError(f"policy: expected log_prob of the robots {list(env.envs)}, got {got_robots}")
        expected = {f"log_prob[{name!r}]": each.num_envs for name, each in env.envs.items()}
        got = {f"log_prob[{name!r}]": value for name, value in log_prob.items()}
    for name, num_envs in expected.items():
        if not hasattr(got[name], "shape"):
            raise TypeError(f"policy: expected {name} as an array of shape ({num_envs},), got {got[name]!r}")
        if got[name].shape != (num_envs,):
            raise ValueError(f"policy: expected {name} of shape ({num_envs},), got {got[name].shape}")
