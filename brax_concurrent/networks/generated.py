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

from brax_concurrent.scheduler.kernel import Kernel, kernel

# What is applied to a result v. Comparisons are so that a NaN stays one.
_ACTIVATE: dict[str | None, str] = {
    None: "",
    "relu": "v = zero if v < zero else v",
    "relu6": "v = zero if v < zero else (six if v > six else v)",
    "swish": "v = v / (one + math.exp(-v))",
    "sigmoid": "v = one / (one + math.exp(-v))",
    "tanh": "v = math.tanh(v)",
}


def _define(name: str, source: str, reads: Iterable[str]) -> Kernel:
    scope: dict[str, Any] = {"math": math, "np": np, "zero": np.float32(0), "one": np.float32(1), "six": np.float32(6)}
    exec(source, scope)
    return kernel(reads=tuple(reads), writes=("y",))(scope[name])


def _name(kind: str, activation: str | None) -> str:
    return kind if activation is None else f"{kind}_{activation}"


def _indent(text: str, levels: int) -> str:
    return textwrap.indent(text.strip("\n"), "    " * levels)


@functools.cache
def conv(pixels: int, channels: int, adjacent: bool, biased: bool, activation: str | None) -> Kernel:
    """A convolution, of which a unit computes so many neighbouring pixels of a row times so many channels.

    Args:
      pixels, channels: of a unit.
      adjacent: whether a unit's channels are neighbours, which the vectors of a CPU like, or those of neighbouring
        units are, which the threads of a GPU like.
      biased: whether there is a bias.
      activation: what is applied to the result, one of ACTIVATIONS or None.
    """
    each_p, each_q = range(pixels), range(channels)
    of_unit = f"part * {channels} + " if adjacent else "part + parts * "
    columns = []
    for p in each_p:
        columns += [
            f"column = (first + {p}) * stride + np.int64(kx) * dilation - left",
            f"inside{p} = column >= 0 and column < x.shape[1]",
            f"x{p} = x[i, np.uint64(column if inside{p} else 0)]",
        ]
    # What is outside of the image is zero and left out: pixels at its edge go one by one.
    columns += [
        f"if {' and '.join(f'inside{p}' for p in each_p)}:",
        *_indent(_products(each_p, each_q), 1).splitlines(),
    ]
    if pixels > 1:
        columns.append("else:")
        for p in each_p:
            columns += [f"    if inside{p}:", *_indent(_products([p], each_q), 2).splitlines()]
    results = []
    for p in each_p:
        results.append(f"if first + {p} < y.shape[1]:")
        for q in each_q:
            results.append(f"    if {of_unit}{q} < y.shape[2]:")
            results.append(f"        v = a{p}_{q}{f' + b[c{q}]' if biased else ''}")
            results += _indent(_ACTIVATE[activation], 2).splitlines()
            results.append(f"        y[row, first + {p}, c{q}] = v")
    name = _name(f"conv_{pixels}x{channels}", activation)
    source = f"""
def {name}(unit, x, w, {"b, " if biased else ""}y, stride, top, left, dilation):
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
                f = w[ky, kx]
{_indent(chr(10).join(columns), 4)}
{_indent(chr(10).join(results), 1)}
"""
    return _define(name, source, ("x", "w", *(("b",) if biased else ())))


def _products(pixels: Iterable[int], channels: Iterable[int]) -> str:
    """The sums of some pixels and channels go on with all input channels of one place of the filter."""
    lines = [f"v{p} = x{p}[n]" for p in pixels]
    for q in channels:
        lines += [f"f{q} = f[n, c{q}]", *(f"a{p}_{q} += v{p} * f{q}" for p in pixels)]
    body = "\n".join(["n = np.uint64(k)", *lines])
    return f"for k in range(w.shape[2]):\n{_indent(body, 1)}"


@functools.cache
def depthwise(biased: bool, activation: str | None) -> Kernel:
    """A convolution of each channel by itself; a unit is one channel of one pixel."""
    name = _name("depthwise", activation)
    source = f"""
def {name}(unit, x, w, {"b, " if biased else ""}y, stride, top, left, dilation):
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
{_indent(_ACTIVATE[activation], 1)}
    y[row, column, c] = v
"""
    return _define(name, source, ("x", "w", *(("b",) if biased else ())))


@functools.cache
def add(inputs: int, flagged: bool, scaled: bool, weighted: bool, activation: str | None) -> Kernel:
    """A sum of tensors of one shape; a unit is one element.

    Args:
      inputs: how many.
      flagged: each has a flag, and is not read where that is 0.
      scaled: each is multiplied by an element of a vector.
      weighted: each is multiplied by an element of an array of weights.
      activation: what is applied to the sum.
    """
    name = _name(f"{'merge' if flagged else 'add'}_{inputs}", activation)
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
def {name}(unit, {", ".join([*xs, *others])}, y):
    c, pixel = unit % y.shape[2], unit // y.shape[2]
    row, column = pixel // y.shape[1], pixel % y.shape[1]
    v = zero
{_indent(chr(10).join(lines), 1)}
{_indent(_ACTIVATE[activation], 1)}
    y[row, column, c] = v
"""
    return _define(name, source, (*xs, *others))


@functools.cache
def some(inputs: int, negated: bool = False) -> Kernel:
    """Whether one of so many flags is not 0; negated: whether none is."""
    flags, name = [f"flag{i}" for i in range(inputs)], f"{'none' if negated else 'any'}_{inputs}"
    source = f"""
def {name}(unit, {", ".join(flags)}, y):
    y[0] = {int(not negated)} if {" or ".join(f"{flag}[0] != 0" for flag in flags)} else {int(negated)}
"""
    return _define(name, source, flags)
