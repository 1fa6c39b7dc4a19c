"""Timelines: what toy records come to, what the file has, and what the task numbers of real records mean."""

import itertools
import json
import os
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from fake_gpu import fake_driver, fake_pool
from hypothesis import given
from hypothesis import strategies as st
from mixing import copy_ad, log, mix_ab, mix_cd, mixing
from random_streams import streams, unhurried, upstream_of
from task_kernels import axpy, count, fallible
from toy_programs import pendulum, pendulum_arrays

import brax_concurrent as bc
from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.backends.cuda_driver import Kernel
from brax_concurrent.backends.cuda_program import DESC_TRACE, CudaOp, CudaPart
from brax_concurrent.backends.cuda_trace import ROW_WORDS, TRACE_CAPACITY, TRACE_COUNT, TRACE_FIRST_ROW
from brax_concurrent.backends.native import DESC_INTERLEAVE
from brax_concurrent.scheduler.cuda import compile_cuda, launch_program
from brax_concurrent.scheduler.graph import dependencies, reduced
from brax_concurrent.scheduler.records import recording
from brax_concurrent.scheduler.serial import TileComposite, TilePart
from brax_concurrent.scheduler.streams import compile_window
from brax_concurrent.scheduler.trace import SKIPPED, Timeline, TracedTask, apart, checked_path
from brax_concurrent.scheduler.trace_streams import cuda_rows, cuda_stream, list_stream, tile_stream

US = 1000  # nanoseconds
STREAM = (
    TracedTask("load", range(1)),
    TracedTask("left", range(1), (0,)),
    TracedTask("right", range(4, 6), (0,)),
    TracedTask("maybe", range(1), (1,)),
    TracedTask("join", range(1), (2, 3)),
)
ROWS = np.array(
    [  # task, lane, begin, end, run
        [0, 0, 100, 110, 0],
        [1, 0, 110, 130, 0],
        [2, 1, 112, 120, 0],
        [3, SKIPPED, 131, 131, 0],
        [4, 1, 132, 140, 0],
        [0, 1, 1000, 1010, 1],
        [2, 1, 1010, 1020, 1],
        [1, 0, 1010, 1015, 1],
    ]
) * np.array([1, 1, US, US, 1])


def timeline(rows=ROWS, **settings):
    return Timeline(STREAM, rows, **settings)


def written(timeline, path):
    timeline.write(path)
    return json.loads(path.read_text())


def test_makespan_is_without_the_pause_between_runs():
    assert timeline().makespan == (40 + 20) * US
    at_once = np.where(ROWS[:, 4:] == 1, ROWS - [0, 0, 880 * US, 880 * US, 0], ROWS)  # run 1 is from 120 to 140
    assert timeline(at_once).makespan == 40 * US
    assert timeline(ROWS[:0]).makespan == 0


def test_occupancy_is_of_the_lanes_that_there_are():
    busy = 30 + 16 + 5 + 20
    assert timeline().busy == busy * US
    assert timeline().occupancy == pytest.approx(busy / (2 * 60))
    assert timeline(lanes=4).occupancy == pytest.approx(busy / (4 * 60))
    assert timeline(lanes=1).num_lanes == 2
    assert timeline(ROWS[:0]).occupancy == 0


def test_a_lane_with_two_tasks_at_once_is_busy_once_and_they_are_two_in_flight():
    rows = np.array([[0, 0, 0, 10, 0], [1, 0, 5, 20, 0]])
    assert timeline(rows).occupancy == 1
    assert timeline(rows).concurrency == pytest.approx(25 / 20)
    assert timeline(apart(rows)).occupancy == pytest.approx(25 / 40)


def test_concurrency_is_the_mean_number_in_flight():
    assert timeline().concurrency == pytest.approx((30 + 16 + 5 + 20) / 60)
    assert timeline(ROWS[:0]).concurrency == 0


def test_overlaps_are_pairs_in_flight_together():
    assert timeline().overlaps() == 2  # left and right, in both runs
    assert timeline(ROWS[:0]).overlaps() == 0


