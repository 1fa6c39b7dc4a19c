"""scripts/bench_throughput.py: what is measured, recorded and drawn; peers that are there and that are not."""

from __future__ import annotations

import functools
import json

import _records
import bench_throughput
import jax
import mujoco
import numpy as np
import peers
import plot_throughput
import pytest
from peers import CannotRunError, Peer, Prepared, models, mujoco_physics, paced

import brax_concurrent as bc
from brax_concurrent.envs.registry import list_envs, make_task
from brax_concurrent.kernels.model import load_model
from brax_concurrent.training.measure import Timing

jax.config.update("jax_platforms", "cpu")

pytestmark = pytest.mark.xdist_group("bench_throughput")

COMMON = ["--backend", "cpu", "--scheduler", "serial", "--repeats", "2", "--num-envs", "4"]


def fake(name="fast", rate=1e6, *, prepare=None, modules=()):
    def made_up(robot, num_envs, backend, threads):
        return Prepared(lambda: rate, lambda: None, num_envs, 0.5, {"backend": backend, "threads": threads})

    return Peer(name, f"{name}-package", modules, prepare or made_up)


def raising(error):
    def prepare(*_):
        raise error

    return prepare


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the script with these peers, drawing nothing; returns its exit code and its records."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(bench_throughput, "draw", lambda backend: None)
    monkeypatch.setattr(bench_throughput, "Timing", functools.partial(Timing, steps=2))

    def run(*arguments, known=()):
        monkeypatch.setattr(peers, "all_peers", lambda: {peer.name: peer for peer in known})
        code = bench_throughput.main([*COMMON, *arguments])
        file = tmp_path / "throughput.jsonl"
        return code, _records.read(file) if file.exists() else []

    return run


def test_results_are_recorded_against_serial_by_stages(run, monkeypatch):
    rates = {"stage": iter([7.0, 100.0, 300.0]), "step": iter([7.0, 300.0, 100.0])}  # first the warm-up
    monkeypatch.setattr(Timing, "sample", lambda self: next(rates[self.env.granularity]))
    monkeypatch.setattr(Timing, "check", lambda self: None)  # nothing has been stepped
    code, found = run("--robots", "grasp", "--granularity", "step", "--peer", "fast", "--threads", "1", known=[fake()])
    assert code == 0
    rows = [(r["scheduler"], r["granularity"], r["case"], r["num_envs"], r["n"], r["baseline"]) for r in found]
    assert rows == [
        ("serial", "stage", "grasp", 4, 2, "serial"),
        ("serial", "step", "grasp", 4, 2, "serial"),
        ("fast", None, "grasp", 4, 2, "serial"),
    ]
    stage, step, fast = found
    assert [r["value"] for r in found] == [200.0, 200.0, 1e6]
    assert stage["ratio"] == 1.0
    assert step["ratio"] == pytest.approx((3 + 1 / 3) / 2)  # the median of the turns' quotients
    assert fast["ratio"] == pytest.approx((1e6 / 100 + 1e6 / 300) / 2)
    assert {r["unit"] for r in found} == {"env steps/s"}
    assert (stage["detail"]["threads"], fast["detail"]["threads"]) == (1, 1)
    assert 0 < stage["detail"]["compile_seconds"] < 600
    assert fast["detail"]["backend"] == "cpu"


def test_all_is_one_batch_that_peers_have_no_part_in(run, monkeypatch, capsys):
    monkeypatch.setattr(bc, "list_envs", lambda: ["grasp", "halfcheetah"])
    code, found = run("--robots", "all", "--granularity", "stage", "--peer", "fast", known=[fake()])
    assert code == 0
    assert [(r["case"], r["num_envs"], r["scheduler"]) for r in found] == [("all", 8, "serial")]
    assert "skipped   fast, all: it steps one robot at a time" in capsys.readouterr().out


