"""The command `brax-concurrent`: roll robots out, list them, check them against MuJoCo."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from brax_concurrent import __version__

EXAMPLES = """\
examples:
  brax-concurrent envs
  brax-concurrent rollout ant --num-envs 256 --steps 1000
  brax-concurrent rollout humanoid --num-envs 64 --steps 200 --out humanoid.npz
  brax-concurrent check walker2d --dtype float64
  brax-concurrent check my_robot.xml

exit codes: 0 done; 1 a tolerance was missed or a file could not be written; 2 wrong arguments; 130 interrupted (Ctrl-C)
"""

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

_COLUMNS = ("obs", "action", "log_prob", "reward", "terminated", "truncated", "final_obs")
"""What a rollout keeps of each step; also the arrays' names in the file, each (steps, num_envs, ...)."""

_CHUNK = 32_768  # environment steps between two looks at the clock
_LONGEST_CHUNK = 100
_TABLE_ENVS = 1024  # environments for which `envs` says what memory one needs


class _CommandError(Exception):
    """What went wrong, for the user, and the exit code that says so."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


# ---- The command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    Args:
        arguments: of the command line, without the program's name; None: sys.argv.
    """
    try:
        options = _parser().parse_args(arguments)
        return int(options.run(options))
    except _CommandError as error:
        print(f"brax-concurrent: error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("brax-concurrent: interrupted; nothing was kept", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "brax-concurrent",
        description="Robots for reinforcement learning: MuJoCo's physics in batches, as JAX functions.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"brax-concurrent {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_rollout(commands)
    listing = commands.add_parser("envs", help="table of the robots", description="Table of the robots.")
    listing.set_defaults(run=_envs)
    _add_check(commands)
    return parser


def _add_rollout(commands: Any) -> None:
    text = "Simulate a batch of robots under random actions, and keep the transitions if asked to."
    parser = commands.add_parser("rollout", help="simulate a batch under random actions", description=text)
    parser.add_argument("robot", help="a name that `brax-concurrent envs` lists")
    parser.add_argument("--num-envs", type=_at_least(1), default=256, metavar="N", help="environments (default 256)")
    parser.add_argument("--steps", type=_at_least(1), default=1000, metavar="N", help="control steps (default 1000)")
    parser.add_argument("--out", type=Path, metavar="FILE.npz", help="save the transitions as NumPy arrays")
    parser.add_argument("--force", action="store_true", help="overwrite FILE.npz if it exists")
    parser.add_argument("--seed", type=int, default=0, help="of resets and actions (default 0)")
    parser.add_argument("--scheduler", default="serial", help="see the documentation of make (default serial)")
    parser.add_argument("--progress", action="store_true", help="show progress even where stderr is no terminal")
    _add_place(parser)
    parser.set_defaults(run=_rollout)


def _add_check(commands: Any) -> None:
    text = "Compare a robot's physics with MuJoCo C on random states, stage by stage."
    parser = commands.add_parser("check", help="agreement with MuJoCo, stage by stage", description=text)
    parser.add_argument("robot", help="a name that `brax-concurrent envs` lists, or an MJCF file")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="default float32")
    parser.add_argument("--states", type=_at_least(1), default=1000, metavar="N", help="random states (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the states (default 0)")
    _add_place(parser)
    parser.set_defaults(run=_check)


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    parser.add_argument(
        "--threads", type=_at_least(0), default=0, metavar="N", help="CPU threads at most; 0: all cores"
    )


def _at_least(low: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {low}, got {text!r}")
        return int(text)

    return whole_number


@contextlib.contextmanager
def _wrong_arguments() -> Iterator[None]:
    """What the library says of bad arguments, as an error of usage."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, FileNotFoundError) as error:
        raise _CommandError(str(error), USAGE) from error


# ---- rollout ---------------------------------------------------------------------------------------------------------


def _rollout(options: argparse.Namespace) -> int:
    from brax_concurrent.envs import make

    with _wrong_arguments():
        setting = {name: getattr(options, name) for name in ("backend", "scheduler", "threads")}
        env = make(options.robot, options.num_envs, **setting)
        key = jax.random.key(options.seed)
    record = None if options.out is None else _Record(options.out, options.steps, env, options.force)
    start = time.perf_counter()
    run = _Rollout(env, key, options.steps)
    print(f"{env.name}: {env.num_envs} environments, {env.backend}, {env.scheduler}")
    print(f"compiled in {time.perf_counter() - start:.1f} s (later runs take machine code from the disk)", flush=True)
    statistics = _Statistics(env.num_envs)
    with _Progress(options.steps, env.num_envs, options.progress) as progress:
        for first, batch in run.chunks():
            statistics.add(batch)
            if record is not None:
                record.add(first, batch)
            progress.show(first + len(batch.reward))
    for line in statistics.lines(run, progress.seconds):
        print(line)
    if record is not None:
        record.save()
        print(f"saved {options.out}: {', '.join(_COLUMNS)}, each ({options.steps}, {env.num_envs}, ...)")
    return OK


class _Rollout:
    """A random policy in an environment, in chunks of steps, each one call of the jitted rollout.

    Compiles when made: it takes a first chunk and forgets it.
    """

    def __init__(self, env: Any, key: Any, steps: int):
        self.env, self.steps, self._policy = env, steps, _random_policy(env)
        reset_key, self._key = jax.random.split(key)
        self.state = env.reset(reset_key)
        self.chunk = min(max(_CHUNK // env.num_envs, 1), _LONGEST_CHUNK, steps)
        for length in {self.chunk, steps % self.chunk} - {0}:
            jax.block_until_ready(self._call(self.state, length, 0))

    def _call(self, state: Any, length: int, first: int) -> Any:
        from brax_concurrent.training.rollout import rollout

        return rollout(self.env, self._policy, None, state, jax.random.fold_in(self._key, first), length)

    def chunks(self) -> Iterator[tuple[int, Any]]:
        """(number of the first step, transitions) until all steps are done."""
        for first in range(0, self.steps, self.chunk):
            batch = self._call(self.state, min(self.chunk, self.steps - first), first)
            self.state = jax.block_until_ready(batch).state
            yield first, batch


def _random_policy(env: Any) -> Callable[..., Any]:
    """Actions uniform in the action space."""
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

    def lines(self, run: _Rollout, seconds: float) -> Iterator[str]:
        """What to tell the user. `seconds`: how long it took without compiling."""
        rate = self._steps / max(seconds, 1e-9)
        physics = rate * run.env.task.frame_skip
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
            count = int(run.state.info[name].sum())
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
            raise _CommandError(f"no memory for {_bytes(size)}: ask for fewer steps or environments", FAILED) from error

    def _check_place(self, size: int) -> None:
        """Refuse before the work what would fail after it."""
        self._check_overwrite()
        folder = self._path.parent
        if not folder.is_dir():
            raise _CommandError(f"cannot write {self._path}: there is no folder {folder}", FAILED)
        try:
            with tempfile.TemporaryFile(dir=folder):
                free = shutil.disk_usage(folder).free
        except OSError as error:
            raise _CommandError(f"cannot write {self._path}: {error.strerror}", FAILED) from error
        if size > free:
            text = f"cannot write {self._path}: it needs {_bytes(size)}, its disk has {_bytes(free)} left"
            raise _CommandError(text, FAILED)

    def _check_overwrite(self) -> None:
        if self._path.is_dir():
            raise _CommandError(f"cannot write {self._path}: it is a folder", FAILED)
        if self._path.exists() and not self._force:
            raise _CommandError(f"{self._path} exists; --force overwrites it", FAILED)

    def add(self, first: int, batch: Any) -> None:
        for name, array in self._arrays.items():
            value = np.asarray(getattr(batch, name))
            array[first : first + len(value)] = value

    def save(self) -> None:
        temporary = None
        try:
            handle, temporary = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
            with os.fdopen(handle, "wb") as file:
                np.savez(file, **self._arrays)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            self._check_overwrite()
            os.replace(temporary, self._path)
            temporary = None
        except OSError as error:
            raise _CommandError(f"cannot write {self._path}: {error.strerror or error}", FAILED) from error
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.0f} TB"


# ---- envs ------------------------------------------------------------------------------------------------------------


def _envs(options: argparse.Namespace) -> int:
    del options
    from brax_concurrent.envs import list_envs, make

    head = ["robot", "nq", "nv", "nu", "obs", "action", "dt", "frame_skip", "integrator", "pairs", "nconmax"]
    rows = [[*head, "state", "carried", "arena", "beyond"]]
    for name in list_envs():
        env = make(name, _TABLE_ENVS, backend="cpu")
        m = env.model
        sizes = [m.nq, m.nv, m.nu, env.observation_size, env.action_size]
        more = [f"{env.dt:g}", env.task.frame_skip, m.opt.integrator, m.npair, m.nconmax]
        rows.append([str(x) for x in (name, *sizes, *more, *_memory(env))])
    _print_table(rows, left=(0, 8))
    print(f"""
dt: duration of a control step, s, of frame_skip physics steps. pairs: pairs of geoms that can touch.
nconmax: contacts kept per environment. Memory of the CPU backend in float32, bytes:
state    arrays of State per environment: positions, velocities, observations, reward, info, ...
carried  what the engine keeps in State besides: solver warm start, random key, counters, the task's memory
arena    scratch memory of one thread, which its tiles of 32 environments share
beyond   per environment, beyond state: carried + arena * {_threads()} threads / {_TABLE_ENVS:,} environments""")
    return OK


def _threads() -> int:
    """Threads that share the work on `_TABLE_ENVS` environments here: one per core, at most one per tile."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _TABLE_ENVS // 32)


def _memory(env: Any) -> list[str]:
    """The columns state, carried, arena and beyond."""
    state = jax.eval_shape(env.reset, jax.random.key(0))
    carried = _row_bytes(state.internal)
    seen = _row_bytes(state) - carried
    arena = _arena_bytes(env)
    return [f"{x:,.0f}" for x in (seen, carried, arena, carried + arena * _threads() / env.num_envs)]


def _row_bytes(tree: Any) -> int:
    """Bytes per environment of the arrays in a pytree."""
    return sum(x.size // x.shape[0] * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _arena_bytes(env: Any) -> int:
    """Bytes of the arena that a control step needs.

    Specialising the step says it, which takes a second where compiling takes several; the number is kept on disk.
    """
    from brax_concurrent.backends.objects import ObjectCache
    from brax_concurrent.envs.program import source_fingerprint
    from brax_concurrent.envs.stream import StreamBuilder
    from brax_concurrent.kernels.specialize import specialize

    identity = (source_fingerprint(), env.task.identity(), env.model.fingerprint, env.granularity)
    key = "a" + hashlib.sha256(repr(identity).encode()).hexdigest()[:40]
    store = ObjectCache()
    kept = store.get(key)
    if kept is not None and kept.isdigit():
        return int(kept)
    stream = StreamBuilder(env.task, env.model).control_step(env.granularity)
    size = specialize(stream.kernels, stream.view, stream.fields, stream.user).layout.arena_bytes
    store.put(key, str(size).encode())
    return size


def _print_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> None:
    """Columns as wide as they need; numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (x.ljust(n) if i in left else x.rjust(n) for i, (x, n) in enumerate(zip(row, widths, strict=True)))
        print("  ".join(cells).rstrip())


# ---- check -----------------------------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> int:
    import mujoco

    from brax_concurrent.envs.arrays import resolve_backend
    from brax_concurrent.envs.check import check
    from brax_concurrent.kernels.model import load_model

    with _wrong_arguments():
        backend = resolve_backend(options.backend)
        model = _robot_model(options.robot)
        load_model(model)
    setting = {name: getattr(options, name) for name in ("dtype", "seed", "threads")}
    report = check(model, num_states=options.states, backend=backend, **setting)
    print(
        f"{options.robot}, {options.dtype} on {backend}, against MuJoCo {mujoco.__version__}: "
        f"{report.num_states:,} random states with {report.num_contacts:,} contacts"
    )
    if report.left_out:
        print(f"({report.left_out} more states were left out: they have more contacts than nconmax)")
    rows = [["field", "stage", "median", "p99", "max", "tolerance", ""]]
    for row in report.rows:
        numbers = [f"{x:.1e}" for x in (row.median, row.p99, row.worst)]
        rows.append([row.field, row.stage, *numbers, f"{row.tolerance:.0e}", "ok" if row.ok else "MISSED"])
    _print_table(rows, left=(0, 1, 6))
    judged = {"p99": "p99", "worst": "max"}[report.judged]
    missed = [row.field for row in report.rows if not row.ok]
    print(f"errors are relative to the field's size in a state; {judged} must keep to the tolerance")
    print(f"missed: {', '.join(missed)}" if missed else "agrees" if report.ok else "nothing was compared")
    return OK if report.ok else FAILED


def _robot_model(robot: str) -> Any:
    """The model of a named robot, or the path of an MJCF file."""
    from brax_concurrent.envs.registry import make_task

    if robot.endswith(".xml") or os.sep in robot:
        if not Path(robot).is_file():
            raise FileNotFoundError(f"there is no file {robot}")
        return robot
    return make_task(robot).model
