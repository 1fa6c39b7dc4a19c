"""Programs for the GPU, run by a driver that is not one: what is launched, with what, and what a failure says."""

from dataclasses import replace

import numpy as np
import pytest
import update_cuda_registers as table
from fake_gpu import PARAMETERS, fake_driver, on_the_cpu

from brax_concurrent.backends import cuda, cuda_driver
from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.backends.cuda_calls import Functions
from brax_concurrent.backends.cuda_driver import CudaError, Kernel
from brax_concurrent.backends.cuda_program import CudaOp, CudaPart, build_program
from brax_concurrent.envs import program as env_program
from brax_concurrent.envs import program_cuda
from brax_concurrent.envs.registry import make_task
from brax_concurrent.envs.stream import StreamBuilder
from brax_concurrent.kernels.model import load_model
from brax_concurrent.scheduler.cuda import launch_program
from brax_concurrent.scheduler.schedule import Schedule

SPECS = (BufferSpec("x", (3,), "float32", "readwrite"), BufferSpec("y", (), "float32", "write"))
FIRST, SECOND = Kernel("first", "k1", 101), Kernel("second", "k2", 102)
OPS = (CudaOp(FIRST, ("x",)), CudaOp(SECOND, ("y", "x")), CudaOp(FIRST, ("x",)), CudaOp(SECOND, ()))
PART = CudaPart(OPS, 640, SPECS)
NO_FUNCTIONS = Functions(8, 8, 8)


def test_kernels_are_launched_in_program_order():
    driver = fake_driver()
    program = build_program([PART], 1, functions=driver.functions, multiprocessors=2)
    launch_program(program, [0x1000, 0x2000], 0x9000, 257, stream=55)
    launch_program(program, [0x1000, 0x2000], 0x9000, 100, stream=0)
    expected = [101, 102, 101, 102]
    assert [launch[0] for launch in driver.launches] == expected * 2
    for launch in driver.launches[:4]:  # blocks of 128 threads; stream; arena and num_envs
        assert launch[1:PARAMETERS] == [3, 128, 1, 0, 55, 0]
        assert launch[PARAMETERS : PARAMETERS + 2] == [0x9000, 257]
    for launch in driver.launches[4:]:  # a small batch: a block for each multiprocessor
        assert launch[1:PARAMETERS] == [2, 64, 1, 0, 0, 0]
    assert program.scratch_bytes(101) == 4 * 640


@pytest.mark.parametrize(("num_envs", "grid"), [(1, 1), (256, 1), (257, 2), (1 << 20, 4096)])
def test_every_environment_has_a_thread(num_envs, grid):
    driver = fake_driver()
    program = build_program([CudaPart(OPS[:1], 0, SPECS, block=256)], 1, functions=driver.functions)
    launch_program(program, [1, 2], 3, num_envs, stream=0)
    assert driver.launches[0][1:3] == [grid, 256]


def test_a_kernel_gets_the_buffers_that_it_names():
    driver = fake_driver(parameters=6)
    program = build_program([CudaPart(OPS[1:2], 0, SPECS)], 1, functions=driver.functions)
    launch_program(program, [0x1000, 0x2000], 0x9000, 5, stream=0)
    assert driver.launches[0][PARAMETERS : PARAMETERS + 6] == [0x9000, 5, 32, 0, 0x2000, 0x1000]


def test_a_failed_launch_stops_the_program_and_is_named():
    driver = fake_driver()
    broken = (OPS[0], OPS[1], CudaOp(Kernel("broken", "k3", 0), ("x",)), OPS[1])
    program = build_program([CudaPart(broken, 0, SPECS)], 1, functions=driver.functions)
    with pytest.raises(
        CudaError, match=r"launch of kernel broken \(op 2 of 4, unit 0\): the fake is broken \(error 1\)"
    ):
        launch_program(program, [1, 2], 3, 40, stream=0)
    assert [launch[0] for launch in driver.launches] == [101, 102]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": 48}, "block must be a multiple of 32 of at most 1024, got 48"),
        ({"block": 2048}, "block must be a multiple of 32 of at most 1024, got 2048"),
        ({"lanes": 33}, "lanes must be from 1 to 32, got 33"),
        ({"arena_bytes": -1}, "arena_bytes must not be negative, got -1"),
        ({"unit_tiles": -2}, "unit_tiles must not be negative, got -2"),
        ({"share": -1}, "share must not be negative, got -1"),
        ({"num_envs": 0}, "num_envs must be at least 1, got 0"),
        ({"buffers": (*SPECS, SPECS[0])}, "buffer names must differ"),
        ({"buffers": (BufferSpec("x", (3,), "float32", "write", per_env=False),)}, "buffer x: all environments"),
        ({"ops": (CudaOp(FIRST, ("z",)),)}, r"kernel first takes \['z'\], which are no buffers"),
    ],
)
def test_parts_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build_program([replace(PART, **changes)], 1, functions=NO_FUNCTIONS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": 0}, "fingerprint must be a nonzero uint64, got 0"),
        ({"mode": "fast"}, r"mode: expected one of \('serial', 'sw', 'graph', 'hw'\), got 'fast'"),
        ({"window": 65}, "window must be from 1 to 64, got 65"),
        ({"streams": 0}, "streams must be from 1 to 16, got 0"),
        ({"parts": []}, "expected at least one"),
        ({"parts": [PART, PART]}, "one of several parts needs num_envs"),
    ],
)
def test_programs_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build_program(**{"parts": [PART], "fingerprint": 1, "functions": NO_FUNCTIONS, **changes})


