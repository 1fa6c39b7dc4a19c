"""Streams of tasks with hw on a GPU that is none: the driver's calls go to the process's own memory, the launch to the
emulator, and a unit is the kernel's own Python function.
"""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from task_kernels import axpy, copy, fallible, fill, on_gpu, undeclared
from warp_emulator import Machine, TrapError, as_coroutines

import brax_concurrent as bc

pytest.importorskip("cuda.bindings.nvvm", reason="numba-cuda with NVIDIA's compilers is not installed")
from list_machine import MODULES

from brax_concurrent.backends import cuda_driver, task_cuda, task_link
from brax_concurrent.backends import list_layout as c
from brax_concurrent.backends.arguments import KernelError
from brax_concurrent.scheduler import cuda_list_hw

MULTIPROCESSORS, RESIDENT = 3, 2
CODE, COMPILED = {}, {}  # what all tests here compile, once


class Block:
    """Memory on the GPU: the process's own, with something in it."""

    def __init__(self, size):
        self.bytes = np.full(size + 128, 0xA5, np.uint8)
        self.address = -(-self.bytes.ctypes.data // 128) * 128
        self.size = size


class Gpu:
    """The driver's functions, and what was launched."""

    def __init__(self):
        self.launches, self.functions, self.blocks, self.arrays = [], [], [], []
        self.errors, self.after = np.zeros(8, np.int32), None

    def allocate(self, size):
        self.blocks.append(Block(size))
        return self.blocks[-1]

    def call(self, name, *arguments, doing=""):
        """A function of the driver's, by its name without the version."""
        getattr(self, name.removeprefix("cu").removesuffix("_v2").lower())(*arguments)

    def ctxsynchronize(self):
        if self.after is not None:
            error, self.after = self.after, None
            raise cuda_driver.CudaError(str(error))

    def ctxgetdevice(self, device):
        device._obj.value = 0

    def devicegetattribute(self, value, attribute, device):
        value._obj.value = MULTIPROCESSORS

    def kernelgetfunction(self, function, kernel):
        function._obj.value = kernel.value

    def occupancymaxactiveblockspermultiprocessor(self, count, kernel, threads, dynamic):
        assert (threads, dynamic.value) == (c.BLOCK, 0)
        count._obj.value = RESIDENT

    def memcpyhtod(self, target, source, size):
        ctypes.memmove(target.value, source.value, size.value)

    memcpydtoh = memcpyhtod

    def memsetd8(self, target, value, size):
        ctypes.memset(target.value, value.value, size.value)

    def launchkernel(self, kernel, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra):
        assert (gy, gz, bx, by, bz, shared, stream, extra) == (1, 1, c.BLOCK, 1, 1, 0, None, None)
        arguments = tuple(ctypes.c_int64.from_address(pointers[i]).value for i in range(c.PARAMETERS))
        self.launches.append(SimpleNamespace(blocks=gx, arguments=arguments))
        machine, cells = Machine(len(self.launches)), self.errors.ctypes.data
        machine.regions = [(cells, cells + self.errors.nbytes), *self.arrays]
        machine.regions += [(each.address, each.address + each.size) for each in self.blocks]
        entry = as_coroutines(MODULES, {**machine.primitives(), "run_unit": self.unit_runner(machine)})["run_list"]
        try:
            machine.launch(entry, gx, lambda block: bx, (0, *arguments), lambda block: 32)
        except TrapError as error:
            self.after = error

    def unit_runner(self, machine):
        def run_unit(function, parameters, unit):
            yield
            kernel, types = self.functions[function]
            values, place = [], parameters
            for each in types:
                count = 1 if each.ndim is None else 5 + 2 * each.ndim
                words = [machine.shared_word(machine.current.block, place + 8 * word) for word in range(count)]
                values.append(decoded(each, words))
                place += 8 * count
            try:
                kernel(unit, *values)
            except ValueError:
                return 1
            while kernel is forever.function:
                yield
            return 0

        return run_unit


def decoded(kind, words):
    if kind.ndim is None:
        return np.array(words, np.int64).view(np.uint8)[: np.dtype(kind.dtype).itemsize].view(kind.dtype)[0]
    _, _, items, _, address, *rest = words
    dtype = np.dtype(kind.dtype)
    if items == 0:
        return np.empty(rest[: kind.ndim], dtype)
    first = np.frombuffer((ctypes.c_uint8 * dtype.itemsize).from_address(address), dtype)
    return np.lib.stride_tricks.as_strided(first, rest[: kind.ndim], rest[kind.ndim :])


@bc.kernel(writes=("y",))
def forever(unit, y):
    y[unit] = 1


@pytest.fixture
def gpu(monkeypatch):
    fake, compiled, original = Gpu(), COMPILED, task_link.compile_unit

    def compile_and_keep(function, types, capability, **options):
        code = original(function, types, capability, **options)
        compiled[code.symbol] = function, types
        return code

    def load(functions, capability):
        fake.functions = [compiled[code.symbol] for code in functions]
        return cuda_driver.Kernel("dispatcher", "d", 77)

    monkeypatch.setattr("brax_concurrent.scheduler.stream._CODE", CODE)
    monkeypatch.setattr(cuda_driver, "call", fake.call)
    monkeypatch.setattr(cuda_driver, "shared_words", lambda count: fake.errors)
    monkeypatch.setattr(cuda_list_hw, "_free_cells", [])
    monkeypatch.setattr(cuda_list_hw, "DeviceBlock", fake.allocate)
    monkeypatch.setattr(cuda_list_hw, "load_program", load)
    monkeypatch.setattr(task_link, "compile_unit", compile_and_keep)
    monkeypatch.setattr(task_cuda, "DeviceBlock", fake.allocate)
    monkeypatch.setattr(task_cuda, "device_of", lambda addresses: 0)
    monkeypatch.setattr(cuda_driver, "primary_context", lambda device=0: contextlib.nullcontext())
    monkeypatch.setattr(cuda_driver, "compute_capability", lambda device=0: (9, 0))
    return fake


def see(gpu, *arrays):
    """Arrays that predicates may be in."""
    gpu.arrays = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays]


