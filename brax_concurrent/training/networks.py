"""Actor and critic as plain functions of plain parameters: a tuple of (weights, bias), one pair per layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Layer = tuple[jax.Array, jax.Array]
"""weights (inputs, outputs) and bias (outputs,)."""
Mlp = tuple[Layer, ...]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"tanh": jnp.tanh, "swish": jax.nn.swish}


def init_mlp(key: jax.Array, sizes: Sequence[int], last_scale: float) -> Mlp:
    """Orthogonal weights and zero biases.

    Args:
        key: random key.
        sizes: inputs, then the outputs of each layer.
        last_scale: how large the last layer's weights are; those of the others are scaled by sqrt(2).

    Source: Andrychowicz et al., "What Matters In On-Policy Reinforcement Learning?" (ICLR 2021), for small last layers.
    """
    keys = jax.random.split(key, len(sizes) - 1)
    layers = []
    for i, (layer_key, inputs, outputs) in enumerate(zip(keys, sizes[:-1], sizes[1:], strict=True)):
        scale = last_scale if i == len(keys) - 1 else math.sqrt(2.0)
        weights = jax.nn.initializers.orthogonal(scale)(layer_key, (inputs, outputs), jnp.float32)
        layers.append((weights, jnp.zeros(outputs, jnp.float32)))
    return tuple(layers)


def mlp(layers: Mlp, inputs: jax.Array, activation: str) -> jax.Array:
    """`inputs` (..., n) through all layers, with the activation between them and none after the last.

    In full single precision also where a GPU's default would round the factors of products to fewer bits.
    """
    x = inputs
    for i, (weights, bias) in enumerate(layers):
        x = jnp.matmul(x, weights, precision=jax.lax.Precision.HIGHEST) + bias
        if i < len(layers) - 1:
            x = ACTIVATIONS[activation](x)
    return x


def value(critic: Mlp, observation: jax.Array, activation: str) -> jax.Array:
    """The critic's estimate (...,) for normalised observations (..., n)."""
    return mlp(critic, observation, activation)[..., 0]


# ---- The Gaussian of actions, whose log standard deviations are parameters that do not depend on the observation


def log_prob(mean: jax.Array, log_std: jax.Array, sample: jax.Array) -> jax.Array:
    """Log density (...,) of samples (..., n) under a diagonal Gaussian."""
    squares = jnp.square((sample - mean) * jnp.exp(-log_std))
    return -0.5 * squares.sum(-1) - log_std.sum() - 0.5 * log_std.size * math.log(2.0 * math.pi)


def entropy(log_std: jax.Array) -> jax.Array:
    """Differential entropy of that Gaussian, nats."""
    return log_std.sum() + 0.5 * log_std.size * math.log(2.0 * math.pi * math.e)


def named(tree: Any, prefix: str) -> dict[str, jax.Array]:
    """A pytree's arrays by readable names, such as "actor.0.weights"."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts = [str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", "")))) for part in path]
        if len(parts) > 1:  # of a network: (layer, 0 or 1)
            parts[-1] = ("weights", "bias")[int(parts[-1])]
        found[".".join((prefix, *parts))] = leaf
    return found
