"""Native programs called from JAX: transformations, in-place updates, threads, errors and later processes."""

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_programs import ADDRESSES, compiled, pendulum, pendulum_arrays, pendulum_reference

from brax_concurrent.backends.cpu_program import ALWAYS, BufferSpec, build_program
from brax_concurrent.backends.intrinsics import (
    atomic_add,
    atomic_load,
    copy_bytes,
    give_way,
    load_i64,
    store_i32,
    store_i64,
)
from brax_concurrent.interop import ffi_frame, ffi_handler, jax_ffi
from brax_concurrent.interop.ffi_frame import as_int64
from brax_concurrent.interop.jax_ffi import ffi_call
from brax_concurrent.scheduler.serial import compile_serial

# Tests share compiled code.


@pytest.fixture(scope="module")
def program():
    return compile_serial(pendulum())


def pendulum_inputs(num_envs, seed=42):
    q, gravity, _, slowed = (jnp.array(array) for array in pendulum_arrays(num_envs, seed))
    return [q, gravity, slowed]


def expected_outputs(num_envs, seed=42, steps=1):
    arrays = pendulum_arrays(num_envs, seed)
    for _ in range(steps):
        arrays = pendulum_reference(arrays)
    q, _, energy, slowed = arrays
    return [q, energy, slowed]


def assert_same_bits(outputs, expected):
    for name, output, want in zip(("q", "energy", "slowed"), outputs, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(output), want, err_msg=name)


