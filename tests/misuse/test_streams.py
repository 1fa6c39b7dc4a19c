"""Streams that cannot be right are refused, with the kernel and the place, before anything runs."""

from __future__ import annotations

import dataclasses

import pytest
from toy_programs import ACCELERATION, ANY_FAST, ARENA_BYTES, ENERGY, PENDULUM, integrate, kernel, pendulum

from brax_concurrent.envs import make
from brax_concurrent.envs.program import tile_program
from brax_concurrent.scheduler.footprint import EVERYTHING, Footprint, Segment
from brax_concurrent.scheduler.serial import (
    ARENA,
    ArenaField,
    TileComposite,
    TileOp,
    TilePart,
    TileProgram,
    check_written,
    compile_composite,
    compile_serial,
)

FIELDS = (
    ArenaField("acceleration", ACCELERATION, ACCELERATION + 128),
    ArenaField("energy", ENERGY, ENERGY + 128),
    ArenaField("any_fast", ANY_FAST, ANY_FAST + 4, "int32"),
)
NAMED = dataclasses.replace(PENDULUM, fields=FIELDS)
OPS = pendulum().ops


def program(*ops):
    return TileProgram(NAMED, ops)


def with_footprint(op, footprint):
    return TileOp(dataclasses.replace(op.kernel, footprint=lambda tile: footprint), op.predicate)


@pytest.mark.parametrize(
    ("span", "said"),
    [
        ((300, ARENA_BYTES + 4), r"kernel solve: arena bytes must be within \[0, 384\], got \[300, 388\)"),
        ((-4, 4), r"kernel solve: arena bytes must be within \[0, 384\], got \[-4, 4\)"),
        ((8, 4), r"kernel solve: arena bytes must be within \[0, 384\], got \[8, 4\)"),
        ("qq", r"kernel solve: no buffer is called 'qq'; there are \['q', 'gravity', 'energy', 'slowed'\]"),
    ],
)
@pytest.mark.parametrize("side", ["reads", "writes"])
def test_a_footprint_outside_of_memory_names_the_kernel(side, span, said):
    with pytest.raises(ValueError, match=said):
        PENDULUM.footprint(**{side: (span,)}, kernel="solve")


@pytest.mark.parametrize(
    ("segment", "said"),
    [
        (Segment(4, 0, 4), "kernel integrate reads buffer 4; there are 4 buffers"),
        (Segment(-2, 0, 4), "kernel integrate reads buffer -2; there are 4 buffers"),
        (Segment(1, 0, 8), r"kernel integrate reads bytes \[0, 8\) of buffer gravity, which has 4 bytes"),
    ],
)
def test_a_segment_outside_of_the_buffers_names_the_kernel(segment, said):
    with pytest.raises(ValueError, match=said):
        program(with_footprint(OPS[3], Footprint(reads=(segment,))))


def test_what_nobody_wrote_is_not_read():
    said = r"^kernel integrate \(op 0\) reads bytes \[0, 256\) of field acceleration, energy in the arena, which no op"
    with pytest.raises(ValueError, match=said):
        compile_serial(program(OPS[3]))
    with pytest.raises(ValueError, match=r"^kernel find_fast \(op 0\) reads bytes \[0, 128\) of field acceleration in"):
        compile_serial(program(OPS[1], OPS[0], *OPS[2:]))
    with pytest.raises(
        ValueError, match=r"^kernel find_fast \(op 0\) reads bytes \[0, 128\) of the arena, which no op"
    ):
        compile_serial(TileProgram(PENDULUM, OPS[1:]))
    composite = TileComposite((TilePart("good", pendulum(), 40), TilePart("bad", program(*OPS[1:]), 40)))
    with pytest.raises(ValueError, match=r"^part bad: kernel find_fast \(op 0\) reads"):
        compile_composite(composite)


def test_what_was_written_in_part_is_not_read_whole():
    half = with_footprint(OPS[0], Footprint(writes=(Segment(ARENA, 0, 64), Segment(ARENA, 96, 128))))
    with pytest.raises(ValueError, match=r"kernel find_fast \(op 1\) reads bytes \[64, 96\) of field acceleration"):
        compile_serial(program(half, OPS[1]))


def test_a_predicate_that_nobody_wrote_is_not_asked():
    with pytest.raises(ValueError, match=r"kernel slow_down \(op 1\) reads bytes \[256, 384\) of field any_fast"):
        compile_serial(program(OPS[0], OPS[2]))
    own = Footprint(writes=(Segment(ARENA, ANY_FAST, ANY_FAST + 4),))  # too late: it is read before the op runs
    with pytest.raises(ValueError, match=r"kernel slow_down \(op 1\) reads bytes \[256, 384\) of field any_fast"):
        compile_serial(program(OPS[0], with_footprint(OPS[2], own)))


def test_an_output_that_nobody_wrote_is_not_read():
    curious = TileOp(kernel(integrate, ("energy",), ("q",)))
    with pytest.raises(
        ValueError, match=r"kernel integrate \(op 0\) reads bytes \[0, 128\) of buffer energy, which no"
    ):
        compile_serial(program(curious))
    compile_serial(program(*OPS[:4], curious))


def test_what_may_be_read_is_not_refused():
    """Inputs, what the kernel itself writes, and all that a kernel without a footprint may have written."""
    check_written(program(OPS[0]))
    check_written(program(TileOp(kernel(integrate, ((0, 256), "energy"), ((0, 256), "energy")))))
    check_written(program(with_footprint(OPS[0], EVERYTHING), OPS[3]))


@pytest.mark.parametrize("kind", ["control_step", "reset_where", "restart"])
def test_a_robots_stream_without_its_first_kernel_is_refused(kind):
    right = tile_program(make("grasp", 1, backend="cpu"), kind)
    check_written(right)
    assert right.ops[0].kernel.name == "load"
    with pytest.raises(ValueError, match=r"\(op \d\) reads bytes \[\d+, \d+\) of field .* in the arena, which no op"):
        check_written(dataclasses.replace(right, ops=right.ops[1:]))
