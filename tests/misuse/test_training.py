"""Training and evaluating with bad input: what is damaged, foreign, full, not finite or misspelt is told by name."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import resource
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from brax_concurrent import cli
from brax_concurrent.envs.halfcheetah import HalfCheetah
from brax_concurrent.training import evaluate, logs
from brax_concurrent.training import train as training
from brax_concurrent.training.checkpoint import CheckpointError, Checkpoints
from brax_concurrent.training.policy import POLICY, Policy, PolicyError
from brax_concurrent.training.ppo import Config
from brax_concurrent.training.train import CHECKPOINTS, RUN, NotFiniteError, train

# When one of its reads or writes fails, Orbax closes its event loop, and those beside it complain when they end.
pytestmark = [
    pytest.mark.xdist_group("train"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def cache():
    with runs.compiled_once():
        yield


@pytest.fixture
def folder(tmp_path):
    """A copy of a finished run's folder, to do harm to."""
    return shutil.copytree(runs.finished()[0], tmp_path / "run")


def run(capsys, *arguments):
    """Exit code and error message of the command."""
    code = cli.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().err


# ---- arguments


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_envs", 0, "num_envs: expected a whole number of at least 1, got 0"),
        ("steps", 1e6, "steps: expected a whole number of at least 1, got 1000000.0"),
        ("discount", 1.5, "discount: expected a number from 0 to 1, got 1.5"),
        ("learning_rate", math.nan, "learning_rate: expected a number from 0 to 1, got nan"),
        ("clip_range", "wide", "clip_range: expected a number from 1e-06 to 10, got 'wide'"),
        ("actor_layers", (64, 0), "actor_layers: expected whole numbers of at least 1, got (64, 0)"),
        ("activation", "relu6", "activation: expected one of ['tanh', 'swish'], got 'relu6'"),
        ("num_minibatches", 7, "num_minibatches: expected a number that divides num_envs * unroll_length, 40960, in"),
    ],
)
def test_a_configuration_is_checked(name, value, said):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Config(**{name: value})
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "learning=1"], "set: there is no 'learning'; known: steps, num_envs, "),
        (["--set", "learning_rate=fast"], "learning_rate: expected a number, got 'fast'"),
        (["--set", "num_epochs=1.5"], "num_epochs: expected a whole number, got '1.5'"),
        (["--set", "actor_layers=64,x"], "actor_layers: expected whole numbers with commas between, got '64,x'"),
        (["--num-envs", "33"], "num_minibatches: expected a number that divides"),
    ],
)
def test_settings_of_the_command_are_checked(capsys, tmp_path, options, said):
    code, error = run(capsys, "train", "halfcheetah", "--out", tmp_path / "run", "--set", "unroll_length=5", *options)
    assert (code, error.startswith(f"brax-concurrent: error: {said}")) == (2, True), error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "1.5"], "--steps: expected a whole number of at least 1, such as 5e6, got '1.5'"),
        (["--steps", "1e999"], "--steps: expected a whole number"),
        (["--seconds", "0"], "--seconds: expected a positive number, got '0'"),
        (["--seed", str(1 << 63)], "--seed: expected a whole number from 0 to 2**63 - 1, got '9223372036854775808'"),
        (["--out", ""], "--out: expected a folder, got ''"),
        (["--set", "x"], "--set: expected NAME=VALUE, got 'x'"),
    ],
)
def test_options_are_checked(capsys, tmp_path, options, said):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "halfcheetah", "--out", str(tmp_path), *options])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_run_is_not_overwritten(capsys, folder):
    before = (folder / POLICY).read_bytes()
    code, error = run(capsys, "train", "halfcheetah", "--out", folder)
    assert code == 2
    assert error == f"brax-concurrent: error: {folder} holds a run already: --resume goes on with it\n"
    assert (folder / POLICY).read_bytes() == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["halfcheetah", "--seed", "4"], "seed: {folder} is a run with seed 3, got 4"),
        (["halfcheetah", "--num-envs", "64"], "num_envs: {folder} is a run with 32, got 64"),
        (["walker2d"], "robot: {folder} is a run of 'halfcheetah', got 'walker2d'"),
    ],
)
def test_a_run_goes_on_by_its_own_settings(capsys, folder, options, said):
    code, error = run(capsys, "train", *options, "--out", folder, "--resume")
    assert (code, error) == (2, f"brax-concurrent: error: {said.format(folder=folder)}\n")


