"""Programs of several steps: a tile runs its ops again and again, each time on the next part of some arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_programs import kernel, pendulum, pendulum_arrays, pendulum_reference

from brax_concurrent.backends.cpu_program import BufferSpec, build_program
from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.interop.jax_ffi import ffi_call
from brax_concurrent.scheduler.check import FootprintChecker
from brax_concurrent.scheduler.hw_tiles import compile_hw
from brax_concurrent.scheduler.records import recordable
from brax_concurrent.scheduler.serial import (
    TileComposite,
    TileLayout,
    TileOp,
    TilePart,
    TileProgram,
    compile_composite,
    compile_serial,
)
from brax_concurrent.scheduler.streams import compile_window

jax.config.update("jax_platforms", "cpu")
STEPS = 7
ARENA_BYTES = 132  # no multiple of 8
LAYOUT = TileLayout(
    ARENA_BYTES,
    (
        BufferSpec("force", (2,), "float32", "read", per_step=True),
        BufferSpec("gain", (1,), "float32", "read", per_env=False),
        BufferSpec("q", (), "float32", "readwrite"),
        BufferSpec("seen", (), "float32", "write", per_step=True),
        BufferSpec("last", (), "float32", "write"),
    ),
)


def push(arena, buffers, first_env, num_envs):
    """q *= gain, then q += both forces; what it was before is seen."""
    for env in range(first_env, min(first_env + 32, num_envs)):
        buffers[3][env] = buffers[2][env]
        arena[env - first_env] = buffers[2][env] * buffers[1][0] + buffers[0][2 * env] + buffers[0][2 * env + 1]


def settle(arena, buffers, first_env, num_envs):
    for env in range(first_env, min(first_env + 32, num_envs)):
        buffers[2][env] = arena[env - first_env]
        buffers[4][env] = arena[env - first_env]


def pushed(steps=STEPS):
    lanes = (0, 128)
    ops = (
        TileOp(kernel(push, ("force", "gain", "q"), ("seen", lanes), LAYOUT)),
        TileOp(kernel(settle, (lanes,), ("q", "last"), LAYOUT)),
    )
    return TileProgram(LAYOUT, ops, steps)


def arrays(num_envs, steps=STEPS):
    rng = np.random.default_rng(1)
    force = rng.normal(size=(steps, num_envs, 2)).astype(np.float32)
    q = rng.normal(size=num_envs).astype(np.float32)
    return [force, np.array([0.9], np.float32), q, np.full((steps, num_envs), 7, np.float32), np.zeros_like(q)]


def reference(given):
    force, gain, q, seen, _ = (array.copy() for array in given)
    for step in range(len(force)):
        seen[step] = q
        q = q * gain[0] + force[step, :, 0] + force[step, :, 1]
    return [force, gain, q, seen, q]


@pytest.mark.parametrize(("num_envs", "threads", "steps"), [(1, 1, 7), (33, 2, 7), (1000, 8, 7), (40, 0, 1)])
def test_each_step_has_its_part_of_the_arrays(num_envs, threads, steps):
    given = arrays(num_envs, steps)
    expected = reference(given)
    run_program(compile_serial(pushed(steps), threads=threads), given, num_envs)
    for spec, found, want in zip(LAYOUT.buffers, given, expected, strict=True):
        np.testing.assert_array_equal(found, want, err_msg=spec.name)


def test_the_arena_is_poisoned_before_every_step():
    given = arrays(40)
    ops = (pushed().ops[0], TileOp(kernel(settle, ((0, 128),), ("q", "last"), LAYOUT)))
    run_program(compile_serial(TileProgram(LAYOUT, ops, STEPS), poison=True), given, 40)
    assert np.isfinite(given[2]).all()
    only = [(ops[1].kernel.address, -1)]
    run_program(build_program(only, ARENA_BYTES, LAYOUT.buffers, 77, poison=True, steps=STEPS), given, 40)
    assert np.isnan(given[2]).all()


def test_from_jax():
    given = arrays(45)
    expected = reference(given)
    program = compile_serial(pushed())
    call = jax.jit(lambda *inputs: ffi_call(program, inputs))
    found = call(*map(jnp.asarray, given[:3]))
    for spec, array, want in zip(program.outputs, found, expected[2:], strict=True):
        np.testing.assert_array_equal(array, want, err_msg=spec.name)
    short = (given[0][:3], *given[1:3])
    with pytest.raises(ValueError, match=r"input force: expected float32\[7, 45, 2\], got float32\[3, 45, 2\]"):
        call(*short)


def test_in_a_composite():
    """Beside a program of one step, whose arena is larger."""
    stepped, plain = arrays(70), pendulum_arrays(50)
    expected = [*pendulum_reference(plain), *reference(stepped)]
    parts = (TilePart("plain", pendulum(), 50), TilePart("stepped", pushed(), 70))
    program = compile_composite(TileComposite(parts), threads=2)
    given = [*plain, *stepped]
    run_program(program, given, 120)
    for spec, found, want in zip(program.buffers, given, expected, strict=True):
        np.testing.assert_array_equal(found, want, err_msg=spec.name)
    assert {spec.name: spec.shape for spec in program.buffers}["stepped.seen"] == (STEPS, 70)


def test_tasks_are_those_of_all_steps():
    program = pushed(3)
    tasks = list(program.tasks(40))
    assert [task.kernel for task in tasks] == ["push", "settle"] * 3 * 2
    assert len(tasks) == len(list(program.places(40)))
    second = tasks[6 + 2].footprint  # tile 1, step 1: 8 environments
    assert [(s.start, s.stop) for s in second.reads if s.buffer == 0] == [(8 * (40 + 32), 8 * 80)]
    assert [(s.start, s.stop) for s in second.writes if s.buffer == 3] == [(4 * (40 + 32), 4 * 80)]
    assert [(s.start, s.stop) for s in second.reads if s.buffer == 2] == [(4 * 32, 4 * 40)]


def test_the_number_of_steps_is_part_of_what_a_program_is():
    three, four = compile_serial(pushed(3)), compile_serial(pushed(4))
    assert (three.steps, four.steps) == (3, 4)
    assert three.fingerprint != four.fingerprint
    assert compile_serial(pushed(3)).fingerprint == three.fingerprint


def test_one_step_keeps_to_its_footprints():
    checker = FootprintChecker(pushed(1), 40)
    checker.run(arrays(40, 1))
    assert checker.violations == ()


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        pushed(0)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        build_program([(1, -1)], 64, [], 1, steps=0)
    with pytest.raises(ValueError, match="buffer x: what there is for each step is read or written, but .* readwrite"):
        BufferSpec("x", (), "float32", "readwrite", per_step=True)
    with pytest.raises(ValueError, match="buffer x: .* shared by all environments"):
        BufferSpec("x", (1,), "float32", "read", per_env=False, per_step=True)
    for compile_program in (compile_window, compile_hw):
        with pytest.raises(ValueError, match="a window has one step of a program, got one of 7"):
            compile_program(pushed())
    with pytest.raises(ValueError, match="only a program of one step can be recorded, got one of 7"):
        recordable(compile_serial(pushed()))
    with pytest.raises(ValueError, match="a program of one step is checked, got one of 7"):
        FootprintChecker(pushed(), 40)
