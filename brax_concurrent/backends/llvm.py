"""Lane programs to LLVM IR: a machine vector per value (`lanes` > 1, the CPU) or a scalar (1, a GPU thread).

In vector form a block that runs for some lanes only runs under a mask: it is jumped over when no lane is active, and
its stores to what outlives it keep the other lanes' numbers. In scalar form the same blocks are plain branches. Either
way a lane's results do not depend on its neighbours.
"""

from __future__ import annotations

import itertools
import struct
from typing import Any

from llvmlite import ir

from brax_concurrent.backends import nvvm
from brax_concurrent.backends.program import (
    Barrier,
    Block,
    Break,
    Local,
    Loop,
    Place,
    Store,
    Value,
    When,
    collect_locals,
)
from brax_concurrent.backends.rows import RowCopier
from brax_concurrent.backends.tables import Tables
from brax_concurrent.backends.user_arrays import UserArrays

I1, I8, I32, I64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)
TILE = 32


def round_f32(x: float) -> float:
    """`x` rounded to single precision."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return float("inf") if x > 0 else float("-inf")


class Emitter:
    """Writes one lane program into an LLVM function.

    Args:
        builder: positioned where the program is to start.
        program: the LaneProgram.
        lanes: lanes per machine vector; 1 for scalar code.
        arena: i8 pointer to the tile's arena, at the first lane of this vector for floats (`float_shift`) ..
        lane_offset: i64, first lane of this vector within the tile.
        env: i64 index of the first lane's environment.
        num_envs: i64 number of environments.
        user: i8 pointers to the user arrays by name; looked up where they are used.
        gpu: whether this is NVVM IR: pointers are to global memory.
        valid: scalar code: an i1, whether what is stored into user arrays is wanted; None: it is.
        meeting: on a GPU: the i32 number of a barrier and how many threads meet there; None: all of the block.
        order: vector code: i32 pointer to which environments the lanes have, one that there is in each lane; None:
            those from `env` on.
    """

    def __init__(self, builder: Any, program: Any, lanes: int, arena: Any, lane_offset: Any, env: Any, num_envs: Any,
                 user: Any, gpu: bool = False, valid: Any = None, meeting: Any = None,
                 order: Any = None):  # fmt: skip
        self.meeting, self.order = meeting, order
        self.b, self.program, self.layout, self.lanes = builder, program, program.layout, lanes
        self.user, self.num_envs, self.gpu = user, num_envs, gpu
        self.space = 1 if gpu else 0  # global memory
        self.float = ir.FloatType() if program.layout.precision == "f32" else ir.DoubleType()
        self.item = 4 if program.layout.precision == "f32" else 8
        self.arena = {d: self.b.gep(arena, [self.b.mul(lane_offset, I64(self.bytes_of(d)))]) for d in ("f", "i")}
        if gpu:
            self.arena = {dtype: nvvm.opaque(self.b, start) for dtype, start in self.arena.items()}
        self.values: dict[int, tuple[Any, bool]] = {}  # ident -> (LLVM value, is a vector)
        self.locals: dict[int, Any] = {}
        self.level: dict[int, int] = {}  # block -> mask level that its locals are declared at
        self.mask: Any = None
        self.mask_level = 0
        self.levels = 0
        self.break_target: Any = None
        self.live_slot: Any = None
        self.rows: RowCopier | None = None
        self.env = env
        self.env_lane, self.env_valid = (env, valid) if lanes == 1 else self._environments(env, num_envs)
        self.arrays, self.tables = UserArrays(self), Tables(self)

    # -- types and constants -----------------------------------------------------------------------------------------

    def scalar_type(self, dtype: str) -> Any:
        return {"f": self.float, "i": I32, "b": I1}[dtype]

    def type(self, dtype: str) -> Any:
        scalar = self.scalar_type(dtype)
        return scalar if self.lanes == 1 else ir.VectorType(scalar, self.lanes)

    def constant(self, x: Any, dtype: str, vector: bool) -> Any:
        scalar = self.scalar_type(dtype)
        if dtype == "f":
            x = round_f32(float(x)) if self.item == 4 else float(x)
        elif dtype == "i":
            x = ((int(x) + 2**31) % 2**32) - 2**31
        else:
            x = int(bool(x))
        return (
            ir.Constant(ir.VectorType(scalar, self.lanes), [ir.Constant(scalar, x)] * self.lanes)
            if vector
            else ir.Constant(scalar, x)
        )

    def bytes_of(self, dtype: str) -> int:
        """Bytes of a floating-point number or integer."""
        return self.item if dtype == "f" else 4

    def splat(self, x: Any) -> Any:
        """A scalar in all lanes."""
        vector = ir.VectorType(x.type, self.lanes)
        first = self.b.insert_element(ir.Constant(vector, ir.Undefined), x, I32(0))
        zeros = ir.Constant(ir.VectorType(I32, self.lanes), [I32(0)] * self.lanes)
        return self.b.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)

    def get(self, x: Any, dtype: str, vector: bool) -> Any:
        """An operand as a scalar or, if `vector`, in all lanes."""
        vector = vector and self.lanes > 1
        if not isinstance(x, Value):
            return self.constant(x, dtype, vector)
        value, is_vector = self.values[x.ident]
        if vector and not is_vector:
            return self.splat(value)
        return value

    def iota(self, kind: Any, step: int) -> Any:
        return ir.Constant(ir.VectorType(kind, self.lanes), [ir.Constant(kind, i * step) for i in range(self.lanes)])

    def intrinsic(self, name: str, result: Any, arguments: list[Any]) -> Any:
        module = self.b.module
        known = module.globals.get(name)
        if known is None:
            known = ir.Function(module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.b.call(known, arguments)

    def suffix(self, kind: Any) -> str:
        if isinstance(kind, ir.VectorType):
            return f"v{kind.count}{self.suffix(kind.element)}"
        return {"float": "f32", "double": "f64"}.get(str(kind), str(kind))

    def all_lanes(self) -> Any:
        return self.constant(True, "b", True)

    def any_lane(self, mask: Any) -> Any:
        kind = ir.IntType(self.lanes)
        return self.b.icmp_unsigned("!=", self.b.bitcast(mask, kind), ir.Constant(kind, 0))

    # -- blocks ------------------------------------------------------------------------------------------------------

    def emit(self) -> None:
        """The whole program."""
        with self.b.goto_entry_block():
            for local in collect_locals(self.program.root):
                slot = self.b.alloca(self.type(local.dtype), size=local.length)
                slot.align = self.lanes * self.item
                if self._in_memory(local):
                    # LLVM would make registers of it, more than there are, and copy them around every loop. An empty
                    # assembler instruction hides where the address comes from, and the array stays where it is.
                    kind = ir.FunctionType(slot.type, [slot.type])
                    slot = self.b.asm(kind, "", "=r,0", [slot], side_effect=True)
                self.locals[local.ident] = slot
        if self.lanes > 1:
            self.rows = RowCopier(self)
        self.block(self.program.root)

    def _in_memory(self, local: Local) -> bool:
        return self.lanes > 1 and local.length > 1 and local.dtype != "b"

    def block(self, block: Block) -> None:
        self.level[id(block)] = self.mask_level
        if self.rows is not None:
            self.rows.enter(block)
        for item in block.body:
            if isinstance(item, Value):
                self.value(item)
            elif isinstance(item, Store):
                self.store(item.place, item.value)
            elif isinstance(item, When):
                self.when(item)
            elif isinstance(item, Loop):
                (self.set_bits if item.words else self.loop)(item)
            elif isinstance(item, Break):
                self.leave(item.cond)
            elif isinstance(item, Barrier) and self.gpu:
                nvvm.barrier(self.b, self.meeting)
        if self.rows is not None:
            self.rows.leave(block)

    def when(self, item: When) -> None:
        uniform = self.lanes == 1 or item.cond.uniform
        cond = self.get(item.cond, "b", not uniform)
        mask, level = self.mask, self.mask_level
        if not uniform:
            cond = cond if mask is None else self.b.and_(mask, cond)
            self._deeper(cond)
        with self.b.if_then(cond if uniform else self.any_lane(cond)):
            self.block(item.body)
        self.mask, self.mask_level = mask, level

    def _deeper(self, mask: Any) -> None:
        self.levels += 1
        self.mask, self.mask_level = mask, self.levels

    def loop(self, item: Loop) -> None:
        varying = self.lanes > 1 and isinstance(item.count, Value) and not item.count.uniform
        masked = varying or (item.has_break and self.lanes > 1)
        count = self.get(item.count, "i", varying)
        outer = (self.mask, self.mask_level, self.break_target, self.live_slot)
        with self.b.goto_entry_block():
            counter = self.b.alloca(I32)
            live = self.b.alloca(self.type("b")) if masked else None
        self.b.store(I32(0), counter)
        if masked:
            self.b.store(self.all_lanes() if self.mask is None else self.mask, live)
        head, body, done = (self.b.append_basic_block(x) for x in ("head", "body", "done"))
        self.b.branch(head)
        self.b.position_at_end(head)
        k = self.b.load(counter)
        if varying:
            active = self.b.and_(self.b.load(live), self.b.icmp_signed("<", self.splat(k), count))
            self.b.store(active, live)
            go = self.any_lane(active)
        else:
            active = self.b.load(live) if masked else None
            go = self.b.icmp_signed("<", k, count)
        self.b.cbranch(go, body, done)
        self.b.position_at_end(body)
        self.values[item.counter.ident] = (k, False)
        if item.rolled and self.gpu:
            nvvm.keep_once(self.b)
        if masked:
            self._deeper(active)
        self.break_target, self.live_slot = done, live
        self.block(item.body)
        self.b.store(self.b.add(k, I32(1)), counter)
        self.b.branch(head)
        self.b.position_at_end(done)
        self.mask, self.mask_level, self.break_target, self.live_slot = outer

    def set_bits(self, item: Loop) -> None:
        """A loop over the bits of words, 64 at a time.

        In scalar form those of the lane: it turns as often as it has bits. In vector form those of any lane, each under
        the mask of its lanes: the number is one for all, and what it selects needs no gathering.
        """
        words = anyones = [self.get(word, "i", True) for word in item.words]
        outer, vector = (self.mask, self.mask_level), self.lanes > 1
        if vector:
            zero = self.constant(0, "i", True)
            words = words if self.mask is None else [self.b.select(self.mask, word, zero) for word in words]
            name = f"llvm.vector.reduce.or.{self.suffix(zero.type)}"
            anyones = [self.intrinsic(name, I32, [word]) for word in words]
        kind = I32 if len(words) == 1 else I64
        rests = [self.b.zext(low, kind) for low in anyones[::2]]
        for i, high in enumerate(anyones[1::2]):
            rests[i] = self.b.or_(rests[i], self.b.shl(self.b.zext(high, kind), kind(32)))
        with self.b.goto_entry_block():
            slots, start = [self.b.alloca(kind) for _ in rests], self.b.alloca(I32)
            lanes = self.b.alloca(self.type("i"), size=len(words)) if vector else None
        for rest, slot in zip(rests, slots, strict=True):
            self.b.store(rest, slot)
        for i, word in enumerate(words if vector else ()):
            self.b.store(word, self.b.gep(lanes, [I32(i)]), align=self._align("i"))
        self.b.store(I32(0), start)
        head, body, beyond, done = (self.b.append_basic_block(x) for x in ("head", "body", "beyond", "done"))
        self.b.branch(head)
        self.b.position_at_end(head)
        rest, base = self.b.load(slots[0]), self.b.load(start)
        self.b.cbranch(self.b.icmp_unsigned("!=", rest, kind(0)), body, beyond)
        self.b.position_at_end(beyond)
        for slot, following in itertools.pairwise(slots):
            self.b.store(self.b.load(following), slot)
        self.b.store(kind(0), slots[-1])
        self.b.store(self.b.add(base, I32(64)), start)
        self.b.cbranch(self.b.icmp_unsigned("<", base, I32(64 * (len(slots) - 1))), head, done)
        self.b.position_at_end(body)
        self.b.store(self.b.and_(rest, self.b.sub(rest, kind(1))), slots[0])
        bit = self.intrinsic(f"llvm.cttz.{kind}", kind, [rest, I1(1)])
        k = self.b.add(base, bit if kind == I32 else self.b.trunc(bit, I32))
        if vector:
            word = self.b.load(self.b.gep(lanes, [self.b.lshr(k, I32(5))]), align=self._align("i"))
            one = self.splat(self.b.shl(I32(1), self.b.and_(k, I32(31))))
            self._deeper(self.b.icmp_unsigned("!=", self.b.and_(word, one), zero))
        self.values[item.counter.ident] = (k, False)
        self.block(item.body)
        self.b.branch(head)
        self.b.position_at_end(done)
        self.mask, self.mask_level = outer

    def leave(self, cond: Any) -> None:
        go_on = self.b.append_basic_block("go_on")
        if self.lanes == 1:
            self.b.cbranch(self.get(cond, "b", False), self.break_target, go_on)
        else:
            self.mask = self.b.and_(self.mask, self.b.not_(self.get(cond, "b", True)))
            self.b.store(self.mask, self.live_slot)
            self.b.cbranch(self.any_lane(self.mask), go_on, self.break_target)
        self.b.position_at_end(go_on)

    # -- values ------------------------------------------------------------------------------------------------------

    def value(self, v: Value) -> None:
        vector = self.lanes > 1 and not v.uniform
        if v.op == "load":
            result = self.load(v.attr, v.dtype)
        elif v.op == "table":
            result = self.tables.load(v, vector)
        elif v.op == "pass":  # what another kernel stored: a boundary for fused multiply-adds only
            result = self.get(v.args[0], v.dtype, vector)
        else:
            dtypes = [a.dtype if isinstance(a, Value) else None for a in v.args]
            known = next((d for d in reversed(dtypes) if d is not None), v.dtype)
            args = [
                self.get(a, "b" if v.op == "select" and i == 0 else (known if v.op != "select" else v.dtype), vector)
                for i, a in enumerate(v.args)
            ]
            result = self.operation(v, args)
        self.values[v.ident] = (result, vector)

    def operation(self, v: Value, args: list[Any]) -> Any:
        b, op = self.b, v.op
        if op in ("sqrt", "abs", "rint", "fma"):
            if op == "fma":
                minus_product, minus_sum = v.attr
                args = [
                    self.negative(args[0]) if minus_product else args[0],
                    args[1],
                    self.negative(args[2]) if minus_sum else args[2],
                ]
            if self.gpu:
                return nvvm.arithmetic(self, op, args)
            name = {"abs": "fabs"}.get(op, op)
            return self.intrinsic(f"llvm.{name}.{self.suffix(args[0].type)}", args[0].type, args)
        if op == "select":
            return b.select(*args)
        if op in ("lt", "le", "eq"):
            symbol = {"lt": "<", "le": "<=", "eq": "=="}[op]
            is_float = next(a.dtype for a in v.args if isinstance(a, Value)) == "f"
            return b.fcmp_ordered(symbol, *args) if is_float else b.icmp_signed(symbol, *args)
        if op in ("convert", "bits", "from_bits"):
            return self.conversion(v, args[0])
        if v.dtype == "f" and self.gpu and op != "neg":
            return nvvm.arithmetic(self, op, args)
        if v.dtype == "f":
            return {"add": b.fadd, "sub": b.fsub, "mul": b.fmul, "div": b.fdiv, "neg": self.negative}[op](*args)
        table = {"add": b.add, "sub": b.sub, "mul": b.mul, "neg": b.neg, "and": b.and_, "or": b.or_, "xor": b.xor,
                 "shl": b.shl, "lshr": b.lshr, "ashr": b.ashr, "quotient": b.sdiv, "remainder": b.srem,
                 "unsigned quotient": b.udiv, "unsigned remainder": b.urem, "not": b.not_}  # fmt: skip
        return table[op](*args)

    def negative(self, x: Any) -> Any:
        """-x; NVVM's dialect knows no fneg."""
        return self.b.fsub(ir.Constant(x.type, -0.0), x) if self.gpu else self.b.fneg(x)

    def conversion(self, v: Value, a: Any) -> Any:
        vector = isinstance(a.type, ir.VectorType)

        def kind(scalar: Any) -> Any:
            return ir.VectorType(scalar, self.lanes) if vector else scalar

        single = kind(ir.FloatType())
        if v.op == "bits":
            return self.b.bitcast(a if self.item == 4 else self.b.fptrunc(a, single), kind(I32))
        if v.op == "from_bits":
            x = self.b.bitcast(a, single)
            return x if self.item == 4 else self.b.fpext(x, kind(self.float))
        source = v.args[0].dtype
        if v.dtype == "i":
            return self.b.fptosi(a, kind(I32)) if source == "f" else self.b.zext(a, kind(I32))
        if v.dtype == "b":
            return self.b.icmp_signed("!=", a, self.constant(0, "i", vector))
        return (self.b.sitofp if source == "i" else self.b.uitofp)(a, kind(self.float))

    # -- memory ------------------------------------------------------------------------------------------------------

    def _environments(self, env: Any, num_envs: Any) -> tuple[Any, Any]:
        """Index of each lane's environment (the last one for lanes beyond it) and which lanes have one of their own."""
        place = self.b.add(self.splat(env), self.iota(I64, 1))
        valid = self.b.icmp_signed("<", place, self.splat(num_envs))
        if self.order is not None:
            vector = ir.VectorType(I32, self.lanes)
            given = self.b.load(self.b.bitcast(self.order, ir.PointerType(vector)), align=4 * self.lanes)
            return self.b.sext(given, ir.VectorType(I64, self.lanes)), valid
        return self.b.select(valid, place, self.splat(self.b.sub(num_envs, I64(1)))), valid

    def gather(self, base: Any, offsets: Any, kind: Any, mask: Any) -> Any:
        """Lanes of `kind` from base + offsets (i64 bytes)."""
        pointers = self._pointers(base, offsets, kind)
        result = ir.VectorType(kind, self.lanes)
        name = f"llvm.masked.gather.{self.suffix(result)}.v{self.lanes}p0"
        zero = ir.Constant(result, [ir.Constant(kind, 0)] * self.lanes)
        return self.intrinsic(
            name, result, [pointers, I32(kind.width // 8 if isinstance(kind, ir.IntType) else self.item), mask, zero]
        )

    def scatter(self, base: Any, offsets: Any, value: Any, mask: Any) -> None:
        kind = value.type.element
        pointers = self._pointers(base, offsets, kind)
        size = kind.width // 8 if isinstance(kind, ir.IntType) else self.item
        self.intrinsic(
            f"llvm.masked.scatter.{self.suffix(value.type)}.v{self.lanes}p0",
            ir.VoidType(),
            [value, pointers, I32(size), mask],
        )

    def _pointers(self, base: Any, offsets: Any, kind: Any) -> Any:
        address = self.b.add(self.splat(self.b.ptrtoint(base, I64)), offsets)
        return self.b.inttoptr(address, ir.VectorType(ir.PointerType(kind), self.lanes))

    def _row(self, place: Place) -> tuple[Any, bool]:
        """(byte offset of the component's row, whether it differs between lanes)."""
        size = self.layout.row_bytes
        base = self.layout.rows[place.name, place.component]
        if place.index is None:
            return I64(base * size), False
        stride = self.layout.row_stride[place.name] * size
        vector = self.lanes > 1 and not place.index.uniform
        index = self.get(place.index, "i", vector)
        wide = ir.VectorType(I64, self.lanes) if vector else I64
        index = self.b.sext(index, wide)
        scale, start = I64(stride), I64(base * size)
        if vector:
            scale, start = self.splat(scale), self.splat(start)
        return self.b.add(self.b.mul(index, scale), start), vector

    def _pointer(self, place: Place, dtype: str, offset: Any) -> Any:
        kind = ir.PointerType(self.type(dtype), self.space) if self.space else ir.PointerType(self.type(dtype))
        return self.b.bitcast(self.b.gep(self.arena[dtype], [offset]), kind)

    def _align(self, dtype: str) -> int:
        return self.lanes * (self.item if dtype == "f" else 4)

    def load(self, place: Place, dtype: str) -> Any:
        if place.kind == "user":
            return self.arrays.load(place, dtype)
        if place.local is not None:
            return self.b.load(self.local_slot(place), align=self._align(dtype) if dtype != "b" else None)
        offset, varying = self._row(place)
        if varying:
            size = self.item if dtype == "f" else 4
            mask = self.all_lanes() if self.mask is None else self.mask
            return self.gather(
                self.arena[dtype], self.b.add(offset, self.iota(I64, size)), self.scalar_type(dtype), mask
            )
        return self.b.load(self._pointer(place, dtype, offset), align=self._align(dtype))

    def local_slot(self, place: Place) -> Any:
        assert place.local is not None
        index = I32(place.component) if place.index is None else self.get(place.index, "i", False)
        return self.b.gep(self.locals[place.local.ident], [index])

    def store(self, place: Place, value: Any) -> None:
        if place.kind == "user":
            self.arrays.store(place, value)
            return
        dtype = value.dtype if isinstance(value, Value) else {"f": "f", "i": "i", "b": "b"}[_number_type(value)]
        if place.local is not None:
            dtype = place.local.dtype
            new, slot = self.get(value, dtype, True), self.local_slot(place)
            if self.mask is not None and self.level[id(place.local.block)] != self.mask_level:
                if self._in_memory(place.local):
                    self._masked_store(new, slot, self._align(dtype))
                    return
                new = self.b.select(
                    self.mask, new, self.b.load(slot, align=self._align(dtype) if dtype != "b" else None)
                )
            self.b.store(new, slot, align=self._align(dtype) if dtype != "b" else None)
            return
        offset, varying = self._row(place)
        new = self.get(value, dtype, True)
        if varying:
            size = self.item if dtype == "f" else 4
            mask = self.all_lanes() if self.mask is None else self.mask
            self.scatter(self.arena[dtype], self.b.add(offset, self.iota(I64, size)), new, mask)
        elif self.mask is None:
            self.b.store(new, self._pointer(place, dtype, offset), align=self._align(dtype))
        else:
            self._masked_store(new, self._pointer(place, dtype, offset), self._align(dtype))

    def _masked_store(self, new: Any, pointer: Any, align: int) -> None:
        name = f"llvm.masked.store.{self.suffix(new.type)}.p0"
        self.intrinsic(name, ir.VoidType(), [new, pointer, I32(align), self.mask])


def _number_type(x: Any) -> str:
    return "b" if isinstance(x, bool) else "i" if isinstance(x, int) else "f"
