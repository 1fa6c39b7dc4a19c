"""Arguments of `make` and `Simulator`: the message names the argument, what was expected and what was given."""

from __future__ import annotations

import inspect
import re

import batches
import pendulum
import pytest

import brax_concurrent as bc
from brax_concurrent.envs.ant import Ant
from brax_concurrent.kernels.model import UnsupportedModelError


@pytest.mark.parametrize(
    ("name", "near"),
    [("ants", "'ant'"), ("Ant-v5", "'ant'"), ("half_cheetah", "'halfcheetah' or 'cheetah'"), ("walker", "'walker2d'")],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, near):
    with pytest.raises(ValueError, match=f"name: there is no task '{name}'; did you mean {near}. known: ant, grasp, "):
        bc.make(name)


def test_a_name_unlike_all_is_answered_with_all():
    with pytest.raises(
        ValueError, match=r"no task 'hopper'; known: ant, grasp, halfcheetah, humanoid, walker2d, cheetah"
    ):
        bc.make("hopper")
    with pytest.raises(TypeError, match="name: expected the name of a task, got 3"):
        bc.make(3)


def test_an_unknown_argument_is_answered_with_the_nearest():
    with pytest.raises(TypeError, match=r"no argument 'ctrl_cost' \(did you mean 'ctrl_cost_weight'\?\)"):
        bc.make("ant", ctrl_cost=1.0)
    with pytest.raises(TypeError, match="no argument 'render_mode' .*rendering"):
        bc.make("ant", render_mode="human")


def test_an_unknown_argument_is_answered_with_those_of_the_task_and_of_make():
    *own, task = inspect.signature(bc.make).parameters
    assert (own[0], task) == ("name", "task_arguments")
    own.remove("name")
    with pytest.raises(TypeError) as caught:
        bc.make("grasp", 4, schedular="sw")
    message = str(caught.value)
    assert message.startswith("grasp: there is no argument 'schedular' (did you mean 'scheduler'?); known: xml_file, ")
    assert sorted(message.partition("; of make: ")[2].split(", ")) == sorted(own)
    with pytest.raises(TypeError, match=r"a Task has its arguments already, got \['dtyp'\] \(did you mean 'dtype'\?\)"):
        bc.make(Ant(), dtyp="float64")
    with pytest.raises(TypeError, match=r"got \['backnd'\] beside it \(did you mean 'backend'\?\)"):
        bc.make({"ant": 4}, backnd="cpu")
    with pytest.raises(
        TypeError, match=r"no argument 'nconmx' .*'nconmax'.*; of make: per_env, max_episode_steps, nconmax$"
    ):
        bc.make({"ant": (4, {"nconmx": 5})})


@pytest.mark.parametrize("num_envs", [0, -1, 1.5, True, "4", None])
def test_a_batch_has_at_least_one_environment(num_envs):
    message = re.escape(f"num_envs: expected a whole number of at least 1, got {num_envs!r}")
    with pytest.raises(ValueError, match=message):
        bc.make("walker2d", num_envs)
    with pytest.raises(ValueError, match=message):
        bc.Simulator(pendulum.PENDULUM, num_envs)


