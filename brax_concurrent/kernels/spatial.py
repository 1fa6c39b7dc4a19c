"""Spatial (6-D) vectors as lists of six scalars: rotation first, then translation.

MuJoCo keeps all of a tree's spatial quantities in world axes about the centre of mass of the tree
(`subtree_com` of its root), so that they can be added without transformations. The algebra is Featherstone's
(Rigid Body Dynamics Algorithms, 2008, chapter 2). An inertia is ten scalars: the rotational part xx yy zz xy
xz yz, the first moment mass * offset, and the mass.
"""

from __future__ import annotations

from typing import Any

from brax_concurrent.kernels.vec import Vec, add, cross, dot, sub


def inertia_times(inertia: Vec, v: Vec) -> list[Any]:
    """Momentum of a body with velocity v, or the force that gives it the acceleration v."""
    xx, yy, zz, xy, xz, yz, *moment, mass = inertia
    rotation, translation = v[:3], v[3:]
    turned = [dot(row, rotation) for row in ((xx, xy, xz), (xy, yy, yz), (xz, yz, zz))]
    carried = [mass * x for x in translation]
    return [*add(turned, cross(moment, translation)), *sub(carried, cross(moment, rotation))]


def cross_motion(v: Vec, motion: Vec) -> list[Any]:
    """Rate of change of a motion vector that moves with velocity v."""
    return [
        *cross(v[:3], motion[:3]),
        *add(cross(v[:3], motion[3:]), cross(v[3:], motion[:3])),
    ]


def cross_force(v: Vec, force: Vec) -> list[Any]:
    """Rate of change of a force vector that moves with velocity v."""
    return [
        *add(cross(v[:3], force[:3]), cross(v[3:], force[3:])),
        *cross(v[:3], force[3:]),
    ]
