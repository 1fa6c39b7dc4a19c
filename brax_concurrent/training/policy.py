"""A trained policy: what maps observations to actions, and its file."""

from __future__ import annotations

import dataclasses
import json
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brax_concurrent.envs.base import Env
from brax_concurrent.training import networks, statistics
from brax_concurrent.training.files import whole_file

POLICY = "policy.npz"
"""The file's name in a run's folder."""

_FORMAT = "brax_concurrent policy 1"
_ARRAYS = ("log_std", "mean", "variance", "low", "high")


class PolicyError(RuntimeError):
    """A file that holds no policy, or a policy that does not fit an environment."""


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """An actor with the statistics that normalise its observations; a pytree.

    Attributes:
        robot: name of the task that it was trained on.
        activation: between the actor's layers, "tanh" or "swish".
        actor: (weights, bias) of each layer; weights are (inputs, outputs).
        log_std: (action_size,) of the samples that it was trained with, in units of half the action's range.
        mean, variance: (observation_size,) of the observations that it was trained on.
        low, high: (action_size,) of the action space.
        steps: environment steps that it was trained for.
    """

    robot: str
    activation: str
    actor: networks.Mlp
    log_std: Any
    mean: Any
    variance: Any
    low: Any
    high: Any
    steps: Any

    def __call__(self, obs: jax.Array) -> jax.Array:
        """The actions (..., action_size) for observations (..., observation_size), deterministic and in their space."""
        seen = statistics.Statistics(jnp.zeros(()), self.mean, self.variance)
        answer = networks.mlp(self.actor, statistics.normalize(seen, obs), self.activation)
        return in_action_space(answer, self.low, self.high)

    @property
    def observation_size(self) -> int:
        """Entries of an observation."""
        return int(self.mean.shape[0])

    @property
    def action_size(self) -> int:
        """Entries of an action."""
        return int(self.log_std.shape[0])

    def check_fits(self, observation_size: int, action_size: int, whose: str) -> None:
        """Raise PolicyError if an environment's observations or actions have other sizes."""
        for name, own, theirs in (
            ("observation", self.observation_size, observation_size),
            ("action", self.action_size, action_size),
        ):
            if own != theirs:
                raise PolicyError(f"policy: {whose} has {name}s of {theirs} numbers, this policy's have {own}")

    def save(self, path: Path) -> None:
        """Write it as .npz: arrays `actor.0.weights`, `actor.0.bias`, ..., and the others by their names.

        `about` is the rest as JSON.

        Raises:
            OSError: the file cannot be written; what was there before stays.
        """
        about = {"format": _FORMAT, "robot": self.robot, "activation": self.activation, "steps": int(self.steps)}
        arrays = networks.named(self.actor, "actor") | {name: getattr(self, name) for name in _ARRAYS}
        contents: dict[str, Any] = {name: np.asarray(x) for name, x in arrays.items()}
        with whole_file(path) as file:
            np.savez(file, about=json.dumps(about), **contents)

    @classmethod
    def load(cls, path: Path) -> Policy:
        """What `save` wrote.

        Raises:
            PolicyError: the file is no policy, or is damaged; the message says what is wrong.
            OSError: it cannot be read.
        """
        try:
            if path.is_file() and not zipfile.is_zipfile(path):
                raise ValueError("it is no .npz archive")
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            about = json.loads(str(arrays.pop("about")))
            if about["format"] != _FORMAT:
                raise ValueError(f"its format is {about['format']!r}, expected {_FORMAT!r}")
            layers = range(sum(name.endswith(".weights") for name in arrays))
            actor = tuple((arrays[f"actor.{i}.weights"], arrays[f"actor.{i}.bias"]) for i in layers)
            rest = {name: arrays[name] for name in _ARRAYS}
            found = cls(about["robot"], about["activation"], actor, steps=about["steps"], **rest)
            _check_sound(found)
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            text = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise PolicyError(f"{path} is no policy that was trained here, or is damaged: {text}") from error
        return found


jax.tree_util.register_dataclass(
    Policy,
    data_fields=["actor", *_ARRAYS, "steps"],
    meta_fields=["robot", "activation"],
)


def in_action_space(answer: jax.Array, low: Any, high: Any) -> jax.Array:
    """From the actor's units, in which the space is [-1, 1], to an environment's; clipped to the space."""
    return jnp.clip((low + high) / 2 + (high - low) / 2 * answer, low, high)


def applied_action(env: Env) -> Callable[[jax.Array], jax.Array]:
    """`in_action_space` of an environment.

    Raises:
        ValueError: an action has no bounds.
    """
    low, high = (bound.astype(np.float32) for bound in (env.action_low, env.action_high))
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError(f"env: expected bounds of all actions of {env.name}, got {low} to {high}")
    return lambda answer: in_action_space(answer, low, high)


def _check_sound(policy: Policy) -> None:
    """Raise ValueError unless the sizes of all arrays follow from each other and all numbers are what they can be."""
    if policy.activation not in networks.ACTIVATIONS:
        raise ValueError(f"there is no activation {policy.activation!r}")
    widths = [policy.observation_size, *(layer[0].shape[-1] for layer in policy.actor)]
    for i, (weights, bias) in enumerate(policy.actor):
        if weights.shape != (widths[i], widths[i + 1]) or bias.shape != (widths[i + 1],):
            shapes = f"{weights.shape} and {bias.shape}"
            raise ValueError(f"layer {i} has weights and bias of {shapes}, for {widths[i]} inputs")
    for name, size in zip(_ARRAYS, (widths[-1], widths[0], widths[0], widths[-1], widths[-1]), strict=True):
        if getattr(policy, name).shape != (size,):
            raise ValueError(f"{name} has shape {getattr(policy, name).shape}, expected ({size},)")
    for name, array in (networks.named(policy.actor, "actor") | {n: getattr(policy, n) for n in _ARRAYS}).items():
        if array.dtype != np.float32 or not np.isfinite(array).all():
            raise ValueError(f"{name} is not all finite numbers in single precision")
    if (policy.variance < 0).any():
        raise ValueError(f"variance has the negative number {policy.variance.min():g}")
    if (policy.low > policy.high).any():
        raise ValueError("low is above high")
