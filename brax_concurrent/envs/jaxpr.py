"""JAX functions as kernel code: a jaxpr evaluated on the scalars of one environment.

An array of the jaxpr is a NumPy array of objects: traced values of the kernel being built, or Python numbers where they
are known. So structure (slices, reshapes, loops) leaves no code behind, and arithmetic becomes the lane programs of
docs/lanes.md, folded and fused like the physics' own. An equation whose inputs are all known is computed while tracing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from brax_concurrent.backends.program import Value
from brax_concurrent.envs.jaxpr_operations import (
    ARRAYS,
    ELEMENTWISE,
    REDUCTIONS,
    RefusedError,
    Scalars,
    dynamic_slice,
    each,
    filled,
    is_known,
    reduce,
    scalars,
    select,
)

_JAX = str(Path(jax.__file__).parent)
_DTYPES = ("float32", "float64", "int32", "int64", "bool")
_LONGEST_LOOP = 10_000


class UnsupportedOperationError(ValueError):
    """A function uses an operation of JAX that kernels do not have.

    Attributes:
        what: the operation and why it is refused.
        place: the line that calls it, as FILE:LINE.
    """

    def __init__(self, what: str, place: str):
        self.what, self.place = what, place
        super().__init__(f"{place}: {what}")


def evaluate(closed: ClosedJaxpr, args: Sequence[Scalars]) -> list[Scalars]:
    """What the function of a jaxpr returns.

    Args:
        closed: from `jax.make_jaxpr`.
        args: an array of scalars for each argument, of its shape.

    Raises:
        UnsupportedOperationError: the message names the operation and the line that it was called in.
    """
    with np.errstate(all="ignore"):  # known infinities and NaN are as good as those of run time
        return _run(closed.jaxpr, closed.consts, args)


def _run(jaxpr: Jaxpr, consts: Iterable[Any], args: Sequence[Scalars]) -> list[Scalars]:
    values: dict[Any, Scalars] = dict(zip(jaxpr.constvars, map(scalars, consts), strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Scalars:
        return scalars(atom.val) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        try:
            results = _equation(eqn, [read(atom) for atom in eqn.invars])
        except UnsupportedOperationError as error:
            # The outermost line: what is inside a function of JAX's may have been traced for another caller.
            raise UnsupportedOperationError(error.what, _place(eqn)) from None
        for var, result in zip(eqn.outvars, results, strict=True):
            if not _is_ours(var) and not is_known(result):
                raise _refused(eqn, f"gives {_dtype(var).name} numbers; kernels have {', '.join(_DTYPES)}")
            values[var] = result
    return [read(atom) for atom in jaxpr.outvars]


def _dtype(atom: Any) -> np.dtype:
    return atom.aval.dtype


def _is_ours(atom: Any) -> bool:
    return _dtype(atom).name in _DTYPES


def _equation(eqn: JaxprEqn, args: list[Scalars]) -> list[Scalars]:
    name, params = eqn.primitive.name, eqn.params
    if all(map(is_known, args)) and not all(_is_ours(atom) for atom in (*eqn.invars, *eqn.outvars)):
        return _known(eqn, args)  # unsigned integers wrap as JAX has it
    if name in ELEMENTWISE:
        try:
            return [each(ELEMENTWISE[name](params, _dtype(eqn.outvars[0]).kind), *args)]
        except RefusedError as error:
            raise _refused(eqn, str(error)) from None
    if name in ARRAYS:
        result = ARRAYS[name](params, *args)
        return result if isinstance(result, list) else [result]
    if name in REDUCTIONS:
        return [reduce(REDUCTIONS[name], args[0], params["axes"])]
    if name in _CONTROL:
        return _CONTROL[name](eqn, args)
    if name in _CALLS:
        function = next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params)
        return evaluate(function, args) if isinstance(function, ClosedJaxpr) else _run(function, (), args)
    if name == "dynamic_slice":
        return [dynamic_slice(params["slice_sizes"], *args)]
    if name in _MOVES:
        return _move(eqn, args)
    if all(map(is_known, args)):
        return _known(eqn, args)
    raise _refused(eqn, "has no counterpart in kernels (docs/tasks.md says what has)")


def supported_operations() -> list[str]:
    """JAX's names of the operations that kernels have."""
    return sorted({*ELEMENTWISE, *ARRAYS, *REDUCTIONS, *_MOVES, *_CONTROL, "dynamic_slice"})


def _refused(eqn: JaxprEqn, why: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(f"JAX's {eqn.primitive.name!r} {why}", _place(eqn))


def _place(eqn: JaxprEqn) -> str:
    """The line outside JAX that an equation comes from."""
    traceback: Any = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_JAX):
            return f"{frame.file_name}:{frame.line_num}"
    return "an unknown line"


# ---- What moves numbers, done by JAX on their places ---------------------------------------------------------------

_MOVES: dict[str, Callable[[int], range]] = {  # which of n inputs are indices
    "gather": lambda n: range(1, 2),
    "scatter": lambda n: range(1, 2),
    "scatter-add": lambda n: range(1, 2),
    "dynamic_update_slice": lambda n: range(2, n),
    "pad": lambda n: range(0),
}


