"""Programs on the GPU: the kernels of a control step, launched one after another on one stream, without Python.

A *kernel* is one of backends/cuda.py. A *program* is the list of kernels of one control step. Each is launched for all
environments at once, in program order and on the same stream, so each finishes before the next begins. The arenas of
all tiles lie in one block of memory that the caller provides; nothing is allocated and nothing waits for the GPU.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from brax_concurrent.backends import cuda_driver, intrinsics
from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.intrinsics import load_i64, store_i64
from brax_concurrent.backends.native import TILE, WORD, compile_callback, source_hash

# A program's descriptor: int64 words. From DESC_FIRST_OP on, OP_WORDS for each op; then the ops' lists of parameters,
# each parameter the word of the call record (below) that holds its value.
DESC_OPS = 0  # number of ops
DESC_ARENA_BYTES = 1  # of one tile
DESC_BLOCK = 2  # threads of a block
DESC_SPREAD = 3  # with at most so many environments a block is one warp
DESC_LAUNCH, DESC_COPY, DESC_EXPLAIN = 4, 5, 6  # addresses of the driver's functions
DESC_POINTERS, DESC_CALL_BYTES = 7, 8  # of a call record: where its pointers begin, its size, in bytes
DESC_FIRST_OP = 16
OP_KERNEL, OP_NAME, OP_COUNT, OP_PARAMETERS, OP_WORDS = 0, 1, 2, 3, 4  # the list's length, and its offset in bytes

# A call record: int64 words. After the buffers' addresses, room for the pointers that a launch takes.
CALL_ARENA, CALL_NUM_ENVS, CALL_FIRST_BUFFER = 0, 1, 2

WARP, DEFAULT_BLOCK, MAX_BLOCK = 32, 128, 1024


@dataclass(frozen=True)
class Functions:
    """Addresses of the driver's functions that programs call.

    Attributes:
        launch: `cuLaunchKernel`. copy: `cuMemcpyDtoDAsync_v2`. explain: `cuGetErrorString`.
    """

    launch: int
    copy: int
    explain: int

    @classmethod
    def of_driver(cls) -> Functions:
        """Those of the CUDA driver."""
        return cls(*map(cuda_driver.address, ("cuLaunchKernel", "cuMemcpyDtoDAsync_v2", "cuGetErrorString")))


@dataclass(frozen=True)
class CudaOp:
    """One launch: a kernel, and the names of the buffers that it takes after arena and num_envs."""

    kernel: cuda_driver.Kernel
    arguments: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class CudaProgram:
    """A program ready to run. Make it with `build_program`.

    Attributes:
        desc: (words,) int64, the descriptor, see DESC_*; its address is what native code holds.
        fingerprint: uint64 content hash: equal means that the program does the same, in any process.
        buffers: the user's arrays.
        ops: the launches in program order.
        owners: what must stay alive as long as the program is used.
    """

    desc: np.ndarray
    fingerprint: int
    buffers: tuple[BufferSpec, ...]
    ops: tuple[CudaOp, ...]
    owners: tuple[object, ...] = ()

    @property
    def address(self) -> int:
        """Address of the descriptor."""
        return int(self.desc.ctypes.data)

    @property
    def inputs(self) -> tuple[BufferSpec, ...]:
        """Buffers that a caller passes."""
        return tuple(spec for spec in self.buffers if spec.access != "write")

    @property
    def outputs(self) -> tuple[BufferSpec, ...]:
        """Buffers that a caller gets back."""
        return tuple(spec for spec in self.buffers if spec.access != "read")

    def arena_shape(self, num_envs: int) -> tuple[int, int]:
        """Shape of the scratch memory, in bytes: (tiles, bytes of a tile)."""
        return -(-num_envs // TILE), int(self.desc[DESC_ARENA_BYTES])


def build_program(
    ops: Sequence[CudaOp],
    arena_bytes: int,
    buffers: Sequence[BufferSpec],
    fingerprint: int,
    *,
    block: int = DEFAULT_BLOCK,
    spread: int = 0,
    functions: Functions | None = None,
) -> CudaProgram:
    """A program from its kernels.

    Args:
        ops: the launches in program order.
        arena_bytes: scratch memory of one tile.
        buffers: the user's arrays.
        fingerprint: a uint64 that says what the program does (`cpu_program.content_hash`), without addresses.
        block: threads of a block, a multiple of 32.
        spread: with at most so many environments a block has 32 threads, which spreads small batches over the GPU.
        functions: what to launch and copy with; None: the CUDA driver.

    Raises:
        ValueError: a number is out of range, a buffer is not known, or one is written that all environments share.
    """
    if not 0 < fingerprint < 1 << 64:
        raise ValueError(f"fingerprint must be a nonzero uint64, got {fingerprint}")
    if block % WARP != 0 or not WARP <= block <= MAX_BLOCK:
        raise ValueError(f"block must be a multiple of {WARP} of at most {MAX_BLOCK}, got {block}")
    if arena_bytes < 0 or spread < 0:
        raise ValueError(f"arena_bytes and spread must not be negative, got {arena_bytes} and {spread}")
    for spec in buffers:
        if spec.access != "read" and not spec.per_env:
            raise ValueError(
                f"buffer {spec.name}: all environments would write it at once; only per_env buffers may be written"
            )
    names = [spec.name for spec in buffers]
    if len(set(names)) != len(names):
        raise ValueError(f"buffer names must differ, got {names}")
    for op in ops:
        unknown = [name for name in op.arguments if name not in names]
        if unknown:
            raise ValueError(f"kernel {op.kernel.name} takes {unknown}, which are no buffers; there are {names}")
    strings = {op.kernel.name: np.frombuffer(op.kernel.name.encode() + b"\0", np.uint8) for op in ops}
    head = [0] * DESC_FIRST_OP
    head[DESC_OPS], head[DESC_ARENA_BYTES], head[DESC_BLOCK], head[DESC_SPREAD] = len(ops), arena_bytes, block, spread
    functions = functions or Functions.of_driver()
    head[DESC_LAUNCH], head[DESC_COPY], head[DESC_EXPLAIN] = functions.launch, functions.copy, functions.explain
    head[DESC_POINTERS] = WORD * (CALL_FIRST_BUFFER + len(names))
    head[DESC_CALL_BYTES] = head[DESC_POINTERS] + WORD * max([2 + len(op.arguments) for op in ops], default=0)
    desc = np.array([np.uint64(word) for word in head + _describe_ops(ops, names, strings)], np.uint64).view(np.int64)
    return CudaProgram(desc, fingerprint, tuple(buffers), tuple(ops), tuple(strings.values()))


def _describe_ops(ops: Sequence[CudaOp], buffers: Sequence[str], strings: Mapping[str, np.ndarray]) -> list[int]:
    """The descriptor's words from DESC_FIRST_OP on. Ops with the same parameters share a list."""
    words: list[int] = []
    lists: list[int] = []
    places: dict[tuple[str, ...], int] = {}
    first_list = DESC_FIRST_OP + OP_WORDS * len(ops)
    for op in ops:
        if op.arguments not in places:
            places[op.arguments] = WORD * (first_list + len(lists))
            lists += [CALL_ARENA, CALL_NUM_ENVS, *(CALL_FIRST_BUFFER + buffers.index(name) for name in op.arguments)]
        name = int(strings[op.kernel.name].ctypes.data)
        words += [op.kernel.handle, name, 2 + len(op.arguments), places[op.arguments]]
    return words + lists


