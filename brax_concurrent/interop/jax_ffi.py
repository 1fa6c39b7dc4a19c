"""Calling a native program from JAX: the only crossing from JAX to native code.

`ffi_call` works eagerly and under `jit`, `lax.scan`, `shard_map` and `vmap`. Arrays that a program carries
are updated in place where the caller gives them up (the carry of a scan, a donated argument) and copied where
the caller keeps them, so calls are pure functions as JAX means it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brax_concurrent.backends.cpu_program import BufferSpec, CpuProgram
from brax_concurrent.backends.cuda_program import CudaProgram
from brax_concurrent.backends.native import (
    DESC_ARENA_BYTES,
    DESC_FIRST_OP,
    DESC_GROUP,
    DESC_INTERLEAVE,
    DESC_OPS,
    DESC_ORDERED,
    DESC_POISON,
    DESC_STEPS,
    DESC_THREADS,
    DESC_TIMEOUT,
    DESC_WINDOW,
)
from brax_concurrent.interop import ffi_cuda, ffi_frame, ffi_handler

Program = CpuProgram | CudaProgram

_WINDOW = (DESC_WINDOW, DESC_GROUP, DESC_INTERLEAVE, DESC_ORDERED, DESC_TIMEOUT)

_lock = threading.Lock()
# XLA keeps handlers and executables for as long as the process lives, so all that they use is kept as well:
# by backend and fingerprint, the program, its signature and its buffers' names as C strings.
_registered: dict[tuple[type, int], tuple[Program, np.ndarray, list[np.ndarray]]] = {}


def _target(program: Program) -> str:
    """The name of a program's handler, which is compiled and registered with XLA if it is the first of its kind."""
    cuda = isinstance(program, CudaProgram)
    return _registered_target(cuda, isinstance(program, CudaProgram) and program.captured)


@functools.cache
def _registered_target(cuda: bool, captured: bool) -> str:
    ours, other, module = ("CUDA", "cpu", ffi_cuda) if cuda else ("cpu", "CUDA", ffi_handler)
    name, code, _ = ffi_cuda.handler(captured) if cuda else ffi_handler.handler()
    for platform, function in ((ours, code), (other, module.refusal())):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function.address), platform=platform, api_version=1)
    return name


def _signature(program: Program) -> tuple[np.ndarray, list[np.ndarray]]:
    """A program's SIG_* words, and the C strings that they point to."""
    names = [np.frombuffer(spec.name.encode() + b"\0", np.uint8) for spec in program.buffers]
    results = len(program.outputs) + isinstance(program, CudaProgram)  # with scratch memory
    words = [program.address, len(program.inputs), results, len(program.buffers)]
    arg = ret = 0
    for spec, name in zip(program.buffers, names, strict=True):
        code, item_bytes = ffi_frame.DTYPES[spec.dtype]
        words += [
            -1 if spec.access == "write" else arg,
            -1 if spec.access == "read" else ret,
            spec.item_bytes * (program.steps if spec.per_step else 1) if spec.per_env else 0,
            0 if spec.per_env else spec.item_bytes,
            code,
            item_bytes,
            int(name.ctypes.data),
        ]
        arg += spec.access != "write"
        ret += spec.access != "read"
    return np.array(words, np.int64), names


def _content(program: Program) -> tuple[object, ...]:
    """What must be equal in programs of one fingerprint: all but addresses."""
    if isinstance(program, CudaProgram):
        return program.content()
    count = int(program.desc[DESC_OPS])
    predicates = program.desc[DESC_FIRST_OP : DESC_FIRST_OP + 2 * count][1::2].tolist()
    settings = [int(program.desc[word]) for word in (DESC_ARENA_BYTES, DESC_THREADS, DESC_POISON, DESC_STEPS, *_WINDOW)]
    return program.buffers, predicates, settings


def register(program: Program) -> str:
    """Make a program known to the handler, for ever; returns the handler's name.

    A second program of the same fingerprint is the same program: the first one goes on serving both.

    Raises:
      ValueError: a buffer's dtype is not one of those that can cross, or a different program has the
        fingerprint.
    """
    cuda = isinstance(program, CudaProgram)
    key = (type(program), program.fingerprint)
    with _lock:
        known = _registered.get(key)
        if known is not None:
            if _content(known[0]) != _content(program):
                raise ValueError(
                    f"two different programs have the fingerprint {program.fingerprint:016x}: "
                    f"{_content(known[0])} and {_content(program)}"
                )
            return _target(program)
        for spec in program.buffers:
            if spec.dtype not in ffi_frame.DTYPES:
                raise ValueError(f"buffer {spec.name}: dtype must be one of {list(ffi_frame.DTYPES)}, got {spec.dtype}")
        target = _target(program)
        signature, names = _signature(program)
        module = ffi_cuda if cuda else ffi_handler
        module.handler()[2].put(program.fingerprint, int(signature.ctypes.data))
        _registered[key] = (program, signature, names)
        return target


def serving(program: Program) -> Program:
    """The program that runs when JAX calls this one: the first that was registered of its fingerprint, or it itself."""
    with _lock:
        known = _registered.get((type(program), program.fingerprint))
    return program if known is None else known[0]


