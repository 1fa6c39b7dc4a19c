"""MlpPolicy: its JAX function, its kernel, and that both do the same; without environments."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import norm

import brax_concurrent as bc
from brax_concurrent.backends import cuda
from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.envs.policy import step_keys
from brax_concurrent.envs.policy_kernel import parts_of
from brax_concurrent.kernels.kernel import Kernel
from brax_concurrent.kernels.reference import ReferenceWorld
from brax_concurrent.kernels.specialize import touched
from brax_concurrent.scheduler.footprint import Hazard, conflicts, hazards
from brax_concurrent.scheduler.serial import TileLayout
from tests.lanes import NoModel, run_compiled, specialized

SIZES = [  # observation, hidden, activation, action: below, at and beyond whole blocks of 4 inputs and 16 outputs
    (17, (64, 64), "tanh", 6),
    (3, (), "tanh", 1),
    (16, (16,), "relu", 16),
    (5, (1,), "swish", 2),
    (21, (18, 33, 7), "swish", 17),
    (8, (4, 3, 2, 40), "relu", 5),
]
NUM = 45


def task(observation, action):
    bound = np.ones(action, np.float32)
    return SimpleNamespace(
        name="made up", observation_size=observation, action_size=action, action_low=-bound, action_high=bound
    )


def random_params(policy, observation, action, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape, scale=1.0):
        return jnp.asarray((scale * rng.normal(size=shape)).astype(dtype))

    sizes = (observation, *policy.hidden, action)
    layers = tuple((draw(a, b, scale=a**-0.5), draw(b)) for a, b in itertools.pairwise(sizes))
    params = {"layers": layers, "log_std": draw(action, scale=0.5)}
    if policy.normalize_obs:
        params |= {"obs_mean": draw(observation), "obs_std": jnp.exp(draw(observation))}
    return params


def observations(observation, dtype=np.float32):
    obs = np.random.default_rng(1).normal(size=(NUM, observation)).astype(dtype)
    obs[3] *= 1e3  # beyond the limits of normalised observations and of the activations
    return obs


def kernel_arrays(policy, params, obs, key, step, size):
    """(arrays with rows of environments, shared arrays) of the policy's kernel."""
    dtype = obs.dtype
    own = {
        "obs": obs.copy(),
        "action": np.zeros((NUM, size.action_size), dtype),
        "policy_obs": np.zeros_like(obs),
        "log_prob": np.zeros((NUM, 1), dtype),
        "policy_env": np.arange(NUM, dtype=np.int32)[:, None],
        "policy_step": np.full((NUM, 1), step, np.int32),
    }
    shared = {name: np.array(array) for name, array in policy.packed(params, size).items()}
    return own, shared | {"policy_key": np.asarray(jax.random.key_data(key)).view(np.int32)[None]}


def as_kernels(policy, size, split=False):
    names = ("obs", "action", "policy_obs", "log_prob", "policy_env", "policy_step", "policy_weights", "policy_head",
             "policy_key", "policy_statistics")  # fmt: skip
    made = policy.kernel(size, split)
    every = (*made.fields, *("user." + name for name in names))
    return [Kernel(name, function, every, every) for name, function in made.kernels.items()], made.fields


