"""What each robot is trained with, on a CPU and on a GPU; tuned by hand."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from brax_concurrent.training.ppo import Config

_COMMON: dict[str, Any] = {"discount": 0.99, "initial_std": 0.4, "entropy_cost": 0.0}
# On a CPU learning takes most of the time, in proportion to the samples. On a GPU a step of the optimiser takes about
# as long for many samples as for few: larger batches.
_PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"num_envs": 256, "unroll_length": 32, "num_minibatches": 16, "num_epochs": 8},
    "cuda": {"num_envs": 2048, "unroll_length": 20, "num_minibatches": 32, "num_epochs": 8, "eval_envs": 128},
}
# A step of Ant or Humanoid takes a GPU as long for 4096 environments as for 1024; an evaluation is 1000 steps.
_WIDE: dict[str, Any] = {"num_envs": 4096, "unroll_length": 10, "evaluations": 10}
_ROBOTS: dict[str, dict[str, Any]] = {
    "ant": {"reward_scaling": 0.1},
    "grasp": {"reward_scaling": 1.0},
    # A run without a reward for entropy ended on its back, where a cheetah slides along with a return of 1,900.
    "halfcheetah": {"reward_scaling": 0.1, "entropy_cost": 0.002},
    "humanoid": {"reward_scaling": 0.05},
    "walker2d": {"reward_scaling": 0.1},
}
_OF_BOTH: dict[tuple[str, str], dict[str, Any]] = {
    ("ant", "cpu"): {"learning_rate": 4e-4, "steps": 5_000_000},
    ("ant", "cuda"): {**_WIDE, "learning_rate": 5e-4, "steps": 30_000_000},
    ("grasp", "cpu"): {"learning_rate": 4e-4, "steps": 5_000_000},
    ("grasp", "cuda"): {"learning_rate": 5e-4, "steps": 30_000_000},
    ("halfcheetah", "cpu"): {"learning_rate": 5e-4, "steps": 3_000_000},
    ("halfcheetah", "cuda"): {"learning_rate": 5e-4, "steps": 20_000_000},
    ("humanoid", "cpu"): {"learning_rate": 3e-4, "steps": 3_000_000},
    ("humanoid", "cuda"): {**_WIDE, "learning_rate": 4e-4, "steps": 30_000_000},
    ("walker2d", "cpu"): {"learning_rate": 4e-4, "steps": 4_000_000},
    ("walker2d", "cuda"): {"learning_rate": 5e-4, "steps": 30_000_000},
}


def preset(robot: str, backend: str) -> Config:
    """The committed configuration of a robot on "cpu" or "cuda"; a task of one's own gets what they share."""
    own = _ROBOTS.get(robot, {}) | _OF_BOTH.get((robot, backend), {})
    return Config(**(_COMMON | _PLACES[backend] | own))


def override(config: Config, settings: Mapping[str, str]) -> Config:
    """A configuration with some settings given as text; layers are numbers with commas between.

    Raises:
        ValueError: there is no such setting, or it does not take that value; the message names it.
    """
    types = typing.get_type_hints(Config)
    unknown = [name for name in settings if name not in types]
    if unknown:
        raise ValueError(f"set: there is no {unknown[0]!r}; known: {', '.join(types)}")
    return dataclasses.replace(config, **{name: _value(name, text, types[name]) for name, text in settings.items()})


def _value(name: str, text: str, kind: Any) -> Any:
    try:
        if kind not in (int, float, str):
            return tuple(int(part) for part in text.split(","))
        return kind(text)
    except ValueError:
        wanted = {int: "a whole number", float: "a number"}.get(kind, "whole numbers with commas between")
        raise ValueError(f"{name}: expected {wanted}, got {text!r}") from None
