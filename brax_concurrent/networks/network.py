"""A network with its weights and memory on a device: images in, results out, through any scheduler."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from brax_concurrent.backends import cuda_driver, device_array
from brax_concurrent.networks.arguments import is_whole
from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.memory import Plan, plan_memory
from brax_concurrent.networks.tasks import Memory, add_layer
from brax_concurrent.networks.tensors import Flag, Layer, Tensor
from brax_concurrent.networks.weights import checked_weights, load_weights, seeded_weights
from brax_concurrent.scheduler.run_streams import run_streams
from brax_concurrent.scheduler.schedule import whole
from brax_concurrent.scheduler.stream import TaskStream
from brax_concurrent.scheduler.trace import Timeline


class Network:
    """A graph that can be run.

    Each image has its own tensors and its own tasks: those of a batch are independent, and each image takes its own
    path through a network whose path depends on the input.

    Args:
      graph: the network.
      weights: by name, float32; the path of an .npz file with them; or None: drawn from `seed`.
      batch: images that are inferred at once.
      device: "cpu", "cuda", or "auto": cuda if there is a GPU.
      seed: see `seeded_weights`.

    Attributes:
      graph: the network.
      batch: images at once.
      device: where it runs.
      plan: how tensors share memory.
      streams: the tasks of each image.

    Raises:
      TypeError: the graph or weights are none.
      ValueError: weights do not fit, or batch, device or seed are none.
      CudaError: there is no GPU.
    """

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        batch: int = 1,
        device: str = "auto",
        seed: int = 0,
    ):
        if not isinstance(graph, Graph):
            raise TypeError(f"graph: expected a Graph, see make_network, got {graph!r}")
        if not graph.outputs:
            raise ValueError(f"{graph.name}: expected a graph with outputs, got none: see Graph.output")
        if not is_whole(batch) or batch < 1:
            raise ValueError(f"batch: expected a whole number from 1 on, got {batch!r}")
        self.graph, self.batch, self.device = graph, int(batch), _device(device)
        self.plan: Plan = plan_memory(graph)
        host = _weights(graph, weights, seed)
        self._weights = {name: self._on_device(array) for name, array in host.items()}

        @functools.cache  # for all images
        def swapped(name: str) -> Any:
            return self._on_device(np.ascontiguousarray(host[name].swapaxes(-1, -2)))

        self._flag_offsets, flags = _flag_offsets(graph)
        self._blocks = [self._empty(max(self.plan.size, 1), np.float32) for _ in range(self.batch)]
        every = self._empty(max(self.batch * flags, 1), np.int32)  # one array, which `sw` on a GPU can read at once
        self._flags = [every[image * flags : (image + 1) * flags] for image in range(self.batch)]
        self.streams = tuple(TaskStream() for _ in range(self.batch))
        self._starts = [0]  # of each layer: its first task; and behind the last. The same in all streams
        for image, stream in enumerate(self.streams):
            memory = self._memory(image, swapped)
            for layer in graph.layers:
                add_layer(stream, layer, memory)
                if image == 0:
                    self._starts.append(len(stream))

    def __repr__(self) -> str:
        return f"Network({self.graph!r}, batch={self.batch}, device={self.device!r})"

    def __call__(self, images: Any, scheduler: str = "auto", **knobs: Any) -> dict[str, np.ndarray]:
        """Infer a batch.

        Args:
          images: (batch, height, width, channels), float32; without the batch where that is 1.
          scheduler, knobs: see `run`, whose arguments they are.

        Returns:
          The graph's outputs by name, each (batch, *shape); without the batch where the images are without it.

        Raises:
          TypeError: the images are not float32.
          ValueError: they have another shape; or see `run`.
        """
        single = self.load(images)
        self.run(scheduler, **knobs)
        found = self.read()
        return {name: array[0] for name, array in found.items()} if single else found

    def load(self, images: Any) -> bool:
        """Copy images to where the tasks read them; see `__call__`. Returns whether it was one without a batch."""
        array = _as_array(images)
        single = self.batch == 1 and array.ndim == 3
        pixels = array[None] if single else array
        _check_shape(array.shape, pixels.shape, (self.batch, *self.graph.input.shape))
        for image, own in enumerate(pixels):
            self._write(self._array(image, self.graph.input), np.ascontiguousarray(own))
        return single

    def run(
        self,
        scheduler: str = "auto",
        *,
        window: int = 32,
        streams: int = 4,
        threads: int = 0,
        windows: int = 0,
        trace: str | os.PathLike[str] | None = None,
    ) -> Timeline | None:
        """Run all tasks on the images that are loaded; returns when they have finished.

        Args:
          scheduler, window, streams, threads, trace: see `TaskStream.run`. "auto" is what was the fastest where
            all were measured: graph for one image on a GPU, unless there is a trace; else hw.
          windows: of a batch, see `run_streams`.

        Returns:
          The timeline, if a trace is asked for.

        Raises:
          TypeError, ValueError, RuntimeError: see `TaskStream.run`.
        """
        if scheduler == "auto":
            scheduler = "graph" if self.device == "cuda" and self.batch == 1 and trace is None else "hw"
        if self.batch == 1:
            if whole("windows", windows) < 0:
                raise ValueError(f"windows must not be negative, got {windows}")
            return self.streams[0].run(scheduler, window=window, streams=streams, threads=threads, trace=trace)
        knobs = {"windows": windows, "window": window, "cuda_streams": streams, "threads": threads}
        return run_streams(self.streams, scheduler, **knobs, trace=trace)

    def read(self) -> dict[str, np.ndarray]:
        """The outputs of the last run by name, each (batch, *shape)."""
        return {
            name: np.stack([self._read(image, tensor) for image in range(self.batch)])
            for name, tensor in self.graph.outputs.items()
        }

    def ran(self, image: int = 0) -> tuple[Layer, ...]:
        """The layers that the last run ran for an image, by its flags.

        Raises:
          ValueError: there is no such image in a batch.
        """
        self._check_image(image)
        flags = {tensor: self._read(image, tensor) for tensor in self._flag_offsets}
        return tuple(
            layer
            for layer in self.graph.layers
            if layer.when is None or flags[layer.when.tensor][layer.when.index] != 0
        )

    def flag(self, flag: Flag, image: int = 0) -> int:
        """A flag's value after the last run.

        Raises:
          TypeError: it is no flag.
          ValueError: it is another graph's, or there is no such image in a batch.
        """
        if not isinstance(flag, Flag):
            raise TypeError(f"flag: expected a flag, as Graph.gate returns them, got {type(flag).__name__}")
        if flag.tensor not in self._flag_offsets or not 0 <= flag.index < flag.tensor.size:
            raise ValueError(f"flag: {flag.tensor.name}, {flag.index}: expected one of {self.graph.name}")
        self._check_image(image)
        return int(self._read(image, flag.tensor)[flag.index])

    def tasks_of(self, layer: Layer) -> range:
        """The places in each image's stream of a layer's tasks: none where it is a view.

        Raises:
          ValueError: the graph has no such layer.
        """
        if layer not in self.graph.layers:
            got = layer.name if isinstance(layer, Layer) else repr(layer)
            raise ValueError(f"layer: expected one of the layers of {self.graph.name}, see Graph.layers, got {got}")
        index = self.graph.layers.index(layer)
        return range(self._starts[index], self._starts[index + 1])

    def _check_image(self, image: int) -> None:
        if not is_whole(image) or not 0 <= image < self.batch:
            raise ValueError(f"image: expected a whole number from 0 to {self.batch - 1}, got {image!r}")

    # -- memory --

    def _memory(self, image: int, swapped: Callable[[str], Any]) -> Memory:
        return Memory(
            functools.partial(self._array, image),
            lambda flag: self._flag_array(image, flag.tensor)[flag.index : flag.index + 1],
            functools.partial(self._flag_array, image),
            self._weights,
            swapped,
            self.device,
            self.batch,
        )

    def _array(self, image: int, tensor: Tensor) -> Any:
        """A tensor's memory as kernels have it."""
        place, block = self.plan.places[tensor], self._blocks[image]
        if len(tensor.shape) == 4:  # weights, mixed for this image
            return block[place.offset : place.offset + tensor.size].reshape(tensor.shape)
        height, width, channels = (1, 1, *tensor.shape)[-3:]
        whole = block[place.offset : place.offset + height * width * place.channels]
        whole = whole.reshape((height, width, place.channels))
        return whole if channels == place.channels else whole[:, :, place.channel : place.channel + channels]

    def _flag_array(self, image: int, tensor: Tensor) -> Any:
        offset = self._flag_offsets[tensor]
        return self._flags[image][offset : offset + tensor.size]

    def _read(self, image: int, tensor: Tensor) -> np.ndarray:
        array = self._flag_array(image, tensor) if tensor in self._flag_offsets else self._array(image, tensor)
        host = array.copy() if self.device == "cpu" else array.copy_to_host()
        return host.reshape(tensor.shape)

    def _write(self, array: Any, values: np.ndarray) -> None:
        if self.device == "cpu":
            array[...] = values
        else:
            array.copy_to_device(values)

    def _empty(self, size: int, dtype: Any) -> Any:
        if self.device == "cpu":
            return np.zeros(size, dtype)
        return device_array.empty((size,), dtype)

    def _on_device(self, array: np.ndarray) -> Any:
        if self.device == "cpu":
            return array
        there = self._empty(array.size, np.float32).reshape(array.shape)
        there.copy_to_device(array)
        return there


