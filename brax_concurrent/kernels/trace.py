"""Tracing: a kernel run on symbolic scalars becomes a lane program, specialised to the robot.

`TracingWorld` is to tracing what `ReferenceWorld` is to NumPy: the `w` of docs/lanes.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from brax_concurrent.backends.program import (
    Barrier,
    Block,
    Break,
    Builder,
    Local,
    Loop,
    Place,
    Store,
    UserArray,
    Value,
    When,
    told_apart,
)
from brax_concurrent.kernels.kernel import Kernel
from brax_concurrent.kernels.layout import MODEL_PREFIX, Field
from brax_concurrent.kernels.ops import bit_words


class Varying:
    """Marks a component that differs between environments or kernels."""


VARYING = Varying()
Facts = dict[tuple[str, int], Any]  # (field, flat component) -> the constant that all writers agree on, or VARYING


@dataclass
class Trace:
    """What tracing one kernel gave.

    Attributes:
        root: the program's outermost block.
        facts: what the kernel wrote into each component, as in Facts.
    """

    kernel: Kernel
    root: Block
    precision: str
    facts: Facts = field(default_factory=dict)


def trace(
    kernel: Kernel,
    m: Any,
    fields: Mapping[str, Field],
    user: Mapping[str, UserArray],
    facts: Facts,
    precision: str,
) -> Trace:
    """Trace one kernel.

    Args:
        kernel: the declared kernel.
        m: the model view (kernels/specialize.py).
        fields: shapes of all fields.
        user: the users' arrays by name: (columns, dtype "f", "i" or "b"), and the rows of those that are shared.
        facts: components known to be constant in the whole stream.
        precision: "f32" or "f64".

    Raises:
        UndeclaredAccessError: a field is read or written that the kernel does not declare.
    """
    world = TracingWorld(kernel, fields, user, facts, precision)
    kernel.function(m.bind(world) if hasattr(m, "bind") else m, world)
    return Trace(kernel, world.builder.root, precision, world.written)


def infer_kernel(
    name: str, function: Any, m: Any, fields: Mapping[str, Field], user: Mapping[str, UserArray], when: str = ""
) -> Kernel:
    """A kernel whose reads and writes are what tracing the function once shows; `when` is the kernel's."""
    everything = (*fields, *("user." + n for n in user))
    world = TracingWorld(Kernel(name, function, everything, everything), fields, user, {}, "f32")
    function(m.bind(world) if hasattr(m, "bind") else m, world)
    return Kernel(name, function, tuple(world.touched["read"]), tuple(world.touched["write"]), when)


class UndeclaredAccessError(ValueError):
    """A kernel touched a field that its declaration does not name."""


