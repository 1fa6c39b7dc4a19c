"""Loading a robot: its constants are MuJoCo's, and stay constant."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import mujoco
import numpy as np
import pytest

import brax_concurrent
from brax_concurrent.kernels.model import Model, Option, load_model

ASSETS = Path(brax_concurrent.__file__).parent / "envs" / "assets"
ROBOTS = ("ant", "grasp", "halfcheetah", "humanoid", "walker2d")

# Fields of Model that MuJoCo does not have, or has under another meaning.
OWN_ARRAYS = {"pair_geom", "pair_explicit", "pair_condim", "pair_maxcontact"}

HOPPER = """
<mujoco>
  <option timestep="0.005" {option}>{flag}</option>
  <worldbody>
    <geom name="floor" type="plane" size="1 1 1"/>
    <body pos="0 0 0.4">
      <freejoint/><geom type="capsule" size="0.1 0.2"/>
      <body pos="0 0 0.3">
        <joint name="j" axis="0 1 0" range="-20 20" stiffness="3" springref="15" damping="0.2"/>
        <geom type="capsule" size="0.05" fromto="0 0 0 0.2 0 0.3"/>
        <body pos="0.2 0 0.3"><joint name="k" axis="1 0 0"/><geom type="sphere" size="0.08"/></body></body>
    </body>
  </worldbody>
  <actuator>
    <motor joint="j" gear="3" ctrlrange="-0.5 0.5"/>
    <position joint="k" kp="5" kv="0.1" group="2" forcerange="0.05 0.5"/>
  </actuator>
