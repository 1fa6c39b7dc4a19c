"""Streams of several tile programs: order, footprints, and that any order which they allow gives the same bits."""

import ctypes
import dataclasses
import random

import numpy as np
import pytest
from toy_programs import ANY_FAST, ARENA_BYTES, PENDULUM, pendulum, pendulum_arrays, pendulum_reference

from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.backends.native import DESC_POISON, DESC_THREADS, TILE
from brax_concurrent.scheduler.footprint import EVERYTHING, Segment, conflicts
from brax_concurrent.scheduler.serial import (
    ARENA,
    TileComposite,
    TileKernel,
    TileOp,
    TilePart,
    TileProgram,
    compile_composite,
)

STEP = ["accelerate", "find_fast", "slow_down", "integrate"]


def short():
    """The pendulum with one step rather than two."""
    return TileProgram(PENDULUM, pendulum().ops[:4])


def two(first=70, second=40):
    return TileComposite((TilePart("a", pendulum(), first), TilePart("b", short(), second)))


def test_the_stream_is_in_the_runners_order():
    tasks = list(two().tasks())
    assert [task.kernel for task in tasks] == [f"a.{k}" for k in STEP + STEP] * 3 + [f"b.{k}" for k in STEP] * 2
    assert [task.units.start for task in tasks] == [tile for tile in range(3) for _ in range(8)] + [0] * 4 + [1] * 4


def test_parts_share_no_memory():
    tasks = list(two().tasks())
    alone = [*pendulum().tasks(70), *short().tasks(40)]
    for index, (task, own) in enumerate(zip(tasks, alone, strict=True)):
        first_buffer, arena = (0, ARENA) if index < 24 else (4, ARENA - 1)
        for mine, theirs in (
            (task.footprint.reads, own.footprint.reads),
            (task.footprint.writes, own.footprint.writes),
            ((task.predicate,) if task.predicate else (), (own.predicate,) if own.predicate else ()),
        ):
            moved = [Segment(arena if s.buffer == ARENA else first_buffer + s.buffer, s.start, s.stop) for s in theirs]
            assert list(mine) == moved
    assert not any(conflicts(one.footprint, other.footprint) for one in tasks[:24] for other in tasks[24:])


def test_an_unknown_footprint_is_unknown_in_a_composite_too():
    mystery = TileProgram(PENDULUM, (TileOp(TileKernel("mystery", 8, "mystery")),))
    composite = TileComposite((TilePart("a", pendulum(), 9), TilePart("m", mystery, 9)))
    assert list(composite.tasks())[-1].footprint == EVERYTHING
    assert compile_composite(composite, threads=4).desc[DESC_THREADS] == 1
    assert compile_composite(two(), threads=4).desc[DESC_THREADS] == 4


@pytest.mark.parametrize("interleave", [2, 3, 100])
def test_interleaving_mixes_the_parts_and_keeps_each_tiles_order(interleave):
    straight, mixed = list(two(320, 160).tasks()), list(two(320, 160).tasks(interleave))
    assert sorted(map(repr, mixed)) == sorted(map(repr, straight))
    for part, tiles in (("a", 10), ("b", 5)):
        for tile in range(tiles):
            own = [t for t in straight if t.kernel.startswith(part) and t.units.start == tile]
            assert [t for t in mixed if t.kernel.startswith(part) and t.units.start == tile] == own
    assert {task.kernel[0] for task in mixed[:2]} == {"a", "b"}  # both robots from the first tasks on,
    begun = [task.kernel[0] for task in mixed if task.kernel.endswith("accelerate")]
    assert "b" in begun[-2 * interleave :]  # and to the last
    together = {(task.kernel[0], task.units.start) for task in mixed[: 4 * interleave]}
    assert len(together) == min(interleave, 15)


def run_tasks(composite, tasks, arrays):
    """Run tasks one by one, each tile of each part in an arena of its own."""
    addresses = [np.array([a.ctypes.data for a in arrays[4 * i : 4 * i + 4]]) for i in range(2)]
    arenas = [np.zeros((-(-part.num_envs // TILE) + 1) * ARENA_BYTES, np.uint8) for part in composite.parts]
    base = [-(-arena.ctypes.data // 64) * 64 for arena in arenas]
    entry = {op.kernel.name: op.kernel.address for op in pendulum().ops}
    for task in tasks:
        name, kernel = task.kernel.split(".")
        index = "ab".index(name)
        if task.predicate is not None:
            assert task.predicate.buffer == ARENA - index
            assert task.predicate.start == task.units.start * ARENA_BYTES + ANY_FAST
            if not any((ctypes.c_int32 * 32).from_address(base[index] + task.predicate.start)):
                continue
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(entry[kernel])
        arena = base[index] + task.units.start * ARENA_BYTES
        function(arena, addresses[index].ctypes.data, TILE * task.units.start, composite.parts[index].num_envs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("interleave", [1, 4])
def test_any_order_that_the_footprints_allow_gives_the_same_bits(seed, interleave):
    composite = two()
    expected = [*pendulum_arrays(70), *pendulum_arrays(40, seed=3)]
    arrays = [array.copy() for array in expected]
    run_program(compile_composite(composite), expected, 110)
    tasks = list(composite.tasks(interleave))
    older = [{j for j in range(i) if conflicts(tasks[j].footprint, t.footprint)} for i, t in enumerate(tasks)]
    choose, waiting, order = random.Random(seed), set(range(len(tasks))), []
    while waiting:
        order.append(choose.choice(sorted(i for i in waiting if not older[i] & waiting)))
        waiting.remove(order[-1])
    assert order != sorted(order)
    run_tasks(composite, [tasks[i] for i in order], arrays)
    for array, want in zip(arrays, expected, strict=True):
        assert array.tobytes() == want.tobytes()


def test_the_native_program_runs_all_parts():
    composite = two()
    arrays = [*pendulum_arrays(70), *pendulum_arrays(40, seed=3)]
    whole = pendulum_reference(arrays[:4])
    q, gravity, _, slowed = arrays[4:]
    program = compile_composite(composite, threads=2, poison=True)
    run_program(program, arrays, 110)
    for array, want in zip(arrays[:4], whole, strict=True):
        np.testing.assert_array_equal(array, want)
    assert program.buffers[4].name == "b.q"
    assert [owner.desc[DESC_POISON] for owner in program.owners[1:]] == [1, 1]
    assert not np.array_equal(arrays[4], pendulum_reference([q, gravity, q, slowed])[0])  # one step, not two


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="part b: num_envs must be at least 1, got 0"):
        next(two(second=0).tasks())
    with pytest.raises(ValueError, match="interleave must be at least 1, got 0"):
        next(two().tasks(interleave=0))
    with pytest.raises(ValueError, match="part a: names must differ"):
        compile_composite(TileComposite((two().parts[0], dataclasses.replace(two().parts[1], name="a"))))
