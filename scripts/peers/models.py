"""The robots' MJCF files as the other engines get them, and when an episode of theirs ends."""

from __future__ import annotations

from typing import Any

import mujoco

from brax_concurrent.envs.registry import make_task
from brax_concurrent.envs.task import ASSETS

ROOT_HEIGHT = {"ant": 2, "humanoid": 2, "walker2d": 1}  # its place in qpos


def load(robot: str, *, pgs: bool) -> mujoco.MjModel:
    """The robot's own file with the file's own options.

    Args:
        robot: one of ours.
        pgs: whether the engine has the PGS solver; where not, it is Newton with MuJoCo's default of 100 iterations.
    """
    model = mujoco.MjModel.from_xml_path(str(ASSETS / f"{robot}.xml"))
    if not pgs and model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
        model.opt.solver, model.opt.iterations = mujoco.mjtSolver.mjSOL_NEWTON, 100
    return model


def frame_skip(robot: str) -> int:
    """Physics steps of a control step."""
    return make_task(robot).frame_skip


def healthy_height(robot: str) -> tuple[int, float, float] | None:
    """(place of the root's height in qpos, lowest, highest) of a running episode; None: the robot cannot fall."""
    if robot not in ROOT_HEIGHT:
        return None
    low, high = make_task(robot).healthy_z_range  # type: ignore[attr-defined]  # those three have it
    return ROOT_HEIGHT[robot], low, high


def detail(model: mujoco.MjModel, robot: str, reset: str) -> dict[str, Any]:
    """The settings, for the record."""
    option = model.opt
    return {
        "timestep": f"{option.timestep:g}",
        "frame_skip": frame_skip(robot),
        "integrator": mujoco.mjtIntegrator(option.integrator).name.removeprefix("mjINT_").lower(),
        "solver": mujoco.mjtSolver(option.solver).name.removeprefix("mjSOL_").lower(),
        "iterations": int(option.iterations),
        "ls_iterations": int(option.ls_iterations),
        "reset": reset,
        "observation": False,
    }
