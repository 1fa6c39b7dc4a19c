"""Different robots in one batch: one environment whose state, action and results are dicts by robot.

A step of all robots is ONE native call. Its threads take a tile of whichever robot is next, so a robot with little to
do fills the gaps at the end of one with much to do, and nothing waits between robots (backends/composite.py).
"""

from __future__ import annotations

import dataclasses
import difflib
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brax_concurrent.envs.arrays import checked, run, varying_alike
from brax_concurrent.envs.base import Env, checked_key
from brax_concurrent.envs.own_task import AnyTask
from brax_concurrent.envs.program import compile_mixed, tile_composite
from brax_concurrent.envs.state import State
from brax_concurrent.envs.trace import Tracer, write_trace
from brax_concurrent.interop.jax_ffi import Program
from brax_concurrent.kernels.model import Model
from brax_concurrent.scheduler.trace import Timeline

Robots = Mapping[str, int | tuple[int, Mapping[str, Any] | AnyTask]]
"""What `make` takes for a mixed batch: for each robot its num_envs, or (num_envs, arguments), or (num_envs, Task)."""

_OWN = ("per_env", "max_episode_steps", "nconmax")  # arguments of `make` that may differ between robots


@dataclasses.dataclass(frozen=True)
class MixedState:
    """What `MixedEnv.reset` and `step` return: the state of every robot, by its name.

    An attribute of `State` that is an array there is a dict of arrays here: `state.obs["ant"]` is `(2048, 105)`.

    Attributes:
        states: each robot's own State, as an environment of that robot alone returns it.
    """

    states: dict[str, State]

    def _by_robot(self, attribute: str) -> dict[str, Any]:
        return {name: getattr(state, attribute) for name, state in self.states.items()}

    @property
    def qpos(self) -> dict[str, jax.Array]:
        """By robot, (num_envs, nq) positions."""
        return self._by_robot("qpos")

    @property
    def qvel(self) -> dict[str, jax.Array]:
        """By robot, (num_envs, nv) velocities."""
        return self._by_robot("qvel")

    @property
    def obs(self) -> dict[str, jax.Array]:
        """By robot, (num_envs, observation_size)."""
        return self._by_robot("obs")

    @property
    def reward(self) -> dict[str, jax.Array]:
        """By robot, (num_envs,)."""
        return self._by_robot("reward")

    @property
    def terminated(self) -> dict[str, jax.Array]:
        """By robot, (num_envs,) bool."""
        return self._by_robot("terminated")

    @property
    def truncated(self) -> dict[str, jax.Array]:
        """By robot, (num_envs,) bool."""
        return self._by_robot("truncated")

    @property
    def done(self) -> dict[str, jax.Array]:
        """By robot, (num_envs,) bool: terminated or truncated."""
        return self._by_robot("done")

    @property
    def final_obs(self) -> dict[str, jax.Array]:
        """By robot, (num_envs, observation_size) before any reset."""
        return self._by_robot("final_obs")

    @property
    def info(self) -> dict[str, dict[str, jax.Array]]:
        """By robot, then by quantity, (num_envs,)."""
        return self._by_robot("info")

    @property
    def metrics(self) -> dict[str, dict[str, jax.Array]]:
        """By robot, then by part of the reward, (num_envs,)."""
        return self._by_robot("metrics")

    @property
    def model(self) -> dict[str, dict[str, jax.Array]]:
        """By robot, then by quantity: per-environment model quantities."""
        return self._by_robot("model")

    def replace(self, **changes: Mapping[str, Any]) -> MixedState:
        """A copy with some attributes of some robots changed: `state.replace(qpos={"ant": qpos})`.

        Raises:
            ValueError: a robot that the state does not have.
        """
        for attribute, values in changes.items():
            _check_names(attribute, values, self.states, all_of_them=False)

        def changed(name: str, state: State) -> State:
            own = {attribute: values[name] for attribute, values in changes.items() if name in values}
            return state.replace(**own)

        return MixedState({name: changed(name, state) for name, state in self.states.items()})


