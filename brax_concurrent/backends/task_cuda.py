"""Tasks on a GPU: a scalar function of one unit becomes a kernel with a thread for each unit.

A task's kernel takes, as parameters of Numba's: the failure cell, the task's place in the stream, its predicate, its
first unit, its number of units, and the arguments. An array is seven words and more (meminfo, parent, items, itemsize,
address, shape, strides), of which meminfo and parent are 0; a scalar is its value, a complex number two.

The failure cell is three int64 (code, task, unit) that all tasks of a run share. The first thread whose function raises
an exception fills it; threads that find it filled do nothing. A predicate is an array of one int32, or of none.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda, njit, types
from numba.cuda.compiler import compile_cuda
from numba.cuda.extending import intrinsic

from brax_concurrent.backends import cuda_calls, cuda_driver, intrinsics, nvvm
from brax_concurrent.backends.arguments import Argument, ArgumentType, ArrayArgument, KernelError, ScalarArgument
from brax_concurrent.backends.cuda import target
from brax_concurrent.backends.cuda_calls import Functions, error_text, launch_kernel
from brax_concurrent.backends.intrinsics import load_i64
from brax_concurrent.backends.native import WORD, compile_callback, source_hash
from brax_concurrent.backends.objects import ObjectCache
from brax_concurrent.backends.task_objects import task_key

BLOCK = 128  # threads of a block
MAX_GRID = (1 << 31) - 1  # blocks of a launch
FAILURE = ArgumentType("int64", 1)
PREDICATE = ArgumentType("int32", 1, readonly=True)
FAILURE_WORDS = 3  # code, task, unit
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


@dataclass(frozen=True)
class CudaCode:
    """A task's kernel, compiled.

    name, symbol   what messages call it; its entry in the code
    ptx, cubin     what NVVM wrote; machine code
    resources      what a thread needs
    """

    name: str
    symbol: str
    ptx: str
    cubin: bytes
    resources: nvvm.Resources


@dataclass(frozen=True, eq=False)
class LaunchTable:
    """What to launch, in program order: arrays with an element for each task, all int64.

    kernel      handles
    grid        numbers of blocks; 0: nothing to launch
    block       threads of a block
    parameters  addresses of arrays of the addresses of the kernel's parameters
    failure     address of the failure cell, on the GPU
    names       what messages call the kernels
    owners      what must stay alive as long as the table is used
    """

    kernel: np.ndarray
    grid: np.ndarray
    block: np.ndarray
    parameters: np.ndarray
    failure: int
    names: tuple[str, ...]
    owners: tuple[object, ...] = ()

    def __len__(self) -> int:
        return len(self.kernel)


# --- compiling ----------------------------------------------------------------------------------


def compile_task(
    function: Callable[..., Any],
    arguments: Sequence[ArgumentType],
    compute_capability: tuple[int, int],
    *,
    fastmath: bool = False,
) -> CudaCode:
    """Machine code of a scalar function `function(unit, *arguments)`.

    It is kept on disk between processes, where what it computes follows from the function alone. No GPU is needed,
    unless it calls other compiled functions: for those Numba asks the current GPU what it is.

    As usual with Numba on a GPU, division by zero gives infinity or NaN and indices are not checked. A multiplication
    and an addition may be contracted into one operation, so bits may differ from the CPU's.

    Args:
      function: Python that Numba compiles.
      arguments: their types.
      compute_capability: of the GPU.
      fastmath: floating-point operations may be reordered and approximated.

    Raises:
      KernelError: Numba or NVIDIA's compilers refuse it, it stores into a read-only array, or returns something.
    """
    made_for = (target(compute_capability), fastmath, source_hash(__file__))
    key = task_key(function, arguments, made_for)
    kept = None if key is None else ObjectCache().get(f"g{key}")
    if kept is not None:
        return _unpacked(function.__name__, kept)
    code = _compile_task(function, arguments, compute_capability, fastmath)
    if key is not None:
        ObjectCache().put(f"g{key}", _packed(code))
    return code


def _packed(code: CudaCode) -> bytes:
    """Compiled code as bytes: a line of JSON, the machine code, the PTX."""
    head = {"symbol": code.symbol, "cubin": len(code.cubin), "resources": dataclasses.asdict(code.resources)}
    return json.dumps(head).encode() + b"\n" + code.cubin + code.ptx.encode()


def _unpacked(name: str, data: bytes) -> CudaCode:
    line, _, rest = data.partition(b"\n")
    head = json.loads(line)
    cubin, ptx = rest[: head["cubin"]], rest[head["cubin"] :].decode()
    return CudaCode(name, head["symbol"], ptx, cubin, nvvm.Resources(**head["resources"]))


def _compile_task(
    function: Callable[..., Any],
    arguments: Sequence[ArgumentType],
    compute_capability: tuple[int, int],
    fastmath: bool,
) -> CudaCode:
    name = function.__name__
    kinds = tuple(each.numba_type() for each in arguments)
    try:
        options = {"fastmath": fastmath, "opt": 3}
        result = compile_cuda(
            function, None, (types.int64, *kinds), fastmath=fastmath, nvvm_options=options, cc=compute_capability
        )
        if result.signature.return_type != types.none:
            returned = result.signature.return_type
            raise KernelError(f"it returns {returned}: a kernel returns nothing, it stores into arrays")
        head = (FAILURE.numba_type(), types.int64, PREDICATE.numba_type(), types.int64, types.int64)
        ptx, _ = cuda.compile(
            _kernel(call_unit_of(result, len(kinds)), len(kinds)),
            types.void(*head, *kinds),
            device=False,
            abi="numba",
            fastmath=fastmath,
            cc=compute_capability,
        )
        (mangled,) = [line.split()[2].rstrip("(") for line in ptx.splitlines() if line.startswith(".visible .entry")]
        symbol = f"task_{hashlib.sha256(ptx.encode()).hexdigest()[:16]}"
        ptx = ptx.replace(mangled, symbol)
        cubin, resources = nvvm.assemble(ptx, name, compute_capability)
    except (ImportError, cuda_driver.CudaError, KernelError):
        raise
    except Exception as error:  # Numba also fails in other ways than by its own exceptions
        raise KernelError(str(error)) from error
    return CudaCode(name, symbol, ptx, cubin, resources)


def call_unit_of(result: Any, count: int) -> Any:
    """An intrinsic (unit, arguments): calls the compiled function and returns 0, or the number of its exception."""

    @intrinsic
    def call_unit(typingctx, unit, arguments):
        def codegen(context, builder, signature, values):
            context.active_code_library.add_linking_library(result.library)
            unpacked = [builder.extract_value(values[1], i) for i in range(count)]
            status, _ = context.call_internal_no_propagate(
                builder, result.fndesc, result.signature, [values[0], *unpacked]
            )
            word = ir.IntType(64)
            return builder.select(status.is_error, builder.sext(status.code, word), word(0))

        return types.int64(unit, arguments), codegen

    return call_unit


_SOURCE = """
def kernel(failure, task, predicate, first, units, {names}):
    index = cuda.grid(1)
    if index >= units or failure[0] != 0:
        return
    if predicate.size == 1 and predicate[0] == 0:
        return
    code = call_unit(first + index, ({names}))
    if code != 0 and cuda.atomic.compare_and_swap(failure, 0, code) == 0:
        failure[1] = task
        failure[2] = first + index
