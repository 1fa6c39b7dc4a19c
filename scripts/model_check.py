"""Check the dispatcher protocol of docs/protocol with SPIN, and with planted mistakes that SPIN would see them.

    python scripts/model_check.py                   seconds
    python scripts/model_check.py --size large      minutes, up to 1 GB a search
    python scripts/model_check.py --only UNITS --story    a planted mistake, told step by step

Each size of a model is searched exhaustively, twice: for failed assertions and deadlocks with waiting that blocks, and
for fair runs without an end with waiting that spins. Exits 1 if SPIN finds an error in the protocol, or none in a
planted mistake, or could not finish a search, or if the sizes leave a statement of a model untried; 2 without SPIN.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

MODELS = Path(__file__).parents[1] / "docs" / "protocol"
MISSING = """\
model checking needs {missing}, which {verb} not installed:
  Debian, Ubuntu   apt-get install spin gcc
  elsewhere        https://spinroot.com (a C program without dependencies), and a C compiler by the name of gcc"""

SMALL, LARGE, NEVER = "small", "large", "never"
# A model with what it is compiled with; from which --size on it is searched for safety, and for liveness, which takes
# several times as long.
SIZES = (
    ("dispatcher GRAPH=CHAIN WORKERS=3", SMALL, LARGE),
    ("dispatcher GRAPH=DIAMOND", SMALL, SMALL),
    ("dispatcher GRAPH=DIAMOND SLOTS=3", SMALL, SMALL),
    ("dispatcher GRAPH=CHAIN GANG=2", SMALL, LARGE),
    ("dispatcher GRAPH=OVERWRITE TILES=2 GROUP=2", SMALL, LARGE),
    ("dispatcher GRAPH=PREDICATES SLOTS=3", SMALL, SMALL),
    ("dispatcher GRAPH=CHAIN WINDOWS=2 WORKERS=1 TILES=2", SMALL, LARGE),
    ("units GRAPH=DIAMOND", SMALL, SMALL),
    ("units GRAPH=OVERWRITE SLOTS=3 PARTS=3", SMALL, SMALL),
    ("log GRAPH=DIAMOND", SMALL, SMALL),
    ("log GRAPH=PREDICATES SLOTS=3", SMALL, SMALL),
    ("log GRAPH=FLAGS SLOTS=3", SMALL, LARGE),
    ("log GRAPH=OVERWRITE SLOTS=3 PARTS=3", SMALL, LARGE),
    ("dispatcher GRAPH=DIAMOND WORKERS=3 SLOTS=3", LARGE, LARGE),
    ("dispatcher GRAPH=PREDICATES WORKERS=3 SLOTS=4", LARGE, LARGE),
    ("dispatcher GRAPH=PREDICATES GANG=2 SLOTS=3", LARGE, NEVER),
    ("dispatcher GRAPH=ALONE SLOTS=4", LARGE, LARGE),
    ("dispatcher GRAPH=ALONE WORKERS=3 SLOTS=4", LARGE, NEVER),
    ("dispatcher GRAPH=PREDICATES TILES=2 SLOTS=3", LARGE, NEVER),
    ("dispatcher GRAPH=DIAMOND TILES=2 GROUP=2 SLOTS=4", LARGE, NEVER),
    ("dispatcher GRAPH=DIAMOND GANG=2 TILES=2 GROUP=2 SLOTS=4", LARGE, NEVER),
    ("dispatcher GRAPH=OVERWRITE WORKERS=3 TILES=2 GROUP=2 SLOTS=3", LARGE, NEVER),
    ("dispatcher GRAPH=CHAIN WINDOWS=2 WORKERS=2 TILES=2", LARGE, NEVER),
    ("units GRAPH=CHAIN WORKERS=3", LARGE, LARGE),
    ("units GRAPH=ALONE SLOTS=3 PARTS=3", LARGE, LARGE),
    ("units GRAPH=DIAMOND WORKERS=3 SLOTS=3", LARGE, NEVER),
    ("units GRAPH=OVERWRITE WORKERS=3 SLOTS=3 PARTS=3", LARGE, NEVER),
    ("log GRAPH=CHAIN WORKERS=3", LARGE, NEVER),
    ("log GRAPH=PREDICATES WORKERS=3 SLOTS=3", LARGE, NEVER),
    ("log GRAPH=OVERWRITE WORKERS=3", LARGE, NEVER),
    ("log GRAPH=DIAMOND WORKERS=3", LARGE, NEVER),
    ("log GRAPH=ALONE SLOTS=3 PARTS=3", LARGE, NEVER),
)
# A planted mistake, and the small size in which SPIN must see it. README.md says what each is.
BUGS = (
    ("NO_FENCE", "dispatcher GRAPH=DIAMOND"),
    ("NO_ACQUIRE", "dispatcher GRAPH=OVERWRITE TILES=2 GROUP=2"),
    ("LATE_FENCE", "dispatcher GRAPH=DIAMOND"),
    ("LOST_DONE", "dispatcher GRAPH=DIAMOND SLOTS=3"),
    ("ASK", "dispatcher GRAPH=DIAMOND"),
    ("GRANTED", "dispatcher GRAPH=DIAMOND"),
    ("OVERWRITE", "dispatcher GRAPH=DIAMOND"),
    ("END", "dispatcher GRAPH=DIAMOND"),
    ("RUNNING", "dispatcher GRAPH=DIAMOND"),
    ("PREDICATE", "dispatcher GRAPH=PREDICATES SLOTS=3"),
    ("GANG", "dispatcher GRAPH=CHAIN GANG=2"),
    ("NO_FENCE", "units GRAPH=DIAMOND"),
    ("LATE_FENCE", "units GRAPH=DIAMOND"),
    ("NO_ACQUIRE", "units GRAPH=OVERWRITE SLOTS=3 PARTS=3"),
    ("UNITS", "units GRAPH=DIAMOND"),
    ("JOIN", "units GRAPH=DIAMOND"),
    ("REPORT", "units GRAPH=DIAMOND"),
    ("EPOCH", "units GRAPH=DIAMOND"),
    ("END", "units GRAPH=DIAMOND"),
    ("NO_FENCE", "log GRAPH=DIAMOND"),
    ("LATE_FENCE", "log GRAPH=DIAMOND"),
    ("NO_ACQUIRE", "log GRAPH=OVERWRITE SLOTS=3 PARTS=3"),
    ("TICKET", "log GRAPH=DIAMOND"),
    ("FIRST", "log GRAPH=DIAMOND"),
    ("RUNNING", "log GRAPH=DIAMOND"),
    ("SKIP", "log GRAPH=PREDICATES SLOTS=3"),
    ("PREDICATE", "log GRAPH=FLAGS SLOTS=3"),
    ("END", "log GRAPH=DIAMOND"),
    ("NO_WAIT", "log GRAPH=DIAMOND"),
    ("OPERANDS", "log GRAPH=DIAMOND"),
    ("EARLY", "log GRAPH=DIAMOND"),
    ("LATE_RECORD", "log GRAPH=DIAMOND"),
)
SAFETY, LIVENESS = "safety", "liveness"
CLEAN, INCOMPLETE = "no error", "not finished"


