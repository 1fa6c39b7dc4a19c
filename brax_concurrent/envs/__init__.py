"""What is simulated and how it is scored."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

from brax_concurrent.envs.arrays import resolve_backend
from brax_concurrent.envs.base import Env
from brax_concurrent.envs.mixed import MixedEnv, MixedState, Robots, make_mixed
from brax_concurrent.envs.own_task import AnyTask, Fields, Noise, Task
from brax_concurrent.envs.registry import check_arguments, list_envs, make_task, nearest
from brax_concurrent.envs.state import State
from brax_concurrent.envs.trace import make_tracer
from brax_concurrent.scheduler.schedule import Schedule

__all__ = ["Env", "Fields", "MixedEnv", "MixedState", "Noise", "State", "Task", "list_envs", "make"]


@overload
def make(
    name: str | AnyTask,
    num_envs: int = 1,
    *,
    backend: str = "auto",
    scheduler: str = "auto",
    granularity: str = "auto",
    window: int | None = None,
    streams: int | None = None,
    envs_per_task: int | None = None,
    policy: str = "oldest",
    regroup: bool | None = None,
    dtype: str = "float32",
    autoreset: bool = True,
    threads: int = 0,
    per_env: Sequence[str] = (),
    max_episode_steps: int | None = None,
    nconmax: int | None = None,
    trace: str | os.PathLike[str] | None = None,
    **task_arguments: Any,
) -> Env: ...


@overload
def make(name: Robots, **settings: Any) -> MixedEnv: ...


def make(
    name: str | AnyTask | Robots,
    num_envs: int = 1,
    *,
    backend: str = "auto",
    scheduler: str = "auto",
    granularity: str = "auto",
    window: int | None = None,
    streams: int | None = None,
    envs_per_task: int | None = None,
    policy: str = "oldest",
    regroup: bool | None = None,
    dtype: str = "float32",
    autoreset: bool = True,
    threads: int = 0,
    per_env: Sequence[str] = (),
    max_episode_steps: int | None = None,
    nconmax: int | None = None,
    trace: str | os.PathLike[str] | None = None,
    **task_arguments: Any,
) -> Env | MixedEnv:
    """A batch of environments, of one robot or of several.

    Args:
        name: one of `list_envs()`, the alias "cheetah", or a Task of your own (docs/tasks.md). Or a dict of different
            robots, for a MixedEnv: by name the num_envs, (num_envs, dict of task arguments), or, under any name,
            (num_envs, Task): `{"ant": 2048, "humanoid": (512, {"frame_skip": 3}), "mine": (64, MyTask())}`.
        num_envs: environments in the batch, at least 1; not with a dict, which says it for each robot.
        backend: "cpu", "cuda" or "auto" (CUDA where there is a GPU that JAX uses, else the CPU).
        scheduler: how the tasks of a step are put in order. "serial": program order. "sw": through an out-of-order
            window, independent tasks at once: on several CUDA streams, or on the CPU on its threads. "hw": through
            windows of the workers themselves, in one kernel that stays on the GPU, or of each CPU thread. "graph" (CUDA
            only): a CUDA Graph with the step's true branches. All give the same bits. "auto": what `bc.tune` measured
            best here, else "serial"; for different robots on a GPU "sw".
        granularity: one task for each stage of the physics ("stage"), for each physics step ("substep") or for a
            whole control step ("step"), bit for bit the same; "auto": what `bc.tune` measured best, here or elsewhere.
        window: slots of the windows of "sw" and "hw", 1 to 64 ("hw" on a GPU: 32); 1: program order. Default 32.
        streams: CUDA streams of "sw", 1 to 16, default 8.
        envs_per_task: environments of one task on CUDA, a multiple of 32; 0: all ("hw": by their number). CPU: 32.
        policy, regroup: of "hw", which ready task runs first, and whether environments with similar work are put
            side by side (they keep their places in all arrays); see scheduler/schedule.py. With regroup=True "auto" is
            "hw".
        dtype: "float32", or "float64" (with `jax_enable_x64`). autoreset: whether `step` resets environments that
            ended, each to a fresh random state.
        threads: CPU threads at most; 0: all cores.
        per_env: model quantities that differ between environments, e.g. ("geom_friction", "body_mass"): pass their
            values to `reset`. They act as if that field of MjModel were changed; what MuJoCo's compiler derives from
            it (`body_subtreemass`, `dof_invweight0`, ...) stays, but can be named here too.
        max_episode_steps: control steps until truncation; None: the task's, 1000.
        nconmax: contacts kept per environment; None: the model's default (kernels/model.py). What does not fit is
            counted in `state.info["contacts_lost"]`.
        trace: a file for the timeline of the control steps' tasks, which `env.write_trace()` writes, or else the end of
            the process; see "Timeline" in docs/performance.md. None: the file that BRAX_CONCURRENT_TRACE names in the
            environment, else nothing is recorded, which costs nothing.
        task_arguments: of the task's constructor, those of Gymnasium's v5 environment.

    Raises:
        ValueError, TypeError: an unknown name or argument, or a bad value; the message names it.
    """
    given = locals()
    common: dict[str, Any] = {setting: given[setting] for setting in _SETTINGS}
    limits = {"max_episode_steps": max_episode_steps, "nconmax": nconmax}
    if isinstance(name, Mapping):
        _check_nothing_beside_a_dict(num_envs, task_arguments)
        common |= _one_schedule(common)
        return make_mixed(name, _make_one, common | limits, make_tracer(trace, " and ".join(map(str, name))))
    task = _task(name, limits, task_arguments, _ARGUMENTS)
    return Env(task, num_envs, **common, tracer=make_tracer(trace, task.name))


_SETTINGS = (
    *("backend", "scheduler", "granularity", "window", "streams", "envs_per_task", "dtype", "autoreset", "threads"),
    *("policy", "regroup", "per_env"),
)
_ARGUMENTS = ("num_envs", *_SETTINGS, "max_episode_steps", "nconmax", "trace")  # of make but for the task's


def _check_nothing_beside_a_dict(num_envs: int, task_arguments: Iterable[str]) -> None:
    if num_envs != 1 or task_arguments:
        other = [*(["num_envs"] if num_envs != 1 else []), *task_arguments]
        hint = "".join(nearest(argument, _ARGUMENTS) for argument in task_arguments)
        raise TypeError(
            f"a dict has each robot's arguments, as NAME: (num_envs, arguments); got {other} beside it{hint}"
        )


def _one_schedule(common: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule of all robots of a batch, where it is not said: not what is best for one of them."""
    chosen = {name: getattr(Schedule, name) for name in ("window", "streams", "envs_per_task") if common[name] is None}
    on_gpu = resolve_backend(common["backend"]) == "cuda"
    if common["scheduler"] == "auto":
        chosen["scheduler"] = "hw" if common["regroup"] is True else "sw" if on_gpu else "serial"
    if common["regroup"] is None and not on_gpu:
        chosen["regroup"] = False
    return chosen


