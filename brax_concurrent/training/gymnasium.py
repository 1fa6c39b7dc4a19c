"""Importing this module registers the robots with Gymnasium, for `gymnasium.make_vec`.

Gymnasium loads no plugins by itself since 1.0. An id can name the module to import first:
`gymnasium.make_vec("brax_concurrent.training.gymnasium:brax_concurrent/Ant-v5", num_envs=64)`. Needs the extra `gym`.
Neither JAX nor Numba is loaded before an environment is made.
"""

from __future__ import annotations

from typing import Any, NoReturn

import gymnasium

ENTRY_POINT = "brax_concurrent.training.gymnasium_env:GymVectorEnv"
SINGLE_ENTRY_POINT = "brax_concurrent.training.gymnasium:no_single_environment"
MAX_EPISODE_STEPS = 1000

IDS = {
    "brax_concurrent/Ant-v5": "ant",
    "brax_concurrent/Grasp-v0": "grasp",
    "brax_concurrent/HalfCheetah-v5": "halfcheetah",
    "brax_concurrent/Humanoid-v5": "humanoid",
    "brax_concurrent/Walker2d-v5": "walker2d",
}
"""Names of tasks by Gymnasium's ids. Those of version 5 are Gymnasium's tasks of that version."""


def no_single_environment(env_or_name: str, **_: Any) -> NoReturn:
    """What `gymnasium.make` calls, which makes no batches: says what does.

    Raises:
        gymnasium.error.Error: always.
    """
    identifier = next((identifier for identifier, name in IDS.items() if name == env_or_name), "brax_concurrent/...")
    raise gymnasium.error.Error(
        f"{identifier} is a batch of environments, which gymnasium.make has none of: call "
        f'gymnasium.make_vec("{identifier}", num_envs=64), without vectorization_mode'
    )


def register() -> None:
    """Register what is not registered yet."""
    for identifier, name in IDS.items():
        if identifier not in gymnasium.registry:
            gymnasium.register(
                identifier,
                entry_point=SINGLE_ENTRY_POINT,
                vector_entry_point=ENTRY_POINT,
                max_episode_steps=MAX_EPISODE_STEPS,
                kwargs={"env_or_name": name},
            )


register()
