"""Robots' kernels that tiles skip: resets where nothing ended. The same tasks, and the same bits, in all schedulers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orders import assert_same

import brax_concurrent as bc
from brax_concurrent.backends.cpu_program import ALWAYS
from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.envs.program import tile_program
from brax_concurrent.scheduler.hw_tiles import compile_hw
from brax_concurrent.scheduler.records import LANE, RUN, recordable, recording
from brax_concurrent.scheduler.serial import compile_serial
from brax_concurrent.scheduler.streams import compile_window

jax.config.update("jax_platforms", "cpu")

KEY, NUM_ENVS, STEPS = jax.random.key(3), 70, 4  # three tiles; the last is not full


def arrays_after_reset(env, program):
    """The program's arrays, where one environment of the first tile has come a step further than the others."""
    known = env._arrays(env.reset(KEY), action=jnp.full((env.num_envs, env.action_size), 0.3))
    known["elapsed"] = known["elapsed"].at[5].set(1)
    shapes = [(spec, spec.array_shape(env.num_envs)) for spec in program.buffers]
    return [np.array(known[s.name] if s.name in known else np.zeros(n), s.dtype).reshape(n) for s, n in shapes]


def after_each_step(program, arrays):
    found = []
    for _ in range(STEPS):
        run_program(program, arrays, NUM_ENVS)
        found += [array.copy() for array in arrays]
    return found


# Arenas are filled with nonzero bytes: lanes without an environment may be left unwritten, and must not want anything.
MAKES = {
    "serial": lambda tiles: recordable(compile_serial(tiles, poison=True)),
    "sw": lambda tiles: compile_window(tiles, poison=True),
    "hw": lambda tiles: compile_hw(tiles, poison=True),
    "hw in groups": lambda tiles: compile_hw(tiles, threads=2, tiles=2, policy="same_kernel", poison=True),
}


@pytest.mark.parametrize(
    "robot",
    ["halfcheetah", "grasp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("walker2d", "ant", "humanoid"))],
)
def test_tiles_in_which_nothing_ends_skip_the_kernels_of_the_reset(robot):
    env = bc.make(robot, NUM_ENVS, backend="cpu", granularity="stage", max_episode_steps=3)
    tiles = tile_program(env)
    conditional = [op.kernel.name for op in tiles.ops if op.predicate != ALWAYS]
    assert (conditional[0], conditional[-1]) == ("reset", "observe_reset")
    always = compile_serial(replace(tiles, ops=tuple(replace(op, predicate=ALWAYS) for op in tiles.ops)))
    expected = after_each_step(always, arrays_after_reset(env, always))
    for scheduler, make in MAKES.items():
        program = make(tiles)
        with recording(program, 10_000) as records:
            assert_same(after_each_step(program, arrays_after_reset(env, program)), expected)
        skipped = records.rows[records.rows[:, LANE] == -1]
        # One environment of the first tile ends in the second step, all others in the third.
        wanted = [tiles_that_skip * len(conditional) for tiles_that_skip in (3, 2, 0, 3)]
        assert np.bincount(skipped[:, RUN], minlength=STEPS).tolist() == wanted, scheduler
