"""The programs in the documentation run as they are written, but for the size; those of other pages have tests of
their own."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

jax.config.update("jax_platforms", "cpu")

DOCS = Path(__file__).parents[1] / "docs"


def run(page, number, *smaller):
    """The names that a page's program leaves; each pair of `smaller` is a text and what takes its place."""
    code = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)[number]
    for old, new in smaller:
        assert old in code
        code = code.replace(old, new)
    names = {}
    exec(compile(code, page, "exec"), names)
    return names


def test_networks():
    names = run("networks.md", 0)
    assert names["scores"].shape == (8, 10)
    assert np.isfinite(names["scores"]).all()
    ran = {layer.name.partition(".")[0] for layer in names["network"].ran(7)}
    assert any(name.startswith("separable") for name in ran)  # at least one of the two


@pytest.mark.slow
def test_policies(capsys):
    run("policies.md", 0, ("1024", "4"), ("length=32", "length=3"))
    assert capsys.readouterr().out == "(3, 4, 105) (3, 4)\n"


def test_environments():
    env = run("environments.md", 0, ("4096", "4"))["env"]
    assert (env.num_envs, env.task.forward_reward_weight, env.task.healthy_z_range) == (4, 2.0, (0.3, 1.0))


@pytest.mark.slow
def test_gymnasiums_interface():
    pytest.importorskip("gymnasium")
    names = run("environments.md", 1, ("num_envs=64", "num_envs=3"))
    assert names["observations"].shape == (3, 105)


@pytest.mark.slow
def test_a_timeline(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    timeline = run("performance.md", 0, ("4096", "64"))["timeline"]
    assert timeline.intervals
    assert (tmp_path / "trace.json").exists()
    assert timeline.summary() in capsys.readouterr().out


@pytest.mark.slow
def test_a_page_of_a_policy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("interfaces.md", 2, ("steps=400", "steps=3"))
    assert "<script" in (tmp_path / "ant.html").read_text()
