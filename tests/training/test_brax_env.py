"""BraxEnv against Brax's own wrappers, step by step, and in Brax's own trainer."""

from __future__ import annotations

import functools
import re

import batches
import jax
import jax.numpy as jnp
import numpy as np
import pendulum
import pytest
from swing import LIMIT, Swing, swing

base = pytest.importorskip("brax.envs.base")

from brax.envs.wrappers import training as wrappers  # noqa: E402
from brax.training.agents.ppo import networks, train  # noqa: E402

from brax_concurrent.training.brax_env import BraxEnv, patch_jax, wrap  # noqa: E402

NUM = 4


class Single(base.Env):
    """One pendulum as one environment of Brax's, of which its wrappers make a batch."""

    batch = swing(1)
    observation_size = action_size = 1
    backend = "brax_concurrent"

    def reset(self, rng):
        return self.state(self.batch.reset(rng))

    def step(self, state, action):
        new = self.batch.step(state.pipeline_state, action[None])
        return self.state(new).replace(info=state.info)

    def state(self, state):
        flat = jax.tree.map(lambda leaf: leaf[0], (state.obs, state.reward, state.terminated * 1.0, state.metrics))
        return base.State(state, *flat)


@functools.cache
def env():
    return BraxEnv(Swing(), backend="cpu")


def keys(num=NUM, seed=0):
    return jax.random.split(jax.random.PRNGKey(seed), num)


def test_it_does_what_braxs_wrappers_do():
    theirs = wrappers.wrap(Single(), episode_length=LIMIT)
    reset, ours_step, their_step = jax.jit(theirs.reset), jax.jit(env().step), jax.jit(theirs.step)
    state, expected = env().reset(keys()), reset(keys())
    ends = []
    for action in batches.random_actions(swing(NUM), 4 * LIMIT):
        for name in ("obs", "reward", "done"):
            found = getattr(state, name)
            np.testing.assert_array_equal(found, getattr(expected, name), err_msg=name)
            assert found.dtype == jnp.float32
        for name in ("steps", "truncation", "episode_done", "episode_metrics"):
            jax.tree.map(np.testing.assert_array_equal, state.info[name], expected.info[name])
        jax.tree.map(np.testing.assert_array_equal, state.metrics, expected.metrics)
        np.testing.assert_array_equal(state.info["time_out"], state.info["truncation"])
        ends.append((state.done, state.info["truncation"]))
        state, expected = ours_step(state, action), their_step(expected, action)
    done, truncation = np.swapaxes(ends, 0, 1)
    assert (done * truncation).any()
    assert (done * (1 - truncation)).any()


def test_it_is_the_batch_of_this_package():
    own, num = BraxEnv("walker2d", backend="cpu", max_episode_steps=30), 33
    plain = batches.env("walker2d", num, max_episode_steps=30)
    state, expected = own.reset(keys(num)), plain.reset(keys(num))
    step = jax.jit(own.step, donate_argnums=0)
    for action in batches.random_actions(plain, 40):
        state, expected = step(state, action), plain.step(expected, action)
        batches.assert_same_bits(state.pipeline_state, expected)
        np.testing.assert_array_equal(state.done, expected.done)
        np.testing.assert_array_equal(state.info["final_obs"], expected.final_obs)
    assert (own.observation_size, own.action_size, own.dt) == (17, 6, plain.dt)
    assert own.episode_length == 30
    assert own.unwrapped is own


def test_actions_from_minus_one_to_one_are_the_robots_range():
    robot = pendulum.PENDULUM.replace('ctrlrange="-1 1"', 'ctrlrange="-0.25 0.75"')
    own = BraxEnv("halfcheetah", backend="cpu", xml_file=robot, ctrl_cost_weight=1.0)
    state = own.reset(keys(3))
    reward = own.step(state, jnp.array([[-1.0], [0.0], [1.0]])).metrics["reward_ctrl"]
    np.testing.assert_allclose(reward, [-(0.25**2), -(0.25**2), -(0.75**2)], rtol=1e-6)


def test_model_values_are_asked_for_at_every_reset():
    def masses(keys):
        return {"body_mass": jax.vmap(lambda key: jax.random.uniform(key, (2,), minval=1.0, maxval=2.0))(keys)}

    own = BraxEnv("halfcheetah", backend="cpu", xml_file=pendulum.PENDULUM, per_env=("body_mass",), model_values=masses)
    first, second = own.reset(keys()), wrap(own, 7).reset(keys(seed=1))
    assert np.unique(np.concatenate([s.pipeline_state.model["body_mass"] for s in (first, second)])).size == 16
    assert own.step(first, jnp.ones((NUM, 1))).pipeline_state.model["body_mass"].shape == (NUM, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"action_repeat": 2}, "action_repeat: expected 1, got 2; for longer control steps give frame_skip"),
        ({"randomization_fn": lambda system, rng: None}, "randomization_fn: it changes a System of Brax's"),
        ({"env": Single()}, "env: expected a BraxEnv, got Single"),
        ({"episode_length": 0}, "max_episode_steps"),
    ],
)
def test_what_wrap_refuses(arguments, said):
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        wrap(**{"env": env(), **arguments})


def test_braxs_own_wrapper_is_refused():
    with pytest.raises(ValueError, match=r"rng: expected a key for each environment, .*wrap_env_fn=brax_concurrent"):
        wrappers.wrap(env()).reset(keys())
    with pytest.raises(TypeError, match="num_envs: the keys say how many environments there are"):
        BraxEnv("ant", num_envs=3)


@pytest.mark.slow
def test_braxs_ppo_trains(monkeypatch):
    """A few updates; a pendulum whose reward is its speed turns faster for it."""
    monkeypatch.setattr(jax, "device_put_replicated", None, raising=False)
    monkeypatch.delattr(jax, "device_put_replicated", raising=False)
    patch_jax()
    own = BraxEnv("halfcheetah", backend="cpu", xml_file=pendulum.PENDULUM)
    small = functools.partial(
        networks.make_ppo_networks, policy_hidden_layer_sizes=(16,), value_hidden_layer_sizes=(16,)
    )
    seen = []
    schedule = {"num_envs": 32, "batch_size": 32, "num_minibatches": 4, "unroll_length": 10, "num_timesteps": 12_800}
    evaluation = {
        "num_evals": 2,
        "num_eval_envs": 16,
        "progress_fn": lambda step, metrics: seen.append((step, metrics)),
    }
    make_policy, params, _ = train.train(
        own, wrap_env_fn=wrap, episode_length=25, network_factory=small, learning_rate=3e-3, **schedule, **evaluation
    )
    assert [step for step, _ in seen] == [0, 12_800]
    before, after = (metrics for _, metrics in seen)
    assert before["eval/avg_episode_length"] == after["eval/avg_episode_length"] == 25
    assert after["eval/episode_reward"] > before["eval/episode_reward"]
    assert np.isfinite(after["training/total_loss"])
    state = wrap(own, 25).reset(keys())
    action, _ = make_policy(params)(state.obs, jax.random.PRNGKey(0))
    assert action.shape == (NUM, 1)
