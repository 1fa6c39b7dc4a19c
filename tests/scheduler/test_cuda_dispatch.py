"""The host's side of hw on CUDA, put onto a driver that is not one: what is launched, with what. No GPU is needed."""

import numpy as np
import pytest
from fake_gpu import BROKEN, FILLED, PARAMETERS, fake_driver

from brax_concurrent.backends import cuda_dispatch as c
from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.cuda_driver import CudaError, Kernel
from brax_concurrent.backends.cuda_program import (
    DESC_CONTROL_BYTES,
    DESC_ERRORS,
    DESC_GANG,
    DESC_KERNEL,
    DESC_MOST_GANG,
    DESC_PARAMETERS,
    DESC_POLICY,
    DESC_REGROUP,
    DESC_WARPS,
    RECORD_ARENA,
    RECORD_FIRST_BUFFER,
    RECORD_NUM_ENVS,
    RECORD_ORDER,
    CudaOp,
    CudaPart,
)
from brax_concurrent.backends.cuda_trace import DISPATCH_ROW
from brax_concurrent.scheduler.cuda import compile_cuda, launch_program
from brax_concurrent.scheduler.cuda_dispatch import Dispatch, bundle_tiles
from brax_concurrent.scheduler.regroup import THREADS
from brax_concurrent.scheduler.trace_streams import dispatched_rows, dispatched_stream

BUFFERS = (BufferSpec("x", (3,), "float32", "readwrite"), BufferSpec("work", (), "int32", "readwrite"))
DISPATCHER, SORTER, MULTIPROCESSORS, ARENA = 500, 600, 4, 0x100000
RECORD_WORDS = RECORD_FIRST_BUFFER + len(BUFFERS)


def make_part(ops=1, **settings):
    kernels = tuple(CudaOp(Kernel(f"kernel{i}", f"k{i}", 0), ()) for i in range(ops))
    return CudaPart(kernels, 640, BUFFERS, **settings)


def make_program(parts, driver, gang=0, most=4, **settings):
    errors = np.zeros(c.ERROR_WORDS, np.int32)
    words = {
        DESC_KERNEL: DISPATCHER,
        DESC_WARPS: 8,
        DESC_GANG: gang,
        DESC_MOST_GANG: most,
        DESC_POLICY: c.SAME_KERNEL,
        DESC_REGROUP: SORTER,
        DESC_CONTROL_BYTES: c.COUNTERS_BYTES,
        DESC_ERRORS: int(errors.ctypes.data),
        DESC_PARAMETERS: c.CONTROL_WORDS + RECORD_WORDS * len(parts),
    }
    loaded = Dispatch(Kernel("dispatcher", "d", DISPATCHER), False, words, errors)
    program = compile_cuda(
        parts, "hw", multiprocessors=MULTIPROCESSORS, functions=driver.functions, dispatch=loaded, **settings
    )
    return program, errors


@pytest.fixture(scope="module")
def drivers():
    """By how many of a launch's parameters it records: those of the sorter, or of a dispatcher's first part."""
    return {count: fake_driver(parameters=count, most=20) for count in (3, c.CONTROL_WORDS + RECORD_WORDS)}


@pytest.fixture
def driver(drivers):
    found = drivers[c.CONTROL_WORDS + RECORD_WORDS]
    found.clear()
    return found


def run(driver, parts, num_envs, **settings):
    """The dispatcher's launch, and its control words."""
    program, _ = make_program(parts, driver, **settings)
    addresses = [0x1000 * (1 + i) for i in range(len(program.buffers))]
    launch_program(program, addresses, ARENA, num_envs, 55)
    (launch,) = driver.launches
    assert launch[0] == DISPATCHER
    return launch, launch[PARAMETERS : PARAMETERS + c.CONTROL_WORDS]


