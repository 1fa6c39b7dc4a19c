"""Kernels of which there are several forms, written by these functions: of how many inputs, with which activation.

Convolutions here are those of a CPU; generated_cuda.py has a GPU's.
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
ACTIVATE: dict[str | None, str] = {
    None: "",
    "relu": "v = zero if v < zero else v",
    "relu6": "v = zero if v < zero else (six if v > six else v)",
    "swish": "v = v / (one + math.exp(-v))",
    "sigmoid": "v = one / (one + math.exp(-v))",
    "tanh": "v = math.tanh(v)",
}


MOST_UNITS = 1 << 31
MOST_WRITTEN_OUT = 49  # places of a filter


def place_of_unit(array: str, vector: int = 1) -> str:
    """The lines that find the pixel of a unit, and its channel or the first of its vector of neighbouring channels.

    Units are divided as 32-bit numbers: 64 bits take a GPU about a hundred instructions.
    """
    first, parts = (f" * np.uint64({vector})", f" // {vector}") if vector > 1 else ("", "")
    return f"""
number, columns, channels = np.uint32(unit), np.uint32({array}.shape[1]), np.uint32({array}.shape[2]{parts})
c, pixel = np.uint64(number % channels){first}, number // channels
row, column = np.int64(pixel // columns), np.int64(pixel % columns)
"""


def define(name: str, source: str, reads: Iterable[str], **scope: Any) -> Kernel:
    """The kernel of that name in a source, which stores into `y`."""
    scope |= {"math": math, "np": np, "zero": np.float32(0), "one": np.float32(1), "six": np.float32(6)}
    exec(source, scope)
    return kernel(reads=tuple(reads), writes=("y",))(scope[name])


def named(kind: str, activation: str | None) -> str:
    """The name of a kernel."""
    return kind if activation is None else f"{kind}_{activation}"


def indent(text: str | Iterable[str], levels: int) -> str:
    """Lines of a source, so far to the right."""
    return textwrap.indent((text if isinstance(text, str) else "\n".join(text)).strip("\n"), "    " * levels)


@functools.cache
def conv(channels: int, biased: bool, activation: str | None) -> Kernel:
    """A convolution; a unit is so many neighbouring channels of a pixel, which are what the vectors of a CPU like.

    Args:
      channels: of a unit. Their sums are kept in registers: hence a variable for each, which only written-out code has.
      biased: whether there is a bias.
      activation: what is applied to the result, one of ACTIVATIONS or None.
    """
    each = range(channels)
    results = []
    for q in each:
        results.append(f"if part * {channels} + {q} < y.shape[2]:")
        results.append(f"    v = a{q}{f' + b[c{q}]' if biased else ''}")
        results += indent(ACTIVATE[activation], 1).splitlines()
        results.append(f"    y[row, column, c{q}] = v")
    name = named(f"conv_1x{channels}", activation)
    source = f"""
def {name}(unit, x, w, {"b, " if biased else ""}y, stride, top, left, dilation):
    parts = np.uint32((y.shape[2] + {channels - 1}) // {channels})
    columns, number = np.uint32(y.shape[1]), np.uint32(unit)
    part, pixel = np.int64(number % parts), number // parts
    row, column = np.int64(pixel // columns), np.int64(pixel % columns)
{indent((f"c{q} = np.uint64(min(part * {channels} + {q}, y.shape[2] - 1))" for q in each), 1)}
{indent((f"a{q} = zero" for q in each), 1)}
    for ky in range(w.shape[0]):
        i = row * stride + ky * dilation - top
        if i >= 0 and i < x.shape[0]:
            for kx in range(w.shape[1]):
                j = column * stride + kx * dilation - left
                if j >= 0 and j < x.shape[1]:
                    p, f = x[np.uint64(i), np.uint64(j)], w[ky, kx]
                    for k in range(w.shape[2]):
                        n = np.uint64(k)
                        v = p[n]
{indent((f"a{q} += v * f[n, c{q}]" for q in each), 6)}
{indent(results, 1)}
"""
    return define(name, source, ("x", "w", *(("b",) if biased else ())))


@functools.cache
def depthwise(biased: bool, activation: str | None) -> Kernel:
    """A convolution of each channel by itself; a unit is one channel of one pixel."""
    name = named("depthwise", activation)
    source = f"""
def {name}(unit, x, w, {"b, " if biased else ""}y, stride, top, left, dilation):
{indent(place_of_unit("y"), 1)}
    v = zero
    for ky in range(w.shape[0]):
        i = row * stride + ky * dilation - top
        if i >= 0 and i < x.shape[0]:
            for kx in range(w.shape[1]):
                j = column * stride + kx * dilation - left
                if j >= 0 and j < x.shape[1]:
                    v += x[np.uint64(i), np.uint64(j), c] * w[ky, kx, c]
    {"v = v + b[c]" if biased else ""}
{indent(ACTIVATE[activation], 1)}
    y[row, column, c] = v
"""
    return define(name, source, ("x", "w", *(("b",) if biased else ())))


@functools.cache
def add(inputs: int, flagged: bool, scaled: bool, weighted: bool, activation: str | None) -> Kernel:
    """A sum of tensors of one shape; a unit is one element.

    Args:
      inputs: how many.
      flagged: each has a flag, and is left out where that is 0, whatever it is.
      scaled: each is multiplied by an element of a vector.
      weighted: each is multiplied by an element of an array of weights.
      activation: what is applied to the sum.
    """
    name = named(f"{'merge' if flagged else 'add'}_{inputs}", activation)
    xs, flags = [f"x{i}" for i in range(inputs)], [f"flag{i}" for i in range(inputs)] if flagged else []
    others = [*flags, *(["scale"] if scaled else []), *(["weight"] if weighted else [])]
    loads, sums = [f"g{i} = {flag}[0]" for i, flag in enumerate(flags)], []
    for i, x in enumerate(xs):
        factors = [
            x + "[row, column, c]",
            *([f"scale[0, 0, {i}]"] if scaled else []),
            *([f"weight[{i}]"] if weighted else []),
        ]
        loads.append(f"p{i} = {' * '.join(factors)}")
        sums.append(f"v = v + p{i}{f' if g{i} != 0 else v' if flagged else ''}")
    source = f"""
def {name}(unit, {", ".join([*xs, *others])}, y):
{indent(place_of_unit("y"), 1)}
    v = zero
{indent([*loads, *sums], 1)}
{indent(ACTIVATE[activation], 1)}
    y[row, column, c] = v
"""
    return define(name, source, (*xs, *others))


@functools.cache
def some(inputs: int, negated: bool = False) -> Kernel:
    """Whether one of so many flags is not 0; negated: whether none is."""
    flags, name = [f"flag{i}" for i in range(inputs)], f"{'none' if negated else 'any'}_{inputs}"
    source = f"""
def {name}(unit, {", ".join(flags)}, y):
    y[0] = {int(not negated)} if {" | ".join(f"{flag}[0]" for flag in flags)} != 0 else {int(negated)}
"""
    return define(name, source, flags)
