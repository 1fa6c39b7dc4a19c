"""Kernels of which there are several forms, written by these functions: how much a unit computes, of how many inputs.

A unit of a convolution computes a block of pixels times channels, so that each value that it loads serves several
multiplications, and keeps their sums in registers: hence a variable for each, which only written-out code has.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np

from brax_concurrent.networks.tensors import ACTIVATIONS
from brax_concurrent.scheduler.kernel import Kernel, kernel

CODES: dict[str | None, int] = {None: 0, **{name: code for code, name in enumerate(ACTIVATIONS, 1)}}
"""What a kernel's argument `activation` is."""

# Comparisons are so that a NaN stays one.
_ACTIVATE = """
if activation == 1:
    v = zero if v < zero else v
elif activation == 2:
    v = zero if v < zero else (six if v > six else v)
elif activation == 3:
    v = v / (one + math.exp(-v))
elif activation == 4:
    v = one / (one + math.exp(-v))
elif activation == 5:
    v = math.tanh(v)
"""


def _define(name: str, source: str, reads: Iterable[str]) -> Kernel:
    scope: dict[str, Any] = {"math": math, "np": np, "zero": np.float32(0), "one": np.float32(1), "six": np.float32(6)}
    exec(source, scope)
    return kernel(reads=tuple(reads), writes=("y",))(scope[name])


def _indent(text: str, levels: int) -> str:
    return textwrap.indent(text.strip("\n"), "    " * levels)


@functools.cache
def conv(pixels: int, channels: int, adjacent: bool, biased: bool = True) -> Kernel:
    """A convolution, of which a unit computes so many neighbouring pixels of a row times so many channels.

    Args:
      pixels, channels: of a unit.
      adjacent: whether a unit's channels are neighbours, which the vectors of a CPU like, or those of neighbouring
        units are, which the threads of a GPU like.
      biased: whether there is a bias.
    """
    each_p, each_q = range(pixels), range(channels)
    of_unit = f"part * {channels} + " if adjacent else "part + parts * "
    inner = [
        *(f"v{p} = x[i, j{p}, k] if inside{p} else zero" for p in each_p),
        *(f"f{q} = w[ky, kx, k, c{q}]" for q in each_q),
        *(f"a{p}_{q} += v{p} * f{q}" for p in each_p for q in each_q),
    ]
    columns = [
        line
        for p in each_p
        for line in (
            f"column = (first + {p}) * stride + np.int64(kx) * dilation - left",
            f"inside{p} = column >= 0 and column < x.shape[1]",
            f"j{p} = np.uint64(column if inside{p} else 0)",
        )
    ]
    results = []
    for p in each_p:
        results.append(f"if first + {p} < y.shape[1]:")
        for q in each_q:
            results.append(f"    if {of_unit}{q} < y.shape[2]:")
            results.append(f"        v = a{p}_{q}{f' + b[c{q}]' if biased else ''}")
            results += _indent(_ACTIVATE, 2).splitlines()
            results.append(f"        y[row, first + {p}, c{q}] = v")
    name = f"conv_{pixels}x{channels}"
    source = f"""
def {name}(unit, x, w, {"b, " if biased else ""}y, stride, top, left, dilation, activation):
    parts = (y.shape[2] + {channels - 1}) // {channels}
    part, block = unit % parts, unit // parts
    blocks = (y.shape[1] + {pixels - 1}) // {pixels}
    row, first = block // blocks, block % blocks * {pixels}
{_indent(chr(10).join(f"c{q} = np.uint64(min({of_unit}{q}, y.shape[2] - 1))" for q in each_q), 1)}
{_indent(chr(10).join(f"a{p}_{q} = zero" for p in each_p for q in each_q), 1)}
    for ky in range(w.shape[0]):
        line = row * stride + ky * dilation - top
        if line >= 0 and line < x.shape[0]:
            i = np.uint64(line)
            for kx in range(w.shape[1]):
{_indent(chr(10).join(columns), 4)}
                for k in range(w.shape[2]):
{_indent(chr(10).join(inner), 5)}
{_indent(chr(10).join(results), 1)}
"""
    return _define(name, source, ("x", "w", *(("b",) if biased else ())))


@functools.cache
def depthwise(biased: bool = True) -> Kernel:
    """A convolution of each channel by itself; a unit is one channel of one pixel."""
    name = "depthwise"
    source = f"""
def {name}(unit, x, w, {"b, " if biased else ""}y, stride, top, left, dilation, activation):
    c, pixel = np.uint64(unit % y.shape[2]), unit // y.shape[2]
    row, column = pixel // y.shape[1], pixel % y.shape[1]
    v = zero
    for ky in range(w.shape[0]):
        i = row * stride + ky * dilation - top
        if i >= 0 and i < x.shape[0]:
            for kx in range(w.shape[1]):
                j = column * stride + kx * dilation - left
                if j >= 0 and j < x.shape[1]:
                    v += x[np.uint64(i), np.uint64(j), c] * w[ky, kx, c]
    {"v = v + b[c]" if biased else ""}
{_indent(_ACTIVATE, 1)}
    y[row, column, c] = v
"""
    return _define(name, source, ("x", "w", *(("b",) if biased else ())))


@functools.cache
def add(inputs: int, flagged: bool, scaled: bool, weighted: bool) -> Kernel:
    """A sum of tensors of one shape; a unit is one element.

    Args:
      inputs: how many.
      flagged: each has a flag, and is not read where that is 0.
      scaled: each is multiplied by an element of a vector.
      weighted: each is multiplied by an element of an array of weights.
    """
    name = f"{'merge' if flagged else 'add'}_{inputs}"
    xs, flags = [f"x{i}" for i in range(inputs)], [f"flag{i}" for i in range(inputs)] if flagged else []
    others = [*flags, *(["scale"] if scaled else []), *(["weight"] if weighted else [])]
    lines = []
    for i, x in enumerate(xs):
        factors = [
            x + "[row, column, c]",
            *([f"scale[0, 0, {i}]"] if scaled else []),
            *([f"weight[{i}]"] if weighted else []),
        ]
        line = f"v += {' * '.join(factors)}"
        lines += [f"if flag{i}[0] != 0:", f"    {line}"] if flagged else [line]
    source = f"""
def {name}(unit, {", ".join([*xs, *others])}, y, activation):
    c, pixel = unit % y.shape[2], unit // y.shape[2]
    row, column = pixel // y.shape[1], pixel % y.shape[1]
    v = zero
{_indent(chr(10).join(lines), 1)}
{_indent(_ACTIVATE, 1)}
    y[row, column, c] = v
"""
    return _define(name, source, (*xs, *others))


@functools.cache
def some(inputs: int) -> Kernel:
    """Whether one of so many flags is not 0."""
    flags = [f"flag{i}" for i in range(inputs)]
    source = f"""
def any_{inputs}(unit, {", ".join(flags)}, y):
    y[0] = 1 if {" or ".join(f"{flag}[0] != 0" for flag in flags)} else 0
"""
    return _define(f"any_{inputs}", source, flags)
