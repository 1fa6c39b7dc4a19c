"""In which order a window with one worker issues the tasks of some tiles: found once, when the program is made.

A worker that has a window to itself runs one task at a time, and that has ended before the next is chosen. So nothing
in its window depends on how long tasks take: who issues next follows from the conflicts between a tile's kernels and
from the policy. The window is played here with the rules of window.py, and what it gives is a list that the worker
follows. (A task that its predicate skips takes no time; it keeps its place in the list.)
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import carray, types

from brax_concurrent.backends import intrinsics
from brax_concurrent.backends.intrinsics import pointer, stack_bytes
from brax_concurrent.backends.native import WORD, compile_callback, source_hash
from brax_concurrent.scheduler import window
from brax_concurrent.scheduler.window import (
    MAX_SLOTS,
    NO_SLOT,
    WAITING,
    free_slot,
    oldest_slot,
    ready_mask,
    retire_slots,
    slot_bit,
    upstream_mask_of_kind,
)

POLICIES = ("oldest", "depth_first", "same_kernel")
"""Which of the ready tasks issues: the oldest; the oldest of the tile that the last task was of; or the oldest of the
kernel that ran last, whose code is in the instruction cache. The latter two take the oldest where there is none."""

TILE_BITS = 8  # of an order's words, for the place of the tile in its group; the op's is in the bits above
_DEPTH_FIRST, _SAME_KERNEL = POLICIES.index("depth_first"), POLICIES.index("same_kernel")
_SLOT_BYTES, _MASK_BYTES = WORD * MAX_SLOTS, WORD * 2


def _make_play(magic: int) -> Callable[..., int]:
    # As in native.py: `magic` is in Numba's cache key and ties the code to the content of the files it is of.
    def play(table: int, kernels: int, ops: int, tiles: int, size: int, policy: int, order: int) -> int:
        conflicts, names = carray(pointer(table), (ops, ops), np.bool_), carray(pointer(kernels), ops, np.int64)
        issued = carray(pointer(order), ops * tiles, np.int64)
        upstream = carray(pointer(stack_bytes(_SLOT_BYTES)), size, np.uint64)
        tasks, kinds, units = (
            carray(pointer(stack_bytes(_SLOT_BYTES)), size, np.int64),
            carray(pointer(stack_bytes(_SLOT_BYTES)), size, np.int64),
            carray(pointer(stack_bytes(_SLOT_BYTES)), size, np.int64),
        )
        masks = carray(pointer(stack_bytes(_MASK_BYTES)), 2, np.uint64)
        masks[:], kinds[:] = np.uint64(0), 0
        coming, kernel, tile = 0, -1, -1
        for place in range(ops * tiles):
            while coming < ops * tiles:
                slot = free_slot(masks[WAITING], size)
                if slot == NO_SLOT:
                    break
                kinds[slot], units[slot], tasks[slot] = coming // tiles, coming % tiles, coming
                occupied = masks[WAITING]
                upstream[slot] = upstream_mask_of_kind(conflicts, kinds, units, occupied, kinds[slot], units[slot])
                masks[WAITING] |= slot_bit(slot)
                coming += 1
            ready, preferred = ready_mask(upstream, masks[WAITING]), np.uint64(0)
            for slot in range(size):
                alike = policy == _DEPTH_FIRST and units[slot] == tile
                if alike or (policy == _SAME_KERNEL and names[kinds[slot]] == kernel):
                    preferred |= slot_bit(slot) & ready
            slot = oldest_slot(tasks, preferred if preferred != np.uint64(0) else ready)
            kernel, tile = names[kinds[slot]], units[slot]
            issued[place] = (kinds[slot] << TILE_BITS) | tile
            retire_slots(upstream, masks, slot_bit(slot))
        return magic

    return play


@functools.cache
def _play() -> tuple[int, Any, Any]:
    """The magic of this version, the compiled function, and what keeps its code alive."""
    magic = source_hash(__file__, window.__file__, intrinsics.__file__)
    code = compile_callback(_make_play(magic), types.int64(*[types.int64] * 7))
    return magic, ctypes.CFUNCTYPE(*[ctypes.c_int64] * 8)(code.address), code


def issue_order(table: np.ndarray, kernels: Sequence[object], tiles: int, window: int, policy: str) -> np.ndarray:
    """The order in which one worker's window issues the tasks of a group of tiles.

    The tiles go through the program side by side: the stream is op 0 of all, then op 1 of all, and so on.

    Args:
      table: (ops, ops) bool, which ops of a tile must run in program order.
      kernels: each op's kernel, hashable.
      tiles: of the group, 1 to 255.
      window: slots, 1 to 64.
      policy: one of POLICIES.

    Returns:
      (ops * tiles,) int64: the tile's place in the group + (the op << TILE_BITS).
    """
    number = {kernel: index for index, kernel in enumerate(dict.fromkeys(kernels))}
    names = np.array([number[kernel] for kernel in kernels], np.int64)
    table, order = np.ascontiguousarray(table), np.zeros(len(kernels) * tiles, np.int64)
    magic, play, _ = _play()
    numbers = (len(kernels), tiles, window, POLICIES.index(policy))
    if play(table.ctypes.data, names.ctypes.data, *numbers, order.ctypes.data) != magic:
        raise RuntimeError("the compiled window is of another version of this package")
    return order
