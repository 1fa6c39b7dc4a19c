"""Finding the fastest scheduler and granularity on the user's own machine."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from brax_concurrent.envs import make, tuned
from brax_concurrent.envs.arrays import GRANULARITIES, resolve_granularity
from brax_concurrent.envs.own_task import AnyTask
from brax_concurrent.scheduler.schedule import schedulers_on
from brax_concurrent.training.measure import Throughput, compare

_SECONDS = {"cpu": 0.1, "cuda": 0.02}  # of a timing: short, since there are many candidates
# What is tried of each scheduler besides granularity, by argument of `make`, its default first; a scheduler that is not
# here has nothing. (On a GPU the size of a program says whether `hw` regroups.)
_SPACE: Mapping[str, Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "cpu": {"sw": {"window": (32, 8)}, "hw": {"regroup": (False, True)}},
    "cuda": {"sw": {"window": (32, 8)}},
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings that were measured.

    Attributes:
        settings: arguments of `make`.
        throughput: how fast they are.
    """

    settings: Mapping[str, Any]
    throughput: Throughput


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What `tune` found.

    Attributes:
        settings: what `make` takes from now on, as its arguments: `make(name, num_envs, **tuned.settings)`. They are
            the simplest of `alike`.
        candidates: all that was measured, the fastest first.
        alike: of these the fastest, and those that timings do not tell from it, the simplest first.
        num_envs: environments that it was measured with.
        backend: "cpu" or "cuda".
    """

    settings: Mapping[str, Any]
    candidates: tuple[Candidate, ...]
    alike: tuple[Candidate, ...]
    num_envs: int
    backend: str


def tune(
    name: str | AnyTask,
    num_envs: int,
    *,
    repeats: int = 5,
    seconds: float | None = None,
    key: jax.Array | None = None,
    **make_arguments: Any,
) -> Tuned:
    """Measure which settings of `make` are fastest here, and remember them.

    All candidates compute the same bits. They are compiled, which can take minutes on a GPU, and then timed turn and
    turn about. What was measured is kept in the cache directory: `make` with `scheduler="auto"` or
    `granularity="auto"` then takes the best, for this robot, number of environments (to the next power of two), dtype,
    device and number of threads, in this and later processes. Tune again after an upgrade, or to replace it.

    The fastest has the highest median. Candidates that were at least as fast as it in a quarter of the turns are within
    the spread of the timings; the simplest of them is taken, so that noise does not choose: serial before sw, hw and
    graph, then the granularity, window and (on a CPU) `regroup` that `make` takes by itself.

    Args:
        name: one of `list_envs()`, or a Task. Robots of a mixed batch are tuned one by one.
        num_envs: environments in the batch.
        repeats: timings of each candidate.
        seconds: of a timing, at least; None: 0.1 on the CPU, 0.02 on a GPU.
        key: random key for resets and actions; None: `jax.random.key(0)`.
        make_arguments: see `make`. A setting that is given is not varied: `tune("ant", 4096, scheduler="serial")`.

    Raises:
        TypeError, ValueError: a wrong argument, as `make` and `measure` say it.
    """
    if isinstance(name, Mapping):
        raise TypeError(f"name: expected one robot or Task, got a dict: tune each of {list(name)} by itself")
    asked = {"scheduler": "auto", **make_arguments}
    first = make(name, num_envs, **asked)
    envs, tried = [], []
    for settings in candidate_settings(first.backend, asked):
        envs.append(make(name, num_envs, **{**asked, **settings}))
        tried.append(settings)
    wanted = _SECONDS[first.backend] if seconds is None else seconds
    measured = compare(envs, repeats=repeats, seconds=wanted, key=key)
    candidates = [Candidate(settings, found) for settings, found in zip(tried, measured, strict=True)]
    samples = [one.throughput.samples for one in candidates]
    tuned.remember(first._situation, [(one.settings, own) for one, own in zip(candidates, samples, strict=True)])
    alike = tuple(candidates[place] for place in tuned.alike(samples))
    candidates.sort(key=lambda one: -one.throughput.median)
    return Tuned(alike[0].settings, tuple(candidates), alike, first.num_envs, first.backend)


def candidate_settings(backend: str, asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What is worth measuring on a backend, the simplest first.

    Args:
        backend: "cpu" or "cuda".
        asked: arguments of `make`; a setting among them that is neither "auto" nor None is kept to.
    """
    for scheduler in ("hw",) if asked.get("regroup") is True else schedulers_on(backend):
        default = resolve_granularity("auto", backend, scheduler)
        granularities = (default, *(name for name in GRANULARITIES if name != default))
        space = {"scheduler": (scheduler,), "granularity": granularities, **_SPACE[backend].get(scheduler, {})}
        kept = {name: asked[name] for name in space if asked.get(name) not in ("auto", None)}
        if kept.get("scheduler", scheduler) == scheduler:
            choices = {name: (kept[name],) if name in kept else values for name, values in space.items()}
            for values in itertools.product(*choices.values()):
                yield dict(zip(choices, values, strict=True))
