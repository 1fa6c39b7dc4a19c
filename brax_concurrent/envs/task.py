"""What an environment is, apart from its physics: how it is observed, scored, ended and reset.

A task's methods are kernel code in the language of docs/lanes.md: scalars of one environment. They are
compiled together with the physics; nothing of them runs in Python at run time. Users write theirs in JAX
(own_task.py), which own_kernels.py brings into this form.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from brax_concurrent.kernels.model import Model, load_model
from brax_concurrent.kernels.ops import maximum, minimum, sqrt
from brax_concurrent.kernels.vec import dot

ASSETS = Path(__file__).parent / "assets"

Memory = Mapping[str, list[Any]]
"""What `KernelTask.memory` names: a list of scalars for each name."""


@dataclass(frozen=True)
class Outcome:
    """What a step earned.

    Attributes:
        reward: scalar.
        terminated: boolean scalar.
        metrics: parts of the reward, by the names in `KernelTask.metrics`.
        info: further numbers, by the names in `KernelTask.info`.
    """

    reward: Any
    terminated: Any
    metrics: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)


class KernelTask:
    """Base class of tasks. A subclass sets the attributes in its constructor and overrides the methods.

    Attributes:
        name: registered name.
        model: MJCF path, XML string or mujoco.MjModel.
        frame_skip: physics steps per control step.
        observation_size: entries of an observation.
        observation_structure: the parts of an observation in order and the entries of each, as Gymnasium's;
            "skipped_qpos" counts what is left out.
        action_size: entries of an action.
        action_low, action_high: `(action_size,)` bounds that the action space states (values outside are not
            refused: the engine clamps the control as MuJoCo does).
        max_episode_steps: control steps until truncation.
        memory: names of per-environment numbers that one step leaves to the next, and how many of each.
        metrics, info: names of scalars that `outcome` returns. "NAME[0]", "NAME[1]", ... are the entries of a
            vector NAME.
        observes: extra kernels that an observation needs after the physics, e.g. ("rne_post_constraint",).
        solves_at_reset: whether observations of a new state need its acceleration or forces.
        nconmax: contacts kept per environment, None for the model's default.
    """

    name: str = ""
    model: Any = None
    frame_skip: int = 1
    observation_size: int = 0
    observation_structure: Mapping[str, int] = {}
    action_size: int = 0
    action_low: np.ndarray
    action_high: np.ndarray
    max_episode_steps: int = 1000
    memory: Mapping[str, int] = {}
    metrics: Sequence[str] = ()
    info: Sequence[str] = ()
    observes: Sequence[str] = ()
    solves_at_reset: bool = False
    nconmax: int | None = None

    def control(self, m: Any, w: Any, action: list[Any], memory: Memory) -> None:
        """Write `w.ctrl` (and `w.mocap_pos`, `w.mocap_quat`) from the action. Default: ctrl = action."""
        for i, a in enumerate(action):
            w.ctrl[i] = a

    def observation(self, m: Any, w: Any, memory: Memory) -> list[Any]:
        """The observation of the state in `w`, `observation_size` scalars.

        After a step the derived fields (xpos, cvel, contacts, ...) are those of the physics' last evaluation,
        as in MuJoCo. With Euler that is the state one physics step before qpos and qvel, with Runge-Kutta an
        estimate of them. After a reset they are those of the new state, contact wrenches being 0. `memory`:
        what `remember` or `remember_reset` gave.
        """
        raise NotImplementedError

    def outcome(self, m: Any, w: Any, action: list[Any], before: Memory, after: Memory) -> Outcome:
        """Reward and termination of a step. `before` and `after`: the memory at its start and end."""
        raise NotImplementedError

    def remember(self, m: Any, w: Any, before: Memory, random: Any) -> dict[str, list[Any]]:
        """The memory after a step, from `w`. `random.uniform()` and `random.normal()` draw numbers."""
        return {}

    def reset(self, m: Any, w: Any, random: Any) -> None:
        """Write a fresh `w.qpos` and `w.qvel` (and mocap fields); `random` draws. ctrl, qacc_warmstart: 0."""
        raise NotImplementedError

    def remember_reset(self, m: Any, w: Any, random: Any) -> dict[str, list[Any]]:
        """The memory after a reset, from `w` (derived fields hold the new state)."""
        return {}

    def identity(self) -> str | None:
        """What this task is, given the package's source; None if that cannot be said (a user's own class).

        Two tasks of equal identity, on models of equal fingerprint, have the same kernels.
        """
        kind = type(self)
        arguments = getattr(self, "__dataclass_fields__", None)
        if kind.__module__.split(".")[0] != __name__.split(".")[0] or arguments is None:
            return None
        names = (*arguments, "max_episode_steps", "nconmax")
        values = {name: getattr(self, name) for name in names if name != "xml_file"}
        return f"{kind.__module__}.{kind.__qualname__}{sorted(values.items())!r}"

    def _adopt_model(self, xml_file: Any, default: str) -> Model:
        """Set what the model says: `model`, `action_size`, `action_low` and `action_high`.

        Args:
            xml_file: the constructor's argument: `default` for the file that comes with the package (named
                after the task), else the path of an MJCF file, MJCF text or a compiled model.
            default: Gymnasium's name of the file.

        Raises:
            FileNotFoundError, ValueError, TypeError: see kernels.model.load_model.
        """
        self.model = _model_source(xml_file, default, ASSETS / f"{self.name}.xml")
        model = load_model(self.model)
        self.action_size = model.nu
        bounds = np.where(model.actuator_ctrllimited[:, None], model.actuator_ctrlrange, (-np.inf, np.inf))
        self.action_low, self.action_high = bounds.T.astype(np.float32)
        return model

    def _observe(self, **parts: int) -> None:
        """Set `observation_structure` and `observation_size` from the entries of each part."""
        self.observation_structure = parts
        self.observation_size = sum(n for name, n in parts.items() if name != "skipped_qpos")


def _model_source(xml_file: Any, default: str, own: Path) -> Any:
    is_text = isinstance(xml_file, str) and xml_file.lstrip().startswith("<")
    if is_text or isinstance(xml_file, mujoco.MjModel):
        return xml_file
    if not isinstance(xml_file, (str, os.PathLike)):
        given = type(xml_file).__name__
        raise TypeError(f"xml_file: expected an MJCF path, MJCF text or a mujoco.MjModel, got {given}")
    if xml_file == default:
        return str(own)
    path = Path(xml_file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"xml_file: expected {default!r} (the file of this package), MJCF text or the path of an MJCF "
            f"file, got {str(xml_file)!r}"
        )
    return str(path)


# ---- For constructors: checks of arguments -----------------------------------------------------------------


def check_arguments(task: Any) -> None:
    """Check a task's arguments by their declared types, and make plain Python values of them.

    float: a finite number. int: a whole number of at least 1. bool. tuple[float, float]: a range (low, high)
    with low <= high, either may be infinite. Arguments of other types are left to the task.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an argument that is out of range.
    """
    for argument in dataclasses.fields(task):
        if argument.type in _CHECKS:
            value = _CHECKS[argument.type](argument.name, getattr(task, argument.name))
            setattr(task, argument.name, value)


def check_at_least(task: Any, low: float, *names: str) -> None:
    """Raise ValueError where one of the named arguments is below `low`."""
    for name in names:
        if getattr(task, name) < low:
            raise ValueError(f"{name}: expected at least {low:g}, got {getattr(task, name)!r}")


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def _number(name: str, value: Any) -> float:
    if not _is_real(value):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return float(value)


def _whole_number(name: str, value: Any) -> int:
    if not _is_real(value) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value!r}")
    return int(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def _range(name: str, value: Any) -> tuple[float, float]:
    ends = tuple(value) if isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str) else ()
    if len(ends) != 2 or not all(_is_real(x) for x in ends):
        raise TypeError(f"{name}: expected two numbers (low, high), got {value!r}")
    if not ends[0] <= ends[1]:
        raise ValueError(f"{name}: expected low <= high, got {value!r}")
    return float(ends[0]), float(ends[1])


_CHECKS: dict[Any, Callable[[str, Any], Any]] = {
    "float": _number,
    "int": _whole_number,
    "bool": _flag,
    "tuple[float, float]": _range,
}


def body_id(model: Model, argument: str, body: Any) -> int:
    """The id of a body.

    Args:
        model: the Model.
        argument: what the constructor calls it.
        body: name or id.

    Raises:
        TypeError, ValueError: neither a name nor an id of the model.
    """
    if isinstance(body, str):
        if body not in model.body_names:
            raise ValueError(f"{argument}: expected one of {', '.join(model.body_names)}, got {body!r}")
        return model.body_names.index(body)
    if not _is_real(body) or not isinstance(body, numbers.Integral):
        raise TypeError(f"{argument}: expected the name or id of a body, got {body!r}")
    number = int(body)
    if not 0 <= number < model.nbody:
        raise ValueError(f"{argument}: expected a body id from 0 to {model.nbody - 1}, got {body!r}")
    return number


def require_free_root(model: Model) -> None:
    """Raise ValueError unless the first joint is free: qpos begins with a position and a quaternion."""
    if model.njnt == 0 or model.jnt_type[0] != int(mujoco.mjtJoint.mjJNT_FREE):
        raise ValueError(f"xml_file: expected a model whose first joint is free, got {model!r}")


# ---- For kernel code ---------------------------------------------------------------------------------------


def sum_of_squares(scalars: Iterable[Any]) -> Any:
    """The sum of x * x, 0 for none."""
    xs = list(scalars)
    return dot(xs, xs) if xs else 0.0


def limit(x: Any, low: float, high: float) -> Any:
    """`x` limited to a constant range; an infinite end costs nothing."""
    x = maximum(x, low) if low > -math.inf else x
    return minimum(x, high) if high < math.inf else x


def distance_from_origin(w: Any) -> Any:
    """Horizontal distance of a free root joint from the origin, m."""
    return sqrt(w.qpos[0] * w.qpos[0] + w.qpos[1] * w.qpos[1])


def reset_qpos(m: Any, w: Any, random: Any, scale: float) -> None:
    """qpos = qpos0 + uniform noise on (-scale, scale); quaternions are not normalised, as in Gymnasium."""
    for i in range(m.nq):
        w.qpos[i] = m.qpos0[i] + random.uniform(-scale, scale)


def reset_qvel_uniform(m: Any, w: Any, random: Any, scale: float) -> None:
    """Qvel uniform on (-scale, scale)."""
    for i in range(m.nv):
        w.qvel[i] = random.uniform(-scale, scale)


def reset_qvel_normal(m: Any, w: Any, random: Any, scale: float) -> None:
    """Qvel normal with standard deviation scale."""
    for i in range(m.nv):
        w.qvel[i] = scale * random.normal()
