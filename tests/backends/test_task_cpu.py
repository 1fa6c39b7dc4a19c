"""Tasks as native code: what is called, and what a table must be."""

import ctypes

import numpy as np
import pytest

from brax_concurrent.backends.arguments import ArgumentType, KernelError
from brax_concurrent.backends.task_cpu import (
    ARGS_UNIT,
    TaskTable,
    argument_words,
    build_table,
    compile_task,
    exception_of,
    run_in_order,
)
from brax_concurrent.scheduler.arrays import as_argument


def scaled(unit, a, x, y):
    if unit == 90:
        raise KeyError("no such unit")
    y[unit, 1] = a * x[unit]


@pytest.fixture(scope="module")
def code():
    types = [ArgumentType("float32"), ArgumentType("int16", 1, readonly=True), ArgumentType("float64", 2, "A")]
    return compile_task(scaled, types)


def test_code_has_the_documented_signature(code):
    x, y = np.arange(100, dtype=np.int16), np.zeros((2, 100)).T
    block = np.array(argument_words([as_argument(each, "x") for each in (np.float32(0.5), x, y)]), np.int64)
    call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(code.address)
    assert call(block.ctypes.data, 3, 4) == 0
    assert np.array_equal(np.flatnonzero(y[:, 1]), [3, 4, 5, 6])
    assert np.array_equal(y[3:7, 1], [1.5, 2, 2.5, 3])
    assert call(block.ctypes.data, 3, 0) == 0
    failed = call(block.ctypes.data, 88, 5)
    assert block[ARGS_UNIT] == 90
    assert np.array_equal(y[88:93, 1], [44, 44.5, 0, 0, 0])
    cause, place = exception_of(failed)
    assert repr(cause) == repr(KeyError("no such unit"))
    assert place.startswith(__file__)


def test_a_small_code_is_a_number_of_numbas():
    assert str(exception_of(-1)[0]) == "Numba's error -1"


def test_a_table_runs_until_a_task_fails(code):
    x, y, flag = np.ones(100, np.int16), np.zeros((100, 2)), np.zeros(1, np.int32)
    arguments = [as_argument(each, "x") for each in (np.float32(2), x, y[:, ::-1])]
    table = build_table([code] * 4, [arguments] * 4, [1, 100, 100, 2], [0, flag.ctypes.data, 0, 0])
    assert run_in_order(table)[0] == 2
    assert y[:, 0].sum() == 2 * 90


@pytest.mark.parametrize(
    "column", [np.zeros(2, np.int32), np.zeros(3, np.int64), np.zeros((2, 1), np.int64), np.zeros(4, np.int64)[::2]]
)
def test_a_table_is_of_equal_columns(column):
    good = np.zeros(2, np.int64)
    with pytest.raises(ValueError, match=r"num_units: expected int64\[2\], contiguous, got"):
        TaskTable(good, good, good, column, good)


def test_a_function_that_numba_refuses():
    with pytest.raises(KernelError, match="readonly array"):
        compile_task(lambda unit, y: y.fill(0), [ArgumentType("float64", 1, readonly=True)])