@pytest.mark.parametrize("num_envs", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("jit", [False, True])
def test_a_call_computes_what_numpy_does(program, num_envs, jit):
    call = jax.jit(lambda *inputs: ffi_call(program, inputs)) if jit else lambda *inputs: ffi_call(program, inputs)
    assert_same_bits(call(*pendulum_inputs(num_envs)), expected_outputs(num_envs))


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_the_number_of_threads_changes_no_bit(threads):
    num_envs = 5000
    program = compile_serial(pendulum(), threads=threads)
    call = jax.jit(lambda *inputs: ffi_call(program, inputs))
    for _ in range(20):
        assert_same_bits(call(*pendulum_inputs(num_envs)), expected_outputs(num_envs))


def test_an_eager_call_leaves_its_inputs_alone(program):
    inputs = pendulum_inputs(100)
    before = [np.array(array) for array in inputs]
    outputs = ffi_call(program, inputs)
    assert not np.array_equal(outputs[0], inputs[0])
    for array, old in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(array, old)


def test_a_value_read_after_the_call_is_the_old_one(program):
    @jax.jit
    def change(q, gravity, slowed):
        return ffi_call(program, [q, gravity, slowed])[0] - q

    q, gravity, slowed = pendulum_inputs(100)
    np.testing.assert_array_equal(change(q, gravity, slowed), expected_outputs(100)[0] - np.asarray(q))


def _count(arena, buffers, first_env, num_envs):
    for env in range(first_env, min(first_env + 32, num_envs)):
        buffers[0][env] += np.float32(1)


def _report_address(arena, buffers, first_env, num_envs):
    """Where the counters lie, as two uint32."""
    for env in range(first_env, min(first_env + 32, num_envs)):
        store_i64(load_i64(buffers + 8) + 8 * env, load_i64(buffers))


@pytest.fixture(scope="module")
def counter():
    """Adds 1 to each environment's number, in place, and reports where it did so."""
    count, report = compiled(_count), compiled(_report_address, ADDRESSES)
    specs = [BufferSpec("count", (), "float32", "readwrite"), BufferSpec("address", (2,), "uint32", "write")]
    ops = [(count.address, ALWAYS), (report.address, ALWAYS)]
    return build_program(ops, 0, specs, 0xC0FFEE, owners=[count, report])


def addresses(output):
    return np.asarray(output).reshape(-1, 2).view(np.uint64).ravel()


def copies_of_the_carry(function, carry):
    """How often XLA copies an array of the carry's shape in the loop body that has the call."""
    text = function.lower(carry).compile().as_text()
    (body,) = [computation for computation in text.split("\n\n") if " custom-call(" in computation]
    return len(re.findall(r"= f32\[100\]\S* copy\(", body))


def test_a_scan_updates_its_carry_in_place(counter):
    length = 1000

    @jax.jit
    def count(carry):
        return jax.lax.scan(lambda c, _: ffi_call(counter, [c]), carry, length=length)

    @jax.jit
    def keep_old(carry):
        return jax.lax.scan(lambda c, _: (ffi_call(counter, [c])[0], c[0]), carry, length=length)

    start = jnp.arange(100, dtype=jnp.float32)
    copies = ffi_handler.handler()[2].copies
    end, where = count(start)
    np.testing.assert_array_equal(end, np.arange(100) + length)
    np.testing.assert_array_equal(start, np.arange(100))
    assert where.shape == (length, 100, 2)
    assert len(set(addresses(where))) == 1  # one buffer for all steps,
    assert ffi_handler.handler()[2].copies == copies  # to which the handler copied nothing,
    assert copies_of_the_carry(count, start) == 0  # nor did XLA,
    assert copies_of_the_carry(keep_old, start) > 0  # which does where the caller needs the old value


def test_a_donated_argument_is_updated_in_place(counter):
    count = jax.jit(lambda c: ffi_call(counter, [c]), donate_argnums=0)
    start = jnp.zeros(100)
    pointer = start.unsafe_buffer_pointer()
    end, where = count(start)
    assert set(addresses(where)) == {pointer}
    assert end.unsafe_buffer_pointer() == pointer
    assert start.is_deleted()
    np.testing.assert_array_equal(end, np.ones(100))


def test_without_an_alias_the_handler_copies_the_carry(counter):
    """XLA was not told of the alias, so it gives two buffers; the caller's must stay as it was."""
    target = jax_ffi.register(counter)
    shapes = [jax.ShapeDtypeStruct((100,), jnp.float32), jax.ShapeDtypeStruct((100, 2), jnp.uint32)]
    call = jax.ffi.ffi_call(target, shapes)
    start = jnp.arange(100, dtype=jnp.float32)
    copies = ffi_handler.handler()[2].copies
    end, _ = call(start, num_envs=np.int64(100), program=np.int64(0xC0FFEE))
    np.testing.assert_array_equal(end, np.arange(100) + 1)
    np.testing.assert_array_equal(start, np.arange(100))
    assert ffi_handler.handler()[2].copies == copies + 1


def test_four_threads_call_one_function_at_once():
    num_envs = 3000
    calls = 50
    program = compile_serial(pendulum(), threads=2)
    call = jax.jit(lambda *inputs: ffi_call(program, inputs))
    inputs = [pendulum_inputs(num_envs, seed) for seed in range(4)]
    expected = [expected_outputs(num_envs, seed) for seed in range(4)]
    jax.block_until_ready(call(*inputs[0]))
    barrier, failures = threading.Barrier(4), []

    def work(seed):
        barrier.wait()
        for _ in range(calls):
            outputs = call(*inputs[seed])
            same = [np.array_equal(output, want) for output, want in zip(outputs, expected[seed], strict=True)]
            if not all(same):
                failures.append((seed, same))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


def _meet_and_dawdle(arena, buffers, first_env, num_envs):
    """Tile 0 waits, not for ever, until tile 1 has begun; tile 1 takes its time, then writes."""
    met = load_i64(buffers + 8)
    if first_env == 0:
        for _ in range(2_000_000):
            if atomic_load(met) != 0:
                break
            give_way()
    else:
        atomic_add(met, 1)
        for _ in range(50_000):
            give_way()
    store_i32(load_i64(buffers) + 4 * first_env, 1)


def test_a_call_ends_when_all_tiles_have():
    """Also those that another thread is still busy with when the caller's own are done."""
    code = compiled(_meet_and_dawdle, ADDRESSES)
    specs = [
        BufferSpec("done", (), "int32", "write"),
        BufferSpec("met", (2,), "uint32", "read", per_env=False),
    ]
    program = build_program([(code.address, ALWAYS)], 0, specs, 0xDA, threads=2, owners=[code])
    for _ in range(5):
        (done,) = ffi_call(program, [jnp.zeros(2, jnp.uint32)], num_envs=64)
        assert np.array(done)[::32].tolist() == [1, 1]


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_makes_one_call_after_another(program, axis):
    batch = [pendulum_inputs(40, seed) for seed in range(3)]
    q, slowed = (jnp.stack([inputs[index] for inputs in batch], axis) for index in (0, 2))
    call = jax.jit(jax.vmap(lambda q, g, s: ffi_call(program, [q, g, s]), in_axes=(axis, None, axis)))
    outputs = call(q, batch[0][1], slowed)
    for seed in range(3):
        assert_same_bits([output[seed] for output in outputs], expected_outputs(40, seed))


def test_grad_says_that_there_is_none(program):
    q, gravity, slowed = pendulum_inputs(40)

    def energy(scale, cut):
        given = cut(scale * q)
        return ffi_call(program, [given, gravity, slowed])[1].sum() * scale

    for function in (energy, jax.jit(energy, static_argnums=1)):
        for derivative in (jax.grad, jax.jacfwd):
            with pytest.raises(ValueError, match="there are no derivatives of a control step"):
                derivative(function)(1.0, lambda x: x)
        (_, value, _) = ffi_call(program, [q, gravity, slowed])
        np.testing.assert_allclose(jax.grad(function)(1.0, jax.lax.stop_gradient), value.sum(), rtol=1e-6)


def _copy_each(arena, buffers, first_env, num_envs):
    """Six arrays to six others, of 8, 8, 4, 4, 1, 1 bytes per environment with widths 1, 2, 1, 3, 1, 1."""
    count = min(32, num_envs - first_env)
    for index, width in ((0, 8), (1, 8), (2, 4), (3, 12), (4, 1), (5, 1)):
        source, target = load_i64(buffers + 8 * index), load_i64(buffers + 8 * (6 + index))
        copy_bytes(target + width * first_env, source + width * first_env, width * count)


def test_every_dtype_crosses():
    num_envs = 70
    kinds = [
        ("float32", (2,)),
        ("float32", (2,)),
        ("int32", ()),
        ("uint32", (3,)),
        ("bool", ()),
        ("uint8", (1,)),
    ]
    specs = [BufferSpec(f"in{index}", shape, dtype, "read") for index, (dtype, shape) in enumerate(kinds)]
    specs += [BufferSpec(f"out{index}", shape, dtype, "write") for index, (dtype, shape) in enumerate(kinds)]
    code = compiled(_copy_each, ADDRESSES)
    program = build_program([(code.address, ALWAYS)], 0, specs, 0xD7, owners=[code])
    generator = np.random.default_rng(0)
    inputs = [
        jnp.asarray(generator.integers(0, 2 if dtype == "bool" else 200, (num_envs, *shape)), dtype)
        for dtype, shape in kinds
    ]
    outputs = ffi_call(program, inputs)
    for given, got in zip(inputs, outputs, strict=True):
        assert given.dtype == got.dtype
        np.testing.assert_array_equal(given, got)


def test_float64_crosses_with_x64_only():
    num_envs = 40
    kinds = [("float64", ()), ("float64", ()), ("int32", ()), ("uint32", (3,)), ("bool", ()), ("uint8", ())]
    specs = [BufferSpec(f"in{index}", shape, dtype, "read") for index, (dtype, shape) in enumerate(kinds)]
    specs += [BufferSpec(f"out{index}", shape, dtype, "write") for index, (dtype, shape) in enumerate(kinds)]
    code = compiled(_copy_each, ADDRESSES)
    program = build_program([(code.address, ALWAYS)], 0, specs, 0xD8, owners=[code])
    arrays = [
        np.arange(num_envs * int(np.prod(shape))).reshape(num_envs, *shape).astype(dtype) for dtype, shape in kinds
    ]
    with pytest.raises(ValueError, match="buffer in0: float64 needs .*jax_enable_x64"):
        ffi_call(program, arrays)
    with jax.enable_x64(True):
        for given, got in zip(arrays, ffi_call(program, arrays), strict=True):
            assert given.dtype == got.dtype
            np.testing.assert_array_equal(given, got)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i[:2], r"expected 3 inputs \(q, gravity, slowed\), got 2"),
        (lambda i: [i[0].astype(jnp.int32), *i[1:]], r"input q: expected float32\[40\], got int32\[40\]"),
        (lambda i: [*i[:2], i[2][:39]], r"input slowed: expected float32\[40\], got float32\[39\]"),
        (lambda i: [i[0], i[0], i[2]], r"input gravity: expected float32\[1\], got float32\[40\]"),
        (lambda i: [i[0][0], *i[1:]], "input q: expected a leading axis of environments, got a scalar"),
        (lambda i: [i[0][:0], *i[1:]], "num_envs must be at least 1, got 0"),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_inputs_that_do_not_fit_are_refused(program, change, message, jit):
    call = jax.jit(lambda inputs: ffi_call(program, inputs)) if jit else lambda inputs: ffi_call(program, inputs)
    with pytest.raises(ValueError, match=message):
        call(change(pendulum_inputs(40)))


