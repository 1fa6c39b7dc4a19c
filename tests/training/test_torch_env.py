"""TorchVecEnv: the environment itself, without copies, as rsl_rl takes it."""

from __future__ import annotations

import re

import batches
import jax
import numpy as np
import pytest
from swing import LIMIT, swing

torch = pytest.importorskip("torch")
pytest.importorskip("tensordict")

from brax_concurrent.training.torch_env import TorchVecEnv, as_jax, as_torch  # noqa: E402

NUM = 4


def vector(seed=0):
    return TorchVecEnv(swing(NUM, autoreset=True), seed=seed)


def actions(num, seed=0):
    return [torch.from_numpy(action) for action in batches.random_actions(swing(NUM), num, seed=seed)]


def test_a_step_is_the_environments():
    own = TorchVecEnv("walker2d", 33, seed=3, backend="cpu", max_episode_steps=30)
    assert (own.num_envs, own.num_actions, own.max_episode_length) == (33, 6, 30)
    assert own.cfg == {"name": "walker2d", "num_envs": 33, "seed": 3, "backend": "cpu", "max_episode_steps": 30}
    assert own.device == torch.device("cpu")
    plain = batches.env("walker2d", 33, max_episode_steps=30)
    state = plain.reset(jax.random.split(jax.random.key(3))[1])
    np.testing.assert_array_equal(own.get_observations()["policy"], state.obs)
    ends = [0, 0]
    for action in batches.random_actions(plain, 40):
        obs, rewards, dones, extras = own.step(torch.from_numpy(action))
        state = plain.step(state, action)
        batches.assert_same_bits(own.state, state)
        time_outs = np.asarray(state.truncated) & ~np.asarray(state.terminated)
        expected = {
            "obs": (obs["policy"], torch.float32, state.obs),
            "current": (own.get_observations()["policy"], torch.float32, state.obs),
            "rewards": (rewards, torch.float32, state.reward),
            "dones": (dones, torch.int64, state.done),
            "time_outs": (extras["time_outs"], torch.bool, time_outs),
            "final_obs": (extras["final_obs"], torch.float32, state.final_obs),
            "episode_length_buf": (own.episode_length_buf, torch.int32, state.internal["elapsed"]),
            **{name: (extras["log"]["/" + name], torch.float32, value) for name, value in state.metrics.items()},
        }
        for name, (found, dtype, value) in expected.items():
            assert found.dtype == dtype, name
            np.testing.assert_array_equal(found, value, err_msg=name)
        ends[0] += int(dones.sum())
        ends[1] += int(extras["time_outs"].sum())
    assert ends[0] > ends[1] > 0


def test_nothing_is_copied():
    array = jax.numpy.arange(64.0)
    tensor = as_torch(array)
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    tensor = torch.zeros(64, 16)
    assert as_jax(tensor).unsafe_buffer_pointer() == tensor.data_ptr()
    part = torch.arange(12.0).reshape(4, 3)[:, :2]
    np.testing.assert_array_equal(as_jax(part), part)


def test_what_a_step_gave_is_the_callers():
    """Later steps leave it alone, and writing to it does not change what is simulated."""
    own, other = vector(), vector()
    kept, expected = [], []
    for number, action in enumerate(actions(3 * LIMIT)):
        given = action.clone()
        obs, rewards, _, extras = own.step(given)
        given.fill_(float("nan"))
        for tensor in (obs["policy"], rewards, extras["final_obs"], *extras["log"].values()):
            kept.append(tensor)
            expected.append(tensor.clone())
        again, same, *_ = other.step(action)
        torch.testing.assert_close(obs["policy"], again["policy"], rtol=0, atol=0)
        torch.testing.assert_close(rewards, same, rtol=0, atol=0)
        if number % 2:
            again["policy"].fill_(7.0)
            same.fill_(7.0)
    for found, value in zip(kept, expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=0)


