"""Single elements of the user's row-major arrays, in lanes or in a GPU's thread. Whole rows: rows.py."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from brax_concurrent.backends.program import Place

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


class UserArrays:
    """Loads and stores of one program's user arrays.

    Args:
        emitter: the Emitter (llvm.py) that writes the program.
    """

    def __init__(self, emitter: Any):
        self._e = emitter

    def _offsets(self, place: Place) -> tuple[Any, Any, int]:
        """(byte offsets of the lanes' elements, LLVM type of an element, its size)."""
        columns, dtype = self._e.program.user[place.name][:2]
        kind = I8 if dtype == "b" else self._e.scalar_type(dtype)
        size = 1 if dtype == "b" else 4 if dtype == "i" else self._e.item
        scale, start = I64(columns * size), I64(place.component * size)
        if self._e.lanes > 1:
            scale, start = self._e.splat(scale), self._e.splat(start)
        return self._e.b.add(self._e.b.mul(self._e.env_lane, scale), start), kind, size

    def load(self, place: Place, dtype: str) -> Any:
        """The element of each lane's environment, any number in lanes without one; of a shared array a scalar."""
        if place.shared:
            return self._load_shared(place, dtype)
        if self._e.rows is not None and place.name in self._e.rows.plans:
            return self._e.rows.load(place)
        offset, kind, _ = self._offsets(place)
        base = self._e.user[place.name]
        if self._e.lanes == 1:
            pointer = ir.PointerType(kind, self._e.space) if self._e.space else ir.PointerType(kind)
            raw = self._e.b.load(self._e.b.bitcast(self._e.b.gep(base, [offset]), pointer))
        elif self._is_adjacent(place):
            raw = self._adjacent(base, kind, None)
        else:
            raw = self._e.gather(base, offset, kind, self._e.all_lanes())
        if dtype != "b":
            return raw
        zero = ir.Constant(raw.type, [I8(0)] * self._e.lanes) if self._e.lanes > 1 else I8(0)
        return self._e.b.icmp_unsigned("!=", raw, zero)

    def _load_shared(self, place: Place, dtype: str) -> Any:
        columns, kind, size = self._e.program.user[place.name][0], self._e.scalar_type(dtype), self._e.bytes_of(dtype)
        offset: Any = I64(place.component * size)
        if place.index is not None:
            row = self._e.b.sext(self._e.get(place.index, "i", False), I64)
            offset = self._e.b.add(self._e.b.mul(row, I64(columns * size)), offset)
        pointer = ir.PointerType(kind, self._e.space) if self._e.space else ir.PointerType(kind)
        raw = self._e.b.load(self._e.b.bitcast(self._e.b.gep(self._e.user[place.name], [offset]), pointer))
        if self._e.gpu:
            # Through the read-only path, and neighbours in one instruction: XLA's arrays begin at multiples of 128.
            raw.set_metadata("invariant.load", self._e.b.module.add_metadata([]))
            whole = 16 if columns * size % 16 == 0 or place.index is None else size
            raw.align = next(a for a in (16, 8, 4) if whole % a == 0 and place.component * size % a == 0)
        return raw

    def store(self, place: Place, value: Any) -> None:
        """Write each lane's element, in lanes that are active and have an environment."""
        dtype = self._e.program.user[place.name][1]
        new, base = self._e.get(value, dtype, True), self._e.user[place.name]
        if self._e.rows is not None and place.name in self._e.rows.plans:
            self._e.rows.store(place, new)
            return
        offset, kind, _ = self._offsets(place)
        if dtype == "b":
            new = self._e.b.zext(new, I8 if self._e.lanes == 1 else ir.VectorType(I8, self._e.lanes))
        if self._e.lanes == 1:
            pointer = ir.PointerType(kind, self._e.space) if self._e.space else ir.PointerType(kind)
            target = self._e.b.bitcast(self._e.b.gep(base, [offset]), pointer)
            if self._e.env_valid is None:
                self._e.b.store(new, target)
            else:
                with self._e.b.if_then(self._e.env_valid):
                    self._e.b.store(new, target)
        else:
            mask = self._e.env_valid if self._e.mask is None else self._e.b.and_(self._e.mask, self._e.env_valid)
            if self._is_adjacent(place):
                self._adjacent(base, kind, (new, mask))
            else:
                self._e.scatter(base, offset, new, mask)

    def _is_adjacent(self, place: Place) -> bool:
        """Whether the lanes' elements lie side by side."""
        return self._e.order is None and self._e.program.user[place.name][0] == 1

    def _adjacent(self, base: Any, kind: Any, new: tuple[Any, Any] | None) -> Any:
        """Load the lanes' elements, which lie side by side, or store `new`, (value, mask).

        Lanes beyond the last environment are loaded as 0.
        """
        size = kind.width // 8 if isinstance(kind, ir.IntType) else self._e.item
        vector = ir.VectorType(kind, self._e.lanes)
        pointer = self._e.b.bitcast(
            self._e.b.gep(base, [self._e.b.mul(self._e.env, I64(size))]), ir.PointerType(vector)
        )
        if new is not None:
            name = f"llvm.masked.store.{self._e.suffix(vector)}.p0"
            return self._e.intrinsic(name, ir.VoidType(), [new[0], pointer, I32(size), new[1]])
        zero = ir.Constant(vector, [ir.Constant(kind, 0)] * self._e.lanes)
        return self._e.intrinsic(
            f"llvm.masked.load.{self._e.suffix(vector)}.p0", vector, [pointer, I32(size), self._e.env_valid, zero]
        )
