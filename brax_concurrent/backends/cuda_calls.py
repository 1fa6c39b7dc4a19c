"""The CUDA driver's functions as compiled code calls them: by address, without Python.

Each takes the address of its function first, handles and pointers as int64, and returns the driver's error code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from brax_concurrent.backends import cuda_driver

I32, I64, POINTER = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()

SUCCESS, NOT_READY = 0, 600  # CUresult
NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


@dataclass(frozen=True)
class Functions:
    """Addresses of the driver's functions that programs call; in a program, words in this order.

    A word of 0 is a function that the driver does not have.
    """

    launch: int
    copy: int
    explain: int
    device: int = 0
    record: int = 0
    wait: int = 0
    query: int = 0
    graph_create: int = 0
    graph_add: int = 0
    graph_instantiate: int = 0
    graph_set: int = 0
    graph_launch: int = 0
    graph_destroy: int = 0
    graph_drop: int = 0
    fill: int = 0
    read: int = 0

    @classmethod
    def of_driver(cls) -> Functions:
        """Those of the CUDA driver."""
        return cls(*map(cuda_driver.address, DRIVER_NAMES))

    def words(self) -> np.ndarray:
        """(functions,) int64."""
        return np.array([getattr(self, f.name) for f in fields(self)], np.int64)


def error_text(explain: int, error: int) -> str:
    """What `cuGetErrorString`, at the address `explain`, says of an error code."""
    text = ctypes.c_char_p()
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)(explain)(error, ctypes.addressof(text))
    return (text.value or b"unknown").decode()


DRIVER_NAMES = (
    "cuLaunchKernel",
    "cuMemcpyDtoDAsync_v2",
    "cuGetErrorString",
    "cuCtxGetDevice",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuEventQuery",
    "cuGraphCreate",
    "cuGraphAddKernelNode_v2",
    "cuGraphInstantiateWithFlags",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphLaunch",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuMemsetD32Async",
    "cuMemcpyDtoH_v2",
)
# The place of each function in `Functions.words`.
F_LAUNCH, F_COPY, F_EXPLAIN, F_DEVICE, F_RECORD, F_WAIT, F_QUERY = range(7)
F_GRAPH_CREATE, F_GRAPH_ADD, F_GRAPH_INSTANTIATE, F_GRAPH_SET, F_GRAPH_LAUNCH, F_GRAPH_DESTROY, F_GRAPH_DROP = range(
    7, 14
)
F_FILL, F_READ = 14, 15


def _pointer(builder: Any, word: Any) -> Any:
    return builder.inttoptr(word, POINTER)


def _call(builder: Any, address: Any, arguments: Sequence[Any]) -> Any:
    kind = ir.FunctionType(I32, [argument.type for argument in arguments])
    return builder.sext(builder.call(builder.inttoptr(address, kind.as_pointer()), arguments), I64)


def _codegen(convert: Callable[[Any, Sequence[Any]], list[Any]]) -> Any:
    """Code that calls the function at the first argument with what `convert(builder, the others)` makes of them."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, args[0], convert(builder, args[1:]))

    return codegen


@intrinsic
def launch_kernel(typingctx, function, kernel, grid, block, stream, parameters):
    """cuLaunchKernel of a one-dimensional grid without dynamic shared memory."""

    def convert(builder, args):
        kernel, stream, parameters = (_pointer(builder, args[i]) for i in (0, 3, 4))
        grid, block = builder.trunc(args[1], I32), builder.trunc(args[2], I32)
        one, none = I32(1), I32(0)
        return [kernel, grid, one, one, block, one, one, none, stream, parameters, ir.Constant(POINTER, None)]

    return types.int64(*[types.int64] * 6), _codegen(convert)


@intrinsic
def copy_async(typingctx, function, target, source, size, stream):
    """cuMemcpyDtoDAsync_v2: copy bytes on the GPU when the stream comes to it."""
    return types.int64(*[types.int64] * 5), _codegen(lambda b, args: [*args[:3], _pointer(b, args[3])])


@intrinsic
def fill_async(typingctx, function, target, value, words, stream):
    """cuMemsetD32Async: fill int32 words on the GPU when the stream comes to it."""

    def convert(builder, args):
        return [args[0], builder.trunc(args[1], I32), args[2], _pointer(builder, args[3])]

    return types.int64(*[types.int64] * 5), _codegen(convert)


@intrinsic
def read_memory(typingctx, function, target, source, size):
    """cuMemcpyDtoH_v2: copy bytes from the GPU to `target`, and wait for that."""
    return types.int64(*[types.int64] * 4), _codegen(lambda b, args: [_pointer(b, args[0]), *args[1:]])


@intrinsic
def explain_error(typingctx, function, error, text):
    """cuGetErrorString: writes the address of a C string to the address `text`."""
    return types.int64(*[types.int64] * 3), _codegen(lambda b, args: [b.trunc(args[0], I32), _pointer(b, args[1])])


@intrinsic
def current_device(typingctx, function, device):
    """cuCtxGetDevice: writes an int32 to the address `device`."""
    return types.int64(*[types.int64] * 2), _codegen(lambda b, args: [_pointer(b, args[0])])


@intrinsic
def record_event(typingctx, function, event, stream):
    """cuEventRecord: the event is done when the stream has done what was put onto it before."""
    return types.int64(*[types.int64] * 3), _codegen(lambda b, args: [_pointer(b, x) for x in args])


@intrinsic
def wait_event(typingctx, function, stream, event):
    """cuStreamWaitEvent: what is put onto the stream from now on waits for the event's last recording."""
    return types.int64(*[types.int64] * 3), _codegen(lambda b, args: [*(_pointer(b, x) for x in args), I32(0)])


@intrinsic
def query_event(typingctx, function, event):
    """cuEventQuery: 0, or NOT_READY, or an error."""
    return types.int64(*[types.int64] * 2), _codegen(lambda b, args: [_pointer(b, args[0])])


@intrinsic
def create_graph(typingctx, function, graph):
    """cuGraphCreate: writes a handle to the address `graph`."""
    return types.int64(*[types.int64] * 2), _codegen(lambda b, args: [_pointer(b, args[0]), I32(0)])


@intrinsic
def add_kernel_node(typingctx, function, node, graph, upstream, count, parameters):
    """cuGraphAddKernelNode_v2: writes a handle to the address `node`; `upstream` is an array of `count` nodes."""

    def convert(builder, args):
        return [*(_pointer(builder, x) for x in args[:3]), args[3], _pointer(builder, args[4])]

    return types.int64(*[types.int64] * 6), _codegen(convert)


@intrinsic
def instantiate_graph(typingctx, function, executable, graph):
    """cuGraphInstantiateWithFlags: writes a handle to the address `executable`."""
    return types.int64(*[types.int64] * 3), _codegen(
        lambda b, args: [_pointer(b, args[0]), _pointer(b, args[1]), I64(0)]
    )


@intrinsic
def set_kernel_node(typingctx, function, executable, node, parameters):
    """cuGraphExecKernelNodeSetParams_v2: for replays from now on."""
    return types.int64(*[types.int64] * 4), _codegen(lambda b, args: [_pointer(b, x) for x in args])


@intrinsic
def launch_graph(typingctx, function, executable, stream):
    """cuGraphLaunch."""
    return types.int64(*[types.int64] * 3), _codegen(lambda b, args: [_pointer(b, x) for x in args])


@intrinsic
def destroy_graph(typingctx, function, graph):
    """cuGraphDestroy of a description, or cuGraphExecDestroy of what was instantiated from it."""
    return types.int64(*[types.int64] * 2), _codegen(lambda b, args: [_pointer(b, args[0])])
