"""A training run: its loop, its folder, and going on with it after an interruption."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brax_concurrent import __version__
from brax_concurrent.envs import Env, Task, make
from brax_concurrent.envs.arrays import resolve_backend
from brax_concurrent.training import ppo, statistics
from brax_concurrent.training.checkpoint import CheckpointError, Checkpoints
from brax_concurrent.training.evaluate import Scores, make_evaluate
from brax_concurrent.training.files import whole_file
from brax_concurrent.training.logs import Log
from brax_concurrent.training.policy import POLICY, Policy
from brax_concurrent.training.ppo import Config
from brax_concurrent.training.presets import preset

RUN, CHECKPOINTS = "run.json", "checkpoints"
_LOCK = "lock"
"""In a run's folder, beside the newest policy: what it is made with, and the folder of checkpoints."""


class NotFiniteError(RuntimeError):
    """NaN or infinity in what is learnt from or learnt."""


class FolderInUseError(FileExistsError):
    """Another process trains in the folder."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while training, after what was learnt had been saved; the message says where."""


@dataclasses.dataclass
class Clock:
    """Seconds of a run so far, compiling apart; `compiling` is of this process only."""

    collection: float = 0.0
    learning: float = 0.0
    evaluation: float = 0.0
    compiling: float = 0.0

    @property
    def total(self) -> float:
        """Wall time of the run without compiling."""
        return self.collection + self.learning + self.evaluation

    @property
    def collection_share(self) -> float:
        """Of the time that training takes, evaluations apart."""
        return self.collection / max(self.collection + self.learning, 1e-9)

    def steps_per_second(self, steps: int) -> float:
        """Environment steps collected and learnt from, evaluations apart."""
        return steps / max(self.collection + self.learning, 1e-9)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        policy: at its end; also in its folder.
        scores: of its last evaluation.
        steps: environment steps that it was trained for.
        clock: where the time went.
        env: what it was trained in.
    """

    policy: Policy
    scores: Scores
    steps: int
    clock: Clock
    env: Env


def train(
    robot: str | Task,
    out: Path,
    *,
    config: Config | None = None,
    seed: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    resume: bool = False,
    backend: str = "auto",
    threads: int = 0,
    report: Callable[[str], None] = print,
) -> Result:
    """Train a policy by PPO, in a folder that keeps all that is needed to go on.

    On the CPU a run that was interrupted or killed, and resumed with the same arguments, ends with the bits of one
    that was not, unless `seconds` are given.

    Args:
        robot: a name that `make` knows, or a Task, with bounded actions.
        out: the run's folder, made if it is not there: run.json, policy.npz, progress.csv, TensorBoard's events and
            checkpoints/.
        config: None: the robot's preset for the backend, or, with `resume`, that of the run.
        seed: of all random numbers; None: 0, or, with `resume`, that of the run.
        steps: environment steps in all, instead of the configuration's.
        seconds: stop after about so much wall time without compiling, if that comes before the steps.
            The learning rate then falls with time.
        resume: go on from the newest checkpoint in `out`, or from the start if the run has none yet.
        backend, threads: see `make`.
        report: gets a line at the start and one at every evaluation.

    Raises:
        TypeError, ValueError: an argument is not what it should be; the message names it.
        FileExistsError: `out` holds a run that has learnt something, and `resume` is False; or, as a FolderInUseError,
            another process trains there.
        CheckpointError: a checkpoint cannot be written, or not be gone on from.
        NotFiniteError: NaN or infinity came up; the checkpoints stay.
        Interrupted: Ctrl-C; a checkpoint was written.
        OSError: a file cannot be written.
    """
    if config is not None and not isinstance(config, Config):
        raise TypeError(
            "config: expected a ppo.Config, such as dataclasses.replace(presets.preset('ant', 'cpu'), steps=60000), "
            f"got {type(config).__name__}"
        )
    if seed is not None:
        _check_seed(seed)
    backend = resolve_backend(backend)
    device = jax.local_devices(backend="cpu" if backend == "cpu" else "gpu")[0]
    with jax.default_device(device):
        name, config, seed = _settings(robot, out, config, seed, steps, backend, resume)
        with _alone(out):
            _write_settings(out, name, config, seed)
            run = _Run(robot, out, config, seed, seconds, resume, backend, threads, report)
            try:
                return run.go()
            finally:
                run.close()


def _check_seed(seed: Any) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise ValueError(f"seed: expected a whole number from 0 to 2**63 - 1, got {seed!r}")


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keep the folder of a run from other processes: two would take each other's checkpoints for damaged."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(out)) from error
    with (out / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FolderInUseError(f"out: another process is training in {out}") from error
        yield


class _Run:
    """One process's part of a run."""

    def __init__(
        self,
        robot: str | Task,
        out: Path,
        config: Config,
        seed: int,
        seconds: float | None,
        resume: bool,
        backend: str,
        threads: int,
        report: Callable[[str], None],
    ):
        self._out, self._config, self._seconds, self._report = out, config, seconds, report
        self._key = jax.random.key(seed)
        self._env = env = make(robot, config.num_envs, backend=backend, threads=threads)
        self._eval_env = make(robot, config.eval_envs, backend=backend, threads=threads)
        self._checkpoints = Checkpoints(out / CHECKPOINTS)
        self._clock = Clock()
        self._iteration = 0
        self._ended: list[ppo.Episodes] = []  # since the last row of the log
        self._carry = _start(env, config, self._key)
        if resume:
            self._restore()
        self._iterations = math.ceil(config.steps / config.batch_size)
        self._scores: Scores | None = None
        try:
            self._log = Log(out, self._iteration, self.steps)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        goes_on = f" after {self.steps:,} steps" if resume else ""
        report(f"{env.name}{goes_on}: {env.num_envs:,} environments, {env.backend}, {env.scheduler}; compiling")
        try:
            self._compile()
        except BaseException:  # it takes long enough to be interrupted in
            self.close()
            raise

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return self._iteration * self._config.batch_size

    @property
    def _progress(self) -> float:
        """From 0 to 1 at the end."""
        by_time = 0.0 if self._seconds is None else self._clock.total / self._seconds
        return max(self._iteration / self._iterations, by_time)

    def _restore(self) -> None:
        """Take the newest checkpoint up; there is none yet of a run that was stopped before its first."""
        if self._checkpoints.latest() is None:
            if (self._out / POLICY).exists():
                raise CheckpointError(
                    f"there is no checkpoint in {self._checkpoints.folder}, but {self._out / POLICY} holds what a run "
                    "has learnt: train in another folder, or remove that file to begin again"
                )
            return
        self._iteration, self._carry, about = self._checkpoints.restore(self._carry)
        self._clock = Clock(**about["clock"])
        self._ended = [ppo.Episodes(*about.get("ended", (0, 0.0, 0)))]

    def go(self) -> Result:
        """Train to the end."""
        evaluations = self._config.evaluations
        with _interruptible() as interrupt:
            while self._progress < 1.0 and not interrupt.is_set():
                before = int(self._progress * evaluations)
                metrics = self._iterate()
                if int(self._progress * evaluations) > before or self._progress >= 1.0:
                    self._milestone(metrics)
        if self._progress < 1.0:
            self._save()
            raise Interrupted(f"saved {self._out} after {self.steps:,} steps; resume goes on from there")
        if self._scores is None:  # the run had already ended, perhaps in the middle of saving
            self._report(
                f"{self._out} has {self.steps:,} steps, in {self._clock.total:,.0f} s: nothing is left to do, unless "
                "more steps or seconds are asked for"
            )
            self._scores = self._scored()
            self._save()
        return Result(self._policy(), self._scores, self.steps, self._clock, self._env)

    def close(self) -> None:
        """Let go of the files."""
        self._log.close()
        self._checkpoints.close()

    # ---- the parts

    def _compile(self) -> None:
        start = time.perf_counter()
        collect, learn = ppo.make_collect(self._env, self._config), ppo.make_learn(self._config)
        key, rate = self._keys()[0], jnp.float32(0.0)
        self._collect = jax.jit(collect, donate_argnums=1).lower(*self._carry, key).compile()
        batch = jax.eval_shape(collect, *self._carry, key)[0]
        self._learn = jax.jit(learn, donate_argnums=0).lower(self._carry[0], batch, rate, key).compile()
        self._evaluate = make_evaluate(self._eval_env).lower(self._policy(), key).compile()
        self._clock.compiling = time.perf_counter() - start

    def _keys(self) -> tuple[jax.Array, jax.Array]:
        """For collecting and for learning in this iteration: functions of its number, which a resumed run has too."""
        collection, learning = jax.random.split(jax.random.fold_in(self._key, self._iteration))
        return collection, learning

    def _iterate(self) -> dict[str, float]:
        """Collect a batch and learn from it."""
        learner, state, tally = self._carry
        collection_key, learning_key = self._keys()
        rate = self._learning_rate()
        start = time.perf_counter()
        batch, tally, ended = jax.block_until_ready(self._collect(learner, state, tally, collection_key))
        collected = time.perf_counter()
        learner, metrics, bad = self._learn(learner, batch, jnp.float32(rate), learning_key)
        metrics, bad, ended = jax.device_get((metrics, bad, ended))
        jax.block_until_ready(learner)
        learnt = time.perf_counter()
        self._clock.collection += collected - start
        self._clock.learning += learnt - collected
        self._carry = learner, batch.state, tally
        self._iteration += 1
        self._ended.append(ended)
        self._check(bad)
        return {name: float(value) for name, value in metrics.items()} | {"learning_rate": rate}

    def _learning_rate(self) -> float:
        first, last = self._config.learning_rate, self._config.final_learning_rate
        return first + (last - first) * min(self._progress, 1.0)

    def _check(self, bad: dict[str, Any]) -> None:
        """Raise NotFiniteError if something is not finite."""
        first = ppo.first_not_finite(bad)
        if first is None:
            return
        saved = self._checkpoints.latest()
        kept = "there is no checkpoint" if saved is None else f"the checkpoint of iteration {saved} is kept"
        raise NotFiniteError(
            f"{first} is not finite in iteration {self._iteration}, after {self.steps:,} steps; {kept} in {self._out}"
        )

    def _milestone(self, metrics: dict[str, float]) -> None:
        """Evaluate, save, log and report."""
        self._scores = scores = self._scored()
        clock, config = self._clock, self._config
        ended, self._ended = self._sums(), []
        episodes = int(ended.number)
        row = metrics | {
            "iteration": self._iteration,
            "steps": self.steps,
            "seconds": clock.total,
            "collection_seconds": clock.collection,
            "learning_seconds": clock.learning,
            "evaluation_seconds": clock.evaluation,
            "steps_per_second": clock.steps_per_second(self.steps),
            "collection_share": clock.collection_share,
            "episodes": episodes,
            "train_return": float(ended.returns) / episodes if episodes else math.nan,
            "train_length": float(ended.lengths) / episodes if episodes else math.nan,
            "eval_return": scores.mean,
            "eval_std": scores.std,
            "eval_length": float(scores.lengths.mean()),
        }
        self._log.write(row)
        total = self._iterations * config.batch_size
        self._save()
        self._report(
            f"{self.steps:>13,} of {total:,} steps  return {scores.mean:>8,.1f} +- {scores.std:,.1f}  "
            f"{row['steps_per_second']:>9,.0f} env steps/s  collection {clock.collection_share:.0%} of training  "
            f"{clock.total:,.0f} s"
        )

    def _sums(self) -> ppo.Episodes:
        """Of the episodes that ended since the last row of the log; in double precision, however they are grouped."""
        return ppo.Episodes(*(np.sum(x, dtype=float) for x in zip(*self._ended, strict=True)))

    def _scored(self) -> Scores:
        start = time.perf_counter()
        key = jax.random.fold_in(self._key, 2**31 - 1)  # no iteration's
        scores = Scores(*map(np.asarray, self._evaluate(self._policy(), key)))
        self._clock.evaluation += time.perf_counter() - start
        return scores

    def _policy(self) -> Policy:
        learner: ppo.Learner = self._carry[0]
        seen, env = learner.statistics, self._env
        return Policy(
            robot=env.name,
            activation=self._config.activation,
            actor=learner.params["actor"],
            log_std=learner.params["log_std"],
            mean=seen.mean,
            variance=seen.variance,
            low=jnp.asarray(env.action_low, jnp.float32),
            high=jnp.asarray(env.action_high, jnp.float32),
            steps=self.steps,
        )

    def _save(self) -> None:
        about = {"clock": dataclasses.asdict(self._clock), "steps": self.steps}
        if self._ended:
            about["ended"] = [float(x) for x in self._sums()]
        if self._checkpoints.latest() != self._iteration:
            self._checkpoints.save(self._iteration, self._carry, about)
        self._policy().save(self._out / POLICY)


