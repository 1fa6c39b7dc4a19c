"""Brax's own PPO on a robot of this package. Needs the extra `brax`: pip install "brax-concurrent[brax]"."""

import functools
import warnings

warnings.filterwarnings("ignore", "JAXopt is no longer maintained", DeprecationWarning)  # Brax imports it

from brax.training.agents.ppo import networks, train  # noqa: E402

from brax_concurrent.training.brax_env import BraxEnv, patch_jax, wrap  # noqa: E402


def progress(step, metrics):
    """What Brax reports at each evaluation."""
    reward, length = metrics["eval/episode_reward"], metrics["eval/avg_episode_length"]
    print(f"{step:>9,} steps: mean return {reward:8.2f}, mean length {length:6.1f}")


def main(num_timesteps=2_000_000, num_envs=256, episode_length=1000, hidden=(64, 64), num_evals=5):
    """Train a walker and return Brax's policy."""
    patch_jax()  # Brax 0.14.2 calls a function that JAX has taken out
    layers = {"policy_hidden_layer_sizes": hidden, "value_hidden_layer_sizes": hidden}
    make_policy, params, _ = train.train(
        BraxEnv("walker2d"),
        wrap_env_fn=wrap,  # a BraxEnv is a batch by itself and resets its episodes
        num_timesteps=num_timesteps,
        episode_length=episode_length,
        num_envs=num_envs,
        batch_size=num_envs,
        num_minibatches=4,
        unroll_length=20,
        num_updates_per_batch=8,
        num_evals=num_evals,
        num_eval_envs=64,
        learning_rate=3e-4,
        discounting=0.99,
        entropy_cost=1e-3,
        normalize_observations=True,
        network_factory=functools.partial(networks.make_ppo_networks, **layers),
        progress_fn=progress,
    )
    return make_policy(params, deterministic=True)


if __name__ == "__main__":
    main()
