"""HalfCheetah: a planar two-legged robot that runs forward. The task is Gymnasium's HalfCheetah-v5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from brax_concurrent.envs.task import (
    KernelTask,
    Memory,
    Outcome,
    check_arguments,
    check_at_least,
    reset_qpos,
    reset_qvel_normal,
    sum_of_squares,
)


@dataclass(kw_only=True, eq=False)
class HalfCheetah(KernelTask):
    """Gymnasium's HalfCheetah-v5 with all of its constructor's arguments but those for rendering.

    Observation, 17 numbers:

    | Index | Meaning                                                            | Unit       |
    | ----- | ------------------------------------------------------------------ | ---------- |
    | 0     | height of the torso above its start                                | m          |
    | 1     | pitch of the torso                                                 | rad        |
    | 2-7   | angles bthigh, bshin, bfoot, fthigh, fshin, ffoot                  | rad        |
    | 8, 9  | velocity of the torso, forward and upward                          | m/s        |
    | 10-16 | angular velocities: pitch, then the joints of 2-7                  | rad/s      |

    The torso's x comes first if `exclude_current_positions_from_observation` is False.

    Action, 6 numbers in [-1, 1]: torques of bthigh, bshin, bfoot, fthigh, fshin, ffoot in units of 120, 90,
    60, 120, 60 and 30 N m.

    Reward = forward - control cost:

    | Metric         | Value                                                       |
    | -------------- | ----------------------------------------------------------- |
    | reward_forward | forward_reward_weight * (x after - x before) / dt           |
    | reward_ctrl    | -ctrl_cost_weight * sum of action^2, of the action as given |

    Info: x_position (m), x_velocity (m/s).

    Termination: never. Reset: qpos0 + U(-s, s) and velocities s * N(0, 1), where s = reset_noise_scale.

    Args:
        xml_file: "half_cheetah.xml" (Gymnasium's robot), the path of an MJCF file, MJCF text or a
            mujoco.MjModel. The first joint must be the slide along x.
        frame_skip: physics steps per control step; dt = frame_skip * timestep, 0.05 s.
        forward_reward_weight, ctrl_cost_weight: see the reward.
        reset_noise_scale: see the reset.
        exclude_current_positions_from_observation: see the observation.

    Raises:
        TypeError, ValueError, FileNotFoundError: an argument is not what it should be; the message names it.

    Source: Wawrzynski, "A Cat-Like Robot Real-Time Learning to Run" (ICANNGA 2009).
    """

    xml_file: Any = "half_cheetah.xml"
    frame_skip: int = 5
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.1
    reset_noise_scale: float = 0.1
    exclude_current_positions_from_observation: bool = True

    name = "halfcheetah"
    metrics = ("reward_forward", "reward_ctrl")
    info = ("x_position", "x_velocity")

    def __post_init__(self) -> None:
        check_arguments(self)
        check_at_least(self, 0.0, "reset_noise_scale")
        model = self._adopt_model(self.xml_file, "half_cheetah.xml")
        self.memory = {"x_position": 1}
        self._skipped = 1 if self.exclude_current_positions_from_observation else 0
        self._observe(skipped_qpos=self._skipped, qpos=model.nq - self._skipped, qvel=model.nv)

    def observation(self, m: Any, w: Any, memory: Memory) -> list[Any]:
        return [w.qpos[i] for i in range(self._skipped, m.nq)] + [w.qvel[i] for i in range(m.nv)]

    def outcome(self, m: Any, w: Any, action: list[Any], before: Memory, after: Memory) -> Outcome:
        x_velocity = (after["x_position"][0] - before["x_position"][0]) / (self.frame_skip * m.opt.timestep)
        parts = {
            "reward_forward": self.forward_reward_weight * x_velocity,
            "reward_ctrl": -self.ctrl_cost_weight * sum_of_squares(action),
        }
        return Outcome(
            reward=sum(parts.values()),
            terminated=False,
            metrics=parts,
            info={"x_position": w.qpos[0], "x_velocity": x_velocity},
        )

    def remember(self, m: Any, w: Any, before: Memory, random: Any) -> dict[str, list[Any]]:
        return {"x_position": [w.qpos[0]]}

    def reset(self, m: Any, w: Any, random: Any) -> None:
        reset_qpos(m, w, random, self.reset_noise_scale)
        reset_qvel_normal(m, w, random, self.reset_noise_scale)

    def remember_reset(self, m: Any, w: Any, random: Any) -> dict[str, list[Any]]:
        return {"x_position": [w.qpos[0]]}
