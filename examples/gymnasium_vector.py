"""The loop of a reinforcement learner on Gymnasium's interface: a batch of robots behind `gymnasium.make_vec`.

Needs the extra `gym`: pip install "brax-concurrent[gym]".
"""

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics


def main(num_envs=64, steps=200, max_episode_steps=50):
    """Collect a batch of transitions with a random linear policy, as PPO would, and print what came of it."""
    envs = gymnasium.make_vec(
        "brax_concurrent.training.gymnasium:brax_concurrent/HalfCheetah-v5",
        num_envs=num_envs,
        autoreset_mode=AutoresetMode.SAME_STEP,
        max_episode_steps=max_episode_steps,
    )
    envs = RecordEpisodeStatistics(envs)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=envs.single_observation_space.shape + envs.single_action_space.shape) / 10
    value_weights = rng.normal(size=envs.single_observation_space.shape)  # of a value function, untrained too

    all_obs = np.zeros((steps, *envs.observation_space.shape), np.float32)
    all_actions = np.zeros((steps, *envs.action_space.shape), np.float32)
    rewards, bootstraps = np.zeros((2, steps, num_envs), np.float32)
    returns = []
    obs, _ = envs.reset(seed=0)
    for step in range(steps):
        noise = rng.normal(scale=0.3, size=envs.action_space.shape)
        action = np.clip(obs @ weights + noise, envs.action_space.low, envs.action_space.high).astype(np.float32)
        all_obs[step], all_actions[step] = obs, action  # copies: obs is a view of JAX's array
        obs, rewards[step], terminated, truncated, infos = envs.step(action)
        # `obs` already is the next episode's first: the value beyond the time limit is that of this one's last.
        for i in np.flatnonzero(truncated & ~terminated):
            bootstraps[step, i] = infos["final_obs"][i] @ value_weights
        if "episode" in infos:
            returns.extend(infos["episode"]["r"][infos["_episode"]])
    envs.close()
    print(f"{rewards.size:,} steps: obs {all_obs.shape}, actions {all_actions.shape}, {all_obs.dtype}")
    print(f"{len(returns)} episodes, mean return {np.mean(returns):.2f}; {np.count_nonzero(bootstraps)} bootstrapped")


if __name__ == "__main__":
    main()
