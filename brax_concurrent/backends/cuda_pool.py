"""Streams and events for windows on CUDA, a set for each GPU of this process. They are made once and never freed.

A pool is int64 words. Compiled code that puts tasks onto its streams holds its lock meanwhile, since it records the
events anew.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np
from numba import njit

from brax_concurrent.backends import cuda_driver
from brax_concurrent.backends.cuda_calls import F_DEVICE, NO_TIMING, NON_BLOCKING, current_device
from brax_concurrent.backends.cuda_program import MAX_STREAMS, MAX_WINDOW
from brax_concurrent.backends.intrinsics import (
    compare_and_set,
    give_way,
    load_i32,
    load_i64,
    monotonic_ns,
    stack_bytes,
)
from brax_concurrent.backends.native import WORD

POOL_LOCK = 0
POOL_STREAMS = 8  # MAX_STREAMS words, the first for the caller's own stream
POOL_FORK = POOL_STREAMS + MAX_STREAMS
POOL_JOINS = POOL_FORK + 1  # MAX_STREAMS words
POOL_EVENTS = POOL_JOINS + MAX_STREAMS  # one for each slot of a window
POOL_WORDS = POOL_EVENTS + MAX_WINDOW
MAX_DEVICES = 64

_lock = threading.Lock()
_table = np.zeros(MAX_DEVICES, np.int64)
_pools: dict[int, np.ndarray] = {}


def pools() -> int:
    """Address of the pools' addresses by GPU, made now for those in use that have none; 0 where there is none."""
    with _lock:
        for device in range(min(cuda_driver.device_count(), MAX_DEVICES)):
            if device not in _pools and cuda_driver.in_use(device):
                _pools[device] = _new_pool(device)
                _table[device] = _pools[device].ctypes.data
    return int(_table.ctypes.data)


def _new_pool(device: int) -> np.ndarray:
    words = np.zeros(POOL_WORDS, np.int64)
    with cuda_driver.primary_context(device):
        for lane in range(1, MAX_STREAMS):
            words[POOL_STREAMS + lane] = _made("cuStreamCreate", NON_BLOCKING)
        for event in range(POOL_FORK, POOL_WORDS):
            words[event] = _made("cuEventCreate", NO_TIMING)
    return words


def _made(function: str, flags: int) -> int:
    handle = ctypes.c_void_p()
    cuda_driver.call(function, ctypes.byref(handle), flags)
    return handle.value or 0


@njit
def find_pool(table: int, functions: int) -> int:
    """Address of the pool of the current context's GPU; 0 if it has none."""
    device = stack_bytes(8)
    if current_device(load_i64(functions + WORD * F_DEVICE), device) != 0 or load_i32(device) >= MAX_DEVICES:
        return 0
    return load_i64(table + WORD * load_i32(device))


@njit
def lock_pool(pool: int, timeout: int) -> bool:
    """Take the pool's lock; False if another call kept it for `timeout` nanoseconds."""
    start = monotonic_ns()
    while compare_and_set(pool + WORD * POOL_LOCK, 0, 1) == 0:
        if monotonic_ns() - start > timeout:
            return False
        give_way()
    return True


@njit
def unlock_pool(pool: int) -> None:
    """Give the pool's lock back."""
    compare_and_set(pool + WORD * POOL_LOCK, 1, 0)
