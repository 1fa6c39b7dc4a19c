"""Every example runs, at a small size, and prints what it promises."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

# By file: arguments of its main, and what it prints, as a regular expression.
CASES = {
    "brax_ppo.py": (
        {"num_timesteps": 1280, "num_envs": 16, "episode_length": 20, "hidden": (8,), "num_evals": 2},
        r"        0 steps: mean return +-?\d+\.\d\d, mean length +\d+\.\d\n"
        r"    1,280 steps: mean return +-?\d+\.\d\d, mean length +\d+\.\d\n",
    ),
    "cholesky.py": (
        {"count": 5, "size": 8},
        r"35 tasks, 13 one after the other; largest error \d\.\de-1[3-6]\n",
    ),
    "custom_network.py": (
        {"batch": 12, "size": 16, "channels": 4},
        r"two_branches: 908 parameters, 228 tasks for 12 images\n"
        r"\d+ took coarse\n\d+ took fine\n\d+ took fine and coarse\nlargest difference from JAX: \de-0[5-9]\n",
    ),
    "demo.py": (
        {"num_envs": 16, "length": 30, "batches": 2, "robots": ("halfcheetah", "walker2d")},
        r"16 environments of each robot, 2 batches of 30 steps, on \S+\n"
        r"halfcheetah +compiled in +[\d.]+ s; +[\d,]+ steps/s; +0 episodes: none\n"
        r"walker2d +compiled in +[\d.]+ s; +[\d,]+ steps/s; +\d\d episodes: return +[\d.-]+, length +[\d.]+\n"
        r"The policy is untrained.*\n"
        r"  obs +float32 +\(30, 16, 17\)\n  action +float32 +\(30, 16, 6\)\n  log_prob .*\(30, 16\)\n(.*\n)*"
        r"  final_obs +float32 +\(30, 16, 17\)\n",
    ),
    "domain_randomisation.py": (
        {"num_envs": 32, "steps": 10},
        r"(\w+ scaled by less than 0.8: \d\.\d\d m from the start; by more: \d\.\d\d m\n){2}",
    ),
    "evolution.py": (
        {"num_envs": 64, "steps": 5, "generations": 2},
        r"(generation \d: mean return +-?\d+\.\d\d, best +-?\d+\.\d\d, of 64 policies\n){2}",
    ),
    "gymnasium_vector.py": (
        {"num_envs": 8, "steps": 20, "max_episode_steps": 10},
        r"160 steps: obs \(20, 8, 17\), actions \(20, 8, 6\), float32\n"
        r"16 episodes, mean return -?\d\.\d\d; 16 bootstrapped\n",
    ),
    "own_task.py": (
        {"num_envs": 32, "steps": 100},
        r"told 0\.[0-4]\d m/s, they hop -?\d\.\d\d m/s\n"
        r"told 0\.[5-9]\d m/s, they hop -?\d\.\d\d m/s\n\d+ falls in 32 s\n",
    ),
    "ppo_gymnasium.py": (
        {"num_envs": 8, "steps": 8, "updates": 2, "hidden": (8,), "max_episode_steps": 8},
        r"update 1: 8 episodes ended, mean return -?\d\.\d\d\n"
        r"update 2: 8 episodes ended, mean return -?\d\.\d\d\n",
    ),
    "ppo_jax.py": (
        {"num_envs": 8, "length": 8, "updates": 2, "hidden": (8,)},
        r"update 1: mean reward -?\d\.\d{3}\nupdate 2: mean reward -?\d\.\d{3}\n",
    ),
    "random_rollout.py": (
        {"num_envs": 8, "steps": 20},
        r"160 steps, mean reward -0\.\d+\nafter 1 s they are between -?[\d.]+ m and -?[\d.]+ m from the start\n",
    ),
    "sharding.py": (
        {"num_envs": 8, "steps": 5, "generations": 2},
        r"8 worlds on 1 devices of 1 processes\nmean return of 5 steps after 2 generations: -?\d\.\d{3}\n",
    ),
    "simulator.py": (
        {"num_envs": 9},
        r"after 3.0 s 8 of 9 poles stand: gains from 1.00 on\ntips between 0.40 m and 1.60 m; 0 diverged\n",
    ),
}


NEEDS = {"brax_ppo.py": "brax.training.agents.ppo.train"}  # what may be missing


def test_every_example_is_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_runs(name, capsys):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
        capsys.readouterr()  # mujoco-mjx prints which of its own backends it has not
    arguments, output = CASES[name]
    runpy.run_path(str(EXAMPLES / name))["main"](**arguments)
    printed = capsys.readouterr().out
    assert re.fullmatch(output, printed), printed


@pytest.mark.parametrize("name", CASES)
def test_it_is_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < (60 if name == "own_task.py" else 80)