jax.tree_util.register_dataclass(MixedState, data_fields=["states"], meta_fields=[])


class MixedEnv:
    """A batch of environments of different tasks. Make it with `make({"ant": 2048, "humanoid": 1024})`.

    `reset`, `reset_to`, `reset_where` and `step` are pure functions, as those of `Env`; each is one native call. What
    is an array there is a dict of arrays by robot here. Each robot's numbers are, bit for bit, those of its own
    environment, reset with the key `robot_key(key, name)`.

    Args:
        envs: the robots' environments, by names of your choice; all for one backend.
        threads: CPU threads at most; 0: as many as the environments allow.
        tracer: what records the control steps (envs/trace.py); None: nothing does.

    Raises:
        TypeError: a name that is no string, or a value that is no Env.
        ValueError: no environments, or environments for different backends or with different schedules.
    """

    def __init__(self, envs: Mapping[str, Env], threads: int = 0, tracer: Tracer | None = None):
        for name, env in envs.items():
            if not isinstance(name, str) or not isinstance(env, Env):
                raise TypeError(f"envs: expected environments by name, got {name!r}: {type(env).__name__}")
        if not envs:
            raise ValueError("envs: expected at least one robot, got none")
        backends = {name: env.backend for name, env in envs.items()}
        if len(set(backends.values())) > 1:
            raise ValueError(f"envs: expected one backend for all, got {backends}")
        self._envs, self._threads = dict(envs), threads
        self.backend = next(iter(backends.values()))
        schedules = {name: env.schedule for name, env in envs.items()}
        if len(set(schedules.values())) > 1:
            raise ValueError(f"envs: expected one schedule for all, got {schedules}")
        self._programs: dict[str, Program] = {}
        self._tracer = tracer

    # -- facts -------------------------------------------------------------------------------------------------------

    @property
    def envs(self) -> Mapping[str, Env]:
        """The environment of each robot alone; it steps `state.states[name]`."""
        return MappingProxyType(self._envs)

    @property
    def num_envs(self) -> int:
        """Environments of all robots together."""
        return sum(env.num_envs for env in self._envs.values())

    @property
    def observation_size(self) -> dict[str, int]:
        """By robot, entries of an observation."""
        return {name: env.observation_size for name, env in self._envs.items()}

    @property
    def action_size(self) -> dict[str, int]:
        """By robot, entries of an action."""
        return {name: env.action_size for name, env in self._envs.items()}

    @property
    def action_low(self) -> dict[str, np.ndarray]:
        """By robot, (action_size,) lower bounds."""
        return {name: env.action_low for name, env in self._envs.items()}

    @property
    def action_high(self) -> dict[str, np.ndarray]:
        """By robot, (action_size,) upper bounds."""
        return {name: env.action_high for name, env in self._envs.items()}

    @property
    def dt(self) -> dict[str, float]:
        """By robot, duration of a control step, s."""
        return {name: env.dt for name, env in self._envs.items()}

    @property
    def model(self) -> dict[str, Model]:
        """By robot, its Model."""
        return {name: env.model for name, env in self._envs.items()}

    def __repr__(self) -> str:
        return f"MixedEnv({ {name: env.num_envs for name, env in self._envs.items()} })"

    # -- public operations -------------------------------------------------------------------------------------------

    def reset(self, key: jax.Array, model: Mapping[str, Mapping[str, Any]] | None = None) -> MixedState:
        """Fresh random states of all robots.

        Args:
            key: a JAX random key; robot NAME's own is `robot_key(key, NAME)`.
            model: by robot, values of its `per_env` quantities; what is left out is the model's own.

        Raises:
            TypeError, ValueError: `key` is no key, or `model` does not fit.
        """
        return self._run("reset_all", varying_alike(self._blank(key, model)))

    def reset_to(
        self,
        qpos: Mapping[str, Any],
        qvel: Mapping[str, Any],
        key: jax.Array | None = None,
        model: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> MixedState:
        """Start from given physics states; the solver's warm start is zero.

        Args:
            qpos: by robot, (num_envs, nq). qvel: by robot, (num_envs, nv).
            key: for later resets; default `jax.random.key(0)`.
            model: see reset.
        """
        states = self._blank(jax.random.key(0) if key is None else key, model)
        sizes = self.model
        qpos = self._checked("qpos", qpos, lambda name: (sizes[name].nq,))
        qvel = self._checked("qvel", qvel, lambda name: (sizes[name].nv,))
        states = {name: state.replace(qpos=qpos[name], qvel=qvel[name]) for name, state in states.items()}
        return self._run("restart", varying_alike(states))

    def reset_where(self, state: MixedState, mask: Mapping[str, Any]) -> MixedState:
        """Fresh random states where `mask` holds; by robot, (num_envs,) bool.

        The others keep their states; their random streams move on.
        """
        self._check_state(state)
        given = self._checked("mask", mask, lambda name: (), bool)
        return self._run("reset_where", state.states, mask=given)

    def step(self, state: MixedState, action: Mapping[str, Any]) -> MixedState:
        """One control step of all environments of all robots.

        Args:
            state: from this environment's `reset` or `step`.
            action: by robot, (num_envs, action_size), see `Env.step`.

        Raises:
            TypeError, ValueError: wrong type, shape or dtype, a robot too many or too few, or a state of another
                environment; the message names the robot.
        """
        self._check_state(state)
        given = self._checked("action", action, lambda name: (self._envs[name].action_size,))
        return self._run("control_step", state.states, action=given)

    def write_trace(self) -> Timeline:
        """Write what was recorded of the control steps so far; see `Env.write_trace`."""
        return write_trace(self._tracer)

    # -- plumbing ----------------------------------------------------------------------------------------------------

    def _blank(self, key: jax.Array, model: Mapping[str, Mapping[str, Any]] | None) -> dict[str, State]:
        _check_names("model", model or {}, self._envs, all_of_them=False)
        key = checked_key(key)
        states = {}
        for name, env in self._envs.items():
            try:
                states[name] = env._blank(robot_key(key, name), (model or {}).get(name))
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name}: {error}") from None
        return states

    def _run(self, kind: str, states: Mapping[str, State], **given: Mapping[str, jax.Array]) -> MixedState:
        """The robots' states after one of their programs, see `Env.program`."""
        own = {n: {argument: values[n] for argument, values in given.items()} for n in self._envs}
        arrays = {n: env._arrays(states[n], **own[n]) for n, env in self._envs.items()}
        flat = {f"{n}.{array}": value for n, named in arrays.items() for array, value in named.items()}
        results = run(self.program(kind), flat, self.num_envs)
        outputs = {n: [spec.name for spec in env.program(kind).outputs] for n, env in self._envs.items()}
        new = {n: {array: results[f"{n}.{array}"] for array in named} for n, named in outputs.items()}
        return MixedState({n: env._updated(states[n], new[n]) for n, env in self._envs.items()})

    def program(self, kind: str) -> Program:
        """The robots' programs of one kind as one, the robot whose tiles take longest first; see `Env.program`."""
        if kind not in self._programs:
            envs = sorted(self._envs.items(), key=lambda item: -_tile_work(item[1]))
            parts = [(name, env, env.num_envs * _tile_work(env)) for name, env in envs]
            program = compile_mixed(parts, kind, self._threads)
            if kind == "control_step" and self._tracer is not None:
                tiles = None if self.backend == "cuda" else tile_composite(parts, kind)
                program = self._tracer.attach(program, self.num_envs, tiles)
            self._programs[kind] = program
        return self._programs[kind]

    def _checked(
        self, argument: str, given: Any, shape: Callable[[str], tuple[int, ...]], dtype: Any = None
    ) -> dict[str, jax.Array]:
        """Arrays by robot, (num_envs, *shape(name)), of the robot's dtype if none is said."""
        _check_names(argument, given, self._envs)
        return {
            name: checked(
                f"{argument}[{name!r}]", given[name], (env.num_envs, *shape(name)), jnp.dtype(dtype or env.dtype)
            )
            for name, env in self._envs.items()
        }

    def _check_state(self, state: Any) -> None:
        if not isinstance(state, MixedState):
            raise TypeError(
                f"state: expected a MixedState from this environment's reset or step, got {type(state).__name__}"
            )
        _check_names("state", state.states, self._envs)
        for name, env in self._envs.items():
            own = state.states[name]
            if not isinstance(own, State):
                raise TypeError(f"state[{name!r}]: expected a State, got {type(own).__name__}")
            found = own.env
            if found != env.fingerprint:
                raise ValueError(
                    f"state[{name!r}]: expected one of {env.fingerprint}, got one of {found or 'no environment'}"
                )