def test_the_folder_is_a_file(capsys, tmp_path):
    (tmp_path / "run").write_text("")
    code, error = run(capsys, "train", "halfcheetah", "--out", tmp_path / "run")
    assert (code, error) == (1, f"brax-concurrent: error: cannot write {tmp_path / 'run'}: Not a directory\n")


def test_another_process_trains_there(capsys, folder):
    with training._alone(folder):
        code, error = run(capsys, "train", "halfcheetah", "--out", folder, "--resume")
    assert (code, error) == (1, f"brax-concurrent: error: another process is training in {folder}\n")


def test_nothing_to_resume(capsys, tmp_path):
    code, error = run(capsys, "train", "halfcheetah", "--out", tmp_path, "--resume")
    assert code == 1
    assert error == f"brax-concurrent: error: {tmp_path} holds no training run: there is no {tmp_path / RUN}\n"


# ---- checkpoints


def test_a_damaged_checkpoint_is_named_and_so_is_the_one_before(capsys, folder):
    for path in runs.files_of_newest_checkpoint(folder):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    code, error = run(capsys, "train", "halfcheetah", "--out", folder, "--resume")
    assert code == 1
    newest = folder / CHECKPOINTS / "12"
    assert f"error: {newest} is damaged or no checkpoint of a training run here: " in error
    assert f"without {newest} a resumed run goes on from iteration 9" in error
    shutil.rmtree(newest)
    assert train("halfcheetah", folder, resume=True, report=lambda line: None).steps == runs.TINY.steps


def test_a_checkpoint_that_has_a_flipped_bit_is_damaged(tmp_path):
    """Bits drawn at random cannot be compressed, so the files have them as they are, wherever TensorStore puts them."""
    noise = np.random.default_rng(0).integers(2**32, size=1024, dtype=np.uint32)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"noise": noise}, {})
    checkpoints.save(5, {"noise": noise}, {})
    flipped = noise.copy()
    flipped[500] ^= 1 << 20
    holding = [path for path in (tmp_path / "5").rglob("d/*") if noise.tobytes() in path.read_bytes()]
    assert holding
    for path in holding:
        path.write_bytes(path.read_bytes().replace(noise.tobytes(), flipped.tobytes()))
    expected = f"{tmp_path}/5 is damaged: its numbers are not those that were saved; without {tmp_path}/5 a resumed run"
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        checkpoints.restore({"noise": noise})


def test_a_foreign_checkpoint_is_told_by_its_first_wrong_array(folder):
    (folder / CHECKPOINTS / "12").rename(folder / "elsewhere")
    shutil.rmtree(folder / CHECKPOINTS)
    other = Checkpoints(folder / CHECKPOINTS)
    other.save(5, {"weights": jnp.zeros(3)}, {})
    with pytest.raises(CheckpointError, match=r"5 is a checkpoint of another run: expected .* found nothing"):
        train("halfcheetah", folder, resume=True)
    with pytest.raises(CheckpointError, match=r"expected float32\[4\] as \['weights'\], found float32\[3\]"):
        other.restore({"weights": jnp.zeros(4)})


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def replaced(folder):
    shutil.rmtree(folder)
    folder.write_text("")


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        (
            "12",
            emptied,
            "{folder}/12 is damaged or no checkpoint of a training run here: it lacks arrays and contents; w",
        ),
        (
            "12/arrays",
            shutil.rmtree,
            "{folder}/12 is damaged or no checkpoint of a training run here: it lacks arrays;",
        ),
        (
            "",
            emptied,
            "there is no checkpoint in {folder}, but {folder.parent}/policy.npz holds what a run has learnt: ",
        ),
        ("", replaced, "{folder} is no folder, so that no checkpoint can be there: move it away"),
    ],
)
def test_a_damaged_folder_of_checkpoints_is_told_in_one_line(capsys, folder, name, harm, said):
    checkpoints = folder / CHECKPOINTS
    before = (folder / POLICY).read_bytes()
    harm(checkpoints / name)
    code, error = run(capsys, "train", "halfcheetah", "--out", folder, "--resume")
    assert code == 1
    assert error.startswith(f"brax-concurrent: error: {said.format(folder=checkpoints)}")
    assert error.count("\n") == 1
    assert (folder / POLICY).read_bytes() == before


