"""Different robots in one batch: each robot's bits are those of its own environment, however they are run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brax_concurrent as bc
from brax_concurrent.backends.native import DESC_THREADS
from brax_concurrent.envs.ant import Ant
from brax_concurrent.envs.base import Env
from brax_concurrent.envs.halfcheetah import HalfCheetah
from brax_concurrent.envs.mixed import MixedEnv, MixedState, robot_key

jax.config.update("jax_platforms", "cpu")


LIMIT = 4  # steps to truncation: the tests below go through auto-resets
KEY = jax.random.key(7)


@pytest.fixture(scope="module")
def mixed() -> MixedEnv:
    fast = HalfCheetah(frame_skip=2)
    fast.max_episode_steps = LIMIT + 1
    walker = {"healthy_z_range": (1.2, 2.0), "max_episode_steps": 100}  # falls below soon
    cheetah = {"max_episode_steps": LIMIT}
    return bc.make({"halfcheetah": (70, cheetah), "walker2d": (33, walker), "fast": (5, fast)}, threads=2)


@pytest.fixture(scope="module")
def singles(mixed: MixedEnv) -> dict[str, Any]:
    """The same robots, each made on its own."""
    return {
        "halfcheetah": bc.make("halfcheetah", 70, max_episode_steps=LIMIT),
        "walker2d": bc.make("walker2d", 33, healthy_z_range=(1.2, 2.0), max_episode_steps=100),
        "fast": bc.make(mixed.envs["fast"].task, 5),
    }


def actions(env: MixedEnv, seed: int) -> dict[str, jax.Array]:
    draw = np.random.default_rng(seed)
    return {n: jnp.asarray(draw.uniform(-1, 1, (e.num_envs, e.action_size)), jnp.float32) for n, e in env.envs.items()}


def assert_same(one: Any, other: Any) -> None:
    """Two pytrees of the same structure and bits."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.dtype == b.dtype, path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def alone(singles: dict[str, Any], act: Callable[[str, Any], Any]) -> MixedState:
    """What `act(name, environment)` gives for each robot, put together."""
    return MixedState({name: act(name, env) for name, env in singles.items()})


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_each_robot_has_the_bits_of_its_own_run(mixed, singles, threads):
    env = MixedEnv(mixed.envs, threads)
    state, own = env.reset(KEY), {n: e.reset(robot_key(KEY, n)) for n, e in singles.items()}
    assert_same(state, MixedState(own))
    terminated, truncated = dict.fromkeys(env.envs, 0), dict.fromkeys(env.envs, 0)
    for seed in range(3 * LIMIT):
        action = actions(env, seed)
        state = env.step(state, action)
        own = {n: singles[n].step(own[n], action[n]) for n in own}
        assert_same(state, MixedState(own))
        terminated = {n: count + int(state.terminated[n].sum()) for n, count in terminated.items()}
        truncated = {n: count + int(state.truncated[n].sum()) for n, count in truncated.items()}
    assert terminated["walker2d"] > 10  # every robot was reset: the walker because it fell, the others in time
    assert truncated == {"halfcheetah": 3 * 70, "walker2d": 0, "fast": 2 * 5}


def test_results_are_dicts_by_robot(mixed):
    state = mixed.step(mixed.reset(KEY), actions(mixed, 0))
    names = ["halfcheetah", "walker2d", "fast"]
    for attribute in ("qpos", "qvel", "obs", "reward", "terminated", "truncated", "done", "final_obs"):
        values = getattr(state, attribute)
        assert list(values) == names
        for name in names:
            assert values[name] is getattr(state.states[name], attribute) or attribute == "done"
            assert values[name].shape[0] == mixed.envs[name].num_envs
    np.testing.assert_array_equal(state.done["fast"], state.terminated["fast"] | state.truncated["fast"])
    assert state.info["walker2d"] is state.states["walker2d"].info
    assert state.metrics["fast"] is state.states["fast"].metrics
    assert state.model == {name: {} for name in names}


