"""What the kernels cannot do is refused when a model is loaded: by MJCF's names, and all of it at once."""

from __future__ import annotations

import mujoco
import pytest

from brax_concurrent.kernels.model import UnsupportedModelError, load_model

ROBOT = """
<mujoco model="probe">
  <compiler autolimits="true"/>
  <extension>{extension}</extension>
  <option {option}>{flag}</option>
  <asset>
    <mesh name="tetra" vertex="0 0 0  1 0 0  0 1 0  0 0 1"/>
    <hfield name="hills" nrow="2" ncol="2" size="1 1 1 1" elevation="0 1 1 0"/>
  </asset>
  <worldbody>
    <geom name="floor" type="plane" size="1 1 1"/>
    <site name="anchor" pos="0 0 2"/>
    {world}
    <body name="base" pos="0 0 1" {body}>
      <freejoint name="root"/>
      <geom name="base" size="0.1"/>
      <site name="base"/>
      {child}
      <body name="arm">
        <joint name="elbow" axis="0 1 0" {joint}/>
        <geom name="arm" type="capsule" size="0.05 0.2" {geom}/>
        <site name="arm"/>
      </body>
    </body>
  </worldbody>
  <contact>{contact}</contact>
  <tendon>{tendon}</tendon>
  <equality>{equality}</equality>
  <actuator>{actuator}</actuator>
  <sensor>{sensor}</sensor>
</mujoco>
"""
PARTS = [
    "extension",
    "option",
    "flag",
    "world",
    "body",
    "child",
    "joint",
    "geom",
    "contact",
    "tendon",
    "equality",
    "actuator",
    "sensor",
]


def robot(**parts: str) -> str:
    return ROBOT.format(**(dict.fromkeys(PARTS, "") | parts))


def fixed(attributes: str) -> dict[str, str]:
    return {"tendon": f'<fixed name="t" {attributes}><joint joint="elbow" coef="1"/></fixed>'}


def act(element: str) -> dict[str, str]:
    return {"actuator": element}


