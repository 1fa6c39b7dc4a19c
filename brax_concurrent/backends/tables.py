"""A lane program's constant vectors, one behind the other in memory.

So an index into several tables makes one address; on a GPU each table by itself would have its own made.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from brax_concurrent.backends import nvvm
from brax_concurrent.backends.program import Value, told_apart, walk

I8, I64 = ir.IntType(8), ir.IntType(64)


class Tables:
    """Loads from the tables of one program.

    Args:
        emitter: the Emitter (llvm.py) that writes the program, its builder positioned where the program is to start.
    """

    def __init__(self, emitter: Any):
        self._e = emitter
        used = [item for item in walk(emitter.program.root) if isinstance(item, Value) and item.op == "table"]
        # Floating-point numbers first: theirs may be the larger alignment.
        tables = {_key(v): v for dtype in ("f", "i") for v in used if v.dtype == dtype}
        self._offsets, columns, size = dict[Any, int](), list[Any](), 0
        for key, v in tables.items():
            kind = ir.ArrayType(emitter.scalar_type(v.dtype), len(v.attr))
            columns.append(ir.Constant(kind, [emitter.constant(x, v.dtype, False) for x in v.attr]))
            self._offsets[key] = size
            size += len(v.attr) * emitter.bytes_of(v.dtype)
        self._base = self._place(ir.Constant.literal_struct(columns)) if columns else None

    def _place(self, value: Any) -> Any:
        """The address of a new constant in memory."""
        b, space = self._e.b, self._e.space
        variable = ir.GlobalVariable(b.module, value.type, f"constants.{len(b.module.globals)}", addrspace=space)
        variable.global_constant, variable.linkage, variable.initializer = True, "internal", value
        address = self._pointer(variable, I8)
        return nvvm.opaque(b, address) if self._e.gpu else address

    def _pointer(self, address: Any, kind: Any) -> Any:
        space = self._e.space
        return self._e.b.bitcast(address, ir.PointerType(kind, space) if space else ir.PointerType(kind))

    def load(self, v: Value, vector: bool) -> Any:
        """The numbers at the lanes' indices. Lanes that are not active may hold any, so it is brought into range."""
        e, b, offset = self._e, self._e.b, I64(self._offsets[_key(v)])
        kind, size, index = e.scalar_type(v.dtype), I64(e.bytes_of(v.dtype)), e.get(v.args[0], "i", vector)
        if not vector:
            address = b.gep(b.gep(self._base, [b.mul(b.zext(index, I64), size)]), [offset])
            number = b.load(self._pointer(address, kind), align=size.constant)
            number.set_metadata("invariant.load", b.module.add_metadata([]))
            return number
        top, zero = e.constant(len(v.attr) - 1, "i", True), e.constant(0, "i", True)
        index = b.select(b.icmp_unsigned("<", index, top), index, b.select(b.icmp_signed("<", index, zero), zero, top))
        offsets = b.mul(b.zext(index, ir.VectorType(I64, e.lanes)), e.splat(size))
        return e.gather(b.gep(self._base, [offset]), offsets, kind, e.all_lanes())


def _key(v: Value) -> Any:
    """What tables that may share memory have in common."""
    return v.dtype, told_apart(v.attr)
