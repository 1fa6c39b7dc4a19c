"""Environments that hw regroups on the CPU: the same bits at the same places, whatever their work was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orders import assert_same

import brax_concurrent as bc
from brax_concurrent.backends.cpu_run import run_program
from brax_concurrent.backends.native import DESC_SCRATCH_BYTES
from brax_concurrent.envs import tuned
from brax_concurrent.envs.program import tile_program
from brax_concurrent.envs.task import ASSETS
from brax_concurrent.scheduler.hw_tiles import compile_hw
from brax_concurrent.scheduler.serial import compile_serial
from brax_concurrent.training.measure import random_actions

jax.config.update("jax_platforms", "cpu")

KEY = jax.random.key(3)
SLOW = [pytest.param(*batch, marks=pytest.mark.slow) for batch in (("walker2d", 70), ("ant", 300), ("humanoid", 70))]


def random_arrays(env, program):
    """A program's arrays after a reset, with random actions, and random work of the step before."""
    rng = np.random.default_rng(env.num_envs)
    known = env._arrays(env.reset(KEY), action=rng.uniform(-1, 1, (env.num_envs, env.action_size)))
    known |= {"work": rng.integers(0, 2000, env.num_envs), "elapsed": rng.integers(0, 3, env.num_envs)}
    shapes = [(spec, spec.array_shape(env.num_envs)) for spec in program.buffers]
    return [np.array(known[s.name] if s.name in known else np.zeros(n), s.dtype).reshape(n) for s, n in shapes]


@pytest.mark.parametrize(("robot", "num_envs"), [("halfcheetah", 1), ("halfcheetah", 70), ("grasp", 300), *SLOW])
def test_any_order_of_environments_gives_the_same_bits(robot, num_envs):
    env = bc.make(robot, num_envs, backend="cpu", granularity="stage", max_episode_steps=3)
    serial = compile_serial(tile_program(env))
    regrouped = compile_hw(tile_program(env, grouped=True), threads=2, poison=True)
    found, expected = (random_arrays(env, program) for program in (regrouped, serial))
    work = [spec.name for spec in serial.buffers].index("work")
    for _ in range(4):
        run_program(serial, expected, num_envs)
        run_program(regrouped, found, num_envs)
        assert_same(found, expected)
        found[work][:] = expected[work][:] = np.random.default_rng(0).permutation(expected[work])


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_work_differs_so_that_lanes_change():
    regrouped, plain = (bc.make("walker2d", 70, backend="cpu", scheduler="hw", regroup=r) for r in (True, None))
    assert regrouped.program("control_step").fingerprint != plain.program("control_step").fingerprint
    state = regrouped.step(regrouped.reset(KEY), jnp.ones((70, 6)))
    assert len(set(np.asarray(state.internal["work"]).tolist())) > 3


@pytest.mark.parametrize(("granularity", "dtype"), [("stage", "float64"), ("substep", "float32"), ("step", "float32")])
def test_steps_and_resets_of_a_regrouped_batch(granularity, dtype):
    with jax.enable_x64(dtype == "float64"):
        arguments = {"backend": "cpu", "granularity": granularity, "max_episode_steps": 4, "dtype": dtype}
        regrouped = bc.make("walker2d", 200, scheduler="hw", regroup=True, **arguments)
        envs = [regrouped, bc.make("walker2d", 200, **arguments)]
        states = [env.reset(KEY) for env in envs]
        for step in range(9):
            action = random_actions(regrouped, jax.random.fold_in(KEY, step))
            states = [env.step(state, action) for env, state in zip(envs, states, strict=True)]
            assert_same(*map(leaves, states))
        mask = jnp.arange(200) % 3 == 0
        assert_same(*(leaves(env.reset_where(state, mask)) for env, state in zip(envs, states, strict=True)))


