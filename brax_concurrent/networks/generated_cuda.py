"""Convolutions as a GPU likes them, written by these functions.

One image gives a GPU few threads, so what takes the time is the latency of memory: a unit loads the values of several
multiplications before it multiplies, and loops and branches do not depend on what lies outside of the image. Where the
compiler would mix loads and multiplications nevertheless, to save registers, a fence stands between: nothing that is
loaded before it may be loaded after it.

Next come the loads themselves: a unit of a convolution computes a block of pixels times channels, so that each value
that it loads serves several multiplications, and loads several neighbouring values at once where they lie so. It keeps
its sums in registers: hence a variable for each, which only written-out code has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from brax_concurrent.backends import gpu_units
from brax_concurrent.networks.generated import ACTIVATE, define, indent, named, place_of_unit
from brax_concurrent.scheduler.kernel import Kernel

WARP = 32
FENCE = "gpu.fence()"
_WIDE = 4  # floats of the widest load


@dataclass(frozen=True)
class Block:
    """What a unit of a convolution computes.

    Attributes:
      pixels, channels: so many neighbouring pixels of a row times so many channels.
      lanes: so many neighbouring units compute one block: each takes every so-many-th vector of input channels, and
        they exchange their sums. More than one only for blocks of one pixel and channel; a power of two, at most 32.
      vector: input channels that are loaded at once, 1, 2 or 4: all rows of the image begin at multiples of that.
      wide: the channels are four neighbours, whose weights are loaded at once. Otherwise neighbouring units have
        neighbouring channels: their threads read neighbouring weights.
      ahead: for so many vectors all is loaded before the first multiplication.
    """

    pixels: int = 1
    channels: int = 1
    lanes: int = 1
    vector: int = 1
    wide: bool = False
    ahead: int = 8

    @property
    def swapped(self) -> bool:
        """Whether filters have the input channels last: lanes read neighbouring ones."""
        return self.lanes > 1 and self.vector > 1

    @property
    def name(self) -> str:
        """Of its kernel."""
        lanes, vector = f"x{self.lanes}" if self.lanes > 1 else "", f"v{self.vector}" if self.vector > 1 else ""
        return f"conv_{self.pixels}x{self.channels}{lanes}{vector}{'w' if self.wide else ''}"

    def units(self, height: int, width: int, channels: int) -> int:
        """How many units a result of that shape takes: whole warps, where some of a warp share a block."""
        units = height * -(-width // self.pixels) * -(-channels // self.channels) * self.lanes
        return units if self.lanes == 1 else -(-units // WARP) * WARP


# The largest first, and how many units there should be at least, of all images at once: the more, the more of the GPU's
# threads have something to do. Beyond what the GPU has threads for, lanes only cost.
BLOCKS = (Block(4, 4, ahead=2), Block(2, 4, ahead=4), Block(1, 4, ahead=4), Block(1, 2), Block(1, 1))
SHARED_BLOCKS = tuple(Block(lanes=lanes) for lanes in (32, 8, 4, 2))
_FEW_UNITS, _MANY_UNITS = 32768, 65536
_FEWEST_OF_LANE = 8  # input channels
_FEW_OUTPUTS = 256  # with many lanes a warp has few output channels, of whose weights it loads more than it needs


def block_for(
    result: tuple[int, int, int], channels: int, batch: int = 1, vector: int = 1, swappable: bool = True
) -> Block:
    """What a unit computes.

    Args:
      result: shape of an image's.
      channels: of the input.
      batch: how many images there are at once.
      vector: see `vector_of`.
      swappable: whether there can be filters with the input channels last.
    """
    for block in BLOCKS[:-1]:
        if batch * block.units(*result) >= _FEW_UNITS:
            return _with_vectors(replace(block, wide=block.channels == _WIDE and result[2] % _WIDE == 0), vector)
    for block in SHARED_BLOCKS:
        coalesced = block.lanes <= WARP // 4 or math.prod(result) <= _FEW_OUTPUTS
        enough = block.lanes * _FEWEST_OF_LANE <= channels
        if coalesced and enough and batch * block.units(*result) <= _MANY_UNITS:
            return _with_vectors(block, vector) if swappable else block
    return _with_vectors(BLOCKS[-1], vector)


def _with_vectors(block: Block, vector: int) -> Block:
    """The block with such vectors. They take less registers for addresses, so twice as much is loaded ahead."""
    return replace(block, vector=vector, ahead=block.ahead if vector == 1 else max(2 * block.ahead // vector, 1))


def vector_of(address: int, strides: tuple[int, ...], channels: int) -> int:
    """How many channels of an image can be loaded at once, wherever its rows begin; strides are in bytes."""
    places = (address, *strides[:-1], 4 * channels)
    return next((count for count in (_WIDE, 2) if all(place % (4 * count) == 0 for place in places)), 1)


@functools.cache
def conv(block: Block, biased: bool, activation: str | None) -> Kernel:
    """A convolution; for the other arguments see `generated.conv`."""
    each_p, each_q, lanes, vector = range(block.pixels), range(block.channels), block.lanes, block.vector
    of_unit = "part * 4 + {}" if block.wide else "part + {} * parts"
    results = []
    for p in each_p:
        results.append(f"if first + {p} < y.shape[1]:")
        for q in each_q:
            results.append(f"    if {of_unit.format(q)} < y.shape[2]:")
            results.append(f"        v = a{p}_{q}{f' + b[c{q}]' if biased else ''}")
            results += indent(ACTIVATE[activation], 2).splitlines()
            results.append(f"        y[row, first + {p}, c{q}] = v")
    name = named(block.name, activation)
    source = f"""