# --- compiled code ----------------------------------------------------------------------------------------------------


_I32, _I64, _POINTER = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()


def _call_driver(builder: Any, address: Any, arguments: Sequence[Any]) -> Any:
    """The error code of a function of the driver, an int64."""
    kind = ir.FunctionType(_I32, [argument.type for argument in arguments])
    return builder.sext(builder.call(builder.inttoptr(address, kind.as_pointer()), arguments), _I64)


@intrinsic
def _launch_kernel(typingctx, function, kernel, grid, block, stream, parameters):
    """cuLaunchKernel, at the address `function`, of a one-dimensional grid without dynamic shared memory."""

    def codegen(context, builder, signature, args):
        grid, block = (builder.trunc(number, _I32) for number in args[2:4])
        kernel, stream, parameters = (builder.inttoptr(args[i], _POINTER) for i in (1, 4, 5))
        one, none, extra = _I32(1), _I32(0), ir.Constant(_POINTER, None)
        arguments = [kernel, grid, one, one, block, one, one, none, stream, parameters, extra]
        return _call_driver(builder, args[0], arguments)

    return types.int64(*[types.int64] * 6), codegen


@intrinsic
def copy_async(typingctx, function, target, source, size, stream):
    """cuMemcpyDtoDAsync_v2, at the address `function`: copy bytes on the GPU when the stream comes to it."""

    def codegen(context, builder, signature, args):
        return _call_driver(builder, args[0], [*args[1:4], builder.inttoptr(args[4], _POINTER)])

    return types.int64(*[types.int64] * 5), codegen


