"""What a training run writes down: a CSV file, TensorBoard's events, and lines for who watches."""

from __future__ import annotations

import csv
import math
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

    Raises:
        OSError: a file cannot be written.
        ValueError: what is there is no such log.
    """

    def __init__(self, folder: Path, iteration: int, steps: int):
        path = folder / CSV
        rows = _rows_until(path, iteration) if path.exists() and iteration else []
        with whole_file(path) as file:
            text = [",".join(COLUMNS), *(",".join(row[name] for name in COLUMNS) for row in rows)]
            file.write(("\n".join(text) + "\n").encode())
        self._file = open(path, "a", newline="")  # noqa: SIM115  # until close()
        self._csv = csv.DictWriter(self._file, COLUMNS, restval="")
        self._events = SummaryWriter(str(folder), purge_step=steps if iteration else None)

    def write(self, row: Mapping[str, float]) -> None:
        """Add a row; numbers that are missing or NaN stay empty. Keys are of COLUMNS."""
        known = {name: value for name, value in row.items() if not math.isnan(value)}
        self._csv.writerow({name: f"{value:.9g}" for name, value in known.items()})
        self._file.flush()
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
        ValueError: the file has other columns.
    """
    return [{name: float(text) if text else math.nan for name, text in row.items()} for row in _rows(path)]


def _rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: expected the columns of a training log, got {reader.fieldnames}")
        return [row for row in reader if None not in row.values()]  # the last may be cut off by a kill


def _rows_until(path: Path, iteration: int) -> list[dict[str, str]]:
    return [row for row in _rows(path) if int(float(row["iteration"])) <= iteration]
