"""Arrays that all environments share: read at rows that are known at run time, the same number in every lane."""

from __future__ import annotations

import numpy as np
import pytest

from brax_concurrent.backends import cuda
from brax_concurrent.kernels import ops
from brax_concurrent.kernels.kernel import Kernel
from brax_concurrent.kernels.layout import Field
from brax_concurrent.kernels.reference import ReferenceWorld
from brax_concurrent.kernels.specialize import touched
from tests.lanes import FLOAT, NoModel, run_compiled, specialized

FIELDS = {"h": Field((3, 2), "test")}
COLUMNS = 4


def product(m, w):
    """y = x @ a + b[1], with the row of `a` known at run time, in halves that pass through a field."""
    total = [w.var(w.user.b[1, j]) for j in range(COLUMNS)]
    for j in range(6):
        w.h[j // 2, j % 2] = w.user.x[j]
    for k in w.range(3):
        for half in range(2):
            x = w.h[k, half]
            for j in range(COLUMNS):
                total[j].value = total[j].value + x * w.user.a[k * 2 + half, j]
    for j in range(COLUMNS):
        w.user.y[j] = ops.where(w.user.n[0, 1] == 7, total[j].value, 0.0)


KERNEL = Kernel("product", product, ("h", "user.x", "user.a", "user.b", "user.n"), ("h", "user.y"))


def arrays(dtype, num_envs=45):
    rng = np.random.default_rng(0)
    own = {"x": rng.normal(size=(num_envs, 6)).astype(dtype), "y": np.full((num_envs, COLUMNS), 9, dtype)}
    shared = {"a": rng.normal(size=(6, COLUMNS)).astype(dtype), "b": rng.normal(size=(2, COLUMNS)).astype(dtype)}
    return own, shared | {"n": np.array([[3, 7]], np.int32)}


@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_a_product_with_a_shared_matrix(precision):
    own, shared = arrays(FLOAT[precision])
    special = run_compiled([KERNEL], FIELDS, own, precision, shared=shared)
    expected = own["x"].astype(np.float64) @ shared["a"] + shared["b"][1]
    np.testing.assert_allclose(own["y"], expected, rtol=1e-4 if precision == "f32" else 1e-12, atol=1e-5)
    reads, writes = touched(special.programs["product"])
    assert {"x", "a", "b", "n"} <= set(reads)
    assert writes[0] == "y"


def test_the_reference_reads_the_same():
    own, shared = arrays(np.float64)
    compiled = {name: array.copy() for name, array in own.items()}
    run_compiled([KERNEL], FIELDS, compiled, "f64", shared=shared)
    ReferenceWorld(FIELDS, 45, own, shared).run(KERNEL, NoModel())
    np.testing.assert_allclose(own["y"], compiled["y"], rtol=1e-12)


def test_on_a_gpu_they_are_read_only_vectors():
    pytest.importorskip("cuda.bindings.nvvm", reason="numba-cuda with NVIDIA's compilers is not installed")
    own, shared = arrays(np.float32)
    kernel = cuda.compile_kernel(specialized([KERNEL], FIELDS, own, "f32", shared=shared).programs["product"])
    assert set(kernel.arguments) == {"x", "a", "b", "n", "y"}
    assert "ld.global.nc.v4" in kernel.ptx


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda w: w.user.a[6, 0], "row 6 is outside 0..5"),
        (lambda w: w.user.a[-1, 0], "row -1 is outside 0..5"),
        (lambda w: w.user.a[0, 4], "column 4 is outside 0..3"),
        (lambda w: w.user.a[ops.to_int(w.user.x[0]), 0], "a Python int or a loop counter"),
        (lambda w: w.user.a.__setitem__((0, 0), 1.0), "cannot write it"),
    ],
)
def test_misuse_is_explained(body, message):
    own, shared = arrays(np.float32)
    k = Kernel("misuse", lambda m, w: body(w), ("user.x", "user.a"), ("user.y", "user.a"))
    with pytest.raises((IndexError, TypeError, ValueError), match=message):
        specialized([k], FIELDS, own, "f32", shared=shared)
