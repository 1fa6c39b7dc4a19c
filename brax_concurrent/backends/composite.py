"""Composites: several programs, each for its own number of environments, run by one job.

A job that runs one program leaves threads idle at its end, while the last tiles are worked on. A job that runs all
programs has one such end instead of one for each, and its threads take another program's tiles meanwhile.

The parts' tiles are dealt in the order of the parts, one at a time, to whoever is free. Put the part whose tiles take
longest first and the one with the quickest last: then nobody starts a long tile when the others are about to finish,
and the threads end within a quick tile of each other (longest processing time first, R. L. Graham 1969).

Which part a tile belongs to changes nothing else: it runs the part's own kernels, on the part's own buffers, from first
to last in one arena. So each part computes, bit for bit, what it computes when it is run alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from brax_concurrent.backends.cpu_program import BufferSpec, CpuProgram, assemble, content_hash
from brax_concurrent.backends.native import (
    DESC_ARENA_BYTES,
    DESC_NUM_ENVS,
    DESC_OPS,
    DESC_SCRATCH_BYTES,
    DESC_STEPS,
    DESC_THREADS,
    DESC_TILES,
    TILE,
)


@dataclass(frozen=True)
class Part:
    """A program's place in a composite.

    name      unlike the other parts': its buffers are called "NAME.BUFFER"
    program   what its tiles run; no composite
    num_envs  its environments, at least 1
    """

    name: str
    program: CpuProgram
    num_envs: int

    @property
    def buffers(self) -> tuple[BufferSpec, ...]:
        """Its buffers as the composite has them: of fixed shape, the axis of environments included."""
        return tuple(
            replace(spec, name=f"{self.name}.{spec.name}", shape=self._shape(spec), per_env=False, per_step=False)
            for spec in self.program.buffers
        )

    def _shape(self, spec: BufferSpec) -> tuple[int, ...]:
        return spec.array_shape(self.num_envs, self.program.steps)


def build_composite(parts: Sequence[Part], *, threads: int = 0) -> CpuProgram:
    """One program that does what several do.

    Args:
      parts: in the order in which their tiles are dealt; the part whose tiles take longest first.
      threads: run on at most so many; 0: on all. A part's own limit holds for the composite: it may be 1 because the
        part's tiles depend on each other.

    Returns:
      A program for exactly the parts' environments. Its buffers are the parts', in the order of the parts, with shapes
      that include the axis of environments.

    Raises:
      ValueError: no parts, two of one name, num_envs below 1, threads below 0, or a part that is a composite; the
        message names the part.
    """
    if not parts:
        raise ValueError("parts: expected at least one, got none")
    if threads < 0:
        raise ValueError(f"threads must not be negative, got {threads}")
    names = [part.name for part in parts]
    for part in parts:
        if names.count(part.name) > 1:
            raise ValueError(f"part {part.name}: names must differ, got {names}")
        if part.num_envs < 1:
            raise ValueError(f"part {part.name}: num_envs must be at least 1, got {part.num_envs}")
        if part.program.num_envs is not None:
            raise ValueError(f"part {part.name}: a composite cannot be a part; give its parts")
    buffers = [spec for part in parts for spec in part.buffers]
    if len({spec.name for spec in buffers}) != len(buffers):
        raise ValueError(f"parts: two have a buffer of one name, got {sorted(spec.name for spec in buffers)}")
    limits = [limit for limit in (threads, *(int(part.program.desc[DESC_THREADS]) for part in parts)) if limit]
    words = {
        DESC_OPS: len(parts),
        DESC_ARENA_BYTES: max(int(part.program.desc[DESC_ARENA_BYTES]) for part in parts),
        DESC_SCRATCH_BYTES: max(int(part.program.desc[DESC_SCRATCH_BYTES]) for part in parts),
        DESC_THREADS: min(limits, default=0),
        DESC_STEPS: max(part.program.steps for part in parts),
        DESC_NUM_ENVS: sum(part.num_envs for part in parts),
        DESC_TILES: sum(-(-part.num_envs // TILE) for part in parts),
    }
    content = tuple((part.name, part.program.fingerprint, part.num_envs) for part in parts)
    return assemble(
        words,
        [(part.program.address, part.num_envs) for part in parts],
        buffers,
        content_hash("composite", content, words[DESC_THREADS]),
        [part.program for part in parts],
    )
