"""PPO: advantages, statistics, densities and the loss against NumPy, what the environment gets, and that it learns."""

from __future__ import annotations

import dataclasses

import batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import scipy.stats

from brax_concurrent.training import networks, ppo, statistics
from brax_concurrent.training.policy import applied_action
from brax_concurrent.training.rollout import Rollout, rollout
from brax_concurrent.training.train import train

# ---- generalised advantage estimation


def advantages(reward, value, next_value, terminated, truncated, discount, gae_lambda):
    """Environment by environment, episode by episode: the sum of discounted errors from each step to its end."""
    found = np.zeros_like(reward)
    length, num_envs = reward.shape
    for i in range(num_envs):
        for t in range(length):
            factor = 1.0
            for k in range(t, length):
                target = reward[k, i] + (0.0 if terminated[k, i] else discount * next_value[k, i])
                found[t, i] += factor * (target - value[k, i])
                factor *= discount * gae_lambda
                if terminated[k, i] or truncated[k, i]:
                    break
    return found


def trajectory(seed=0, length=17, num_envs=5):
    random = np.random.default_rng(seed)
    reward, value, next_value = random.normal(size=(3, length, num_envs))
    terminated, truncated = random.random((2, length, num_envs)) < 0.15
    terminated[3, 0] = truncated[3, 0] = True  # what terminates at the time limit has terminated
    truncated[-1, 1] = terminated[-1, 2] = True
    return reward, value, next_value, terminated, truncated


