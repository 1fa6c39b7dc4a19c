"""Networks as users run them: batches, schedulers, weights, memory, what they are told of mistakes."""

import jax
import numpy as np
import pytest

from brax_concurrent.networks import network as network_module
from brax_concurrent.networks.as_jax import as_jax
from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.images import random_images
from brax_concurrent.networks.memory import plan_memory
from brax_concurrent.networks.network import Network
from brax_concurrent.networks.registry import NETWORKS, list_networks, make_network
from brax_concurrent.networks.tensors import Flag
from brax_concurrent.networks.weights import seeded_weights
from brax_concurrent.scheduler.stream import TaskStream

jax.config.update("jax_platforms", "cpu")

SHAPE = (12, 12, 3)


def branching(cells=3, candidates=3):
    """Cells of candidates, any of which an image may take."""
    g = Graph("branching", SHAPE)
    x = g.conv(g.input, 6, 3, activation="relu")
    logits = g.dense(g.global_pool(g.conv(g.input, 4, 3, stride=2)), cells * candidates, norm=False, gain=6.0)
    flags = g.gate(logits, groups=cells)
    for cell in range(cells):
        own, found = flags[cell * candidates : (cell + 1) * candidates], []
        for i, flag in enumerate(own):
            with g.when(flag):
                found.append(g.separable(x, 6, 2 * i + 1, activation="relu"))
        x = g.add(x, g.merge(found, own))
    g.output(features=x, scores=g.dense(g.global_pool(g.concat([x, g.input])), 5))
    return g


def flags(graph):
    """The tensor of the gate's flags."""
    return next(layer.output for layer in graph.layers if layer.kind == "gate")


@pytest.fixture(scope="module")
def graph():
    return branching()


def test_images_take_their_own_paths_and_get_jaxs_results(graph):
    weights = seeded_weights(graph)
    network, expected = Network(graph, weights), jax.jit(as_jax(graph))
    paths = set()
    for image in random_images(SHAPE, 20):
        found = network(image)
        for name, wanted in expected(weights, image).items():
            assert np.abs(found[name] - wanted).max() <= 1e-4 * np.abs(wanted).max()
        paths.add(tuple(layer.name for layer in network.ran()))
    assert len(paths) >= 10


def test_the_kernels_that_run_are_those_that_the_gates_choose(graph, tmp_path):
    network = Network(graph)
    for scheduler in ("serial", "sw", "hw"):
        for image in random_images(SHAPE, 2, seed=3):
            network.load(image)
            timeline = network.run(scheduler, trace=tmp_path / "trace.json")
            ran = {each.task for each in timeline.intervals if not each.skipped}
            chosen = {task for layer in network.ran() for task in network.tasks_of(layer)}
            assert ran == chosen
            assert len(ran) < len(network.streams[0])


def test_a_batch_gets_the_bits_of_its_images_one_by_one(graph):
    images = random_images(SHAPE, 5, seed=1)
    single, batch = Network(graph), Network(graph, batch=5)
    expected = [single(image, "serial") for image in images]
    for scheduler in ("serial", "sw", "hw"):
        found = batch(images, scheduler)
        for name, array in found.items():
            assert array.shape == (5, *graph.outputs[name].shape)
            np.testing.assert_array_equal(array, np.stack([each[name] for each in expected]))
    assert len({tuple(layer.name for layer in batch.ran(i)) for i in range(5)}) > 1


def test_a_batch_of_one_may_keep_its_dimension(graph):
    network, image = Network(graph), random_images(SHAPE, 1)
    assert network(image)["scores"].shape == (1, 5)
    assert network(image[0])["scores"].shape == (5,)


def test_weights_depend_on_the_seed_alone(graph, tmp_path):
    one, same, other = seeded_weights(graph, 1), seeded_weights(graph, 1), seeded_weights(graph, 2)
    assert all((one[name] == same[name]).all() for name in one)
    assert not any((one[name] == other[name]).all() for name in one)
    np.savez(tmp_path / "weights.npz", **one)
    image = random_images(SHAPE, 1)[0]
    expected = Network(graph, seed=1)(image)["scores"]
    np.testing.assert_array_equal(Network(graph, tmp_path / "weights.npz")(image)["scores"], expected)


