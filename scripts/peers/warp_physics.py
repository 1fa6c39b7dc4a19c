"""MuJoCo Warp on the robots' own MJCF files: one CUDA graph is a control step."""

from __future__ import annotations

import time

import numpy as np

from peers import SECONDS, Peer, Prepared, models, paced

# Contacts and constraint rows that a world has room for: (nconmax, njmax). `check` says whether they sufficed.
SIZES = {"ant": (16, 64), "grasp": (16, 96), "halfcheetah": (12, 48), "humanoid": (24, 80), "walker2d": (16, 64)}


def prepare(robot: str, num_envs: int, backend: str, threads: int) -> Prepared:
    """Random controls, frame_skip physics steps, and a restart at qpos0 of worlds that fell; nothing is observed."""
    import mujoco
    import warp as wp

    wp.config.log_level = wp.LOG_WARNING  # said before MuJoCo Warp starts it
    import mujoco_warp as mjw

    from peers import warp_kernels

    model, skip, healthy = models.load(robot, pgs=False), models.frame_skip(robot), models.healthy_height(robot)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    nconmax, njmax = SIZES[robot]
    root, lowest, highest = healthy or (-1, 0.0, 0.0)
    device = wp.get_device("cpu" if backend == "cpu" else "cuda:0")
    start = time.perf_counter()
    with wp.ScopedDevice(device):
        m = mjw.put_model(model)
        d = mjw.put_data(model, data, nworld=num_envs, nconmax=nconmax, njmax=njmax)
        low, high = (wp.array(bound, dtype=wp.float32) for bound in model.actuator_ctrlrange.T)
        seed, qpos0 = wp.zeros(1, dtype=wp.int32), wp.array(model.qpos0, dtype=wp.float32)

        def step() -> None:
            wp.launch(warp_kernels.draw_controls, (num_envs, model.nu), [seed, low, high, d.ctrl])
            for _ in range(skip):
                mjw.step(m, d)
            arguments = [seed, root, lowest, highest, qpos0, d.qpos, d.qvel, d.qacc_warmstart]
            wp.launch(warp_kernels.reset_fallen, num_envs, arguments)

        step()
        graph = None
        if device.is_cuda:
            with wp.ScopedCapture() as capture:
                step()
            graph = capture.graph
        wp.synchronize_device(device)
    compile_seconds = time.perf_counter() - start

    def work(units: int) -> None:
        with wp.ScopedDevice(device):
            for _ in range(units):
                if graph is None:
                    step()
                else:
                    wp.capture_launch(graph)
            wp.synchronize_device(device)

    def check() -> None:
        if not (np.isfinite(d.qpos.numpy()).all() and np.isfinite(d.qvel.numpy()).all()):
            raise RuntimeError("qpos or qvel are not finite")
        kinds = mjw.OverflowType
        lost = int(np.bitwise_or.reduce(d.overflow.numpy()))  # of all steps so far
        if lost & (kinds.NEFC | kinds.NJMAX_NNZ | kinds.BROADPHASE | kinds.NARROWPHASE):
            raise RuntimeError(f"nconmax={nconmax} or njmax={njmax} is too small: {kinds(lost)!r}")

    work(2)
    sample = paced(work, num_envs, SECONDS[backend])
    reset = "none" if healthy is None else "root height"
    detail = {**models.detail(model, robot, reset), "nconmax": nconmax, "njmax": njmax, "graph": graph is not None}
    return Prepared(sample, check, num_envs, compile_seconds, detail)


PEERS = [Peer("mujoco-warp", "mujoco-warp", ("mujoco_warp", "warp"), prepare)]