def test_one_failure_stops_nothing_else(run, capsys):
    broken = fake("broken", prepare=raising(OSError("no such thing")))
    void = fake("void", prepare=lambda *_: Prepared(lambda: 1.0, raising(RuntimeError("not finite")), 4, 0.5, {}))
    late = fake("late", prepare=lambda *_: Prepared(raising(MemoryError("full")), lambda: None, 4, 0.5, {}))
    elsewhere = fake("elsewhere", prepare=raising(CannotRunError("it runs on the moon")))
    known = [broken, void, late, elsewhere, fake()]
    code, found = run("--robots", "grasp", "--granularity", "stage", "--peer", "all", known=known)
    assert code == 1
    assert [r["scheduler"] for r in found] == ["serial", "fast"]
    out = capsys.readouterr().out
    assert "FAILED    broken, grasp, 4 environments: OSError: no such thing" in out
    assert "FAILED    void, grasp, 4 environments: RuntimeError: not finite" in out
    assert "FAILED    late, grasp, 4 environments: MemoryError: full" in out
    assert "skipped   elsewhere, grasp, 4 environments: it runs on the moon" in out


def test_what_cannot_run_is_no_failure(run):
    known = [fake("elsewhere", prepare=raising(CannotRunError("it runs on the moon")))]
    code, found = run("--robots", "grasp", "--granularity", "stage", "--peer", "elsewhere", known=known)
    assert (code, [r["scheduler"] for r in found]) == (0, ["serial"])


def test_a_peer_that_is_not_installed(run, capsys):
    absent = fake("absent", modules=("no_such_module", "no_such.package"))
    code, found = run("--robots", "grasp", "--granularity", "stage", "--peer", "all", known=[absent, fake()])
    assert (code, [r["scheduler"] for r in found]) == (0, ["serial", "fast"])
    assert "not installed: absent (pip install absent-package)" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        run("--robots", "grasp", "--peer", "absent", known=[absent])
    assert stopped.value.code == 2
    said = "--peer absent: no_such_module, no_such.package is not installed: pip install absent-package"
    assert said in capsys.readouterr().err


def test_every_peer_has_a_name_and_a_package():
    every = peers.all_peers()
    names = {
        "brax-spring",
        "brax-generalized",
        "brax-positional",
        "brax-mjx",
        "mujoco-warp",
        "mjx",
        "mujoco",
        "envpool",
    }
    assert set(every) == names
    assert all(peer.install and peer.modules for peer in every.values())
    assert every["mujoco"].missing() == []


def test_settings_reach_the_schedulers_that_have_them(monkeypatch):
    given = []

    class Made:
        num_envs = 3

    def timing(env):
        found = Prepared(lambda: 1.0, lambda: None, 3, 0.5, {})
        object.__setattr__(found, "env", Made)
        return found

    monkeypatch.setattr(bench_throughput, "Timing", timing)
    monkeypatch.setattr(bc, "make", lambda name, num_envs, **rest: given.append(rest))
    options = bench_throughput.parse_arguments([*COMMON, "--set", "window=8", "order=new"])
    for scheduler in ("serial", "other"):
        bench_throughput.prepare_ours("grasp", 3, options, scheduler, "stage")
    place = {"granularity": "stage", "backend": "cpu", "threads": 0}
    assert given == [{"scheduler": "serial", **place}, {"scheduler": "other", "window": 8, "order": "new", **place}]


def test_paced_work_lasts_long_enough(monkeypatch):
    clock = {"now": 0.0}
    monkeypatch.setattr(peers.time, "perf_counter", lambda: clock["now"])
    done = []

    def work(units):
        done.append(units)
        clock["now"] += 0.03 * units

    sample = paced(work, 20, 0.1)
    assert sample() == pytest.approx(20 / 0.03)
    assert done == [1, 1, 4]


def test_peers_get_the_robots_own_files():
    for robot in list_envs():
        model = models.load(robot, pgs=False)
        assert model.opt.solver == mujoco.mjtSolver.mjSOL_NEWTON
        assert model.opt.timestep == load_model(make_task(robot).model).opt.timestep
    assert models.load("humanoid", pgs=True).opt.solver == mujoco.mjtSolver.mjSOL_PGS
    assert models.load("humanoid", pgs=False).opt.iterations == 100
    assert models.healthy_height("halfcheetah") is None
    for robot in models.ROOT_HEIGHT:
        root, low, high = models.healthy_height(robot)
        model = models.load(robot, pgs=True)
        assert low < model.qpos0[root] < high
        data = mujoco.MjData(model)
        data.qpos[root] += 0.25
        mujoco.mj_kinematics(model, data)
        lifted = data.xpos[1, 2]
        data.qpos[root] -= 0.25
        mujoco.mj_kinematics(model, data)
        assert lifted - data.xpos[1, 2] == pytest.approx(0.25)  # that place of qpos is the root's height


