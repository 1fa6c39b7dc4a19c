"""`brax-concurrent tune`: find and remember the fastest scheduler and granularity of a robot on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from brax_concurrent.cli.common import OK, add_place, at_least, print_table, wrong_arguments


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `brax-concurrent`."""
    text = """Measure which scheduler and granularity are fastest for a robot on this machine, and remember it: make
    takes it for scheduler="auto" and granularity="auto"."""
    parser = subparsers.add_parser("tune", help="find the fastest settings on this machine", description=text)
    parser.add_argument("robot", help="a name that `brax-concurrent envs` lists")
    number = {"type": at_least(1), "metavar": "N"}
    parser.add_argument("--num-envs", default=4096, help="environments (default 4096)", **number)
    parser.add_argument("--scheduler", default="auto", metavar="NAME", help="only this one (default: each)")
    parser.add_argument("--granularity", default="auto", metavar="NAME", help="only this one (default: each)")
    parser.add_argument("--repeats", default=5, help="timings of each candidate (default 5)", **number)
    add_place(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    from brax_concurrent.training.tune import tune

    given = {name: getattr(arguments, name) for name in ("scheduler", "granularity", "backend", "threads", "repeats")}
    with wrong_arguments():
        found = tune(arguments.robot, arguments.num_envs, **given)
    names = list(dict.fromkeys(name for one in found.candidates for name in one.settings))
    rows = [[*names, "env steps/s", "spread", "to the best", "compiled"]]
    for one in found.candidates:
        settings = [str(one.settings.get(name, "")) for name in names]
        ratio = one.throughput.ratio(found.candidates[0].throughput)
        numbers = [f"{one.throughput.median:,.0f}", f"{one.throughput.spread:.1%}", f"{ratio:.2f}x"]
        rows.append([*settings, *numbers, f"{one.throughput.compile_seconds:.1f} s"])
    print(f"{arguments.robot}: {found.num_envs} environments, {found.backend}")
    print_table(rows, left=range(len(names)))
    best = ", ".join(f"{name}={value!r}" for name, value in found.settings.items())
    print(f"fastest: make({arguments.robot!r}, {found.num_envs}, {best})")
    print(f"remembered: make({arguments.robot!r}, {found.num_envs}) takes it from now on")
    return OK
