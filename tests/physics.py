"""Random states of robots, MuJoCo's answers to them, and how a kernel's answers are compared with these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

import brax_concurrent
from brax_concurrent.kernels.kernel import Kernel
from brax_concurrent.kernels.layout import Field, physics_fields
from brax_concurrent.kernels.model import Model, load_model
from brax_concurrent.kernels.reference import ReferenceWorld
from brax_concurrent.kernels.specialize import ModelView

ROBOTS = ("ant", "grasp", "halfcheetah", "humanoid", "walker2d")
ASSETS = Path(brax_concurrent.__file__).parent / "envs" / "assets"

# float64 against float64, through sums of at most some hundred terms and inertia matrices with condition
# numbers up to some ten thousand: 1e-12 is what rounding explains. What is wrong in a formula is wrong by
# more than 1e-3.
TOLERANCE = 1e-9

FREE, SLIDE, HINGE = 0, 2, 3

MujocoCall = Callable[[mujoco.MjModel, mujoco.MjData], None]


@dataclasses.dataclass(frozen=True)
class Robot:
    """A robot for MuJoCo (`mj`) and for the kernels (`model`, and the `view` of it that kernels get)."""

    mj: mujoco.MjModel
    model: Model
    view: ModelView
    fields: Mapping[str, Field]


@dataclasses.dataclass(frozen=True)
class States:
    """Inputs of a physics step, each of shape (num, ...)."""

    qpos: np.ndarray
    qvel: np.ndarray
    ctrl: np.ndarray
    qacc_warmstart: np.ndarray
    mocap_pos: np.ndarray
    mocap_quat: np.ndarray

    def __len__(self) -> int:
        return len(self.qpos)

    def items(self) -> Iterable[tuple[str, np.ndarray]]:
        return ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))


def robot(source: str | mujoco.MjModel, nconmax: int | None = None) -> Robot:
    """Load one of ROBOTS (one object for all who ask: do not change it), MJCF text or a compiled model."""
    if isinstance(source, str) and source in ROBOTS and nconmax is None:
        return _shipped(source)
    mj = compiled(source) if isinstance(source, str) else source
    model = load_model(mj, nconmax=nconmax)
    return Robot(mj, model, ModelView(model), physics_fields(model))


def compiled(source: str, **options: Any) -> mujoco.MjModel:
    """Compile one of ROBOTS or MJCF text, and set members of `mj.opt`."""
    if source in ROBOTS:
        mj = mujoco.MjModel.from_xml_path(str(ASSETS / f"{source}.xml"))
    else:
        mj = mujoco.MjModel.from_xml_string(source)
    for option, value in options.items():
        setattr(mj.opt, option, value)
    return mj


@cache
def _shipped(name: str) -> Robot:
    return robot(compiled(name))


# ---- States


def random_states(mj: mujoco.MjModel, num: int, seed: int = 0) -> States:
    """Poses of all kinds, each with a speed and a control.

    A third of the states are near qpos0, a third have any orientation and joint angles inside their limits, a
    third also go beyond the limits. Two thirds are then lifted or lowered until the lowest geom is within 5
    cm of touching z = 0: standing, sitting, lying. Speeds run from slow to 10 rad/s, controls beyond their
    range. Quaternions are not normalised, as after a reset with noise.
    """
    rng = np.random.default_rng(seed)
    data = mujoco.MjData(mj)
    qpos = np.tile(mj.qpos0, (num, 1))
    for s in range(num):
        _randomise(mj, qpos[s], kind=s % 3, rng=rng)
    mocap_pos = np.tile(data.mocap_pos, (num, 1, 1)) + rng.normal(size=(num, mj.nmocap, 3)) * 0.3
    mocap_quat = np.tile(data.mocap_quat, (num, 1, 1)) + rng.normal(size=(num, mj.nmocap, 4)) * 0.3
    for s in range(num):
        if s % 9 < 6:
            data.mocap_pos[:], data.mocap_quat[:] = mocap_pos[s], mocap_quat[s]
            _put_on_floor(mj, data, qpos[s], gap=rng.uniform(-0.05, 0.05))
    speed = 10 ** rng.uniform(-2, 1, size=(num, 1))
    return States(
        qpos=qpos,
        qvel=rng.normal(size=(num, mj.nv)) * speed,
        ctrl=_random_controls(mj, num, rng),
        qacc_warmstart=rng.normal(size=(num, mj.nv)),
        mocap_pos=mocap_pos,
        mocap_quat=mocap_quat,
    )


def _randomise(mj: mujoco.MjModel, qpos: np.ndarray, kind: int, rng: np.random.Generator) -> None:
    for j in range(mj.njnt):
        q = mj.jnt_qposadr[j]
        if mj.jnt_type[j] == FREE:
            qpos[q : q + 3] += rng.normal(size=3) * (0.05 if kind == 0 else 0.5)
            turn = rng.normal(size=4) * (0.1 if kind == 0 else 1.0)
            qpos[q + 3 : q + 7] = qpos[q + 3 : q + 7] * (kind == 0) + turn
        elif kind == 0:
            qpos[q] += rng.normal() * 0.1
        elif mj.jnt_limited[j]:
            low, high = mj.jnt_range[j]
            beyond = 0.1 * (high - low) * (kind == 2)
            qpos[q] = rng.uniform(low - beyond, high + beyond)
        else:
            qpos[q] += rng.uniform(-1, 1) * (np.pi if mj.jnt_type[j] == HINGE else 0.5)


def _put_on_floor(mj: mujoco.MjModel, data: mujoco.MjData, qpos: np.ndarray, gap: float) -> None:
    """Lift each root that can be lifted until the lowest point of what it carries is `gap` above z = 0."""
    data.qpos[:] = qpos
    mujoco.mj_kinematics(mj, data)
    for j in range(mj.njnt):
        body, q = mj.jnt_bodyid[j], mj.jnt_qposadr[j]
        free = mj.jnt_type[j] == FREE
        lift = mj.jnt_type[j] == SLIDE and mj.body_parentid[body] == 0 and abs(data.xaxis[j, 2]) > 0.99
        if free or lift:
            bottoms = [_bottom(mj, data, g) for g in range(mj.ngeom) if mj.body_rootid[mj.geom_bodyid[g]] == body]
            if bottoms:
                up = 1.0 if free else np.sign(data.xaxis[j, 2])
                qpos[q + 2 * free] += (gap - min(bottoms)) * up


def _bottom(mj: mujoco.MjModel, data: mujoco.MjData, g: int) -> float:
    half = mj.geom_size[g, 1] * abs(data.geom_xmat[g, 8]) if mj.geom_type[g] == mujoco.mjtGeom.mjGEOM_CAPSULE else 0.0
    return float(data.geom_xpos[g, 2] - mj.geom_size[g, 0] - half)


def _random_controls(mj: mujoco.MjModel, num: int, rng: np.random.Generator) -> np.ndarray:
    low, high = np.where(mj.actuator_ctrllimited[:, None], mj.actuator_ctrlrange, (-1.0, 1.0)).reshape(-1, 2).T
    return low + (high - low) * rng.uniform(-0.25, 1.25, size=(num, mj.nu))


# ---- MuJoCo's answers


def mujoco_fields(
    mj: mujoco.MjModel,
    states: States,
    names: Iterable[str],
    call: MujocoCall = mujoco.mj_forward,
) -> dict[str, np.ndarray]:
    """Fields by name, (num, *shape), after `call` on each state; qM and qLD in the kernels' order."""
    data = mujoco.MjData(mj)
    rows: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for s in range(len(states)):
        for name, value in states.items():
            getattr(data, name)[:] = value[s]
        call(mj, data)
        for name, found in rows.items():
            found.append(_field(mj, data, name))
    return {name: np.array(found) for name, found in rows.items()}