BAD = {
    "backend": [("gpu", "backend: expected 'auto', 'cpu' or 'cuda', got 'gpu'"), (None, "got None")],
    "dtype": [("float16", "dtype: expected one of ('float32', 'float64'), got 'float16'"), (None, "got None")],
    "threads": [
        (-1, "threads: expected a whole number of at least 0, got -1"),
        (1.5, "threads: expected a whole number of at least 0, got 1.5"),
    ],
    "nconmax": [(0, "nconmax: expected "), (-3, "got -3")],
    "per_env": [
        (("mass",), "per_env: 'mass' is no real-valued quantity of the model; known: actuator_biasprm, "),
        (("body_parentid",), "per_env: 'body_parentid' is no real-valued quantity of the model"),
        ("body_mass", "per_env: expected a sequence of names, got the string 'body_mass'"),
    ],
}
ONLY_MAKE = {
    "scheduler": [("fastest", "scheduler: expected one of ('serial'"), (None, "got None")],
    "granularity": [("fine", "granularity: expected 'auto' or one of ('stage', 'substep', 'step'), got 'fine'")],
    "autoreset": [("no", "autoreset: expected True or False, got 'no'")],
    "max_episode_steps": [
        (0, "max_episode_steps: expected a whole number of at least 1, got 0"),
        (2.5, "max_episode_steps: expected a whole number of at least 1, got 2.5"),
    ],
    "xml_file": [
        (
            "nowhere.xml",
            "xml_file: expected 'ant.xml' (the file of this package), MJCF text or the path of an MJCF file",
        ),
        (3, "xml_file: expected an MJCF path, MJCF text or a mujoco.MjModel, got int"),
    ],
}
ONLY_SIMULATOR = {
    "rk4_rotation": [("exact", "rk4_rotation: expected one of ('munthe-kaas', 'plain'), got 'exact'")],
    "fields": [
        (("xpo",), "fields: 'xpo' is no field; nearest: ['xpos', 'xipos'], all: ['actuator_force', "),
        ("xpos", "fields: expected a sequence of names, got the string 'xpos'"),
    ],
}


def cases(*tables):
    return [(name, value, message) for table in tables for name, bad in table.items() for value, message in bad]


@pytest.mark.parametrize(("argument", "value", "message"), cases(BAD, ONLY_MAKE))
def test_arguments_of_make(argument, value, message):
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=re.escape(message)):
        bc.make("ant", 4, **{argument: value})


@pytest.mark.parametrize(("argument", "value", "message"), cases(BAD, ONLY_SIMULATOR))
def test_arguments_of_simulator(argument, value, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        bc.Simulator(pendulum.PENDULUM, 4, **{argument: value})


def test_double_precision_needs_jaxs():
    for make in (lambda: bc.make("ant", dtype="float64"), lambda: bc.Simulator(pendulum.PENDULUM, 1, dtype="float64")):
        with pytest.raises(ValueError, match=r"'float64' needs jax.config.update\('jax_enable_x64', True\)"):
            make()
        with batches.precision("float64"):
            make()


def test_a_gpu_must_be_there():
    with pytest.raises(ValueError, match="backend: 'cuda' needs JAX on a CUDA GPU; it computes on 'cpu'"):
        bc.make("ant", backend="cuda")


def test_a_task_brings_its_own_arguments():
    with pytest.raises(TypeError, match=r"a Task has its arguments already, got \['frame_skip', 'nconmax'\]"):
        bc.make(Ant(), frame_skip=3, nconmax=4)


MANY_FAULTS = """
<mujoco>
  <option cone="elliptic"/>
  <worldbody>
    <body name="cart"><joint name="socket" type="ball"/><geom name="crate" type="box" size="1 1 1"/></body>
    <body name="wheel"><joint name="axle"/><geom size="0.1"/></body>
  </worldbody>
  <equality><joint joint1="axle"/></equality>
</mujoco>
"""


def test_an_unsupported_model_is_refused_with_all_that_is_unsupported():
    for make in (lambda: bc.Simulator(MANY_FAULTS, 1), lambda: bc.make("halfcheetah", xml_file=MANY_FAULTS)):
        with pytest.raises(UnsupportedModelError) as caught:
            make()
        for part in ("4 unsupported", "'socket'", "ball", "'crate'", "box", "elliptic", "equality"):
            assert part in str(caught.value)


def test_text_that_mujoco_cannot_compile():
    with pytest.raises(ValueError, match="MuJoCo cannot compile this MJCF text: XML Error: Schema violation"):
        bc.Simulator("<mujoco><wings/></mujoco>", 1)
    with pytest.raises(FileNotFoundError, match=r"found nothing at 'nowhere.xml'"):
        bc.Simulator("nowhere.xml", 1)
