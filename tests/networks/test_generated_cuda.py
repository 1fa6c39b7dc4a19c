"""A GPU's convolutions as Python, 32 threads to a warp, against JAX's."""

import ctypes
import threading
import types
from dataclasses import replace

import jax
import numpy as np
import pytest
from network_checks import OnGpu

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from brax_concurrent.backends import device_array
from brax_concurrent.backends.arguments import ScalarArgument
from brax_concurrent.networks import generated_cuda
from brax_concurrent.networks.generated_cuda import BLOCKS, SHARED_BLOCKS, WARP, Block, block_for
from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.network import Network

jax.config.update("jax_platforms", "cpu")

CASES = {
    "1x1": ((3, 5, 20), (1, 1, 20, 8), {}),
    "3x3": ((4, 5, 10), (3, 3, 10, 6), {"top": 1, "left": 1}),
    "strided": ((5, 7, 9), (3, 2, 9, 5), {"stride": 2, "left": 1}),
    "dilated": ((7, 6, 4), (3, 3, 4, 12), {"dilation": 2, "top": 2, "left": 3}),
    "vector": ((1, 1, 300), (1, 1, 300, 4), {}),
}
FORMS = [
    *(replace(block, vector=vector, ahead=ahead) for block in (*BLOCKS, *SHARED_BLOCKS)
      for vector, ahead in ((1, 3), (2, 2), (4, 1), (4, 2))),
    *(replace(block, vector=vector, wide=True) for block in BLOCKS if block.channels == 4 for vector in (1, 4)),
    Block(3, 2, ahead=3),
]  # fmt: skip


class Lanes:
    """What kernels call of gpu_units.py, for the 32 threads of a warp."""

    def __init__(self):
        self.barrier, self.values, self.own = threading.Barrier(WARP), [None] * WARP, threading.local()

    def fence(self):
        pass

    def load2(self, array, index):
        assert array.strides[0] == 4
        assert index % 2 == 0
        return tuple(array[index : index + 2])

    def load4(self, array, index):
        assert array.strides[0] == 4
        assert index % 4 == 0
        return tuple(array[index : index + 4])

    def store2(self, array, index, elements):
        assert index % 2 == 0
        array[index : index + 2] = elements

    def store4(self, array, index, elements):
        assert index % 4 == 0
        array[index : index + 4] = elements

    def exchange(self, value, lanes):
        self.values[self.own.lane] = value
        self.barrier.wait(10)
        found = self.values[self.own.lane ^ lanes]
        self.barrier.wait(10)
        return found


def run(kernel, units, warps, *arguments):
    """All units of a kernel; in warps of threads if they exchange values."""
    lanes = Lanes()
    scope = {**kernel.function.__globals__, "gpu": lanes}
    function = types.FunctionType(kernel.function.__code__, scope)
    if not warps:
        for unit in range(units):
            function(unit, *arguments)
        return
    assert units % WARP == 0
    errors = []

    def work(lane):
        lanes.own.lane = lane
        try:
            for first in range(0, units, WARP):
                function(first + lane, *arguments)
        except Exception as error:
            errors.append(error)
            lanes.barrier.abort()

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(WARP)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def numbers(stride=1, top=0, left=0, dilation=1):
    return stride, top, left, dilation


def expected(x, w, b, shape, stride=1, top=0, left=0, dilation=1, groups=1):
    """What JAX computes of as many rows and columns as `shape` has."""
    pads = [
        (first, (n - 1) * stride + (k - 1) * dilation + 1 - size - first)
        for first, n, k, size in zip((top, left), shape, w.shape, x.shape, strict=False)
    ]
    found = jax.lax.conv_general_dilated(
        x[None],
        w,
        (stride, stride),
        pads,
        rhs_dilation=(dilation, dilation),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
        precision="highest",
    )
    return np.maximum(np.asarray(found[0]) + b, 0)