@pytest.mark.parametrize(
    ("num_envs", "blocks", "shift", "threads", "dynamic"),
    [
        (1, 1, 0, 32, 0),
        (32 * 4, 4, 0, 32, 0),  # a tile for each multiprocessor
        (32 * 4 + 1, 3, 1, 64, 0),  # more: two warps go through one bundle together
        (32 * 16, 4, 2, 128, 0),
        (32 * 32, 4, 2, 256, 0),  # two gangs of four
        (32 * 32 + 1, 4, 2, 256, 1),  # more bundles than gangs: they are claimed from a counter
    ],
)
def test_whole_steps_have_as_few_warps_as_multiprocessors_allow(driver, num_envs, blocks, shift, threads, dynamic):
    launch, control = run(driver, [make_part()], num_envs)
    assert launch[1:4] == [blocks, threads, 1]
    assert launch[5] == 55
    assert control[c.C_GANG] == shift
    assert control[c.C_FLIGHTS] == threads // 32 >> shift
    assert control[c.C_DYNAMIC] == dynamic
    assert control[c.C_POLICY] == c.SAME_KERNEL
    filled = [row[1:3] for row in driver.rows if row[0] == FILLED]
    tiles = -(-num_envs // 32)
    assert filled == ([[ARENA + 640 * tiles, c.COUNTERS_BYTES // 4]] if dynamic else [])


def test_stages_keep_all_gangs_and_have_more_bundles_in_flight(driver):
    launch, control = run(driver, [make_part(ops=3)], 32)
    assert launch[2] == 8 * 32
    assert control[c.C_FLIGHTS] == 16


def test_a_gang_of_ones_own(driver):
    launch, control = run(driver, [make_part()], 32 * 8, gang=8)
    assert control[c.C_GANG] == 3
    assert launch[1:3] == [1, 256]


@pytest.mark.parametrize(
    ("numbers", "shares", "tiles"),
    [
        ((160, 32 * 64), (3, 1), 2),
        ((160, 32 * 64), (1, 3), 4),
        ((32 * 64, 160), (1, 3), 2),
        ((160, 32 * 64), (0, 0), 2),  # all have all: the first counts
    ],
)
def test_of_several_robots_the_one_with_most_multiprocessors_says_how_large_gangs_are(driver, numbers, shares, tiles):
    """5 and 64 tiles on 3 and 1 of four multiprocessors, or the other way round."""
    parts = [make_part(name=n, num_envs=envs, share=s) for n, envs, s in zip("ab", numbers, shares, strict=True)]
    program, _ = make_program(parts, driver)
    assert bundle_tiles(program, sum(numbers)) == tiles


def test_records_of_all_parts_follow_the_control_words(driver):
    parts = [make_part(name="a", num_envs=40), make_part(name="b", num_envs=100)]
    launch, _ = run(driver, parts, 140)
    first = launch[PARAMETERS + c.CONTROL_WORDS :]
    assert first[RECORD_ARENA] == ARENA
    assert first[RECORD_NUM_ENVS] == 40
    assert first[RECORD_ORDER] == 0
    assert first[RECORD_FIRST_BUFFER : RECORD_FIRST_BUFFER + 2] == [0x1000, 0x2000]


def test_environments_are_regrouped_where_there_are_bundles_enough(drivers):
    driver = drivers[3]
    driver.clear()
    program, _ = make_program([make_part(work="work")], driver, gang=1)
    tiles = 3 * MULTIPROCESSORS // 2  # one and a half for each multiprocessor
    assert program.scratch_bytes(32 * tiles) == tiles * (640 + 128) + c.COUNTERS_BYTES
    launch_program(program, [0x1000, 0x2000], ARENA, 32 * tiles, 55)
    sorter, dispatcher = driver.launches
    assert sorter[:3] == [SORTER, 1, THREADS]
    assert sorter[PARAMETERS : PARAMETERS + 3] == [0x2000, 32 * tiles, ARENA + 640 * tiles]
    assert dispatcher[0] == DISPATCHER
    driver.clear()
    launch_program(program, [0x1000, 0x2000], ARENA, 32 * (tiles - 1), 55)
    assert [launch[0] for launch in driver.launches] == [DISPATCHER]


def test_a_failed_launch_says_so(driver):
    program, _ = make_program([make_part()], driver)
    with pytest.raises(CudaError, match="the fake is broken"):
        launch_program(program, [0x1000, 0x2000], ARENA, 32, BROKEN)


def test_a_task_that_was_stuck_is_named_by_the_next_call(driver):
    program, errors = make_program([make_part(ops=3)], driver)
    found = {c.E_CODE: c.NEVER_READY, c.E_SLOT: 5, c.E_PART: 0, c.E_BUNDLE: 7, c.E_OP: 2, c.E_STEP: 1}
    for word, value in found.items():
        errors[word] = value
    message = r"kernel kernel2 \(op 2 of 3, step 1, bundle 7\) in slot 5 of the window never became ready"
    with pytest.raises(CudaError, match=message):
        launch_program(program, [0x1000, 0x2000], ARENA, 32, 55)
    assert driver.launches == []


def test_a_timeline_knows_the_tasks_by_bundle(driver):
    program, _ = make_program([make_part(ops=2, upstream=((), (0,)))], driver, gang=2)
    num_envs = 32 * 3
    assert bundle_tiles(program, num_envs) == 2
    stream = dispatched_stream(program, num_envs)
    assert [(task.kernel, task.units, task.waits_for) for task in stream] == [
        ("kernel0", range(0, 2), ()),
        ("kernel1", range(0, 2), (0,)),
        ("kernel0", range(2, 3), ()),
        ("kernel1", range(2, 3), (2,)),
    ]
    rows = np.zeros(3, DISPATCH_ROW)
    rows["bundle"], rows["op"], rows["place"] = [1, 0, 0], [0, 1, 0], [0x301, c.SKIPPED_PLACE, 0x100]
    rows["begin"], rows["end"] = [10, 20, 5], [15, 20, 9]
    assert dispatched_rows(program, num_envs, rows)[:, :4].tolist() == [[2, 1, 10, 15], [1, -1, 20, 20], [0, 0, 5, 9]]
