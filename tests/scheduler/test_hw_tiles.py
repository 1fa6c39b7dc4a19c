"""A window for each thread: the bits of the serial program, the order that footprints ask for, and what goes wrong."""

import ctypes
import gc
import time

import numpy as np
import pytest
from holding import ENOUGH, GO_ON, holding, let_go
from hypothesis import given
from hypothesis import strategies as st
from mixing import MIXERS, copy_ad, log, meet, mix_ab, mix_cd, mixing, mixing_arrays, set_flag
from orders import assert_same, check_order
from random_streams import unhurried
from toy_programs import ADDRESSES, compiled, pendulum, pendulum_arrays, pendulum_reference

from brax_concurrent.backends import cpu_run, native
from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.scheduler.hw_order import POLICIES, TILE_BITS, issue_order
from brax_concurrent.scheduler.hw_tiles import compile_hw
from brax_concurrent.scheduler.records import BEGIN, END, LANE, RUN, TASK, recording
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

programs = st.lists(st.tuples(st.sampled_from(MIXERS), st.booleans()), max_size=12).map(lambda ops: mixing(*ops))
settings = st.fixed_dictionaries(
    {
        "threads": st.integers(1, 4),
        "window": st.integers(1, 64),
        "tiles": st.integers(1, 6),
        "policy": st.sampled_from(POLICIES),
    }
)


# --- the order ---------------------------------------------------------------------------------


def played(table, kernels, tiles, window, policy):
    """The order by sets: of the oldest unfinished tasks, as many as the window has slots, a ready one issues."""
    left = [(op, tile) for op in range(len(kernels)) for tile in range(tiles)]
    last, order = (None, None), []
    while left:
        inside = left[:window]
        ready = [
            (op, tile)
            for place, (op, tile) in enumerate(inside)
            if not any(other == tile and table[older, op] for older, other in inside[:place])
        ]
        same = {
            "oldest": ready,
            "depth_first": [task for task in ready if task[1] == last[1]],
            "same_kernel": [task for task in ready if last[0] is not None and kernels[task[0]] == kernels[last[0]]],
        }[policy]
        last = (same or ready)[0]
        left.remove(last)
        order.append(last)
    return order


@unhurried
@given(st.data())
def test_the_order_is_that_of_a_window_with_one_worker(data):
    ops, tiles, window = (data.draw(st.integers(*pair)) for pair in ((0, 9), (1, 5), (1, 64)))
    pairs = data.draw(st.sets(st.tuples(*[st.integers(0, max(ops - 1, 0))] * 2)))
    table = np.zeros((ops, ops), bool)
    for one, other in pairs if ops else ():
        table[one, other] = table[other, one] = True
    kernels, policy = (
        data.draw(st.lists(st.sampled_from("abc"), min_size=ops, max_size=ops)),
        data.draw(st.sampled_from(POLICIES)),
    )
    order = issue_order(table, kernels, tiles, window, policy)
    found = [(word >> TILE_BITS, word & ((1 << TILE_BITS) - 1)) for word in order.tolist()]
    assert found == played(table, kernels, tiles, window, policy)


def test_policies_differ():
    table, kernels = np.zeros((3, 3), bool), ["a", "b", "a"]
    orders = {policy: issue_order(table, kernels, 2, 64, policy).tolist() for policy in POLICIES}
    a, b, c = 0, 1 << TILE_BITS, 2 << TILE_BITS
    assert orders["oldest"] == [a, a + 1, b, b + 1, c, c + 1]
    assert orders["depth_first"] == [a, b, c, a + 1, b + 1, c + 1]
    assert orders["same_kernel"] == [a, a + 1, c, c + 1, b, b + 1]


# --- the bits ----------------------------------------------------------------------------------


@unhurried
@given(programs, settings, st.integers(1, 200))
def test_the_bits_are_those_of_the_serial_program(program, numbers, num_envs):
    arrays, expected = mixing_arrays(num_envs), mixing_arrays(num_envs)
    run_program(compile_serial(program), expected, num_envs)
    compiled_program = compile_hw(program, **numbers)
    with recording(compiled_program, 1000) as records:
        run_program(compiled_program, arrays, num_envs)
    assert_same(arrays, expected)
    rows = check_order(records.rows, list(program.tasks(num_envs)))
    assert (records.missing, records.runs) == (0, 1)
    for lane in range(numbers["threads"]):
        own = rows[rows[:, LANE] == lane]
        own = own[np.argsort(own[:, BEGIN], kind="stable")]
        assert (own[:-1, END] <= own[1:, BEGIN]).all()


