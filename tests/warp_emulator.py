"""Device code as plain Python: every lane a coroutine, and a random one of them moves next.

The source of device functions is taken as it is. Each call of a device function or of a primitive of cuda_device.py
becomes a `yield from`, and the primitives are those below. A lane stops before each access to global memory, so that
others may come in between, and at each operation of its warp or block until all have come to the same.

Global memory is the process's own memory, at its real addresses. Integers have the signs and sizes of CUDA's. Plain
stores are seen by the own block at once, by others some time until the block's next fence or release, in any order.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import heapq
import inspect
import operator
import random
import types
from dataclasses import dataclass, field
from typing import Any

LANES = 32
GARBAGE = 0x5A5A5A5A  # what is in shared memory at first
LONGEST_SLEEP = 3000  # moves
SEEN = 0.02  # the probability that in a move one of the stores that others do not see yet becomes seen


class TrapError(Exception):
    """The device code ended the kernel by force."""


class HangError(AssertionError):
    """Nobody can move, or nobody has got anywhere for too long."""


def signed(value: int, bits: int = 32) -> int:
    """The low bits of a number as CUDA's signed integer."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


class _Yielding(ast.NodeTransformer):
    """Calls of the named functions become `yield from`."""

    def __init__(self, names: set[str]):
        self.names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self.names:
            return ast.copy_location(ast.YieldFrom(node), node)
        return node


def as_coroutines(modules: list[types.ModuleType], primitives: dict[str, Any], edit: Any = None) -> dict[str, Any]:
    """The functions of some modules of device code as generator functions, by name.

    Args:
      modules: of device code.
      primitives: what replaces functions that are not in the modules.
      edit: source -> source, of each module: plants mistakes.
    """
    sources = [inspect.getsource(module) if edit is None else edit(inspect.getsource(module)) for module in modules]
    made: dict[str, Any] = {}
    for module, (code, names) in zip(modules, _compiled(tuple(sources), frozenset(primitives)), strict=True):
        scope = {**vars(module), **primitives, **made}
        exec(code, scope)
        made |= {name: scope[name] for name in names}
    # Functions of the first modules call those of later ones.
    for function in made.values():
        function.__globals__.update(made)
    return made


@functools.cache
def _compiled(sources: tuple[str, ...], primitives: frozenset[str]) -> list[tuple[Any, list[str]]]:
    """For each module the code that defines its functions, and their names."""
    trees = [ast.parse(source) for source in sources]
    functions = [[node for node in tree.body if isinstance(node, ast.FunctionDef)] for tree in trees]
    called = {node.name for own in functions for node in own} | primitives - {"_I32"}
    found = []
    for own in functions:
        for node in own:
            node.decorator_list = []
            node.body.append(ast.parse("if False:\n    yield").body[0])  # a generator, whatever it calls
        tree = ast.fix_missing_locations(_Yielding(set(called)).visit(ast.Module(own, [])))
        found.append((compile(tree, "device code", "exec"), [node.name for node in own]))
    return found


@dataclass
class Lane:
    """A thread: where it is, and what it waits for."""

    block: int
    thread: int
    body: Any = None
    answer: Any = None
    waits: tuple[Any, ...] | None = None
    warp: Warp | None = None


@dataclass
class Warp:
    """Lanes, and how many of them wait for the others."""

    lanes: list[Lane]
    there: int = 0


