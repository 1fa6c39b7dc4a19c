"""The serial scheduler: the stream of a tile program, and its program for the native runner."""

import ctypes
import dataclasses
import random

import numpy as np
import pytest
from toy_programs import ANY_FAST, ARENA_BYTES, PENDULUM, integrate, kernel, pendulum, pendulum_arrays

from brax_concurrent.backends.cpu_program import ALWAYS, BufferSpec
from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.backends.native import DESC_FIRST_OP, DESC_THREADS
from brax_concurrent.scheduler.footprint import EVERYTHING, Footprint, Segment, conflicts
from brax_concurrent.scheduler.serial import (
    ARENA,
    TileKernel,
    TileLayout,
    TileOp,
    TileProgram,
    compile_serial,
    unknown_footprint,
)
from brax_concurrent.scheduler.task import Task


def test_the_stream_is_in_program_order():
    tasks = list(pendulum().tasks(70))
    step = ["accelerate", "find_fast", "slow_down", "integrate"]
    assert [task.kernel for task in tasks] == (step + step) * 3
    assert [task.units for task in tasks] == [range(tile, tile + 1) for tile in range(3) for _ in range(8)]
    assert [task.predicate is not None for task in tasks[:4]] == [False, False, True, False]


def test_footprints_are_the_tiles_bytes():
    accelerate, _, slow_down, _ = list(pendulum().tasks(70))[16:20]  # tile 2 has 6 of 32 environments
    rows = Segment(0, 2 * 128, 70 * 4)
    lanes = Segment(ARENA, 2 * ARENA_BYTES, 2 * ARENA_BYTES + 128)
    assert accelerate.footprint == Footprint((rows, Segment(1, 0, 4)), (lanes,))
    predicate = Segment(ARENA, 2 * ARENA_BYTES + ANY_FAST, 2 * ARENA_BYTES + ANY_FAST + 128)
    assert slow_down.predicate == predicate
    assert (
        slow_down.footprint
        == Footprint((lanes, predicate, Segment(3, 256, 280)), (lanes, Segment(3, 256, 280))).normal()
    )


def test_interleaving_keeps_each_tiles_order():
    straight, mixed = list(pendulum().tasks(150)), list(pendulum().tasks(150, interleave=3))
    assert [task.units.start for task in mixed[:6]] == [0, 1, 2, 0, 1, 2]
    assert [task.units.start for task in mixed[-4:]] == [3, 4, 3, 4]
    for tile in range(5):
        assert [t for t in mixed if t.units.start == tile] == [t for t in straight if t.units.start == tile]


