"""What code that runs on a GPU is written with, for functions that Numba compiles: memory, warps, barriers, clocks.

Addresses are int64: of global memory, or offsets into the shared memory of a block. Loads and stores are volatile:
each is carried out where it stands, since other threads may have changed what is read. They order nothing else; for
that there is `fence_block`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import cuda, types
from numba.cuda.compiler import compile_cuda
from numba.cuda.extending import intrinsic

device_function = cuda.jit(device=True, inline="always")
"""Decorator of functions that run on a GPU, called by others: written into each place where they are called, so that
none needs a GPU to be compiled."""

_LETTERS = {ir.IntType(32): "r", ir.IntType(64): "l"}
_TYPES = {32: (types.int32, ir.IntType(32)), 64: (types.int64, ir.IntType(64)), 0: (types.void, ir.VoidType())}


def _assembly(
    name: str, text: str, result: int, arguments: Sequence[int], doc: str, memory: bool = True, together: bool = False
) -> Any:
    """A function that is a piece of PTX.

    Args:
        name: what it is called.
        text: the PTX, with $0, $1 ... for the result, if there is one, and the arguments.
        result, arguments: their bits, 32 or 64, integers; 0: no result.
        doc: its docstring.
        memory: whether it touches memory or other threads; False: equal calls may be merged.
        together: whether threads meet in it: the compiler must not copy it into branches that some of them take.
    """
    kinds = [_TYPES[bits] for bits in arguments]
    returned, low = _TYPES[result]
    letters = [_LETTERS[kind] for _, kind in kinds]
    constraints = ",".join(([f"={_LETTERS[low]}"] if result else []) + letters + (["~{memory}"] if memory else []))

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        done = builder.asm(ir.FunctionType(low, [v.type for v in values]), text, constraints, list(values), memory)
        if together:
            set.add(done.attributes, "convergent")  # LLVM has it, llvmlite's list of attributes does not
        return done if result else context.get_dummy_value()

    names = [f"a{i}" for i in range(len(arguments))]
    scope: dict[str, Any] = {
        "signature": returned(*(kind for kind, _ in kinds)),
        "codegen": codegen,
    }
    exec(f"def {name}({', '.join(['typingctx', *names])}):\n    return signature, codegen", scope)  # by Numba's rule
    function = scope[name]
    function.__doc__ = doc
    return intrinsic(function)


load_shared = _assembly("load_shared", "ld.volatile.shared.b32 $0, [$1];", 32, [64], "An int32 of shared memory.")
store_shared_word = _assembly(
    "store_shared_word", "st.volatile.shared.b64 [$0], $1;", 0, [64, 64], "Write an int64 there."
)
store_shared = _assembly("store_shared", "st.volatile.shared.b32 [$0], $1;", 0, [64, 32], "Write an int32 there.")
load_shared_word = _assembly(
    "load_shared_word", "ld.volatile.shared.b64 $0, [$1];", 64, [64], "An int64 of shared memory."
)
exchange_shared = _assembly(
    "exchange_shared", "atom.shared.exch.b32 $0, [$1], $2;", 32, [64, 32], "Write an int32 there; what was there."
)
add_shared = _assembly(
    "add_shared", "atom.shared.add.u32 $0, [$1], $2;", 32, [64, 32], "Add to an int32 there; what was there."
)
max_shared = _assembly("max_shared", "red.shared.max.s32 [$0], $1;", 0, [64, 32], "Make an int32 there at least this.")
load_global = _assembly("load_global", "ld.volatile.global.b32 $0, [$1];", 32, [64], "An int32 of global memory.")
load_acquire = _assembly(
    "load_acquire",
    "ld.acquire.gpu.global.b32 $0, [$1];",
    32,
    [64],
    """An int32 of global memory. What was above the `count_release` that wrote it is seen below.

    No dearer than `load_global`, but it empties the multiprocessor's L1: others that run there read anew.
    """,
)
load_acquire_word = _assembly(
    "load_acquire_word", "ld.acquire.gpu.global.b64 $0, [$1];", 64, [64], "The same for an int64, and any release."
)
load_table = _assembly(
    "load_table", "ld.global.nc.b32 $0, [$1];", 32, [64], "An int32 of global memory that nobody writes.", memory=False
)
load_global_word = _assembly(
    "load_global_word", "ld.volatile.global.b64 $0, [$1];", 64, [64], "An int64 of global memory."
)
load_constant = _assembly(
    "load_constant", "ld.global.b32 $0, [$1];", 32, [64], "An int32 that nobody writes meanwhile.", memory=False
)
load_constant_word = _assembly(
    "load_constant_word", "ld.global.b64 $0, [$1];", 64, [64], "An int64 that nobody writes meanwhile.", memory=False
)
store_global = _assembly("store_global", "st.volatile.global.b32 [$0], $1;", 0, [64, 32], "Write an int32 there.")
store_global_word = _assembly(
    "store_global_word", "st.volatile.global.b64 [$0], $1;", 0, [64, 64], "Write an int64 there."
)
add_global = _assembly(
    "add_global", "atom.global.add.u32 $0, [$1], $2;", 32, [64, 32], "Add to an int32 there; what was there."
)
swap_global = _assembly(
    "swap_global",
    "atom.global.cas.b32 $0, [$1], $2, $3;",
    32,
    [64, 32, 32],
    "Write $3 to an int32 there if it is $2; what was there.",
)
swap_global_word = _assembly(
    "swap_global_word",
    "atom.global.cas.b64 $0, [$1], $2, $3;",
    64,
    [64, 64, 64],
    "Write $3 to an int64 there if it is $2; what was there.",
)
count_release = _assembly(
    "count_release",
    "red.release.gpu.global.add.u32 [$0], $1;",
    0,
    [64, 32],
    "Add to an int32 there; nothing comes back. Who acquires that sees what is above, and what was above what it saw.",
)
set_global = _assembly(
    "set_global", "red.global.or.b32 [$0], $1;", 0, [64, 32], "Set these bits of an int32 there; nothing comes back."
)
barrier = _assembly(
    "barrier",
    "bar.sync $0, $1;",
    0,
    [32, 32],
    "Wait until so many threads have come to this barrier, 0 to 15.",
    together=True,
)
clock = _assembly("clock", "mov.u64 $0, %globaltimer;", 64, [], "Nanoseconds of the GPU's clock.")
multiprocessor = _assembly("multiprocessor", "mov.u32 $0, %smid;", 32, [], "The number of this multiprocessor.")
thread_index = _assembly("thread_index", "mov.u32 $0, %tid.x;", 32, [], "This thread's number in its block.", False)
block_threads = _assembly("block_threads", "mov.u32 $0, %ntid.x;", 32, [], "Threads of a block.", False)
remainder = _assembly(
    "remainder", "rem.u32 $0, $1, $2;", 32, [32, 32], "$1 modulo $2, unsigned: no call of a function.", False
)
block_index = _assembly("block_index", "mov.u32 $0, %ctaid.x;", 32, [], "This block's number.", False)
grid_blocks = _assembly("grid_blocks", "mov.u32 $0, %nctaid.x;", 32, [], "Blocks of the grid.", False)
fence_block = _assembly("fence_block", "membar.cta;", 0, [], "What is above is seen by the block before what is below.")
fence_device = _assembly("fence_device", "membar.gl;", 0, [], "The same for all blocks.")
fence_system = _assembly("fence_system", "membar.sys;", 0, [], "The same for all blocks and the host.")
fence_gpu = _assembly(
    "fence_gpu",
    "fence.acq_rel.gpu;",
    0,
    [],
    """Before a store or an atomic operation: whoever sees that sees what is above. After a load that saw it: the same.

    Cheaper than `fence_device`, which also puts all such fences into one order. It counts for what other threads of the
    block have done before a barrier, and for what they do after one.
    """,
)
sleep = _assembly("sleep", "nanosleep.u32 $0;", 0, [32], "Rest for about so many nanoseconds.")
trap = _assembly("trap", "trap;", 0, [], "End the kernel with an error.")
join_warp = _assembly(
    "join_warp", "bar.warp.sync 0xffffffff;", 0, [], "Wait for the other lanes of the warp.", together=True
)
ballot = _assembly(
    "ballot",
    "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
    32,
    [32],
    "Bit i is whether lane i's argument is not 0.",
    together=True,
)
from_lane = _assembly(
    "from_lane",
    "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
    32,
    [32, 32],
    "The argument of the lane with that number.",
    together=True,
)
uniform = _assembly(
    "uniform",
    "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
    32,
    [32],
    """What is the same in all lanes, so that the compiler knows it: a branch on it then diverges nobody.

    In code that may have diverged every access to memory costs two instructions more (R2UR, for its descriptor).
    """,
    together=True,
)
least = _assembly(
    "least",
    "redux.sync.min.u32 $0, $1, 0xffffffff;",
    32,
    [32],
    "The least of the lanes' arguments, unsigned.",
    together=True,
)
total = _assembly(
    "total", "redux.sync.add.s32 $0, $1, 0xffffffff;", 32, [32], "The sum of the lanes' arguments.", together=True
)
union = _assembly(
    "union",
    "redux.sync.or.b32 $0, $1, 0xffffffff;",
    32,
    [32],
    "The lanes' arguments, bit by bit or'ed.",
    together=True,
)
lowest_bit = _assembly(
    "lowest_bit", "{ .reg .b32 t; brev.b32 t, $1; bfind.shiftamt.u32 $0, t; }", 32, [32], "Its place; -1 of 0.", False
)

highest_bit = _assembly("highest_bit", "bfind.u32 $0, $1;", 32, [32], "Its place; -1 of 0.", False)
bit = _assembly("bit", "shl.b32 $0, 1, $1;", 32, [32], "1 << $1 in 32 bits; 0 if that is not below 32.", False)
ones = _assembly("ones", "popc.b32 $0, $1;", 32, [32], "How many bits are 1.", False)


@intrinsic
def keep_once(typingctx):
    """Nothing, but the compiler makes no copies of the loop around it, and moves no access to memory over it."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        call = builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
        set.add(call.attributes, "noduplicate")  # LLVM has it, llvmlite's list of attributes does not
        return context.get_dummy_value()

    return types.void(), codegen


def external(name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """A function of the program that some other module has, as compiled functions call it."""
    return cuda.declare_device(name, result(*arguments), abi="c")


def device_ir(
    function: Callable[..., Any], arguments: Sequence[Any], compute_capability: tuple[int, int]
) -> tuple[str, str]:
    """A function that returns an int32 in NVVM's dialect of LLVM IR, as Numba writes it: its symbol, and the module.

    Before its arguments it takes the address of an int32, to which it writes what it returns.
    """
    result = compile_cuda(
        function, types.int32, tuple(arguments), cc=compute_capability, nvvm_options={"opt": 3}, fastmath=False
    )
    (text,) = result.library.llvm_strs
    return result.fndesc.mangled_name, text


@functools.cache
def words() -> tuple[Any, Any]:
    """Numba's int32 and int64."""
    return types.int32, types.int64