@dataclass
class Machine:
    """A GPU that runs one kernel.

    Attributes:
      seed: of what moves next.
      patience: so many moves in which nothing but looking happens are a deadlock.
      sleepy: the probability that a lane does not move for a while.
      late: blocks that do not begin before a number of moves.
      regions: memory that may be touched, as (first address, end).
      moves: so far. progress: the move at which something was last written.
    """

    seed: int
    patience: int = 200_000
    sleepy: float = 0.0
    late: dict[int, int] = field(default_factory=dict)
    regions: list[tuple[int, int]] = field(default_factory=list)
    moves: int = 0
    progress: int = 0
    time: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.shared: dict[tuple[int, int], int] = {}
        self.grid = 0
        self.at_release: list[Any] = []  # called with the block
        self.at_acquire: list[Any] = []
        self.unseen: dict[int, dict[int, tuple[Any, int]]] = {}  # stores of a block that others do not see yet
        self.inside = (0, 0)

    # -- running --

    def launch(self, entry: Any, grid: int, threads: Any, arguments: tuple[int, ...], warp: Any) -> None:
        """Run a kernel to its end.

        Args:
          entry: its function, made by `as_coroutines`. Its arguments are `arguments`.
          grid: blocks.
          threads: of each block, by its number: what only leaves need not be there.
          warp: lanes of a block's warps, by its number.

        Raises:
          TrapError, HangError.
        """
        self.grid = grid
        self.blocks = {b: [Lane(b, t) for t in range(threads(b))] for b in range(grid)}
        for block, lanes in self.blocks.items():
            for first in range(0, len(lanes), warp(block)):
                own = Warp(lanes[first : first + warp(block)])
                for lane in own.lanes:
                    lane.warp, lane.body = own, entry(*arguments)
        self.moves = self.progress = 0
        waiting = sorted(self.late.items(), key=lambda item: item[1])
        ready = [lane for b, lanes in self.blocks.items() if b not in self.late for lane in lanes]
        asleep: list[tuple[int, int, Lane]] = []
        while ready or waiting or asleep:
            while waiting and (not (ready or asleep) or waiting[0][1] <= self.moves):
                ready += self.blocks[waiting.pop(0)[0]]
            while asleep and (not ready or asleep[0][0] <= self.moves):
                ready.append(heapq.heappop(asleep)[2])
            index = int(self.random.random() * len(ready))
            lane = ready[index]
            if self.unseen and self.random.random() < SEEN:
                block = self.random.choice(sorted(self.unseen))
                self.show(block, self.random.choice(sorted(self.unseen[block])))
            waits = self.step(lane)
            rests = not waits and self.random.random() < self.sleepy
            if waits or rests:
                ready[index] = ready[-1]
                ready.pop()
            if waits:
                ready += self.released(lane)
            elif rests:
                until = self.moves + int(self.random.random() * LONGEST_SLEEP)
                heapq.heappush(asleep, (until, self.moves, lane))
            if self.moves - self.progress > self.patience:
                raise HangError(f"nothing but looking for {self.patience} moves")
        for block in list(self.unseen):
            self.release(block)
        stuck = [lane for lanes in self.blocks.values() for lane in lanes if lane.body is not None]
        if stuck:
            raise HangError(f"for ever: {[(lane.block, lane.thread, lane.waits) for lane in stuck[:8]]}")

    def step(self, lane: Lane) -> bool:
        """Move a lane to where it stops next; whether it then waits for others or has ended."""
        self.moves += 1
        self.time += 5
        self.current = lane
        try:
            lane.waits = lane.body.send(lane.answer)
        except StopIteration:
            lane.body, lane.waits, self.progress = None, ("end",), self.moves
            return True
        lane.answer = None
        return lane.waits is not None

    def released(self, lane: Lane) -> list[Lane]:
        """Those that can move on since a lane has come to where it waits."""
        kind = lane.waits[0] if lane.waits else None
        if kind == "barrier":
            _, number, count = lane.waits
            there = [each for each in self.blocks[lane.block] if each.waits and each.waits[:2] == ("barrier", number)]
            if len(there) < count:
                return []
            assert len(there) == count, "more threads at a barrier than it is for"
            return self.go_on(there, [None] * count)  # each barrier of a block has all its threads
        if kind != "warp":
            return []
        warp = lane.warp
        warp.there += 1
        if warp.there < len(warp.lanes):
            return []
        warp.there = 0
        names = {each.waits[1] for each in warp.lanes}
        assert len(names) == 1, f"lanes of a warp at different operations: {names}"
        return self.go_on(warp.lanes, _COLLECTIVES[names.pop()]([each.waits[2:] for each in warp.lanes]))

    def go_on(self, lanes: list[Lane], answers: list[Any]) -> list[Lane]:
        for lane, answer in zip(lanes, answers, strict=True):
            lane.waits, lane.answer = None, answer
        return lanes

    # -- memory --

    def at(self, address: int, kind: Any) -> Any:
        """The integer at an address."""
        size = ctypes.sizeof(kind)
        assert address % size == 0, f"address {address:#x} is not aligned"
        if not self.inside[0] <= address < self.inside[1]:
            found = [region for region in self.regions if region[0] <= address < region[1]]
            assert found, f"address {address:#x} is nobody's"
            self.inside = found[0]
        return kind.from_address(address)

    def shared_word(self, block: int, offset: int) -> int:
        """The int64 at an offset of a block's shared memory."""
        low, high = (self.shared.get((block, offset + half), GARBAGE) for half in (0, 4))
        return high << 32 | (low & 0xFFFFFFFF)

    def set_shared_word(self, block: int, offset: int, value: int) -> None:
        """Write an int64 of a block's shared memory, which consists of int32."""
        self.shared[block, offset], self.shared[block, offset + 4] = signed(value), signed(value >> 32)

    def wrote(self) -> None:
        self.progress = self.moves

    def show(self, block: int, address: int) -> None:
        """A store of a block is seen by all."""
        kind, value = self.unseen[block].pop(address)
        if not self.unseen[block]:
            del self.unseen[block]
        self.at(address, kind).value = value
        self.wrote()

    def release(self, block: int) -> None:
        """So are all that it has made."""
        for address in list(self.unseen.get(block, {})):
            self.show(block, address)
        for each in self.at_release:
            each(block)

    def acquire(self, block: int) -> None:
        """What the block reads from now on is new."""
        for each in self.at_acquire:
            each(block)

    def primitives(self) -> dict[str, Any]:
        """What replaces the functions of cuda_device.py."""
        return {**_memory(self), **_registers(self), **_meeting(self), "_I32": signed}


