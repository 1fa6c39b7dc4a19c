"""Compiled streams on disk: later processes start from them, and what does not fit or is damaged is not used."""

from __future__ import annotations

import itertools
import shutil
import threading
from pathlib import Path

import batches
import mujoco
import numpy as np
import physics
import pytest

import brax_concurrent as bc
from brax_concurrent.backends import cpu, objects
from brax_concurrent.backends.objects import ObjectCache
from brax_concurrent.envs import program
from brax_concurrent.envs.halfcheetah import HalfCheetah

pytestmark = pytest.mark.xdist_group("cache")

PENDULUM = """
<mujoco>
  <worldbody>
    <geom type="plane" size="1 1 1"/>
    <body pos="0 0 0.15"><joint name="swing" axis="0 1 0"/><geom size="0.1" pos="0.2 0 0"/></body>
  </worldbody>
  <actuator><motor joint="swing" ctrlrange="-1 1"/></actuator>
</mujoco>
"""

COUNT = """
import json, os
import jax
import jax.numpy as jnp
import numpy as np
import brax_concurrent as bc
from brax_concurrent.backends import cpu
from brax_concurrent.envs import program

counts = {"traced": 0, "compiled": 0}

def counted(what, function):
    def wrapper(*args):
        counts[what] += 1
        return function(*args)
    return wrapper

program.specialize = counted("traced", program.specialize)
cpu._compile = counted("compiled", cpu._compile)

def report(*arrays):
    print(json.dumps([counts, [np.asarray(x).tobytes().hex() for x in arrays]]))
"""

SIMULATE = """
sim = bc.Simulator(os.environ["MODEL"], 40, ("xpos", "ncon"), backend="cpu")
state = sim.reset()
for _ in range(50):
    state = sim.step(state, jnp.full((40, 1), 0.5))
report(state.qpos, state.xpos)
"""