def _move(eqn: JaxprEqn, args: list[Scalars]) -> list[Scalars]:
    """Let JAX move the places of numbers, then take the numbers from there."""
    indices = _MOVES[eqn.primitive.name](len(args))
    everything: list[Any] = []
    inputs = []
    for i, (atom, x) in enumerate(zip(eqn.invars, args, strict=True)):
        if i in indices:
            if not is_known(x):
                raise _refused(eqn, "needs an index that is known while tracing; use jnp.where to choose at run time")
            inputs.append(x.astype(_dtype(atom)))
        else:
            inputs.append(np.arange(len(everything), len(everything) + x.size, dtype=np.int32).reshape(x.shape))
            everything += x.flat
    if eqn.primitive.name == "scatter-add":
        return [_scatter_add(eqn, inputs, everything)]
    params = eqn.params
    if "fill_value" in params:  # what lies outside the array is at place -1; by default it is what JAX has there
        default = {"f": float("nan"), "b": True}.get(_dtype(eqn.outvars[0]).kind, -(1 << 31))
        everything.append(default if params["fill_value"] is None else np.asarray(params["fill_value"]).item())
        params = {**params, "fill_value": -1}
    (places,) = _bind(eqn, inputs, params)
    return [filled([everything[i] for i in places.flat], places.shape)]


def _scatter_add(eqn: JaxprEqn, inputs: list[Any], everything: Sequence[Any]) -> Scalars:
    """`x.at[indices].add(y)`, at indices that differ."""
    names = ("indices_are_sorted", "unique_indices", "mode")
    old, where, new = inputs
    with jax.ensure_compile_time_eval():
        settings = {name: eqn.params[name] for name in names}
        places = np.asarray(jax.lax.scatter(old, where, new, eqn.params["dimension_numbers"], **settings))
    if np.count_nonzero(places != old) != new.size:
        raise _refused(eqn, "needs indices that differ from each other and are inside the array")
    added = [
        everything[i] if i == j else everything[j] + everything[i] for i, j in zip(places.flat, old.flat, strict=True)
    ]
    return filled(added, places.shape)


def _known(eqn: JaxprEqn, args: list[Scalars]) -> list[Scalars]:
    """An equation of known numbers, computed by JAX."""
    if not all(isinstance(_dtype(var), np.dtype) for var in eqn.outvars):
        raise _refused(eqn, "makes random keys, which kernels do not have: draw from `noise`")
    inputs = [x.astype(_dtype(atom)) for atom, x in zip(eqn.invars, args, strict=True)]
    return [scalars(result) for result in _bind(eqn, inputs, eqn.params)]


def _bind(eqn: JaxprEqn, inputs: Sequence[np.ndarray], params: Any) -> list[np.ndarray]:
    with jax.ensure_compile_time_eval():
        results = eqn.primitive.bind(*map(jax.numpy.asarray, inputs), **params)
        return [np.asarray(x) for x in (results if eqn.primitive.multiple_results else [results])]


# ---- Control flow --------------------------------------------------------------------------------------------------


def _cond(eqn: JaxprEqn, args: list[Scalars]) -> list[Scalars]:
    """The branch that is known to be taken, or all of them and a choice."""
    which, branches = args[0].item(), eqn.params["branches"]
    if not isinstance(which, Value):
        return evaluate(branches[min(max(int(which), 0), len(branches) - 1)], args[1:])
    results = [evaluate(branch, args[1:]) for branch in branches]
    return [each(functools.partial(select, which), *cases) for cases in zip(*results, strict=True)]


def _scan(eqn: JaxprEqn, args: list[Scalars]) -> list[Scalars]:
    """Unrolled: what one turn knows the next may use."""
    p = eqn.params
    if p["length"] > _LONGEST_LOOP:
        raise _refused(eqn, f"has {p['length']} turns, and kernels unroll it; expected at most {_LONGEST_LOOP}")
    first, last = p["num_consts"], p["num_consts"] + p["num_carry"]
    consts, carry, rows = args[:first], args[first:last], args[last:]
    outputs: dict[int, list[Scalars]] = {}
    for i in range(p["length"])[:: -1 if p["reverse"] else 1]:
        results = evaluate(p["jaxpr"], [*consts, *carry, *(row[i, ...] for row in rows)])
        carry, outputs[i] = results[: p["num_carry"]], results[p["num_carry"] :]
    stacked = [np.stack(column) for column in zip(*(outputs[i] for i in sorted(outputs)), strict=True)]
    if not outputs:
        stacked = [np.empty(atom.aval.shape, object) for atom in tuple[Any, ...](eqn.outvars[p["num_carry"] :])]
    return [*carry, *stacked]


def _while(eqn: JaxprEqn, args: list[Scalars]) -> list[Scalars]:
    """A loop whose number of turns is known."""
    p = eqn.params
    n, k = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    carry = args[k:]
    for _ in range(_LONGEST_LOOP):
        (again,) = evaluate(p["cond_jaxpr"], [*args[:n], *carry])
        if not is_known(again):
            raise _refused(eqn, "needs a condition that is known while tracing")
        if not again.item():
            return carry
        carry = evaluate(p["body_jaxpr"], [*args[n:k], *carry])
    raise _refused(eqn, f"has over {_LONGEST_LOOP} turns, and kernels unroll it")


_CONTROL = {"cond": _cond, "scan": _scan, "while": _while}
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call")
