"""A kernel that never ends until it is let go, on whatever thread is not the caller's."""

import ctypes
import time

import numpy as np
from toy_programs import ADDRESSES, compiled

from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.intrinsics import atomic_add, atomic_load, call_address, give_way, load_i64, monotonic_ns
from brax_concurrent.scheduler.serial import TileKernel, TileLayout, TileOp, TileProgram

# The control block of `hold`: who must not be held, the address of the function that says who is asking, how many are
# held, whether to go on, for how many the caller waits.
CALLER, SELF, HELD, GO_ON, ENOUGH = range(5)


def hold(arena, buffers, first_env, num_envs):
    """Do not end, for 20 s, on another thread than the caller's, who waits until enough are held."""
    begin = monotonic_ns()
    block = load_i64(load_i64(buffers))  # not the buffer: it may be gone before this ends
    if call_address(load_i64(block + 8 * SELF), 0) == load_i64(block + 8 * CALLER):
        while atomic_load(block + 8 * HELD) < load_i64(block + 8 * ENOUGH) and monotonic_ns() - begin < 20 * 10**9:
            give_way()
        return
    atomic_add(block + 8 * HELD, 1)
    while atomic_load(block + 8 * GO_ON) == 0 and monotonic_ns() - begin < 20 * 10**9:
        give_way()
    atomic_add(block + 8 * HELD, -1)


def holding():
    """A program that holds every thread but this one, and its control block and arrays for two tiles."""
    layout = TileLayout(
        64, (BufferSpec("block", (2,), "uint32", "read", per_env=False), BufferSpec("x", (), "float32", "readwrite"))
    )
    code = compiled(hold, ADDRESSES)
    kernel = TileKernel("hold", code.address, "hold 1", layout.footprint(("x",), ("x",)), code)
    block = np.zeros(5, np.int64)
    block[ENOUGH] = 1
    function = ctypes.CDLL(None).pthread_self
    function.restype = ctypes.c_int64
    block[CALLER] = function()
    block[SELF] = ctypes.cast(function, ctypes.c_void_p).value
    pointer = np.array([block.ctypes.data], np.int64).view(np.uint32)
    return TileProgram(layout, (TileOp(kernel),)), block, [pointer, np.zeros(64, np.float32)]


def let_go(block):
    """Wait until nobody is held."""
    block[GO_ON] = 1
    deadline = time.monotonic() + 20
    while block[HELD]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