def _field(mj: mujoco.MjModel, data: mujoco.MjData, name: str) -> np.ndarray:
    if name == "qM":
        dense = dense_inertia(mj, data)
        return np.array([dense[i, j] for i, j in _inertia_order(mj)])
    if name == "qLD":
        stored = {
            (i, int(mj.M_colind[adr])): data.qLD[adr]
            for i in range(mj.nv)
            for adr in range(mj.M_rowadr[i], mj.M_rowadr[i] + mj.M_rownnz[i])
        }
        return np.array([stored.get(ij, 0.0) for ij in _inertia_order(mj)])
    return np.array(getattr(data, name))


def dense_inertia(mj: mujoco.MjModel, data: mujoco.MjData) -> np.ndarray:
    dense = np.zeros((mj.nv, mj.nv))
    mujoco.mj_fullM(mj, data, dense)
    return dense


def _inertia_order(mj: mujoco.MjModel) -> list[tuple[int, int]]:
    """(row, column) of each entry of qM: from each dof up through its ancestors."""
    order = []
    for i in range(mj.nv):
        j = i
        while j >= 0:
            order.append((i, j))
            j = int(mj.dof_parentid[j])
    return order


# ---- Comparison


def world_of(robot: Robot, states: States) -> ReferenceWorld:
    """A reference world that holds the states and nothing else."""
    world = ReferenceWorld(robot.fields, len(states))
    for name, value in states.items():
        if value.size:
            world.put(name, value)
    return world


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference in any state, over the field's size in that state.

    A field's size is its largest absolute component. Components are not compared each with itself, because
    those that cancel to nearly 0 (a coordinate of a planar robot) have no digits of their own. Where a whole
    field nearly cancels, a thousandth of its largest size over all states takes the place of its size.

    Args:
        found, expected: shape (num, ...). NaN anywhere is an infinite error.
    """
    if found.shape != expected.shape:
        raise ValueError(f"shapes: expected {expected.shape}, got {found.shape}")
    if found.size == 0:
        return 0.0
    found, expected = (x.reshape(len(x), -1) for x in (found, expected))
    difference = np.abs(found - expected).max(axis=1)
    size = np.abs(expected).max(axis=1)
    size = np.maximum(size, 1e-3 * size.max())
    if size.max() == 0:  # the field is 0 everywhere
        size[:] = 1.0
    error = difference / size
    return float(np.inf) if np.isnan(error).any() else float(error.max())


def errors(world: ReferenceWorld, expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Relative error by field name. Fields have at least one component, even where MuJoCo has none."""
    found = {}
    for name, value in expected.items():
        got = world.get(name)
        found[name] = relative_error(got.reshape(len(got), -1)[:, : value[0].size], value.reshape(len(value), -1))
    return found


def stage_errors(
    robot: Robot, kernel: Kernel, states: States, after: MujocoCall = mujoco.mj_forward
) -> dict[str, float]:
    """Run one kernel on MuJoCo's own inputs, its outputs poisoned before, and compare all that it writes.

    Args:
        robot: the robot.
        kernel: a kernel that reads states and what mj_forward computes.
        states: the states.
        after: what MuJoCo does to the states to compute the kernel's outputs.
    """
    inputs = {name for name in kernel.reads if not hasattr(states, name)}
    expected = mujoco_fields(robot.mj, states, inputs)
    expected |= mujoco_fields(robot.mj, states, kernel.writes, after)
    world = world_of(robot, states)
    for name in inputs:
        if expected[name].size:
            world.put(name, expected[name].reshape(len(states), *robot.fields[name].shape))
    world.poison(*(name for name in kernel.writes if name not in kernel.reads))
    world.run(kernel, robot.view)
    return errors(world, {name: expected[name] for name in kernel.writes})


def assert_agrees(found: Mapping[str, float], tolerance: float = TOLERANCE) -> None:
    """All relative errors are within the tolerance; those that are not are named."""
    wrong = {name: error for name, error in found.items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance:g}: {wrong}"
