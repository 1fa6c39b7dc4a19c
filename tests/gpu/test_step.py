"""Environments on the GPU: the bits of the CPU, through all of JAX's ways to call them.

Both backends do the same arithmetic: fused multiply-adds where the program says so, IEEE rounding of everything, the
same polynomials, subnormal numbers taken for zero. So their results are equal, not close.
"""

import gpu_smoke
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from own_tasks import Everything

import brax_concurrent as bc
from brax_concurrent.backends import cuda_driver
from brax_concurrent.interop import ffi_cuda

ROBOTS = bc.list_envs()
STATE = ("qpos", "qvel", "obs")


def assert_equal(found):
    wrong = {name: str(difference) for name, difference in found.items() if difference.first is not None}
    assert wrong == {}


def assert_same_state(first, second):
    assert_equal({name: gpu_smoke.difference(getattr(first, name), getattr(second, name)) for name in STATE})


def make(robot="halfcheetah", num_envs=64, **arguments):
    return bc.make(robot, num_envs, backend="cuda", **arguments)


def actions(env, steps=1, seed=1):
    return jnp.asarray(gpu_smoke.random_actions(env, steps, seed))


def test_auto_means_cuda_here():
    env = bc.make("halfcheetah", 2)
    assert env.backend == "cuda"
    assert env.reset(jax.random.key(0)).qpos.devices() == {gpu_smoke.device_of("cuda")}


@pytest.mark.parametrize("robot", ROBOTS)
def test_backends_agree_bit_by_bit(robot):
    assert_equal(gpu_smoke.agreement(robot, num_envs=512, steps=20))


@pytest.mark.parametrize("num_envs", [1, 37, 129])
def test_a_tile_or_block_need_not_be_full(num_envs):
    assert_equal(gpu_smoke.agreement("halfcheetah", num_envs=num_envs, steps=5))


def test_bad_actions_are_zeros_and_counted():
    chosen = gpu_smoke.random_actions(bc.make("ant", 64, backend="cpu"), 5)
    chosen[1, 3, 2] = np.nan
    chosen[2, 40, 0] = np.inf
    assert_equal(gpu_smoke.agreement("ant", num_envs=64, steps=5, actions=chosen))
    env = make("ant")
    state = env.reset(jax.random.key(0))
    for action in jnp.asarray(chosen):
        state = env.step(state, action)
    expected = np.zeros(64, int)
    expected[[3, 40]] = 1
    np.testing.assert_array_equal(state.info["bad_actions"], expected)
    assert np.isfinite(state.qpos).all()


def test_double_precision_agrees_too():
    with jax.enable_x64(True):
        assert_equal(gpu_smoke.agreement("halfcheetah", num_envs=64, steps=5, dtype="float64"))


def test_a_task_of_a_users_agrees_too():
    assert_equal(gpu_smoke.agreement(Everything(), num_envs=129, steps=50))


def test_jit_scan_and_eager_calls_agree():
    env = make()
    start, chosen = env.reset(jax.random.key(0)), actions(env, 6)
    eager = start
    for action in chosen:
        eager = env.step(eager, action)
    jitted = start
    for action in chosen:
        jitted = jax.jit(env.step)(jitted, action)
    scanned = jax.jit(lambda s, a: lax.scan(lambda c, x: (env.step(c, x), None), s, a)[0])(start, chosen)
    assert_same_state(eager, jitted)
    assert_same_state(eager, scanned)


def test_an_eager_step_leaves_the_old_state_alone():
    env = make()
    state = env.reset(jax.random.key(0))
    before = {name: np.array(getattr(state, name)) for name in STATE}
    new = env.step(state, actions(env)[0])
    assert not np.array_equal(new.qpos, state.qpos)
    for name, old in before.items():
        np.testing.assert_array_equal(getattr(state, name), old)


def test_a_donated_state_is_updated_in_place():
    env = make()
    state = env.step(env.reset(jax.random.key(0)), actions(env)[0])
    pointers = [array.unsafe_buffer_pointer() for array in (state.qpos, state.qvel)]
    copies = ffi_cuda.handler()[2].copies
    expected = env.step(state, actions(env)[0])
    new = jax.jit(env.step, donate_argnums=0)(state, actions(env)[0])
    assert [array.unsafe_buffer_pointer() for array in (new.qpos, new.qvel)] == pointers
    assert state.qpos.is_deleted()
    assert ffi_cuda.handler()[2].copies == copies
    assert_same_state(new, expected)


def test_a_scan_carries_its_state_in_place():
    env = make(num_envs=100)
    copies = ffi_cuda.handler()[2].copies
    scan = jax.jit(lambda s, a: lax.scan(lambda c, x: (env.step(c, x), c.reward), s, a))
    jax.block_until_ready(scan(env.reset(jax.random.key(0)), actions(env, 50)))
    assert ffi_cuda.handler()[2].copies == copies


