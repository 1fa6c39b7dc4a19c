"""Kernels of any application: a scalar function of one unit, with the names of the arrays it reads and writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

RESERVED = ("units", "predicate")  # what TaskStream.add takes besides the kernel's own arguments


@dataclass(frozen=True, eq=False)
class Kernel:
    """A declared kernel. Make it with `kernel`; run it in a `TaskStream`.

    Called like a function it is the plain Python function, for one unit: good for tests and debuggers.

    Attributes:
      function: the user's function.
      name: what tasks, graphs and messages call it.
      parameters: names of its arguments after the unit.
      reads, writes: those of the arrays among them; None: not declared, it may touch all memory.
      boundscheck, fastmath: see `kernel`.
    """

    function: Callable[..., None]
    name: str
    parameters: tuple[str, ...]
    reads: frozenset[str] | None = None
    writes: frozenset[str] | None = None
    boundscheck: bool = False
    fastmath: bool = False

    @property
    def declared(self) -> bool:
        """Whether it is known what the kernel reads and writes."""
        return self.writes is not None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.function(*args, **kwargs)


@overload
def kernel(function: Callable[..., None], /) -> Kernel: ...
@overload
def kernel(
    *,
    reads: Sequence[str] | None = None,
    writes: Sequence[str] | None = None,
    boundscheck: bool = False,
    fastmath: bool = False,
) -> Callable[[Callable[..., None]], Kernel]: ...
def kernel(
    function: Callable[..., None] | None = None,
    /,
    *,
    reads: Sequence[str] | None = None,
    writes: Sequence[str] | None = None,
    boundscheck: bool = False,
    fastmath: bool = False,
) -> Kernel | Callable[[Callable[..., None]], Kernel]:
    """Declare a kernel: a decorator for a scalar function `function(unit, ...)`.

    A task calls it for every unit from 0 on, in any order and on any thread; Numba compiles it when it first runs. It
    returns nothing and stores into its arrays. Units of one task must not depend on each other.

    Args:
      function: the function, where the decorator is written without parentheses.
      reads: names of the parameters that are arrays and are read.
      writes: names of those that are written; a name may be in both. A store into an array that is not here is an error
        when the kernel is compiled. With neither reads nor writes nothing is known of the kernel: its tasks run alone.
      boundscheck: on the CPU, an index out of range is an IndexError. It costs time, and without it such an index reads
        or writes other memory.
      fastmath: floating-point operations may be reordered and contracted.

    Raises:
      TypeError: the function is compiled already, its parameters are not all plain and without default, reads or writes
        are no names, or boundscheck or fastmath is neither True nor False.
      ValueError: reads or writes name something that is no parameter, or a parameter has a reserved name.
    """
    reads, writes = _once(reads), _once(writes)

    def declare(function: Callable[..., None]) -> Kernel:
        name, parameters = _parameters(function)
        for what, flag in (("boundscheck", boundscheck), ("fastmath", fastmath)):
            if not isinstance(flag, bool):
                raise TypeError(f"kernel {name}: {what}: expected True or False, got {flag!r}")
        known = reads is not None or writes is not None
        return Kernel(
            function,
            name,
            parameters,
            _names(name, "reads", reads, parameters) if known else None,
            _names(name, "writes", writes, parameters) if known else None,
            boundscheck,
            fastmath,
        )

    return declare if function is None else declare(function)


def _parameters(function: Any) -> tuple[str, tuple[str, ...]]:
    """A function's name and its parameters after the unit."""
    if not inspect.isfunction(function):
        hint = ": give the plain function, the stream compiles it" if hasattr(function, "py_func") else ""
        raise TypeError(f"kernel: expected a Python function, got {type(function).__name__}{hint}")
    name = function.__name__
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise TypeError(f"kernel {name}: expected the unit as first parameter, got no parameters")
    for each in parameters:
        if each.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD or each.default is not inspect.Parameter.empty:
            raise TypeError(f"kernel {name}: expected plain parameters without defaults, got {each}")
        if each.name in RESERVED:
            raise ValueError(
                f"kernel {name}: a parameter cannot be called {each.name}, which TaskStream.add takes itself"
            )
    return name, tuple(each.name for each in parameters[1:])


def _once(names: Any) -> Any:
    """`reads` or `writes` as a tuple, if they can be: a generator gives its names only once."""
    return tuple(names) if isinstance(names, Iterable) and not isinstance(names, (str, bytes)) else names


def _names(kernel: str, what: str, names: Any, parameters: tuple[str, ...]) -> frozenset[str]:
    """Checked names of `reads` or `writes`."""
    if names is None:  # the other one is given
        return frozenset()
    if not isinstance(names, tuple) or not all(isinstance(each, str) for each in names):
        raise TypeError(f'kernel {kernel}: {what}: expected a tuple of names such as ("a",), got {names!r}')
    for each in names:
        if each not in parameters:
            raise ValueError(
                f"kernel {kernel}: {what}: {each!r} is no parameter after the unit, which are {parameters}"
            )
    return frozenset(names)
