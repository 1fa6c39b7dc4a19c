"""The CUDA driver, called through ctypes. Nothing here happens at import; the first call loads and starts the driver.

Kernels are loaded as libraries, whose handles belong to no context: one handle serves every device. XLA computes in
each device's primary context, and makes it current for the thread that runs a handler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterable, Iterator
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CU_DEVICE_ATTRIBUTE_*
_LOCAL_BYTES, _REGISTERS = 3, 4  # CU_FUNC_ATTRIBUTE_*

_lock = threading.Lock()
_loaded: dict[str, int] = {}  # handles by symbol; code is never unloaded


class CudaError(RuntimeError):
    """A call of the CUDA driver failed. The message says what was tried and has the driver's explanation."""


@functools.cache
def _library() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"there is no CUDA driver: {error}") from error
    code = library.cuInit(0)
    if code != 0:
        raise CudaError(f"starting the CUDA driver: {_explain(library, code)}")
    return library


def _explain(library: Any, code: int) -> str:
    name, text = c_char_p(), c_char_p()
    library.cuGetErrorName(c_int(code), byref(name))
    library.cuGetErrorString(c_int(code), byref(text))
    said = [part.value.decode() for part in (text, name) if part.value]
    return f"{said[0]} ({said[1]}, {code})" if len(said) == 2 else f"error {code}"


def explain(code: int) -> str:
    """What the driver says about an error code."""
    return _explain(_library(), code)


def call(name: str, *arguments: Any, doing: str = "") -> None:
    """Call a function of the driver.

    Args:
        name: the function.
        arguments: ctypes objects; a plain int is passed as a C int.
        doing: what messages say was tried; default the function's name.

    Raises:
        CudaError: there is no driver, or the function failed.
    """
    library = _library()
    code = getattr(library, name)(*arguments)
    if code != 0:
        raise CudaError(f"{doing or name}: {_explain(library, code)}")


def address(name: str) -> int:
    """Where a function of the driver lies, for compiled code."""
    return ctypes.cast(getattr(_library(), name), c_void_p).value or 0


def device_count() -> int:
    """GPUs that this process may use; 0 without a driver."""
    count = c_int(0)
    try:
        call("cuDeviceGetCount", byref(count))
    except CudaError:
        return 0
    return count.value


def _attribute(attribute: int, device: int) -> int:
    value = c_int(0)
    call("cuDeviceGetAttribute", byref(value), attribute, device, doing=f"attribute {attribute} of GPU {device}")
    return value.value


def compute_capability(device: int = 0) -> tuple[int, int]:
    """What machine code a GPU runs."""
    return _attribute(_MAJOR, device), _attribute(_MINOR, device)


def multiprocessors(device: int = 0) -> int:
    """Streaming multiprocessors of a GPU."""
    return _attribute(_MULTIPROCESSORS, device)


def current_device() -> int:
    """The GPU of the context that is current in this thread."""
    device = c_int(0)
    call("cuCtxGetDevice", byref(device))
    return device.value


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel.

    Attributes:
        name: what messages call it. symbol: its entry in the machine code.
        handle: a CUkernel, which `cuLaunchKernel` takes in every context.
    """

    name: str
    symbol: str
    handle: int

    def registers(self, device: int = 0) -> int:
        """32-bit registers of one thread."""
        return self._attribute(_REGISTERS, device)

    def local_bytes(self, device: int = 0) -> int:
        """Bytes of local memory of one thread: its stack and spilled registers."""
        return self._attribute(_LOCAL_BYTES, device)

    def _attribute(self, attribute: int, device: int) -> int:
        value = c_int(0)
        doing = f"attribute {attribute} of kernel {self.name}"
        call("cuKernelGetAttribute", byref(value), attribute, c_void_p(self.handle), device, doing=doing)
        return value.value


def load_kernel(name: str, symbol: str, cubin: bytes) -> Kernel:
    """Put a kernel's machine code into this process, for ever. The same symbol is the same kernel.

    Raises:
        CudaError: naming the kernel, e.g. because the code is for another GPU.
    """
    with _lock:
        if symbol not in _loaded:
            library, kernel = c_void_p(), c_void_p()
            none = [None, None, 0] * 2  # options of the compiler and of the library
            call("cuLibraryLoadData", byref(library), c_char_p(cubin), *none, doing=f"loading kernel {name}")
            call(
                "cuLibraryGetKernel", byref(kernel), library, c_char_p(symbol.encode()), doing=f"finding kernel {name}"
            )
            _loaded[symbol] = kernel.value or 0
        return Kernel(name, symbol, _loaded[symbol])


def resident_blocks(kernel: Kernel, threads: int) -> int:
    """How many blocks of so many threads a multiprocessor of the current GPU can hold at once."""
    count, function, none = c_int(0), c_void_p(), ctypes.c_size_t(0)
    doing = f"finding how many blocks of kernel {kernel.name} fit"
    call("cuKernelGetFunction", byref(function), c_void_p(kernel.handle), doing=doing)
    call("cuOccupancyMaxActiveBlocksPerMultiprocessor", byref(count), function, threads, none, doing=doing)
    return count.value


def in_use(device: int) -> bool:
    """Whether this process computes on a GPU: whether its primary context exists."""
    flags, active = c_uint(0), c_int(0)
    call("cuDevicePrimaryCtxGetState", device, byref(flags), byref(active))
    return bool(active.value)


def make_resident(kernels: Iterable[Kernel]) -> None:
    """Load kernels onto all GPUs that are in use.

    The driver would do so at a kernel's first launch, which then waits for the GPU and is not allowed while XLA
    captures a command buffer.
    """
    kernels = list(kernels)
    for device in range(device_count()):
        if in_use(device):
            with primary_context(device):
                for kernel in kernels:
                    function = c_void_p()
                    doing = f"loading kernel {kernel.name} onto GPU {device}"
                    call("cuKernelGetFunction", byref(function), c_void_p(kernel.handle), doing=doing)
                    if hasattr(_library(), "cuFuncLoad"):  # since driver 550
                        call("cuFuncLoad", function, doing=doing)


def shared_words(count: int) -> np.ndarray:
    """int32 words, zeros, that the host and all GPUs see at one address. They stay for ever: a kernel may write late.

    Raises:
        CudaError: there is no GPU, or no memory.
    """
    portable_and_mapped = 1 | 2  # CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP
    host = c_void_p()
    with primary_context():
        call(
            "cuMemHostAlloc",
            byref(host),
            ctypes.c_size_t(4 * count),
            portable_and_mapped,
            doing="allocating host memory",
        )
    words = np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(host.value or 0))
    words[:] = 0
    return words


@contextlib.contextmanager
def primary_context(device: int = 0) -> Iterator[None]:
    """The context that XLA uses on a GPU, current in this thread inside the block.

    Once used it is there until the process ends: memory and kernels are in it.
    """
    call("cuCtxPushCurrent_v2", _retained(device))
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", byref(c_void_p()))


@functools.cache
def _retained(device: int) -> c_void_p:
    context = c_void_p()
    call("cuDevicePrimaryCtxRetain", byref(context), device)
    return context
