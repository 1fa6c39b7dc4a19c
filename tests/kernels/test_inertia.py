"""inertia.py against MuJoCo and against dense linear algebra."""

import mujoco
import numpy as np
import physics
import pytest

from brax_concurrent.kernels.inertia import factor_inertia, inertia
from brax_concurrent.kernels.symmetric import factor, solve

NUM_STATES = 1000


@pytest.mark.parametrize("kernel", [inertia, factor_inertia], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("name", physics.ROBOTS)
def test_fields_are_mujocos(name, kernel):
    robot = physics.robot(name)
    physics.assert_agrees(physics.stage_errors(robot, kernel, physics.random_states(robot.mj, NUM_STATES)))


@pytest.mark.parametrize("name", physics.ROBOTS)
def test_the_dense_matrix_is_mujocos(name):
    robot = physics.robot(name)
    states = physics.random_states(robot.mj, 50)
    world = physics.world_of(robot, states)
    for field, value in physics.mujoco_fields(robot.mj, states, ("cinert", "cdof")).items():
        world.put(field, value)
    world.run(inertia, robot.view)
    found = np.zeros((len(states), robot.mj.nv, robot.mj.nv))
    for adr, (i, j) in enumerate(robot.model.qM_ij):
        found[:, i, j] = found[:, j, i] = world.get("qM")[:, adr]
    data = mujoco.MjData(robot.mj)
    for s in range(len(states)):
        for field, value in states.items():
            getattr(data, field)[:] = value[s]
        mujoco.mj_forward(robot.mj, data)
        expected = physics.dense_inertia(robot.mj, data)
        np.testing.assert_allclose(found[s], expected, rtol=0, atol=1e-12 * expected.max())


@pytest.mark.parametrize("density", [0.2, 0.6, 1.0])
def test_factor_and_solve_with_fill_in(density):
    """Any pattern: entries that elimination fills in are found."""
    rng = np.random.default_rng(0)
    n = 8
    matrix = rng.normal(size=(n, n)) * (rng.random((n, n)) < density)
    matrix = matrix @ matrix.T * (rng.random((n, n)) < density)
    matrix = np.tril(matrix, -1) + np.tril(matrix, -1).T + np.diag(np.abs(matrix).sum(axis=0) + 1)
    rhs = rng.normal(size=n)
    entries = {(i, j): float(matrix[i, j]) for i in range(n) for j in range(i + 1) if matrix[i, j] != 0}
    lower, inverse = factor(entries)
    unit = np.eye(n)
    for (i, j), value in lower.items():
        unit[i, j] = value if i != j else 1
    np.testing.assert_allclose(unit.T @ np.diag(1 / np.array(inverse)) @ unit, matrix, atol=1e-13)
    np.testing.assert_allclose(solve(lower, inverse, list(rhs)), np.linalg.solve(matrix, rhs), rtol=1e-12)
    assert entries == {ij: float(matrix[ij]) for ij in entries}, "the matrix was changed"


def test_factor_names_a_missing_diagonal_entry():
    with pytest.raises(ValueError, match=r"all of the diagonal, got no entry \(1, 1\)"):
        factor({(0, 0): 1.0, (2, 2): 1.0})


def test_a_tree_has_no_fill_in():
    robot = physics.robot("humanoid")
    rng = np.random.default_rng(0)
    entries = {(i, j): rng.uniform(0.1, 1) + 50.0 * (i == j) for i, j in robot.model.qM_ij}
    assert factor(entries)[0].keys() == entries.keys()
