"""The native runner: tiles, threads, predicates, arenas and what it refuses."""

import ctypes
import gc

import numba
import numpy as np
import pytest
from numba import types
from toy_programs import ADDRESSES, compiled, pendulum, pendulum_arrays, pendulum_reference

from brax_concurrent.backends import native
from brax_concurrent.backends.cpu_program import ALWAYS, BufferSpec, build_program, content_hash
from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.backends.intrinsics import atomic_add, load_i32, load_i64, store_i32, store_i64
from brax_concurrent.scheduler.serial import compile_serial


def test_a_program_computes_what_numpy_does():
    num_envs = 170
    arrays = pendulum_arrays(num_envs)
    expected = pendulum_reference(arrays)
    assert 0 < expected[3].sum() < 2 * num_envs  # some tiles were slowed down, some were not
    run_program(compile_serial(pendulum()), arrays, num_envs)
    for name, array, want in zip(("q", "gravity", "energy", "slowed"), arrays, expected, strict=True):
        np.testing.assert_array_equal(array, want, err_msg=name)


@pytest.mark.parametrize("num_envs", [1, 31, 32, 33, 1000])
def test_a_partly_filled_tile_writes_no_row_that_is_not_there(num_envs):
    guarded = [np.concatenate([array, np.full(40, 7, np.float32)]) for array in pendulum_arrays(num_envs)]
    arrays = [array[: len(array) - 40] for array in guarded]
    expected = pendulum_reference(arrays)
    run_program(compile_serial(pendulum()), arrays, num_envs)
    for array, want in zip(guarded, expected, strict=True):
        np.testing.assert_array_equal(array[:-40], want)
        np.testing.assert_array_equal(array[-40:], 7)


@pytest.mark.parametrize("threads", [2, 8, 0])
def test_the_number_of_threads_changes_no_bit(threads):
    num_envs = 5000
    alone, many = pendulum_arrays(num_envs), pendulum_arrays(num_envs)
    run_program(compile_serial(pendulum(), threads=1), alone, num_envs)
    program = compile_serial(pendulum(), threads=threads)
    for _ in range(20):  # the pool's threads start at different times
        many = pendulum_arrays(num_envs)
        run_program(program, many, num_envs)
        for one, other in zip(alone, many, strict=True):
            assert one.tobytes() == other.tobytes()


def _count_tile(arena, buffers, first_env, num_envs):
    """Add 1 to the tile's count, and its number to the sum of all tiles', at once with other threads."""
    address = load_i64(buffers) + 4 * first_env
    store_i32(address, load_i32(address) + 1)
    atomic_add(load_i64(buffers + 8), first_env)


def test_every_tile_runs_once():
    num_envs = 32 * 999
    counts, total = np.zeros(num_envs, np.int32), np.zeros(1, np.float64)
    specs = [
        BufferSpec("counts", (), "int32", "readwrite"),
        BufferSpec("total", (1,), "float64", "read", False),
    ]
    code = compiled(_count_tile, ADDRESSES)
    program = build_program([(code.address, ALWAYS)], 0, specs, 1, owners=[code])
    run_program(program, [counts, total], num_envs, threads=8)
    assert counts[::32].tolist() == [1] * 999
    assert total.view(np.int64)[0] == 32 * 999 * 998 // 2


def _set_predicate(arena, buffers, first_env, num_envs):
    """The predicate of each lane is its flag."""
    for lane in range(32):
        store_i32(arena + 64 + 4 * lane, load_i32(load_i64(buffers) + 4 * (first_env + lane)))


def _append(arena, buffers, first_env, num_envs):
    """Write down, as digits to base 10, which ops ran."""
    address = load_i64(buffers + 8) + 4 * first_env
    store_i32(address, 10 * load_i32(address) + load_i32(arena))


def _next_one(arena, buffers, first_env, num_envs):
    store_i32(arena, 1)


def _next_two(arena, buffers, first_env, num_envs):
    store_i32(arena, 2)


