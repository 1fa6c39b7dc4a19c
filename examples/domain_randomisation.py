"""Robots that differ: every environment has its own friction and mass, in one compiled program."""

import jax
import jax.numpy as jnp

import brax_concurrent as bc


def main(num_envs=256, steps=100):
    """Let ants of different masses, on floors of different friction, take the same random actions."""
    masses = ("body_mass", "body_inertia", "body_subtreemass")  # all that MuJoCo's compiler makes of a density
    env = bc.make("ant", num_envs, per_env=("geom_friction", *masses), autoreset=False)
    friction_key, mass_key, key = jax.random.split(jax.random.key(0), 3)
    friction = jax.random.uniform(friction_key, (num_envs,), minval=0.2, maxval=1.5)
    mass = jax.random.uniform(mass_key, (num_envs,), minval=0.5, maxval=2.0)
    factors = {"geom_friction": friction} | dict.fromkeys(masses, mass)
    own = {name: jnp.asarray(getattr(env.model, name), jnp.float32) for name in factors}
    model = {name: jnp.einsum("e,...->e...", factors[name], value) for name, value in own.items()}
    qpos = jnp.broadcast_to(jnp.asarray(env.model.qpos0, jnp.float32), (num_envs, env.model.nq))
    state = env.reset_to(qpos, jnp.zeros((num_envs, env.model.nv)), model=model)

    @jax.jit
    def run(state):
        def one(state, key):
            action = jax.random.uniform(key, (env.action_size,), minval=-1.0, maxval=1.0)
            return env.step(state, jnp.broadcast_to(action, (num_envs, env.action_size))), None

        return jax.lax.scan(one, state, jax.random.split(key, steps))[0]

    state = run(state)
    distance = state.info["distance_from_origin"]
    for name, value in (("friction", friction), ("mass", mass)):
        low, high = (distance[pick].mean() for pick in (value < 0.8, value >= 0.8))
        print(f"{name} scaled by less than 0.8: {low:.2f} m from the start; by more: {high:.2f} m")


if __name__ == "__main__":
    main()
