"""Streams whose tasks never end: what lives as long as they do, and the end of the process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import brax_concurrent as bc
from brax_concurrent.backends.intrinsics import atomic_add, atomic_load, give_way, monotonic_ns


@bc.kernel(reads=("x", "y"), writes=("y",))
def hold(unit, control, x, y):
    """Do not end, for 20 s, until the word after `control` is set; that itself says whether somebody is held."""
    begin = monotonic_ns()
    atomic_add(control, 1)
    while atomic_load(control + 8) == 0 and monotonic_ns() - begin < 20 * 10**9:
        give_way()
    y[unit] += x[unit]
    atomic_add(control, -1)


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_task_that_never_ends_keeps_its_arrays(monkeypatch, threads):
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", "0.3")
    control, x, y, flag = np.zeros(2, np.int64), np.ones(4), np.zeros(4), np.ones(1, np.int32)
    stream = bc.TaskStream()
    stream.add(hold, units=1, control=control.ctypes.data, x=x, y=y, predicate=flag)
    with pytest.raises(RuntimeError, match=r"no task ended for 300 ms; waited for task 0 \(hold\)$"):
        stream.run(threads=threads)
    kept = [weakref.ref(each) for each in (x, y, flag)]
    del stream, x, y, flag
    gc.collect()
    assert all(each() is not None for each in kept)
    control[1] = 1
    until(lambda: control[0] == 0)
    until(lambda: all(each() is None for each in kept))


PROGRAM = """
import sys, threading, time
import numpy as np
from test_task_stream_end import bc, hold

x, y, control, stream = np.ones(1), np.zeros(1), np.array([0, 1]), bc.TaskStream()

def run():
    threading.main_thread().join()
    for _ in range(2):
        stream.add(hold, units=1, control=control.ctypes.data, x=x, y=y)
    stream.run(threads=2)
    print("ran", y[0], flush=True)

if sys.argv[1] == "outlive":
    threading.Thread(target=run).start()
else:
    control[1] = 0
    for _ in range(2):
        stream.add(hold, units=1, control=control.ctypes.data, x=x, y=np.zeros(1))
    try:
        stream.run(threads=2)
    except RuntimeError as error:
        print(error, flush=True)
    print(time.monotonic(), flush=True)
"""


def in_a_process(what):
    tests = Path(__file__).parent
    paths = os.pathsep.join([str(tests), str(tests.parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "BRAX_CONCURRENT_TIMEOUT": "0.3"}
    command = [sys.executable, "-c", PROGRAM, what]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_process_with_tasks_that_never_end_ends():
    done = in_a_process("stuck")
    ended = time.monotonic()
    message, left = done.stdout.splitlines()
    assert message == "no task ended for 300 ms; waited for task 0 (hold), task 1 (hold)"
    assert ended - float(left) < 10  # those tasks take 20 s
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_that_outlives_the_main_one_can_run_a_stream():
    done = in_a_process("outlive")
    assert (done.stdout, done.stderr, done.returncode) == ("ran 2.0\n", "", 0)
