"""Which dofs contacts couple: what a robot's tree says before any contact is known.

A contact adds J' D J to the solver's matrix, and only a few dofs act on it: for a foot on the floor the chain from the
root to that foot. Here candidate pairs are grouped by the dofs that act on them, so that a contact's products are those
of its group; and it is found where contacts between limbs, which are possible but rare, would make the elimination of a
limb's rows much longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from brax_concurrent.kernels.contact_parameters import dof_signs, pair_bodies
from brax_concurrent.kernels.symmetric import closure

_LIKE = 1.3  # groups are merged while the products of the union are at most this times those of the larger one
_RARE_ROW, _RARE_TOTAL = 2, 200  # see `rare_limbs`

Dofs = frozenset[int]
Entries = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Groups:
    """Candidate pairs by the dofs that act on them.

    Attributes:
        dofs: of each group.
        entries: of each group, those that some pair of it couples.
        of_pair: each candidate pair's group, which has all dofs that act on it.
    """

    dofs: tuple[Dofs, ...]
    entries: tuple[Entries, ...]
    of_pair: tuple[int, ...]


@dataclass(frozen=True)
class RareLimbs:
    """The last rows of the matrix, where other limbs seldom meet them.

    Attributes:
        first: the first of these rows.
        entries: what is in them, and what elimination fills in, only where a pair of `crossing` touches.
        crossing: by candidate pair, 1 where it couples these rows with dofs of other limbs, else 0.
    """

    first: int
    entries: Entries
    crossing: tuple[int, ...]


def acting_dofs(m: Any) -> list[Dofs]:
    """By candidate pair the dofs that act on its contacts."""
    signs = dof_signs(m)
    return [frozenset(i for i in range(m.nv) if signs[i][p]) for p in range(m.npair)]


def entries_of(dofs: Dofs) -> Entries:
    """The lower entries of a matrix that couple the dofs."""
    return frozenset((i, j) for i in dofs for j in dofs if j <= i)


def contact_groups(m: Any) -> Groups:
    """Pairs with a fixed body, which act on one chain, in groups of like chains; all others in one group."""
    acting = acting_dofs(m)
    chains = {dofs for dofs, single in zip(acting, _with_fixed_body(m), strict=True) if single}
    others = frozenset[int]().union(*(a for a, single in zip(acting, _with_fixed_body(m), strict=True) if not single))
    groups = _merged(chains)
    if others:
        groups = [*(g for g in groups if not g <= others), others]
    of_pair = [min((len(g), k) for k, g in enumerate(groups) if dofs <= g)[1] for dofs in acting]
    entries: list[Entries] = [frozenset()] * len(groups)
    for k, dofs in zip(of_pair, acting, strict=True):
        entries[k] |= entries_of(dofs)
    return Groups(tuple(groups), tuple(entries), tuple(of_pair))


def rare_limbs(m: Any, mass: Iterable[tuple[int, int]]) -> RareLimbs | None:
    """The last rows each of which takes more than twice the operations when other limbs touch its limb.

    Contacts with fixed bodies and with other trees (what a hand grasps) count as usual, those of a robot with itself
    as rare. None: there are no such rows, or they are not worth two versions.

    Args:
        m: the model.
        mass: the entries of the joint-space inertia.
    """
    acting = acting_dofs(m)
    usual = set(mass)
    for p, dofs in enumerate(acting):
        first, second = pair_bodies(m, p)
        usual |= frozenset() if m.body_rootid[first] == m.body_rootid[second] else entries_of(dofs)
    usually, always = closure(usual), closure(usual.union(*map(entries_of, acting)))
    few, many = _operations(usually, m.nv), _operations(always, m.nv)
    first = m.nv
    while first > 0 and many[first - 1] > _RARE_ROW * few[first - 1]:
        first -= 1
    if sum(many[first:]) - sum(few[first:]) < _RARE_TOTAL:
        return None
    entries = frozenset((i, j) for i, j in always - usually if i >= first)
    return RareLimbs(first, entries, tuple(int(not entries.isdisjoint(entries_of(dofs))) for dofs in acting))


def _with_fixed_body(m: Any) -> list[bool]:
    """By candidate pair whether one of its bodies cannot move."""
    return [any(not len(m.body_dofs[b]) for b in pair_bodies(m, p)) for p in range(m.npair)]


def _merged(chains: Iterable[Dofs]) -> list[Dofs]:
    """The chains, the likest two made one as long as that costs little."""
    groups = sorted(chains, key=sorted)
    while True:
        unions = [(_products(a | b) / max(_products(a), _products(b)), a, b) for a in groups for b in groups if a != b]
        growth, first, second = min(unions, key=lambda union: union[0], default=(_LIKE + 1, frozenset(), frozenset()))
        if growth > _LIKE:
            return groups
        groups = sorted((*(g for g in groups if g not in (first, second)), first | second), key=sorted)


def _products(dofs: Dofs) -> int:
    """Multiplications that a contact of these dofs takes in each iteration: 3 an entry, and 10 a dof."""
    return 3 * len(entries_of(dofs)) + 10 * len(dofs)


def _operations(pattern: Iterable[tuple[int, int]], n: int) -> list[int]:
    """Multiply-adds that the elimination of each row takes."""
    lengths = [0] * n
    for i, j in pattern:
        lengths[i] += i != j
    return [d * (d + 1) // 2 for d in lengths]
