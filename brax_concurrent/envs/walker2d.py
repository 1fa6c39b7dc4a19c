"""Walker2d: a planar two-legged robot that walks forward. The task is Gymnasium's Walker2d-v5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from brax_concurrent.envs.task import (
    KernelTask,
    Memory,
    Outcome,
    check_arguments,
    check_at_least,
    limit,
    reset_qpos,
    reset_qvel_uniform,
    sum_of_squares,
)
from brax_concurrent.kernels.ops import both, negate, where

_MAX_SPEED = 10.0  # observed velocities are clipped here


@dataclass(kw_only=True, eq=False)
class Walker2d(KernelTask):
    """Gymnasium's Walker2d-v5 with all of its constructor's arguments but those for rendering.

    Observation, 17 numbers:

    | Index | Meaning                                                                   | Unit  |
    | ----- | ------------------------------------------------------------------------- | ----- |
    | 0     | height of the torso, 1.25 at the start                                    | m     |
    | 1     | pitch of the torso                                                        | rad   |
    | 2-7   | angles thigh, leg, foot, thigh_left, leg_left, foot_left                  | rad   |
    | 8, 9  | velocity of the torso, forward and upward, clipped to [-10, 10]           | m/s   |
    | 10-16 | angular velocities, clipped to [-10, 10]: pitch, then the joints of 2-7   | rad/s |

    The torso's x comes first if `exclude_current_positions_from_observation` is False.

    Action, 6 numbers in [-1, 1]: torques of thigh, leg, foot, thigh_left, leg_left, foot_left in units of
    100 N m.

    Reward = forward + survive - control cost:

    | Metric         | Value                                                       |
    | -------------- | ----------------------------------------------------------- |
    | reward_forward | forward_reward_weight * (x after - x before) / dt           |
    | reward_survive | healthy_reward while healthy, else 0                        |
    | reward_ctrl    | -ctrl_cost_weight * sum of action^2, of the action as given |

    Info: x_position, z_distance_from_origin (height above qpos0) (m), x_velocity (m/s).

    Termination: when not healthy, if `terminate_when_unhealthy`. Healthy: height and pitch inside the open
    `healthy_z_range` and `healthy_angle_range`.

    Reset: qpos0 + U(-s, s) and velocities U(-s, s), where s = reset_noise_scale.

    Args:
        xml_file: "walker2d_v5.xml" (Gymnasium's robot; its "walker2d.xml" is an older one with other
            friction), the path of an MJCF file, MJCF text or a mujoco.MjModel. The first joints must be x, z
            and pitch.
        frame_skip: physics steps per control step; dt = frame_skip * timestep, 0.008 s.
        forward_reward_weight, ctrl_cost_weight, healthy_reward: see the reward.
        terminate_when_unhealthy, healthy_z_range, healthy_angle_range: see the termination; m, rad.
        reset_noise_scale: see the reset.
        exclude_current_positions_from_observation: see the observation.

    Raises:
        TypeError, ValueError, FileNotFoundError: an argument is not what it should be; the message names it.

    Source: Erez, Tassa, Todorov, "Infinite-Horizon Model Predictive Control for Periodic Tasks with Contacts"
    (RSS 2011).
    """

    xml_file: Any = "walker2d_v5.xml"
    frame_skip: int = 4
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 1e-3
    healthy_reward: float = 1.0
    terminate_when_unhealthy: bool = True
    healthy_z_range: tuple[float, float] = (0.8, 2.0)
    healthy_angle_range: tuple[float, float] = (-1.0, 1.0)
    reset_noise_scale: float = 5e-3
    exclude_current_positions_from_observation: bool = True

    name = "walker2d"
    metrics = ("reward_forward", "reward_ctrl", "reward_survive")
    info = ("x_position", "z_distance_from_origin", "x_velocity")

    def __post_init__(self) -> None:
        check_arguments(self)
        check_at_least(self, 0.0, "reset_noise_scale")
        model = self._adopt_model(self.xml_file, "walker2d_v5.xml")
        if model.nq < 3:
            raise ValueError(f"xml_file: expected a model with joints for x, z and pitch, got {model!r}")
        self.memory = {"x_position": 1}
        self._skipped = 1 if self.exclude_current_positions_from_observation else 0
        self._observe(skipped_qpos=self._skipped, qpos=model.nq - self._skipped, qvel=model.nv)

    def observation(self, m: Any, w: Any, memory: Memory) -> list[Any]:
        qvel = [limit(w.qvel[i], -_MAX_SPEED, _MAX_SPEED) for i in range(m.nv)]
        return [w.qpos[i] for i in range(self._skipped, m.nq)] + qvel

    def outcome(self, m: Any, w: Any, action: list[Any], before: Memory, after: Memory) -> Outcome:
        x_velocity = (after["x_position"][0] - before["x_position"][0]) / (self.frame_skip * m.opt.timestep)
        healthy = self._healthy(w)
        parts = {
            "reward_forward": self.forward_reward_weight * x_velocity,
            "reward_survive": where(healthy, self.healthy_reward, 0.0),
            "reward_ctrl": -self.ctrl_cost_weight * sum_of_squares(action),
        }
        return Outcome(
            reward=sum(parts.values()),
            terminated=negate(healthy) if self.terminate_when_unhealthy else False,
            metrics=parts,
            info={
                "x_position": w.qpos[0],
                "z_distance_from_origin": w.qpos[1] - m.qpos0[1],
                "x_velocity": x_velocity,
            },
        )

    def remember(self, m: Any, w: Any, before: Memory, random: Any) -> dict[str, list[Any]]:
        return {"x_position": [w.qpos[0]]}

    def reset(self, m: Any, w: Any, random: Any) -> None:
        reset_qpos(m, w, random, self.reset_noise_scale)
        reset_qvel_uniform(m, w, random, self.reset_noise_scale)

    def remember_reset(self, m: Any, w: Any, random: Any) -> dict[str, list[Any]]:
        return {"x_position": [w.qpos[0]]}

    def _healthy(self, w: Any) -> Any:
        (low, high), (back, front) = self.healthy_z_range, self.healthy_angle_range
        z, angle = w.qpos[1], w.qpos[2]
        return both(both(low < z, z < high), both(back < angle, angle < front))