@unhurried
@given(st.lists(programs, min_size=1, max_size=3), settings, st.integers(1, 100))
def test_the_bits_of_a_composite_too(parts, numbers, num_envs):
    sizes = [max(num_envs // (1 + index), 1) for index in range(len(parts))]
    composite = TileComposite(
        tuple(TilePart(f"p{i}", part, n) for i, (part, n) in enumerate(zip(parts, sizes, strict=True)))
    )
    arrays, expected = ([a for i, n in enumerate(sizes) for a in mixing_arrays(n, i)] for _ in range(2))
    run_program(compile_composite(composite), expected, sum(sizes))
    program = compile_hw(composite, **numbers)
    with recording(program, 1000) as records:
        run_program(program, arrays, sum(sizes))
    assert_same(arrays, expected)
    check_order(records.rows, list(composite.tasks()))


@unhurried
@given(st.permutations([mix_ab, mix_cd, copy_ad, set_flag, log, log]), settings, st.integers(1, 130))
def test_tiles_that_depend_on_each_other_keep_their_order(functions, numbers, num_envs):
    program = mixing(*functions)
    arrays, expected = mixing_arrays(num_envs), mixing_arrays(num_envs)
    run_program(compile_serial(program), expected, num_envs)
    compiled_program = compile_hw(program, **numbers)
    with recording(compiled_program, 1000) as records:
        run_program(compiled_program, arrays, num_envs)
    assert_same(arrays, expected)
    check_order(records.rows, list(program.tasks(num_envs)))


def test_a_composite_with_a_part_of_dependent_tiles():
    parts = mixing(mix_ab, mix_cd), mixing(log, mix_ab, log)
    composite = TileComposite(tuple(TilePart(f"p{index}", part, 70) for index, part in enumerate(parts)))
    arrays, expected = ([*mixing_arrays(70), *mixing_arrays(70, 2)] for _ in range(2))
    run_program(compile_composite(composite), expected, 140)
    run_program(compile_hw(composite, threads=3, tiles=4), arrays, 140)
    assert_same(arrays, expected)


@pytest.mark.parametrize("num_envs", [1, 31, 33, 5000])
def test_a_program_with_predicates_computes_what_numpy_does(num_envs):
    program = compile_hw(pendulum(), threads=2, tiles=3, poison=True)
    for _ in range(3):
        arrays = pendulum_arrays(num_envs)
        expected = pendulum_reference(arrays)
        run_program(program, arrays, num_envs)
        assert_same(arrays, expected)


def test_skipped_tasks_have_no_lane_and_take_no_time():
    """They are those that the serial program skips."""
    skipped = []
    for make in (compile_hw, serially_recorded):
        program = make(pendulum(), threads=2)
        with recording(program, 1000) as records:
            for _ in range(2):
                run_program(program, pendulum_arrays(170), 170)
        rows = records.rows[records.rows[:, LANE] == -1]
        assert (rows[:, BEGIN] == rows[:, END]).all()
        skipped.append({(row[TASK], row[RUN]) for row in rows.tolist()})
    assert skipped[0] == skipped[1]
    assert 0 < len(skipped[0]) < 2 * 2 * 6  # of two ops, in six tiles


def serially_recorded(program, **numbers):
    from brax_concurrent.scheduler.records import recordable

    return recordable(compile_serial(program, **numbers))


# --- threads and memory ------------------------------------------------------------------------


def test_tiles_run_at_once():
    """Two tasks of different tiles that wait for each other."""
    arrays = mixing_arrays(64)
    run_program(compile_hw(mixing(meet), threads=2, tiles=4), arrays, 64)
    assert arrays[2].view(np.int64)[:2].tolist() == [2, 2]


def test_a_latecomer_touches_nothing_but_the_job():
    program = compile_hw(pendulum(), threads=3)
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
    job[[native.JOB_BUFFERS, native.JOB_STATE]] = 8  # addresses that would crash
    assert participate(job.ctypes.data) == native.OK
    assert job[[native.JOB_DONE, native.JOB_REFERENCES]].tolist() == [4, 1]


def test_arenas_are_as_many_as_tiles_in_flight_and_used_again():
    program = compile_hw(pendulum(), threads=2, tiles=3)
    desc = program.desc
    idle = desc[-int(desc[native.DESC_ARENAS]) :]
    seen = set()
    for _ in range(5):
        run_program(program, pendulum_arrays(3200), 3200)
        seen.update(idle[idle != 0].tolist())
    assert 3 <= len(seen) <= 6
    del program
    gc.collect()
    assert not idle.any()  # freed with the program


def test_no_memory_for_the_arenas_is_an_error():
    layout = TileLayout(1 << 60, ())
    op = TileOp(TileKernel("nothing", compiled(mix_ab, ADDRESSES).address, "nothing", layout.footprint()))
    with pytest.raises(MemoryError, match="0 of 3 tiles"):
        run_program(compile_hw(TileProgram(layout, (op,)), threads=2), [], 96)


def test_a_program_without_ops_is_finished_at_once():
    run_program(compile_hw(TileProgram(TileLayout(0, ()), ()), threads=2), [], 500)


# --- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"window": 0}, "window must be from 1 to 64, got 0"),
        ({"window": 65}, "window must be from 1 to 64, got 65"),
        ({"tiles": 0}, "tiles must be from 1 to 16, got 0"),
        ({"tiles": 17}, "tiles must be from 1 to 16, got 17"),
        ({"policy": "newest"}, "policy must be one of oldest, depth_first, same_kernel, got 'newest'"),
        ({"threads": -2}, "threads and arena_bytes must not be negative, got -2"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        compile_hw(pendulum(), **numbers)


def test_a_program_of_another_version_is_not_run():
    program = compile_hw(pendulum())
    program.desc[native.DESC_MAGIC] += 1
    with pytest.raises(RuntimeError, match="0 of 2 tiles"):
        run_program(program, pendulum_arrays(64), 64, threads=1)


def test_a_kernel_that_never_ends_is_named(monkeypatch):
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", "0.3")
    tiles, block, arrays = holding()
    program = compile_hw(tiles, threads=2)
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
    program = compile_hw(TileComposite((TilePart("a", tiles, 64), TilePart("b", tiles, 128))), threads=6)
    named = r"[ab]\.hold of tile [0-3]"
    message = rf"it waits for kernel {named}, kernel {named}, kernel {named} and others$"
    with pytest.raises(RuntimeError, match=message):
        run_program(program, [*arrays, arrays[0], np.zeros(128, np.float32)], 192)
    let_go(block)