@intrinsic
def explain_error(typingctx, function, error, text):
    """cuGetErrorString, at the address `function`: writes the address of a C string to the address `text`."""

    def codegen(context, builder, signature, args):
        arguments = [builder.trunc(args[1], _I32), builder.inttoptr(args[2], _POINTER)]
        return _call_driver(builder, args[0], arguments)

    return types.int64(*[types.int64] * 3), codegen


@njit(nogil=True)
def launch_ops(desc: int, call: int, stream: int) -> int:
    """Launch all kernels of the program `desc` with the call record `call`, both addresses.

    Returns 0, or where a launch failed (op + 1) << 32 | error: nothing is launched after it.
    """
    num_envs = load_i64(call + WORD * CALL_NUM_ENVS)
    block = load_i64(desc + WORD * DESC_BLOCK)
    if num_envs <= load_i64(desc + WORD * DESC_SPREAD):
        block = WARP
    grid = (num_envs + block - 1) // block
    launch = load_i64(desc + WORD * DESC_LAUNCH)
    pointers = call + load_i64(desc + WORD * DESC_POINTERS)
    op = desc + WORD * DESC_FIRST_OP
    for index in range(load_i64(desc + WORD * DESC_OPS)):
        parameters = desc + load_i64(op + WORD * OP_PARAMETERS)
        for i in range(load_i64(op + WORD * OP_COUNT)):
            store_i64(pointers + WORD * i, call + WORD * load_i64(parameters + WORD * i))
        error = _launch_kernel(launch, load_i64(op + WORD * OP_KERNEL), grid, block, stream, pointers)
        if error != 0:
            return ((index + 1) << 32) | error
        op += WORD * OP_WORDS
    return 0


def _make_launch(magic: int) -> Callable[[int, int, int], int]:
    # As in native.py: `magic` is in Numba's cache key and ties the code to the content of the files it is of.
    def launch(desc: int, call: int, stream: int) -> int:
        return launch_ops(desc, call, stream) if magic != 0 else -1

    return launch


@functools.cache
def _launch() -> Any:
    magic = source_hash(__file__, intrinsics.__file__)
    return compile_callback(_make_launch(magic), types.int64(types.int64, types.int64, types.int64))


def launch_program(program: CudaProgram, addresses: Sequence[int], arena: int, num_envs: int, stream: int) -> None:
    """Launch a program without JAX. The arrays' context must be current; nothing is waited for.

    Args:
        program: what to run.
        addresses: device addresses of arrays for `program.buffers`, in that order.
        arena: device address of scratch memory of `program.arena_shape(num_envs)` bytes.
        num_envs: environments, at least 1.
        stream: a CUstream; 0 is the default stream.

    Raises:
        ValueError: the number of arrays or environments is wrong.
        CudaError: a launch failed; names the op.
    """
    if len(addresses) != len(program.buffers) or num_envs < 1:
        raise ValueError(
            f"expected {len(program.buffers)} addresses and at least 1 environment, got {len(addresses)} and {num_envs}"
        )
    record = np.zeros(program.desc[DESC_CALL_BYTES] // WORD, np.uint64)
    record[: CALL_FIRST_BUFFER + len(addresses)] = [arena, num_envs, *addresses]
    run = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(_launch().address)
    result = run(program.address, record.ctypes.data, stream)
    if result != 0:
        op, error = (result >> 32) - 1, result & 0xFFFFFFFF
        explain = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)(int(program.desc[DESC_EXPLAIN]))
        text = ctypes.c_char_p()
        explain(error, ctypes.addressof(text))
        said = (text.value or b"unknown").decode()
        raise cuda_driver.CudaError(
            f"launch of kernel {program.ops[op].kernel.name} (op {op} of {len(program.ops)}): {said} (error {error})"
        )