def test_seeds():
    robots = [TorchVecEnv("halfcheetah", 3, seed=seed, backend="cpu") for seed in (1, 1, 2)]
    first, same, other = (robot.get_observations()["policy"] for robot in robots)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    again, extras = robots[0].reset()
    assert not torch.equal(again["policy"], first)
    assert extras == {}
    assert torch.equal(robots[0].reset(seed=2)[0]["policy"], other)


@pytest.mark.parametrize("write", ["assign", "assign_int32", "in_place"])
def test_episodes_can_begin_at_different_times(write):
    own, begun = vector(), torch.arange(NUM)
    if write == "in_place":
        with torch.inference_mode():
            own.step(torch.zeros(NUM, 1))
        own.episode_length_buf[:] = begun
    else:
        own.episode_length_buf = begun if write == "assign" else begun.int()
    ended = np.zeros(NUM, int)
    for step in range(1, LIMIT + 1):
        *_, dones, extras = own.step(torch.zeros(NUM, 1))
        assert torch.equal(dones.bool(), extras["time_outs"])
        ended[dones.bool().numpy()] = step
    assert ended.tolist() == [LIMIT, LIMIT - 1, LIMIT - 2, LIMIT - 3]


def test_results_of_inference_mode_can_be_used_outside():
    own = vector()
    with torch.inference_mode():
        obs, *_ = own.step(torch.zeros(NUM, 1))
    layer = torch.nn.Linear(2, 1)
    layer(obs["policy"]).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.zeros((NUM, 1), np.float32), "actions: expected a torch.Tensor, got ndarray"),
        (torch.zeros(NUM), "actions: expected torch.float32 (4, 1) on cpu, got torch.float32 (4,) on cpu"),
        (torch.zeros(NUM, 1).double(), "got torch.float64 (4, 1) on cpu"),
        (torch.zeros(NUM, 1, device="meta"), "(4, 1) on meta"),
        (torch.zeros(NUM, 1, requires_grad=True), "a step has no derivatives, got a tensor that requires grad"),
    ],
)
def test_wrong_actions_are_refused(given, said):
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        vector().step(given)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"env_or_name": 3}, "env_or_name: expected the name of a robot, a Task or an Env, got int"),
        ({"env_or_name": "ant", "autoreset": False}, "autoreset: the step resets what ended"),
        ({"env_or_name": swing(NUM)}, "env_or_name: expected an Env made with autoreset=True"),
        ({"env_or_name": swing(NUM), "num_envs": 5, "legs": 3}, "already, got ['num_envs=5', 'legs'] beside it"),
        ({"env_or_name": "ant", "num_envs": 0}, "num_envs: expected a whole number of at least 1, got 0"),
    ],
)
def test_a_wrong_argument_is_named(arguments, said):
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        TorchVecEnv(**arguments)


def test_a_wrong_episode_length_buf_is_refused():
    own = vector()
    own.episode_length_buf = torch.zeros(3)
    with pytest.raises(ValueError, match=r"episode_length_buf: expected torch.int32 \(4,\) on cpu, got torch.float32"):
        own.step(torch.zeros(NUM, 1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # whatever rsl_rl and what it imports warn of
def test_rsl_rls_runner_trains():
    runners = pytest.importorskip("rsl_rl.runners")
    own = TorchVecEnv("halfcheetah", 32, backend="cpu", max_episode_steps=20)
    model = {"class_name": "MLPModel", "hidden_dims": [16], "activation": "elu", "obs_normalization": True}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
    runner = runners.OnPolicyRunner(
        own,
        {
            "num_steps_per_env": 8,
            "save_interval": 100,
            "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
            "actor": {**model, "distribution_cfg": gaussian},
            "critic": model,
            "algorithm": {"class_name": "PPO", "num_learning_epochs": 2, "num_mini_batches": 2},
        },
    )
    before = {name: value.clone() for name, value in runner.alg.get_policy().state_dict().items()}
    runner.learn(3, init_at_random_ep_len=True)
    after = runner.alg.get_policy().state_dict()
    assert any(not torch.equal(before[name], value) for name, value in after.items())
    assert all(torch.isfinite(value).all() for value in after.values())
    policy = runner.get_inference_policy()
    assert policy(own.get_observations()).shape == (32, 6)
