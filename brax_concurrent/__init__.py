"""Robot simulation for reinforcement learning, scheduled out of order like a processor's instructions.

Importing the package is cheap: a public name loads its module, and with it JAX and Numba, on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brax_concurrent.envs import MixedEnv, State, Task, list_envs, make
    from brax_concurrent.envs.policy import MlpPolicy
    from brax_concurrent.envs.simulator import Simulator
    from brax_concurrent.networks.graph import Graph
    from brax_concurrent.networks.network import Network
    from brax_concurrent.networks.registry import list_networks, make_network
    from brax_concurrent.scheduler.kernel import kernel
    from brax_concurrent.scheduler.run_streams import run_streams
    from brax_concurrent.scheduler.stream import TaskError, TaskStream
    from brax_concurrent.training.rollout import Rollout, rollout
    from brax_concurrent.training.tune import tune

__version__ = "0.1.0.dev0"

__all__ = [
    "Graph",
    "MixedEnv",
    "MlpPolicy",
    "Network",
    "Rollout",
    "Simulator",
    "State",
    "Task",
    "TaskError",
    "TaskStream",
    "kernel",
    "list_envs",
    "list_networks",
    "make",
    "make_network",
    "rollout",
    "run_streams",
    "tune",
]

_HOMES = {
    "Graph": "brax_concurrent.networks.graph",
    "Network": "brax_concurrent.networks.network",
    "list_networks": "brax_concurrent.networks.registry",
    "make_network": "brax_concurrent.networks.registry",
    "MixedEnv": "brax_concurrent.envs",
    "MlpPolicy": "brax_concurrent.envs.policy",
    "Rollout": "brax_concurrent.training.rollout",
    "Task": "brax_concurrent.envs",
    "Simulator": "brax_concurrent.envs.simulator",
    "State": "brax_concurrent.envs",
    "TaskError": "brax_concurrent.scheduler.stream",
    "TaskStream": "brax_concurrent.scheduler.stream",
    "kernel": "brax_concurrent.scheduler.kernel",
    "list_envs": "brax_concurrent.envs",
    "make": "brax_concurrent.envs",
    "rollout": "brax_concurrent.training.rollout",
    "run_streams": "brax_concurrent.scheduler.run_streams",
    "tune": "brax_concurrent.training.tune",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
