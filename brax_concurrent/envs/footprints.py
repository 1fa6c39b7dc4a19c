"""An environment's programs run on real states, with every kernel held to its footprint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.envs.base import Env
from brax_concurrent.envs.program import tile_program
from brax_concurrent.kernels.layout import MODEL_PREFIX
from brax_concurrent.scheduler.check import FootprintChecker
from brax_concurrent.scheduler.serial import compile_serial

_STEPS = 20  # of random actions between the states


@dataclass(frozen=True)
class CheckedStream:
    """One of an environment's streams, and what its kernels did.

    kind     "reset_all", "control_step", "reset_where" or "restart"
    checker  after the runs: violations, unused declarations, how often each kernel ran
    """

    kind: str
    checker: FootprintChecker


def check_environment(env: Env, seed: int = 0) -> list[CheckedStream]:
    """Run all streams of an environment and see whether their kernels keep to their footprints.

    The control step is examined on fresh states, after 20 steps of random actions, and on states of which every second
    one was thrown: displaced into odd poses and the ground, at its time limit, out of MuJoCo's bounds, or with an
    action that is not finite. The code is the CPU's, on NumPy arrays.

    Args:
        env: what to check; the last tile is partly filled if its number of environments is no multiple of 32.
        seed: of states and actions.
    """
    return _Run(env, seed).streams()


class _Run:
    def __init__(self, env: Env, seed: int):
        self._env, self._random = env, np.random.default_rng(seed)
        self._arrays: dict[str, np.ndarray] = {}
        for name, value in env._model_values({}).items():
            self._arrays[MODEL_PREFIX + name] = np.array(value).reshape(env.num_envs, -1)

    def streams(self) -> list[CheckedStream]:
        env = self._env
        reset, step = _Program(self, "reset_all"), _Program(self, "control_step")
        self._arrays["key"] = self._random.integers(1 << 32, size=(env.num_envs, 2), dtype=np.uint32)
        reset.check()
        self._act()
        step.check()
        for _ in range(_STEPS):
            self._act()
            step.run()
        step.check()
        self._act()
        self._throw()
        step.check()
        where, restart = _Program(self, "reset_where"), _Program(self, "restart")
        self._arrays["mask"] = self._random.random(env.num_envs) < 0.5
        where.check()
        self._throw()
        restart.check()
        return [CheckedStream(each.kind, each.checker) for each in (reset, step, where, restart)]

    def buffers(self, specs: Any) -> list[np.ndarray]:
        """The arrays that a program takes; those that are new are 0."""
        for spec in specs:
            if spec.name not in self._arrays:
                self._arrays[spec.name] = np.zeros(spec.array_shape(self._env.num_envs), spec.dtype)
        return [self._arrays[spec.name] for spec in specs]

    def _act(self) -> None:
        env = self._env
        action = self._random.uniform(env.action_low, env.action_high, (env.num_envs, env.action_size))
        self._arrays["action"] = action.astype(env.dtype)

    def _throw(self) -> None:
        arrays, dtype = self._arrays, self._env.dtype
        for name, size in (("qpos", 0.5), ("qvel", 3.0)):
            odd = arrays[name][1::2]
            odd += self._random.normal(0, size, odd.shape).astype(dtype)
        arrays["elapsed"][3::8] = self._env.task.max_episode_steps - 1
        arrays["action"][5::8] = np.nan
        arrays["qvel"][7::8] = 1e12


class _Program:
    """One program of the environment, checked or just run."""

    def __init__(self, run: _Run, kind: str):
        self.kind, self._run, env = kind, run, run._env
        self._program = tile_program(env, kind)
        self._num_envs = env.num_envs
        self.checker = FootprintChecker(self._program, env.num_envs)
        self._native = compile_serial(self._program)

    def check(self) -> None:
        """Run it once, examined."""
        self.checker.run(self._run.buffers(self._program.layout.buffers))

    def run(self) -> None:
        """Run it once, natively."""
        run_program(self._native, self._run.buffers(self._native.buffers), self._num_envs)
