"""How busy a control step keeps a GPU, and what its warps wait for: hardware counters, and timelines.

    python scripts/bench_occupancy.py
    python scripts/bench_occupancy.py --robots ant --num-envs 4096 --how serial:stage serial:step hw:step

Each control step is one, with actions 0, of an environment that has taken 200 random steps. Its kernels are profiled by
Nsight Compute (`ncu`, which comes with CUDA's toolkit, and may need the administrator's permission to read counters),
which runs this script a second time; its counters are put together as the step's: times and events added, parts of a
maximum weighted by time, parts of an instruction by instructions. Then control steps are recorded as `brax-concurrent
trace` does, which tells in which part of the time the workers, CUDA streams or gangs of warps, had a task.

Records go to occupancy.jsonl in $OUT if it is set, else in benchmarks/: the value is the achieved occupancy, the part
of the warps that the GPU could hold of which one is there on average, in per cent.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _records
import jax

import brax_concurrent as bc
from brax_concurrent.training.measure import random_actions

HOW = ("serial:stage", "serial:step", "hw:step")
WARM_UP, RECORDED = 200, 8
_STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
TIME, INSTRUCTIONS, OCCUPANCY = "microseconds", "instructions", "achieved occupancy, %"
METRICS: dict[str, tuple[str, str, float]] = {
    # name: (ncu's, how kernels are put together, factor)
    TIME: ("gpu__time_duration.sum", "sum", 1e-3),
    INSTRUCTIONS: ("smsp__inst_executed.sum", "sum", 1.0),
    "DRAM bytes read": ("dram__bytes_read.sum", "sum", 1.0),
    "DRAM bytes written": ("dram__bytes_write.sum", "sum", 1.0),
    OCCUPANCY: ("sm__warps_active.avg.pct_of_peak_sustained_active", TIME, 1.0),
    "issue slots used, %": ("smsp__issue_active.avg.pct_of_peak_sustained_active", TIME, 1.0),
    "L1 hits, %": ("l1tex__t_sector_hit_rate.pct", TIME, 1.0),
    "active lanes of an instruction": ("smsp__thread_inst_executed_per_inst_executed.ratio", INSTRUCTIONS, 1.0),
    "cycles of a warp for an instruction": ("smsp__average_warp_latency_per_inst_issued.ratio", INSTRUCTIONS, 1.0),
    "of these waiting for instructions": (_STALLED.format("no_instruction"), INSTRUCTIONS, 1.0),
    "of these waiting for memory": (_STALLED.format("long_scoreboard"), INSTRUCTIONS, 1.0),
    "of these waiting at barriers": (_STALLED.format("barrier"), INSTRUCTIONS, 1.0),
    "of these waiting for results of arithmetic": (_STALLED.format("wait"), INSTRUCTIONS, 1.0),
}


def rows_of(text: str) -> list[dict[str, float]]:
    """What ncu measured of each kernel, in the order of the launches, by the names of METRICS.

    Args:
        text: what `ncu --csv --page raw --print-units base` printed.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = list(csv.DictReader(lines))[1:]  # the first row has the units
    return [{n: factor * float(row[own].replace(",", "")) for n, (own, _, factor) in METRICS.items()} for row in table]


