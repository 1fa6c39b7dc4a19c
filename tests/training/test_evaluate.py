"""Scores of a policy: each environment's first episode, here and in Gymnasium, and the command that prints both."""

from __future__ import annotations

import re

import batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brax_concurrent import cli
from brax_concurrent.training import evaluate
from brax_concurrent.training.policy import POLICY, Policy


def policy(robot, observation_size, action_size, low, high):
    """One layer with random weights, which moves."""
    random = np.random.default_rng(0)
    weights = random.normal(0.0, 0.1, (observation_size, action_size)).astype(np.float32)
    actor = ((jnp.asarray(weights), jnp.asarray(random.normal(size=action_size), jnp.float32)),)
    bounds = (jnp.full(action_size, bound, jnp.float32) for bound in (low, high))
    mean, variance = jnp.zeros(observation_size), jnp.ones(observation_size)
    return Policy(robot, "tanh", actor, jnp.zeros(action_size), mean, variance, *bounds, steps=7)


WALKER = policy("walker2d", 17, 6, -1.0, 1.0)


def test_a_score_is_that_of_the_first_episode():
    """Beside a step by step loop; walkers fall at different times."""
    env = batches.env("walker2d", 32)
    found = evaluate.score(WALKER, env, seed=5)
    state, step, act = env.reset(jax.random.key(5)), jax.jit(env.step), jax.jit(WALKER)
    returns, lengths = np.zeros(32), np.zeros(32, int)
    going = np.ones(32, bool)
    while going.any():
        state = step(state, act(state.obs))
        returns[going] += np.asarray(state.reward)[going]
        lengths[going] += 1
        going &= ~np.asarray(state.done)
    assert len(set(lengths)) > 2
    np.testing.assert_array_equal(found.lengths, lengths)
    np.testing.assert_allclose(found.returns, returns, rtol=1e-4, atol=1e-4)
    assert found.mean == pytest.approx(returns.mean(), rel=1e-4)
    assert found.standard_error == pytest.approx(returns.std(ddof=1) / np.sqrt(32), rel=1e-4)


def test_gymnasium_gives_what_its_own_environment_gives(monkeypatch):
    """More episodes than are made at once, beside one environment after another."""
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.setattr(evaluate, "_AT_ONCE", 2)
    found = evaluate.score_in_gymnasium(WALKER, 3, seed=11)
    env = gymnasium.make("Walker2d-v5")
    for i in range(3):
        obs, _ = env.reset(seed=11 + i)
        total, length, ended = 0.0, 0, False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(np.asarray(WALKER(obs.astype(np.float32))))
            total, length, ended = total + float(reward), length + 1, terminated or truncated
        assert found.lengths[i] == length
        assert found.returns[i] == pytest.approx(total, rel=1e-3)
    env.close()


def test_here_and_there_are_the_same_task():
    """The same policy falls after as many steps and with the same return; 5 standard errors."""
    ours = evaluate.score(WALKER, batches.env("walker2d", 64))
    theirs = evaluate.score_in_gymnasium(WALKER, 64)
    error = np.hypot(ours.standard_error, theirs.standard_error)
    assert abs(ours.mean - theirs.mean) < 5 * error
    spread = np.hypot(*(scores.lengths.std() / 8 for scores in (ours, theirs)))
    assert abs(ours.lengths.mean() - theirs.lengths.mean()) < 5 * spread


def test_the_command_prints_both(tmp_path, capsys):
    WALKER.save(tmp_path / POLICY)
    options = ["--episodes", "3", "--backend", "cpu"]
    assert cli.main(["evaluate", str(tmp_path), "--in", "ours", "gymnasium", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "walker2d, trained for 7 steps; deterministic actions"
    assert lines[1].split() == ["in", "episodes", "return", "+-", "least", "most", "length"]
    assert [line.split()[:2] for line in lines[2:4]] == [["ours", "3"], ["Walker2d-v5", "3"]]
    ours, theirs = (float(line.split()[2].replace(",", "")) for line in lines[2:4])
    assert ours == pytest.approx(evaluate.score(WALKER, batches.env("walker2d", 3)).mean, abs=0.1)
    difference = re.fullmatch(r"difference of the means ([+-][\d.,]+), standard error [\d.,]+", lines[4])[1]
    assert float(difference.replace(",", "")) == pytest.approx(theirs - ours, abs=0.11)
    assert cli.main(["evaluate", str(tmp_path / POLICY), "--in", "ours", *options]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_policy_survives_its_file(tmp_path):
    WALKER.save(tmp_path / POLICY)
    loaded = Policy.load(tmp_path / POLICY)
    assert jax.tree.structure(loaded) == jax.tree.structure(WALKER)
    jax.tree.map(np.testing.assert_array_equal, loaded, WALKER)
    assert (loaded.observation_size, loaded.action_size) == (17, 6)
