"""Joint-space inertia (`mj_crb`) and its factor (`mj_factorM`)."""

from __future__ import annotations

from typing import Any

from brax_concurrent.kernels.fold import known, tidy, zero
from brax_concurrent.kernels.kernel import kernel
from brax_concurrent.kernels.kinematics import FREE
from brax_concurrent.kernels.spatial import inertia_times
from brax_concurrent.kernels.symmetric import factor
from brax_concurrent.kernels.vec import Vec, add, dot


@kernel(reads=("cinert", "cdof"), writes=("qM",))
def inertia(m: Any, w: Any) -> None:
    """Composite rigid body algorithm (Featherstone, chapter 6), kg, kg m or kg m^2.

    M[i, j] is the force along dof j that accelerates, by a unit of dof i, everything that dof i carries. Only
    a dof's ancestors see that force.
    """
    composite: list[Vec] = [w.cinert[b] for b in range(m.nbody)]
    for b in range(m.nbody - 1, 0, -1):
        parent = m.body_parentid[b]
        if parent > 0:
            composite[parent] = add(composite[parent], composite[b])
    forces = [inertia_times(composite[m.dof_bodyid[i]], w.cdof[i]) for i in range(m.nv)]
    for adr, (i, j) in enumerate(m.qM_ij):
        body = m.dof_bodyid[i]
        if _floats_alone(m, body):
            own = [m.body_mass[body]] * 3 + list(m.body_inertia[body])
            entry = own[i - m.body_dofadr[body]] if i == j else 0.0
        else:
            entry = dot(w.cdof[j], forces[i])
        w.qM[adr] = entry + m.dof_armature[i] if i == j else entry


def _floats_alone(m: Any, b: int) -> bool:
    """Whether body b is a free body that turns about its own principal axes: M is constant and diagonal."""
    return (
        m.body_jntnum[b] == 1
        and m.jnt_type[m.body_jntadr[b]] == FREE
        and not m.body_children[b]
        and known(tidy(m.body_ipos[b]), (0.0, 0.0, 0.0))
        and known(tidy(m.body_iquat[b]), (1.0, 0.0, 0.0, 0.0))
    )


@kernel(reads=("qM",), writes=("qLD", "qLDiagInv"))
def factor_inertia(m: Any, w: Any) -> None:
    """M = L' D L with the tree's sparsity, where L is lower triangular with a unit diagonal."""
    lower, inverse = factor(inertia_entries(m, w))
    for (i, j), adr in _addresses(m).items():
        w.qLD[adr] = lower.get((i, j), 0.0) if i != j else lower[i, i]
    for i in range(m.nv):
        w.qLDiagInv[i] = inverse[i]


def _addresses(m: Any) -> dict[tuple[int, int], int]:
    return {(i, j): adr for adr, (i, j) in enumerate(m.qM_ij)}


def inertia_entries(m: Any, w: Any) -> dict[tuple[int, int], Any]:
    """The entries of qM that are not known to be 0. The caller reads `qM`."""
    entries = {(i, j): w.qM[adr] for (i, j), adr in _addresses(m).items()}
    return {ij: entry for ij, entry in entries.items() if not zero(entry)}


def factor_entries(m: Any, w: Any) -> tuple[dict[tuple[int, int], Any], list[Any]]:
    """What `factor_inertia` stored, as `factor` returns it. The caller reads `qLD` and `qLDiagInv`."""
    lower = {(i, j): w.qLD[adr] for (i, j), adr in _addresses(m).items() if i != j}
    inverse = [w.qLDiagInv[i] for i in range(m.nv)]
    return {ij: entry for ij, entry in lower.items() if not zero(entry)}, inverse
