"""Wrong architectures of policies, parameters that do not fit, rollouts that cannot be one stream."""

from __future__ import annotations

import batches
import jax
import jax.numpy as jnp
import pytest

import brax_concurrent as bc

pytestmark = pytest.mark.xdist_group("locomotion")
POLICY = bc.MlpPolicy((8, 6))


@pytest.fixture(scope="module")
def cheetah():
    return batches.env("halfcheetah", 4)


@pytest.fixture(scope="module")
def params(cheetah):
    return POLICY.init(jax.random.key(0), cheetah)


def roll(env, params, policy=POLICY, state=None, length=2, **arguments):
    state = env.reset(jax.random.key(0)) if state is None else state
    return bc.rollout(env, policy, params, state, jax.random.key(0), length, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"hidden": 64}, TypeError, r"hidden: expected a sequence of widths such as \(64, 64\), got 64"),
        ({"hidden": (64, 0)}, ValueError, r"hidden: expected whole numbers of at least 1, got \(64, 0\)"),
        ({"hidden": (64.0,)}, ValueError, r"hidden: expected whole numbers"),
        ({"activation": "gelu"}, ValueError, r"activation: expected one of \('tanh', 'relu', 'swish'\), got 'gelu'"),
        ({"normalize_obs": 1}, TypeError, "normalize_obs: expected True or False, got 1"),
        ({"scale_actions": None}, TypeError, "scale_actions: expected True or False, got None"),
    ],
)
def test_architectures(arguments, error, message):
    with pytest.raises(error, match=message):
        bc.MlpPolicy(**arguments)


def changed(params, layer=None, **others):
    if layer is not None:
        index, pair = layer
        layers = list(params["layers"])
        layers[index] = pair
        others["layers"] = tuple(layers)
    return params | others


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda p: p["layers"], TypeError, r"params: expected a dict of \['layers', 'log_std'\], got tuple"),
        (lambda p: p | {"obs_mean": 0}, TypeError, r"params: expected a dict of .*, got \['layers', 'log_std', 'obs_m"),
        (lambda p: changed(p, layers=p["layers"][:2]), ValueError, r"params\['layers'\]: expected 3 layers, .*got 2"),
        (
            lambda p: changed(p, (1, (p["layers"][1][0].T, p["layers"][1][1]))),
            ValueError,
            r"params\['layers'\]\[1\] weights: expected float32\[8, 6\], got float32\[6, 8\]",
        ),
        (
            lambda p: changed(p, (0, (p["layers"][0][0], jnp.zeros(9)))),
            ValueError,
            r"params\['layers'\]\[0\] bias: expected float32\[8\], got float32\[9\]",
        ),
        (
            lambda p: changed(p, (2, tuple(x.astype(jnp.bfloat16) for x in p["layers"][2]))),
            ValueError,
            r"params\['layers'\]\[2\] weights: expected float32\[6, 6\], got bfloat16\[6, 6\]",
        ),
        (lambda p: changed(p, (0, p["layers"][0][0])), TypeError, r"params\['layers'\]\[0\]: expected a pair"),
        (lambda p: changed(p, (0, (1.0, 2.0))), ValueError, r"\[0\] weights: expected .*, got float32\[\]"),
    ],
)
def test_parameters_that_do_not_fit(cheetah, params, change, error, message, fused):
    with pytest.raises(error, match=message):
        roll(cheetah, change(params), fused=fused)


def test_deviations_of_another_number_of_actions(cheetah, params):
    with pytest.raises(ValueError, match=r"params\['log_std'\]: expected float32\[6\], got float32\[5\]"):
        roll(cheetah, changed(params, log_std=jnp.zeros(5)), fused=True)


def test_observations_that_are_no_batch(cheetah, params):
    with pytest.raises(ValueError, match=r"obs: expected \(num_envs, observation_size\), got \(17,\)"):
        POLICY(params, jnp.zeros(17), jax.random.key(0))


def test_what_cannot_be_one_stream(cheetah, params, tmp_path):
    with pytest.raises(TypeError, match="fused: only an MlpPolicy can be part of the stream, got function"):
        roll(cheetah, params, lambda p, obs, key: (obs[:, :6], obs[:, 0]), fused=True)
    with pytest.raises(TypeError, match="fused: expected True, False or None, got 'yes'"):
        roll(cheetah, params, fused="yes")
    window = bc.make("halfcheetah", 4, backend="cpu", scheduler="sw")
    with pytest.raises(ValueError, match="fused: not with scheduler 'sw', which puts one control step in order"):
        roll(window, params, state=1, fused=True)
    traced = bc.make("halfcheetah", 4, backend="cpu", trace=tmp_path / "trace.json")
    with pytest.raises(ValueError, match="fused: not with an environment that records its control steps"):
        roll(traced, params, state=1, fused=True)
    mixed = bc.make({"halfcheetah": 4}, backend="cpu")
    with pytest.raises(ValueError, match="fused: not with several robots in one batch"):
        roll(mixed, params, state=1, fused=True)
    with pytest.raises(TypeError, match="env: expected an environment of one robot"):
        POLICY.init(jax.random.key(0), mixed)


def test_states_keys_and_lengths(cheetah, params):
    with pytest.raises(TypeError, match="state: expected a State"):
        roll(cheetah, params, state=1, fused=True)
    with pytest.raises(ValueError, match="length: expected a whole number of at least 1, got 0"):
        roll(cheetah, params, length=0, fused=True)
    with pytest.raises(TypeError, match="key: expected a JAX random key"):
        bc.rollout(cheetah, POLICY, params, cheetah.reset(jax.random.key(0)), 3, 2, fused=True)
