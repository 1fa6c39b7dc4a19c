"""What is recorded on a GPU: kernels really overlap on several streams, and not those that conflict."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import brax_concurrent as bc


def take(env, steps):
    actions = jnp.zeros((steps, env.num_envs, env.action_size))
    run = jax.jit(lambda state, actions: lax.scan(lambda s, a: (env.step(s, a), None), state, actions)[0])
    return jax.block_until_ready(run(env.reset(jax.random.key(0)), actions))


@pytest.mark.parametrize("scheduler", ["serial", "sw", "graph"])
def test_kernels_are_recorded_by_the_gpus_clock(tmp_path, scheduler):
    path, steps = tmp_path / "t.json", 3
    settings = {"backend": "cuda", "scheduler": scheduler, "granularity": "stage", "streams": 4}
    env = bc.make("halfcheetah", 2048, trace=path, envs_per_task=512, **settings)
    state = take(env, steps)
    np.testing.assert_array_equal(state.obs, take(bc.make("halfcheetah", 2048, **settings), steps).obs)
    found = env.write_trace()
    assert (len(found), found.runs, found.missing) == (steps * len(found.stream), steps, 0)
    assert (found.rows[:, 2] <= found.rows[:, 3]).all()
    assert found.makespan > 0
    assert found.overlaps() > 0 or scheduler == "serial"
    at = {(row.run, row.task): row for row in found.intervals}
    for row in found.intervals:
        assert all(at[row.run, older].end <= row.begin for older in row.waits_for)
    assert sum(event["ph"] == "X" for event in json.loads(path.read_text())["traceEvents"]) == len(found)


def test_different_robots_are_in_flight_together(tmp_path):
    robots = {"halfcheetah": 1024, "walker2d": 1024, "grasp": 1024}
    env = bc.make(robots, backend="cuda", scheduler="sw", granularity="step", trace=tmp_path / "t.json")
    state = env.reset(jax.random.key(0))
    for _ in range(3):
        actions = {n: jnp.zeros((e.num_envs, e.action_size)) for n, e in env.envs.items()}
        state = jax.block_until_ready(env.step(state, actions))
    found = env.write_trace()
    assert len(found) == 3 * len(found.stream) == 9
    assert found.overlaps() > 0
    assert found.concurrency > 1
