"""Fields: the named per-environment quantities, their shapes, and where they lie in a tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brax_concurrent.kernels.model import Model

LANES = 32
"""Environments in a tile."""


MODEL_PREFIX = "model."
"""Fields that hold per-environment model quantities are named with this in front."""


@dataclass(frozen=True)
class Field:
    """A per-environment quantity.

    Attributes:
        shape: components per environment (at least one dimension).
        dtype: "f" (the build's floating-point type) or "i" (int32).
        doc: meaning and unit.
    """

    shape: tuple[int, ...]
    doc: str
    dtype: str = "f"


def physics_fields(m: Model) -> dict[str, Field]:
    """All fields of the physics stages by MuJoCo's name, in the order in which a step computes them.

    MuJoCo's sparse `qM`/`qLD` order (legacy: each dof's chain of ancestors, itself first) is kept. Contacts are records
    0..ncon-1; where MuJoCo has four pyramid rows per contact, the kernels keep the three basis rows (normal and two
    tangents times their friction coefficients), see kernels/constraint.py.
    """
    nb, nv, nc = m.nbody, m.nv, max(m.nconmax, 1)
    tables = [_state_fields(m), _position_fields(m), _velocity_fields(m), _integration_fields(m)]
    contact = {
        "ncon": Field((1,), "contacts kept, at most nconmax", "i"),
        "ncon_lost": Field((1,), "contacts beyond nconmax in this evaluation", "i"),
        "contact_dist": Field((nc,), "signed distance, m"),
        "contact_pos": Field((nc, 3), "midpoint of the contact, m, world"),
        "contact_frame": Field((nc, 6), "normal (geom1 to geom2) and first tangent, world"),
        "contact_pair": Field((nc,), "index into the model's candidate pairs", "i"),
        "contact_mu": Field((nc, 2), "friction coefficients of the two tangents (0 for condim 1)"),
        "contact_J": Field((nc, 3, nv), "Jacobian of the normal and of mu times each tangent"),
        "contact_D": Field(
            (nc,), "efc_D of each of the contact's four pyramid rows (condim 1: a quarter of its row's)"
        ),
        "contact_aref": Field((nc, 3), "reference acceleration of the rows of contact_J, m/s^2"),
        "contact_jar": Field((nc, 3), "solver: contact_J qacc - contact_aref"),
        "contact_jv": Field((nc, 3), "solver: contact_J times the search direction"),
        "contact_force": Field((nc, 4), "efc_force of the four pyramid rows (condim 1: a quarter of the row's each)"),
        "limit_sign": Field((max(m.njnt, 1),), "J of the joint's limit row: 1 lower, -1 upper, 0 inactive"),
        "limit_D": Field((max(m.njnt, 1),), "efc_D of the joint's limit row, 0 when inactive"),
        "limit_aref": Field((max(m.njnt, 1),), "efc_aref of the joint's limit row"),
        "limit_force": Field((max(m.njnt, 1),), "efc_force of the joint's limit row"),
        "qacc": Field((nv,), "acceleration"),
        "qfrc_constraint": Field((nv,), "constraint force in joint space, N or N m"),
        "solver_niter": Field((1,), "Newton iterations", "i"),
        "cfrc_ext": Field((nb, 6), "contact wrench about subtree_com of the root: torque, force"),
    }
    return {name: field for table in (*tables, contact) for name, field in table.items()}


def _state_fields(m: Model) -> dict[str, Field]:
    return {
        "qpos": Field((max(m.nq, 1),), "position, m, rad or quaternion"),
        "qvel": Field((max(m.nv, 1),), "velocity, m/s or rad/s"),
        "ctrl": Field((max(m.nu, 1),), "control, in the actuator's unit"),
        "qacc_warmstart": Field(
            (max(m.nv, 1),), "what qacc is expected to be; between steps, that of the last evaluation"
        ),
        "mocap_pos": Field((max(m.nmocap, 1), 3), "mocap body positions, m"),
        "mocap_quat": Field((max(m.nmocap, 1), 4), "mocap body orientations"),
    }


def _position_fields(m: Model) -> dict[str, Field]:
    nb, nj, ng, nv = m.nbody, max(m.njnt, 1), max(m.ngeom, 1), max(m.nv, 1)
    return {
        "xpos": Field((nb, 3), "body origin, m, world"),
        "xquat": Field((nb, 4), "body orientation, world"),
        "xmat": Field((nb, 9), "body orientation, row-major"),
        "xipos": Field((nb, 3), "body centre of mass, m, world"),
        "ximat": Field((nb, 9), "orientation of the body's inertia frame"),
        "xanchor": Field((nj, 3), "joint anchor, m, world"),
        "xaxis": Field((nj, 3), "joint axis, world"),
        "geom_xpos": Field((ng, 3), "geom centre, m, world"),
        "geom_xmat": Field((ng, 9), "geom orientation, row-major"),
        "subtree_com": Field((nb, 3), "centre of mass of the subtree, m, world"),
        "cinert": Field((nb, 10), "com-based body inertia: 6 rotational, mass times offset, mass"),
        "cdof": Field((nv, 6), "com-based motion axis: rotation, translation"),
        "qM": Field((max(m.nM, 1),), "joint-space inertia, sparse"),
        "qLD": Field((max(m.nM, 1),), "L'DL factor of qM, sparse"),
        "qLDiagInv": Field((nv,), "1 / D"),
    }


def _velocity_fields(m: Model) -> dict[str, Field]:
    nb, nv, nu = m.nbody, max(m.nv, 1), max(m.nu, 1)
    return {
        "cvel": Field((nb, 6), "com-based velocity: rotation, translation"),
        "cdof_dot": Field((nv, 6), "time derivative of cdof"),
        "qfrc_passive": Field((nv,), "springs and dampers, N or N m"),
        "qfrc_bias": Field((nv,), "Coriolis, centrifugal, gravity, N or N m"),
        "actuator_force": Field((nu,), "actuator output, N or N m"),
        "qfrc_actuator": Field((nv,), "actuators in joint space, N or N m"),
        "qfrc_smooth": Field((nv,), "sum of all but constraint forces"),
        "qacc_smooth": Field((nv,), "unconstrained acceleration"),
    }


def _integration_fields(m: Model) -> dict[str, Field]:
    nv, nfree = max(m.nv, 1), sum(int(kind) == 0 for kind in m.jnt_type)
    return {
        # Kept over a Runge-Kutta step.
        "rk4_qpos": Field((max(m.nq, 1),), "qpos at the start of the step"),
        "rk4_qvel": Field((nv,), "qvel at the start of the step"),
        "rk4_dq": Field((nv,), "weighted sum of the stages' velocities"),
        "rk4_dv": Field((nv,), "weighted sum of the stages' accelerations"),
        "rk4_trend": Field((nv,), "the last change of qacc over half a step; 0 at the start of a call"),
        "rk4_turn": Field(
            (max(nfree, 1), 3), "rotation vector of each free joint since the step's start, rad, body frame"
        ),
        "diverged": Field((1,), "1 once qpos, qvel or qacc was NaN, infinite or beyond 1e10", "i"),
    }