def {name}(unit, x, w, {"b, " if biased else ""}y, stride, top, left, dilation):
    parts = (y.shape[2] + {block.channels - 1}) // {block.channels}
    blocks = (y.shape[1] + {block.pixels - 1}) // {block.pixels}
{indent(_SHARED.format(lanes) if lanes > 1 else _ALONE, 1)}
    part, place = np.int64(number % np.uint32(parts)), np.uint32(number // np.uint32(parts))
    row, first = np.int64(place // np.uint32(blocks)), np.int64(place % np.uint32(blocks)) * {block.pixels}
{indent((f"c{q} = np.uint64(min({of_unit.format(q)}, y.shape[2] - 1))" for q in each_q), 1)}
{indent((f"a{p}_{q} = zero" for p in each_p for q in each_q), 1)}
    vectors = x.shape[2] // {vector}
    mine, last = (vectors - lane + {lanes - 1}) // {lanes}, vectors - 1
    turns, whole = (vectors + {lanes - 1}) // {lanes}, vectors // {lanes * block.ahead} * {block.ahead}
    for ky in range(w.shape[0]):
        line = row * stride + ky * dilation - top
        i, on_line = np.uint64(min(max(line, 0), x.shape[0] - 1)), line >= 0 and line < x.shape[0]
        for kx in range(w.shape[1]):
            f = w[ky, kx]
{indent(_columns(block), 3)}
{indent((f"a0_0 += gpu.exchange(a0_0, np.int32({lanes >> n}))" for n in range(1, lanes.bit_length())), 1)}
    if there:
{indent(results, 2)}
"""
    reads = ("x", "w", *(("b",) if biased else ()))
    return define(name, source, reads, gpu=gpu_units)


_ALONE = """
there, lane, number = True, 0, np.uint32(unit)
"""
_SHARED = """
count = y.shape[0] * blocks * parts
there, lane = unit < count * {0} and unit % {0} == 0, unit % {0}
number = np.uint32(min(unit // {0}, count - 1))
"""


def _columns(block: Block) -> Iterable[str]:
    """What one place of the filter adds. What is outside of the image is zero and left out: its sums are put back."""
    each_p, sums = range(block.pixels), [(p, q) for p in range(block.pixels) for q in range(block.channels)]
    for p in each_p:
        yield f"column = (first + {p}) * stride + np.int64(kx) * dilation - left"
        yield f"inside{p} = on_line and column >= 0 and column < x.shape[1]"
        yield f"x{p} = x[i, np.uint64(min(max(column, 0), x.shape[1] - 1))]"
    if block.swapped:
        yield "f0 = f[c0]"
    yield from (f"old{p}_{q} = a{p}_{q}" for p, q in sums)
    yield f"for turn in range(0, whole, {block.ahead}):"
    yield from (f"    {line}" for line in _turns(block, masked=False))
    yield "if whole < turns:"
    yield "    turn = whole"
    yield from (f"    {line}" for line in _turns(block, masked=True))
    yield from (f"a{p}_{q} = a{p}_{q} if inside{p} else old{p}_{q}" for p, q in sums)


def _turns(block: Block, masked: bool) -> Iterable[str]:
    """Some vectors from `turn` on; masked: those behind the last are loaded from there, and left out."""
    each_p, each_q, each_e = range(block.pixels), range(block.channels), range(block.vector)
    for n in range(block.ahead):
        k = f"lane + (turn + {n}) * {block.lanes}"
        yield f"n{n} = np.uint64(({f'min({k}, last)' if masked else k}) * {block.vector})"
        yield from (_load([f"v{p}_{n}_{e}" for e in each_e], f"x{p}", f"n{n}") for p in each_p)
        if block.swapped:
            yield _load([f"f0_{n}_{e}" for e in each_e], "f0", f"n{n}")
        elif block.wide:
            yield from (_load([f"f{q}_{n}_{e}" for q in each_q], f"f[n{n} + np.uint64({e})]", "c0") for e in each_e)
        else:
            yield from (f"f{q}_{n}_{e} = f[n{n} + np.uint64({e}), c{q}]" for e in each_e for q in each_q)
    if block.pixels * block.channels >= 4 or block.vector > 1:
        yield FENCE
    for n in range(block.ahead):
        for q in each_q:
            for p in each_p:
                yield f"s = a{p}_{q}"
                yield from (f"s = s + v{p}_{n}_{e} * f{q}_{n}_{e}" for e in each_e)
                yield f"a{p}_{q} = s{f' if turn + {n} < mine else a{p}_{q}' if masked else ''}"


def _load(names: list[str], array: str, index: str) -> str:
    """The neighbouring elements of an array from an index on."""
    if len(names) == 1:
        return f"{names[0]} = {array}[{index}]"
    return f"{', '.join(names)} = gpu.load{len(names)}({array}, {index})"


# --- layers whose channels are apart ----------------------------------------------------------------------------------


@functools.cache
def depthwise(height: int, width: int, biased: bool, activation: str | None, vector: int) -> Kernel:
    """A convolution of each channel by itself, with filters of that size; a unit is one vector of a pixel's channels.

    Every place of the filter is written out.
    """
    each = range(vector)
    name = named(f"depthwise_{height}x{width}{_suffix(vector)}", activation)
    bias = [_load([f"b{e}" for e in each], "b", "c"), *(f"v{e} = v{e} + b{e}" for e in each)] if biased else []
    source = f"""
def {name}(unit, x, w, {"b, " if biased else ""}y, stride, top, left, dilation):
{indent(place_of_unit("y", vector), 1)}
{indent((f"v{e} = zero" for e in each), 1)}
{indent(_places(height, width, vector), 1)}
{indent(bias, 1)}
{indent(_activated(vector, activation), 1)}
{indent(_store("y", vector), 1)}
"""
    return define(name, source, ("x", "w", *(("b",) if biased else ())), gpu=gpu_units)


MOST_PRODUCTS = 100  # of a unit of a depthwise convolution: more need too many registers
_AHEAD = 25  # values of a filter, in whole rows


def _places(height: int, width: int, vector: int) -> Iterable[str]:
    """What lies outside of the image is loaded from its edge, and left out."""
    each = range(vector)
    for axis, count, at, first, size in (("i", height, "row", "top", 0), ("j", width, "column", "left", 1)):
        for k in range(count):
            yield f"at = {at} * stride + {k} * dilation - {first}"
            yield f"in_{axis}{k} = at >= 0 and at < x.shape[{size}]"
            yield f"{axis}{k} = np.uint64(min(max(at, 0), x.shape[{size}] - 1))"
    rows = max(_AHEAD // (width * vector), 1)
    for begin in range(0, height, rows):
        some = [(i, j) for i in range(begin, min(begin + rows, height)) for j in range(width)]
        yield from (_load([f"x{i}_{j}_{e}" for e in each], f"x[i{i}, j{j}]", "c") for i, j in some)
        yield from (_load([f"w{i}_{j}_{e}" for e in each], f"w[{i}, {j}]", "c") for i, j in some)
        yield FENCE
        for i, j in some:
            yield from (f"v{e} = v{e} + x{i}_{j}_{e} * w{i}_{j}_{e} if in_i{i} and in_j{j} else v{e}" for e in each)


@functools.cache
def add(inputs: int, flagged: bool, scaled: bool, weighted: bool, activation: str | None, vector: int) -> Kernel:
    """A sum of tensors of one shape; a unit is one vector of a pixel's channels. For the others see generated.add."""
    each, xs = range(vector), [f"x{i}" for i in range(inputs)]
    flags = [f"flag{i}" for i in range(inputs)] if flagged else []
    others = [*flags, *(["scale"] if scaled else []), *(["weight"] if weighted else [])]
    lines, sums = [f"g{i} = {flag}[0]" for i, flag in enumerate(flags)], []
    for i, x in enumerate(xs):
        factors = [*([f"scale[0, 0, {i}]"] if scaled else []), *([f"weight[{i}]"] if weighted else [])]
        lines.append(_load([f"p{i}_{e}" for e in each], f"{x}[row, column]", "c"))
        lines += [f"s{i} = {' * '.join(factors)}"] if factors else []
        product = f"p{i}_{{0}} * s{i}" if factors else f"p{i}_{{0}}"
        chosen = f" if g{i} != 0 else v{{0}}" if flagged else ""
        sums += [f"v{{0}} = v{{0}} + {product}{chosen}".format(e) for e in each]
    name = named(f"{'merge' if flagged else 'add'}_{inputs}{_suffix(vector)}", activation)
    source = f"""
def {name}(unit, {", ".join([*xs, *others])}, y):
{indent(place_of_unit("y", vector), 1)}
{indent((f"v{e} = zero" for e in each), 1)}
{indent([*lines, FENCE, *sums], 1)}
{indent(_activated(vector, activation), 1)}
{indent(_store("y", vector), 1)}
"""
    return define(name, source, (*xs, *others), gpu=gpu_units)


@functools.cache
def copy(vector: int) -> Kernel:
    """One vector of a pixel's channels, into a part of another tensor."""
    name, each = f"copy{_suffix(vector)}", range(vector)
    source = f"""
def {name}(unit, x, y):
{indent(place_of_unit("x", vector), 1)}
{indent([_load([f"v{e}" for e in each], "x[row, column]", "c")], 1)}
{indent(_store("y", vector), 1)}
"""
    return define(name, source, ("x",), gpu=gpu_units)


def _suffix(vector: int) -> str:
    return f"v{vector}" if vector > 1 else ""


def _activated(vector: int, activation: str | None) -> list[str]:
    lines = []
    for e in range(vector):
        if ACTIVATE[activation]:
            lines += [f"v = v{e}", *ACTIVATE[activation].splitlines(), f"v{e} = v"]
    return lines


def _store(array: str, vector: int) -> list[str]:
    if vector == 1:
        return [f"{array}[row, column, c] = v0"]
    return [f"gpu.store{vector}({array}[row, column], c, ({', '.join(f'v{e}' for e in range(vector))}))"]
