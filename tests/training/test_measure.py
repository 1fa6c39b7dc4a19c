"""Measuring throughput: what is timed, what is counted, and what makes a measurement void."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import pytest

import brax_concurrent as bc
from brax_concurrent.training.measure import Throughput, Timing, compare, measure, random_actions

jax.config.update("jax_platforms", "cpu")

pytestmark = pytest.mark.xdist_group("measure")


def test_median_spread_and_ratio():
    slow = Throughput((100.0, 80.0, 120.0), 5, 4, 1.0)
    fast = Throughput((200.0, 240.0, 120.0), 5, 4, 1.0)
    assert (slow.median, slow.spread) == (100.0, 0.4)
    assert fast.ratio(slow) == 2.0
    with pytest.raises(ValueError, match="expected 3 timings, got 1"):
        slow.ratio(Throughput((1.0,), 5, 4, 1.0))


@pytest.mark.parametrize("robots", ["grasp", {"grasp": 3, "halfcheetah": 5}])
def test_steps_and_environments_are_counted(robots):
    env = bc.make(robots, **({} if isinstance(robots, dict) else {"num_envs": 8}))
    begin = time.perf_counter()
    found = measure(env, steps=7, repeats=3)
    elapsed = time.perf_counter() - begin
    assert (found.steps, found.num_envs, len(found.samples)) == (7, 8, 3)
    assert 0 < found.compile_seconds < elapsed
    assert sum(7 * 8 / sample for sample in found.samples) < elapsed - found.compile_seconds


def test_a_timing_lasts_as_long_as_asked_for(monkeypatch):
    cost = {"call": 2e-3, "step": 1e-4}  # seconds, of a scan that computes nothing

    def compiled(self, steps):
        self.steps = steps

    def sample(self):
        return self.steps * self.env.num_envs / (cost["call"] + cost["step"] * self.steps)

    monkeypatch.setattr(Timing, "_compile", compiled)
    monkeypatch.setattr(Timing, "sample", sample)
    monkeypatch.setattr(Timing, "check", lambda self: None)
    found = measure(bc.make("grasp", 32), repeats=3, seconds=0.05)
    assert 0.05 <= found.steps * found.num_envs / found.median < 0.07


def test_without_steps_a_timing_is_long_enough_to_time():
    found = measure(bc.make("grasp", 32), repeats=1, seconds=0.1)
    assert found.steps > 8
    assert found.steps * found.num_envs / found.median > 0.02  # the machine may have become faster meanwhile


def test_states_and_keys_go_on_from_timing_to_timing():
    env = bc.make("grasp", 4, max_episode_steps=5)
    timing = Timing(env, 3, jax.random.key(1), None)
    seen = [jax.device_get((timing._carry[0].internal["elapsed"], jax.random.key_data(timing._carry[1])))]
    for _ in range(2):
        timing.sample()
        seen.append(jax.device_get((timing._carry[0].internal["elapsed"], jax.random.key_data(timing._carry[1]))))
    assert [elapsed.tolist() for elapsed, _ in seen] == [[3] * 4, [1] * 4, [4] * 4]  # resets itself after five
    assert len({tuple(key.tolist()) for _, key in seen}) == 3
    timing.check()


def test_actions_fill_the_range_of_each_robot():
    env = bc.make({"grasp": 300, "humanoid": 300})
    for name, actions in random_actions(env, jax.random.key(0)).items():
        low, high = env.action_low[name], env.action_high[name]
        assert ((actions >= low) & (actions <= high)).all()
        assert (jnp.abs(actions.mean(0) - (low + high) / 2) < 0.1 * (high - low)).all()
        assert ((actions.max(0) - actions.min(0)) > 0.9 * (high - low)).all()


def test_each_robot_has_actions_of_its_own():
    actions = random_actions(bc.make({"halfcheetah": 8, "walker2d": 8}), jax.random.key(0))
    assert actions["halfcheetah"].shape == actions["walker2d"].shape
    assert (actions["halfcheetah"] != actions["walker2d"]).all()


def test_turns_are_taken(monkeypatch):
    order = []
    sample = Timing.sample
    monkeypatch.setattr(Timing, "sample", lambda self: order.append(self.env) or sample(self))
    one, two = bc.make("grasp", 2), bc.make("grasp", 3)
    found = compare([one, two], steps=1, repeats=2)
    assert order == [one, two, one, two, one, two]  # first a warm-up of each
    assert [each.num_envs for each in found] == [2, 3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.replace(obs=s.obs.at[1, 0].set(jnp.nan)), "state.obs is not finite after 1 steps"),
        (lambda s: s.replace(qvel=s.qvel * jnp.inf), "state.qvel is not finite"),
        (
            lambda s: s.replace(internal={**s.internal, "tick": s.internal["tick"].at[0].add(1)}),
            "after 1 steps the environments have taken 1 to 2",
        ),
    ],
)
def test_a_void_measurement_is_an_error(monkeypatch, change, said):
    env = bc.make("grasp", 4)
    step = env.step
    monkeypatch.setattr(env, "step", lambda state, action: change(step(state, action)))
    with pytest.raises(RuntimeError, match=said):
        measure(env, steps=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"steps": 0}, "steps: expected a whole number of at least 1, got 0"),
        ({"steps": 1.5}, "steps: expected a whole number"),
        ({"repeats": 0}, "repeats: expected a whole number of at least 1, got 0"),
        ({"seconds": 0.0}, "seconds: expected a positive number, got 0.0"),
    ],
)
def test_bad_arguments(arguments, said):
    with pytest.raises(ValueError, match=said):
        measure(bc.make("grasp", 1), **arguments)


def test_what_cannot_be_measured():
    with pytest.raises(TypeError, match="env: expected what bc.make returns, got str"):
        measure("grasp")
    with pytest.raises(ValueError, match="expected grasp with autoreset"):
        measure(bc.make("grasp", 1, autoreset=False))
    env = bc.make("grasp", 1)
    env.task = dataclasses.replace(env.task)
    env.task.action_high = env.task.action_high + float("inf")
    with pytest.raises(ValueError, match="expected bounds of all actions of grasp"):
        measure(env)