def test_all_weights_that_do_not_fit_are_listed(graph, tmp_path):
    weights = seeded_weights(graph)
    names = list(weights)
    weights[names[0]] = weights[names[0]][:1]
    weights[names[1]] = weights[names[1]].astype(np.float64)
    del weights[names[2]]
    weights["another"] = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="weights do not fit branching") as error:
        Network(graph, weights)
    for part in (f"{names[0]}: expected the shape", f"{names[1]}: expected float32, got float64",
                 f"{names[2]}: missing", "another: the network has none"):  # fmt: skip
        assert part in str(error.value)
    (tmp_path / "weights.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="npz"):
        Network(graph, tmp_path / "weights.npz")
    with pytest.raises(FileNotFoundError, match="weights: there is no file .*nowhere.npz"):
        Network(graph, tmp_path / "nowhere.npz")


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (np.zeros((12, 12, 3)), TypeError, "images: expected an array of float32, got float64"),
        (np.zeros((12, 11, 3), np.float32), ValueError, r"expected the shape \(1, 12, 12, 3\), or \(12, 12, 3\)"),
        (np.zeros((2, 12, 12, 3), np.float32), ValueError, r"got \(2, 12, 12, 3\)"),
        (np.zeros((3, 12, 12), np.float32), ValueError, r"got \(3, 12, 12\): channels come last, as np.moveaxis"),
        (np.zeros((1, 3, 12, 12), np.float32), ValueError, r"got \(1, 3, 12, 12\): channels come last"),
        (np.zeros((4, 12, 12), np.float32), ValueError, r"got \(4, 12, 12\)$"),
        ("image", TypeError, "images: expected an array of float32, got str"),
        (None, TypeError, "images: expected an array of float32, got NoneType"),
        ([np.zeros(3), np.zeros(2)], ValueError, "images: expected an array, or what NumPy makes one of: "),
    ],
)
def test_images_that_do_not_fit_are_refused(graph, images, error, message):
    with pytest.raises(error, match=message):
        Network(graph)(images)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch: expected a whole number from 1 on, got 0"),
        ({"batch": 2.0}, "batch: expected a whole number"),
        ({"device": "tpu"}, "device: expected auto, cpu or cuda, got 'tpu'"),
        ({"seed": -1}, "seed: expected a whole number from 0"),
        ({"seed": 1.5}, "seed: expected a whole number .*, got 1.5"),
        ({"seed": 2**64}, "seed: expected a whole number"),
    ],
)
def test_other_arguments_that_do_not_fit_are_refused(graph, arguments, message):
    with pytest.raises(ValueError, match=message):
        Network(graph, **arguments)


def test_weights_are_arrays_or_a_path_and_no_open_file(graph, tmp_path):
    with (tmp_path / "file").open("w") as file:
        with pytest.raises(TypeError, match="weights: expected arrays by name or the path .*, got int"):
            Network(graph, file.fileno())
        file.write("still open")
    with pytest.raises(TypeError, match="weights: .*got list"):
        Network(graph, [seeded_weights(graph)])
    with pytest.raises(TypeError, match="graph: expected a Graph, see make_network, got 'squeezenet'"):
        Network("squeezenet")


@pytest.mark.parametrize("batch", [1, 2])
def test_a_batch_takes_the_arguments_that_an_image_takes(graph, batch, tmp_path):
    network = Network(graph, batch=np.int64(batch))
    assert (type(network.batch), len(network.streams)) == (int, batch)
    knobs = {"window": 8, "streams": 2, "threads": 1, "windows": 1, "trace": tmp_path / "trace.json"}
    assert network.run("sw", **knobs).intervals
    for name, wrong, message in [
        ("scheduler", "fast", "scheduler: expected one of serial, sw, hw, graph, got 'fast'"),
        ("window", 0, "window must be from 1 to 64, got 0"),
        ("streams", 17, "streams must be from 1 to 16, got 17"),
        ("threads", -1, "threads must not be negative, got -1"),
        ("windows", -1, "windows must not be negative, got -1"),
        ("trace", tmp_path / "no" / "trace.json", "trace: cannot write .*there is no folder"),
    ]:
        with pytest.raises(ValueError, match=message):
            network.run(**{name: wrong})
    with pytest.raises(TypeError, match=r"Network.run\(\) got an unexpected keyword argument 'windw'"):
        network.run("sw", windw=3)