def test_num_envs_must_be_given_when_no_input_has_it():
    code = compiled(_count)
    specs = [
        BufferSpec("key", (2,), "uint32", "read", per_env=False),
        BufferSpec("x", (), "float32", "write"),
    ]
    program = build_program([(code.address, ALWAYS)], 0, specs[::-1], 0xE0, owners=[code])
    with pytest.raises(ValueError, match="no input has an axis of environments: give num_envs"):
        ffi_call(program, [jnp.zeros(2, jnp.uint32)])
    (x,) = ffi_call(program, [jnp.zeros(2, jnp.uint32)], num_envs=50)
    assert x.shape == (50,)


def raw_call(inputs, shapes, **attributes):
    """Around the checks of `ffi_call`, as an executable from an old cache would come."""
    target = jax_ffi.register(compile_serial(pendulum()))
    jax.block_until_ready(jax.ffi.ffi_call(target, shapes)(*inputs, **attributes))


REFUSED = (ValueError, jax.errors.JaxRuntimeError)  # which of them depends on the JAX version
FLOATS_40 = jax.ShapeDtypeStruct((40,), jnp.float32)


@pytest.mark.parametrize(
    ("inputs", "outputs", "attributes", "message"),
    [
        (3, 3, {"program": np.int64(0xABC123)}, "unknown program 0000000000abc123: make its environment"),
        (3, 3, {"program": np.int64(0)}, "unknown program 0000000000000000"),
        (2, 3, {}, "expected 3 inputs and 3 outputs, got 2 and 3"),
        (3, 1, {}, "expected 3 inputs and 3 outputs, got 3 and 1"),
        (3, 3, {"num_envs": np.int64(41)}, "buffer q: expected 164 bytes for 41 environments, got 160"),
        (3, 3, {"num_envs": np.int64(0)}, "num_envs must be at least 1, got 0"),
        (
            3,
            3,
            {"num_envs": np.int32(39)},
            "expected the attributes num_envs and program, two int64, of 2 given",
        ),
        (
            3,
            3,
            {"num_envs": np.arange(3)},
            "expected the attributes num_envs and program, two int64, of 2 given",
        ),
        (3, 3, {"zeal": np.int64(1)}, "expected the attributes num_envs and program, two int64, of 3 given"),
    ],
)
def test_the_handler_refuses_calls_that_do_not_fit(program, inputs, outputs, attributes, message):
    good = {"num_envs": np.int64(40), "program": np.int64(as_int64(program.fingerprint))}
    with pytest.raises(REFUSED, match=message):
        raw_call(pendulum_inputs(40)[:inputs], [FLOATS_40] * outputs, **(good | attributes))


