"""The command `envs`: a table of the robots."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from typing import Any

from brax_concurrent.cli.common import OK, print_table

_TABLE_ENVS = 1024  # environments for which the table says what memory one needs


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser's."""
    parser = subparsers.add_parser("envs", help="table of the robots", description="Table of the robots.")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table; returns the exit code."""
    del arguments
    from brax_concurrent.envs import list_envs, make

    head = ["robot", "nq", "nv", "nu", "obs", "action", "dt", "frame_skip", "integrator", "pairs", "nconmax"]
    rows = [[*head, "state", "carried", "arena", "beyond"]]
    for name in list_envs():
        env = make(name, _TABLE_ENVS, backend="cpu")
        m = env.model
        sizes = [m.nq, m.nv, m.nu, env.observation_size, env.action_size]
        more = [f"{env.dt:g}", env.task.frame_skip, m.opt.integrator, m.npair, m.nconmax]
        rows.append([str(x) for x in (name, *sizes, *more, *_memory(env))])
    print_table(rows, left=(0, 8))
    print(f"""
dt: duration of a control step, s, of frame_skip physics steps. pairs: pairs of geoms that can touch.
nconmax: contacts kept per environment. Memory of the CPU backend in float32, bytes:
state    arrays of State per environment: positions, velocities, observations, reward, info, ...
carried  what the engine keeps in State besides: solver warm start, random key, counters, the task's memory
arena    scratch memory of one thread, which its tiles of 32 environments share
beyond   per environment, beyond state: carried + arena * {_threads()} threads / {_TABLE_ENVS:,} environments""")
    return OK


def _threads() -> int:
    """Threads that share the work on `_TABLE_ENVS` environments here: one per core, at most one per tile."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _TABLE_ENVS // 32)


def _memory(env: Any) -> list[str]:
    """The columns state, carried, arena and beyond."""
    import jax

    state = jax.eval_shape(env.reset, jax.random.key(0))
    carried = _row_bytes(state.internal)
    seen = _row_bytes(state) - carried
    arena = _arena_bytes(env)
    return [f"{x:,.0f}" for x in (seen, carried, arena, carried + arena * _threads() / env.num_envs)]


def _row_bytes(tree: Any) -> int:
    """Bytes per environment of the arrays in a pytree."""
    import jax

    return sum(x.size // x.shape[0] * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _arena_bytes(env: Any) -> int:
    """Bytes of the arena that a control step needs.

    Specialising the step says it, which takes a second where compiling takes several; the number is kept on disk.
    """
    from brax_concurrent.backends.objects import ObjectCache
    from brax_concurrent.envs.program import source_fingerprint
    from brax_concurrent.envs.stream import StreamBuilder
    from brax_concurrent.kernels.specialize import specialize

    identity = (source_fingerprint(), env.task.identity(), env.model.fingerprint, env.granularity)
    key = "a" + hashlib.sha256(repr(identity).encode()).hexdigest()[:40]
    store = ObjectCache()
    kept = store.get(key)
    if kept is not None and kept.isdigit():
        return int(kept)
    print(
        f"tracing a control step of {env.name} to see what memory it needs (kept on disk for the next time)",
        file=sys.stderr,
        flush=True,
    )
    stream = StreamBuilder(env.task, env.model).control_step(env.granularity)
    size = specialize(stream.kernels, stream.view, stream.fields, stream.user).layout.arena_bytes
    store.put(key, str(size).encode())
    return size
