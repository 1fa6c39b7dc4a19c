"""MlpPolicy: a network that acts, as a JAX function of its parameters and as a kernel of an environment's stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from brax_concurrent.envs.policy_kernel import ACTIVATIONS, BLOCK, INPUTS, LIMIT, OUTPUTS, PolicyKernel, limited

if TYPE_CHECKING:
    from brax_concurrent.envs.base import Env
    from brax_concurrent.envs.task import KernelTask

_JAX_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "swish": jax.nn.swish,
}
_HEAD_GAIN = 0.01  # actions begin near the middle; Andrychowicz et al., "What Matters In On-Policy RL?" (ICLR 2021)


@dataclass(frozen=True)
class MlpPolicy:
    """A Gaussian policy whose mean is a multilayer perceptron; its standard deviations do not depend on the state.

    It is a policy like any other for `rollout`, `policy(params, obs, key) -> (action, log_prob)`, differentiable in
    `params`. `rollout` can also make it a kernel of the environment's stream, see there. Both draw the same normal
    numbers, a function of the key, the environment's place in the batch and the action's component; so in a `shard_map`
    give each device a key of its own.

    `params` is a dict: `layers`, a tuple of (weights (inputs, outputs), bias (outputs,)), the last one giving the
    actions' means; `log_std` (action_size,); with `normalize_obs` also `obs_mean` and `obs_std` (observation_size,).
    All have the environment's dtype.

    Args:
        hidden: widths of the hidden layers, each at least 1; () for a linear policy.
        activation: behind each hidden layer, "tanh", "relu" or "swish".
        normalize_obs: whether the network gets (obs - obs_mean) / obs_std, clipped to +-10. No gradients go there.
        scale_actions: whether the policy's actions are in units in which the action space is [-1, 1]: `rollout` then
            steps the environment with the action brought into its space and clipped to it, and keeps the policy's own.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """

    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    normalize_obs: bool = False
    scale_actions: bool = False

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "hidden", tuple(self.hidden))
        except TypeError:
            raise TypeError(f"hidden: expected a sequence of widths such as (64, 64), got {self.hidden!r}") from None
        for width in self.hidden:
            if isinstance(width, bool) or not isinstance(width, int) or width < 1:
                raise ValueError(f"hidden: expected whole numbers of at least 1, got {self.hidden}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {tuple(ACTIVATIONS)}, got {self.activation!r}")
        for name in ("normalize_obs", "scale_actions"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected True or False, got {getattr(self, name)!r}")

    # -- parameters --------------------------------------------------------------------------------------------------

    def init(self, key: jax.Array, env: Env) -> dict[str, Any]:
        """Fresh parameters for an environment: orthogonal weights, zero biases, standard deviations of 1.

        Args:
            key: a JAX random key.
            env: one robot's environment (of a MixedEnv one of `env.envs`).
        """
        if not isinstance(env.observation_size, int):
            raise TypeError("env: expected an environment of one robot, got one of several: take one of env.envs")
        sizes = (env.observation_size, *self.hidden, env.action_size)
        gains = [math.sqrt(2.0)] * len(self.hidden) + [_HEAD_GAIN]
        layers = []
        for own, gain, inputs, outputs in zip(
            jax.random.split(key, len(gains)), gains, sizes[:-1], sizes[1:], strict=True
        ):
            weights = jax.nn.initializers.orthogonal(gain)(own, (inputs, outputs), env.dtype)
            layers.append((weights, jnp.zeros(outputs, env.dtype)))
        params: dict[str, Any] = {"layers": tuple(layers), "log_std": jnp.zeros(env.action_size, env.dtype)}
        if self.normalize_obs:
            params["obs_mean"] = jnp.zeros(env.observation_size, env.dtype)
            params["obs_std"] = jnp.ones(env.observation_size, env.dtype)
        return params

    def check(self, params: Any, observation_size: int, action_size: int, dtype: Any) -> None:
        """Raise TypeError or ValueError, naming the layer, unless `params` are this policy's for such sizes."""
        names = {"layers", "log_std", *(("obs_mean", "obs_std") if self.normalize_obs else ())}
        if not isinstance(params, Mapping) or set(params) != names:
            got = sorted(params) if isinstance(params, Mapping) else type(params).__name__
            raise TypeError(f"params: expected a dict of {sorted(names)}, got {got}")
        sizes = (observation_size, *self.hidden, action_size)
        if not isinstance(params["layers"], (tuple, list)) or len(params["layers"]) != len(sizes) - 1:
            what = params["layers"]
            got = f"{len(what)} of them" if isinstance(what, (tuple, list)) else type(what).__name__
            raise ValueError(f"params['layers']: expected {len(sizes) - 1} layers, pairs (weights, bias), got {got}")
        for i, layer in enumerate(params["layers"]):
            if not isinstance(layer, (tuple, list)) or len(layer) != 2:
                raise TypeError(f"params['layers'][{i}]: expected a pair (weights, bias), got {type(layer).__name__}")
            _check_array(f"params['layers'][{i}] weights", layer[0], (sizes[i], sizes[i + 1]), dtype)
            _check_array(f"params['layers'][{i}] bias", layer[1], (sizes[i + 1],), dtype)
        _check_array("params['log_std']", params["log_std"], (action_size,), dtype)
        for name in names & {"obs_mean", "obs_std"}:
            _check_array(f"params[{name!r}]", params[name], (observation_size,), dtype)

    # -- as a function of JAX ----------------------------------------------------------------------------------------

    def __call__(self, params: Any, obs: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draw actions.

        Args:
            params: see the class.
            obs: (num_envs, observation_size).
            key: a JAX random key.

        Returns:
            action (num_envs, action_size), and log_prob (num_envs,), its log density.
        """
        mean = self.mean(params, obs)
        z = self.normals(key, mean.shape[0], mean.shape[1], mean.dtype)
        action = mean + jnp.exp(params["log_std"]) * z
        return action, -0.5 * jnp.square(z).sum(axis=1) - _log_normalizer(params["log_std"])

    def mean(self, params: Any, obs: jax.Array) -> jax.Array:
        """The means (num_envs, action_size) of the actions for observations (num_envs, observation_size)."""
        if not hasattr(obs, "ndim") or obs.ndim != 2:
            raise ValueError(f"obs: expected (num_envs, observation_size), got {getattr(obs, 'shape', type(obs))}")
        actions = params["log_std"].shape[0] if isinstance(params, Mapping) and "log_std" in params else 0
        self.check(params, obs.shape[1], actions, obs.dtype)
        x = obs
        if self.normalize_obs:
            mean, std = (jax.lax.stop_gradient(params[name]) for name in ("obs_mean", "obs_std"))
            x = jnp.clip((x - mean) * (1.0 / std), -LIMIT, LIMIT)
        for i, (weights, bias) in enumerate(params["layers"]):
            # In full precision also where a GPU's default would round the factors of products to fewer bits.
            x = jnp.matmul(x, weights, precision=jax.lax.Precision.HIGHEST) + bias
            if i < len(self.hidden):
                x = _JAX_ACTIVATIONS[self.activation](x)
        return x

    def log_prob(self, params: Any, obs: jax.Array, action: jax.Array) -> jax.Array:
        """Log density (num_envs,) of actions (num_envs, action_size) that were drawn before."""
        z = (action - self.mean(params, obs)) * jnp.exp(-params["log_std"])
        return -0.5 * jnp.square(z).sum(axis=1) - _log_normalizer(params["log_std"])

    def entropy(self, params: Any) -> jax.Array:
        """Differential entropy of the actions, nats; the same for every observation."""
        return _log_normalizer(params["log_std"]) + 0.5 * params["log_std"].shape[0]

    @staticmethod
    def normals(key: jax.Array, num_envs: int, count: int, dtype: Any = jnp.float32) -> jax.Array:
        """(num_envs, count) standard normal numbers: Threefry of (environment, pair), then Box and Muller.

        Every number is a function of the key, its row and its column only. See envs/random.py for the generator.
        """
        pairs = -(-count // 2)
        env, pair = jnp.meshgrid(jnp.arange(num_envs), jnp.arange(pairs), indexing="ij")
        counter = jnp.stack([env, pair]).astype(jnp.uint32)
        first, second = threefry_2x32(key_words(key), counter.reshape(-1)).reshape(counter.shape)
        radius = jnp.sqrt(-2.0 * jnp.log(_uniform01(first, dtype)))
        angle = 2.0 * math.pi * _uniform01(second, dtype)
        both = jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=-1)
        return both.reshape(num_envs, 2 * pairs)[:, :count]

    # -- as a kernel -------------------------------------------------------------------------------------------------

    def kernel(self, task: KernelTask, split: bool = False) -> PolicyKernel:
        """The same as a kernel of a task's stream, or with `split` as several."""
        return PolicyKernel(
            task.observation_size, task.action_size, self.hidden, self.activation, self.normalize_obs, split
        )

    def packed(self, params: Any, task: KernelTask) -> dict[str, jax.Array]:
        """`params` in the arrays that the kernel reads (policy_kernel.py says how they lie there)."""
        blocks = []
        for layer, (weights, bias) in zip(self.kernel(task).layers, params["layers"], strict=True):
            rows, columns = layer.input_blocks * INPUTS, layer.output_blocks * OUTPUTS
            whole = jnp.concatenate([weights, bias[None]])
            whole = jnp.pad(whole, ((0, rows - whole.shape[0]), (0, columns - whole.shape[1])))
            split = whole.reshape(layer.input_blocks, INPUTS, layer.output_blocks, OUTPUTS)
            blocks.append(split.transpose(2, 0, 1, 3).reshape(-1, BLOCK))
        log_std = params["log_std"]
        arrays = {
            "policy_weights": jnp.concatenate(blocks),
            "policy_head": jnp.append(jnp.exp(log_std), _log_normalizer(log_std))[None],
        }
        if self.normalize_obs:
            arrays["policy_statistics"] = jnp.stack([params["obs_mean"], 1.0 / params["obs_std"]])
        return arrays

    def applied(self, task: KernelTask) -> Callable[[list[Any]], list[Any]] | None:
        """What makes of the policy's action the one that the environment gets, component by component; None: nothing.

        Raises:
            ValueError: `scale_actions`, and the action space has no bounds.
        """
        if not self.scale_actions:
            return None
        low, high = task.action_low.astype(np.float64), task.action_high.astype(np.float64)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError(f"scale_actions: expected bounds of all actions of {task.name}, got {low} to {high}")
        middle, half = (low + high) / 2, (high - low) / 2
        bounds = list(zip(*(x.tolist() for x in (middle, half, low, high)), strict=True))

        def apply(action: list[Any]) -> list[Any]:
            return [limited(m + h * a, lo, hi) for a, (m, h, lo, hi) in zip(action, bounds, strict=True)]

        return apply


def applied_rows(policy: MlpPolicy, task: KernelTask, action: jax.Array) -> jax.Array:
    """`MlpPolicy.applied` to actions (num_envs, action_size)."""
    if policy.applied(task) is None:
        return action
    low, high = (jnp.asarray(bound, action.dtype) for bound in (task.action_low, task.action_high))
    return jnp.clip((low + high) / 2 + (high - low) / 2 * action, low, high)


def key_words(key: jax.Array) -> jax.Array:
    """(2,) uint32: a key as Threefry's; of a key of another generator two words that it gives."""
    words = jax.random.key_data(key)
    return words if words.shape == (2,) else jax.random.bits(key, (2,), jnp.uint32)


def step_keys(key: jax.Array, length: int) -> jax.Array:
    """(length,) keys, one for each step of a rollout; the policy's kernel has the same."""
    own = jax.random.wrap_key_data(key_words(key), impl="threefry2x32")
    return jax.vmap(lambda step: jax.random.fold_in(own, step))(jnp.arange(length, dtype=jnp.uint32))


def _log_normalizer(log_std: jax.Array) -> jax.Array:
    return log_std.sum() + 0.5 * math.log(2.0 * math.pi) * log_std.shape[0]


def _uniform01(bits: jax.Array, dtype: Any) -> jax.Array:
    """kernels.ops.uniform01 of uint32: on (0, 1)."""
    return ((bits >> 9).astype(dtype) * 2.0 + 1.0) * 2.0**-24


def _check_array(name: str, value: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{name}: expected an array {jnp.dtype(dtype).name}{list(shape)}, got {type(value).__name__}")
    if tuple(value.shape) != shape or value.dtype != dtype:
        got = f"{jnp.dtype(value.dtype).name}{list(value.shape)}"
        raise ValueError(f"{name}: expected {jnp.dtype(dtype).name}{list(shape)}, got {got}")
