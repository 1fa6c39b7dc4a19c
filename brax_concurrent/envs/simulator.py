"""Physics without a task: any supported MJCF, batched."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import mujoco

from brax_concurrent.envs import program
from brax_concurrent.envs.arrays import (
    checked,
    default_model_values,
    resolve_backend,
    run,
    validate_batch,
    varying_alike,
)
from brax_concurrent.envs.fields import shown, unknown, visible_fields
from brax_concurrent.envs.stream import (
    COUNTER_FIELDS,
    WORK,
    Array,
    Stream,
    copy_in,
    counting_lost_contacts,
    counting_work,
    finite_or_zeros,
    load_constants,
)
from brax_concurrent.interop.jax_ffi import Program
from brax_concurrent.kernels import contact_forces, step
from brax_concurrent.kernels.integrate import ROTATION_RULES
from brax_concurrent.kernels.kernel import Kernel
from brax_concurrent.kernels.layout import MODEL_PREFIX, Field, physics_fields
from brax_concurrent.kernels.model import Model, load_model
from brax_concurrent.kernels.ops import negate, to_int, where
from brax_concurrent.kernels.specialize import ModelView
from brax_concurrent.kernels.trace import infer_kernel
from brax_concurrent.scheduler.schedule import Schedule

_CARRIED = ("qpos", "qvel", "qacc_warmstart", "contacts_lost", "diverged", "bad_controls")


@dataclasses.dataclass(frozen=True)
class SimulatorState:
    """State of a batch of simulations. Requested fields are attributes, e.g. `state.xpos`.

    Attributes:
        qpos: (num_envs, nq). qvel: (num_envs, nv).
        fields: the derived fields that were asked for, `(num_envs, *shape)` with MuJoCo's names. After `step` they are
            those of the last evaluation before integration (with Runge-Kutta, of its last stage), as in MuJoCo (whose
            `qacc` is then the stages' mean; here it is the last stage's, like the rest). Contacts
            beyond `ncon`, limits of joints without, and what the model has nothing of are 0.
        contacts_lost: (num_envs,) int32, contacts beyond the capacity, in all evaluations since `reset`.
        diverged: (num_envs,) int32, steps whose state went beyond MuJoCo's limits (NaN, or above 1e10) since `reset`;
            such an environment is put back to qpos0 at rest, as MuJoCo does.
        bad_controls: (num_envs,) int32, evaluations whose controls were not finite and were taken for zeros.
        model: per-environment model quantities.
        internal: the solver's warm start, and how much work it had.
        sim: fingerprint of the simulator that made it.
    """

    qpos: jax.Array
    qvel: jax.Array
    fields: dict[str, jax.Array]
    contacts_lost: jax.Array
    diverged: jax.Array
    bad_controls: jax.Array
    model: dict[str, jax.Array]
    internal: dict[str, jax.Array]
    sim: str = ""

    def __getattr__(self, name: str) -> jax.Array:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"no attribute {name!r}; the fields asked for are {sorted(fields)}")

    def replace(self, **changes: Any) -> SimulatorState:
        """A copy with some attributes changed."""
        return dataclasses.replace(self, **changes)


jax.tree_util.register_dataclass(
    SimulatorState,
    data_fields=[f.name for f in dataclasses.fields(SimulatorState) if f.name != "sim"],
    meta_fields=["sim"],
)


class Simulator:
    """A batch of simulations of one model.

    Args:
        model: MJCF path, XML string or mujoco.MjModel.
        num_envs: simulations in the batch, at least 1.
        fields: derived fields that states hold, by MuJoCo's names (see `Simulator.known_fields`).
        backend: "cpu", "cuda" or "auto", see `make`.
        dtype: "float32", or "float64" (with `jax_enable_x64`).
        threads: CPU threads at most; 0: all cores.
        per_env: model quantities that differ between environments, e.g. ("geom_friction",).
        nconmax: contacts kept per environment; None: the model's default.
        rk4_rotation: "munthe-kaas" (MuJoCo 4) or "plain" (MuJoCo 3), see kernels/integrate.py.
        regroup: on a CPU, whether a step puts simulations side by side whose solvers had similar work before, as
            `make(..., scheduler="hw", regroup=True)` does. The results are the same bits at the same places.

    Raises:
        UnsupportedModelError: the model has features that the kernels lack; all are listed.
        ValueError: a bad argument.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | mujoco.MjModel,
        num_envs: int,
        fields: Sequence[str] = (),
        *,
        backend: str = "auto",
        dtype: str = "float32",
        threads: int = 0,
        per_env: Sequence[str] = (),
        nconmax: int | None = None,
        rk4_rotation: str = "munthe-kaas",
        regroup: bool = False,
    ):
        validate_batch(num_envs, dtype, threads)
        self.backend = resolve_backend(backend)
        self.model: Model = load_model(model, nconmax=nconmax)
        self.num_envs, self.dtype, self.per_env = num_envs, jnp.dtype(dtype), tuple(per_env)
        if rk4_rotation not in ROTATION_RULES:
            raise ValueError(f"rk4_rotation: expected one of {ROTATION_RULES}, got {rk4_rotation!r}")
        if not isinstance(regroup, bool):
            raise TypeError(f"regroup: expected True or False, got {regroup!r}")
        if regroup and self.backend != "cpu":
            raise ValueError(f"regroup: a Simulator regroups on a CPU only, got backend={self.backend!r}")
        self._threads, self._rotation, self._regroup = threads, rk4_rotation, regroup
        self._defaults = default_model_values(self.model, per_env)
        self._all = physics_fields(self.model)
        if isinstance(fields, str):
            raise TypeError(f"fields: expected a sequence of names, got the string {fields!r}")
        for name in fields:
            if name not in self.known_fields:
                raise ValueError(f"fields: {unknown(name, self.known_fields)}")
        self.fields = tuple(dict.fromkeys(fields))
        self._view = ModelView(self.model, self.per_env)

    @property
    def known_fields(self) -> dict[str, str]:
        """Fields that can be asked for, and what they are."""
        return {name: field.doc for name, field in visible_fields(self._all).items()}

    @property
    def dt(self) -> float:
        """Duration of a physics step, s."""
        return float(self.model.opt.timestep)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Says which states are this simulator's."""
        digest = hashlib.sha256(repr((self.model.fingerprint, self.dtype.name, self.per_env)).encode()).hexdigest()[:12]
        return f"{self.model.name or 'simulator'}[{self.num_envs}]/{digest}/{','.join(self.fields)}"

    # -- streams -----------------------------------------------------------------------------------------------------

    def _arrays(self) -> dict[str, Array]:
        m = self.model
        arrays = {
            "ctrl": Array(m.nu, "f", "read"),
            "mocap_pos": Array(3 * m.nmocap, "f", "read"),
            "mocap_quat": Array(4 * m.nmocap, "f", "read"),
            "qpos": Array(m.nq, "f", "readwrite"),
            "qvel": Array(m.nv, "f", "readwrite"),
            "qacc_warmstart": Array(m.nv, "f", "readwrite"),
            "contacts_lost": Array(1, "i", "readwrite", scalar=True),
            "diverged": Array(1, "i", "readwrite", scalar=True),
            "bad_controls": Array(1, "i", "readwrite", scalar=True),
        }
        arrays |= {MODEL_PREFIX + name: Array(int(getattr(m, name).size), "f", "read") for name in self.per_env}
        if self._regroup and m.npair:
            arrays[WORK] = Array(1, "i", "readwrite", scalar=True)
        for name in self.fields:
            arrays["field." + name] = Array(prod(self._all[name].shape), self._all[name].dtype, "write")
        return {name: a for name, a in arrays.items() if a.columns > 0}

    def _stream(self, kernels: Sequence[Kernel], advances: bool) -> Stream:
        arrays = self._arrays()
        fields = self._all | COUNTER_FIELDS
        fields |= {MODEL_PREFIX + n: Field(getattr(self.model, n).shape, n) for n in self.per_env}
        user = Stream((), fields, arrays, self._view).user

        def make(name: str, function: Callable[[Any, Any], None]) -> Kernel:
            return infer_kernel(name, function, self._view, fields, user)

        def load(m: Any, w: Any) -> None:
            load_constants(m, w, self.model, self.per_env)
            for name in ("qpos", "qvel", "qacc_warmstart", "mocap_pos", "mocap_quat"):
                if name in arrays:
                    copy_in(w, name, name, fields[name].shape)
            good, ctrl = finite_or_zeros([w.user.ctrl[i] for i in range(m.nu)])
            for i, value in enumerate(ctrl):
                w.ctrl[i] = value
            w.user.bad_controls[0] = w.user.bad_controls[0] + to_int(negate(good))

        def store(m: Any, w: Any) -> None:
            for name in self.fields:
                for flat, index in enumerate(product(*(range(n) for n in fields[name].shape))):
                    getattr(w.user, "field." + name)[flat] = shown(self.model, fields, w, name, index)
            w.user.contacts_lost[0] = w.user.contacts_lost[0] + w.contacts_lost[0]
            if WORK in arrays:
                w.user.work[0] = w.work[0]
            bad = w.diverged[0] != 0
            w.user.diverged[0] = w.user.diverged[0] + to_int(bad)
            if advances:
                for i in range(m.nq):
                    w.user.qpos[i] = where(bad, m.qpos0[i], w.qpos[i])
                for i in range(m.nv):
                    w.user.qvel[i] = where(bad, 0.0, w.qvel[i])
                    w.user.qacc_warmstart[i] = where(bad, 0.0, w.qacc_warmstart[i])

        observe = [contact_forces.rne_post_constraint] if "cfrc_ext" in self.fields else []
        physics = counting_work(counting_lost_contacts(kernels, self.model), self.model)
        return Stream((make("load", load), *physics, *observe, make("store", store)), fields, arrays, self._view)

    @functools.cached_property
    def _step_program(self) -> Program:
        schedule = Schedule("hw", regroup=True) if self._regroup else None
        return self._compile(
            "step", lambda: self._stream(step.physics_step(self.model, self._rotation), advances=True), schedule
        )

    @functools.cached_property
    def _forward_program(self) -> Program:
        return self._compile("forward", lambda: self._stream(step.forward(self.model), advances=False))

    def _compile(self, kind: str, make_stream: Callable[[], Stream], schedule: Schedule | None = None) -> Program:
        identity = f"{kind} {self._rotation} {self.model.fingerprint} {self.fields} {self.per_env} {self._regroup}"
        return program.compile_stream(make_stream, self.backend, self.dtype.name, self._threads, identity, schedule)

    # -- public operations -------------------------------------------------------------------------------------------

    def reset(self, model: dict[str, Any] | None = None) -> SimulatorState:
        """All simulations at the model's qpos0, at rest. `model`: values of `per_env` quantities."""
        qpos = jnp.broadcast_to(jnp.asarray(self.model.qpos0, self.dtype), (self.num_envs, self.model.nq))
        return self.reset_to(qpos, jnp.zeros((self.num_envs, self.model.nv), self.dtype), model=model)

    def reset_to(
        self, qpos: Any, qvel: Any, ctrl: Any = None, *, model: dict[str, Any] | None = None
    ) -> SimulatorState:
        """Start from given states; fields are evaluated there (with `ctrl`, default zeros).

        Args:
            qpos: (num_envs, nq). qvel: (num_envs, nv). ctrl: (num_envs, nu).
            model: values of `per_env` quantities, each `(num_envs, *shape)`; left out: the model's own.
        """
        n, m, counter = self.num_envs, self.model, jnp.zeros(self.num_envs, jnp.int32)
        values = {
            name: jnp.broadcast_to(jnp.asarray(own, self.dtype), (n, *own.shape))
            for name, own in self._defaults.items()
        }
        for name, value in (model or {}).items():
            if name not in values:
                raise ValueError(f"model: {name!r} was not named in per_env={self.per_env}")
            values[name] = checked(f"model[{name!r}]", value, values[name].shape, self.dtype)
        state = SimulatorState(
            qpos=checked("qpos", qpos, (n, m.nq), self.dtype),
            qvel=checked("qvel", qvel, (n, m.nv), self.dtype),
            fields={
                name: jnp.zeros((n, *self._all[name].shape), self.dtype if self._all[name].dtype == "f" else jnp.int32)
                for name in self.fields
            },
            contacts_lost=counter,
            diverged=counter,
            bad_controls=counter,
            model=values,
            internal={"qacc_warmstart": jnp.zeros((n, m.nv), self.dtype), WORK: counter},
            sim=self.fingerprint,
        )
        return self.forward(varying_alike(state), ctrl)

    def forward(
        self, state: SimulatorState, ctrl: Any = None, *, mocap_pos: Any = None, mocap_quat: Any = None
    ) -> SimulatorState:
        """Evaluate the fields at the state, without advancing it (`mj_forward`). Arguments as in step."""
        return self._apply(self._forward_program, state, ctrl, mocap_pos, mocap_quat)

    def step(
        self, state: SimulatorState, ctrl: Any = None, *, mocap_pos: Any = None, mocap_quat: Any = None
    ) -> SimulatorState:
        """One physics step of all simulations (`mj_step`).

        Args:
            state: from this simulator.
            ctrl: (num_envs, nu); default zeros. Clamped to ctrlrange as in MuJoCo. Where an environment's hold NaN or
                infinity, all of them are taken for zeros, and it is counted in `bad_controls`.
            mocap_pos: (num_envs, nmocap, 3), mocap_quat: (num_envs, nmocap, 4); default: the model's.

        Raises:
            TypeError, ValueError: wrong type, shape or dtype, or a state of another simulator.
        """
        return self._apply(self._step_program, state, ctrl, mocap_pos, mocap_quat)

    def _apply(self, native: Any, state: SimulatorState, ctrl: Any, mocap_pos: Any, mocap_quat: Any) -> SimulatorState:
        if not isinstance(state, SimulatorState):
            raise TypeError(f"state: expected a SimulatorState, got {type(state).__name__}")
        if state.sim != self.fingerprint:
            raise ValueError(f"state: expected one of {self.fingerprint}, got one of {state.sim or 'no simulator'}")
        n, m = self.num_envs, self.model
        given = {
            "ctrl": jnp.zeros((n, m.nu), self.dtype) if ctrl is None else checked("ctrl", ctrl, (n, m.nu), self.dtype)
        }
        for name, value, size in (("mocap_pos", mocap_pos, 3), ("mocap_quat", mocap_quat, 4)):
            own = getattr(m, "body_" + name.removeprefix("mocap_"))[
                [b for b in range(m.nbody) if m.body_mocapid[b] >= 0]
            ]
            shape = (n, m.nmocap, size)
            array = (
                jnp.broadcast_to(jnp.asarray(own, self.dtype), shape)
                if value is None
                else checked(name, value, shape, self.dtype)
            )
            given[name] = array.reshape(n, -1)
        carried = {name: getattr(state, name) for name in _CARRIED if name != "qacc_warmstart"}
        carried |= {**state.internal, **given}
        if WORK not in carried:  # a state of an older version
            carried[WORK] = jnp.zeros(n, jnp.int32)
        carried |= {MODEL_PREFIX + name: value.reshape(n, -1) for name, value in state.model.items()}
        new = run(native, carried, n)
        return state.replace(
            **{name: new.get(name, getattr(state, name)) for name in _CARRIED if name != "qacc_warmstart"},
            fields={name: new["field." + name].reshape(value.shape) for name, value in state.fields.items()},
            internal={name: new.get(name, value) for name, value in state.internal.items()},
        )
