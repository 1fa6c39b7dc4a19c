"""Footprints of kernels with rows that are known at run time only: the rows that they can be."""

import numpy as np
import pytest

from brax_concurrent.kernels.kernel import Kernel
from brax_concurrent.kernels.layout import Field
from brax_concurrent.kernels.specialize import touched
from tests.lanes import specialized

ROW = 32 * 4


def known(w):
    for k in w.range(3):
        w.grid[4 + 2 * k, 1] = w.user.x[0]


def nested(w):
    for k in w.range(2):
        for j in w.range(2):
            w.grid[1 + k + 4 * j, 0] = w.user.x[0]


def counted_by_lanes(w):
    for k in w.range(w.count[0]):
        w.grid[k, 0] = w.user.x[0]


def from_a_lane(w):
    w.grid[w.count[0], 0] = w.user.x[0]


@pytest.mark.parametrize(
    ("stores", "rows"),
    [
        (known, {9, 11, 13, 15, 17}),  # the least to the greatest row, in between all
        (nested, {2, 4, 6, 8, 10, 12}),
        (counted_by_lanes, set(range(0, 20, 2))),
        (from_a_lane, set(range(0, 20, 2))),
    ],
)
def test_rows_at_run_time(stores, rows):
    fields = {"grid": Field((10, 2), "rows"), "count": Field((1,), "a lane's own", "i")}
    arrays = {name: np.zeros((32, 1), kind) for name, kind in (("x", "f4"), ("y", "f4"), ("n", "i4"))}

    def reading(m, w):
        w.user.y[0] = w.grid[w.count[0], 0] + w.grid[w.count[0], 1]

    def counting(m, w):
        w.count[0] = w.user.n[0]

    kernels = [
        Kernel("counting", counting, ("user.n",), ("count",)),
        Kernel("storing", lambda m, w: stores(w), ("count", "user.x"), ("grid",)),
        Kernel("other", lambda m, w: filled(w), ("user.x",), ("grid",)),
        Kernel("reading", reading, ("grid", "count"), ("user.y",)),
    ]
    special = specialized(kernels, fields, arrays, "f32")
    _, writes = touched(special.programs["storing"])
    first = special.layout.rows["grid", 0]
    assert {r // ROW - first for start, stop in writes for r in range(start, stop, ROW)} == rows
    reads, _ = touched(special.programs["reading"])
    spans = [each for each in reads if each != "user.y"]
    assert any(start <= first * ROW and (first + 20) * ROW <= stop for start, stop in spans)


def filled(w):
    for i in range(10):
        w.grid[i] = [w.user.x[0]] * 2
