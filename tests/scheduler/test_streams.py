"""The window on threads: the bits of the serial program, the order that footprints ask for, and what overlaps."""

import ctypes
import functools
import gc
import threading
import time

import numpy as np
import pytest
from holding import ENOUGH, GO_ON, holding, let_go
from hypothesis import given
from hypothesis import strategies as st
from mixing import MIXERS, copy_ad, log, meet, meet_too, mix_ab, mix_cd, mixing, mixing_arrays, set_flag
from numba import njit
from orders import assert_same, check_order
from random_streams import unhurried
from toy_programs import ADDRESSES, compiled, pendulum, pendulum_arrays, pendulum_reference

from brax_concurrent.backends import cpu_run, native
from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.backends.intrinsics import atomic_add, load_i64
from brax_concurrent.envs import program as programs_of_envs
from brax_concurrent.envs.grasp import Grasp
from brax_concurrent.envs.stream import StreamBuilder
from brax_concurrent.kernels.model import load_model
from brax_concurrent.scheduler.records import BEGIN, END, LANE, recording
from brax_concurrent.scheduler.serial import (
    TileComposite,
    TileKernel,
    TileLayout,
    TileOp,
    TilePart,
    TileProgram,
    compile_composite,
    compile_serial,
)
from brax_concurrent.scheduler.streams import compile_window

programs = st.lists(st.tuples(st.sampled_from(MIXERS), st.booleans()), max_size=12).map(lambda ops: mixing(*ops))
settings = st.fixed_dictionaries(
    {"threads": st.integers(1, 4), "window": st.integers(1, 64), "interleave": st.integers(0, 6)}
)


@unhurried
@given(programs, settings, st.integers(1, 200))
def test_the_bits_are_those_of_the_serial_program(program, numbers, num_envs):
    arrays, expected = mixing_arrays(num_envs), mixing_arrays(num_envs)
    run_program(compile_serial(program), expected, num_envs)
    compiled_program = compile_window(program, **numbers)
    with recording(compiled_program, 1000) as records:
        run_program(compiled_program, arrays, num_envs)
    assert_same(arrays, expected)
    interleave = int(compiled_program.desc[native.DESC_INTERLEAVE])
    assert interleave == numbers["interleave"] or numbers["interleave"] == 0
    rows = check_order(records.rows, list(program.tasks(num_envs, interleave)))
    if numbers["window"] == 1:
        assert (rows[:-1, END] <= rows[1:, BEGIN]).all()
    assert (records.missing, records.runs) == (0, 1)


