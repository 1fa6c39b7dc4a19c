"""The dispatcher that stays on the GPU: what only it does."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brax_concurrent as bc

KEY = jax.random.key(11)


def steps(env, count):
    """States along a jitted scan of random actions."""

    def one(state, key):
        action = jax.random.uniform(key, (env.num_envs, env.action_size), minval=-1.0, maxval=1.0)
        state = env.step(state, action)
        return state, (state.obs, state.reward, state.terminated, state.qvel)

    return jax.jit(lambda s, keys: jax.lax.scan(one, s, keys))(env.reset(KEY), jax.random.split(KEY, count))[1]


@pytest.mark.parametrize("envs_per_task", [32, 64])
def test_regrouping_changes_no_bit(envs_per_task):
    num_envs = 17000  # over 1.5 bundles for each multiprocessor, and the last tile is not full
    regrouped, serial = (
        bc.make("ant", num_envs, backend="cuda", **arguments)
        for arguments in ({"scheduler": "hw", "envs_per_task": envs_per_task, "regroup": True}, {"scheduler": "serial"})
    )
    for found, expected in zip(steps(regrouped, 12), steps(serial, 12), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_rollout_is_the_cpus_bit_for_bit():
    policy, results, params, state = bc.MlpPolicy((64, 32), normalize_obs=True), [], None, None
    for backend, scheduler in (("cpu", "serial"), ("cuda", "hw")):
        with jax.default_device(jax.local_devices(backend="cpu" if backend == "cpu" else "gpu")[0]):
            env = bc.make("halfcheetah", 200, backend=backend, scheduler=scheduler, granularity="step")
            if params is None:
                params, state = jax.tree.map(np.asarray, (policy.init(KEY, env), env.reset(KEY)))
            given = jax.tree.map(jnp.asarray, (params, state))
            results.append(jax.tree.map(np.asarray, bc.rollout(env, policy, *given, KEY, 12, fused=True)))
    for found, expected in zip(*(jax.tree.leaves(each) for each in results), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_other_schedulers_have_no_rollout_of_their_own():
    env = bc.make("halfcheetah", 32, backend="cuda", scheduler="serial")
    policy = bc.MlpPolicy((8,))
    with pytest.raises(ValueError, match="needs scheduler='hw'|scheduler='hw' only"):
        bc.rollout(env, policy, policy.init(KEY, env), env.reset(KEY), KEY, 2, fused=True)


def test_resets_that_nobody_needs_are_skipped(tmp_path):
    env = bc.make("halfcheetah", 256, backend="cuda", scheduler="hw", granularity="stage", trace=tmp_path / "t.json")
    state = env.reset(KEY)
    for _ in range(3):
        state = env.step(state, jnp.zeros((256, env.action_size)))
    timeline = env.write_trace()
    assert timeline.runs == 3
    assert timeline.missing == 0
    assert len(timeline) == 3 * len(timeline.stream)
    skipped = {interval.name for interval in timeline.intervals if interval.skipped}
    assert {"reset", "observe_reset"} <= skipped
    assert "solve" not in skipped
    for one in timeline.intervals:  # what it waits for has ended before it began
        assert one.end >= one.begin


FOREVER = """
import numpy as np
import ctypes
import jax.numpy as jnp
from brax_concurrent.backends import cuda_driver, nvvm
from brax_concurrent.backends.cpu_program import BufferSpec
from brax_concurrent.backends.cuda import Function, TASK_TYPES
from brax_concurrent.backends.cuda_link import DispatchPart
from brax_concurrent.backends.cuda_program import CudaOp, CudaPart
from brax_concurrent.scheduler.cuda import compile_cuda, explain_failure, launch_program
from brax_concurrent.scheduler.cuda_dispatch import explain, load_dispatch
from llvmlite import ir

def function(name, forever):
    module = nvvm.new_module(name)
    made = ir.Function(module, ir.FunctionType(ir.VoidType(), TASK_TYPES), name)
    builder = ir.IRBuilder(made.append_basic_block("entry"))
    if forever:
        again = made.append_basic_block("again")
        builder.branch(again)
        builder.position_at_end(again)
        builder.asm(ir.FunctionType(ir.VoidType(), []), "nanosleep.u32 100;", "", [], True)
        builder.branch(again)
    else:
        builder.ret_void()
    return Function(name, str(module))

block = jnp.zeros(4096, jnp.uint8)
block.block_until_ready()
functions = (function("forever", True), function("after", False))
buffers = (BufferSpec("x", (1,), "float32", "readwrite"),)
dispatch = load_dispatch([DispatchPart(functions, (-1, -1), None, 1, 128)], cuda_driver.compute_capability())
part = CudaPart(tuple(CudaOp(cuda_driver.Kernel(f.symbol, f.symbol, 0), ()) for f in functions), 128, buffers)
program = compile_cuda([part], "hw", multiprocessors=cuda_driver.multiprocessors(), dispatch=dispatch)
address = block.unsafe_buffer_pointer()
with cuda_driver.primary_context():
    launch_program(program, [address], address + 512, 32, 0)
    try:
        cuda_driver.call("cuCtxSynchronize")
    except cuda_driver.CudaError as error:
        print("launch:", error)
print(explain(program.parts, dispatch.errors, int(1e9)), flush=True)
import os
os._exit(0)
"""


def test_a_task_that_never_ends_is_named():
    environment = os.environ | {"BRAX_CONCURRENT_TIMEOUT": "1"}
    root = str(Path(bc.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", FOREVER], capture_output=True, text=True, env=environment, timeout=240)
    assert "kernel forever (op 0 of 2, step 0, bundle 0) in slot 0 of the window did not end" in done.stdout, done
    assert "launch:" in done.stdout