@pytest.mark.parametrize(("discount", "gae_lambda"), [(0.97, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_advantages_with_terminations_and_truncations(discount, gae_lambda):
    given = trajectory()
    assert given[3].any()
    assert (given[4] & ~given[3]).any()
    found = ppo.gae(*map(jnp.asarray, given), discount, gae_lambda)
    np.testing.assert_allclose(found, advantages(*given, discount, gae_lambda), rtol=1e-5, atol=1e-5)


def test_targets_bootstrap_from_the_end_of_an_episode_not_from_the_next_ones_start():
    """With a critic that says 1 + the first entry of an observation, by hand."""
    config = dataclasses.replace(runs.TINY, num_envs=5, unroll_length=9, num_minibatches=1, critic_layers=())
    reward, _, _, terminated, truncated = trajectory(1, 9)
    obs, final_obs = (np.random.default_rng(2).normal(size=(2, 9, 5, 3)) / 2).astype(np.float32)
    zeros = np.zeros((9, 5))
    batch = Rollout(*map(jnp.asarray, (obs, zeros[..., None], zeros, reward, terminated, truncated, final_obs, zeros)))
    params = {"critic": ((jnp.asarray([[1.0], [0.0], [0.0]]), jnp.ones(1)),)}
    unscaled = statistics.Statistics(jnp.ones(()), jnp.zeros(3), jnp.ones(3))
    samples = ppo._prepared(params, unscaled, batch, config)[0]
    values = 1 + obs[..., 0], 1 + final_obs[..., 0]
    expected = advantages(reward, *values, terminated, truncated, config.discount, config.gae_lambda)
    np.testing.assert_allclose(samples.target, (expected + values[0]).reshape(-1), rtol=1e-4, atol=1e-4)
    normal = (expected - expected.mean()) / expected.std()
    np.testing.assert_allclose(samples.advantage, normal.reshape(-1), rtol=1e-4, atol=1e-4)


# ---- statistics and densities


def test_running_statistics_are_those_of_all_observations():
    random = np.random.default_rng(0)
    seen = statistics.empty(4)
    some = [random.normal(3.0, [0.1, 1.0, 50.0, 0.0], (n, 2, 4)).astype(np.float32) for n in (3, 40, 1)]
    for observations in some:
        seen = statistics.update(seen, jnp.asarray(observations))
    together = np.concatenate(some).reshape(-1, 4).astype(float)
    assert seen.number == len(together)
    np.testing.assert_allclose(seen.mean, together.mean(0), rtol=1e-5)
    np.testing.assert_allclose(seen.variance, together.var(0), rtol=1e-4, atol=1e-6)
    expected = np.clip((together - together.mean(0)) / np.sqrt(together.var(0) + 1e-8), -10, 10)
    np.testing.assert_allclose(statistics.normalize(seen, jnp.asarray(together)), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e6])
def test_variances_are_never_below_0(scale):
    """Of constants, which cancel, and of what hardly varies beside its size."""
    rng, update = np.random.default_rng(0), jax.jit(statistics.update)
    seen = statistics.empty(3)
    for _ in range(30):
        noise = 1e-6 * rng.normal(size=1000)
        batch = scale * np.stack([np.full(1000, 1000.1), 1 + noise, noise], axis=1)
        seen = update(seen, jnp.asarray(batch, jnp.float32))
        assert (np.asarray(seen.variance) >= 0).all()
    np.testing.assert_array_equal(statistics.normalize(seen, jnp.asarray(batch[:9], jnp.float32))[:, 0], 0)
    assert seen.variance[0] == 0


def test_statistics_stay_accurate_after_a_billion_observations():
    seen = statistics.Statistics(jnp.float32(1e9), jnp.float32([5.0]), jnp.float32([4.0]))
    batch = jnp.asarray(np.random.default_rng(1).normal(5.0, 2.0, (40960, 1)), jnp.float32)
    step = jax.jit(statistics.update)
    for _ in range(200):
        seen = step(seen, batch)
    np.testing.assert_allclose([seen.mean[0], seen.variance[0]], [5.0, 4.0], rtol=1e-3)


def test_nothing_is_clipped_before_ten_standard_deviations():
    seen = statistics.Statistics(jnp.ones(()), jnp.zeros(3), jnp.full(3, 4.0))
    np.testing.assert_allclose(statistics.normalize(seen, jnp.asarray([19.0, 21.0, -99.0])), [9.5, 10, -10], rtol=1e-6)


def test_density_and_entropy_of_a_gaussian():
    random = np.random.default_rng(0)
    mean, sample, log_std = random.normal(size=(7, 3)), random.normal(size=(7, 3)), random.normal(size=3)
    expected = scipy.stats.norm.logpdf(sample, mean, np.exp(log_std)).sum(-1)
    np.testing.assert_allclose(networks.log_prob(*map(jnp.asarray, (mean, log_std, sample))), expected, rtol=1e-5)
    expected = scipy.stats.norm.entropy(scale=np.exp(log_std)).sum()
    np.testing.assert_allclose(networks.entropy(jnp.asarray(log_std)), expected, rtol=1e-5)


def test_the_loss_is_the_clipped_surrogate():
    config = dataclasses.replace(runs.TINY, clip_range=0.2, entropy_cost=0.3, value_cost=0.7, actor_layers=())
    params = ppo.init_params(jax.random.key(0), 3, 2, config)
    random = np.random.default_rng(0)
    obs, action = random.normal(size=(50, 3)), random.normal(size=(50, 2))
    old, advantage, target = random.normal(-2.0, 0.5, 50), random.normal(size=50), random.normal(size=50)
    samples = ppo._Samples(*map(jnp.asarray, (obs, action, old, advantage, target)))
    (total, parts), gradient = jax.value_and_grad(ppo.loss, has_aux=True)(params, samples, config)

    (weights, bias), std = params["actor"][0], np.exp(np.asarray(params["log_std"]))
    new = scipy.stats.norm.logpdf(action, obs @ np.asarray(weights) + np.asarray(bias), std).sum(-1)
    ratio = np.exp(new - old)
    surrogate = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage).mean()
    errors = np.asarray(networks.value(params["critic"], jnp.asarray(obs), config.activation)) - target
    entropy = scipy.stats.norm.entropy(scale=std).sum()
    expected = -surrogate + 0.7 * 0.5 * np.square(errors).mean() - 0.3 * entropy
    np.testing.assert_allclose(total, expected, rtol=1e-4)
    np.testing.assert_allclose(parts["clipped"], (np.abs(ratio - 1) > 0.2).mean(), rtol=1e-4)
    # What is clipped pulls at nothing: only the samples that still are below the limit move the actor.
    followed = np.where(advantage > 0, ratio < 1.2, ratio > 0.8)
    assert 5 < followed.sum() < 45
    residual = (action - obs @ np.asarray(weights) - np.asarray(bias)) / std**2
    expected = -((followed * ratio * advantage)[:, None] * residual).mean(0)
    np.testing.assert_allclose(gradient["actor"][0][1], expected, rtol=1e-3, atol=1e-5)


def test_every_sample_is_learnt_from_once_an_epoch(monkeypatch):
    """With a loss that counts them."""

    def count(params, samples, config):
        size = len(samples.log_prob)
        assert size == config.batch_size // config.num_minibatches
        indices = samples.log_prob.astype(jnp.int32)
        return jnp.sum(params["counts"][indices]), {"policy_loss": samples.log_prob.sum()}

    class Plain:
        init = staticmethod(lambda params: ())
        update = staticmethod(lambda gradient, state, params: (jax.tree.map(jnp.negative, gradient), state))

    monkeypatch.setattr(ppo, "loss", count)
    monkeypatch.setattr(ppo, "make_optimizer", lambda config: Plain)
    config = dataclasses.replace(runs.TINY, num_epochs=3, num_minibatches=4)
    size = config.batch_size
    params = ppo.init_params(jax.random.key(0), 2, 1, config) | {"counts": jnp.zeros(size)}
    shape = (config.unroll_length, config.num_envs)
    zeros, numbers = jnp.zeros(shape), jnp.arange(float(size)).reshape(shape)
    flags = jnp.zeros(shape, bool)
    observations = jnp.zeros((*shape, 2))
    batch = Rollout(observations, zeros[..., None], numbers, zeros, flags, flags, observations, zeros)
    learner = ppo.Learner(params, (), statistics.empty(2))
    after = ppo.make_learn(config)(learner, batch, jnp.float32(-1.0), jax.random.key(1))[0]
    np.testing.assert_array_equal(after.params["counts"], -3.0)


def test_observations_too_large_for_their_variance_are_named():
    """Else training would go on, with a policy that could not be loaded."""
    params = ppo.init_params(jax.random.key(0), 1, 1, runs.TINY)
    zeros, flags = jnp.zeros((8, 32)), jnp.zeros((8, 32), bool)
    observations = zeros.at[0].set(1e20)[..., None]
    batch = Rollout(observations, zeros[..., None], zeros, zeros, flags, flags, observations, None)
    seen = statistics.update(statistics.empty(1), observations)
    bad = jax.jit(lambda *given: ppo._prepared(*given, runs.TINY)[2])(params, seen, batch)
    assert ppo.first_not_finite(jax.device_get(bad)) == "observations' variance"


# ---- what the environment gets


def test_the_control_cost_is_that_of_the_clipped_action():
    env = batches.env("halfcheetah", 32)
    config = dataclasses.replace(runs.TINY, initial_std=2.0)
    params = ppo.init_params(jax.random.key(0), env.observation_size, env.action_size, config)
    learner = ppo.Learner(params, (), statistics.empty(env.observation_size))
    given = (ppo.sampling_policy(config), learner, env.reset(jax.random.key(1)), jax.random.key(2))
    batch = rollout(env, *given, length=1, applied=applied_action(env))
    sample = np.asarray(batch.action[0])
    assert (np.abs(sample) > 1).any()
    cost = 0.1 * np.square(np.clip(sample, -1, 1)).sum(-1)
    np.testing.assert_allclose(batch.state.metrics["reward_ctrl"], -cost, rtol=1e-5)
    mean = networks.mlp(params["actor"], statistics.normalize(learner.statistics, batch.obs[0]), config.activation)
    np.testing.assert_allclose(batch.log_prob[0], networks.log_prob(mean, params["log_std"], sample), rtol=1e-5)


def test_actions_are_in_the_space_of_the_robot():
    env = batches.env("humanoid", 32)
    answer = jnp.asarray([[-3.0] * 17, [-1.0] * 17, [0.0] * 17, [0.5] * 17, [9.0] * 17])
    expected = np.asarray([-0.4, -0.4, 0.0, 0.2, 0.4])[:, None] * np.ones(17)
    np.testing.assert_allclose(applied_action(env)(answer), expected, rtol=1e-6)


def test_returns_are_counted_by_episode():
    reward = np.random.default_rng(0).normal(size=(6, 3))
    done = np.zeros((6, 3), bool)
    done[2, 0] = done[5, 0] = done[4, 1] = True
    batch = Rollout(*[None] * 3, *map(jnp.asarray, (reward, done, ~done & False)), None, None)
    before = ppo.Tally(jnp.asarray([10.0, jnp.nan, 0.0]), jnp.asarray([7, 5, 0]))
    after, ended = ppo._counted(before, batch)
    assert ended.number == 2  # the start of the second environment's episode is unknown
    np.testing.assert_allclose(ended.returns, 10 + reward[:, 0].sum(), rtol=1e-5)
    assert ended.lengths == 7 + 6
    np.testing.assert_allclose(after.returns, [0, reward[5, 1], reward[:, 2].sum()], rtol=1e-5)
    np.testing.assert_array_equal(after.lengths, [0, 1, 6])


# ---- it learns


@pytest.mark.slow
def test_a_cheetah_learns_to_run(tmp_path):
    """Under random actions it has a return of about -300, at rest of 0."""
    result = train("halfcheetah", tmp_path, steps=270_000, seed=0, report=lambda line: None)
    assert result.scores.mean > 500
