"""Which geoms can touch, in which order, and with which contact parameters.

The filters are those of MuJoCo's broad phase (`mj_broadphase` and `mj_collision`), without the geometric
ones: what is left is the list of pairs that some pose could bring into contact.  It is a constant of the
model.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from brax_concurrent.kernels.model import Model

PLANE = int(mujoco.mjtGeom.mjGEOM_PLANE)
SPHERE = int(mujoco.mjtGeom.mjGEOM_SPHERE)
CAPSULE = int(mujoco.mjtGeom.mjGEOM_CAPSULE)

#: Contacts that one pair can produce at once, by geom types in MuJoCo's order (`mj_maxContact`).
MAX_CONTACTS = {
    (PLANE, SPHERE): 1,
    (PLANE, CAPSULE): 2,
    (SPHERE, SPHERE): 1,
    (SPHERE, CAPSULE): 1,
    (CAPSULE, CAPSULE): 2,
}

#: MuJoCo's lower bound of a friction coefficient (mjMINMU), and what it counts as zero (mjMINVAL).
MIN_FRICTION = float(mujoco.mjMINMU)
MIN_VALUE = float(mujoco.mjMINVAL)


@dataclasses.dataclass(frozen=True)
class PairParameters:
    """The contact parameters of one pair, as MuJoCo writes them into `mjContact`.

    Attributes:
        dim: condim, 1 or 3.
        friction: shape (5,): tangent 1, tangent 2, spin, roll 1, roll 2.
        solref: shape (2,): time constant [s] and damping ratio, or -stiffness and -damping.
        solimp: shape (5,).
        margin: [m]; a contact is active when dist < margin (`mjContact.includemargin`).
        gap: [m]; a contact is detected when dist < margin + gap.
    """

    dim: int
    friction: npt.NDArray[np.float64]
    solref: npt.NDArray[np.float64]
    solimp: npt.NDArray[np.float64]
    margin: float
    gap: float


def candidate_pairs(mj: mujoco.MjModel) -> list[tuple[int, int, int]]:
    """List the geom pairs that can touch, as (geom1, geom2, index of the explicit `<pair>` or -1).

    geom1's type is never above geom2's; equal types keep MuJoCo's order, which is that of their bodies.  The
    list is ordered as MuJoCo orders its contacts: by body pair, explicit pairs first, then by geom.  Explicit
    pairs whose two geoms cannot move against each other are left out: they can exert no force.

    Args:
        mj: a compiled model.  With the flag `contact` or `constraint` disabled there are no pairs.

    Returns:
        One tuple per candidate pair.
    """
    disabled = mujoco.mjtDisableBit.mjDSBL_CONTACT | mujoco.mjtDisableBit.mjDSBL_CONSTRAINT
    if mj.opt.disableflags & disabled:
        return []
    explicit = defaultdict(list)
    for k, signature in enumerate(mj.pair_signature.tolist()):
        explicit[signature].append(k)
    excluded = set(mj.exclude_signature.tolist())

    pairs: list[tuple[int, int, int]] = []
    for body1 in range(mj.nbody):
        for body2 in range(body1, mj.nbody):
            if not _moves_relative(mj, body1, body2):
                continue
            signature = (body1 << 16) + body2
            named: set[frozenset[int]] = set()
            for k in explicit[signature]:
                g1, g2 = int(mj.pair_geom1[k]), int(mj.pair_geom2[k])
                named.add(frozenset((g1, g2)))
                pairs.append((*_by_type(mj, g1, g2), k))
            if signature in excluded or _filtered_as_parent(mj, body1, body2):
                continue
            mixed = [
                (*_by_type(mj, g1, g2), -1)
                for g1 in _geoms(mj, body1)
                for g2 in _geoms(mj, body2)
                if _masks_match(mj, g1, g2) and frozenset((g1, g2)) not in named
            ]
            # The mid phase sorts a body pair's contacts by their geoms; without it they stay in loop order.
            pairs += mixed if mj.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_MIDPHASE else sorted(mixed)
    return pairs


def pair_fields(mj: mujoco.MjModel, nconmax: int) -> dict[str, Any]:
    """Return the fields of `Model` that describe contact pairs.

    Args:
        mj: a compiled model that the kernels support.
        nconmax: cap on the contacts kept.

    Returns:
        npair, nexplicit, nconmax, pair_geom, pair_explicit, pair_condim and pair_maxcontact, as `Model` has
        them, and max_contact_rows: the constraint rows that nconmax contacts can make.
    """
    pairs = candidate_pairs(mj)
    geoms = np.array([pair[:2] for pair in pairs], np.int32).reshape(-1, 2)
    condim = [int(mj.pair_dim[k]) if k >= 0 else mix_geoms(mj, g1, g2).dim for g1, g2, k in pairs]
    most = [MAX_CONTACTS[int(mj.geom_type[g1]), int(mj.geom_type[g2])] for g1, g2, _ in pairs]
    nconmax = min(sum(most), nconmax)
    rows = [4 if dim == 3 else 1 for dim, n in zip(condim, most, strict=True) for _ in range(n)]
    return {
        "npair": len(pairs),
        "nexplicit": int(mj.npair),
        "nconmax": nconmax,
        "max_contact_rows": sum(sorted(rows, reverse=True)[:nconmax]),
        "pair_geom": geoms,
        "pair_explicit": np.array([pair[2] for pair in pairs], np.int32),
        "pair_condim": np.array(condim, np.int32),
        "pair_maxcontact": np.array(most, np.int32),
    }


def _moves_relative(mj: mujoco.MjModel, body1: int, body2: int) -> bool:
    """Return whether any degree of freedom lies between two bodies, or moves one of them."""
    weld1, weld2 = mj.body_weldid[body1], mj.body_weldid[body2]
    return bool(weld1 != weld2 and (mj.body_dofnum[weld1] > 0 or mj.body_dofnum[weld2] > 0))


def _filtered_as_parent(mj: mujoco.MjModel, body1: int, body2: int) -> bool:
    """Return whether MuJoCo skips the two bodies because one is the other's parent.

    Bodies welded to the world are never filtered this way, so that a floor stays solid for the first link.
    """
    if mj.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_FILTERPARENT:
        return False
    weld1, weld2 = int(mj.body_weldid[body1]), int(mj.body_weldid[body2])
    parent1 = int(mj.body_weldid[mj.body_parentid[weld1]])
    parent2 = int(mj.body_weldid[mj.body_parentid[weld2]])
    return weld1 != 0 and weld2 != 0 and (weld1 == parent2 or weld2 == parent1)


def _geoms(mj: mujoco.MjModel, body: int) -> range:
    first = int(mj.body_geomadr[body])
    return range(first, first + int(mj.body_geomnum[body]))


def _masks_match(mj: mujoco.MjModel, g1: int, g2: int) -> bool:
    forth = mj.geom_contype[g1] & mj.geom_conaffinity[g2]
    back = mj.geom_contype[g2] & mj.geom_conaffinity[g1]
    return bool(forth or back)


def _by_type(mj: mujoco.MjModel, g1: int, g2: int) -> tuple[int, int]:
    return (g2, g1) if mj.geom_type[g1] > mj.geom_type[g2] else (g1, g2)


def mix_pair(model: Model, p: int) -> PairParameters:
    """Return the contact parameters of candidate pair `p`, as MuJoCo 4.0 computes them.

    An explicit `<pair>` brings its own.  Otherwise the geom of higher priority decides; at equal priority
    condim and friction are the larger ones, solref and solimp are weighted by solmix, and a direct
    (non-positive) solref on either side makes solref the elementwise minimum.  Margin and gap are always
    sums.  (`mj_contactParam`.)

    Args:
        model: a loaded model.
        p: index into `model.pair_geom`.

    Returns:
        The parameters, in new arrays.

    Raises:
        IndexError: `p` is not in [0, model.npair).
    """
    if not 0 <= p < model.npair:
        raise IndexError(f"p: expected a pair index in [0, {model.npair}), got {p}")
    k = int(model.pair_explicit[p])
    if k < 0:
        return mix_geoms(model, int(model.pair_geom[p, 0]), int(model.pair_geom[p, 1]))
    return PairParameters(
        dim=int(model.pair_dim[k]),
        friction=np.maximum(model.pair_friction[k], MIN_FRICTION),
        solref=model.pair_solref[k].copy(),
        solimp=model.pair_solimp[k].copy(),
        margin=float(model.pair_margin[k]),
        gap=float(model.pair_gap[k]),
    )


def mix_geoms(m: Any, g1: int, g2: int) -> PairParameters:
    """Return what MuJoCo mixes for two geoms without an explicit pair.

    Args:
        m: a `Model` or a `mujoco.MjModel`; only its `geom_*` arrays are read.
        g1: id of one geom.
        g2: id of the other.

    Returns:
        The parameters, in new arrays.
    """
    priority1, priority2 = int(m.geom_priority[g1]), int(m.geom_priority[g2])
    if priority1 != priority2:
        g = g1 if priority1 > priority2 else g2
        dim, friction = m.geom_condim[g], m.geom_friction[g]
        solref, solimp = m.geom_solref[g], m.geom_solimp[g]
    else:
        dim = max(m.geom_condim[g1], m.geom_condim[g2])
        friction = np.maximum(m.geom_friction[g1], m.geom_friction[g2])
        mix = _solmix(float(m.geom_solmix[g1]), float(m.geom_solmix[g2]))
        solimp = mix * m.geom_solimp[g1] + (1 - mix) * m.geom_solimp[g2]
        if m.geom_solref[g1, 0] > 0 and m.geom_solref[g2, 0] > 0:
            solref = mix * m.geom_solref[g1] + (1 - mix) * m.geom_solref[g2]
        else:
            solref = np.minimum(m.geom_solref[g1], m.geom_solref[g2])
    slide, spin, roll = friction
    return PairParameters(
        dim=int(dim),
        friction=np.maximum(np.array([slide, slide, spin, roll, roll]), MIN_FRICTION),
        solref=np.array(solref),
        solimp=np.array(solimp),
        margin=float(m.geom_margin[g1] + m.geom_margin[g2]),
        gap=float(m.geom_gap[g1] + m.geom_gap[g2]),
    )


def _solmix(weight1: float, weight2: float) -> float:
    """Return the share of the first geom; a weight that is (nearly) zero gives way to the other."""
    if weight1 >= MIN_VALUE and weight2 >= MIN_VALUE:
        return weight1 / (weight1 + weight2)
    if weight1 < MIN_VALUE and weight2 < MIN_VALUE:
        return 0.5
    return 0.0 if weight1 < MIN_VALUE else 1.0