def _as_array(images: Any) -> np.ndarray:
    """Images as a NumPy array of float32."""
    try:
        array = np.asarray(images)
    except ValueError as error:  # such as of images of several sizes
        raise ValueError(f"images: expected an array, or what NumPy makes one of: {error}") from None
    if array.dtype != np.float32:
        got = array.dtype if array.ndim else type(images).__name__
        raise TypeError(f"images: expected an array of float32, got {got}")
    return array


def _check_shape(given: tuple[int, ...], found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Whether images have their shape.

    Args:
      given: as they came. found: with the batch. expected: (batch, height, width, channels).
    """
    if found != expected:
        batch, height, width, channels = expected
        alone = f", or {expected[1:]}" if batch == 1 else ""
        channels_first = found == (batch, channels, height, width)
        hint = ": channels come last, as np.moveaxis(images, -3, -1) puts them" if channels_first else ""
        raise ValueError(f"images: expected the shape {expected}{alone}, got {given}{hint}")


def _device(name: str) -> str:
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: expected auto, cpu or cuda, got {name!r}")
    if name != "auto":
        return name
    return "cuda" if cuda_driver.device_count() > 0 else "cpu"


def _weights(graph: Graph, weights: Any, seed: int) -> dict[str, np.ndarray]:
    """Checked weights, as kernels take them."""
    if weights is None:
        found = seeded_weights(graph, seed)
    else:
        found = checked_weights(graph, weights) if isinstance(weights, Mapping) else load_weights(graph, weights)
    for layer in graph.layers:
        if layer.kind == "sum":  # a weighted one: the sigmoid does not depend on the image
            with np.errstate(over="ignore"):  # then it is 0
                found |= {name: 1 / (1 + np.exp(-found[name])) for name in layer.parameters}
    return found


def _flag_offsets(graph: Graph) -> tuple[dict[Tensor, int], int]:
    """Where each tensor of flags begins among all, and how many flags there are."""
    offsets, count = {}, 0
    for layer in graph.layers:
        if layer.output.dtype == "int32":
            offsets[layer.output] = count
            count += layer.output.size
    return offsets, count
