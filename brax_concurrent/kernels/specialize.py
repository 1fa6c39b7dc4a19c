"""A stream's kernels, traced for one robot and simplified together.

Tracing kernel by kernel would lose what one kernel knows of another's results. So the kernels of a stream are traced
until the facts (components that all writers agree are one constant) stop changing; then everything that no user array
depends on is removed, and fused multiply-adds are formed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from brax_concurrent.backends.program import Barrier, Block, Break, Loop, Place, Store, UserArray, Value, When, walk
from brax_concurrent.kernels.kernel import Kernel
from brax_concurrent.kernels.layout import MODEL_PREFIX, Field
from brax_concurrent.kernels.trace import VARYING, Facts, Trace, trace


class ConstArray:
    """A model array whose elements are Python numbers and whose rows are ConstArrays."""

    __slots__ = ("_data",)

    def __init__(self, data: np.ndarray):
        self._data = data

    def __getitem__(self, index: Any) -> Any:
        item = self._data[index]
        return item.item() if item.ndim == 0 else ConstArray(item)

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self._data)))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self._data, dtype)


class ModelView:
    """The `m` of docs/lanes.md: a Model whose arrays give Python numbers, or fields where they differ by environment.

    Args:
        model: the Model.
        per_env: names of the quantities that are fields instead of constants.
    """

    def __init__(self, model: Any, per_env: Sequence[str] = (), world: Any = None):
        self._model, self._per_env, self._world = model, tuple(per_env), world
        self._cache: dict[str, Any] = {}

    def bind(self, world: Any) -> ModelView:
        """The view inside one kernel run."""
        return ModelView(self._model, self._per_env, world)

    def __getattr__(self, name: str) -> Any:
        if name in self._cache:
            return self._cache[name]
        if name in self._per_env and self._world is not None:
            item = self._world.field(MODEL_PREFIX + name)
        else:
            item = getattr(self._model, name)
            if isinstance(item, np.ndarray):
                item = ConstArray(item)
        self._cache[name] = item
        return item


@dataclass(frozen=True)
class TileLayout:
    """Where fields lie in a tile's arena: row r holds one component of 32 environments.

    Attributes:
        rows: (field, flat component) to row; components that nobody loads have none.
        row_stride: for fields with runtime rows, rows of storage between consecutive first indices.
        num_rows: length of the arena in rows.
        precision: "f32" or "f64".
    """

    rows: Mapping[tuple[str, int], int]
    row_stride: Mapping[str, int]
    num_rows: int
    precision: str

    @property
    def row_bytes(self) -> int:
        return 32 * (4 if self.precision == "f32" else 8)

    @property
    def arena_bytes(self) -> int:
        """Bytes of one tile."""
        return max(self.num_rows, 1) * self.row_bytes


@dataclass(frozen=True)
class LaneProgram:
    """One kernel, ready for a backend.

    Attributes:
        name: the kernel's name.
        root: the program.
        layout: the arena it works on.
        user: the stream's user arrays in order, by name.
        when: a tile in which the 32 int32 from this byte of its arena on are 0 may skip the kernel; None: none may.
    """

    name: str
    root: Block
    layout: TileLayout
    user: Mapping[str, UserArray]
    when: int | None = None


Spans = list[Any]
"""Places that a kernel touches: names of user arrays, and [start, stop) bytes of the arena."""


def touched(program: LaneProgram) -> tuple[Spans, Spans]:
    """What a kernel reads and what it writes, as it was compiled: nothing that folding or pruning removed."""
    rows: tuple[set[int], set[int]] = (set(), set())
    names: tuple[dict[str, None], dict[str, None]] = ({}, {})
    counts: dict[int, Any] = {item.counter.ident: item.count for item in walk(program.root) if isinstance(item, Loop)}
    for item in walk(program.root):
        if isinstance(item, Store):
            place, access = item.place, 1
        elif isinstance(item, Value) and item.op == "load":
            place, access = item.attr, 0
        else:
            continue
        if place.kind == "user":
            names[access][place.name] = None
        elif place.kind == "field":
            rows[access].update(_rows_of(program.layout, place, counts))
    return tuple([*names[a], *_ranges(rows[a], program.layout.row_bytes)] for a in (0, 1))  # type: ignore[return-value]


def _rows_of(layout: TileLayout, place: Place, counts: Mapping[int, Any]) -> list[int]:
    if place.index is None:
        return [layout.rows[place.name, place.component]]
    first, stride = layout.rows[place.name, place.component], layout.row_stride[place.name]
    count = sum(1 for name, _ in layout.rows if name == place.name) // stride
    low, high = _bounds(place.index, counts) or (0, count - 1)
    return [first + stride * i for i in range(max(low, 0), min(high, count - 1) + 1)]


def _bounds(index: Any, counts: Mapping[int, Any]) -> tuple[int, int] | None:
    """The least and the greatest that an integer can be, if it is made of constants and of loops' counters only.

    Args:
        index: the integer.
        counts: of each loop, by its counter's number.
    """
    if not isinstance(index, Value):
        return index, index
    if index.op == "counter":
        count = counts[index.ident]
        return None if isinstance(count, Value) else (0, count - 1)
    sides = [_bounds(each, counts) for each in index.args] if index.op in ("add", "mul") else []
    if len(sides) != 2 or sides[0] is None or sides[1] is None:
        return None
    (a, b), (c, d) = sides[0], sides[1]
    corners = (a + c, b + d) if index.op == "add" else (a * c, a * d, b * c, b * d)
    return min(corners), max(corners)


def _ranges(rows: set[int], row_bytes: int) -> list[tuple[int, int]]:
    """Neighbouring rows as byte ranges."""
    ranges: list[tuple[int, int]] = []
    for row in sorted(rows):
        start, stop = row * row_bytes, (row + 1) * row_bytes
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return ranges


@dataclass(frozen=True)
class Specialized:
    """A stream's programs by kernel name, and their common layout."""

    programs: Mapping[str, LaneProgram]
    layout: TileLayout
    user: Mapping[str, UserArray]


