"""Velocity stage: body velocities (`mj_comVel`) and the forces that motion and gravity ask for (`mj_rne`)."""

from __future__ import annotations

from typing import Any

from brax_concurrent.kernels.fold import tidy
from brax_concurrent.kernels.kernel import kernel
from brax_concurrent.kernels.kinematics import FREE
from brax_concurrent.kernels.spatial import cross_force, cross_motion, inertia_times
from brax_concurrent.kernels.vec import Vec, add, dot, scale

_REST = (0.0,) * 6


@kernel(reads=("qvel", "cdof"), writes=("cvel", "cdof_dot"))
def velocity(m: Any, w: Any) -> None:
    """Velocity of each body, and of each motion axis as carried by what comes before it in the tree."""
    w.cvel[0] = _REST
    velocities: list[Vec] = [_REST]
    for b in range(1, m.nbody):
        v = velocities[m.body_parentid[b]]
        for dofs in _dof_groups(m, b):
            for i in dofs:
                w.cdof_dot[i] = cross_motion(v, w.cdof[i]) if _turns(m, i) else _REST
            v = _after(w, dofs, v)
        velocities.append(v)
        w.cvel[b] = v


@kernel(reads=("qvel", "cdof", "cinert", "cvel"), writes=("qfrc_bias",))
def bias(m: Any, w: Any) -> None:
    """Recursive Newton-Euler (Featherstone, chapter 5): the joint forces that hold qacc at 0, N or N m.

    Bodies that are welded to each other move as one and are summed first; what is welded to the world is left
    out. The velocity product of a joint, cdof_dot * qvel, is formed as velocity x (cdof * qvel): the same
    number with fewer operations, so cdof_dot is computed only for those who ask for it. Gravity acts as an
    upward acceleration of the world.
    """
    inertias = _welded_inertias(m, w)
    accelerations: dict[int, Vec] = {0: [0.0, 0.0, 0.0, *scale(tidy(m.opt.gravity), -1.0)]}
    forces: dict[int, Vec] = {}
    for b, body_inertia in inertias.items():
        parent = m.body_weldid[m.body_parentid[b]]
        acceleration, v = accelerations[parent], w.cvel[parent]
        for dofs in _dof_groups(m, b):
            for i in dofs:
                if _turns(m, i):
                    acceleration = add(acceleration, cross_motion(v, scale(w.cdof[i], w.qvel[i])))
            v = _after(w, dofs, v)
        accelerations[b] = acceleration
        momentum = inertia_times(body_inertia, w.cvel[b])
        forces[b] = add(inertia_times(body_inertia, acceleration), cross_force(w.cvel[b], momentum))
    for b in reversed(forces):
        parent = m.body_weldid[m.body_parentid[b]]
        if parent > 0:
            forces[parent] = add(forces[parent], forces[b])
    for i in range(m.nv):
        w.qfrc_bias[i] = dot(w.cdof[i], forces[m.dof_bodyid[i]])


def _welded_inertias(m: Any, w: Any) -> dict[int, Vec]:
    """By the body that carries the joints, in tree order: the inertia of all that is welded to it."""
    inertias: dict[int, Vec] = {}
    for b in range(1, m.nbody):
        carrier = m.body_weldid[b]
        if carrier > 0:
            inertias[carrier] = add(inertias[carrier], w.cinert[b]) if carrier in inertias else w.cinert[b]
    return inertias


def _dof_groups(m: Any, b: int) -> list[range]:
    """The dofs of body b in groups that move at once: a free joint's two halves, or one dof."""
    first, count = m.body_dofadr[b], m.body_dofnum[b]
    if count and m.jnt_type[m.dof_jntid[first]] == FREE:
        return [range(first, first + 3), range(first + 3, first + 6)]
    return [range(i, i + 1) for i in range(first, first + count)]


def _turns(m: Any, i: int) -> bool:
    """Whether the axis of dof i can turn: a free joint translates along the world's axes."""
    joint = m.dof_jntid[i]
    return m.jnt_type[joint] != FREE or i - m.jnt_dofadr[joint] >= 3


def _after(w: Any, dofs: range, v: Vec) -> Vec:
    """The velocity v after the motion of some dofs is added."""
    for i in dofs:
        v = add(v, scale(w.cdof[i], w.qvel[i]))
    return v
