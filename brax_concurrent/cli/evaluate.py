"""The command `evaluate`: what a trained policy scores, here and in Gymnasium's own environment."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
from pathlib import Path
from typing import Any

from brax_concurrent.cli.common import (
    FAILED,
    OK,
    USAGE,
    CommandError,
    add_place,
    at_least,
    print_table,
    seed,
    wrong_arguments,
)
from brax_concurrent.cli.train import missing

_PLACES = ("ours", "gymnasium")


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser's."""
    text = """Score a trained policy with deterministic actions: in this package's environment, and in Gymnasium's of
    the same name, which MuJoCo itself simulates."""
    parser = subparsers.add_parser("evaluate", help="score a trained policy, here and in Gymnasium", description=text)
    parser.add_argument("policy", type=Path, metavar="DIR", help="the folder of a training run, or a policy.npz")
    parser.add_argument(
        *("--in",), dest="places", nargs="+", choices=_PLACES, help="where (default: both, if Gymnasium has the robot)"
    )
    parser.add_argument("--episodes", type=at_least(1), default=20, metavar="N", help="in each (default 20)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the resets (default 0)")
    add_place(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Score and print; returns the exit code."""
    from brax_concurrent.envs import make
    from brax_concurrent.training.evaluate import gymnasium_id, score, score_in_gymnasium
    from brax_concurrent.training.policy import PolicyError

    policy = load_trained(arguments.policy)
    check_known(policy)
    print(f"{policy.robot}, trained for {int(policy.steps):,} steps; deterministic actions", flush=True)
    scores: dict[str, Any] = {}
    places = _places(arguments.places, policy.robot)
    try:
        with wrong_arguments():
            if "ours" in places:
                place = {"backend": arguments.backend, "threads": arguments.threads}
                env = make(policy.robot, arguments.episodes, **place)
                scores["ours"] = score(policy, env, arguments.seed)
            if "gymnasium" in places:
                scores[gymnasium_id(policy.robot)] = score_in_gymnasium(policy, arguments.episodes, arguments.seed)
    except PolicyError as error:
        raise CommandError(str(error), FAILED) from error
    rows = [["in", "episodes", "return", "+-", "least", "most", "length"]]
    for name, found in scores.items():
        values = [found.mean, found.std, found.returns.min(), found.returns.max(), found.lengths.mean()]
        rows.append([name, str(arguments.episodes), *(f"{value:,.1f}" for value in values)])
    print_table(rows)
    if len(scores) == 2:
        ours, theirs = scores.values()
        uncertainty = (ours.standard_error**2 + theirs.standard_error**2) ** 0.5
        print(f"difference of the means {theirs.mean - ours.mean:+,.1f}, standard error {uncertainty:,.1f}")
    return OK


def _places(asked: list[str] | None, robot: str) -> list[str]:
    """Where to score, found out before anything is: by default in Gymnasium too, if it has the robot."""
    from brax_concurrent.training.evaluate import gymnasium_id

    if asked is not None and "gymnasium" not in asked:
        return asked
    try:
        importlib.import_module("gymnasium")
        gymnasium_id(robot)
    except ModuleNotFoundError as error:
        without = "" if asked else ", or use --in ours"
        raise CommandError(str(missing(error, "gymnasium[mujoco]")) + without, FAILED) from error
    except ValueError as error:
        if asked is not None:
            raise CommandError(str(error), USAGE) from error
        return ["ours"]
    return list(asked or _PLACES)


def check_known(policy: Any) -> None:
    """CommandError if a policy was trained on a task that is no robot of ours: a shell cannot make that."""
    from brax_concurrent.envs import list_envs

    if policy.robot not in list_envs():
        raise CommandError(
            f"the policy is for {policy.robot!r}, a task of your own: in Python, Policy.load(file) of "
            "brax_concurrent.training.policy reads it, and evaluate.score and trajectory take it; see docs/training.md",
            FAILED,
        )


def load_trained(path: Path) -> Any:
    """The policy in a run's folder or a file; CommandError if it cannot be read."""
    from brax_concurrent.training.policy import POLICY, Policy, PolicyError

    file = path / POLICY if path.is_dir() else path
    try:
        return Policy.load(file)
    except PolicyError as error:
        raise CommandError(str(error), FAILED) from error
    except FileNotFoundError as error:
        raise CommandError(f"cannot read {file}: {_why(path)}", FAILED) from error
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror or error}", FAILED) from error


def _why(path: Path) -> str:
    """Why there is no policy."""
    from brax_concurrent.envs import list_envs
    from brax_concurrent.training.train import RUN

    if (path / RUN).exists():
        return "this run has saved none yet; it does at its first evaluation"
    if str(path) in list_envs():
        return f"expected the folder of a training run; `brax-concurrent train {path} --out runs/{path}` makes one"
    return os.strerror(errno.ENOENT)
