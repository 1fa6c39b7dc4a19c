"""Proximal policy optimisation: collect with the environment's own scan, learn from the batch in minibatches.

What the actor answers is a sample of a Gaussian, in units in which every action's range is [-1, 1]. The environment
gets it clipped to its action space, in its own units: Gymnasium's tasks charge for the action as given, and so for one
that the space holds. The loss sees the sample itself, whose density is known.

Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from brax_concurrent.envs.base import Env
from brax_concurrent.envs.state import State
from brax_concurrent.training import networks, statistics
from brax_concurrent.training.policy import applied_action
from brax_concurrent.training.rollout import Rollout, rollout
from brax_concurrent.training.statistics import Statistics

Params = dict[str, Any]
"""{"actor": layers, "log_std": (action_size,), "critic": layers}; layers as in networks.py."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What a training run is made with.

    Attributes:
        steps: environment steps in all, unless the run is asked for another number.
        num_envs: environments that are simulated at once.
        unroll_length: control steps that each takes between two times of learning.
        num_minibatches: pieces of a batch, of which each is one step of the optimiser; they divide
            num_envs * unroll_length.
        num_epochs: times that each batch is gone through.
        learning_rate, final_learning_rate: of Adam, at the start and, linearly in between, at the end.
        discount: of rewards, per control step.
        gae_lambda: of generalised advantage estimation.
        clip_range: how far the probability ratio may leave 1 before it stops to be followed.
        entropy_cost, value_cost: weights of the entropy and of the value's squared error in the loss.
        max_gradient_norm: where the gradient's norm is clipped.
        reward_scaling: what rewards are multiplied by for the critic; returns that are reported are not.
        initial_std: of actions, as a part of half their range.
        actor_layers, critic_layers: widths of the hidden layers.
        activation: "tanh" or "swish".
        evaluations: how often the policy is evaluated, and a checkpoint written, over the run.
        eval_envs: episodes of an evaluation.

    Raises:
        ValueError: a value out of its range; the message names it.
    """

    steps: int = 10_000_000
    num_envs: int = 2048
    unroll_length: int = 20
    num_minibatches: int = 32
    num_epochs: int = 8
    learning_rate: float = 3e-4
    final_learning_rate: float = 0.0
    discount: float = 0.97
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    entropy_cost: float = 1e-3
    value_cost: float = 0.5
    max_gradient_norm: float = 1.0
    reward_scaling: float = 1.0
    initial_std: float = 0.6
    actor_layers: tuple[int, ...] = (64, 64)
    critic_layers: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    evaluations: int = 20
    eval_envs: int = 64

    def __post_init__(self) -> None:
        """Check every value."""
        for name in _WHOLE:
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int) or given < 1:
                raise ValueError(f"{name}: expected a whole number of at least 1, got {given!r}")
        for name, (low, high) in _RANGES.items():
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, (int, float)) or not low <= given <= high:
                raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, got {given!r}")
        for name in ("actor_layers", "critic_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in getattr(self, name)):
                raise ValueError(f"{name}: expected whole numbers of at least 1, got {getattr(self, name)!r}")
        if self.activation not in networks.ACTIVATIONS:
            raise ValueError(f"activation: expected one of {list(networks.ACTIVATIONS)}, got {self.activation!r}")
        if self.batch_size % self.num_minibatches:
            text = f"num_envs * unroll_length, {self.batch_size}, in equal parts"
            raise ValueError(f"num_minibatches: expected a number that divides {text}, got {self.num_minibatches}")

    @property
    def batch_size(self) -> int:
        """Environment steps between two times of learning."""
        return self.num_envs * self.unroll_length


_WHOLE = ("steps", "num_envs", "unroll_length", "num_minibatches", "num_epochs", "evaluations", "eval_envs")
_RANGES = {
    "learning_rate": (0.0, 1.0),
    "final_learning_rate": (0.0, 1.0),
    "discount": (0.0, 1.0),
    "gae_lambda": (0.0, 1.0),
    "clip_range": (1e-6, 10.0),
    "entropy_cost": (0.0, 10.0),
    "value_cost": (0.0, 100.0),
    "max_gradient_norm": (1e-6, 1e6),
    "reward_scaling": (1e-6, 1e6),
    "initial_std": (1e-3, 10.0),
}


class Learner(NamedTuple):
    """What learning carries from batch to batch."""

    params: Params
    optimizer: Any
    statistics: Statistics


class Tally(NamedTuple):
    """Returns and lengths (num_envs,) of the episodes that are going on; the return is NaN if its start is unknown."""

    returns: jax.Array
    lengths: jax.Array


class Episodes(NamedTuple):
    """Sums over the episodes that ended: how many, their returns, their lengths; each ()."""

    number: jax.Array
    returns: jax.Array
    lengths: jax.Array


# ---- The policy in an environment


def init_params(key: jax.Array, observation_size: int, action_size: int, config: Config) -> Params:
    """An actor whose mean is near 0 everywhere, and a critic."""
    actor_key, critic_key = jax.random.split(key)
    return {
        "actor": networks.init_mlp(actor_key, (observation_size, *config.actor_layers, action_size), 0.01),
        "log_std": jnp.full(action_size, math.log(config.initial_std), jnp.float32),
        "critic": networks.init_mlp(critic_key, (observation_size, *config.critic_layers, 1), 1.0),
    }


def sampling_policy(config: Config) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`policy(learner, obs, key) -> (sample, log_prob)` for `rollout`."""

    def policy(learner: Learner, obs: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        params = learner.params
        mean = networks.mlp(params["actor"], statistics.normalize(learner.statistics, obs), config.activation)
        sample = mean + jnp.exp(params["log_std"]) * jax.random.normal(key, mean.shape)
        return sample, networks.log_prob(mean, params["log_std"], sample)

    return policy


def make_collect(env: Env, config: Config) -> Callable[..., tuple[Rollout, Tally, Episodes]]:
    """`collect(learner, state, tally, key)`: a batch, and what became of the episodes."""
    policy, applied = sampling_policy(config), applied_action(env)

    def collect(learner: Learner, state: State, tally: Tally, key: jax.Array) -> tuple[Rollout, Tally, Episodes]:
        batch = rollout(env, policy, learner, state, key, config.unroll_length, applied=applied)
        return batch, *_counted(tally, batch)

    return collect


def _counted(tally: Tally, batch: Rollout) -> tuple[Tally, Episodes]:
    """Follow the episodes through a batch."""

    def one(carry: tuple[Tally, Episodes], step: tuple[jax.Array, jax.Array]) -> tuple[tuple[Tally, Episodes], None]:
        going, ended = carry
        reward, done = step
        returns, lengths = going.returns + reward, going.lengths + 1
        counts = done & ~jnp.isnan(returns)
        ended = Episodes(
            ended.number + counts.sum(),
            ended.returns + jnp.where(counts, returns, 0).sum(),
            ended.lengths + jnp.where(counts, lengths, 0).sum(),
        )
        return (Tally(jnp.where(done, 0, returns), jnp.where(done, 0, lengths)), ended), None

    zero = jnp.zeros((), jnp.int32)
    none = Episodes(zero, jnp.zeros((), batch.reward.dtype), zero)
    return lax.scan(one, (tally, none), (batch.reward, batch.terminated | batch.truncated))[0]


# ---- Learning from a batch


def gae(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    discount: float,
    gae_lambda: float,
) -> jax.Array:
    """Advantages by generalised advantage estimation; all arrays are (length, num_envs).

    Args:
        reward, terminated, truncated: what each step gave.
        value: the critic's of the observation before the step.
        next_value: the critic's of the observation at the step's end, before any reset. It stands for the rewards that
            would have followed, also where the episode was truncated, but not where it terminated.
        discount, gae_lambda: per step.

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (ICLR 2016);
    Pardo et al., "Time Limits in Reinforcement Learning" (ICML 2018).
    """
    error = reward + discount * jnp.where(terminated, 0, next_value) - value
    goes_on = ~(terminated | truncated)

    def backwards(later: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        error, goes_on = step
        advantage = error + discount * gae_lambda * jnp.where(goes_on, later, 0)
        return advantage, advantage

    return lax.scan(backwards, jnp.zeros_like(error[0]), (error, goes_on), reverse=True)[1]


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Clipped gradients through Adam, all as one vector: on a GPU each array of its own would cost launches.

    What it gives is multiplied by the learning rate where it is applied.
    """
    clip = optax.clip_by_global_norm(config.max_gradient_norm)
    return optax.flatten(optax.chain(clip, optax.scale_by_adam(eps=1e-5)))


class _Samples(NamedTuple):
    """What the loss needs of each step: (batch_size, ...)."""

    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    target: jax.Array


def loss(params: Params, samples: _Samples, config: Config) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The clipped surrogate, the value's error and the entropy; and what is logged of them."""
    mean = networks.mlp(params["actor"], samples.observation, config.activation)
    log_ratio = networks.log_prob(mean, params["log_std"], samples.action) - samples.log_prob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - config.clip_range, 1.0 + config.clip_range)
    policy_loss = -jnp.minimum(ratio * samples.advantage, clipped * samples.advantage).mean()
    estimate = networks.value(params["critic"], samples.observation, config.activation)
    value_loss = 0.5 * jnp.square(estimate - samples.target).mean()
    entropy = networks.entropy(params["log_std"])
    parts = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "kl": (ratio - 1.0 - log_ratio).mean(),
        "clipped": (jnp.abs(ratio - 1.0) > config.clip_range).mean(),
    }
    return policy_loss + config.value_cost * value_loss - config.entropy_cost * entropy, parts


def make_learn(config: Config) -> Callable[..., tuple[Learner, dict[str, jax.Array], dict[str, jax.Array]]]:
    """`learn(learner, batch, learning_rate, key)`: the learner after a batch, metrics, and when what became not finite.

    The observations' statistics take the batch in first; the ratio's denominators are the densities that the samples
    were really drawn with. The last of the three is for `first_not_finite`.
    """
    optimizer = make_optimizer(config)

    def step(carry: tuple[Params, Any], samples: _Samples, rate: jax.Array) -> tuple[tuple[Params, Any], Any]:
        params, state = carry
        gradient, parts = jax.grad(loss, has_aux=True)(params, samples, config)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda update: -rate * update, updates))
        return (params, state), parts | {"gradient_norm": optax.tree.norm(gradient)}

    def learn(
        learner: Learner, batch: Rollout, rate: jax.Array, key: jax.Array
    ) -> tuple[Learner, dict[str, jax.Array], dict[str, jax.Array]]:
        seen = statistics.update(learner.statistics, batch.obs)
        samples, metrics, bad = _prepared(learner.params, seen, batch, config)

        def minibatch(carry: tuple[Params, Any], which: jax.Array) -> tuple[tuple[Params, Any], Any]:
            return step(carry, jax.tree.map(lambda x: x[which], samples), rate)

        def epoch(carry: tuple[Params, Any], epoch_key: jax.Array) -> tuple[tuple[Params, Any], Any]:
            order = jax.random.permutation(epoch_key, config.batch_size)
            return lax.scan(minibatch, carry, order.reshape(config.num_minibatches, -1))

        keys = jax.random.split(key, config.num_epochs)
        (params, state), parts = lax.scan(epoch, (learner.params, learner.optimizer), keys)
        metrics |= jax.tree.map(jnp.mean, parts) | {"std": jnp.exp(params["log_std"]).mean()}
        bad |= {name: _when(parts[name].reshape(-1), 1) for name in _CAUSES if name in parts}
        last = 1 + config.num_epochs * config.num_minibatches
        bad |= {name: _when(leaf.reshape(1, -1), last) for name, leaf in networks.named(params, "parameter").items()}
        return Learner(params, state, seen), metrics, bad

    return learn


