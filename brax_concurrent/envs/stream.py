"""The streams of an environment: which kernels a control step, a reset and a restart consist of.

`control_step` reads as the recipe. A task's methods become kernels here; what they read and write is found by tracing
them once, so that a task need not declare it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from brax_concurrent.backends.program import UserArray
from brax_concurrent.envs.arrays import GRANULARITIES
from brax_concurrent.envs.random import Random
from brax_concurrent.envs.task import KernelTask
from brax_concurrent.kernels import contact_forces, step
from brax_concurrent.kernels.collision import collision
from brax_concurrent.kernels.fuse import Recipe, Repeat, fused, unrolled
from brax_concurrent.kernels.kernel import Kernel, KernelFunction
from brax_concurrent.kernels.layout import MODEL_PREFIX, Field, physics_fields
from brax_concurrent.kernels.model import Model
from brax_concurrent.kernels.ops import both, either, isfinite, negate, to_int, where
from brax_concurrent.kernels.solver import solve
from brax_concurrent.kernels.specialize import ModelView
from brax_concurrent.kernels.trace import infer_kernel

_OBSERVERS = {"rne_post_constraint": contact_forces.rne_post_constraint}
_STEP_DRAWS, _RESET_DRAWS = 0, 1
WORK = "work"
COUNTER_FIELDS = {
    "contacts_lost": Field((1,), "contacts beyond nconmax, over all evaluations of the call", "i"),
    WORK: Field((1,), "what the solver had to do: contacts and 1 times iterations, over all evaluations", "i"),
}


@dataclass(frozen=True)
class Array:
    """A user's array of a stream.

    Attributes:
        columns: numbers per environment.
        dtype: "f" (the build's floating-point type), "i" int32, "u" uint32 or "b" bool.
        access: "read", "write" or "readwrite" (carried from call to call).
        scalar: whether the array is `(num_envs,)` rather than `(num_envs, columns)`.
        rows: of an array `(rows, columns)` that all environments share and kernels only read; 0: of no such.
        per_step: whether each step of a rollout has its own, `(steps, num_envs, ...)`.
    """

    columns: int
    dtype: str
    access: str
    scalar: bool = False
    rows: int = 0
    per_step: bool = False


@dataclass(frozen=True)
class Stream:
    """Kernels in program order, and the arrays that they meet the user in."""

    kernels: tuple[Kernel, ...]
    fields: Mapping[str, Field]
    arrays: Mapping[str, Array]
    view: ModelView

    @property
    def user(self) -> dict[str, UserArray]:
        """The arrays as kernels know them."""
        return _as_kernels_see(self.arrays)


def _as_kernels_see(arrays: Mapping[str, Array]) -> dict[str, UserArray]:
    types = {name: "i" if a.dtype == "u" else a.dtype for name, a in arrays.items()}
    return {n: (a.columns, types[n], a.rows) if a.rows else (a.columns, types[n]) for n, a in arrays.items()}


class StreamBuilder:
    """Builds the streams of one task on one model.

    Args:
        task: the task.
        model: its Model.
        per_env: model quantities that differ between environments.
        autoreset: whether a step resets environments that ended.
    """

    def __init__(self, task: KernelTask, model: Model, per_env: Sequence[str] = (), autoreset: bool = True):
        self.task, self.model, self.per_env, self.autoreset = task, model, tuple(per_env), autoreset
        self.view = ModelView(model, per_env)
        self.fields = physics_fields(model) | {
            "action": Field((max(task.action_size, 1),), "the action, zeros if any entry is not finite"),
            "done": Field((1,), "whether this environment is being reset", "i"),
        }
        self.fields |= COUNTER_FIELDS
        for name in per_env:
            self.fields[MODEL_PREFIX + name] = Field(getattr(model, name).shape, f"{name} of this environment")

    # -- arrays ------------------------------------------------------------------------------------------------------

    def state_arrays(self) -> dict[str, Array]:
        """What is carried from call to call."""
        m = self.model
        arrays = {
            "qpos": Array(m.nq, "f", "readwrite"),
            "qvel": Array(m.nv, "f", "readwrite"),
            "qacc_warmstart": Array(m.nv, "f", "readwrite"),
            "key": Array(2, "u", "read"),
            "tick": Array(1, "i", "readwrite", scalar=True),
            "elapsed": Array(1, "i", "readwrite", scalar=True),
            "contacts_lost": Array(1, "i", "readwrite", scalar=True),
            "diverged": Array(1, "i", "readwrite", scalar=True),
            "bad_actions": Array(1, "i", "readwrite", scalar=True),
        }
        for name, count in self.task.memory.items():
            arrays["memory." + name] = Array(count, "f", "readwrite")
        return arrays

    def model_arrays(self) -> dict[str, Array]:
        """Per-environment model quantities."""
        sizes = {name: int(getattr(self.model, name).size) for name in self.per_env}
        return {MODEL_PREFIX + name: Array(size, "f", "read") for name, size in sizes.items()}

    def outcome_arrays(self) -> dict[str, Array]:
        """What a step returns besides the state."""
        t = self.task
        names = [*(f"metrics.{n}" for n in t.metrics), *(f"info.{n}" for n in t.info)]
        return {
            "obs": Array(t.observation_size, "f", "write"),
            "final_obs": Array(t.observation_size, "f", "write"),
            "reward": Array(1, "f", "write", scalar=True),
            "terminated": Array(1, "b", "write", scalar=True),
            "truncated": Array(1, "b", "write", scalar=True),
        } | {name: Array(1, "f", "write", scalar=True) for name in names}

    def step_arrays(self) -> dict[str, Array]:
        """What a control step reads and writes."""
        action = {"action": Array(self.task.action_size, "f", "read")}
        work = {WORK: Array(1, "i", "readwrite", scalar=True)} if self.model.npair else {}
        return action | self.model_arrays() | self.state_arrays() | work | self.outcome_arrays()

    # -- streams -----------------------------------------------------------------------------------------------------

    def control_step(self, granularity: str = "stage") -> Stream:
        """One control step: load, physics, outcome, reset of what ended, store.

        Args:
            granularity: one kernel for each stage, for each physics step ("substep") or for all ("step"). The bits are
                the same.
        """
        arrays = self.step_arrays()
        return Stream(tuple(self.step_kernels(arrays, granularity)), self.fields, arrays, self.view)

    def step_kernels(
        self, arrays: Mapping[str, Array], granularity: str, applied: Callable[[list[Any]], list[Any]] | None = None
    ) -> list[Kernel]:
        """The kernels of a control step.

        Args:
            arrays: the stream's.
            granularity: see control_step.
            applied: makes the action that is carried out of the one in the array; None: they are the same.
        """
        make = self.maker(arrays)
        before = [make("load", self._load), make("control", lambda m, w: self._control(m, w, applied))]
        physics = counting_work(counting_lost_contacts(step.physics_recipe(self.model), self.model), self.model)
        after = [*(_OBSERVERS[name] for name in self.task.observes), make("outcome", self._outcome)]
        after += self._resetting(make, self._reset if self.autoreset else self._restore)
        after += [make("store", self._store)]
        repeated = Repeat(self.task.frame_skip, tuple(physics))
        if granularity == "stage":
            return list(unrolled([*before, repeated, *after]))
        if granularity == "substep":
            middle = fused("physics_step", physics)
            return [fused("begin", before), *[middle] * self.task.frame_skip, fused("end", after)]
        if granularity == "step":
            return [fused("control_step", [*before, repeated, *after])]
        raise ValueError(f"granularity: expected one of {GRANULARITIES}, got {granularity!r}")

    def reset_all(self) -> Stream:
        """A fresh random state in every environment."""
        arrays = self.model_arrays() | self.state_arrays() | {"obs": Array(self.task.observation_size, "f", "write")}
        make = self.maker(arrays)

        def start(m: Any, w: Any) -> None:
            self._load(m, w)
            w.done[0] = 1
            w.user.elapsed[0] = 0

        return Stream(
            (make("load", start), *self._resetting(make), make("store", self._store)), self.fields, arrays, self.view
        )

    def reset_where(self) -> Stream:
        """A fresh random state where `mask` holds; the others stay as they are."""
        arrays = {"mask": Array(1, "b", "read", scalar=True)} | self.model_arrays() | self.state_arrays()
        arrays |= {"obs": Array(self.task.observation_size, "f", "readwrite")}
        make = self.maker(arrays)

        def start(m: Any, w: Any) -> None:
            self._load(m, w)
            w.done[0] = to_int(w.user.mask[0])
            w.user.elapsed[0] = where(w.user.mask[0], 0, w.user.elapsed[0])

        return Stream(
            (make("load", start), *self._resetting(make), make("store", self._store)), self.fields, arrays, self.view
        )

    def restart(self) -> Stream:
        """Derived quantities and observation of given positions and velocities."""
        arrays = self.model_arrays() | self.state_arrays() | {"obs": Array(self.task.observation_size, "f", "write")}
        make = self.maker(arrays)

        def start(m: Any, w: Any) -> None:
            self._load(m, w)
            w.done[0] = 1
            w.user.elapsed[0] = 0
            self._rest(m, w)

        kernels = (
            make("load", start),
            *self._forward(make),
            make("observe", self._observe_reset),
            make("store", self._store),
        )
        return Stream(kernels, self.fields, arrays, self.view)

    def _resetting(self, make: Callable[..., Kernel], reset: Callable[[Any, Any], None] | None = None) -> list[Kernel]:
        first = make("reset", reset or self._reset, when="done")
        return [first, *self._forward(make), make("observe_reset", self._observe_reset, when="done")]

    def _forward(self, make: Callable[..., Kernel]) -> list[Kernel]:
        """What an observation of a new state can need, in environments that are being reset only."""

        def masked(kernel: Kernel) -> Kernel:
            def function(m: Any, w: Any) -> None:
                with w.when(w.done[0] == 1):
                    kernel.function(m, w)

            return make("reset_" + kernel.name, function, when="done")

        stages = step.forward if self.task.solves_at_reset else step.observable
        return [masked(kernel) for kernel in stages(self.model)]

    def maker(self, arrays: Mapping[str, Array], fields: Mapping[str, Field] | None = None) -> Callable[..., Kernel]:
        """What makes a kernel of a name and a function, on these arrays and fields (None: the builder's)."""
        user = _as_kernels_see(arrays)

        def make(name: str, function: KernelFunction, when: str = "") -> Kernel:
            return infer_kernel(name, function, self.view, fields or self.fields, user, when)

        return make

    # -- kernels -----------------------------------------------------------------------------------------------------

    def _load(self, m: Any, w: Any) -> None:
        load_constants(m, w, self.model, self.per_env)
        for name in ("qpos", "qvel", "qacc_warmstart"):
            copy_in(w, name, name, self.fields[name].shape)

    def _control(self, m: Any, w: Any, applied: Callable[[list[Any]], list[Any]] | None = None) -> None:
        given = [w.user.action[i] for i in range(self.task.action_size)]
        good, action = finite_or_zeros(given if applied is None else applied(given))
        for i, a in enumerate(action):
            w.action[i] = a
        w.user.bad_actions[0] = w.user.bad_actions[0] + to_int(negate(good))
        self.task.control(m, w, action, self._memory(w))

    def _memory(self, w: Any) -> dict[str, list[Any]]:
        return {name: [getattr(w.user, "memory." + name)[i] for i in range(n)] for name, n in self.task.memory.items()}

    def _keep(self, w: Any, memory: Mapping[str, Sequence[Any]]) -> None:
        for name, values in memory.items():
            for i, value in enumerate(values):
                getattr(w.user, "memory." + name)[i] = value

    def _random(self, w: Any, draws: int) -> Random:
        return Random((w.user.key[0], w.user.key[1]), (w.user.tick[0] << 1) + draws)

    def _outcome(self, m: Any, w: Any) -> None:
        t, action, before = self.task, [w.action[i] for i in range(self.task.action_size)], self._memory(w)
        after = t.remember(m, w, before, self._random(w, _STEP_DRAWS))
        result = t.outcome(m, w, action, before, after)
        bad = w.diverged[0] != 0
        elapsed = w.user.elapsed[0] + 1
        terminated, truncated = either(result.terminated, bad), elapsed >= t.max_episode_steps
        ended = both(either(terminated, truncated), self.autoreset)
        w.done[0] = to_int(ended if self.autoreset else bad)
        w.user.elapsed[0] = where(ended, 0, elapsed)
        w.user.terminated[0], w.user.truncated[0] = terminated, truncated
        w.user.reward[0] = where(bad, 0.0, result.reward)
        for prefix, names, values in (("metrics.", t.metrics, result.metrics), ("info.", t.info, result.info)):
            for name in names:
                getattr(w.user, prefix + name)[0] = where(bad, 0.0, values[name])
        for i, x in enumerate(t.observation(m, w, after)):
            x = where(bad, 0.0, x)
            w.user.final_obs[i] = x
            w.user.obs[i] = x
        self._keep(w, after)
        if m.npair:
            w.user.work[0] = w.work[0]
        w.user.contacts_lost[0] = w.user.contacts_lost[0] + w.contacts_lost[0]
        w.user.diverged[0] = w.user.diverged[0] + to_int(bad)

    def _rest(self, m: Any, w: Any) -> None:
        for i in range(m.nu):
            w.ctrl[i] = 0.0
        for i in range(m.nv):
            w.qacc_warmstart[i] = 0.0
        for name in self.task.observes:
            if name == "rne_post_constraint":
                for b in range(m.nbody):
                    w.cfrc_ext[b] = [0.0] * 6

    def _reset(self, m: Any, w: Any) -> None:
        with w.when(w.done[0] == 1):
            self._rest(m, w)
            self.task.reset(m, w, self._random(w, _RESET_DRAWS))

    def _restore(self, m: Any, w: Any) -> None:
        """MuJoCo's rule, where nothing else resets: a diverged simulation starts again from qpos0, at rest."""
        with w.when(w.done[0] == 1):
            self._rest(m, w)
            for i in range(m.nq):
                w.qpos[i] = m.qpos0[i]
            for i in range(m.nv):
                w.qvel[i] = 0.0

    def _observe_reset(self, m: Any, w: Any) -> None:
        with w.when(w.done[0] == 1):
            memory = self.task.remember_reset(m, w, self._random(w, _RESET_DRAWS))
            self._keep(w, memory)
            for i, x in enumerate(self.task.observation(m, w, memory)):
                w.user.obs[i] = x

    def _store(self, m: Any, w: Any) -> None:
        for i in range(m.nq):
            w.user.qpos[i] = w.qpos[i]
        for i in range(m.nv):
            w.user.qvel[i] = w.qvel[i]
            w.user.qacc_warmstart[i] = w.qacc_warmstart[i]
        w.user.tick[0] = w.user.tick[0] + 1


def load_constants(m: Any, w: Any, model: Model, per_env: Sequence[str]) -> None:
    """Start a tile: per-environment quantities in, mocap bodies at the model's place, counters at 0."""
    for name in per_env:
        copy_in(w, MODEL_PREFIX + name, MODEL_PREFIX + name, getattr(model, name).shape)
    for b in range(m.nbody):
        if m.body_mocapid[b] >= 0:
            w.mocap_pos[m.body_mocapid[b]] = m.body_pos[b]
            w.mocap_quat[m.body_mocapid[b]] = m.body_quat[b]
    if m.opt.integrator == "rk4":
        for i in range(m.nv):
            w.rk4_trend[i] = 0.0
    w.diverged[0] = 0
    w.contacts_lost[0] = 0
    w.work[0] = 0


def finite_or_zeros(values: Sequence[Any]) -> tuple[Any, list[Any]]:
    """MuJoCo's rule for bad controls: if any is NaN or infinite, all of this environment's are 0."""
    good: Any = True
    for x in values:
        good = both(good, isfinite(x))
    return good, [where(good, x, 0.0) for x in values]


def counting_lost_contacts(recipe: Recipe, model: Model) -> list[Any]:
    """The recipe, whose collision stages add what found no room to `contacts_lost`."""
    if sum(int(n) for n in model.pair_maxcontact) <= model.nconmax:
        return list(recipe)

    def function(m: Any, w: Any) -> None:
        collision.function(m, w)
        w.contacts_lost[0] = w.contacts_lost[0] + w.ncon_lost[0]

    names = ("ncon_lost", "contacts_lost")
    counting = Kernel(collision.name, function, (*collision.reads, *names), (*collision.writes, "contacts_lost"))
    return _with(recipe, collision, counting)


def counting_work(recipe: Recipe, model: Model) -> list[Any]:
    """The recipe, whose solver adds what it had to do to `work`, by which the dispatcher groups environments."""
    if not model.npair:
        return list(recipe)

    def function(m: Any, w: Any) -> None:
        solve.function(m, w)
        w.work[0] = w.work[0] + (w.solver_niter[0] + 1) * (w.ncon[0] + 1)

    names = ("solver_niter", "ncon", WORK)
    counting = Kernel(solve.name, function, tuple(dict.fromkeys((*solve.reads, *names))), (*solve.writes, WORK))
    return _with(recipe, solve, counting)


def _with(recipe: Recipe, kernel: Kernel, other: Kernel) -> list[Any]:
    """The recipe with one kernel for another."""

    def changed(item: Any) -> Any:
        if isinstance(item, Repeat):
            return Repeat(item.times, tuple(changed(inner) for inner in item.body))
        return other if item is kernel else item

    return [changed(item) for item in recipe]


def copy_in(w: Any, name: str, array: str, shape: Sequence[int]) -> None:
    """Copy a flat row of a user's array into a field."""
    for flat, index in enumerate(product(*(range(n) for n in shape))):
        w.field(name)[index] = getattr(w.user, array)[flat]
