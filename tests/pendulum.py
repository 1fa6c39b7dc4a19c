"""A robot that compiles in a moment, for tests of what is wrong before any physics."""

from __future__ import annotations

from typing import Any

import batches

NUM = 4

PENDULUM = """
<mujoco>
  <worldbody>
    <geom type="plane" size="1 1 1"/>
    <body pos="0 0 0.15"><joint name="swing" axis="0 1 0"/><geom size="0.1" pos="0.2 0 0"/></body>
  </worldbody>
  <actuator><motor joint="swing" ctrlrange="-1 1"/></actuator>
</mujoco>
"""


def env(num_envs: int = NUM, dtype: str = "float32", **arguments: Any) -> Any:
    """HalfCheetah's task with a pendulum as the robot: 1 position, 1 velocity, 1 action."""
    return batches.env("halfcheetah", num_envs, dtype, xml_file=PENDULUM, **arguments)


def simulator(*fields: str, num_envs: int = NUM, **arguments: Any) -> Any:
    return batches.simulator(PENDULUM, num_envs, fields, **{"dtype": "float32"} | arguments)
