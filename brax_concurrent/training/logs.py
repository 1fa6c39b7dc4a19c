"""What a training run writes down: a CSV file, TensorBoard's events, and lines for who watches."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter

from brax_concurrent.training.files import whole_file

CSV = "progress.csv"
COLUMNS = (
    *("iteration", "steps", "seconds", "collection_seconds", "learning_seconds", "evaluation_seconds"),
    *("steps_per_second", "collection_share", "learning_rate", "episodes", "train_return", "train_length"),
    *("eval_return", "eval_std", "eval_length"),
    *("policy_loss", "value_loss", "entropy", "gradient_norm", "kl", "clipped", "explained_variance", "std"),
)
"""Of progress.csv. Seconds are since the run's start, without compiling; returns are means over the episodes that
ended since the last row, or of an evaluation; what is unknown in a row is empty."""


class Log:
    """The files of a run's folder that grow.

    Args:
        folder: the run's.
        iteration, steps: of the checkpoint that the run goes on from, 0 for a new run: what a process that was killed
            wrote after it is taken back.

    A log that another version of the package began keeps its columns; what it lacks is empty in its rows.

    Raises:
        OSError: a file cannot be written.
        ValueError: what is there is no such log.
    """

    def __init__(self, folder: Path, iteration: int, steps: int):
        path = folder / CSV
        found, rows = _read(path) if path.exists() and iteration else (COLUMNS, [])
        names = (*COLUMNS, *(name for name in found if name not in COLUMNS))
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, names, restval="")
        table.writeheader()
        table.writerows(row for row in rows if float(row["iteration"]) <= iteration)
        with whole_file(path) as file:
            file.write(text.getvalue().encode())
        self._file = open(path, "a", newline="")  # noqa: SIM115  # until close()
        self._csv = csv.DictWriter(self._file, names, restval="")
        self._events = SummaryWriter(str(folder), purge_step=steps + 1 if iteration else None)

    def write(self, row: Mapping[str, float]) -> None:
        """Add a row; numbers that are missing or NaN stay empty. Keys are of COLUMNS."""
        known = {name: value for name, value in row.items() if not math.isnan(value)}
        self._csv.writerow({name: f"{value:.9g}" for name, value in known.items()})
        self._file.flush()
        os.fsync(self._file.fileno())  # as the checkpoint that follows: else a crash of the machine could lose the row
        for name, value in known.items():
            if name not in ("iteration", "steps"):
                self._events.add_scalar(name, value, int(row["steps"]))

    def close(self) -> None:
        """Write what is buffered."""
        self._events.close()
        self._file.close()


def read_csv(path: Path) -> list[dict[str, float]]:
    """Rows of a progress.csv; NaN where a row has no number.

    Raises:
        ValueError: the file is no training log.
    """
    empty = dict.fromkeys(COLUMNS, math.nan)
    _, rows = _read(path)
    return [empty | {name: float(text) if text else math.nan for name, text in row.items()} for row in rows]


def _read(path: Path) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """Columns and rows, but for a last one that was cut off by a kill."""
    try:
        with open(path, newline="") as file:
            reader = csv.DictReader(file)
            names = tuple(reader.fieldnames or ())
            if not {"iteration", "steps"} <= set(names):
                raise ValueError(f"expected the columns of a training log, got {list(names)}")
            rows = [row for row in reader if None not in row.values()]
        for row in rows:
            if None in row or not float(row["iteration"]) >= 0:
                raise ValueError(f"expected a number for each column, got {list(row.values())}")
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} is damaged or no training log: {error}; move it away to begin another") from error
    return names, rows
