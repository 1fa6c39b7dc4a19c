"""Tuning: what is tried, what is found, and that `make` takes what is remembered."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import pytest

import brax_concurrent as bc
from brax_concurrent.backends.objects import ObjectCache
from brax_concurrent.envs import tuned
from brax_concurrent.envs.arrays import GRANULARITIES
from brax_concurrent.scheduler.schedule import SCHEDULERS, Schedule, schedulers_on
from brax_concurrent.training import tune as tuning
from brax_concurrent.training.measure import Throughput

jax.config.update("jax_platforms", "cpu")

pytestmark = pytest.mark.xdist_group("tune")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("BRAX_CONCURRENT_CACHE", str(tmp_path))
    return ObjectCache().directory


def fake_rates(monkeypatch, rates):
    """`tune` finds these instead of measuring: env steps/s by granularity."""

    def compare(envs, **_):
        return [Throughput((rates[env.granularity],) * 3, 2, env.num_envs, 0.5) for env in envs]

    monkeypatch.setattr(tuning, "compare", compare)


@pytest.mark.slow
def test_tune_measures_every_candidate(monkeypatch):
    kept = []
    monkeypatch.setattr(tuned, "remember", lambda where, candidates: kept.extend(candidates))  # not by whoever tests
    found = bc.tune("grasp", 64, repeats=2, seconds=0.01)
    tried = [(one.settings["scheduler"], one.settings["granularity"]) for one in found.candidates]
    assert set(itertools.product(schedulers_on("cpu"), GRANULARITIES)) <= set(tried)
    rates = [one.throughput.median for one in found.candidates]
    assert rates == sorted(rates, reverse=True)
    assert found.settings == found.alike[0].settings
    assert found.candidates[0] in found.alike
    assert (found.num_envs, found.backend) == (64, "cpu")
    measured = [(one.settings, one.throughput.samples) for one in found.candidates]
    assert sorted(kept, key=repr) == sorted(measured, key=repr)
    assert all(len(one.throughput.samples) == 2 for one in found.candidates)


def test_make_takes_what_is_remembered(monkeypatch, cache):
    assert bc.make("grasp", 64).granularity == "stage"
    fake_rates(monkeypatch, {"stage": 1.0, "substep": 3.0, "step": 2.0})
    assert bc.tune("grasp", 64).settings["granularity"] == "substep"
    env = bc.make("grasp", 64, scheduler="auto", granularity="auto")
    assert (env.scheduler, env.granularity) == (SCHEDULERS[0], "substep")
    assert bc.make("grasp", 64).granularity == "substep"
    assert bc.make("grasp", 50).granularity == "substep"  # to the next power of two
    assert bc.make({"grasp": 64}).envs["grasp"].granularity == "substep"
    assert bc.make("grasp", 64, granularity="step").granularity == "step"


@pytest.mark.parametrize(
    "other",
    [
        {"num_envs": 128},
        {"num_envs": 45},
        {"threads": 1234},
        {"frame_skip": 2},
        {"per_env": ("body_mass",)},
        {"name": "halfcheetah"},
    ],
)
def test_other_situations_are_not_meant(monkeypatch, cache, other):
    fake_rates(monkeypatch, {"stage": 1.0, "substep": 3.0, "step": 2.0})
    bc.tune("grasp", 64)
    assert bc.make(**{"name": "grasp", "num_envs": 64, **other}).granularity == "stage"


def test_a_setting_that_is_given_is_kept(monkeypatch, cache):
    fake_rates(monkeypatch, {"stage": 1.0, "substep": 3.0, "step": 2.0})
    found = bc.tune("grasp", 64, granularity="step")
    assert {one.settings["granularity"] for one in found.candidates} == {"step"}
    assert bc.make("grasp", 64).granularity == "step"  # the memory has nothing else


def test_a_scheduler_that_is_given_takes_its_own_best(monkeypatch, cache):
    monkeypatch.setattr(tuned, "SCHEDULERS", ("serial", "quick"))
    where = bc.make("grasp", 64)._situation
    quick = {"scheduler": "quick", "granularity": "step", "window": 8}
    tuned.remember(where, [({"scheduler": "serial", "granularity": "substep"}, [1.0]), (quick, [2.0])])
    auto = {"scheduler": "auto", "granularity": "auto", "window": None}
    assert tuned.recall(auto, where) == quick
    assert tuned.recall({**auto, "window": 16}, where) == {
        "scheduler": "serial",
        "granularity": "substep",
        "window": 16,
    }
    assert tuned.recall({**auto, "scheduler": "serial"}, where)["granularity"] == "substep"
    assert tuned.recall({**auto, "granularity": "stage"}, where) == {
        **auto,
        "granularity": "stage",
        "scheduler": "serial",
    }
    monkeypatch.setattr(tuned, "SCHEDULERS", ("serial",))  # a scheduler that is no more
    assert tuned.recall(auto, where)["granularity"] == "substep"


def test_make_regroups_where_that_was_measured_best(monkeypatch, cache):
    def compare(envs, **_):
        rates = [3.0 if env.schedule.regroup else 2.0 if env.scheduler == "hw" else 1.0 for env in envs]
        return [Throughput((rate,) * 3, 2, 64, 0.5) for rate in rates]

    monkeypatch.setattr(tuning, "compare", compare)
    assert bc.tune("grasp", 64).settings == {"scheduler": "hw", "granularity": "stage", "regroup": True}
    assert bc.make("grasp", 64).schedule.regroup is True
    assert bc.make("grasp", 64, regroup=False).schedule == Schedule("hw", regroup=False)
    assert bc.make("grasp", 64, scheduler="serial").schedule.regroup is None
    found = bc.tune("grasp", 64, regroup=True)
    assert {(one.settings["scheduler"], one.settings["regroup"]) for one in found.candidates} == {("hw", True)}


@pytest.mark.parametrize("damage", [b"", b"{", b"\0" * 100])
def test_a_damaged_memory_is_ignored(monkeypatch, cache, damage):
    fake_rates(monkeypatch, {"stage": 1.0, "substep": 3.0, "step": 2.0})
    bc.tune("grasp", 64)
    (file,) = cache.glob("t*")
    assert bc.make("grasp", 64).granularity == "substep"
    whole = file.read_bytes()
    for contents in (damage, whole[:-3], whole[:-3] + b"..."):
        file.write_bytes(contents)
        assert bc.make("grasp", 64, scheduler="auto").granularity == "stage"
    bc.tune("grasp", 64)
    assert bc.make("grasp", 64).granularity == "substep"


def test_a_folder_that_cannot_be_written_costs_the_memory_only(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("BRAX_CONCURRENT_CACHE", str(file))
    fake_rates(monkeypatch, {"stage": 1.0, "substep": 3.0, "step": 2.0})
    assert bc.tune("grasp", 64).settings["granularity"] == "substep"
    assert bc.make("grasp", 64, scheduler="auto").granularity == "stage"


def test_settings_of_one_scheduler_are_varied_with_it(monkeypatch):
    monkeypatch.setattr(tuning, "schedulers_on", lambda backend: ("serial", "quick"))
    monkeypatch.setattr(tuning, "_SPACE", {"cpu": {"quick": {"window": (8, 32)}}, "cuda": {}})
    every = list(tuning.candidate_settings("cpu", {"granularity": "step", "scheduler": "auto"}))
    step = {"granularity": "step"}
    assert every == [
        {"scheduler": "serial", **step},
        {"scheduler": "quick", **step, "window": 8},
        {"scheduler": "quick", **step, "window": 32},
    ]
    of_serial = {"scheduler": "serial", "granularity": "auto"}
    for backend, first in (("cpu", "stage"), ("cuda", "step")):  # what make takes by itself
        assert next(tuning.candidate_settings(backend, of_serial))["granularity"] == first
    assert list(tuning.candidate_settings("cpu", {"scheduler": "quick", **step, "window": 5})) == [
        {"scheduler": "quick", **step, "window": 5}
    ]


@pytest.mark.parametrize(
    ("serial", "quick", "same"),
    [
        ((9.0, 9.0, 9.0, 9.0, 9.0), (10.0, 10.0, 10.0, 10.0, 10.0), False),
        ((9.0, 9.0, 9.0, 9.0, 9.0), (10.0, 10.0, 10.0, 10.0, 1.0), False),  # a hiccup
        ((9.0, 9.0, 9.0, 9.0, 11.0), (10.0, 10.0, 10.0, 8.0, 10.0), True),
        ((9.0, 9.0, 5.0, 5.0, 5.0), (10.0, 10.0, 6.0, 6.0, 6.0), False),  # the machine slowed down
        ((9.0,), (10.0,), False),
        ((9.0,), (9.0,), True),
    ],
)
def test_of_those_within_the_spread_the_simplest_is_taken(cache, serial, quick, same):
    assert tuned.alike([serial, quick]) == ([0, 1] if same else [1])
    where = bc.make("grasp", 64)._situation
    settings = {"scheduler": "serial", "granularity": "stage"}, {"scheduler": "sw", "granularity": "step"}
    tuned.remember(where, list(zip(settings, (serial, quick), strict=True)))
    assert bc.make("grasp", 64).scheduler == ("serial" if same else "sw")
    assert bc.make("grasp", 64, scheduler="sw").granularity == "step"


def test_wrong_arguments_are_make_s():
    with pytest.raises(TypeError, match="name: expected one robot or Task, got a dict"):
        bc.tune({"grasp": 4}, 1)
    with pytest.raises(ValueError, match="there is no task 'graps'"):
        bc.tune("graps", 4)
    with pytest.raises(ValueError, match="granularity: expected"):
        bc.tune("grasp", 4, granularity="fine")
    with pytest.raises(ValueError, match="scheduler: expected"):
        bc.tune("grasp", 4, scheduler="none")


def test_what_is_found_is_frozen(monkeypatch, cache):
    fake_rates(monkeypatch, dict.fromkeys(GRANULARITIES, 1.0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        bc.tune("grasp", 4).num_envs = 5
