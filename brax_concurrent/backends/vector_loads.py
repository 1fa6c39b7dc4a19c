"""Loads of several neighbouring float32 at once, for kernels on a GPU: one instruction, and one look into its cache.

`load2(array, index)` and `load4(array, index)` take an array of one dimension whose elements lie one behind the other,
and give the elements from `index` on as a tuple. The first must lie at a multiple of 8 or 16 bytes: nobody checks that,
and a GPU ends the program where it is not so. Kernels name this module, whose content is in the key of their code.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

_FLOAT = ir.FloatType()


def _loads(count: int) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, values[0])
        place = builder.bitcast(builder.gep(array.data, [values[1]]), ir.VectorType(_FLOAT, count).as_pointer())
        vector = builder.load(place)
        vector.align = 4 * count
        parts = [builder.extract_element(vector, ir.IntType(32)(i)) for i in range(count)]
        return context.make_tuple(builder, signature.return_type, parts)

    return codegen


@intrinsic
def load2(typingctx, array, index):
    """Two elements."""
    return types.UniTuple(types.float32, 2)(array, types.uint64), _loads(2)


@intrinsic
def load4(typingctx, array, index):
    """Four elements."""
    return types.UniTuple(types.float32, 4)(array, types.uint64), _loads(4)
