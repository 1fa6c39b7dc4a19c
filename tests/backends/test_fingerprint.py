"""Fingerprints of functions: equal for equal code, different for all that changes what is computed."""

import math
import subprocess
import sys

import numpy as np
import pytest

from brax_concurrent.backends.fingerprint import fingerprint

SOURCE = "def f(unit, x):\n    x[unit] = math.exp(x[unit]) + k\n"


def made(source=SOURCE, **scope):
    names = {"math": math, "np": np, "k": 1.5, **scope}
    exec(source, names)
    return names["f"]


def test_equal_code_has_equal_fingerprints_in_every_process():
    assert fingerprint(made()) == fingerprint(made())
    program = (
        "import math, sys; from brax_concurrent.backends.fingerprint import fingerprint;"
        f"s = {{'math': math, 'k': 1.5}}; exec({SOURCE!r}, s); sys.stdout.write(fingerprint(s['f']))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout == fingerprint(made())


@pytest.mark.parametrize(
    "other",
    [
        made(SOURCE.replace("exp", "sin")),
        made(SOURCE.replace("+ k", "- k")),
        made(SOURCE.replace("+ k", "+ 2")),
        made(k=1.25),
        made(k=np.float32(1.5)),
        made(k=np.float64(1.5)),
        made(k=True),
        made(SOURCE.replace("k\n", "1\n")),
        made(SOURCE.replace("k\n", "1.0\n")),
        made(SOURCE.replace("k\n", "True\n")),
        made(SOURCE.replace("k\n", "-0.0\n")),
        made(SOURCE.replace("k\n", "0.0\n")),
        made(SOURCE.replace("unit, x", "x, unit")),
    ],
)
def test_what_computes_something_else_has_another(other):
    alike = [made(), made(SOURCE.replace("k\n", "1.0\n")), made(SOURCE.replace("k\n", "0.0\n"))]
    assert fingerprint(other) is not None
    assert sum(fingerprint(other) == fingerprint(each) for each in alike) <= 1
    assert fingerprint(other) != fingerprint(made())


def enclosing(k):
    def f(unit, x):
        x[unit] = k

    return f


@pytest.mark.parametrize(
    "function",
    [
        enclosing(3),
        made(k=np.zeros(3)),
        made(k=fingerprint),
        made(k=[1]),
        made("def f(unit, x):\n    x[unit] = sum(k * i for i in range(3))\n"),
        made(SOURCE.replace("math.exp", "abs"), abs=math.fabs),
    ],
)
def test_functions_that_depend_on_more_have_none(function):
    assert fingerprint(function) is None


def test_builtins_are_known():
    assert fingerprint(made(SOURCE.replace("math.exp", "abs"))) is not None


def test_what_is_caught_where_is_part_of_it():
    """Equal instructions under another table of handlers, as when a line is moved into a `try`."""
    source = "def f(unit, x):\n    try:\n        x[unit] = 1 / x[unit]\n    except Exception:\n        x[unit] = k\n"
    caught = made(source)
    table = caught.__code__.co_exceptiontable
    assert table
    other = type(caught)(caught.__code__.replace(co_exceptiontable=table[: len(table) // 2]), caught.__globals__)
    assert fingerprint(caught) == fingerprint(made(source))
    assert fingerprint(other) != fingerprint(caught)
