"""The command trace, called as a function; small sizes."""

import argparse
import json
import re

import jax
import pytest

from brax_concurrent import cli
from brax_concurrent.cli import trace
from brax_concurrent.cli.common import CommandError
from brax_concurrent.envs import list_envs, make
from brax_concurrent.envs import trace as envs_trace

jax.config.update("jax_platforms", "cpu")


def run(*arguments):
    parser = argparse.ArgumentParser()
    trace.add_parser(parser.add_subparsers(required=True))
    options = parser.parse_args(["trace", *map(str, arguments)])
    return options.run(options)


def test_trace_writes_the_file_and_the_window(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(envs_trace, "_unwritten", {})
    out, dot = tmp_path / "t.json", tmp_path / "w.dot"
    place = ["--granularity", "stage", "--window", 10, "--threads", 1]
    assert run("grasp", "--num-envs", 40, "--steps", 2, *place, "--out", out, "--dot", dot) == 0
    said, error = capsys.readouterr()
    counts = r"([\d,]+) tasks in 2 runs, (\d+) of them skipped"
    found = re.fullmatch(rf"{out}: {counts}: makespan .* of 1 thread, concurrency [\d.]+\n", said)
    events = json.loads(out.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == int(found[1].replace(",", "")) - int(found[2]) > 0
    text = dot.read_text()
    assert len(re.findall(r"^  t\d+ \[label=", text, re.M)) == 10
    assert re.search(r't0 -> t\d \[label="RAW[^"]*"\];', text)
    assert not envs_trace._unwritten  # nothing is left to say at exit
    assert error == ""


def test_trace_takes_all_robots_in_one_batch(tmp_path, capsys, monkeypatch):
    import brax_concurrent.envs

    given = []

    def small(robots, **arguments):
        given.append((robots, arguments))
        return make({"grasp": 40, "twin": (33, brax_concurrent.envs.registry.make_task("grasp"))}, **arguments)

    monkeypatch.setattr(brax_concurrent.envs, "make", small)
    assert run("all", "--num-envs", 5, "--steps", 1, "--scheduler", "serial", "--out", tmp_path / "t.json") == 0
    assert re.search(r"tasks in 1 run, \d+ of them skipped:", capsys.readouterr().out)
    ((robots, arguments),) = given
    assert robots == dict.fromkeys(list_envs(), 5)
    assert (arguments["scheduler"], arguments["trace"]) == ("serial", tmp_path / "t.json")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["graps"], "there is no task 'graps'"),
        (["grasp", "--scheduler", "none"], "scheduler: expected"),
        (["grasp", "--window", "65"], "window: expected 1 to 64, got 65"),
        (
            ["grasp", "--out", "/no/such/folder/t.json"],
            "--out: cannot write /no/such/folder/t.json: there is no folder",
        ),
        (["grasp", "--dot", "/no/such/folder/w.dot"], "--dot: cannot write /no/such/folder/w.dot: there is no folder"),
        (["robot.xml"], "trace takes the name of a robot"),
    ],
)
def test_wrong_arguments(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match=re.escape(said)) as found:
        run(*arguments)
    assert found.value.code == 2
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_in_the_end_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(envs_trace, "_unwritten", {})
    out = tmp_path / "t.json"
    step = trace._step

    def and_then(env, steps):
        step(env, steps)
        out.mkdir()

    monkeypatch.setattr(trace, "_step", and_then)
    with pytest.raises(CommandError, match="cannot write .*: Is a directory") as found:
        run("grasp", "--num-envs", 32, "--steps", 1, "--out", out)
    assert found.value.code == 1


def test_the_command_is_known():
    with pytest.raises(SystemExit) as stopped:
        cli.main(["trace", "--help"])
    assert stopped.value.code == 0
