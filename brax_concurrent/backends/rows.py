"""The way between the user's row-major arrays and lanes, in machine-vector code.

A row `(columns,)` belongs to one environment, a vector to one column. Gathering and scattering column by column costs a
machine instruction with as many addresses as lanes each time, and much compile time. So an array that a program
touches is copied through a staging area, `columns` vectors long, in two nested loops: in before the block that uses it,
out behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

from brax_concurrent.backends.program import Block, Loop, Place, Store, UserArray, Value, When

I32, I64 = ir.IntType(32), ir.IntType(64)


@dataclass
class Staging:
    """How one user array is staged.

    Attributes:
        block: the innermost block that holds all its uses and is not repeated.
        load: whether its rows must be read first: something is loaded, or not every column is surely stored.
        store: whether its rows are written back.
    """

    name: str
    columns: int
    dtype: str
    block: Block
    load: bool
    store: bool
    slot: Any = None


@dataclass
class _Uses:
    blocks: list[Block] = field(default_factory=list)
    loaded: bool = False
    stored: dict[int, list[Block]] = field(default_factory=dict)


def _accesses(block: Block) -> Iterator[tuple[Block, Place, bool]]:
    """(block, place, is a store) of all uses of user arrays that have rows of environments."""
    for item in block.body:
        if isinstance(item, Store) and item.place.kind == "user":
            yield block, item.place, True
        elif isinstance(item, Value) and item.op == "load" and item.attr.kind == "user" and not item.attr.shared:
            yield block, item.attr, False
        elif isinstance(item, (Loop, When)):
            yield from _accesses(item.body)


def _loop_bodies(block: Block) -> Iterator[Block]:
    for item in block.body:
        if isinstance(item, (Loop, When)):
            if isinstance(item, Loop):
                yield item.body
            yield from _loop_bodies(item.body)


def plan(root: Block, user: dict[str, UserArray]) -> dict[str, Staging]:
    """Which arrays are staged: those of several columns of numbers."""
    uses: dict[str, _Uses] = {}
    for block, place, is_store in _accesses(root):
        columns, dtype = user[place.name][:2]
        if columns == 1 or dtype == "b":
            continue
        use = uses.setdefault(place.name, _Uses())
        use.blocks.append(block)
        if is_store:
            use.stored.setdefault(place.component, []).append(block)
        else:
            use.loaded = True
    repeated = set(map(id, _loop_bodies(root)))
    plans = {}
    for name, use in uses.items():
        block = _common(use.blocks, repeated)
        columns, dtype = user[name][:2]
        covered = len(use.stored) == columns and all(any(b is block for b in bs) for bs in use.stored.values())
        plans[name] = Staging(name, columns, dtype, block, use.loaded or not covered, bool(use.stored))
    return plans


def _common(blocks: list[Block], repeated: set[int]) -> Block:
    """The innermost block around all of `blocks` that lies in no loop."""

    def path(block: Block) -> list[Block]:
        chain: list[Block] = []
        current: Block | None = block
        while current is not None:
            chain.insert(0, current)
            current = current.parent
        return chain

    paths = [path(b) for b in blocks]
    common = paths[0][0]
    for level in zip(*paths, strict=False):
        if any(b is not level[0] for b in level) or id(level[0]) in repeated:
            break
        common = level[0]
    return common


class RowCopier:
    """Emits the copies of one program. `e` is the Emitter that it serves."""

    def __init__(self, e: Any):
        self.e = e
        self.plans = plan(e.program.root, dict(e.program.user))
        with e.b.goto_entry_block():
            for p in self.plans.values():
                p.slot = e.b.alloca(e.type(p.dtype), size=p.columns)
                p.slot.align = 64
            environments = e.b.alloca(e.env_lane.type)
        e.b.store(e.env_lane, environments)
        self._environments = e.b.bitcast(environments, ir.PointerType(I64))

    def enter(self, block: Block) -> None:
        for p in self.plans.values():
            if p.block is block and p.load:
                self._copy(p, into_lanes=True)

    def leave(self, block: Block) -> None:
        for p in self.plans.values():
            if p.block is block and p.store:
                self._copy(p, into_lanes=False)

    def load(self, place: Place) -> Any:
        p = self.plans[place.name]
        return self.e.b.load(self._vector(p, place.component), align=self._align(p))

    def store(self, place: Place, new: Any) -> None:
        e, p = self.e, self.plans[place.name]
        slot = self._vector(p, place.component)
        if e.mask is not None and e.level[id(p.block)] != e.mask_level:
            new = e.b.select(e.mask, new, e.b.load(slot, align=self._align(p)))
        e.b.store(new, slot, align=self._align(p))

    def _vector(self, p: Staging, column: int) -> Any:
        return self.e.b.gep(p.slot, [I32(column)])

    def _align(self, p: Staging) -> int:
        return self.e.lanes * self._size(p)

    def _size(self, p: Staging) -> int:
        return 4 if p.dtype == "i" else int(self.e.item)

    def _copy(self, p: Staging, into_lanes: bool) -> None:
        """Copy each lane's row, element by element.

        Inactive lanes are not written back; in lanes beyond the last environment another one's row is read.
        """
        e, b, kind = self.e, self.e.b, self.e.scalar_type(p.dtype)
        pointer = ir.PointerType(kind)
        rows, lanes = b.bitcast(e.user[p.name], pointer), b.bitcast(p.slot, pointer)
        mask = e.env_valid if e.mask is None else b.and_(e.mask, e.env_valid)
        bits = b.bitcast(mask, ir.IntType(e.lanes))
        with _counted(b, I32(e.lanes)) as lane:
            active = b.trunc(b.lshr(bits, b.trunc(lane, bits.type) if e.lanes < 32 else lane), ir.IntType(1))
            with b.if_then(ir.IntType(1)(1) if into_lanes else active):
                env = b.load(b.gep(self._environments, [lane]))
                row = b.gep(rows, [b.mul(env, I64(p.columns))])
                with _counted(b, I32(p.columns)) as column:
                    element = b.gep(row, [column])
                    place = b.gep(lanes, [b.add(b.mul(column, I32(e.lanes)), lane)])
                    source, target = (element, place) if into_lanes else (place, element)
                    b.store(b.load(source, align=self._size(p)), target, align=self._size(p))


class _counted:  # noqa: N801  # a context manager
    """`for counter in range(count)` in LLVM IR."""

    def __init__(self, builder: Any, count: Any):
        self.b, self.count = builder, count

    def __enter__(self) -> Any:
        b = self.b
        before = b.block
        self.head, self.body, self.done = (b.append_basic_block(x) for x in ("row_head", "row_body", "row_done"))
        b.branch(self.head)
        b.position_at_end(self.head)
        self.counter = b.phi(I32)
        self.counter.add_incoming(I32(0), before)
        b.cbranch(b.icmp_signed("<", self.counter, self.count), self.body, self.done)
        b.position_at_end(self.body)
        return self.counter

    def __exit__(self, *_: Any) -> None:
        b = self.b
        self.counter.add_incoming(b.add(self.counter, I32(1)), b.block)
        b.branch(self.head)
        b.position_at_end(self.done)
