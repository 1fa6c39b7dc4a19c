"""GymVectorEnv against Gymnasium's own SyncVectorEnv, call by call, and its registration.

The robot is a pendulum; where two sides are compared it is always reset to the same state, so that random numbers do
not matter.
"""

from __future__ import annotations

import dataclasses
import re

import batches
import jax
import numpy as np
import pendulum
import pytest
from swing import LIMIT, Swing, swing

import brax_concurrent as bc

gymnasium = pytest.importorskip("gymnasium")

from gymnasium.utils.performance import benchmark_vector_step  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402
from gymnasium.wrappers.vector import RecordEpisodeStatistics  # noqa: E402

from brax_concurrent.training import gymnasium as ids  # noqa: E402
from brax_concurrent.training.gymnasium_env import GymVectorEnv  # noqa: E402

NUM = pendulum.NUM
MODES = list(AutoresetMode)


def env(num_envs=NUM, *, autoreset=False, **arguments):
    return pendulum.env(num_envs, autoreset=autoreset, max_episode_steps=LIMIT, **arguments)


def vector(mode=AutoresetMode.NEXT_STEP, seed=None):
    return GymVectorEnv(env(autoreset=mode is AutoresetMode.SAME_STEP), autoreset_mode=mode, seed=seed)


class Single(gymnasium.Env):
    """One pendulum as one Gymnasium environment, for SyncVectorEnv."""

    def __init__(self):
        self.batch = swing(1)
        size = self.batch.observation_size
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = gymnasium.spaces.Box(self.batch.action_low, self.batch.action_high)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = self.batch.reset(jax.random.key(0))
        return np.asarray(self.state.obs)[0], self.numbers(set(self.state.info) - set(self.batch.task.info))

    def step(self, action):
        self.state = self.batch.step(self.state, action[None])
        reward, *done = (np.asarray(getattr(self.state, n))[0] for n in ("reward", "terminated", "truncated"))
        return np.asarray(self.state.obs)[0], reward, *done, self.numbers({*self.state.info, *self.state.metrics})

    def numbers(self, names):
        return {n: np.asarray(v)[0] for n, v in (self.state.info | self.state.metrics).items() if n in names}