def test_the_only_checkpoint_is_damaged(folder):
    shutil.rmtree(folder / CHECKPOINTS / "9")
    emptied(folder / CHECKPOINTS / "12")
    with pytest.raises(CheckpointError, match="12 is damaged .*; there is no other: train in another folder"):
        train("halfcheetah", folder, resume=True)


def test_other_files_in_place_of_checkpoints(folder):
    shutil.rmtree(folder / CHECKPOINTS)
    (folder / CHECKPOINTS / "7").mkdir(parents=True)
    (folder / CHECKPOINTS / "7" / "weights.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="7 is damaged or no checkpoint of a training run here"):
        train("halfcheetah", folder, resume=True)


@pytest.mark.parametrize("text", ["", "{}", '{"robot": "ant", "seed": 0, "config": {"rate": 1}}', "[1]"])
def test_damaged_settings(folder, text):
    (folder / RUN).write_text(text)
    with pytest.raises(CheckpointError, match=r"run\.json is damaged or not of a training run here"):
        train("halfcheetah", folder, resume=True)


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path):
    """No file may grow beyond 64 kB, which is what a write to a full disk runs into too: it fails in the middle."""
    random = np.random.default_rng(0)
    small, large = ({"x": jnp.asarray(random.normal(size=n), jnp.float32)} for n in (1000, 1_000_000))
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, small, {"steps": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r": File too large; the last good one is that of iteration 1"):
            checkpoints.save(2, large, {"steps": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for each in (checkpoints, Checkpoints(tmp_path / "c")):
        iteration, tree, about = each.restore(small)
        assert (iteration, about) == (1, {"steps": 1})
        np.testing.assert_array_equal(tree["x"], small["x"])
    Checkpoints(tmp_path / "c").save(2, large, {"steps": 2})
    assert Checkpoints(tmp_path / "c").latest() == 2


def test_a_full_disk_ends_the_command_with_what_is_left(capsys, tmp_path, monkeypatch):
    """At the second checkpoint."""
    save = Checkpoints.save

    def failing(checkpoints, iteration, tree, about):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024 if iteration > 3 else before[0], before[1]))
        try:
            save(checkpoints, iteration, tree, about)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(Checkpoints, "save", failing)
    options = ["--out", tmp_path / "run", "--seed", 3, "--steps", runs.TINY.steps, *runs.SETTINGS]
    code, error = run(capsys, "train", "halfcheetah", *options)
    assert code == 1
    assert f"error: cannot write a checkpoint into {tmp_path / 'run' / CHECKPOINTS}: " in error
    assert error.endswith("the last good one is that of iteration 3\n")
    assert int(Policy.load(tmp_path / "run" / POLICY).steps) == 3 * runs.TINY.batch_size


def test_a_policy_that_cannot_be_written_leaves_the_one_before(folder, monkeypatch):
    before = (folder / POLICY).read_bytes()

    def full(file, **arrays):
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        Policy.load(folder / POLICY).save(folder / POLICY)
    assert (folder / POLICY).read_bytes() == before
    assert not list(folder.glob(f".{POLICY}*"))


# ---- numbers that are none


def test_a_reward_that_is_not_finite_stops_training(tmp_path):
    task = HalfCheetah(forward_reward_weight=3e38)
    with pytest.raises(NotFiniteError, match=r"batch\.reward is not finite in iteration 1, .*; there is no checkpoint"):
        train(task, tmp_path / "run", config=runs.TINY, report=lambda line: None)


@pytest.mark.parametrize(
    ("minibatches", "name"), [(1, "parameter.actor.0.bias"), (2, "policy_loss")], ids=["parameter", "loss"]
)
def test_parameters_that_are_not_finite_stop_training(tmp_path, monkeypatch, capsys, minibatches, name):
    """A learning rate of NaN in the fifth iteration: with one minibatch its parameters, with two already a loss."""
    rate = training._Run._learning_rate
    monkeypatch.setattr(training._Run, "_learning_rate", lambda run: math.nan if run._iteration == 4 else rate(run))
    settings = [*runs.SETTINGS, "--set", f"num_minibatches={minibatches}", "--set", f"num_epochs={minibatches}"]
    options = ["--out", tmp_path / "run", "--steps", runs.TINY.steps, *settings]
    code, error = run(capsys, "train", "halfcheetah", *options)
    assert code == 1
    assert error == (
        f"brax-concurrent: error: {name} is not finite in iteration 5, after 1,280 steps; the checkpoint of iteration "
        f"3 is kept in {tmp_path / 'run'}\n"
    )
    assert Checkpoints(tmp_path / "run" / CHECKPOINTS).latest() == 3
    assert np.isfinite(Policy.load(tmp_path / "run" / POLICY).mean).all()