def _make_one(
    name: str | AnyTask, num_envs: int, *, max_episode_steps: int | None, nconmax: int | None, **arguments: Any
) -> Env:
    """One robot's environment of a mixed batch, which is not recorded by itself."""
    settings = {setting: arguments.pop(setting) for setting in _SETTINGS}
    limits = {"max_episode_steps": max_episode_steps, "nconmax": nconmax}
    return Env(_task(name, limits, arguments, ("per_env", *limits)), num_envs, **settings)


def _task(
    name: str | AnyTask, limits: Mapping[str, int | None], arguments: Mapping[str, Any], of_make: Sequence[str]
) -> AnyTask:
    """The task that `make` means.

    Args:
        name, arguments: of the task.
        limits: attributes of it, None where it keeps its own.
        of_make: arguments that the user could have given besides.
    """
    limits = {limit: value for limit, value in limits.items() if value is not None}
    if isinstance(name, AnyTask):
        if arguments or limits:
            hint = "".join(nearest(argument, of_make) for argument in arguments)
            raise TypeError(f"a Task has its arguments already, got {[*arguments, *limits]}{hint}")
        return name
    kind: Any = name
    if isinstance(kind, type) and issubclass(kind, AnyTask):
        raise TypeError(f"name: expected an instance of a Task, such as {kind.__name__}(), got the class")
    check_arguments(name, arguments, of_make)
    task = make_task(name, **arguments)
    for limit, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{limit}: expected a whole number of at least 1, got {value!r}")
        setattr(task, limit, value)
    return task
