"""Rollouts with the policy inside the stream are the scan's."""

from __future__ import annotations

from dataclasses import replace

import batches
import jax
import numpy as np
import pytest

import brax_concurrent as bc
from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.envs import program
from brax_concurrent.envs.policy import applied_rows, step_keys
from brax_concurrent.scheduler.check import FootprintChecker
from brax_concurrent.scheduler.serial import compile_serial

NUM, LENGTH = 40, 24
SMALL = bc.MlpPolicy((20,), normalize_obs=True, scale_actions=True)
ROBOTS = [
    pytest.param("halfcheetah", SMALL, marks=pytest.mark.xdist_group("locomotion")),
    *(pytest.param(name, bc.MlpPolicy(), marks=pytest.mark.slow) for name in ("ant", "grasp", "humanoid", "walker2d")),
]


def start(name, policy, **arguments):
    """An environment whose episodes end within a rollout, strong actions, and the state after a few steps."""
    env = batches.env(name, NUM, max_episode_steps=9, **arguments)
    params = policy.init(jax.random.key(0), env)
    *layers, (weights, bias) = params["layers"]
    params["layers"] = (*layers, (50 * weights, bias + 0.1))
    state = env.reset(jax.random.key(1))
    if policy.normalize_obs:
        params |= {"obs_mean": state.obs.mean(axis=0), "obs_std": state.obs.std(axis=0) + 0.1}
    return env, params, env.step(state, batches.random_actions(env))


@pytest.mark.parametrize(("name", "policy"), ROBOTS)
def test_each_step_is_a_step_of_the_environment_with_the_policys_action(name, policy):
    """What the policy saw is the state's, what it did is its function's, and the rest are the bits of `step`."""
    env, params, state = start(name, policy)
    key = jax.random.key(7)
    batch = bc.rollout(env, policy, params, state, key, LENGTH, fused=True)
    act, step = jax.jit(policy), jax.jit(lambda s, a: env.step(s, applied_rows(policy, env.task, a)))
    for t, step_key in enumerate(step_keys(key, LENGTH)):
        np.testing.assert_array_equal(batch.obs[t], state.obs)
        action, log_prob = act(params, state.obs, step_key)
        np.testing.assert_allclose(batch.action[t], action, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(batch.log_prob[t], log_prob, rtol=1e-5, atol=1e-5)
        state = step(state, batch.action[t])
        for kept in ("reward", "terminated", "truncated", "final_obs"):
            np.testing.assert_array_equal(getattr(batch, kept)[t], getattr(state, kept), err_msg=f"{kept}, step {t}")
    batches.assert_same_bits(batch.state, state)
    assert batch.truncated.any()


@pytest.mark.xdist_group("locomotion")
def test_the_scan_gives_the_same_up_to_rounding():
    env, params, state = start("halfcheetah", SMALL)
    fused, scanned = (bc.rollout(env, SMALL, params, state, jax.random.key(7), LENGTH, fused=x) for x in (True, None))
    for name in ("obs", "action", "log_prob", "reward", "final_obs"):
        found, expected = getattr(fused, name), getattr(scanned, name)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        # A difference in the last place of an action grows from step to step, with contacts, until a reset ends it.
        np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-3, atol=1e-3, err_msg=name)
        assert np.quantile(np.abs(found - expected) / (1.0 + np.abs(expected)), 0.99) < 0.01, name
    np.testing.assert_array_equal(fused.truncated, scanned.truncated)
    np.testing.assert_array_equal(fused.terminated, scanned.terminated)


@pytest.mark.xdist_group("locomotion")
def test_it_is_a_function_of_its_arguments():
    """Two halves are the whole but for the numbers drawn; other keys are other numbers; threads change nothing."""
    env, params, state = start("halfcheetah", SMALL)

    def roll(key, env=env, length=LENGTH):
        return bc.rollout(env, SMALL, params, state, jax.random.key(key), length, fused=True)

    batches.assert_same_bits(roll(7), roll(7))
    alone = batches.env("halfcheetah", NUM, max_episode_steps=9, threads=1)
    batches.assert_same_bits(roll(7, alone), roll(7))
    short, other = roll(7, length=5), roll(8)
    np.testing.assert_array_equal(short.action, roll(7).action[:5])
    assert not np.isclose(other.log_prob, roll(7).log_prob).all(axis=0).any()
    inside = jax.jit(lambda s, k: bc.rollout(env, SMALL, params, s, k, 5, fused=True))(state, jax.random.key(7))
    batches.assert_same_bits(inside, short)


