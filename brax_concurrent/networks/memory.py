"""Where tensors lie: in one block of memory, in which those that are never needed at once share bytes."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.tensors import Layer, Tensor

ALIGNMENT = 32  # elements of 4 bytes: a line of a GPU's cache
MAX_PIECES = 256  # pixels of a view whose footprint is exact: see scheduler/arrays.py


@dataclass(frozen=True)
class Place:
    """Where a tensor lies, in elements.

    Attributes:
      offset: of the block's first element that belongs to the tensor it is a part of, or to itself.
      channel: at which of that tensor's channels it begins.
      channels: how many that one has.
    """

    offset: int
    channel: int
    channels: int


@dataclass(frozen=True)
class Plan:
    """Memory for one image.

    Attributes:
      places: of all tensors but flags.
      size: elements of the block.
      unshared: what it would be if no tensors shared bytes.
    """

    places: Mapping[Tensor, Place]
    size: int
    unshared: int


def plan_memory(graph: Graph, *, distance: int = 32) -> Plan:
    """Give every tensor but flags its place.

    Args:
      graph: the network.
      distance: a tensor's bytes are given to others only so many layers after its last use. Whoever gets them sooner
        would have to wait for tasks that a window still has, and run after them for no other reason.
    """
    owners = _owners(graph)
    first, last = _lifetimes(graph, owners)
    places: dict[Tensor, Place] = {}
    blocks: list[tuple[int, int, int, int]] = []  # offset, stop, first layer, first layer that may have the bytes
    for tensor in sorted(first, key=lambda each: -each.size):
        needed = -(-tensor.size // ALIGNMENT) * ALIGNMENT
        offset = 0
        for start, stop, begin, free in sorted(blocks):
            if begin <= last[tensor] + distance and first[tensor] < free:  # needed at once
                if offset + needed <= start:
                    break
                offset = max(offset, stop)
        blocks.append((offset, offset + needed, first[tensor], last[tensor] + distance + 1))
        places[tensor] = Place(offset, 0, tensor.channels)
    for tensor, (owner, channel) in owners.items():
        if tensor is not owner:
            places[tensor] = Place(places[owner].offset, channel, owner.channels)
    size = max((stop for _, stop, _, _ in blocks), default=0)
    return Plan(places, size, sum(-(-each.size // ALIGNMENT) * ALIGNMENT for each in first))


def _owners(graph: Graph) -> dict[Tensor, tuple[Tensor, int]]:
    """For every tensor but flags whose memory it lies in, and at which channel there."""
    owners = {graph.input: (graph.input, 0)}
    owners |= {each.output: (each.output, 0) for each in graph.layers if each.output.dtype == "float32"}
    # What the user writes or reads, and what its kernel takes for one piece, become no parts of others.
    fixed = {graph.input, *graph.outputs.values(), *(each.output for each in graph.layers if each.kind == "mix")}
    # From the last layer on: a concatenation may itself be a part of a later one.
    for layer in reversed(graph.layers):
        owner, channel = owners.get(layer.output, (layer.output, 0))
        if layer.kind == "view" and _may_move(layer.inputs[0], fixed, owners):
            owners[layer.inputs[0]] = (owner, channel)
        elif layer.kind == "concat" and _is_exact(layer):
            for tensor in layer.inputs:
                if _may_move(tensor, fixed, owners) and layer.inputs.count(tensor) == 1:
                    owners[tensor] = (owner, channel)
                channel += tensor.channels
    return owners


def _is_exact(layer: Layer) -> bool:
    return layer.output.size // layer.output.channels <= MAX_PIECES


def _may_move(tensor: Tensor, fixed: Set[Tensor], owners: Mapping[Tensor, tuple[Tensor, int]]) -> bool:
    """Whether a tensor may become a part of another: it is none yet."""
    return owners[tensor][0] is tensor and tensor not in fixed


def _lifetimes(
    graph: Graph, owners: Mapping[Tensor, tuple[Tensor, int]]
) -> tuple[dict[Tensor, int], dict[Tensor, int]]:
    """Of every tensor that owns memory: the layers from which on, and up to which, it is needed."""
    end = len(graph.layers)
    first = {graph.input: 0}  # and always after: a network may be run again without a new image
    last = {graph.input: end}
    for index, layer in enumerate(graph.layers):
        for tensor in (*layer.reads, layer.output):
            if tensor in owners:
                owner = owners[tensor][0]
                first.setdefault(owner, index)
                last[owner] = max(last.get(owner, index), index)
    for tensor in graph.outputs.values():
        if tensor in owners:
            last[owners[tensor][0]] = end
    return first, last
