"""Position stage: where bodies, joints and geoms are (`mj_kinematics`), and centres of mass (`mj_comPos`)."""

from __future__ import annotations

from typing import Any

from brax_concurrent.kernels.fold import constant, tidy
from brax_concurrent.kernels.kernel import kernel
from brax_concurrent.kernels.ops import sincos, where
from brax_concurrent.kernels.vec import (
    Vec,
    add,
    add_scaled,
    cross,
    mat_vec,
    normalize,
    quat_mul,
    quat_to_mat,
    scale,
    sub,
)

FREE, SLIDE, HINGE = 0, 2, 3
"""Values of jnt_type (mjtJoint)."""

_IDENTITY = (1.0, 0.0, 0.0, 0.0)
_ORIGIN = (0.0, 0.0, 0.0)
_MINVAL = 1e-15  # MuJoCo's mjMINVAL

# Moments of inertia that are equal save two columns of a rotation matrix, but the short form loses digits of
# the third moment by this factor, so it is used below it only (capsules: up to ten times as long as wide).
_SLENDER = 20.0


class _Orientation:
    """A unit quaternion and, when somebody asks, its matrix."""

    def __init__(self, quat: Vec):
        self.quat = list(quat)
        self._mat: list[Any] | None = None

    @property
    def mat(self) -> list[Any]:
        if self._mat is None:
            self._mat = tidy(quat_to_mat(self.quat))
        return self._mat

    def turned(self, quat: Vec) -> _Orientation:
        """This orientation after a rotation in its own frame."""
        return _Orientation(quat_mul(self.quat, quat))

    def turned_mat(self, quat: Vec) -> list[Any]:
        """The matrix of `turned(quat)`, column by column: who needs one column pays for one."""
        columns = _columns(tidy(quat_to_mat(tidy(quat))))
        x, y, z = (mat_vec(self.mat, column) for column in columns)
        return [x[0], y[0], z[0], x[1], y[1], z[1], x[2], y[2], z[2]]

    def apply(self, v: Vec) -> list[Any]:
        return mat_vec(self.mat, v)


_Frame = tuple[list[Any], _Orientation]
"""Origin and orientation."""


def _columns(mat: Vec) -> list[Vec]:
    return [mat[0::3], mat[1::3], mat[2::3]]


@kernel(
    reads=("qpos", "mocap_pos", "mocap_quat"),
    writes=("xpos", "xquat", "xmat", "xipos", "ximat", "xanchor", "xaxis", "geom_xpos", "geom_xmat"),
)
def kinematics(m: Any, w: Any) -> None:
    """Forward kinematics from the world outward.

    Quaternions are normalised where they enter (free joints, mocap bodies), without writing qpos back;
    products of unit quaternions stay unit to rounding, so those inside the tree are not normalised again.
    """
    frames: list[_Frame] = [(list(_ORIGIN), _Orientation(_IDENTITY))]
    for b in range(1, m.nbody):
        frames.append(_place_body(m, w, b, *frames[m.body_parentid[b]]))
    for b, (pos, orientation) in enumerate(frames):
        w.xpos[b], w.xquat[b], w.xmat[b] = pos, orientation.quat, orientation.mat
        w.xipos[b] = add(pos, orientation.apply(tidy(m.body_ipos[b])))
        w.ximat[b] = orientation.turned_mat(m.body_iquat[b])
    for g in range(m.ngeom):
        # Where this is the body's inertial frame, the expressions are the same and are computed once.
        pos, orientation = frames[m.geom_bodyid[g]]
        w.geom_xpos[g] = add(pos, orientation.apply(tidy(m.geom_pos[g])))
        w.geom_xmat[g] = orientation.turned_mat(m.geom_quat[g])


def _place_body(m: Any, w: Any, b: int, pos: Vec, orientation: _Orientation) -> _Frame:
    """Frame of body b, whose parent's frame is given; stores the anchors and axes of its joints."""
    first, count = m.body_jntadr[b], m.body_jntnum[b]
    if count and m.jnt_type[first] == FREE:
        q = m.jnt_qposadr[first]
        pos = [w.qpos[q + i] for i in range(3)]
        w.xanchor[first], w.xaxis[first] = pos, tidy(m.jnt_axis[first])
        return pos, _Orientation(_unit([w.qpos[q + i] for i in range(3, 7)]))
    if m.body_mocapid[b] >= 0:
        # Mocap bodies are children of the world.
        return w.mocap_pos[m.body_mocapid[b]], _Orientation(_unit(w.mocap_quat[m.body_mocapid[b]]))
    pos = add(pos, orientation.apply(tidy(m.body_pos[b])))
    return _move_joints(m, w, range(first, first + count), pos, orientation.turned(tidy(m.body_quat[b])))


