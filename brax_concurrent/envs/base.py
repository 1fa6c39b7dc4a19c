"""Environments: `reset` and `step` as pure functions of pytrees."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brax_concurrent.envs import tuned
from brax_concurrent.envs.arrays import (
    checked,
    default_model_values,
    resolve_backend,
    resolve_granularity,
    resolve_schedule,
    run,
    validate_batch,
    varying_alike,
)
from brax_concurrent.envs.own_kernels import OwnTask
from brax_concurrent.envs.own_task import Task
from brax_concurrent.envs.policy import MlpPolicy, key_words
from brax_concurrent.envs.policy_kernel import KEPT, rollout_stream
from brax_concurrent.envs.program import compile_env, scheduled_tiles
from brax_concurrent.envs.state import State
from brax_concurrent.envs.stream import Stream, StreamBuilder
from brax_concurrent.envs.task import KernelTask
from brax_concurrent.envs.trace import Tracer, write_trace
from brax_concurrent.interop.jax_ffi import Program
from brax_concurrent.kernels.layout import MODEL_PREFIX
from brax_concurrent.kernels.model import Model, load_model
from brax_concurrent.scheduler.schedule import check_regroup
from brax_concurrent.scheduler.serial import TileProgram
from brax_concurrent.scheduler.trace import Timeline

_COUNTERS = ("contacts_lost", "diverged", "bad_actions")


class Env:
    """A batch of environments of one task.

    `reset`, `reset_to`, `reset_where` and `step` work eagerly and inside `jax.jit`, `lax.scan`, `vmap` and `shard_map`.

    Args:
        task: what is simulated and how it is scored.
        num_envs: environments in the batch, at least 1.
        backend, scheduler, granularity, window, streams, envs_per_task: see `make`.
        dtype: "float32", or "float64" (with `jax_enable_x64`).
        autoreset: whether `step` resets environments that ended, each to a fresh random state.
        threads: CPU threads at most; 0: all cores.
        per_env: model quantities that differ between environments, e.g. ("geom_friction", "body_mass").
        tracer: what records the control steps (envs/trace.py); None: nothing does.

    Raises:
        ValueError: num_envs < 1, an unknown dtype, float64 without jax_enable_x64, or an unknown model quantity.
    """

    def __init__(
        self,
        task: KernelTask | Task,
        num_envs: int,
        *,
        backend: str = "auto",
        scheduler: str = "serial",
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
        tracer: Tracer | None = None,
    ):
        validate_batch(num_envs, dtype, threads)
        self.backend = resolve_backend(backend)
        if not isinstance(autoreset, bool):
            raise TypeError(f"autoreset: expected True or False, got {autoreset!r}")
        self.num_envs, self.dtype = num_envs, jnp.dtype(dtype)
        self.task: KernelTask = OwnTask(task, dtype) if isinstance(task, Task) else task
        self.autoreset, self._threads = autoreset, threads
        self.model: Model = load_model(self.task.model, nconmax=self.task.nconmax)
        self._defaults = default_model_values(self.model, per_env)
        knobs = {"window": window, "streams": streams, "envs_per_task": envs_per_task, "regroup": regroup}
        asked = {"scheduler": scheduler, "granularity": granularity, **knobs}
        self._choose(asked, per_env, policy)
        self._builder = StreamBuilder(self.task, self.model, per_env, autoreset)
        self.per_env = tuple(per_env)
        self.tile_programs: dict[tuple[Any, ...], TileProgram] = {}  # filled by envs/program.py
        self._programs: dict[tuple[str, MlpPolicy | None, int], Program] = {}
        self._tracer = tracer

    @property
    def scheduler(self) -> str:
        """How a step's tasks are put in order: "serial", "sw", "hw" or "graph"."""
        return self.schedule.scheduler

    # -- facts -------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task.name

    @property
    def observation_size(self) -> int:
        """Entries of an observation."""
        return self.task.observation_size

    @property
    def action_size(self) -> int:
        """Entries of an action."""
        return self.task.action_size

    @property
    def action_low(self) -> np.ndarray:
        """(action_size,) lower bounds."""
        return self.task.action_low

    @property
    def action_high(self) -> np.ndarray:
        """(action_size,) upper bounds."""
        return self.task.action_high

    @property
    def dt(self) -> float:
        """Duration of a control step, s."""
        return float(self.model.opt.timestep) * self.task.frame_skip

    @functools.cached_property
    def fingerprint(self) -> str:
        """Says which states are this environment's: its task, model, arguments and size."""
        what = (self.task.identity() or f"{type(self.task)} {id(self.task)}", self.model.fingerprint, self.dtype.name)
        digest = hashlib.sha256(repr((*what, self.per_env)).encode()).hexdigest()[:12]
        return f"{self.name}[{self.num_envs}]/{digest}"

    def __repr__(self) -> str:
        return f"Env({self.name!r}, num_envs={self.num_envs}, dtype={self.dtype.name!r})"

    def _choose(self, asked: tuned.Settings, per_env: Sequence[str], policy: str) -> None:
        """Take the scheduler and its settings that are asked for; for "auto" what was measured best here."""
        setting: dict[str, Any] = {"dtype": self.dtype.name, "threads": self._threads, "per_env": per_env}
        self._situation = tuned.situation(self.task, self.model, self.num_envs, backend=self.backend, **setting)
        check_regroup(asked["regroup"])
        if asked["regroup"] and asked["scheduler"] == "auto":
            asked = {**asked, "scheduler": "hw"}
        chosen = tuned.recall(asked, self._situation)
        scheduler, granularity = chosen.pop("scheduler"), chosen.pop("granularity")
        knobs = {name: value for name, value in chosen.items() if value is not None}
        self.schedule = resolve_schedule(self.backend, scheduler, policy=policy, **knobs)
        self.granularity = resolve_granularity(granularity, self.backend, self.scheduler)

    # -- programs ----------------------------------------------------------------------------------------------------

    def program(self, kind: str, policy: MlpPolicy | None = None, length: int = 1) -> Program:
        """One of this environment's native programs, compiled when it is first asked for.

        Args:
            kind: "control_step", "reset_all", "reset_where", "restart" or "rollout".
            policy, length: of a rollout, who acts and for how many control steps.
        """
        key = (kind, policy, length)
        if key not in self._programs:
            program = compile_env(self, kind, policy, length)
            if kind == "control_step" and self._tracer is not None:
                tiles = scheduled_tiles(self, kind) if self.backend == "cpu" else None
                program = self._tracer.attach(program, self.num_envs, tiles)
            self._programs[key] = program
        return self._programs[key]

    def stream(
        self, kind: str, policy: MlpPolicy | None = None, split: bool = False
    ) -> tuple[Callable[[], Stream], str | None]:
        """What builds one of this environment's streams, and what says which stream it is, given the source.

        Args:
            kind: "control_step", "reset_all", "reset_where", "restart" or "rollout": a control step with the policy
                inside, which programs of any length repeat.
            policy: of a rollout, who acts. split: whether it is several kernels, which may run at once.
        """
        if kind == "rollout":
            assert policy is not None
            kernel, applied = policy.kernel(self.task, split), policy.applied(self.task)
            make_stream = functools.partial(rollout_stream, self._builder, kernel, self.granularity, applied)
        else:
            make_stream = getattr(self._builder, kind)
        if kind == "control_step":
            make_stream = functools.partial(make_stream, self.granularity)
        identity = self.task.identity()
        if identity is not None:
            granularity = self.granularity if kind in ("control_step", "rollout") else ""
            arguments = (self.per_env, self.autoreset, granularity)
            identity = f"{kind} {identity} {self.model.fingerprint} {arguments} {policy or ''}{' split' * split}"
        return make_stream, identity

    # -- public operations -------------------------------------------------------------------------------------------

    def reset(self, key: jax.Array, model: Mapping[str, Any] | None = None) -> State:
        """Fresh random states.

        Args:
            key: a JAX random key (`jax.random.key(0)` or a legacy uint32 (2,) key), or one for each environment,
                (num_envs,) or (num_envs, 2). With its own key an environment's random numbers depend on nothing else,
                so they are the same on however many devices the environments are.
            model: values of `per_env` quantities, each `(num_envs, *shape)`; left out: the model's own.

        Raises:
            TypeError, ValueError: `key` is no key, or `model` does not fit.
        """
        state = varying_alike(self._blank(key, model))
        return self._updated(state, self._run(self.program("reset_all"), state))

    def reset_to(
        self, qpos: Any, qvel: Any, key: jax.Array | None = None, model: Mapping[str, Any] | None = None
    ) -> State:
        """Start from given physics states; the solver's warm start is zero.

        Args:
            qpos: (num_envs, nq). qvel: (num_envs, nv).
            key: for later resets; default `jax.random.key(0)`.
            model: see reset.
        """
        state = self._blank(jax.random.key(0) if key is None else key, model)
        qpos = checked("qpos", qpos, (self.num_envs, self.model.nq), self.dtype)
        qvel = checked("qvel", qvel, (self.num_envs, self.model.nv), self.dtype)
        state = varying_alike(state.replace(qpos=qpos, qvel=qvel))
        return self._updated(state, self._run(self.program("restart"), state))

    def reset_where(self, state: State, mask: Any) -> State:
        """Fresh random states where `mask` (num_envs,) bool holds.

        The others keep their states; their random streams move on.
        """
        self._check_state(state)
        mask = checked("mask", mask, (self.num_envs,), jnp.dtype(bool))
        return self._updated(state, self._run(self.program("reset_where"), state, mask=mask))

    def step(self, state: State, action: Any) -> State:
        """One control step of all environments.

        Args:
            state: from this environment's `reset` or `step`.
            action: (num_envs, action_size). Controls are clamped to the actuators' ranges by the physics, as in
                MuJoCo. An environment whose action holds NaN or infinity gets zeros and is counted in
                `info["bad_actions"]`.

        Raises:
            TypeError, ValueError: wrong type, shape or dtype, or a state of another environment.
        """
        self._check_state(state)
        action = checked("action", action, (self.num_envs, self.action_size), self.dtype)
        return self._updated(state, self._run(self.program("control_step"), state, action=action))

    def unroll(
        self, policy: MlpPolicy, params: Any, state: State, key: jax.Array, length: int
    ) -> tuple[State, dict[str, jax.Array]]:
        """Let a policy act for `length` control steps, in one native call; `rollout` with `fused=True`.

        Args:
            policy: who acts. params: its parameters.
            state: from this environment's `reset`, `step` or `unroll`.
            key: a JAX random key, for the policy's draws.
            length: control steps, at least 1.

        Returns:
            The state after the last step, and `(length, num_envs, ...)` arrays: `obs`, `action`, `log_prob`, `reward`,
            `terminated`, `truncated` and `final_obs`.

        Raises:
            TypeError, ValueError: the parameters are not the policy's for this environment, or a state of another.
        """
        self._check_state(state)
        policy.check(params, self.observation_size, self.action_size, self.dtype)
        own = {
            "policy_key": key_words(checked_key(key))[None],
            "policy_env": jnp.arange(self.num_envs, dtype=jnp.int32),
            "policy_step": jnp.zeros(self.num_envs, jnp.int32),
            **policy.packed(params, self.task),
        }
        new = self._run(self.program("rollout", policy, length), state, **own)
        kept = {name: new[name] for name in ("action", "log_prob", *KEPT)} | {"obs": new["policy_obs"]}
        return self._updated(state, new | {name: new[name][-1] for name in KEPT}), kept

    def write_trace(self) -> Timeline:
        """Write what was recorded of the control steps so far to the file that `make` was given as `trace`.

        Returns:
            What is in it. If nobody asks, the file is written when the process ends.

        Raises:
            RuntimeError: the environment was made without `trace`.
            OSError: the file cannot be written.
        """
        return write_trace(self._tracer)

    # -- plumbing ----------------------------------------------------------------------------------------------------

    def _run(self, native: Program, state: State, **given: jax.Array) -> dict[str, jax.Array]:
        return run(native, self._arrays(state, **given), self.num_envs)

    def _arrays(self, state: State, **given: jax.Array) -> dict[str, jax.Array]:
        """A state's arrays by the names that programs know them by."""
        carried = {"qpos": state.qpos, "qvel": state.qvel, "obs": state.obs, **state.internal, **given}
        carried |= {name: state.info[name] for name in _COUNTERS}
        return carried | {MODEL_PREFIX + n: value.reshape(self.num_envs, -1) for n, value in state.model.items()}

    def _updated(self, state: State, new: dict[str, jax.Array]) -> State:
        changes: dict[str, Any] = {name: new[name] for name in ("qpos", "qvel", "obs")}
        for name in ("reward", "terminated", "truncated", "final_obs"):
            changes[name] = new.get(name, getattr(state, name))
        if "final_obs" not in new:
            changes["final_obs"] = jnp.copy(new["obs"])  # not the same buffer: see _blank
        changes["internal"] = {name: new.get(name, value) for name, value in state.internal.items()}
        changes["info"] = {n: new.get(n if n in _COUNTERS else "info." + n, v) for n, v in state.info.items()}
        changes["metrics"] = {n: new.get("metrics." + n, v) for n, v in state.metrics.items()}
        return state.replace(**changes)

    def _blank(self, key: jax.Array, model: Mapping[str, Any] | None) -> State:
        """A state of zeros, with keys and per-environment quantities filled in.

        Each leaf is an array of its own: a caller may donate the state, and a buffer cannot be donated twice.
        """
        n, m = self.num_envs, self.model

        def zeros(*shape: int, dtype: Any = self.dtype) -> jax.Array:
            return jnp.zeros((n, *shape), dtype)

        internal = {"qacc_warmstart": zeros(m.nv), "key": self._keys(key)}
        internal |= {name: zeros(dtype=jnp.int32) for name in ("tick", "elapsed")}
        if m.npair:
            internal["work"] = zeros(dtype=jnp.int32)
        internal |= {"memory." + name: zeros(size) for name, size in self.task.memory.items()}
        info = {name: zeros(dtype=jnp.int32) for name in _COUNTERS} | {name: zeros() for name in self.task.info}
        return State(
            qpos=zeros(m.nq),
            qvel=zeros(m.nv),
            obs=zeros(self.observation_size),
            reward=zeros(),
            terminated=zeros(dtype=bool),
            truncated=zeros(dtype=bool),
            final_obs=zeros(self.observation_size),
            info=info,
            metrics={name: zeros() for name in self.task.metrics},
            model=self._model_values(model or {}),
            internal=internal,
            env=self.fingerprint,
        )

    def _model_values(self, given: Mapping[str, Any]) -> dict[str, jax.Array]:
        unknown = sorted(set(given) - set(self.per_env))
        if unknown:
            raise ValueError(f"model: {unknown} were not named in per_env={self.per_env}")
        values = {}
        for name in self.per_env:
            shape = (self.num_envs, *self._defaults[name].shape)
            own = jnp.broadcast_to(jnp.asarray(self._defaults[name], self.dtype), shape)
            values[name] = checked(f"model[{name!r}]", given[name], shape, self.dtype) if name in given else own
        return values

    def _keys(self, key: Any) -> jax.Array:
        """(num_envs, 2) uint32: what the environments' random numbers follow from."""
        n, dtype, shape = self.num_envs, getattr(key, "dtype", None), getattr(key, "shape", None)
        typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
        if (typed and shape == (n,)) or (dtype == jnp.uint32 and shape == (n, 2)):
            return jax.vmap(lambda own: jax.random.bits(own, (2,), jnp.uint32))(jnp.asarray(key))
        if typed and shape:
            raise ValueError(f"key: expected one key or {n}, one for each environment, got keys of shape {shape}")
        return jax.random.bits(checked_key(key), (n, 2), jnp.uint32)

    def _check_state(self, state: State) -> None:
        if not isinstance(state, State):
            raise TypeError(
                f"state: expected a State from this environment's reset or step, got {type(state).__name__}"
            )
        if state.env != self.fingerprint:
            raise ValueError(f"state: expected one of {self.fingerprint}, got one of {state.env or 'no environment'}")


def checked_key(key: Any) -> jax.Array:
    """`key` as one JAX random key; TypeError or ValueError if it is none."""
    if isinstance(key, np.ndarray):
        key = jnp.asarray(key)
    if not isinstance(key, jax.Array) or not (
        jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or (key.dtype == jnp.uint32 and key.shape == (2,))
    ):
        got = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else type(key).__name__
        raise TypeError(f"key: expected a JAX random key such as jax.random.key(0), got {got}")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape != ():
        raise ValueError(f"key: expected one key, got an array of keys of shape {key.shape}; use jax.vmap")
    return key
