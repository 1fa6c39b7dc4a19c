"""Environments of similar work in the same tiles of hw on the CPU: who gets which lane, and who refuses to do it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import assert_same
from random_streams import unhurried
from toy_programs import ADDRESSES, compiled, pendulum, pendulum_arrays, pendulum_reference

from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.backends.intrinsics import load_i32, load_i64, store_i32
from brax_concurrent.scheduler.hw_regroup import GROUP_TILES, deal
from brax_concurrent.scheduler.hw_tiles import compile_hw
from brax_concurrent.scheduler.serial import (
    TileComposite,
    TileKernel,
    TileLayout,
    TileOp,
    TilePart,
    TileProgram,
    compile_serial,
)
from brax_concurrent.scheduler.streams import compile_window

MOST = 1023  # the greatest work that is told from greater
LAYOUT = TileLayout(
    64,
    (
        BufferSpec("work", (), "int32", "readwrite"),
        BufferSpec("place", (), "int32", "readwrite"),
        BufferSpec("times", (), "int32", "readwrite"),
        BufferSpec("extra", (), "int32", "readwrite"),
    ),
)


def note_places(arena, buffers, first_env, num_envs):
    """By environment, the lane that it has of the batch, how many it has, and how many without one were told it."""
    work, place, times, extra = (buffers + 0, buffers + 8, buffers + 16, buffers + 24)
    for lane in range(32):
        env = load_i32(arena + 64 + 4 * lane)
        if first_env + lane < num_envs:
            store_i32(load_i64(place) + 4 * env, first_env + lane)
            store_i32(load_i64(times) + 4 * env, load_i32(load_i64(times) + 4 * env) + 1)
        elif 0 <= env < num_envs:
            store_i32(load_i64(extra) + 4 * env, load_i32(load_i64(extra) + 4 * env) + 1)
    store_i32(load_i64(work) + 4 * load_i32(arena + 64), -1)  # too late to matter to anybody


def noting(work="work"):
    code = compiled(note_places, ADDRESSES)
    footprint = LAYOUT.footprint(writes=("work", "place", "times", "extra"))
    return TileProgram(LAYOUT, (TileOp(TileKernel("note", code.address, "note places 1", footprint, code)),), work=work)


def noted(work, **settings):
    arrays = [np.array(work, np.int32), *(np.zeros(len(work), np.int32) for _ in range(3))]
    run_program(compile_hw(noting(), **settings), arrays, len(work))
    return arrays[1:]


@unhurried
@given(st.lists(st.integers(-5, 1100), min_size=1, max_size=520), st.integers(0, 3))
def test_environments_are_dealt_by_falling_work(work, before):
    everybody = np.array([7] * before + work, np.int32)
    order = np.full(544, -1, np.int32)
    deal(everybody.ctypes.data, before, len(work), order.ctypes.data)
    by_work = np.argsort(-np.clip(work, 0, MOST), kind="stable") + before
    np.testing.assert_array_equal(order[: len(work)], by_work)
    lanes = -(-len(work) // 32) * 32
    assert (order[len(work) : lanes] == by_work[-1]).all()
    assert (order[lanes:] == -1).all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("num_envs", [1, 31, 32, 64, 70, 1000, 3000])
def test_every_environment_has_a_lane_and_groups_are_sorted(num_envs, threads):
    work = np.random.default_rng(num_envs).integers(0, 50, num_envs)
    place, times, _ = noted(work, threads=threads)
    assert (times == 1).all()
    env = np.argsort(place)  # of each lane
    assert (np.sort(place) == np.arange(num_envs)).all()
    for tile in range(0, num_envs, 32):  # environments stay in their group, and a tile has neighbours by work
        assert abs(env[tile : tile + 32] - tile).max() < 32 * GROUP_TILES
        assert (np.diff(work[env[tile : tile + 32]]) <= 0).all()


def test_a_group_is_sixteen_tiles_where_there_are_many():
    work = np.random.default_rng(0).integers(0, 1000, 32 * 64)
    place, _, _ = noted(work, threads=1)
    first = np.argsort(place)[: 32 * GROUP_TILES]
    assert (first < 32 * GROUP_TILES).all()
    assert (np.diff(work[first]) <= 0).all()


def test_lanes_without_an_environment_are_told_one_that_there_is():
    _, _, extra = noted(np.random.default_rng(0).integers(0, 50, 20), threads=1)
    assert extra.sum() == 12


def test_a_composites_parts_are_regrouped_each_for_itself():
    work = np.random.default_rng(0).integers(0, 50, 170).astype(np.int32)
    parts = (TilePart("a", noting(), 100), TilePart("b", pendulum(), 64), TilePart("c", noting(), 70))
    swinging = pendulum_arrays(64)
    expected = pendulum_reference(swinging)
    halves = (work[:100].copy(), work[100:].copy())
    first, last = ([part, *(np.zeros(len(part), np.int32) for _ in range(3))] for part in halves)
    run_program(compile_hw(TileComposite(parts), threads=2), [*first, *swinging, *last], 234)
    for own, size in ((first, 100), (last, 70)):
        assert (own[2] == 1).all()
        assert (np.sort(own[1]) == np.arange(size)).all()
    assert_same(swinging, expected)


def note_arena(arena, buffers, first_env, num_envs):
    """By environment, what the arena held before; then something else."""
    for lane in range(32):
        store_i32(load_i64(buffers + 24) + 4 * load_i32(arena + 64 + 4 * lane), load_i32(arena))
    store_i32(arena, 5)


def test_each_tile_finds_its_arena_poisoned():
    code = compiled(note_arena, ADDRESSES)
    footprint = LAYOUT.footprint(writes=("extra",))
    op = TileOp(TileKernel("note", code.address, "note arena 1", footprint, code))
    arrays = [np.zeros(300, np.int32) for _ in range(4)]
    run_program(compile_hw(TileProgram(LAYOUT, (op,), work="work"), threads=1, poison=True), arrays, 300)
    assert (arrays[3] == -1).all()


def test_a_regrouping_program_is_another_one():
    assert compile_hw(noting()).fingerprint != compile_hw(noting("")).fingerprint


@pytest.mark.parametrize("compile_program", [compile_serial, compile_window])
def test_other_schedulers_refuse_kernels_that_expect_an_order(compile_program):
    with pytest.raises(ValueError, match="program: only compile_hw orders environments by work, as its kernels expect"):
        compile_program(noting())


def test_tiles_that_depend_on_each_other_are_not_regrouped():
    code = compiled(note_places, ADDRESSES)
    unknown = TileProgram(LAYOUT, (TileOp(TileKernel("note", code.address, "unknown 1", owner=code)),), work="work")
    with pytest.raises(ValueError, match="its tiles depend on each other, so that environments cannot be regrouped"):
        compile_hw(unknown)


def test_the_buffer_is_named_that_is_not_there():
    with pytest.raises(ValueError, match="no buffer is called 'effort'"):
        noting("effort")
