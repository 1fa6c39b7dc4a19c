"""Which geoms can touch, and with which parameters: the same as in MuJoCo's contacts."""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np
import pytest

import brax_concurrent
from brax_concurrent.kernels.model import load_model, mix_pair

ASSETS = Path(brax_concurrent.__file__).parent / "envs" / "assets"
ROBOTS = ("ant", "grasp", "halfcheetah", "humanoid", "walker2d")

# Every filter of MuJoCo's in one model: masks, exclude, explicit pairs (one between a parent and its child,
# one that replaces a mixed pair, two that cannot act), bodies welded to the world, to each other and to a
# mocap body, parents whose child is filtered, a static parent whose child is not, and geoms of all types in
# both orders.
TANGLE = """
<mujoco>
  <compiler autolimits="true"/>
  <option {option}>{flag}</option>
  <default><geom {geom}/></default>
  <worldbody>
    <geom name="floor" type="plane" size="1 1 1"/>
    <geom name="post" type="capsule" size="0.1 0.5" pos="3 0 0"/>
    <body name="shelf" pos="0 3 0">
      <geom name="shelf" type="sphere" size="0.2"/>
      <body name="lid"><joint name="lid"/><geom name="lid" type="capsule" size="0.1 0.2"/></body>
    </body>
    <body name="hand" mocap="true" pos="0 0 2">
      <geom name="hand" type="capsule" size="0.2 0.2"/>
      <body name="glove"><geom name="glove" type="sphere" size="0.3"/>
        <body name="thumb" pos="0.4 0 0"><joint name="thumb"/><geom name="thumb" type="sphere" size="0.1"/>
          <body name="nail" pos="0.4 0 0">
            <joint name="nail"/><geom name="nail" type="sphere" size="0.1"/>
          </body>
        </body>
      </body>
    </body>
    <body name="cart" pos="0 0 1">
      <freejoint name="cart"/>
      <geom name="cart1" type="capsule" size="0.2 0.3"/>
      <geom name="cart2" type="sphere" size="0.25" pos="0.5 0 0"/>
      <geom name="decal" type="box" size="0.1 0.1 0.1" contype="0" conaffinity="0"/>
      <body name="handle" pos="0 0 0.5"><geom name="handle" type="sphere" size="0.1"/>
        <body name="rope" pos="0 0 0.5"><joint axis="1 1 0"/><joint pos="0 0 0.1" axis="0 3 0"/>
          <geom name="rope" type="capsule" size="0.05 0.2"/>
          <body name="knot" pos="0 0 0.4">
            <joint type="slide"/><geom name="knot" type="sphere" size="0.1"/>
          </body>
        </body>
      </body>
    </body>
    <body name="ghost" pos="2 2 2"><joint name="ghost"/>
      <geom name="ghost" type="sphere" size="0.1" contype="2" conaffinity="4"/></body>
    <body name="medium" pos="2 2 3"><joint name="medium"/>
      <geom name="medium" type="capsule" size="0.1 0.1" contype="1" conaffinity="2"/></body>
  </worldbody>
  <contact>
    <exclude body1="lid" body2="medium"/>
    <pair name="parent" geom1="rope" geom2="knot" condim="1" margin="{margin}" gap="0.01"/>
    <pair name="instead" geom1="cart2" geom2="floor" friction="0.5 0.6 0.01 0.02 0" margin="{margin}"
          solref="0.03 1.5" solimp="0.8 0.9 0.002 0.4 3"/>
    <pair name="same body" geom1="cart1" geom2="cart2" margin="{margin}"/>
    <pair name="both static" geom1="post" geom2="shelf" margin="{margin}"/>
  </contact>
</mujoco>
"""


def tangle(option: str = "", flag: str = "", geom: str = "", margin: str = "0.02") -> str:
    return TANGLE.format(option=option, flag=flag, geom=geom, margin=margin)


def path(robot: str) -> str:
    return str(ASSETS / f"{robot}.xml")


def mj_model(robot: str) -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_path(path(robot))


def swollen(mj: mujoco.MjModel) -> mujoco.MjData:
    """A state in which every geom is near enough to every other: MuJoCo reports all pairs it ever tests."""
    mj.geom_margin[:] = mj.pair_margin[:] = mj.body_margin[:] = 1000
    d = mujoco.MjData(mj)
    mujoco.mj_forward(mj, d)
    return d


