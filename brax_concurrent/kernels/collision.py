"""Collision stage: which geoms touch, where and how deep (`mj_collision`).

All candidate pairs are tested; what touches is appended to the lane's own list of contacts. Pairs with a plane are
unrolled, because their geometry folds (the plane is fixed). The many alike pairs of a robot with itself are tested with
bounding spheres first, which decides nothing but whether the work is done; those that are near are a loop at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from brax_concurrent.kernels.contact_parameters import pair_margin
from brax_concurrent.kernels.fold import constant
from brax_concurrent.kernels.kernel import kernel
from brax_concurrent.kernels.ops import absolute, both, clip, maximum, minimum, negate, sign_bit, to_int, where
from brax_concurrent.kernels.vec import Vec, add_scaled, cross, dot, normalize, sub

PLANE, SPHERE, CAPSULE = 0, 2, 3
"""Values of geom_type (mjtGeom)."""

_PARALLEL = 1e-8  # of two segments: the squared sine of the angle between them
_X_AXIS = (1.0, 0.0, 0.0)


@kernel(
    reads=("geom_xpos", "geom_xmat"),
    writes=("ncon", "ncon_lost", "contact_dist", "contact_pos", "contact_frame", "contact_pair"),
)
def collision(m: Any, w: Any) -> None:
    """Find the contacts with dist < margin, in order of their pairs, except that looped pairs follow type by type."""
    contacts = _Contacts(m, w)
    kinds: dict[tuple[int, int], list[int]] = {}
    for p in range(m.npair):
        g1, g2 = m.pair_geom[p, 0], m.pair_geom[p, 1]
        kind = (m.geom_type[g1], m.geom_type[g2])
        if kind[0] == PLANE:
            _COLLIDE[kind](contacts, _Pair(p, _geom(m, w, g1), _geom(m, w, g2), pair_margin(m, p)))
        else:
            kinds.setdefault(kind, []).append(p)
    for kind, pairs in kinds.items():
        _collide_alike(m, w, contacts, _COLLIDE[kind], pairs)
    contacts.finish()


@dataclass(frozen=True)
class _Geom:
    """A geom at run time; `index` is a Python int or a runtime integer, radius and half length are in m.

    Position and axis are read where they are asked for: the far test needs no axis.
    """

    w: Any
    index: Any
    radius: Any
    half: Any

    @property
    def pos(self) -> Vec:
        """The centre, m, world."""
        return self.w.geom_xpos[self.index]

    @property
    def axis(self) -> Vec:
        """The z axis: a plane's normal, a capsule's axis."""
        return [self.w.geom_xmat[self.index, i] for i in (2, 5, 8)]


@dataclass(frozen=True)
class _Pair:
    """Two geoms that may touch; `index` is that of the candidate pair, a Python int or a runtime integer."""

    index: Any
    first: _Geom
    second: _Geom
    margin: Any


def _geom(m: Any, w: Any, g: int) -> _Geom:
    return _Geom(w, g, m.geom_size[g, 0], m.geom_size[g, 1])


_Collider = Callable[["_Contacts", _Pair], Any]


class _Contacts:
    """The lane's list of contacts while it grows."""

    def __init__(self, m: Any, w: Any):
        self.w = w
        self._most = m.nconmax
        self._count = w.var(0)
        self._can_overflow = sum(m.pair_maxcontact[p] for p in range(m.npair)) > m.nconmax

    def append(self, pair: Any, touches: Any, dist: Any, pos: Vec, normal: Vec, tangent: Vec) -> None:
        """Add a contact in the lanes where `touches` holds; what finds no room is counted only."""
        w, k = self.w, self._count.value
        room = both(touches, k < self._most) if self._can_overflow else touches
        with w.when(room):
            w.contact_dist[k] = dist
            w.contact_pos[k] = pos
            w.contact_frame[k] = [*normal, *tangent]
            w.contact_pair[k] = pair
        self._count.value = k + to_int(touches)

    def finish(self) -> None:
        count, most = self._count.value, self._most
        self.w.ncon[0] = minimum(count, most) if self._can_overflow else count
        self.w.ncon_lost[0] = maximum(count - most, 0) if self._can_overflow else 0