def _memory(m: Machine) -> dict[str, Any]:
    def load(kind: Any, acquires: bool = False) -> Any:
        def found(address):
            yield
            own = m.unseen.get(m.current.block, {})
            value = own[address][1] if address in own else m.at(address, kind).value
            if acquires:
                m.acquire(m.current.block)
            return value

        return found

    def store(kind: Any) -> Any:
        def wrote(address, value):
            yield
            m.at(address, kind)  # it must be somebody's
            m.unseen.setdefault(m.current.block, {})[address] = kind, value
            m.wrote()

        return wrote

    def set_bits(address, bits):
        yield
        cell = m.at(address, ctypes.c_int32)
        cell.value |= bits
        m.wrote()

    def count(address, value):
        yield
        m.release(m.current.block)
        m.at(address, ctypes.c_int32).value += value
        m.wrote()

    def add(address, value):
        yield
        cell = m.at(address, ctypes.c_int32)
        before, cell.value = cell.value, cell.value + value
        m.wrote()
        return before

    def swap(kind: Any) -> Any:
        def swapped(address, expected, value):
            yield
            cell = m.at(address, kind)
            before = cell.value
            if before == expected:
                cell.value = value
                m.wrote()
            return before

        return swapped

    def load_shared(offset):
        yield
        return m.shared[m.current.block, offset]

    def store_shared(offset, value):
        yield
        assert offset % 4 == 0, f"offset {offset:#x} is not aligned"
        if m.shared.get((m.current.block, offset)) != (value := signed(value)):
            m.shared[m.current.block, offset] = value
            m.wrote()

    def exchange_shared(offset, value):
        yield
        before = m.shared[m.current.block, offset]
        m.shared[m.current.block, offset] = signed(value)
        return before

    def load_shared_word(offset):
        yield
        return m.shared_word(m.current.block, offset)

    def store_shared_word(offset, value):
        yield
        m.set_shared_word(m.current.block, offset, value)

    word, half = ctypes.c_int64, ctypes.c_int32
    return {
        "load_global": load(half), "load_global_word": load(word), "load_constant": load(half),
        "load_constant_word": load(word), "store_global": store(half), "store_global_word": store(word),
        "load_acquire": load(half, True), "load_acquire_word": load(word, True),
        "add_global": add, "count_release": count, "set_global": set_bits,
        "swap_global": swap(half), "swap_global_word": swap(word),
        "load_shared_word": load_shared_word, "store_shared_word": store_shared_word, "load_shared": load_shared,
        "store_shared": store_shared, "exchange_shared": exchange_shared, "load_table": load(half),
    }  # fmt: skip


