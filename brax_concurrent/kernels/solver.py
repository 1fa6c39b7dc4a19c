"""Constraint solver: the acceleration under constraint forces, by MuJoCo's primal Newton method (`mj_solNewton`).

qacc minimises a strictly convex, piecewise quadratic function (MuJoCo documentation, "Computation: solver algorithms"):

    cost(qacc) = (qacc - qacc_smooth)' M (qacc - qacc_smooth) / 2 + sum over rows of D min(J qacc - aref, 0)**2 / 2

Each environment has its own loop: it assembles H = M + J' D J over the active rows (those with J qacc < aref), factors
it, both with the sparsity that the robot allows (kernels/coupling.py), and searches along the Newton direction for the
exact minimum. When the full step changes no row's activity it has reached the minimum of the whole, and the loop ends
without another test.

Written for single precision too: the unknown is the deviation from qacc_smooth, and the improvement that ends the loop
is a sum of squares instead of a difference of costs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from brax_concurrent.kernels.coupling import contact_groups, rare_limbs
from brax_concurrent.kernels.fold import zero
from brax_concurrent.kernels.inertia import inertia_entries
from brax_concurrent.kernels.kernel import kernel
from brax_concurrent.kernels.ops import absolute, both, either, minimum, negate, sqrt, where
from brax_concurrent.kernels.symmetric import Symmetric, closure, eliminate, factor, times
from brax_concurrent.kernels.symmetric import solve as solve_factored
from brax_concurrent.kernels.vec import Vec, add, dot, sub

_MIN_ITERATIONS = 10


@kernel(
    reads=(
        *("qM", "qacc_smooth", "qacc_warmstart", "limit_sign", "limit_D", "limit_aref"),
        *("ncon", "contact_pair", "contact_J", "contact_D", "contact_aref", "contact_jar", "contact_jv"),
    ),
    writes=(
        *("qacc", "qfrc_constraint", "limit_force", "contact_force", "solver_niter"),
        *("contact_jar", "contact_jv"),
    ),
)
def solve(m: Any, w: Any) -> None:
    """Find qacc and the constraint forces."""
    p = _Problem(m, w)
    p.start()
    cap = max(_MIN_ITERATIONS, m.opt.iterations)
    tolerance = m.opt.tolerance * m.stat_meaninertia * max(1, m.nv)
    for it in w.range(cap):
        gradient = p.quadratic()
        size = sqrt(dot(gradient, gradient))
        # Conditions are written so that NaN ends a loop, too.
        w.break_where(negate(size > tolerance))
        search = [-x for x in p.solve(gradient)]
        decrement = -0.5 * dot(gradient, search)
        w.break_where(both(it > 0, negate(decrement > tolerance)))
        moved = times(p.mass, search)
        step = p.line_search(search, moved, tolerance * m.opt.ls_tolerance)
        p.advance(search, moved, step.length)
        w.solver_niter[0] = it + 1
        w.break_where(either(step.exact, negate(step.improvement > tolerance)))
    p.finish()


@dataclass(frozen=True)
class _Limit:
    """The row of a limited joint: sign * qacc[dof] against aref; D is 0 where the joint is inside its range."""

    joint: int
    dof: int
    sign: Any
    stiffness: Any
    aref: Any


@dataclass(frozen=True)
class _Step:
    """What a line search found.

    Attributes:
        length: in units of the search direction.
        exact: whether this is the minimum of the whole cost.
        improvement: decrease of the cost.
    """

    length: Any
    exact: Any
    improvement: Any


class _Problem:
    """One environment's problem and its current point.

    Attributes (all variables of the lane):
        deviation: qacc - qacc_smooth.
        momentum: M deviation.
        pending: the contacts' `contact_jar` still lacks this times `contact_jv`.
        crossed: whether an active contact couples the rare limbs (`coupling.rare_limbs`) with others.
    """

    def __init__(self, m: Any, w: Any):
        self.m, self.w = m, w
        self.mass = inertia_entries(m, w)
        self.smooth = [w.qacc_smooth[i] for i in range(m.nv)]
        self.limits = [
            _Limit(j, m.jnt_dofadr[j], w.limit_sign[j], w.limit_D[j], w.limit_aref[j])
            for j in range(m.njnt)
            if m.jnt_limited[j]
        ]
        self.groups = contact_groups(m)
        self.rare = rare_limbs(m, self.mass)
        self.crossed = w.var(False)
        self.deviation = [w.var(0.0) for _ in range(m.nv)]
        self.momentum = [w.var(0.0) for _ in range(m.nv)]
        self.pending = w.var(0.0)
        w.solver_niter[0] = 0

    # -- the point ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin at qacc_warmstart or at qacc_smooth, whichever costs less."""
        w, m = self.w, self.m
        warm = [w.qacc_warmstart[i] - self.smooth[i] for i in range(m.nv)] if m.opt.warmstart else None
        excess = w.var(0.0)  # twice what the contacts cost at the warm start more than at qacc_smooth
        for k in self.contacts():
            jacobian = w.contact_J[k]
            jar = sub([dot(row, self.smooth) for row in jacobian], w.contact_aref[k])
            # contact_jv serves as the other candidate's store until there is a search direction.
            w.contact_jar[k], w.contact_jv[k] = jar, jar
            if warm is not None:
                warm_jar = add(jar, [dot(row, warm) for row in jacobian])
                w.contact_jar[k] = warm_jar
                difference = _squares(warm_jar) - _squares(jar)
                excess.value = excess.value + w.contact_D[k] * difference
        if warm is None:
            return
        momentum = times(self.mass, warm)
        total = excess.value + dot(warm, momentum)
        for limit in self.limits:
            cold = limit.sign * self.smooth[limit.dof] - limit.aref
            total = total + limit.stiffness * (_square(cold + limit.sign * warm[limit.dof]) - _square(cold))
        use_warm = total <= 0.0
        for i in range(m.nv):
            self.deviation[i].value = where(use_warm, warm[i], 0.0)
            self.momentum[i].value = where(use_warm, momentum[i], 0.0)
        for k in self.contacts():
            for i in self._moving_rows(k):
                w.contact_jar[k, i] = where(use_warm, w.contact_jar[k, i], w.contact_jv[k, i])

    def contacts(self) -> Iterator[Any]:
        return self.w.range(self.w.ncon[0]) if self.m.npair else iter(())

    def _moving_rows(self, k: Any) -> list[int]:
        """Basis rows of contact k that are not known to be 0: what `start` stored of the others stays as it is."""
        return [i for i, row in enumerate(self.w.contact_J[k]) if not all(zero(x) for x in row)]

    def limit_jar(self, limit: _Limit) -> Any:
        return limit.sign * (self.smooth[limit.dof] + self.deviation[limit.dof].value) - limit.aref

    def _contact_jar(self, k: Any) -> list[Any]:
        """J qacc - aref of a contact's basis rows at the current point, brought up to date."""
        w, pending = self.w, self.pending.value
        for i in self._moving_rows(k):
            w.contact_jar[k, i] = w.contact_jar[k, i] + pending * w.contact_jv[k, i]
        return w.contact_jar[k]

    def advance(self, search: Vec, moved: Vec, length: Any) -> None:
        """Move by length * search, where M search is `moved`. The contacts follow in the next pass over them."""
        for i in range(self.m.nv):
            self.deviation[i].value = self.deviation[i].value + length * search[i]
            self.momentum[i].value = self.momentum[i].value + length * moved[i]
        self.pending.value = length

    # -- the quadratic at the point ----------------------------------------------------------------------------------

    def quadratic(self) -> list[Any]:
        """Put the Hessian of the cost into `hessian`, return the gradient."""
        w = self.w
        self.hessian = _Sums(w, {ij: self.mass.get(ij, 0.0) for ij in self.pattern})
        gradient = _Sums(w, {i: x.value for i, x in enumerate(self.momentum)})
        for limit in self.limits:
            jar, i = self.limit_jar(limit), limit.dof
            gradient.add(i, [limit.sign * limit.stiffness], [minimum(jar, 0.0)])
            self.hessian.add((i, i), [where(jar < 0.0, limit.stiffness, 0.0)], [1.0])
        self.crossed.value = False
        for k in self.contacts():
            jar = self._contact_jar(k)
            pull, weights = _pull(jar, w.contact_D[k]), _weights(jar, w.contact_D[k])
            columns = list(zip(*w.contact_J[k], strict=True))
            for i, column in enumerate(columns):
                gradient.add(i, column, pull)
            self._add_curvature(w.contact_pair[k], columns, weights)
        self.pending.value = 0.0
        return list(gradient.totals().values())

    def _add_curvature(self, pair: Any, columns: list[Any], weights: list[list[Any]]) -> None:
        """Add J' weights J of a contact to the Hessian: the entries of its group, and none if no row is active."""
        w, active = self.w, weights[0][0] > 0.0
        if self.rare is not None:
            crosses = w.table(self.rare.crossing)[pair] == 1
            self.crossed.value = either(self.crossed.value, both(crosses, active))
        with w.when(active):
            group = w.table(self.groups.of_pair)[pair]
            self._add_groups(group, range(len(self.groups.dofs)), columns, weights, {})

    def _add_groups(
        self, group: Any, numbers: Iterable[int], columns: list[Any], weights: list[list[Any]], known: dict[int, Vec]
    ) -> None:
        """Add what `known` lacks of the entries of a contact whose group is one of these.

        Groups share dofs, at least those of the root. The entries of those that all of them have come first, in all
        lanes at once; then, of groups that share more, those of theirs. So lanes whose contacts are of different groups
        go apart as late as possible, and the code for shared entries is there once.

        Args:
            group: the lane's number of a group.
            numbers: which it can be here.
            columns, weights: the contact's Jacobian by dof, and the weights of its basis rows.
            known: weights times columns, by dof; the entries of these are there already.
        """
        dofs, entries, w = self.groups.dofs, self.groups.entries, self.w
        common = frozenset.intersection(*(dofs[n] for n in numbers))
        coupled = frozenset().union(*(entries[n] for n in numbers))
        weighted = known | {j: [dot(row, columns[j]) for row in weights] for j in sorted(common - known.keys())}
        for i, j in self.pattern:
            if (i, j) in coupled and {i, j} <= common and not known.keys() >= {i, j}:
                self.hessian.add((i, j), columns[i], weighted[j])
        rest = {n: dofs[n] - common for n in numbers if dofs[n] != common}
        while rest:
            most = max(sorted(frozenset().union(*rest.values())), key=lambda dof: sum(dof in d for d in rest.values()))
            part = [n for n, own in rest.items() if most in own]
            with w.when(functools.reduce(either, (group == n for n in part))):
                self._add_groups(group, part, columns, weights, weighted)
            rest = {n: own for n, own in rest.items() if n not in part}

    @functools.cached_property
    def pattern(self) -> list[tuple[int, int]]:
        """Entries of H that can be non-zero: those of M, and those of dofs that can act on one contact.

        With rare limbs also what elimination fills in, which happens in place.
        """
        entries = set(self.mass).union(*self.groups.entries)
        if self.rare is not None:
            entries = closure(entries)
        # In this order an unrolled loop over the entries finds its operands in registers.
        return sorted(entries, key=lambda entry: (entry[0] // 3, entry[1] // 3, entry))

    def solve(self, rhs: list[Any]) -> list[Any]:
        """The Hessian's inverse times a vector. The Hessian is used up."""
        if self.rare is None:
            return solve_factored(*factor(self._matrix()), rhs)
        first, last = self.rare.first, range(self.rare.first, self.m.nv)
        pivots = {i: self.w.var(0.0) for i in last}
        crossed = self.crossed.value
        for chosen, absent in ((crossed, frozenset()), (negate(crossed), self.rare.entries)):
            with self.w.when(chosen):
                matrix = {ij: x for ij, x in self._matrix().items() if ij not in absent}
                lower, inverse, rest = eliminate(matrix, first)
                for ij, x in (lower | rest).items():
                    if x is not matrix.get(ij):
                        self.hessian.put(ij, x)
                for i in last:
                    pivots[i].value = inverse[i]
        done = self._matrix()
        lower, inverse = factor({ij: x for ij, x in done.items() if ij[0] < first})
        lower |= {ij: x for ij, x in done.items() if ij[0] >= first}
        return solve_factored(lower, [*inverse, *(pivots[i].value for i in last)], rhs)

    def _matrix(self) -> Symmetric:
        return {ij: x for ij, x in self.hessian.totals().items() if not zero(x)}

    # -- the line search ---------------------------------------------------------------------------------------------

    def line_search(self, search: Vec, moved: Vec, tolerance: Any) -> _Step:
        """The exact minimum of the cost along a direction, by Newton's method on its derivative.

        The derivative is piecewise linear and increasing: a Newton step that stays on its piece lands on the root.
        Where it would leave the interval known to hold the root, the interval is halved instead.

        Args:
            search: the Newton direction, so that the step to try first is 1.
            moved: M search.
            tolerance: derivative, per unit of |search|, at which to stop.
        """
        w, m = self.w, self.m
        self._project(search)
        momentum = [x.value for x in self.momentum]
        slope, curvature = dot(search, momentum), dot(search, moved)
        limits = [(x, self.limit_jar(x), x.sign * search[x.dof]) for x in self.limits]
        flat = tolerance * sqrt(dot(search, search))
        length, low, high = w.var(1.0), w.var(0.0), w.var(-1.0)
        exact, second, shift = w.var(False), w.var(0.0), w.var(0.0)
        expected = w.var(-1.0)  # the second derivative where a Newton step came from
        for trial in w.range(max(_MIN_ITERATIONS, m.opt.ls_iterations)):
            at = length.value
            line = _Line(w, slope + at * curvature, curvature)
            for limit, jar, jv in limits:
                line.add_row(jar, jv, at, limit.stiffness)
            for k in self.contacts():
                line.add_contact(w.contact_jar[k], w.contact_jv[k], at, w.contact_D[k])
            first = line.first.value
            second.value, shift.value = line.second.value, line.shift.value
            exact.value = both(trial == 0, negate(line.changed.value))
            same_piece = second.value == expected.value
            w.break_where(either(either(exact.value, same_piece), negate(absolute(first) > flat)))
            low.value = where(first < 0.0, at, low.value)
            high.value = where(first < 0.0, high.value, at)
            newton = at - first / second.value
            open_end = high.value < 0.0
            inside = both(newton > low.value, either(open_end, newton < high.value))
            expected.value = where(inside, second.value, -1.0)
            length.value = where(inside, newton, 0.5 * (low.value + high.value))
            w.break_where(length.value == at)
        at = length.value
        return _Step(at, exact.value, 0.5 * (at * at * second.value + shift.value))

    def _project(self, search: Vec) -> None:
        """contact_jv = J search, with contact_jar at the current point."""
        for k in self.contacts():
            self.w.contact_jv[k] = [dot(row, search) for row in self.w.contact_J[k]]

    # -- results -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Store the acceleration and the forces at the current point."""
        w = self.w
        for i in range(self.m.nv):
            w.qacc[i] = self.smooth[i] + self.deviation[i].value
        force = _Sums(w, dict.fromkeys(range(self.m.nv), 0.0))
        for limit in self.limits:
            push = -limit.stiffness * minimum(self.limit_jar(limit), 0.0)
            w.limit_force[limit.joint] = push
            force.add(limit.dof, [limit.sign], [push])
        for k in self.contacts():
            jar, stiffness = self._contact_jar(k), w.contact_D[k]
            w.contact_force[k] = [-stiffness * minimum(row, 0.0) for row in _pyramid(jar)]
            push = [-x for x in _pull(jar, stiffness)]
            for i, column in enumerate(zip(*w.contact_J[k], strict=True)):
                force.add(i, column, push)
        for i, total in force.totals().items():
            w.qfrc_constraint[i] = total


class _Line:
    """Derivatives of the cost along a line, summed row by row.

    Attributes (variables of the lane):
        first, second: derivatives at the trial point.
        shift: sum of D jar(0)**2 over rows active at 0 and not at the trial point, minus that over rows active there
            and not at 0. Where `first` is 0, the cost has decreased by (at**2 * second + shift) / 2: this is the
            integral of t * cost''(t), by parts, and free of cancellation.
        changed: whether any row is active at one of the two points only.
    """

    def __init__(self, w: Any, first: Any, second: Any):
        self.first, self.second = w.var(first), w.var(second)
        self.shift, self.changed = w.var(0.0), w.var(False)

    def add_row(self, jar: Any, jv: Any, at: Any, stiffness: Any) -> None:
        self._add([jar], [jv], [jar + at * jv], stiffness)

    def add_contact(self, jar: Vec, jv: Vec, at: Any, stiffness: Any) -> None:
        end = [a + at * b for a, b in zip(jar, jv, strict=True)]
        self._add(_pyramid(jar), _pyramid(jv), _pyramid(end), stiffness)

    def _add(self, start: Vec, rate: Vec, end: Vec, stiffness: Any) -> None:
        first, second, shift, changed = 0.0, 0.0, 0.0, False
        for x0, y, x in zip(start, rate, end, strict=True):
            was, now = x0 < 0.0, x < 0.0
            first = first + minimum(x, 0.0) * y
            second = second + where(now, y * y, 0.0)
            shift = shift + (_square(x0) - where(now, x0 * x0, 0.0))
            changed = either(changed, was ^ now)
        self.first.value = self.first.value + stiffness * first
        self.second.value = self.second.value + stiffness * second
        self.shift.value = self.shift.value + stiffness * shift
        self.changed.value = either(self.changed.value, changed)


def _pyramid(basis: Vec) -> list[Any]:
    """Values of the four edge rows from those of the three basis rows."""
    n, t1, t2 = basis
    return [n + t1, n - t1, n + t2, n - t2]


def _pull(jar: Vec, stiffness: Any) -> list[Any]:
    """Gradient of a contact's cost with respect to its basis rows; minus the force along them."""
    edges = [minimum(x, 0.0) for x in _pyramid(jar)]
    return [
        stiffness * (edges[0] + edges[1] + (edges[2] + edges[3])),
        stiffness * (edges[0] - edges[1]),
        stiffness * (edges[2] - edges[3]),
    ]


def _weights(jar: Vec, stiffness: Any) -> list[list[Any]]:
    """Hessian of a contact's cost with respect to its basis rows: sum of D e e' over the active edges e."""
    plus1, minus1, plus2, minus2 = (where(x < 0.0, stiffness, 0.0) for x in _pyramid(jar))
    sum1, sum2, tilt1, tilt2 = plus1 + minus1, plus2 + minus2, plus1 - minus1, plus2 - minus2
    return [[sum1 + sum2, tilt1, tilt2], [tilt1, sum1, 0.0], [tilt2, 0.0, sum2]]


def _square(x: Any) -> Any:
    low = minimum(x, 0.0)
    return low * low


def _squares(jar: Vec) -> Any:
    """Sum over a contact's rows of min(jar, 0)**2."""
    a, b, c, d = (_square(x) for x in _pyramid(jar))
    return a + b + (c + d)


class _Sums:
    """Named sums that grow in a loop over contacts.

    Args:
        w: the world.
        initial: their values at the start, by name.
    """

    def __init__(self, w: Any, initial: Mapping[Any, Any]):
        self._initial = initial
        self._index = {name: i for i, name in enumerate(initial)}
        self._cells = w.array(len(initial), 0.0)
        for name, i in self._index.items():
            self._cells[i] = initial[name]
        self._grown: set[Any] = set()

    def add(self, name: Any, a: Vec, b: Vec) -> None:
        """Add a'b, one multiply-add after another."""
        products = [x * y for x, y in zip(a, b, strict=True)]
        if not all(zero(x) for x in products):
            self._grown.add(name)
            i = self._index[name]
            total = self._cells[i]
            for product in products:
                total = total + product
            self._cells[i] = total

    def put(self, name: Any, value: Any) -> None:
        """Replace a sum."""
        self._grown.add(name)
        self._cells[self._index[name]] = value

    def totals(self) -> dict[Any, Any]:
        """The sums; one that nothing changed is still known as well as at the start."""
        return {name: self._cells[i] if name in self._grown else self._initial[name] for name, i in self._index.items()}
