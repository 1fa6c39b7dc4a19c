"""Contact forces as wrenches on bodies (`mj_rnePostConstraint`, its external part)."""

from __future__ import annotations

from typing import Any

from brax_concurrent.kernels.contact_parameters import by_pair, pair_bodies
from brax_concurrent.kernels.kernel import kernel
from brax_concurrent.kernels.vec import Vec, cross, dot, sub


@kernel(
    reads=(
        *("ncon", "contact_pair", "contact_pos", "contact_frame", "contact_mu", "contact_force"),
        *("subtree_com", "cfrc_ext"),
    ),
    writes=("cfrc_ext",),
)
def rne_post_constraint(m: Any, w: Any) -> None:
    """cfrc_ext: of each body the sum of contact wrenches about its tree's centre of mass, N m and N, world axes.

    A contact pushes its second body along the normal and its first body the other way; the world's row stays 0.
    """
    for b in range(m.nbody):
        w.cfrc_ext[b] = [0.0] * 6
    if not m.npair:
        return
    bodies = [pair_bodies(m, p) for p in range(m.npair)]
    for k in w.range(w.ncon[0]):
        pair = w.contact_pair[k]
        force = _world_force(w, k)
        for side, sign in ((0, -1.0), (1, 1.0)):
            ids = [both[side] for both in bodies]
            if any(ids):
                _add_wrench(m, w, pair, ids, w.contact_pos[k], [sign * f for f in force])


def _world_force(w: Any, k: Any) -> list[Any]:
    """Force on the second body, N, from the forces of the pyramid's edges (`mju_decodePyramid`)."""
    edges, mu, frame = w.contact_force[k], w.contact_mu[k], w.contact_frame[k]
    along = [
        edges[0] + edges[1] + edges[2] + edges[3],
        (edges[0] - edges[1]) * mu[0],
        (edges[2] - edges[3]) * mu[1],
    ]
    axes = [frame[:3], frame[3:], cross(frame[:3], frame[3:])]
    return [dot([axis[i] for axis in axes], along) for i in range(3)]


def _add_wrench(m: Any, w: Any, pair: Any, bodies: list[int], pos: Vec, force: Vec) -> None:
    """Add a force at pos to the pair's body, unless that is the world."""
    body = by_pair(w, pair, bodies)
    centres = {r: w.subtree_com[r] for r in {m.body_rootid[b] for b in bodies}}
    arm = sub(pos, [by_pair(w, pair, [centres[m.body_rootid[b]][i] for b in bodies]) for i in range(3)])
    wrench = [*cross(arm, force), *force]
    with w.when(body > 0):
        for i, x in enumerate(wrench):
            w.cfrc_ext[body, i] = w.cfrc_ext[body, i] + x
