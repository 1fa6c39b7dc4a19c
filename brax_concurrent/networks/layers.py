"""Layers as kernels: what one unit of each computes. tasks.py says with what arguments, and how many units there are.

All tensors are (height, width, channels); a vector is (1, 1, channels). Neighbouring units have neighbouring channels,
so that the threads of a GPU read neighbouring memory. Indices are unsigned in inner loops, or Numba would test each for
being counted from the end; units are divided as 32-bit numbers, see generated.place_of_unit. Kernels of which there are
several forms are in generated.py and generated_cuda.py.
"""

from __future__ import annotations

import math

import numpy as np

from brax_concurrent.scheduler.kernel import kernel


@kernel(reads=("x",), writes=("y",))
def max_pool(unit, x, y, height, width, stride, top, left):
    """One channel of one pixel: the largest value of a window; a NaN if there is one."""
    number, columns, channels = np.uint32(unit), np.uint32(y.shape[1]), np.uint32(y.shape[2])
    c, pixel = np.uint64(number % channels), number // channels
    row, column = np.int64(pixel // columns), np.int64(pixel % columns)
    best = np.float32(-np.inf)
    for i in range(max(row * stride - top, 0), min(row * stride - top + height, x.shape[0])):
        for j in range(max(column * stride - left, 0), min(column * stride - left + width, x.shape[1])):
            value = x[np.uint64(i), np.uint64(j), c]
            if value > best or value != value:
                best = value
    y[row, column, c] = best


@kernel(reads=("x",), writes=("y",))
def avg_pool(unit, x, y, height, width, stride, top, left):
    """One channel of one pixel: the mean of what of a window lies in the image."""
    number, columns, channels = np.uint32(unit), np.uint32(y.shape[1]), np.uint32(y.shape[2])
    c, pixel = np.uint64(number % channels), number // channels
    row, column = np.int64(pixel // columns), np.int64(pixel % columns)
    first_row, stop_row = max(row * stride - top, 0), min(row * stride - top + height, x.shape[0])
    first, stop = max(column * stride - left, 0), min(column * stride - left + width, x.shape[1])
    total = np.float32(0)
    for i in range(first_row, stop_row):
        for j in range(first, stop):
            total += x[np.uint64(i), np.uint64(j), c]
    y[row, column, c] = total / np.float32((stop_row - first_row) * (stop - first))


@kernel(reads=("x", "scale"), writes=("y",))
def multiply(unit, x, scale, y):
    """One element: times its channel's scale."""
    number, columns, channels = np.uint32(unit), np.uint32(x.shape[1]), np.uint32(x.shape[2])
    c, pixel = np.uint64(number % channels), number // channels
    row, column = np.int64(pixel // columns), np.int64(pixel % columns)
    y[row, column, c] = x[row, column, c] * scale[0, 0, c]


@kernel(reads=("x",), writes=("y",))
def copy(unit, x, y):
    """One element, into a part of another tensor."""
    number, columns, channels = np.uint32(unit), np.uint32(x.shape[1]), np.uint32(x.shape[2])
    c, pixel = np.uint64(number % channels), number // channels
    row, column = np.int64(pixel // columns), np.int64(pixel % columns)
    y[row, column, c] = x[row, column, c]


@kernel(reads=("x",), writes=("y",))
def resize_nearest(unit, x, y):
    """One element, from the pixel that its own pixel's centre lies in."""
    number, columns, channels = np.uint32(unit), np.uint32(y.shape[1]), np.uint32(y.shape[2])
    c, pixel = np.uint64(number % channels), number // channels
    row, column = np.int64(pixel // columns), np.int64(pixel % columns)
    i = (2 * row + 1) * x.shape[0] // (2 * y.shape[0])
    j = (2 * column + 1) * x.shape[1] // (2 * y.shape[1])
    y[row, column, c] = x[i, j, c]


@kernel(reads=("x",), writes=("y",))
def resize_linear(unit, x, y):
    """One element, between the four pixels whose centres are nearest; beyond the outermost centres it is theirs."""
    number, columns, channels = np.uint32(unit), np.uint32(y.shape[1]), np.uint32(y.shape[2])
    c, pixel = np.uint64(number % channels), number // channels
    row, column = np.int64(pixel // columns), np.int64(pixel % columns)
    # Twice the place among x's centres, in units of y's pixels: whole numbers, so no rounding moves it.
    down = max((2 * row + 1) * x.shape[0] - y.shape[0], 0)
    right = max((2 * column + 1) * x.shape[1] - y.shape[1], 0)
    i, j = down // (2 * y.shape[0]), right // (2 * y.shape[1])
    s = np.float32(down % (2 * y.shape[0])) / np.float32(2 * y.shape[0])
    t = np.float32(right % (2 * y.shape[1])) / np.float32(2 * y.shape[1])
    below, beside = min(i + 1, x.shape[0] - 1), min(j + 1, x.shape[1] - 1)
    upper = x[i, j, c] + t * (x[i, beside, c] - x[i, j, c])
    lower = x[below, j, c] + t * (x[below, beside, c] - x[below, j, c])
    y[row, column, c] = upper + s * (lower - upper)


@kernel(reads=("x",), writes=("y",))
def softmax(unit, x, y):
    """One element. Each unit finds the largest of its pixel and the sum by itself: no unit waits for another."""
    number, columns, channels = np.uint32(unit), np.uint32(x.shape[1]), np.uint32(x.shape[2])
    c, pixel = np.uint64(number % channels), number // channels
    row, column = np.uint64(pixel // columns), np.uint64(pixel % columns)
    largest = x[row, column, 0]
    for other in range(1, x.shape[2]):
        value = x[row, column, np.uint64(other)]
        if value > largest or value != value:
            largest = value
    total = np.float32(0)
    for other in range(x.shape[2]):
        total += math.exp(x[row, column, np.uint64(other)] - largest)
    y[row, column, c] = math.exp(x[row, column, c] - largest) / total


@kernel(reads=("x",), writes=("flags",))
def gate(unit, x, flags, threshold, size, fallback):
    """One group of `size` elements: which of them exceed the threshold. NaN does not.

    If none does and fallback is not 0, the largest has 1: the first of several, and of NaNs.
    """
    first, best, some = unit * size, unit * size, 0
    for i in range(first, first + size):
        value = x[0, 0, i]
        flags[i] = 1 if value > threshold else 0
        some += flags[i]
        if value > x[0, 0, best] or (value == value and x[0, 0, best] != x[0, 0, best]):
            best = i
    if fallback != 0 and some == 0:
        flags[best] = 1


@kernel(reads=("routing", "w"), writes=("y",))
def mix(unit, routing, w, y):
    """One weight: the sum of all experts', each times its element of the routing."""
    total = np.float32(0)
    for expert in range(w.shape[0]):
        total += routing[0, 0, np.uint64(expert)] * w[np.uint64(expert), np.uint64(unit)]
    y[unit] = total
