"""The command `check`: agreement with MuJoCo C, stage by stage."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from brax_concurrent.cli.common import FAILED, OK, add_place, at_least, is_path, print_table, wrong_arguments


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser's."""
    text = "Compare a robot's physics with MuJoCo C on random states, stage by stage."
    parser = subparsers.add_parser("check", help="agreement with MuJoCo, stage by stage", description=text)
    parser.add_argument("robot", help="a name that `brax-concurrent envs` lists, or an MJCF file")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="default float32")
    parser.add_argument("--states", type=at_least(1), default=1000, metavar="N", help="random states (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the states (default 0)")
    add_place(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare and print the errors; returns the exit code."""
    import mujoco

    from brax_concurrent.envs.arrays import resolve_backend
    from brax_concurrent.envs.check import check
    from brax_concurrent.kernels.model import load_model

    with wrong_arguments():
        backend = resolve_backend(arguments.backend)
        model = _robot_model(arguments.robot)
        load_model(model)
    setting = {name: getattr(arguments, name) for name in ("dtype", "seed", "threads")}
    report = check(model, num_states=arguments.states, backend=backend, **setting)
    print(
        f"{arguments.robot}, {arguments.dtype} on {backend}, against MuJoCo {mujoco.__version__}: "
        f"{report.num_states:,} random states with {report.num_contacts:,} contacts"
    )
    if report.left_out:
        print(f"({report.left_out} more states were left out: they have more contacts than nconmax)")
    rows = [["field", "stage", "median", "p99", "max", "tolerance", ""]]
    for row in report.rows:
        numbers = [f"{x:.1e}" for x in (row.median, row.p99, row.worst)]
        rows.append([row.field, row.stage, *numbers, f"{row.tolerance:.0e}", "ok" if row.ok else "MISSED"])
    print_table(rows, left=(0, 1, 6))
    judged = {"p99": "p99", "worst": "max"}[report.judged]
    missed = [row.field for row in report.rows if not row.ok]
    print(f"errors are relative to the field's size in a state; {judged} must keep to the tolerance")
    print(f"missed: {', '.join(missed)}" if missed else "agrees" if report.ok else "nothing was compared")
    if missed and arguments.dtype == "float32":
        print(_in_double(arguments))
    return OK if report.ok else FAILED


def _in_double(arguments: argparse.Namespace) -> str:
    """What to do about a tolerance that is missed in single precision."""
    command = ["brax-concurrent", "check", arguments.robot, "--dtype", "float64", "--states", str(arguments.states)]
    command += [f"--seed={arguments.seed}", f"--backend={arguments.backend}"]
    return (
        "in single precision that may be rounding: where numbers nearly cancel, as those of a spinning ball, few "
        f"digits are left, and of fewer than 100 states each counts; double precision tells:\n{shlex.join(command)}"
    )


def _robot_model(robot: str) -> Any:
    """The model of a named robot, or the path of an MJCF file."""
    from brax_concurrent.envs.registry import make_task

    if is_path(robot):
        if not Path(robot).is_file():
            raise FileNotFoundError(f"robot: there is no file {robot}")
        return robot
    return make_task(robot).model
