"""Training runs that are over in a moment, for the tests of training."""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from brax_concurrent.training.policy import Policy
from brax_concurrent.training.ppo import Config
from brax_concurrent.training.train import CHECKPOINTS, Result, train

jax.config.update("jax_platforms", "cpu")

ITERATIONS = 12
TINY = Config(
    num_envs=32,
    unroll_length=8,
    steps=ITERATIONS * 32 * 8,
    num_minibatches=2,
    num_epochs=2,
    actor_layers=(8,),
    critic_layers=(8,),
    evaluations=4,
    eval_envs=2,
)
SETTINGS = [
    *("--set", "unroll_length=8", "--set", "num_minibatches=2", "--set", "num_epochs=2", "--set", "actor_layers=8"),
    *("--set", "critic_layers=8", "--set", "evaluations=4", "--set", "eval_envs=2", "--num-envs", "32"),
    *("--set", "entropy_cost=0.001", "--set", "initial_std=0.6", "--set", "learning_rate=3e-4"),
    *("--set", "discount=0.97", "--set", "reward_scaling=1.0"),
]
"""TINY, but for its steps, as options of the command `train`."""


@functools.cache
def _kept() -> Path:
    """A folder for this process."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@contextlib.contextmanager
def compiled_once() -> Iterator[Path]:
    """With JAX's compilation cache in a folder: runs that are alike compile only once in this process."""
    folder = _kept() / "compiled"
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield folder
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@functools.cache
def finished() -> tuple[Path, Result]:
    """A run of TINY without interruption, seed 3; its folder, which nobody changes, and its result."""
    folder = _kept() / "finished"
    with compiled_once():
        return folder, train("halfcheetah", folder, config=TINY, seed=3, report=lambda line: None)


def numbers(policy: Policy) -> dict[str, Any]:
    """All that a policy consists of, by name."""
    arrays = {name: np.asarray(getattr(policy, name)) for name in ("log_std", "mean", "variance")}
    for i, (weights, bias) in enumerate(policy.actor):
        arrays |= {f"weights {i}": np.asarray(weights), f"bias {i}": np.asarray(bias)}
    return arrays


def files_of_newest_checkpoint(folder: Path) -> list[Path]:
    """Those with numbers in them."""
    newest = max((folder / CHECKPOINTS).iterdir(), key=lambda path: int(path.name))
    return [path for path in newest.rglob("d/*") if path.is_file()]