def _move_joints(m: Any, w: Any, joints: range, pos: Vec, orientation: _Orientation) -> _Frame:
    """Slide and turn a body about its joints, in their order.

    The body is held by one of its points: `local` in the body frame is at `point` in the world. A hinge turns
    the body about its anchor, so the anchor is that point afterwards, and the next joint's anchor is the same
    if it has the same `jnt_pos`: nothing to compute for the usual stack of joints.
    """
    point: Vec = pos
    local: Vec = _ORIGIN
    for j in joints:
        q = w.qpos[m.jnt_qposadr[j]] - m.qpos0[m.jnt_qposadr[j]]
        axis = tidy(m.jnt_axis[j])
        anchor = add(point, orientation.apply(tidy(sub(m.jnt_pos[j], local))))
        if m.jnt_type[j] == SLIDE:
            xaxis = orientation.apply(axis)
            point = add_scaled(anchor, xaxis, q)
        else:
            sine, cosine = sincos(0.5 * q)
            before, orientation = orientation, orientation.turned([cosine, *scale(axis, sine)])
            # A hinge does not move its own axis: of the last one take the final matrix, needed anyway.
            xaxis = (orientation if j == joints[-1] else before).apply(axis)
            point = anchor
        local = m.jnt_pos[j]
        w.xanchor[j], w.xaxis[j] = anchor, xaxis
    return sub(point, orientation.apply(tidy(local))), orientation


def _unit(quat: Vec) -> list[Any]:
    return normalize(quat, _IDENTITY)[0]


@kernel(
    reads=("xmat", "xipos", "ximat", "xanchor", "xaxis"),
    writes=("subtree_com", "cinert", "cdof"),
)
def com(m: Any, w: Any) -> None:
    """Centres of mass; inertias and motion axes in world axes about the tree's centre of mass."""
    coms = _subtree_coms(m, w)
    for b in range(m.nbody):
        w.subtree_com[b] = coms[b]
        w.cinert[b] = _body_inertia(m, w, b, coms[m.body_rootid[b]]) if b else (0.0,) * 10
    for j in range(m.njnt):
        body, dof = m.jnt_bodyid[j], m.jnt_dofadr[j]
        arm = sub(coms[m.body_rootid[body]], w.xanchor[j])
        if m.jnt_type[j] == SLIDE:
            w.cdof[dof] = [*_ORIGIN, *w.xaxis[j]]
        elif m.jnt_type[j] == HINGE:
            w.cdof[dof] = _turning_about(w.xaxis[j], arm)
        else:
            for i in range(3):
                w.cdof[dof + i] = [1.0 if k == 3 + i else 0.0 for k in range(6)]
            # Rotations of a free joint are about the body's own axes.
            for i, axis in enumerate(_columns(w.xmat[body])):
                w.cdof[dof + 3 + i] = _turning_about(axis, arm)


def _turning_about(axis: Vec, arm: Vec) -> list[Any]:
    return [*axis, *cross(axis, arm)]


def _subtree_coms(m: Any, w: Any) -> list[list[Any]]:
    """Centre of mass of each subtree, m: sum of mass * xipos over body_subtreemass."""
    moments = [scale(w.xipos[b], m.body_mass[b]) for b in range(m.nbody)]
    for b in range(m.nbody - 1, 0, -1):
        parent = m.body_parentid[b]
        moments[parent] = add(moments[parent], moments[b])
    coms = []
    for b in range(m.nbody):
        massless = m.body_subtreemass[b] < _MINVAL
        inverse = 1.0 / where(massless, 1.0, m.body_subtreemass[b])
        alone = b > 0 and not m.body_children[b]
        own, mean = w.xipos[b], scale(moments[b], inverse)
        coms.append(own if alone else [where(massless, x, y) for x, y in zip(own, mean, strict=True)])
    return coms


def _body_inertia(m: Any, w: Any, b: int, about: Vec) -> list[Any]:
    """Inertia of body b about a point: R diag(I) R' plus Steiner's term."""
    xx, yy, zz, xy, xz, yz = _rotated_inertia(m.body_inertia[b], _columns(w.ximat[b]))
    mass = m.body_mass[b]
    x, y, z = sub(w.xipos[b], about)
    mx, my, mz = scale((x, y, z), mass)
    return [
        xx + (my * y + mz * z), yy + (mx * x + mz * z), zz + (mx * x + my * y),
        xy - mx * y, xz - mx * z, yz - my * z,
        mx, my, mz, mass,
    ]  # fmt: skip


def _rotated_inertia(moments: Vec, axes: list[Vec]) -> list[Any]:
    """Sum of moment * axis axis' over the principal axes, as xx yy zz xy xz yz.

    The axes' own products sum to the identity, so a common part of the moments needs no axis at all: none is
    left of a sphere, one of a capsule, two of anything else.
    """
    base: Any = 0.0
    if constant(*moments):
        base = min(moments)
        for k in range(3):
            twin, other = moments[k], moments[k - 1]
            if twin == moments[k - 2] and twin < _SLENDER * other:
                base = twin
    total = [base, base, base, 0.0, 0.0, 0.0]
    for moment, (x, y, z) in zip(moments, axes, strict=True):
        sx, sy, sz = scale((x, y, z), moment - base)
        total = add(total, [sx * x, sy * y, sz * z, sx * y, sx * z, sy * z])
    return total
