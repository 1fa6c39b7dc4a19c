"""How a kernel is declared: a scalar function of one environment, the fields it reads and the fields it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KernelFunction = Callable[[Any, Any], None]


@dataclass(frozen=True)
class Kernel:
    """A declared kernel.

    Attributes:
        name: the function's name; unique within a stream.
        function: `function(m, w)`, see docs/lanes.md.
        reads: names of the fields it reads (`user.NAME` for a user's array).
        writes: names of the fields it writes.
        when: name of an int field of one number, or "". Where it is 0 the kernel does nothing, so that a tile in which
            it is 0 everywhere skips it. The specialiser holds the code to that.
    """

    name: str
    function: KernelFunction
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    when: str = ""

    def __call__(self, m: Any, w: Any) -> None:
        self.function(m, w)


def kernel(*, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()) -> Callable[[KernelFunction], Kernel]:
    """Declare a kernel where it is written; the tracer refuses undeclared accesses by field name.

    Args:
        reads: fields that the function loads. A field that it also stores is named in both.
        writes: fields that the function stores.
    """

    def declare(function: KernelFunction) -> Kernel:
        return Kernel(function.__name__, function, tuple(reads), tuple(writes))

    return declare