def run_tasks(program, tasks, arrays, num_envs):
    """Run tasks one by one, each tile in an arena of its own."""
    addresses = np.array([array.ctypes.data for array in arrays])
    arenas = np.zeros((-(-num_envs // 32) + 1) * ARENA_BYTES, np.uint8)
    base = -(-arenas.ctypes.data // 64) * 64
    entry = {op.kernel.name: op.kernel.address for op in program.ops}
    for task in tasks:
        arena = base + task.units.start * ARENA_BYTES
        if task.predicate is not None and not any((ctypes.c_int32 * 32).from_address(base + task.predicate.start)):
            continue
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(entry[task.kernel])
        function(arena, addresses.ctypes.data, 32 * task.units.start, num_envs)


def any_order(tasks, seed):
    """An order, as wild as the footprints allow."""
    choose = random.Random(seed)
    older = [{j for j in range(i) if conflicts(tasks[j].footprint, task.footprint)} for i, task in enumerate(tasks)]
    waiting, done = set(range(len(tasks))), set()
    while waiting:
        ready = sorted(i for i in waiting if older[i] <= done)
        chosen = choose.choice(ready)
        waiting.remove(chosen)
        done.add(chosen)
        yield tasks[chosen]


@pytest.mark.parametrize("seed", range(5))
def test_any_order_that_the_footprints_allow_gives_the_same_bits(seed):
    num_envs = 150
    program = pendulum()
    expected, arrays = pendulum_arrays(num_envs), pendulum_arrays(num_envs)
    run_program(compile_serial(program), expected, num_envs)
    tasks = list(program.tasks(num_envs))
    order = list(any_order(tasks, seed))
    assert order != tasks
    run_tasks(program, order, arrays, num_envs)
    for array, want in zip(arrays, expected, strict=True):
        assert array.tobytes() == want.tobytes()


def test_a_wrong_footprint_is_noticed_by_that_test():
    """The control: without its reads, `integrate` may run too early."""
    num_envs = 150
    program = pendulum()
    blind = dataclasses.replace(program.ops[3].kernel, footprint=PENDULUM.footprint(writes=("energy",)))
    careless = TileProgram(PENDULUM, (*program.ops[:3], TileOp(blind), *program.ops[4:7], TileOp(blind)))
    expected = pendulum_arrays(num_envs)
    run_program(compile_serial(program), expected, num_envs)
    wrong = 0
    for seed in range(5):
        arrays = pendulum_arrays(num_envs)
        run_tasks(careless, any_order(list(careless.tasks(num_envs)), seed), arrays, num_envs)
        wrong += any(array.tobytes() != want.tobytes() for array, want in zip(arrays, expected, strict=True))
    assert wrong == 5


def test_the_native_program_has_the_ops_in_order():
    program = pendulum()
    desc = compile_serial(program).desc
    ops = desc[DESC_FIRST_OP : DESC_FIRST_OP + 16].reshape(8, 2).tolist()
    assert ops == [[op.kernel.address, op.predicate] for op in program.ops]


def test_the_fingerprint_is_of_content_and_not_of_addresses():
    program = pendulum()
    moved = tuple(
        TileOp(dataclasses.replace(op.kernel, address=op.kernel.address + 64), op.predicate) for op in program.ops
    )
    same = TileProgram(PENDULUM, moved)
    assert compile_serial(program).fingerprint == compile_serial(same).fingerprint
    wider = TileLayout(ARENA_BYTES + 64, PENDULUM.buffers)
    more = TileLayout(ARENA_BYTES, (*PENDULUM.buffers, BufferSpec("extra", (), "bool", "read")))
    other = [
        TileProgram(PENDULUM, (*program.ops[:4], *program.ops[:3:-1])),
        TileProgram(PENDULUM, program.ops[:4]),
        TileProgram(PENDULUM, tuple(TileOp(op.kernel) for op in program.ops)),
        TileProgram(wider, program.ops),
        TileProgram(more, program.ops),
    ]
    fingerprints = {compile_serial(each).fingerprint for each in [program, *other]}
    fingerprints |= {compile_serial(program, threads=n).fingerprint for n in (1, 2)}
    fingerprints.add(compile_serial(program, poison=True).fingerprint)
    assert len(fingerprints) == 9


def test_tiles_run_at_once_only_if_their_footprints_allow_it():
    program = pendulum()
    assert program.tiles_are_independent
    assert compile_serial(program, threads=4).desc[DESC_THREADS] == 4
    unknown = TileKernel("mystery", 8, "mystery")
    assert unknown.footprint is unknown_footprint
    neighbours = dataclasses.replace(unknown, footprint=lambda tile: Footprint(writes=(Segment(0, 0, 4 + 128 * tile),)))
    for suspect in (unknown, neighbours):
        careful = TileProgram(PENDULUM, (*program.ops, TileOp(suspect)))
        assert not careful.tiles_are_independent
        assert compile_serial(careful, threads=4).desc[DESC_THREADS] == 1
    assert next(TileProgram(PENDULUM, (TileOp(unknown),)).tasks(1)).footprint is EVERYTHING


def test_mistakes_are_refused_where_they_are_made():
    with pytest.raises(ValueError, match=r"no buffer is called 'qq'; there are \['q', 'gravity'"):
        PENDULUM.footprint(reads=("qq",))
    with pytest.raises(ValueError, match=rf"arena bytes must be within \[0, {ARENA_BYTES}\], got \[300, 400\)"):
        PENDULUM.footprint(writes=((300, 400),))
    with pytest.raises(ValueError, match="kernel integrate writes buffer gravity, whose access is read"):
        TileProgram(PENDULUM, (TileOp(kernel(integrate, writes=("gravity",))),))
    with pytest.raises(ValueError, match="num_envs and interleave must be at least 1, got 0 and 1"):
        next(pendulum().tasks(0))
    with pytest.raises(ValueError, match="op 0: predicate offset"):
        compile_serial(TileProgram(PENDULUM, (TileOp(pendulum().ops[0].kernel, predicate=ARENA_BYTES),)))


def test_a_task_must_read_its_predicate():
    predicate = Segment(ARENA, 64, 68)
    Task("solve", range(1), Footprint(reads=(Segment(ARENA, 0, 68),)), predicate)
    Task("solve", range(1), EVERYTHING, predicate)
    for reads in ((), (Segment(ARENA, 0, 67),), (Segment(0, 64, 68),)):
        with pytest.raises(ValueError, match="task solve: its footprint does not read its predicate"):
            Task("solve", range(1), Footprint(reads), predicate)
    with pytest.raises(ValueError, match="task solve: a predicate is int32s, of 4 bytes each"):
        Task("solve", range(1), EVERYTHING, Segment(ARENA, 64, 70))
    Task("solve", range(1), EVERYTHING, Segment(ARENA, 64, 192))
    assert ALWAYS == -1