def robot_key(key: jax.Array, name: str) -> jax.Array:
    """The random key of one robot in a mixed batch: `key` with the CRC-32 of the robot's name folded in.

    It depends on nothing but the two, so that adding a robot, or changing a robot's num_envs, leaves the others' random
    states as they are.
    """
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def make_mixed(
    robots: Robots, make: Callable[..., Env], common: Mapping[str, Any], tracer: Tracer | None = None
) -> MixedEnv:
    """The mixed batch that a dict describes.

    Args:
        robots: see Robots.
        make: makes the environment of one robot: make(name or Task, num_envs, **arguments).
        common: arguments for every robot. A robot's own may only differ in the task's arguments, `per_env`,
            `max_episode_steps` and `nconmax`.
        tracer: see MixedEnv.

    Raises:
        TypeError, ValueError: an empty dict, or a robot's name, number or argument that is wrong; the message names it.
    """
    if not robots:
        raise ValueError("name: expected at least one robot in the dict, got none")
    envs = {}
    for name, value in robots.items():
        if not isinstance(name, str):
            raise TypeError(f"name: expected the names of robots as keys, got {name!r}")
        num_envs, what = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
        if not isinstance(what, Mapping | AnyTask) or isinstance(num_envs, AnyTask | Mapping | tuple):
            raise TypeError(
                f"{name}: expected num_envs, (num_envs, dict of task arguments) or (num_envs, Task), got {value!r}"
            )
        if isinstance(num_envs, bool) or not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
            raise ValueError(f"{name}: num_envs must be a whole number of at least 1, got {num_envs!r}")
        arguments = {} if isinstance(what, AnyTask) else what
        for argument in arguments:
            if argument == "trace" or (argument in common and argument not in _OWN):
                raise TypeError(f"{name}: {argument} is one for the whole batch, give it to make")
        envs[name] = make(what if isinstance(what, AnyTask) else name, int(num_envs), **{**common, **arguments})
    return MixedEnv(envs, tracer=tracer)


def _tile_work(env: Env) -> int:
    """A guess at how long a tile takes, good enough to put the robots in order.

    Physics evaluations of a control step times the square of what they solve for.
    """
    stages = 4 if env.model.opt.integrator == "rk4" else 1
    return env.task.frame_skip * stages * env.model.nv**2


def _check_names(argument: str, given: Any, robots: Iterable[str], all_of_them: bool = True) -> None:
    """Raise unless `given` is a dict whose keys are robots, and all of them unless that is not asked for."""
    known = list(robots)
    if not isinstance(given, Mapping):
        raise TypeError(f"{argument}: expected a dict by robot {known}, got {type(given).__name__}")
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"{argument}: there is no robot {name!r}{hint}; expected {known}")
    missing = [name for name in known if name not in given]
    if missing and all_of_them:
        raise ValueError(f"{argument}: nothing for robot {', '.join(map(repr, missing))}; expected {known}")
