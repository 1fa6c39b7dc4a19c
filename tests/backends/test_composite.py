"""Composites: several programs in one job. Each part's bits, who runs when, what is refused; natively and from JAX."""

import dataclasses
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_programs import ADDRESSES, compiled, kernel, pendulum, pendulum_arrays, pendulum_reference

from brax_concurrent.backends import native
from brax_concurrent.backends.composite import Part, build_composite
from brax_concurrent.backends.cpu_program import ALWAYS, BufferSpec, build_program
from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.backends.intrinsics import atomic_add, atomic_load, give_way, load_i64, store_i32
from brax_concurrent.interop import jax_ffi
from brax_concurrent.interop.jax_ffi import ffi_call
from brax_concurrent.scheduler.serial import TileLayout, TileOp, TileProgram, compile_serial

# A program unlike the pendulum: fewer buffers, rows of three, a larger arena.
SPIRAL = TileLayout(
    2048,
    (BufferSpec("x", (3,), "float32", "readwrite"), BufferSpec("norm", (), "float32", "write")),
)


def spread(arena, buffers, first_env, num_envs):
    """Fill the arena to its last byte, with what follows from x."""
    for lane in range(32):
        for i in range(16):
            arena[16 * lane + i] = np.float32(-1)
        if first_env + lane < num_envs:
            for i in range(3):
                arena[16 * lane + 13 + i] = buffers[0][3 * (first_env + lane) + i]


def wind(arena, buffers, first_env, num_envs):
    """x rotates, from the arena's copy; norm is the sum of its squares."""
    for env in range(first_env, min(first_env + 32, num_envs)):
        norm = np.float32(0)
        for i in range(3):
            x = arena[16 * (env - first_env) + 13 + (i + 1) % 3] * np.float32(0.9)
            buffers[0][3 * env + i] = x
            norm += x * x
        buffers[1][env] = norm


def spiral():
    ops = (
        TileOp(kernel(spread, ("x",), ((0, 2048),), SPIRAL)),
        TileOp(kernel(wind, ((0, 2048),), ("x", "norm"), SPIRAL)),
    )
    return TileProgram(SPIRAL, ops)


def spiral_arrays(num_envs, seed=1):
    x = np.random.default_rng(seed).normal(size=(num_envs, 3)).astype(np.float32)
    return [x, np.full(num_envs, np.nan, np.float32)]


def spiral_reference(arrays):
    x = np.roll(arrays[0], -1, axis=1) * np.float32(0.9)
    return [x, x[:, 0] * x[:, 0] + x[:, 1] * x[:, 1] + x[:, 2] * x[:, 2]]


def three_parts(*num_envs, threads=0):
    """A composite of pendulum, spiral and pendulum, its arrays, and what they must become."""
    first, second, third = num_envs
    parts = [
        Part("first", compile_serial(pendulum(), threads=threads), first),
        Part("second", compile_serial(spiral(), threads=threads), second),
        Part("third", compile_serial(pendulum(), threads=threads), third),
    ]
    arrays = [*pendulum_arrays(first), *spiral_arrays(second), *pendulum_arrays(third, seed=7)]
    expected = [
        *pendulum_reference(arrays[:4]),
        *spiral_reference(arrays[4:6]),
        *pendulum_reference(arrays[6:]),
    ]
    return build_composite(parts, threads=threads), arrays, expected


def assert_same(arrays, expected):
    for index, (array, want) in enumerate(zip(arrays, expected, strict=True)):
        np.testing.assert_array_equal(np.asarray(array), want, err_msg=f"buffer {index}")


@pytest.mark.parametrize("num_envs", [(1, 1, 1), (31, 32, 33), (70, 1, 64), (5, 700, 100)])
def test_each_part_computes_what_it_does_alone_and_no_row_more(num_envs):
    composite, arrays, expected = three_parts(*num_envs)
    guarded = [np.concatenate([array.ravel(), np.full(40, 7, np.float32)]) for array in arrays]
    arrays = [whole[:-40].reshape(array.shape) for whole, array in zip(guarded, arrays, strict=True)]
    run_program(composite, arrays, sum(num_envs))
    assert_same(arrays, expected)
    for whole in guarded:
        np.testing.assert_array_equal(whole[-40:], 7)


@pytest.mark.parametrize("threads", [1, 2, 8, 0])
def test_the_number_of_threads_changes_no_bit(threads):
    for _ in range(10):
        composite, arrays, expected = three_parts(1000, 1500, 777, threads=threads)
        assert composite.desc[native.DESC_THREADS] == threads
        run_program(composite, arrays, 3277)
        assert_same(arrays, expected)


