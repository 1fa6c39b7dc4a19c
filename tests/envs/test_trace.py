"""Environments that are recorded: what the file has, that nothing else is in it, and that the bits stay."""

import contextlib
import gc
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_gpu import fake_driver, fake_pool
from jax import lax

import brax_concurrent as bc
from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.cuda_driver import Kernel
from brax_concurrent.backends.cuda_program import DESC_TRACE, CudaOp, CudaPart
from brax_concurrent.backends.cuda_trace import ROW_WORDS, TRACE_CAPACITY, TRACE_COUNT, TRACE_FIRST_ROW
from brax_concurrent.backends.native import DESC_INTERLEAVE, DESC_RECORDS
from brax_concurrent.envs import trace
from brax_concurrent.envs.program import tile_program
from brax_concurrent.scheduler.cuda import compile_cuda, launch_program
from brax_concurrent.scheduler.graph import dependencies

jax.config.update("jax_platforms", "cpu")

KEY = jax.random.key(3)
SETTINGS = {"granularity": "stage", "threads": 2}


def make(path=None, num_envs=100, scheduler="sw", **arguments):
    return bc.make("grasp", num_envs, scheduler=scheduler, trace=path, **SETTINGS, **arguments)


def take(env, steps, state=None):
    """Some steps, in a jitted scan."""
    actions = jax.random.uniform(KEY, (steps, env.num_envs, env.action_size), minval=-1.0)
    run = jax.jit(lambda state, actions: lax.scan(lambda s, a: (env.step(s, a), None), state, actions)[0])
    return run(env.reset(KEY) if state is None else state, actions)


def check_order(intervals, tasks):
    """All tasks of all runs are there, and of two that conflict the older one ended first."""
    upstream = dependencies(tasks)
    for run in {row.run for row in intervals}:
        own = {row.task: row for row in intervals if row.run == run}
        assert sorted(own) == list(range(len(tasks)))
        for task, older in enumerate(upstream):
            assert own[task].name == tasks[task].kernel
            assert own[task].units == tasks[task].units
            assert all(own[each].end <= own[task].begin for each in older)


@pytest.mark.parametrize("scheduler", ["sw", "hw", "serial"])
def test_control_steps_are_recorded_and_nothing_else(tmp_path, scheduler):
    path = tmp_path / "t.json"
    env, other = make(path, scheduler=scheduler), make(scheduler=scheduler)
    state, expected = take(env, 3), take(other, 3)
    assert other.program("control_step").desc[DESC_RECORDS] == 0
    np.testing.assert_array_equal(state.obs, expected.obs)
    assert not path.exists()
    found = env.write_trace()
    tasks = list(tile_program(env).tasks(100, int(env.program("control_step").desc[DESC_INTERLEAVE]) or 1))
    assert (len(found), found.runs, found.missing) == (3 * len(tasks), 3, 0)
    check_order(found.intervals, tasks)
    assert found.num_lanes == 2
    assert 0 < found.occupancy <= 1
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["ph"] in "Xi" for event in events) == 3 * len(tasks)
    skipped = {(row.run, row.task) for row in found.intervals if row.skipped}
    assert found.skipped == len(skipped) > 0  # nothing ends in three steps
    ran = [row for row in found.intervals if not row.skipped]
    arrows = sum((row.run, older) not in skipped for row in ran for older in row.waits_for)
    assert sum(event["ph"] == "s" for event in events) == arrows > 0
    take(env, 1, state)  # it goes on
    assert env.write_trace().runs == 4


@pytest.mark.parametrize("scheduler", ["sw", "hw"])
def test_a_mixed_batch_is_recorded_as_one(tmp_path, monkeypatch, scheduler):
    monkeypatch.setenv(trace.ENVIRONMENT, str(tmp_path / "unused.json"))
    env = bc.make({"grasp": 70, "twin": (40, bc.envs.registry.make_task("grasp"))}, scheduler=scheduler,
                  trace=tmp_path / "t.json", **SETTINGS)  # fmt: skip
    actions = {name: jnp.zeros((robot.num_envs, robot.action_size)) for name, robot in env.envs.items()}
    state = env.step(env.step(env.reset(KEY), actions), actions)
    alone = env.envs["grasp"].step(state.states["grasp"], actions["grasp"])
    assert np.isfinite(alone.obs).all()
    found = env.write_trace()
    assert found.runs == 2
    names = {row.name.split(".")[0] for row in found.intervals}
    assert names == {"grasp", "twin"}
    check_order(found.intervals, trace.first_tasks(env, 1 << 20))
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]
    with pytest.raises(RuntimeError, match="there is no trace"):
        env.envs["grasp"].write_trace()


def test_what_finds_no_room_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "CAPACITY", 50)
    env = make(tmp_path / "t.json")
    take(env, 2)
    found = env.write_trace()
    assert len(found) == 50
    assert found.missing == 2 * len(found.stream) - 50
    assert f"{found.missing:,} more not recorded" in found.summary()


def test_an_environment_that_took_no_step_has_an_empty_trace(tmp_path):
    env = make(tmp_path / "t.json")
    env.reset(KEY)
    assert len(env.write_trace()) == 0
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["missing"] == 0


def test_without_a_trace_there_is_nothing_to_write(tmp_path):
    with pytest.raises(
        RuntimeError, match=r"make the environment with trace='file.json', or set BRAX_CONCURRENT_TRACE"
    ):
        make().write_trace()