@dataclass(frozen=True)
class Run:
    """A search: a size of a model, what is looked for, and the planted mistake, if any."""

    size: str
    looks_for: str
    bug: str = ""

    @property
    def model(self) -> str:
        return self.size.split()[0] + ".pml"

    @property
    def is_quick(self) -> bool:
        return self.size not in {size for size, since, _ in SIZES if since == LARGE}

    @property
    def defines(self) -> list[str]:
        words = self.size.split()[1:]
        words += ["SPINNING"] if self.looks_for == LIVENESS else []
        words += [f"BUG_{self.bug}"] if self.bug else []
        return [f"-D{word}" for word in words]


@dataclass(frozen=True)
class Result:
    """What a search came to: `found` is CLEAN, INCOMPLETE or the error in words, `story` what led to it."""

    run: Run
    found: str
    states: int
    megabytes: float
    seconds: float
    untried: frozenset[str]
    story: str

    @property
    def is_right(self) -> bool:
        return self.found != INCOMPLETE and (self.found != CLEAN) == bool(self.run.bug)


def search(run: Run, gigabytes: int) -> Result:
    """Let SPIN search one size of a model exhaustively."""
    with tempfile.TemporaryDirectory(prefix="model-check-") as name:
        folder = Path(name)
        for path in MODELS.glob("*.pml"):
            shutil.copy(path, folder)
        _command(["spin", *run.defines, "-a", run.model], folder)
        flags = ["-DSAFETY", "-DNOCLAIM"] if run.looks_for == SAFETY else ["-DNFAIR=3"]
        # A small size takes longer to compile than to search.
        flags += [f"-DMEMLIM={1024 * gigabytes}", "-w", *(["-O0"] if run.is_quick else ["-O2", "-DCOLLAPSE"])]
        _command(["gcc", *flags, "-o", "pan", "pan.c"], folder)
        begin = time.monotonic()
        # More than the longest path and the usual number of states: else pan says so, or takes longer.
        limits = ["-m200000", "-w20"] if run.is_quick else ["-m5000000", "-w24"]
        output = _command(["./pan", *limits, *(["-a", "-f"] if run.looks_for == LIVENESS else [])], folder)
        seconds = time.monotonic() - begin
        story = _command(["spin", *run.defines, "-t", run.model], folder) if ".trail" in output else ""
    return Result(
        run,
        _found(output, story),
        int(_number(r"(\d+) states, stored", output)),
        _number(r"([\d.]+)\ttotal actual memory usage", output),
        seconds,
        frozenset(re.findall(rf"^\t({re.escape(run.model)}:\d+), state", output, re.MULTILINE)),
        _told(story),
    )


