"""The recipe of a physics step: which kernels, in which order."""

from __future__ import annotations

from typing import Any

from brax_concurrent.kernels.acceleration import acceleration
from brax_concurrent.kernels.actuation import actuation, passive
from brax_concurrent.kernels.bias import bias, velocity
from brax_concurrent.kernels.collision import collision
from brax_concurrent.kernels.constraint import constraints
from brax_concurrent.kernels.fuse import Choose, Repeat, unrolled
from brax_concurrent.kernels.inertia import factor_inertia, inertia
from brax_concurrent.kernels.integrate import check_state, euler, rk4
from brax_concurrent.kernels.kernel import Kernel
from brax_concurrent.kernels.kinematics import com, kinematics
from brax_concurrent.kernels.solver import solve


def forward(model: Any) -> list[Kernel]:
    """From (qpos, qvel, ctrl) to qacc, as `mj_forward`."""
    del model  # all models have the same stages; a stage without work is empty
    return [
        kinematics,
        com,
        inertia,
        factor_inertia,
        collision,
        velocity,
        bias,
        passive,
        actuation,
        acceleration,
        constraints,
        solve,
    ]


def physics_recipe(model: Any, rotation: str = "munthe-kaas") -> list[Kernel | Repeat | Choose]:
    """One step of the model's integrator, as `mj_step`.

    Args:
        model: the Model.
        rotation: see `integrate.rk4`; Euler has no use for it.
    """
    if model.opt.integrator == "euler":
        return [*forward(model), euler, check_state]
    return [Repeat(4, (*forward(model), Choose(rk4(rotation)))), check_state]


def physics_step(model: Any, rotation: str = "munthe-kaas") -> list[Kernel]:
    """The kernels of `physics_recipe` in program order."""
    return list(unrolled(physics_recipe(model, rotation)))


def observable(model: Any) -> list[Kernel]:
    """What can be observed of a state without solving: positions, contacts, velocities, actuation."""
    del model
    return [kinematics, com, collision, velocity, actuation]