def test_a_stream_runs(gpu):
    x, y, flags, stream = np.arange(300.0), np.zeros((300, 2)), np.array([0, 1], np.int32), bc.TaskStream()
    see(gpu, flags)
    stream.add(copy, units=300, x=on_gpu(x[::-1]), y=on_gpu(y[:, 0]))
    stream.add(axpy, units=128, a=2.0, x=on_gpu(x), y=on_gpu(y[:, 0]))
    stream.add(fill, units=3, value=7.0, y=on_gpu(y[:, 1]), predicate=on_gpu(flags[:1]))
    stream.add(fill, units=2, value=8.0, y=on_gpu(y[:, 1]), predicate=on_gpu(flags[1:]))
    stream.add(fill, units=0, value=9.0, y=on_gpu(y[:, 1]))
    stream.run("hw")
    expected = np.zeros((300, 2))
    expected[:, 0] = x[::-1]
    expected[:128, 0] += 2 * x[:128]
    expected[:2, 1] = 8
    assert np.array_equal(y, expected)
    (launch,) = gpu.launches
    assert launch.blocks == 1 + RESIDENT * MULTIPROCESSORS - 1  # no task needs more than six chunks at once
    stream.run("hw", window=1)
    assert len(gpu.launches) == 2
    assert gpu.launches[1].arguments[c.P_SLOTS] == 1


def test_a_stream_follows_tasks_that_are_added_and_may_have_nothing_to_do(gpu):
    x, y, stream = np.arange(4.0), np.zeros(4), bc.TaskStream()
    stream.add(fill, units=0, value=9.0, y=on_gpu(y))
    stream.run("hw")
    assert gpu.launches == []
    stream.add(copy, units=4, x=on_gpu(x), y=on_gpu(y))
    stream.run("hw")
    stream.add(axpy, units=4, a=1.0, x=on_gpu(x), y=on_gpu(y))
    stream.run("hw")
    assert np.array_equal(y, 2 * x)
    assert [launch.blocks for launch in gpu.launches] == [2, 3]


def test_a_kernel_that_raises_stops_the_stream(gpu):
    x, y, z, stream = np.array([4.0, 4, -1, 4]), np.zeros(4), np.zeros(1), bc.TaskStream()
    stream.add(fill, units=0, value=1.0, y=on_gpu(y))  # numbers are the stream's, whatever has no units
    stream.add(fallible, units=4, x=on_gpu(x), y=on_gpu(y))
    stream.add(copy, units=1, x=on_gpu(y), y=on_gpu(z))
    stream.add(fill, units=1, value=1.0, y=on_gpu(z))
    with pytest.raises(
        bc.TaskError, match=r"task 1, kernel fallible on the arrays \(x, y\), unit 2: raised an exception, Num"
    ):
        stream.run("hw")
    assert z[0] == 0
    x[2] = 4
    stream.run("hw")
    assert z[0] == 1


def test_undeclared_stores_are_named(gpu):
    x, stream = on_gpu(np.zeros(1)), bc.TaskStream()
    stream.add(undeclared, units=1, x=x, y=x, z=x)
    with pytest.raises(KernelError, match=r"task 0, kernel undeclared: stores into z; expected only .*\['y'\]"):
        stream.run("hw")