spans = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 9), st.integers(0, 1)), max_size=20)


@unhurried
@given(spans)
def test_numbers_are_what_counting_nanoseconds_gives(spans):
    rows = np.array([[0, lane, begin, begin + length, run] for lane, begin, length, run in spans]).reshape(-1, 5)
    rows = rows.astype(np.int64)
    found = timeline(rows)
    runs = {run: [row for row in rows if row[4] == run] for run in set(rows[:, 4])}
    going_on = [any(min(r[2] for r in own) <= at < max(r[3] for r in own) for own in runs.values()) for at in range(30)]
    in_flight = [[row[1] for row in rows if row[2] <= at < row[3]] for at in range(30)]
    assert found.makespan == sum(going_on)
    assert found.busy == sum(len(set(lanes)) for lanes in in_flight)
    assert found.concurrency * found.makespan == pytest.approx(sum(map(len, in_flight)))
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[:i]]
    assert found.overlaps() == sum(max(a[2], b[2]) < min(a[3], b[3]) for a, b in pairs)
    separate = apart(rows)
    assert (separate[:, [0, 2, 3, 4]] == rows[:, [0, 2, 3, 4]]).all()
    for lane in set(separate[:, 1]):
        own = separate[separate[:, 1] == lane]
        assert timeline(own).overlaps() == 0
        assert len({int(row[1]) for row, new in zip(rows, separate, strict=True) if new[1] == lane}) == 1


def test_summary_is_a_line():
    assert timeline(lanes=3, missing=1200, lane_name="thread").summary() == (
        "8 tasks in 2 runs, 1 of them skipped, 1,200 more not recorded: "
        "makespan 0.060 ms, occupancy 39.4% of 3 threads, concurrency 1.18"
    )
    assert timeline(ROWS[:1]).summary() == (
        "1 task in 1 run: makespan 0.010 ms, occupancy 100.0% of 1 lane, concurrency 1.00"
    )
    assert "of 2 branches," in timeline(lane_name="branch").summary()


def test_intervals_say_what_a_row_means():
    assert len(timeline()) == 8
    left, right, skipped = timeline().intervals[1:4]
    assert (left.name, left.units, left.lane, left.waits_for, left.skipped) == ("left", range(1), 0, (0,), False)
    assert (right.begin, right.end, right.run, right.task) == (112 * US, 120 * US, 0, 2)
    assert skipped.skipped


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS[:, :4], "rows: expected shape (n, 5), got (8, 4)"),
        (np.add(ROWS, (5, 0, 0, 0, 0)), "rows: expected tasks from 0 to 4, got 5 to 9"),
        (np.subtract(ROWS, (1, 0, 0, 0, 0)), "got -1 to 3"),
        (np.add(ROWS, (0, 0, 0, -6 * US, 0)), "rows: task 3 of run 0 ends at 125000, before it begins"),
    ],
)
def test_rows_that_cannot_be_are_refused(rows, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        timeline(rows)


# --- the file ----------------------------------------------------------------------------------


def check_events(events):
    """What every file must keep to; the events by phase."""
    found = {phase: [event for event in events if event["ph"] == phase] for phase in "MXisf"}
    assert sum(map(len, found.values())) == len(events)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in found["X"])
    named = {event["tid"] for event in found["M"] if event["name"] == "thread_name"}
    assert {event["tid"] for event in events if event["ph"] in "Xisf"} == named
    starts, finishes = ({event["id"]: event for event in found[phase]} for phase in "sf")
    assert len(starts) == len(found["s"]) == len(found["f"])
    assert starts.keys() == finishes.keys()
    for id, start in starts.items():
        finish = finishes[id]
        assert start["ts"] <= finish["ts"]
        for event in (start, finish):  # each end is inside a task, or the viewer drops it
            own = [x for x in found["X"] if x["tid"] == event["tid"]]
            assert any(x["ts"] <= event["ts"] <= x["ts"] + x["dur"] for x in own)
        assert finish["bp"] == "e"
    return found