def assert_equal(found, expected, path=""):
    """Equal nested dicts of arrays, of equal dtypes but for rewards, which SyncVectorEnv has in double precision."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), path
        for name in expected:
            assert_equal(found[name], expected[name], f"{path}/{name}")
    elif isinstance(expected, np.ndarray) and expected.dtype != object:
        np.testing.assert_array_equal(found, expected, err_msg=path)
        assert found.dtype == expected.dtype, path
    elif isinstance(expected, np.ndarray):
        assert found.dtype == object
        for i in range(NUM):
            assert (found[i] is None) == (expected[i] is None), path
            if expected[i] is not None:
                assert_equal(found[i], expected[i], f"{path}[{i}]")
    else:
        raise TypeError(f"{path}: expected a dict or an array, got {type(expected).__name__}")


@pytest.mark.parametrize("mode", MODES)
def test_it_does_what_sync_vector_env_does(mode):
    own = swing(NUM, autoreset=mode is AutoresetMode.SAME_STEP)
    ours, theirs = GymVectorEnv(own, autoreset_mode=mode), SyncVectorEnv([Single] * NUM, autoreset_mode=mode)
    assert ours.metadata["autoreset_mode"] is theirs.metadata["autoreset_mode"]
    for found, expected in zip(ours.reset(seed=0), theirs.reset(seed=0), strict=True):
        assert_equal(found, expected, "reset")
    ends = []
    for step, action in enumerate(batches.random_actions(ours.env, 3 * LIMIT + 2)):
        found, expected = ours.step(action), theirs.step(action)
        for name, a, b in zip(("obs", "reward", "terminated", "truncated"), found, expected, strict=False):
            assert_equal(a, b if name != "reward" else b.astype(np.float32), f"step {step}: {name}")
        assert_equal(found[4], expected[4], f"step {step}: infos")
        done = found[2] | found[3]
        ends.append(found[2:4])
        mask = done if mode is AutoresetMode.DISABLED else np.zeros(NUM, bool)
        if step in (1, 7):  # so that episodes end at different times
            mask = mask | (np.arange(NUM) == step % 3)
        if mask.any():
            again, expected = (each.reset(options={"reset_mask": mask.copy()}) for each in (ours, theirs))
            assert_equal(again[0], expected[0], f"step {step}: reset")
            assert_equal(again[1], expected[1], f"step {step}: reset infos")
    terminated, truncated = np.swapaxes(ends, 0, 1)
    assert terminated.any()
    assert truncated.any()


def test_spaces():
    own = vector()
    assert own.single_observation_space.shape == (1,)
    assert own.single_action_space == gymnasium.spaces.Box(own.env.action_low, own.env.action_high, dtype=np.float32)
    assert own.observation_space.shape == own.action_space.shape == (NUM, 1)
    observations, _ = own.reset(seed=0)
    assert observations in own.observation_space
    assert own.observation_space.dtype == own.action_space.dtype == np.float32
    observations, rewards, terminations, truncations, _ = own.step(own.action_space.sample())
    assert observations in own.observation_space
    assert [(a.shape, a.dtype) for a in (rewards, terminations, truncations)] == [
        ((NUM,), np.float32),
        ((NUM,), np.bool_),
        ((NUM,), np.bool_),
    ]


def test_results_are_read_only_views_that_later_steps_leave_alone():
    own = vector()
    observations, _ = own.reset(seed=0)
    kept = observations.copy()
    assert not observations.flags.owndata
    assert not observations.flags.writeable
    for action in batches.random_actions(own.env, LIMIT + 2):
        own.step(action)
    np.testing.assert_array_equal(observations, kept)


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_fixes_all_that_follows(mode):
    def run(own, seed):
        results = [own.reset(seed=seed)[0]]
        for action in batches.random_actions(own.env, LIMIT):
            results.append(own.step(action)[0])
        mask = np.arange(NUM) == 1
        results += [own.reset(options={"reset_mask": mask})[0], own.reset()[0]]
        return np.stack(results)

    one, other = vector(mode), vector(mode, seed=3)
    first = run(one, 3)
    np.testing.assert_array_equal(run(one, 3), first)
    np.testing.assert_array_equal(run(other, None), first)
    assert (run(one, 4) != first).any(axis=(1, 2)).all()
    assert (first[-1] != first[0]).all()
    assert np.unique(first[0]).size == NUM  # environments differ


def test_a_seed_with_a_mask_reseeds_those_environments():
    own, mask = vector(), np.array([True, False, True, False])
    fresh, _ = own.reset(seed=5)
    before, _ = own.reset(seed=6)
    after, infos = own.reset(seed=5, options={"reset_mask": mask})
    np.testing.assert_array_equal(after, np.where(mask[:, None], fresh, before))
    np.testing.assert_array_equal(infos["_diverged"], mask)


def test_same_step_is_the_environment_itself():
    own = vector(AutoresetMode.SAME_STEP)
    own.reset(seed=0)
    state = own.state
    for action in batches.random_actions(own.env, LIMIT):
        state = own.env.step(state, action)
        own.step(action)
    batches.assert_same_bits(own.state, state)
    assert np.asarray(state.truncated).all()


def test_an_action_where_next_step_resets_is_not_looked_at():
    own = vector()
    own.reset(seed=0)
    for action in batches.random_actions(own.env, LIMIT):
        own.step(action)
    _, rewards, _, _, infos = own.step(np.full((NUM, 1), np.nan, np.float32))
    assert not rewards.any()
    assert not infos["bad_actions"].any()
    *_, infos = own.step(np.full((NUM, 1), np.nan, np.float32))
    assert infos["bad_actions"].tolist() == [1] * NUM


@pytest.mark.parametrize("mode", MODES)
def test_gymnasiums_users_of_vector_environments_work(mode):
    assert benchmark_vector_step(vector(mode), target_duration=0, seed=0) > 0


def test_gymnasiums_wrapper_counts_episodes():
    own = RecordEpisodeStatistics(vector(AutoresetMode.SAME_STEP))
    own.reset(seed=0)
    for action in batches.random_actions(own.unwrapped.env, LIMIT):
        infos = own.step(action)[-1]
    assert infos["episode"]["l"].tolist() == [LIMIT] * NUM


@dataclasses.dataclass
class Forces(Swing):
    """With a vector among the numbers that it tells, in no good order."""

    def __post_init__(self):
        super().__post_init__()
        self.info = ("force[0]", *self.info, "force[1]", "force[2]")

    def outcome(self, m, w, action, before, after):
        outcome = super().outcome(m, w, action, before, after)
        forces = {f"force[{i}]": i * action[0] for i in range(3)}
        return dataclasses.replace(outcome, info=forces | dict(outcome.info))


def test_a_vectors_entries_are_one_array():
    own = GymVectorEnv(Forces(), NUM, backend="cpu")
    own.reset(seed=0)
    (action,) = batches.random_actions(own.env, 1)
    *_, infos = own.step(action)
    np.testing.assert_array_equal(infos["force"], action * np.arange(3, dtype=np.float32))
    assert infos["_force"].tolist() == [True] * NUM
    for name in own.env.task.metrics:
        np.testing.assert_array_equal(infos[name], own.state.metrics[name])
    assert infos["x_position"].shape == (NUM,)


def test_the_state_is_a_copy():
    own = vector()
    own.reset(seed=0)
    state = own.state
    expected = {name: leaf.copy() for name, leaf in batches.leaves(state).items()}
    own.step(np.ones((NUM, 1), np.float32))
    batches.assert_same_bits(state, expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"env_or_name": "halfcheetah", "autoreset_mode": "Never"}, "autoreset_mode: expected AutoresetMode.NEXT_STEP"),
        ({"env_or_name": "halfcheetah", "autoreset": True}, "autoreset: autoreset_mode says it"),
        ({"env_or_name": "halfcheetah", "num_envs": 0}, "num_envs: expected a whole number of at least 1, got 0"),
        ({"env_or_name": "halfcheetah", "legs": 3}, "halfcheetah: there is no argument 'legs'"),
        ({"env_or_name": "halfcheetah", "seed": -1}, "seed: expected a whole number of at least 0, got -1"),
        ({"env_or_name": {"ant": 3}}, "env_or_name: expected the name of a robot, a Task or an Env, got dict"),
    ],
)
def test_a_wrong_argument_is_named(arguments, said):
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        GymVectorEnv(**arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_envs": 3}, f"num_envs: expected that of the Env, {NUM}, got 3"),
        ({"frame_skip": 3}, "env_or_name: an Env has its arguments already, got ['frame_skip'] beside it"),
        ({"autoreset_mode": "SameStep"}, "env_or_name: expected an Env made with autoreset=True"),
    ],
)
def test_an_env_has_its_arguments(arguments, said):
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        GymVectorEnv(env(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"seed": [1, 2, 3, 4]}, "seed: expected one whole number for the batch or None, got [1, 2, 3, 4]"),
        ({"seed": True}, "seed: expected one whole number"),
        ({"options": {"mask": 1}}, "options: expected no others than 'reset_mask', got ['mask']"),
        ({"options": {"reset_mask": [True] * NUM}}, "options['reset_mask']: expected a NumPy array of bool, got list"),
        ({"options": {"reset_mask": np.ones(NUM)}}, "expected a NumPy array of bool, got one of float64"),
        ({"options": {"reset_mask": np.ones(3, bool)}}, "options['reset_mask']: expected the shape (4,), got (3,)"),
        ({"options": {"reset_mask": np.zeros(NUM, bool)}}, "options['reset_mask']: expected at least one True"),
    ],
)
def test_a_wrong_argument_of_reset_is_named(arguments, said):
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        vector().reset(**arguments)


def test_calls_out_of_order_are_refused():
    own, action = vector(AutoresetMode.DISABLED), np.zeros((NUM, 1), np.float32)
    mask = np.arange(NUM) == 2
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        own.step(action)
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        own.reset(options={"reset_mask": mask})
    own.reset(seed=0)
    with pytest.raises(ValueError, match=r"actions: expected float32\[4, 1\], got float32\[4\]"):
        own.step(action[:, 0])
    own.step(action)
    own.reset(options={"reset_mask": mask})
    for _ in range(LIMIT - 1):
        own.step(action)
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"environments \[0, 1, 3\] ended and were not reset"):
        own.step(action)
    own.close()
    for call in (lambda: own.step(action), own.reset):
        with pytest.raises(gymnasium.error.ClosedEnvironmentError):
            call()


# ---- Registration


@pytest.mark.parametrize("identifier", ids.IDS)
def test_make_vec_makes_it(identifier):
    own = gymnasium.make_vec(identifier, num_envs=3, backend="cpu", autoreset_mode="Disabled")
    assert (own.env.name, own.num_envs, own.env.autoreset) == (ids.IDS[identifier], 3, False)
    assert own.env.task.max_episode_steps == 1000
    assert own.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    if identifier.endswith("-v5"):
        theirs = gymnasium.make(own.spec.name + "-v5")
        assert own.single_observation_space.shape == theirs.observation_space.shape
        assert own.single_action_space == theirs.action_space
        theirs.close()


@pytest.mark.parametrize("identifier", ids.IDS)
def test_make_says_that_make_vec_makes_it(identifier):
    said = re.escape(f'call gymnasium.make_vec("{identifier}", num_envs=64), without vectorization_mode')
    with pytest.raises(gymnasium.error.Error, match=said):
        gymnasium.make(identifier, backend="cpu")
    with pytest.raises(gymnasium.error.Error, match=said):
        gymnasium.make_vec(identifier, num_envs=2, vectorization_mode="sync")


def test_make_vec_passes_arguments():
    own = gymnasium.make_vec(
        "brax_concurrent/HalfCheetah-v5", num_envs=2, backend="cpu", max_episode_steps=LIMIT, xml_file=pendulum.PENDULUM
    )
    assert (own.env.task.max_episode_steps, own.env.model.nq) == (LIMIT, 1)
    assert own.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP


def test_every_task_has_an_id():
    assert sorted(ids.IDS.values()) == bc.list_envs()
    module, _, name = ids.ENTRY_POINT.partition(":")
    assert (GymVectorEnv.__module__, GymVectorEnv.__name__) == (module, name)


def test_an_id_that_names_the_module_needs_no_import_and_registration_loads_no_jax():
    code = """
        import json, sys
        import gymnasium
        spec = gymnasium.envs.registration._find_spec("brax_concurrent.training.gymnasium:brax_concurrent/Ant-v5")
        print(json.dumps([spec.id, [name for name in ("jax", "numba", "mujoco") if name in sys.modules]]))
    """
    assert batches.run_python(code) == ["brax_concurrent/Ant-v5", []]
