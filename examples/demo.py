"""What `make demo` runs: PPO's batches of transitions from the five robots, by an untrained policy."""

import time

import jax
import jax.numpy as jnp
import numpy as np

import brax_concurrent as bc


def init_policy(key, sizes):
    """Weights of a multilayer perceptron, and the logarithm of its actions' standard deviation."""
    keys = jax.random.split(key, len(sizes) - 1)
    shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return {"layers": [jax.random.normal(k, (n, m)) / np.sqrt(n) for k, n, m in shapes], "log_std": -0.5}


def policy(params, obs, key):
    """A normally distributed action, and the logarithm of its probability density."""
    *hidden, last = params["layers"]
    x = obs
    for weights in hidden:
        x = jnp.tanh(x @ weights)
    noise = jax.random.normal(key, (len(obs), last.shape[1]))
    density = -0.5 * noise**2 - params["log_std"] - 0.5 * jnp.log(2 * jnp.pi)
    return 0.1 * (x @ last) + jnp.exp(params["log_std"]) * noise, density.sum(axis=1)


def episodes(reward, done):
    """Returns and lengths of the episodes that ended, from (steps, num_envs) arrays."""
    total, length, returns, lengths = np.zeros(reward.shape[1]), np.zeros(reward.shape[1]), [], []
    for r, d in zip(reward, done, strict=True):
        total, length = total + r, length + 1
        returns, lengths = [*returns, *total[d]], [*lengths, *length[d]]
        total[d], length[d] = 0, 0
    return returns, lengths


def collect(name, num_envs, length, batches):
    """Roll out one robot and print what came out."""
    env = bc.make(name, num_envs)
    keys = jax.random.split(jax.random.key(0), batches + 2)
    params = init_policy(keys[0], (env.observation_size, 64, 64, env.action_size))
    start = time.perf_counter()
    state = env.reset(keys[1])
    jax.block_until_ready(bc.rollout(env, policy, params, state, keys[1], length))
    compiled = time.perf_counter() - start
    kept = []
    start = time.perf_counter()
    for key in keys[2:]:
        data = jax.block_until_ready(bc.rollout(env, policy, params, state, key, length))
        state = data.state
        kept.append((data.reward, data.terminated | data.truncated))
    steps = num_envs * length * batches
    rate = steps / (time.perf_counter() - start)
    returns, lengths = episodes(*(np.concatenate(x) for x in zip(*kept, strict=True)))
    ended = f"return {np.mean(returns):8.1f}, length {np.mean(lengths):6.1f}" if returns else "none"
    print(f"{name:12s} compiled in {compiled:5.1f} s; {rate:9,.0f} steps/s; {len(returns):6,} episodes: {ended}")
    return data


def main(num_envs=256, length=100, batches=10, robots=("halfcheetah", "walker2d", "ant", "grasp", "humanoid")):
    """Collect from each robot in turn."""
    print(f"{num_envs} environments of each robot, {batches} batches of {length} steps, on {jax.devices()[0]}")
    for name in robots:
        data = collect(name, num_envs, length, batches)
    print("The policy is untrained: walkers fall, cheetahs jitter. A batch for PPO to learn from, of the last robot:")
    for part in ("obs", "action", "log_prob", "reward", "terminated", "truncated", "final_obs"):
        value = getattr(data, part)
        print(f"  {part:12s} {value.dtype!s:8s} {value.shape}")


if __name__ == "__main__":
    main()
