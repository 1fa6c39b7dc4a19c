"""JAX functions as kernel code: a jaxpr evaluated on the scalars of one environment.

An array of the jaxpr is a NumPy array of objects: traced values of the kernel being built, or Python numbers where they
are known. So structure (slices, reshapes, loops) leaves no code behind, and arithmetic becomes the lane programs of
docs/lanes.md, folded and fused like the physics' own. An equation whose inputs are all known is computed while tracing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from brax_concurrent.backends.program import Value
from brax_concurrent.envs.jaxpr_errors import UnsupportedOperationError, outside, refused
from brax_concurrent.envs.jaxpr_operations import (
    ARRAYS,
    ELEMENTWISE,
    REDUCTIONS,
    RefusedError,
    Scalars,
    each,
    filled,
    is_known,
    reduce,
    scalars,
    select,
    wrapped,
)
from brax_concurrent.envs.jaxpr_places import SCATTERS, dynamic_slice, dynamic_update_slice, gather, scatter
from brax_concurrent.envs.jaxpr_unsigned import elementwise, place

_DTYPES = ("float32", "float64", "int32", "int64", "uint32", "bool")
_LONGEST_LOOP = 10_000


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
            raise outside(error, eqn) from None
        for var, result in zip(eqn.outvars, results, strict=True):
            values[var] = wrapped(result, _dtype(var)) if _dtype(var).kind in "iu" else result
    return [read(atom) for atom in jaxpr.outvars]


def _dtype(atom: Any) -> np.dtype:
    return atom.aval.dtype


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _is_ours(atom: Any) -> bool:
    return _dtype(atom).name in _DTYPES


def _is_unsigned(atom: Any) -> bool:
    return _dtype(atom) == np.uint32


def _equation(eqn: JaxprEqn, args: list[Scalars]) -> list[Scalars]:
    """The results of an equation."""
    results = _computed(eqn, args)
    for var, result in zip(eqn.outvars, results, strict=True):
        if not _is_ours(var) and not is_known(result):
            raise refused(eqn, f"gives {_dtype(var).name} numbers; kernels have {', '.join(_DTYPES)}")
    return results


def _computed(eqn: JaxprEqn, args: list[Scalars]) -> list[Scalars]:
    name, params = eqn.primitive.name, eqn.params
    if not all(map(is_known, args)):
        _check_width(eqn, args)
    elif not all(_is_ours(atom) and not _is_unsigned(atom) for atom in (*eqn.invars, *eqn.outvars)):
        return _known(eqn, args)  # unsigned integers wrap as JAX has it
    if name in ELEMENTWISE:
        dtype, unsigned = _dtype(eqn.outvars[0]), any(map(_is_unsigned, eqn.invars))
        try:
            chosen = elementwise(name, params, dtype) if unsigned else ELEMENTWISE[name](params, dtype)
            return [each(chosen, *args)]
        except RefusedError as error:
            raise refused(eqn, str(error)) from None
    if name in ARRAYS:
        result = ARRAYS[name](params, *args)
        return result if isinstance(result, list) else [result]
    if name in REDUCTIONS:
        if _is_unsigned(eqn.invars[0]) and name not in ("reduce_sum", "reduce_prod"):
            raise refused(eqn, "of unsigned numbers has no counterpart in kernels: convert them to int32")
        return [reduce(REDUCTIONS[name], args[0], params["axes"])]
    if name in _CONTROL:
        return _CONTROL[name](eqn, args)
    if name in _CALLS:
        function = next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params)
        return evaluate(function, args) if isinstance(function, ClosedJaxpr) else _run(function, (), args)
    if name in _PLACES:
        return [_at_places(eqn, args)]
    if all(map(is_known, args)):
        return _known(eqn, args)
    raise refused(eqn, "has no counterpart in kernels (docs/tasks.md says what has)")


def supported_operations() -> list[str]:
    """JAX's names of the operations that kernels have."""
    return sorted({*ELEMENTWISE, *ARRAYS, *REDUCTIONS, *_PLACES, *_CONTROL})