def test_what_is_not_of_the_network_is_refused(graph):
    network, other = Network(graph, batch=2), branching()
    for ask in (network.ran, lambda image: network.flag(Flag(flags(graph), 0), image)):
        for image in (2, -1, "x"):
            with pytest.raises(ValueError, match=f"image: expected a whole number from 0 to 1, got {image!r}"):
                ask(image)
    with pytest.raises(TypeError, match="flag: expected a flag, as Graph.gate returns them, got int"):
        network.flag(3)
    for foreign in (Flag(flags(other), 0), Flag(flags(graph), 99), Flag(graph.input, 0)):
        with pytest.raises(
            ValueError, match=f"flag: {foreign.tensor.name}, {foreign.index}: expected one of branching"
        ):
            network.flag(foreign)
    for layer, name in ((other.layers[0], "conv_0"), ("conv_0", "'conv_0'")):
        with pytest.raises(ValueError, match=f"layer: expected one of the layers of branching, .*, got {name}$"):
            network.tasks_of(layer)


def test_graphs_and_networks_are_shown_in_a_line(graph):
    layers, parameters = len(graph.layers), graph.parameter_count
    shown = f"Graph('branching', input_shape=(12, 12, 3), layers={layers}, parameters={parameters})"
    assert repr(graph) == shown
    assert repr(Network(graph, batch=2)) == f"Network({shown}, batch=2, device='cpu')"


def test_weights_may_lie_anywhere(graph):
    weights, image = seeded_weights(graph), random_images(SHAPE, 1)[0]
    odd = {
        name: np.frombuffer(b"-" + array.tobytes(), np.uint8)[1:].view(np.float32).reshape(array.shape)
        for name, array in weights.items()
    }
    np.testing.assert_array_equal(Network(graph, odd)(image)["scores"], Network(graph, weights)(image)["scores"])


def test_sigmoids_of_large_weights_are_0_and_1():
    g = Graph("toy", (1, 1, 2))
    g.output(y=g.weighted_sum([g.input, g.input], name="sum"))
    network = Network(g, {"sum.weight": np.array([-1000, 1000], np.float32)}, device="cpu")
    assert network(np.ones((1, 1, 2), np.float32), "serial")["y"].tolist() == [[[1.0, 1.0]]]


def test_a_network_without_outputs_is_refused():
    g = Graph("toy", SHAPE)
    g.conv(g.input, 3)
    with pytest.raises(ValueError, match="toy: expected a graph with outputs"):
        Network(g)