def test_one_part_is_enough():
    composite = build_composite([Part("only", compile_serial(pendulum()), 100)])
    arrays = pendulum_arrays(100)
    expected = pendulum_reference(arrays)
    run_program(composite, arrays, 100)
    assert_same(arrays, expected)


def test_buffers_are_named_and_have_whole_shapes():
    composite, _, _ = three_parts(40, 50, 60)
    assert composite.num_envs == 150
    assert compile_serial(pendulum()).num_envs is None
    assert [(spec.name, spec.shape, spec.access, spec.per_env) for spec in composite.buffers[3:6]] == [
        ("first.slowed", (40,), "readwrite", False),
        ("second.x", (50, 3), "readwrite", False),
        ("second.norm", (50,), "write", False),
    ]
    assert [spec.name for spec in composite.inputs if spec.name.startswith("third")] == [
        "third.q",
        "third.gravity",
        "third.slowed",
    ]
    assert composite.buffers[1].shape == (1,)  # gravity is one for all environments


def _take_number(arena, buffers, first_env, num_envs):
    """The tile's place in the order in which tiles were begun, from a counter that the parts share."""
    store_i32(load_i64(buffers) + 4 * first_env, atomic_add(load_i64(load_i64(buffers + 8)), 1))


def numbering(arena_bytes=0, **settings):
    code = compiled(_take_number, ADDRESSES)
    specs = [BufferSpec("number", (), "int32", "write"), BufferSpec("counter", (2,), "uint32", "read", False)]
    return build_program([(code.address, ALWAYS)], arena_bytes, specs, 99 + arena_bytes, owners=[code], **settings)


def test_tiles_are_dealt_part_after_part():
    """On one thread, every tile once: the first part's in order, then the next one's."""
    counter = np.zeros(1, np.int64)
    address = np.array([counter.ctypes.data], np.int64).view(np.uint32)
    program = numbering()
    composite = build_composite([Part("a", program, 100), Part("b", program, 32), Part("c", program, 65)])
    numbers = [np.full(n, -1, np.int32) for n in (100, 32, 65)]
    run_program(composite, [x for each in numbers for x in (each, address)], 197, threads=1)
    assert [each[::32].tolist() for each in numbers] == [[0, 1, 2, 3], [4], [5, 6, 7]]
    assert counter[0] == 8


def _wait_for_the_rest(arena, buffers, first_env, num_envs):
    """The first tile waits, not for ever, until all others are done."""
    done = load_i64(load_i64(buffers + 8))
    if first_env == 0:
        for _ in range(20_000_000):
            if atomic_load(done) == 63:
                break
            give_way()
    else:
        atomic_add(done, 1)
    store_i32(load_i64(buffers) + 4 * first_env, atomic_load(done))


def test_nobody_waits_behind_a_long_tile():
    """Tiles are claimed one by one: the thread that has the long one has no other."""
    code = compiled(_wait_for_the_rest, ADDRESSES)
    specs = [BufferSpec("seen", (), "int32", "write"), BufferSpec("done", (2,), "uint32", "read", False)]
    program = build_program([(code.address, ALWAYS)], 0, specs, 7, owners=[code])
    counter, seen = np.zeros(1, np.int64), np.zeros(64 * 32, np.int32)
    address = np.array([counter.ctypes.data], np.int64).view(np.uint32)
    composite = build_composite([Part("a", program, 64 * 32)])
    run_program(composite, [seen, address], 64 * 32, threads=2)
    assert seen[0] == 63


def test_the_arena_has_room_for_the_largest_part_and_is_used_again():
    small, large = compile_serial(pendulum()), compile_serial(spiral())
    for parts in ([("s", small), ("l", large)], [("l", large), ("s", small)]):
        composite = build_composite([Part(name, program, 100) for name, program in parts])
        assert composite.desc[native.DESC_ARENA_BYTES] == 2048
        arrays = [a for name, _ in parts for a in (pendulum_arrays(100) if name == "s" else spiral_arrays(100))]
        for _ in range(3):
            run_program(composite, arrays, 200, threads=1)
        idle = composite.desc[-int(composite.desc[native.DESC_ARENAS]) :]
        assert np.count_nonzero(idle) == 1
        desc = composite.desc
        del composite, idle
        gc.collect()
        assert not desc[-int(desc[native.DESC_ARENAS]) :].any()  # freed with the composite