def _start(env: Env, config: Config, key: jax.Array) -> tuple[ppo.Learner, Any, ppo.Tally]:
    """What is carried from iteration to iteration, at the start.

    Episodes start at all ages, so that those of one age are not the whole batch, time and again.
    """
    init_key, reset_key, age_key = jax.random.split(jax.random.fold_in(key, 2**31 - 2), 3)
    params = ppo.init_params(init_key, env.observation_size, env.action_size, config)
    optimizer = ppo.make_optimizer(config).init(params)
    state = env.reset(reset_key)
    age = jax.random.randint(age_key, (env.num_envs,), 0, env.task.max_episode_steps)
    state = state.replace(internal=state.internal | {"elapsed": age.astype(state.internal["elapsed"].dtype)})
    # NaN: what a first episode had earned before is unknown, so that its return is not counted.
    tally = ppo.Tally(jnp.full(env.num_envs, jnp.nan), jnp.zeros(env.num_envs, jnp.int32))
    return ppo.Learner(params, optimizer, statistics.empty(env.observation_size)), state, tally


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that the iteration is finished first; a second one is as always."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(*_: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


# ---- The run's folder


def _settings(
    robot: str | Task, out: Path, config: Config | None, seed: int | None, steps: int | None, backend: str, resume: bool
) -> tuple[str, Config, int]:
    """Robot, configuration and seed of a new run, or of that in `out`."""
    name = robot.name if isinstance(robot, Task) else make(robot, 1, backend=backend).name
    if resume:
        kept = read_run(out)
        _check_same(out, kept, name, config, seed)
        config, seed = config or kept["config"], kept["seed"]
    elif (out / POLICY).exists() or ((out / CHECKPOINTS).is_dir() and any((out / CHECKPOINTS).iterdir())):
        raise FileExistsError(f"out: {out} holds a run already; resume it, or name another folder")
    config = config or preset(name, backend)
    config = config if steps is None else dataclasses.replace(config, steps=steps)
    return name, config, seed or 0


