"""Every kind of lie in a footprint is caught and named; honest programs pass."""

import dataclasses

import numpy as np
import pytest
import toy_programs
from toy_programs import compiled, pendulum, pendulum_arrays, pendulum_reference

from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.scheduler.check import FootprintChecker, Unused, Violation, check_footprints
from brax_concurrent.scheduler.check_memory import Memory
from brax_concurrent.scheduler.footprint import Footprint, Segment
from brax_concurrent.scheduler.serial import ArenaField, TileKernel, TileLayout, TileOp, TileProgram

NUM_ENVS = 40  # tile 1 has 8 of 32
LAYOUT = TileLayout(
    256,
    (
        BufferSpec("x", (), "float32", "readwrite"),
        BufferSpec("scale", (2,), "float32", "read", per_env=False),
        BufferSpec("y", (), "float32", "write"),
        BufferSpec("flag", (), "bool", "readwrite"),
    ),
)
DOUBLE, SUM = (0, 128), (128, 256)
NAMES = (ArenaField("double", *DOUBLE), ArenaField("sum", *SUM))


def double(arena, buffers, first_env, num_envs):
    for env in range(first_env, min(first_env + 32, num_envs)):
        arena[env - first_env] = buffers[1][0] * buffers[0][env]


def add(arena, buffers, first_env, num_envs):
    for env in range(first_env, min(first_env + 32, num_envs)):
        arena[32 + env - first_env] = arena[env - first_env] + np.float32(1)


def finish(arena, buffers, first_env, num_envs):
    for env in range(first_env, min(first_env + 32, num_envs)):
        buffers[2][env] = arena[env - first_env] * arena[32 + env - first_env]
        buffers[0][env] += np.float32(0.5)


HONEST = {
    double: (["x", "scale"], [DOUBLE]),
    add: ([DOUBLE], [SUM]),
    finish: ([DOUBLE, SUM, "x"], ["y", "x"]),
}


def toy(function, reads=(), writes=()):
    return TileOp(toy_programs.kernel(function, tuple(reads), tuple(writes), LAYOUT))


def honest_ops(*more):
    return [toy(function, *declared) for function, declared in HONEST.items()] + list(more)


def arrays(x=0.25, y=0.0):
    random = np.random.default_rng(7)
    values = (random.uniform(0.5, 1.5, NUM_ENVS) * x).astype(np.float32)
    scale, flag = np.array([2, 3], np.float32), np.zeros(NUM_ENVS, bool)
    return [values, scale, np.full(NUM_ENVS, y, np.float32), flag]


def found(ops, buffers=None, names=NAMES):
    program = TileProgram(LAYOUT, tuple(ops))
    violations = check_footprints(program, arrays() if buffers is None else buffers, NUM_ENVS, names=names)
    return [(v.kernel, v.access, v.place) for v in violations]


# ---- honest programs


def test_an_honest_program_passes():
    assert found(honest_ops()) == []
    assert found(honest_ops(), names=()) == []


def test_a_run_is_a_run():
    """The buffers are afterwards as the program leaves them, and predicates are obeyed."""
    buffers = pendulum_arrays(150)
    expected = pendulum_reference(buffers)
    checker = FootprintChecker(pendulum(), 150)
    checker.run(buffers)
    assert checker.violations == ()
    for array, want in zip(buffers, expected, strict=True):
        assert array.tobytes() == want.tobytes()
    skipped = checker.op_counts.pop("slow_down")
    assert checker.op_counts == {"accelerate": 10, "find_fast": 10, "integrate": 10}
    assert 0 < skipped < 10


def write_some(arena, buffers, first_env, num_envs):
    """Writes y where x is large; the other rows of y stay."""
    for env in range(first_env, min(first_env + 32, num_envs)):
        if buffers[0][env] > np.float32(0.25):
            buffers[2][env] = np.float32(7)


