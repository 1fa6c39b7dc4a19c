"""Environments whose steps go through the window: the same bits as in program order, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brax_concurrent as bc
from brax_concurrent.scheduler.schedule import SCHEDULERS, Schedule, schedulers_on

jax.config.update("jax_platforms", "cpu")

KEY, NUM_ENVS = jax.random.key(3), 70  # the last tile is not full


def rollout(env):
    """All that ten steps of random actions and their resets return."""

    def one(state, key):
        action = jax.random.uniform(key, (env.num_envs, env.action_size), minval=-1.0, maxval=1.0)
        state = env.step(state, action)
        return state, (state.obs, state.reward, state.terminated, state.final_obs)

    state = env.reset(KEY)
    return jax.jit(lambda s: jax.lax.scan(one, s, jax.random.split(KEY, 10)))(state)


def assert_same(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.fixture(scope="module")
def expected():
    return rollout(bc.make("grasp", NUM_ENVS, backend="cpu"))


@pytest.mark.parametrize("granularity", ["stage", "substep", "step"])
@pytest.mark.parametrize(("scheduler", "window"), [("sw", 1), ("sw", 3), ("sw", 64), ("hw", 1), ("hw", 32)])
def test_a_window_changes_no_bit(expected, granularity, scheduler, window):
    env = bc.make("grasp", NUM_ENVS, backend="cpu", scheduler=scheduler, granularity=granularity, window=window)
    assert env.schedule == Schedule(scheduler, window=window)
    got = rollout(env)
    assert_same(jax.tree.leaves(got), jax.tree.leaves(expected))


def test_whole_steps_are_what_a_window_on_the_cpu_gets():
    assert bc.make("grasp", 4, backend="cpu", scheduler="sw").granularity == "step"
    assert bc.make("grasp", 4, backend="cpu", scheduler="serial").granularity == "stage"
    assert bc.make("grasp", 4, backend="cpu", scheduler="hw").granularity == "stage"


@pytest.mark.parametrize("scheduler", ["sw", "hw"])
def test_resets_of_some_environments_go_through_the_window_too(scheduler):
    env, serial = (bc.make("grasp", NUM_ENVS, backend="cpu", scheduler=s) for s in (scheduler, "serial"))
    mask = jnp.arange(NUM_ENVS) % 3 == 0
    assert_same(env.reset_where(env.reset(KEY), mask), serial.reset_where(serial.reset(KEY), mask))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"scheduler": "fast"},
            ValueError,
            r"scheduler: expected one of \('serial', 'sw', 'hw', 'graph'\), got 'fast'",
        ),
        ({"scheduler": "graph"}, ValueError, "scheduler: 'graph' needs backend='cuda'"),
        ({"scheduler": "sw", "window": 0}, ValueError, "window: expected 1 to 64, got 0"),
        ({"scheduler": "sw", "window": 65}, ValueError, "window: expected 1 to 64, got 65"),
        ({"scheduler": "sw", "window": 2.5}, TypeError, "window: expected a whole number, got 2.5"),
        ({"scheduler": "sw", "streams": 17}, ValueError, "streams: expected 1 to 16, got 17"),
        ({"streams": True}, TypeError, "streams: expected a whole number, got True"),
        ({"envs_per_task": 48}, ValueError, "envs_per_task: expected 0 or a multiple of 32, got 48"),
        ({"num_envs": 1 << 40}, ValueError, "num_envs: expected at most 1073741824, got 1099511627776"),
        ({"envs_per_task": -32}, ValueError, "envs_per_task: expected 0 or a multiple of 32, got -32"),
    ],
)
def test_schedules_that_cannot_be_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        bc.make("grasp", **{"num_envs": 4, "backend": "cpu", **arguments})


@pytest.mark.parametrize("scheduler", ["sw", "hw"])
def test_a_timeout_that_cannot_be_is_refused_when_the_environment_is_made(monkeypatch, scheduler):
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="BRAX_CONCURRENT_TIMEOUT must be a positive number of seconds, got 'soon'"):
        bc.make("grasp", 4, backend="cpu", scheduler=scheduler)


def test_robots_of_a_batch_get_one_schedule_whatever_was_tuned(monkeypatch):
    said = {
        "scheduler": "auto",
        "window": None,
        "streams": 3,
        "envs_per_task": None,
        "regroup": None,
        "backend": "auto",
    }
    monkeypatch.setattr(bc.envs, "resolve_backend", lambda backend: "cuda")
    chosen = {**said, **bc.envs._one_schedule(said)}
    assert chosen == {**said, "scheduler": "sw", "window": 32, "envs_per_task": 0}
    monkeypatch.setattr(bc.envs, "resolve_backend", lambda backend: "cpu")
    assert bc.envs._one_schedule(said) == {"scheduler": "serial", "window": 32, "envs_per_task": 0, "regroup": False}
    assert bc.envs._one_schedule({**said, "regroup": True})["scheduler"] == "hw"
    assert "scheduler" not in bc.envs._one_schedule({**said, "scheduler": "graph"})


def test_a_graph_needs_cuda():
    assert schedulers_on("cuda") == SCHEDULERS == ("serial", "sw", "hw", "graph")
    assert schedulers_on("cpu") == ("serial", "sw", "hw")