def test_tensors_that_are_needed_at_once_do_not_share_memory(graph):
    long = branching(cells=12)
    for g, distance in ((graph, 0), (long, 0), (long, 32)):
        plan = plan_memory(g, distance=distance)
        held = np.full((len(g.layers) + 1, plan.size), -1)
        names = [g.input, *(layer.output for layer in g.layers if layer.output.dtype == "float32")]
        needed = {tensor: [i for i, layer in enumerate(g.layers) if tensor in layer.reads] for tensor in names}
        for layer_index, layer in enumerate(g.layers):
            needed.get(layer.output, []).append(layer_index)
        for tensor in g.outputs.values():
            needed[tensor].append(len(g.layers))
        for number, tensor in enumerate(names):
            place = plan.places[tensor]
            pixels = np.arange(tensor.size // tensor.channels)[:, None] * place.channels
            elements = (place.offset + place.channel + pixels + np.arange(tensor.channels)).ravel()
            assert elements.max() < plan.size
            for layer_index in range(min(needed[tensor]), max(needed[tensor]) + 1):
                others = set(held[layer_index, elements]) - {-1}
                for other in others:  # only a concatenation, which the tensor is a part of, or its other view
                    kinds = {layer.kind for layer in g.layers if layer.output in (tensor, names[other])}
                    assert kinds & {"concat", "view"}, (tensor.name, names[other].name)
                held[layer_index, elements] = number
    assert plan_memory(long, distance=0).size < plan_memory(long, distance=32).size < plan_memory(long).unshared


def test_blocks_under_flags_do_not_nest():
    g = Graph("toy", SHAPE)
    flags = g.gate(g.dense(g.global_pool(g.input), 2))
    with g.when(flags[0]), pytest.raises(ValueError, match="do not nest"), g.when(flags[1]):
        pass


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda g: g.conv(g.input, 4, activation="gelu"), "activation: expected one of relu"),
        (
            lambda g: g.conv(g.input, 4, 13, padding="VALID"),
            r"nothing is left of \[\(12, 12, 3\)\]: it makes \(0, 0, 4\)",
        ),
        (lambda g: g.conv(g.input, 4, padding="FULL"), "padding: expected SAME, VALID"),
        (lambda g: g.dense(g.input, 4), "input: expected a vector"),
        (lambda g: g.global_pool(g.global_pool(g.input)), "expected an image"),
        (lambda g: g.add(g.input, g.conv(g.input, 4)), "add: expected tensors of one shape"),
        (lambda g: g.concat([g.input, g.conv(g.input, 4, stride=2)]), "concat: expected equal heights"),
        (lambda g: g.resize(g.input, (6, 24)), "it only enlarges"),
        (lambda g: g.resize(g.input, (24, 24), "cubic"), "method: expected one of linear, nearest"),
        (lambda g: g.avg_pool(g.input, 1, padding=1), "a window lies outside"),
        (lambda g: g.max_pool(g.input, 2, stride=2, padding=((0, 2), (0, 0))), "a window lies outside"),
        (lambda g: g.multiply(g.input, g.dense(g.global_pool(g.input), 4)), "multiply: expected 3 scales"),
        (lambda g: g.gate(g.global_pool(g.input), groups=2), "groups: expected a divisor of 3"),
        (lambda g: g.merge([g.input], []), "merge: expected a flag for each tensor"),
        (lambda g: [g.conv(g.input, 4, name="a"), g.conv(g.input, 4, name="a")], "name: 'a' is taken"),
    ],
)
def test_layers_that_do_not_fit_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build(Graph("toy", SHAPE))


def test_outputs_have_names():
    g = Graph("toy", SHAPE)
    with pytest.raises(TypeError, match=r"toy: output: expected tensors by name, such as output\(scores=x\)"):
        g.output(g.input)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_networks())
def test_a_network_gets_jaxs_results_on_paths_of_the_images_own(name):
    g = make_network(name, **NETWORKS[name].small)
    weights = seeded_weights(g)
    network, expected = Network(g, weights, device="cpu"), jax.jit(as_jax(g))
    paths = set()
    for image in random_images(g.input.shape, 20):
        found, wanted = network(image), expected(weights, image)
        for output, array in wanted.items():
            assert np.abs(found[output] - array).max() <= 1e-4 * np.abs(array).max()
        paths.add(tuple(layer.name for layer in network.ran()))
    assert (len(paths) >= 15) == NETWORKS[name].dynamic


def test_networks_that_are_not_known_are_told():
    with pytest.raises(ValueError, match="did you mean 'nasnet'"):
        make_network("nasnets")
    with pytest.raises(TypeError, match="squeezenet: expected arguments among image_size"):
        make_network("squeezenet", width=3)


@pytest.mark.parametrize(
    ("device", "batch", "trace", "scheduler"),
    [
        ("cpu", 1, None, "hw"),
        ("cuda", 1, None, "graph"),
        ("cuda", 1, "t.json", "hw"),
        ("cuda", 2, None, "hw"),
    ],
)
def test_auto_is_what_was_the_fastest(device, batch, trace, scheduler, monkeypatch):
    chosen = []
    monkeypatch.setattr(TaskStream, "run", lambda self, scheduler, **knobs: chosen.append(scheduler))
    monkeypatch.setattr(network_module, "run_streams", lambda streams, scheduler, **knobs: chosen.append(scheduler))
    g = Graph("toy", (4, 4, 2))
    g.output(y=g.conv(g.input, 3))
    network = Network(g, batch=batch)
    network.device = device
    network.run(trace=trace)
    assert chosen == [scheduler]
