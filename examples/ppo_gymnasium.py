"""PPO as CleanRL writes it, a loop on Gymnasium's vector interface; networks in JAX. Needs the extras gym and train."""

import itertools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from jax.scipy.stats import norm

GAMMA, LAMBDA, CLIP, MINIBATCHES, EPOCHS, OPTIMIZER = 0.99, 0.95, 0.2, 8, 4, optax.adam(1e-3)


@jax.jit
def network(params, obs):
    """A multilayer perceptron: the action's mean and standard deviation, and the value of the state."""
    for w, b in params[:-1]:
        obs = jnp.tanh(obs @ w + b)
    value, *rest = jnp.split(obs @ params[-1][0] + params[-1][1], [1], axis=-1)
    mean, spread = jnp.split(0.1 * rest[0], 2, axis=-1)
    return mean, jnp.exp(spread - 0.5), 10 * value[..., 0]


@jax.jit
def update(params, optimizer_state, batch):
    """One step on a minibatch: PPO's clipped objective, and the value's error."""

    def loss(params, obs, action, old, advantage, target):
        mean, std, value = network(params, obs)
        ratio = jnp.exp(norm.logpdf(action, mean, std).sum(axis=-1) - old)
        normal = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        objective = jnp.minimum(ratio * normal, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * normal)
        return jnp.mean(0.02 * (value - target) ** 2 - objective)

    updates, optimizer_state = OPTIMIZER.update(jax.grad(loss)(params, *batch), optimizer_state)
    return optax.apply_updates(params, updates), optimizer_state


def main(num_envs=256, steps=32, updates=60, hidden=(64, 64), max_episode_steps=200):
    """Train a cheetah, and print the returns of the episodes that ended."""
    name = "brax_concurrent.training.gymnasium:brax_concurrent/HalfCheetah-v5"
    options = {"autoreset_mode": AutoresetMode.SAME_STEP, "max_episode_steps": max_episode_steps}
    envs = RecordEpisodeStatistics(gymnasium.make_vec(name, num_envs=num_envs, **options))
    rng = np.random.default_rng(0)
    sizes = (envs.single_observation_space.shape[0], *hidden, 1 + 2 * envs.single_action_space.shape[0])
    params = [(rng.normal(size=(n, m)) / n**0.5, np.zeros(m)) for n, m in itertools.pairwise(sizes)]
    optimizer_state = OPTIMIZER.init(params := jax.tree.map(jnp.float32, params))
    all_obs, actions = (np.zeros((steps, *s.shape), np.float32) for s in (envs.observation_space, envs.action_space))
    log_probs, deltas, decays, values = np.zeros((4, steps, num_envs), np.float32)
    obs, _ = envs.reset(seed=0)
    for number in range(1, updates + 1):
        returns = []
        for t in range(steps):
            mean, std, values[t] = (np.asarray(x) for x in network(params, obs))
            all_obs[t], actions[t] = obs, rng.normal(mean, std)
            log_probs[t] = norm.logpdf(actions[t], mean, std).sum(axis=-1)
            obs, rewards, terminated, truncated, infos = envs.step(actions[t])
            last, ended = obs.copy(), terminated | truncated  # where one ended, obs is the next episode's first
            for i in np.flatnonzero(ended):
                last[i] = infos["final_obs"][i]
            deltas[t] = rewards + GAMMA * np.asarray(network(params, last)[2]) * ~terminated - values[t]
            decays[t] = GAMMA * LAMBDA * ~ended
            returns.extend(infos["episode"]["r"][infos["_episode"]] if "episode" in infos else [])
        advantages = deltas.copy()
        for t in reversed(range(steps - 1)):
            advantages[t] += decays[t] * advantages[t + 1]
        batch = [x.reshape(-1, *x.shape[2:]) for x in (all_obs, actions, log_probs, advantages, advantages + values)]
        for _ in range(EPOCHS):
            for rows in np.split(rng.permutation(steps * num_envs), MINIBATCHES):
                params, optimizer_state = update(params, optimizer_state, [x[rows] for x in batch])
        if returns:
            print(f"update {number}: {len(returns)} episodes ended, mean return {np.mean(returns):.2f}")


if __name__ == "__main__":
    main()
