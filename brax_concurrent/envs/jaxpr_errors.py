"""What a user is told of an operation that kernels lack: by which function of JAX, where, and what to write instead."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import JaxprEqn

_JAX = str(Path(jax.__file__).parent)
_MODULES = {
    "jnp": "jax.numpy",
    "jnp.linalg": "jax.numpy.linalg",
    "jnp.fft": "jax.numpy.fft",
    **{name: name for name in ("jax.nn", "jax.random", "jax.scipy.special", "jax.scipy.linalg", "jax.lax", "jax")},
}
_WITH_FUNCTIONS = ("cond", "switch", "scan", "map", "fori_loop", "while_loop", "associative_scan")
"""Of jax.lax: what is refused inside them is the user's own."""

_SMALL = "write a small inverse or solution by its formula; jnp.linalg.det is there up to 3 x 3"
_DRAW = "draw from `noise`, in reset or remember"
_TRACED = "methods are traced once and run as native code; a number is seen as one of the metrics of reward"
_INSTEAD = {
    "sort": "jnp.max, jnp.min, jnp.argmax and jnp.argmin are there",
    "top_k": "jnp.max and jnp.argmax are there",
    **dict.fromkeys(("lu", "qr", "cholesky", "triangular_solve", "eigh", "eig", "svd", "custom_linear_solve"), _SMALL),
    **dict.fromkeys(("random_bits", "random_seed", "random_wrap", "random_fold_in", "threefry2x32"), _DRAW),
    **dict.fromkeys(("debug_print", "debug_callback", "pure_callback", "io_callback"), _TRACED),
    "erf": "jnp.tanh is there, and jax.nn.gelu is approximate by default",
    "erf_inv": "draw from `noise` with noise.normal",
    "asinh": "write jnp.log(x + jnp.sqrt(x**2 + 1))",
    "acosh": "write jnp.log(x + jnp.sqrt(x**2 - 1))",
    "atanh": "write 0.5 * (jnp.log1p(x) - jnp.log1p(-x))",
    "cbrt": "write jnp.sign(x) * jnp.abs(x) ** (1 / 3)",
    "conv_general_dilated": "write the sum over slices",
    "cumlogsumexp": "write jnp.log(jnp.cumsum(jnp.exp(x)))",
    "bitcast_convert_type": "compare with 0 instead of looking at bits",
}


class UnsupportedOperationError(ValueError):
    """A function uses an operation of JAX that kernels do not have.

    Attributes:
        what: the function of JAX as a user writes it, the operation, why it is refused and what to write instead.
        place: the line that calls it, as FILE:LINE.
    """

    def __init__(self, what: str, place: str):
        self.what, self.place = what, place
        super().__init__(f"{place}: {what}")


def refused(eqn: JaxprEqn, why: str) -> UnsupportedOperationError:
    """An error that says why an equation has no code."""
    name = eqn.primitive.name
    instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
    return UnsupportedOperationError(f"JAX's {name!r} {why}{instead}", _place(eqn))


def outside(error: UnsupportedOperationError, eqn: JaxprEqn) -> UnsupportedOperationError:
    """The error as seen from `eqn`, which it was raised in: with the user's line, and the function called there.

    What is inside a function of JAX's may have been traced for another caller, and then has that one's lines.
    """
    function, place = _function(eqn), _place(eqn)
    if function is None or function in (f"jax.lax.{name}" for name in _WITH_FUNCTIONS):
        return error if _is_line(error.place) else UnsupportedOperationError(error.what, place)
    _, found, rest = error.what.rpartition("JAX's '")
    return UnsupportedOperationError(f"{function}: {found}{rest}" if found else error.what, place)


def _frames(eqn: JaxprEqn) -> list[Any]:
    """The calls that led to an equation, innermost first."""
    traceback: Any = eqn.source_info.traceback
    return list(traceback.frames) if traceback is not None else []


def _place(eqn: JaxprEqn) -> str:
    """The line outside JAX that an equation comes from."""
    for frame in _frames(eqn):
        if not frame.file_name.startswith(_JAX):
            return f"{frame.file_name}:{frame.line_num}"
    return "an unknown line"


def _is_line(place: str) -> bool:
    return ":" in place


def _function(eqn: JaxprEqn) -> str | None:
    """The function of JAX that the user's line calls, None if that is not known."""
    frames = _frames(eqn)
    first = next((i for i, frame in enumerate(frames) if not frame.file_name.startswith(_JAX)), 0)
    if first == 0:
        return None
    called = frames[first - 1]
    if called.file_name.endswith("array_methods.py"):
        method = called.function_name.rpartition(".")[2]
        if "_IndexUpdateRef" in called.function_name:
            return f"x.at[...].{method}"
        inner = frames[first - 2].function_name if first > 1 else ""
        return "x[...]" if "getitem" in inner + method else None
    names = (called.function_name.rpartition(".")[2], str(eqn.params.get("name", "")))
    for name in names:
        for short, module in _MODULES.items():
            if callable(getattr(importlib.import_module(module), name, None)):
                return f"{short}.{name}"
    return None