def specialize(
    kernels: Iterable[Kernel],
    view: ModelView,
    fields: Mapping[str, Field],
    user: Mapping[str, UserArray],
    precision: str = "f32",
) -> Specialized:
    """Trace and simplify the kernels of a stream.

    Args:
        kernels: in program order; repeats are traced once.
        view: the model.
        fields: all fields that the kernels may name.
        user: user arrays by name: (columns, dtype "f", "i" or "b"), and the rows of those that are shared.
        precision: "f32" or "f64".

    Raises:
        UndeclaredAccessError: see trace().
        ValueError: a kernel reads a component that no kernel writes, or does something where its `when` is 0.
    """
    distinct = list({k.name: k for k in kernels}.values())
    traces = _trace_until_stable(distinct, view, fields, user, precision)
    liveness = _Liveness(traces, fields)
    layout = _lay_out(liveness.loaded, liveness.dynamic, fields, precision)
    programs = {}
    for t in traces:
        _prune(t.root, liveness.live)
        form_fma(t.root)
        when = predicate_row(t.kernel, t.root, layout, fields)
        programs[t.kernel.name] = LaneProgram(t.kernel.name, t.root, layout, user, when)
    return Specialized(programs, layout, user)


def _trace_until_stable(
    kernels: Sequence[Kernel],
    view: ModelView,
    fields: Mapping[str, Field],
    user: Mapping[str, UserArray],
    precision: str,
) -> list[Trace]:
    """Trace with the facts of the last round until they hold. A fact that failed once is never assumed again."""
    facts: Facts = {}
    broken: set[tuple[str, int]] = set()
    while True:
        found: Facts = {}
        traces = []
        for k in kernels:
            t = trace(k, view, fields, user, facts, precision)
            traces.append(t)
            for place, value in t.facts.items():
                agrees = place not in found or (found[place] is not VARYING and found[place] == value)
                found[place] = value if value is not VARYING and agrees and place not in broken else VARYING
        constants = {place: value for place, value in found.items() if value is not VARYING}
        if constants == facts:
            return traces
        broken |= {place for place, value in facts.items() if constants.get(place) != value}
        facts = {place: value for place, value in constants.items() if place not in broken}


class _Liveness:
    """What the user arrays depend on, over all kernels of a stream.

    Attributes:
        live: identities of the live values and statements.
        loaded: (field, flat component) that some live load reads.
        dynamic: fields that are read or written with a runtime row.
    """

    def __init__(self, traces: Sequence[Trace], fields: Mapping[str, Field]):
        self.live: set[int] = set()
        self.loaded: set[tuple[str, int]] = set()
        self.dynamic: set[str] = set()
        self._fields = fields
        self._stores: dict[Any, list[tuple[Store, Block]]] = {}
        self._owner: dict[int, tuple[Any, Block]] = {}  # inner block -> its statement and the block that holds it
        self._work: list[Any] = []
        for t in traces:
            self._index(t.root)
        for store, block in self._stores.pop("user", []):
            self._mark_store(store, block)
        while self._work:
            self._visit(self._work.pop())
        self._check_written()

    def _rows(self, place: Place) -> list[tuple[str, int]]:
        shape = self._fields[place.name].shape
        if place.index is None:
            return [(place.name, place.component)]
        stride = prod(shape[1:])
        return [(place.name, r * stride + place.component) for r in range(shape[0])]

    def _index(self, block: Block) -> None:
        for item in block.body:
            if isinstance(item, Store):
                keys: list[Any] = ["user"]
                if item.place.kind == "field":
                    keys = list(self._rows(item.place))
                    if item.place.index is not None:
                        self.dynamic.add(item.place.name)
                elif item.place.local is not None:
                    keys = [item.place.local]
                for key in keys:
                    self._stores.setdefault(key, []).append((item, block))
            elif isinstance(item, (Loop, When)):
                self._owner[id(item.body)] = (item, block)
                self._index(item.body)

    def _mark_store(self, store: Store, block: Block) -> None:
        if id(store) not in self.live:
            self.live.add(id(store))
            self._work += [store.value, store.place.index]
            self._mark_block(block)

    def _mark_block(self, block: Block) -> None:
        while id(block) in self._owner and id(block) not in self.live:
            self.live.add(id(block))
            statement, outer = self._owner[id(block)]
            self.live.add(id(statement))
            self._work += [statement.count, *statement.words] if isinstance(statement, Loop) else [statement.cond]
            for item in block.body:
                if isinstance(item, Break):
                    self.live.add(id(item))
                    self._work.append(item.cond)
            block = outer

    def _visit(self, value: Any) -> None:
        if not isinstance(value, Value) or id(value) in self.live:
            return
        self.live.add(id(value))
        self._work += value.args
        if value.op != "load":
            return
        self._mark_block(value.block)
        place: Place = value.attr
        sources: list[Any] = []
        if place.kind == "field":
            if place.index is not None:
                self.dynamic.add(place.name)
            sources = [row for row in self._rows(place) if row not in self.loaded]
            self.loaded.update(sources)
        elif place.local is not None:
            sources = [place.local]
        for source in sources:
            for store, block in self._stores.get(source, []):
                self._mark_store(store, block)

    def _check_written(self) -> None:
        for name in sorted({n for n, _ in self.loaded}):
            rows = [c for n, c in self.loaded if n == name]
            if not any((name, c) in self._stores for c in rows):
                raise ValueError(f"field {name!r} is read, but no kernel of the stream writes it")