# What is put into the probe, and what the error must say about it.
REFUSED: dict[str, tuple[dict[str, str], str]] = {
    # options
    "implicit": ({"option": 'integrator="implicit"'}, "option integrator='implicit'"),
    "implicitfast": ({"option": 'integrator="implicitfast"'}, "option integrator='implicitfast'"),
    "discrete": ({"option": 'integrator="discrete"'}, "option integrator='discrete'"),
    "elliptic": ({"option": 'cone="elliptic"'}, "option cone='elliptic'"),
    "density": ({"option": 'density="1.2"'}, "option density=1.2"),
    "viscosity": ({"option": 'viscosity="0.1"'}, "option viscosity=0.1"),
    "noslip": ({"option": 'noslip_iterations="3"'}, "option noslip_iterations=3"),
    "override": ({"flag": '<flag override="enable"/>'}, "option flag override='enable'"),
    "sleep": ({"flag": '<flag sleep="enable"/>'}, "option flag sleep='enable'"),
    "diagexact": ({"flag": '<flag diagexact="enable"/>'}, "option flag diagexact='enable'"),
    "ipc": ({"option": 'integrator="discrete"', "flag": '<flag ipc="enable"/>'}, "option flag ipc='enable'"),
    "speculative": ({"flag": '<flag speculative="enable"/>'}, "option flag speculative='enable'"),
    # bodies and joints
    "gravcomp": ({"body": 'gravcomp="0.5"'}, "body 'base' gravcomp=0.5"),
    "ball": (
        {"child": "<body><joint name='b' type='ball'/><geom size='0.1'/></body>"},
        "joint 'b' type='ball'",
    ),
    "nameless ball": (
        {"child": "<body><joint type='ball'/><geom size='0.1'/></body>"},
        "joint #1 type='ball'",
    ),
    "frictionloss": ({"joint": 'frictionloss="0.2"'}, "joint 'elbow' frictionloss=0.2"),
    "stiffness poly": ({"joint": 'stiffness="1 2"'}, "joint 'elbow' stiffness with polynomial coefficients"),
    "damping poly": ({"joint": 'damping="1 2"'}, "joint 'elbow' damping with polynomial coefficients"),
    "yield": ({"joint": 'stiffness="1" springyield="0.3"'}, "joint 'elbow' springyield=0.00523599"),
    "joint force": ({"joint": 'actuatorfrcrange="-1 1"'}, "joint 'elbow' actuatorfrcrange"),
    "margin": (
        {"joint": 'range="-10 10" margin="0.2"'},
        "joint 'elbow' margin=0.2 with a range 0.349066 wide",
    ),
    "limit solref": (
        {"joint": 'range="-10 10" solreflimit="0.02 -1"'},
        "joint 'elbow' solreflimit='0.02 -1'",
    ),
    "free spring": (
        {"world": "<body><joint name='f' type='free' stiffness='2'/><geom size='0.1'/></body>"},
        "joint 'f' type='free' with stiffness=2",
    ),
    # geoms and pairs
    "box": ({"world": "<geom name='g' type='box' size='1 1 1'/>"}, "geom 'g' type='box'"),
    "cylinder": ({"world": "<geom name='g' type='cylinder' size='1 1'/>"}, "geom 'g' type='cylinder'"),
    "ellipsoid": ({"world": "<geom name='g' type='ellipsoid' size='1 1 1'/>"}, "geom 'g' type='ellipsoid'"),
    "mesh": ({"world": "<geom name='g' type='mesh' mesh='tetra'/>"}, "geom 'g' type='mesh'"),
    "hfield": ({"world": "<geom name='g' type='hfield' hfield='hills'/>"}, "geom 'g' type='hfield'"),
    "affinity only": (
        {"world": "<geom name='g' type='box' size='1 1 1' contype='0'/>"},
        "geom 'g' type='box'",
    ),
    "box in a pair": (
        {
            "child": "<geom name='g' type='box' size='1 1 1' contype='0' conaffinity='0'/>",
            "contact": "<pair geom1='floor' geom2='g'/>",
        },
        "geom 'g' type='box'",
    ),
    "mocap plane": (
        {"world": "<body mocap='true'><geom name='g' type='plane' size='1 1 1'/></body>"},
        "geom 'g' type='plane' on a body that is not fixed to the world",
    ),
    "condim 4": ({"geom": 'condim="4"'}, "geom 'arm' condim=4"),
    "condim 6": ({"geom": 'condim="6"'}, "geom 'arm' condim=6"),
    "adhesion": ({"geom": 'adhesion="2"'}, "geom 'arm' adhesion=2"),
    "surfacevel": ({"geom": 'surfacevel="1 0 0 0 0 0"'}, "geom 'arm' surfacevel='1 0 0 0 0 0'"),
    "solref": ({"geom": 'solref="0.02 -1"'}, "geom 'arm' solref='0.02 -1'"),
    "pair condim": (
        {"contact": "<pair name='p' geom1='floor' geom2='arm' condim='4'/>"},
        "pair 'p' condim=4",
    ),
    "pair adhesion": (
        {"contact": "<pair name='p' geom1='floor' geom2='arm' adhesion='1'/>"},
        "pair 'p' adhesion=1",
    ),
    "pair solref": (
        {"contact": "<pair name='p' geom1='floor' geom2='arm' solref='-1 1'/>"},
        "pair 'p' solref='-1 1'",
    ),
    # tendons
    "tendon limit": (fixed('range="-1 1"'), "tendon 't' limited='true'"),
    "tendon spring": (fixed('stiffness="3"'), "tendon 't' stiffness='3'"),
    "tendon spring poly": (fixed('stiffness="0 3"'), "tendon 't' stiffnesspoly='3 0'"),
    "tendon damping": (fixed('damping="3"'), "tendon 't' damping='3'"),
    "tendon frictionloss": (fixed('frictionloss="3"'), "tendon 't' frictionloss='3'"),
    "tendon armature": (fixed('armature="3"'), "tendon 't' armature='3'"),
    "tendon yield": (fixed('stiffness="3" springyield="0.3"'), "tendon 't' springyield='0.3'"),
    "tendon force": (fixed('actuatorfrcrange="-1 1"'), "tendon 't' actuatorfrcrange"),
    "spatial": (
        {"tendon": "<spatial name='t'><site site='anchor'/><site site='arm'/></spatial>"},
        "tendon 't' is spatial",
    ),
    # equality
    "connect": ({"equality": "<connect name='e' body1='arm' anchor='0 0 0'/>"}, "equality 'e' (connect)"),
    "weld": ({"equality": "<weld body1='arm'/>"}, "equality #0 (weld)"),
    "inactive": ({"equality": "<joint name='e' joint1='elbow' active='false'/>"}, "equality 'e' (joint)"),
    # actuators
    "tendon motor": (
        {**fixed(""), "actuator": "<motor name='a' tendon='t'/>"},
        "actuator 'a' transmission='tendon'",
    ),
    "site motor": (act("<motor name='a' site='arm'/>"), "actuator 'a' transmission='site'"),
    "crank": (
        act("<motor name='a' cranksite='arm' slidersite='base' cranklength='1'/>"),
        "actuator 'a' transmission='slidercrank'",
    ),
    "gripper": (act("<adhesion name='a' body='arm' ctrlrange='0 1'/>"), "actuator 'a' transmission='body'"),
    "free motor": (act("<motor name='a' joint='root'/>"), "actuator 'a' acts on joint 'root'"),
    "muscle": (act("<muscle name='a' joint='elbow' lengthrange='0 1'/>"), "actuator 'a' dyntype='muscle'"),
    "damper": (
        act("<damper name='a' joint='elbow' kv='1' ctrlrange='0 1'/>"),
        "actuator 'a' gaintype='affine'",
    ),
    "cylinder actuator": (act("<cylinder name='a' joint='elbow'/>"), "actuator 'a' dyntype='filter'"),
    "intvelocity": (
        act("<intvelocity name='a' joint='elbow' actrange='0 1'/>"),
        "actuator 'a' dyntype='integrator'",
    ),
    "filtered servo": (
        act("<position name='a' joint='elbow' timeconst='0.1'/>"),
        "actuator 'a' dyntype='filterexact'",
    ),
    "pid": (act("<pid name='a' joint='elbow' kp='1' ki='1'/>"), "actuator 'a' gaintype='pid'"),
    "two controls": (
        act("<pid name='a' joint='elbow' kp='1'/>"),
        "actuator 'a' with 2 controls and 1 outputs",
    ),
    "dcmotor": (
        act("<dcmotor name='a' joint='elbow' motorconst='1' resistance='1'/>"),
        "actuator 'a' biastype='dcmotor'",
    ),
    "user": (act("<general name='a' joint='elbow' gaintype='user'/>"), "actuator 'a' gaintype='user'"),
    "delay": (act("<motor name='a' joint='elbow' delay='0.1' nsample='60'/>"), "actuator 'a' delay=0.1"),
    "actuator damping": (act("<motor name='a' joint='elbow' damping='2'/>"), "actuator 'a' damping=2"),
    "actuator armature": (act("<motor joint='elbow' armature='2'/>"), "actuator #0 armature=2"),
    # the rest
    "flex": (
        {"world": "<flexcomp name='rag' type='grid' count='3 3 1' spacing='.1 .1 .1' dim='2' mass='1'/>"},
        "flex 'rag'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    parts, said = REFUSED[case]
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(robot(**parts))
    assert any(feature.startswith(said) for feature in caught.value.features), str(caught.value)
    assert isinstance(caught.value, ValueError)
    for feature in caught.value.features:
        assert feature in str(caught.value)


def test_the_probe_itself_is_supported():
    """So that every refusal above is due to the part that was added."""
    model = load_model(robot())
    assert (model.name, model.nv, model.npair) == ("probe", 7, 2)


def test_all_reasons_are_listed_at_once():
    parts = (
        "ball",
        "condim 4",
        "frictionloss",
        "elliptic",
        "connect",
        "muscle",
        "tendon limit",
        "sleep",
        "box",
    )
    combined: dict[str, str] = {}
    for case in parts:
        for part, text in REFUSED[case][0].items():
            combined[part] = combined.get(part, "") + " " + text
    with pytest.raises(UnsupportedModelError, match=r"model 'probe' uses 1[0-9] unsupported") as caught:
        load_model(robot(**combined))
    for case in parts:
        assert any(feature.startswith(REFUSED[case][1]) for feature in caught.value.features), case


def test_a_model_without_joints_is_refused():
    with pytest.raises(UnsupportedModelError, match="no joints"):
        load_model("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")


def test_plugins_are_refused():
    plugin = robot(
        extension="<plugin plugin='mujoco.pid'><instance name='servo'/></plugin>",
        actuator="<plugin name='a' joint='elbow' plugin='mujoco.pid' instance='servo'/>",
    )
    try:
        mj = mujoco.MjModel.from_xml_string(plugin)
    except ValueError as error:  # pragma: no cover - depends on how MuJoCo was packaged
        pytest.skip(f"MuJoCo came without its plugins: {error}")
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(mj)
    assert {"plugin 'servo'", "actuator 'a' plugin"} <= set(caught.value.features)


HARMLESS = {
    "PGS": {"option": 'solver="PGS"'},
    "CG": {"option": 'solver="CG"'},
    "energy": {"flag": '<flag energy="enable" fwdinv="enable"/>'},
    "no autoreset": {"flag": '<flag autoreset="disable" island="disable" multiccd="disable" sensor="disable"/>'},
    "visual box": {"child": "<geom type='box' size='1 1 1' contype='0' conaffinity='0' condim='6'/>"},
    "visual mesh": {"world": "<geom type='mesh' mesh='tetra' contype='0' conaffinity='0'/>"},
    "visual mocap plane": {
        "world": "<body mocap='true'><geom type='plane' size='1 1 1' contype='0' conaffinity='0'/></body>"
    },
    "wide limit": {"joint": 'range="-10 10" margin="0.17"'},
    "direct limit": {"joint": 'range="-10 10" solreflimit="-100 -1"'},
    "unlimited margin": {"joint": 'margin="9"'},
    "free damping": {"world": "<body><joint type='free' damping='2' armature='1'/><geom size='0.1'/></body>"},
    "info tendon": fixed(""),
    "ignored friction": {"joint": 'frictionloss="1"', "flag": '<flag frictionloss="disable"/>'},
    "ignored equality": {
        "equality": "<connect body1='arm' anchor='0 0 0'/>",
        "flag": '<flag equality="disable"/>',
    },
    "servo": act("<position joint='elbow' kp='3' dampratio='1' ctrlrange='-1 1' forcerange='-2 2'/>"),
    "velocity": act("<velocity jointinparent='elbow' kv='3'/>"),
    "general": act("<general joint='elbow' biastype='affine' gainprm='2' biasprm='1 2 3' gear='4'/>"),
    "sensor": {"sensor": "<jointpos joint='elbow'/><touch site='arm'/>"},
    "mocap": {"world": "<body mocap='true'><geom size='1'/><body><joint/><geom size='0.1'/></body></body>"},
}


@pytest.mark.parametrize("case", HARMLESS)
def test_harmless_features_load(case):
    assert load_model(robot(**HARMLESS[case])).nv >= 7


def test_the_refused_integrator_may_be_replaced():
    source = robot(option='integrator="implicit"')
    assert load_model(source, integrator="rk4").opt.integrator == "rk4"
