"""The benchmarks of training and of the transfer to Gymnasium: what they write, from runs that are over in a moment."""

from __future__ import annotations

import csv
import math

import _records
import bench_training
import bench_transfer
import numpy as np
import pytest
import runs

from brax_concurrent.training.evaluate import Scores

pytestmark = pytest.mark.xdist_group("train")


@pytest.fixture(scope="module", autouse=True)
def cache():
    with runs.compiled_once():
        yield


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Records as if of a made-up machine, in a folder."""
    where = {"device": "Chip", "driver": None, "versions": {}, "commit": "abc", "date": "2030-01-02T03:04:05+00:00"}
    monkeypatch.setattr(_records, "provenance", lambda backend: dict(where))
    monkeypatch.setenv("BRAX_CONCURRENT_RECORDS", str(tmp_path / "records"))
    return tmp_path / "records"


@pytest.mark.slow
def test_training_and_transfer_of_two_seeds(monkeypatch, measured, tmp_path):
    monkeypatch.setattr(bench_training, "preset", lambda robot, backend: runs.TINY)
    out = tmp_path / "out"
    options = ["--seeds", "3", "4", "--out", str(out), "--target", "halfcheetah=-1000", "--backend", "cpu"]
    bench_training.main(["halfcheetah", *options])
    assert sorted(path.name for path in out.iterdir()) == ["halfcheetah-3.npz", "halfcheetah-4.npz", "halfcheetah.csv"]
    with open(out / "halfcheetah.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["seed"], row["iteration"]) for row in rows] == [(s, f"{i}.0") for s in "34" for i in (3, 6, 9, 12)]
    ends = [float(row["eval_return"]) for row in rows if row["iteration"] == "12.0"]
    returned, rate, reached = _records.read(measured / "training.jsonl")
    assert (returned["unit"], returned["n"], returned["num_envs"]) == ("return", 2, 32)
    assert returned["value"] == pytest.approx(sum(ends) / 2)
    assert returned["spread"] == pytest.approx(abs(ends[0] - ends[1]) / 2)
    assert returned["detail"]["steps"] == runs.TINY.steps
    assert rate["unit"] == "env steps/s"
    assert reached["unit"] == "s to a return of -1,000"
    firsts = [float(row["seconds"]) for row in rows if row["iteration"] == "3.0"]
    assert reached["value"] == pytest.approx(sum(firsts) / 2)

    bench_transfer.main([*map(str, out.glob("*.npz")), "--episodes", "2", "--backend", "cpu"])
    theirs, ours = _records.read(measured / "transfer.jsonl")
    assert (theirs["scheduler"], ours["baseline"]) == ("gymnasium", "gymnasium")
    assert {record["detail"]["episodes of each policy"] for record in (theirs, ours)} == {2}
    # An untrained cheetah hardly moves, there as here.
    assert abs(theirs["value"]) < 50
    assert abs(ours["value"]) < 50


def test_the_standard_error_is_that_of_the_mean_over_policies():
    random = np.random.default_rng(0)
    scores = [Scores(random.normal(0.0, 2.0, 50), np.ones(50)) for _ in range(3)]
    found = bench_transfer.detail(scores, 50)
    assert found["standard error"] == pytest.approx(2.0 / math.sqrt(150), rel=0.1)
    assert found["mean"] == pytest.approx(np.mean([each.returns for each in scores]))


@pytest.mark.parametrize(("wanted", "found"), [(5.0, 1.0), (6.0, 3.0), (10.0, None)])
def test_when_a_return_was_reached(wanted, found):
    curve = [{"seconds": float(i), "eval_return": value} for i, value in enumerate([math.nan, 5.0, 4.0, 9.0])]
    assert bench_training.seconds_until(curve, wanted) == found


@pytest.mark.parametrize("text", ["halfcheetah", "cheetahs=1", "=1"])
def test_a_target_is_a_robot_and_a_return(capsys, text):
    with pytest.raises(SystemExit):
        bench_training.parse_arguments(["ant", "--out", "x", "--target", text])
    assert "expected ROBOT=RETURN" in capsys.readouterr().err
