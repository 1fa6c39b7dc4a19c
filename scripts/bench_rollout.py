"""Transitions per second of rollouts: the policy as a kernel of the stream, and as a step of a jitted scan.

    python scripts/bench_rollout.py
    python scripts/bench_rollout.py --robots ant --hidden 64,64 --num-envs 4096 --length 64

Both are timed turn and turn about in one process, each time from where the last rollout ended. The scan steps an
environment in program order, which is the fastest there. Records go to
throughput.jsonl in $OUT if it is set, else in benchmarks/.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import _records
import jax

import brax_concurrent as bc
from brax_concurrent.envs.arrays import resolve_backend


class Turns:
    """One way of collecting, timed again and again."""

    def __init__(self, env: Any, policy: bc.MlpPolicy, length: int, fused: bool):
        self._env, self._policy, self._length, self._fused = env, policy, length, fused
        self._params = policy.init(jax.random.key(0), env)
        self._state, self._key = env.reset(jax.random.key(1)), jax.random.key(2)
        self.samples: list[float] = []
        self._collect()  # compiles

    def _collect(self) -> None:
        self._key, own = jax.random.split(self._key)
        batch = bc.rollout(self._env, self._policy, self._params, self._state, own, self._length, fused=self._fused)
        self._state = jax.block_until_ready(batch).state

    def sample(self) -> None:
        """Collect once more."""
        start = time.perf_counter()
        self._collect()
        self.samples.append(self._length * self._env.num_envs / (time.perf_counter() - start))


def measure(name: str, num_envs: int, hidden: tuple[int, ...], given: argparse.Namespace) -> None:
    """Measure one robot with one network, and write two records."""
    plain, env = (bc.make(name, num_envs, backend=given.backend, scheduler=s) for s in ("serial", given.scheduler))
    policy = bc.MlpPolicy(hidden)
    scan, fused = Turns(plain, policy, given.length, False), Turns(env, policy, given.length, True)
    for _ in range(given.repeats):
        scan.sample()
        fused.sample()
    ratio = statistics.median(a / b for a, b in zip(fused.samples, scan.samples, strict=True))
    network = {"policy": f"{'x'.join(map(str, hidden))} {policy.activation}", "length": given.length}
    common: dict[str, Any] = {"unit": "transitions/s", "num_envs": num_envs, "directory": os.environ.get("OUT")}
    ways: list[tuple[Any, Turns, str, dict[str, Any]]] = [
        (plain, scan, "scan", {}),
        (env, fused, "stream", {"baseline": "scan", "ratio": ratio}),
    ]
    for own, turns, way, compared in ways:
        values = _records.summary(turns.samples)
        how: dict[str, Any] = {"detail": {**network, "rollout": way}}
        how |= {knob: getattr(own, knob) for knob in ("backend", "scheduler", "granularity")}
        _records.append("throughput", name, **values, **common, **compared, **how)
        print(f"{name} {num_envs} {network['policy']} {way}: {values['value']:,.0f} transitions/s", flush=True)
    print(f"{name} {num_envs} {network['policy']}: stream is {ratio:.2f} times the scan", flush=True)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robots", nargs="+", default=bc.list_envs(), choices=bc.list_envs())
    parser.add_argument("--num-envs", nargs="+", type=int, default=[1024])
    parser.add_argument("--hidden", nargs="+", default=["64,64", "256,256"], help="widths of the hidden layers")
    parser.add_argument("--length", type=int, default=32, help="control steps of a rollout")
    parser.add_argument("--backend", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--scheduler", choices=("serial", "hw"), help="of the stream; on a GPU hw, the default there")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    given.backend = resolve_backend(given.backend)
    given.scheduler = given.scheduler or ("hw" if given.backend == "cuda" else "serial")
    for name in given.robots:
        for num_envs in given.num_envs:
            for hidden in given.hidden:
                measure(name, num_envs, tuple(map(int, hidden.split(","))), given)


if __name__ == "__main__":
    main()