def test_the_handler_refuses_buffers_that_do_not_fit(program):
    good = {"num_envs": np.int64(40), "program": np.int64(as_int64(program.fingerprint))}
    q, gravity, slowed = pendulum_inputs(40)
    with pytest.raises(REFUSED, match="buffer gravity: expected XLA data type 11, got 4"):
        raw_call([q, gravity.astype(jnp.int32), slowed], [FLOATS_40] * 3, **good)
    with pytest.raises(REFUSED, match="buffer gravity: expected 4 bytes for 40 environments, got 8"):
        raw_call([q, jnp.zeros(2), slowed], [FLOATS_40] * 3, **good)
    wide = jax.ShapeDtypeStruct((40, 2), jnp.float32)
    with pytest.raises(REFUSED, match="buffer energy: expected 160 bytes for 40 environments, got 320"):
        raw_call([q, gravity, slowed], [FLOATS_40, wide, FLOATS_40], **good)
    raw_call([q, gravity, slowed], [FLOATS_40] * 3, **good)


def test_no_memory_for_the_arenas_is_an_error():
    code = compiled(_count)
    specs = [BufferSpec("count", (), "float32", "readwrite")]
    program = build_program([(code.address, ALWAYS)], 1 << 60, specs, 0xE1, owners=[code])
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"no memory for an arena of {1 << 60} bytes"):
        jax.block_until_ready(ffi_call(program, [jnp.zeros(100)]))


