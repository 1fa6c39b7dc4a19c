"""How many control steps a second environments take under random actions."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from brax_concurrent.envs.base import Env
from brax_concurrent.envs.mixed import MixedEnv, MixedState
from brax_concurrent.envs.state import State

_SECONDS = {"cpu": 0.3, "cuda": 0.05}  # of one timing, at least: a CPU's clock and neighbours vary more
_PROBE_STEPS = 8  # of the first scan, which says roughly how long a step takes
_GROWTH = 1000.0  # of the next one at most


@dataclasses.dataclass(frozen=True)
class Throughput:
    """How fast environments step, measured.

    Attributes:
        samples: environment steps a second, of each timing in turn.
        steps: control steps of one timing.
        num_envs: environments that take each of them.
        compile_seconds: until the step was compiled: traced, its kernels made or loaded from the disk, and XLA's part.
    """

    samples: tuple[float, ...]
    steps: int
    num_envs: int
    compile_seconds: float

    @property
    def median(self) -> float:
        """Environment steps a second."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """From the slowest to the fastest timing, as a part of the median."""
        return (max(self.samples) - min(self.samples)) / self.median

    def ratio(self, other: Throughput) -> float:
        """How many times as fast as `other`: the median of the quotients, turn by turn.

        Raises:
            ValueError: `other` has another number of timings.
        """
        if len(self.samples) != len(other.samples):
            raise ValueError(f"other: expected {len(self.samples)} timings, got {len(other.samples)}")
        return statistics.median(a / b for a, b in zip(self.samples, other.samples, strict=True))


def measure(
    env: Env | MixedEnv,
    *,
    steps: int | None = None,
    repeats: int = 5,
    key: jax.Array | None = None,
    seconds: float | None = None,
) -> Throughput:
    """Time an environment's control steps under random actions.

    One timing is one jitted `lax.scan` of `steps` control steps, whose actions are drawn inside it, uniform in the
    action range, and whose state is donated and goes on from timing to timing. Compiling and one warm-up come before.

    Args:
        env: what `make` returns, with autoreset; of a MixedEnv, the environments of all robots are counted.
        steps: control steps of a timing; None: as many as take `seconds`.
        repeats: timings, at least 1.
        key: random key for the first reset and for the actions; None: `jax.random.key(0)`.
        seconds: of a timing, at least; None: 0.3 on the CPU, 0.05 on a GPU.

    Raises:
        TypeError: `env` is no environment of this package.
        ValueError: an argument that is out of its range, an environment without autoreset or an action without bounds.
        RuntimeError: what was computed is not finite, or the episodes did not go on.
    """
    return compare([env], steps=steps, repeats=repeats, key=key, seconds=seconds)[0]


def compare(
    envs: Sequence[Env | MixedEnv],
    *,
    steps: int | None = None,
    repeats: int = 5,
    key: jax.Array | None = None,
    seconds: float | None = None,
) -> list[Throughput]:
    """`measure` several environments turn and turn about, so that a machine that slows down slows all of them.

    Args:
        envs: what to compare; all are kept in memory at once.
        steps, repeats, key, seconds: see measure; where `steps` is None, each environment has its own.
    """
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats: expected a whole number of at least 1, got {repeats!r}")
    timings = [Timing(env, steps, key, seconds) for env in envs]
    samples = [[timing.sample() for timing in timings] for _ in range(repeats)]
    for timing in timings:
        timing.check()
    return [timing.throughput(own) for timing, own in zip(timings, zip(*samples, strict=True), strict=True)]


def random_actions(env: Env | MixedEnv, key: jax.Array) -> Any:
    """An action for every environment, uniform between its bounds: `(num_envs, action_size)`, of its dtype.

    Of a MixedEnv, a dict of such arrays by robot, which it is stepped with.
    """
    robots = env.envs if isinstance(env, MixedEnv) else {"": env}
    actions = {}
    for draw, (name, robot) in zip(jax.random.split(key, len(robots)), robots.items(), strict=True):
        low, high = (bound.astype(robot.dtype) for bound in (robot.action_low, robot.action_high))
        actions[name] = jax.random.uniform(draw, (robot.num_envs, robot.action_size), robot.dtype, low, high)
    return actions if isinstance(env, MixedEnv) else actions[""]


class Timing:
    """A compiled and warmed-up scan of random steps; each `sample` goes on from where the last one ended.

    `measure` and `compare` are made of it; take it to measure in turn with something else.

    Args:
        env, steps, key, seconds: see measure.
    """

    def __init__(
        self,
        env: Env | MixedEnv,
        steps: int | None = None,
        key: jax.Array | None = None,
        seconds: float | None = None,
    ):
        _check_arguments(env, steps, seconds)
        self.env = env
        self._device = jax.local_devices(backend="cpu" if env.backend == "cpu" else "gpu")[0]
        with jax.default_device(self._device):
            reset_key, action_key = jax.random.split(jax.random.key(0) if key is None else key)
            self._carry = jax.device_put((env.reset(reset_key), action_key), self._device)
            self._first = {name: int(state.internal["tick"][0]) for name, state in self._states().items()}
            self._taken = 0
            start = time.perf_counter()
            self._compile(steps or _PROBE_STEPS)
            self.compile_seconds = time.perf_counter() - start
            lasts = self._lasts()
            if steps is None:
                self._lengthen(lasts, seconds or _SECONDS[env.backend])
        self.check()

    def _lasts(self) -> float:
        """Seconds of one scan."""
        return self.steps * self.env.num_envs / self.sample()

    def _lengthen(self, lasts: float, seconds: float) -> None:
        """Take a longer scan, and again, since a short one says little of a step's time, until one lasts `seconds`."""
        while lasts < seconds:
            self._compile(math.ceil(self.steps * min(1.1 * seconds / lasts, _GROWTH)))
            lasts = self._lasts()

    def _compile(self, steps: int) -> None:
        def one(carry: tuple[Any, jax.Array], _: None) -> tuple[tuple[Any, jax.Array], None]:
            state, key = carry
            key, draw = jax.random.split(key)
            return (self.env.step(state, random_actions(self.env, draw)), key), None

        def run(carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            return lax.scan(one, carry, length=steps)[0]

        self.steps = steps
        self._run = jax.jit(run, donate_argnums=0).lower(self._carry).compile()

    def sample(self) -> float:
        """Environment steps a second of `steps` control steps."""
        start = time.perf_counter()
        self._carry = jax.block_until_ready(self._run(self._carry))
        elapsed = time.perf_counter() - start
        self._taken += self.steps
        return self.steps * self.env.num_envs / elapsed

    def check(self) -> None:
        """Raise RuntimeError unless all that was computed is finite and every environment took every step."""
        for name, state in self._states().items():
            _check_state(f"{name}: " if name else "", state, self._first[name], self._taken)

    def _states(self) -> dict[str, State]:
        state = self._carry[0]
        return state.states if isinstance(state, MixedState) else {"": state}

    def throughput(self, samples: tuple[float, ...]) -> Throughput:
        """What was measured."""
        return Throughput(samples, self.steps, self.env.num_envs, self.compile_seconds)


def _check_arguments(env: Any, steps: Any, seconds: Any) -> None:
    if not isinstance(env, (Env, MixedEnv)):
        raise TypeError(f"env: expected what bc.make returns, got {type(env).__name__}")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ValueError(f"steps: expected a whole number of at least 1, got {steps!r}")
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"seconds: expected a positive number, got {seconds!r}")
    for robot in env.envs.values() if isinstance(env, MixedEnv) else [env]:
        if not robot.autoreset:
            raise ValueError(f"env: expected {robot.name} with autoreset: ended episodes would be measured")
        if not (np.isfinite(robot.action_low).all() and np.isfinite(robot.action_high).all()):
            raise ValueError(f"env: expected bounds of all actions of {robot.name}, to draw random ones between")


def _check_state(prefix: str, state: State, first: int, steps: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(jnp.isfinite(leaf).all()):
            where = jax.tree_util.keystr(path)
            raise RuntimeError(f"{prefix}state{where} is not finite after {steps} steps: the measurement is void")
    taken = state.internal["tick"] - first
    if not bool((taken == steps).all()):
        raise RuntimeError(f"{prefix}after {steps} steps the environments have taken {taken.min()} to {taken.max()}")