def test_facts_are_dicts_by_robot(mixed, singles):
    assert mixed.num_envs == 70 + 33 + 5
    assert list(mixed.envs) == ["halfcheetah", "walker2d", "fast"]
    assert mixed.observation_size == {"halfcheetah": 17, "walker2d": 17, "fast": 17}
    assert mixed.action_size == {"halfcheetah": 6, "walker2d": 6, "fast": 6}
    assert mixed.dt == {name: env.dt for name, env in singles.items()}
    assert mixed.dt["fast"] == pytest.approx(0.4 * mixed.dt["halfcheetah"])
    for name, env in singles.items():
        assert mixed.model[name].fingerprint == env.model.fingerprint
        np.testing.assert_array_equal(mixed.action_low[name], env.action_low)
        np.testing.assert_array_equal(mixed.action_high[name], env.action_high)
    assert repr(mixed) == "MixedEnv({'halfcheetah': 70, 'walker2d': 33, 'fast': 5})"
    assert mixed.backend == "cpu"


def test_a_robots_key_depends_on_its_name_and_nothing_else(mixed):
    """The CRC-32 of "ant" is 440568585, in every process."""
    assert_same(robot_key(KEY, "ant"), jax.random.fold_in(KEY, 440568585))
    fewer = MixedEnv({"fast": mixed.envs["fast"]}).reset(KEY)
    assert_same(fewer.states["fast"], mixed.reset(KEY).states["fast"])
    twins = MixedEnv({"left": mixed.envs["fast"], "right": mixed.envs["fast"]}).reset(KEY)
    assert not np.array_equal(twins.qpos["left"], twins.qpos["right"])
    legacy = jax.random.PRNGKey(7)
    assert_same(mixed.reset(legacy).states["fast"], mixed.envs["fast"].reset(robot_key(legacy, "fast")))


def test_reset_to_starts_from_given_states(mixed, singles):
    there = mixed.step(mixed.reset(KEY), actions(mixed, 1))
    for key in (None, jax.random.key(3)):
        default = jax.random.key(0) if key is None else key
        state = mixed.reset_to(there.qpos, there.qvel, key)
        own = alone(singles, lambda n, e, k=default: e.reset_to(there.qpos[n], there.qvel[n], robot_key(k, n)))
        assert_same(state, own)
        assert_same(state.qpos, there.qpos)


def test_reset_where_resets_those_alone(mixed, singles):
    before = mixed.step(mixed.reset(KEY), actions(mixed, 1))
    mask = {n: np.arange(e.num_envs) % 3 == 0 for n, e in mixed.envs.items()}
    after = mixed.reset_where(before, mask)
    assert_same(after, alone(singles, lambda n, e: e.reset_where(before.states[n], mask[n])))
    for name in mask:
        changed = (np.asarray(after.qpos[name]) != np.asarray(before.qpos[name])).any(1)
        np.testing.assert_array_equal(changed, mask[name])


def test_without_autoreset_episodes_go_on(mixed):
    env = bc.make({"halfcheetah": (40, {"max_episode_steps": 2})}, autoreset=False)
    single = bc.make("halfcheetah", 40, max_episode_steps=2, autoreset=False)
    state, own = env.reset(KEY), single.reset(robot_key(KEY, "halfcheetah"))
    for seed in range(3):
        action = actions(env, seed)
        state, own = env.step(state, action), single.step(own, action["halfcheetah"])
        assert_same(state.states["halfcheetah"], own)
    assert state.truncated["halfcheetah"].all()
    assert (state.states["halfcheetah"].internal["elapsed"] == 3).all()


def test_one_argument_serves_all_robots():
    env = bc.make({"halfcheetah": 3, "walker2d": (2, {"max_episode_steps": 9})}, max_episode_steps=7, nconmax=5)
    assert {name: each.task.max_episode_steps for name, each in env.envs.items()} == {"halfcheetah": 7, "walker2d": 9}
    assert [each.task.nconmax for each in env.envs.values()] == [5, 5]
    for each, threads in ((env, 0), (MixedEnv(env.envs, 1), 1), (bc.make({"halfcheetah": 3}, threads=1), 1)):
        assert each.program("reset_all").desc[DESC_THREADS] == threads


def test_per_environment_quantities_may_differ_between_robots():
    quantity = {"per_env": ("qpos0",)}
    env = bc.make({"halfcheetah": (6, quantity), "walker2d": 4})
    single = bc.make("halfcheetah", 6, **quantity)
    values = {"qpos0": np.linspace(-1, 1, 6 * 9, dtype=np.float32).reshape(6, 9)}
    named = {name: list(each) for name, each in env.reset(KEY).model.items()}
    assert named == {"halfcheetah": ["qpos0"], "walker2d": []}
    state = env.reset(KEY, {"halfcheetah": values})
    own = single.reset(robot_key(KEY, "halfcheetah"), values)
    np.testing.assert_allclose(state.qpos["halfcheetah"], values["qpos0"], atol=0.1)
    for seed in range(3):
        assert_same(state.states["halfcheetah"], own)
        action = actions(env, seed)
        state, own = env.step(state, action), single.step(own, action["halfcheetah"])
    again = env.reset_to(state.qpos, state.qvel, model={"halfcheetah": values})
    np.testing.assert_array_equal(again.model["halfcheetah"]["qpos0"], values["qpos0"])


