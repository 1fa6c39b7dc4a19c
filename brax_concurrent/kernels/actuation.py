"""Forces from springs and dampers (`mj_passive`) and from actuators (`mj_fwdActuation`)."""

from __future__ import annotations

from typing import Any

from brax_concurrent.kernels.kernel import kernel
from brax_concurrent.kernels.kinematics import FREE
from brax_concurrent.kernels.ops import absolute, both, clip, where

_AFFINE = 1  # mjtBias
_MAX_VALUE = 1e10  # MuJoCo's mjMAXVAL: what is larger is bad


@kernel(reads=("qpos", "qvel"), writes=("qfrc_passive",))
def passive(m: Any, w: Any) -> None:
    """Linear springs toward qpos_spring and linear dampers, N or N m. Free joints have dampers only."""
    for j in range(m.njnt):
        dof, q = m.jnt_dofadr[j], m.jnt_qposadr[j]
        for i in range(dof, dof + (6 if m.jnt_type[j] == FREE else 1)):
            force = -m.dof_damping[i] * w.qvel[i]
            if m.jnt_type[j] != FREE:
                force = force - m.jnt_stiffness[j] * (w.qpos[q] - m.qpos_spring[q])
            w.qfrc_passive[i] = force


@kernel(reads=("qpos", "qvel", "ctrl"), writes=("actuator_force", "qfrc_actuator"))
def actuation(m: Any, w: Any) -> None:
    """Actuators with a fixed gain on hinges and slides, N or N m.

    actuator_force = gain * ctrl + bias, and gear times that in joint space.
    """
    joint_force: list[Any] = [0.0] * m.nv
    for i, ctrl in enumerate(_controls(m, w)):
        joint = m.actuator_trnid[i, 0]
        dof, gear = m.jnt_dofadr[joint], m.actuator_gear[i, 0]
        force = m.actuator_gainprm[i, 0] * ctrl
        if m.actuator_biastype[i] == _AFFINE:
            constant, stiffness, damping = (m.actuator_biasprm[i, k] for k in range(3))
            length, speed = gear * w.qpos[m.jnt_qposadr[joint]], gear * w.qvel[dof]
            force = force + (constant + stiffness * length + damping * speed)
        if m.actuator_forcelimited[i]:
            force = clip(force, m.actuator_forcerange[i, 0], m.actuator_forcerange[i, 1])
        w.actuator_force[i] = force
        joint_force[dof] = joint_force[dof] + gear * force
    for i in range(m.nv):
        w.qfrc_actuator[i] = joint_force[i]


def _controls(m: Any, w: Any) -> list[Any]:
    """ctrl limited to its range; all zero where one control is NaN or beyond 1e10, as in MuJoCo."""
    controls = []
    sound: Any = True
    for i in range(m.nu):
        ctrl = w.ctrl[i]
        if m.actuator_ctrllimited[i]:
            low, high = m.actuator_ctrlrange[i, 0], m.actuator_ctrlrange[i, 1]
            ctrl = where(ctrl < low, low, where(ctrl > high, high, ctrl))  # unlike clip, keeps NaN
        controls.append(ctrl)
        sound = both(absolute(ctrl) <= _MAX_VALUE, sound)
    return [where(sound, ctrl, 0.0) for ctrl in controls]