def _varying_axes(arrays: Sequence[jax.Array]) -> tuple[Any, ...]:
    """The mesh axes along which the devices of a shard_map hold different parts of some of the arrays."""
    types = [getattr(jax.typeof(array), "manual_axis_type", None) for array in arrays]
    return tuple(frozenset[Any]().union(*(getattr(each, "varying", ()) for each in types)))


def _describe_outputs(program: Program, num_envs: int, axes: tuple[Any, ...]) -> list[Any]:
    """Objects with each output's shape, dtype and, under shard_map, the axes along which it varies."""
    steps = program.steps
    shapes: list[tuple[tuple[int, ...], str]] = [(s.array_shape(num_envs, steps), s.dtype) for s in program.outputs]
    if isinstance(program, CudaProgram):
        shapes.append(((program.scratch_bytes(num_envs),), "uint8"))
    if not axes:
        return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    # A traced array is the one public way to say it; nothing but its type is used, so it is never made.
    return [jax.lax.pcast(jnp.zeros(shape, dtype), axes, to="varying") for shape, dtype in shapes]


@functools.cache
def _compiled(program: Program, num_envs: int) -> Callable[..., tuple[jax.Array, ...]]:
    """A jitted call of the program. An eager call takes jit's fast path; under a trace it is inlined."""
    target = register(program)
    for spec in program.buffers:
        if jax.dtypes.canonicalize_dtype(spec.dtype) != spec.dtype:
            raise ValueError(f"buffer {spec.name}: {spec.dtype} needs jax.config.update('jax_enable_x64', True)")
    fingerprint = np.int64(ffi_frame.as_int64(program.fingerprint))
    arg_of = {spec.name: index for index, spec in enumerate(program.inputs)}
    carried = [(index, spec.name) for index, spec in enumerate(program.outputs) if spec.access == "readwrite"]
    aliases = {arg_of[name]: index for index, name in carried}

    @jax.custom_jvp
    def call(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        outputs = _describe_outputs(program, num_envs, _varying_axes(inputs))
        run = jax.ffi.ffi_call(target, outputs, vmap_method="sequential", input_output_aliases=aliases)
        # The attributes that the handler expects. Content only: executables outlive this process.
        results = run(*inputs, num_envs=np.int64(num_envs), program=fingerprint)[: len(program.outputs)]
        # Without a barrier XLA for GPUs makes a second call of it for results that a scan stacks (its fusion of custom
        # calls with dynamic-update-slice), and a policy's rollout takes twice as long.
        return tuple(jax.lax.optimization_barrier(results) if isinstance(program, CudaProgram) else results)

    call.defjvp(_no_derivatives)
    return jax.jit(call, inline=True)


def _no_derivatives(*_: Any) -> Any:
    raise ValueError(
        "there are no derivatives of a control step, a reset or a physics step: gradients of what it returns are not "
        "to be had, but policy gradients need none; jax.lax.stop_gradient on its arguments keeps others out of it"
    )


def _num_envs(program: Program, inputs: Sequence[jax.Array]) -> int:
    for spec, array in zip(program.inputs, inputs, strict=True):
        if spec.per_env and not spec.per_step:
            if not array.shape:
                raise ValueError(f"input {spec.name}: expected a leading axis of environments, got a scalar")
            return int(array.shape[0])
    raise ValueError("no input has an axis of environments: give num_envs")


def _check_input(spec: BufferSpec, array: jax.Array, num_envs: int, steps: int) -> None:
    shape = spec.array_shape(num_envs, steps)
    if tuple(array.shape) != shape or array.dtype != spec.dtype:
        raise ValueError(f"input {spec.name}: expected {spec.dtype}{list(shape)}, got {array.dtype}{list(array.shape)}")


def _placed(program: Program) -> contextlib.AbstractContextManager[Any]:
    """Make the CPU the default device for an eager call of its programs."""
    if isinstance(program, CudaProgram) or jax.default_backend() == "cpu":
        return contextlib.nullcontext()
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def ffi_call(program: Program, inputs: Sequence[jax.Array], num_envs: int | None = None) -> tuple[jax.Array, ...]:
    """Run a program on JAX arrays, on the device that it was made for.

    A program for the CPU runs there also where JAX's default device is another, unless it is inside a computation that
    JAX runs elsewhere, or an array is committed elsewhere.

    Args:
      program: what to run; `register`ed with its first call.
      inputs: one array per `program.inputs`, in that order, of exactly that shape, `spec.array_shape`, and dtype.
      num_envs: environments; None: a composite's own number, else the length of the first per-environment input.
        Static.

    Returns:
      One array per `program.outputs`, in that order. `vmap` makes one call after another; it is correct, but
      more environments in one call are faster. There are no derivatives: `grad` raises.

    Raises:
      ValueError: the number, a shape or a dtype of the inputs is not what the program expects.
    """
    if len(inputs) != len(program.inputs):
        names = ", ".join(spec.name for spec in program.inputs)
        raise ValueError(f"expected {len(program.inputs)} inputs ({names}), got {len(inputs)}")
    fixed = program.num_envs
    if num_envs is None:
        num_envs = fixed or _num_envs(program, inputs)
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, got {num_envs}")
    if fixed not in (None, num_envs):
        raise ValueError(f"num_envs must be {fixed}, all environments of the composite, got {num_envs}")
    call = _compiled(program, num_envs)
    for spec, array in zip(program.inputs, inputs, strict=True):
        _check_input(spec, array, num_envs, program.steps)
    with _placed(program):
        return call(*inputs)