</mujoco>
"""


def hopper(option: str = "", flag: str = "") -> str:
    """A small model in which every disable flag makes a difference."""
    return HOPPER.format(option=option, flag=f'<flag {flag}="disable"/>' if flag else "")


def path(robot: str) -> str:
    return str(ASSETS / f"{robot}.xml")


def mj_model(robot: str) -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_path(path(robot))


# Constants ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("robot", ROBOTS)
def test_arrays_and_sizes_equal_mujocos(robot):
    mj, model = mj_model(robot), load_model(path(robot))
    compared = 0
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        if isinstance(value, np.ndarray) and field.name not in OWN_ARRAYS:
            theirs = np.asarray(getattr(mj, field.name))
            np.testing.assert_array_equal(value, theirs, err_msg=field.name)
            assert value.dtype == (np.float64 if theirs.dtype.kind == "f" else np.int32)
            compared += 1
    assert compared == 73
    for size in ("nq", "nv", "nu", "nbody", "njnt", "ngeom", "nmocap", "ntendon", "nM"):
        assert getattr(model, size) == getattr(mj, size)
    assert model.nexplicit == mj.npair
    assert model.stat_meaninertia == mj.stat.meaninertia


@pytest.mark.parametrize(
    ("robot", "integrator", "solver", "iterations"),
    [("ant", "rk4", "newton", 100), ("humanoid", "rk4", "pgs", 50), ("grasp", "euler", "newton", 100)],
)
def test_options(robot, integrator, solver, iterations):
    opt, theirs = load_model(path(robot)).opt, mj_model(robot).opt
    assert (opt.integrator, opt.solver, opt.iterations) == (integrator, solver, iterations)
    for name in ("timestep", "impratio", "tolerance", "ls_iterations", "ls_tolerance"):
        assert getattr(opt, name) == getattr(theirs, name)
    np.testing.assert_array_equal(opt.gravity, theirs.gravity)
    assert opt.eulerdamp
    assert opt.warmstart
    assert opt.refsafe


def test_integrator_can_be_chosen():
    assert load_model(path("ant"), integrator="euler").opt.integrator == "euler"
    assert load_model(hopper('integrator="implicitfast"'), integrator="euler").opt.integrator == "euler"


def test_names():
    model = load_model(path("ant"))
    assert model.name == "ant"
    assert model.body_names[:2] == ("world", "torso")
    assert model.jnt_names[:3] == ("root", "hip_1", "ankle_1")
    assert model.actuator_names[0] == "hip_4"
    assert load_model("<mujoco><worldbody><body><joint/><geom size='1'/></body></worldbody></mujoco>").jnt_names == (
        "",
    )


@pytest.mark.parametrize("source", [*ROBOTS, "hopper"])
def test_tree_and_inertia_addresses(source):
    """qM_ij and qm_address put MuJoCo's full inertia matrix into MuJoCo's own sparse (legacy) order."""
    mj = mujoco.MjModel.from_xml_string(hopper()) if source == "hopper" else mj_model(source)
    model = load_model(mj)
    d = mujoco.MjData(mj)
    mujoco.mj_forward(mj, d)
    full = np.zeros((mj.nv, mj.nv))
    mujoco.mj_fullM(mj, d, full)
    pattern = np.zeros((mj.nv, mj.nv), bool)
    assert len(model.qM_ij) == model.nM
    for address, (i, j) in enumerate(model.qM_ij):
        assert model.qm_address(i, j) == address
        pattern[i, j] = pattern[j, i] = True
    assert (full[~pattern] == 0).all()
    # mapM2M takes MuJoCo's own row-by-row storage to the legacy order.
    legacy = np.array([full[i, j] for i, j in model.qM_ij])
    np.testing.assert_allclose(legacy[mj.mapM2M], d.M, rtol=1e-14, atol=1e-14)

    jacobian = np.zeros((3, mj.nv))
    for body in range(mj.nbody):
        # A point off every axis moves with each dof of the body's chain, and with no other.
        mujoco.mj_jac(mj, d, jacobian, None, d.xpos[body] + np.array([0.31, 0.57, 0.83]), body)
        assert tuple(np.flatnonzero(np.abs(jacobian).max(axis=0) > 1e-12)) == model.body_dofs[body]
        assert all(mj.body_parentid[child] == body for child in model.body_children[body])
    assert sorted(child for children in model.body_children for child in children) == list(range(1, mj.nbody))


def test_qm_address_names_what_is_wrong():
    model = load_model(path("ant"))
    with pytest.raises(KeyError, match=r"expected j among dof 7 and its ancestors .* got j=8"):
        model.qm_address(7, 8)


# One model however it comes -----------------------------------------------------------------------


@pytest.mark.parametrize("robot", ROBOTS)
def test_path_string_and_mjmodel_give_the_same_model(robot):
    from_path = load_model(path(robot))
    from_pathlib = load_model(ASSETS / f"{robot}.xml")
    from_string = load_model("\n  " + Path(path(robot)).read_text())
    from_model = load_model(mj_model(robot))
    assert {m.fingerprint for m in (from_path, from_pathlib, from_string, from_model)} == {from_path.fingerprint}
    assert from_path == from_model
    assert hash(from_path) == hash(from_model)
    assert len(from_path.fingerprint) == 64


def test_fingerprint_sees_every_field():
    model = load_model(path("humanoid"))
    seen = {model.fingerprint}
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        if isinstance(value, np.ndarray):
            changed = value.copy()
            changed.flat[-1:] += 1
            changed = changed if value.size else np.append(value, np.zeros((1, *value.shape[1:]), value.dtype), 0)
        elif isinstance(value, tuple):
            changed = (*value, ("x",))
        elif isinstance(value, Option):
            changed = dataclasses.replace(value, warmstart=False)
        else:
            changed = value + type(value)(1)
        seen.add(dataclasses.replace(model, **{field.name: changed}).fingerprint)
    assert len(seen) == 1 + len(dataclasses.fields(model))


def test_models_are_constant():
    model = load_model(path("humanoid"))
    arrays = [(f.name, getattr(model, f.name)) for f in dataclasses.fields(model)]
    arrays = [(name, value) for name, value in arrays if isinstance(value, np.ndarray)] + [("g", model.opt.gravity)]
    for again in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert again == model
        for name in ("geom_friction", "pair_geom", "jnt_limited"):
            with pytest.raises(ValueError, match="read-only"):
                getattr(again, name)[0] = 0
    assert len(arrays) > 70
    assert not any(value.flags.writeable for _, value in arrays)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.nq = 3


def test_models_do_not_share_memory_with_mujoco():
    mj = mj_model("ant")
    model = load_model(mj)
    before = model.fingerprint
    mj.geom_friction[:] = 7
    mj.opt.gravity[:] = 7
    assert dataclasses.replace(model).fingerprint == before
    assert model.geom_friction.max() == 1
    assert model.opt.gravity[2] == -9.81


def test_replace_makes_another_model():
    model = load_model(path("ant"))
    heavy = dataclasses.replace(model, body_mass=2 * model.body_mass)
    assert heavy != model
    assert heavy.body_mass[1] == 2 * model.body_mass[1]
    assert not heavy.body_mass.flags.writeable
    assert model != "ant"


def test_repr_is_one_readable_line():
    text = repr(load_model(path("humanoid")))
    assert text.startswith("Model('humanoid', nq=24, nv=23, nu=17")
    assert "\n" not in text
    assert len(text) < 200


# Flags --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        *[("", name) for name in ("limit", "spring", "damper", "gravity", "clampctrl", "actuation")],
        ('actuatorgroupdisable="2"', ""),
    ],
)
def test_disabled_flags_are_worked_into_the_constants(option, flag):
    """A model without the flag, given the constants loaded from the one with it, moves exactly alike."""
    flagged = mujoco.MjModel.from_xml_string(hopper(option, flag))
    plain = mujoco.MjModel.from_xml_string(hopper())
    baked = copy.copy(plain)
    model = load_model(flagged)
    for field in dataclasses.fields(model):
        if isinstance(getattr(model, field.name), np.ndarray) and field.name not in OWN_ARRAYS:
            getattr(baked, field.name)[:] = getattr(model, field.name)
    baked.opt.gravity[:] = model.opt.gravity
    ends = []
    for mj in (flagged, baked, plain):
        d = mujoco.MjData(mj)
        d.qpos[7] = -0.5
        d.ctrl[:] = [2, 0.3]
        mujoco.mj_step(mj, d, 40)
        ends.append(np.concatenate([d.qpos, d.qvel]))
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-12, atol=1e-13)
    assert np.abs(ends[2] - ends[0]).max() > 1e-4  # the flag matters here


@pytest.mark.parametrize("flag", ["eulerdamp", "warmstart", "refsafe"])
def test_flags_of_the_options(flag):
    assert getattr(load_model(hopper()).opt, flag) is True
    assert getattr(load_model(hopper(flag=flag)).opt, flag) is False


# Wrong arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (
            {"model": "no/such/robot.xml"},
            FileNotFoundError,
            r"model: .*found nothing at 'no/such/robot.xml'",
        ),
        ({"model": "."}, FileNotFoundError, r"model: .*found a folder at '.'"),
        ({"model": 3}, TypeError, r"model: expected an MJCF path, MJCF text or a mujoco.MjModel, got int"),
        (
            {"model": "<mujoco><worldbody>"},
            ValueError,
            r"model: MuJoCo cannot compile this MJCF text: .*XML",
        ),
        ({"model": "<mujoco><wordbody/></mujoco>"}, ValueError, r"model: .*unrecognized element"),
        ({"nconmax": 0}, ValueError, r"nconmax: expected at least 1, got 0"),
        ({"nconmax": 2.5}, TypeError, r"nconmax: expected an integer or None, got 2.5"),
        ({"nconmax": True}, TypeError, r"nconmax: expected an integer or None, got True"),
        ({"integrator": "RK4"}, ValueError, r"integrator: expected 'euler', 'rk4' or None, got 'RK4'"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, said):
    with pytest.raises(error, match=said):
        load_model(**{"model": path("ant"), **arguments})


def test_bad_file_names_its_path(tmp_path):
    bad = tmp_path / "bad.xml"
    bad.write_text("not a model")
    with pytest.raises(ValueError, match=r"model: MuJoCo cannot compile '.*bad.xml'"):
        load_model(bad)


def test_every_field_is_documented():
    for cls in (Model, Option):
        for field in dataclasses.fields(cls):
            assert field.name in (cls.__doc__ or ""), field.name
