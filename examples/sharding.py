"""One batch over several devices, and over several processes: evolution of a policy, each device with its own worlds.

On one machine: python examples/sharding.py. Over two processes, which may be on two machines (the first one's address):
  python examples/sharding.py localhost:1234 2 0  &  python examples/sharding.py localhost:1234 2 1
To try it on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=4 makes four devices of it.
"""

import functools
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import brax_concurrent as bc


def main(num_envs=256, steps=50, generations=3):
    """Move a linear policy along its better perturbations, one per world; the result is their returns at the end."""
    mesh = jax.make_mesh((jax.device_count(),), ("worlds",))
    parts, whole = PartitionSpec("worlds"), PartitionSpec()
    env = bc.make("halfcheetah", num_envs // jax.device_count())  # of one device
    shape = (env.observation_size, env.action_size)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(parts, whole), out_specs=(whole, parts))
    def generation(keys, weights):
        """What one device does with its worlds' keys."""
        noise = jax.vmap(lambda key: jax.random.normal(key, shape))(keys)
        policies = weights + 0.1 * noise

        def step(state, _):
            action = jnp.tanh(jnp.einsum("no,noa->na", state.obs, policies))
            state = env.step(state, action)
            return state, state.reward

        _, rewards = jax.lax.scan(step, env.reset(keys), length=steps)
        returns = rewards.sum(axis=0)
        mean = jax.lax.pmean(returns.mean(), "worlds")  # over all devices of all processes
        step_direction = jax.lax.pmean(jnp.einsum("n,noa->oa", returns - mean, noise) / len(keys), "worlds")
        return weights + 0.02 * step_direction, returns

    # Every process says the same; each device computes its part of the keys only.
    split = jax.jit(functools.partial(jax.random.split, num=num_envs), out_shardings=NamedSharding(mesh, parts))
    weights = jnp.zeros(shape)
    for number in range(generations):
        weights, returns = generation(split(jax.random.key(number)), weights)
    mean = jax.jit(jnp.mean, out_shardings=NamedSharding(mesh, whole))(returns)
    if jax.process_index() == 0:
        print(f"{num_envs} worlds on {jax.device_count()} devices of {jax.process_count()} processes")
        print(f"mean return of {steps} steps after {generations} generations: {mean:.3f}")
    return returns


if __name__ == "__main__":
    if sys.argv[1:]:
        address, count, number = sys.argv[1:]
        jax.distributed.initialize(address, int(count), int(number))
    main()
