"""Fusing: several kernels of a stream, and their repetition, as one kernel.

A recipe is a sequence of kernels, `Repeat`s and `Choose`s. `unrolled` gives the kernels one by one; `fused` makes one
kernel of it whose intermediate fields stay in registers. Both give the same bits: a value that one kernel stores and
another loads is opaque to the forming of fused multiply-adds, as it is when it goes through memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from brax_concurrent.kernels.kernel import Kernel


@dataclass(frozen=True)
class Repeat:
    """`body`, `times` times. Inside a `Choose`, turn i takes its i-th kernel."""

    times: int
    body: tuple[Any, ...]


@dataclass(frozen=True)
class Choose:
    """One kernel for each turn of the innermost `Repeat` around it."""

    kernels: tuple[Kernel, ...]


Recipe = Sequence["Kernel | Repeat | Choose"]


def unrolled(recipe: Recipe, turn: int = 0) -> Iterator[Kernel]:
    """The kernels in program order."""
    for item in recipe:
        if isinstance(item, Repeat):
            for i in range(item.times):
                yield from unrolled(item.body, i)
        elif isinstance(item, Choose):
            yield item.kernels[turn]
        else:
            yield item


def fused(name: str, recipe: Recipe) -> Kernel:
    """One kernel that does what the recipe says.

    There is a barrier between its stages. Nothing needs it: lanes share no memory. But warps that go through a long
    kernel side by side fetch its instructions once, and those that drift apart each for itself.
    """
    kernels = list(unrolled(recipe))
    reads = tuple(dict.fromkeys(field for k in kernels for field in k.reads))
    writes = tuple(dict.fromkeys(field for k in kernels for field in k.writes))
    return Kernel(name, lambda m, w: _run(recipe, m, w, None), reads, writes)


def _run(recipe: Recipe, m: Any, w: Any, turn: Any) -> None:
    for item in recipe:
        w.barrier()
        if isinstance(item, Repeat):
            for i in w.range(item.times) if item.times > 1 else (0,):
                _run(item.body, m, w, i)
        elif isinstance(item, Choose):
            for i, kernel in enumerate(item.kernels):
                with w.when(turn == i):
                    _stage(kernel, m, w)
        else:
            _stage(item, m, w)


def _stage(kernel: Kernel, m: Any, w: Any) -> None:
    w.enter_stage(kernel)
    kernel.function(m, w)
    w.enter_stage(None)