def test_the_file_has_tasks_arrows_and_names(tmp_path):
    contents = written(timeline(lane_name="stream", name="toy", missing=7), tmp_path / "t.json")
    assert contents["otherData"]["missing"] == 7
    found = check_events(contents["traceEvents"])
    assert len(found["X"]) == 7
    right = found["X"][2]
    assert (right["name"], right["tid"], right["ts"], right["dur"]) == ("right", 1, 12.0, 8.0)
    assert right["args"] == {"task": 2, "units": "4 to 5", "run": 0, "waits for": [0]}
    (skipped,) = found["i"]
    assert (skipped["name"], skipped["ts"], skipped["args"]["units"]) == ("maybe", 31.0, 0)
    names = [event["args"]["name"] for event in found["M"] if event["name"].endswith("_name")]
    assert names == ["toy", "stream 0", "stream 1", "skipped"]
    ends = Counter((s["ts"], f["ts"]) for s, f in zip(found["s"], found["f"], strict=True))
    first, second = (9.999, 10.0), (909.999, 910.0)  # the last nanosecond of `load`
    assert ends == {first: 1, (9.999, 12.0): 1, (19.999, 32.0): 1, second: 2}


def test_an_arrow_whose_older_task_is_not_recorded_is_left_out(tmp_path):
    found = check_events(written(timeline(ROWS[1:5]), tmp_path / "t.json")["traceEvents"])
    assert len(found["s"]) == 1


def test_an_empty_timeline_is_a_file_too(tmp_path):
    check_events(written(timeline(ROWS[:0]), tmp_path / "t.json")["traceEvents"])


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "t.json"
    target.write_text("old")

    def fails(source, target):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no"):
        timeline().write(target)
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]
    assert target.read_text() == "old"


