"""NVIDIA's compilers as libraries: LLVM IR to PTX (libNVVM), PTX to machine code (nvJitLink). No GPU is needed.

They come with numba-cuda, are loaded at the first compilation and release the GIL, so that kernels compile on several
threads at once. Machine code made by a compiler of one CUDA major version loads into every driver of that version, PTX
into drivers at least as new as the compiler only: therefore it is machine code that is kept and loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from llvmlite import ir

DATA_LAYOUT = (
    "e-p:64:64:64-i1:8:8-i8:8:8-i16:16:16-i32:32:32-i64:64:64-i128:128:128-f32:32:32-f64:64:64-"
    "v16:16:16-v32:32:32-v64:64:64-v128:128:128-n16:32:64"
)
TRIPLE = "nvptx64-nvidia-cuda"
PACKAGES = ("cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink", "cuda-toolkit")
_I32, _I64 = ir.IntType(32), ir.IntType(64)


class CompileError(RuntimeError):
    """A kernel was refused by NVVM or the PTX assembler. The message names the kernel and has the compiler's log."""


@dataclass(frozen=True)
class Resources:
    """What a thread of a kernel needs, as the PTX assembler reports it.

    Attributes:
        registers: 32-bit registers.
        stack: bytes of local memory, spilled registers included.
        spill_stores, spill_loads: bytes that instructions write and read because registers ran out; None if the
            assembler, which keeps code that it made before, does not say.
    """

    registers: int
    stack: int
    spill_stores: int | None
    spill_loads: int | None


def arithmetic(emitter: Any, op: str, args: list[Any]) -> Any:
    """A floating-point operation of an Emitter's with PTX's own rounding.

    The assembler contracts PTX's plain mul and add; the .rn forms stay as they are. In single precision the .ftz forms
    take subnormal numbers for zero, which is what XLA's threads do on the CPU: so the bits agree.
    """
    if op == "sub":
        op, args = "add", [args[0], emitter.negative(args[1])]
    elif op == "div" and isinstance(args[0], ir.Constant) and args[0].constant == 1.0:
        op, args = "rcp", args[1:]  # rounds as the division does, in fewer instructions
    name = {"abs": "fabs", "rint": "round"}.get(op, f"{op}.rn")
    return emitter.intrinsic(f"llvm.nvvm.{name}.{'ftz.f' if emitter.item == 4 else 'd'}", args[0].type, args)


def special_register(builder: Any, name: str) -> Any:
    """A special register such as tid.x, an i32."""
    symbol = f"llvm.nvvm.read.ptx.sreg.{name}"
    known = builder.module.globals.get(symbol) or ir.Function(builder.module, ir.FunctionType(_I32, []), symbol)
    return builder.call(known, [])


def _void(builder: Any, symbol: str) -> Any:
    """Call an intrinsic that takes and returns nothing."""
    known = builder.module.globals.get(symbol)
    return builder.call(known or ir.Function(builder.module, ir.FunctionType(ir.VoidType(), []), symbol), [])


def barrier(builder: Any, meeting: tuple[Any, Any] | None = None) -> None:
    """Wait for all threads of the block that have not left the kernel, or for so many at the barrier of a number."""
    if meeting is None:
        _void(builder, "llvm.nvvm.barrier0")
        return
    kind = ir.FunctionType(ir.VoidType(), [_I32, _I32])
    builder.asm(kind, "bar.sync $0, $1;", "r,r,~{memory}", list(meeting), True)


def leave_kernel(builder: Any) -> None:
    """End this thread; barriers no longer wait for it (PTX ISA, `exit`). A branch to the end would not be the same."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "exit;", "", [], True)


def keep_once(builder: Any) -> None:
    """An empty instruction that must not be copied, so that the compiler unrolls no loop around it."""
    call = builder.asm(ir.FunctionType(ir.VoidType(), []), "", "", [], True)
    set.add(call.attributes, "noduplicate")  # LLVM has it, llvmlite's list of attributes does not


def opaque(builder: Any, address: Any) -> Any:
    """An i8 pointer to global memory, of which the compiler cannot see where it comes from.

    It would take it apart, and add its parts up again at every access with an index that is known at run time only.
    """
    kind = ir.FunctionType(_I64, [_I64])
    number = builder.asm(kind, "mov.b64 $0, $1;", "=l,l", [builder.ptrtoint(address, _I64)], False)
    return builder.inttoptr(number, address.type)


def stamp_time(builder: Any, op: str, address: Any) -> None:
    """Replace the uint64 at a global address by its "min" or "max" with the GPU's clock, in nanoseconds."""
    kind = ir.FunctionType(ir.VoidType(), [address.type])
    text = f"{{ .reg .u64 t; mov.u64 t, %globaltimer; red.global.{op}.u64 [$0], t; }}"
    builder.asm(kind, text, "l,~{memory}", [address], True)


def new_module(name: str) -> Any:
    """A module in NVVM's dialect."""
    nvvm = _libraries()[0]
    module = ir.Module(name=name)
    module.triple, module.data_layout = TRIPLE, DATA_LAYOUT
    version = module.add_metadata([_I32(number) for number in nvvm.ir_version()])
    module.add_named_metadata("nvvmir.version", version)
    return module


def mark_kernel(function: Any, threads: int = 0, blocks: int = 0) -> None:
    """Make a function of a module a kernel.

    Args:
        function: of llvmlite.
        threads: of a block at most; 0: any number.
        blocks: so many must fit a multiprocessor, whatever registers have to be spilled for it; 0: no matter.
    """
    module = function.module
    words = [function, ir.MetaDataString(module, "kernel"), _I32(1)]
    words += [ir.MetaDataString(module, "maxntidx"), _I32(threads)] if threads else []
    words += [ir.MetaDataString(module, "minctasm"), _I32(blocks)] if blocks else []
    module.add_named_metadata("nvvm.annotations", module.add_metadata(words))


