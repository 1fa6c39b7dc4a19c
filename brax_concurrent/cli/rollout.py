"""The command `rollout`: a batch under random actions, and its transitions in a file."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from brax_concurrent.cli.common import (
    FAILED,
    OK,
    CommandError,
    add_place,
    at_least,
    refuse_path,
    seed,
    wrong_arguments,
)
from brax_concurrent.training.files import whole_file

_COLUMNS = ("obs", "action", "log_prob", "reward", "terminated", "truncated", "final_obs")
"""What a rollout keeps of each step; also the arrays' names in the file, each (steps, num_envs, ...)."""

_CHUNK = 32_768  # environment steps between two looks at the clock
_LONGEST_CHUNK = 100


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser's."""
    text = "Simulate a batch of robots under random actions, and keep the transitions if asked to."
    parser = subparsers.add_parser("rollout", help="simulate a batch under random actions", description=text)
    parser.add_argument("robot", help="a name that `brax-concurrent envs` lists")
    parser.add_argument("--num-envs", type=at_least(1), default=256, metavar="N", help="environments (default 256)")
    parser.add_argument("--steps", type=at_least(1), default=1000, metavar="N", help="control steps (default 1000)")
    parser.add_argument("--out", type=Path, metavar="FILE.npz", help="save the transitions as NumPy arrays")
    parser.add_argument("--force", action="store_true", help="overwrite FILE.npz if it exists")
    parser.add_argument("--seed", type=seed, default=0, help="of resets and actions (default 0)")
    parser.add_argument("--scheduler", default="serial", help="see the documentation of make (default serial)")
    parser.add_argument("--progress", action="store_true", help="show progress even where stderr is no terminal")
    add_place(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulate, print statistics, write the file; returns the exit code."""
    import jax

    from brax_concurrent.envs import make

    refuse_path("rollout", arguments.robot)
    with wrong_arguments():
        setting = {name: getattr(arguments, name) for name in ("backend", "scheduler", "threads")}
        env = make(arguments.robot, arguments.num_envs, **setting)
        key = jax.random.key(arguments.seed)
    record = None if arguments.out is None else _Record(arguments.out, arguments.steps, env, arguments.force)
    start = time.perf_counter()
    rollout = _Rollout(env, key, arguments.steps)
    print(f"{env.name}: {env.num_envs} environments, {env.backend}, {env.scheduler}")
    print(f"compiled in {time.perf_counter() - start:.1f} s (later runs take machine code from the disk)", flush=True)
    statistics = _Statistics(env.num_envs)
    with _Progress(arguments.steps, env.num_envs, arguments.progress) as progress:
        for first, batch in rollout.chunks():
            statistics.add(batch)
            if record is not None:
                record.add(first, batch)
            progress.show(first + len(batch.reward))
    for line in statistics.lines(rollout, progress.seconds):
        print(line)
    if record is not None:
        record.save()
        print(f"saved {arguments.out}: {', '.join(_COLUMNS)}, each ({arguments.steps}, {env.num_envs}, ...)")
    return OK


class _Rollout:
    """A random policy in an environment, in chunks of steps, each one call of the jitted rollout.

    Compiles when made: it takes a first chunk and forgets it.
    """

    def __init__(self, env: Any, key: Any, steps: int):
        import jax

        self.env, self.steps, self._policy = env, steps, random_policy(env)
        reset_key, self._key = jax.random.split(key)
        self.state = env.reset(reset_key)
        self.chunk = min(max(_CHUNK // env.num_envs, 1), _LONGEST_CHUNK, steps)
        for length in {self.chunk, steps % self.chunk} - {0}:
            jax.block_until_ready(self._call(self.state, length, 0))

    def _call(self, state: Any, length: int, first: int) -> Any:
        import jax

        from brax_concurrent.training.rollout import rollout

        return rollout(self.env, self._policy, None, state, jax.random.fold_in(self._key, first), length)

    def chunks(self) -> Iterator[tuple[int, Any]]:
        """(number of the first step, transitions) until all steps are done."""
        import jax

        for first in range(0, self.steps, self.chunk):
            batch = self._call(self.state, min(self.chunk, self.steps - first), first)
            self.state = jax.block_until_ready(batch).state
            yield first, batch


def random_policy(env: Any) -> Callable[..., Any]:
    """Actions uniform in the action space."""
    import jax

    low, high = env.action_low, env.action_high
    log_density = -sum(math.log(b - a) for a, b in zip(low.tolist(), high.tolist(), strict=True))

    def policy(params: None, obs: Any, key: Any) -> tuple[Any, Any]:
        del params
        action = jax.random.uniform(key, (len(obs), len(low)), obs.dtype, low, high)
        return action, jax.numpy.full(len(obs), log_density, obs.dtype)

    return policy


class _Statistics:
    """Returns and lengths of the episodes that ended, step by step."""

    def __init__(self, num_envs: int):
        self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, int)
        self._ended: list[tuple[float, int]] = []
        self._terminated = 0
        self._reward, self._steps = 0.0, 0

    def add(self, batch: Any) -> None:
        reward, terminated, truncated = (np.asarray(x) for x in (batch.reward, batch.terminated, batch.truncated))
        self._reward += float(reward.sum())
        self._steps += reward.size
        self._terminated += int(terminated.sum())
        for r, done in zip(reward, terminated | truncated, strict=True):
            self._returns += r
            self._lengths += 1
            self._ended += zip(self._returns[done].tolist(), self._lengths[done].tolist(), strict=True)
            self._returns[done], self._lengths[done] = 0.0, 0

    def lines(self, rollout: _Rollout, seconds: float) -> Iterator[str]:
        """What to tell the user. `seconds`: how long it took without compiling."""
        rate = self._steps / max(seconds, 1e-9)
        physics = rate * rollout.env.task.frame_skip
        yield (
            f"{self._steps:,} environment steps in {seconds:.2f} s: {rate:,.0f} environment steps/s "
            f"({physics:,.0f} physics steps/s)"
        )
        yield f"reward per step {self._reward / max(self._steps, 1):.4g}"
        if self._ended:
            returns, lengths = zip(*self._ended, strict=True)
            yield (
                f"{len(returns):,} episodes ended ({self._terminated:,} terminated): mean return "
                f"{sum(returns) / len(returns):.4g}, mean length {sum(lengths) / len(lengths):.4g}"
            )
        else:
            yield "no episode ended"
        for name in ("contacts_lost", "diverged"):
            count = int(rollout.state.info[name].sum())
            if count:
                yield f"{name}: {count:,} (see State.info)"


# ---- progress --------------------------------------------------------------------------------------------------------


class _Progress:
    """A bar on stderr where that is a terminal; a line for every tenth where it is not, if asked for."""

    def __init__(self, steps: int, num_envs: int, wanted: bool):
        self._steps, self._num_envs = steps, num_envs
        self._bar = sys.stderr.isatty()
        self._shown = self._bar or wanted
        self._tenths = 0
        self._last = 0.0
        self.seconds = 0.0

    def __enter__(self) -> _Progress:
        self._start = time.perf_counter()
        return self

    def show(self, done: int) -> None:
        """`done` steps are done."""
        self.seconds = time.perf_counter() - self._start
        if not self._shown:
            return
        rate = done * self._num_envs / max(self.seconds, 1e-9)
        left = self.seconds * (self._steps - done) / done
        text = f"{done:,} of {self._steps:,} steps, {rate:,.0f} environment steps/s, {left:.0f} s left"
        if self._bar and (self.seconds - self._last > 0.1 or done == self._steps):
            self._last = self.seconds
            filled = 30 * done // self._steps
            print(f"\r[{'=' * filled}{' ' * (30 - filled)}] {text}\033[K", end="", file=sys.stderr, flush=True)
        elif not self._bar and 10 * done // self._steps > self._tenths:
            self._tenths = 10 * done // self._steps
            print(text, file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar:
            print(file=sys.stderr)


# ---- the file --------------------------------------------------------------------------------------------------------


class _Record:
    """All transitions, in memory until the end; then a file that is there as a whole or not at all."""

    def __init__(self, path: Path, steps: int, env: Any, force: bool):
        self._path, self._force = path, force
        wide = {"obs": env.observation_size, "final_obs": env.observation_size, "action": env.action_size}
        shapes = {name: (steps, env.num_envs, *([wide[name]] if name in wide else [])) for name in _COLUMNS}
        types = {name: bool if name in ("terminated", "truncated") else env.dtype for name in _COLUMNS}
        size = sum(math.prod(shapes[name]) * np.dtype(types[name]).itemsize for name in _COLUMNS)
        self._check_place(size)
        print(f"{path} will have {_bytes(size)}, which are kept in memory meanwhile", flush=True)
        try:
            self._arrays: dict[str, Any] = {name: np.empty(shapes[name], types[name]) for name in _COLUMNS}
        except MemoryError as error:
            raise CommandError(f"no memory for {_bytes(size)}: ask for fewer steps or environments", FAILED) from error

    def _check_place(self, size: int) -> None:
        """Refuse before the work what would fail after it."""
        self._check_overwrite()
        folder = self._path.parent
        if not folder.is_dir():
            raise CommandError(f"cannot write {self._path}: there is no folder {folder}", FAILED)
        try:
            with tempfile.TemporaryFile(dir=folder):
                free = shutil.disk_usage(folder).free
        except OSError as error:
            raise CommandError(f"cannot write {self._path}: {error.strerror}", FAILED) from error
        if size > free:
            text = f"cannot write {self._path}: it needs {_bytes(size)}, its disk has {_bytes(free)} left"
            raise CommandError(text, FAILED)

    def _check_overwrite(self) -> None:
        if self._path.is_dir():
            raise CommandError(f"cannot write {self._path}: it is a folder", FAILED)
        if self._path.exists() and not self._force:
            raise CommandError(f"{self._path} exists; --force overwrites it", FAILED)

    def add(self, first: int, batch: Any) -> None:
        for name, array in self._arrays.items():
            value = np.asarray(getattr(batch, name))
            array[first : first + len(value)] = value

    def save(self) -> None:
        try:
            with whole_file(self._path) as file:
                np.savez(file, **self._arrays)
                self._check_overwrite()
        except OSError as error:
            raise CommandError(f"cannot write {self._path}: {error.strerror or error}", FAILED) from error


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.0f} TB"
