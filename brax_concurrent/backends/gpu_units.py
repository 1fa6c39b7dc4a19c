"""What a task's kernel on a GPU may call besides Python's arithmetic. Kernels name this module: see fingerprint.py.

`load2(array, index)` and `load4(array, index)` are loads of several neighbouring float32 at once: one instruction, and
one look into the cache. They take an array of one dimension whose elements lie one behind the other, and give those
from `index` on as a tuple; `store2` and `store4` write one. The first must lie at a multiple of 8 or 16 bytes: nobody
checks that, and a GPU ends the program where it is not so.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

_FLOAT, _I32 = ir.FloatType(), ir.IntType(32)


def _place(context: Any, builder: Any, kind: Any, array: Any, index: Any, count: int) -> Any:
    """Where so many elements of an array lie."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(_FLOAT, count).as_pointer())


def _loads(count: int) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array, index = values
        vector = builder.load(_place(context, builder, signature.args[0], array, index, count))
        vector.align = 4 * count
        parts = [builder.extract_element(vector, _I32(i)) for i in range(count)]
        return context.make_tuple(builder, signature.return_type, parts)

    return codegen


def _stores(count: int) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array, index, elements = values
        vector = ir.Constant(ir.VectorType(_FLOAT, count), ir.Undefined)
        for i in range(count):
            vector = builder.insert_element(vector, builder.extract_value(elements, i), _I32(i))
        builder.store(vector, _place(context, builder, signature.args[0], array, index, count)).align = 4 * count
        return context.get_dummy_value()

    return codegen


@intrinsic
def load2(typingctx, array, index):
    """Two elements."""
    return types.UniTuple(types.float32, 2)(array, types.uint64), _loads(2)


@intrinsic
def load4(typingctx, array, index):
    """Four elements."""
    return types.UniTuple(types.float32, 4)(array, types.uint64), _loads(4)


@intrinsic
def store2(typingctx, array, index, elements):
    """Write two elements."""
    return types.void(array, types.uint64, types.UniTuple(types.float32, 2)), _stores(2)


@intrinsic
def store4(typingctx, array, index, elements):
    """Write four elements."""
    return types.void(array, types.uint64, types.UniTuple(types.float32, 4)), _stores(4)


@intrinsic
def fence(typingctx):
    """What is loaded above is not loaded below: the compiler likes to load late, to save registers."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.asm(ir.FunctionType(ir.VoidType(), []), "membar.cta;", "~{memory}", [], True)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def exchange(typingctx, value, distance):
    """The float32 of the unit whose number differs in the bits of `distance`, below 32; it gets this one's.

    All 32 units from a multiple of 32 on must be there, and come to the same call.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_FLOAT, [_FLOAT, _I32])
        text = "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;"
        done = builder.asm(kind, text, "=f,f,r,~{memory}", list(values), True)
        set.add(done.attributes, "convergent")  # LLVM has it, llvmlite's list of attributes does not
        return done

    return types.float32(types.float32, types.int32), codegen