def _command(words: list[str], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    output = done.stdout + done.stderr
    if done.returncode < 0 or (words[0] != "./pan" and done.returncode > 0):
        raise SystemExit(f"{' '.join(words)} failed:\n{output}")
    return output


def _number(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    return float(match[1]) if match else 0.0


def _found(output: str, story: str) -> str:
    """The error in words: the comment behind the assertion that failed, or what pan calls it."""
    if failed := re.search(r"^spin: (\w+\.pml):(\d+), Error: assertion violated", story, re.MULTILINE):
        line = (MODELS / failed[1]).read_text().splitlines()[int(failed[2]) - 1]
        return line.partition("/*")[2].partition("*/")[0].strip()
    if re.search(r"^pan:\d+: invalid end state", output, re.MULTILINE):
        return "deadlock: a worker waits for ever"
    if re.search(r"^pan:\d+: acceptance cycle", output, re.MULTILINE):
        return "a fair run without an end"
    is_complete = "errors: 0" in output and not re.search(r"not completed|too small|out of memory|aborted", output)
    return CLEAN if is_complete else INCOMPLETE


def _told(story: str) -> str:
    lines = [line for line in story.splitlines() if re.match(r"\s+(worker|warp) \d|\s*<<<", line)]
    return "\n".join(line.strip() for line in lines)


def untried(results: list[Result]) -> dict[str, list[str]]:
    """The lines of each model that no size without a planted mistake has reached."""
    left: dict[str, frozenset[str]] = {}
    for result in results:
        if not result.run.bug and result.run.looks_for == SAFETY:
            model = result.run.model
            left[model] = left.get(model, result.untried) & result.untried
    return {model: sorted(lines) for model, lines in left.items() if lines}


def row(result: Result) -> str:
    """A result as a row of a Markdown table."""
    run = result.run
    planted = f"`BUG_{run.bug}`" if run.bug else ""
    verdict = result.found if result.is_right else f"**{result.found}**"
    cost = f"{result.states:,} | {result.megabytes:,.0f} | {result.seconds:.1f}"
    return f"| {run.size} | {planted} | {run.looks_for} | {verdict} | {cost} |"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=(SMALL, LARGE), default=SMALL, help="large adds sizes to small")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose size or mistake contains this")
    parser.add_argument("--story", action="store_true", help="tell what led to each error")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="searches at once")
    parser.add_argument("--gigabytes", type=int, default=4, help="memory that a search may take")
    options = parser.parse_args(arguments)
    if missing := [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]:
        print(MISSING.format(missing=" and ".join(missing), verb="is" if len(missing) == 1 else "are"), file=sys.stderr)
        return 2

    is_small = options.size == SMALL
    asked = (SMALL,) if is_small else (SMALL, LARGE)
    runs = [
        Run(size, looks_for)
        for size, *since in SIZES
        for looks_for, first in zip((SAFETY, LIVENESS), since, strict=True)
        if first in asked
    ]
    runs += [Run(size, SAFETY, bug) for bug, size in BUGS]
    runs += [Run(size, LIVENESS, bug) for bug, size in BUGS if bug in ("EPOCH", "ASK")]
    runs = [run for run in runs if options.only in f"{run.size} BUG_{run.bug}"]
    results = []
    print("| size | planted mistake | looked for | found | states | MB | s |")
    print("| --- | --- | --- | --- | ---: | ---: | ---: |")
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(partial(search, gigabytes=options.gigabytes), runs):
            results.append(result)
            print(row(result), flush=True)
            if result.story and (options.story or not result.is_right):
                print(f"\n{result.story}\n-> {result.found}\n")
    return verdict(results, is_whole=not options.only)


def verdict(results: list[Result], is_whole: bool) -> int:
    """Say what the results come to; 0 if all are as they should be."""
    wrong = [result for result in results if not result.is_right]
    for result in wrong:
        print(f"\nwrong: {row(result)}")
    left = untried(results) if is_whole else {}
    for model, lines in left.items():
        print(f"\nno size reaches these lines of {model}: {', '.join(lines)}")
    if not results:
        print("\nnothing to check: no size and no mistake is called so")
    is_right = bool(results) and not wrong and not left
    if is_right:
        planted = sum(bool(result.run.bug) for result in results)
        print(f"\n{len(results) - planted} searches without an error, and an error in each of {planted} with a mistake")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
