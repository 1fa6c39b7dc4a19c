"""One batch over several devices and processes: the same bits as on one, and docs/scaling.md runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import batches
import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SMALL = {"num_envs": 64, "steps": 5, "generations": 1}


def devices(count):
    return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"}


@pytest.mark.slow
def test_the_documents_program_gives_the_same_bits_on_four_devices():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/scaling.md").read_text(), re.DOTALL)
    code = """
        import json
        import batches, jax, jax.numpy as jnp
        names = {}
        exec(compile(%r, "scaling.md", "exec"), names)
        assert len(names["state"].obs.sharding.device_set) == 4
        assert names["state"].obs.shape[0] == names["num_envs"] == 4 * names["env"].num_envs

        alone = batches.env("walker2d", names["num_envs"])
        state = alone.reset(jax.random.split(jax.random.key(0), names["num_envs"]))
        for _ in range(30):
            state = alone.step(state, jnp.tanh(state.obs[:, :6]))
        batches.assert_same_bits(names["state"], state)
        print(json.dumps([len(jax.devices()), float(names["mean_reward"])]))
    """
    count, reward = batches.run_python(code % block, **devices(4))
    assert count == 4
    assert np.isfinite(reward)


def start(code, **environment):
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "JAX_PLATFORMS": "cpu"} | environment
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_two_processes_of_two_devices_each(capsys):
    with contextlib.closing(socket.socket()) as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    code = f"""
        import json, runpy
        import jax
        from jax.experimental.multihost_utils import process_allgather
        jax.distributed.initialize({address!r}, 2, {{number}})
        returns = runpy.run_path({str(ROOT / "examples/sharding.py")!r})["main"](**{SMALL})
        own = [shard.index[0].start for shard in returns.addressable_shards]
        print(json.dumps([own, process_allgather(returns, tiled=True).tolist()]))
    """
    processes = [start(code.replace("{number}", str(number)), **devices(2)) for number in range(2)]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    (first, returns), (second, same) = (json.loads(output.splitlines()[-1]) for output, _ in outputs)
    assert [*first, *second] == [0, 16, 32, 48]
    assert returns == same
    assert "64 worlds on 4 devices of 2 processes\n" in outputs[0][0]
    alone = runpy.run_path(str(ROOT / "examples/sharding.py"))["main"](**SMALL)
    np.testing.assert_allclose(returns, alone, rtol=1e-4, atol=1e-4)  # the policy's products are rounded differently
    assert capsys.readouterr().out.startswith("64 worlds on 1 devices of 1 processes\n")


def test_float32_stays_float32_in_jaxs_64_bit_mode():
    env = batches.env("halfcheetah", 3)
    with jax.enable_x64(True):
        state = env.step(env.reset(jax.random.key(0)), batches.random_actions(env))
        kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(state)}
    assert kinds == {"float32", "int32", "uint32", "bool"}