ENVIRONMENT = """
env = bc.make("halfcheetah", 40, backend="cpu", xml_file=os.environ["MODEL"])
state = env.step(env.reset(jax.random.key(0)), jnp.full((40, 1), 0.5))
report(state.obs)
"""


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def run(code: str, directory: Path) -> tuple[dict[str, int], list[str]]:
    """How often a process traced and compiled, and the bits that it got."""
    return tuple(batches.run_python(COUNT + code, MODEL=PENDULUM, BRAX_CONCURRENT_CACHE=str(directory)))


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A directory that one process has filled, what it counted and the bits that it got."""
    directory = tmp_path_factory.mktemp("filled")
    return directory, *run(SIMULATE, directory)


@pytest.fixture
def copy(filled, tmp_path):
    shutil.copytree(filled[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


# ---- Processes


@pytest.mark.slow
def test_a_later_process_neither_traces_nor_compiles_and_has_the_same_bits(filled):
    directory, counts, bits = filled
    before = {path: path.stat().st_mtime_ns for path in files(directory)}
    assert counts["traced"] == 2
    assert counts["compiled"] >= len(before) - 2 > 10  # kernels without work are alike, and may be compiled at once
    assert run(SIMULATE, directory) == ({"traced": 0, "compiled": 0}, bits)
    assert {path: path.stat().st_mtime_ns for path in files(directory)} == before


@pytest.mark.slow
def test_so_it_is_with_an_environment(tmp_path):
    counts, bits = run(ENVIRONMENT, tmp_path)
    assert counts["traced"] == 2
    assert run(ENVIRONMENT, tmp_path) == ({"traced": 0, "compiled": 0}, bits)


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


DAMAGES = (_flip, lambda data: data[:-100], lambda data: b"", lambda data: data + b"\0")


@pytest.mark.slow
def test_damaged_files_are_compiled_again_and_replaced(filled, copy):
    _, _, bits = filled
    damaged = files(copy)
    for path, damage in zip(damaged, itertools.cycle(DAMAGES), strict=False):
        path.write_bytes(damage(path.read_bytes()))
    counts, found = run(SIMULATE, copy)
    assert found == bits
    assert counts["traced"] == 2
    assert counts["compiled"] >= len(damaged) - 2
    assert files(copy) == damaged
    assert all(ObjectCache(copy).get(path.name) is not None for path in damaged)


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_kind_of_damage_is_noticed(damage, tmp_path):
    cache = ObjectCache(tmp_path)
    cache.put("key", bytes(range(250)))
    assert cache.get("key") == bytes(range(250))
    (path,) = files(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get("key") is None


def test_files_that_changed_places_are_not_taken_for_each_other(copy):
    first, second, *_ = files(copy)
    first.write_bytes(second.read_bytes())
    assert ObjectCache(copy).get(first.name) is None
    assert ObjectCache(copy).get(second.name) is not None


@pytest.mark.slow
def test_processes_that_start_at_once_do_not_disturb_each_other(filled, tmp_path):
    _, _, bits = filled
    found = []
    threads = [threading.Thread(target=lambda: found.append(run(SIMULATE, tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [other for _, other in found] == [bits] * 2
    assert {path.name for path in files(tmp_path)} == {path.name for path in files(filled[0])}
    assert all(ObjectCache(tmp_path).get(path.name) is not None for path in files(tmp_path))


# ---- The directory


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_a_directory_that_cannot_be_used_only_costs_time(place, tmp_path, monkeypatch):
    blocked = tmp_path / "blocked"
    blocked.write_bytes(b"not a directory")
    monkeypatch.setenv(objects.ENVIRONMENT, str(blocked if place == "a file" else blocked / "below"))
    sim = batches.simulator(PENDULUM, 3, dtype="float32")
    assert np.isfinite(sim.step(sim.reset()).qpos).all()
    assert files(tmp_path) == [blocked]


def test_a_full_disk_leaves_no_half_files(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(objects.os, "replace", fail)
    cache = ObjectCache(tmp_path)
    cache.put("key", b"data")
    assert cache.get("key") is None
    assert files(tmp_path) == []


def test_where_the_directory_is(tmp_path, monkeypatch):
    monkeypatch.setenv(objects.ENVIRONMENT, str(tmp_path / "own"))
    assert objects.default_directory() == tmp_path / "own"
    monkeypatch.delenv(objects.ENVIRONMENT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert objects.default_directory() == tmp_path / "xdg" / "brax_concurrent"
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    cache = ObjectCache()
    cache.put("key", b"data")
    assert cache.get("key") is None


# ---- What must differ


@pytest.fixture
def traced(tmp_path, monkeypatch):
    """An empty cache, and the list of streams that were traced since."""
    monkeypatch.setenv(objects.ENVIRONMENT, str(tmp_path))
    calls = []
    original = program.specialize
    monkeypatch.setattr(program, "specialize", lambda *args: calls.append(args) or original(*args))
    return calls


def pendulum(model=PENDULUM, **arguments):
    return batches.simulator(model, 3, **{"dtype": "float32", "fields": ("xpos",)} | arguments)


OTHERS = {
    "model": lambda: pendulum(PENDULUM.replace("0.2 0 0", "0.21 0 0")),
    "fields": lambda: pendulum(fields=("xpos", "xquat")),
    "dtype": lambda: pendulum(dtype="float64"),
    "per_env": lambda: pendulum(per_env=("body_mass",)),
    "rk4_rotation": lambda: pendulum(rk4_rotation="plain"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_argument_is_another_file(what, traced):
    for make, count in ((pendulum, 1), (pendulum, 1), (OTHERS[what], 2), (OTHERS[what], 2), (pendulum, 2)):
        sim = make()
        with batches.precision(sim.dtype.name):
            sim.reset()
        assert len(traced) == count


def test_the_number_of_threads_and_of_simulations_is_no_part_of_it(traced):
    pendulum().reset()
    pendulum(threads=1).reset()
    batches.simulator(PENDULUM, 77, ("xpos",), "float32").reset()
    assert len(traced) == 1


@pytest.mark.parametrize("change", ["source_fingerprint", "target"])
def test_another_source_or_processor_is_another_file(change, traced, monkeypatch):
    pendulum().reset()
    owner = program if change == "source_fingerprint" else cpu
    monkeypatch.setattr(owner, change, lambda: "another")
    pendulum().reset()
    assert len(traced) == 2


def test_the_source_fingerprint_sees_every_change(tmp_path, monkeypatch):
    package = tmp_path / "package"
    shutil.copytree(Path(bc.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(program, "__file__", str(package / "envs" / "program.py"))
    seen = [program.source_fingerprint.__wrapped__()]
    assert program.source_fingerprint() in seen
    target = package / "kernels" / "solver.py"
    target.write_text(target.read_text() + "\n")
    seen.append(program.source_fingerprint.__wrapped__())
    target.rename(target.with_name("solver2.py"))
    seen.append(program.source_fingerprint.__wrapped__())
    (package / "envs" / "new.py").write_text("")
    seen.append(program.source_fingerprint.__wrapped__())
    assert len(set(seen)) == 4


def swapped_names() -> mujoco.MjModel:
    """The ant with the names of two bodies swapped."""
    spec = mujoco.MjSpec.from_file(str(physics.ASSETS / "ant.xml"))
    bodies = [spec.body(name) for name in ("front_left_leg", "front_right_leg")]
    for body, name in zip(bodies, ("other", "front_left_leg"), strict=True):
        body.name = name
    bodies[0].name = "front_right_leg"
    return spec.compile()


VARIANTS = {
    "plain": lambda: bc.make("ant"),
    "task": lambda: bc.make("walker2d"),
    "argument": lambda: bc.make("ant", ctrl_cost_weight=0.25),
    "range": lambda: bc.make("ant", healthy_z_range=(0.2, 1.1)),
    "frame_skip": lambda: bc.make("ant", frame_skip=3),
    "main_body": lambda: bc.make("ant", main_body="front_left_leg"),
    "main_body of another name": lambda: bc.make("ant", xml_file=swapped_names(), main_body="front_left_leg"),
    "max_episode_steps": lambda: bc.make("ant", max_episode_steps=7),
    "nconmax": lambda: bc.make("ant", nconmax=3),
    "autoreset": lambda: bc.make("ant", autoreset=False),
    "per_env": lambda: bc.make("ant", per_env=("body_mass",)),
}


def test_environments_that_differ_have_other_identities():
    seen = []
    for make in VARIANTS.values():
        seen += [make().stream(kind)[1] for kind in ("control_step", "reset_all", "reset_where", "restart")]
    assert None not in seen
    assert len(set(seen)) == len(seen) == 4 * len(VARIANTS)


def test_a_users_own_task_is_not_kept_whole(traced):
    class Own(HalfCheetah):
        pass

    assert Own().identity() is None
    assert HalfCheetah().identity() is not None