@pytest.mark.parametrize("robot", ["grasp", "humanoid"])
def test_mujoco_is_measured(robot, monkeypatch):
    monkeypatch.setitem(peers.SECONDS, "cpu", 0.001)
    prepared = mujoco_physics.prepare(robot, 3, "cpu", 1)
    assert prepared.sample() > 0
    prepared.check()
    assert prepared.num_envs == 3
    assert prepared.detail["threads"] == 1
    assert prepared.detail["solver"] == ("pgs" if robot == "humanoid" else "newton")
    assert not any(isinstance(value, float) for value in prepared.detail.values())  # a float would be no setting
    json.dumps(prepared.detail)
    with pytest.raises(CannotRunError, match="MuJoCo C runs on the CPU"):
        mujoco_physics.prepare(robot, 3, "cuda", 1)


@pytest.fixture
def drawn_from(monkeypatch, tmp_path):
    """A file of records as if from two GPUs, the newer one last."""
    where = {"driver": "1", "versions": {}, "commit": "abc", "date": "2030-01-02T03:04:05+00:00"}
    common = {"unit": "env steps/s", "spread": 0.0, "n": 1, "backend": "cuda", "directory": tmp_path}

    def append(device, case, value, **settings):
        monkeypatch.setattr(_records, "provenance", lambda backend: {"device": device, **where})
        _records.append("throughput", case, value, **{**common, **settings})

    append("old", "ant", 9e9, scheduler="serial", granularity="stage", num_envs=64)
    append("new", "ant", 5.0, scheduler="serial", granularity="stage", num_envs=64)
    append("new", "ant", 1.0, scheduler="serial", granularity="stage", num_envs=64)  # measured again
    append("new", "ant", 3.0, scheduler="serial", granularity="step", num_envs=64)
    append("new", "ant", 4.0, scheduler="serial", granularity="step", num_envs=256)
    append("new", "ant", 2.0, scheduler="brax-spring", num_envs=64)
    append("new", "grasp", 7.0, scheduler="sw", granularity="stage", num_envs=64, detail={"window": 8})
    append("new", "grasp", 8.0, scheduler="sw", granularity="stage", num_envs=64, detail={"window": 32})
    append("new", "grasp", 6.0, scheduler="serial", unit="s to first step", num_envs=64)
    return tmp_path / "throughput.jsonl"


def test_the_newest_and_the_best_are_drawn(drawn_from):
    records = [r for r in _records.read(drawn_from) if r["device"] == "new" and r["unit"] == "env steps/s"]
    assert plot_throughput.best_lines(records) == {
        "ant": {"serial": {64: 3.0, 256: 4.0}, "brax-spring": {64: 2.0}},
        "grasp": {"sw": {64: 8.0}},
    }


# Matplotlib 3.10 calls pyparsing by names that its newer versions deprecate.
@pytest.mark.filterwarnings("ignore:.*deprecated.*use:DeprecationWarning")
def test_a_picture_of_one_device(drawn_from, monkeypatch, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    seen = []
    best = plot_throughput.best_lines
    monkeypatch.setattr(plot_throughput, "best_lines", lambda records: seen.extend(records) or best(records))
    picture = tmp_path / "throughput.png"
    plot_throughput.draw(drawn_from, "cuda", picture)
    assert {record["device"] for record in seen} == {"new"}
    pixels = matplotlib.image.imread(picture)
    assert pixels.shape[1] > pixels.shape[0] > 100
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 10


def test_nothing_to_draw(drawn_from, tmp_path):
    with pytest.raises(ValueError, match="throughput.jsonl has no env steps/s of backend 'cpu'"):
        plot_throughput.draw(drawn_from, "cpu", tmp_path / "no.png")


def test_without_matplotlib_it_is_said(monkeypatch, capsys):
    monkeypatch.setattr(bench_throughput.importlib.util, "find_spec", lambda name: None)
    bench_throughput.draw("cpu")
    assert "no picture: pip install matplotlib" in capsys.readouterr().out
