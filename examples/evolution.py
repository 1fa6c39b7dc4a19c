"""Evolution strategies: as many policies as environments, each environment under its own network, all in one jit.

After Salimans et al., "Evolution Strategies as a Scalable Alternative to Reinforcement Learning" (2017): antithetic
perturbations of one network, each judged by one episode, their ranks as weights of the step.
"""

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

import brax_concurrent as bc

SIGMA = 0.05  # of the perturbations


def init_network(key, sizes):
    """Weights and biases of a multilayer perceptron."""
    keys = jax.random.split(key, len(sizes) - 1)
    shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [(jax.random.normal(k, (n, m)) / n**0.5, jnp.zeros(m)) for k, n, m in shapes]


def network(layers, obs):
    """The action of one policy for one observation."""
    *hidden, (weights, biases) = layers
    for w, b in hidden:
        obs = jnp.tanh(obs @ w + b)
    return jnp.tanh(obs @ weights + biases)


def main(num_envs=4096, steps=100, generations=10, hidden=(16,)):
    """Make a cheetah run, and return the means of the generations' returns."""
    env = bc.make("halfcheetah", num_envs)
    center, unravel = ravel_pytree(init_network(jax.random.key(0), (env.observation_size, *hidden, env.action_size)))
    optimizer = optax.adam(0.05)

    def episode_returns(flat_policies, key):
        """(num_envs,) returns: environment i is under policy i, (num_envs, weights)."""
        policies = jax.vmap(unravel)(flat_policies)

        def step(state, _):
            state = env.step(state, jax.vmap(network)(policies, state.obs))
            return state, state.reward

        return jax.lax.scan(step, env.reset(key), length=steps)[1].sum(axis=0)

    @jax.jit
    def generation(center, optimizer_state, key):
        """One step of the network in the middle, and what its perturbations earned."""
        noise_key, reset_key = jax.random.split(key)
        half = jax.random.normal(noise_key, (num_envs // 2, center.size))
        noise = jnp.concatenate([half, -half])
        returns = episode_returns(center + SIGMA * noise, reset_key)
        ranks = jnp.argsort(jnp.argsort(returns)) / (num_envs - 1) - 0.5
        uphill = ranks @ noise / (num_envs * SIGMA)
        updates, optimizer_state = optimizer.update(-uphill, optimizer_state)
        return optax.apply_updates(center, updates), optimizer_state, returns

    optimizer_state, means = optimizer.init(center), []
    for number in range(generations):
        center, optimizer_state, returns = generation(center, optimizer_state, jax.random.key(number + 1))
        means.append(float(returns.mean()))
        print(f"generation {number}: mean return {means[-1]:8.2f}, best {returns.max():8.2f}, of {num_envs} policies")
    return means


if __name__ == "__main__":
    main()
