"""Write README's tables of results from benchmarks/*.jsonl.

A table stands between `<!-- results:NAME -->` and `<!-- /results:NAME -->`, where NAME is a benchmark.
Filters may follow the name, as in `<!-- results:throughput backend=cuda num_envs=4096 -->`; `detail.window=32` is one
for a setting in `detail`, and a space in a value is written `_`. Of results with the same settings the newest counts.

    python scripts/update_readme.py            rewrite README.md
    python scripts/update_readme.py --check    exit 1 if that would change it
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import _records
from _records import Record

MARKED = re.compile(r"(<!-- results:(\w+)([^>]*?) -->\n)(.*?)(<!-- /results:\2 -->)", re.DOTALL)
# One column per scheduler for these; one row per result for the others.
COMPARED = ("throughput", "dispatch", "cpu", "networks")
OURS = ("serial", "graph", "sw", "hw")
SETTINGS = ("case", "num_envs", "batch", "backend", "scheduler", "granularity", "unit", "device", "detail")


def render(text: str, directory: Path) -> str:
    """`text` with every marked table written anew from the records in `directory`."""

    def fill(match: re.Match[str]) -> str:
        opening, bench, filters, _, closing = match.groups()
        if bench not in _records.BENCHES:
            raise ValueError(f"results:{bench} is no benchmark; known are {_records.BENCHES}")
        path = directory / f"{bench}.jsonl"
        records = newest(_records.read(path)) if path.exists() else []
        return opening + _tables(bench, [r for r in records if _passes(r, filters.split())]) + closing

    filled, tables = MARKED.subn(fill, text)
    if tables != text.count("<!-- results:") or tables != text.count("<!-- /results:"):
        raise ValueError("a results marker lacks its partner, or stands in the middle of a line")
    return filled


def newest(records: list[Record]) -> list[Record]:
    """The last record of each combination of settings, sorted by case, size and scheduler."""

    def settings(record: Record) -> str:
        return json.dumps([_chosen(record) if name == "detail" else record[name] for name in SETTINGS], sort_keys=True)

    latest = {settings(record): record for record in records}
    return sorted(latest.values(), key=_order)


def _order(record: Record) -> tuple[Any, ...]:
    scheduler = record["scheduler"]
    rank = OURS.index(scheduler) if scheduler in OURS else len(OURS)
    return record["case"] == "all", record["case"], _size(record), record["backend"], rank, scheduler


def _size(record: Record) -> int:
    return record["num_envs"] or record["batch"] or 0


def _passes(record: Record, filters: list[str]) -> bool:
    for item in filters:
        name, _, wanted = item.partition("=")
        group = record["detail"] if name.startswith("detail.") else record
        if str(group.get(name.removeprefix("detail."))).replace(" ", "_") != wanted:
            return False
    return True


def _tables(bench: str, records: list[Record]) -> str:
    """One captioned table for each device and unit."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["device"], record["unit"]), []).append(record)
    parts = []
    for (device, unit), group in groups.items():
        rows = _compare(group) if bench in COMPARED else _list(group)
        newest = max(group, key=lambda record: record["date"])
        driver = f", driver {newest['driver']}" if newest["driver"] else ""
        caption = f"{bench.capitalize()}, {unit}, on {device}{driver} ({_measured(group, bench)}):"
        parts.append(f"{caption}\n\n{_markdown(rows)}\n")
    return "\n".join(parts)


def _measured(records: list[Record], bench: str) -> str:
    """When, and at which commits; with several a row that compares may have numbers of several runs."""
    ordered = sorted(records, key=lambda record: record["date"])
    days = dict.fromkeys(record["date"][:10] for record in (ordered[0], ordered[-1]))
    commits = dict.fromkeys(record["commit"] for record in ordered)
    if len(commits) == 1:
        return f"measured {' to '.join(days)} at commit {ordered[0]['commit']}"
    said = f"measured {' to '.join(days)} at commits {', '.join(commits)}"
    return said + "; a row's numbers may be of several, each ratio is of one" * (bench in COMPARED)


def _compare(records: list[Record]) -> list[list[str]]:
    """A row per case, size and settings, a column per scheduler; of several granularities the best one."""
    schedulers = list(dict.fromkeys(r["scheduler"] for r in sorted(records, key=lambda r: _order(r)[-2:])))
    size = "batch" if all(record["batch"] for record in records) else "environments"
    rows: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        rows.setdefault((record["case"], _size_text(record), _settings(record)), []).append(record)
    table = [["case", size, "settings", *schedulers]]
    for key, row in rows.items():
        candidates = [[r for r in row if r["scheduler"] == scheduler] for scheduler in schedulers]
        table.append([*key, *(_cell(_best(same)) if same else "" for same in candidates)])
    return _without_empty_columns(table)


def _best(records: list[Record]) -> Record:
    lower_is_better = re.match(r"(ns|us|ms|s)\b", records[0]["unit"])
    choose = min if lower_is_better else max
    return choose(records, key=lambda record: record["value"])


def _cell(record: Record) -> str:
    against = f" ({record['ratio']:.3g}x {record['baseline']})" if record["baseline"] else ""
    return _number(record["value"]) + against


def _list(records: list[Record]) -> list[list[str]]:
    """A row per result."""
    table = [["case", "environments", "settings", "backend", "scheduler", "value", "n", "against"]]
    for record in records:
        value = f"{_number(record['value'])} ± {_number(record['spread'])}"
        against = f"{record['ratio']:.3g}x {record['baseline']}" if record["baseline"] else ""
        row = [record["case"], _size_text(record), _settings(record), record["backend"], record["scheduler"]]
        table.append([*row, value, str(record["n"]), against])
    return _without_empty_columns(table)


def _size_text(record: Record) -> str:
    return f"{_size(record):,}" if _size(record) else ""


def _chosen(record: Record) -> dict[str, Any]:
    """The settings in `detail`: a float there is something measured."""
    return {name: value for name, value in record["detail"].items() if not isinstance(value, float)}


def _settings(record: Record) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(_chosen(record).items()))


def _without_empty_columns(table: list[list[str]]) -> list[list[str]]:
    keep = [column for column in range(len(table[0])) if any(row[column] for row in table[1:])]
    return [[row[column] for column in keep] for row in table]


def _number(value: float) -> str:
    """Three significant digits, with k, M or G for large numbers."""
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            scaled = value / (1e3 if suffix == "k" else factor)
            return (f"{scaled:.3g}" if abs(scaled) < 999.5 else f"{scaled:.0f}") + suffix
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _markdown(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str]) -> int:
    """Rewrite README.md, or with `--check` only say whether it is out of date."""
    readme = _records.ROOT / "README.md"
    before = readme.read_text()
    after = render(before, _records.ROOT / "benchmarks")
    if before == after:
        return 0
    if "--check" in arguments:
        print("README.md is out of date: run python scripts/update_readme.py")
        return 1
    readme.write_text(after)
    print("README.md rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
