"""The command infer, called as a function; small networks."""

import json

import jax
import numpy as np
import pytest

from brax_concurrent import cli
from brax_concurrent.networks.images import random_images
from brax_concurrent.networks.network import Network
from brax_concurrent.networks.registry import NETWORKS, make_network

jax.config.update("jax_platforms", "cpu")

SMALL = ("infer", "instanas", "--small", "--backend", "cpu", "--runs", "2")


def run(*arguments):
    return cli.main([str(each) for each in arguments])


def test_it_says_what_ran_and_writes_outputs_and_timeline(tmp_path, capsys):
    out, trace = tmp_path / "out.npz", tmp_path / "trace.json"
    assert run(*SMALL, "--batch", 2, "--scheduler", "sw", "--seed", 3, "--out", out, "--trace", trace) == 0
    said = capsys.readouterr().out
    assert "image 1:" in said
    assert "2 runs: median" in said
    graph = make_network("instanas", **NETWORKS["instanas"].small)
    images = random_images(graph.input.shape, 2, 3)
    expected = Network(graph, batch=2, device="cpu", seed=3)(images, "serial")
    with np.load(out) as found:
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
    assert json.loads(trace.read_text())["traceEvents"]
    assert run(*SMALL, "--out", out) == 1
    assert "--force overwrites" in capsys.readouterr().err


def test_images_come_from_a_file_as_many_as_it_has(tmp_path, capsys):
    np.save(tmp_path / "images.npy", random_images((16, 16, 3), 3))
    assert run(*SMALL, "--images", tmp_path / "images.npy", "--scheduler", "serial") == 0
    assert "image 2:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("infer", "instans"), "did you mean 'instanas'"),
        ((*SMALL, "--set", "colour=3"), "expected arguments among input_shape"),
        ((*SMALL, "--scheduler", "warp"), "scheduler: expected one of"),
        ((*SMALL, "--images", "nowhere.npy"), "images: there is no file nowhere.npy"),
        ((*SMALL, "--weights", "nowhere.npz"), "weights: there is no file nowhere.npz"),
        ((*SMALL, "--trace", "."), "cannot write .: it is a folder"),
        ((*SMALL, "--out", ".", "--force"), "cannot write .: it is a folder"),
        ((*SMALL, "--set", "stem=0"), "0"),
        (("infer", "instanas", "--small", "--backend", "cuda"), "GPU"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys, monkeypatch):
    from brax_concurrent.backends import cuda_driver

    monkeypatch.setattr(cuda_driver, "device_count", lambda: 0)
    assert run(*arguments) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("brax-concurrent: error: ")
    assert error.count("\n") == 1
    assert message in error


def test_outputs_go_to_the_file_that_is_named(tmp_path):
    assert run(*SMALL, "--out", tmp_path / "outputs") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    with np.load(tmp_path / "outputs") as found:
        assert found.files


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY"])
def test_a_file_of_images_that_is_none_is_named(tmp_path, capsys, content):
    path = tmp_path / "images.npy"
    path.write_bytes(content)
    assert cli.main([*SMALL, "--images", str(path)]) == 2
    assert f"{path}: expected an .npy file, as numpy.save writes it" in capsys.readouterr().err