"""


def _kernel(call_unit: Any, count: int) -> Any:
    """The kernel around it, with so many arguments: Numba's kernels take no variable number of them."""
    names = "".join(f"a{i}, " for i in range(count))
    scope: dict[str, Any] = {"cuda": cuda, "call_unit": call_unit}
    exec(_SOURCE.format(names=names), scope)
    return scope["kernel"]


# --- parameters ---------------------------------------------------------------------------------


def parameter_words(arguments: Sequence[Argument]) -> list[int]:
    """The values of a kernel's parameters, an int64 each, whose first bytes are the parameter."""
    words: list[int] = []
    for each in arguments:
        if isinstance(each, ScalarArgument):
            parts = [each.value.real, each.value.imag] if each.value.dtype.kind == "c" else [each.value]
            words += [int.from_bytes(part.tobytes(), "little") for part in parts]
        else:
            words += _array_words(each.address, each.shape, each.strides, each.itemsize)
    return words


def _array_words(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> list[int]:
    items = int(np.prod(shape, dtype=np.int64))
    return [0, 0, items, itemsize, address, *shape, *strides]


def build_table(
    kernels: Sequence[cuda_driver.Kernel],
    arguments: Sequence[Sequence[Argument]],
    units: Sequence[int],
    predicates: Sequence[ArrayArgument | None],
    failure: DeviceBlock | None = None,
) -> LaunchTable:
    """The table of launches in program order.

    Args:
      kernels: of each task.
      arguments: of each task. Their arrays must live as long as the table is used.
      units: how many each has, from 0 on.
      predicates: an array of one int32, or None.
      failure: the failure cell; None: a new one on the current GPU.

    Raises:
      ValueError: a task has more units than a launch has threads.
      CudaError: there is no memory for the failure cell.
    """
    cell = failure or failure_cell()
    for kernel, count in zip(kernels, units, strict=True):
        if count > BLOCK * MAX_GRID:
            raise ValueError(f"kernel {kernel.name}: units must be at most {BLOCK * MAX_GRID} on a GPU, got {count}")
    rows = []
    for index, count in enumerate(units):
        predicate = predicates[index]
        condition = _array_words(*((0, (0,)) if predicate is None else (predicate.address, (1,))), (4,), 4)
        head = [*_array_words(cell.address, (FAILURE_WORDS,), (WORD,), WORD), index, *condition, 0, count]
        rows.append(head + parameter_words(arguments[index]))
    words = np.array([np.array(word & (1 << 64) - 1, np.uint64) for row in rows for word in row], np.uint64)
    pointers = (words.ctypes.data + WORD * np.arange(len(words))).astype(np.int64)
    lengths = np.array([len(row) for row in rows], np.int64)
    return LaunchTable(
        np.array([kernel.handle for kernel in kernels], np.int64),
        (np.array(units, np.int64) + BLOCK - 1) // BLOCK,
        np.full(len(kernels), BLOCK, np.int64),
        pointers.ctypes.data + WORD * (np.cumsum(lengths) - lengths),
        cell.address,
        tuple(kernel.name for kernel in kernels),
        (words, pointers, cell),
    )


# --- running ------------------------------------------------------------------------------------


@njit(nogil=True)
def launch_in_order(launch: int, kernel: int, grid: int, block: int, parameters: int, count: int, stream: int) -> int:
    """Launch `count` tasks on one stream, from the addresses of a LaunchTable's arrays.

    Returns 0, or where a launch failed (task + 1) << 32 | error: nothing is launched after it.
    """
    for task in range(count):
        offset = WORD * task
        blocks = load_i64(grid + offset)
        if blocks != 0:
            threads = load_i64(block + offset)
            error = launch_kernel(
                launch, load_i64(kernel + offset), blocks, threads, stream, load_i64(parameters + offset)
            )
            if error != 0:
                return ((task + 1) << 32) | error
    return 0


def _make_launch(magic: int) -> Callable[..., int]:
    # As in native.py: `magic` is in Numba's cache key and ties the code to the content of the files it is of.
    def tasks(launch: int, kernel: int, grid: int, block: int, parameters: int, count: int, stream: int) -> int:
        return launch_in_order(launch, kernel, grid, block, parameters, count, stream) if magic != 0 else -1

    return tasks


@functools.cache
def _compiled_launch() -> Any:
    magic = source_hash(__file__, cuda_calls.__file__, intrinsics.__file__)
    return compile_callback(_make_launch(magic), types.int64(*[types.int64] * 7))


def launch_table(table: LaunchTable, stream: int = 0, functions: Functions | None = None) -> None:
    """Launch all tasks in program order on one CUDA stream. Nothing is waited for.

    Args:
      table: what to launch; its GPU's context must be current.
      stream: a CUstream; 0 is the default stream.
      functions: what to launch with; None: the CUDA driver.

    Raises:
      CudaError: a launch failed; names the task.
    """
    functions = functions or Functions.of_driver()
    arrays = (table.kernel, table.grid, table.block, table.parameters)
    run = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 7)(_compiled_launch().address)
    result = run(functions.launch, *(array.ctypes.data for array in arrays), len(table), stream)
    if result != 0:
        task, error = (result >> 32) - 1, result & 0xFFFFFFFF
        said = error_text(functions.explain, error)
        raise cuda_driver.CudaError(f"launch of task {task}, kernel {table.names[task]}: {said} (error {error})")


