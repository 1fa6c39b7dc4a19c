"""Constants of contacts and limits: how MuJoCo mixes them for a pair of geoms, and what becomes of them in a row.

Everything here is computed before a loop over contacts starts, once per pair of geoms. With a robot's constants it
folds to Python numbers; with quantities that vary per environment it is a little code per pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from brax_concurrent.kernels.fold import constant
from brax_concurrent.kernels.ops import absolute, both, exp, int32, log, maximum, minimum, power, where
from brax_concurrent.kernels.vec import Vec

_MIN_VALUE = 1e-15  # mjMINVAL
_MIN_FRICTION = 1e-5  # mjMINMU
_MIN_IMPEDANCE, _MAX_IMPEDANCE = 0.0001, 0.9999  # mjMINIMP, mjMAXIMP


@dataclass(frozen=True)
class Spring:
    """How a constraint row answers its violation: solref and solimp, as the constraint stage uses them.

    The impedance d(r) rises from `start` at r = 0 to `start + rise` at |r| >= 1 / inverse_width along two arcs of the
    power `order` that meet at `midpoint` (MuJoCo documentation, "Solver parameters"). Then
    aref = -damping * velocity - stiffness * d(r) * r.
    """

    stiffness: Any
    damping: Any
    start: Any
    rise: Any
    inverse_width: Any
    midpoint: Any
    order: Any
    lower: Any  # factor of the arc below the midpoint: midpoint ** (1 - order)
    upper: Any  # of the one above: (1 - midpoint) ** (1 - order)

    def impedance(self, violation: Any) -> Any:
        """d(violation), violation in m or rad."""
        x = minimum(absolute(violation) * self.inverse_width, 1.0)
        below = self.lower * _raise(x, self.order)
        above = 1.0 - self.upper * _raise(1.0 - x, self.order)
        linear = constant(self.order) and self.order == 1
        return self.start + self.rise * (x if linear else where(x <= self.midpoint, below, above))


def spring(m: Any, solref: Vec, solimp: Vec) -> Spring:
    """The Spring of a solref (time constant and damping ratio, or -stiffness and -damping) and a solimp."""
    time, ratio = solref
    if m.opt.refsafe:
        time = where(time > 0, maximum(time, 2.0 * m.opt.timestep), time)
    first, last, midpoint = (minimum(maximum(solimp[i], _MIN_IMPEDANCE), _MAX_IMPEDANCE) for i in (0, 1, 3))
    width, order = maximum(solimp[2], 0.0), maximum(solimp[4], 1.0)
    flat = width <= _MIN_VALUE
    return Spring(
        stiffness=where(
            time > 0,
            1.0 / maximum(last * last * time * time * ratio * ratio, _MIN_VALUE),
            -time / (last * last),
        ),
        damping=where(ratio > 0, 2.0 / maximum(last * time, _MIN_VALUE), -ratio / last),
        start=where(flat, 0.5 * (first + last), first),
        rise=where(flat, 0.0, last - first),
        inverse_width=1.0 / where(flat, 1.0, width),
        midpoint=midpoint,
        order=order,
        lower=_raise(midpoint, 1.0 - order),
        upper=_raise(1.0 - midpoint, 1.0 - order),
    )


def _raise(x: Any, exponent: Any) -> Any:
    """x ** exponent for x >= 0."""
    if not constant(exponent):
        return exp(maximum(exponent * log(maximum(x, 1e-30)), -80.0))
    if constant(x):
        return x**exponent
    return power(x, exponent) if exponent > 0 else 1.0 / power(x, -exponent) if exponent < 0 else 1.0


def row_stiffness(impedance: Any, inverse_inertia: Any, scale: Any) -> Any:
    """D = 1 / R of a constraint row, R = scale * max((1 - impedance) / impedance * inverse_inertia, 1e-15)."""
    resistance = (1.0 - impedance) * inverse_inertia
    if not constant(inverse_inertia) or inverse_inertia * _MIN_IMPEDANCE < _MIN_VALUE:
        resistance = maximum(resistance, impedance * _MIN_VALUE)
    return impedance / (scale * resistance)


@dataclass(frozen=True)
class PairConstants:
    """What the constraint stage needs of a candidate pair.

    Attributes:
        margin: m; the contact is active when dist < margin.
        mu: friction coefficients of the two tangents; 0 for condim 1.
        spring: of all the contact's rows.
        inverse_inertia: MuJoCo's approximation of the diagonal of J inv(M) J' for the first row.
        scale: R of each of the contact's four rows over R of the first row by itself. MuJoCo's pyramid rows have
            2 mu**2 / impratio times that, so that the pyramid is as stiff along the normal as the elliptic cone would
            be; condim 1 is kept as four equal rows of a quarter of its row's D.
    """

    margin: Any
    mu: tuple[Any, Any]
    spring: Spring
    inverse_inertia: Any
    scale: Any


def pair_constants(m: Any, p: int) -> PairConstants:
    """The constants of candidate pair p, as `mj_contactParam`, `mj_diagApprox` and `mj_makeImpedance` find them."""
    friction, solref, solimp = _mixed(m, p)
    body1, body2 = pair_bodies(m, p)
    inertia = m.body_invweight0[body1, 0] + m.body_invweight0[body2, 0]
    mu: tuple[Any, Any] = (0.0, 0.0)
    scale: Any = 4.0
    if m.pair_condim[p] != 1:
        mu = (maximum(friction[0], _MIN_FRICTION), maximum(friction[1], _MIN_FRICTION))
        inertia = inertia * (1.0 + mu[0] * mu[0])
        scale = 2.0 * mu[0] * mu[0] / maximum(m.opt.impratio, _MIN_VALUE)
    return PairConstants(pair_margin(m, p), mu, spring(m, solref, solimp), inertia, scale)


def pair_margin(m: Any, p: int) -> Any:
    """Distance below which candidate pair p exerts force, m: the explicit pair's, else the sum of the geoms'."""
    explicit = m.pair_explicit[p]
    if explicit >= 0:
        return m.pair_margin[explicit]
    return m.geom_margin[m.pair_geom[p, 0]] + m.geom_margin[m.pair_geom[p, 1]]


def pair_bodies(m: Any, p: int) -> tuple[int, int]:
    """Bodies of the two geoms of candidate pair p."""
    return m.geom_bodyid[m.pair_geom[p, 0]], m.geom_bodyid[m.pair_geom[p, 1]]


def _mixed(m: Any, p: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Friction of the two tangents, solref and solimp of candidate pair p."""
    explicit = m.pair_explicit[p]
    if explicit >= 0:
        return (
            [m.pair_friction[explicit, i] for i in range(2)],
            [m.pair_solref[explicit, i] for i in range(2)],
            [m.pair_solimp[explicit, i] for i in range(5)],
        )
    g1, g2 = m.pair_geom[p, 0], m.pair_geom[p, 1]
    slide, solref, solimp = ([[a[g, i] for i in range(n)] for g in (g1, g2)] for a, n in _columns(m))
    if m.geom_priority[g1] != m.geom_priority[g2]:
        g = 0 if m.geom_priority[g1] > m.geom_priority[g2] else 1
        return slide[g] * 2, solref[g], solimp[g]
    share = _solmix(m.geom_solmix[g1], m.geom_solmix[g2])
    standard = both(solref[0][0] > 0, solref[1][0] > 0)
    mix = [[share * a + (1.0 - share) * b for a, b in zip(*values, strict=True)] for values in (solref, solimp)]
    direct = [minimum(a, b) for a, b in zip(*solref, strict=True)]
    return (
        [maximum(slide[0][0], slide[1][0])] * 2,
        [where(standard, a, b) for a, b in zip(mix[0], direct, strict=True)],
        mix[1],
    )


