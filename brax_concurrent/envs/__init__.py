"""What is simulated and how it is scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from brax_concurrent.envs.base import Env
from brax_concurrent.envs.registry import list_envs, make_task
from brax_concurrent.envs.state import State
from brax_concurrent.envs.task import Outcome, Task

__all__ = ["Env", "Outcome", "State", "Task", "list_envs", "make"]


def make(
    name: str | Task,
    num_envs: int = 1,
    *,
    backend: str = "auto",
    scheduler: str = "serial",
    granularity: str = "auto",
    dtype: str = "float32",
    autoreset: bool = True,
    threads: int = 0,
    per_env: Sequence[str] = (),
    max_episode_steps: int | None = None,
    nconmax: int | None = None,
    **task_arguments: Any,
) -> Env:
    """A batch of environments.

    Args:
        name: one of `list_envs()`, the alias "cheetah", or a Task of your own.
        num_envs: environments in the batch, at least 1.
        backend: "cpu", "cuda" or "auto" (CUDA where there is a GPU that JAX uses, else the CPU).
        scheduler: "serial", program order.
        granularity: one task for each stage of the physics ("stage"), for each physics step ("substep") or for a
            whole control step ("step"). The results are the same, bit for bit; "auto" takes what measured best.
        dtype: "float32", or "float64" (with `jax_enable_x64`; on the CPU).
        autoreset: whether `step` resets environments that ended, each to a fresh random state.
        threads: CPU threads at most; 0: all cores.
        per_env: model quantities that differ between environments, e.g. ("geom_friction", "body_mass"): pass their
            values to `reset`. They act as if that field of MjModel were changed; what MuJoCo's compiler derives from
            it (`body_subtreemass`, `dof_invweight0`, ...) stays, but can be named here too.
        max_episode_steps: control steps until truncation; None: the task's, 1000.
        nconmax: contacts kept per environment; None: the model's default (kernels/model.py). What does not fit is
            counted in `state.info["contacts_lost"]`.
        task_arguments: of the task's constructor, those of Gymnasium's v5 environment.

    Raises:
        ValueError, TypeError: an unknown name or argument, or a bad value; the message names it.
    """
    if isinstance(name, Task):
        given = [
            *task_arguments,
            *(["max_episode_steps"] if max_episode_steps else []),
            *(["nconmax"] if nconmax else []),
        ]
        if given:
            raise TypeError(f"a Task has its arguments already, got {given}")
        task = name
    else:
        task = make_task(name, **task_arguments)
        for limit, value in (("max_episode_steps", max_episode_steps), ("nconmax", nconmax)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{limit}: expected a whole number of at least 1, got {value!r}")
            setattr(task, limit, value)
    return Env(
        task,
        num_envs,
        backend=backend,
        scheduler=scheduler,
        granularity=granularity,
        dtype=dtype,
        autoreset=autoreset,
        threads=threads,
        per_env=per_env,
    )
