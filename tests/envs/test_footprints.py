"""Every kernel of every robot touches only what its footprint declares."""

import itertools

import jax
import numpy as np
import pytest

from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.envs import make
from brax_concurrent.envs.footprints import check_environment
from brax_concurrent.envs.program import tile_program
from brax_concurrent.scheduler.check import FootprintChecker
from brax_concurrent.scheduler.serial import compile_serial

jax.config.update("jax_platforms", "cpu")


def test_the_fields_are_where_the_kernels_use_them():
    """What the examined reset leaves in the field qpos is what it stores to the user."""
    env = make("grasp", 40, backend="cpu")
    program = tile_program(env, "reset_all")
    fields = program.layout.fields
    assert len({f.name for f in fields}) == len(fields) >= 8
    assert all(a.stop <= b.start for a, b in itertools.pairwise(fields))
    assert fields[-1].stop == program.layout.arena_bytes
    (qpos,) = (f for f in fields if f.name == "qpos")
    buffers = [np.zeros(spec.array_shape(40), spec.dtype) for spec in program.layout.buffers]
    index = [spec.name for spec in program.layout.buffers].index("key")
    buffers[index] = np.random.default_rng(1).integers(1 << 32, size=(40, 2), dtype=np.uint32)
    native = [buffer.copy() for buffer in buffers]
    checker = FootprintChecker(program, 40)
    checker.run(buffers)
    assert checker.violations == ()
    run_program(compile_serial(program), native, 40)
    for buffer, same in zip(buffers, native, strict=True):
        assert buffer.tobytes() == same.tobytes()
    writers = [op.kernel.name for op in program.ops if covers(op.kernel.footprint(0).writes, qpos)]
    assert writers == ["load", "reset"]


def covers(segments, field):
    return any(s.buffer == -1 and s.start <= field.start and field.stop <= s.stop for s in segments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("robot", "arguments"),
    [
        ("ant", {}),
        ("grasp", {"per_env": ("body_mass", "geom_friction")}),
        ("grasp", {"granularity": "substep", "autoreset": False}),
        ("halfcheetah", {}),
        ("halfcheetah", {"granularity": "step"}),
        ("humanoid", {}),
        ("walker2d", {}),
    ],
)
def test_robots_keep_to_their_footprints(robot, arguments):
    for stream in check_environment(make(robot, 40, backend="cpu", **arguments)):
        assert stream.checker.violations == ()
        assert min(stream.checker.op_counts.values()) >= 2