def test_a_path_is_checked_before_anything_runs(tmp_path, monkeypatch):
    assert checked_path("trace", tmp_path / "a.json") == tmp_path / "a.json"
    monkeypatch.chdir(tmp_path)
    assert checked_path("trace", "a.json") == tmp_path / "a.json"
    for value in (3, b"a.json", True):
        with pytest.raises(TypeError, match=f"trace: expected the path of a file to write, got {value!r}"):
            checked_path("trace", value)
    for value, message in (
        ("", "trace: expected the path of a file to write, got an empty one"),
        (tmp_path, "trace: expected the path of a file to write, got the folder"),
        ("no/a.json", f"trace: cannot write {tmp_path}/no/a.json: there is no folder {tmp_path}/no"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            checked_path("trace", value)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=f"the folder {tmp_path} cannot be written to"):
        checked_path("trace", "a.json")


# --- what task numbers mean --------------------------------------------------------------------


def as_traced(tasks):
    upstream = reduced(dependencies(tasks))
    return [(task.kernel, task.units, tuple(sorted(older))) for task, older in zip(tasks, upstream, strict=True)]


def plain(stream):
    return [(task.kernel, task.units, task.waits_for) for task in stream]


@pytest.mark.parametrize("interleave", [1, 2, 3, 7])
@pytest.mark.parametrize("program", [pendulum(), mixing(mix_ab, mix_cd, copy_ad, mix_ab), mixing(mix_ab, log)])
def test_what_tiles_wait_for_is_what_footprints_say(program, interleave):
    expected = as_traced(list(program.tasks(150, interleave)))
    assert plain(tile_stream(program, 150, interleave)) == expected
    places = list(program.places(150, interleave))
    assert [(program.ops[op].kernel.name, range(tile, tile + 1)) for _, tile, op in places] == [
        each[:2] for each in expected
    ]


@pytest.mark.parametrize("interleave", [1, 3])
@pytest.mark.parametrize("second", [mixing(mix_ab, mix_cd), mixing(log, mix_ab)])
def test_what_tiles_of_a_composite_wait_for(second, interleave):
    composite = TileComposite((TilePart("a", pendulum(), 130), TilePart("b", second, 70)))
    assert plain(tile_stream(composite, 200, interleave)) == as_traced(list(composite.tasks(interleave)))


@unhurried
@given(streams())
def test_what_listed_tasks_wait_for(tasks):
    found = list_stream(tasks)
    expected = reduced(upstream_of(tasks))
    assert [set(task.waits_for) for task in found] == [set(each) for each in expected]


def test_no_task_begins_before_those_it_waits_for_end():
    program = compile_window(pendulum(), threads=3)
    stream = tile_stream(pendulum(), 500, int(program.desc[DESC_INTERLEAVE]))
    with recording(program, 1000) as records:
        for _ in range(3):
            run_program(program, pendulum_arrays(500), 500)
    found = Timeline(stream, records.rows)
    assert (len(found), found.runs) == (3 * 16 * 8, 3)
    at = {(row.run, row.task): row for row in found.intervals}
    for row in found.intervals:
        assert all(at[row.run, older].end <= row.begin for older in row.waits_for)
    check_events(list(found.events()))


# --- CUDA, without a GPU -----------------------------------------------------------------------


def make_part(ops, conflicts=None, **settings):
    """A part of kernels by number, of which pairs conflict; None: nothing is known of them."""
    kernels = [CudaOp(Kernel(f"kernel{k}", f"k{k}", 100 + k), ("x",)) for k in ops]
    if conflicts is not None:
        older = [[j for j in range(i) if (ops[j], ops[i]) in conflicts] for i in range(len(ops))]
        settings["upstream"] = tuple(tuple(each) for each in older)
        settings["conflicts"] = frozenset((f"k{a}", f"k{b}") for a, b in conflicts)
    return CudaPart(tuple(kernels), 640, (BufferSpec("x", (3,), "float32", "readwrite"),), **settings)


def launches(parts, scheduler, num_envs, calls=2, capacity=100):
    """The launches that a traced program makes on a driver that is none, and the program."""
    driver, (table, owners) = fake_driver(parameters=5), fake_pool()
    program = compile_cuda(parts, scheduler, functions=driver.functions, pools=table)
    words = np.zeros(TRACE_FIRST_ROW + ROW_WORDS * capacity, np.int64)
    words[TRACE_CAPACITY] = capacity
    program.desc[DESC_TRACE] = words.ctypes.data
    for _ in range(calls):
        launch_program(program, [0x1000] * len(program.buffers), 0x9000, num_envs, 55)
    del owners
    count = min(int(words[TRACE_COUNT]), capacity)
    return program, words[TRACE_FIRST_ROW : TRACE_FIRST_ROW + ROW_WORDS * count].reshape(count, ROW_WORDS)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["serial", "sw", "graph"])
def test_launches_are_numbered_in_the_order_in_which_they_are_made(scheduler):
    parts = [
        make_part([0, 1, 2], {(0, 2)}, name="a", num_envs=100, unit_tiles=2),
        make_part([3, 4], {(3, 4)}, name="b", num_envs=30),
    ]
    program, rows = launches(parts, scheduler, 130)
    stream = cuda_stream(program, 130)
    assert Counter((task.kernel, task.units) for task in stream) == {
        **{(f"a.kernel{i}", tiles): 1 for i in range(3) for tiles in (range(2), range(2, 4))},
        ("b.kernel3", range(1)): 1,
        ("b.kernel4", range(1)): 1,
    }
    for task in stream:
        older = {"a.kernel2": "a.kernel0", "b.kernel4": "b.kernel3"}.get(task.kernel)
        expected = [older] if older else []
        assert [stream[each].kernel for each in task.waits_for] == expected
        assert all(stream[each].units == task.units for each in task.waits_for)
    times = np.arange(2 * len(rows)).reshape(-1, 2)
    found = cuda_rows(program, 130, rows, times)
    assert found[:, 0].tolist() == [*range(8), *range(8)]
    assert found[:, 4].tolist() == [0] * 8 + [1] * 8
    assert (found[:, 2:4] == times).all()
    times[3:5] = (-1, 0)  # no warp of these has run yet
    assert len(cuda_rows(program, 130, rows, times)) == len(rows) - 2


