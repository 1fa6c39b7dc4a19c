"""The project's MJCF files describe Gymnasium's robots, and the hand of Brax's grasp."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import mujoco
import numpy as np
import pytest

import brax_concurrent

ASSETS = Path(brax_concurrent.__file__).parent / "envs" / "assets"
GYMNASIUM = {
    "ant": "ant.xml",
    "halfcheetah": "half_cheetah.xml",
    "walker2d": "walker2d_v5.xml",
    "humanoid": "humanoid.xml",
}

# Ant and Humanoid are equal to the bit.  HalfCheetah writes its total mass as a density, and
# Walker2d's lengths lack the rounding errors of Gymnasium's (0.2 for 0.19999999999999996): equal to 1e-12.
EXACT = ("ant", "humanoid")

# What only concerns drawing, names, memory and speed.
NOT_PHYSICS = re.compile(
    "_|B_|D_|M_|bvh_|cam_|efm|key_|light_|map[DM]|mat_|mesh_|name_|names|narena|nbuffer|nbvh|ncam|nkey|nlight|"
    "nmat|nmesh|nnames|nnumeric|npaths|ntex|nuser|numeric_|paths|signature|site_|skin_|tex_|text_|vis|"
    "geom_matid|geom_rgba|geom_user"
)


def gymnasium_model(robot: str) -> mujoco.MjModel:
    spec = importlib.util.find_spec("gymnasium")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "envs" / "mujoco" / "assets"
    return mujoco.MjModel.from_xml_path(str(folder / GYMNASIUM[robot]))


def asset(robot: str) -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_path(str(ASSETS / f"{robot}.xml"))


def physics_fields(m: mujoco.MjModel) -> dict[str, np.ndarray]:
    """Every numeric field of the model that is not about drawing, and those of its options and statistics."""
    values = {}
    for owner, prefix in ((m, ""), (m.opt, "opt."), (m.stat, "stat.")):
        for name in dir(owner):
            value = getattr(owner, name)
            if NOT_PHYSICS.match(name) or callable(value) or prefix + name in ("opt", "stat"):
                continue
            array = np.asarray(value)
            if array.dtype.kind in "biuf":
                values[prefix + name] = array
    # The camera decides what is drawn, not what happens.
    return {k: v for k, v in values.items() if k not in ("stat.center", "stat.extent")}


@pytest.mark.parametrize("robot", sorted(GYMNASIUM))
def test_every_physical_field_equals_gymnasiums(robot):
    ours, theirs = physics_fields(asset(robot)), physics_fields(gymnasium_model(robot))
    assert len(ours) > 350
    assert {"body_inertia", "jnt_range", "opt.timestep", "stat.meaninertia"} <= set(ours)
    assert set(ours) == set(theirs)
    different = []
    for name, value in ours.items():
        if value.shape != theirs[name].shape:
            different.append(f"{name}: shape {value.shape}, Gymnasium {theirs[name].shape}")
        elif robot in EXACT or value.dtype.kind != "f":
            if not np.array_equal(value, theirs[name]):
                different.append(f"{name}: {value} is not {theirs[name]}")
        elif not np.allclose(value, theirs[name], rtol=1e-12, atol=1e-15):
            different.append(f"{name}: off by {np.abs(value - theirs[name]).max()}")
    assert not different, "\n".join(different)


@pytest.mark.parametrize("robot", sorted(GYMNASIUM))
def test_names_equal_gymnasiums(robot):
    ours, theirs = asset(robot), gymnasium_model(robot)
    compared = 0
    for kind, count in (
        ("BODY", "nbody"),
        ("JOINT", "njnt"),
        ("GEOM", "ngeom"),
        ("ACTUATOR", "nu"),
        ("TENDON", "ntendon"),
    ):
        for i in range(getattr(theirs, count)):
            obj = getattr(mujoco.mjtObj, f"mjOBJ_{kind}")
            name = mujoco.mj_id2name(theirs, obj, i)
            if name is not None:  # Gymnasium leaves some bodies and motors without a name; ours have one.
                assert mujoco.mj_id2name(ours, obj, i) == name
                compared += 1
            assert mujoco.mj_id2name(ours, obj, i)
    assert compared >= 25


def test_a_wrong_number_would_be_noticed():
    """The comparison above must see a change in any family of fields."""
    theirs = gymnasium_model("ant")
    for edit in (
        "geom_friction",
        "dof_armature",
        "body_inertia",
        "jnt_range",
        "actuator_gear",
        "geom_contype",
    ):
        ours = asset("ant")
        getattr(ours, edit)[-1] += 1
        assert not np.array_equal(physics_fields(ours)[edit], physics_fields(theirs)[edit])


@pytest.mark.parametrize("robot", [*sorted(GYMNASIUM), "grasp"])
def test_assets_have_a_floor_a_light_a_sky_and_a_camera(robot):
    m = asset(robot)
    assert (m.geom_type == int(mujoco.mjtGeom.mjGEOM_PLANE)).sum() == 1
    assert m.nlight >= 1
    assert m.ncam >= 1
    assert (m.tex_type == int(mujoco.mjtTexture.mjTEXTURE_SKYBOX)).any()


@pytest.mark.parametrize("robot", [*sorted(GYMNASIUM), "grasp"])
def test_assets_compile_without_a_warning(robot, capfd):
    asset(robot)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


# The hand of Brax v1's grasp: where its links stand in the default state.
NOMINAL = {
    "object": (0, 0, 1),
    "palm": (0, 0, 3.3107),
    "proximal_1": (0, 2.25, 2.8107),
    "middle_1": (0, 3.5303, 2.2804),
    "distal_1": (0, 4.0607, 1.0),
    "proximal_2": (0, -2.25, 2.8107),
    "distal_2": (0, -4.0607, 1.0),
    "distal_3": (-4.0607, 0, 1.0),
    "middle_4": (3.5303, 0, 2.2804),
    "distal_4": (4.0607, 0, 1.0),
}


@pytest.fixture
def grasp() -> tuple[mujoco.MjModel, mujoco.MjData]:
    m = asset("grasp")
    d = mujoco.MjData(m)
    mujoco.mj_forward(m, d)
    return m, d


def curl_inwards(m: mujoco.MjModel, curl: float, middle: float, distal: float) -> np.ndarray:
    """Controls that close the hand by these angles (degrees) on every finger."""
    ctrl = np.zeros(m.nu)
    for finger in "1234":
        sign = -1 if finger == "1" else 1
        for joint, angle in (("curl", curl), ("middle", middle), ("distal", distal)):
            ctrl[m.actuator(f"{joint}_{finger}").id] = sign * np.radians(angle)
    return ctrl


def test_grasp_sizes(grasp):
    m, _ = grasp
    assert (m.nq, m.nv, m.nu, m.nmocap) == (7 + 16, 6 + 16, 16, 1)
    assert m.opt.timestep == 0.005
    assert m.opt.integrator == int(mujoco.mjtIntegrator.mjINT_EULER)
    assert m.opt.disableflags == 0
    np.testing.assert_array_equal(m.body_mass[1:], 1)
    np.testing.assert_array_equal(m.body_inertia[1:], 1)
    np.testing.assert_array_equal(m.dof_damping, [0] * 6 + [50] * 16)


def test_grasp_pose_is_brax_default(grasp):
    m, d = grasp
    for body, position in NOMINAL.items():
        np.testing.assert_allclose(d.body(body).xipos, position, atol=6e-5, err_msg=body)
    # Distal links hang straight down: their capsules' axes are vertical.
    for finger in "1234":
        np.testing.assert_allclose(abs(d.geom(f"distal_{finger}").xmat[[2, 5, 8]]), [0, 0, 1], atol=1e-12)
    # The pose is qpos0, with middle and distal joints at 45 degrees.
    bends = [j for j in range(m.njnt) if m.joint(j).name.startswith(("middle", "distal"))]
    np.testing.assert_allclose(abs(m.qpos0[m.jnt_qposadr[bends]]), np.pi / 4, rtol=1e-15)
    np.testing.assert_array_equal(d.qpos, m.qpos0)


def test_grasp_joint_ranges_and_servos(grasp):
    m, _ = grasp
    for finger in "1234":
        bend = (-90, 0) if finger == "1" else (0, 90)
        for joint, wanted in (("curl", (-45, 45)), ("twist", (-45, 45)), ("middle", bend), ("distal", bend)):
            np.testing.assert_allclose(np.degrees(m.joint(f"{joint}_{finger}").range), wanted, atol=1e-12)
            servo = m.actuator(f"{joint}_{finger}")
            np.testing.assert_array_equal(servo.ctrlrange, m.joint(f"{joint}_{finger}").range)
            assert servo.ctrllimited
            assert servo.trnid[0] == m.joint(f"{joint}_{finger}").id
            assert servo.gainprm[0] == 300
            assert tuple(servo.biasprm[:3]) == (0, -300, 0)


def test_grasp_closing_moves_the_tips_inwards_and_down(grasp):
    m, d = grasp
    before = {f: d.body(f"distal_{f}").xipos.copy() for f in "1234"}
    for joint in range(m.njnt):
        name = m.joint(joint).name
        if name.startswith("curl"):
            d.qpos[m.jnt_qposadr[joint]] = np.radians(-20 if name.endswith("1") else 20)
    mujoco.mj_forward(m, d)
    for finger, tip in before.items():
        now = d.body(f"distal_{finger}").xipos
        assert np.hypot(*now[:2]) < np.hypot(*tip[:2]) - 0.5
        assert now[2] < tip[2] - 0.5


def test_grasp_only_the_six_pairs_touch(grasp):
    """With every geom swollen to touch every other, what MuJoCo reports is what can ever collide."""
    m, d = grasp
    m.geom_margin[:] = 100
    m.body_margin[:] = 100
    mujoco.mj_forward(m, d)
    pairs = {frozenset((m.geom(c.geom[0]).name, m.geom(c.geom[1]).name)) for c in d.contact}
    assert pairs == {frozenset(("object", other)) for other in ("ground", "palm", *(f"distal_{f}" for f in "1234"))}
    for contact in d.contact:
        assert contact.dim == 3
        assert tuple(contact.friction[:2]) == (1, 1)


def test_grasp_is_stable_under_random_control(grasp):
    m, d = grasp
    rng = np.random.default_rng(0)
    low, high = m.actuator_ctrlrange.T
    slack = np.radians(10)  # soft limits give way a little
    for step in range(1000):
        if step % 4 == 0:
            d.ctrl[:] = rng.uniform(low, high)
        mujoco.mj_step(m, d)
        assert np.isfinite(d.qacc).all()
        angles = d.qpos[7:]
        assert (angles > low - slack).all()
        assert (angles < high + slack).all()
    assert not any(warning.number for warning in d.warning)
    assert np.abs(d.qvel[6:]).max() < 20


def test_grasp_all_distal_links_reach_the_object(grasp):
    m, d = grasp
    d.mocap_pos[0, 2] = 3.5  # the lowest palm that does not overlap the object
    d.ctrl[:] = curl_inwards(m, 45, 90, 0)
    touched = set()
    for _ in range(400):
        mujoco.mj_step(m, d)
        touched |= {m.geom(g).name for c in d.contact for g in c.geom if c.dist < 0}
    assert {f"distal_{f}" for f in "1234"} <= touched