def _columns(m: Any) -> tuple[tuple[Any, int], ...]:
    return (m.geom_friction, 1), (m.geom_solref, 2), (m.geom_solimp, 5)


def _solmix(weight1: Any, weight2: Any) -> Any:
    """The share of the first geom; a weight that is (nearly) zero gives way to the other."""
    small1, small2 = weight1 < _MIN_VALUE, weight2 < _MIN_VALUE
    total = where(both(small1, small2), 1.0, weight1 + weight2)
    share = where(small1, 0.0, where(small2, 1.0, weight1 / total))
    return where(both(small1, small2), 0.5, share)


def by_pair(w: Any, pair: Any, values: Sequence[Any]) -> Any:
    """values[pair] for a runtime pair: the common value, or a table, or, where they are not constant, a selection."""
    if constant(*values):
        return values[0] if len(set(values)) == 1 else w.table(values)[pair]
    distinct: dict[Any, tuple[int, Any]] = {}
    kinds = [distinct.setdefault(v if constant(v) else id(v), (len(distinct), v))[0] for v in values]
    kind = w.table(kinds)[pair]
    (_, result), *others = distinct.values()
    for number, value in others:
        result = where(kind == number, value, result)
    return result


def dof_signs(m: Any) -> list[tuple[int, ...]]:
    """For each dof, by pair: 1 if it moves the second body only, -1 if the first only, 0 if none or both.

    A dof that moves both bodies carries the contact along: its columns of the two bodies' Jacobians cancel.
    """
    chains = [[set(m.body_dofs[b]) for b in pair_bodies(m, p)] for p in range(m.npair)]
    return [tuple((i in second) - (i in first) for first, second in chains) for i in range(m.nv)]


class DofSelector:
    """Tells which dofs act on a contact: a few flags per pair, 32 to the word, instead of a table per dof.

    Args:
        w: the world.
        signs: from `dof_signs`.
        pair: the contact's pair, a runtime integer.
    """

    def __init__(self, w: Any, signs: Sequence[tuple[int, ...]], pair: Any):
        self._signs = signs
        self._flags: dict[tuple[bool, ...], Any] = {}
        found = {tuple(s == sign for s in row) for row in signs for sign in (1, -1)}
        sets = sorted(s for s in found if any(s) and not all(s))
        for first in range(0, len(sets), 32):
            chunk = sets[first : first + 32]
            word = w.table([int32(sum(s[p] << bit for bit, s in enumerate(chunk))) for p in range(len(signs[0]))])[pair]
            for bit, members in enumerate(chunk):
                self._flags[members] = (word & int32(1 << bit)) != 0

    def signed(self, dof: int, values: Vec) -> list[Any]:
        """The values times the dof's sign for this contact."""
        plus, minus = (tuple(s == sign for s in self._signs[dof]) for sign in (1, -1))
        return [self._pick(plus, v, self._pick(minus, -v, 0.0)) for v in values]

    def _pick(self, members: tuple[bool, ...], value: Any, other: Any) -> Any:
        if not any(members):
            return other
        return value if all(members) else where(self._flags[members], value, other)
