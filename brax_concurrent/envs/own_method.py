"""A method of a user's task, traced by JAX: what it depends on, what it returns, what it computes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from brax_concurrent.backends.program import Builder, Value
from brax_concurrent.envs.jaxpr import UnsupportedOperationError, evaluate
from brax_concurrent.envs.jaxpr_operations import Scalars
from brax_concurrent.envs.own_task import Noise

Path = tuple[str, ...]
"""Which array: ("s", "xpos"), ("before", "memory", "target"), ("action",), ("noise", "0")."""

Supply = Callable[[Path, tuple[int, ...], str], Any]
"""Gives the component `index` of the array `path`, of the kind "f", "i" or "b": `supply(path, index, kind)`."""


_MISTAKES: dict[type[Exception], str] = {
    jax.errors.TracerArrayConversionError: (
        "NumPy needs numbers, and these are known in a step only: use jax.numpy's functions, and jnp.asarray(table)[i] "
        "for a table of NumPy's"
    ),
    jax.errors.TracerIntegerConversionError: (
        "a list is indexed by a number that is known in a step only: use jnp.asarray(list)[i]"
    ),
    jax.errors.NonConcreteBooleanIndexError: (
        "how many elements x[condition] has is known in a step only: use jnp.where(condition, x, 0.0)"
    ),
    jax.errors.ConcretizationTypeError: (
        "Python's `if`, `and`, `float` and the like need a number, and this one is known in a step only: use jnp.where "
        "and its like"
    ),
}
"""What a user does who takes what is traced for numbers, by JAX's error."""


class Method:
    """A user's method, traced by JAX.

    Args:
        label: what errors call it: "Hopper.reward".
        function: the bound method.
        trees: its arguments as trees of shapes, by name; `wrap` makes of a tree what the method is given.
        wrap: by name of the argument; those that are missing are given as they are.
        noise: the dtype of what it may draw, or None where it draws nothing.
        precision: "f32" or "f64".

    Attributes:
        result: the shapes of what it returns, as a tree.
        used: the components of arguments that its results depend on.
        identity: two methods of equal identity compute the same.
        requests: what it draws, in order: ("uniform" or "normal", shape).
    """

    def __init__(
        self,
        label: str,
        function: Callable[..., Any],
        trees: Mapping[str, Any],
        wrap: Mapping[str, Callable[[Any], Any]],
        noise: Any = None,
        precision: str = "f32",
    ):
        self.label, self._precision = label, precision
        self.requests: list[tuple[str, tuple[int, ...]]] = []

        def call(given: Mapping[str, Any]) -> Any:
            arguments = {name: wrap.get(name, _itself)(given[name]) for name in trees}
            if noise is None:
                return function(*arguments.values())
            drawn = Noise(given.get("noise"), noise)
            result = function(*arguments.values(), drawn)
            self.requests = drawn.requests
            return result

        given: dict[str, Any] = dict(trees)
        try:
            if noise is not None:
                jax.eval_shape(call, given)
                given["noise"] = [jax.ShapeDtypeStruct(dims, noise) for _, dims in self.requests]
            self._closed, self.result = jax.make_jaxpr(call, return_shape=True)(given)
        except tuple(_MISTAKES) as error:
            said = str(error).partition("\n")[0]
            told = next(text for kind, text in _MISTAKES.items() if isinstance(error, kind))
            raise TypeError(f"{label}: {told} ({said})") from error
        leaves, _ = jax.tree_util.tree_flatten_with_path(given)
        self._inputs = [
            (tuple(str(getattr(k, "key", getattr(k, "idx", k))) for k in path), leaf) for path, leaf in leaves
        ]
        self.used, self.identity = self._dry_run()

    def _dry_run(self) -> tuple[frozenset[tuple[Path, tuple[int, ...]]], str]:
        """The components that the results depend on, and what tells this method from any other."""
        builder = Builder(self._precision)

        def load(path: Path, index: tuple[int, ...], kind: str) -> Value:
            return builder.fresh("load", (), kind, (path, index))

        results = self.evaluate(load, everything=True)
        names: dict[int, int] = {}
        lines = []
        for item in builder.root.body:
            names[item.ident] = len(names)
            lines.append((item.op, item.dtype, item.attr, [_name(a, names) for a in item.args]))
        outputs = [_name(x, names) for result in results for x in result.flat]
        digest = hashlib.sha256(repr((lines, outputs, self.requests, str(self.result))).encode()).hexdigest()
        work, seen, used = [x for result in results for x in result.flat], set(), set()
        while work:
            value = work.pop()
            if isinstance(value, Value) and value.ident not in seen:
                seen.add(value.ident)
                work += value.args
                if value.op == "load":
                    used.add(value.attr)
        return frozenset(used), digest

    def evaluate(self, supply: Supply, everything: bool = False) -> list[Scalars]:
        """The results one by one; `everything`: the components that no result depends on are asked for too."""
        args = []
        for path, leaf in self._inputs:
            array = np.full(leaf.shape, 0.0 if leaf.dtype.kind == "f" else 0, object)
            for index in np.ndindex(leaf.shape):
                if everything or (path, index) in self.used:
                    array[index] = supply(path, index, leaf.dtype.kind)
            args.append(array)
        try:
            return evaluate(self._closed, args)
        except UnsupportedOperationError as error:
            raise UnsupportedOperationError(error.what, f"{self.label}, {error.place}") from None

    def results(self, supply: Supply) -> Any:
        """The results as the tree that the method returns, with lists of scalars for arrays."""
        leaves = [list(x.flat) for x in self.evaluate(supply)]
        return jax.tree.unflatten(jax.tree.structure(self.result), leaves)

    def fields(self, argument: str) -> set[str]:
        """The fields of an argument that are used."""
        return {path[1] for path, _ in self.used if path[0] == argument and path[1] != "memory"}


def _itself(x: Any) -> Any:
    return x


def _name(x: Any, names: Mapping[int, int]) -> Any:
    return ("value", names[x.ident]) if isinstance(x, Value) else (type(x).__name__, repr(x))
