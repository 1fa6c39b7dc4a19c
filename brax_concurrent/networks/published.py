"""What publications say of a network, to be printed beside what it comes to here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """Figures of a publication.

    Attributes:
      parameters, multiply_adds: as it counts them; None: it does not say.
      source: which publication, and what in it the graph follows.
    """

    parameters: int | None
    multiply_adds: int | None
    source: str