@pytest.mark.parametrize("name", ["grasp", {"grasp": 4}])
def test_wrong_paths_name_the_argument(tmp_path, monkeypatch, name):
    with pytest.raises(TypeError, match="trace: expected the path of a file to write, got 7"):
        bc.make(name, trace=7)
    message = re.escape(f"trace: cannot write {tmp_path}/no/t.json: there is no folder {tmp_path}/no")
    with pytest.raises(ValueError, match=message):
        bc.make(name, trace=tmp_path / "no" / "t.json")
    monkeypatch.setenv(trace.ENVIRONMENT, str(tmp_path))
    with pytest.raises(ValueError, match="BRAX_CONCURRENT_TRACE: expected the path of a file to write, got the folder"):
        bc.make(name)


def test_a_robot_of_a_mixed_batch_has_no_trace_of_its_own(tmp_path):
    with pytest.raises(TypeError, match="grasp: trace is one for the whole batch, give it to make"):
        bc.make({"grasp": (4, {"trace": tmp_path / "t.json"})})


def test_files_of_the_environment_variable_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "_asked_for", iter([1, 2]))
    monkeypatch.setenv(trace.ENVIRONMENT, str(tmp_path / "t.json"))
    for steps in (1, 2):
        env = make()
        take(env, steps)
        assert env.write_trace().runs == steps
    assert sorted(file.name for file in tmp_path.iterdir()) == ["t.2.json", "t.json"]


def test_at_exit_what_nobody_wrote_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trace, "_unwritten", {})
    env, lost = make(tmp_path / "t.json"), make(tmp_path / "folder.json")
    for each in (env, lost):
        take(each, 1)
    (tmp_path / "folder.json").mkdir()
    del env, each
    gc.collect()  # the environment is gone, what it recorded is not
    trace._write_all()
    said = capsys.readouterr().err.splitlines()
    assert re.match(
        rf"brax_concurrent: {tmp_path}/t.json: [\d,]+ tasks in 1 run, \d+ of them skipped: makespan ", said[0]
    )
    assert said[1].startswith(f"brax_concurrent: {tmp_path}/folder.json was not written: ")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_a_process_writes_its_trace_at_its_end(tmp_path):
    code = (
        "import jax, jax.numpy as jnp, brax_concurrent as bc\n"
        "env = bc.make('grasp', 40, threads=1, granularity='stage')\n"
        "env.step(env.reset(jax.random.key(0)), jnp.zeros((40, env.action_size)))\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", trace.ENVIRONMENT: str(tmp_path / "t.json")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert re.match(
        rf"brax_concurrent: {tmp_path}/t.json: \d+ tasks in 1 run, \d+ of them skipped: makespan .*\n$", done.stderr
    )
    assert done.stdout == ""
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["missing"] == 0


# --- CUDA, without a GPU -----------------------------------------------------------------------


class FakeBlock:
    """A trace block in the host's memory: launches are numbered as on a GPU, and the times are made up."""

    def __init__(self, program, capacity):
        self._desc = program.desc
        self.words = np.zeros(TRACE_FIRST_ROW + ROW_WORDS * capacity, np.int64)
        self.words[TRACE_CAPACITY] = capacity

    def start(self):
        self._desc[DESC_TRACE] = self.words.ctypes.data

    def read(self):
        count, capacity = int(self.words[TRACE_COUNT]), int(self.words[TRACE_CAPACITY])
        used = min(count, capacity)
        rows = self.words[TRACE_FIRST_ROW : TRACE_FIRST_ROW + ROW_WORDS * used].reshape(used, ROW_WORDS)
        begin = 1000 + 10 * np.arange(used)  # each kernel takes as long as it takes to launch two
        return rows.copy(), np.stack((begin, begin + 20), axis=1), count - used


@pytest.mark.parametrize(
    ("scheduler", "lanes", "lane_name"), [("serial", 1, "stream"), ("sw", 3, "stream"), ("graph", 2, "branch")]
)
def test_launches_on_a_gpu_become_a_timeline(tmp_path, monkeypatch, scheduler, lanes, lane_name):
    monkeypatch.setattr(trace, "TraceBlock", FakeBlock)
    monkeypatch.setattr(trace, "_unwritten", {})
    monkeypatch.setattr(trace, "CAPACITY", 10)
    monkeypatch.setattr(trace.jax, "live_arrays", lambda platform: [] if platform == "gpu" else None)
    monkeypatch.setattr(trace.cuda_driver, "primary_context", contextlib.nullcontext)
    driver, (table, owners) = fake_driver(parameters=5), fake_pool()
    kernels = tuple(CudaOp(Kernel(name, name, 100 + i), ("x",)) for i, name in enumerate(("first", "second")))
    part = CudaPart(kernels, 64, (BufferSpec("x", (), "float32", "readwrite"),), ((), (0,)), unit_tiles=1)
    program = compile_cuda([part], scheduler, functions=driver.functions, pools=table, streams=3)
    tracer = trace.make_tracer(tmp_path / "t.json", "toy")
    traced = tracer.attach(program, 70, None)
    assert not traced.captured
    assert traced.fingerprint != program.fingerprint
    for _ in range(2):
        launch_program(traced, [0x1000], 0x9000, 70, 55)
    found = tracer.write()
    assert (len(found), found.runs, found.missing, found.name) == (10, 2, 2, "toy")
    names = ["first", "second"] * 3 if scheduler != "sw" else ["first"] * 3 + ["second"] * 3
    assert [task.kernel for task in found.stream] == names
    assert [row.task for row in found.intervals] == [*range(6), *range(4)]
    assert (found.num_lanes, found.lane_name) == (lanes, lane_name)
    assert found.overlaps() == 9
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["missing"] == 2
    del owners