@pytest.mark.slow  # what waits for what is found by code that Numba compiles first
def test_a_timeline(gpu, tmp_path):
    y, flag, stream = np.zeros(300), np.zeros(1, np.int32), bc.TaskStream()
    see(gpu, flag)
    stream.add(fill, units=300, value=1.0, y=on_gpu(y))
    stream.add(fill, units=1, value=2.0, y=on_gpu(y), predicate=on_gpu(flag))
    stream.add(fill, units=0, value=3.0, y=on_gpu(np.zeros(1)))
    stream.add(fill, units=2, value=4.0, y=on_gpu(y))
    timeline = stream.run("hw", trace=tmp_path / "trace.json")
    assert (tmp_path / "trace.json").exists()
    rows = sorted(timeline.intervals, key=lambda row: row.task)
    assert [(row.task, row.skipped, row.waits_for) for row in rows] == [
        (0, False, ()),
        (1, True, (0,)),
        (3, False, (1,)),
    ]
    assert rows[0].begin < rows[0].end <= rows[2].begin < rows[2].end
    assert rows[1].begin == rows[1].end <= rows[2].begin  # nobody writes its predicate
    assert timeline.lane_name == "block"
    busy, workers = timeline.worked
    assert workers == gpu.launches[-1].blocks - 1
    assert sum(row.end - row.begin for row in rows) <= busy <= workers * timeline.makespan  # several blocks for a task
    assert timeline.occupancy == busy / (workers * timeline.makespan)
    x = np.array([-1.0])
    stream.add(fallible, units=1, x=on_gpu(x), y=on_gpu(y))
    with pytest.raises(bc.TaskError, match="task 4, kernel fallible"):
        stream.run("hw", trace=tmp_path / "other.json")
    assert (tmp_path / "other.json").exists()
    with pytest.raises(ValueError, match="trace: on a GPU only hw records tasks, .* run by 'graph'"):
        stream.run("graph", trace=tmp_path / "trace.json")


def test_a_task_that_does_not_end_is_named(gpu, monkeypatch):
    y, stream = np.zeros(2), bc.TaskStream()
    stream.add(fill, units=2, value=1.0, y=on_gpu(y))
    stream.add(fill, units=0, value=1.0, y=on_gpu(y))
    stream.add(forever, units=1, y=on_gpu(y[:1]))
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", "0.0002")  # in nanoseconds of the emulator 40,000 moves
    with pytest.raises(
        RuntimeError,
        match=r"task 2, kernel forever, in slot \d+ of the window did not end within 0 ms, nor did any other",
    ):
        stream.run("hw")
    assert cuda_list_hw._free_cells == []  # what was ended by force may write to its cell late


def test_memory_of_a_run_is_used_again_where_it_fits(gpu):
    y, stream = np.zeros(300), bc.TaskStream()
    for _ in range(2):
        stream.add(fill, units=300, value=1.0, y=on_gpu(y))
    stream.run("hw")
    known = len(gpu.blocks)
    stream.run("hw", window=64)
    assert len(gpu.blocks) == known
    assert gpu.launches[1].arguments[c.P_SLOTS] == 32
    assert gpu.launches[0].arguments[c.P_WORK] == gpu.launches[1].arguments[c.P_WORK]
    assert len(cuda_list_hw._free_cells) == 1


# ---- several streams


def image(seed, pairs=2, size=40):
    """A stream on memory of its own, and what is in it."""
    x, y, stream = np.arange(size) + 10.0 * seed, np.zeros(size), bc.TaskStream()
    for _ in range(pairs):
        stream.add(axpy, units=size, a=1.0, x=on_gpu(x), y=on_gpu(y))
        stream.add(copy, units=size, x=on_gpu(y), y=on_gpu(x))
    return stream, x, y


def test_streams_at_once(gpu):
    images = [image(seed) for seed in range(4)]
    streams = [stream for stream, _, _ in images]
    for windows, expected in ((0, MULTIPROCESSORS), (1, 1)):
        bc.run_streams(streams, windows=windows)
        assert gpu.launches[-1].arguments[c.P_WINDOWS] == expected
    for seed, (_, x, y) in enumerate(images):  # each pair of tasks but the first doubles both
        assert np.array_equal(x, 2.0**3 * (np.arange(40) + 10.0 * seed))
        assert np.array_equal(x, y)
    assert gpu.launches[-1].arguments[c.P_COUNT] == 4


def test_an_exception_in_one_of_several_streams(gpu):
    good, x, y, bad = np.zeros(1), np.array([-1.0]), np.zeros(1), bc.TaskStream()
    stream = bc.TaskStream()
    stream.add(fill, units=1, value=1.0, y=on_gpu(good))
    bad.add(fill, units=1, value=1.0, y=on_gpu(y))
    bad.add(fallible, units=1, x=on_gpu(x), y=on_gpu(y))
    with pytest.raises(bc.TaskError, match="^stream 1, task 1, kernel fallible on the arrays") as raised:
        bc.run_streams([stream, bad])
    assert (raised.value.stream, raised.value.task, raised.value.unit) == (1, 1, 0)