def _registers(m: Machine) -> dict[str, Any]:
    def value(read: Any) -> Any:
        def found(*arguments):
            return read(*arguments)
            yield

        return found

    def lowest_bit(mask):
        mask &= 0xFFFFFFFF
        return (mask & -mask).bit_length() - 1

    return {
        "thread_index": value(lambda: m.current.thread),
        "block_threads": value(lambda: len(m.blocks[m.current.block])),
        "block_index": value(lambda: m.current.block),
        "multiprocessor": value(lambda: m.current.block),
        "grid_blocks": value(lambda: m.grid),
        "keep_once": value(lambda: None),
        "clock": value(lambda: m.time),
        "lowest_bit": value(lowest_bit),
        "highest_bit": value(lambda mask: (mask & 0xFFFFFFFF).bit_length() - 1),
        "bit": value(lambda place: signed(1 << place if 0 <= place < 32 else 0)),
        "ones": value(lambda mask: (mask & 0xFFFFFFFF).bit_count()),
        "remainder": value(lambda a, b: (a & 0xFFFFFFFF) % (b & 0xFFFFFFFF)),
    }


def _meeting(m: Machine) -> dict[str, Any]:
    def together(name: str) -> Any:
        def meet(*arguments):
            return (yield ("warp", name, *arguments))

        return meet

    def barrier(number, count):
        yield ("barrier", number, count)

    def pause(*_):
        yield

    def fence():
        yield
        m.release(m.current.block)
        m.acquire(m.current.block)

    def trap():
        raise TrapError
        yield

    return {**{name: together(name) for name in _COLLECTIVES}, "barrier": barrier, "sleep": pause,
            "fence_gpu": fence, "fence_system": fence, "fence_device": fence, "fence_block": pause,
            "trap": trap}  # fmt: skip


def _ballot(lanes: list[Any]) -> list[int]:
    return [signed(sum(1 << i for i, (value,) in enumerate(lanes) if value))] * len(lanes)


def _from_lane(lanes: list[Any]) -> list[int]:
    return [signed(int(lanes[source & (LANES - 1)][0])) for _, source in lanes]


def _uniform(lanes: list[Any]) -> list[int]:
    values = {signed(int(value)) for (value,) in lanes}
    assert len(values) == 1, f"lanes differ in what is said to be uniform: {values}"
    return [values.pop()] * len(lanes)


_COLLECTIVES: dict[str, Any] = {
    "ballot": _ballot,
    "from_lane": _from_lane,
    "uniform": _uniform,
    "least": lambda lanes: [signed(min(int(value) & 0xFFFFFFFF for (value,) in lanes))] * len(lanes),
    "total": lambda lanes: [signed(sum(int(value) for (value,) in lanes))] * len(lanes),
    "union": lambda lanes: [signed(functools.reduce(operator.or_, (value for (value,) in lanes)))] * len(lanes),
    "join_warp": lambda lanes: [None] * len(lanes),
}