# ---- policies

NPY = b"\x93NUMPY\1\0\x76\0" + b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}".ljust(117) + b"\n" + bytes(4)


def changed(folder, **arrays):
    """The folder's policy file with other arrays; None leaves one out."""
    with np.load(folder / POLICY) as file:
        contents = dict(file) | arrays
    np.savez(folder / POLICY, **{name: array for name, array in contents.items() if array is not None})


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"mean": None}, "it lacks 'mean'"),
        ({"about": None}, "it lacks 'about'"),
        ({"about": np.asarray("{}")}, "it lacks 'format'"),
        ({"about": np.asarray('{"format": "other 7"}')}, "its format is 'other 7'"),
        ({"actor.1.bias": np.zeros(5, np.float32)}, "layer 1 has weights and bias of (8, 6) and (5,), for 8 inputs"),
        ({"mean": np.zeros(16, np.float32)}, "layer 0 has weights and bias of (17, 8) and (8,), for 16 inputs"),
        ({"low": np.zeros(2, np.float32)}, "low has shape (2,), expected (6,)"),
        ({"variance": np.full(17, np.nan, np.float32)}, "variance is not all finite numbers"),
        ({"variance": np.r_[np.ones(16), -1e-3].astype(np.float32)}, "variance has the negative number -0.001"),
        ({"low": np.full(6, 2, np.float32)}, "low is above high"),
        ({"log_std": np.zeros(6)}, "log_std is not all finite numbers in single precision"),
    ],
)
def test_a_policy_that_is_not_sound(folder, arrays, said):
    changed(folder, **arrays)
    with pytest.raises(PolicyError) as caught:
        Policy.load(folder / POLICY)
    start = f"{folder / POLICY} is no policy that was trained here, or is damaged: "
    assert str(caught.value).startswith(start + said)


@pytest.mark.parametrize("contents", [b"", b"PK\3\4", b"hello", b"\x93NUMPY", NPY])
def test_what_is_no_policy_file(capsys, folder, contents):
    (folder / POLICY).write_bytes(contents)
    code, error = run(capsys, "evaluate", folder)
    assert code == 1
    assert f"error: {folder / POLICY} is no policy that was trained here, or is damaged: " in error