def failure_cell() -> DeviceBlock:
    """A new failure cell on the current GPU, in which nothing has failed.

    Raises:
      CudaError: there is no memory.
    """
    cell = DeviceBlock(WORD * FAILURE_WORDS)
    _clear_failure(cell.address)
    return cell


def _clear_failure(cell: int) -> None:
    cuda_driver.call("cuMemsetD8_v2", c_uint64(cell), ctypes.c_ubyte(0), c_size_t(WORD * FAILURE_WORDS))


def run_table(failure: int, launch: Callable[[], None]) -> tuple[int, int, int] | None:
    """Have all tasks launched, and wait for them.

    It waits first for all that the GPU was given before: the arrays may come from other streams.

    Args:
      failure: address of their failure cell, in which nothing has failed. So it is afterwards.
      launch: launches them, so that the default stream ends with them.

    Returns:
      None, or (code, task, unit) of the unit that raised an exception first; tasks that began after it did nothing.

    Raises:
      CudaError: a launch or a kernel failed.
    """
    cuda_driver.call("cuCtxSynchronize", doing="waiting for the GPU before the tasks")
    found = np.full(FAILURE_WORDS, -1, np.int64)
    source, target = c_uint64(failure), c_void_p(found.ctypes.data)
    try:
        launch()
        # A copy waits for the default stream: a call less than to wait and to copy.
        cuda_driver.call("cuMemcpyDtoH_v2", target, source, c_size_t(found.nbytes), doing="running the tasks")
    finally:
        if found[0] != 0:
            with contextlib.suppress(cuda_driver.CudaError):
                _clear_failure(failure)
    code, task, unit = found.tolist()
    return None if code == 0 else (code, task, unit)


