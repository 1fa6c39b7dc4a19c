"""Draw benchmarks/throughput.png from benchmarks/throughput.jsonl: env steps per second over environments, by robot.

    python scripts/plot_throughput.py [--backend cuda] [--records FILE] [--picture FILE]

Of results with the same settings the newest counts, of several granularities or settings of a scheduler the best. All
are of one device, that of the newest record.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import _records
import update_readme
from _records import Record

UNIT = "env steps/s"
WIDE = 3  # panels in a row


def best_lines(records: list[Record]) -> dict[str, dict[str, dict[int, float]]]:
    """By case and scheduler, the best env steps/s for each number of environments."""
    lines: dict[str, dict[str, dict[int, float]]] = {}
    for record in update_readme.newest(records):
        line = lines.setdefault(record["case"], {}).setdefault(record["scheduler"], {})
        size = record["num_envs"]
        line[size] = max(record["value"], line.get(size, 0.0))
    return lines


def draw(path: Path, backend: str, picture: Path) -> None:
    """Draw the records of one backend.

    Raises:
        ValueError: there are none, or one that breaks the schema.
    """
    records = [r for r in _records.read(path) if r["backend"] == backend and r["unit"] == UNIT and r["num_envs"]]
    if not records:
        raise ValueError(f"{path} has no {UNIT} of backend {backend!r}")
    device = records[-1]["device"]
    lines = best_lines([record for record in records if record["device"] == device])
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    high = -(-len(lines) // WIDE)
    size = (4.5 * WIDE, 3.6 * high)
    figure, grid = pyplot.subplots(high, WIDE, figsize=size, squeeze=False, layout="constrained")
    names = sorted({name for case in lines.values() for name in case}, key=_rank)
    colours = {name: f"C{number % 10}" for number, name in enumerate(names)}
    for panel in grid.flat[len(lines) :]:
        panel.set_visible(False)
    for panel, case in zip(grid.flat, lines, strict=False):
        for name in sorted(lines[case], key=_rank):
            sizes = sorted(lines[case][name])
            style = "-" if name in update_readme.OURS else "--"
            rates = [lines[case][name][size] for size in sizes]
            panel.plot(sizes, rates, style, marker="o", color=colours[name], label=name)
        panel.set(title=case, xscale="log", yscale="log", xlabel="environments", ylabel=UNIT)
        panel.grid(True, which="major", alpha=0.3)
        panel.legend(fontsize="small")
    figure.suptitle(device)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    print(f"drawn: {picture}")


def _rank(scheduler: str) -> tuple[int, str]:
    ours = update_readme.OURS
    return (ours.index(scheduler) if scheduler in ours else len(ours)), scheduler


def main() -> None:
    """Draw what the arguments ask for."""
    folder = _records.ROOT / "benchmarks"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda", choices=_records.BACKENDS)
    parser.add_argument("--records", type=Path, default=folder / "throughput.jsonl")
    parser.add_argument("--picture", type=Path, default=folder / "throughput.png")
    given = parser.parse_args()
    draw(given.records, given.backend, given.picture)


if __name__ == "__main__":
    main()