def test_a_step_is_one_native_call(mixed):
    state = mixed.reset(KEY)
    for function, arguments in (
        (mixed.reset, (KEY,)),
        (mixed.reset_to, (state.qpos, state.qvel)),
        (mixed.reset_where, (state, state.done)),
        (mixed.step, (state, actions(mixed, 0))),
    ):
        assert str(jax.make_jaxpr(function)(*arguments)).count("ffi_call") == 1


def test_robots_with_long_tiles_come_first(mixed):
    env = MixedEnv({name: mixed.envs[name] for name in ("fast", "halfcheetah", "walker2d")})
    order = [spec.name.split(".")[0] for spec in env.program("control_step").buffers]
    assert list(dict.fromkeys(order)) == ["walker2d", "halfcheetah", "fast"]  # Runge-Kutta; 5 substeps; 2


# ---- Transformations ---------------------------------------------------------------------------------------


def test_jit_and_scan_give_the_same_bits(mixed):
    plans = [actions(mixed, seed) for seed in range(2 * LIMIT)]
    state = mixed.reset(KEY)
    eager = state
    for action in plans:
        eager = mixed.step(eager, action)
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *plans)
    scanned, rewards = jax.jit(
        lambda s, a: jax.lax.scan(lambda c, x: (lambda n: (n, n.reward))(mixed.step(c, x)), s, a)
    )(jax.jit(mixed.reset)(KEY), stacked)
    assert_same(scanned, eager)
    assert {n: r.shape for n, r in rewards.items()} == {n: (2 * LIMIT, e.num_envs) for n, e in mixed.envs.items()}
    assert_same(jax.tree.map(lambda r: r[-1], rewards), eager.reward)
    assert_same(state, mixed.reset(KEY))  # the caller's state is as it was


def test_vmap_over_keys_is_one_reset_for_each(mixed):
    keys = jax.random.split(KEY, 3)
    plan = actions(mixed, 0)

    def two(key):
        state = mixed.reset(key)
        return state, mixed.step(state, plan)

    many = jax.jit(jax.vmap(two))(keys)
    for index in range(3):
        assert_same(jax.tree.map(lambda x, i=index: x[i], many), two(keys[index]))


@pytest.mark.slow
def test_shard_map_runs_each_devices_robots():
    code = """
        import json
        import jax, jax.numpy as jnp, numpy as np
        import brax_concurrent as bc
        from jax.sharding import PartitionSpec as P

        env = bc.make({"halfcheetah": 5, "walker2d": 33})
        keys, mesh, parts = jax.random.split(jax.random.key(0), 2), jax.make_mesh((2,), ("devices",)), P("devices")
        action = {name: jnp.full((each.num_envs, 6), 0.3) for name, each in env.envs.items()}

        def run(keys):
            def many(start):
                return jax.lax.scan(lambda s, _: (env.step(s, action), s.reward), start, length=5)

            state, _ = many(env.reset(keys[0]))
            return many(env.reset_to(state.qpos, state.qvel, keys[0]))

        sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=parts, out_specs=(parts, P(None, "devices"))))
        state, rewards = sharded(jax.device_put(keys, jax.NamedSharding(mesh, parts)))
        assert len(rewards["walker2d"].sharding.device_set) == 2
        for i in range(2):
            alone, own = jax.jit(run)(keys[i : i + 1])
            for name, num_envs in (("halfcheetah", 5), ("walker2d", 33)):
                place = slice(num_envs * i, num_envs * (i + 1))
                assert np.array_equal(np.asarray(state.qpos[name])[place], alone.qpos[name])
                assert np.array_equal(np.asarray(rewards[name])[:, place], own[name])
        print(json.dumps(len(jax.devices())))
    """
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    assert batches.run_python(code, XLA_FLAGS=flags) == 2


def test_a_state_may_be_donated(mixed):
    step = jax.jit(mixed.step, donate_argnums=0)
    kept = mixed.step(mixed.step(mixed.reset(KEY), actions(mixed, 0)), actions(mixed, 1))
    assert_same(step(step(mixed.reset(KEY), actions(mixed, 0)), actions(mixed, 1)), kept)


