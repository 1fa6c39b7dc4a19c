"""Windows and graphs on CUDA, put onto a driver that is not one: what is sure to wait for what."""

import functools
import itertools

import numpy as np
import pytest
from fake_gpu import BROKEN, CHANGED, PARAMETERS, REPLAYED, STUCK, WAITED, fake_driver, fake_pool
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.cuda_driver import CudaError, Kernel
from brax_concurrent.backends.cuda_pool import POOL_EVENTS
from brax_concurrent.backends.cuda_program import CudaOp, CudaPart
from brax_concurrent.scheduler.cuda import compile_cuda, launch_program
from brax_concurrent.scheduler.cuda_graph import GRAPHS, cost
from brax_concurrent.scheduler.graph import reduced

SPECS = (BufferSpec("x", (3,), "float32", "readwrite"), BufferSpec("y", (), "float32", "write"))
KERNELS = [Kernel(f"kernel{i}", f"k{i}", 100 + i) for i in range(5)]


def make_part(ops, conflicts, **settings):
    """A part of kernels by number, of which pairs conflict."""
    pairs = frozenset((f"k{a}", f"k{b}") for a, b in conflicts)
    meet = {(a, b) for a, b in conflicts} | {(b, a) for a, b in conflicts}
    older = [frozenset(j for j in range(i) if (ops[j], ops[i]) in meet) for i in range(len(ops))]
    return CudaPart(
        ops=tuple(CudaOp(KERNELS[k], ("x",)) for k in ops),
        arena_bytes=640,
        buffers=SPECS,
        upstream=tuple(tuple(sorted(each)) for each in reduced(older)),
        conflicts=pairs,
        **settings,
    )


@functools.cache
def shared_driver():
    """One for all runs: making one compiles for seconds. What a run recorded is gone with the next."""
    return fake_driver(parameters=5)


def run(parts, scheduler, num_envs, *, stream=55, driver=None, **settings):
    driver = driver or shared_driver()
    driver.clear()
    table, owners = fake_pool()
    program = compile_cuda(parts, scheduler, functions=driver.functions, pools=table, **settings)
    addresses = [0x100000 * (1 + i) for i in range(len(program.buffers))]
    launch_program(program, addresses, 0x9000, num_envs, stream)
    del owners
    return driver, program


def named(launch):
    """(kernel, unit's first byte of the arena) of a launch."""
    return launch[0] - 100, launch[PARAMETERS]


streams_of_ops = st.lists(st.integers(0, 4), min_size=1, max_size=12)
pairs = st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)))


