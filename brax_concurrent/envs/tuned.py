"""What `tune` measured on this machine, remembered for `make(..., scheduler="auto", granularity="auto")`.

One entry for each situation, kept as JSON in the cache directory like machine code (backends/objects.py): an entry that
is damaged is as if it were not there, and a directory that cannot be written costs the memory, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from brax_concurrent import __version__
from brax_concurrent.backends import cpu
from brax_concurrent.backends.cpu_program import cores
from brax_concurrent.backends.objects import ObjectCache
from brax_concurrent.envs.arrays import GRANULARITIES
from brax_concurrent.envs.task import KernelTask
from brax_concurrent.kernels.model import Model
from brax_concurrent.scheduler.schedule import SCHEDULERS

Settings = Mapping[str, Any]
"""Arguments of `make` that change speed and nothing else: scheduler, granularity and what a scheduler takes besides."""

_FORMAT = 2  # of an entry: another number is another key
DEFAULTS: Settings = {"scheduler": "serial"}  # what "auto" means where nothing is remembered and `make` has no rule


def situation(
    task: KernelTask, model: Model, num_envs: int, *, backend: str, dtype: str, threads: int, per_env: Iterable[str]
) -> Mapping[str, Any]:
    """What the best settings depend on.

    Args:
        task, model: what is simulated.
        num_envs: rounded to a power of two here: settings that are best for 4096 are taken for 4000.
        backend: "cpu" or "cuda".
        dtype, threads, per_env: arguments of `make`; threads 0 is as many as there are processors.
    """
    on_cpu = backend == "cpu"
    return {
        "robot": [task.name, task.frame_skip, model.fingerprint],
        "num_envs": 1 << round(math.log2(num_envs)),
        "device": cpu.target() if on_cpu else jax.local_devices(backend="gpu")[0].device_kind,
        "threads": (threads or cores()) if on_cpu else 0,
        "dtype": dtype,
        "per_env": sorted(per_env),
        "version": __version__,
    }


def remember(where: Mapping[str, Any], candidates: Iterable[tuple[Settings, Sequence[float]]]) -> None:
    """Keep how fast each of the candidates was; what was known of the situation is replaced.

    Args:
        where: from `situation`.
        candidates: settings, the simplest first, and environment steps a second, turn by turn.
    """
    entry = [{"settings": dict(settings), "rates": list(rates)} for settings, rates in candidates]
    ObjectCache().put(_key(where), json.dumps(entry).encode())


def alike(rates: Sequence[Sequence[float]]) -> list[int]:
    """The places of those candidates that timings do not tell from the fastest, itself included, in order.

    The fastest has the highest median. One that was at least as fast in a quarter of the turns is not told from it: a
    machine that slows down in some turns then decides nothing, nor does a single slow timing of the fastest in five.

    Args:
        rates: of each candidate, one for each turn, at least one of each.
    """
    fastest = max(rates, key=statistics.median)
    return [place for place, own in enumerate(rates) if own is fastest or 4 * turns_won(own, fastest) >= len(own)]


def turns_won(rates: Sequence[float], other: Sequence[float]) -> int:
    """In how many turns the one was at least as fast as the other."""
    return sum(a >= b for a, b in zip(rates, other, strict=True))


def recall(asked: Settings, where: Mapping[str, Any]) -> dict[str, Any]:
    """`asked`, with the best of what was measured in place of "auto" and None.

    Only candidates that agree with everything else that is asked for count. The best is the simplest of those that are
    `alike`. What is still "auto" after that is one of
    `DEFAULTS`, or is left to the rules of `make`.

    Args:
        asked: settings as `make` got them; without an "auto" among them nothing is looked up.
        where: from `situation`.
    """
    settings = dict(asked)
    if "auto" in settings.values():
        fixed = {name: value for name, value in settings.items() if value not in ("auto", None)}
        fitting = [one for one in _candidates(where) if fixed.items() <= {**settings, **one["settings"]}.items()]
        if fitting:
            best = fitting[alike([one["rates"] for one in fitting])[0]]["settings"]
            settings |= {name: value for name, value in best.items() if name in settings}
    return settings | {name: value for name, value in DEFAULTS.items() if settings.get(name) == "auto"}


def _candidates(where: Mapping[str, Any]) -> list[Any]:
    """What is remembered and can still be made."""
    stored = ObjectCache().get(_key(where))
    known = json.loads(stored) if stored is not None else []
    return [
        one
        for one in known
        if one["settings"].get("scheduler") in SCHEDULERS and one["settings"].get("granularity") in GRANULARITIES
    ]


def _key(where: Mapping[str, Any]) -> str:
    return "t" + hashlib.sha256(json.dumps([_FORMAT, where], sort_keys=True).encode()).hexdigest()[:40]
