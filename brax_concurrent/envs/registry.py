"""The tasks by name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from brax_concurrent.envs.ant import Ant
from brax_concurrent.envs.grasp import Grasp
from brax_concurrent.envs.halfcheetah import HalfCheetah
from brax_concurrent.envs.humanoid import Humanoid
from brax_concurrent.envs.task import KernelTask
from brax_concurrent.envs.walker2d import Walker2d

TASKS: dict[str, type[KernelTask]] = {task.name: task for task in (Ant, Grasp, HalfCheetah, Humanoid, Walker2d)}
ALIASES = {"cheetah": "halfcheetah"}

_RENDERING = (
    *("default_camera_config", "render_mode", "width", "height", "camera_id", "camera_name", "max_geom"),
    "visual_options",
)


def list_envs() -> list[str]:
    """The names that `make` knows, without aliases."""
    return sorted(TASKS)


def make_task(name: str, **arguments: Any) -> KernelTask:
    """A task by its name.

    Args:
        name: one of `list_envs()`, or "cheetah" for "halfcheetah".
        arguments: of the task's constructor: those of Gymnasium's v5 environment but for rendering.

    Raises:
        ValueError: there is no such task; the message has the names that are near.
        TypeError: the name is no string, or the task has no such argument; the message has those that it has.
    """
    check_arguments(name, arguments)
    return TASKS[_known(name)](**arguments)


def check_arguments(name: str, arguments: Iterable[str], of_make: Sequence[str] = ()) -> None:
    """Whether a task has arguments of these names.

    Args:
        name: see `make_task`.
        arguments: their names.
        of_make: what else could have been meant where the user gave them, for the message.

    Raises:
        ValueError, TypeError: see `make_task`.
    """
    valid = [field.name for field in dataclasses.fields(TASKS[_known(name)])]  # type: ignore[arg-type]  # dataclasses
    for argument in arguments:
        if argument not in valid:
            raise TypeError(_unknown_argument(name, argument, valid, of_make))


def nearest(argument: str, valid: Iterable[str]) -> str:
    """What may have been meant, in brackets for a message; nothing if none is near."""
    near = difflib.get_close_matches(argument, valid, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _known(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"name: expected the name of a task, got {name!r}")
    if name in TASKS:
        return name
    if name in ALIASES:
        return ALIASES[name]
    known = [*list_envs(), *ALIASES]
    base = name.lower().replace("_", "").split("-")[0]  # "Ant-v5", "half_cheetah"
    near = difflib.get_close_matches(base, known, n=2)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ValueError(f"name: there is no task {name!r}; {hint}known: {', '.join(known)}")


def _unknown_argument(name: str, argument: str, valid: Sequence[str], of_make: Sequence[str]) -> str:
    hint = nearest(argument, [*valid, *of_make])
    if argument in _RENDERING:
        hint = " (it is about rendering, which simulation has no part in)"
    besides = f"; of make: {', '.join(of_make)}" if of_make else ""
    return f"{name}: there is no argument {argument!r}{hint}; known: {', '.join(valid)}{besides}"