def test_ops_run_in_order_and_predicates_skip_them_per_tile():
    one, two = compiled(_next_one, ADDRESSES), compiled(_next_two, ADDRESSES)
    predicate, append = compiled(_set_predicate, ADDRESSES), compiled(_append, ADDRESSES)
    ops = [(predicate, ALWAYS), (one, ALWAYS), (append, 64), (append, ALWAYS), (two, ALWAYS), (append, 64)]
    specs = [BufferSpec("flag", (), "int32", "read"), BufferSpec("log", (), "int32", "readwrite")]
    program = build_program([(code.address, offset) for code, offset in ops], 192, specs, 2)
    flag, log = np.zeros(128, np.int32), np.zeros(128, np.int32)
    flag[[32, 127]] = 1, -5  # any nonzero value of any lane is true
    run_program(program, [flag, log], 128, threads=1)
    assert log[::32].tolist() == [1, 112, 1, 112]


def _leave_arena(arena, buffers, first_env, num_envs):
    """Read what the tile has not written, then write it."""
    store_i32(load_i64(buffers) + 4 * first_env, load_i32(arena + 8))
    store_i32(arena + 8, 5)


def test_poison_shows_a_read_of_what_was_never_written():
    code = compiled(_leave_arena, ADDRESSES)
    specs = [BufferSpec("seen", (), "float32", "write")]
    seen = np.zeros(96, np.float32)
    run_program(build_program([(code.address, ALWAYS)], 64, specs, 3), [seen], 96, threads=1)
    assert seen.view(np.int32)[[32, 64]].tolist() == [5, 5]  # left by the tile before: that is the mistake
    run_program(build_program([(code.address, ALWAYS)], 64, specs, 4, poison=True), [seen], 96, threads=1)
    assert np.isnan(seen[[0, 32, 64]]).all()


def test_arenas_are_aligned_and_used_again():
    def _arena_address(arena, buffers, first_env, num_envs):
        store_i64(load_i64(buffers) + 8 * first_env, arena)

    code = compiled(_arena_address, ADDRESSES)
    program = build_program([(code.address, ALWAYS)], 1000, [BufferSpec("at", (), "float64", "write")], 5)
    found = set()
    for _ in range(30):
        at = np.zeros(3200, np.float64)
        run_program(program, [at], 3200, threads=4)
        found.update(at.view(np.int64)[::32].tolist())
    assert all(address % 64 == 0 for address in found)
    assert 1 <= len(found) <= 4
    idle = program.desc[-int(program.desc[native.DESC_ARENAS]) :]
    kept = {int(address) for address in idle if address}
    assert found <= kept  # and those of participants who came when no tile was left
    assert len(kept) <= 4
    desc = program.desc
    del program, idle
    gc.collect()
    assert not desc[-int(desc[native.DESC_ARENAS]) :].any()  # freed with the program


def _job(program, addresses, num_envs, references):
    tiles = -(-num_envs // 32)
    job = np.zeros(native.JOB_WORDS, np.int64)
    job[native.JOB_DESC] = program.address
    job[native.JOB_BUFFERS] = addresses.ctypes.data
    job[[native.JOB_NUM_ENVS, native.JOB_TILES, native.JOB_CHUNK]] = num_envs, tiles, 1
    job[native.JOB_REFERENCES] = references
    return job


def _participate(program):
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(int(program.desc[native.DESC_PARTICIPATE]))


def test_a_latecomer_touches_nothing_but_the_job():
    program = compile_serial(pendulum())
    arrays = pendulum_arrays(100)
    addresses = np.array([array.ctypes.data for array in arrays])
    job = _job(program, addresses, 100, references=3)
    assert _participate(program)(job.ctypes.data) == native.OK
    assert job[native.JOB_DONE] == 4
    job[[native.JOB_BUFFERS, native.JOB_DESC + 0]] = 8, program.address  # an address that would crash
    assert _participate(program)(job.ctypes.data) == native.OK
    assert job[native.JOB_DONE] == 4
    assert job[native.JOB_REFERENCES] == 1


def test_a_program_of_another_version_is_not_run():
    program = compile_serial(pendulum())
    arrays = pendulum_arrays(64)
    before = [array.copy() for array in arrays]
    program.desc[native.DESC_MAGIC] += 1
    with pytest.raises(RuntimeError, match="0 of 2 tiles"):
        run_program(program, arrays, 64, threads=1)
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, old)


def test_no_memory_for_the_arenas_is_an_error():
    program = build_program([(compiled(_next_one, ADDRESSES).address, ALWAYS)], 1 << 60, [], 6)
    with pytest.raises(MemoryError, match="0 of 3 tiles"):
        run_program(program, [], 96, threads=2)