def test_without_known_dependencies_an_op_waits_for_the_one_before():
    program, rows = launches([make_part([0, 1, 2])], "serial", 40, calls=1)
    assert [task.waits_for for task in cuda_stream(program, 40)] == [(), (0,), (1,)]
    assert len(rows) == 3


def test_a_traced_program_is_not_captured():
    program, _ = launches([make_part([0])], "serial", 40)
    assert program.captured
    assert not replace(program, traced=True).captured


# --- task streams ------------------------------------------------------------------------------


def chains(links=5, size=2000):
    """Two chains of tasks that have nothing in common."""
    stream, arrays = bc.TaskStream(), [np.ones(size) for _ in range(4)]
    for _ in range(links):
        for x, y in (arrays[:2], arrays[2:]):
            stream.add(axpy, units=size, a=0.5, x=x, y=y)
    return stream, arrays


@pytest.mark.parametrize("scheduler", ["serial", "sw"])
def test_a_task_stream_is_traced(tmp_path, scheduler):
    path = tmp_path / "t.json"
    stream, arrays = chains()
    plain_stream, expected = chains()
    assert plain_stream.run(scheduler) is None
    found = stream.run(scheduler, threads=2, trace=path)
    for array, want in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array, want)
    assert sorted(row.task for row in found.intervals) == list(range(10))
    assert [task.waits_for for task in found.stream] == [(), (), *((i,) for i in range(8))]
    rows = sorted(found.intervals, key=lambda row: row.task)
    for row in rows:
        assert all(rows[older].end <= row.begin for older in row.waits_for)
    if scheduler == "serial":
        assert all(a.end <= b.begin for a, b in itertools.pairwise(rows))
        assert found.num_lanes == 1
    events = check_events(json.loads(path.read_text())["traceEvents"])
    assert (len(events["X"]), len(events["s"])) == (10, 8)


def test_a_task_that_is_skipped_is_seen_in_the_trace(tmp_path):
    stream, flag, y = bc.TaskStream(), np.zeros(1, np.int32), np.zeros(8)
    stream.add(count, units=8, first=1.0, y=y, predicate=flag)
    found = stream.run(trace=tmp_path / "t.json")
    assert found.skipped == 1
    assert not y.any()


@pytest.mark.parametrize("scheduler", ["serial", "sw"])
def test_the_trace_of_a_stream_that_fails_ends_there(tmp_path, scheduler):
    stream, x, y = bc.TaskStream(), np.ones(4), np.zeros(4)
    stream.add(count, units=4, first=-2.0, y=x)
    stream.add(fallible, units=4, x=x, y=y)
    stream.add(axpy, units=4, a=1.0, x=y, y=x)
    with pytest.raises(bc.TaskError, match="task 1, kernel fallible"):
        stream.run(scheduler, trace=tmp_path / "t.json")
    events = check_events(json.loads((tmp_path / "t.json").read_text())["traceEvents"])
    assert [event["args"]["task"] for event in events["X"]] == [0, 1]


def test_a_wrong_path_is_an_error_before_anything_runs(tmp_path):
    stream, arrays = chains()
    with pytest.raises(ValueError, match="trace: cannot write .*: there is no folder"):
        stream.run(trace=tmp_path / "no" / "t.json")
    with pytest.raises(TypeError, match="trace: expected the path of a file to write, got 1"):
        stream.run(trace=1)
    assert (arrays[1] == 1).all()


def test_an_empty_stream_has_an_empty_trace(tmp_path):
    assert len(bc.TaskStream().run(trace=tmp_path / "t.json")) == 0
    check_events(json.loads((tmp_path / "t.json").read_text())["traceEvents"])


def test_tasks_on_a_gpu_are_traced_by_hw_only(tmp_path, monkeypatch):
    stream, _ = chains()
    monkeypatch.setattr(stream, "_device", "cuda")
    with pytest.raises(ValueError, match="trace: on a GPU only hw records tasks, and this stream is run by 'sw'"):
        stream.run(trace=tmp_path / "t.json")
