"""Physics of a robot of your own, without a task: a cart that has to keep a pole from falling."""

import jax
import jax.numpy as jnp

import brax_concurrent as bc

MJCF = """
<mujoco model="cart-pole">
  <option timestep="0.01"/>
  <worldbody>
    <body name="cart" pos="0 0 1">
      <joint name="slide" type="slide" axis="1 0 0" damping="0.1"/>
      <geom type="capsule" fromto="-0.2 0 0 0.2 0 0" size="0.1" mass="1"/>
      <body name="pole">
        <joint name="hinge" axis="0 1 0" damping="0.01"/>
        <geom type="capsule" fromto="0 0 0 0 0 0.6" size="0.04" mass="0.2"/>
        <body name="tip" pos="0 0 0.6"><geom type="sphere" size="0.05" mass="0.1"/></body>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="slide" gear="10" ctrlrange="-1 1" ctrllimited="true"/></actuator>
</mujoco>
"""


def main(num_envs=64, steps=300):
    """Balance poles that start at different angles, each environment with its own gain of the controller."""
    sim = bc.Simulator(MJCF, num_envs, fields=("xpos",))  # a path or a mujoco.MjModel will do as well
    gain = jnp.linspace(0.0, 8.0, num_envs)

    @jax.jit
    def run(state):
        def one(state, _):
            angle, speed = state.qpos[:, 1], state.qvel[:, 1]
            state = sim.step(state, (gain * (angle + 0.2 * speed))[:, None])
            return state, state.xpos[:, -1, 2]  # height of the tip, m

        return jax.lax.scan(one, state, length=steps)

    qpos = jnp.zeros((num_envs, sim.model.nq)).at[:, 1].set(0.1)
    state, heights = run(sim.reset_to(qpos, jnp.zeros((num_envs, sim.model.nv))))
    stands = heights[-1] > 1.5
    print(
        f"after {steps * sim.dt:.1f} s {stands.sum()} of {num_envs} poles stand: gains from {gain[stands].min():.2f} on"
    )
    print(f"tips between {heights.min():.2f} m and {heights.max():.2f} m; {state.diverged.sum()} diverged")


if __name__ == "__main__":
    main()
