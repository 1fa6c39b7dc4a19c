"""Inferences a second of neural networks, by scheduler, and of the same networks in JAX.

    python scripts/bench_networks.py                                   all networks, one image at a time
    python scripts/bench_networks.py --networks instanas --batch 128
    python scripts/bench_networks.py --backend cpu --small             small versions, for a CPU

Every network sees the same random images, each its own path where the network is dynamic. For each input all schedulers
run turn and turn about, and so do JAX's versions: masked, and for one image with `lax.cond`. A time is that of a call
until its results are there, on the device; copies from and to the host are left out. The results of every input are
compared: among schedulers bit for bit, with JAX (in full float32 precision, on the CPU) to 1e-4 of the largest value.
JAX is timed as a user would run it: with its default precision, which on a GPU rounds to fewer bits; the faster version
counts. `--no-jax` times none, and compares all the same.

The value is the median over inputs. Ratios are to `serial`, which launches the same kernels one after the other from
compiled code. Records go to networks.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _records
import jax
import numpy as np

from brax_concurrent.networks.as_jax import as_jax
from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.images import random_images
from brax_concurrent.networks.network import Network
from brax_concurrent.networks.registry import entry_of, list_networks, make_network
from brax_concurrent.networks.weights import seeded_weights
from brax_concurrent.scheduler.schedule import schedulers_on

TOLERANCE = 1e-4
JAX = "jax"  # what records call the faster of its versions


def jax_versions(graph: Graph, weights: Any, batch: int, device: Any) -> dict[str, Callable[[Any], Any]]:
    """Jitted functions of images by name, to be timed; they return when the results are there."""
    dynamic = any(layer.when is not None for layer in graph.layers)
    names = ["mask", "cond"] if dynamic and batch == 1 else ["mask"]
    return {name: jitted(graph, weights, batch, device, name, "default") for name in names}


def jitted(graph: Graph, weights: Any, batch: int, device: Any, branches: str, precision: str) -> Callable[[Any], Any]:
    """The network in JAX as a function of images; it returns when the results are there."""
    infer, there = as_jax(graph, branches=branches, precision=precision), jax.device_put(weights, device)
    if batch == 1:
        single = jax.jit(infer)
        return lambda images: jax.block_until_ready(single(there, images[0]))
    several = jax.jit(jax.vmap(infer, in_axes=(None, 0)))
    return lambda images: jax.block_until_ready(several(there, images))


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def check(name: str, found: dict[str, np.ndarray], expected: dict[str, Any], batch: int) -> float:
    """The largest difference from JAX's results, relative to the largest value.

    Raises:
        RuntimeError: it is beyond the tolerance, so nothing measured here counts.
    """
    worst = 0.0
    for output, array in found.items():
        wanted = np.asarray(expected[output]).reshape(array.shape)
        if not np.isfinite(wanted).all():
            raise RuntimeError(f"{name}: {output}: results are not finite")
        worst = max(worst, float(np.abs(array - wanted).max() / max(np.abs(wanted).max(), 1e-30)))
    if worst > TOLERANCE:
        raise RuntimeError(f"{name}: results differ from JAX's by {worst:.1e} of the largest")
    return worst


def measure(name: str, graph: Graph, batch: int, options: argparse.Namespace) -> None:
    """Measure one network, print and record it."""
    weights = seeded_weights(graph, options.seed)
    network = Network(graph, weights, batch=batch, device=options.backend)
    cpu = jax.local_devices(backend="cpu")[0]
    device = cpu if network.device == "cpu" or options.no_jax else jax.local_devices(backend="gpu")[0]
    exact = jitted(graph, weights, batch, cpu, "mask", "highest")
    versions = {} if options.no_jax else jax_versions(graph, weights, batch, device)
    schedulers = options.schedulers or schedulers_on(network.device)
    images = random_images(graph.input.shape, options.inputs * batch, options.seed)
    images = images.reshape((options.inputs, batch, *graph.input.shape))
    times: dict[str, list[float]] = {each: [] for each in (*schedulers, *versions)}
    paths, worst = set(), 0.0
    for turn, group in enumerate(images):
        network.load(group)
        there = jax.device_put(group, device)
        expected = exact(jax.device_put(group, cpu))
        bits: dict[str, np.ndarray] = {}
        for scheduler in [*schedulers[turn % len(schedulers) :], *schedulers[: turn % len(schedulers)]]:
            network.run(scheduler)  # compiles the first time, and fills caches
            times[scheduler].append(seconds(functools.partial(network.run, scheduler), options.repeats))
            found = network.read()
            if bits and any((found[output] != bits[output]).any() for output in found):
                raise RuntimeError(f"{name}: {scheduler} computes other bits than the scheduler before")
            bits = found
        for version in versions:
            versions[version](there)
            times[version].append(seconds(functools.partial(versions[version], there), options.repeats))
        worst = max(worst, check(name, bits, expected, batch))
        paths |= {tuple(layer.name for layer in network.ran(image)) for image in range(batch)}
    record(name, network, times, {"paths": len(paths), "difference": worst, **occupancy(network, schedulers)}, options)


def occupancy(network: Network, schedulers: Sequence[str]) -> dict[str, float]:
    """Busy time of workers over available time, by scheduler, where timelines can be had."""
    found = {}
    for scheduler in schedulers:
        with tempfile.TemporaryDirectory() as folder:
            try:
                timeline = network.run(scheduler, trace=Path(folder) / "trace.json")
            except ValueError:  # this scheduler cannot be traced on this device
                continue
        if timeline is not None:
            found[f"occupancy {scheduler}"] = round(timeline.occupancy, 4)
    return found


def record(
    name: str, network: Network, times: dict[str, list[float]], detail: dict[str, Any], options: argparse.Namespace
) -> None:
    """Print and record the figures of one network."""
    batch = network.batch
    rows = {each: times[each] for each in times if each not in ("mask", "cond")}
    rival = min(times.keys() - rows.keys(), key=lambda each: statistics.median(times[each]), default=None)
    if rival is not None:
        rows[JAX] = times[rival]
    rates = {each: [batch / second for second in samples] for each, samples in rows.items()}
    base = statistics.median(rates["serial"]) if "serial" in rates else None
    detail = {"small": options.small, "seed": options.seed, **({"jax": rival} if rival else {}), **detail}
    for each, samples in rates.items():
        found = _records.summary(samples)
        ratio = found["value"] / base if base is not None and each != "serial" else None
        of_serial = "" if ratio is None else f"{ratio:6.2f}x of serial"
        print(
            f"{name:16} {batch:4} {each:7} {found['value']:12,.1f} images/s "
            f"{1e3 * batch / found['value']:10.3f} ms {of_serial}",
            flush=True,
        )
        _records.append(
            "networks",
            name,
            found["value"],
            "images/s",
            found["spread"],
            found["n"],
            backend=network.device,
            scheduler=each,
            batch=batch,
            baseline=None if ratio is None else "serial",
            ratio=ratio,
            detail=detail,
        )
    print(f"{'':16} {', '.join(f'{key} {value}' for key, value in detail.items())}", flush=True)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list_networks(), choices=list_networks(), metavar="NAME")
    parser.add_argument("--batch", nargs="+", type=int, default=[1], metavar="N")
    parser.add_argument("--schedulers", nargs="+", metavar="NAME")
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--small", action="store_true", help="small versions of the networks")
    parser.add_argument("--inputs", type=int, default=20, help="batches of images (default 20)")
    parser.add_argument("--repeats", type=int, default=3, help="timings of an input, of which the median counts")
    parser.add_argument("--no-jax", action="store_true", help="do not time JAX, whose compiler takes a minute or two")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.networks:
        graph = make_network(name, **(entry_of(name).small if options.small else {}))
        for batch in options.batch:
            measure(name, graph, batch, options)


if __name__ == "__main__":
    main()