def test_a_program_of_another_version_is_an_error():
    code = compiled(_count)
    specs = [BufferSpec("count", (), "float32", "readwrite")]
    program = build_program([(code.address, ALWAYS)], 0, specs, 0xE2, owners=[code])
    program.desc[0] += 1
    with pytest.raises(jax.errors.JaxRuntimeError, match="0 of 4 tiles done"):
        jax.block_until_ready(ffi_call(program, [jnp.zeros(100)]))


def test_a_fingerprint_belongs_to_one_program():
    code = compiled(_count)
    specs = [BufferSpec("count", (), "float32", "readwrite")]
    first = build_program([(code.address, ALWAYS)], 128, specs, 0xE3, owners=[code])
    same = build_program([(code.address, ALWAYS)], 128, specs, 0xE3, owners=[code])
    assert jax_ffi.register(first) == jax_ffi.register(same)
    for other in (
        build_program([(code.address, 0)], 128, specs, 0xE3),
        build_program([(code.address, ALWAYS)] * 2, 128, specs, 0xE3),
        build_program([(code.address, ALWAYS)], 128, specs, 0xE3, threads=1),
        build_program([(code.address, ALWAYS)], 128, [BufferSpec("x", (), "float32", "readwrite")], 0xE3),
    ):
        with pytest.raises(ValueError, match="two different programs have the fingerprint 00000000000000e3"):
            jax_ffi.register(other)


def test_a_dtype_that_cannot_cross_is_refused():
    program = build_program([(8, ALWAYS)], 0, [BufferSpec("half", (), "float16", "read")], 0xE4)
    with pytest.raises(ValueError, match="buffer half: dtype must be one of .*, got float16"):
        jax_ffi.register(program)


def test_many_programs_are_found():
    """With hashes that fall on each other in the table, around its end."""
    code = compiled(_count)
    specs = [BufferSpec("count", (), "float32", "readwrite")]
    hashes = [(index << 32) - 3 for index in range(1, 30)] + [(1 << 64) - 1]
    for index, value in enumerate(hashes):
        ops = [(code.address, ALWAYS)] * (1 + index % 3)
        jax_ffi.register(build_program(ops, 0, specs, value, owners=[code]))
    target = jax_ffi.register(compile_serial(pendulum()))
    call = jax.ffi.ffi_call(target, [FLOATS_40], input_output_aliases={0: 0})
    for index, value in enumerate(hashes):
        (sums,) = call(jnp.zeros(40), num_envs=np.int64(40), program=np.int64(as_int64(value)))
        np.testing.assert_array_equal(sums, np.full(40, 1 + index % 3))


def test_a_full_table_says_so():
    table = ffi_frame.ProgramTable(magic=1)
    table._programs = ffi_frame.TABLE_PAIRS // 2 - 1
    table.put(5, 64)
    with pytest.raises(RuntimeError, match="a process can have 32768 different programs"):
        table.put(6, 64)


