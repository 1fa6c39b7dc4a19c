"""Benchmark results, one JSON object a line in benchmarks/<bench>.jsonl. Schema: benchmarks/README.md."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BENCHES = ("throughput", "dispatch", "cpu", "networks", "training", "transfer", "accuracy", "occupancy")
BACKENDS = ("cpu", "cuda")
GRANULARITIES = ("stage", "substep", "step")
PACKAGES = (
    "brax-concurrent",
    "jax",
    "jaxlib",
    "numba",
    "numba-cuda",
    "llvmlite",
    "numpy",
    "mujoco",
    "gymnasium",
    "optax",
)

Record = dict[str, Any]

FIELDS: dict[str, tuple[type, ...]] = {
    "bench": (str,),
    "case": (str,),
    "num_envs": (int, type(None)),
    "batch": (int, type(None)),
    "backend": (str,),
    "scheduler": (str,),
    "granularity": (str, type(None)),
    "value": (int, float),
    "unit": (str,),
    "spread": (int, float),
    "n": (int,),
    "baseline": (str, type(None)),
    "ratio": (int, float, type(None)),
    "detail": (dict,),
    "device": (str,),
    "driver": (str, type(None)),
    "versions": (dict,),
    "commit": (str,),
    "date": (str,),
}


def append(
    bench: str,
    case: str,
    value: float,
    unit: str,
    spread: float,
    n: int,
    *,
    backend: str,
    scheduler: str,
    num_envs: int | None = None,
    batch: int | None = None,
    granularity: str | None = None,
    baseline: str | None = None,
    ratio: float | None = None,
    detail: Mapping[str, Any] | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> Record:
    """Validate a result, add where and when it was measured, append it to its file and return it.

    Args:
        bench: one of `BENCHES`; also the file's name.
        case: the robot or network; "all" for all five robots in one stream.
        value: the result, in `unit`. `summary` makes it, with `spread` and `n`, from repeated measurements.
        unit: e.g. "env steps/s" or "ns/task".
        spread: how far apart the repetitions were, in `unit`.
        n: number of repetitions.
        backend: "cpu" or "cuda"; decides which device is recorded.
        scheduler: ours ("serial", "graph", "sw", "hw") or the name of a rival that was measured itself.
        num_envs: environments simulated at once; or `batch` for a network.
        batch: inputs of a network at once.
        granularity: "stage", "substep" or "step"; None where there is no stream.
        baseline: the scheduler or rival, measured in the same run, that `ratio` compares with.
        ratio: how many times better than the baseline; higher is better, whatever the unit.
        detail: any other settings of the run, by name.
        directory: where to write; by default $BRAX_CONCURRENT_RECORDS or benchmarks/.

    Raises:
        ValueError: naming the field and the value that breaks the schema.
    """
    record: Record = {
        "bench": bench,
        "case": case,
        "num_envs": num_envs,
        "batch": batch,
        "backend": backend,
        "scheduler": scheduler,
        "granularity": granularity,
        "value": value,
        "unit": unit,
        "spread": spread,
        "n": n,
        "baseline": baseline,
        "ratio": ratio,
        "detail": dict(detail or {}),
        **provenance(backend),
    }
    validate(record)
    where = folder(directory)
    where.mkdir(parents=True, exist_ok=True)
    with open(where / f"{bench}.jsonl", "a") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")
    return record


def folder(directory: str | os.PathLike[str] | None = None) -> Path:
    """Where records go: `directory`, else $BRAX_CONCURRENT_RECORDS, else benchmarks/."""
    return Path(directory or os.environ.get("BRAX_CONCURRENT_RECORDS") or ROOT / "benchmarks")


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Repeated measurements as `append` takes them: `value` (the median), `spread` (half the range), `n`."""
    if not samples:
        raise ValueError("samples is empty: nothing was measured")
    return {
        "value": statistics.median(samples),
        "spread": (max(samples) - min(samples)) / 2,
        "n": len(samples),
    }


def read(path: Path) -> list[Record]:
    """All records of one file, in the order in which they were measured.

    Raises:
        ValueError: naming file, line, field and value.
    """
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            validate(record)
            if record["bench"] != path.stem:
                raise ValueError(f"bench is {record['bench']!r} in a file named {path.name}")
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        records.append(record)
    return records


def validate(record: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the field and its value, if the record breaks the schema."""
    if record.keys() != FIELDS.keys():
        missing, unknown = sorted(FIELDS.keys() - record.keys()), sorted(record.keys() - FIELDS.keys())
        raise ValueError(f"missing fields {missing}, unknown fields {unknown}; put settings into detail")
    for name, kinds in FIELDS.items():
        value = record[name]
        if not isinstance(value, kinds) or isinstance(value, bool):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{name} is {value!r}; it must be {wanted}")
        if value == "":
            raise ValueError(f"{name} is empty")
    choices = {"bench": BENCHES, "backend": BACKENDS, "granularity": (*GRANULARITIES, None)}
    for name, allowed in choices.items():
        if record[name] not in allowed:
            raise ValueError(f"{name} is {record[name]!r}; it must be one of {allowed}")
    _validate_numbers(record)


def _validate_numbers(record: Mapping[str, Any]) -> None:
    for name in ("value", "spread", "ratio"):
        if record[name] is not None and not math.isfinite(record[name]):
            raise ValueError(f"{name} is {record[name]!r}; it must be finite")
    for name in ("num_envs", "batch", "n"):
        if record[name] is not None and record[name] < 1:
            raise ValueError(f"{name} is {record[name]!r}; it must be at least 1")
    if record["spread"] < 0:
        raise ValueError(f"spread is {record['spread']!r}; it must not be negative")
    if record["num_envs"] is not None and record["batch"] is not None:
        raise ValueError("num_envs and batch are both given; a result has at most one of them")
    if (record["baseline"] is None) != (record["ratio"] is None):
        raise ValueError("baseline and ratio belong together: give both or neither")


def provenance(backend: str) -> Record:
    """Device, driver, versions, commit and date of a measurement that this process makes now."""
    device, driver = _gpu() if backend == "cuda" else (_cpu(), None)
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": device,
        "driver": driver,
        "versions": versions,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _gpu() -> tuple[str, str]:
    """Name and driver version of the first GPU that this process may use."""
    output = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if not output:
        raise ValueError("backend is 'cuda', but nvidia-smi finds no GPU here")
    name, driver = output.splitlines()[0].rsplit(",", 1)
    return name.strip(), driver.strip()


def _cpu() -> str:
    """Model name and the number of logical processors that this process may use."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return f"{model}, {len(os.sched_getaffinity(0))} logical processors"


def _commit() -> str:
    """The commit that was measured, "-dirty" if the package differs from it.

    $BRAX_CONCURRENT_COMMIT says it where the code was copied to a machine without its repository.
    """
    if given := os.environ.get("BRAX_CONCURRENT_COMMIT"):
        return given
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", "brax_concurrent", "scripts")
    return f"{commit}-dirty" if changed else commit


def _output(*command: str) -> str:
    """What the command prints, or "" where it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