def load(code: CudaCode) -> cuda_driver.Kernel:
    """The kernel in this process.

    Raises:
      CudaError: naming it.
    """
    return cuda_driver.load_kernel(code.name, code.symbol, code.cubin)


class DeviceBlock:
    """Memory on the current GPU, freed with this object.

    Raises:
      CudaError: there is none.
    """

    def __init__(self, size: int):
        address, context = c_uint64(), c_void_p()
        cuda_driver.call("cuMemAlloc_v2", byref(address), c_size_t(size), doing=f"allocating {size} bytes")
        cuda_driver.call("cuCtxGetCurrent", byref(context))
        self.address, self._context = address.value, context

    def __del__(self) -> None:
        try:
            cuda_driver.call("cuCtxPushCurrent_v2", self._context)
            cuda_driver.call("cuMemFree_v2", c_uint64(self.address))
            cuda_driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))
        except Exception:  # at exit the driver may be gone, and so may contextlib
            pass


def device_of(addresses: Iterable[int]) -> int:
    """The number of the GPU that memory is on; without any the first.

    Raises:
      ValueError: the memory is on several GPUs.
      CudaError: there is no GPU, or an address is none of its.
    """
    devices = set()
    for address in set(addresses):
        device = c_int(0)
        doing = f"finding the GPU of address {address:#x}"
        cuda_driver.call("cuPointerGetAttribute", byref(device), _DEVICE_ORDINAL, c_uint64(address), doing=doing)
        devices.add(device.value)
    if len(devices) > 1:
        raise ValueError(f"expected all arrays of a stream on one GPU, got some on each of {sorted(devices)}")
    return devices.pop() if devices else 0


def one_allocation(first: int, last: int) -> bool:
    """Whether two addresses are in one piece of memory that was allocated on a GPU.

    Raises:
      CudaError: the first is in none.
    """
    start, size = c_uint64(), c_size_t()
    cuda_driver.call("cuMemGetAddressRange_v2", byref(start), byref(size), c_uint64(first))
    return start.value <= last < start.value + size.value


def empty(shape: int | tuple[int, ...], dtype: Any) -> Any:
    """An array of Numba's on the current GPU, not initialised.

    Raises:
      CudaError: there is no GPU.
    """
    if cuda_driver.device_count() == 0:
        raise cuda_driver.CudaError("device: expected cpu, for there is no GPU, got 'cuda'")
    return cuda.device_array(shape, dtype)