def test_parts_keep_their_poison():
    def _leave(arena, buffers, first_env, num_envs):
        """Read what the tile has not written, then write it."""
        buffers[0][first_env] = arena[0]
        arena[0] = np.float32(5)

    code = compiled(_leave)
    spec = [BufferSpec("seen", (), "float32", "write")]
    plain = build_program([(code.address, ALWAYS)], 64, spec, 3, owners=[code])
    poisoned = build_program([(code.address, ALWAYS)], 64, spec, 4, poison=True, owners=[code])
    seen = [np.zeros(64, np.float32), np.zeros(64, np.float32)]
    run_program(build_composite([Part("p", poisoned, 64), Part("q", plain, 64)]), seen, 128, threads=1)
    assert np.isnan(seen[0][[0, 32]]).all()
    assert seen[1][[0, 32]].tolist() == [5, 5]


def test_parts_live_as_long_as_the_composite():
    parts = [compile_serial(pendulum()), compile_serial(spiral())]
    composite = build_composite([Part("a", parts[0], 64), Part("b", parts[1], 64)])
    alive = [weakref.ref(part) for part in parts]
    del parts
    gc.collect()
    assert all(part() is not None for part in alive)
    del composite
    gc.collect()
    assert all(part() is None for part in alive)


def test_a_part_that_needs_one_thread_gets_it():
    free, limited = numbering(), numbering(64, threads=1)
    assert build_composite([Part("a", free, 9), Part("b", limited, 9)]).desc[native.DESC_THREADS] == 1
    assert build_composite([Part("a", free, 9), Part("b", limited, 9)], threads=4).desc[native.DESC_THREADS] == 1
    assert build_composite([Part("a", free, 9)], threads=4).desc[native.DESC_THREADS] == 4
    assert build_composite([Part("a", free, 9)]).desc[native.DESC_THREADS] == 0


def test_the_fingerprint_is_of_content():
    toy, other = compile_serial(pendulum()), compile_serial(spiral())
    parts = [Part("a", toy, 40), Part("b", other, 50)]
    again = [Part("a", compile_serial(pendulum()), 40), Part("b", compile_serial(spiral()), 50)]
    assert build_composite(parts).fingerprint == build_composite(again).fingerprint
    variants = [
        parts,
        parts[::-1],
        parts[:1],
        [parts[0], Part("c", other, 50)],
        [parts[0], Part("b", other, 51)],
        [parts[0], Part("b", compile_serial(spiral(), poison=True), 50)],
    ]
    fingerprints = {build_composite(each).fingerprint for each in variants}
    fingerprints |= {build_composite(parts, threads=2).fingerprint, toy.fingerprint, other.fingerprint}
    assert len(fingerprints) == 9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda a, b: build_composite([]), "parts: expected at least one, got none"),
        (lambda a, b: build_composite([a, b], threads=-1), "threads must not be negative, got -1"),
        (lambda a, b: build_composite([a, b, a]), r"part a: names must differ, got \['a', 'b', 'a'\]"),
        (
            lambda a, b: build_composite([a, dataclasses.replace(b, num_envs=0)]),
            "part b: num_envs must be at least 1, got 0",
        ),
        (
            lambda a, b: build_composite([a, Part("c", build_composite([b]), 9)]),
            "part c: a composite cannot be a part; give its parts",
        ),
    ],
)
def test_parts_that_make_no_sense_are_refused(make, message):
    parts = [Part("a", compile_serial(pendulum()), 40), Part("b", compile_serial(spiral()), 9)]
    build_composite(parts)
    with pytest.raises(ValueError, match=message):
        make(*parts)


def test_two_buffers_of_one_name_are_refused():
    spec = BufferSpec("c.x", (), "float32", "write"), BufferSpec("x", (), "float32", "write")
    one, two = (build_program([(8, ALWAYS)], 0, [each], 1) for each in spec)
    with pytest.raises(ValueError, match=r"parts: two have a buffer of one name, got \['b.c.x', 'b.c.x'\]"):
        build_composite([Part("b", one, 4), Part("b.c", two, 4)])


def test_arrays_that_do_not_fit_are_refused():
    composite, arrays, _ = three_parts(40, 50, 60)
    for total in (149, 40):
        with pytest.raises(ValueError, match=f"num_envs must be 150, all environments of the composite, got {total}"):
            run_program(composite, arrays, total)
    arrays[4] = arrays[4][:49]
    with pytest.raises(ValueError, match=r"buffer second.x: expected float32\[50, 3\], got float32\[49, 3\]"):
        run_program(composite, arrays, 150)
    with pytest.raises(ValueError, match="expected 10 buffers"):
        run_program(composite, arrays[:9], 150)


def test_no_memory_for_the_arenas_is_an_error():
    composite = build_composite([Part("a", numbering(), 32), Part("b", numbering(1 << 60), 32)])
    nothing = np.zeros(2, np.uint32)
    arrays = [np.zeros(32, np.int32), nothing, np.zeros(32, np.int32), nothing]
    with pytest.raises(MemoryError, match="0 of 2 tiles"):
        run_program(composite, arrays, 64, threads=1)


