"""Networks' kernels compile for a GPU, without one, and need no more registers than leave it work to switch to."""

import functools
import os

import jax
import numpy as np
import pytest
from network_checks import OnGpu

from brax_concurrent.backends import device_array
from brax_concurrent.networks.network import Network
from brax_concurrent.networks.registry import NETWORKS, make_network

pytest.importorskip("cuda.bindings.nvvm", reason="numba-cuda with NVIDIA's compilers is not installed")
task_cuda = pytest.importorskip("brax_concurrent.backends.task_cuda")

jax.config.update("jax_platforms", "cpu")

MOST_REGISTERS = 128  # with 128 threads to a block, four blocks to a multiprocessor


def on_no_gpu(name, monkeypatch):
    """The kernels of a small network on a GPU, each with its arguments' types."""
    monkeypatch.setattr(device_array, "empty", lambda shape, dtype: OnGpu(np.zeros(shape, dtype)))
    network = Network(make_network(name, **NETWORKS[name].small), device="cuda")
    assert network.streams[0].device == "cuda"
    return {(call.kernel, call.types()) for call in network.streams[0]._calls}


@pytest.mark.slow
def test_the_dispatchers_program_leaves_a_multiprocessor_four_workers(monkeypatch):
    from brax_concurrent.backends import task_link
    from brax_concurrent.scheduler import cuda_list_hw

    monkeypatch.setattr(task_link, "link_units", functools.partial(task_link.link_units, cache_directory=os.devnull))
    units = [task_link.compile_unit(k.function, types, (9, 0)) for k, types in on_no_gpu("instanas", monkeypatch)]
    resources = cuda_list_hw.link(list({unit.symbol: unit for unit in units}.values()), (9, 0)).resources
    assert resources.registers <= 128
    assert resources.spill_stores <= 256  # bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["instanas", "nasnet"])
def test_kernels_compile_for_a_gpu(name, monkeypatch):
    kinds = on_no_gpu(name, monkeypatch)
    assert len(kinds) >= 8
    for kernel, types in kinds:
        code = task_cuda.compile_task(kernel.function, types, (9, 0))
        assert code.resources.registers <= MOST_REGISTERS, kernel.name
        assert not code.resources.spill_stores, kernel.name
        assert "f64" not in "".join(line for line in code.ptx.splitlines() if ".f64" in line), kernel.name