# --- other processes ----------------------------------------------------------------------
ROOT = Path(__file__).parents[2]


def run_python(code, **environment):
    """Run in a fresh interpreter; returns what it printed as JSON in its last line."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


SECOND_PROCESS = """
    import json, time
    import jax, jax.monitoring, numpy as np
    from toy_programs import pendulum, pendulum_arrays, pendulum_reference
    from brax_concurrent.interop import ffi_handler, jax_ffi
    from brax_concurrent.scheduler.serial import compile_serial

    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    tile_program = pendulum()
    start = time.perf_counter()
    program = compile_serial(tile_program)
    jax_ffi.register(program)
    seconds = time.perf_counter() - start
    arrays = pendulum_arrays(100)
    call = jax.jit(lambda *inputs: jax_ffi.ffi_call(program, inputs))
    q, energy, slowed = call(arrays[0], arrays[1], arrays[3])
    expected = pendulum_reference(arrays)
    assert np.array_equal(q, expected[0]) and np.array_equal(energy, expected[2])
    print(json.dumps({
        "native": program.owners[0].cache_hits,
        "handler": ffi_handler.handler()[1].cache_hits,
        "jax_hits": events.count("/jax/compilation_cache/cache_hits"),
        "addresses": [program.address, ffi_handler.handler()[1].address],
        "target": jax_ffi.register(program),
        "fingerprint": program.fingerprint,
        "seconds": seconds,
    }))
"""


@pytest.mark.slow
def test_a_second_process_starts_from_the_caches(tmp_path):
    """Numba's cache gives the handler, JAX's the executable; neither holds the first process's addresses."""
    caches = {
        "NUMBA_CACHE_DIR": str(tmp_path / "numba"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first, second = run_python(SECOND_PROCESS, **caches), run_python(SECOND_PROCESS, **caches)
    print(f"compile and register: {first['seconds']:.3f} s, then {second['seconds']:.3f} s")
    assert (first["native"], first["handler"], first["jax_hits"]) == (0, 0, 0)
    assert (second["native"], second["handler"]) == (1, 1)
    assert second["jax_hits"] >= 1
    assert second["target"] == first["target"]
    assert second["fingerprint"] == first["fingerprint"]
    assert second["addresses"] != first["addresses"]  # else nothing above was tried


@pytest.mark.slow
def test_shard_map_runs_each_device_on_its_part():
    code = """
        import json
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        from toy_programs import pendulum, pendulum_arrays, pendulum_reference
        from brax_concurrent.interop.jax_ffi import ffi_call
        from brax_concurrent.scheduler.serial import compile_serial

        program = compile_serial(pendulum(), threads=2)
        mesh = jax.make_mesh((4,), ("devices",))
        q, gravity, _, slowed = pendulum_arrays(4 * 320)
        expected = pendulum_arrays(4 * 320)
        for _ in range(10):
            expected = pendulum_reference(expected)

        def rollout(q, gravity, slowed):
            def step(carry, _):
                q, energy, slowed = ffi_call(program, [carry[0], gravity, carry[1]])
                return (q, slowed), energy
            (q, slowed), energies = jax.lax.scan(step, (q, slowed), length=10)
            return q, energies[-1], slowed

        parts = P("devices")
        shard = NamedSharding(mesh, parts)
        rollout = jax.jit(jax.shard_map(rollout, mesh=mesh, in_specs=(parts, P(), parts), out_specs=parts))
        outputs = rollout(jax.device_put(q, shard), gravity, jax.device_put(slowed, shard))
        assert outputs[0].sharding.is_equivalent_to(shard, 1), outputs[0].sharding
        same = [np.array_equal(outputs[0], expected[0]), np.array_equal(outputs[1], expected[2]),
                np.array_equal(outputs[2], expected[3])]
        print(json.dumps([len(jax.devices()), same]))
    """
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    assert run_python(code, XLA_FLAGS=flags) == [4, [True, True, True]]