# --- from JAX -----------------------------------------------------------------------------


def jax_inputs(composite, arrays):
    by_name = dict(zip((spec.name for spec in composite.buffers), arrays, strict=True))
    return [jnp.array(by_name[spec.name]) for spec in composite.inputs]


def wanted_outputs(composite, expected):
    by_name = dict(zip((spec.name for spec in composite.buffers), expected, strict=True))
    return [by_name[spec.name] for spec in composite.outputs]


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("num_envs", [(1, 1, 1), (33, 640, 300)])
def test_a_call_computes_what_numpy_does(num_envs, threads):
    composite, arrays, expected = three_parts(*num_envs, threads=threads)
    inputs = jax_inputs(composite, arrays)
    for call in (lambda *i: ffi_call(composite, i), jax.jit(lambda *i: ffi_call(composite, i, sum(num_envs)))):
        assert_same(call(*inputs), wanted_outputs(composite, expected))
    for array, old in zip(inputs, jax_inputs(composite, arrays), strict=True):
        np.testing.assert_array_equal(array, old)  # the caller's arrays are as they were


def test_a_scan_carries_a_composite():
    composite, arrays, _ = three_parts(40, 70, 33)
    names = [spec.name for spec in composite.inputs]

    def step(carry, _):
        outputs = ffi_call(composite, [carry[name] for name in names])
        by_name = dict(zip((spec.name for spec in composite.outputs), outputs, strict=True))
        return {name: by_name.get(name, value) for name, value in carry.items()}, by_name["second.norm"]

    carry, norms = jax.jit(lambda c: jax.lax.scan(step, c, length=20))(
        dict(zip(names, jax_inputs(composite, arrays), strict=True))
    )
    first, second, third = arrays[:4], arrays[4:6], arrays[6:]
    for index in range(20):
        first, second, third = pendulum_reference(first), spiral_reference(second), pendulum_reference(third)
        np.testing.assert_array_equal(norms[index], second[1])
    np.testing.assert_array_equal(carry["first.q"], first[0])
    np.testing.assert_array_equal(carry["second.x"], second[0])
    np.testing.assert_array_equal(carry["third.slowed"], third[3])


def test_several_threads_call_one_composite_at_once():
    composite, arrays, expected = three_parts(500, 700, 300, threads=2)
    inputs, wanted = jax_inputs(composite, arrays), wanted_outputs(composite, expected)
    call = jax.jit(lambda *i: ffi_call(composite, i))
    jax.block_until_ready(call(*inputs))
    barrier, failures = threading.Barrier(4), []

    def work():
        barrier.wait()
        for _ in range(30):
            same = [np.array_equal(output, want) for output, want in zip(call(*inputs), wanted, strict=True)]
            if not all(same):
                failures.append(same)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


def test_calls_that_do_not_fit_are_refused():
    composite, arrays, _ = three_parts(40, 50, 60)
    inputs = jax_inputs(composite, arrays)
    with pytest.raises(ValueError, match="num_envs must be 150, all environments of the composite, got 40"):
        ffi_call(composite, inputs, 40)
    inputs[3] = inputs[3][:49]
    with pytest.raises(ValueError, match=r"input second.x: expected float32\[50, 3\], got float32\[49, 3\]"):
        ffi_call(composite, inputs)


REFUSED = (ValueError, jax.errors.JaxRuntimeError)  # which of them depends on the JAX version


def test_the_handler_refuses_calls_that_do_not_fit():
    """Around the checks of `ffi_call`, as an executable from an old cache would come."""
    composite, arrays, _ = three_parts(40, 50, 60)
    inputs = jax_inputs(composite, arrays)
    shapes = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in composite.outputs]
    target = jax_ffi.register(composite)
    program = np.int64(np.uint64(composite.fingerprint).astype(np.int64))

    def call(inputs, shapes, num_envs):
        jax.block_until_ready(jax.ffi.ffi_call(target, shapes)(*inputs, num_envs=np.int64(num_envs), program=program))

    call(inputs, shapes, 150)
    for total in (40, 151):
        with pytest.raises(REFUSED, match=f"num_envs must be 150, all environments of the composite, got {total}"):
            call(inputs, shapes, total)
    wrong = [*inputs[:3], inputs[3][:49], *inputs[4:]]
    with pytest.raises(REFUSED, match="buffer second.x: expected 600 bytes for 150 environments, got 588"):
        call(wrong, shapes, 150)
    with pytest.raises(REFUSED, match="buffer third.q: expected XLA data type 11, got 4"):
        call([*inputs[:4], inputs[4].astype(jnp.int32), *inputs[5:]], shapes, 150)