def policy(params: Any, obs: dict[str, jax.Array], key: jax.Array) -> tuple[Any, Any]:
    """Each robot's action from its own observation."""
    action = {n: jnp.tanh(params * x[:, :6]) + 0.1 * jax.random.normal(key, (len(x), 6)) for n, x in obs.items()}
    return action, {n: -(a**2).sum(1) for n, a in action.items()}


def test_rollout_collects_dicts(mixed):
    length = 2 * LIMIT
    start = mixed.reset(KEY)
    data = bc.rollout(mixed, policy, jnp.float32(0.5), start, jax.random.key(5), length)
    jitted = jax.jit(policy)
    state = start
    for index, key in enumerate(jax.random.split(jax.random.key(5), length)):
        action, log_prob = jitted(jnp.float32(0.5), state.obs, key)
        for collected, want in ((data.obs, state.obs), (data.action, action), (data.log_prob, log_prob)):
            assert sorted(collected) == sorted(mixed.envs)
            for name in want:
                np.testing.assert_allclose(collected[name][index], want[name], rtol=1e-6, atol=1e-6)
        state = mixed.step(state, {n: data.action[n][index] for n in action})
        for attribute in ("reward", "terminated", "truncated", "final_obs"):
            assert_same({n: x[index] for n, x in getattr(data, attribute).items()}, dict(getattr(state, attribute)))
    assert_same(data.state, state)
    assert data.truncated["halfcheetah"].any()


def test_several_host_threads_step_at_once(mixed):
    keys = [jax.random.key(seed) for seed in range(4)]
    plan = actions(mixed, 0)

    @jax.jit
    def run(key):
        return jax.lax.scan(lambda s, _: (mixed.step(s, plan), None), mixed.reset(key), length=5)[0]

    expected = [jax.block_until_ready(run(key)) for key in keys]
    barrier, failures = threading.Barrier(4), []

    def work(index):
        barrier.wait()
        for _ in range(5):
            try:
                assert_same(run(keys[index]), expected[index])
            except AssertionError as error:
                failures.append((index, error))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


@pytest.mark.parametrize("scheduler", ["sw", "hw"])
def test_every_scheduler_gives_the_same_bits(mixed, scheduler):
    windows = {n: make_like(env, scheduler=scheduler, window=8) for n, env in mixed.envs.items()}
    env = MixedEnv(windows)
    state = mixed.reset(KEY)
    assert_same(env.reset(KEY), state)
    assert_same(env.step(state, actions(mixed, 0)), mixed.step(state, actions(mixed, 0)))
    assert str(jax.make_jaxpr(env.step)(state, actions(mixed, 0))).count("ffi_call") == 1


def test_robots_with_different_schedules_are_no_batch(mixed):
    envs = dict(mixed.envs)
    envs["walker2d"] = make_like(envs["walker2d"], scheduler="sw")
    with pytest.raises(ValueError, match="expected one schedule for all"):
        MixedEnv(envs)


def make_like(env, **schedule):
    """An environment of the same task and size, scheduled otherwise."""
    return Env(env.task, env.num_envs, **schedule)


# ---- States ------------------------------------------------------------------------------------------------


def test_replace_changes_some_robots(mixed):
    state = mixed.reset(KEY)
    changed = state.replace(qpos={"fast": state.qpos["fast"] + 1}, reward={"fast": jnp.ones(5), "walker2d": None})
    np.testing.assert_array_equal(changed.qpos["fast"], state.qpos["fast"] + 1)
    assert changed.qpos["walker2d"] is state.qpos["walker2d"]
    assert changed.reward["walker2d"] is None
    assert changed.states["halfcheetah"] == state.states["halfcheetah"].replace()
    assert list(changed.states) == list(state.states)


def test_make_takes_aliases_and_tasks_under_any_name():
    env = bc.make({"cheetah": 2, "cheetah.slow": (1, HalfCheetah(frame_skip=9)), "b": (np.int64(3), Ant())})
    assert [each.task.name for each in env.envs.values()] == ["halfcheetah", "halfcheetah", "ant"]
    assert env.envs["b"].num_envs == 3
    assert env.envs["cheetah.slow"].task.frame_skip == 9
    assert env.dt["cheetah.slow"] == pytest.approx(9 / 5 * env.dt["cheetah"])