def _check_width(eqn: JaxprEqn, args: Sequence[Scalars]) -> None:
    """Refuse to let a whole number that takes more than 32 bits meet those of run time, which have no more."""
    for atom, x in zip(eqn.invars, args, strict=True):
        if _dtype(atom) == np.int64:
            far = next((i for i in x.flat if isinstance(i, int) and not -(2**31) <= i < 2**31), None)
            if far is not None:
                raise refused(eqn, f"has the whole number {far}; those of kernels have 32 bits")


# ---- What moves numbers: where their places are known, by JAX ------------------------------------------------------

_PLACES: dict[str, Callable[[int], range]] = {  # which of n inputs are indices
    "gather": lambda n: range(1, 2),
    "dynamic_slice": lambda n: range(1, n),
    "dynamic_update_slice": lambda n: range(2, n),
    "pad": lambda n: range(0),
    **dict.fromkeys(SCATTERS, lambda n: range(1, 2)),
}


def _at_places(eqn: JaxprEqn, args: list[Scalars]) -> Scalars:
    name, params = eqn.primitive.name, eqn.params
    indices = _PLACES[name](len(args))
    known = all(is_known(args[i]) for i in indices)
    args = [each(place, x) if i in indices and _is_unsigned(eqn.invars[i]) else x for i, x in enumerate(args)]
    if name == "dynamic_slice":
        return dynamic_slice(params["slice_sizes"], *args)
    if name == "dynamic_update_slice" and not known:
        return dynamic_update_slice(*args)
    if name == "gather" and not known:
        return gather(params, _fill(eqn), _shape(eqn.outvars[0]), *args)
    if name in SCATTERS and not (known and name == "scatter"):
        return scatter(params, SCATTERS[name], *args)
    return _moved(eqn, args)


def _moved(eqn: JaxprEqn, args: list[Scalars]) -> Scalars:
    """Let JAX move the places of numbers, then take the numbers from there."""
    indices = _PLACES[eqn.primitive.name](len(args))
    everything: list[Any] = []
    inputs = []
    for i, (atom, x) in enumerate(zip(eqn.invars, args, strict=True)):
        if i in indices:
            inputs.append(x.astype(_dtype(atom)))
        else:
            inputs.append(np.arange(len(everything), len(everything) + x.size, dtype=np.int32).reshape(x.shape))
            everything += x.flat
    params = eqn.params
    if "fill_value" in params:  # what lies outside the array is at place -1
        everything.append(_fill(eqn))
        params = {**params, "fill_value": -1}
    (places,) = _bind(eqn, inputs, params)
    return filled([everything[i] for i in places.flat], places.shape)


def _fill(eqn: JaxprEqn) -> Any:
    """What a gather finds outside of its array; by default it is what JAX has there."""
    given = eqn.params["fill_value"]
    default = {"f": float("nan"), "b": True}.get(_dtype(eqn.outvars[0]).kind, -(1 << 31))
    return default if given is None else np.asarray(given).item()


def _known(eqn: JaxprEqn, args: list[Scalars]) -> list[Scalars]:
    """An equation of known numbers, computed by JAX."""
    if not all(isinstance(_dtype(var), np.dtype) for var in eqn.outvars):
        raise refused(eqn, "makes random keys, which kernels do not have")
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
        raise refused(eqn, f"has {p['length']} turns, and kernels unroll it; expected at most {_LONGEST_LOOP}")
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
            raise refused(
                eqn, "needs a condition that is known while tracing: use a fixed number of turns and jnp.where"
            )
        if not again.item():
            return carry
        carry = evaluate(p["body_jaxpr"], [*args[n:k], *carry])
    raise refused(eqn, f"has over {_LONGEST_LOOP} turns, and kernels unroll it")


_CONTROL = {"cond": _cond, "scan": _scan, "while": _while}
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call")
