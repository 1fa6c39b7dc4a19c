"""Records of what ran when."""

import threading
import time

import numpy as np
import pytest
from toy_programs import pendulum, pendulum_arrays

from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.scheduler.records import BEGIN, END, LANE, RUN, TASK, recording
from brax_concurrent.scheduler.serial import compile_serial
from brax_concurrent.scheduler.streams import compile_window


def test_rows_are_told_apart_by_run_and_counted_where_there_is_no_room():
    program = compile_window(pendulum(), threads=2)
    before = time.monotonic_ns()
    with recording(program, 60) as records:
        assert (len(records.rows), records.missing, records.runs) == (0, 0, 0)
        for _ in range(2):
            run_program(program, pendulum_arrays(150), 150)  # 5 tiles of 8 ops
    after = time.monotonic_ns()
    run_program(program, pendulum_arrays(150), 150)
    rows = records.rows
    assert (rows.shape, records.missing, records.runs) == ((60, 5), 20, 2)
    assert np.bincount(rows[:, RUN]).tolist() == [40, 20]
    assert sorted(rows[:40, TASK]) == list(range(40))
    assert ((before <= rows[:, BEGIN]) & (rows[:, BEGIN] <= rows[:, END]) & (rows[:, END] <= after)).all()
    assert set(rows[:, LANE]) <= {-1, 0, 1}


def test_runs_at_once_share_a_buffer():
    program = compile_window(pendulum(), threads=1)
    with recording(program, 4000) as records:
        workers = [
            threading.Thread(target=lambda: [run_program(program, pendulum_arrays(150), 150) for _ in range(20)])
            for _ in range(2)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert (records.runs, records.missing, len(records.rows)) == (40, 0, 1600)
    for run in range(40):
        assert sorted(records.rows[records.rows[:, RUN] == run][:, TASK]) == list(range(40))


def test_what_cannot_be_recorded_is_refused():
    program = compile_window(pendulum())
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"), recording(program, 0):
        pass
    with pytest.raises(ValueError, match="runs in program order"), recording(compile_serial(pendulum()), 1):
        pass
    with recording(program, 1), pytest.raises(RuntimeError, match="recorded already"), recording(program, 1):
        pass
    with recording(program, 1):  # an end is an end
        pass
