"""A pendulum whose episodes end and that is always reset to the same state, so that random numbers do not matter."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pendulum

import brax_concurrent as bc
from brax_concurrent.envs.halfcheetah import HalfCheetah

LIMIT = 5
TERMINATES = 0.7  # a torque above it ends the episode


@dataclasses.dataclass
class Swing(HalfCheetah):
    xml_file: Any = pendulum.PENDULUM
    reset_noise_scale: float = 0.0
    exclude_current_positions_from_observation: bool = False
    max_episode_steps: int = LIMIT

    def outcome(self, m, w, action, before, after):
        return dataclasses.replace(super().outcome(m, w, action, before, after), terminated=action[0] > TERMINATES)


@functools.cache
def swing(num_envs, autoreset=False):
    return bc.make(Swing(), num_envs, autoreset=autoreset, backend="cpu")
