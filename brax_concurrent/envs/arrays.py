"""Checks at the boundary, and the way from named arrays to a native call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brax_concurrent.interop.jax_ffi import Program, ffi_call
from brax_concurrent.kernels.model import Model
from brax_concurrent.scheduler.engine import timeout_ns
from brax_concurrent.scheduler.schedule import NEED_CUDA, Schedule, schedulers_on

DTYPES = ("float32", "float64")
GRANULARITIES = ("stage", "substep", "step")
MOST_ENVS = 1 << 30


def validate_batch(num_envs: Any, dtype: Any, threads: Any) -> None:
    """Raise ValueError unless these are a batch size, a floating-point type that JAX has on, and a thread count."""
    if isinstance(num_envs, bool) or not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
        raise ValueError(f"num_envs: expected a whole number of at least 1, got {num_envs!r}")
    if num_envs > MOST_ENVS:
        raise ValueError(f"num_envs: expected at most {MOST_ENVS}, got {num_envs}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {DTYPES}, got {dtype!r}")
    if dtype == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError("dtype: 'float64' needs jax.config.update('jax_enable_x64', True)")
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 0:
        raise ValueError(f"threads: expected a whole number of at least 0, got {threads!r}")


def resolve_backend(backend: str) -> str:
    """Which of "cpu" and "cuda" a `backend` argument means; "auto" takes the platform that JAX computes on."""
    if backend not in ("auto", "cpu", "cuda"):
        raise ValueError(f"backend: expected 'auto', 'cpu' or 'cuda', got {backend!r}")
    on_gpu = jax.default_backend() in ("gpu", "cuda")
    if backend == "cuda" and not on_gpu:
        raise ValueError(f"backend: 'cuda' needs JAX on a CUDA GPU; it computes on {jax.default_backend()!r}")
    return "cuda" if on_gpu and backend != "cpu" else "cpu"


def resolve_granularity(granularity: str, backend: str, scheduler: str = "serial") -> str:
    """Which of "stage", "substep" and "step" a `granularity` argument means.

    "auto" takes what measured best: on the CPU stages, which cost nothing there in program order or in windows of the
    threads' own, and compile fastest, but whole steps with one window for all, whose lock takes about as long as a
    stage of a small robot; on a GPU whole steps.
    """
    if granularity not in ("auto", *GRANULARITIES):
        raise ValueError(f"granularity: expected 'auto' or one of {GRANULARITIES}, got {granularity!r}")
    if granularity != "auto":
        return granularity
    return "stage" if backend == "cpu" and scheduler in ("serial", "hw") else "step"


def resolve_schedule(backend: str, scheduler: str, **knobs: Any) -> Schedule:
    """The schedule that arguments of `make` ask for; TypeError or ValueError, naming the argument, if it cannot be."""
    schedule = Schedule(scheduler, **knobs)
    if scheduler in ("sw", "hw"):
        timeout_ns()  # a setting in the environment that cannot be is reported here
    if scheduler in NEED_CUDA and backend != "cuda":
        raise ValueError(f"scheduler: {scheduler!r} needs backend='cuda'; on the CPU there are {schedulers_on('cpu')}")
    return schedule


def checked(name: str, value: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`value` as a JAX array of exactly this shape and dtype.

    Python and NumPy values are converted by `jnp.asarray` (so NumPy's float64 becomes float32 unless JAX's 64-bit mode
    is on); a dtype that differs after that is an error, never a cast.
    """
    try:
        array = value if isinstance(value, jax.Array) else jnp.asarray(value)
    except (TypeError, ValueError):
        what = f"{jnp.dtype(dtype).name}{list(shape)}"
        raise TypeError(f"{name}: expected {what}, got {type(value).__name__}") from None
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"{name}: expected {jnp.dtype(dtype).name}{list(shape)}, got {array.dtype.name}{list(array.shape)}"
        )
    return array


def default_model_values(model: Model, per_env: Sequence[str]) -> dict[str, np.ndarray]:
    """The model's own values of per-environment quantities; ValueError for what is no real-valued quantity."""
    known = {
        name: value
        for name in dir(model)
        if isinstance(value := getattr(model, name), np.ndarray) and value.dtype.kind == "f"
    }
    if isinstance(per_env, str):
        raise TypeError(f"per_env: expected a sequence of names, got the string {per_env!r}")
    for name in per_env:
        if name not in known:
            raise ValueError(
                f"per_env: {name!r} is no real-valued quantity of the model; known: {', '.join(sorted(known))}"
            )
    return {name: known[name] for name in per_env}


def varying_alike(tree: Any) -> Any:
    """Inside `shard_map`: mark all arrays of a pytree as different from device to device if one of them is.

    Programs mark all that they return so; with arrays that no program returned, a state would not keep its type when a
    `lax.scan` carries it.
    """

    def axes(array: jax.Array) -> frozenset[Any]:
        kind = getattr(jax.typeof(array), "manual_axis_type", None)
        return frozenset(getattr(kind, "varying", ()))

    every = frozenset[Any]().union(*(axes(array) for array in jax.tree.leaves(tree)))

    def marked(array: jax.Array) -> jax.Array:
        missing = tuple(every - axes(array))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(marked, tree) if every else tree


def run(native: Program, arrays: Mapping[str, Any], num_envs: int) -> dict[str, jax.Array]:
    """Call a program with the arrays that it takes by name; the results by name."""
    results = ffi_call(native, [arrays[spec.name] for spec in native.inputs], num_envs)
    return {spec.name: result for spec, result in zip(native.outputs, results, strict=True)}