class TracingWorld:
    """The symbolic world of one lane; see docs/lanes.md for what each member means."""

    def __init__(
        self,
        kernel: Kernel,
        fields: Mapping[str, Field],
        user: Mapping[str, UserArray],
        facts: Facts,
        precision: str,
    ):
        self.builder = Builder(precision)
        self.precision = precision
        self.written: Facts = {}
        self.touched: dict[str, dict[str, None]] = {"read": {}, "write": {}}
        self._kernel = self._stage = kernel
        self._fields, self._facts = fields, facts
        self._memory: dict[Any, Any] = {}  # what a location holds at this point, where that is known
        self._loops: list[tuple[Loop, Block]] = []
        self._locals = 0
        self.user = _UserArrays(self, user)

    def __getattr__(self, name: str) -> _FieldView:
        if name.startswith("_") or name not in self._fields:
            raise AttributeError(f"no field named {name!r}")
        return _FieldView(self, name, self._fields[name].shape, ())

    def enter_stage(self, kernel: Kernel | None) -> None:
        """Begin a kernel inside a fused one (None: end it).

        Its own declaration holds, and what went before it is only known as values that come from memory.
        """
        self._stage = kernel or self._kernel
        for key, value in self._memory.items():
            if isinstance(value, Value) and value.op not in ("load", "pass"):
                self._memory[key] = self.builder.emit("pass", (value,), value.dtype)

    def field(self, name: str) -> _FieldView:
        return _FieldView(self, name, self._fields[name].shape, ())

    # -- memory ------------------------------------------------------------------------------------------------------

    def check(self, name: str, access: str) -> None:
        self.touched[access][name] = None
        if access == "read" and name.startswith(MODEL_PREFIX):
            return  # a constant of the robot, unless the user varies it
        declared = self._stage.reads if access == "read" else self._stage.writes
        if name not in declared:
            raise UndeclaredAccessError(
                f"kernel {self._stage.name!r} {'reads' if access == 'read' else 'writes'} field {name!r}, "
                f"which its {access}s= does not name"
            )

    def load(self, name: str, component: int, index: Value | None) -> Any:
        """The value of a component; with `index` (a runtime row) `component` counts within the row."""
        self.check(name, "read")
        shape = self._fields[name].shape
        stride = prod(shape[1:])
        rows = [component] if index is None else [row * stride + component for row in range(shape[0])]
        known = [self._facts.get((name, row), VARYING) for row in rows]
        if known[0] is not VARYING and all(k is not VARYING and k == known[0] for k in known):
            return known[0]
        key = (name, component, index.ident if index is not None else None)
        if key not in self._memory:
            place = Place("field", name, component, index)
            self._memory[key] = self.builder.fresh(
                "load", (index,) if index is not None else (), self._fields[name].dtype, place
            )
        return self._memory[key]

    def store(self, name: str, component: int, index: Value | None, value: Any) -> None:
        self.check(name, "write")
        dtype, shape = self._fields[name].dtype, self._fields[name].shape
        value = self._operand(value, dtype, name)
        stride = prod(shape[1:])
        for row in [component] if index is None else [r * stride + component for r in range(shape[0])]:
            old = self.written.get((name, row), value)
            same = not isinstance(value, Value) and not isinstance(old, (Value, Varying)) and old == value
            self.written[name, row] = value if same else VARYING
        self._forget(name, component, index)
        self._memory[name, component, index.ident if index is not None else None] = value
        self.builder.statement(Store(Place("field", name, component, index), value))

    def _forget(self, name: str, component: int, index: Value | None) -> None:
        """Drop what is known of places that a store may change: with a runtime row on either side, all rows."""
        stride = prod(self._fields[name].shape[1:])
        stale = [
            key
            for key in self._memory
            if key[0] == name
            and (
                ((index is not None or key[2] is not None) and key[1] % stride == component % stride)
                or key[1] == component
            )
        ]
        for key in stale:
            del self._memory[key]

    def _operand(self, value: Any, dtype: str, name: str) -> Any:
        if isinstance(value, Value):
            if value.dtype != dtype:
                raise TypeError(f"{name}: expected a value of type {dtype!r}, got {value.dtype!r}")
            if not self.builder.block.inside(value.block):
                raise ValueError(f"{name}: stores a value from a block that has ended: use w.var")
            return value
        return {"f": float, "i": int, "b": bool}[dtype](value)

    # -- control flow ------------------------------------------------------------------------------------------------

    def range(self, count: Any, rolled: bool = False) -> Iterator[Value]:
        if not isinstance(count, Value) and count <= 0:
            return
        uniform = not isinstance(count, Value) or count.uniform
        yield from self._loop(count, masked=not uniform, rolled=rolled)

    def set_bits(self, words: Sequence[Any]) -> Iterator[Value]:
        words = tuple(self._operand(word, "i", "set_bits") for word in bit_words(words))
        if words:
            yield from self._loop(32 * len(words), masked=True, words=words)

    def _loop(self, count: Any, masked: bool, **more: Any) -> Iterator[Value]:
        before = self._enter(masked=True)
        counter = self.builder.fresh("counter", (), "i", uniform=True)
        self.builder.block.body.pop()  # the loop itself defines its counter
        loop = Loop(count, counter, self.builder.block, **more)
        loop.body.masked = masked
        self._loops.append((loop, self.builder.block))
        yield counter
        self._loops.pop()
        self._leave(before, loop)

    def break_where(self, cond: Any) -> None:
        loop, block = self._loops[-1] if self._loops else (None, None)
        if loop is None or loop.words or self.builder.block is not block:
            raise ValueError("break_where must stand directly in the body of a w.range loop")
        if isinstance(cond, Value) or cond:
            loop.has_break = loop.body.masked = True
            self.builder.statement(Break(cond))

    @contextmanager
    def when(self, cond: Any) -> Iterator[None]:
        if not isinstance(cond, Value) and cond:
            yield
            return
        before = self._enter(masked=True)
        body = self.builder.block
        yield
        self._leave(before, When(cond, body) if isinstance(cond, Value) else None)

    def barrier(self) -> None:
        block: Block | None = self.builder.block
        while block is not None and not block.masked:
            block = block.parent
        if block is not None:
            raise ValueError("a barrier must not stand under w.when or in a loop that lanes leave at different times")
        self.builder.statement(Barrier())

    def _enter(self, masked: bool) -> dict[Any, Any]:
        before = dict(self._memory)
        self.builder.open(masked)
        # What a loop's body changes is unknown at its start; only what this kernel never writes stays known. The same
        # rule serves `when`, at the price of a few loads that the compiler merges again.
        writable = set(self._kernel.writes)
        self._memory = {k: v for k, v in before.items() if k[0] not in writable and not isinstance(k[0], int)}
        return before

    def _leave(self, before: dict[Any, Any], statement: Any) -> None:
        self.builder.close()
        if statement is None:
            self._memory = before
            return
        self.builder.statement(statement)
        fields, locals_ = _changed(statement.body)
        self._memory = {k: v for k, v in before.items() if k[0] not in fields and k[0] not in locals_}

    # -- locals ------------------------------------------------------------------------------------------------------

    def var(self, initial: Any) -> _Variable:
        variable = _Variable(self, self._declare(1, initial))
        variable.value = initial
        return variable

    def array(self, length: int, initial: Any = 0.0) -> _Array:
        array = _Array(self, self._declare(length, initial))
        for i in range(length):
            array[i] = initial
        return array

    def _declare(self, length: int, initial: Any) -> Local:
        self._locals += 1
        if isinstance(initial, Value):
            dtype = initial.dtype
        else:
            dtype = "b" if isinstance(initial, (bool, np.bool_)) else "i" if isinstance(initial, int) else "f"
        return Local(self._locals, length, dtype, self.builder.block)

    def load_local(self, local: Local, index: Any) -> Any:
        if not self.builder.block.inside(local.block):
            raise ValueError("a variable was used outside the block that declared it")
        dynamic = isinstance(index, Value)
        key = (local.ident, index.ident if dynamic else index, "dynamic" if dynamic else None)
        if key not in self._memory:
            place = Place("local", "", 0 if dynamic else index, index if dynamic else None, local)
            self._memory[key] = self.builder.fresh("load", (index,) if dynamic else (), local.dtype, place)
        return self._memory[key]

    def store_local(self, local: Local, index: Any, value: Any) -> None:
        dynamic = isinstance(index, Value)
        if dynamic and not index.uniform:
            raise ValueError(
                "a local array takes a Python int or a loop counter, not a lane's own integer: use a field"
            )
        value = self._operand(value, local.dtype, "variable")
        stale = [k for k in self._memory if k[0] == local.ident and (dynamic or k[2] == "dynamic" or k[1] == index)]
        for key in stale:
            del self._memory[key]
        self._memory[local.ident, index.ident if dynamic else index, "dynamic" if dynamic else None] = value
        place = Place("local", "", 0 if dynamic else index, index if dynamic else None, local)
        self.builder.statement(Store(place, value))

    def table(self, constants: Any) -> _Table:
        return _Table(self, np.asarray(constants))