def contact_pairs(d: mujoco.MjData) -> list[tuple[int, int]]:
    """The geom pairs of the contacts, in order, each once."""
    return list(dict.fromkeys((int(c.geom[0]), int(c.geom[1])) for c in d.contact))


# Pairs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("robot", "npair", "contacts", "nconmax", "njmax"),
    [
        ("ant", 13, 25, 16, 8 + 4 * 16),
        ("halfcheetah", 8, 16, 16, 6 + 4 * 16),
        ("walker2d", 7, 14, 14, 6 + 4 * 14),
        ("humanoid", 126, 190, 16, 17 + 4 * 16),
        ("grasp", 6, 6, 6, 16 + 4 * 6),
    ],
)
def test_pair_counts(robot, npair, contacts, nconmax, njmax):
    model = load_model(path(robot))
    assert model.npair == len(model.pair_geom) == npair
    assert model.pair_maxcontact.sum() == contacts
    assert (model.nconmax, model.njmax) == (nconmax, njmax)


def test_humanoid_pairs_by_type():
    model = load_model(path("humanoid"))
    types = [tuple(t) for t in model.geom_type[model.pair_geom].tolist()]
    assert {t: types.count(t) for t in types} == {(0, 3): 12, (0, 2): 5, (3, 3): 52, (2, 3): 47, (2, 2): 10}
    assert {t: set(model.pair_maxcontact[[k == t for k in types]]) for t in types} == {
        (0, 3): {2}, (0, 2): {1}, (3, 3): {2}, (2, 3): {1}, (2, 2): {1},
    }  # fmt: skip
    floor = np.array([t[0] == 0 for t in types])
    assert set(model.pair_condim[floor]) == {3}
    assert set(model.pair_condim[~floor]) == {1}


@pytest.mark.parametrize("robot", ROBOTS)
def test_pairs_are_those_that_mujoco_tests_in_its_order(robot):
    assert contact_pairs(swollen(mj_model(robot))) == [tuple(p) for p in load_model(path(robot)).pair_geom.tolist()]


@pytest.mark.parametrize("flag", ["", '<flag filterparent="disable"/>', '<flag midphase="disable"/>'])
def test_pairs_pass_the_same_filters_as_mujocos(flag):
    mj = mujoco.MjModel.from_xml_string(tangle(flag=flag, margin="1000", geom='margin="1000"'))
    model = load_model(tangle(flag=flag))
    names = model.geom_names
    expected = [(names[a], names[b]) for a, b in contact_pairs(swollen(mj))]
    # Pairs that cannot act are MuJoCo's to report and not ours.
    idle = [pair for pair in expected if set(pair) in ({"cart1", "cart2"}, {"post", "shelf"})]
    assert len(idle) == 2
    ours = [(names[a], names[b]) for a, b in model.pair_geom]
    assert ours == [pair for pair in expected if pair not in idle]
    assert len(set(ours)) == len(ours) > 25
    assert (("thumb", "nail") in ours) == ("filterparent" in flag)
    assert ("knot", "rope") in ours
    assert ("shelf", "lid") in ours
    assert ("lid", "medium") not in ours
    assert ("floor", "hand") not in ours
    assert ("ghost", "medium") in ours
    assert not any("decal" in p for p in ours)
    explicit = {ours[p]: model.pair_explicit[p] for p in range(model.npair) if model.pair_explicit[p] >= 0}
    assert set(explicit) == {("knot", "rope"), ("floor", "cart2")}
    for (a, b), k in explicit.items():
        assert {names.index(a), names.index(b)} == {mj.pair_geom1[k], mj.pair_geom2[k]}


def test_contacts_of_random_states_are_among_the_pairs():
    mj = mj_model("humanoid")
    model = load_model(mj)
    pairs = {tuple(p): int(most) for p, most in zip(model.pair_geom.tolist(), model.pair_maxcontact, strict=True)}
    rng = np.random.default_rng(0)
    d = mujoco.MjData(mj)
    seen: set[tuple[int, int]] = set()
    for _ in range(300):
        d.qpos[:] = rng.uniform(-2, 2, mj.nq)
        d.qpos[2] = rng.uniform(0, 1)
        mujoco.mj_forward(mj, d)
        contacts = [(int(c.geom[0]), int(c.geom[1])) for c in d.contact]
        seen |= set(contacts)
        assert all(contacts.count(pair) <= pairs[pair] for pair in contacts)
    assert len(seen) > 60


