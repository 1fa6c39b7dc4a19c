"""The same networks as functions of JAX: what is compared with, in results and in speed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.tensors import Flag, Layer, Pads, Tensor

Values = dict[Tensor, Any]
_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": lambda x: jnp.maximum(x, 0),
    "relu6": lambda x: jnp.minimum(jnp.maximum(x, 0), 6),
    "swish": lambda x: x * jax.nn.sigmoid(x),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


def as_jax(
    graph: Graph, *, branches: str = "mask", precision: str = "highest"
) -> Callable[[Mapping[str, Any], Any], dict[str, Any]]:
    """A network as a function of weights and one image (height, width, channels), for `jax.jit` and `jax.vmap`.

    Args:
      graph: the network.
      branches: what becomes of layers that run only under a flag. "mask": they always run, and what is not wanted is
        dropped. "cond": neighbours under one flag are a `lax.cond`; under `jax.vmap` that is a mask again.
      precision: of products, see `jax.default_matmul_precision`. With "default" a GPU may round float32 to fewer bits.

    Returns:
      (weights by name, image) -> outputs by name.

    Raises:
      ValueError: branches is neither.
    """
    if branches not in ("mask", "cond"):
        raise ValueError(f"branches: expected mask or cond, got {branches!r}")

    def infer(weights: Mapping[str, Any], image: Any) -> dict[str, Any]:
        values: Values = {graph.input: image}
        with jax.default_matmul_precision(precision):
            for when, group in itertools.groupby(graph.layers, key=lambda layer: layer.when):
                layers = list(group)
                if when is None or branches == "mask":
                    _run(layers, weights, values)
                else:
                    _run_if(when, layers, weights, values)
        return {name: values[tensor] for name, tensor in graph.outputs.items()}

    return infer


def _run(layers: Sequence[Layer], weights: Mapping[str, Any], values: Values) -> None:
    for layer in layers:
        values[layer.output] = _KINDS[layer.kind](layer, [weights[name] for name in layer.parameters], values)


def _run_if(when: Flag, layers: Sequence[Layer], weights: Mapping[str, Any], values: Values) -> None:
    """Layers under one flag; where it is 0, zeros come out."""

    def run() -> list[Any]:
        inside = dict(values)
        _run(layers, weights, inside)
        return [inside[layer.output] for layer in layers]

    def skip() -> list[Any]:
        return [jnp.zeros(layer.output.shape, layer.output.dtype) for layer in layers]

    found = lax.cond(_flag(when, values) != 0, run, skip)
    values.update({layer.output: each for layer, each in zip(layers, found, strict=True)})


def _flag(flag: Flag, values: Values) -> Any:
    return values[flag.tensor][flag.index]


def _finish(layer: Layer, x: Any) -> Any:
    """What a layer applies to its result."""
    name = layer.attributes["activation"]
    return x if name is None else _ACTIVATIONS[name](x)


def _conv(layer: Layer, weights: list[Any], values: Values) -> Any:
    a, x = layer.attributes, values[layer.inputs[0]]
    own = weights if len(layer.inputs) == 1 else [values[layer.inputs[1]], *weights]  # mixed, or trained as they are
    filters = own[0]
    groups = 1
    if layer.kind == "depthwise":
        filters, groups = filters[:, :, None, :], x.shape[-1]
    x, pads = _cropped(x, a["pads"])
    y = lax.conv_general_dilated(
        x[None],
        filters,
        (a["stride"], a["stride"]),
        pads,
        rhs_dilation=(a["dilation"], a["dilation"]),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )[0]
    return _finish(layer, y + own[1] if len(own) > 1 else y)


def _cropped(x: Any, pads: Pads) -> tuple[Any, Pads]:
    """An image without what negative padding takes away, and the padding that is left.

    XLA takes no negative padding for windows that are reduced, and on CPUs its convolutions with it read outside of
    the image (jaxlib 0.10.2: 16 channels, an odd width, 1x1 filters, stride 2, padding (-1, 1)).
    """
    (top, bottom), (left, right) = pads
    height, width = x.shape[:2]
    x = x[max(-top, 0) : height - max(-bottom, 0), max(-left, 0) : width - max(-right, 0)]
    return x, ((max(top, 0), max(bottom, 0)), (max(left, 0), max(right, 0)))


def _dense(layer: Layer, weights: list[Any], values: Values) -> Any:
    y = jnp.dot(values[layer.inputs[0]], weights[0])
    return _finish(layer, y + weights[1] if len(weights) > 1 else y)


def _pool(layer: Layer, _: list[Any], values: Values) -> Any:
    a, x = layer.attributes, values[layer.inputs[0]]
    dims, strides = (*a["size"], 1), (a["stride"], a["stride"], 1)
    x, (rows, columns) = _cropped(x, a["pads"])
    pads = (rows, columns, (0, 0))
    if layer.kind == "max_pool":
        return lax.reduce_window(x, -jnp.inf, lax.max, dims, strides, pads)
    total = lax.reduce_window(x, 0.0, lax.add, dims, strides, pads)
    # One channel will do for how many count: XLA folds constants, which takes it seconds for many channels.
    return total / lax.reduce_window(jnp.ones_like(x[..., :1]), 0.0, lax.add, dims, strides, pads)


def _sum(layer: Layer, weights: list[Any], values: Values) -> Any:
    xs, flags, scales = [values[x] for x in layer.inputs], layer.attributes["flags"], layer.attributes["scales"]
    if weights:
        xs = [x * jax.nn.sigmoid(weights[0][i]) for i, x in enumerate(xs)]
    if scales is not None:
        xs = [x * values[scales][i] for i, x in enumerate(xs)]
    if flags:
        xs = [jnp.where(_flag(flag, values) != 0, x, 0.0) for flag, x in zip(flags, xs, strict=True)]
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return _finish(layer, total)


def _gate(layer: Layer, _: list[Any], values: Values) -> Any:
    x, groups = values[layer.inputs[0]], layer.attributes["groups"]
    on = x > layer.attributes["threshold"]
    if groups:
        rows, on = x.reshape(groups, -1), on.reshape(groups, -1)
        largest = jnp.where(jnp.isnan(rows), -jnp.inf, rows).max(axis=1, keepdims=True)
        first = jnp.arange(rows.shape[1]) == jnp.argmax(rows == largest, axis=1)[:, None]  # of NaNs alone the first
        on = jnp.where(on.any(axis=1, keepdims=True), on, first).reshape(-1)
    return on.astype(jnp.int32)


def _any(layer: Layer, _: list[Any], values: Values) -> Any:
    pairs = zip(layer.inputs, layer.attributes["indices"], strict=True)
    found = jnp.stack([values[tensor][index] != 0 for tensor, index in pairs]).any()
    return (found if layer.kind == "any" else ~found).astype(jnp.int32)[None]


def _mix(layer: Layer, weights: list[Any], values: Values) -> Any:
    return jnp.tensordot(values[layer.inputs[0]], weights[0], axes=1)


_KINDS: dict[str, Callable[[Layer, list[Any], Values], Any]] = {
    "conv": _conv,
    "depthwise": _conv,
    "dense": _dense,
    "max_pool": _pool,
    "avg_pool": _pool,
    "view": lambda layer, _, values: values[layer.inputs[0]].reshape(layer.output.shape),
    "sum": _sum,
    "multiply": lambda layer, _, values: values[layer.inputs[0]] * values[layer.inputs[1]],
    "concat": lambda layer, _, values: jnp.concatenate([values[x] for x in layer.inputs], axis=-1),
    "resize": lambda layer, _, values: jax.image.resize(
        values[layer.inputs[0]], layer.output.shape, layer.attributes["method"]
    ),
    "softmax": lambda layer, _, values: jax.nn.softmax(values[layer.inputs[0]], axis=-1),
    "gate": _gate,
    "any": _any,
    "none": _any,
    "mix": _mix,
}
