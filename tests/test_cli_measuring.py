"""The commands bench and tune, called as functions; small sizes."""

import argparse
import json
import re
import sys

import jax
import pytest

import brax_concurrent
from brax_concurrent.cli import bench, tune
from brax_concurrent.cli.common import CommandError
from brax_concurrent.envs import list_envs, make, tuned
from brax_concurrent.envs.arrays import GRANULARITIES
from brax_concurrent.scheduler.schedule import schedulers_on
from brax_concurrent.training import measure as measuring
from brax_concurrent.training import tune as tuning
from brax_concurrent.training.measure import Throughput

jax.config.update("jax_platforms", "cpu")

pytestmark = pytest.mark.xdist_group("cli_measuring")

QUICK = ["--steps", "3", "--repeats", "2"]


def run(*arguments):
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    bench.add_parser(commands)
    tune.add_parser(commands)
    options = parser.parse_args([str(x) for x in arguments])
    return options.run(options)


def rows(text):
    """The table's cells; its columns are two spaces or more apart."""
    return [re.split(r"\s{2,}", line) for line in text.splitlines()]


@pytest.fixture
def made_up(monkeypatch):
    """Instead of measuring: 1000 env steps/s by stages, 1500 by whole steps; notes what it got."""
    seen = []

    def compare(envs, **arguments):
        seen.append((list(envs), arguments))
        rates = [{"stage": 1000.0, "step": 1500.0}.get(getattr(env, "granularity", ""), 1200.0) for env in envs]
        return [
            Throughput((rate, rate, 1.1 * rate), 7, env.num_envs, 0.25) for env, rate in zip(envs, rates, strict=True)
        ]

    monkeypatch.setattr(measuring, "compare", compare)
    return seen


@pytest.mark.slow
def test_bench_prints_and_writes_what_it_measured(capsys, tmp_path):
    file = tmp_path / "results.json"
    scheduler = schedulers_on("cpu")[-1]
    assert run("bench", "grasp", "--num-envs", 4, 8, "--scheduler", scheduler, "serial", "--json", file, *QUICK) == 0
    head, *table = rows(capsys.readouterr().out)
    assert head == ["robot", "scheduler", "granularity", "envs", "env steps/s", "spread", "to serial", "compiled"]
    assert [row[:4] for row in table[::2]] == [["grasp", "serial", "step", "4"], ["grasp", "serial", "step", "8"]]
    written = json.loads(file.read_text())
    results = written.pop("results")
    assert written == {"version": brax_concurrent.__version__, "backend": "cpu", "device": "cpu"}
    assert [each["num_envs"] for each in results] == [4, 4, 8, 8]
    for row, each in zip(table, results, strict=True):
        assert each["robot"] == "grasp"
        assert (each["steps"], len(each["samples"])) == (3, 2)
        assert min(each["samples"]) <= each["env_steps_per_second"] <= max(each["samples"])
        assert row[1:3] == [each["scheduler"], each["granularity"]]
        assert row[4:7] == [
            f"{each['env_steps_per_second']:,.0f}",
            f"{each['spread']:.1%}",
            f"{each['ratio_to_serial']:.2f}x",
        ]
    assert [each["ratio_to_serial"] for each in results[::2]] == [1.0, 1.0]


def test_bench_compares_with_the_first_of_serial(capsys, made_up):
    assert run("bench", "grasp", "--granularity", "stage", "step", "--scheduler", "serial", "--num-envs", 6) == 0
    _, *table = rows(capsys.readouterr().out)
    assert table == [
        ["grasp", "serial", "stage", "6", "1,000", "10.0%", "1.00x", "0.2 s"],
        ["grasp", "serial", "step", "6", "1,500", "10.0%", "1.50x", "0.2 s"],
    ]
    ((envs, arguments),) = made_up
    assert [env.granularity for env in envs] == ["stage", "step"]
    assert arguments == {"steps": None, "repeats": 5}


def test_bench_takes_each_robot_and_all_of_them_in_one_batch(capsys, made_up):
    assert run("bench", "--num-envs", 3, "--threads", 1) == 0
    _, *table = rows(capsys.readouterr().out)
    assert list(dict.fromkeys(row[0] for row in table)) == [*list_envs(), "all"]
    assert {row[1] for row in table} == set(schedulers_on("cpu"))
    mixed = made_up[-1][0][0]
    assert {name: env.num_envs for name, env in mixed.envs.items()} == dict.fromkeys(list_envs(), 3)
    assert table[-1][3] == "15"
    assert {env._threads for group, _ in made_up[:-1] for env in group} == {1}


def test_bench_hands_settings_to_make_but_for_serial(made_up, monkeypatch):
    given = []
    monkeypatch.setattr(
        brax_concurrent.envs,
        "make",
        lambda name, num_envs, **rest: given.append(rest) or make(name, num_envs),
    )
    run(
        "bench",
        "grasp",
        "--scheduler",
        "other",
        "serial",
        "--set",
        "window=8",
        "--set",
        "order=new",
        "--set",
        "regroup=True",
    )
    place = {"granularity": "step", "backend": "auto", "threads": 0}
    assert given == [
        {"scheduler": "serial", **place},
        {"scheduler": "other", "window": 8, "order": "new", "regroup": True, **place},
    ]