def test_writing_some_of_what_is_declared_is_no_read():
    assert found([toy(write_some, ["x"], ["y"])]) == []


def test_what_a_kernel_wrote_itself_it_may_read():
    def there_and_back(arena, buffers, first_env, num_envs):
        for env in range(first_env, min(first_env + 32, num_envs)):
            arena[env - first_env] = buffers[0][env]
            buffers[2][env] = arena[env - first_env]

    assert found([toy(there_and_back, ["x"], [DOUBLE, "y"])]) == []


def test_a_kernel_without_a_footprint_may_do_all_but_leave_the_arrays():
    code = compiled(finish)
    assert found([*honest_ops()[:2], TileOp(TileKernel("mystery", code.address, "mystery", owner=code))]) == []
    code = compiled(beyond_y)
    (lie,) = found([TileOp(TileKernel("mystery", code.address, "mystery", owner=code))])
    assert lie == ("mystery", "write", "what lies behind buffer y")


# ---- lies about reads


@pytest.mark.parametrize(
    ("function", "forgotten", "place"),
    [
        (double, "x", "buffer x"),
        (double, "scale", "buffer scale"),
        (add, DOUBLE, "field double"),
        (finish, SUM, "field sum"),
        (finish, "x", "buffer x"),
    ],
)
def test_an_undeclared_read_is_named(function, forgotten, place):
    ops = honest_ops()
    index = list(HONEST).index(function)
    reads, writes = HONEST[function]
    ops[index] = toy(function, [read for read in reads if read != forgotten], writes)
    assert found(ops) == [(function.__name__, "read", place)]


def test_several_undeclared_reads_are_all_named():
    assert found([*honest_ops()[:2], toy(finish, [], ["y", "x"])]) == [
        ("finish", "read", "field double"),
        ("finish", "read", "field sum"),
        ("finish", "read", "buffer x"),
    ]


def test_a_violation_says_where_and_reads_well():
    program = TileProgram(LAYOUT, (*honest_ops()[:2], toy(finish, [DOUBLE, "x"], ["y", "x"])))
    (violation,) = check_footprints(program, arrays(), NUM_ENVS, names=NAMES)
    assert violation == Violation("finish", 2, 0, "read", "field sum", ((128, 256),))
    assert str(violation) == "kernel finish reads field sum, bytes [128, 256), undeclared (op 2, tile 0)"
    (unnamed,) = check_footprints(program, arrays(), NUM_ENVS)
    assert unnamed == dataclasses.replace(violation, place="the arena")


def scale_large(arena, buffers, first_env, num_envs):
    """Reads `scale` only if an x is large."""
    for env in range(first_env, min(first_env + 32, num_envs)):
        buffers[2][env] = buffers[0][env]
        if buffers[0][env] > np.float32(10):
            buffers[2][env] *= buffers[1][1]


def test_a_read_under_a_condition_is_found_on_a_state_that_meets_it():
    program = TileProgram(LAYOUT, (toy(scale_large, ["x"], ["y"]),))
    checker = FootprintChecker(program, NUM_ENVS)
    checker.run(arrays())
    assert checker.violations == ()
    checker.run(arrays(x=100))
    (violation,) = checker.violations
    assert (violation.access, violation.place) == ("read", "buffer scale")


def above_five(arena, buffers, first_env, num_envs):
    for env in range(first_env, min(first_env + 32, num_envs)):
        buffers[2][env] = np.float32(1) if arena[env - first_env] > np.float32(5) else np.float32(0)


def test_a_comparison_that_a_nan_leaves_false_is_found():
    assert found([honest_ops()[0], toy(above_five, [], ["y"])]) == [("above_five", "read", "field double")]


