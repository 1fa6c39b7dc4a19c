"""`brax-concurrent bench`: control steps a second, by robot, scheduler and number of environments."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brax_concurrent import __version__
from brax_concurrent.cli.common import (
    FAILED,
    OK,
    CommandError,
    add_place,
    add_settings,
    at_least,
    python_value,
    wrong_arguments,
)

ALL = "all"
_HEAD = ("robot", "scheduler", "granularity", "envs", "env steps/s", "spread", "to serial", "compiled")
_WIDTHS = (-12, -9, -11, 7, 13, 7, 9, 9)  # negative: to the left


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `brax-concurrent`."""
    text = """Measure how many control steps a second robots take under random actions, in one jitted scan.
    Rows of one robot and number of environments are measured turn and turn about."""
    parser = subparsers.add_parser("bench", help="control steps a second", description=text)
    parser.add_argument(
        *("robots",),
        nargs="*",
        metavar="ROBOT",
        help=f"names that `brax-concurrent envs` lists, or {ALL!r}: all in one batch, N of each (default: each)",
    )
    number = {"type": at_least(1), "metavar": "N"}
    parser.add_argument("--num-envs", nargs="+", default=[4096], help="environments (default 4096)", **number)
    parser.add_argument("--scheduler", nargs="+", metavar="NAME", help="see the documentation of make (default: each)")
    parser.add_argument("--granularity", nargs="+", default=["step"], metavar="NAME", help="default step")
    add_settings(parser, "another argument of make, for all schedulers but serial", python_value)
    parser.add_argument("--steps", help="control steps of a timing (default: as many as take a while)", **number)
    parser.add_argument("--repeats", default=5, help="timings (default 5)", **number)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, with all timings")
    add_place(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Case:
    """One row of the table."""

    robot: str
    scheduler: str
    num_envs: int
    settings: Mapping[str, Any]
    env: Any

    @property
    def granularity(self) -> str:
        """Of the robot, or of the robots."""
        envs = getattr(self.env, "envs", {self.robot: self.env})
        return "/".join(dict.fromkeys(env.granularity for env in envs.values()))


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise CommandError(f"cannot write {arguments.json}: there is no folder {arguments.json.parent}", FAILED)
    with wrong_arguments():
        groups = _groups(arguments)
    _print(_HEAD)
    code, results = OK, []
    for group in groups:
        try:
            results += _measure(group, arguments)
        except RuntimeError as error:  # of the device or of a measurement that is void: the others can be measured
            print(f"brax-concurrent: {group[0].robot}, {group[0].num_envs} environments: {error}", file=sys.stderr)
            code = FAILED
    if arguments.json is not None:
        _write(arguments.json, groups, results)
    return code


def _groups(arguments: argparse.Namespace) -> list[list[_Case]]:
    """The cases that are measured together: of one robot and one number of environments; serial comes first."""
    from brax_concurrent.envs import list_envs, make
    from brax_concurrent.envs.arrays import resolve_backend
    from brax_concurrent.scheduler.schedule import schedulers_on

    with wrong_arguments():
        backend = resolve_backend(arguments.backend)
    place = {"backend": arguments.backend, "threads": arguments.threads}
    schedulers = sorted(arguments.scheduler or schedulers_on(backend), key=lambda name: name != "serial")

    def case(robot: str, num_envs: int, scheduler: str, granularity: str) -> _Case:
        settings = {} if scheduler == "serial" else dict(arguments.set)
        common = {"scheduler": scheduler, "granularity": granularity, **settings, **place}
        if robot == ALL:
            return _Case(robot, scheduler, num_envs, settings, make(dict.fromkeys(list_envs(), num_envs), **common))
        return _Case(robot, scheduler, num_envs, settings, make(robot, num_envs, **common))

    robots = arguments.robots or [*list_envs(), ALL]
    pairs = [(scheduler, granularity) for scheduler in schedulers for granularity in arguments.granularity]
    return [[case(robot, n, *pair) for pair in pairs] for robot in robots for n in arguments.num_envs]


def _measure(group: Sequence[_Case], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the cases and print their rows; returns them as JSON has them."""
    from brax_concurrent.training.measure import compare

    measured = compare([case.env for case in group], steps=arguments.steps, repeats=arguments.repeats)
    rows = []
    for case, found in zip(group, measured, strict=True):
        ratio = found.ratio(measured[0]) if group[0].scheduler == "serial" else None
        _print(
            (
                *(case.robot, case.scheduler, case.granularity, f"{found.num_envs:,}", f"{found.median:,.0f}"),
                *(f"{found.spread:.1%}", "" if ratio is None else f"{ratio:.2f}x", f"{found.compile_seconds:.1f} s"),
            )
        )
        rows.append(
            {
                "robot": case.robot,
                "scheduler": case.scheduler,
                "granularity": case.granularity,
                "settings": dict(case.settings),
                "num_envs": found.num_envs,
                "env_steps_per_second": found.median,
                "spread": found.spread,
                "ratio_to_serial": ratio,
                "compile_seconds": found.compile_seconds,
                "steps": found.steps,
                "samples": list(found.samples),
            }
        )
    return rows


def _write(path: Path, groups: Sequence[Sequence[_Case]], results: Sequence[Mapping[str, Any]]) -> None:
    backend = groups[0][0].env.backend
    import jax

    device = jax.local_devices(backend="cpu" if backend == "cpu" else "gpu")[0].device_kind
    contents = {"version": __version__, "backend": backend, "device": device, "results": list(results)}
    try:
        path.write_text(json.dumps(contents, indent=1) + "\n")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}", FAILED) from error


def _print(cells: Sequence[str]) -> None:
    def padded(cell: str, width: int) -> str:
        justify: Callable[..., str] = cell.rjust if width > 0 else cell.ljust
        return justify(abs(width))

    print("  ".join(padded(cell, width) for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip(), flush=True)
