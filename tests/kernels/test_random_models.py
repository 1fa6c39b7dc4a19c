"""All stages on robots that nobody designed."""

import itertools

import mujoco
import physics
import pytest
from kernels.random_models import NUM_MODELS, random_model
from kernels.test_integrate import EVALUATE, STATE, step_kernels, without_constraints

NUM_STATES = 24


@pytest.mark.parametrize("seed", range(NUM_MODELS))
def test_stages_and_a_step_without_constraints(seed):
    robot = without_constraints(random_model(seed))
    states = physics.random_states(robot.mj, NUM_STATES, seed)
    written = dict.fromkeys(name for kernel in EVALUATE for name in kernel.writes)
    world = physics.world_of(robot, states)
    for kernel in EVALUATE:
        world.run(kernel, robot.view)
    found = physics.errors(world, physics.mujoco_fields(robot.mj, states, written))
    for kernel in step_kernels(robot)[len(EVALUATE) :]:
        world.run(kernel, robot.view)
    expected = physics.mujoco_fields(robot.mj, states, STATE, mujoco.mj_step)
    physics.assert_agrees(found | physics.errors(world, expected))


def test_the_models_differ_and_have_all_features():
    models = [physics.compiled(random_model(seed)) for seed in range(NUM_MODELS)]
    joints = list(
        itertools.chain.from_iterable(zip(m.jnt_type, m.jnt_limited, m.jnt_stiffness, strict=True) for m in models)
    )
    assert {kind for kind, _, _ in joints} == {physics.FREE, physics.SLIDE, physics.HINGE}
    assert len({m.nv for m in models}) > 10
    assert any(m.nmocap for m in models)
    assert any((m.body_jntnum > 2).any() for m in models)
    assert any(((m.body_jntnum == 0) & (m.body_weldid > 0)).any() for m in models)
    assert any(m.nu and (m.actuator_biastype == mujoco.mjtBias.mjBIAS_AFFINE).any() for m in models)
