"""Joint-space inertia (`mj_crb`) and its factor (`mj_factorM`); factor and solve for any sparse matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brax_concurrent.kernels.fold import known, tidy, zero
from brax_concurrent.kernels.kernel import kernel
from brax_concurrent.kernels.kinematics import FREE
from brax_concurrent.kernels.spatial import inertia_times
from brax_concurrent.kernels.vec import Vec, add, dot

Symmetric = Mapping[tuple[int, int], Any]
"""A symmetric matrix by its lower entries: (i, j) with i >= j to a scalar; what is missing is 0."""


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


def factor(matrix: Symmetric) -> tuple[dict[tuple[int, int], Any], list[Any]]:
    """Factor a symmetric positive definite matrix as L' D L, eliminating the last dof first.

    In this order the inertia of a tree has no fill-in, and neither has M + J' D J where each row of J touches
    one chain of dofs (Featherstone, chapter 6.5). Whatever fill-in there is, is found here, while tracing.

    Args:
        matrix: entries (i, j) with i >= j; all of the diagonal 0..n-1.

    Returns:
        (lower, inverse): L below its unit diagonal and, on it, D, as entries (i, j); and the n values 1 / D.
    """
    n = _size(matrix)
    lower = dict(matrix)
    inverse: list[Any] = [0.0] * n
    for k in range(n - 1, -1, -1):
        inverse[k] = 1.0 / lower[k, k]
        row = [j for j in range(k) if (k, j) in lower]
        scaled = {j: lower[k, j] * inverse[k] for j in row}
        for i in row:
            for j in row:
                if j <= i:
                    lower[i, j] = lower.get((i, j), 0.0) - scaled[i] * lower[k, j]
        for j in row:
            lower[k, j] = scaled[j]
    return lower, inverse


def _size(matrix: Symmetric) -> int:
    n = 1 + max(i for i, _ in matrix)
    missing = [i for i in range(n) if (i, i) not in matrix]
    if missing:
        raise ValueError(f"matrix: expected all of the diagonal, got no entry {(missing[0], missing[0])}")
    return n


def solve_factored(lower: Symmetric, inverse: Sequence[Any], rhs: Sequence[Any]) -> list[Any]:
    """Solve L' D L x = rhs.

    Args:
        lower, inverse: from `factor`; the diagonal of `lower` is not used.
        rhs: n scalars; it is not changed.
    """
    x = list(rhs)
    n = len(x)
    rows = [[j for j in range(i) if (i, j) in lower] for i in range(n)]
    for i in range(n - 1, -1, -1):
        for j in rows[i]:
            x[j] = x[j] - lower[i, j] * x[i]
    x = [value * inv for value, inv in zip(x, inverse, strict=True)]
    for i in range(n):
        for j in rows[i]:
            x[i] = x[i] - lower[i, j] * x[j]
    return x
