"""Ant: a four-legged robot that runs forward. The task is Gymnasium's Ant-v5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from brax_concurrent.envs.task import (
    KernelTask,
    Memory,
    Outcome,
    body_id,
    check_arguments,
    check_at_least,
    distance_from_origin,
    limit,
    require_free_root,
    reset_qpos,
    reset_qvel_normal,
    sum_of_squares,
)
from brax_concurrent.kernels.ops import both, isfinite, negate, where


@dataclass(kw_only=True, eq=False)
class Ant(KernelTask):
    """Gymnasium's Ant-v5 with all of its constructor's arguments but those for rendering.

    Observation, 105 numbers:

    | Index  | Meaning                                                               | Unit           |
    | ------ | --------------------------------------------------------------------- | -------------- |
    | 0      | torso height                                                          | m              |
    | 1-4    | torso orientation, a quaternion (w, x, y, z)                          |                |
    | 5-12   | angles hip_1, ankle_1, hip_2, ankle_2, hip_3, ankle_3, hip_4, ankle_4 | rad            |
    | 13-15  | torso velocity, world axes                                            | m/s            |
    | 16-18  | torso angular velocity, torso axes                                    | rad/s          |
    | 19-26  | joint velocities, in the order of 5-12                                | rad/s          |
    | 27-104 | `cfrc_ext`, clipped, per body: torque and force of contacts           | N m (3), N (3) |

    "Per body" is torso, then front_left_leg, aux_1, foot_1 and likewise for the other legs. The torso's x and
    y come first if `exclude_current_positions_from_observation` is False; 27-104 are left out if
    `include_cfrc_ext_in_observation` is False.

    Action, 8 numbers in [-1, 1]: torques of hip_4, ankle_4, hip_1, ankle_1, hip_2, ankle_2, hip_3, ankle_3 in
    units of 150 N m. This is the actuators' order, which differs from the joints'.

    Reward = forward + survive - control cost - contact cost:

    | Metric         | Value                                                                            |
    | -------------- | -------------------------------------------------------------------------------- |
    | reward_forward | forward_reward_weight * (x after - x before) / dt of the main body               |
    | reward_survive | healthy_reward while healthy, else 0                                             |
    | reward_ctrl    | -ctrl_cost_weight * sum of action^2, of the action as given                      |
    | reward_contact | -contact_cost_weight * sum of clipped cfrc_ext^2, over all bodies and the world  |

    As in Gymnasium, the main body's position and cfrc_ext are MuJoCo's derived data: those of the physics'
    last evaluation, a little behind qpos.

    Info: x_position, y_position, distance_from_origin (torso, m), x_velocity, y_velocity (main body, m/s).

    Termination: when not healthy, if `terminate_when_unhealthy`. Healthy: qpos and qvel are finite and the
    torso's height is in the closed `healthy_z_range`.

    Reset: qpos0 + U(-s, s) in every entry, quaternion included and not normalised, and velocities
    s * N(0, 1), where s = reset_noise_scale. As in Gymnasium, qpos0 has the ankles outside their limits.

    Args:
        xml_file: "ant.xml" (Gymnasium's robot), the path of an MJCF file, MJCF text or a mujoco.MjModel. The
            first joint must be free.
        frame_skip: physics steps per control step; dt = frame_skip * timestep, 0.05 s.
        forward_reward_weight, ctrl_cost_weight, contact_cost_weight, healthy_reward: see the reward.
        main_body: name or id of the body whose displacement is rewarded.
        terminate_when_unhealthy, healthy_z_range: see the termination; metres.
        contact_force_range: where cfrc_ext is clipped to, N and N m.
        reset_noise_scale: see the reset.
        exclude_current_positions_from_observation, include_cfrc_ext_in_observation: see the observation.

    Raises:
        TypeError, ValueError, FileNotFoundError: an argument is not what it should be; the message names it.

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
    (ICLR 2016).
    """

    xml_file: Any = "ant.xml"
    frame_skip: int = 5
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.5
    contact_cost_weight: float = 5e-4
    healthy_reward: float = 1.0
    main_body: int | str = 1
    terminate_when_unhealthy: bool = True
    healthy_z_range: tuple[float, float] = (0.2, 1.0)
    contact_force_range: tuple[float, float] = (-1.0, 1.0)
    reset_noise_scale: float = 0.1
    exclude_current_positions_from_observation: bool = True
    include_cfrc_ext_in_observation: bool = True

    name = "ant"
    metrics = ("reward_forward", "reward_ctrl", "reward_contact", "reward_survive")
    info = ("x_position", "y_position", "distance_from_origin", "x_velocity", "y_velocity")

    def __post_init__(self) -> None:
        check_arguments(self)
        check_at_least(self, 0.0, "reset_noise_scale")
        model = self._adopt_model(self.xml_file, "ant.xml")
        require_free_root(model)
        self._body = body_id(model, "main_body", self.main_body)
        self.memory = {"main_body_position": 2}
        self._skipped = 2 if self.exclude_current_positions_from_observation else 0
        self._observe(
            skipped_qpos=self._skipped,
            qpos=model.nq - self._skipped,
            qvel=model.nv,
            cfrc_ext=6 * (model.nbody - 1) * self.include_cfrc_ext_in_observation,
        )
        if self.include_cfrc_ext_in_observation or self.contact_cost_weight:
            self.observes = ("rne_post_constraint",)

    def observation(self, m: Any, w: Any, memory: Memory) -> list[Any]:
        qpos = [w.qpos[i] for i in range(self._skipped, m.nq)]
        qvel = [w.qvel[i] for i in range(m.nv)]
        return qpos + qvel + (self._contact_forces(m, w) if self.include_cfrc_ext_in_observation else [])

    def outcome(self, m: Any, w: Any, action: list[Any], before: Memory, after: Memory) -> Outcome:
        dt = self.frame_skip * m.opt.timestep
        start, end = before["main_body_position"], after["main_body_position"]
        x_velocity, y_velocity = (end[0] - start[0]) / dt, (end[1] - start[1]) / dt
        healthy = self._healthy(m, w)
        parts = {
            "reward_forward": self.forward_reward_weight * x_velocity,
            "reward_survive": where(healthy, self.healthy_reward, 0.0),
            "reward_ctrl": -self.ctrl_cost_weight * sum_of_squares(action),
            "reward_contact": -self._contact_cost(m, w),
        }
        return Outcome(
            reward=sum(parts.values()),
            terminated=negate(healthy) if self.terminate_when_unhealthy else False,
            metrics=parts,
            info={
                "x_position": w.qpos[0],
                "y_position": w.qpos[1],
                "distance_from_origin": distance_from_origin(w),
                "x_velocity": x_velocity,
                "y_velocity": y_velocity,
            },
        )

    def remember(self, m: Any, w: Any, before: Memory, random: Any) -> dict[str, list[Any]]:
        return {"main_body_position": [w.xpos[self._body, 0], w.xpos[self._body, 1]]}

    def reset(self, m: Any, w: Any, random: Any) -> None:
        reset_qpos(m, w, random, self.reset_noise_scale)
        reset_qvel_normal(m, w, random, self.reset_noise_scale)

    def remember_reset(self, m: Any, w: Any, random: Any) -> dict[str, list[Any]]:
        return self.remember(m, w, {}, random)

    def _contact_forces(self, m: Any, w: Any) -> list[Any]:
        """Clipped contact wrenches of all bodies but the world, whose row is 0."""
        forces = [w.cfrc_ext[b, i] for b in range(1, m.nbody) for i in range(6)]
        return [limit(force, *self.contact_force_range) for force in forces]

    def _contact_cost(self, m: Any, w: Any) -> Any:
        if not self.contact_cost_weight:
            return 0.0
        of_the_world = [limit(0.0, *self.contact_force_range)] * 6  # not 0 if the range excludes 0
        return self.contact_cost_weight * sum_of_squares([*self._contact_forces(m, w), *of_the_world])

    def _healthy(self, m: Any, w: Any) -> Any:
        low, high = self.healthy_z_range
        healthy = both(w.qpos[2] >= low, w.qpos[2] <= high)
        for x in [*(w.qpos[i] for i in range(m.nq)), *(w.qvel[i] for i in range(m.nv))]:
            healthy = both(healthy, isfinite(x))
        return healthy
