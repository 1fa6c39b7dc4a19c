"""Batches that tests share, so that a process compiles them once; and single and double precision side by side.

A test in double precision runs `with batches.precision("float64"):`; JAX's own setting is as before afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import physics

import brax_concurrent as bc

jax.config.update("jax_platforms", "cpu")

LOCOMOTION = ("ant", "halfcheetah", "humanoid", "walker2d")


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """JAX's 64-bit mode, on for "float64"."""
    with jax.enable_x64(dtype == "float64"):
        yield


@functools.cache
def env(name: str, num_envs: int, dtype: str = "float32", **arguments: Any) -> Any:
    """`make` on the CPU; one object for all who ask for the same."""
    with precision(dtype):
        return bc.make(name, num_envs, dtype=dtype, backend="cpu", **arguments)


def env_of(task: Any, num_envs: int, dtype: str = "float32", **arguments: Any) -> Any:
    """`make` of a Task, on the CPU."""
    with precision(dtype):
        return bc.make(task, num_envs, dtype=dtype, backend="cpu", **arguments)


def simulator(
    source: Any, num_envs: int, fields: tuple[str, ...] = (), dtype: str = "float64", **arguments: Any
) -> Any:
    """A simulator of one of physics.ROBOTS, MJCF text or a compiled model."""
    if isinstance(source, str) and source in physics.ROBOTS:
        source = str(physics.ASSETS / f"{source}.xml")
    with precision(dtype):
        return bc.Simulator(source, num_envs, fields, dtype=dtype, **arguments)


def random_actions(env: Any, *shape: int, seed: int = 0, reach: float = 1.0) -> np.ndarray:
    """(*shape, num_envs, action_size), uniform on `reach` times the bounds."""
    size = (*shape, env.num_envs, env.action_size)
    action = np.random.default_rng(seed).uniform(env.action_low, env.action_high, size)
    return (reach * action).astype(env.dtype)


def leaves(tree: Any) -> dict[str, np.ndarray]:
    """A pytree's arrays by their path, e.g. `.info['diverged']`."""
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def rows(tree: Any, chosen: Any) -> dict[str, np.ndarray]:
    """Some environments of a batch, by path."""
    return {name: leaf[chosen] for name, leaf in leaves(tree).items()}


def run_python(code: str, **environment: str) -> Any:
    """Run code in a process of its own; the result is the last line that it prints, which is JSON."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_same_bits(found: Any, expected: Any) -> None:
    """Two pytrees, or what `leaves` or `rows` made of them, have equal arrays bit by bit (so NaN equals itself)."""
    found, expected = (tree if isinstance(tree, Mapping) else leaves(tree) for tree in (found, expected))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        if found[name].tobytes() != value.tobytes():
            different = [i for i in range(len(value)) if found[name][i].tobytes() != value[i].tobytes()]
            raise AssertionError(f"{name} differs in rows {different[:8]}")
