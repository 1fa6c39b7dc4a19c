"""A training run's folder, its log, and going on with it after Ctrl-C or after it was killed."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import batches
import jax
import numpy as np
import pytest
import runs

from brax_concurrent import cli
from brax_concurrent.training import logs
from brax_concurrent.training import train as training
from brax_concurrent.training.policy import POLICY, Policy
from brax_concurrent.training.train import CHECKPOINTS, _start, read_run, train

pytestmark = pytest.mark.xdist_group("train")


@pytest.fixture(scope="module", autouse=True)
def cache():
    with runs.compiled_once() as folder:
        yield folder


@pytest.fixture
def folder():
    """Of a run that was never interrupted."""
    return runs.finished()[0]


def check_same(out, other):
    """The policies of two runs, bit by bit."""
    ours, theirs = (runs.numbers(Policy.load(folder / POLICY)) for folder in (out, other))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


def test_a_run_leaves_its_policy_its_log_and_its_settings(folder):
    result = runs.finished()[1]
    assert result.steps == runs.TINY.steps
    assert read_run(folder)["config"] == runs.TINY
    loaded = Policy.load(folder / POLICY)
    assert int(loaded.steps) == result.steps
    obs = np.random.default_rng(0).normal(size=(5, 17)).astype(np.float32)
    np.testing.assert_array_equal(loaded(obs), result.policy(obs))
    assert sorted(int(path.name) for path in (folder / CHECKPOINTS).iterdir()) == [9, 12]
    rows = logs.read_csv(folder / logs.CSV)
    assert [row["iteration"] for row in rows] == [3, 6, 9, 12]
    assert rows[-1]["eval_return"] == pytest.approx(result.scores.mean)
    for row in rows:
        parts = row["collection_seconds"], row["learning_seconds"], row["evaluation_seconds"]
        assert row["seconds"] == pytest.approx(sum(parts))
        assert row["collection_share"] == pytest.approx(parts[0] / (parts[0] + parts[1]))
        assert row["steps_per_second"] == pytest.approx(row["steps"] / (parts[0] + parts[1]))
    rates = [row["learning_rate"] for row in rows]
    assert rates == pytest.approx([runs.TINY.learning_rate * (12 - i) / 12 for i in (2, 5, 8, 11)])
    assert any(path.name.startswith("events.out.tfevents") for path in folder.iterdir())


def learnt(folder):
    """The rows of a run's log without what depends on the time."""
    rows = logs.read_csv(folder / logs.CSV)
    timed = ("seconds", "steps_per_second", "collection_share")
    return [{name: x for name, x in row.items() if not name.endswith(timed)} for row in rows]


@pytest.mark.parametrize("iteration", [4, 6], ids=["between two rows of the log", "at a row"])
def test_ctrl_c_saves_and_a_resumed_run_ends_with_the_same_bits(folder, tmp_path, monkeypatch, capsys, iteration):
    out = tmp_path / "run"
    command = ["train", "halfcheetah", "--out", str(out), "--seed", "3", "--steps", str(runs.TINY.steps)]
    check = training._Run._check

    def interrupted(run, bad):
        check(run, bad)
        if run._iteration == iteration:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(training._Run, "_check", interrupted)
        assert cli.main([*command, *runs.SETTINGS]) == 130
    error = capsys.readouterr().err
    assert f"interrupted: saved {out} after {iteration * 256:,} steps; resume goes on from there" in error
    assert read_run(out)["config"] == runs.TINY
    assert cli.main([*command, "--resume"]) == 0
    output = capsys.readouterr().out
    first, second, *_ = output.splitlines()
    assert first.startswith(f"halfcheetah: going on with {out}; ")
    assert second.startswith(f"halfcheetah after {iteration * 256:,} steps: 32 environments")
    assert "3,072 of 3,072 steps" in output
    assert "collection took" in output
    check_same(out, folder)
    np.testing.assert_equal(learnt(out), learnt(folder))


def test_ctrl_c_before_anything_is_learnt_leaves_a_folder_to_begin_in(tmp_path, monkeypatch, capsys):
    """While it compiles, which takes longest with a robot's first run."""
    out = tmp_path / "run"
    command = ["train", "halfcheetah", "--out", str(out), "--steps", "256", *runs.SETTINGS]

    def interrupted(run):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training._Run, "_compile", interrupted)
        assert cli.main(command) == 130
    assert capsys.readouterr().err == "brax-concurrent: interrupted: nothing had been learnt yet\n"
    assert cli.main([*command, "--seed", "5"]) == 0
    assert read_run(out)["seed"] == 5


