"""Running JAX functions as compiled kernels, without environments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from brax_concurrent.backends.program import Value, walk
from brax_concurrent.envs.jaxpr import evaluate
from brax_concurrent.envs.jaxpr_operations import filled
from brax_concurrent.kernels.kernel import Kernel
from tests.lanes import run_compiled, specialized


def compiled(function, x: np.ndarray, precision: str) -> tuple[np.ndarray, int]:
    """The function of each row, by a compiled kernel, and how many values the kernel computes."""
    kernels, arrays = _parts(function, x)
    special = run_compiled(kernels, {}, arrays, precision)
    return arrays["y"], sum(isinstance(item, Value) for item in walk(special.programs["k"].root))


def kernel(function, x: np.ndarray):
    """The function of a row like those of `x`, as the program of a kernel in single precision."""
    kernels, arrays = _parts(function, x)
    return specialized(kernels, {}, arrays, "f32").programs["k"]


def _parts(function, x: np.ndarray):
    closed = jax.make_jaxpr(function)(jnp.zeros(x.shape[1], x.dtype))
    (shape,) = [a.shape for a in closed.out_avals]
    kind = closed.out_avals[0].dtype.kind
    dtype = {"f": x.dtype, "i": np.dtype(np.int32), "b": np.dtype(bool)}[kind]
    arrays = {"x": x, "y": np.zeros((len(x), int(np.prod(shape, dtype=int))), dtype)}

    def body(m, w):
        (result,) = evaluate(closed, [filled([w.user.x[i] for i in range(x.shape[1])], x.shape[1:])])
        assert result.shape == shape
        for i, value in enumerate(result.flat):
            w.user.y[i] = value

    return [Kernel("k", body, ("user.x",), ("user.y",))], arrays
