"""Environment steps per second under random actions: robots, schedulers, granularities, batch sizes, other simulators.

    python scripts/bench_throughput.py
    python scripts/bench_throughput.py --robots ant all --num-envs 4096 --scheduler serial --granularity stage step
    python scripts/bench_throughput.py --robots ant --peer mujoco-warp brax-spring

All that is measured of one robot at one batch size is measured turn and turn about, in one process. Ours is a jitted
scan of control steps with observations, rewards and resets (brax_concurrent/training/measure.py); how others are run
is told in peers/. "all" is one batch with every robot. Results are appended, as benchmarks/README.md describes, to
throughput.jsonl in $OUT if it is set, else in benchmarks/, and drawn beside it where Matplotlib is installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import _records
import peers
from peers import CannotRunError, Prepared

import brax_concurrent as bc
from brax_concurrent.backends.cpu_program import cores
from brax_concurrent.cli.common import setting
from brax_concurrent.envs.arrays import GRANULARITIES, resolve_backend
from brax_concurrent.scheduler.schedule import SCHEDULERS, schedulers_on
from brax_concurrent.training.measure import Timing

ALL = "all"
SIZES = {"cpu": [256, 1024, 4096], "cuda": [1024, 4096, 16384, 65536]}
BASELINE = ("serial", "stage")


@dataclass(frozen=True)
class Entry:
    """What is measured in one turn: one of our schedulers at one granularity, or a peer, whose granularity is None."""

    scheduler: str
    granularity: str | None
    prepare: Callable[[], Prepared]
    note: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.scheduler, self.granularity, self.note) if part)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, with defaults that depend on the backend filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    robots = [*bc.list_envs(), ALL]
    parser.add_argument("--robots", nargs="+", default=robots, choices=robots)
    parser.add_argument("--num-envs", nargs="+", type=int, help='of each robot of "all"')
    parser.add_argument("--scheduler", nargs="+", choices=SCHEDULERS)
    parser.add_argument("--granularity", nargs="+", default=list(GRANULARITIES), choices=GRANULARITIES)
    parser.add_argument("--set", nargs="+", type=setting, default=[], metavar="ARGUMENT=VALUE", help="not for serial")
    parser.add_argument("--backend", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0: all")
    parser.add_argument(
        "--per-tile", action="store_true", help="also launch every kernel for 32 environments at a time"
    )
    parser.add_argument("--repeats", type=int, default=5)
    every = peers.all_peers()
    parser.add_argument("--peer", nargs="+", default=[], choices=[*every, ALL], help="all: those that are installed")
    given = parser.parse_args(arguments)
    for name in given.peer:
        if name != ALL and (missing := every[name].missing()):
            parser.error(f"--peer {name}: {', '.join(missing)} is not installed: pip install {every[name].install}")
    given.backend = resolve_backend(given.backend)
    given.scheduler = given.scheduler or list(schedulers_on(given.backend))
    given.num_envs = given.num_envs or SIZES[given.backend]
    return given


def chosen_peers(names: list[str]) -> list[peers.Peer]:
    """The peers to measure; of "all" those that are installed, with a line about each of the others."""
    every = peers.all_peers()
    chosen = [every[name] for name in every if name in names]
    if ALL in names:
        for peer in every.values():
            if peer.missing():
                print(f"not installed: {peer.name} (pip install {peer.install})", flush=True)
            elif peer not in chosen:
                chosen.append(peer)
    return chosen


def prepare_ours(
    robot: str, num_envs: int, given: argparse.Namespace, scheduler: str, granularity: str, **settings: Any
) -> Prepared:
    """One of our environments, compiled and warmed up; `settings` are further arguments of `make`."""
    settings |= {} if scheduler == "serial" else dict(given.set)
    common = {"scheduler": scheduler, "granularity": granularity, "backend": given.backend, "threads": given.threads}
    if robot == ALL:
        timing = Timing(bc.make(dict.fromkeys(bc.list_envs(), num_envs), **common, **settings))
    else:
        timing = Timing(bc.make(robot, num_envs, **common, **settings))
    threads = {"threads": given.threads or cores()} if given.backend == "cpu" else {}
    detail = {**settings, **threads}
    return Prepared(timing.sample, timing.check, timing.env.num_envs, timing.compile_seconds, detail)


def entries(robot: str, num_envs: int, given: argparse.Namespace, others: list[peers.Peer]) -> Iterator[Entry]:
    """What is measured of a robot at a batch size, the baseline first and always."""
    pairs = [(scheduler, granularity) for scheduler in given.scheduler for granularity in given.granularity]
    for scheduler, granularity in dict.fromkeys([BASELINE, *pairs]):
        prepare = functools.partial(prepare_ours, robot, num_envs, given, scheduler, granularity)
        yield Entry(scheduler, granularity, prepare)
    if given.per_tile and given.backend == "cuda":
        prepare = functools.partial(prepare_ours, robot, num_envs, given, *BASELINE, envs_per_task=32)
        yield Entry(*BASELINE, prepare, "per tile")
    for peer in others:
        if robot == ALL:
            print(f"skipped   {peer.name}, {robot}: it steps one robot at a time", flush=True)
            continue
        prepare = functools.partial(peer.prepare, robot, num_envs, given.backend, given.threads)
        yield Entry(peer.name, None, prepare)


def attempt(what: str, work: Callable[[], Any]) -> Any:
    """What `work` returns, or None: a failure is printed, so that the rest is measured all the same."""
    try:
        return work()
    except CannotRunError as reason:
        print(f"skipped   {what}: {reason}", flush=True)
    except Exception as error:
        failures.append(what)
        print(f"FAILED    {what}: {type(error).__name__}: {error}", flush=True)
    return None


failures: list[str] = []


def measure_group(robot: str, num_envs: int, given: argparse.Namespace, others: list[peers.Peer]) -> None:
    """Measure, print and record all entries of a robot at a batch size."""
    ready: dict[Entry, Prepared] = {}
    for entry in entries(robot, num_envs, given, others):
        prepared = attempt(f"{entry}, {robot}, {num_envs} environments", entry.prepare)
        if prepared is not None:
            ready[entry] = prepared
    samples: dict[Entry, list[float]] = {entry: [] for entry in ready}
    for _ in range(given.repeats):
        for entry in list(samples):
            sample = attempt(f"{entry}, {robot}, {num_envs} environments", ready[entry].sample)
            if sample is None:
                del samples[entry]
            else:
                samples[entry].append(sample)
    for entry in list(samples):
        if attempt(f"{entry}, {robot}, {num_envs} environments", functools.partial(checked, ready[entry])) is None:
            del samples[entry]
    baseline = next((own for entry, own in samples.items() if (entry.scheduler, entry.granularity) == BASELINE), None)
    for entry, own in samples.items():
        report(robot, entry, ready[entry], own, baseline, given.backend)


def checked(prepared: Prepared) -> bool:
    """True, unless the check raises."""
    prepared.check()
    return True


def report(
    robot: str, entry: Entry, prepared: Prepared, samples: list[float], baseline: list[float] | None, backend: str
) -> None:
    """Print and record one entry's result; its ratio is the median of its turns' quotients with the baseline's."""
    against: Mapping[str, Any] = {}
    if baseline is not None:
        ratio = statistics.median(a / b for a, b in zip(samples, baseline, strict=True))
        against = {"baseline": BASELINE[0], "ratio": ratio}
    result = _records.summary(samples)
    detail = {**prepared.detail, "compile_seconds": float(prepared.compile_seconds)}
    _records.append(
        "throughput",
        robot,
        **result,
        **against,
        unit="env steps/s",
        num_envs=prepared.num_envs,
        backend=backend,
        scheduler=entry.scheduler,
        granularity=entry.granularity,
        detail=detail,
        directory=os.environ.get("OUT"),
    )
    print(
        f"{robot:12} {prepared.num_envs:7} envs  {entry!s:20} {result['value']:14,.0f} env steps/s "
        f"(+-{result['spread'] / result['value']:.1%})"
        + (f", {against['ratio']:.3g}x {' '.join(BASELINE)}" if against else "")
        + f"; compiled in {prepared.compile_seconds:.1f} s",
        flush=True,
    )


def draw(backend: str) -> None:
    """Draw the results beside the records, where Matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: pip install matplotlib, then python scripts/plot_throughput.py", flush=True)
        return
    import plot_throughput

    folder = _records.folder(os.environ.get("OUT"))
    picture = "throughput.png" if backend == "cuda" else f"throughput-{backend}.png"
    plot_throughput.draw(folder / "throughput.jsonl", backend, folder / picture)


def main(arguments: list[str] | None = None) -> int:
    """Measure what is asked for; 1 if anything failed."""
    given = parse_arguments(arguments)
    if given.peer:  # JAX would take the GPU's memory, and leave none for libraries without it
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    others = chosen_peers(given.peer)
    failures.clear()
    where = _records.provenance(given.backend)
    print(where["device"], where["driver"] or "", where["versions"], where["commit"], flush=True)
    for robot in given.robots:
        for num_envs in given.num_envs:
            measure_group(robot, num_envs, given, others)
    draw(given.backend)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
