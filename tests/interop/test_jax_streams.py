"""Programs of the window called from JAX: bits, overlap, thread pools, records, errors."""

import os
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from holding import holding, let_go
from mixing import copy_ad, log, meet, meet_too, mix_ab, mix_cd, mixing, mixing_arrays, set_flag
from toy_programs import pendulum, pendulum_arrays, pendulum_reference

from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.interop import jax_ffi
from brax_concurrent.interop.jax_ffi import ffi_call
from brax_concurrent.scheduler.hw_tiles import compile_hw
from brax_concurrent.scheduler.records import RUN, TASK, recording
from brax_concurrent.scheduler.serial import TileComposite, TilePart, compile_serial
from brax_concurrent.scheduler.streams import compile_window

windows = pytest.mark.parametrize("compile_program", [compile_window, compile_hw])


@pytest.mark.parametrize("numbers", [{}, {"window": 1}, {"window": 7, "interleave": 3}, {"threads": 1}])
@pytest.mark.parametrize("num_envs", [1, 33, 1000])
def test_a_call_computes_what_numpy_does(numbers, num_envs):
    program = compile_window(pendulum(), **numbers)
    arrays = pendulum_arrays(num_envs)
    for _ in range(3):
        arrays = pendulum_reference(arrays)
    q, gravity, _, slowed = (jnp.array(array) for array in pendulum_arrays(num_envs))

    @jax.jit
    def three(q, slowed):
        def step(carry, _):
            q, energy, slowed = ffi_call(program, [carry[0], gravity, carry[1]])
            return (q, slowed), energy

        return jax.lax.scan(step, (q, slowed), length=3)

    (q, slowed), energy = three(q, slowed)
    for found, want in zip((q, energy[-1], slowed), (arrays[0], arrays[2], arrays[3]), strict=True):
        np.testing.assert_array_equal(found, want)


@windows
@pytest.mark.parametrize("functions", [(mix_ab, (mix_cd, True), copy_ad, set_flag, (mix_ab, True)), (mix_ab, log, log)])
def test_a_call_has_the_bits_of_the_serial_program(compile_program, functions):
    arrays = mixing_arrays(300)
    program = mixing(*functions)
    inputs = [jnp.array(array) for array in arrays]
    run_program(compile_serial(program), arrays, 300)
    for found, want in zip(ffi_call(compile_program(program), inputs), arrays, strict=False):
        np.testing.assert_array_equal(found, want)


@windows
def test_a_composite_from_jax(compile_program):
    composite = TileComposite((TilePart("a", pendulum(), 700), TilePart("b", pendulum(), 40)))
    program = compile_program(composite, window=20)
    arrays = [pendulum_arrays(700), pendulum_arrays(40, seed=3)]
    inputs = [jnp.array(each[index]) for each in arrays for index in (0, 1, 3)]
    outputs = ffi_call(program, inputs)
    for index, each in enumerate(arrays):
        q, _, energy, slowed = pendulum_reference(each)
        for found, want in zip(outputs[3 * index : 3 * index + 3], (q, energy, slowed), strict=True):
            np.testing.assert_array_equal(found, want)


@windows
def test_calls_at_once_do_not_disturb_each_other(compile_program):
    program = compile_program(pendulum(), window=24)
    call = jax.jit(lambda *inputs: ffi_call(program, inputs))
    failures = []

    def work(seed):
        arrays = pendulum_arrays(700, seed)
        expected = pendulum_reference(arrays)
        for _ in range(30):
            outputs = call(*(jnp.array(arrays[index]) for index in (0, 1, 3)))
            if not all((np.asarray(a) == expected[b]).all() for a, b in zip(outputs, (0, 2, 3), strict=True)):
                failures.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="XLA's pool then has one thread")
@pytest.mark.parametrize("functions", [(meet, meet_too), (mix_ab, meet, copy_ad, meet_too)])
def test_independent_tasks_run_at_once(functions):
    numbers, out, _ = (jnp.array(array) for array in mixing_arrays(32))
    shared = np.zeros(16, np.int32)
    program = compile_window(mixing(*functions), threads=2)
    on_device = jnp.array(shared)
    jax.block_until_ready(ffi_call(program, [numbers, out, on_device]))
    assert np.asarray(on_device).view(np.int64)[:2].tolist() == [2, 2]


def test_runs_are_recorded_one_by_one():
    program = compile_window(pendulum(), threads=2, window=30)
    inputs = [jnp.array(pendulum_arrays(100)[index]) for index in (0, 1, 3)]
    jax.block_until_ready(ffi_call(program, inputs))
    again = compile_window(pendulum(), threads=2, window=30)
    served = jax_ffi.serving(again)
    assert served is program
    with recording(served, 80) as records:
        for _ in range(3):
            jax.block_until_ready(ffi_call(again, inputs))
    jax.block_until_ready(ffi_call(again, inputs))  # no longer
    assert (records.runs, records.missing) == (3, 3 * 32 - 80)
    for run, count in ((0, 32), (1, 32), (2, 16)):
        rows = records.rows[records.rows[:, RUN] == run]
        assert len(np.unique(rows[:, TASK])) == len(rows) == count


@windows
def test_a_kernel_that_never_ends_is_an_error(monkeypatch, compile_program):
    """JAX's own thread must be the caller of the handler, so that it is the helper that is held."""
    monkeypatch.setenv("BRAX_CONCURRENT_TIMEOUT", "0.3")
    tiles, block, arrays = holding()
    program = compile_program(tiles, threads=2)
    inputs = [jnp.array(array) for array in arrays]
    with pytest.raises(jax.errors.JaxRuntimeError, match="DEADLINE_EXCEEDED.* kernel hold of tile [01]"):
        jax.block_until_ready(ffi_call(program, inputs))
    let_go(block)


@windows
def test_no_memory_for_the_arenas_is_an_error(compile_program):
    tiles = pendulum()
    huge = type(tiles)(type(tiles.layout)(1 << 60, tiles.layout.buffers), tiles.ops)
    inputs = [jnp.array(pendulum_arrays(100)[index]) for index in (0, 1, 3)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="no memory for an arena"):
        jax.block_until_ready(ffi_call(compile_program(huge), inputs))


def test_a_process_with_one_core_finishes_alone():
    code = """
        import os, sys
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        sys.path.insert(0, sys.argv[1])
        import jax.numpy as jnp, numpy as np
        from toy_programs import pendulum, pendulum_arrays, pendulum_reference
        from brax_concurrent.interop.jax_ffi import ffi_call
        from brax_concurrent.scheduler.streams import compile_window
        arrays = pendulum_arrays(500)
        q, gravity, energy, slowed = pendulum_reference(arrays)
        found = ffi_call(compile_window(pendulum(), threads=8), [jnp.array(arrays[index]) for index in (0, 1, 3)])
        for each, want in zip(found, (q, energy, slowed)):
            np.testing.assert_array_equal(each, want)
    """
    tests = os.path.dirname(os.path.dirname(__file__))
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), tests], check=True, timeout=240)
