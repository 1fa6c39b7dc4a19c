"""The memory in which `check.py` runs kernels: all that they can reach, and what lies around it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from brax_concurrent.backends.cpu_program import ALWAYS
from brax_concurrent.backends.native import PREDICATE_ROW, TILE
from brax_concurrent.scheduler.footprint import Footprint, Segment
from brax_concurrent.scheduler.serial import ARENA, ArenaField, TileOp, TileProgram

_ALIGNMENT = 64
_ARENA_GUARD, _BUFFER_GUARD = 1 << 16, 1 << 12  # bytes around each: a wrong record index stays within the arenas'
_UNWRITTEN, _NAN = 0xA5, 0xFF
_FLOATS = (1e30, -1e30, 1e-30)  # put in place of floats
_KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


@dataclass(frozen=True)
class Region:
    """An array in the checker's memory: bytes [first, first + size) of a buffer, from `start` on."""

    label: str
    buffer: int
    first: int
    start: int
    size: int


@dataclass(frozen=True)
class Place:
    """Bytes [start, stop) of the checker's memory; messages count from `origin`."""

    label: str
    start: int
    stop: int
    origin: int


class Memory:
    """All that kernels can reach, side by side in one block: each tile's arena and each buffer, with guards around."""

    def __init__(self, program: TileProgram, num_envs: int, names: Sequence[ArenaField]):
        self._layout, self._num_envs = program.layout, num_envs
        self._names = _sorted_fields(names, program.layout.arena_bytes)
        self._tiles = -(-num_envs // TILE)
        self._regions: list[Region] = []
        end = _ARENA_GUARD
        for tile in range(self._tiles):
            end = self._add("the arena", ARENA, tile * program.layout.arena_bytes, end, program.layout.arena_bytes)
        for index, spec in enumerate(program.layout.buffers):
            end = self._add(f"buffer {spec.name}", index, 0, end, program.layout.whole(index, num_envs).stop)
        block = np.empty(end + _ALIGNMENT, np.uint8)
        shift = -block.ctypes.data % _ALIGNMENT
        self.bytes = block[shift : shift + end]
        starts = {r.buffer: r.start for r in self._regions}
        address = self.bytes.ctypes.data
        self._pointers = np.array([address + starts[i] for i in range(len(program.layout.buffers))], np.int64)
        self._make_others()
        self.places = cache(self._places)

    def _add(self, label: str, buffer: int, first: int, start: int, size: int) -> int:
        """Put an array at `start`; returns where there is room for the next."""
        self._regions.append(Region(label, buffer, first, start, size))
        guard = _ARENA_GUARD if buffer == ARENA else _BUFFER_GUARD
        return -(-(start + size) // _ALIGNMENT) * _ALIGNMENT + guard

    # -- running

    def take(self, buffers: Sequence[np.ndarray]) -> None:
        """Start a program: the buffers' contents in, arenas and guards as nobody would leave them."""
        specs = self._layout.buffers
        if len(buffers) != len(specs):
            names = ", ".join(spec.name for spec in specs)
            raise ValueError(f"expected {len(specs)} buffers ({names}), got {len(buffers)}")
        self.bytes[:] = _UNWRITTEN
        for region in self._regions:
            here = self.bytes[region.start : region.start + region.size]
            if region.buffer == ARENA:
                here[:] = _NAN
                continue
            spec, array = specs[region.buffer], buffers[region.buffer]
            shape = spec.array_shape(self._num_envs)
            if array.shape != shape or array.dtype != spec.dtype:
                raise ValueError(
                    f"buffer {spec.name}: expected {spec.dtype}{list(shape)}, got {array.dtype}{list(array.shape)}"
                )
            here[:] = np.frombuffer(array.tobytes(), np.uint8)

    def give(self, buffers: Sequence[np.ndarray]) -> None:
        """The contents of the buffers that the program may write, back to the caller's arrays."""
        for region in self._regions:
            if region.buffer != ARENA and self._layout.buffers[region.buffer].access != "read":
                array = buffers[region.buffer]
                here = self.bytes[region.start : region.start + region.size]
                array[...] = here.view(array.dtype).reshape(array.shape)

    def allows(self, op: TileOp, tile: int) -> bool:
        """Whether the op's predicate lets it run now."""
        if op.predicate == ALWAYS:
            return True
        start = self._regions[tile].start + op.predicate
        return bool(self.bytes[start : start + PREDICATE_ROW].any())

    def call(self, op: TileOp, tile: int) -> None:
        """Run an op's kernel on a tile."""
        arena = self.bytes.ctypes.data + self._regions[tile].start
        _KERNEL(op.kernel.address)(arena, self._pointers.ctypes.data, tile * TILE, self._num_envs)

    # -- what else memory could hold

    def others(self, now: np.ndarray, turn: int) -> Iterator[np.ndarray]:
        """Memory that differs from `now`: once all NaN and -1, once huge and tiny numbers and neighbouring integers.

        The second finds what a NaN does not, a comparison that is false either way. Its numbers alternate from element
        to element, so that some lane takes the other branch, and with `turn`. Integers differ by 1, so that an index
        stays within the guards.
        """
        yield np.full_like(now, _NAN)
        yield np.where(self._is_float, self._floats[turn % len(self._floats)], now.view(np.uint32) ^ self._flips).view(
            np.uint8
        )

    def _make_others(self) -> None:
        """By 4-byte word: whether it is a float's, what floats become instead, which bits of others are inverted."""
        words = len(self.bytes) // 4
        self._is_float, self._flips = np.zeros(words, bool), np.ones(words, np.uint32)
        self._floats = [np.zeros(words, np.uint32) for _ in _FLOATS]
        for start, stop, dtype in self._typed():
            part = slice(start // 4, -(-stop // 4))
            if np.dtype(dtype).kind == "f":
                self._is_float[part] = True
                for turn, floats in enumerate(self._floats):
                    values = np.roll(_FLOATS, turn)
                    floats[part].view(dtype)[:] = np.resize(values, (stop - start) // np.dtype(dtype).itemsize)
            elif np.dtype(dtype).itemsize == 1:
                self._flips[part] = 0x01010101

    def _typed(self) -> Iterator[tuple[int, int, str]]:
        for region in self._regions:
            if region.buffer != ARENA:
                yield region.start, region.start + region.size, self._layout.buffers[region.buffer].dtype
                continue
            if not self._names:
                yield region.start, region.start + region.size, "int32"
            for field in self._names:
                yield region.start + field.start, region.start + field.stop, field.dtype

    # -- what is where

    def declared(self, footprint: Footprint) -> tuple[np.ndarray, np.ndarray]:
        """Which bytes a footprint lets a kernel read and write."""
        if footprint.everything:
            everything = [Segment(region.buffer, region.first, region.first + region.size) for region in self._regions]
            return self._mask(everything), self._mask(everything)
        return self._mask(footprint.reads), self._mask(footprint.writes)

    def _mask(self, segments: Iterable[Segment]) -> np.ndarray:
        mask = np.zeros(len(self.bytes), bool)
        for segment in segments:
            for region in self._regions:
                if region.buffer == segment.buffer:
                    start, stop = (min(max(x - region.first, 0), region.size) for x in (segment.start, segment.stop))
                    mask[region.start + start : region.start + stop] = True
        return mask

    def _places(self, tile: int) -> list[Place]:
        """All memory in pieces with names, as one tile sees it."""
        places = []
        end = 0
        for index, region in enumerate(self._regions):
            last = index + 1 == len(self._regions)
            behind = len(self.bytes) if last else (region.start + region.size + self._regions[index + 1].start) // 2
            places.append(Place(f"what lies before {region.label}", end, region.start, region.start))
            inside = self._in_arena(region, index == tile) if region.buffer == ARENA else self._in_buffer(region, tile)
            places += [replace(p, start=p.start + region.start, stop=p.stop + region.start) for p in inside]
            places.append(Place(f"what lies behind {region.label}", region.start + region.size, behind, region.start))
            end = behind
        return [place for place in places if place.start < place.stop]

    def _in_arena(self, region: Region, own: bool) -> Iterator[Place]:
        suffix = "" if own else " of another tile"
        end = 0
        for field in [*self._names, ArenaField("", region.size, region.size)]:
            yield Place(f"the arena{suffix}", end, field.start, region.start)
            yield Place(f"field {field.name}{suffix}", field.start, field.stop, region.start)
            end = field.stop

    def _in_buffer(self, region: Region, tile: int) -> Iterator[Place]:
        start, stop = 0, region.size
        spec = self._layout.buffers[region.buffer]
        if spec.per_env:
            start, stop = (min(n * TILE * spec.item_bytes, region.size) for n in (tile, tile + 1))
        other = f"{region.label}, another tile's rows"
        yield Place(other, 0, start, region.start)
        yield Place(region.label, start, stop, region.start)
        yield Place(other, stop, region.size, region.start)


def _sorted_fields(fields: Sequence[ArenaField], arena_bytes: int) -> list[ArenaField]:
    result = sorted(fields, key=lambda field: field.start)
    end = 0
    for field in result:
        if not end <= field.start <= field.stop <= arena_bytes:
            raise ValueError(
                f"names: field {field.name} has bytes [{field.start}, {field.stop}), expected them within "
                f"[{end}, {arena_bytes}), beside the other fields"
            )
        end = field.stop
    return result