@pytest.mark.xdist_group("locomotion")
def test_another_length_compiles_nothing(monkeypatch):
    env, params, state = start("halfcheetah", SMALL)
    bc.rollout(env, SMALL, params, state, jax.random.key(7), 3, fused=True)
    monkeypatch.setattr(program, "specialize", lambda *_: pytest.fail("traced again"))
    bc.rollout(env, SMALL, params, state, jax.random.key(7), 4, fused=True)
    fresh = bc.make("halfcheetah", NUM, backend="cpu", max_episode_steps=9)  # from the disk
    assert fresh.program("rollout", SMALL, 4).fingerprint == env.program("rollout", SMALL, 4).fingerprint
    assert env.program("rollout", SMALL, 4).fingerprint != env.program("rollout", SMALL, 3).fingerprint


def arrays_of(tiles, state, params, env, steps):
    """What a rollout's program is given, buffer by buffer, for `steps` steps."""
    arrays = env._arrays(state, policy_key=np.ones((1, 2), np.uint32), **SMALL.packed(params, env.task))
    arrays |= {"policy_env": np.arange(NUM, dtype=np.int32), "policy_step": np.zeros(NUM, np.int32)}
    return [
        np.array(arrays[s.name]) if s.access != "write" else np.zeros(s.array_shape(NUM, steps), s.dtype)
        for s in tiles.layout.buffers
    ]


@pytest.mark.xdist_group("locomotion")
@pytest.mark.parametrize(
    ("split", "kernels"),
    [
        (False, ["policy"]),
        pytest.param(
            True, ["policy_" + x for x in ("observe", "normals", "0_0", "0_1", "head")], marks=pytest.mark.slow
        ),
    ],
)
def test_its_kernels_keep_to_their_footprints(split, kernels):
    env, params, state = start("halfcheetah", SMALL)
    tiles = program.tile_program(env, "rollout", SMALL, split)
    given = arrays_of(tiles, state, params, env, 1)
    run_program(compile_serial(tiles), given, NUM)
    checker = FootprintChecker(tiles, NUM)
    checker.run(given)
    assert checker.violations == ()
    found = {name: count for name, count in checker.op_counts.items() if name.startswith("policy")}
    assert found == dict.fromkeys(kernels, 2)


@pytest.mark.slow
@pytest.mark.xdist_group("locomotion")
def test_a_policy_of_several_kernels_gives_the_same_bits():
    """As the GPU's dispatcher has it, here in program order."""
    env, params, state = start("halfcheetah", SMALL)
    results = []
    for split in (False, True):
        tiles = replace(program.tile_program(env, "rollout", SMALL, split), steps=LENGTH)
        given = arrays_of(tiles, state, params, env, LENGTH)
        run_program(compile_serial(tiles), given, NUM)
        results.append(dict(zip((s.name for s in tiles.layout.buffers), given, strict=True)))
    one, several = results
    assert one.keys() == several.keys()
    assert one["truncated"].any()
    for name, array in one.items():
        assert several[name].tobytes() == array.tobytes(), name
    assert env.stream("rollout", SMALL)[1] != env.stream("rollout", SMALL, split=True)[1]


@pytest.mark.slow
def test_granularity_and_precision():
    env, params, state = start("halfcheetah", SMALL)
    stages = bc.rollout(env, SMALL, params, state, jax.random.key(7), 5, fused=True)
    whole = batches.env("halfcheetah", NUM, max_episode_steps=9, granularity="step")
    assert len(program.tile_program(whole, "rollout", SMALL).ops) == 2
    batches.assert_same_bits(bc.rollout(whole, SMALL, params, state, jax.random.key(7), 5, fused=True), stages)
    with batches.precision("float64"):
        env, params, state = start("halfcheetah", SMALL, dtype="float64")
        fused, scanned = (bc.rollout(env, SMALL, params, state, jax.random.key(7), 9, fused=x) for x in (True, False))
        for name in ("action", "log_prob", "reward"):
            np.testing.assert_allclose(getattr(fused, name), getattr(scanned, name), rtol=1e-7, atol=1e-7)