def test_bench_goes_on_after_a_failure(capsys, monkeypatch, made_up):
    fine = measuring.compare

    def compare(envs, **arguments):
        if envs[0].num_envs == 2:
            raise RuntimeError("out of memory")
        return fine(envs, **arguments)

    monkeypatch.setattr(measuring, "compare", compare)
    assert run("bench", "grasp", "--num-envs", 2, 3, "--scheduler", "serial") == 1
    out, err = capsys.readouterr()
    assert err == "brax-concurrent: grasp, 2 environments: out of memory\n"
    assert [row[3] for row in rows(out)] == ["envs", "3"]


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["bench", "graps"], "there is no task 'graps'", 2),
        (["bench", "grasp", "--scheduler", "none"], "scheduler: expected", 2),
        (["bench", "grasp", "--granularity", "fine"], "granularity: expected", 2),
        (["bench", "grasp", "--json", "/no/such/folder/a.json"], "there is no folder /no/such/folder", 1),
        (["tune", "graps"], "there is no task 'graps'", 2),
        (["tune", "grasp", "--scheduler", "none"], "scheduler: expected", 2),
    ],
)
def test_wrong_arguments(arguments, said, code):
    with pytest.raises(CommandError, match=re.escape(said)) as found:
        run(*arguments)
    assert found.value.code == code


@pytest.mark.parametrize("text", ["window", "=3", "a b=3", "window="])
def test_a_setting_has_a_name_and_a_value(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("bench", "grasp", "--set", text)
    assert stopped.value.code == 2
    assert f"expected ARGUMENT=VALUE, got {text!r}" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said_after_the_table(tmp_path, capsys, made_up):
    with pytest.raises(CommandError, match="cannot write .*: Is a directory"):
        run("bench", "grasp", "--num-envs", 3, "--scheduler", "serial", "--json", tmp_path)
    assert len(rows(capsys.readouterr().out)) == 2


@pytest.mark.slow
def test_tune_prints_the_candidates_and_remembers(capsys, monkeypatch):
    kept = []
    monkeypatch.setattr(tuned, "remember", lambda where, candidates: kept.extend(candidates))
    assert run("tune", "grasp", "--num-envs", 32, "--scheduler", "serial", "--repeats", 1) == 0
    begin, first, head, *table, fastest, remembered = rows(capsys.readouterr().out)
    assert begin == ["grasp: measuring with 32 environments; compiling comes first"]
    assert first == ["grasp: 32 environments, cpu"]
    assert head == ["scheduler", "granularity", "env steps/s", "spread", "to the first", "as fast in", "compiled"]
    fastest_first = sorted(kept, key=lambda one: -one[1][0])
    assert [row[:3] for row in table] == [
        ["serial", settings["granularity"], f"{rate:,.0f}"] for settings, (rate,) in fastest_first
    ]
    assert sorted(row[1] for row in table) == sorted(GRANULARITIES)
    assert table[0][4:6] == ["1.00x", "1 of 1"]
    assert fastest == [f"fastest: make('grasp', 32, scheduler='serial', granularity={table[0][1]!r})"]
    assert remembered == ["remembered: make('grasp', 32) takes it from now on"]


def test_tune_says_what_is_within_the_spread_and_takes_the_simplest_of_it(capsys, monkeypatch):
    rates = {
        ("serial", "stage"): (100.0, 130.0, 90.0, 80.0),
        ("sw", "step"): (120.0, 120.0, 110.0, 110.0),
        ("hw", "stage"): (60.0, 70.0, 80.0, 60.0),
    }

    def compare(envs, **_):
        found = [rates.get((env.scheduler, env.granularity), (10.0,) * 4) for env in envs]
        return [Throughput(samples, 7, env.num_envs, 0.25) for env, samples in zip(envs, found, strict=True)]

    monkeypatch.setattr(tuning, "compare", compare)
    monkeypatch.setattr(tuned, "remember", lambda *_: None)
    assert run("tune", "grasp", "--num-envs", 32, "--repeats", 4) == 0
    _, _, _, *table, told, taken, remembered = rows(capsys.readouterr().out)
    assert [row[:-1] for row in table[:5]] == [
        ["sw", "step", "32", "115", "8.7%", "1.00x", "4 of 4"],
        ["sw", "step", "8", "115", "8.7%", "1.00x", "4 of 4"],
        ["serial", "stage", "95", "52.6%", "0.83x", "1 of 4"],
        ["hw", "stage", "False", "65", "30.8%", "0.57x", "0 of 4"],
        ["hw", "stage", "True", "65", "30.8%", "0.57x", "0 of 4"],
    ]
    assert told == ["3 do not differ by more than the spread: the first, and those as fast in 1 turn of 4"]
    assert taken == ["simplest of these: make('grasp', 32, scheduler='serial', granularity='stage')"]
    assert remembered == ["remembered: make('grasp', 32) takes it from now on"]


def test_tune_says_what_it_does_before_it_loads_anything(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "brax_concurrent.training.tune", None)
    with pytest.raises(ModuleNotFoundError):
        run("tune", "grasp")
    assert capsys.readouterr().out.startswith("grasp: measuring with 4,096 environments; ")
