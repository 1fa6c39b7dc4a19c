"""A policy as a kernel of the stream: the forward pass of a small network, and an action drawn from its Gaussian.

A layer's weights lie in blocks of 4 inputs by 16 outputs, `BLOCK` numbers in a row of one array that all environments
share; a layer's bias is the weight of one input more, which is 1. So a kernel reads them in order, 16 sums stay in
registers while a loop goes over the inputs, and what is not full of the last blocks is never read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from brax_concurrent.envs.random import threefry
from brax_concurrent.envs.stream import Array, Stream, StreamBuilder
from brax_concurrent.kernels.layout import Field
from brax_concurrent.kernels.ops import log, sigmoid, sincos, sqrt, tanh, uniform01, where

INPUTS, OUTPUTS = 4, 16
BLOCK = INPUTS * OUTPUTS
LIMIT = 10.0
"""Normalised observations are clipped to this many standard deviations."""

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "tanh": tanh,
    "relu": lambda x: where(x < 0.0, 0.0, x),
    "swish": lambda x: x * sigmoid(x),
}

KEPT = ("reward", "terminated", "truncated", "final_obs")
"""What a control step gives that a rollout keeps of every step."""


@dataclass(frozen=True)
class Layer:
    """One layer: its sizes and the first of its rows of blocks, `input_blocks` for each 16 outputs."""

    inputs: int
    outputs: int
    first_row: int

    @property
    def input_blocks(self) -> int:
        """Blocks over the inputs and the bias."""
        return -(-(self.inputs + 1) // INPUTS)

    @property
    def output_blocks(self) -> int:
        """Blocks over the outputs."""
        return -(-self.outputs // OUTPUTS)


def layers_of(sizes: Sequence[int]) -> tuple[Layer, ...]:
    """The layers of a network; sizes are the inputs and then the outputs of each layer."""
    layers: list[Layer] = []
    row = 0
    for inputs, outputs in pairwise(sizes):
        layers.append(Layer(inputs, outputs, row))
        row += layers[-1].input_blocks * layers[-1].output_blocks
    return tuple(layers)


@dataclass(frozen=True)
class PolicyKernel:
    """The kernel of one architecture, for one task's sizes.

    Attributes:
        observation_size, action_size: numbers of each.
        hidden: widths of the hidden layers.
        activation: behind each of them, a name in `ACTIVATIONS`.
        normalize_obs: whether the network gets the observation in standard deviations from a mean.
    """

    observation_size: int
    action_size: int
    hidden: tuple[int, ...]
    activation: str
    normalize_obs: bool

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The network's layers."""
        return layers_of((self.observation_size, *self.hidden, self.action_size))

    @property
    def fields(self) -> dict[str, Field]:
        """What passes between the layers. Hidden layers take turns with two fields."""
        widths = [self.observation_size, *(max(self.hidden[i::2], default=0) for i in range(2))]
        names = ("policy_input", "policy_hidden", "policy_hidden_2")
        return {
            name: Field((-(-width // INPUTS), INPUTS), "activations of the policy's network, 0 beyond the last")
            for name, width in zip(names, widths, strict=True)
            if width
        }

    @property
    def arrays(self) -> dict[str, Array]:
        """The user's arrays that only the policy touches; see `MlpPolicy.packed`."""
        last = self.layers[-1]
        statistics = {"policy_statistics": Array(self.observation_size, "f", "read", rows=2)}
        return {
            "policy_key": Array(2, "u", "read", rows=1),
            "policy_env": Array(1, "i", "read", scalar=True),
            "policy_step": Array(1, "i", "readwrite", scalar=True),
            "policy_weights": Array(BLOCK, "f", "read", rows=last.first_row + last.input_blocks * last.output_blocks),
            "policy_head": Array(self.action_size + 1, "f", "read", rows=1),
            **(statistics if self.normalize_obs else {}),
            "policy_obs": Array(self.observation_size, "f", "write", per_step=True),
            "log_prob": Array(1, "f", "write", scalar=True, per_step=True),
        }

    def __call__(self, m: Any, w: Any) -> None:
        """Draw an action for the environment's observation."""
        self._observe(w)
        mean = self._network(w)
        squares: Any = 0.0
        for i, (center, z) in enumerate(zip(mean, self._normals(w), strict=True)):
            w.user.action[i] = center + w.user.policy_head[0, i] * z
            squares = squares + z * z
        w.user.log_prob[0] = -0.5 * squares - w.user.policy_head[0, self.action_size]

    def _observe(self, w: Any) -> None:
        for i in range(self.observation_size):
            x = w.user.obs[i]
            w.user.policy_obs[i] = x
            if self.normalize_obs:
                statistics = w.user.policy_statistics
                x = limited((x - statistics[0, i]) * statistics[1, i], -LIMIT, LIMIT)
            w.policy_input[i // INPUTS, i % INPUTS] = x
        _fill_up(w.policy_input, self.observation_size)

    def _network(self, w: Any) -> list[Any]:
        """The means of the actions."""
        source, activation = w.policy_input, ACTIVATIONS[self.activation]
        *hidden, head = self.layers
        for i, layer in enumerate(hidden):
            target = w.policy_hidden_2 if i % 2 else w.policy_hidden
            full, rest = divmod(layer.outputs, OUTPUTS)
            for block in w.range(full):
                sums = _outputs(w, layer, source, layer.first_row + block * layer.input_blocks, OUTPUTS)
                for j, x in enumerate(sums):
                    target[block * (OUTPUTS // INPUTS) + j // INPUTS, j % INPUTS] = activation(x)
            last = layer.first_row + full * layer.input_blocks
            for j, x in enumerate(_outputs(w, layer, source, last, rest) if rest else ()):
                target[full * (OUTPUTS // INPUTS) + j // INPUTS, j % INPUTS] = activation(x)
            _fill_up(target, layer.outputs)
            source = target
        mean: list[Any] = []
        for block in range(head.output_blocks):
            count = min(OUTPUTS, head.outputs - block * OUTPUTS)
            mean += _outputs(w, head, source, head.first_row + block * head.input_blocks, count)
        return mean

    def _normals(self, w: Any) -> list[Any]:
        """Standard normal numbers, those that `MlpPolicy.normals` draws."""
        key, step, env = w.user.policy_key, w.user.policy_step, w.user.policy_env[0]
        step_key = threefry((key[0, 0], key[0, 1]), (0, step[0]))  # jax.random.fold_in
        step[0] = step[0] + 1
        numbers: list[Any] = []
        for pair in range(-(-self.action_size // 2)):
            first, second = threefry(step_key, (env, pair))
            radius = sqrt(-2.0 * log(uniform01(first)))
            sine, cosine = sincos(2.0 * math.pi * uniform01(second))
            numbers += [radius * cosine, radius * sine]
        return numbers[: self.action_size]


def _outputs(w: Any, layer: Layer, source: Any, row: Any, count: int) -> list[Any]:
    """The first `count` outputs of a block, whose rows of weights begin at `row`, before the activation."""
    weights = w.user.policy_weights
    full, rest = divmod(layer.inputs, INPUTS)
    sums = [w.var(weights[row + full, rest * OUTPUTS + i]) for i in range(count)]

    def add(block: Any, which: int) -> None:
        x = source[block, which]
        for i, total in enumerate(sums):
            total.value = total.value + x * weights[row + block, which * OUTPUTS + i]

    for block in w.range(full):
        for which in range(INPUTS):
            add(block, which)
    for which in range(rest):
        add(full, which)
    return [total.value for total in sums]


def _fill_up(activations: Any, count: int) -> None:
    """Zeros behind the last activation, so that no block has numbers that nobody wrote."""
    for i in range(count, -(-count // INPUTS) * INPUTS):
        activations[i // INPUTS, i % INPUTS] = 0.0


def limited(x: Any, low: Any, high: Any) -> Any:
    """`x` limited to [low, high]; NaN stays NaN."""
    return where(x > high, high, where(x < low, low, x))


def rollout_stream(
    builder: StreamBuilder,
    policy: PolicyKernel,
    granularity: str,
    applied: Callable[[list[Any]], list[Any]] | None = None,
) -> Stream:
    """A control step with the policy inside: it acts on what the step before observed.

    Args:
        builder: of the environment's streams.
        policy: the policy's kernel.
        granularity: of the control step, see StreamBuilder.control_step; the policy is one kernel.
        applied: see StreamBuilder.step_kernels.
    """
    # The control step's arrays and fields come first, as they do without the policy: so its kernels are the same code.
    arrays = builder.step_arrays()
    arrays |= {name: replace(arrays[name], access="write", per_step=True) for name in ("action", *KEPT)}
    arrays |= {"obs": replace(arrays["obs"], access="readwrite"), **policy.arrays}
    fields = builder.fields | policy.fields
    kernels = (
        builder.maker(arrays, fields)("policy", policy),
        *builder.step_kernels(arrays, granularity, applied),
    )
    return Stream(kernels, fields, arrays, builder.view)
