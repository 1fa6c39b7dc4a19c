"""When kernels ran on the GPU, by its own clock.

Every kernel has a parameter `stamp`: 0, or the address of two uint64 on the GPU to which its warps write the earliest
beginning and the latest end (`%globaltimer`, nanoseconds). A trace block gives each launch its own pair. Nothing is
measured on the host, and a kernel's interval is the time in which it really had a warp on the GPU.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba import njit

from brax_concurrent.backends import cuda_dispatch, cuda_driver
from brax_concurrent.backends.cuda_program import DESC_RUN, DESC_TRACE, CudaProgram
from brax_concurrent.backends.intrinsics import atomic_add, load_i64, store_i64
from brax_concurrent.backends.native import WORD

TRACE_STAMPS, TRACE_CAPACITY, TRACE_COUNT, TRACE_RUN = 0, 1, 2, 3  # address on the GPU; rows; launches so far; calls
TRACE_FIRST_ROW = 8
ROW_RUN, ROW_UNIT, ROW_OP, ROW_LANE, ROW_WORDS = 0, 1, 2, 3, 4
_PAIR = 16  # bytes
DISPATCH_ROW = np.dtype(
    [("begin", "i8"), ("end", "i8"), *((name, "i4") for name in ("part", "bundle", "step", "op", "place", "run"))]
)
"""What the dispatcher writes of a task, see cuda_dispatch.R_BEGIN."""
_MANY = 2**64 - 1


@njit
def next_stamp(trace: int, unit: int, op: int, lane: int) -> int:
    """The next launch's place on the GPU, 0 when there is no room; a row says what is launched."""
    index = atomic_add(trace + WORD * TRACE_COUNT, 1)
    if index >= load_i64(trace + WORD * TRACE_CAPACITY):
        return 0
    row = trace + WORD * (TRACE_FIRST_ROW + ROW_WORDS * index)
    store_i64(row + WORD * ROW_RUN, load_i64(trace + WORD * TRACE_RUN))
    store_i64(row + WORD * ROW_UNIT, unit)
    store_i64(row + WORD * ROW_OP, op)
    store_i64(row + WORD * ROW_LANE, lane)
    return load_i64(trace + WORD * TRACE_STAMPS) + _PAIR * index


class TraceBlock:
    """Room for the times of `capacity` launches of one program on the current context's GPU.

    Recording begins with `start` and ends with `stop`, which waits for the GPU. What finds no room is counted.
    """

    def __init__(self, program: CudaProgram, capacity: int):
        self._program = program
        self.words = np.zeros(TRACE_FIRST_ROW + ROW_WORDS * capacity, np.int64)
        self._stamps = np.zeros((capacity, 2), np.uint64)
        self._stamps[:, 0] = _MANY
        self._device: Any = ctypes.c_uint64()
        cuda_driver.call("cuMemAlloc_v2", ctypes.byref(self._device), ctypes.c_size_t(self._stamps.nbytes))
        self.words[TRACE_STAMPS], self.words[TRACE_CAPACITY] = self._device.value, capacity

    def start(self) -> None:
        """Record the program's launches from now on, as one run after those before."""
        source = ctypes.c_void_p(self._stamps.ctypes.data)
        cuda_driver.call("cuMemcpyHtoD_v2", self._device, source, ctypes.c_size_t(self._stamps.nbytes))
        self.words[TRACE_COUNT] = 0
        self._program.desc[DESC_TRACE] = self.words.ctypes.data

    def stop(self) -> tuple[np.ndarray, np.ndarray, int]:
        """End the recording; returns what `read` does."""
        self._program.desc[DESC_TRACE] = 0
        return self.read()

    def read(self) -> tuple[np.ndarray, np.ndarray, int]:
        """What was recorded so far; waits for the GPU.

        Returns:
            rows (n, ROW_WORDS) int64, see ROW_*; times (n, 2) int64, begin and end of each in ns of the GPU's clock;
            and how many launches found no room.
        """
        cuda_driver.call("cuCtxSynchronize", doing="waiting for the kernels that are traced")
        count, capacity = int(self.words[TRACE_COUNT]), int(self.words[TRACE_CAPACITY])
        used = min(count, capacity)
        times = np.zeros((used, 2), np.uint64)
        target = ctypes.c_void_p(times.ctypes.data)
        if used:
            cuda_driver.call("cuMemcpyDtoH_v2", target, self._device, ctypes.c_size_t(times.nbytes))
        rows = self.words[TRACE_FIRST_ROW : TRACE_FIRST_ROW + ROW_WORDS * used].reshape(used, ROW_WORDS)
        return rows.copy(), times.astype(np.int64), count - used

    def free(self) -> None:
        """Give the memory on the GPU back."""
        if self._device.value:
            cuda_driver.call("cuMemFree_v2", self._device)
            self._device = ctypes.c_uint64()


class DispatchTrace:
    """Room for the times of `capacity` tasks of a program of the dispatcher, on the current context's GPU.

    As TraceBlock; the GPU itself writes the rows.
    """

    def __init__(self, program: CudaProgram, capacity: int):
        self._program, self._capacity = program, capacity
        self._size = cuda_dispatch.TRACE_FIRST + cuda_dispatch.R_BYTES * capacity
        self._device: Any = ctypes.c_uint64()
        cuda_driver.call("cuMemAlloc_v2", ctypes.byref(self._device), ctypes.c_size_t(self._size))

    def start(self) -> None:
        """Record the program's tasks from now on."""
        head = np.array([0, self._capacity, 0, 0], np.int32)
        source = ctypes.c_void_p(head.ctypes.data)
        cuda_driver.call("cuMemcpyHtoD_v2", self._device, source, ctypes.c_size_t(head.nbytes))
        self._program.desc[DESC_RUN] = 0
        self._program.desc[DESC_TRACE] = self._device.value

    def read(self) -> tuple[np.ndarray, int]:
        """What was recorded so far, and how many tasks found no room; waits for the GPU.

        Returns:
            A structured array with the fields of DISPATCH_ROW.
        """
        cuda_driver.call("cuCtxSynchronize", doing="waiting for the kernels that are traced")
        data = np.zeros(self._size, np.uint8)
        target = ctypes.c_void_p(data.ctypes.data)
        cuda_driver.call("cuMemcpyDtoH_v2", target, self._device, ctypes.c_size_t(self._size))
        count = int(data[:4].view(np.uint32)[0])
        rows = data[cuda_dispatch.TRACE_FIRST :].view(DISPATCH_ROW)[: min(count, self._capacity)]
        return rows.copy(), max(count - self._capacity, 0)