@pytest.mark.parametrize("options", [{"xla_gpu_graph_min_graph_size": 1}])
def test_a_captured_scan_gives_the_same_bits(options):
    env = make(num_envs=300)
    start, chosen = env.reset(jax.random.key(0)), actions(env, 20)

    def scan(s, a):
        return lax.scan(lambda c, x: (env.step(c, x), None), s, a)[0]

    plain = jax.jit(scan)(start, chosen)
    captured = jax.jit(scan).lower(start, chosen).compile(compiler_options=options)(start, chosen)
    assert_same_state(plain, captured)


def test_vmap_over_keys():
    env = make(num_envs=33)
    keys = jax.random.split(jax.random.key(3), 3)
    batch = jax.vmap(env.reset)(keys)
    for index, key in enumerate(keys):
        np.testing.assert_array_equal(batch.qpos[index], env.reset(key).qpos)


def test_episodes_end_and_start_anew_as_on_the_cpu():
    """Long enough that walkers fall: the reset runs in some lanes only."""
    found = gpu_smoke.agreement("walker2d", num_envs=96, steps=150)
    assert_equal(found)
    env = make("walker2d", 96)
    ended = gpu_smoke.trajectory(env, env.reset(jax.random.key(0)), gpu_smoke.random_actions(env, 150))["terminated"]
    assert ended.any()


def on_both(robot, num_envs, work, **arguments):
    """What `work(env)` returns, an iterable of states, on both backends, in pairs."""
    outcomes = []
    for backend in ("cpu", "cuda"):
        with jax.default_device(gpu_smoke.device_of(backend)):
            outcomes.append(work(bc.make(robot, num_envs, backend=backend, **arguments)))
    return zip(*outcomes, strict=True)


def test_restarts_agree():
    def work(env):
        state = env.reset_where(env.reset(jax.random.key(5)), np.arange(40) % 3 == 0)
        for action in gpu_smoke.random_actions(env, 10):
            state = env.step(state, jnp.asarray(action))
        return state, env.reset_to(state.qpos, state.qvel)

    for on_cpu, on_gpu in on_both("ant", 40, work):
        assert_same_state(on_cpu, on_gpu)


def test_quantities_that_differ_by_environment_agree():
    def work(env):
        factor = np.linspace(0.5, 1.5, 40, dtype=np.float32)[:, None, None]
        friction = jnp.asarray(env.model.geom_friction.astype(np.float32) * factor)
        state = env.reset(jax.random.key(5), model={"geom_friction": friction})
        for action in gpu_smoke.random_actions(env, 10):
            state = env.step(state, jnp.asarray(action))
        return [state]

    for on_cpu, on_gpu in on_both("ant", 40, work, per_env=("geom_friction",)):
        assert_same_state(on_cpu, on_gpu)


def test_a_simulators_fields_agree():
    fields = ("xpos", "qM", "qfrc_bias", "cfrc_ext")
    outcomes = []
    for backend in ("cpu", "cuda"):
        model = bc.make("ant", 1, backend="cpu").task.model
        simulator = bc.Simulator(model, 50, fields, backend=backend)
        generator = np.random.default_rng(0)
        with jax.default_device(gpu_smoke.device_of(backend)):
            qpos = simulator.model.qpos0 + generator.normal(0, 0.1, (50, simulator.model.nq))
            state = simulator.reset_to(qpos.astype(np.float32), np.zeros((50, simulator.model.nv), np.float32))
            for _ in range(5):
                state = simulator.step(state)
        outcomes.append({"qpos": state.qpos, "qvel": state.qvel} | {name: getattr(state, name) for name in fields})
    ours, theirs = outcomes
    assert_equal({name: gpu_smoke.difference(ours[name], theirs[name]) for name in ours})


def test_a_program_for_the_cpu_says_so_inside_a_computation_on_the_gpu():
    env = bc.make("halfcheetah", 4, backend="cpu")
    state = env.reset(jax.random.key(0))
    placed = jax.device_put((state, jnp.zeros((4, 6))), gpu_smoke.device_of("cuda"))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"this program is for the CPU, but JAX runs"):
        jax.block_until_ready(jax.jit(env.step)(*placed))


@pytest.mark.parametrize("robot", ROBOTS)
def test_the_driver_sees_what_the_assembler_said(robot):
    program = make(robot).program("control_step")
    for op in {op.kernel.name: op for op in program.ops}.values():
        assert 0 < op.kernel.registers() <= 255
        assert op.kernel.local_bytes() >= 0


def test_errors_of_the_driver_name_the_kernel():
    with pytest.raises(cuda_driver.CudaError, match=r"(loading|finding) kernel nonsense: .*\(CUDA_ERROR_\w+, \d+\)"):
        cuda_driver.load_kernel("nonsense", "nonsense", b"this is no machine code at all" + bytes(64))