def _prepared(
    params: Params, seen: Statistics, batch: Rollout, config: Config
) -> tuple[_Samples, dict[str, jax.Array], dict[str, jax.Array]]:
    """A batch as the loss needs it, what is logged of it, and what of it is not finite."""
    observation = statistics.normalize(seen, batch.obs)
    estimate = networks.value(params["critic"], observation, config.activation)
    next_estimate = networks.value(params["critic"], statistics.normalize(seen, batch.final_obs), config.activation)
    reward = config.reward_scaling * batch.reward
    ends = batch.terminated, batch.truncated
    advantage = gae(reward, estimate, next_estimate, *ends, config.discount, config.gae_lambda)
    target = advantage + estimate
    arrays = {name: getattr(batch, name.removeprefix("batch.")) for name in _CAUSES if name.startswith("batch.")}
    arrays |= {"value": estimate, "advantage": advantage, "observations' variance": seen.variance}
    bad = {name: _when(array.reshape(1, -1), 0) for name, array in arrays.items()}
    explained = 1.0 - (target - estimate).var() / (target.var() + 1e-8)
    normal = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    samples = _Samples(observation, batch.action, batch.log_prob, normal, target)
    flat = jax.tree.map(lambda x: x.reshape(config.batch_size, *x.shape[2:]), samples)
    return flat, {"explained_variance": explained}, bad


# ---- What is not finite

_NEVER = 2**31 - 1
_CAUSES = (
    *(
        "batch.obs",
        "observations' variance",
        "batch.action",
        "batch.log_prob",
        "batch.reward",
        "batch.final_obs",
        "value",
        "advantage",
    ),
    *("policy_loss", "value_loss", "entropy", "gradient_norm"),
)
"""An earlier one, if it is not finite, makes the later ones so; parameters come last."""


def _when(array: jax.Array, first: int) -> jax.Array:
    """`first` plus the index of the first row that is not all finite; _NEVER if there is none."""
    bad = ~jnp.isfinite(array.reshape(len(array), -1)).all(-1)
    return jnp.where(bad.any(), first + jnp.argmax(bad), _NEVER).astype(jnp.int32)


def first_not_finite(bad: dict[str, Any]) -> str | None:
    """The name of what was not finite before all else, None if all is finite; `bad` is what `learn` returns last."""
    order = {name: i for i, name in enumerate(_CAUSES)}
    found = [(int(when), order.get(name, len(order)), name) for name, when in bad.items() if when != _NEVER]
    return min(found)[2] if found else None