def _lay_out(
    loaded: set[tuple[str, int]], dynamic: set[str], fields: Mapping[str, Field], precision: str
) -> TileLayout:
    """Rows for all loaded components, in the order of `fields`; whole records for fields with runtime rows."""
    rows: dict[tuple[str, int], int] = {}
    row_stride: dict[str, int] = {}
    count = 0
    for name, f in fields.items():
        if name in dynamic:
            stride = prod(f.shape[1:])
            kept = sorted({c % stride for n, c in loaded if n == name})
            row_stride[name] = len(kept)
            for r in range(f.shape[0] if kept else 0):
                for c in kept:
                    rows[name, r * stride + c] = count
                    count += 1
        else:
            for c in range(prod(f.shape)):
                if (name, c) in loaded:
                    rows[name, c] = count
                    count += 1
    return TileLayout(rows, row_stride, count, precision)


def predicate_row(kernel: Kernel, root: Block, layout: TileLayout, fields: Mapping[str, Field]) -> int | None:
    """Where the kernel's `when` lies in the arena; None if it has none, or none is left because all of it is known.

    Raises:
        ValueError: `when` is no int field of one number, or the program does something where it is 0.
    """
    if not kernel.when:
        return None
    known = fields.get(kernel.when)
    if known is None or known.dtype != "i" or prod(known.shape) != 1:
        raise ValueError(
            f"kernel {kernel.name}: when: expected the name of an int field of one number, got {kernel.when!r}"
        )
    if not any(_loads(item, kernel.when) for item in walk(root)):
        return None
    for item in root.body:
        if not isinstance(item, (Value, Barrier)) and not (
            isinstance(item, When) and _false_at_0(item.cond, kernel.when)
        ):
            raise ValueError(f"kernel {kernel.name}: when: expected all that it does under w.when({kernel.when} == 1)")
    return layout.rows[kernel.when, 0] * layout.row_bytes


def _loads(item: Any, name: str) -> bool:
    return isinstance(item, Value) and item.op == "load" and item.attr.kind == "field" and item.attr.name == name


def _false_at_0(cond: Any, name: str) -> bool:
    """Whether a condition is that a field equals something but 0, or implies it."""
    if not isinstance(cond, Value):
        return False
    if cond.op == "and":
        return any(_false_at_0(each, name) for each in cond.args)
    negated = cond.op == "not"
    test = cond.args[0] if negated else cond
    if not isinstance(test, Value) or test.op != "eq":
        return False
    numbers = [each for each in test.args if not isinstance(each, Value)]
    return len(numbers) == 1 and any(_loads(each, name) for each in test.args) and (numbers[0] == 0) == negated


def _prune(block: Block, live: set[int]) -> None:
    """Keep what is live only."""
    block.body = [item for item in block.body if id(item) in live or isinstance(item, Barrier)]
    for item in block.body:
        if isinstance(item, (Loop, When)):
            _prune(item.body, live)


def form_fma(block: Block) -> None:
    """Turn sums with a product into fused multiply-adds, by one rule: the right operand's product, else the left's.

    A product that is also used elsewhere stays for those uses: forming the fused operation costs nothing, and the
    result does not depend on who else uses the product.
    """
    for item in block.body:
        if isinstance(item, (Loop, When)):
            form_fma(item.body)
        elif isinstance(item, Value) and item.op in ("add", "sub") and item.dtype == "f":
            a, b = item.args
            minus = item.op == "sub"
            if isinstance(b, Value) and b.op == "mul":
                item.op, item.args, item.attr = "fma", (b.args[0], b.args[1], a), (minus, False)
            elif isinstance(a, Value) and a.op == "mul":
                item.op, item.args, item.attr = "fma", (a.args[0], a.args[1], b), (False, minus)
