"""A policy as a kernel of the stream: the forward pass of a small network, and an action drawn from its Gaussian.

A layer's weights lie in blocks of 4 inputs by 16 outputs, `BLOCK` numbers in a row of one array that all environments
share; a layer's bias is the weight of one input more, which is 1. So a kernel reads them in order, 16 sums stay in
registers while a loop goes over the inputs, and what is not full of the last blocks is never read.

It is one kernel, or several for a scheduler that runs tasks of one tile at once: parts of a layer write rows of their
own and read the layer before, so that their footprints say that none waits for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from brax_concurrent.envs.random import threefry
from brax_concurrent.envs.stream import Array, Stream, StreamBuilder
from brax_concurrent.kernels.kernel import KernelFunction
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

PARTS = 8
"""Kernels of a layer at most: as many as a multiprocessor has gangs."""
ALL_PARTS = 16
"""Kernels of all hidden layers at most, beside those of the control step (cuda_dispatch.MAX_KINDS in all)."""

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


def parts_of(width: int, layers: int) -> tuple[range, ...]:
    """Blocks of outputs of each part of a layer `width` wide, in a network of so many hidden layers."""
    blocks = -(-width // OUTPUTS)
    each = -(-blocks // max(min(PARTS, ALL_PARTS // layers), 1))
    return tuple(range(first, min(first + each, blocks)) for first in range(0, blocks, each))


@dataclass(frozen=True)
class PolicyKernel:
    """The kernel or kernels of one architecture, for one task's sizes. The bits are the same.

    Attributes:
        observation_size, action_size: numbers of each.
        hidden: widths of the hidden layers.
        activation: behind each of them, a name in `ACTIVATIONS`.
        normalize_obs: whether the network gets the observation in standard deviations from a mean.
        split: whether they are several kernels; with more than `ALL_PARTS` hidden layers it is one all the same.
    """

    observation_size: int
    action_size: int
    hidden: tuple[int, ...]
    activation: str
    normalize_obs: bool
    split: bool = False

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The network's layers."""
        return layers_of((self.observation_size, *self.hidden, self.action_size))

    @property
    def fields(self) -> dict[str, Field]:
        """What passes between the layers. Hidden layers take turns with two fields."""
        widths = [self.observation_size, *(max(self.hidden[i::2], default=0) for i in range(2))]
        names = ("policy_input", "policy_hidden", "policy_hidden_2")
        fields = {
            name: Field((-(-width // INPUTS), INPUTS), "activations of the policy's network, 0 beyond the last")
            for name, width in zip(names, widths, strict=True)
            if width
        }
        if self.split:
            fields["policy_normals"] = Field((self.action_size,), "standard normal numbers of the action")
        return fields

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

    @property
    def kernels(self) -> dict[str, KernelFunction]:
        """What draws an action for the environment's observation: kernels by name, in program order."""
        if not self.split or len(self.hidden) > ALL_PARTS:
            return {"policy": self._whole}
        kernels: dict[str, KernelFunction] = {"policy_observe": self._observe, "policy_normals": self._draw}
        for layer, width in enumerate(self.hidden):
            for part, blocks in enumerate(parts_of(width, len(self.hidden))):
                kernels[f"policy_{layer}_{part}"] = partial(self._part, layer, blocks)
        return kernels | {"policy_head": self._head}

    def _whole(self, m: Any, w: Any) -> None:
        self._observe(m, w)
        for index in range(len(self.hidden)):
            self._part(index, range(self.layers[index].output_blocks), m, w)
        mean, normals = self._mean(w), self._normals(w)
        self._act(w, mean, normals)
        self._rate(w, normals)

    def _draw(self, m: Any, w: Any) -> None:
        normals = self._normals(w)
        for i, z in enumerate(normals):
            w.policy_normals[i] = z
        self._rate(w, normals)

    def _part(self, index: int, blocks: range, m: Any, w: Any) -> None:
        """Some blocks of a hidden layer."""
        full, rest = divmod(self.hidden[index], OUTPUTS)
        for block in w.range(min(blocks.stop, full) - blocks.start, rolled=self.split):
            self._block(w, index, block + blocks.start if blocks.start else block, OUTPUTS)
        if blocks.stop > full:
            self._block(w, index, full, rest)
        if blocks.stop * OUTPUTS >= self.hidden[index]:
            _fill_up(self._after(w, index), self.hidden[index])

    def _head(self, m: Any, w: Any) -> None:
        self._act(w, self._mean(w), [w.policy_normals[i] for i in range(self.action_size)])

    def _observe(self, m: Any, w: Any) -> None:
        for i in range(self.observation_size):
            x = w.user.obs[i]
            w.user.policy_obs[i] = x
            if self.normalize_obs:
                statistics = w.user.policy_statistics
                x = limited((x - statistics[0, i]) * statistics[1, i], -LIMIT, LIMIT)
            w.policy_input[i // INPUTS, i % INPUTS] = x
        _fill_up(w.policy_input, self.observation_size)

    def _after(self, w: Any, index: int) -> Any:
        """The activations behind a hidden layer; of -1: the network's input."""
        return w.policy_input if index < 0 else w.policy_hidden_2 if index % 2 else w.policy_hidden

    def _block(self, w: Any, index: int, block: Any, count: int) -> None:
        """The first `count` outputs of a block of a hidden layer."""
        layer, target, activation = self.layers[index], self._after(w, index), ACTIVATIONS[self.activation]
        sums = self._outputs(w, layer, self._after(w, index - 1), layer.first_row + block * layer.input_blocks, count)
        first = block * (OUTPUTS // INPUTS)
        if self.split and count == OUTPUTS:
            # 16 activations one behind the other would be more code than all the rest.
            before = w.array(OUTPUTS)
            for j, x in enumerate(sums):
                before[j] = x
            for turn in w.range(OUTPUTS // INPUTS, rolled=True):
                for j in range(INPUTS):
                    target[first + turn, j] = activation(before[turn * INPUTS + j])
            return
        for j, x in enumerate(sums):
            target[first + j // INPUTS, j % INPUTS] = activation(x)

    def _mean(self, w: Any) -> list[Any]:
        """The means of the actions."""
        head, source = self.layers[-1], self._after(w, len(self.hidden) - 1)
        mean: list[Any] = []
        for block in range(head.output_blocks):
            count = min(OUTPUTS, head.outputs - block * OUTPUTS)
            mean += self._outputs(w, head, source, head.first_row + block * head.input_blocks, count)
        return mean

    def _act(self, w: Any, mean: Sequence[Any], normals: Sequence[Any]) -> None:
        for i, (center, z) in enumerate(zip(mean, normals, strict=True)):
            w.user.action[i] = center + w.user.policy_head[0, i] * z

    def _rate(self, w: Any, normals: Sequence[Any]) -> None:
        """The action's log density, which depends on the normal numbers only."""
        squares: Any = 0.0
        for z in normals:
            squares = squares + z * z
        w.user.log_prob[0] = -0.5 * squares - w.user.policy_head[0, self.action_size]

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

    def _outputs(self, w: Any, layer: Layer, source: Any, row: Any, count: int) -> list[Any]:
        """The first `count` outputs of a block, whose rows of weights begin at `row`, before the activation."""
        weights = w.user.policy_weights
        full, rest = divmod(layer.inputs, INPUTS)
        sums = [w.var(weights[row + full, rest * OUTPUTS + i]) for i in range(count)]

        def add(block: Any, which: int) -> None:
            x = source[block, which]
            for i, total in enumerate(sums):
                total.value = total.value + x * weights[row + block, which * OUTPUTS + i]

        # A part has a warp for itself and few others around that hide how long loads take: more of them at once.
        together = min(2 * OUTPUTS // count, 4) if self.split else 1
        for turn in w.range(full // together):
            for block in range(together):
                for which in range(INPUTS):
                    add(turn * together + block if self.split else turn, which)
        for block in range(full - full % together, full):
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
        policy: the policy's kernel or kernels.
        granularity: of the control step, see StreamBuilder.control_step; the policy's kernels are its own.
        applied: see StreamBuilder.step_kernels.
    """
    # The control step's arrays and fields come first, as they do without the policy: so its kernels are the same code.
    arrays = builder.step_arrays()
    arrays |= {name: replace(arrays[name], access="write", per_step=True) for name in ("action", *KEPT)}
    arrays |= {"obs": replace(arrays["obs"], access="readwrite"), **policy.arrays}
    fields = builder.fields | policy.fields
    make = builder.maker(arrays, fields)
    kernels = (
        *(make(name, function) for name, function in policy.kernels.items()),
        *builder.step_kernels(arrays, granularity, applied),
    )
    return Stream(kernels, fields, arrays, builder.view)