def _collide_alike(m: Any, w: Any, contacts: _Contacts, collide: _Collider, pairs: list[int]) -> None:
    """Test pairs of the same two types.

    The tests of bounding spheres are unrolled: a lane then knows its near pairs, and neither a runtime row nor a branch
    stands between two tests. What they leave is a loop over the lane's own pairs, unless sizes or margins differ by
    environment.
    """
    ids = [(m.pair_geom[p, 0], m.pair_geom[p, 1]) for p in pairs]
    sizes = [[m.geom_size[g, i] for g in both_ids for i in (0, 1)] for both_ids in ids]
    margins = [pair_margin(m, p) for p in pairs]
    if len(pairs) == 1 or not constant(*margins, *(x for row in sizes for x in row)):
        for p, (g1, g2), margin in zip(pairs, ids, margins, strict=True):
            _collide_near(contacts, collide, _Pair(p, _geom(m, w, g1), _geom(m, w, g2), margin))
        return
    firsts, seconds = (w.table(column) for column in zip(*ids, strict=True))
    reaches = [_reach(r1, h1, r2, h2, margin) for (r1, h1, r2, h2), margin in zip(sizes, margins, strict=True)]
    squares = [reach * reach for reach in reaches]
    numbers = [_column(w, column) for column in (margins, *zip(*sizes, strict=True))]
    for i in w.set_bits(_near(w, ids, squares)):
        margin, radius1, half1, radius2, half2 = (_at(column, i) for column in numbers)
        first, second = _Geom(w, firsts[i], radius1, half1), _Geom(w, seconds[i], radius2, half2)
        collide(contacts, _Pair(w.table(pairs)[i], first, second, margin))


def _near(w: Any, ids: list[tuple[int, int]], squares: list[float]) -> list[Any]:
    """The pairs whose bounding spheres overlap, as words for `w.set_bits`; `squares` are those of the reaches, m^2.

    What is gathered are signs: a condition would first have to become a number.
    """
    words: list[Any] = []
    for start in range(0, len(ids), 32):
        word: Any = 0
        for (g1, g2), square in zip(ids[start : start + 32][::-1], squares[start : start + 32][::-1], strict=True):
            x, y, z = sub(w.geom_xpos[g1], w.geom_xpos[g2])
            word = word << 1 | sign_bit(z * z + (y * y + (x * x - square)))
        words.append(word)
    return words


def _column(w: Any, values: Any) -> Any:
    """A table of the values, or the value if they are all the same."""
    return float(values[0]) if len(set(values)) == 1 else w.table([float(v) for v in values])


def _at(column: Any, i: Any) -> Any:
    return column if constant(column) else column[i]


def _reach(radius1: Any, half1: Any, radius2: Any, half2: Any, margin: Any) -> Any:
    """Distance of the centres up to which bounding spheres, a little enlarged against rounding, overlap, m."""
    return (radius1 + half1 + radius2 + half2 + margin) * 1.00001


def _collide_near(contacts: _Contacts, collide: _Collider, pair: _Pair) -> None:
    """Collide the pair where bounding spheres overlap."""
    first, second = pair.first, pair.second
    reach = _reach(first.radius, first.half, second.radius, second.half, pair.margin)
    apart = sub(first.pos, second.pos)
    with contacts.w.when(dot(apart, apart) <= reach * reach):
        collide(contacts, pair)


# ---- planes ----------------------------------------------------------------------------------------------------------


def _plane_sphere(contacts: _Contacts, pair: _Pair) -> None:
    plane, sphere = pair.first, pair.second
    dist = dot(sub(sphere.pos, plane.pos), plane.axis) - sphere.radius
    with contacts.w.when(dist < pair.margin):
        pos = add_scaled(sphere.pos, plane.axis, -0.5 * dist - sphere.radius)
        contacts.append(pair.index, True, dist, pos, plane.axis, _any_tangent(plane.axis))


def _plane_capsule(contacts: _Contacts, pair: _Pair) -> None:
    """Its two end spheres against the plane; the first tangent lies along the capsule."""
    plane, capsule = pair.first, pair.second
    middle = dot(sub(capsule.pos, plane.pos), plane.axis) - capsule.radius
    rise = dot(capsule.axis, plane.axis) * capsule.half
    with contacts.w.when(middle - absolute(rise) < pair.margin):
        # The axis' component in the plane, as n x a x n: a fixed vertical normal leaves two products of it.
        along = cross(cross(plane.axis, capsule.axis), plane.axis)
        tangent = normalize(along, _X_AXIS)[0]
        for end in (1.0, -1.0):
            dist = middle + end * rise
            point = add_scaled(capsule.pos, capsule.axis, end * capsule.half)
            pos = add_scaled(point, plane.axis, -0.5 * dist - capsule.radius)
            contacts.append(pair.index, dist < pair.margin, dist, pos, plane.axis, tangent)