def test_a_call_without_its_arrays_is_refused():
    program = build_program([PART], 1, functions=NO_FUNCTIONS)
    with pytest.raises(ValueError, match="expected 2 addresses and at least 1 environment, got 1 and 5"):
        launch_program(program, [1], 0, 5, 0)
    with pytest.raises(ValueError, match="got 2 and 0"):
        launch_program(program, [1, 2], 0, 0, 0)


@pytest.mark.skipif(cuda_driver.device_count() > 0, reason="there is a GPU")
def test_without_a_gpu_the_error_says_so():
    with pytest.raises(CudaError, match="CUDA"):
        cuda_driver.compute_capability()


def random_arrays(specs, num_envs, seed=0):
    generator = np.random.default_rng(seed)
    arrays = []
    for spec in specs:
        shape = spec.array_shape(num_envs)
        if spec.dtype == "float32":
            arrays.append(generator.normal(0, 0.3, shape).astype(np.float32))
        elif spec.dtype == "uint32":
            arrays.append(generator.integers(0, 1 << 32, shape, dtype=np.uint32))
        else:
            arrays.append(np.zeros(shape, spec.dtype))
    return arrays


@pytest.mark.slow
@pytest.mark.xdist_group("cuda_halfcheetah")
def test_a_whole_control_step_has_the_bits_of_the_cpu():
    """The code of one GPU thread, compiled for the CPU and launched as on a GPU, against machine vectors of lanes."""
    num_envs = 70  # the last tile is not full
    task = make_task("halfcheetah")
    stream = StreamBuilder(task, load_model(task.model, nconmax=task.nconmax)).control_step()
    special = table.specialized("halfcheetah")
    specs = env_program.buffers_of(stream, "float32")
    vectors, scalars = random_arrays(specs, num_envs), random_arrays(specs, num_envs)
    run_program(env_program.compile_cpu(lambda: stream, "float32", 1), vectors, num_envs)

    programs = [program for program in special.programs.values() if program.root.body]
    ops = dict(zip((p.name for p in programs), cuda.in_parallel(on_the_cpu, programs), strict=True))
    driver = fake_driver()
    order = tuple(ops[kernel.name] for kernel in stream.kernels if kernel.name in ops)
    part = CudaPart(order, special.layout.arena_bytes, tuple(specs))
    program = build_program([part], 1, functions=driver.functions)
    arena = np.full(program.scratch_bytes(num_envs), 255, np.uint8)
    launch_program(program, [array.ctypes.data for array in scalars], arena.ctypes.data, num_envs, stream=0)
    assert len(driver.launches) == len(order)
    for spec, scalar, vector in zip(specs, scalars, vectors, strict=True):
        np.testing.assert_array_equal(scalar, vector, err_msg=spec.name)


@pytest.mark.xdist_group("cuda_halfcheetah")
def test_a_packed_stream_is_loaded_kernel_by_kernel(monkeypatch, tmp_path):
    monkeypatch.setenv("BRAX_CONCURRENT_CACHE", str(tmp_path))
    driver, loaded = fake_driver(), {}

    def load(name, symbol, cubin):
        assert cubin[:4] == b"\x7fELF"
        return loaded.setdefault(name, Kernel(name, symbol, 100 + len(loaded)))

    monkeypatch.setattr(cuda_driver, "load_kernel", load)
    monkeypatch.setattr(cuda_driver, "make_resident", lambda kernels: None)
    monkeypatch.setattr(Functions, "of_driver", classmethod(lambda cls: driver.functions))
    task = make_task("halfcheetah")
    builder = StreamBuilder(task, load_model(task.model, nconmax=task.nconmax))
    stream = builder.reset_all()
    packed = program_cuda.pack(stream, "f32", env_program.buffers_of(stream, "float32"), (9, 0))
    part = program_cuda.load_part(packed)
    assert [op.kernel.name for op in part.ops] == ["load", "reset", "observe_reset", "store"]
    assert part.upstream == ((), (0,), (1,), (1,))  # storing a new state and observing it are independent
    programs = {s: program_cuda.schedule_parts([part], Schedule(s), 132) for s in ("serial", "graph")}
    for scheduler, program in programs.items():
        addresses = [0x1000 * (1 + index) for index in range(len(program.buffers))]
        launch_program(program, addresses, 0x100, 132 * 64, stream=3)
        assert [launch[0] for launch in driver.launches[-4:]] == [loaded[op.kernel.name].handle for op in part.ops]
        assert driver.launches[-1][1:3] == [132, 64]
        same = program_cuda.schedule_parts([program_cuda.load_part(packed)], Schedule(scheduler), 132)
        assert same.fingerprint == program.fingerprint
    smaller = program_cuda.schedule_parts([program_cuda.load_part(packed, block=64)], Schedule(), 132)
    assert len({smaller.fingerprint, *(program.fingerprint for program in programs.values())}) == 3
