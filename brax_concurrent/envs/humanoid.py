"""Humanoid: a robot shaped like a human that walks forward. The task is Gymnasium's Humanoid-v5."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from brax_concurrent.envs.task import (
    KernelTask,
    Memory,
    Outcome,
    check_arguments,
    check_at_least,
    distance_from_origin,
    limit,
    require_free_root,
    reset_qpos,
    reset_qvel_uniform,
    sum_of_squares,
)
from brax_concurrent.kernels.ops import both, negate, where

_ROOT_DOFS = 6  # qfrc_actuator is observed without the free joint's entries


@dataclass(kw_only=True, eq=False)
class Humanoid(KernelTask):
    """Gymnasium's Humanoid-v5 with all of its constructor's arguments but those for rendering.

    Observation, 348 numbers:

    | Index   | Meaning                                                              | Unit               |
    | ------- | -------------------------------------------------------------------- | ------------------ |
    | 0       | torso height                                                         | m                  |
    | 1-4     | torso orientation, a quaternion (w, x, y, z)                         |                    |
    | 5-7     | abdomen_z, abdomen_y, abdomen_x                                      | rad                |
    | 8-11    | right_hip_x, right_hip_z, right_hip_y, right_knee                    | rad                |
    | 12-15   | left_hip_x, left_hip_z, left_hip_y, left_knee                        | rad                |
    | 16-18   | right_shoulder1, right_shoulder2, right_elbow                        | rad                |
    | 19-21   | left_shoulder1, left_shoulder2, left_elbow                           | rad                |
    | 22-24   | torso velocity, world axes                                           | m/s                |
    | 25-27   | torso angular velocity, torso axes                                   | rad/s              |
    | 28-44   | joint velocities, in the order of 5-21                               | rad/s              |
    | 45-174  | `cinert`, per body: inertia (xx, yy, zz, xy, xz, yz) about the       | kg m^2 (6),        |
    |         | robot's centre of mass, mass times offset from it, mass              | kg m (3), kg       |
    | 175-252 | `cvel`, per body: angular velocity; velocity of the point that is at | rad/s (3),         |
    |         | the robot's centre of mass                                           | m/s (3)            |
    | 253-269 | `qfrc_actuator`, torques of the actuators in the order of 5-21       | N m                |
    | 270-347 | `cfrc_ext`, per body: torque and force of contacts                   | N m (3), N (3)     |

    "Per body" is torso, lwaist, pelvis, right thigh, shin and foot, left thigh, shin and foot, right upper
    and lower arm, left upper and lower arm. The torso's x and y come first if
    `exclude_current_positions_from_observation` is False; each of the last four is left out if its
    `include_..._in_observation` is False.

    Action, 17 numbers in [-0.4, 0.4]: torques of abdomen_y, abdomen_z, abdomen_x, then the legs and arms in
    the order of 8-21, in units of 100 N m (hip_y: 300, knees: 200, arms: 25). The abdomen's order is not that
    of the observation.

    Reward = forward + survive - control cost - contact cost:

    | Metric         | Value                                                                       |
    | -------------- | --------------------------------------------------------------------------- |
    | reward_forward | forward_reward_weight * (x after - x before) / dt of the centre of mass     |
    | reward_survive | healthy_reward while healthy, else 0                                        |
    | reward_ctrl    | -ctrl_cost_weight * sum of action^2, of the action as given                 |
    | reward_contact | -(contact_cost_weight * sum of cfrc_ext^2 limited to contact_cost_range)    |

    As in Gymnasium, the centre of mass, cinert, cvel, qfrc_actuator and cfrc_ext are MuJoCo's derived data:
    those of the physics' last evaluation, a little behind qpos and qvel.

    Info: x_position, y_position, distance_from_origin (torso, m), x_velocity, y_velocity (centre of mass,
    m/s), tendon_length[i] and tendon_velocity[i] (hip_y and knee of the right and left leg, rad and rad/s).
    The tendons' are those of the new qpos and qvel, in Gymnasium those of the last evaluation: the one
    difference, of a fraction of a physics step's motion.

    Termination: when not healthy, if `terminate_when_unhealthy`. Healthy: the torso's height is inside the
    open `healthy_z_range`.

    Reset: qpos0 + U(-s, s) in every entry, quaternion included and not normalised, and velocities U(-s, s),
    where s = reset_noise_scale.

    Args:
        xml_file: "humanoid.xml" (Gymnasium's robot), the path of an MJCF file, MJCF text or a mujoco.MjModel.
            The first joint must be free.
        frame_skip: physics steps per control step; dt = frame_skip * timestep, 0.015 s.
        forward_reward_weight, ctrl_cost_weight, contact_cost_weight, contact_cost_range, healthy_reward:
            see the reward.
        terminate_when_unhealthy, healthy_z_range: see the termination; metres.
        reset_noise_scale: see the reset.
        exclude_current_positions_from_observation, include_cinert_in_observation,
            include_cvel_in_observation, include_qfrc_actuator_in_observation,
            include_cfrc_ext_in_observation: see the observation.

    Raises:
        TypeError, ValueError, FileNotFoundError: an argument is not what it should be; the message names it.

    Source: Tassa, Erez, Todorov, "Synthesis and stabilization of complex behaviors through online trajectory
    optimization" (IROS 2012).
    """

    xml_file: Any = "humanoid.xml"
    frame_skip: int = 5
    forward_reward_weight: float = 1.25
    ctrl_cost_weight: float = 0.1
    contact_cost_weight: float = 5e-7
    contact_cost_range: tuple[float, float] = (-math.inf, 10.0)
    healthy_reward: float = 5.0
    terminate_when_unhealthy: bool = True
    healthy_z_range: tuple[float, float] = (1.0, 2.0)
    reset_noise_scale: float = 1e-2
    exclude_current_positions_from_observation: bool = True
    include_cinert_in_observation: bool = True
    include_cvel_in_observation: bool = True
    include_qfrc_actuator_in_observation: bool = True
    include_cfrc_ext_in_observation: bool = True

    name = "humanoid"
    metrics = ("reward_survive", "reward_forward", "reward_ctrl", "reward_contact")

    def __post_init__(self) -> None:
        check_arguments(self)
        check_at_least(self, 0.0, "reset_noise_scale")
        model = self._adopt_model(self.xml_file, "humanoid.xml")
        require_free_root(model)
        self.memory = {"centre_of_mass": 2}
        self._skipped = 2 if self.exclude_current_positions_from_observation else 0
        bodies = model.nbody - 1
        self._observe(
            skipped_qpos=self._skipped,
            qpos=model.nq - self._skipped,
            qvel=model.nv,
            cinert=10 * bodies * self.include_cinert_in_observation,
            cvel=6 * bodies * self.include_cvel_in_observation,
            qfrc_actuator=(model.nv - _ROOT_DOFS) * self.include_qfrc_actuator_in_observation,
            cfrc_ext=6 * bodies * self.include_cfrc_ext_in_observation,
            ten_length=0,
            ten_velocity=0,
        )
        if self.include_cfrc_ext_in_observation or self.contact_cost_weight:
            self.observes = ("rne_post_constraint",)
        tendons = [f"tendon_{what}[{t}]" for what in ("length", "velocity") for t in range(model.ntendon)]
        self.info = ("x_position", "y_position", *tendons, "distance_from_origin", "x_velocity", "y_velocity")

    def observation(self, m: Any, w: Any, memory: Memory) -> list[Any]:
        bodies = range(1, m.nbody)
        values = [w.qpos[i] for i in range(self._skipped, m.nq)] + [w.qvel[i] for i in range(m.nv)]
        if self.include_cinert_in_observation:
            values += [x for b in bodies for x in w.cinert[b]]
        if self.include_cvel_in_observation:
            values += [x for b in bodies for x in w.cvel[b]]
        if self.include_qfrc_actuator_in_observation:
            values += [w.qfrc_actuator[i] for i in range(_ROOT_DOFS, m.nv)]
        if self.include_cfrc_ext_in_observation:
            values += [x for b in bodies for x in w.cfrc_ext[b]]
        return values

    def outcome(self, m: Any, w: Any, action: list[Any], before: Memory, after: Memory) -> Outcome:
        dt = self.frame_skip * m.opt.timestep
        start, end = before["centre_of_mass"], after["centre_of_mass"]
        x_velocity, y_velocity = (end[0] - start[0]) / dt, (end[1] - start[1]) / dt
        low, high = self.healthy_z_range
        healthy = both(low < w.qpos[2], w.qpos[2] < high)
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
                **_tendons(m, w),
                "distance_from_origin": distance_from_origin(w),
                "x_velocity": x_velocity,
                "y_velocity": y_velocity,
            },
        )

    def remember(self, m: Any, w: Any, before: Memory, random: Any) -> dict[str, list[Any]]:
        masses = [m.body_mass[b] for b in range(1, m.nbody)]
        total = sum(masses)
        return {
            "centre_of_mass": [sum(mass * w.xipos[b, i] for b, mass in enumerate(masses, 1)) / total for i in (0, 1)]
        }

    def reset(self, m: Any, w: Any, random: Any) -> None:
        reset_qpos(m, w, random, self.reset_noise_scale)
        reset_qvel_uniform(m, w, random, self.reset_noise_scale)

    def remember_reset(self, m: Any, w: Any, random: Any) -> dict[str, list[Any]]:
        return self.remember(m, w, {}, random)

    def _contact_cost(self, m: Any, w: Any) -> Any:
        """The world's row of cfrc_ext is 0."""
        forces = [x for b in range(1, m.nbody) for x in w.cfrc_ext[b]] if self.contact_cost_weight else []
        return limit(self.contact_cost_weight * sum_of_squares(forces), *self.contact_cost_range)


def _tendons(m: Any, w: Any) -> dict[str, Any]:
    """Lengths and velocities of fixed tendons: sums of coefficient times joint position or velocity."""
    values = {}
    for t in range(m.ntendon):
        length: Any = 0.0
        velocity: Any = 0.0
        for k in range(m.tendon_adr[t], m.tendon_adr[t] + m.tendon_num[t]):
            joint, coefficient = m.wrap_objid[k], m.wrap_prm[k]
            length = length + coefficient * w.qpos[m.jnt_qposadr[joint]]
            velocity = velocity + coefficient * w.qvel[m.jnt_dofadr[joint]]
        values[f"tendon_length[{t}]"], values[f"tendon_velocity[{t}]"] = length, velocity
    return values