def test_robots_of_a_mixed_batch_are_regrouped_each_for_itself():
    robots = {"halfcheetah": 100, "grasp": 70}
    envs = [bc.make(robots, backend="cpu", scheduler=s, regroup=r) for s, r in (("hw", True), ("serial", None))]
    states = [env.reset(KEY) for env in envs]
    for step in range(5):
        action = random_actions(envs[0], jax.random.fold_in(KEY, step))
        states = [env.step(state, action) for env, state in zip(envs, states, strict=True)]
        assert_same(*map(leaves, states))


def test_a_timeline_has_every_task_of_a_regrouped_step(tmp_path):
    path = tmp_path / "trace.json"
    env = bc.make("halfcheetah", 200, backend="cpu", scheduler="hw", regroup=True, trace=path)
    env.step(env.reset(KEY), jnp.zeros((200, 6)))
    rows = env.write_trace().rows
    assert sorted(rows[:, 0]) == list(range(7 * len(tile_program(env).ops)))


def test_a_simulators_steps_are_regrouped_by_the_last_ones_work():
    path = ASSETS / "walker2d.xml"
    sims = [bc.Simulator(path, 300, ("ncon",), backend="cpu", regroup=regroup) for regroup in (True, False)]
    rng = np.random.default_rng(0)
    qpos = np.asarray(sims[0].model.qpos0) + rng.uniform(-0.3, 0.3, (300, sims[0].model.nq))
    states = [sim.reset_to(qpos.astype(np.float32), np.zeros((300, sim.model.nv), np.float32)) for sim in sims]
    for _ in range(30):
        ctrl = rng.uniform(-1, 1, (300, 6)).astype(np.float32)
        states = [sim.step(state, ctrl) for sim, state in zip(sims, states, strict=True)]
    assert [sim._step_program.desc[DESC_SCRATCH_BYTES] > 0 for sim in sims] == [True, False]  # room for an order
    work = [state.internal.pop("work") for state in states]
    assert_same(*map(leaves, states))
    assert len(set(np.asarray(work[0]).tolist())) > 3
    assert not np.asarray(work[1]).any()


MJCF = "<mujoco><worldbody><body><joint/><geom size='1'/></body></worldbody></mujoco>"


def test_a_simulator_without_contacts_has_nothing_to_regroup():
    sim = bc.Simulator(
        "<mujoco><worldbody><body><joint/><geom size='1'/></body></worldbody></mujoco>", 70, regroup=True
    )
    assert np.asarray(sim.step(sim.reset()).qpos).shape == (70, 1)


def test_what_a_simulator_cannot_regroup_is_said():
    with pytest.raises(TypeError, match="regroup: expected True or False, got 1"):
        bc.Simulator(ASSETS / "walker2d.xml", 4, regroup=1)


def test_only_hw_regroups():
    assert bc.make("grasp", 4, regroup=True).scheduler == "hw"
    assert bc.make({"grasp": 4}, regroup=True).envs["grasp"].scheduler == "hw"
    with pytest.raises(ValueError, match="regroup: only scheduler='hw' regroups environments, got 'sw'"):
        bc.make("grasp", 4, scheduler="sw", regroup=True)


def test_what_regroup_cannot_be_is_said_whatever_was_tuned(monkeypatch):
    monkeypatch.setattr(
        tuned,
        "_candidates",
        lambda where: [{"settings": {"scheduler": "hw", "granularity": "stage", "regroup": True}, "rates": [1.0]}],
    )
    assert bc.make("grasp", 64).schedule.regroup is True
    for value in (1, np.True_, "auto", np.array([True, False])):
        with pytest.raises(TypeError, match="regroup: expected True, False or None, got "):
            bc.make("grasp", 64, regroup=value)
    assert {
        env.schedule.regroup for env in bc.make({"grasp": 64, "halfcheetah": 64}, scheduler="hw").envs.values()
    } == {False}


def test_a_simulators_state_may_lack_the_work():
    sim = bc.Simulator(ASSETS / "walker2d.xml", 40, regroup=True)
    state = sim.reset()
    old = state.replace(internal={"qacc_warmstart": state.internal["qacc_warmstart"]})
    assert_same(leaves(sim.step(old).qpos), leaves(sim.step(state).qpos))
