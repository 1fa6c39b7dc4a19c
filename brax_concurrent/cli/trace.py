"""`brax-concurrent trace`: when each task of some control steps ran, as a file for Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brax_concurrent.cli.common import FAILED, OK, CommandError, add_place, at_least, refuse_path, wrong_arguments

if TYPE_CHECKING:
    from brax_concurrent.envs import Env, MixedEnv

ALL = "all"


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `brax-concurrent`."""
    text = """Record when each task of some control steps under random actions ran, and on which thread or CUDA stream.
    The file is for https://ui.perfetto.dev; arrows lead to a task from those that it waits for."""
    parser = subparsers.add_parser("trace", help="when each task ran, for Perfetto", description=text)
    parser.add_argument("robot", help=f"a name that `brax-concurrent envs` lists, or {ALL!r}: all in one batch")
    number = {"type": at_least(1), "metavar": "N"}
    parser.add_argument("--num-envs", default=1024, help="environments (default 1024)", **number)
    parser.add_argument("--steps", default=3, help="control steps to record (default 3)", **number)
    parser.add_argument("--scheduler", default="sw", metavar="NAME", help="see the documentation of make (default sw)")
    parser.add_argument("--granularity", default="auto", metavar="NAME", help="default auto")
    parser.add_argument("--window", help="slots of the window of sw or hw", **number)
    parser.add_argument("--streams", help="CUDA streams of sw", **number)
    parser.add_argument("--out", type=Path, default=Path("trace.json"), metavar="FILE", help="default trace.json")
    parser.add_argument(
        *("--dot",),
        type=Path,
        metavar="FILE",
        help="the graph of the first tasks of the stream, as many as the window has slots, for Graphviz; CPU only",
    )
    add_place(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    from brax_concurrent.envs import list_envs, make
    from brax_concurrent.envs.arrays import resolve_backend
    from brax_concurrent.scheduler.trace import checked_path

    refuse_path("trace", arguments.robot)
    names = ("scheduler", "granularity", "window", "streams", "backend", "threads")
    settings = {name: getattr(arguments, name) for name in names}
    with wrong_arguments():
        for option, path in (("--out", arguments.out), ("--dot", arguments.dot)):
            if path is not None:
                checked_path(option, path)
        if arguments.dot is not None and resolve_backend(arguments.backend) != "cpu":
            raise ValueError("--dot: footprints are known of tiles on the CPU; add --backend cpu")
        common = {**settings, "trace": arguments.out}
        if arguments.robot == ALL:
            env: Env | MixedEnv = make(dict.fromkeys(list_envs(), arguments.num_envs), **common)
        else:
            env = make(arguments.robot, arguments.num_envs, **common)
    _step(env, arguments.steps)
    try:
        timeline = env.write_trace()
        if arguments.dot is not None:
            arguments.dot.write_text(_window(env))
    except OSError as error:
        raise CommandError(f"cannot write {error.filename}: {error.strerror or error}", FAILED) from error
    print(f"{arguments.out}: {timeline.summary()}")
    return OK


def _step(env: Env | MixedEnv, steps: int) -> None:
    """Take control steps under random actions."""
    import jax

    from brax_concurrent.training.measure import random_actions

    step = jax.jit(env.step)
    with jax.default_device(jax.local_devices(backend="cpu" if env.backend == "cpu" else "gpu")[0]):
        state = env.reset(jax.random.key(0))
        for key in jax.random.split(jax.random.key(1), steps):
            state = step(state, random_actions(env, key))
        jax.block_until_ready(state)


def _window(env: Env | MixedEnv) -> str:
    """The graph of the tasks that the window holds first."""
    from brax_concurrent.envs.trace import first_tasks
    from brax_concurrent.scheduler.graph import dependencies, reduced, to_dot

    tasks = first_tasks(env, next(iter(getattr(env, "envs", {"": env}).values())).schedule.window)
    return to_dot(tasks, reduced(dependencies(tasks)), name=f"{env!r}: the first {len(tasks)} tasks")