def if_any(arena, buffers, first_env, num_envs):
    """A flag (bool, four in the bits of a float) is read as a whole word."""
    for env in range(first_env, min(first_env + 32, num_envs)):
        buffers[2][env] = np.float32(0) if buffers[3][env // 4] == np.float32(0) else np.float32(1)


def test_a_bool_is_found():
    def wait(arena, buffers, first_env, num_envs):
        for env in range(first_env, min(first_env + 32, num_envs)):
            buffers[2][env] = np.float32(1)

    first = [toy(wait, [], ["y"])]
    lies = found([*first, toy(if_any, [], ["y"])])
    assert ("if_any", "read", "buffer flag") in lies
    set_flags = arrays()
    set_flags[3][:] = True
    assert ("if_any", "read", "buffer flag") in found([*first, toy(if_any, [], ["y"])], set_flags)


def from_next_row(arena, buffers, first_env, num_envs):
    for env in range(first_env, min(first_env + 32, num_envs)):
        buffers[2][env] = buffers[0][min(env + 1, num_envs - 1)]


def test_a_read_of_another_tiles_rows_is_found():
    program = TileProgram(LAYOUT, (toy(from_next_row, ["x"], ["y"]),))
    (violation,) = check_footprints(program, arrays(), NUM_ENVS)
    assert (violation.tile, violation.access, violation.place) == (0, "read", "buffer x, another tile's rows")
    assert violation.spans == ((128, 160),)


def past_the_end(arena, buffers, first_env, num_envs):
    for env in range(first_env, min(first_env + 32, num_envs)):
        buffers[2][env] = buffers[0][env + 8] + arena[-1]


def test_reads_beyond_an_array_are_found():
    places = {place for _, _, place in found([toy(past_the_end, ["x"], ["y"])])}
    assert places == {
        "what lies before the arena",
        "buffer x, another tile's rows",
        "what lies behind buffer x",
    }


# ---- lies about writes


@pytest.mark.parametrize(
    ("function", "forgotten", "place"),
    [
        (double, DOUBLE, "field double"),
        (add, SUM, "field sum"),
        (finish, "y", "buffer y"),
        (finish, "x", "buffer x"),
    ],
)
def test_an_undeclared_write_is_named(function, forgotten, place):
    ops = honest_ops()
    reads, writes = HONEST[function]
    ops[list(HONEST).index(function)] = toy(function, reads, [write for write in writes if write != forgotten])
    assert found(ops) == [(function.__name__, "write", place)]


def beyond_y(arena, buffers, first_env, num_envs):
    """One row more than there are."""
    for env in range(first_env, min(first_env + 32, num_envs + 1)):
        buffers[2][env] = np.float32(3)


def test_a_write_beyond_the_end_is_found():
    program = TileProgram(LAYOUT, (toy(beyond_y, [], ["y"]),))
    (violation,) = check_footprints(program, arrays(), NUM_ENVS)
    assert violation == Violation("beyond_y", 0, 1, "write", "what lies behind buffer y", ((160, 164),))


def before_the_arena(arena, buffers, first_env, num_envs):
    arena[-2] = np.float32(3)
    arena[64] = np.float32(3)


def test_writes_around_the_arena_are_found():
    places = [place for _, _, place in found([toy(before_the_arena)])]
    assert places == ["what lies before the arena", "what lies behind the arena"]


def first_row(arena, buffers, first_env, num_envs):
    """All tiles write into tile 0's rows."""
    buffers[2][0] = np.float32(first_env)
    buffers[2][first_env] = np.float32(1)


def test_a_write_to_another_tile_is_found():
    program = TileProgram(LAYOUT, (toy(first_row, [], ["y"]),))
    (violation,) = check_footprints(program, arrays(), NUM_ENVS)
    assert violation == Violation("first_row", 0, 1, "write", "buffer y, another tile's rows", ((0, 4),))


def sevens(arena, buffers, first_env, num_envs):
    for env in range(first_env, min(first_env + 32, num_envs)):
        buffers[2][env] = np.float32(7)


def test_a_write_of_what_was_there_already_is_found():
    assert found([toy(sevens)], arrays(y=7)) == [("sevens", "write", "buffer y")]


# ---- what memory is filled with instead


@pytest.mark.parametrize("turn", range(3))
def test_every_element_becomes_another_one(turn):
    dtypes = ("float32", "float64", "int32", "uint32", "bool", "uint8")
    layout = TileLayout(64, tuple(BufferSpec(dtype, (3,), dtype, "readwrite") for dtype in dtypes))
    memory = Memory(TileProgram(layout, ()), NUM_ENVS, [ArenaField("f", 0, 32), ArenaField("i", 32, 64, "int32")])
    for value in (0, 1, -1):
        buffers = [
            np.full((NUM_ENVS, 3), abs(value) if dtype in ("uint32", "uint8") else value, dtype) for dtype in dtypes
        ]
        memory.take(buffers)
        now = memory.bytes.copy()
        ones, near = memory.others(now, turn)
        assert (now.view(np.uint32) != near.view(np.uint32)).all()
        for buffer, all_ones, other in zip(
            buffers, taken(memory, ones, buffers), taken(memory, near, buffers), strict=True
        ):
            assert set(all_ones.tobytes()) == {255}
            assert (other != buffer).all()
            if buffer.dtype.kind == "f":
                assert set(np.unique(other)) == {buffer.dtype.type(x) for x in (1e30, -1e30, 1e-30)}
            elif buffer.dtype.kind in "iu" and buffer.dtype.itemsize == 4:
                assert (np.abs(other.astype(int) - buffer) == 1).all()


def taken(memory, contents, buffers):
    """The buffers out of the memory, if it held `contents`."""
    memory.bytes[:] = contents
    result = [np.empty_like(buffer) for buffer in buffers]
    memory.give(result)
    return result


# ---- what is declared for nothing


def test_what_is_never_touched_is_noted():
    program = TileProgram(LAYOUT, tuple(honest_ops(toy(scale_large, ["x", "scale", SUM], ["y", DOUBLE]))))
    checker = FootprintChecker(program, NUM_ENVS, names=NAMES)
    checker.run(arrays())
    assert checker.violations == ()
    kernel = "scale_large"
    unused = [Unused(kernel, "read", "field sum"), Unused(kernel, "read", "buffer scale")]
    unused += [Unused(kernel, "write", "field double")]
    assert list(checker.unused) == unused
    assert str(unused[0]) == "kernel scale_large was not seen to read field sum, which it declares"
    checker.run(arrays(x=100))
    assert list(checker.unused) == [unused[0], unused[2]]


# ---- mistakes


def test_mistakes_are_refused():
    program = TileProgram(LAYOUT, tuple(honest_ops()))
    with pytest.raises(ValueError, match="num_envs must be at least 1, got 0"):
        check_footprints(program, arrays(), 0)
    with pytest.raises(ValueError, match=r"expected 4 buffers \(x, scale, y, flag\), got 3"):
        check_footprints(program, arrays()[:3], NUM_ENVS)
    with pytest.raises(ValueError, match=r"buffer x: expected float32\[40\], got float64\[40\]"):
        check_footprints(program, [arrays()[0].astype(float), *arrays()[1:]], NUM_ENVS)
    with pytest.raises(ValueError, match=r"names: field b has bytes \[64, 128\), expected them within \[100, 256\)"):
        check_footprints(program, arrays(), NUM_ENVS, names=[ArenaField("a", 0, 100), ArenaField("b", 64, 128)])


def test_a_footprint_that_grows_with_the_tile_is_understood():
    """Tile 1 also declares tile 0's first row: `first_row` is then honest, but its tiles are not independent."""
    honest = toy(first_row, [], ["y"])

    def with_first_row(tile):
        return Footprint(writes=(Segment(2, 0, 4), *honest.kernel.footprint(tile).writes))

    kernel = dataclasses.replace(honest.kernel, footprint=with_first_row)
    assert found([TileOp(kernel)]) == []
