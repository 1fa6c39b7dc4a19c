"""Environments as pure functions: transformations, determinism, resets, and environments that go wrong."""

from __future__ import annotations

import os
import threading

import batches
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import physics
import pytest

import brax_concurrent as bc
from brax_concurrent.interop import ffi_handler

pytestmark = pytest.mark.xdist_group("locomotion")

NUM = 33  # a full tile and one environment more


@pytest.fixture(scope="module")
def walker():
    """Walker2d falls within some 20 steps of random actions, so resets happen all the time."""
    return batches.env("walker2d", NUM)


def run(env, length=40, key=0, seed=0, state=None):
    """States after each of `length` steps of random actions, step by step."""
    state = env.reset(jax.random.key(key)) if state is None else state
    states = []
    for action in batches.random_actions(env, length, seed=seed):
        state = env.step(state, action)
        states.append(state)
    return states


# ---- Interface


@pytest.mark.slow
@pytest.mark.parametrize("name", physics.ROBOTS)
def test_shapes_dtypes_and_facts(name):
    env = batches.env(name, NUM)
    assert (env.name, env.num_envs, env.backend, env.dtype) == (name, NUM, "cpu", jnp.float32)
    assert env.action_low.shape == env.action_high.shape == (env.action_size,)
    assert env.dt == env.task.frame_skip * env.model.opt.timestep
    reset = env.reset(jax.random.key(0))
    step = env.step(reset, batches.random_actions(env))
    assert jax.tree.structure(reset) == jax.tree.structure(step)
    for state in (reset, step):
        expected = {
            "qpos": ((NUM, env.model.nq), jnp.float32),
            "qvel": ((NUM, env.model.nv), jnp.float32),
            "obs": ((NUM, env.observation_size), jnp.float32),
            "final_obs": ((NUM, env.observation_size), jnp.float32),
            "reward": ((NUM,), jnp.float32),
            "terminated": ((NUM,), jnp.bool_),
            "truncated": ((NUM,), jnp.bool_),
            "done": ((NUM,), jnp.bool_),
        }
        assert {k: (getattr(state, k).shape, getattr(state, k).dtype) for k in expected} == expected
        counters = {"contacts_lost", "diverged", "bad_actions"}
        assert set(state.info) == counters | set(env.task.info)
        assert set(state.metrics) == set(env.task.metrics)
        for key, value in (state.info | state.metrics).items():
            assert (value.shape, value.dtype) == ((NUM,), jnp.int32 if key in counters else jnp.float32)
        assert all(np.isfinite(leaf).all() for leaf in batches.leaves(state).values() if leaf.dtype == np.float32)
        assert all(not np.asarray(state.info[name]).any() for name in counters)
    np.testing.assert_allclose(sum(step.metrics.values()), step.reward, rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(step.reward)).min() > 0


@pytest.mark.slow
def test_a_control_step_of_grasp_is_mujocos_with_the_palm_moved():
    """Of the other robots test_gymnasium.py has each step."""
    env = batches.env("grasp", NUM)
    robot = physics.robot("grasp")
    rng = np.random.default_rng(0)
    qpos = np.tile(env.model.qpos0, (NUM, 1)) + rng.uniform(-0.1, 0.1, (NUM, env.model.nq))
    qvel, action = rng.normal(size=(NUM, env.model.nv)), batches.random_actions(env)
    start = env.reset_to(qpos, qvel)
    new = env.step(start, action)
    palm = robot.mj.body("palm").pos
    np.testing.assert_allclose(np.asarray(start.obs)[:, 8:11], np.tile(palm, (NUM, 1)), rtol=1e-6)
    goal = np.array([0, 0, 8.5]) + action[:, 16:] * [10, 10, 5]  # the middle and half the width of where it may go
    way = goal - palm
    palms = palm + way * 0.15 * 2 / np.maximum(np.linalg.norm(way, axis=1, keepdims=True), 2)
    np.testing.assert_allclose(np.asarray(new.final_obs)[:, 8:11], palms, rtol=1e-6, atol=1e-6)
    low, high = robot.mj.actuator_ctrlrange.T
    data, expected = mujoco.MjData(robot.mj), []
    for i in range(NUM):
        mujoco.mj_resetData(robot.mj, data)
        data.qpos[:], data.qvel[:], data.mocap_pos[0] = qpos[i], qvel[i], palms[i]
        data.ctrl[:] = low + (high - low) * (action[i, :16] + 1) / 2
        for _ in range(env.task.frame_skip):
            mujoco.mj_step(robot.mj, data)
        expected.append(data.qpos.copy())
    assert physics.relative_error(np.asarray(new.qpos), np.array(expected)) < 1e-5


