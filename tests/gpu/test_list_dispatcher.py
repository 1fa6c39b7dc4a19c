"""Task streams under hw on a GPU: what the emulator cannot show, and several streams at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from numba import cuda
from task_kernels import axpy, copy, fallible, fill

import brax_concurrent as bc
from brax_concurrent.backends.list_layout import BLOCK, MAX_CHUNKS


@bc.kernel(reads=("x", "y"), writes=("y",))
def blend(unit, a, x, y):
    for _ in range(50):
        y[unit] = a * y[unit] + x[unit]


@bc.kernel(reads=("w", "x"), writes=("y",))
def matvec(unit, w, x, y):
    total = 0.0
    for k in range(x.shape[0]):
        total += w[unit, k] * x[k]
    y[unit] = max(total, 0.0)


def on_device(value):
    return cuda.to_device(np.asarray(value))


# ---- one stream


def test_a_long_chain_hands_results_from_block_to_block():
    """Each task reads what another multiprocessor wrote just before: a stale copy would show."""
    x, y, stream = on_device(np.ones(300)), on_device(np.zeros(300)), bc.TaskStream()
    for _ in range(1000):
        stream.add(axpy, units=300, a=1.0, x=x, y=y)
        stream.add(copy, units=300, x=y, y=x)
    for repeat in range(3):
        x.copy_to_device(np.full(300, 1e-300))
        y.copy_to_device(np.zeros(300))
        stream.run("hw")
        expected = np.ldexp(1e-300, 999)
        assert np.array_equal(y.copy_to_host(), np.full(300, expected)), repeat


@pytest.mark.parametrize("units", [1, BLOCK, BLOCK * MAX_CHUNKS, BLOCK * MAX_CHUNKS + 1, 3 * BLOCK * MAX_CHUNKS + 77])
def test_tasks_of_any_size(units):
    y, stream = on_device(np.zeros(units + 1, np.float32)), bc.TaskStream()
    stream.add(fill, units=units, value=np.float32(1), y=y)
    stream.add(axpy, units=units, a=np.float32(2), x=y, y=y)
    stream.run("hw")
    found = y.copy_to_host()
    assert (found[:units] == 3).all()
    assert found[units] == 0


def test_more_tasks_than_the_window_reaches():
    slow, fast, stream = on_device(np.zeros(1)), on_device(np.zeros((500, 10))), bc.TaskStream()
    source = on_device(np.ones(10))
    for _ in range(3):
        stream.add(blend, units=1, a=0.5, x=source, y=slow)
        for row in range(500):
            stream.add(fill, units=10, value=float(row), y=fast[row])
        stream.add(copy, units=1, x=slow, y=fast[0])
    stream.run("hw")
    found = fast.copy_to_host()
    assert np.array_equal(found[1:], np.repeat(np.arange(1.0, 500)[:, None], 10, 1))
    assert found[0, 0] == slow.copy_to_host()[0] > 1.9


def layers(seed, width=96, depth=40, weights=None):
    """A small network of layers with predicates, in single precision."""
    rng = np.random.default_rng(seed)
    if weights is None:
        weights = on_device(np.random.default_rng(0).uniform(-0.2, 0.2, (depth, width, width)).astype(np.float32))
    values = on_device(rng.uniform(0, 1, (depth + 1, width)).astype(np.float32))
    flags, stream = on_device((rng.random(depth) < 0.7).astype(np.int32)), bc.TaskStream()
    for layer in range(depth):
        predicate = flags[layer : layer + 1] if layer % 3 == 0 else None
        stream.add(matvec, units=width, w=weights[layer], x=values[layer], y=values[layer + 1], predicate=predicate)
    return stream, values, weights


def test_a_network_with_predicates_has_the_bits_of_program_order():
    expected, found = layers(1), layers(1)
    expected[0].run("serial")
    found[0].run("hw")
    assert expected[1].copy_to_host().tobytes() == found[1].copy_to_host().tobytes()


@pytest.mark.parametrize(("rows", "units"), [(6, 1), (24, 64), (12, 20_000)])
def test_small_tasks_of_a_random_graph_have_the_bits_of_program_order(rows, units):
    """Most wait in a worker, for several others, and slots are used again at once."""
    rng = np.random.default_rng(rows)
    start = rng.uniform(0.5, 1, (rows, units))
    found, expected = on_device(start), on_device(start)
    streams = [bc.TaskStream(), bc.TaskStream()]
    for _ in range(1500):
        (one, other), a = rng.choice(rows, 2, replace=False), float(rng.choice([-0.25, 0.25]))
        for stream, values in zip(streams, (found, expected), strict=True):
            stream.add(axpy, units=units, a=a, x=values[one], y=values[other])
    streams[1].run("serial")
    for repeat in range(3):
        found.copy_to_device(start)
        streams[0].run("hw")
        assert found.copy_to_host().tobytes() == expected.copy_to_host().tobytes(), repeat


def test_a_timeline(tmp_path):
    stream, _, _ = layers(2)
    timeline = stream.run("hw", trace=tmp_path / "trace.json")
    assert len(timeline) == len(stream)
    assert timeline.skipped == sum(row.skipped for row in timeline.intervals) > 0
    at = {row.task: row for row in timeline.intervals}
    for row in timeline.intervals:
        assert row.begin <= row.end
        assert row.skipped or all(at[older].end <= row.begin for older in row.waits_for)
    assert timeline.makespan > 0
    assert timeline.lane_name == "block"


# ---- several streams


@pytest.mark.parametrize("windows", [0, 1, 2, 7, 1000])
@pytest.mark.parametrize("scheduler", ["hw", "graph", "sw"])
def test_streams_at_once_have_the_bits_of_each_alone(windows, scheduler):
    count, (_, _, weights) = 20, layers(0)
    expected = [layers(seed, weights=weights) for seed in range(count)]
    found = [layers(seed, weights=weights) for seed in range(count)]
    for stream, _, _ in expected:
        stream.run("serial")
    for _ in range(2):
        bc.run_streams([stream for stream, _, _ in found], scheduler, windows=windows)
    for one, other in zip(expected, found, strict=True):
        assert one[1].copy_to_host().tobytes() == other[1].copy_to_host().tobytes()


def test_more_streams_than_windows_of_uneven_length():
    arrays, streams = [], []
    for number in range(300):
        y, stream = on_device(np.zeros(BLOCK * (1 + number % 5))), bc.TaskStream()
        for _ in range(1 + number % 7):
            stream.add(axpy, units=y.shape[0], a=1.0, x=on_device(np.ones(y.shape[0])), y=y)
        arrays.append(y)
        streams.append(stream)
    bc.run_streams(streams)
    for number, y in enumerate(arrays):
        assert (y.copy_to_host() == 1 + number % 7).all()


def test_an_exception_in_one_of_several_streams():
    streams = [bc.TaskStream() for _ in range(3)]
    for number, stream in enumerate(streams):
        x, y = on_device([4.0, -1.0 if number == 1 else 4.0]), on_device(np.zeros(2))
        stream.add(fill, units=2, value=0.0, y=y)
        stream.add(fallible, units=2, x=x, y=y)
    with pytest.raises(bc.TaskError, match="^stream 1, task 1, kernel fallible") as raised:
        bc.run_streams(streams)
    assert (raised.value.stream, raised.value.unit) == (1, 1)


def test_two_threads_run_at_once():
    """Each stream has memory of its own, whatever the driver does at the same time."""
    runs = [layers(seed) for seed in range(4)]
    expected = [layers(seed) for seed in range(4)]
    errors = []

    def work(stream):
        try:
            for _ in range(20):
                stream.run("hw")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(stream,)) for stream, _, _ in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for (stream, one, _), (_, other, _) in zip(expected, runs, strict=True):
        stream.run("serial")
        assert one.copy_to_host().tobytes() == other.copy_to_host().tobytes()


# ---- the watchdog

FOREVER = """
import os
import numpy as np
from numba import cuda
import brax_concurrent as bc

@bc.kernel(reads=("y",), writes=("y",))
def forever(unit, y):
    while y[unit] < 2.0:  # which it never is
        y[unit] = 0.5 * y[unit] + 0.5

y = cuda.to_device(np.zeros(300))
stream = bc.TaskStream()
for _ in range(3):
    stream.add(forever, units=300, y=y)
try:
    stream.run("hw")
except RuntimeError as error:
    print("said:", error, flush=True)
os._exit(0)
"""


def test_a_task_that_never_ends_is_named(tmp_path):
    program = tmp_path / "forever.py"
    program.write_text(FOREVER)
    root = str(Path(bc.__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"BRAX_CONCURRENT_TIMEOUT": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, timeout=240)
    assert "said: task 0, kernel forever, in slot 0 of the window did not end within 1000 ms" in done.stdout, done