@pytest.mark.parametrize("flag", ["contact", "constraint"])
def test_without_contacts_there_are_no_pairs(flag):
    model = load_model(tangle(flag=f'<flag {flag}="disable"/>'))
    assert model.npair == model.nconmax == 0
    assert model.pair_geom.shape == (0, 2)


def test_nconmax():
    assert load_model(path("humanoid"), nconmax=40).nconmax == 40
    assert load_model(path("humanoid"), nconmax=40).njmax == 17 + 4 * 29 + 11  # 29 with the floor, the others condim 1
    assert load_model(path("humanoid"), nconmax=np.int64(4)).njmax == 17 + 4 * 4
    assert load_model(path("walker2d"), nconmax=100).nconmax == 14


# Parameters of a contact --------------------------------------------------------------------------


def check_mixing(source: str | Path) -> int:
    mj = source if isinstance(source, mujoco.MjModel) else mujoco.MjModel.from_xml_string(source)
    model = load_model(mj)
    rows = {tuple(p): k for k, p in enumerate(model.pair_geom.tolist())}
    d = mujoco.MjData(mj)
    mujoco.mj_forward(mj, d)
    compared = 0
    for contact in d.contact:
        p = rows.get((int(contact.geom[0]), int(contact.geom[1])))
        if p is None:
            continue
        mixed = mix_pair(model, p)
        assert mixed.dim == contact.dim == model.pair_condim[p]
        np.testing.assert_array_equal(mixed.friction, contact.friction)
        np.testing.assert_array_equal(mixed.solref, contact.solref)
        np.testing.assert_array_equal(mixed.solimp, contact.solimp)
        assert mixed.margin == contact.includemargin
        assert contact.dist < mixed.margin + mixed.gap
        assert bool(contact.exclude & 1) == (contact.dist >= mixed.margin)
        compared += 1
    return compared


# Pairs of balls in contact; the attributes of the two balls of each pair.
MIXES = {
    "friction, condim": ('friction="0.5 0.02 0.003" condim="1"', 'friction="0.4 0.03 0.001"'),
    "zero friction": ('friction="0 0 0"', 'friction="0 0 0"'),
    "priority": (
        'friction="0.5 0.1 0.1" priority="1" solref="0.03 0.8" condim="1"',
        'friction="2 2 2" solimp="0.5 0.6 0.1"',
    ),
    "priority 2": ('friction="0.5 0.1 0.1"', 'friction="0.1 0 0" priority="3" solref="0.03 0.8" condim="1"'),
    "solmix": (
        'solmix="3" solref="0.01 2" solimp="0.5 0.6 0.1"',
        'solmix="0.7" solref="0.05 0.5" solimp="0.1 0.9 0.01 0.3 4"',
    ),
    "solmix 0": ('solmix="0" solref="0.01 2"', 'solref="0.05 0.5"'),
    "solmix 1 0": ('solref="0.01 2"', 'solmix="0" solref="0.05 0.5"'),
    "solmix 0 0": ('solmix="0" solref="0.01 2"', 'solmix="0" solref="0.05 0.5"'),
    "direct solref": ('solref="-100 -3"', 'solref="-20 -9"'),
    "direct and standard": ('solref="-100 -3"', 'solref="0.05 0.5"'),
    "margins": ('margin="0.3"', 'margin="0.2"'),
    "gaps": ('margin="0.1" gap="0.2"', 'gap="0.3"'),
}


@pytest.mark.parametrize("case", MIXES)
def test_mixing_equals_mujocos_contacts(case):
    first, second = MIXES[case]
    apart = 0.45 if case in ("margins", "gaps") else -0.05
    source = f"""<mujoco><worldbody>
      <body><freejoint/><geom type="sphere" size="0.5" {first}/></body>
      <body pos="{1 + apart} 0 0"><freejoint/><geom type="sphere" size="0.5" {second}/></body>
    </worldbody></mujoco>"""
    assert check_mixing(source) == 1


def test_mixing_of_explicit_pairs_and_robots():
    assert check_mixing(tangle(margin="10", geom='margin="0.5" gap="3"')) > 30
    for robot in ROBOTS:
        mj = mj_model(robot)
        mj.geom_gap[:] = mj.body_margin[:] = 1000
        assert check_mixing(mj) >= load_model(mj).npair


def test_mix_pair_names_a_bad_index():
    model = load_model(path("ant"))
    for p in (-1, 13):
        with pytest.raises(IndexError, match=rf"p: expected a pair index in \[0, 13\), got {p}"):
            mix_pair(model, p)