def test_eager_jit_and_scan_give_the_same_bits(walker):
    states = run(walker)
    jitted, step = walker.reset(jax.random.key(0)), jax.jit(walker.step)
    batches.assert_same_bits(jax.jit(walker.reset)(jax.random.key(0)), jitted)
    actions = batches.random_actions(walker, 40)
    for state, action in zip(states, actions, strict=True):
        jitted = step(jitted, action)
        batches.assert_same_bits(jitted, state)

    @jax.jit
    def scan(key, actions):
        def one(state, action):
            state = walker.step(state, action)
            return state, state

        return jax.lax.scan(one, walker.reset(key), actions)

    last, every = scan(jax.random.key(0), actions)
    batches.assert_same_bits(last, states[-1])
    batches.assert_same_bits(every, jax.tree.map(lambda *xs: jnp.stack(xs), *states))


def test_rollout_is_the_same_scan(walker):
    def policy(params, obs, key):
        action = jnp.tanh(obs[:, : walker.action_size] * params)
        return action, action.sum(axis=1)

    start = walker.reset(jax.random.key(3))
    data = bc.rollout(walker, policy, 2.0, start, jax.random.key(1), 30)
    state = start
    for t in range(30):
        action, log_prob = policy(2.0, state.obs, None)
        np.testing.assert_array_equal(data.obs[t], state.obs)
        np.testing.assert_allclose(data.action[t], action, rtol=1e-6)
        np.testing.assert_allclose(data.log_prob[t], log_prob, rtol=1e-5, atol=1e-6)
        state = walker.step(state, data.action[t])
        for name in ("reward", "terminated", "truncated", "final_obs"):
            np.testing.assert_array_equal(getattr(data, name)[t], getattr(state, name))
    batches.assert_same_bits(data.state, state)


def test_states_are_values(walker):
    """An old state is as it was after steps from it, which can be taken again."""
    start = walker.reset(jax.random.key(0))
    before = {name: leaf.copy() for name, leaf in batches.leaves(start).items()}
    action = batches.random_actions(walker)
    first, second = walker.step(start, action), walker.step(start, action)
    assert not np.array_equal(first.qpos, start.qpos)
    walker.reset_where(start, jnp.ones(NUM, bool))
    batches.assert_same_bits(start, before)
    batches.assert_same_bits(first, second)


def test_a_scan_updates_the_state_in_place(walker):
    @jax.jit
    def scan(state, actions):
        return jax.lax.scan(lambda state, action: (walker.step(state, action), state.reward), state, actions)

    start = walker.reset(jax.random.key(0))
    actions = jnp.asarray(batches.random_actions(walker, 50))
    scan(start, actions)
    copies = ffi_handler.handler()[2].copies
    scan(start, actions)
    assert ffi_handler.handler()[2].copies == copies


def test_vmap_over_keys_and_states(walker):
    keys = jax.random.split(jax.random.key(5), 3)
    states = jax.vmap(walker.reset)(keys)
    actions = batches.random_actions(walker, 3)
    stepped = jax.vmap(walker.step)(states, actions)
    for i, key in enumerate(keys):
        alone = walker.reset(key)
        batches.assert_same_bits(batches.rows(states, i), batches.leaves(alone))
        batches.assert_same_bits(batches.rows(stepped, i), batches.leaves(walker.step(alone, actions[i])))


@pytest.mark.parametrize("legacy", [False, True])
def test_with_its_own_key_an_environment_is_the_same_in_any_batch(walker, legacy):
    keys = jax.random.split(jax.random.key(5), NUM)
    keys = jax.random.key_data(keys) if legacy else keys
    whole = run(walker, 40, state=jax.jit(walker.reset)(keys))
    assert any(np.asarray(state.done).any() for state in whole)
    assert len(np.unique(whole[0].qpos[:, 0])) == NUM
    chosen = np.array([5, 0, 32])
    few = batches.env("walker2d", len(chosen))
    state = few.reset(keys[chosen])
    for expected, actions in zip(whole, batches.random_actions(walker, 40), strict=True):
        state = few.step(state, actions[chosen])
        batches.assert_same_bits(batches.leaves(state), batches.rows(expected, chosen))


