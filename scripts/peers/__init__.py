"""Other simulators, measured as they are meant to be used: one module for each library, imported where it is installed.

Each has `PEERS`, what it can be measured as. An environment step is one random action held for the task's frame_skip.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

MODULES = ("brax_envs", "warp_physics", "mjx_physics", "mujoco_physics", "envpool_envs")
SECONDS = {"cpu": 0.3, "cuda": 0.05}  # of a timing, at least


class CannotRunError(Exception):
    """Says why a library has nothing to measure here: no such robot, or another kind of device."""


@dataclass(frozen=True)
class Prepared:
    """Something compiled and warmed up.

    Attributes:
        sample: measures once; environment steps a second. Each goes on from where the last one ended.
        check: raises RuntimeError if what was computed is not a simulation.
        num_envs: environments simulated at once.
        compile_seconds: until the first step was done.
        detail: settings, for the record.
    """

    sample: Callable[[], float]
    check: Callable[[], None]
    num_envs: int
    compile_seconds: float
    detail: Mapping[str, Any]


@dataclass(frozen=True)
class Peer:
    """A library in one way of using it.

    Attributes:
        name: for `--peer` and the records.
        install: what pip installs for it.
        modules: what is imported then.
        prepare: (robot, num_envs, backend, threads) -> Prepared.
    """

    name: str
    install: str
    modules: tuple[str, ...]
    prepare: Callable[[str, int, str, int], Prepared]

    def missing(self) -> list[str]:
        """Its modules that are not installed."""
        return [module for module in self.modules if not _installed(module)]


def all_peers() -> dict[str, Peer]:
    """Every peer by name, installed or not."""
    return {peer.name: peer for module in MODULES for peer in import_module(f"peers.{module}").PEERS}


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def paced(work: Callable[[int], None], steps: int, seconds: float) -> Callable[[], float]:
    """A function that measures once: environment steps a second.

    Args:
        work: does a unit of work so many times, and waits until it is done.
        steps: environment steps of a unit.
        seconds: that one measurement lasts, at least.
    """
    work(1)
    start = time.perf_counter()
    work(1)
    units = max(math.ceil(seconds / (time.perf_counter() - start)), 1)

    def sample() -> float:
        start = time.perf_counter()
        work(units)
        return units * steps / (time.perf_counter() - start)

    return sample
