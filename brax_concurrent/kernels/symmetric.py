"""Symmetric positive definite matrices of a fixed sparsity: unrolled factor, solve and product.

A matrix is a dict of its lower entries, (i, j) with i >= j; what is missing is 0. Rows are eliminated from the last to
the first. In this order the inertia of a kinematic tree, whose dofs are numbered from the root outward, has no fill-in,
and neither has M + J' D J where each row of J acts on one chain of dofs (Featherstone, Rigid Body Dynamics Algorithms,
2008, section 6.5). Whatever fill-in there is, is found here, while tracing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Symmetric = Mapping[tuple[int, int], Any]


def factor(matrix: Symmetric) -> tuple[dict[tuple[int, int], Any], list[Any]]:
    """Factor a matrix as L' D L, L lower triangular with a unit diagonal.

    Each entry is finished before the next is begun: what is unrolled here is more than a machine has registers, and
    this order stores every entry once.

    Args:
        matrix: n rows, all of the diagonal given.

    Returns:
        (lower, inverse): L below its diagonal and, on it, D, as entries (i, j); and the n values 1 / D.
    """
    lower, inverse, _ = eliminate(matrix, 0)
    return lower, inverse


def eliminate(
    matrix: Symmetric, first: int
) -> tuple[dict[tuple[int, int], Any], list[Any], dict[tuple[int, int], Any]]:
    """The part of `factor` that concerns the rows from `first` on.

    Returns:
        (lower, inverse, rest): `factor`'s, with rows from `first` on only, and the matrix whose factor is theirs above.
    """
    n = _size(matrix)
    rows = _rows(closure(matrix), n)
    raw: dict[tuple[int, int], Any] = {}  # D L
    lower: dict[tuple[int, int], Any] = {}
    inverse: list[Any] = [0.0] * n
    rest: dict[tuple[int, int], Any] = {}
    for i in range(n - 1, -1, -1):
        below = [k for k in range(n - 1, max(i, first - 1), -1) if i in rows[k]]
        for j in [i, *sorted(rows[i])]:
            entry = matrix.get((i, j), 0.0)
            for k in below:
                if j in rows[k]:
                    entry = entry - lower[k, i] * raw[k, j]
            (raw if i >= first else rest)[i, j] = entry
        if i >= first:
            inverse[i] = 1.0 / raw[i, i]
            lower[i, i] = raw[i, i]
            for j in rows[i]:
                lower[i, j] = raw[i, j] * inverse[i]
    return lower, inverse, rest


def solve(lower: Symmetric, inverse: Sequence[Any], rhs: Sequence[Any]) -> list[Any]:
    """Solve L' D L x = rhs.

    Args:
        lower, inverse: from `factor`; the diagonal of `lower` is not used.
        rhs: n scalars; it is not changed.
    """
    x = list(rhs)
    n = len(x)
    rows = _rows(lower, n)
    for i in range(n - 1, -1, -1):
        for j in rows[i]:
            x[j] = x[j] - lower[i, j] * x[i]
    x = [value * inv for value, inv in zip(x, inverse, strict=True)]
    for i in range(n):
        for j in sorted(rows[i]):
            x[i] = x[i] - lower[i, j] * x[j]
    return x


def times(matrix: Symmetric, vector: Sequence[Any]) -> list[Any]:
    """The matrix times a vector."""
    product: list[Any] = [0.0] * len(vector)
    for (i, j), entry in matrix.items():
        product[i] = product[i] + entry * vector[j]
        if i != j:
            product[j] = product[j] + entry * vector[i]
    return product


def closure(pattern: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """The pattern of the factor of a matrix that has this pattern."""
    closed = set(pattern)
    for k in range(max((i for i, _ in closed), default=-1), -1, -1):
        row = [j for i, j in closed if i == k and j < k]
        closed.update((i, j) for i in row for j in row if i >= j)
    return closed


def _rows(pattern: Iterable[tuple[int, int]], n: int) -> list[set[int]]:
    """Columns of each row's entries, without the diagonal."""
    rows: list[set[int]] = [set() for _ in range(n)]
    for i, j in pattern:
        if i != j:
            rows[i].add(j)
    return rows


def _size(matrix: Symmetric) -> int:
    n = 1 + max(i for i, _ in matrix)
    missing = [i for i in range(n) if (i, i) not in matrix]
    if missing:
        raise ValueError(f"matrix: expected all of the diagonal, got no entry {(missing[0], missing[0])}")
    return n
