"""The kernels around MuJoCo Warp's physics; imported only where Warp is installed, whose compiler reads annotations."""

import warp as wp


@wp.kernel
def draw_controls(
    seed: wp.array[wp.int32],
    low: wp.array[wp.float32],
    high: wp.array[wp.float32],
    ctrl: wp.array2d[wp.float32],
) -> None:
    """Controls of (world, actuator), uniform in the actuator's range."""
    world, actuator = wp.tid()
    state = wp.rand_init(seed[0], world * ctrl.shape[1] + actuator)
    ctrl[world, actuator] = low[actuator] + (high[actuator] - low[actuator]) * wp.randf(state)


@wp.kernel
def reset_fallen(
    seed: wp.array[wp.int32],
    root: int,
    lowest: float,
    highest: float,
    qpos0: wp.array[wp.float32],
    qpos: wp.array2d[wp.float32],
    qvel: wp.array2d[wp.float32],
    qacc_warmstart: wp.array2d[wp.float32],
) -> None:
    """Worlds whose root is too low or too high start again at qpos0; root -1: none does. Moves the seed on."""
    world = wp.tid()
    if world == 0:
        seed[0] = seed[0] + 1
    if root >= 0:
        height = qpos[world, root]
        if height < lowest or height > highest:
            for i in range(qpos.shape[1]):
                qpos[world, i] = qpos0[i]
            for i in range(qvel.shape[1]):
                qvel[world, i] = 0.0
                qacc_warmstart[world, i] = 0.0
