"""A task of your own: a hopper on one springy leg is to hop as fast as it is told. Raibert's controller tries."""

import jax
import jax.numpy as jnp

import brax_concurrent as bc

MJCF = """
<mujoco> <option timestep="0.005"/>
  <worldbody> <geom type="plane" size="40 40 1"/>
    <body name="torso" pos="0 0 0.9">
      <joint type="slide" axis="1 0 0"/> <joint type="slide" axis="0 0 1"/> <joint axis="0 1 0"/>
      <geom type="capsule" fromto="-0.25 0 0 0.25 0 0" size="0.1"/>
      <body>
        <joint name="hip" axis="0 1 0" range="-60 60" limited="true" damping="1"/>
        <geom type="capsule" fromto="0 0 0 0 0 -0.4" size="0.03"/> <body pos="0 0 -0.8">
          <joint name="leg" type="slide" axis="0 0 1" range="0 0.4" limited="true" stiffness="2000" damping="10"/>
          <geom type="capsule" fromto="0 0 0 0 0 0.4" size="0.025"/></body></body></body></worldbody>
  <actuator><motor joint="hip" gear="50"/> <motor joint="leg" gear="-300"/></actuator></mujoco>"""


class Hopper(bc.Task):
    model, frame_skip, max_episode_steps = MJCF, 2, 500  # a path or a mujoco.MjModel will do as well
    action_low, action_high = -1.0, 1.0  # else the actuators' ctrlrange

    def observation(self, s):  # of one environment, in JAX; compiled together with the physics
        return jnp.concatenate([s.qpos[1:], s.qvel, s.memory["speed"], jnp.where(s.ncon > 0, 1.0, 0.0)])

    def reward(self, s, before, action):
        speed = (s.qpos[0] - before.qpos[0]) / self.dt
        return 1.0 - jnp.abs(speed - s.memory["speed"][0]) - 0.01 * jnp.sum(action**2), {"speed": speed}

    def terminated(self, s):
        return (s.xpos[self.mj_model.body("torso").id, 2] < 0.4) | (jnp.abs(s.qpos[2]) > 1.2)

    def reset(self, noise):
        return noise.uniform(5, -0.02, 0.02), 0.1 * noise.normal(5), {"speed": noise.uniform(1)}


def raibert(_, obs, key):
    """On the ground keep the torso upright and push; in the air put the foot where the speed wants it."""
    _, pitch, hip, _, vx, _, turn, vhip, vleg, told, ground = obs.T
    air = 80 * (-0.13 * vx - 0.12 * (vx - told) - pitch - hip) - 6 * vhip
    torque = jnp.where(ground, 60 * pitch + 8 * turn, air) / 50
    return jnp.stack([torque, jnp.where(ground, vleg < 0, 0.0)], axis=1).clip(-1, 1), jnp.zeros(len(obs))


def main(num_envs=256, steps=500):
    """Hop for five seconds, and print how fast the slow and the fast were told to be and were."""
    env = bc.make(Hopper(), num_envs)
    data = bc.rollout(env, raibert, None, env.reset(jax.random.key(0)), jax.random.key(1), steps)
    told, speed = data.obs[..., 9], data.obs[..., 4]
    for which in (told < 0.5, told >= 0.5):
        print(f"told {told[which].mean():.2f} m/s, they hop {speed[which].mean():.2f} m/s")
    print(f"{data.terminated.sum()} falls in {num_envs * steps * env.dt:,.0f} s")


if __name__ == "__main__":
    main()
