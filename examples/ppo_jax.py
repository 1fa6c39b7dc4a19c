"""PPO in plain JAX with a network of your own: bc.rollout collects, optax updates, all else is here."""

import jax
import jax.numpy as jnp
import optax
from jax.scipy.stats import norm

import brax_concurrent as bc

GAMMA, LAMBDA, CLIP, MINIBATCHES, EPOCHS, OPTIMIZER = 0.99, 0.95, 0.2, 8, 4, optax.adam(1e-3)


def network(params, obs):
    """A multilayer perceptron: the action's mean and standard deviation, and the value of the state."""
    for w, b in params[:-1]:
        obs = jnp.tanh(obs @ w + b)
    value, *rest = jnp.split(obs @ params[-1][0] + params[-1][1], [1], axis=-1)
    mean, spread = jnp.split(0.1 * rest[0], 2, axis=-1)
    return mean, jnp.exp(spread - 0.5), 10 * value[..., 0]


def policy(params, obs, key):
    """What bc.rollout asks for."""
    mean, std, _ = network(params, obs)
    action = mean + std * jax.random.normal(key, mean.shape)
    return action, norm.logpdf(action, mean, std).sum(axis=-1)


def advantages(params, data):
    """Generalised advantage estimates; an episode that is out of time goes on in value, but not in the sum."""
    value, following = (network(params, obs)[2] for obs in (data.obs, data.final_obs))
    delta = data.reward + GAMMA * following * ~data.terminated - value
    decay = GAMMA * LAMBDA * ~(data.terminated | data.truncated)
    sums = jax.lax.scan(lambda later, x: (x[0] + x[1] * later,) * 2, 0 * delta[0], (delta, decay), reverse=True)[1]
    return sums, sums + value


def loss(params, obs, action, old, advantage, target):
    """PPO's clipped objective, and the value's error."""
    mean, std, value = network(params, obs)
    ratio = jnp.exp(norm.logpdf(action, mean, std).sum(axis=-1) - old)
    normal = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    objective = jnp.minimum(ratio * normal, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * normal)
    return jnp.mean(0.02 * (value - target) ** 2 - objective)


@jax.jit
def update(carry, data, key):
    """(parameters, the optimizer's state) after epochs of minibatches of one rollout."""
    arrays = (data.obs, data.action, data.log_prob, *advantages(carry[0], data))
    flat = [x.reshape(-1, *x.shape[2:]) for x in arrays]

    def minibatch(carry, rows):
        updates, state = OPTIMIZER.update(jax.grad(loss)(carry[0], *(x[rows] for x in flat)), carry[1])
        return (optax.apply_updates(carry[0], updates), state), None

    orders = jax.vmap(lambda k: jax.random.permutation(k, data.reward.size))(jax.random.split(key, EPOCHS))
    return jax.lax.scan(minibatch, carry, orders.reshape(EPOCHS * MINIBATCHES, -1))[0]


def main(name="halfcheetah", num_envs=256, length=32, updates=60, hidden=(64, 64)):
    """Train, and print the mean rewards of the rollouts."""
    env = bc.make(name, num_envs)
    *keys, network_key, key = jax.random.split(jax.random.key(0), updates + 2)
    sizes = (env.observation_size, *hidden, 1 + 2 * env.action_size)
    shapes = zip(jax.random.split(network_key, len(sizes) - 1), sizes[:-1], sizes[1:], strict=True)
    params = [(jax.random.normal(k, (n, m)) / n**0.5, jnp.zeros(m)) for k, n, m in shapes]
    state, carry = env.reset(key), (params, OPTIMIZER.init(params))
    for number, key in enumerate(keys, 1):
        data = bc.rollout(env, policy, carry[0], state, key, length)
        state, carry = data.state, update(carry, data, key)
        if number % max(updates // 5, 1) == 0:
            print(f"update {number}: mean reward {data.reward.mean():.3f}")


if __name__ == "__main__":
    main()
