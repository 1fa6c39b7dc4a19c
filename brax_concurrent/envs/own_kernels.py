"""A user's task in the form of our own: its methods, traced by JAX, evaluated on the scalars of a lane."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brax_concurrent.backends.program import Value
from brax_concurrent.envs.fields import shown, visible_fields
from brax_concurrent.envs.jaxpr_operations import Scalars, filled
from brax_concurrent.envs.own_method import Method, Path, Supply
from brax_concurrent.envs.own_task import Fields, Task
from brax_concurrent.envs.task import KernelTask, Memory, Outcome
from brax_concurrent.kernels import step
from brax_concurrent.kernels.layout import physics_fields
from brax_concurrent.kernels.model import load_model
from brax_concurrent.kernels.ops import to_float, to_int

_STEPS = "before.time"  # memory: control steps since the episode began
_NOTHING: Memory = {}
_BEFORE_STEP = ("qpos", "qvel", "time")  # what is known before the physics


class OwnTask(KernelTask):
    """A `bc.Task` in the form that streams are built from.

    Args:
        task: the user's.
        dtype: "float32" or "float64".

    Raises:
        TypeError, ValueError: an attribute is not what it should be, a method is missing, or does not return what it
            should.
        UnsupportedOperationError: a method uses an operation of JAX that kernels do not have.
    """

    def __init__(self, task: Task, dtype: str):
        self._task, self._dtype = task, jnp.dtype(dtype)
        self._precision = "f64" if self._dtype == jnp.float64 else "f32"
        self._label = type(task).__name__
        for name in ("observation", "reward"):
            if getattr(type(task), name) is getattr(Task, name):
                raise TypeError(f"{self._label}: expected a method {name}, got none")
        self.name, self.model, self.nconmax = str(task.name), task.mj_model, task.nconmax
        self.frame_skip = self._whole("frame_skip")
        self.max_episode_steps = self._whole("max_episode_steps")
        self._model = load_model(self.model, nconmax=self.nconmax)
        self._fields = visible_fields(physics_fields(self._model))
        self._adopt_actions()
        self._trace()
        self._allot_memory()
        used = set().union(*(m.fields(a) for m in self._methods.values() for a in ("s", "before")))
        self.observes = ("rne_post_constraint",) if "cfrc_ext" in used else ()
        self.solves_at_reset = not self._after_reset() <= _known_after_reset(self._model)

    def identity(self) -> str:
        """See KernelTask.identity: what the methods compute says it."""
        attributes = (self.name, self.frame_skip, self.max_episode_steps, self.action_size, self._dtype.name)
        methods = {name: method.identity for name, method in self._methods.items()}
        return f"own {hashlib.sha256(repr((attributes, sorted(methods.items()), self.memory)).encode()).hexdigest()}"

    # -- what the attributes say -------------------------------------------------------------------------------------

    def _whole(self, name: str) -> int:
        value = getattr(self._task, name)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"{self._label}.{name}: expected a whole number of at least 1, got {value!r}")
        return int(value)

    def _adopt_actions(self) -> None:
        task, m, label = self._task, self._model, self._label
        own = type(task).control is not Task.control
        self.action_size = m.nu if task.action_size is None else self._whole("action_size")
        if not own and self.action_size != m.nu:
            raise ValueError(
                f"{label}.action_size: expected {m.nu}, one for each actuator, or a method control; "
                f"got {self.action_size}"
            )
        limited = m.actuator_ctrllimited[:, None]
        ends = np.where(limited, m.actuator_ctrlrange, (-np.inf, np.inf)).T
        if own:
            ends = np.array([[-1.0], [1.0]]) * np.ones(self.action_size)
        bounds = []
        for name, end in zip(("action_low", "action_high"), ends, strict=True):
            given = getattr(task, name)
            try:
                value = np.broadcast_to(np.asarray(end if given is None else given, np.float32), (self.action_size,))
            except (TypeError, ValueError):
                what = f"a number or {self.action_size} numbers"
                raise ValueError(f"{label}.{name}: expected {what}, got {given!r}") from None
            bounds.append(value.copy())
        self.action_low, self.action_high = bounds
        if not np.all(self.action_low <= self.action_high):
            raise ValueError(f"{label}.action_low: expected at most action_high, got {self.action_low.tolist()}")

    # -- what the methods say ----------------------------------------------------------------------------------------

    def _shape(self, *shape: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype or self._dtype)

    def _method(self, name: str, trees: Mapping[str, Any], noise: bool = False) -> Method:
        label = f"{self._label}.{name}"

        def fields(what: str) -> Callable[[Any], Fields]:
            return lambda tree: Fields(
                {k: v for k, v in tree.items() if k != "memory"}, tree.get("memory"), f"{label}: {what}"
            )

        wrap = {what: fields(what) for what in ("s", "before")}
        drawn = self._dtype if noise else None
        return Method(label, getattr(self._task, name), trees, wrap, drawn, self._precision)

    def _trace(self) -> None:
        """Trace all methods, and check what they return."""
        m = self._model
        reset = self._method("reset", {}, noise=True)
        start = reset.result if isinstance(reset.result, (tuple, list)) else ()
        if len(start) not in (2, 3):
            raise TypeError(f"{reset.label}: expected (qpos, qvel) or (qpos, qvel, memory), got {_told(reset.result)}")
        for what, x, size in zip(("qpos", "qvel"), start, (m.nq, m.nv), strict=False):
            _check(f"{reset.label}: {what}", x, (size,))
        shapes = self._memory_shapes(reset.label, start[2]) if len(start) == 3 else {}
        state: dict[str, Any] = {
            name: self._shape(*field.shape, dtype=None if field.dtype == "f" else jnp.int32)
            for name, field in self._fields.items()
        }
        state["time"] = self._shape()
        full = {**state, "memory": shapes}
        action = self._shape(self.action_size)
        given = {"s": full, "before": full, "action": action}
        known = {**{name: state[name] for name in _BEFORE_STEP}, "memory": shapes}
        self._methods = {
            "reset": reset,
            "control": self._method("control", {"s": known, "action": action}),
            "remember": self._method("remember", {**given, "s": state}, noise=True),
            "observation": self._method("observation", {"s": full}),
            "reward": self._method("reward", given),
            "terminated": self._method("terminated", {"s": full}),
        }
        self._check_results(shapes)

    def _memory_shapes(self, label: str, memory: Any) -> dict[str, Any]:
        if not isinstance(memory, Mapping):
            raise TypeError(f"{label}: memory: expected a dict of arrays by name, got {_told(memory)}")
        for name, x in memory.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(f"{label}: memory: expected names, got the key {name!r}")
            if not isinstance(x, jax.ShapeDtypeStruct) or x.dtype.kind != "f":
                raise TypeError(f"{label}: memory[{name!r}]: expected floating-point numbers, got {_told(x)}")
        return {name: self._shape(*x.shape) for name, x in memory.items()}

    def _check_results(self, memory: Mapping[str, Any]) -> None:
        methods = self._methods
        _check(methods["control"].label, methods["control"].result, (self._model.nu,))
        seen = methods["observation"]
        if not isinstance(seen.result, jax.ShapeDtypeStruct) or len(seen.result.shape) != 1 or not seen.result.shape[0]:
            raise TypeError(f"{seen.label}: expected a vector of numbers, got {_told(seen.result)}")
        self._observe(observation=seen.result.shape[0])
        reward, parts = methods["reward"], {}
        result = reward.result
        if isinstance(result, (tuple, list)):
            if len(result) != 2 or not isinstance(result[1], Mapping):
                raise TypeError(f"{reward.label}: expected a scalar or (scalar, dict), got {_told(result)}")
            result, parts = result
        _check(reward.label, result, ())
        for name, x in parts.items():
            if not isinstance(name, str):
                raise TypeError(f"{reward.label}: metrics: expected names, got the key {name!r}")
            _check(f"{reward.label}: metrics[{name!r}]", x, ())
        self.metrics = tuple(parts)
        _check(methods["terminated"].label, methods["terminated"].result, (), "b")
        kept = methods["remember"]
        if not isinstance(kept.result, Mapping) or set(kept.result) != set(memory):
            raise TypeError(f"{kept.label}: expected the memory of reset, {sorted(memory)}, got {_told(kept.result)}")
        for name, x in kept.result.items():
            _check(f"{kept.label}: memory[{name!r}]", x, memory[name].shape, "f")

    # -- memory: the user's, and what `before` is asked for ---------------------------------------------------------

    def _allot_memory(self) -> None:
        self._shapes = {name: x.shape for name, x in self._methods["remember"].result.items()}
        self._kept: dict[str, list[tuple[int, ...]]] = {}  # by field, the components that `before` is asked for
        for method in self._methods.values():
            for path, index in method.used:
                if path[0] == "before" and path[1] in self._fields and path[1] not in _BEFORE_STEP:
                    self._kept.setdefault(path[1], []).append(index)
        self._kept = {name: sorted(set(indices)) for name, indices in sorted(self._kept.items())}
        self.memory = {name: _size(shape) for name, shape in self._shapes.items()}
        self.memory |= {f"before.{name}": len(indices) for name, indices in self._kept.items()}
        if any("time" in method.fields(what) for method in self._methods.values() for what in ("s", "before")):
            self.memory[_STEPS] = 1

    def _after_reset(self) -> set[str]:
        """The fields that are asked for in a new state."""
        return (self._methods["observation"].fields("s") | set(self._kept)) - {"time"}

    def _kept_fields(self, w: Any) -> dict[str, list[Any]]:
        return {
            f"before.{name}": [_float(self._field(w, name, index)) for index in indices]
            for name, indices in self._kept.items()
        }

    def _own(self, memory: Memory) -> dict[str, list[Any]]:
        return {name: memory[name] for name in self._shapes}

    # -- kernel code -------------------------------------------------------------------------------------------------

    def _field(self, w: Any, name: str, index: tuple[int, ...]) -> Any:
        return shown(self._model, self._fields, w, name, index)

    def _time(self, memory: Memory) -> Any:
        return memory[_STEPS][0] * (self._model.opt.timestep * self.frame_skip)

    def _supply(
        self,
        w: Any,
        *,
        memory: Memory = _NOTHING,
        before: Memory = _NOTHING,
        action: Sequence[Any] = (),
        draws: Sequence[Scalars] = (),
    ) -> Supply:
        """Where methods get the components of their arguments.

        Args:
            w: the world.
            memory: of `s`. before: of `before`.
            action: the action. draws: the random numbers, for each request of the method.
        """

        def supply(path: Path, index: tuple[int, ...], kind: str) -> Any:
            if path[0] == "action":
                return action[index[0]]
            if path[0] == "noise":
                return draws[int(path[1])][index]
            held = memory if path[0] == "s" else before
            if path[1] == "memory":
                return held[path[2]][_flat(index, self._shapes[path[2]])]
            if path[1] == "time":
                return self._time(held)
            if path[0] == "s":
                return self._field(w, path[1], index)
            if path[1] in ("qpos", "qvel"):
                return getattr(w.user, path[1])[index[0]]  # not yet overwritten: `store` comes last
            value = held[f"before.{path[1]}"][self._kept[path[1]].index(index)]
            return to_int(value) if kind == "i" else value

        return supply

    def control(self, m: Any, w: Any, action: list[Any], memory: Memory) -> None:
        supply = self._supply(w, memory=memory, action=action)
        for i, x in enumerate(self._methods["control"].results(supply)):
            w.ctrl[i] = _float(x)

    def observation(self, m: Any, w: Any, memory: Memory) -> list[Any]:
        return [_float(x) for x in self._methods["observation"].results(self._supply(w, memory=memory))]

    def outcome(self, m: Any, w: Any, action: list[Any], before: Memory, after: Memory) -> Outcome:
        supply = self._supply(w, memory=after, before=before, action=action)
        reward = self._methods["reward"].results(supply)
        (terminated,) = self._methods["terminated"].results(self._supply(w, memory=after))
        parts = {}
        if self.metrics or isinstance(self._methods["reward"].result, (tuple, list)):
            reward, parts = reward
        return Outcome(_float(reward[0]), terminated, {name: _float(x) for name, (x,) in parts.items()})

    def remember(self, m: Any, w: Any, before: Memory, random: Any) -> dict[str, list[Any]]:
        method = self._methods["remember"]
        action = [w.action[i] for i in range(self.action_size)]
        time = {_STEPS: [before[_STEPS][0] + 1.0]} if _STEPS in self.memory else {}
        draws = _draws(method, random)
        result = method.results(self._supply(w, memory=time, before=before, action=action, draws=draws))
        memory = {name: [_float(x) for x in values] for name, values in result.items()}
        return memory | time | self._kept_fields(w)  # the `before` of the next step is the `s` of this one

    def reset(self, m: Any, w: Any, random: Any) -> None:
        qpos, qvel = self._start(w, random)[:2]
        for i, x in enumerate(qpos):
            w.qpos[i] = _float(x)
        for i, x in enumerate(qvel):
            w.qvel[i] = _float(x)

    def remember_reset(self, m: Any, w: Any, random: Any) -> dict[str, list[Any]]:
        start = self._start(w, random)  # the same draws as in `reset`, in a kernel of their own
        memory = {name: [_float(x) for x in start[2][name]] for name in self._shapes}
        if _STEPS in self.memory:
            memory[_STEPS] = [0.0]
        return memory | self._kept_fields(w)

    def _start(self, w: Any, random: Any) -> Any:
        method = self._methods["reset"]
        return method.results(self._supply(w, draws=_draws(method, random)))


def _draws(method: Method, random: Any) -> list[Scalars]:
    """Fresh numbers for all that a method draws, in its order."""
    return [filled([getattr(random, kind)() for _ in range(_size(dims))], dims) for kind, dims in method.requests]


def _size(dims: tuple[int, ...]) -> int:
    return int(np.prod(dims, dtype=int))


def _flat(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    return int(np.ravel_multi_index(index, shape)) if shape else 0


def _float(x: Any) -> Any:
    if isinstance(x, Value):
        return x if x.dtype == "f" else to_float(x)
    return float(x)


def _known_after_reset(model: Any) -> set[str]:
    """What a new state has without solving for its acceleration."""
    fields = {name for kernel in step.observable(model) for name in kernel.writes}
    return fields | {"qpos", "qvel", "ctrl", "qacc_warmstart", "mocap_pos", "mocap_quat", "cfrc_ext", "diverged"}


def _told(result: Any) -> str:
    """What a method returned, in words."""
    if isinstance(result, jax.ShapeDtypeStruct):
        return f"{result.dtype.name}{list(result.shape)}"
    if isinstance(result, Mapping):
        return "{" + ", ".join(f"{k!r}: {_told(v)}" for k, v in result.items()) + "}"
    if isinstance(result, (tuple, list)):
        return "(" + ", ".join(map(_told, result)) + ")"
    return repr(result)


def _check(label: str, result: Any, shape: tuple[int, ...], kind: str = "fib") -> None:
    """TypeError unless a method returned an array of this shape and of one of these kinds of numbers."""
    if not isinstance(result, jax.ShapeDtypeStruct) or result.shape != shape or result.dtype.kind not in kind:
        numbers = {"fib": "numbers", "f": "floating-point numbers", "b": "booleans"}[kind]
        what = f"{numbers} of the shape {list(shape)}" if shape else f"a scalar of {numbers}"
        raise TypeError(f"{label}: expected {what}, got {_told(result)}")