def _write_settings(out: Path, name: str, config: Config, seed: int) -> None:
    about = {"robot": name, "seed": seed, "version": __version__, "config": dataclasses.asdict(config)}
    with whole_file(out / RUN) as file:
        file.write((json.dumps(about, indent=1) + "\n").encode())


def read_run(out: Path) -> dict[str, Any]:
    """What a run was made with: "robot", "seed", "version", "config".

    Raises:
        CheckpointError: the folder holds no run.
    """
    path = out / RUN
    try:
        about = json.loads(path.read_text())
        about["config"] = Config(**about["config"])
        if not isinstance(about["robot"], str):
            raise ValueError(f"its robot is {about['robot']!r}")
        _check_seed(about["seed"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{out} holds no training run: there is no {path}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged or not of a training run here: {error}") from error
    return about


def _check_same(out: Path, kept: dict[str, Any], name: str, config: Config | None, seed: int | None) -> None:
    """Raise ValueError if a run would be gone on with by other settings than its own, but for the steps."""
    if kept["robot"] != name:
        raise ValueError(f"robot: {out} is a run of {kept['robot']!r}, got {name!r}")
    if seed not in (None, kept["seed"]):
        raise ValueError(f"seed: {out} is a run with seed {kept['seed']}, got {seed}")
    own = dataclasses.asdict(kept["config"])
    given = own if config is None else dataclasses.asdict(config)
    for field, value in own.items():
        if field != "steps" and given[field] != value:
            raise ValueError(f"{field}: {out} is a run with {value!r}, got {given[field]!r}")
