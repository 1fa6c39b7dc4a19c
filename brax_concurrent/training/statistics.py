"""Running mean and variance of observations, by which the networks' inputs are normalised."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

LIMIT = 10.0
"""Normalised observations are clipped to this many standard deviations."""
_EPSILON = 1e-8  # added to the variance: an entry that is always the same becomes 0


class Statistics(NamedTuple):
    """Of all observations so far.

    Attributes:
        number: () how many, float32.
        mean, variance: (observation_size,).
    """

    number: jax.Array
    mean: jax.Array
    variance: jax.Array


def empty(size: int) -> Statistics:
    """Of none yet: normalising by them changes nothing but for the clipping."""
    return Statistics(jnp.zeros((), jnp.float32), jnp.zeros(size, jnp.float32), jnp.ones(size, jnp.float32))


def update(statistics: Statistics, observations: jax.Array) -> Statistics:
    """With a batch of observations (..., observation_size) added.

    In single precision means and variances, not sums, are what stays accurate over billions of observations. A
    variance is a sum of squares, never below 0, and exactly 0 of an entry that is always the same, however large.

    Source: Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance" (1983).
    """
    batch = observations.reshape(-1, observations.shape[-1])
    number = statistics.number + len(batch)
    weight = len(batch) / number
    shifted = batch - batch[0]  # numbers of the size of their spread, whose mean rounds no more than that
    difference = batch[0] + shifted.mean(0) - statistics.mean
    mean = statistics.mean + weight * difference
    within = (1.0 - weight) * statistics.variance + weight * shifted.var(0)
    return Statistics(number, mean, within + weight * (1.0 - weight) * jnp.square(difference))


def normalize(statistics: Statistics, observations: jax.Array) -> jax.Array:
    """Observations (..., observation_size) in standard deviations from the mean, clipped to +-LIMIT."""
    scaled = (observations - statistics.mean) / jnp.sqrt(statistics.variance + _EPSILON)
    return jnp.clip(scaled, -LIMIT, LIMIT)