def new_kernel(symbol: str, arguments: int) -> tuple[Any, Any]:
    """A module with one kernel of so many int64 arguments, and that function."""
    module = new_module(symbol)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * arguments), symbol)
    mark_kernel(function)
    return module, function


def _libraries() -> tuple[Any, Any]:
    try:
        from cuda.bindings import nvjitlink, nvvm
    except ImportError as error:
        raise ImportError(
            "the CUDA backend needs numba-cuda and NVIDIA's compilers: pip install 'brax-concurrent[cuda13]' "
            "(cuda12 for a driver older than 580)"
        ) from error
    return nvvm, nvjitlink


def toolchain() -> str:
    """The installed packages that compiled code depends on; loads none of them."""
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(versions)


def compiler_of(ptx: str) -> str:
    """The version of NVVM that a text of PTX says that it is from, such as "13.0.88"."""
    found = re.search(r"Cuda compilation tools, release [\d.]+, V([\d.]+)", ptx)
    return found[1] if found else "unknown"


def inlined(text: str, symbol: str) -> str:
    """A module whose function of that name is written into the functions of other modules that call it.

    The modules must come in the order in which they call each other: what nobody has called yet is dropped.
    """
    pattern = rf"define (\w+) (@\"{re.escape(symbol)}\"\([^)]*\))"
    changed, count = re.subn(pattern, r"define linkonce_odr \1 \2 alwaysinline", text)
    if count != 1:
        raise CompileError(f"expected one function {symbol} in its module, got {count}")
    return changed


FLUSHED = ("-ftz=1",)  # subnormal numbers are taken for zero in single precision, as XLA does on the CPU


def compile_ptx(
    text: str | Sequence[str],
    name: str,
    compute_capability: tuple[int, int],
    options: Sequence[str] = FLUSHED,
    library: bytes = b"",
) -> str:
    """PTX of a module, or of several as one, in NVVM's dialect of LLVM IR.

    Args:
        text: the module or modules.
        name: what messages call it.
        compute_capability: of the device that it is for.
        options: of NVVM's, besides the device and the level of optimisation.
        library: a module of functions that the others may call, such as libdevice.

    Raises:
        ImportError: NVIDIA's compilers are not installed.
        CompileError: NVVM refuses the module, or does not know the device.
    """
    nvvm, _ = _libraries()
    options = [f"-arch=compute_{compute_capability[0]}{compute_capability[1]}", "-opt=3", *options]
    program = nvvm.create_program()
    try:
        for index, module in enumerate([text] if isinstance(text, str) else text):
            data = module.encode()
            nvvm.add_module_to_program(program, data, len(data), f"{name}.{index}")
        if library:
            nvvm.lazy_add_module_to_program(program, library, len(library), "library")
        try:
            nvvm.compile_program(program, len(options), options)
        except nvvm.nvvmError as error:
            log = bytearray(nvvm.get_program_log_size(program))
            nvvm.get_program_log(program, log)
            raise CompileError(f"kernel {name}: NVVM says {error}: {_text(log)}") from error
        result = bytearray(nvvm.get_compiled_result_size(program))
        nvvm.get_compiled_result(program, result)
        return _text(result)
    finally:
        nvvm.destroy_program(program)


def assemble(ptx: str, name: str, compute_capability: tuple[int, int]) -> tuple[bytes, Resources]:
    """Machine code (a cubin) of a text of PTX with one kernel, and what that needs.

    Raises:
        ImportError: NVIDIA's compilers are not installed.
        CompileError: the assembler refuses the PTX. It must be at least as new as the NVVM that wrote it.
    """
    _, linker = _libraries()
    options = [f"-arch=sm_{compute_capability[0]}{compute_capability[1]}", "-verbose", "-Xptxas=-v"]
    data = ptx.encode() + b"\0"
    handle = linker.create(len(options), options)
    try:
        try:
            linker.add_data(handle, linker.InputType.PTX, data, len(data), name)
            linker.complete(handle)
        except linker.nvJitLinkError as error:
            log = bytearray(linker.get_error_log_size(handle))
            linker.get_error_log(handle, log)
            versions = f"NVVM {compiler_of(ptx)}, nvJitLink {'.'.join(map(str, linker.version()))}"
            raise CompileError(f"kernel {name} ({versions}): nvJitLink says {error}: {_text(log)}") from error
        cubin = bytearray(linker.get_linked_cubin_size(handle))
        linker.get_linked_cubin(handle, cubin)
        log = bytearray(linker.get_info_log_size(handle))
        linker.get_info_log(handle, log)
        return bytes(cubin), _resources(_text(log), name)
    finally:
        linker.destroy(handle)


def _resources(log: str, name: str) -> Resources:
    registers = re.search(r"used (\d+) registers", log, re.IGNORECASE)
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is not None and spills is not None:
        return Resources(int(registers[1]), *(int(number) for number in spills.groups()))
    stack = re.search(r"(\d+) stack", log)  # what a second linking of the same code says: no word of spills
    if registers is None or stack is None:
        raise CompileError(f"kernel {name}: nvJitLink does not say what it needs: {log!r}")
    return Resources(int(registers[1]), int(stack[1]), None, None)


def _text(data: bytearray) -> str:
    return bytes(data).rstrip(b"\0").decode(errors="replace").strip()