def _changed(block: Block) -> tuple[set[str], set[int]]:
    """Fields and locals that a block's stores may change."""
    fields: set[str] = set()
    locals_: set[int] = set()
    for item in block.body:
        if isinstance(item, Store):
            if item.place.local is not None:
                locals_.add(item.place.local.ident)
            else:
                fields.add(item.place.name if item.place.kind == "field" else "user." + item.place.name)
        elif isinstance(item, (Loop, When)):
            inner_fields, inner_locals = _changed(item.body)
            fields |= inner_fields
            locals_ |= inner_locals
    return fields, locals_


class _FieldView:
    __slots__ = ("_name", "_prefix", "_shape", "_world")

    def __init__(self, world: TracingWorld, name: str, shape: tuple[int, ...], prefix: tuple[Any, ...]):
        self._world, self._name, self._shape, self._prefix = world, name, shape, prefix

    def _locate(self, index: tuple[Any, ...]) -> tuple[int, Value | None]:
        row = index[0] if isinstance(index[0], Value) else None
        flat = 0
        for axis, (i, n) in enumerate(zip(index, self._shape, strict=True)):
            if isinstance(i, Value):
                if axis:
                    raise ValueError(f"{self._name}: only the first index may be a runtime integer")
                continue
            if not -n <= i < n:
                raise IndexError(f"{self._name}: index {i} is outside 0..{n - 1} in dimension {axis}")
            flat = flat * n + (int(i) % n)
        return flat, row

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) == len(self._shape):
            return self._world.load(self._name, *self._locate(index))
        return [self[(*index, i)] for i in range(self._shape[len(index)])]

    def __setitem__(self, index: Any, value: Any) -> None:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) == len(self._shape):
            self._world.store(self._name, *self._locate(index), value)
            return
        n = self._shape[len(index)]
        if len(value) != n:
            raise ValueError(f"{self._name}{list(index)}: expected {n} components, got {len(value)}")
        for i in range(n):
            self[(*index, i)] = value[i]