def result_shape(x, w, stride=1, top=0, left=0, dilation=1):
    """With as much padding behind as in front, and a column of nothing else."""
    rows = (x[0] + 2 * top - (w[0] - 1) * dilation - 1) // stride + 1
    return rows, (x[1] + 2 * left - (w[1] - 1) * dilation - 1) // stride + 1


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", FORMS, ids=lambda block: f"{block.name} {block.ahead}")
def test_convolutions_are_jaxs(block, case):
    shape, filters, given = CASES[case]
    if shape[2] % block.vector or (block.wide and filters[3] % 4):
        return  # is never chosen
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=shape).astype(np.float32), rng.normal(size=filters).astype(np.float32)
    b = rng.normal(size=filters[3]).astype(np.float32)
    y = np.full((*result_shape(shape, filters, **given), filters[3]), np.nan, np.float32)
    kernel = generated_cuda.conv(block, True, "relu")
    own = np.ascontiguousarray(w.swapaxes(2, 3)) if block.swapped else w
    run(kernel, block.units(*y.shape), block.lanes > 1, x, own, b, y, *numbers(**given))
    wanted = expected(x, w, b, y.shape, **given)
    assert np.abs(y - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("given", [{"top": 1, "left": 2}, {"stride": 2, "top": 2}, {"dilation": 2, "left": 4}])
@pytest.mark.parametrize("size", [(3, 3), (5, 5), (7, 7), (1, 6)])
@pytest.mark.parametrize("vector", [1, 2, 4])
def test_depthwise_convolutions_are_jaxs(vector, size, given):
    rng, count = np.random.default_rng(2), 3 * vector
    x, w = rng.normal(size=(13, 14, count)).astype(np.float32), rng.normal(size=(*size, count)).astype(np.float32)
    b = rng.normal(size=count).astype(np.float32)
    y = np.full((*result_shape(x.shape, w.shape, **given), count), np.nan, np.float32)
    kernel = generated_cuda.depthwise(*size, True, "relu", vector)
    run(kernel, y.size // vector, False, x, w, b, y, *numbers(**given))
    wanted = expected(x, w[:, :, None], b, y.shape, **given, groups=count)
    assert np.abs(y - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("vector", [1, 2, 4])
@pytest.mark.parametrize(
    ("flagged", "scaled", "weighted"), [(False, False, True), (True, False, False), (True, True, False)]
)
def test_sums_leave_out_what_is_flagged_so(vector, flagged, scaled, weighted):
    rng = np.random.default_rng(3)
    xs = rng.normal(size=(3, 4, 5, 2 * vector)).astype(np.float32)
    flags, factors = [np.array([f], np.int32) for f in (1, 0, 1)], rng.normal(size=3).astype(np.float32)
    y = np.full(xs.shape[1:], np.nan, np.float32)
    used = xs.copy()
    if flagged:
        xs[1], used[1] = np.nan, 0
    arguments = [
        *xs,
        *(flags if flagged else []),
        *([factors[None, None]] if scaled else [factors] if weighted else []),
    ]
    kernel = generated_cuda.add(3, flagged, scaled, weighted, "relu6", vector)
    run(kernel, y.size // vector, False, *arguments, y)
    wanted = sum(x * (f if scaled or weighted else 1) for x, f in zip(used, factors, strict=True))
    np.testing.assert_allclose(y, np.clip(wanted, 0, 6), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vector", [1, 2, 4])
def test_copies_go_into_parts(vector):
    x, whole = np.random.default_rng(4).normal(size=(3, 5, 8)).astype(np.float32), np.zeros((3, 5, 20), np.float32)
    run(generated_cuda.copy(vector), x.size // vector, False, x, whole[:, :, 4:12])
    assert np.array_equal(whole[:, :, 4:12], x)
    assert not whole[:, :, :4].any()
    assert not whole[:, :, 12:].any()


def test_what_is_outside_of_the_image_is_left_out_whatever_is_there():
    """A NaN in a pixel that no place of the filter falls onto is not in the sum."""
    x, w = np.ones((4, 4, 2), np.float32), np.ones((2, 2, 2, 1), np.float32)
    x[0, 0] = np.nan
    y = np.zeros((1, 1, 1), np.float32)
    kernel = generated_cuda.conv(Block(), False, None)
    run(
        kernel, 1, False, x, w, y, *numbers(top=1, left=1, dilation=2)
    )  # it falls onto (-1, -1), (-1, 1), (1, -1), (1, 1)
    assert y[0, 0, 0] == 2


def test_blocks_are_smaller_and_shared_by_more_the_smaller_the_result_is():
    shapes = [(256, 512, 64), (55, 55, 128), (28, 28, 78), (16, 16, 64), (8, 8, 96), (1, 1, 10)]
    blocks = [block_for(shape, 256, 1) for shape in shapes]
    sizes = [block.pixels * block.channels / block.lanes for block in blocks]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) >= 4
    assert block_for((16, 16, 64), 3, 1).lanes == 1  # a lane would have nothing to do


def test_with_more_images_a_unit_computes_more():
    blocks = [block_for((16, 16, 64), 192, batch) for batch in (1, 2, 4, 8, 32, 128)]
    sizes = [block.pixels * block.channels / block.lanes for block in blocks]
    assert sizes == sorted(sizes)
    assert (blocks[0].lanes, blocks[-1].pixels, blocks[-1].channels) == (4, 4, 4)


@pytest.mark.parametrize(
    ("address", "strides", "channels", "vector"),
    [
        (256, (1280, 64, 4), 16, 4),
        (256, (1280, 64, 4), 8, 4),  # a part of a concatenation
        (264, (1280, 64, 4), 8, 2),
        (256, (1280, 56, 4), 14, 2),
        (256, (1284, 64, 4), 16, 1),
        (256, (1280, 64, 4), 7, 1),
        (260, (1280, 64, 4), 16, 1),
    ],
)
def test_vectors_fit_wherever_a_pixel_begins(address, strides, channels, vector):
    assert generated_cuda.vector_of(address, strides, channels) == vector


def as_numpy(argument):
    """What a kernel gets for an argument of a task."""
    if isinstance(argument, ScalarArgument):
        return argument.value
    first = np.frombuffer((ctypes.c_uint8 * argument.itemsize).from_address(argument.address), argument.dtype)
    return np.lib.stride_tricks.as_strided(first, argument.shape, argument.strides)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("batch", [1, 64])
def test_the_tasks_of_a_gpus_network_compute_what_a_cpus_do(batch, monkeypatch):
    """Each task in program order, with the very arrays and units that it is recorded with."""
    g = Graph("toy", (6, 6, 4))
    narrow = g.conv(g.input, 6, 3, padding="SAME", activation="relu")
    x = g.concat([g.conv(g.input, 12, 3, padding="SAME", activation="swish"), narrow, narrow, g.conv(narrow, 8)])
    deep = g.add(x, g.separable(x, 32, 3, padding="SAME"), activation="relu")
    routing = g.dense(g.global_pool(deep), 3, activation="sigmoid")
    mixed = g.mixed_depthwise(g.mixed_conv(deep, routing, 16, 1), routing, 3)
    g.output(scores=g.dense(g.global_pool(g.conv(deep, 256)), 10), mixed=mixed)
    image = np.random.default_rng(5).normal(size=(6, 6, 4)).astype(np.float32)
    wanted = Network(g, device="cpu")(image, "serial")
    monkeypatch.setattr(device_array, "empty", lambda shape, dtype: OnGpu(np.zeros(shape, dtype)))
    network = Network(g, device="cuda", batch=batch)
    network.load(np.stack([image] * batch))
    names = set()
    for call in network.streams[-1]._calls:
        arguments = [as_numpy(each) for each in call.arguments.values()]
        run(call.kernel, call.units, "exchange" in call.kernel.function.__code__.co_names, *arguments)
        names.add(call.kernel.name)
    for name, array in network.read().items():
        assert np.abs(array[-1] - wanted[name]).max() <= 1e-5 * np.abs(wanted[name]).max(), name
    assert any("v4" in name for name in names)
    assert any("x8v4" in name or "x32v4" in name for name in names)
