"""Cholesky factorisation of a matrix in tiles: four kernels, and a stream of tasks that say which tiles they use."""

import math

import numpy as np

import brax_concurrent as bc
from brax_concurrent.scheduler.graph import critical_path, dependencies


@bc.kernel(reads=("a",), writes=("a",))
def potrf(unit, a):
    """A = cholesky(A), lower triangle: one unit."""
    for j in range(a.shape[0]):
        for k in range(j):
            for i in range(j, a.shape[0]):
                a[i, j] -= a[i, k] * a[j, k]
        root = math.sqrt(a[j, j])
        for i in range(j, a.shape[0]):
            a[i, j] /= root


@bc.kernel(reads=("a", "b"), writes=("b",))
def trsm(unit, a, b):
    """B = B A^-T for a lower triangle A: a unit is a row of B."""
    for j in range(a.shape[0]):
        for k in range(j):
            b[unit, j] -= b[unit, k] * a[j, k]
        b[unit, j] /= a[j, j]


@bc.kernel(reads=("a", "c"), writes=("c",))
def syrk(unit, a, c):
    """C -= A A^T, lower triangle: a unit is a row of C."""
    for j in range(unit + 1):
        for k in range(a.shape[1]):
            c[unit, j] -= a[unit, k] * a[j, k]


@bc.kernel(reads=("a", "b", "c"), writes=("c",))
def gemm(unit, a, b, c):
    """C -= A B^T: a unit is an element of C."""
    i, j = divmod(unit, c.shape[1])
    for k in range(a.shape[1]):
        c[i, j] -= a[i, k] * b[j, k]


def factorise(tiles):
    """The stream that turns tiles[i, j], the lower tiles of a matrix, into its Cholesky factor."""
    stream, count, size = bc.TaskStream(), tiles.shape[0], tiles.shape[2]
    for k in range(count):
        stream.add(potrf, units=1, a=tiles[k, k])
        for i in range(k + 1, count):
            stream.add(trsm, units=size, a=tiles[k, k], b=tiles[i, k])
        for i in range(k + 1, count):
            stream.add(syrk, units=size, a=tiles[i, k], c=tiles[i, i])
            for j in range(k + 1, i):
                stream.add(gemm, units=size * size, a=tiles[i, k], b=tiles[j, k], c=tiles[i, j])
    return stream


def main(count=8, size=64):
    """Factorise a random matrix of count x count tiles and compare with NumPy."""
    x = np.random.default_rng(0).normal(size=(count * size, count * size))
    matrix = x @ x.T + count * size * np.eye(count * size)
    tiles = matrix.reshape(count, size, count, size).swapaxes(1, 2).copy()  # tiles[i, j] is one block of memory
    stream = factorise(tiles)
    stream.run()
    factor = np.tril(tiles.swapaxes(1, 2).reshape(matrix.shape))
    error = abs(factor - np.linalg.cholesky(matrix)).max()
    longest, _ = critical_path(dependencies(stream.tasks))
    print(f"{len(stream)} tasks, {longest} one after the other; largest error {error:.1e}")


if __name__ == "__main__":
    main()
