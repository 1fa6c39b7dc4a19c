"""`brax-concurrent infer`: a neural network on images, what of it ran, and how long it took."""

from __future__ import annotations

import argparse
import ast
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from brax_concurrent.cli.common import FAILED, OK, CommandError, add_place, add_settings, at_least, wrong_arguments
from brax_concurrent.networks.registry import entry_of, list_networks, make_network
from brax_concurrent.training.files import whole_file

if TYPE_CHECKING:
    from brax_concurrent.networks.network import Network
    from brax_concurrent.networks.published import Published

_SHOWN = 8  # images whose paths are printed


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `brax-concurrent`."""
    text = """Infer images with a neural network whose layers are tasks of the scheduler. Weights are random, from the
    seed, unless a file is given. Without --images, so are the images."""
    parser = subparsers.add_parser("infer", help="a neural network on images", description=text)
    parser.add_argument("network", metavar="NETWORK", help=f"one of {', '.join(list_networks())}")
    parser.add_argument("--batch", type=at_least(1), metavar="N", help="images at once (default 1, or the file's)")
    parser.add_argument("--scheduler", default="hw", metavar="NAME", help="serial, sw, graph or hw (default hw)")
    parser.add_argument("--window", type=at_least(1), default=32, metavar="N", help="tasks it looks at (default 32)")
    meaning = "an argument of the function that makes the network, such as its image's size; a wrong one lists them"
    add_settings(parser, meaning, _literal_or_text)
    parser.add_argument("--small", action="store_true", help="a small version of it, to try it")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of weights and images (default 0)")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="an .npz file of all weights by name")
    parser.add_argument(
        "--images", type=Path, metavar="FILE", help="an .npy file, (N, height, width, channels) float32"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the outputs by name to this .npz file")
    parser.add_argument("--force", action="store_true", help="overwrite the file of --out if it exists")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a timeline of one more run, for Perfetto")
    parser.add_argument("--runs", type=at_least(1), default=10, metavar="N", help="that are timed (default 10)")
    add_place(parser)
    parser.set_defaults(run=run)


def _literal_or_text(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    for path in (arguments.out, arguments.trace):
        if path is not None and not path.absolute().parent.is_dir():
            raise CommandError(f"cannot write {path}: there is no folder {path.parent}", FAILED)
        if path is not None and path.is_dir():
            raise CommandError(f"cannot write {path}: it is a folder", FAILED)
    if arguments.out is not None and arguments.out.exists() and not arguments.force:
        raise CommandError(f"{arguments.out} exists; --force overwrites it", FAILED)
    try:
        return _infer(arguments)
    except RuntimeError as error:  # of the device, such as that there is none
        raise CommandError(str(error), FAILED) from error


def _infer(arguments: argparse.Namespace) -> int:
    from brax_concurrent.networks.images import random_images
    from brax_concurrent.networks.network import Network

    with wrong_arguments():
        entry = entry_of(arguments.network)
        settings = {**(entry.small if arguments.small else {}), **dict(arguments.set)}
        graph = make_network(arguments.network, **settings)
        if arguments.images is None:
            images = random_images(graph.input.shape, arguments.batch or 1, arguments.seed)
        else:
            images = _images(arguments.images)
        batch = arguments.batch or (len(images) if images.ndim == 4 else 1)
        network = Network(graph, arguments.weights, batch=batch, device=arguments.backend, seed=arguments.seed)
        network.load(images)
        _describe(network, entry.published if not settings else None)
        scheduler = arguments.scheduler
        knobs = {"window": arguments.window, "threads": arguments.threads}
        begin = time.perf_counter()
        network.run(scheduler, **knobs)  # compiles
        compiled = time.perf_counter() - begin
    print(f"{scheduler} on the {network.device}; first run, with compiling: {compiled:.1f} s")
    _show_paths(network)
    _time(network, scheduler, knobs, arguments.runs)
    if arguments.trace is not None:
        with wrong_arguments():
            timeline = network.run(scheduler, trace=arguments.trace, **knobs)
        assert timeline is not None
        print(f"{arguments.trace}: {timeline.summary()}")
    if arguments.out is not None:
        with whole_file(arguments.out) as file:  # a path without .npz would be written to another one
            np.savez(file, **network.read())  # type: ignore[arg-type]  # its stub takes names for options
        print(f"{arguments.out}: {', '.join(f'{name} {array.shape}' for name, array in network.read().items())}")
    return OK


def _images(path: Path) -> np.ndarray:
    """The array of an .npy file; an error of arguments if it is none."""
    if not path.is_file():
        raise FileNotFoundError(f"images: there is no file {path}")
    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, EOFError):
        found = None
    if not isinstance(found, np.ndarray):
        raise ValueError(f"images: {path}: expected an .npy file, as numpy.save writes it")
    return found


def _describe(network: Network, published: Published | None) -> None:
    graph = network.graph
    said = (lambda n: f" (published: {n:,})" if n else "") if published is not None else lambda _: ""
    print(
        f"{graph.name}: {graph.parameter_count:,} parameters{said(published and published.parameters)}, "
        f"{graph.multiply_adds:,} multiply-adds{said(published and published.multiply_adds)}"
    )
    megabytes, unshared = 4e-6 * network.plan.size, 4e-6 * network.plan.unshared
    each = " for each image" if network.batch > 1 else ""
    print(
        f"image {graph.input.shape}, {len(graph.layers)} layers, {len(network.streams[0])} tasks; tensors in "
        f"{megabytes:.1f} MB ({unshared:.1f} unshared){each}",
        flush=True,  # what follows is compiled first, which can take a minute
    )


def _show_paths(network: Network) -> None:
    """What of the network ran for each image, if that depends on the image."""
    graph = network.graph
    if all(layer.when is None for layer in graph.layers):
        return
    for image in range(min(network.batch, _SHOWN)):
        ran = network.ran(image)
        done = sum(layer.multiply_adds for layer in ran) / max(graph.multiply_adds, 1)
        print(f"image {image}: {len(ran)} of {len(graph.layers)} layers ran, {done:.0%} of the multiply-adds")
    if network.batch > _SHOWN:
        print(f"and {network.batch - _SHOWN} images more")


def _time(network: Network, scheduler: str, knobs: dict[str, Any], runs: int) -> None:
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        network.run(scheduler, **knobs)
        times.append(time.perf_counter() - begin)
    median = statistics.median(times)
    print(
        f"{runs} run{'s' if runs > 1 else ''}: median {1e3 * median:.3f} ms ({min(times) * 1e3:.3f} to "
        f"{max(times) * 1e3:.3f}), {network.batch / median:,.4g} images/s"
    )
