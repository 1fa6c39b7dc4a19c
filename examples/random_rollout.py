"""Random actions in a batch of robots, as one jitted scan. `bc.rollout` does the same for a policy of yours."""

import jax

import brax_concurrent as bc


def main(num_envs=256, steps=200):
    """Step cheetahs at random, and print where they got to."""
    env = bc.make("halfcheetah", num_envs)

    @jax.jit
    def run(state, key):
        def one(state, key):
            action = jax.random.uniform(key, (num_envs, env.action_size), minval=env.action_low, maxval=env.action_high)
            state = env.step(state, action)
            return state, state.reward

        return jax.lax.scan(one, state, jax.random.split(key, steps))

    state, reward = run(env.reset(jax.random.key(0)), jax.random.key(1))
    x = state.info["x_position"]
    print(f"{reward.size:,} steps, mean reward {reward.mean():.3f}")
    print(f"after {steps * env.dt:g} s they are between {x.min():.2f} m and {x.max():.2f} m from the start")


if __name__ == "__main__":
    main()