def _any_tangent(normal: Vec) -> list[Any]:
    """The tangent that MuJoCo chooses when nothing suggests one (`mju_makeFrame`): along y, or z if y is near."""
    by_y = absolute(normal[1]) < 0.5
    base = [0.0, where(by_y, 1.0, 0.0), where(by_y, 0.0, 1.0)]
    along = where(by_y, normal[1], normal[2])
    # Its length is at least 0.86.
    return normalize(add_scaled(base, normal, -along), _X_AXIS)[0]


# ---- spheres and capsules --------------------------------------------------------------------------------------------


def _sphere_sphere(contacts: _Contacts, pair: _Pair) -> None:
    _touch(contacts, pair, pair.first.pos, pair.second.pos)


def _sphere_capsule(contacts: _Contacts, pair: _Pair) -> None:
    sphere, capsule = pair.first, pair.second
    along = _within(dot(capsule.axis, sub(sphere.pos, capsule.pos)), capsule.half)
    _touch(contacts, pair, sphere.pos, add_scaled(capsule.pos, capsule.axis, along))


def _capsule_capsule(contacts: _Contacts, pair: _Pair) -> None:
    """The nearest points of two segments; for parallel ones both ends of the stretch where they face each other.

    Points at x1 and x2 along the axes from the centres are nearest where x1 - c x2 = u and x2 - c x1 = v, c being the
    cosine of the angle between the axes. As in MuJoCo 4.0, segments at less than 1e-4 rad are parallel; each end of the
    stretch is an end of one segment and its foot on the other; and two contacts are made even where the stretch is a
    point.
    """
    first, second = pair.first, pair.second
    axis1, axis2 = first.axis, second.axis
    apart, across = sub(second.pos, first.pos), cross(axis1, axis2)
    cosine, u, v = dot(axis1, axis2), dot(axis1, apart), -dot(axis2, apart)
    sine_squared = dot(across, across)  # 1 - cosine**2 would have no digits in single precision
    parallel = sine_squared < _PARALLEL
    crossing = (u + cosine * v) / where(parallel, 1.0, sine_squared)
    for trial in contacts.w.range(where(parallel, 2, 1)):
        end2 = where(trial == 0, -second.half, second.half)
        foot1 = u + cosine * end2
        x1 = _within(where(parallel, foot1, crossing), first.half)
        foot2 = v + cosine * x1
        x2 = where(both(parallel, absolute(foot1) <= first.half), end2, _within(foot2, second.half))
        beyond = both(absolute(foot2) > second.half, negate(parallel))
        x1 = where(beyond, _within(u + cosine * x2, first.half), x1)
        _touch(contacts, pair, add_scaled(first.pos, axis1, x1), add_scaled(second.pos, axis2, x2))


def _within(x: Any, half: Any) -> Any:
    return clip(x, -half, half)


def _touch(contacts: _Contacts, pair: _Pair, point1: Vec, point2: Vec) -> None:
    """Append the contact of two spheres about the points, with the geoms' radii, where they touch."""
    first, second = pair.first, pair.second
    apart = sub(point2, point1)
    reach = first.radius + second.radius + pair.margin
    # |reach|: a negative margin may leave less than nothing.
    with contacts.w.when(dot(apart, apart) < reach * absolute(reach)):
        # Where the points coincide, MuJoCo takes the normal of the plane of the two z axes.
        aside = normalize(cross(first.axis, second.axis), _X_AXIS)[0]
        normal, length = normalize(apart, aside)
        dist = length - first.radius - second.radius
        pos = add_scaled(point1, normal, first.radius + 0.5 * dist)
        contacts.append(pair.index, True, dist, pos, normal, _any_tangent(normal))


_COLLIDE = {
    (PLANE, SPHERE): _plane_sphere,
    (PLANE, CAPSULE): _plane_capsule,
    (SPHERE, SPHERE): _sphere_sphere,
    (SPHERE, CAPSULE): _sphere_capsule,
    (CAPSULE, CAPSULE): _capsule_capsule,
}