class _UserArrays:
    def __init__(self, world: TracingWorld, arrays: Mapping[str, UserArray]):
        self._world, self._arrays = world, arrays

    def __getattr__(self, name: str) -> _UserArray | _SharedArray:
        if name.startswith("_") or name not in self._arrays:
            raise AttributeError(f"no user array named {name!r}")
        columns, dtype, *rows = self._arrays[name]
        if rows:
            return _SharedArray(self._world, name, columns, dtype, *rows)
        return _UserArray(self._world, name, columns, dtype)


class _UserArray:
    def __init__(self, world: TracingWorld, name: str, columns: int, dtype: str):
        self._world, self._name, self._columns, self._dtype = world, name, columns, dtype

    def _check(self, column: int, access: str) -> None:
        if not 0 <= column < self._columns:
            raise IndexError(f"user.{self._name}: column {column} is outside 0..{self._columns - 1}")
        self._world.check("user." + self._name, access)

    def __getitem__(self, column: int) -> Any:
        self._check(column, "read")
        key = ("user." + self._name, column, None)
        if key not in self._world._memory:
            place = Place("user", self._name, column)
            self._world._memory[key] = self._world.builder.fresh("load", (), self._dtype, place)
        return self._world._memory[key]

    def __setitem__(self, column: int, value: Any) -> None:
        self._check(column, "write")
        value = self._world._operand(value, self._dtype, "user." + self._name)
        self._world._memory["user." + self._name, column, None] = value
        self._world.builder.statement(Store(Place("user", self._name, column), value))


class _SharedArray:
    """An array that all environments share, `[row, column]`: every lane gets the same number."""

    def __init__(self, world: TracingWorld, name: str, columns: int, dtype: str, rows: int):
        self._world, self._name, self._shape, self._dtype = world, name, (rows, columns), dtype

    def __getitem__(self, index: tuple[Any, int]) -> Any:
        row, column = index
        rows, columns = self._shape
        if not 0 <= column < columns:
            raise IndexError(f"user.{self._name}: column {column} is outside 0..{columns - 1}")
        if isinstance(row, Value):
            if not row.uniform:
                raise ValueError(f"user.{self._name}: a row of a shared array is a Python int or a loop counter")
        elif not 0 <= row < rows:
            raise IndexError(f"user.{self._name}: row {row} is outside 0..{rows - 1}")
        self._world.check("user." + self._name, "read")
        known = self._world._memory
        runtime = isinstance(row, Value)
        key = ("user." + self._name, column if runtime else row * columns + column, row.ident if runtime else None)
        if key not in known:
            place = Place("user", self._name, key[1], row if runtime else None, shared=True)
            args = (row,) if runtime else ()
            known[key] = self._world.builder.fresh("load", args, self._dtype, place, uniform=True)
        return known[key]

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(f"user.{self._name}: all environments share it, so a kernel cannot write it")


class _Variable:
    __slots__ = ("_local", "_world")

    def __init__(self, world: TracingWorld, local: Local):
        self._world, self._local = world, local

    @property
    def value(self) -> Any:
        return self._world.load_local(self._local, 0)

    @value.setter
    def value(self, new: Any) -> None:
        self._world.store_local(self._local, 0, new)


class _Array:
    __slots__ = ("_local", "_world")

    def __init__(self, world: TracingWorld, local: Local):
        self._world, self._local = world, local

    def _index(self, index: Any) -> Any:
        if not isinstance(index, Value) and not 0 <= index < self._local.length:
            raise IndexError(f"array index {index} is outside 0..{self._local.length - 1}")
        return index

    def __getitem__(self, index: Any) -> Any:
        return self._world.load_local(self._local, self._index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        self._world.store_local(self._local, self._index(index), value)


class _Table:
    """A constant vector: a Python int gives its number, a runtime integer a load (or the number that all share)."""

    def __init__(self, world: TracingWorld, constants: np.ndarray):
        if constants.ndim != 1 or len(constants) == 0:
            raise ValueError(f"w.table: expected a non-empty vector, got shape {constants.shape}")
        self._world = world
        self._dtype = "i" if constants.dtype.kind in "iub" else "f"
        self._constants = tuple(int(c) if self._dtype == "i" else float(c) for c in constants)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, Value):
            return self._constants[index]
        if len(set(map(told_apart, self._constants))) == 1:
            return self._constants[0]
        return self._world.builder.emit("table", (index,), self._dtype, self._constants)
