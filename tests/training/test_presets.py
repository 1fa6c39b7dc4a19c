"""The committed configurations: each robot has one for each backend, and what is given as text overrides it."""

from __future__ import annotations

import dataclasses

import pytest

from brax_concurrent.envs import list_envs
from brax_concurrent.training import presets
from brax_concurrent.training.ppo import Config


@pytest.mark.parametrize("robot", list_envs())
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_every_robot_has_a_configuration(robot, backend):
    """Of its own, and valid."""
    found = presets.preset(robot, backend)
    assert found != presets.preset("mine", backend)
    assert found.steps >= 20 * found.batch_size
    assert (found.num_envs >= 2048) == (backend == "cuda")


def test_settings_given_as_text():
    given = {"num_epochs": "3", "discount": "0.5", "actor_layers": "32,16", "activation": "swish", "steps": "70"}
    expected = dataclasses.replace(
        Config(), num_epochs=3, discount=0.5, actor_layers=(32, 16), activation="swish", steps=70
    )
    assert presets.override(Config(), given) == expected
    assert presets.override(Config(), {}) == Config()
    with pytest.raises(ValueError, match=r"set: there is no 'gamma'; known: steps, num_envs"):
        presets.override(Config(), {"gamma": "0.9"})
