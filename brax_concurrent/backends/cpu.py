"""The CPU backend: lane programs to machine code through LLVM, kept on disk.

A compiled kernel is `void kernel(char *arena, char **buffers, int64_t first_env, int64_t num_envs)`: it processes the
tile of 32 environments that starts at `first_env`.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite
from llvmlite import binding, ir

from brax_concurrent.backends.llvm import I8, I32, I64, TILE, Emitter
from brax_concurrent.backends.objects import ObjectCache
from brax_concurrent.backends.program import touched_arrays

_lock = threading.Lock()
_loaded: dict[str, int] = {}  # symbol -> address; code is never unloaded
_engines: list[Any] = []


@cache
def _target() -> tuple[str, str]:
    """(CPU name, features) of this machine."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


def vector_lanes(precision: str) -> int:
    """Environments per machine vector on this CPU."""
    features = _target()[1].split(",")
    width = 64 if "+avx512f" in features else 32
    return width // (4 if precision == "f32" else 8)


def kernel_ir(program: Any, symbol: str, lanes: int, grouped: bool = False) -> str:
    """LLVM IR of one kernel: a loop over the machine vectors of a tile. `grouped` as for compile_programs."""
    module = ir.Module(name=symbol)
    pointer = ir.PointerType(I8)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer, ir.PointerType(pointer), I64, I64]), symbol)
    arena, buffers, first, num_envs = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    # Only what it touches: then streams that have a kernel in common, and its arrays in common places, share its code.
    touched = touched_arrays(program)
    user = {n: builder.load(builder.gep(buffers, [I64(i)])) for i, n in enumerate(program.user) if n in touched}
    slot = builder.alloca(I64)
    builder.store(I64(0), slot)
    head, body, done = (builder.append_basic_block(x) for x in ("tile", "lanes", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    lane = builder.load(slot)
    env = builder.add(first, lane)
    more = builder.and_(builder.icmp_signed("<", lane, I64(TILE)), builder.icmp_signed("<", env, num_envs))
    builder.cbranch(more, body, done)
    builder.position_at_end(body)
    order = None
    if grouped:
        row = builder.gep(arena, [builder.add(I64(program.layout.arena_bytes), builder.mul(lane, I64(4)))])
        order = builder.bitcast(row, ir.PointerType(I32))
    Emitter(builder, program, lanes, arena, lane, env, num_envs, user, order=order).emit()
    builder.store(builder.add(lane, I64(lanes)), slot)
    builder.branch(head)
    builder.position_at_end(done)
    builder.ret_void()
    return str(module)


def target_machine() -> Any:
    """What emits code for this machine."""
    cpu, features = _target()
    return binding.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=2, jit=True)


def _compile(text: str) -> bytes:
    context = binding.create_context()
    module = binding.parse_assembly(text, context)
    module.verify()
    machine = target_machine()
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = False
    options.loop_unrolling = False
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return machine.emit_object(module)


def _load(symbol: str, code: bytes) -> int:
    """Put machine code into this process and return the kernel's address."""
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(symbol)


@dataclass(frozen=True)
class Code:
    """A kernel's machine code: the symbol is a hash of what it was made from."""

    symbol: str
    object: bytes

    @property
    def address(self) -> int:
        """Where it lies in this process; loaded at the first call, for ever."""
        with _lock:
            if self.symbol not in _loaded:
                _loaded[self.symbol] = _load(self.symbol, self.object)
            return _loaded[self.symbol]


def target() -> str:
    """What machine code depends on besides its source: CPU, its features, and LLVM."""
    return "|".join((*_target(), llvmlite.__version__))


def compile_programs(
    specialized: Any, cache_directory: str | os.PathLike[str] | None = None, *, grouped: bool = False
) -> Mapping[str, Code]:
    """Machine code of all kernels of a specialised stream, compiled now or taken from the disk.

    Args:
        specialized: what kernels.specialize.specialize returned.
        cache_directory: where machine code is kept; None: the default (backends/objects.py).
        grouped: whether a tile's environments are those that the 32 int32 behind its arena name, rather than the 32
            from `first_env` on; lanes without an environment must have the number of one that there is.
    """
    lanes = vector_lanes(specialized.layout.precision)
    store = ObjectCache(cache_directory)

    def build(item: tuple[str, Any]) -> tuple[str, Code]:
        name, program = item
        text = kernel_ir(program, "kernel", lanes, grouped)
        symbol = "k" + hashlib.sha256((target() + text).encode()).hexdigest()[:24]
        code = store.get(symbol)
        if code is None:
            code = _compile(text.replace('@"kernel"', f'@"{symbol}"'))
            store.put(symbol, code)
        return name, Code(symbol, code)

    # Long programs first: they decide how long two threads take.
    programs = sorted(specialized.programs.items(), key=lambda item: -len(item[1].root.body))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(pool.map(build, programs))