@pytest.mark.parametrize(
    ("index", "array", "message"),
    [
        (0, np.zeros(63, np.float32), r"buffer q: expected float32\[64\], got float32\[63\]"),
        (0, np.zeros(64), r"buffer q: expected float32\[64\], got float64\[64\]"),
        (3, np.zeros(128, np.float32)[::2], "buffer slowed: expected a row-major"),
        (2, np.broadcast_to(np.float32(0), 64).copy(), None),
    ],
)
def test_arrays_that_do_not_fit_are_refused(index, array, message):
    arrays = pendulum_arrays(64)
    arrays[index] = array
    if message is None:
        array.flags.writeable = False
        message = "buffer energy: the program writes it, but the array is read-only"
    with pytest.raises(ValueError, match=message):
        run_program(compile_serial(pendulum()), arrays, 64)


def test_wrong_counts_are_refused():
    program = compile_serial(pendulum())
    with pytest.raises(ValueError, match=r"expected 4 buffers \(q, gravity, energy, slowed\), got 3"):
        run_program(program, pendulum_arrays(64)[:3], 64)
    with pytest.raises(ValueError, match="threads must not be negative, got -2"):
        run_program(program, pendulum_arrays(64), 64, threads=-2)
    with pytest.raises(ValueError, match="num_envs must be at least 1, got 0"):
        run_program(program, pendulum_arrays(0), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ops": [(0, ALWAYS)]}, "op 0 has no kernel"),
        ({"ops": [(8, ALWAYS), (8, 62)], "arena_bytes": 256}, "op 1: predicate offset .* got 62"),
        ({"ops": [(8, 64)], "arena_bytes": 188}, "op 0: predicate offset .* 128 bytes within the arena of 188, got 64"),
        ({"fingerprint": 0}, "fingerprint must be a nonzero uint64, got 0"),
        ({"threads": -1}, "threads and arena_bytes must not be negative"),
        ({"buffers": [BufferSpec("a", (), "bool", "read")] * 2}, "buffer names must differ"),
        (
            {"buffers": [BufferSpec("a", (), "bool", "write", per_env=False)]},
            "buffer a: all tiles would write",
        ),
    ],
)
def test_programs_that_make_no_sense_are_refused(change, message):
    good = {"ops": [(8, ALWAYS)], "arena_bytes": 64, "buffers": [], "fingerprint": 1}
    build_program(**good)
    with pytest.raises(ValueError, match=message):
        build_program(**(good | change))
    with pytest.raises(ValueError, match="buffer b: access must be read, write or readwrite, got 'rw'"):
        BufferSpec("b", (), "bool", "rw")


def test_content_hash_is_of_content():
    assert content_hash("a", 1, (2.5, b"c", None)) == content_hash("a", 1, (2.5, b"c", None))
    hashes = {content_hash("ab"), content_hash("a", "b"), content_hash(("a", "b")), content_hash("a", b"b")}
    assert len(hashes) == 4
    assert content_hash("stays") == 9441766522646979542  # the same in every process, for ever
    with pytest.raises(TypeError, match="plain values, got ndarray"):
        content_hash(np.zeros(2000))


def _double(number):
    return 2 * number


def test_code_compiles_without_a_usable_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert native.compile_callback(_double).cache_hits == 0
    assert native.compile_callback(_double).cache_hits == 1
    for file in tmp_path.rglob("*.nb?"):
        file.write_bytes(file.read_bytes()[:50])
    damaged = native.compile_callback(_double)
    assert (damaged.cache_hits, damaged.ctypes(21)) == (0, 42)
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])  # no directory can be written
    assert native.compile_callback(_double).ctypes(21) == 42
    with pytest.raises(numba.core.errors.TypingError):
        native.compile_callback(_double, types.int64(types.voidptr))  # a real mistake is not hidden


def test_source_hash_depends_on_content_alone(tmp_path):
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text("x = 1\n")
    second.write_text("x = 1\n")
    assert native.source_hash(str(first)) == native.source_hash(str(second))
    second.write_text("x = 2\n")
    assert native.source_hash(str(first)) != native.source_hash(str(second))
    gone = str(tmp_path / "gone.py")
    assert native.source_hash(gone) != native.source_hash(gone)