def together(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The counters of several kernels as those of all of them."""
    found = {}
    for name, (_, way, _) in METRICS.items():
        if way == "sum":
            found[name] = sum(row[name] for row in rows)
        else:
            found[name] = sum(row[name] * row[way] for row in rows) / sum(row[way] for row in rows)
    return found


class Case:
    """A robot, a batch size, a scheduler and a granularity, as `robot:num_envs:scheduler:granularity`."""

    def __init__(self, text: str):
        self.text = text
        self.robot, number, self.scheduler, self.granularity = text.split(":")
        self.num_envs = int(number)

    def make(self, **settings: Any) -> Any:
        """The environment."""
        how = {"scheduler": self.scheduler, "granularity": self.granularity, "backend": "cuda", **settings}
        return bc.make(self.robot, self.num_envs, **how)


def random_steps(env: Any, state: Any, count: int) -> Any:
    """A state after so many random control steps."""

    def step(state: Any, key: jax.Array) -> tuple[Any, None]:
        return env.step(state, random_actions(env, key)), None

    keys = jax.random.split(jax.random.key(1), count)
    return jax.block_until_ready(jax.jit(lambda state: jax.lax.scan(step, state, keys)[0])(state))


def profiled(cases: Iterable[Case]) -> None:
    """Inside ncu: one control step of each case; prints how many kernels each has launched."""
    places = ["libcudart.so", *sorted(glob.glob("/usr/local/cuda*/lib64/libcudart.so*"))]
    runtime = next(library for place in places if (library := _library(place)) is not None)
    for case in cases:
        env = case.make()
        state = random_steps(env, env.reset(jax.random.key(0)), WARM_UP)
        action = jax.numpy.zeros((env.num_envs, env.action_size))
        step = jax.jit(env.step)
        state = jax.block_until_ready(step(state, action))
        runtime.cudaProfilerStart()
        jax.block_until_ready(step(state, action))
        runtime.cudaProfilerStop()
        launches = 1 if case.scheduler == "hw" else len(env.program("control_step").ops)
        print(json.dumps([case.text, launches]), flush=True)


def _library(place: str) -> Any:
    try:
        return ctypes.CDLL(place)
    except OSError:
        return None


def counters(cases: Sequence[Case]) -> dict[str, dict[str, float]]:
    """What ncu counts of a control step of each case, by its text.

    Raises:
        RuntimeError: ncu fails, or profiles another number of kernels than were launched.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        ncu = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
        ncu += ["--print-units", "base", "--kernel-name", "regex:^(k|d)[0-9a-f]+$", "--log-file", str(log)]
        ncu += ["--metrics", ",".join(own for own, *_ in METRICS.values())]
        done = subprocess.run(
            [*ncu, sys.executable, __file__, "--inside", *(case.text for case in cases)],
            capture_output=True,
            text=True,
            check=False,
        )
        text = log.read_text() if log.exists() else ""
    launched = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    rows = rows_of(text)
    if done.returncode or sum(count for _, count in launched) != len(rows):
        raise RuntimeError(f"ncu: {len(rows)} kernels profiled of {launched}: {text[-500:]} {done.stderr[-2000:]}")
    found = {}
    for name, count in launched:
        found[name], rows = together(rows[:count]), rows[count:]
    return found


def timeline(case: Case) -> Any:
    """The timeline of some random control steps."""
    with tempfile.TemporaryDirectory() as folder:
        env = case.make(trace=str(Path(folder) / "trace.json"))
        random_steps(env, env.reset(jax.random.key(0)), RECORDED)
        return env.write_trace()


def main(arguments: list[str] | None = None) -> None:
    """Count, record in time, print and append the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robots", nargs="+", default=bc.list_envs(), choices=bc.list_envs())
    parser.add_argument("--num-envs", nargs="+", type=int, default=[4096, 32768])
    parser.add_argument("--how", nargs="+", default=list(HOW), metavar="SCHEDULER:GRANULARITY")
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.inside:
        profiled(map(Case, given.inside))
        return
    if not shutil.which("ncu"):
        parser.error("Nsight Compute's ncu is not on the PATH; CUDA's toolkit has it, in its folder bin")
    cases = [Case(f"{r}:{n}:{how}") for r in given.robots for n in given.num_envs for how in given.how]
    counted = counters(cases)
    for case in cases:
        recorded, own = timeline(case), counted[case.text]
        detail = {name: float(value) for name, value in own.items() if name != OCCUPANCY}
        detail |= {"timeline's occupancy, %": 100 * recorded.occupancy, "tasks in flight": recorded.concurrency}
        _records.append(
            *("occupancy", case.robot, own[OCCUPANCY], "% of warps", 0.0, 1),
            backend="cuda",
            scheduler=case.scheduler,
            granularity=case.granularity,
            num_envs=case.num_envs,
            detail=detail,
            directory=os.environ.get("OUT"),
        )
        print(case.text, {name: round(value, 2) for name, value in {OCCUPANCY: own[OCCUPANCY], **detail}.items()})


if __name__ == "__main__":
    main()
