"""The kinematic tree as plain tuples, which the specialiser unrolls, and the names of the elements."""

from __future__ import annotations

from typing import Any

import mujoco


def element_names(mj: mujoco.MjModel) -> dict[str, tuple[str, ...]]:
    """Return body_names, jnt_names, geom_names, actuator_names, tendon_names; "" where there is none."""
    counted = {
        "body_names": (mj.nbody, mujoco.mjtObj.mjOBJ_BODY),
        "jnt_names": (mj.njnt, mujoco.mjtObj.mjOBJ_JOINT),
        "geom_names": (mj.ngeom, mujoco.mjtObj.mjOBJ_GEOM),
        "actuator_names": (mj.nu, mujoco.mjtObj.mjOBJ_ACTUATOR),
        "tendon_names": (mj.ntendon, mujoco.mjtObj.mjOBJ_TENDON),
    }
    return {
        field: tuple(mujoco.mj_id2name(mj, kind, i) or "" for i in range(count))
        for field, (count, kind) in counted.items()
    }


def tree_fields(mj: mujoco.MjModel) -> dict[str, Any]:
    """Return nM, dof_chain, body_dofs, body_children and qM_ij as `Model` describes them."""
    dof_chain: list[tuple[int, ...]] = []
    for i, parent in enumerate(mj.dof_parentid.tolist()):
        dof_chain.append((*dof_chain[parent], i) if parent >= 0 else (i,))
    body_dofs: list[tuple[int, ...]] = []
    for b in range(mj.nbody):
        if mj.body_dofnum[b] > 0:
            body_dofs.append(dof_chain[int(mj.body_dofadr[b] + mj.body_dofnum[b] - 1)])
        else:
            body_dofs.append(body_dofs[int(mj.body_parentid[b])] if b > 0 else ())
    children: list[list[int]] = [[] for _ in range(mj.nbody)]
    for b in range(1, mj.nbody):
        children[int(mj.body_parentid[b])].append(b)
    qM_ij = tuple((i, j) for i, chain in enumerate(dof_chain) for j in reversed(chain))
    return {
        "nM": len(qM_ij),
        "dof_chain": tuple(dof_chain),
        "body_dofs": tuple(body_dofs),
        "body_children": tuple(tuple(c) for c in children),
        "qM_ij": qM_ij,
    }
