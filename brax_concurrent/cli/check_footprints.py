"""The command `check-footprints`: whether a robot's kernels touch only what they declare."""

from __future__ import annotations

import argparse
from typing import Any

from brax_concurrent.cli.common import FAILED, OK, at_least, print_table, refuse_path, wrong_arguments


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser's."""
    text = (
        "Run a robot's kernels one by one on the CPU, on random states, and see whether each touches only the memory "
        "that its footprint declares."
    )
    name, short = "check-footprints", "whether kernels touch only what they declare"
    parser = subparsers.add_parser(name, help=short, description=text)
    parser.add_argument("robot", help="a name that `brax-concurrent envs` lists")
    parser.add_argument("--granularity", choices=("stage", "substep", "step"), default="stage", help="default stage")
    parser.add_argument("--num-envs", type=at_least(1), default=40, metavar="N", help="environments (default 40)")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of states and actions (default 0)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check and print a line for each kernel; returns the exit code."""
    from brax_concurrent.envs import make
    from brax_concurrent.envs.footprints import check_environment

    refuse_path("check-footprints", arguments.robot)
    with wrong_arguments():
        env = make(arguments.robot, arguments.num_envs, backend="cpu", granularity=arguments.granularity)
    streams = check_environment(env, arguments.seed)
    rows = [["stream", "kernel", "runs", ""]]
    for stream in streams:
        bad = {violation.kernel for violation in stream.checker.violations}
        for kernel, count in stream.checker.op_counts.items():
            verdict = "VIOLATES" if kernel in bad else "ok" if count else "never ran"
            rows.append([stream.kind, kernel, f"{count:,}", verdict])
    print(f"{env.name}, {env.granularity}, {env.num_envs} environments: how often each kernel ran, on all tiles")
    print_table(rows, left=(0, 1, 3))
    for stream in streams:
        for unused in stream.checker.unused:
            print(f"note: {stream.kind}: {unused}")
    violations = [(stream.kind, violation) for stream in streams for violation in stream.checker.violations]
    for kind, violation in violations:
        print(f"violation: {kind}: {violation}")
    print(f"violations: {len(violations)}" if violations else "all kernels that ran keep to their footprints")
    return FAILED if violations else OK
