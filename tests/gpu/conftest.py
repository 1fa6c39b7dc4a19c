"""Everything in this folder needs an NVIDIA GPU: it is marked `gpu`, and skipped where there is none.

With BRAX_CONCURRENT_REQUIRE_GPU=1 (`make gpu-test`) a missing GPU is an error instead.
"""

import ctypes
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def gpu_count() -> int:
    """GPUs that the CUDA driver offers this process; asks the driver itself, to start nothing else."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # pytest passes the items of the whole session, not only those of this folder.
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    if not ours:
        return
    missing = gpu_count() == 0
    if missing and os.environ.get("BRAX_CONCURRENT_REQUIRE_GPU") == "1":
        raise pytest.UsageError("BRAX_CONCURRENT_REQUIRE_GPU=1, but the CUDA driver finds no GPU")
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if missing:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))