@pytest.mark.parametrize(("observation", "hidden", "activation", "action"), SIZES)
def test_the_kernel_is_the_function(observation, hidden, activation, action):
    """In single precision, to its rounding; every other size with normalised observations."""
    policy = bc.MlpPolicy(hidden, activation, normalize_obs=len(hidden) % 2 == 1)
    params, obs, key = random_params(policy, observation, action), observations(observation), jax.random.key(5)
    size = task(observation, action)
    own, shared = kernel_arrays(policy, params, obs, key, 3, size)
    kernels, fields = as_kernels(policy, size)
    run_compiled(kernels, fields, own, shared=shared)
    expected, log_prob = policy(params, obs, step_keys(key, 4)[3])
    np.testing.assert_allclose(own["action"], expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(own["log_prob"][:, 0], log_prob, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(own["policy_obs"], obs)
    assert (own["policy_step"] == 4).all()


@pytest.mark.parametrize(("observation", "hidden", "activation", "action"), [SIZES[0], SIZES[1], SIZES[4]])
def test_several_kernels_give_the_bits_of_one(observation, hidden, activation, action):
    policy = bc.MlpPolicy(hidden, activation, normalize_obs=len(hidden) % 2 == 1)
    params, obs, size = random_params(policy, observation, action), observations(observation), task(observation, action)
    one, shared = kernel_arrays(policy, params, obs, jax.random.key(5), 3, size)
    several = {name: array.copy() for name, array in one.items()}
    for own, split in ((one, False), (several, True)):
        kernels, fields = as_kernels(policy, size, split)
        run_compiled(kernels, fields, own, shared=shared)
    assert len(kernels) == 3 + sum(-(-width // 16) for width in hidden)
    assert np.ptp(one["action"]) > 0.1
    for name, array in one.items():
        assert several[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("hidden", [(64, 64), (100, 40, 17)])
def test_parts_of_a_layer_wait_for_the_layer_before_and_not_for_each_other(hidden):
    """Which is what their footprints say, by which all schedulers go."""
    policy, size = bc.MlpPolicy(hidden), task(17, 6)
    kernels, fields = as_kernels(policy, size, split=True)
    own, shared = kernel_arrays(policy, random_params(policy, 17, 6), observations(17), jax.random.key(0), 0, size)
    special = specialized(kernels, fields, own, "f32", shared=shared)
    buffers = [BufferSpec(name, (), "float32", "readwrite", name in own) for name in (*own, *shared)]
    layout = TileLayout(special.layout.arena_bytes, tuple(buffers))
    footprints = {name: layout.footprint(*touched(program))(0) for name, program in special.programs.items()}
    parts = [[f"policy_{i}_{j}" for j in range(len(parts_of(n, len(hidden))))] for i, n in enumerate(hidden)]
    layers = [["policy_observe"], *parts, ["policy_head"]]
    assert [*footprints] == ["policy_observe", "policy_normals", *itertools.chain(*layers[1:])]
    for one, other in itertools.chain(*(itertools.combinations(layer, 2) for layer in layers)):
        assert not conflicts(footprints[one], footprints[other]), (one, other)
    for one, other in itertools.chain(*itertools.starmap(itertools.product, itertools.pairwise(layers))):
        assert hazards(footprints[one], footprints[other]) & Hazard.RAW, (one, other)
    assert [n for n in footprints if conflicts(footprints[n], footprints["policy_normals"])] == [
        "policy_normals",
        "policy_head",
    ]


def test_how_a_layer_is_cut():
    assert [[*blocks] for blocks in parts_of(64, 2)] == [[0], [1], [2], [3]]
    assert [len(blocks) for blocks in parts_of(256, 2)] == [2] * 8
    assert [len(blocks) for blocks in parts_of(17, 1)] == [1, 1]
    assert [len(blocks) for blocks in parts_of(100, 4)] == [2, 2, 2, 1]
    for layers in range(1, 17):
        assert 1 <= len(parts_of(1000, layers)) * layers <= 16
    deep = bc.MlpPolicy((8,) * 17).kernel(task(3, 2), split=True)
    assert [*deep.kernels] == ["policy"]


def test_in_double_precision_it_is_the_function_and_the_reference():
    observation, hidden, action = 5, (18,), 3
    with batches.precision("float64"):
        policy = bc.MlpPolicy(hidden, "tanh", normalize_obs=True)
        params = random_params(policy, observation, action, np.float64)
        obs, key, size = observations(observation, np.float64), jax.random.key(5), task(observation, action)
        own, shared = kernel_arrays(policy, params, obs, key, 0, size)
        kernels, fields = as_kernels(policy, size)
        again = {name: array.copy() for name, array in own.items()}
        run_compiled(kernels, fields, own, "f64", shared=shared)
        ReferenceWorld(fields, NUM, again, shared).run(kernels[0], NoModel())
        expected, log_prob = policy(params, obs, step_keys(key, 1)[0])
    np.testing.assert_allclose(own["action"], expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(own["log_prob"][:, 0], log_prob, rtol=1e-12)
    np.testing.assert_allclose(again["action"], expected, rtol=1e-12, atol=1e-12)


def test_its_kernel_compiles_for_a_gpu():
    pytest.importorskip("cuda.bindings.nvvm", reason="numba-cuda with NVIDIA's compilers is not installed")
    policy, size = bc.MlpPolicy((64, 64), normalize_obs=True), task(17, 6)
    kernels, fields = as_kernels(policy, size)
    arrays = kernel_arrays(policy, random_params(policy, 17, 6), observations(17), jax.random.key(0), 0, size)
    special = specialized(kernels, fields, arrays[0], "f32", shared=arrays[1])
    compiled = cuda.compile_kernel(special.programs["policy"])
    assert compiled.resources.registers <= 72  # 54 when this was written
    assert compiled.resources.spill_stores in (0, None)
    assert "ld.global.nc.v4.f32" in compiled.ptx


# ---- random numbers


def test_normals_are_normal():
    numbers = np.asarray(bc.MlpPolicy.normals(jax.random.key(0), 20000, 7), np.float64)
    for column in numbers.T:
        assert abs(column.mean()) < 0.03
        assert abs(column.std() - 1) < 0.02
        # Kolmogorov and Smirnov's distance, of which 1.95 / sqrt(n) is exceeded once in 1000 times.
        ranks = np.asarray(norm.cdf(np.sort(column)))
        assert np.abs(ranks - (np.arange(len(column)) + 0.5) / len(column)).max() < 1.95 / math.sqrt(len(column))
    correlation = np.corrcoef(numbers.T) - np.eye(7)
    assert np.abs(correlation).max() < 0.03
    assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.03  # of neighbours


def test_every_key_step_environment_and_component_has_its_own_number():
    keys = jax.vmap(lambda key: step_keys(key, 4))(jax.random.split(jax.random.key(0), 2)).reshape(8)
    every = np.asarray(jax.vmap(lambda key: bc.MlpPolicy.normals(key, 50, 5))(keys))
    assert len(np.unique(every)) > 0.999 * every.size  # of 2**23 radii and angles, few meet by chance
    np.testing.assert_array_equal(bc.MlpPolicy.normals(keys[0], 20, 3), every[0, :20, :3])  # of nothing else


def test_any_generators_keys_are_taken():
    policy = bc.MlpPolicy(())
    params, obs = random_params(policy, 3, 2), observations(3)
    answers = [policy(params, obs, key)[0] for key in (jax.random.key(1), jax.random.PRNGKey(1))]
    np.testing.assert_array_equal(*answers)
    other = policy(params, obs, jax.random.key(1, impl="rbg"))[0]
    assert not np.array_equal(other, answers[0])


# ---- densities and derivatives


def test_log_prob_is_the_density_of_what_was_drawn():
    policy = bc.MlpPolicy((18,), "swish")
    params, obs = random_params(policy, 7, 3), observations(7)
    action, log_prob = policy(params, obs, jax.random.key(2))
    density = norm.logpdf(action, policy.mean(params, obs), jnp.exp(params["log_std"])).sum(axis=1)
    np.testing.assert_allclose(log_prob, density, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(policy.log_prob(params, obs, action), density, rtol=1e-5, atol=1e-5)
    expected = sum(0.5 * math.log(2 * math.pi * math.e) + s for s in params["log_std"].tolist())
    np.testing.assert_allclose(policy.entropy(params), expected, rtol=1e-6)


def test_it_has_the_derivatives_that_differences_say():
    with batches.precision("float64"):
        policy = bc.MlpPolicy((6, 5), normalize_obs=True)
        params = random_params(policy, 4, 3, np.float64)
        obs = observations(4, np.float64)
        action, _ = policy(params, obs, jax.random.key(2))

        @jax.jit
        def loss(params):
            ratio = jnp.exp(policy.log_prob(params, obs, action) - policy.log_prob(params, obs, 0.9 * action) * 0.1)
            return ratio.mean() + policy(params, obs, jax.random.key(3))[0].sum() + policy.entropy(params)

        found = jax.grad(loss)(params)
        assert not found.pop("obs_mean").any()
        assert not found.pop("obs_std").any()
        trained = {name: params[name] for name in found}
        direction = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(x.size).normal(size=x.shape)), trained)

        def along(h):
            return loss(params | jax.tree.map(lambda x, d: x + h * d, trained, direction))

        slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), found, direction)))
        np.testing.assert_allclose(slope, (along(1e-5) - along(-1e-5)) / 2e-5, rtol=1e-6)


# ---- parameters


def test_fresh_parameters_fit_and_differ():
    env = SimpleNamespace(observation_size=7, action_size=3, dtype=jnp.dtype("float32"))
    policy = bc.MlpPolicy((8, 6), normalize_obs=True)
    first, second = (policy.init(jax.random.key(i), env) for i in range(2))
    policy.check(first, 7, 3, jnp.float32)
    weights = first["layers"][1][0]
    np.testing.assert_allclose(weights.T @ weights, 2 * np.eye(6), atol=1e-5)
    assert not np.allclose(weights, second["layers"][1][0])
    obs = observations(7)
    assert np.abs(policy.mean(first, obs)).max() < 0.1
    assert hash(policy) == hash(bc.MlpPolicy([8, 6], normalize_obs=True))


def test_scaled_actions_are_clipped_into_their_space():
    size = task(3, 2)
    size.action_low, size.action_high = np.array([-1, 0], np.float32), np.array([3, 0.5], np.float32)
    apply = bc.MlpPolicy(scale_actions=True).applied(size)
    assert apply([0.5, -0.5]) == [2.0, 0.125]
    assert apply([5.0, -7.0]) == [3.0, 0.0]
    assert np.isnan(apply([math.nan, 0.0])[0])
    assert bc.MlpPolicy().applied(size) is None
    size.action_high[0] = np.inf
    with pytest.raises(ValueError, match=r"scale_actions: expected bounds of all actions of made up, got .*inf"):
        bc.MlpPolicy(scale_actions=True).applied(size)
