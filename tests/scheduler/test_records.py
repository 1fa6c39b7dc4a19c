"""Records of what ran when."""

import threading
import time

import numpy as np
import pytest
from toy_programs import pendulum, pendulum_arrays, pendulum_reference

from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.scheduler.graph import dependencies
from brax_concurrent.scheduler.records import BEGIN, END, LANE, RUN, TASK, recordable, recording
from brax_concurrent.scheduler.serial import TileComposite, TilePart, compile_composite, compile_serial
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
    with (
        pytest.raises(ValueError, match="runs in program order and cannot be recorded"),
        recording(compile_serial(pendulum()), 1),
    ):
        pass
    with recording(program, 1), pytest.raises(RuntimeError, match="recorded already"), recording(program, 1):
        pass
    with recording(program, 1):  # an end is an end
        pass


@pytest.mark.parametrize("threads", [1, 3])
def test_a_program_in_program_order_is_recorded_too(threads):
    serial = compile_serial(pendulum())
    program, arrays, expected = recordable(serial), pendulum_arrays(150), pendulum_arrays(150)
    run_program(serial, expected, 150)
    run_program(program, arrays, 150)  # nothing listens
    for array, want in zip(arrays, expected, strict=True):
        assert array.tobytes() == want.tobytes()
    with recording(program, 60) as records:
        for _ in range(2):
            run_program(program, pendulum_arrays(150), 150, threads=threads)
    rows = records.rows
    assert (rows.shape, records.missing, records.runs) == ((60, 5), 20, 2)
    first = rows[rows[:, RUN] == 0]
    first = first[np.argsort(first[:, TASK])]
    assert first[:, TASK].tolist() == list(range(40))
    for tile in first.reshape(5, 8, 5):
        assert (tile[:-1, END] <= tile[1:, BEGIN]).all()
        assert len(set(tile[:, LANE]) - {-1}) == 1
    assert set(first[:, LANE]) <= {-1, *range(threads)}
    skipped = first[first[:, LANE] == -1]
    assert set(skipped[:, TASK] % 4) == {2}
    assert (skipped[:, BEGIN] == skipped[:, END]).all()


def test_a_composite_in_program_order_counts_its_tasks_from_part_to_part():
    composite = TileComposite((TilePart("a", pendulum(), 70), TilePart("b", pendulum(), 33)))
    program, arrays = recordable(compile_composite(composite)), [*pendulum_arrays(70), *pendulum_arrays(33)]
    expected = [*pendulum_reference(pendulum_arrays(70)), *pendulum_reference(pendulum_arrays(33))]
    with recording(program, 100) as records:
        run_program(program, arrays, 103, threads=2)
    for array, want in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array, want)
    rows = records.rows
    assert sorted(rows[:, TASK]) == list(range(len(list(composite.tasks())))) == list(range(40))
    upstream = dependencies(list(composite.tasks()))
    ends, begins = dict(rows[:, [TASK, END]].tolist()), dict(rows[:, [TASK, BEGIN]].tolist())
    assert all(ends[older] <= begins[task] for task, each in enumerate(upstream) for older in each)
