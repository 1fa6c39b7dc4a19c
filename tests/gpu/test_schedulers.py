"""Schedulers on a GPU: the same bits from all of them, however the work is cut."""

import threading

import gpu_smoke
import jax
import numpy as np
import pytest

import brax_concurrent as bc
from brax_concurrent.interop.jax_ffi import serving
from brax_concurrent.scheduler.cuda_graph import cost

KEY = jax.random.key(5)
NUM_ENVS = 300  # the last tile and the last unit are not full


def trajectory(env, steps=4):
    """What a jitted scan of random steps returns, on the host."""

    def one(state, key):
        state = env.step(state, draw(env, key))
        return state, (state.obs, state.reward, state.terminated, state.qpos)

    run = jax.jit(lambda state, keys: jax.lax.scan(one, state, keys))
    return jax.tree.map(np.asarray, run(env.reset(KEY), jax.random.split(KEY, steps)))


def draw(env, key):
    """Random actions, by robot in a mixed batch."""
    if hasattr(env, "envs"):
        keys = jax.random.split(key, len(env.envs))
        return {name: draw(each, k) for k, (name, each) in zip(keys, env.envs.items(), strict=True)}
    return jax.random.uniform(key, (env.num_envs, env.action_size), minval=-1.0, maxval=1.0)


def assert_same(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def expected():
    return trajectory(bc.make("halfcheetah", NUM_ENVS, backend="cuda", granularity="stage"))


@pytest.mark.parametrize("granularity", ["stage", "substep", "step"])
@pytest.mark.parametrize(
    "schedule",
    [
        {"scheduler": "serial", "envs_per_task": 32},
        {"scheduler": "sw"},
        {"scheduler": "sw", "window": 1, "envs_per_task": 128},
        {"scheduler": "sw", "window": 5, "streams": 3, "envs_per_task": 64},
        {"scheduler": "sw", "window": 64, "streams": 16, "envs_per_task": 32},
        {"scheduler": "graph"},
        {"scheduler": "graph", "envs_per_task": 64},
        {"scheduler": "hw"},
        {"scheduler": "hw", "window": 1, "envs_per_task": 64},
        {"scheduler": "hw", "window": 5, "envs_per_task": 32, "policy": "same_kernel"},
        {"scheduler": "hw", "envs_per_task": 128, "policy": "depth_first"},
    ],
)
def test_no_schedule_changes_a_bit(expected, granularity, schedule):
    env = bc.make("halfcheetah", NUM_ENVS, backend="cuda", granularity=granularity, **schedule)
    assert_same(trajectory(env), expected)


@pytest.mark.parametrize("scheduler", ["serial", "sw", "graph", "hw"])
def test_a_mixed_batch_gives_each_robot_its_own_bits(scheduler):
    robots = {"halfcheetah": 100, "grasp": 70, "walker2d": 33}
    env = bc.make(robots, backend="cuda", scheduler=scheduler, granularity="stage")
    state = env.step(env.reset(KEY), draw(env, KEY))
    for name, each in env.envs.items():
        alone = each.step(each.reset(bc.envs.mixed.robot_key(KEY, name)), draw(env, KEY)[name])
        assert_same(state.states[name], alone)


def test_a_graph_is_replayed():
    env = bc.make("halfcheetah", 64, backend="cuda", scheduler="graph")
    program = serving(env.program("control_step"))

    def one(carry, _):
        state, key = carry
        key, own = jax.random.split(key)
        return (env.step(state, draw(env, own)), key), None

    run = jax.jit(lambda state, key: jax.lax.scan(one, (state, key), length=50)[0], donate_argnums=0)
    carry = run(env.reset(KEY), KEY)
    before = cost(program)
    for _ in range(3):
        carry = run(*carry)
    after = cost(program)
    assert after.builds + after.updates - before.builds - before.updates <= 30  # of 150 steps


def test_a_graph_follows_arrays_that_move():
    """Each step of a scan over given actions has its action at another address."""
    env, serial = (bc.make("halfcheetah", 64, backend="cuda", scheduler=s) for s in ("graph", "serial"))
    actions = jax.random.uniform(KEY, (40, 64, env.action_size), minval=-1.0, maxval=1.0)
    runs = [jax.jit(lambda s, a, e=e: jax.lax.scan(lambda c, x: (e.step(c, x), c.obs), s, a)) for e in (env, serial)]
    found, expected = (run(serial.reset(KEY), actions) for run in runs)
    assert_same(jax.tree.leaves(found), jax.tree.leaves(expected))


@pytest.mark.parametrize("scheduler", ["sw", "hw"])
def test_several_threads_may_step_at_once(scheduler):
    envs = [bc.make("halfcheetah", n, backend="cuda", scheduler=scheduler, granularity="substep") for n in (64, 96)]
    expected = [trajectory(env, 8) for env in envs]
    found = [None] * 4

    def work(i):
        found[i] = trajectory(envs[i % 2], 8)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, result in enumerate(found):
        assert_same(result, expected[i % 2])


def test_the_cpu_agrees_with_every_scheduler():
    for scheduler in ("sw", "graph"):
        found = gpu_smoke.agreement("walker2d", num_envs=100, steps=5, scheduler=scheduler)
        assert {name: str(each) for name, each in found.items() if each.first is not None} == {}
