"""Throughput measured where JAX computes on a GPU: of environments there, of ones on the CPU, and tuned."""

import jax
import pytest

import brax_concurrent as bc
from brax_concurrent.envs.arrays import GRANULARITIES
from brax_concurrent.training.measure import Timing, measure


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
@pytest.mark.parametrize("robots", ["halfcheetah", {"grasp": 64, "halfcheetah": 64}])
def test_each_backend_is_measured_on_its_own_device(backend, robots):
    env = bc.make(robots, **({} if isinstance(robots, dict) else {"num_envs": 64}), backend=backend)
    timing = Timing(env, steps=5)
    assert timing.sample() > 0
    timing.check()
    devices = {device.platform for leaf in jax.tree.leaves(timing._carry) for device in leaf.devices()}
    assert devices == {"cpu" if backend == "cpu" else "gpu"}


def test_a_timing_lasts_as_long_as_asked_for():
    found = measure(bc.make("halfcheetah", 1024, backend="cuda"), repeats=3, seconds=0.05)
    assert 0.02 < found.steps * found.num_envs / found.median < 0.5


def test_what_is_tuned_on_the_gpu_is_for_the_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("BRAX_CONCURRENT_CACHE", str(tmp_path))
    before = bc.make("grasp", 96, backend="cpu").granularity
    found = bc.tune("grasp", 96, backend="cuda", scheduler="serial", repeats=1)
    assert {one.settings["granularity"] for one in found.candidates} == set(GRANULARITIES)
    assert bc.make("grasp", 96, backend="cuda").granularity == found.settings["granularity"]
    assert bc.make("grasp", 96, backend="cpu").granularity == before
