"""What the commands share: exit codes, errors for the user, options, tables."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class CommandError(Exception):
    """What went wrong, for the user, and the exit code that says so."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


@contextlib.contextmanager
def wrong_arguments() -> Iterator[None]:
    """What the library says of bad arguments, as an error of usage.

    What its functions call `name` or `model` is the command's argument `robot`.
    """
    try:
        yield
    except (ValueError, TypeError, OverflowError, FileNotFoundError) as error:
        argument, colon, text = str(error).partition(": ")
        typed = f"robot: {text}" if colon and argument in ("name", "model") else str(error)
        raise CommandError(typed, USAGE) from error


def add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    parser.add_argument("--threads", type=at_least(0), default=0, metavar="N", help="CPU threads at most; 0: all cores")


def python_value(text: str) -> bool | int | str | None:
    """What a setting's text means: a whole number, True, False or None, or itself."""
    words = {"True": True, "False": False, "None": None}
    return words.get(text, int(text) if text.isdecimal() else text)


def add_settings(parser: argparse.ArgumentParser, meaning: str, convert: Callable[[str], Any]) -> None:
    """The option --set ARGUMENT=VALUE, which may be repeated: pairs of a name and what `convert` makes of the text."""
    kind = functools.partial(setting, convert=convert)
    parser.add_argument("--set", type=kind, action="append", default=[], metavar="ARGUMENT=VALUE", help=meaning)


def setting(text: str, convert: Callable[[str], Any] = python_value) -> tuple[str, Any]:
    """The name, and what `convert` makes of the value, of ARGUMENT=VALUE."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals and value):
        raise argparse.ArgumentTypeError(f"expected ARGUMENT=VALUE, got {text!r}")
    return name, convert(value)


def at_least(low: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {low}, got {text!r}")
        return int(text)

    return whole_number


def seed(text: str) -> int:
    """What `jax.random.key` takes."""
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2**63 - 1, got {text!r}")
    return int(text)


def print_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> None:
    """Columns as wide as they need; numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (x.ljust(n) if i in left else x.rjust(n) for i, (x, n) in enumerate(zip(row, widths, strict=True)))
        print("  ".join(cells).rstrip())


def is_path(robot: str) -> bool:
    """Whether a `robot` argument means a file rather than a name."""
    return robot.endswith(".xml") or os.sep in robot


def refuse_path(command: str, robot: str) -> None:
    """Raise a usage error if `robot` means a file, for a command that needs a task."""
    if is_path(robot):
        raise CommandError(
            f"robot: {command} takes the name of a robot that `brax-concurrent envs` lists, got {robot!r}. An MJCF "
            "file has physics but no task: `brax-concurrent check FILE` compares it with MuJoCo, and "
            "brax_concurrent.Simulator simulates it",
            USAGE,
        )