@settings(max_examples=30, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(streams_of_ops, pairs, st.sampled_from(["serial", "sw", "graph"]), st.integers(1, 64), st.integers(1, 16))
def test_every_conflicting_pair_is_ordered_and_every_task_is_launched_once(ops, conflicts, scheduler, window, streams):
    part = make_part(ops, conflicts, unit_tiles=1)
    num_envs = 70  # three units, the last not full
    driver, _ = run([part], scheduler, num_envs, window=window, streams=streams)
    launched = [named(launch) for launch in driver.launches]
    assert sorted(launched) == sorted((k, 0x9000 + 640 * unit) for k in ops for unit in range(3))
    before, meet = driver.before(), conflicts | {(b, a) for a, b in conflicts}
    place = {}  # of each (unit, op) among the launches
    for index, (kernel, arena) in enumerate(launched):
        op = sum(1 for unit, _ in place if unit == arena)
        assert ops[op] == kernel  # issued in program order within a unit
        place[arena, op] = index
    for unit in {unit for unit, _ in place}:
        for older, newer in itertools.combinations(range(len(ops)), 2):
            if (ops[older], ops[newer]) in meet:
                assert place[unit, older] in before[place[unit, newer]]


def test_independent_tasks_are_not_ordered():
    """Two chains side by side: on two streams neither waits for the other, nor in a graph."""
    part = make_part([0, 1, 0, 1], {(0, 0), (1, 1)})
    for scheduler in ("sw", "graph"):
        driver, _ = run([part], scheduler, 40, streams=2)
        assert driver.before()[2:4] == [{0}, {1}]
        assert not driver.before()[1]
    driver, _ = run([part], "serial", 40)
    assert driver.before() == [set(), {0}, {0, 1}, {0, 1, 2}]


def test_what_comes_after_waits_for_all_streams():
    part = make_part([0, 1, 2], {(0, 0)})
    driver, _ = run([part], "sw", 40, streams=3)
    streams = {row[2] for row in driver.rows if row[0] == 0}
    assert streams == {55, 201, 202}
    last = [row for row in driver.rows if row[0] == WAITED][-2:]
    assert [row[1] for row in last] == [55, 55]


def test_a_window_of_one_keeps_program_order():
    part = make_part([0, 1, 2, 0], set(), unit_tiles=1)
    driver, _ = run([part], "sw", 40, window=1, streams=4)
    asked = int(driver.order[1])
    assert asked >= 7  # before each task but the first the host waits for the one before it


def test_units_have_their_own_part_of_every_buffer():
    part = make_part([0], set(), unit_tiles=2)
    driver, _ = run([part], "serial", 100)
    (first, second) = [launch[PARAMETERS : PARAMETERS + 5] for launch in driver.launches]
    assert first == [0x9000, 64, 32, 0, 0x100000]
    assert second == [0x9000 + 2 * 640, 36, 32, 0, 0x100000 + 64 * 12]


def test_parts_are_independent_of_each_other():
    parts = [make_part([0, 0], {(0, 0)}, name=name, num_envs=n) for name, n in (("a", 40), ("b", 70))]
    driver, program = run(parts, "sw", 110, streams=2)
    assert program.num_envs == 110
    assert [b.name for b in program.buffers] == ["a.x", "a.y", "b.x", "b.y"]
    arenas = [launch[PARAMETERS] for launch in driver.launches]
    assert arenas == [0x9000, 0x9000 + 2 * 640] * 2
    assert driver.before() == [set(), set(), {0}, {1}]
    assert program.scratch_bytes(110) == (2 + 3) * 640
    with pytest.raises(ValueError, match="num_envs must be 110"):
        launch_program(program, [1, 2, 3, 4], 0, 100, 0)


@pytest.mark.parametrize(
    ("num_envs", "share", "shape"),
    [
        (1024, 0, [32, 32]),
        (4224, 0, [132, 32]),
        (4225, 0, [67, 64]),
        (8448, 0, [132, 64]),
        (33792, 0, [264, 128]),
        (4096, 40, [32, 128]),
    ],
)
def test_blocks_are_as_small_as_leaves_each_a_multiprocessor(num_envs, share, shape):
    driver, _ = run([make_part([0], set(), share=share)], "serial", num_envs, multiprocessors=132)
    assert driver.launches[0][1:3] == shape


def test_lanes_leave_threads_of_a_warp_without_an_environment():
    driver, _ = run([make_part([0], set(), lanes=8)], "serial", 20, multiprocessors=132)
    assert driver.launches[0][1:3] == [3, 32]
    assert driver.launches[0][PARAMETERS + 2] == 8


def test_a_graph_is_built_once_for_the_same_arrays():
    driver = fake_driver()
    program = compile_cuda([make_part([0, 1], {(0, 1)})], "graph", functions=driver.functions)
    for _ in range(3):
        launch_program(program, [0x1000, 0x2000], 0x9000, 40, 55)
    assert (cost(program).builds, cost(program).updates) == (1, 0)
    assert len(driver.launches) == 2
    assert sum(row[0] == REPLAYED for row in driver.rows) == 3
    launch_program(program, [0x1000, 0x3000], 0x9000, 40, 55)
    launch_program(program, [0x1000, 0x2000], 0x9000, 70, 55)
    assert cost(program).builds == 3
    assert cost(program).seconds > 0
    with pytest.raises(ValueError, match="expected one with scheduler 'graph'"):
        cost(compile_cuda([make_part([0], set())], functions=driver.functions))


def test_nodes_get_other_addresses_when_many_graphs_are_alike():
    """Half of the graphs are for calls of one size; then the one that was unused longest is changed."""
    driver = fake_driver()
    ops = (CudaOp(KERNELS[0], ("x",)), CudaOp(KERNELS[1], ("y",)), CudaOp(KERNELS[2], ()))
    program = compile_cuda([CudaPart(ops, 640, SPECS)], "graph", functions=driver.functions)

    def changed(*call):
        before = sum(row[0] == CHANGED for row in driver.rows)
        launch_program(program, *call)
        return sum(row[0] == CHANGED for row in driver.rows) - before

    half = GRAPHS // 2
    for i in range(half):
        assert changed([0x1000 + i, 0x2000], 0x9000, 40, 55) == 0
    assert (cost(program).builds, cost(program).updates) == (half, 0)
    assert changed([0x5000, 0x2000], 0x9000, 40, 55) == 1  # only the first kernel takes x
    assert changed([0x6000, 0x7000], 0x9000, 40, 55) == 2
    assert changed([0x1002, 0x2000], 0x8000, 40, 55) == 3  # all take the arena
    assert (cost(program).builds, cost(program).updates) == (half, 3)
    assert changed([0x1003, 0x2000], 0x9000, 40, 55) == 0  # this graph is still there
    assert changed([0x1003, 0x2000], 0x9000, 70, 55) == 0
    assert cost(program).builds == half + 1


def test_failures_name_the_kernel():
    ops = make_part([0, 1], {(0, 1)})
    broken = CudaPart((ops.ops[0], CudaOp(Kernel("broken", "k9", 0), ("x",))), 640, SPECS)
    for scheduler in ("serial", "sw", "graph"):
        with pytest.raises(
            CudaError, match=r"launch of kernel broken \(op 1 of 2, unit 0\): the fake is broken \(error 1\)"
        ):
            run([broken], scheduler, 40)
    with pytest.raises(CudaError, match=r"kernel kernel0 \(op 0 of 2, unit 0\): the fake is broken \(error 700\)"):
        run([ops], "sw", 40, stream=BROKEN, streams=1)


def test_a_task_that_never_ends_is_named(monkeypatch):
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", "0.05")
    driver = fake_driver()
    table, owners = fake_pool()
    owners[0][POOL_EVENTS:] = STUCK
    program = compile_cuda([make_part([2, 1, 0], set())], "sw", functions=driver.functions, pools=table, window=2)
    with pytest.raises(CudaError, match=r"kernel kernel2 \(op 0 of 3, unit 0\) did not end within 0.05 s"):
        launch_program(program, [1, 2], 3, 40, 0)
    assert not owners[0][0]  # the lock is free again


def test_a_gpu_without_streams_is_an_error():
    driver, table = fake_driver(), np.zeros(64, np.int64)
    program = compile_cuda([make_part([0], set())], "sw", functions=driver.functions, pools=table.ctypes.data)
    with pytest.raises(CudaError, match="no CUDA streams for the current GPU"):
        launch_program(program, [1, 2], 3, 40, 0)


@pytest.mark.parametrize("text", ["-1", "soon"])
def test_a_timeout_that_is_no_number_is_refused(monkeypatch, text):
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", text)
    with pytest.raises(ValueError, match="BRAX_CONCURRENT_TIMEOUT must be a positive number of seconds"):
        run([make_part([0], set())], "serial", 40)
