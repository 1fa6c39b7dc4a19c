"""Tasks for the GPU, without one: what compiles, which parameters it takes, and what a launch gives it.

The stand-in for a GPU carries launches out in Python: it takes the parameters apart as the kernel's PTX declares them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re

import numpy as np
import pytest
from fake_gpu import NODE, PARAMETERS, REPLAYED, fake_driver, fake_pool
from task_kernels import EVERY_KIND, answers, axpy, copy, every_kind, fallible, fill, on_gpu, undeclared

import brax_concurrent as bc
from brax_concurrent.backends import cuda_pool
from brax_concurrent.backends.arguments import ArgumentType, KernelError
from brax_concurrent.backends.cuda_calls import Functions
from brax_concurrent.scheduler.arrays import as_argument

pytest.importorskip("cuda.bindings.nvvm", reason="numba-cuda with NVIDIA's compilers is not installed")
task_cuda = pytest.importorskip("brax_concurrent.backends.task_cuda")
cuda_driver, Kernel, CudaError = task_cuda.cuda_driver, task_cuda.cuda_driver.Kernel, task_cuda.cuda_driver.CudaError

CAPABILITY = (9, 0)
ARRAY, READ = ArgumentType("float64", 1), ArgumentType("float64", 1, readonly=True)
KINDS = {"u64": np.int64, "f64": np.float64, "f32": np.float32, "u8": np.uint8, "u16": np.uint16, "u32": np.uint32}
HEAD = 7 + 1 + 7 + 2  # parameters before the arguments: failure cell, task, predicate, first unit and units


def parameters(ptx):
    """The kinds of a kernel's parameters, such as u64, in order."""
    (entry,) = re.findall(r"\.visible \.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
    return re.findall(r"\.param \.(\w+) ", entry[1])


class Cell:
    """The failure cell, in the memory of the CPU."""

    def __init__(self):
        self.words = np.zeros(task_cuda.FAILURE_WORDS, np.int64)
        self.address = self.words.ctypes.data


def as_array(words, dtype, ndim):
    """An array from its parameters."""
    meminfo, parent, items, itemsize, address, *rest = words
    shape, strides = rest[:ndim], rest[ndim:]
    assert (meminfo, parent, items, itemsize) == (0, 0, int(np.prod(shape)), np.dtype(dtype).itemsize)
    if items == 0:
        return np.empty(shape, dtype)
    first = np.frombuffer((ctypes.c_uint8 * itemsize).from_address(address), dtype)
    return np.lib.stride_tricks.as_strided(first, shape, strides)


def thread(function, code, types, pointers, index):
    """What one thread of a task's kernel does."""
    kinds = parameters(code.ptx)
    values = [
        np.frombuffer(ctypes.string_at(p, 8), KINDS[kind], 1)[0].item() for p, kind in zip(pointers, kinds, strict=True)
    ]
    failure, task = as_array(values[:7], "int64", 1), values[7]
    predicate, (first, units) = as_array(values[8:15], "int32", 1), values[15:17]
    if index >= units or failure[0] or (predicate.size and not predicate[0]):
        return
    rest, arguments = values[17:], []
    for each in types:
        count = 1 if each.ndim is None else 5 + 2 * each.ndim
        arguments.append(rest[0] if each.ndim is None else as_array(rest[:count], each.dtype, each.ndim))
        rest = rest[count:]
    assert rest == []
    try:
        function(int(first + index), *arguments)
    except ValueError:
        failure[:] = 1, task, first + index


@functools.cache
def the_driver():
    return fake_driver()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is none: yields the list of launches (kernel, grid, block, stream)."""
    launches, kept, driver = [], [], the_driver()
    pools, owners = fake_pool()
    kept.append(owners)
    driver.clear()

    def load(code):
        function, types = compiled[code]
        count = len(parameters(code.ptx))

        def launch(pointers, _, index, __):
            thread(function, code, types, (ctypes.c_uint64 * count).from_address(pointers), index)

        callback = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(launch)
        kept.append(callback)
        return Kernel(code.name, code.symbol, ctypes.cast(callback, ctypes.c_void_p).value)

    compiled, compile_task = {}, task_cuda.compile_task

    def compile_and_keep(function, types, capability, **options):
        code = compile_task(function, types, capability, **options)
        compiled[code] = function, types
        return code

    def run(failure, launch):
        cell = np.ctypeslib.as_array((ctypes.c_int64 * 3).from_address(failure))
        cell[:] = 0
        launch()
        launches[:] = driver.launches
        return tuple(cell.tolist()) if cell[0] else None

    monkeypatch.setattr(task_cuda, "device_of", lambda addresses: 0)
    monkeypatch.setattr(cuda_driver, "primary_context", lambda device=0: contextlib.nullcontext())
    monkeypatch.setattr(cuda_driver, "compute_capability", lambda device=0: CAPABILITY)
    monkeypatch.setattr(task_cuda, "failure_cell", Cell)
    monkeypatch.setattr(task_cuda, "one_allocation", lambda first, last: True)
    monkeypatch.setattr(task_cuda, "compile_task", compile_and_keep)
    monkeypatch.setattr(task_cuda, "load", load)
    monkeypatch.setattr(task_cuda, "run_table", run)
    monkeypatch.setattr(Functions, "of_driver", lambda: driver.functions)
    monkeypatch.setattr(cuda_pool, "pools", lambda: pools)
    monkeypatch.setattr("brax_concurrent.scheduler.stream._CODE", {})
    return launches


@pytest.mark.parametrize("where", ["launch", "copy", None])
def test_a_run_leaves_a_failure_cell_in_which_nothing_has_failed(where, monkeypatch):
    """Whatever ends it: the next run's tasks would do nothing else, or be blamed for what others raised."""
    cell, calls = Cell(), []

    def call(name, *arguments, doing=""):
        calls.append(name)
        if name == "cuMemcpyDtoH_v2":
            if where == "copy" and cell.words.any():
                raise CudaError("refused")
            ctypes.memmove(arguments[0].value, arguments[1].value, arguments[2].value)
        elif name == "cuMemsetD8_v2":
            ctypes.memset(arguments[0].value, arguments[1].value, arguments[2].value)

    def launch():
        cell.words[:] = 7, 2, 1
        if where == "launch":
            raise CudaError("refused")

    monkeypatch.setattr(cuda_driver, "call", call)
    if where is None:
        assert task_cuda.run_table(cell.address, launch) == (7, 2, 1)
    else:
        with pytest.raises(CudaError, match="refused"):
            task_cuda.run_table(cell.address, launch)
    assert cell.words.tolist() == [0, 0, 0]
    calls.clear()
    assert task_cuda.run_table(cell.address, lambda: None) is None
    assert calls == ["cuCtxSynchronize", "cuMemcpyDtoH_v2"]


def test_a_kernel_is_machine_code_with_numbas_parameters():
    code = task_cuda.compile_task(every_kind, EVERY_KIND, CAPABILITY)
    assert code.cubin[:4] == b"\x7fELF"
    assert f".visible .entry {code.symbol}(" in code.ptx
    assert ".target sm_90" in code.ptx
    assert 0 < code.resources.registers < 64
    kinds = parameters(code.ptx)
    assert kinds[HEAD:] == ["f32", *["u64"] * (7 + 9), "u8", "f32", "f32"]
    assert set(kinds[:HEAD]) == {"u64"}
    values = [np.float32(2), np.zeros(3), np.zeros((4, 6), np.int16)[::2, ::-1], True, np.complex64(1 + 2j)]
    words = task_cuda.parameter_words([as_argument(value, "x") for value in values])
    assert len(words) == len(kinds) - HEAD
    y = values[2]
    assert words[8:17] == [0, 0, 12, 2, y.__array_interface__["data"][0], 2, 6, 24, -2]
    found = [np.array(words[i] & (1 << 64) - 1, np.uint64).tobytes() for i in (0, 17, 18, 19)]
    assert [np.frombuffer(b, KINDS[k], 1)[0] for b, k in zip(found, ["f32", "u8", "f32", "f32"], strict=True)] == [
        2,
        1,
        1,
        2,
    ]


def test_code_is_named_by_its_content():
    first, again = (task_cuda.compile_task(copy.function, [READ, ARRAY], CAPABILITY) for _ in range(2))
    other = task_cuda.compile_task(copy.function, [ARRAY, ARRAY], CAPABILITY)
    assert first.symbol != other.symbol
    assert first.resources == again.resources


@pytest.mark.parametrize(
    ("kernel", "types", "message"),
    [
        (undeclared, [READ, ARRAY, READ], "readonly array"),
        (answers, [ARRAY], "it returns int64: a kernel returns nothing"),
    ],
)
def test_kernels_that_do_not_compile(kernel, types, message):
    with pytest.raises(KernelError, match=message):
        task_cuda.compile_task(kernel.function, types, CAPABILITY)


def test_an_exception_is_told_through_the_failure_cell():
    silent, loud = (task_cuda.compile_task(k.function, [READ, ARRAY], CAPABILITY) for k in (copy, fallible))
    assert "atom.global.cas.b64" in loud.ptx
    assert "atom.global.cas" not in silent.ptx


@pytest.mark.parametrize("scheduler", ["serial", "sw"])
def test_a_stream_runs(gpu, scheduler):
    x, y, flags, stream = np.arange(300.0), np.zeros((300, 2)), np.array([0, 1], np.int32), bc.TaskStream()
    stream.add(copy, units=300, x=on_gpu(x[::-1]), y=on_gpu(y[:, 0]))
    stream.add(axpy, units=128, a=2.0, x=on_gpu(x), y=on_gpu(y[:, 0]))
    stream.add(fill, units=3, value=7.0, y=on_gpu(y[:, 1]), predicate=on_gpu(flags[:1]))
    stream.add(fill, units=2, value=8.0, y=on_gpu(y[:, 1]), predicate=on_gpu(flags[1:]))
    stream.add(fill, units=0, value=9.0, y=on_gpu(y[:, 1]))
    stream.run(scheduler)
    expected = np.zeros((300, 2))
    expected[:, 0] = x[::-1]
    expected[:128, 0] += 2 * x[:128]
    expected[:2, 1] = 8
    assert np.array_equal(y, expected)
    # The host reads predicates under sw, and launches nothing for a task that is skipped.
    launches = [[3, 128], [1, 128], [1, 128]] + ([[1, 128]] if scheduler == "serial" else [])
    assert [launch[1:3] for launch in gpu] == launches
    stream.run(scheduler)
    assert len(gpu) == 2 * len(launches)


def test_a_graph_is_made_once_until_tasks_are_added(gpu):
    """The stand-in carries launches out where a node is added: replays show in the row of what happened."""
    x, y, stream = np.arange(4.0), np.zeros(4), bc.TaskStream()
    stream.add(copy, units=4, x=on_gpu(x), y=on_gpu(y))
    stream.add(fill, units=0, value=9.0, y=on_gpu(y))
    stream.add(axpy, units=4, a=2.0, x=on_gpu(x), y=on_gpu(y))
    stream.run("graph")
    assert np.array_equal(y, 3 * x)
    assert [row[0] for row in the_driver().rows] == [NODE, NODE, REPLAYED]
    assert the_driver().before() == [set(), {0}]
    stream.run("graph")
    assert [row[0] for row in the_driver().rows] == [NODE, NODE, REPLAYED, REPLAYED]
    stream.add(fill, units=2, value=7.0, y=on_gpu(y))
    stream.run("graph")
    assert np.array_equal(y, [7, 7, 6, 9])
    assert [row[0] for row in the_driver().rows[4:]] == [NODE, NODE, NODE, REPLAYED]
    assert the_driver().before() == [set(), {0}, set(), {2}, {2, 3}]


def test_a_kernel_that_raises_stops_the_stream(gpu):
    x, y, z, stream = np.array([4.0, 4, -1, 4]), np.zeros(4), np.zeros(1), bc.TaskStream()
    stream.add(fill, units=4, value=1.0, y=on_gpu(y))
    stream.add(fallible, units=4, x=on_gpu(x), y=on_gpu(y))
    stream.add(fill, units=1, value=1.0, y=on_gpu(z))
    with pytest.raises(
        bc.TaskError, match=r"task 1, kernel fallible on the arrays \(x, y\), unit 2: raised an exception, Num"
    ):
        stream.run()
    assert z[0] == 0
    x[2] = 4
    stream.run()
    assert z[0] == 1


def test_undeclared_stores_are_named(gpu):
    x, stream = on_gpu(np.zeros(1)), bc.TaskStream()
    stream.add(undeclared, units=1, x=x, y=x, z=x)
    with pytest.raises(KernelError, match=r"task 0, kernel undeclared: stores into z; expected only .*\['y'\]"):
        stream.run()


def table(handles, stream_units=1):
    kernels = [Kernel(f"k{i}", f"k{i}", handle) for i, handle in enumerate(handles)]
    count = len(handles)
    return task_cuda.build_table(kernels, [()] * count, [stream_units] * count, [None] * count, Cell())


def test_a_failed_launch_is_named_and_stops_the_rest():
    driver = fake_driver()
    with pytest.raises(CudaError, match=r"launch of task 1, kernel k1: the fake is broken \(error 1\)"):
        task_cuda.launch_table(table([101, 0, 102]), functions=driver.functions)
    assert [launch[0] for launch in driver.launches] == [101]
    with pytest.raises(CudaError, match=r"launch of task 0, kernel k0: the fake is broken \(error 700\)"):
        task_cuda.launch_table(table([101]), stream=7, functions=driver.functions)


def test_tasks_are_launched_on_the_stream_given():
    driver = fake_driver()
    task_cuda.launch_table(table([101, 102], 129), stream=55, functions=driver.functions)
    assert [launch[:PARAMETERS] for launch in driver.launches] == [[k, 2, 128, 1, 0, 55, 0] for k in (101, 102)]


def test_too_many_units_for_a_launch():
    with pytest.raises(ValueError, match=r"kernel k0: units must be at most \d+ on a GPU, got"):
        table([101], 1 << 40)


def test_without_a_driver_a_stream_on_a_gpu_says_so(monkeypatch):
    def missing():
        raise CudaError("there is no CUDA driver")

    monkeypatch.setattr(cuda_driver, "_library", missing)
    stream = bc.TaskStream()
    stream.add(fill, units=1, value=1.0, y=on_gpu(np.zeros(1)))
    with pytest.raises(CudaError, match="there is no CUDA driver"):
        stream.run()