def test_a_policy_cut_short(capsys, folder):
    whole = (folder / POLICY).read_bytes()
    (folder / POLICY).write_bytes(whole[: len(whole) // 2])
    code, error = run(capsys, "evaluate", folder)
    assert code == 1
    assert "is no policy that was trained here, or is damaged: " in error


def test_no_policy(capsys, tmp_path):
    code, error = run(capsys, "evaluate", tmp_path / "nothing")
    assert (code, error) == (
        1,
        f"brax-concurrent: error: cannot read {tmp_path / 'nothing'}: No such file or directory\n",
    )


def test_a_run_without_a_policy_yet(capsys, folder):
    (folder / POLICY).unlink()
    code, error = run(capsys, "evaluate", folder)
    said = f"cannot read {folder / POLICY}: this run has saved none yet; it does at its first evaluation"
    assert (code, error) == (1, f"brax-concurrent: error: {said}\n")


def test_a_robot_in_place_of_a_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, error = run(capsys, "evaluate", "ant")
    assert code == 1
    assert "cannot read ant: expected the folder of a training run; `brax-concurrent train ant --out runs/ant`" in error


def test_another_file_of_a_run(capsys, folder):
    code, error = run(capsys, "evaluate", folder / RUN)
    text = f"{folder / RUN} is no policy that was trained here, or is damaged: it is no .npz archive"
    assert (code, error) == (1, f"brax-concurrent: error: {text}\n")


@pytest.mark.parametrize("place", ["ours", "gymnasium"])
def test_a_policy_of_another_robots_size(capsys, folder, place):
    with np.load(folder / POLICY) as file:
        about = json.loads(str(file["about"]))
    changed(folder, about=np.asarray(json.dumps(about | {"robot": "ant"})))
    code, error = run(capsys, "evaluate", folder, "--in", place, "--episodes", 1)
    whose = "ant" if place == "ours" else "Gymnasium's Ant-v5"
    assert code == 1
    assert error == f"brax-concurrent: error: policy: {whose} has observations of 105 numbers, this policy's have 17\n"


def test_by_default_a_robot_that_gymnasium_has_not_is_scored_here(capsys, folder, monkeypatch):
    monkeypatch.setattr(evaluate, "gymnasium_id", lambda robot: (_ for _ in ()).throw(ValueError(robot)))
    assert cli.main(["evaluate", str(folder), "--episodes", "1", "--backend", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["in", "ours"]


def test_a_robot_that_gymnasium_has_not(capsys, folder):
    with np.load(folder / POLICY) as file:
        about = json.loads(str(file["about"]))
    changed(folder, about=np.asarray(json.dumps(about | {"robot": "grasp"})))
    code, error = run(capsys, "evaluate", folder, "--in", "gymnasium")
    assert code == 2
    assert error.startswith("brax-concurrent: error: robot: Gymnasium has no counterpart of 'grasp', only of ant, half")


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (b"epoch,loss\n1,2\n", "expected the columns of a training log, got ['epoch', 'loss']; move it away"),
        (b"", "expected the columns of a training log, got []"),
        (b"iteration,steps\n1,2,3\n", "expected a number for each column, got ['1', '2', ['3']]"),
        (b"iteration,steps\n\0,2\n", "could not convert string to float"),
        (b"\xff\xfe", "'utf-8' codec can't decode"),
    ],
)
def test_a_log_of_something_else(folder, contents, said):
    (folder / logs.CSV).write_bytes(contents)
    with pytest.raises(CheckpointError) as caught:
        train("halfcheetah", folder, resume=True)
    assert str(caught.value).startswith(f"{folder / logs.CSV} is damaged or no training log: {said}")
    assert (folder / logs.CSV).read_bytes() == contents


def test_gymnasiums_robots_are_not_installed(capsys, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    code, error = run(capsys, "evaluate", folder, "--in", "gymnasium")
    assert code == 1
    assert error == "brax-concurrent: error: gymnasium is not installed: pip install 'gymnasium[mujoco]'\n"


def test_what_gymnasium_lacks_is_said_before_anything_is_scored(capsys, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.setattr(evaluate, "score", None)
    code, error = run(capsys, "evaluate", folder)
    assert code == 1
    assert error.endswith("gymnasium is not installed: pip install 'gymnasium[mujoco]', or use --in ours\n")


def test_what_is_not_installed(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "brax_concurrent.training.train", None)
    assert cli.main(["train", "halfcheetah", "--out", str(tmp_path)]) == 1
    output, error = capsys.readouterr()
    assert "pip install 'brax-concurrent[train]'" in error
    # What takes seconds to load, with what is loaded there, is announced before.
    assert output.startswith(f"halfcheetah: training into {tmp_path}; ")


def test_a_configuration_survives_its_file():
    config = dataclasses.replace(runs.TINY, activation="swish")
    assert Config(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert jax.config.jax_platforms == "cpu"


def test_a_run_with_nothing_left_to_do_says_so(capsys, folder):
    assert cli.main(["train", "halfcheetah", "--out", str(folder), "--resume", "--steps", "99"]) == 0
    assert f"{folder} has 3,072 steps, in 0 s: nothing is left to do, unless more steps" in capsys.readouterr().out


@pytest.mark.parametrize("seed", [-1, 1 << 63, 1.5, True])
def test_a_seed_that_cannot_be_is_refused_before_anything_is_written(tmp_path, seed):
    with pytest.raises(ValueError, match="seed: expected a whole number from 0 to 2"):
        train("halfcheetah", tmp_path / "run", seed=seed, steps=10, backend="cpu")
    assert not (tmp_path / "run").exists()


def test_a_folder_is_trained_in_by_one_process(tmp_path):
    again = training._alone(tmp_path)
    with training._alone(tmp_path), pytest.raises(FileExistsError, match="another process is training in"):
        again.__enter__()
    with training._alone(tmp_path):
        pass
