"""Lane programs: the small typed language that kernels are traced into, and the rules by which it is simplified.

A program is a tree of blocks. A block holds values (pure operations and loads, each computed where it stands) and
statements (stores, loops, conditional blocks). It says what ONE lane does; backends run it for many. Constants are
plain Python numbers, never values, so that everything known while tracing folds at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Operand = Any  # a Value, or a Python float, int or bool
UserArray = tuple[int, str] | tuple[int, str, int]
"""A user's array: (columns, dtype) of one with a row for each environment, (columns, dtype, rows) of one that all
environments share. dtype is "f", "i" or "b"; a shared array is not written and holds no booleans."""


class Value:
    """One operation of a program.

    Attributes:
        op: what it computes; args: its operands; attr: what else identifies it (a component, a table).
        dtype: "f" floating point, "i" int32, "b" boolean.
        uniform: whether all lanes of a machine vector hold the same number.
        block: where it is computed; it may be used there and in inner blocks only.
    """

    __slots__ = ("args", "attr", "block", "dtype", "ident", "op", "tracer", "uniform")
    __array_ufunc__ = None  # NumPy scalars leave arithmetic with a Value to the Value

    def __init__(self, tracer: Builder, op: str, args: tuple[Operand, ...], attr: Any, dtype: str, uniform: bool):
        self.tracer, self.op, self.args, self.attr = tracer, op, args, attr
        self.dtype, self.uniform, self.block = dtype, uniform, tracer.block
        self.ident = tracer.next_ident()

    def __bool__(self) -> bool:
        raise TypeError(
            "a Python `if`, `and`, `or` or `not` on a runtime value: use ops.where, w.when, ops.both, ops.either, "
            "ops.negate (docs/lanes.md)"
        )

    def __index__(self) -> int:
        raise TypeError("a runtime integer cannot index a Python sequence: use w.table or a field (docs/lanes.md)")

    def __repr__(self) -> str:
        return f"%{self.ident}:{self.dtype}"

    def __neg__(self) -> Operand:
        return self.tracer.negative(self)

    def __add__(self, other: Operand) -> Operand:
        return self.tracer.add(self, other)

    def __radd__(self, other: Operand) -> Operand:
        return self.tracer.add(other, self)

    def __sub__(self, other: Operand) -> Operand:
        return self.tracer.sub(self, other)

    def __rsub__(self, other: Operand) -> Operand:
        return self.tracer.sub(other, self)

    def __mul__(self, other: Operand) -> Operand:
        return self.tracer.mul(self, other)

    def __rmul__(self, other: Operand) -> Operand:
        return self.tracer.mul(other, self)

    def __truediv__(self, other: Operand) -> Operand:
        return self.tracer.div(self, other)

    def __rtruediv__(self, other: Operand) -> Operand:
        return self.tracer.div(other, self)

    def __lt__(self, other: Operand) -> Operand:
        return self.tracer.compare("lt", self, other)

    def __le__(self, other: Operand) -> Operand:
        return self.tracer.compare("le", self, other)

    def __gt__(self, other: Operand) -> Operand:
        return self.tracer.compare("lt", other, self)

    def __ge__(self, other: Operand) -> Operand:
        return self.tracer.compare("le", other, self)

    def __eq__(self, other: Operand) -> Operand:
        return self.tracer.compare("eq", self, other)

    def __ne__(self, other: Operand) -> Operand:
        return self.tracer.logical_not(self.tracer.compare("eq", self, other))

    __hash__ = object.__hash__

    def __and__(self, other: Operand) -> Operand:
        return self.tracer.binary("and", self, other)

    def __rand__(self, other: Operand) -> Operand:
        return self.tracer.binary("and", other, self)

    def __or__(self, other: Operand) -> Operand:
        return self.tracer.binary("or", self, other)

    def __ror__(self, other: Operand) -> Operand:
        return self.tracer.binary("or", other, self)

    def __xor__(self, other: Operand) -> Operand:
        return self.tracer.binary("xor", self, other)

    def __rxor__(self, other: Operand) -> Operand:
        return self.tracer.binary("xor", other, self)

    def __lshift__(self, other: Operand) -> Operand:
        return self.tracer.binary("shl", self, other)


@dataclass(eq=False)
class Block:
    """A straight run of values and statements; `masked` when it runs for some of the lanes only."""

    parent: Block | None
    masked: bool = False
    body: list[Any] = field(default_factory=list)
    known: dict[Any, Value] = field(default_factory=dict)

    def inside(self, outer: Block) -> bool:
        block: Block | None = self
        while block is not None and block is not outer:
            block = block.parent
        return block is outer


@dataclass(eq=False)
class Local:
    """A variable (length 1) or array of each lane, living from its declaration to the end of its block."""

    ident: int
    length: int
    dtype: str
    block: Block


@dataclass(eq=False)
class Place:
    """Where a load or store goes.

    Attributes:
        name: field name, user array name or None for a local.
        component: flat component index; with `index`, the one within a row.
        index: runtime row number (fields, shared arrays), runtime element number (locals), or None.
        shared: of a user's array: whether all environments share it.
    """

    kind: str  # "field", "user" or "local"
    name: str
    component: int
    index: Value | None = None
    local: Local | None = None
    shared: bool = False


@dataclass(eq=False)
class Store:
    """Put a value into a place."""

    place: Place
    value: Operand


@dataclass(eq=False)
class Loop:
    """Run `body` with `counter` = 0, 1, .. below each lane's own `count`; `rolled`: a GPU's compiler has to keep it.

    With `words` only those numbers of whose bits the lane's words have a 1: bit k % 32 of word k // 32.
    """

    count: Operand
    counter: Value
    body: Block
    has_break: bool = False
    rolled: bool = False
    words: tuple[Operand, ...] = ()


@dataclass(eq=False)
class When:
    """Run `body` in the lanes where `cond` holds."""

    cond: Value
    body: Block


@dataclass(eq=False)
class Break:
    """Leave the innermost loop in the lanes where `cond` holds."""

    cond: Operand


@dataclass(eq=False)
class Barrier:
    """All lanes that are still at work come here before any goes on. It says nothing of memory: lanes share none.

    Stands where all lanes come by equally often: neither under a condition nor in a loop whose count differs.
    """


_COMMUTATIVE = frozenset({"add", "mul", "and", "or", "xor", "eq"})
_FOLD: dict[str, Callable[..., Any]] = {
    "sqrt": math.sqrt,
    "abs": abs,
    "rint": lambda x: float(round(x)),
    "neg": lambda x: -x,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: not a,
}


def is_value(x: Operand) -> bool:
    """Whether `x` is only known at run time."""
    return isinstance(x, Value)


class Builder:
    """Appends values and statements to a program, folding what is known.

    Args:
        precision: "f32" or "f64": the floating-point type that "f" stands for.
    """

    def __init__(self, precision: str):
        if precision not in ("f32", "f64"):
            raise ValueError(f"precision: expected 'f32' or 'f64', got {precision!r}")
        self.precision = precision
        self._count = 0
        self.root = self.block = Block(None)

    def next_ident(self) -> int:
        self._count += 1
        return self._count

    # -- values ------------------------------------------------------------------------------------------------------

    def emit(
        self, op: str, args: tuple[Operand, ...], dtype: str, attr: Any = None, uniform: bool | None = None
    ) -> Value:
        """The value of a pure operation; an equal one that is in sight is used again."""
        key = (op, dtype, told_apart(attr), tuple(a.ident if isinstance(a, Value) else told_apart(a) for a in args))
        block: Block | None = self.block
        while block is not None:
            if key in block.known:
                return block.known[key]
            block = block.parent
        for a in args:
            if isinstance(a, Value) and not self.block.inside(a.block):
                raise ValueError("a value was used outside the w.range or w.when block that computed it: use w.var")
        if uniform is None:
            uniform = all(a.uniform for a in args if isinstance(a, Value))
        value = Value(self, op, args, attr, dtype, uniform)
        self.block.body.append(value)
        self.block.known[key] = value
        return value

    def fresh(self, op: str, args: tuple[Operand, ...], dtype: str, attr: Any = None, uniform: bool = False) -> Value:
        """A value that depends on the moment (a load): never shared."""
        value = Value(self, op, args, attr, dtype, uniform)
        self.block.body.append(value)
        return value

    def unary(self, op: str, a: Operand) -> Operand:
        return self.emit(op, (a,), a.dtype) if isinstance(a, Value) else _FOLD[op](a)

    def binary(self, op: str, a: Operand, b: Operand) -> Operand:
        if not is_value(a) and not is_value(b) and op in _FOLD:
            return _FOLD[op](a, b)
        dtype = a.dtype if isinstance(a, Value) else b.dtype
        a, b = self._typed(a, dtype), self._typed(b, dtype)
        if op in _COMMUTATIVE and not is_value(a):
            a, b = b, a
        if dtype == "b" and not is_value(b):
            keep = b if op == "and" else not b
            return (a if keep else b) if op in ("and", "or") else (self.logical_not(a) if b else a)
        if a is b and op in ("and", "or"):
            return a
        return self.emit(op, (a, b), dtype)

    def _typed(self, a: Operand, dtype: str) -> Operand:
        if isinstance(a, Value):
            if a.dtype != dtype:
                raise TypeError(f"operands of different types: {a.dtype} and {dtype}; use ops.to_float or ops.to_int")
            return a
        if dtype == "f":
            return float(a)
        if dtype == "i":
            if float(a) != int(a):
                raise TypeError(f"a runtime integer meets {a!r}: use ops.to_float")
            return int(a)
        return bool(a)

    def negative(self, a: Operand) -> Operand:
        if not isinstance(a, Value):
            return -a
        if a.op == "neg":
            return a.args[0]
        if a.op == "sub":
            return self.sub(a.args[1], a.args[0])
        return self.emit("neg", (a,), a.dtype)

    def add(self, a: Operand, b: Operand) -> Operand:
        if not is_value(a) and a == 0:
            return b
        if not is_value(b) and b == 0:
            return a
        if isinstance(b, Value) and b.op == "neg":
            return self.sub(a, b.args[0])
        if isinstance(a, Value) and a.op == "neg":
            return self.sub(b, a.args[0])
        return self.binary("add", a, b)

    def sub(self, a: Operand, b: Operand) -> Operand:
        if not is_value(b) and b == 0:
            return a
        if not is_value(a) and a == 0:
            return self.negative(b)
        if isinstance(b, Value) and b.op == "neg":
            return self.add(a, b.args[0])
        if isinstance(a, Value) and a.op == "neg" and is_value(b):
            return self.negative(self.add(a.args[0], b))
        return self.binary("sub", a, b)

    def mul(self, a: Operand, b: Operand) -> Operand:
        """Products with 0, 1 and -1 fold; signs move outward so that equal products are found equal."""
        for x, y in ((a, b), (b, a)):
            if not is_value(x):
                if x == 0:
                    return 0 if isinstance(y, Value) and y.dtype == "i" else 0.0
                if x == 1:
                    return y
                if x == -1:
                    return self.negative(y)
                if isinstance(y, Value) and y.op == "neg":
                    return self.mul(-x, y.args[0])
            elif x.op == "neg" and is_value(y):
                return self.negative(self.mul(x.args[0], y))
        if isinstance(a, Value) and isinstance(b, Value) and b.ident < a.ident:
            a, b = b, a  # one order, so that equal products are found equal
        return self.binary("mul", a, b)

    def div(self, a: Operand, b: Operand) -> Operand:
        if not is_value(b):
            if b == 1:
                return a
            if b == -1:
                return self.negative(a)
            if math.frexp(b)[0] in (0.5, -0.5):  # a power of two: multiplying is exact
                return self.mul(a, 1.0 / b)
        elif not is_value(a) and a == 0:
            return 0.0
        return self.binary("div", a, b)

    def fma(self, a: Operand, b: Operand, c: Operand) -> Operand:
        return self.add(self.mul(a, b), c)

    def compare(self, op: str, a: Operand, b: Operand) -> Operand:
        if not is_value(a) and not is_value(b):
            return _FOLD[op](a, b)
        dtype = a.dtype if isinstance(a, Value) else b.dtype
        return self.emit(op, (self._typed(a, dtype), self._typed(b, dtype)), "b")

    def logical(self, op: str, a: Operand, b: Operand) -> Operand:
        return self.binary(op, a, b)

    def logical_not(self, a: Operand) -> Operand:
        if not isinstance(a, Value):
            return not a
        return a.args[0] if a.op == "not" else self.emit("not", (a,), "b")

    def select(self, cond: Operand, a: Operand, b: Operand) -> Operand:
        if not is_value(cond):
            return a if cond else b
        if a is b or (not is_value(a) and not is_value(b) and told_apart(a) == told_apart(b)):
            return a
        typed = next((x for x in (a, b) if isinstance(x, Value)), None)
        dtype = typed.dtype if typed is not None else _number_type(a, b)
        if cond.op == "not":
            cond, a, b = cond.args[0], b, a
        return self.emit("select", (cond, self._typed(a, dtype), self._typed(b, dtype)), dtype)

    def convert(self, dtype: str, a: Value) -> Value:
        return a if a.dtype == dtype else self.emit("convert", (a,), dtype)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def open(self, masked: bool) -> Block:
        self.block = Block(self.block, masked)
        return self.block

    def close(self) -> None:
        assert self.block.parent is not None
        self.block = self.block.parent

    def statement(self, item: Any) -> None:
        self.block.body.append(item)


def told_apart(a: Any) -> Any:
    """A constant, a tuple of them (a table) or None as a key: Python takes 0, 0.0, -0.0 and False for equal."""
    if isinstance(a, tuple):
        return tuple(map(told_apart, a))
    return type(a), a, a == 0 and math.copysign(1.0, a) < 0


def _number_type(a: Any, b: Any) -> str:
    if isinstance(a, bool) and isinstance(b, bool):
        return "b"
    return "i" if isinstance(a, int) and isinstance(b, int) else "f"


def collect_locals(block: Block) -> list[Local]:
    """The locals that a pruned program still stores, in order."""
    found: dict[int, Local] = {}
    for item in block.body:
        if isinstance(item, Store) and item.place.local is not None:
            found.setdefault(item.place.local.ident, item.place.local)
        elif isinstance(item, (Loop, When)):
            found.update({x.ident: x for x in collect_locals(item.body) if x.ident not in found})
    return list(found.values())


def walk(block: Block) -> Iterator[Any]:
    """All values and statements of a block and its inner blocks, in order."""
    for item in block.body:
        yield item
        if isinstance(item, (Loop, When)):
            yield from walk(item.body)


def touched_arrays(program: Any) -> tuple[str, ...]:
    """User arrays that a LaneProgram reads or writes, in the stream's order."""
    names = set()
    for item in walk(program.root):
        place = item.place if isinstance(item, Store) else None
        if isinstance(item, Value) and item.op == "load":
            place = item.attr
        if place is not None and place.kind == "user":
            names.add(place.name)
    return tuple(name for name in program.user if name in names)
