"""coupling.py on the robots, and elimination in two parts."""

import numpy as np
import physics
import pytest
from kernels.random_models import random_model

from brax_concurrent.kernels.coupling import acting_dofs, contact_groups, entries_of, rare_limbs
from brax_concurrent.kernels.symmetric import closure, eliminate, factor


def mass_of(robot):
    return {(int(i), int(j)) for i, j in robot.model.qM_ij}


@pytest.mark.parametrize("source", [*physics.ROBOTS, *map(random_model, range(6))], ids=str)
def test_every_contact_is_in_a_group_that_has_its_dofs(source):
    model = physics.robot(source).view
    groups, acting = contact_groups(model), acting_dofs(model)
    assert len(groups.of_pair) == len(acting)
    for group, dofs in zip(groups.of_pair, acting, strict=True):
        assert dofs <= groups.dofs[group]
        assert entries_of(dofs) <= groups.entries[group] <= entries_of(groups.dofs[group])
    assert set(groups.of_pair) == set(range(len(groups.dofs))), "a group without pairs"


def test_groups_of_humanoid_are_its_limbs_on_the_floor_and_its_bodies():
    trunk, limbs = set(range(6)), ({*range(6, 13)}, {6, 7, 8, *range(13, 17)}, {17, 18, 19}, {20, 21, 22})
    expected = [*(trunk | limb for limb in limbs), set(range(6, 23))]
    assert sorted(map(sorted, contact_groups(physics.robot("humanoid").view).dofs)) == sorted(map(sorted, expected))


def test_fingers_that_cannot_meet_are_not_coupled():
    (entries,) = contact_groups(physics.robot("grasp").view).entries
    assert not [(i, j) for i, j in entries if j >= 6 and (i - 6) // 4 != (j - 6) // 4]


def test_rare_limbs_of_humanoid_are_its_arms():
    robot = physics.robot("humanoid")
    rare = rare_limbs(robot.view, mass_of(robot))
    assert rare.first == 17
    arms = {frozenset(range(17, 20)), frozenset(range(20, 23))}
    assert all(i >= 17 and not any({i, j} <= arm for arm in arms) and j > 5 for i, j in rare.entries)
    for crosses, dofs in zip(rare.crossing, acting_dofs(robot.view), strict=True):
        limbs = sum(bool(dofs & limb) for limb in (frozenset(range(6, 17)), *arms))
        assert crosses == (max(dofs) >= 17 and limbs > 1), sorted(dofs)


@pytest.mark.parametrize("source", [*physics.ROBOTS, *map(random_model, range(6))], ids=str)
def test_rare_entries_stay_empty_without_the_pairs_that_cross(source):
    robot = physics.robot(source)
    rare = rare_limbs(robot.view, mass_of(robot))
    if rare is None:
        return
    pattern = mass_of(robot)
    for crosses, dofs in zip(rare.crossing, acting_dofs(robot.view), strict=True):
        if not crosses:
            pattern |= entries_of(dofs)
    assert not closure(pattern) & rare.entries


@pytest.mark.parametrize("name", ["ant", "grasp"])
def test_limbs_that_cannot_meet_or_meet_other_trees_are_not_rare(name):
    robot = physics.robot(name)
    assert rare_limbs(robot.view, mass_of(robot)) is None


@pytest.mark.parametrize("first", [0, 3, 8])
def test_elimination_in_two_parts(first):
    rng = np.random.default_rng(0)
    n = 8
    dense = rng.normal(size=(n, n)) * (rng.random((n, n)) < 0.5)
    dense = dense @ dense.T + np.eye(n)
    matrix = {(i, j): float(dense[i, j]) for i in range(n) for j in range(i + 1) if dense[i, j] != 0}
    whole, pivots = factor(matrix)
    lower, inverse, rest = eliminate(matrix, first)
    assert all(i >= first for i, _ in lower)
    assert all(i < first for i, _ in rest)
    if first:
        upper, others = factor(rest)
        lower, inverse = lower | upper, [*others, *inverse[first:]]
    assert lower == whole
    assert inverse == pivots
