"""Training by PPO with the committed configuration, over several seeds: how good the policies get, and how soon.

    python scripts/bench_training.py halfcheetah --seeds 0 1 2 --out runs/bench
    python scripts/bench_training.py halfcheetah ant --seconds 60 --target halfcheetah=4800 --out runs/bench
    python scripts/bench_training.py humanoid --backend cpu --seeds 0 --steps 1e6 --out runs/bench

Of each robot DIR gets the curves ROBOT.csv, with a column for the seed (brax_concurrent/training/logs.py tells the
others), and of each seed the policy ROBOT-SEED.npz. The runs' own folders, with checkpoints, are kept only if `--runs`
names a place. Records go to training.jsonl in $BRAX_CONCURRENT_RECORDS if it is set, else in DIR, as
benchmarks/README.md describes: the return of the last evaluation (the value is the median over the seeds), environment
steps a second while training, with the share of it that collecting takes, and with --target the seconds until an
evaluation first reached that return, if it did with every seed. Seconds are without compiling, and with evaluations.
`--seconds` is for each seed, so that the command ends in time; the learning rate then falls with time.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import _records

from brax_concurrent.cli.train import setting
from brax_concurrent.envs import list_envs
from brax_concurrent.envs.arrays import resolve_backend
from brax_concurrent.training import logs
from brax_concurrent.training.policy import POLICY
from brax_concurrent.training.presets import override, preset
from brax_concurrent.training.train import Result, train


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("robots", nargs="+", choices=list_envs(), metavar="ROBOT")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the runs' folders there, as ROBOT-SEED")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=float, help="instead of the configuration's")
    parser.add_argument("--seconds", type=float, help="for each seed, without compiling")
    parser.add_argument("--set", nargs="+", type=setting, default=[], metavar="NAME=VALUE", help="of Config, for all")
    parser.add_argument("--target", nargs="+", type=target, default=[], metavar="ROBOT=RETURN")
    parser.add_argument("--backend", default="auto", choices=("auto", "cpu", "cuda"))
    given = parser.parse_args(arguments)
    given.backend = resolve_backend(given.backend)
    return given


def target(text: str) -> tuple[str, float]:
    """A robot and the return that it is to reach."""
    robot, equals, value = text.partition("=")
    if robot not in list_envs() or not equals:
        raise argparse.ArgumentTypeError(f"expected ROBOT=RETURN, got {text!r}")
    return robot, float(value)


def seconds_until(curve: list[dict[str, float]], wanted: float) -> float | None:
    """When an evaluation first reached a return; None if none did."""
    return next((row["seconds"] for row in curve if row["eval_return"] >= wanted), None)


def run(robot: str, seed: int, runs: Path, given: argparse.Namespace) -> tuple[Result, list[dict[str, float]]]:
    """Train with one seed; returns what came of it and the curve."""
    folder = runs / f"{robot}-{seed}"
    steps = None if given.steps is None else int(given.steps)
    print(f"{robot}, seed {seed}", flush=True)
    place: dict[str, Any] = {"steps": steps, "seconds": given.seconds, "backend": given.backend}
    config = override(preset(robot, given.backend), dict(given.set))
    result = train(robot, folder, config=config, seed=seed, report=lambda line: print(line, flush=True), **place)
    clock = result.clock
    print(
        f"compiled in {clock.compiling:.1f} s, then {clock.total:.1f} s: collection {clock.collection:.1f} s, learning "
        f"{clock.learning:.1f} s, evaluation {clock.evaluation:.1f} s; collection took {clock.collection_share:.1%} of "
        f"training",
        flush=True,
    )
    shutil.copyfile(folder / POLICY, given.out / f"{robot}-{seed}.npz")
    curve = logs.read_csv(folder / logs.CSV)
    path = given.out / f"{robot}.csv"
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, ["seed", *logs.COLUMNS])
        if new:
            writer.writeheader()
        writer.writerows({"seed": seed, **row} for row in curve)
    return result, curve


def record(robot: str, runs: list[tuple[Result, list[dict[str, float]]]], given: argparse.Namespace) -> None:
    """Append a robot's records and print them."""
    results = [result for result, _ in runs]
    env, clocks = results[0].env, [result.clock for result in results]
    samples = {
        "return": [result.scores.mean for result in results],
        "env steps/s": [result.clock.steps_per_second(result.steps) for result in results],
    }
    wanted = dict(given.target).get(robot)
    times = [] if wanted is None else [seconds_until(curve, wanted) for _, curve in runs]
    reached = [time for time in times if time is not None]
    if reached and len(reached) == len(times):
        samples[f"s to a return of {wanted:,.0f}"] = reached
    elif wanted is not None:
        print(f"{robot}: {len(reached)} of {len(times)} seeds reached {wanted:,.0f}")
    detail: dict[str, Any] = {
        **dict(given.set),
        "steps": None if given.seconds else results[0].steps,
        "budget": None if given.seconds is None else f"{given.seconds:g} s",
        "steps taken": float(_records.summary([result.steps for result in results])["value"]),
        "seconds": float(_records.summary([clock.total for clock in clocks])["value"]),
        "collection share": float(_records.summary([clock.collection_share for clock in clocks])["value"]),
        "seconds compiling": float(_records.summary([clock.compiling for clock in clocks])["value"]),
    }
    detail = {name: value for name, value in detail.items() if value is not None}
    order = {"scheduler": env.scheduler, "granularity": env.granularity}
    where: dict[str, Any] = {"num_envs": env.num_envs, "backend": env.backend, **order}
    for unit, values in samples.items():
        found = _records.summary(values)
        folder = os.environ.get("BRAX_CONCURRENT_RECORDS") or given.out
        _records.append("training", robot, **found, unit=unit, **where, detail=detail, directory=folder)
        print(f"{robot}: {found['value']:,.1f} +- {found['spread']:,.1f} {unit}, {found['n']} seeds", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Train every robot with every seed."""
    given = parse_arguments(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        runs = given.runs or Path(temporary)
        for robot in given.robots:
            record(robot, [run(robot, seed, runs, given) for seed in given.seeds], given)


if __name__ == "__main__":
    main()