def test_the_policy_of_a_run_that_was_killed_before_it_was_written_is_that_of_the_checkpoint(folder, tmp_path):
    """At the end: the checkpoint was whole."""
    out = shutil.copytree(folder, tmp_path / "run")
    dataclasses.replace(Policy.load(out / POLICY), steps=7).save(out / POLICY)
    train("halfcheetah", out, resume=True, report=lambda line: None)
    assert int(Policy.load(out / POLICY).steps) == runs.TINY.steps
    assert learnt(out) == learnt(folder)


def test_a_log_with_other_columns_goes_on(tmp_path):
    """Of another version of the package: what it had more stays, what it had less is empty."""
    (tmp_path / logs.CSV).write_text("iteration,steps,luck\n3,30,0.25\n6,60,0.5\n9,90,0.75\n1")
    log = logs.Log(tmp_path, 6, 60)
    log.write({"iteration": 9, "steps": 90, "eval_return": 1.5})
    log.close()
    rows = logs.read_csv(tmp_path / logs.CSV)
    assert [row["iteration"] for row in rows] == [3, 6, 9]
    np.testing.assert_equal([row["luck"] for row in rows], [0.25, 0.5, np.nan])
    np.testing.assert_equal([row["eval_return"] for row in rows], [np.nan, np.nan, 1.5])


def test_tensorboard_keeps_the_last_row_before_an_interruption(tmp_path, monkeypatch):
    purged = []

    class Writer:
        def __init__(self, folder, purge_step):
            purged.append(purge_step)

        def close(self):
            pass

    monkeypatch.setattr(logs, "SummaryWriter", Writer)
    for iteration, steps in ((0, 0), (6, 60)):
        logs.Log(tmp_path, iteration, steps).close()
    assert purged == [None, 61]  # the first step that is hidden


KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
import runs
from brax_concurrent.training import checkpoint, train

out = Path(sys.argv[1])
save = checkpoint.Checkpoints.save

def kill_while_it_writes():
    while not any(path.name.startswith("9.") for path in (out / train.CHECKPOINTS).iterdir()):
        pass
    os.kill(os.getpid(), signal.SIGKILL)

def saving(checkpoints, iteration, *rest):
    if iteration == 9:
        threading.Thread(target=kill_while_it_writes, daemon=True).start()
        time.sleep(0.2)
    save(checkpoints, iteration, *rest)
    if iteration == 9:
        time.sleep(60)

checkpoint.Checkpoints.save = saving
train.train("halfcheetah", out, config=runs.TINY, seed=3)
"""


def test_a_run_that_was_killed_while_it_saved_ends_with_the_same_bits(folder, cache, tmp_path):
    out = tmp_path / "run"
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), str(tests.parent), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, "-c", KILLED, out], capture_output=True, text=True, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "2,304 of 3,072" not in done.stdout  # the third line, after the third checkpoint
    assert any(path.name.startswith("9.") for path in (out / CHECKPOINTS).iterdir())
    assert int(Policy.load(out / POLICY).steps) == 6 * runs.TINY.batch_size
    assert [row["iteration"] for row in logs.read_csv(out / logs.CSV)] == [3, 6, 9]  # one too many
    resumed = train("halfcheetah", out, resume=True, report=lambda line: None)
    check_same(out, folder)
    np.testing.assert_array_equal(resumed.scores.returns, runs.finished()[1].scores.returns)
    assert [row["iteration"] for row in logs.read_csv(out / logs.CSV)] == [3, 6, 9, 12]
    assert not any(path.name.startswith("9.") for path in (out / CHECKPOINTS).iterdir())


def test_a_run_without_a_checkpoint_begins_again(folder, tmp_path):
    """One that was killed early."""
    copy = shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(copy / CHECKPOINTS)
    (copy / POLICY).unlink()
    train("halfcheetah", copy, resume=True, report=lambda line: None)
    check_same(copy, folder)
    assert [row["iteration"] for row in logs.read_csv(copy / logs.CSV)] == [3, 6, 9, 12]


def test_episodes_begin_at_all_ages():
    """Else all of a batch would be of one age. What they had earned before is unknown."""
    env = batches.env("halfcheetah", 32)
    _, state, tally = _start(env, runs.TINY, jax.random.key(0))
    ages = np.asarray(state.internal["elapsed"])
    assert ages.min() < 200
    assert ages.max() > 800
    assert np.isnan(tally.returns).all()
    step = jax.jit(env.step)
    for _ in range(1000 - ages.max()):
        state = step(state, np.zeros((32, 6), np.float32))
    np.testing.assert_array_equal(state.truncated, ages == ages.max())