@unhurried
@given(st.lists(programs, min_size=1, max_size=3), settings, st.integers(1, 100))
def test_the_bits_of_a_composite_too(parts, numbers, num_envs):
    sizes = [max(num_envs // (1 + index), 1) for index in range(len(parts))]
    composite = TileComposite(
        tuple(TilePart(f"p{i}", part, n) for i, (part, n) in enumerate(zip(parts, sizes, strict=True)))
    )
    arrays, expected = ([a for i, n in enumerate(sizes) for a in mixing_arrays(n, i)] for _ in range(2))
    run_program(compile_composite(composite), expected, sum(sizes))
    program = compile_window(composite, **numbers)
    with recording(program, 1000) as records:
        run_program(program, arrays, sum(sizes))
    assert_same(arrays, expected)
    check_order(records.rows, list(composite.tasks(int(program.desc[native.DESC_INTERLEAVE]))))


@unhurried
@given(st.permutations([mix_ab, mix_cd, copy_ad, set_flag, log, log]), settings, st.integers(1, 130))
def test_tiles_that_depend_on_each_other_keep_their_order(functions, numbers, num_envs):
    program = mixing(*functions)
    assert not program.tiles_are_independent
    arrays, expected = mixing_arrays(num_envs), mixing_arrays(num_envs)
    run_program(compile_serial(program), expected, num_envs)
    compiled_program = compile_window(program, **numbers)
    with recording(compiled_program, 1000) as records:
        run_program(compiled_program, arrays, num_envs)
    assert_same(arrays, expected)
    assert expected[2].any()
    check_order(records.rows, list(program.tasks(num_envs)))


def test_a_composite_with_a_part_of_dependent_tiles():
    parts = mixing(mix_ab, mix_cd), mixing(log, mix_ab, log)
    composite = TileComposite(tuple(TilePart(f"p{index}", part, 70) for index, part in enumerate(parts)))
    arrays, expected = ([*mixing_arrays(70), *mixing_arrays(70, 2)] for _ in range(2))
    run_program(compile_composite(composite), expected, 140)
    program = compile_window(composite, threads=3, interleave=4)
    with recording(program, 100) as records:
        run_program(program, arrays, 140)
    assert_same(arrays, expected)
    check_order(records.rows, list(composite.tasks()))


@pytest.mark.parametrize("num_envs", [1, 31, 32, 33, 5000])
def test_a_program_with_predicates_computes_what_numpy_does(num_envs):
    program = compile_window(pendulum(), threads=2, poison=True)
    for _ in range(10):
        arrays = pendulum_arrays(num_envs)
        expected = pendulum_reference(arrays)
        run_program(program, arrays, num_envs)
        for array, want in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(array, want)


def test_skipped_tasks_have_no_lane_and_take_no_time():
    program = compile_window(pendulum(), threads=2)
    with recording(program, 1000) as records:
        run_program(program, pendulum_arrays(170), 170)
    rows, tasks = records.rows, list(pendulum().tasks(170, int(program.desc[native.DESC_INTERLEAVE])))
    skipped = rows[rows[:, LANE] == -1]
    assert 0 < len(skipped) < sum(task.predicate is not None for task in tasks)
    assert (skipped[:, BEGIN] == skipped[:, END]).all()


# --- what runs at once -------------------------------------------------------------------------


@pytest.mark.parametrize("functions", [(meet, meet_too), (mix_ab, mix_cd, meet, copy_ad, meet_too), (meet,)])
@pytest.mark.parametrize("repeat", range(10))
def test_independent_tasks_run_at_once(functions, repeat):
    """Two tasks that wait for each other: of one tile, also when both come after the same task, or of two tiles."""
    num_envs = 32 if len(functions) > 1 else 64
    arrays = mixing_arrays(num_envs)
    run_program(compile_window(mixing(*functions), threads=2), arrays, num_envs)
    assert arrays[2].view(np.int64)[:2].tolist() == [2, 2]


def test_a_pool_without_a_free_thread_delays_nobody():
    occupied, release = threading.Event(), threading.Event()
    pool = cpu_run._thread_pool(1)
    blocker = pool.submit(lambda: (occupied.set(), release.wait(60)))
    occupied.wait(60)
    try:
        for compile_program in (compile_window, compile_serial):
            arrays = pendulum_arrays(170)
            expected = pendulum_reference(arrays)
            run_program(compile_program(pendulum(), threads=2), arrays, 170)
            assert_same(arrays, expected)
    finally:
        release.set()
        blocker.result()


def test_a_latecomer_touches_nothing_but_the_job():
    program = compile_window(pendulum(), threads=3)
    participate = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(int(program.desc[native.DESC_PARTICIPATE]))
    arrays = pendulum_arrays(100)
    expected = pendulum_reference(arrays)
    addresses = np.array([array.ctypes.data for array in arrays])
    job = cpu_run.aligned_words(native.JOB_WORDS + 4000)
    job[[native.JOB_DESC, native.JOB_BUFFERS]] = program.address, addresses.ctypes.data
    job[[native.JOB_NUM_ENVS, native.JOB_TILES, native.JOB_REFERENCES]] = 100, 4, 3
    job[native.JOB_STATE] = job.ctypes.data + 8 * native.JOB_WORDS
    assert participate(job.ctypes.data) == native.OK  # who starts alone finishes alone
    assert_same(arrays, expected)
    job[native.JOB_BUFFERS] = 8  # an address that would crash
    assert participate(job.ctypes.data) == native.OK
    assert job[[native.JOB_DONE, native.JOB_REFERENCES]].tolist() == [4, 1]


# --- arenas ------------------------------------------------------------------------------------


def test_memory_follows_the_tiles_in_flight():
    def _arena_address(arena, buffers, first_env, num_envs):
        store_arena(load_i64(buffers) + 8 * first_env, arena)

    layout = TileLayout(1000, (BufferSpec("at", (), "float64", "write"),))
    code = compiled(_arena_address, ADDRESSES)
    op = TileOp(TileKernel("arena_address", code.address, "arena_address", layout.footprint((), ("at",)), code))
    program = compile_window(TileProgram(layout, (op, op, op)), threads=2, interleave=3)
    found = set()
    for _ in range(20):
        at = np.zeros(3200, np.float64)
        run_program(program, [at], 3200)
        found.update(at.view(np.int64)[::32].tolist())
    assert all(address % 64 == 0 for address in found)
    assert 1 <= len(found) <= 3 + 32
    desc = program.desc
    idle = desc[-int(desc[native.DESC_ARENAS]) :]
    assert found == {int(address) for address in idle if address}
    del program, idle
    gc.collect()
    assert not desc[-int(desc[native.DESC_ARENAS]) :].any()  # freed with the program


@njit
def store_arena(address, arena):
    atomic_add(address, arena - load_i64(address))


def test_no_memory_for_the_arenas_is_an_error():
    layout = TileLayout(1 << 60, ())
    op = TileOp(TileKernel("nothing", compiled(mix_ab, ADDRESSES).address, "nothing", layout.footprint()))
    with pytest.raises(MemoryError, match="0 of 3 tiles"):
        run_program(compile_window(TileProgram(layout, (op,)), threads=2), [], 96)


def test_a_program_without_ops_is_finished_at_once():
    run_program(compile_window(TileProgram(TileLayout(0, ()), ()), threads=2), [], 500)


# --- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"window": 0}, "window must be from 1 to 64, got 0"),
        ({"window": 65}, "window must be from 1 to 64, got 65"),
        ({"interleave": -1}, "interleave must not be negative, got -1"),
        ({"threads": -2}, "threads and arena_bytes must not be negative, got -2"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        compile_window(pendulum(), **numbers)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_timeout_that_is_no_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"BRAX_CONCURRENT_TIMEOUT must be a positive number of seconds, got '{text}'"):
        compile_window(pendulum())


def test_a_program_of_another_version_is_not_run():
    program = compile_window(pendulum())
    program.desc[native.DESC_MAGIC] += 1
    with pytest.raises(RuntimeError, match="0 of 2 tiles"):
        run_program(program, pendulum_arrays(64), 64, threads=1)


def test_a_kernel_that_never_ends_is_named(monkeypatch):
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", "0.3")
    tiles, block, arrays = holding()
    program = compile_window(tiles, threads=2)
    begin = time.monotonic()
    message = r"nothing finished for 300 ms; it waits for kernel hold of tile [01]$"  # not for both
    with pytest.raises(RuntimeError, match=message):
        run_program(program, arrays, 64)
    assert 0.25 < time.monotonic() - begin < 15
    let_go(block)
    block[[GO_ON, ENOUGH]] = 0
    run_program(program, arrays, 64, threads=1)  # the program is as good as new


def test_of_many_kernels_that_never_end_some_are_named(monkeypatch):
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", "0.3")
    tiles, block, arrays = holding()
    block[ENOUGH] = 5
    program = compile_window(TileComposite((TilePart("a", tiles, 64), TilePart("b", tiles, 128))), threads=6)
    named = r"[ab]\.hold of tile [0-3]"
    message = rf"it waits for kernel {named}, kernel {named}, kernel {named} and others$"
    with pytest.raises(RuntimeError, match=message):
        run_program(program, [*arrays, arrays[0], np.zeros(128, np.float32)], 192)
    let_go(block)


# --- a robot -----------------------------------------------------------------------------------


@functools.cache
def grasp():
    """The control step of a robot, and its model."""
    task = Grasp()
    model = load_model(task.model, nconmax=task.nconmax)
    packed = programs_of_envs._pack(StreamBuilder(task, model).control_step(), "float32")
    return programs_of_envs._tile_program(packed), model


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [{"window": 16}, {"window": 64, "interleave": 5, "threads": 3}])
def test_a_robot_moves_bit_for_bit_as_it_does_serially(numbers):
    tiles, model = grasp()
    serial, window = compile_serial(tiles), compile_window(tiles, **numbers)
    choose = np.random.default_rng(3)
    arrays = []
    for spec in serial.buffers:
        array = np.zeros(spec.array_shape(200))
        if spec.name == "qpos":
            array += model.qpos0 + choose.uniform(-0.02, 0.02, array.shape)
        if spec.name == "action":
            array = choose.uniform(-1, 1, array.shape)
        arrays.append(array.astype(spec.dtype))
    start, expected = [array.copy() for array in arrays], [array.copy() for array in arrays]
    for _ in range(5):
        run_program(serial, expected, 200)
        run_program(window, arrays, 200)
    assert_same(arrays, expected)
    assert any((a != b).any() for a, b in zip(arrays, start, strict=True))
