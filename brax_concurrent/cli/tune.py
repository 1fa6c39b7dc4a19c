"""`brax-concurrent tune`: find and remember the fastest scheduler and granularity of a robot on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from brax_concurrent.cli.common import OK, add_place, at_least, print_table, wrong_arguments


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `brax-concurrent`."""
    text = """Measure which scheduler and granularity are fastest for a robot on this machine, and remember it: make
    takes it for scheduler="auto" and granularity="auto". Of those that are as fast as the fastest within the spread of
    the timings, at least as fast in a quarter of the turns, it is the simplest."""
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
    print(f"{arguments.robot}: measuring with {arguments.num_envs:,} environments; compiling comes first", flush=True)
    from brax_concurrent.envs.tuned import turns_won
    from brax_concurrent.training.tune import tune

    given = {name: getattr(arguments, name) for name in ("scheduler", "granularity", "backend", "threads", "repeats")}
    with wrong_arguments():
        found = tune(arguments.robot, arguments.num_envs, **given)
    names = list(dict.fromkeys(name for one in found.candidates for name in one.settings))
    rows = [[*names, "env steps/s", "spread", "to the first", "as fast in", "compiled"]]
    first = found.candidates[0].throughput
    for one in found.candidates:
        settings = [str(one.settings.get(name, "")) for name in names]
        rate, turns = one.throughput, len(one.throughput.samples)
        numbers = [f"{rate.median:,.0f}", f"{rate.spread:.1%}", f"{rate.median / first.median:.2f}x"]
        won = f"{turns_won(rate.samples, first.samples)} of {turns}"
        rows.append([*settings, *numbers, won, f"{rate.compile_seconds:.1f} s"])
    print(f"{arguments.robot}: {found.num_envs} environments, {found.backend}")
    print_table(rows, left=range(len(names)))
    best = ", ".join(f"{name}={value!r}" for name, value in found.settings.items())
    why = "fastest"
    if len(found.alike) > 1:
        why = "simplest of these"
        print(f"{len(found.alike)} do not differ by more than the spread: the first, and those as fast in 1 turn of 4")
    print(f"{why}: make({arguments.robot!r}, {found.num_envs}, {best})")
    print(f"remembered: make({arguments.robot!r}, {found.num_envs}) takes it from now on")
    return OK
