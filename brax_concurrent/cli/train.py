"""The command `train`: a policy by PPO, in a folder of its own."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from brax_concurrent.cli.common import (
    FAILED,
    INTERRUPTED,
    OK,
    USAGE,
    CommandError,
    add_place,
    at_least,
    refuse_path,
    seed,
    wrong_arguments,
)


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser's."""
    text = """Train a policy by PPO with the robot's committed configuration. DIR gets the policy (policy.npz), a log
    (progress.csv and TensorBoard's events) and checkpoints. Ctrl-C saves; --resume goes on."""
    parser = subparsers.add_parser("train", help="train a policy by PPO", description=text)
    parser.add_argument("robot", help="a name that `brax-concurrent envs` lists")
    parser.add_argument("--out", type=_folder, required=True, metavar="DIR", help="the run's folder")
    parser.add_argument(
        "--steps", type=_steps, metavar="N", help="environment steps, such as 5e6 (default: the robot's)"
    )
    parser.add_argument(
        "--seconds", type=_seconds, metavar="S", help="stop after about S seconds without compiling, if that is sooner"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in DIR from its newest checkpoint")
    parser.add_argument("--seed", type=seed, metavar="N", help="of all random numbers (default 0)")
    parser.add_argument("--num-envs", type=at_least(1), metavar="N", help="environments (default: the robot's)")
    parser.add_argument(
        *("--set",),
        type=setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another setting of brax_concurrent.training.ppo.Config, such as learning_rate=1e-3",
    )
    add_place(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train, print progress; returns the exit code."""
    refuse_path("train", arguments.robot)
    doing = "going on with" if arguments.resume else "training into"
    print(f"{arguments.robot}: {doing} {arguments.out}; loading JAX and making robots takes some seconds", flush=True)
    try:
        from brax_concurrent.training.checkpoint import CheckpointError
        from brax_concurrent.training.policy import POLICY
        from brax_concurrent.training.train import FolderInUseError, NotFiniteError, train
    except ModuleNotFoundError as error:
        raise missing(error, "brax-concurrent[train]") from error
    try:
        with wrong_arguments():
            result = train(
                arguments.robot,
                arguments.out,
                config=_config(arguments),
                seed=arguments.seed,
                steps=arguments.steps,
                seconds=arguments.seconds,
                resume=arguments.resume,
                backend=arguments.backend,
                threads=arguments.threads,
                report=lambda line: print(line, flush=True),
            )
    except FolderInUseError as error:
        raise CommandError(str(error).partition(": ")[2], FAILED) from error
    except FileExistsError as error:
        raise CommandError(f"{arguments.out} holds a run already: --resume goes on with it", USAGE) from error
    except (CheckpointError, NotFiniteError) as error:
        raise CommandError(str(error), FAILED) from error
    except OSError as error:
        raise CommandError(f"cannot write {arguments.out}: {error.strerror or error}", FAILED) from error
    except KeyboardInterrupt as interruption:
        before = "what was saved before is kept" if (arguments.out / POLICY).exists() else "nothing had been learnt yet"
        print(f"brax-concurrent: interrupted: {str(interruption) or before}", file=sys.stderr)
        return INTERRUPTED
    clock = result.clock
    print(
        f"{result.steps:,} steps in {clock.total:.1f} s, without {clock.compiling:.1f} s of compiling: collection "
        f"{clock.collection:.1f} s, learning {clock.learning:.1f} s, evaluation {clock.evaluation:.1f} s\n"
        f"collection took {clock.collection_share:.1%} of training; {clock.steps_per_second(result.steps):,.0f} "
        f"environment steps/s\nreturn {result.scores.mean:,.1f} +- {result.scores.std:,.1f} over "
        f"{len(result.scores.returns)} episodes\nsaved {arguments.out}"
    )
    return OK


def missing(error: ModuleNotFoundError, requirement: str) -> CommandError:
    """What to tell who lacks a package."""
    return CommandError(f"{error.name} is not installed: pip install '{requirement}'", FAILED)


def _config(arguments: argparse.Namespace) -> Any:
    """The configuration with what is set besides; None if nothing is."""
    from brax_concurrent.envs import make
    from brax_concurrent.envs.arrays import resolve_backend
    from brax_concurrent.training.presets import override, preset
    from brax_concurrent.training.train import read_run

    given = dict(arguments.set)
    if arguments.num_envs is not None:
        given["num_envs"] = str(arguments.num_envs)
    if not given:
        return None
    if arguments.resume:
        config = read_run(arguments.out)["config"]
    else:
        backend = resolve_backend(arguments.backend)
        config = preset(make(arguments.robot, backend=backend).name, backend)
    return override(config, given)


def setting(text: str) -> tuple[str, str]:
    """NAME=VALUE as a pair."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals and value):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, got ''; '.' is the one you are in")
    return Path(text)


def _steps(text: str) -> int:
    number = _number(text)
    if not (number >= 1 and number == int(number)):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, such as 5e6, got {text!r}")
    return int(number)


def _seconds(text: str) -> float:
    number = _number(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return number


def _number(text: str) -> float:
    """NaN if it is none or not finite."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan
