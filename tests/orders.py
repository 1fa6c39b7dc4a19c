"""What a recorded run must look like, for the tests of schedulers."""

from __future__ import annotations

import numpy as np

from brax_concurrent.scheduler.graph import dependencies
from brax_concurrent.scheduler.records import BEGIN, END, LANE, TASK


def assert_same(arrays, expected):
    """Equal bits."""
    for array, want in zip(arrays, expected, strict=True):
        assert array.tobytes() == want.tobytes()


def check_order(rows, tasks, upstream=None):
    """Every task ran once, and after all that it waits for had ended."""
    assert sorted(rows[:, TASK]) == list(range(len(tasks)))
    rows = rows[np.argsort(rows[:, TASK])]
    assert (rows[:, BEGIN] <= rows[:, END]).all()
    for task, older in enumerate(dependencies(tasks) if upstream is None else upstream):
        assert all(rows[each, END] <= rows[task, BEGIN] for each in older)
    for task, row in zip(tasks, rows, strict=True):
        assert row[LANE] >= 0 or task.predicate is not None
    return rows
