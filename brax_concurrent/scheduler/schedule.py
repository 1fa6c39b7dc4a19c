"""How a stream is scheduled: which scheduler, and its knobs."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from brax_concurrent.backends.cuda_program import MAX_STREAMS
from brax_concurrent.scheduler.hw_order import POLICIES
from brax_concurrent.scheduler.window import MAX_SLOTS

SCHEDULERS = ("serial", "sw", "hw", "graph")
NEED_CUDA = ("graph",)


def schedulers_on(backend: str) -> tuple[str, ...]:
    """The schedulers that a backend, "cpu" or "cuda", has."""
    return tuple(name for name in SCHEDULERS if backend == "cuda" or name not in NEED_CUDA)


@dataclass(frozen=True)
class Schedule:
    """A scheduler and its knobs.

    Attributes:
        scheduler: "serial": program order. "sw": the out-of-order window on the host. "hw": windows of the workers
            themselves, inside a kernel that stays on the GPU or of each CPU thread. "graph": a CUDA Graph.
        window: slots of the windows of "sw" and "hw", 1 to 64; on a GPU "hw" uses at most 32.
        streams: CUDA streams of "sw", 1 to 16. (On the CPU its tasks run on as many threads as the program has.)
        envs_per_task: environments of a task, a multiple of 32; 0: on CUDA all, on the CPU 32. Of "hw" 32, 64, 128 or
            256; 0: by the number of environments.
        policy: which of the ready tasks "hw" runs first: "oldest", "same_kernel" (the kernel that this worker ran
            before, whose instructions are at hand) or "depth_first" (a tile that was begun before others).
        regroup: whether "hw" puts environments of similar work into the same tiles; on a GPU only where there are many
            tiles. None: on a GPU robots whose code is large, for which it was measured to pay; on a CPU none. True is
            for "hw" only.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    scheduler: str = "serial"
    window: int = 32
    streams: int = 8
    envs_per_task: int = 0
    policy: str = "oldest"
    regroup: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.scheduler, str) or self.scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler: expected one of {SCHEDULERS}, got {self.scheduler!r}")
        for name, low, high in (("window", 1, MAX_SLOTS), ("streams", 1, MAX_STREAMS)):
            value = whole(name, getattr(self, name))
            if not low <= value <= high:
                raise ValueError(f"{name}: expected {low} to {high}, got {value}")
        if whole("envs_per_task", self.envs_per_task) < 0 or self.envs_per_task % 32 != 0:
            raise ValueError(f"envs_per_task: expected 0 or a multiple of 32, got {self.envs_per_task}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy: expected one of {POLICIES}, got {self.policy!r}")
        check_regroup(self.regroup)
        if self.regroup and self.scheduler != "hw":
            raise ValueError(f"regroup: only scheduler='hw' regroups environments, got {self.scheduler!r}")


def check_regroup(value: Any) -> None:
    """TypeError unless it is True, False or None."""
    if not (value is None or isinstance(value, bool)):
        raise TypeError(f"regroup: expected True, False or None, got {value!r}")


def whole(name: str, value: Any) -> int:
    """`value` as an int; TypeError, naming the argument, if it is no whole number."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected a whole number, got {value!r}") from None
