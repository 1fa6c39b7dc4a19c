"""The handler for CUDA without a GPU: XLA's call frame is made by hand, and the driver is a fake."""

import ctypes
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_gpu import PARAMETERS, fake_driver, fake_pool
from numba import cfunc, types

from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.cuda_driver import Kernel
from brax_concurrent.backends.cuda_program import CudaOp, CudaPart, build_program
from brax_concurrent.backends.intrinsics import copy_bytes, load_i64, store_i64
from brax_concurrent.interop import ffi_cuda, ffi_frame, jax_ffi
from brax_concurrent.interop.ffi_frame import as_int64
from brax_concurrent.scheduler.cuda import compile_cuda

NUM_ENVS, ARENA_BYTES, STREAM = 100, 256, 55
SPECS = [
    BufferSpec("x", (3,), "float32", "readwrite"),
    BufferSpec("y", (), "float32", "write"),
    BufferSpec("z", (2,), "int32", "read"),
]
OPS = (
    CudaOp(Kernel("first", "k1", 101), ("x",)),
    CudaOp(Kernel("second", "k2", 102), ("z", "y")),
)
PART = CudaPart(OPS, ARENA_BYTES, tuple(SPECS))


class XLA:
    """As much of XLA as the handler needs: errors, and a stream."""

    def __init__(self, stream=STREAM):
        self.message = np.zeros(ffi_frame.MESSAGE_BYTES, np.uint8)
        text = self.message.ctypes.data

        @cfunc(types.int64(types.int64))
        def create_error(args):
            copy_bytes(text, load_i64(args + 16), ffi_frame.MESSAGE_BYTES)
            return 1

        @cfunc(types.int64(types.int64))
        def get_stream(args):
            if load_i64(args) != 32 or load_i64(args + 16) != 77:  # size of the structure, XLA's context
                return 2
            store_i64(args + 24, stream)
            return 0

        self.api = np.zeros(32, np.int64)
        self.api[ffi_frame.API_ERROR_CREATE // 8] = create_error.address
        self.api[ffi_frame.API_STREAM_GET // 8] = get_stream.address
        self._kept = [create_error, get_stream]

    def _pointers(self, arrays):
        words = np.array([array.ctypes.data for array in arrays], np.int64)
        self._kept += [words, *arrays]
        return int(words.ctypes.data)

    def buffer(self, array):
        """An XLA_FFI_Buffer."""
        dims = np.array(array.shape, np.int64)
        self._kept += [dims, array]
        words = np.zeros(6, np.int64)
        words[2] = ffi_frame.DTYPES[array.dtype.name][0]
        words[3:] = array.ctypes.data, array.ndim, dims.ctypes.data
        return words

    def call(self, inputs, outputs, num_envs=NUM_ENVS, program=0, stage=ffi_frame.STAGE_EXECUTE):
        """Call the handler; what it says went wrong, or ""."""
        frame = np.zeros(24, np.int64)
        frame[ffi_frame.FRAME_API // 8] = self.api.ctypes.data
        frame[ffi_frame.FRAME_CONTEXT // 8] = 77
        frame[ffi_frame.FRAME_STAGE // 8] = stage
        for arrays, size, where in (
            (inputs, ffi_frame.FRAME_ARGS_SIZE, ffi_frame.FRAME_ARGS),
            (outputs, ffi_frame.FRAME_RETS_SIZE, ffi_frame.FRAME_RETS),
        ):
            frame[size // 8] = len(arrays)
            frame[where // 8] = self._pointers([self.buffer(array) for array in arrays])
        values = [np.array([value], np.int64) for value in (num_envs, as_int64(program))]
        scalars = [np.array([ffi_frame.S64, value.ctypes.data], np.int64) for value in values]
        kinds = np.full(2, ffi_frame.ATTRIBUTE_SCALAR, np.int32)
        frame[ffi_frame.FRAME_ATTRS_SIZE // 8] = 2
        frame[ffi_frame.FRAME_ATTR_TYPES // 8] = kinds.ctypes.data
        frame[ffi_frame.FRAME_ATTRS // 8] = self._pointers(scalars)
        handler = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(ffi_cuda.handler()[1].address)
        self._kept += values
        self.message[:] = 0
        return bytes(self.message).split(b"\0")[0].decode() if handler(frame.ctypes.data) != 0 else ""


@pytest.fixture(scope="module")
def driver():
    return fake_driver(parameters=5)


@pytest.fixture(scope="module")
def program(driver):
    made = build_program([PART], 0xCDA, functions=driver.functions)
    jax_ffi.register(made)
    return made


@pytest.fixture
def arrays():
    """x as it comes and as it goes, y, z, scratch memory."""
    x = np.arange(300, dtype=np.float32).reshape(100, 3)
    scratch = np.zeros(4 * ARENA_BYTES, np.uint8)
    return x, np.zeros_like(x), np.zeros(100, np.float32), np.ones((100, 2), np.int32), scratch


def test_a_call_launches_the_kernels_on_xlas_stream(driver, program, arrays):
    x, _, y, z, scratch = arrays
    before, copies = len(driver.launches), driver.copies
    assert XLA().call([x, z], [x, y, scratch], program=0xCDA) == ""
    first, second = driver.launches[before:]
    assert first[:PARAMETERS] == [101, 1, 128, 1, 0, STREAM, 0]
    assert second[:PARAMETERS] == [102, 1, 128, 1, 0, STREAM, 0]
    assert first[PARAMETERS:][:5] == [scratch.ctypes.data, NUM_ENVS, 32, 0, x.ctypes.data]
    assert second[PARAMETERS:][:5] == [scratch.ctypes.data, NUM_ENVS, 32, 0, z.ctypes.data]
    assert driver.copies == copies  # x is in place


def test_an_array_that_is_not_in_place_is_copied_first(driver, program, arrays):
    x, new, y, z, scratch = arrays
    before, copies, counted = len(driver.launches), driver.copies, ffi_cuda.handler()[2].copies
    assert XLA().call([x, z], [new, y, scratch], program=0xCDA) == ""
    assert driver.copies == copies + 1
    assert ffi_cuda.handler()[2].copies == counted + 1
    np.testing.assert_array_equal(new, x)
    assert driver.launches[before][PARAMETERS + 4] == new.ctypes.data


def test_other_stages_do_nothing(driver, program, arrays):
    x, _, y, z, scratch = arrays
    before = len(driver.launches)
    assert XLA().call([x, z], [x, y, scratch], program=0xCDA, stage=2) == ""
    assert len(driver.launches) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x, y, z, s: ([x, z], [x, y, s[: 3 * ARENA_BYTES]]),
            "expected 1024 bytes of scratch memory, got 768 of XLA data type 6",
        ),
        (lambda x, y, z, s: ([x, z], [x, y, s.view(np.int32)]), "expected 1024 bytes of scratch memory, got 256 of"),
        (lambda x, y, z, s: ([x, z], [x, y]), "expected 2 inputs and 3 outputs, got 2 and 2"),
        (lambda x, y, z, s: ([x, x], [x, y, s]), "buffer z: expected XLA data type 4, got 11"),
        (lambda x, y, z, s: ([x, z], [x, y[:99], s]), "buffer y: expected 400 bytes for 100 environments, got 396"),
    ],
)
def test_calls_that_do_not_fit_are_refused(driver, program, arrays, change, message):
    x, _, y, z, scratch = arrays
    before = len(driver.launches)
    assert message in XLA().call(*change(x, y, z, scratch), program=0xCDA)
    assert len(driver.launches) == before


def test_an_unknown_program_is_refused(arrays):
    x, _, y, z, scratch = arrays
    assert "unknown program 000000000000beef" in XLA().call([x, z], [x, y, scratch], program=0xBEEF)


def test_errors_of_the_driver_name_the_op(driver, program, arrays):
    x, new, y, z, scratch = arrays
    broken = XLA(stream=7)
    said = broken.call([x, z], [x, y, scratch], program=0xCDA)
    assert said == "brax_concurrent: launch of kernel first (op 0): the fake is broken (CUDA error 700)"
    said = broken.call([x, z], [new, y, scratch], program=0xCDA)
    assert said == "brax_concurrent: copy of buffer x: the fake is broken (CUDA error 701)"


def test_handlers_do_not_share_programs(program):
    """The same fingerprint on the CPU is another program."""
    other = build_program([replace(PART, ops=PART.ops[:1])], 0xCDA, functions=fake_driver().functions)
    with pytest.raises(ValueError, match="two different programs have the fingerprint 0000000000000cda"):
        jax_ffi.register(other)


def traits(code):
    """What a handler answers when XLA registers it."""
    metadata, extension, frame = np.zeros(8, np.int64), np.zeros(4, np.int64), np.zeros(24, np.int64)
    extension[1], extension[3] = ffi_frame.TYPE_METADATA, metadata.ctypes.data
    frame[ffi_frame.FRAME_EXTENSION // 8] = extension.ctypes.data
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address)(frame.ctypes.data) == 0
    assert metadata.view(np.int32)[6:8].tolist() == [0, 1]  # version
    return int(metadata.view(np.uint32)[8])


def test_command_buffers_can_be_switched_off(monkeypatch):
    _, code, table = ffi_cuda.handler()
    assert traits(code) == ffi_frame.CAPTURABLE
    table._words[ffi_frame.TABLE_TRAITS] = 0
    assert traits(code) == 0
    table._words[ffi_frame.TABLE_TRAITS] = ffi_frame.CAPTURABLE
    assert ffi_cuda.wanted_traits() == ffi_frame.CAPTURABLE
    monkeypatch.setenv(ffi_cuda.ENVIRONMENT, "0")
    assert ffi_cuda.wanted_traits() == 0


def test_a_function_is_lowered_for_cuda(program):
    """With the scratch memory, the aliases and the attributes that the handler expects."""

    def step(x, z):
        return jax.lax.scan(lambda carry, _: jax_ffi.ffi_call(program, [carry, z]), x, length=3)

    shapes = [jax.ShapeDtypeStruct((100, 3), jnp.float32), jax.ShapeDtypeStruct((100, 2), jnp.int32)]
    exported = jax.export.export(
        jax.jit(step), platforms=["cuda"], disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(target())]
    )(*shapes)
    (call,) = [line for line in exported.mlir_module().splitlines() if "stablehlo.custom_call" in line]
    assert f"@{target()}" in call
    assert f"program = {0xCDA} : i64" in call
    assert "num_envs = 100 : i64" in call
    assert "output_tuple_indices = [0], operand_index = 0" in call
    assert "(tensor<100x3xf32>, tensor<100x2xi32>) -> (tensor<100x3xf32>, tensor<100xf32>, tensor<1024xui8>)" in call
    assert [aval.shape for aval in exported.out_avals] == [(100, 3), (3, 100)]
    # Results are used through a barrier only: XLA would fuse the call with the stacking of `y`, and call it twice.
    lines = exported.mlir_module().splitlines()
    name = call.strip().split(":")[0].split(" ")[0]
    (used,) = [line for line in lines if f"{name}#" in line]
    assert "stablehlo.optimization_barrier" in used


def target():
    return ffi_cuda.handler()[0]


def test_a_program_for_cuda_says_that_this_is_the_cpu(program):
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="this program is for CUDA, but JAX runs"):
        jax.block_until_ready(jax_ffi.ffi_call(program, [jnp.zeros((100, 3)), jnp.zeros((100, 2), jnp.int32)]))


# --- programs with a window, and graphs -------------------------------------------------------------------------------


def scheduled(driver, scheduler, **settings):
    table, owners = fake_pool()
    made = compile_cuda([replace(PART, unit_tiles=2)], scheduler, functions=driver.functions, pools=table, **settings)
    jax_ffi.register(replace(made, owners=(*made.owners, owners)))
    return made


@pytest.mark.parametrize("scheduler", ["sw", "graph"])
def test_schedulers_are_reached_through_xla(arrays, scheduler):
    x, _, y, z, scratch = arrays
    driver = fake_driver(parameters=5)
    made = scheduled(driver, scheduler, streams=3)
    assert XLA().call([x, z], [x, y, scratch], program=made.fingerprint) == ""
    # Two units of two tiles: op after op with the window, unit after unit in a graph.
    assert [launch[0] for launch in driver.launches] == ([101, 101, 102, 102] if scheduler == "sw" else [101, 102] * 2)
    assert sorted(launch[PARAMETERS + 1] for launch in driver.launches) == [36, 36, 64, 64]
    name, code, _ = ffi_cuda.handler(made.captured)
    assert not made.captured
    assert traits(code) == 0
    assert name != target()


def test_errors_of_a_window_name_the_kernel(arrays, monkeypatch):
    x, _, y, z, scratch = arrays
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", "0.05")
    driver = fake_driver(parameters=5, patience=1 << 60)
    made = scheduled(driver, "sw", window=1)
    said = XLA().call([x, z], [x, y, scratch], program=made.fingerprint)
    assert said == "brax_concurrent: kernel first (op 0, unit 0) did not end within 50 ms"
    graph = scheduled(fake_driver(parameters=5), "graph")
    said = XLA(stream=7).call([x, z], [x, y, scratch], program=graph.fingerprint)
    assert said == "brax_concurrent: launch of kernel first (op 0): the fake is broken (CUDA error 700)"
