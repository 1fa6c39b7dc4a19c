"""What networks' arguments are held against before a graph is built."""

from __future__ import annotations


def check_counts(network: str, least: int = 1, **counts: int) -> None:
    """Each is a whole number from `least` on.

    Raises:
      ValueError: one is not; it and the network are named.
    """
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < least:
            raise ValueError(f"{network}: {name}: expected a whole number from {least} on, got {count!r}")
