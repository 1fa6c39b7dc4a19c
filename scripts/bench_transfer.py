"""Policies that were trained here, scored here and in Gymnasium's own environment, which MuJoCo simulates.

    python scripts/bench_transfer.py runs/bench/halfcheetah-*.npz --episodes 50

Takes folders of training runs or their policy files. Actions are deterministic. For each robot two records are appended
to transfer.jsonl in $BRAX_CONCURRENT_RECORDS if it is set, else in benchmarks/: the return here, with Gymnasium's as
baseline, and the return in Gymnasium. A policy is a repetition, its mean over the episodes is its result; `ratio` is
the median over the policies of here to there. `mean`, and `standard error` over all episodes, are in `detail`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import _records
import numpy as np

from brax_concurrent.envs import make
from brax_concurrent.envs.arrays import resolve_backend
from brax_concurrent.training.evaluate import Scores, score, score_in_gymnasium
from brax_concurrent.training.policy import POLICY, Policy


def measure(policies: list[Policy], episodes: int, backend: str) -> None:
    """Score one robot's policies in both places, print and record."""
    robot = policies[0].robot
    env = make(robot, episodes, backend=backend)
    pairs = []
    for policy in policies:
        pair = score(policy, env), score_in_gymnasium(policy, episodes)
        print(
            f"{robot}, {int(policy.steps):,} steps: here {pair[0].mean:,.1f} +- {pair[0].std:,.1f}, in Gymnasium "
            f"{pair[1].mean:,.1f} +- {pair[1].std:,.1f}",
            flush=True,
        )
        pairs.append(pair)
    ratio = statistics.median(ours.mean / theirs.mean for ours, theirs in pairs)
    common: dict[str, Any] = {"unit": "return", "backend": env.backend, "num_envs": episodes}
    ours, theirs = ([pair[i] for pair in pairs] for i in (0, 1))
    for places, settings in (
        (theirs, {"scheduler": "gymnasium"}),
        (ours, {"scheduler": env.scheduler, "granularity": env.granularity, "baseline": "gymnasium", "ratio": ratio}),
    ):
        summary = _records.summary([scores.mean for scores in places])
        _records.append("transfer", robot, **summary, **common, **settings, detail=detail(places, episodes))


def detail(scores: list[Scores], episodes: int) -> dict[str, Any]:
    """Over the episodes of all policies."""
    returns = np.stack([each.returns for each in scores])
    within = returns.std(axis=1, ddof=1) if episodes > 1 else np.zeros(len(scores))
    error = float(np.sqrt(np.square(within).sum() / episodes) / len(scores))
    return {"episodes of each policy": episodes, "mean": float(returns.mean()), "standard error": error}


def main(arguments: list[str] | None = None) -> None:
    """Group the policies by robot and score them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--episodes", type=int, default=50, help="of each policy in each place")
    parser.add_argument("--backend", default="auto", choices=("auto", "cpu", "cuda"))
    given = parser.parse_args(arguments)
    loaded = [Policy.load(path / POLICY if path.is_dir() else path) for path in given.policies]
    for robot in dict.fromkeys(policy.robot for policy in loaded):
        own = [policy for policy in loaded if policy.robot == robot]
        measure(own, given.episodes, resolve_backend(given.backend))


if __name__ == "__main__":
    main()
