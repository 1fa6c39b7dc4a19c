"""Constraint stage: joint limits and contacts as rows of a quadratic problem (`mj_makeConstraint`).

A row pulls its coordinate's acceleration J qacc toward a reference aref, with the stiffness D (MuJoCo documentation,
"Computation: constraint model"). A limited joint has one row. A contact has four, the edges of its friction pyramid

    n + mu1 t1,  n - mu1 t1,  n + mu2 t2,  n - mu2 t2        (n: normal, t1 and t2: tangents)

which share one D and are linear in three basis rows. These three are what is kept: J and aref of n, mu1 t1 and mu2 t2.
A frictionless contact has mu = 0: four equal rows, each with a quarter of its row's D.
"""

from __future__ import annotations

from typing import Any

from brax_concurrent.kernels.contact_parameters import (
    DofSelector,
    PairConstants,
    by_pair,
    dof_signs,
    pair_bodies,
    pair_constants,
    row_stiffness,
    spring,
)
from brax_concurrent.kernels.kernel import kernel
from brax_concurrent.kernels.ops import minimum, where
from brax_concurrent.kernels.vec import Vec, add, cross, dot, scale, sub


@kernel(
    reads=(
        *("qpos", "qvel", "cdof", "subtree_com"),
        *("ncon", "contact_dist", "contact_pos", "contact_frame", "contact_pair"),
    ),
    writes=(
        *("limit_sign", "limit_D", "limit_aref"),
        *("contact_mu", "contact_J", "contact_D", "contact_aref"),
    ),
)
def constraints(m: Any, w: Any) -> None:
    """Make the rows of all limits and contacts."""
    for j in range(m.njnt):
        if m.jnt_limited[j]:
            _limit(m, w, j)
    if m.npair:
        _contacts(m, w)


def _limit(m: Any, w: Any, j: int) -> None:
    """The row of a limited hinge or slide joint: of its lower or its upper limit, never both."""
    dof = m.jnt_dofadr[j]
    q = w.qpos[m.jnt_qposadr[j]]
    below, above = q - m.jnt_range[j, 0], m.jnt_range[j, 1] - q
    dist = minimum(below, above)
    active = dist < m.jnt_margin[j]
    side = where(below < above, 1.0, -1.0)
    law = spring(m, [m.jnt_solref[j, i] for i in range(2)], [m.jnt_solimp[j, i] for i in range(5)])
    violation = dist - m.jnt_margin[j]
    impedance = law.impedance(violation)
    aref = -law.damping * (side * w.qvel[dof]) - law.stiffness * impedance * violation
    w.limit_sign[j] = where(active, side, 0.0)
    w.limit_D[j] = where(active, row_stiffness(impedance, m.dof_invweight0[dof], 1.0), 0.0)
    w.limit_aref[j] = where(active, aref, 0.0)


def _contacts(m: Any, w: Any) -> None:
    constants = [pair_constants(m, p) for p in range(m.npair)]
    signs = dof_signs(m)
    roots = {m.body_rootid[b] for p in range(m.npair) for b in pair_bodies(m, p)}
    centres = {r: w.subtree_com[r] for r in sorted(roots)}
    qvel = [w.qvel[i] for i in range(m.nv)]
    for k in w.range(w.ncon[0]):
        pair = w.contact_pair[k]
        mu = [by_pair(w, pair, [c.mu[i] for c in constants]) for i in range(2)]
        jacobian = _jacobian(m, w, k, mu, DofSelector(w, signs, pair), centres)
        velocity = [dot(row, qvel) for row in jacobian]
        w.contact_mu[k], w.contact_J[k] = mu, jacobian
        w.contact_D[k], w.contact_aref[k] = _answer(w, pair, constants, w.contact_dist[k], velocity)


def _jacobian(m: Any, w: Any, k: Any, mu: Vec, selector: DofSelector, centres: dict[int, Vec]) -> list[list[Any]]:
    """The three basis rows of contact k: the second body's velocity at the contact minus the first's, by dof."""
    frame = w.contact_frame[k]
    normal, tangent = frame[:3], frame[3:]
    basis = [normal, scale(tangent, mu[0]), scale(cross(normal, tangent), mu[1])]
    pos = w.contact_pos[k]
    arms = {root: sub(pos, centre) for root, centre in centres.items()}
    columns = []
    for i in range(m.nv):
        root = m.body_rootid[m.dof_bodyid[i]]
        if root not in arms:
            columns.append([0.0, 0.0, 0.0])
            continue
        motion = w.cdof[i]
        velocity = add(motion[3:], cross(motion[:3], arms[root]))
        columns.append(selector.signed(i, [dot(axis, velocity) for axis in basis]))
    return [list(row) for row in zip(*columns, strict=True)]


def _answer(w: Any, pair: Any, constants: list[PairConstants], dist: Any, velocity: Vec) -> tuple[Any, list[Any]]:
    """D of a contact's rows, and aref of its basis rows, m/s^2."""
    law = _spring_of(w, pair, constants)
    violation = dist - by_pair(w, pair, [c.margin for c in constants])
    impedance = law.impedance(violation)
    inertia = by_pair(w, pair, [c.inverse_inertia for c in constants])
    stiffness = row_stiffness(impedance, inertia, by_pair(w, pair, [c.scale for c in constants]))
    aref = [-law.damping * v for v in velocity]
    aref[0] = aref[0] - law.stiffness * impedance * violation
    return stiffness, aref


def _spring_of(w: Any, pair: Any, constants: list[PairConstants]) -> Any:
    laws = [c.spring for c in constants]
    kind = type(laws[0])
    return kind(**{name: by_pair(w, pair, [getattr(law, name) for law in laws]) for name in kind.__dataclass_fields__})