def test_legacy_keys_are_keys(walker):
    batches.assert_same_bits(walker.reset(jax.random.PRNGKey(7)), walker.reset(jax.random.key(7)))


def test_several_host_threads_at_once(walker):
    expected = {key: run(walker, 30, key, key)[-1] for key in range(4)}
    found, start = {}, threading.Barrier(4)

    def work(key):
        start.wait()
        for _ in range(3):
            found[key] = run(walker, 30, key, key)[-1]

    threads = [threading.Thread(target=work, args=(key,)) for key in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for key, state in expected.items():
        batches.assert_same_bits(found[key], state)


@pytest.mark.slow
def test_shard_map_runs_each_devices_environments():
    code = """
        import json
        import jax, jax.numpy as jnp, numpy as np
        import batches
        from jax.sharding import PartitionSpec as P

        env = batches.env("walker2d", 33)
        keys, actions = jax.random.split(jax.random.key(0), 2), jnp.asarray(batches.random_actions(env, 30))
        mesh = jax.make_mesh((2,), ("devices",))

        def rollout(keys, actions):
            step = lambda state, action: (env.step(state, action), state.reward)
            state, rewards = jax.lax.scan(step, env.reset(keys[0]), actions)
            return state, rewards

        parts = P("devices")
        specs = {"in_specs": (parts, P()), "out_specs": (parts, P(None, "devices"))}
        sharded = jax.jit(jax.shard_map(rollout, mesh=mesh, **specs))
        state, rewards = sharded(jax.device_put(keys, jax.NamedSharding(mesh, parts)), actions)
        assert len(rewards.sharding.device_set) == 2
        for i in range(2):
            alone, own = jax.jit(rollout)(keys[i : i + 1], actions)
            place = slice(33 * i, 33 * (i + 1))
            batches.assert_same_bits(batches.rows(state, place), batches.leaves(alone))
            assert np.array_equal(np.asarray(rewards)[:, place], own)
        print(json.dumps(len(jax.devices())))
    """
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    assert batches.run_python(code, XLA_FLAGS=flags) == 2


# ---- Determinism


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_bits_do_not_depend_on_threads(threads):
    num = 500
    expected = run(batches.env("walker2d", num), 10)
    batches.assert_same_bits(run(batches.env("walker2d", num, threads=threads), 10), expected)


def test_the_same_key_gives_the_same_bits_and_another_others(walker):
    first, again, other = (walker.reset(jax.random.key(key)) for key in (0, 0, 1))
    batches.assert_same_bits(first, again)
    rows = np.concatenate([first.qpos, other.qpos])
    assert len(np.unique(rows, axis=0)) == 2 * NUM


def test_an_environments_bits_do_not_depend_on_its_neighbours(walker):
    """One of 33, alone and among other neighbours at another place, through resets."""
    order = [*range(4), *range(5, NUM), 4]
    alone = batches.env("walker2d", 1)

    def pick(state, chosen, env):
        return jax.tree.map(lambda x: x[jnp.array(chosen)], state).replace(env=env.fingerprint)

    start = walker.reset(jax.random.key(0))
    single, shuffled = pick(start, [4], alone), pick(start, order, walker)
    ends = 0
    for state, action in zip(run(walker, 60), batches.random_actions(walker, 60), strict=True):
        single = alone.step(single, action[[4]])
        shuffled = walker.step(shuffled, action[order])
        expected = batches.rows(state, [4])
        batches.assert_same_bits(batches.leaves(single), expected)
        batches.assert_same_bits(batches.rows(shuffled, [NUM - 1]), expected)
        ends += int(state.done[4])
    assert ends > 1


# ---- Resets


def test_every_reset_is_to_a_fresh_random_state(walker):
    states = run(walker, 120)
    start = walker.reset(jax.random.key(0))
    fresh = [np.asarray(start.qpos)] + [np.asarray(s.qpos)[np.asarray(s.done)] for s in states]
    fresh = np.concatenate(fresh)
    assert len(fresh) > 4 * NUM
    for column in range(walker.model.nq):  # not only rows, but all their numbers differ
        values, counts = np.unique(fresh[:, column], return_counts=True)
        assert counts.max() <= 2, (column, values[counts.argmax()])  # of 2**23 numbers some may meet
    np.testing.assert_allclose(fresh, np.broadcast_to(walker.model.qpos0, fresh.shape), atol=5e-3 + 1e-6)
    assert np.abs(fresh - walker.model.qpos0).max() > 4.8e-3


def test_where_an_episode_ends_obs_is_fresh_and_final_obs_the_end(walker):
    ends = 0
    for state in run(walker, 60):
        done, obs, final = (np.asarray(x) for x in (state.done, state.obs, state.final_obs))
        np.testing.assert_array_equal(obs[~done], final[~done])
        assert (obs[done] != final[done]).all()
        # Of the state that the environment is in: qpos without x, and clipped velocities.
        own = np.concatenate([np.asarray(state.qpos)[:, 1:], np.clip(state.qvel, -10, 10)], axis=1)
        np.testing.assert_array_equal(obs, own)
        z, angle = final[:, 0], final[:, 1]
        healthy = (z > 0.8) & (z < 2.0) & (np.abs(angle) < 1.0)
        np.testing.assert_array_equal(healthy, ~np.asarray(state.terminated))
        assert not np.asarray(state.internal["elapsed"])[done].any()
        assert not np.asarray(state.internal["qacc_warmstart"])[done].any()
        ends += done.sum()
    assert ends > NUM


def test_steps_after_an_automatic_reset_are_those_after_the_same_reset_by_hand(walker):
    states = run(walker, 40)
    (t,) = [t for t, s in enumerate(states[:-1]) if np.asarray(s.done).any()][:1]
    action = batches.random_actions(walker, 40)[t + 1]
    start = walker.reset_to(states[t].qpos, states[t].qvel)
    by_hand = walker.step(start, action)
    done = np.flatnonzero(states[t].done)
    for name in ("qpos", "qvel", "obs", "reward", "terminated"):
        found, expected = (np.asarray(getattr(s, name))[done] for s in (by_hand, states[t + 1]))
        np.testing.assert_array_equal(found, expected, err_msg=name)


@pytest.fixture(scope="module")
def endless():
    return batches.env("walker2d", NUM, autoreset=False, max_episode_steps=50)


def test_without_autoreset_ended_environments_go_on(walker, endless):
    states = run(endless, 60)
    ended = np.logical_or.accumulate([np.asarray(s.terminated) for s in states])
    assert ended[-1].all()
    assert all(np.array_equal(s.obs, s.final_obs) for s in states)
    # Until it ends first, an environment's states are those with automatic resets.
    with_resets = run(walker, 60)
    going_on = ~np.concatenate([np.zeros((1, NUM), bool), ended[:-1]])
    for own, other, same in zip(states, with_resets, going_on, strict=True):
        np.testing.assert_array_equal(np.asarray(own.final_obs)[same], np.asarray(other.final_obs)[same])
    heights = np.array([s.qpos[:, 1] for s in states])
    assert (heights[-1] < 0.8).mean() > 0.5  # they lie
    for t, state in enumerate(states, 1):
        np.testing.assert_array_equal(state.internal["elapsed"], t)
        np.testing.assert_array_equal(state.truncated, t >= 50)


def test_truncation_at_the_time_limit(walker):
    """Which is 1000 steps, and which another test sets to 50. Whoever falls before it starts to count again."""
    elapsed = np.arange(NUM) + 960
    start = walker.reset(jax.random.key(0))
    start = start.replace(internal=start.internal | {"elapsed": jnp.asarray(elapsed, jnp.int32)})
    truncated = 0
    for state in run(walker, 40, state=start):
        elapsed += 1
        np.testing.assert_array_equal(state.truncated, elapsed == 1000)
        elapsed[np.asarray(state.done)] = 0
        np.testing.assert_array_equal(state.internal["elapsed"], elapsed)
        np.testing.assert_array_equal(state.done, state.terminated | state.truncated)
        truncated += np.asarray(state.truncated).sum()
    assert 5 < truncated < NUM


def test_reset_where(walker):
    state = run(walker, 10)[-1]
    mask = np.arange(NUM) % 3 == 0
    new = walker.reset_where(state, jnp.asarray(mask))
    for name in ("qpos", "qvel", "obs"):
        found, before = np.asarray(getattr(new, name)), np.asarray(getattr(state, name))
        np.testing.assert_array_equal(found[~mask], before[~mask])
        assert (found[mask] != before[mask]).all()
    for name in ("elapsed", "qacc_warmstart"):
        found = np.asarray(new.internal[name])
        np.testing.assert_array_equal(found[~mask], np.asarray(state.internal[name])[~mask])
        assert not found[mask].any()
    np.testing.assert_array_equal(np.asarray(new.qpos)[:, 1:], np.asarray(new.obs)[:, : walker.model.nq - 1])
    again = walker.reset_where(new, jnp.asarray(mask))
    assert (np.asarray(again.qpos)[mask] != np.asarray(new.qpos)[mask]).all()


def test_reset_to_starts_at_rest_from_what_is_given(walker):
    moved = run(walker, 5)[-1]
    state = walker.reset_to(moved.qpos, moved.qvel)
    for name in ("qpos", "qvel", "obs"):
        np.testing.assert_array_equal(getattr(state, name), getattr(moved, name))
    assert not any(np.asarray(state.internal[name]).any() for name in ("elapsed", "qacc_warmstart"))
    assert not np.asarray(state.done).any()


# ---- What goes wrong


def test_an_environment_that_diverges_ends_is_reset_and_counted_and_its_neighbours_do_not_notice(walker):
    sound = run(walker, 3)[-1]
    rows = np.array([2, 7, 19, 32])
    qpos, qvel = np.array(sound.qpos), np.array(sound.qvel)
    qpos[2, 4], qvel[7], qvel[19, 0], qpos[32] = np.nan, 1e12, np.inf, 1e11
    broken = sound.replace(qpos=jnp.asarray(qpos), qvel=jnp.asarray(qvel))
    clean, hurt = (run(walker, 12, seed=9, state=state) for state in (sound, broken))
    others = np.setdiff1d(np.arange(NUM), rows)
    for expected, found in zip(clean, hurt, strict=True):
        batches.assert_same_bits(batches.rows(found, others), batches.rows(expected, others))
    first = hurt[0]
    assert np.asarray(first.terminated)[rows].all()
    np.testing.assert_array_equal(np.asarray(first.info["diverged"])[rows], 1)
    assert not np.asarray(first.reward)[rows].any()
    assert not np.asarray(first.final_obs)[rows].any()
    np.testing.assert_allclose(np.asarray(first.qpos)[rows], np.tile(walker.model.qpos0, (4, 1)), atol=5.1e-3)
    for state in hurt:
        assert all(np.isfinite(leaf).all() for leaf in batches.leaves(state).values() if leaf.dtype == np.float32)
        np.testing.assert_array_equal(np.asarray(state.info["diverged"])[rows], 1)


def test_without_autoreset_a_diverged_environment_goes_back_to_qpos0(endless):
    env = endless
    sound = env.reset(jax.random.key(0))
    state = env.step(sound.replace(qvel=sound.qvel.at[3].set(jnp.nan)), batches.random_actions(env))
    assert bool(state.terminated[3])
    assert int(state.info["diverged"][3]) == 1
    rest = env.reset_to(np.tile(env.model.qpos0, (NUM, 1)), np.zeros((NUM, env.model.nv)))
    names = ("qpos", "qvel", "obs")
    for name in names:
        np.testing.assert_array_equal(getattr(state, name)[3], getattr(rest, name)[3])
    assert int(state.internal["elapsed"][3]) == 1
    # It goes on from there, and its velocity is measured from there.
    action = batches.random_actions(env, seed=1)
    later, expected = env.step(state, action), env.step(rest, action)
    for name in (*names, "reward", "final_obs"):
        np.testing.assert_array_equal(getattr(later, name)[3], getattr(expected, name)[3])
    assert int(later.info["diverged"][3]) == 1
    assert np.isfinite(later.reward).all()


def test_an_action_that_is_not_finite_counts_and_means_zeros(walker):
    state = run(walker, 3)[-1]
    action = batches.random_actions(walker)
    zeros = action.copy()
    zeros[[1, 8, 32]] = 0
    action[1, 0], action[8, 5], action[32, 2] = np.nan, np.inf, -np.inf
    bad, expected = walker.step(state, action), walker.step(state, zeros)
    counted = bad.info.pop("bad_actions")
    expected.info.pop("bad_actions")
    batches.assert_same_bits(bad, expected)
    np.testing.assert_array_equal(np.flatnonzero(counted), [1, 8, 32])
    assert int(counted.max()) == 1
