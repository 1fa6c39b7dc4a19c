"""Tasks' kernels from the disk: the same results and exceptions, without Numba."""

import subprocess
import sys

import numpy as np
import pytest

import brax_concurrent as bc
from brax_concurrent.backends import task_cpu

SOURCE = """
def root(unit, x, y, shift):
    if x[unit] < 0:
        raise ValueError("negative")
    y[unit] = math.sqrt(x[unit]) + shift
"""


def kernel(source=SOURCE):
    """The kernel as another process would declare it."""
    import math

    scope = {"math": math}
    exec(source, scope)
    return bc.kernel(reads=("x",), writes=("y",))(scope["root"])


def run(root, values):
    x, y = np.array(values), np.zeros(len(values))
    stream = bc.TaskStream()
    stream.add(root, units=len(x), x=x, y=y, shift=1.0)
    stream.run("serial")
    return y


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BRAX_CONCURRENT_CACHE", str(tmp_path))
    return tmp_path


def no_compiler(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("compiled again")

    monkeypatch.setattr(task_cpu, "njit", refuse)


def test_a_kernel_is_compiled_once_and_computes_the_same_from_the_disk(folder, monkeypatch):
    expected = run(kernel(), [4.0, 9.0])
    assert list(folder.rglob("t*"))
    no_compiler(monkeypatch)
    np.testing.assert_array_equal(run(kernel(), [4.0, 9.0]), expected)
    with pytest.raises(bc.TaskError, match="negative") as error:
        run(kernel(), [4.0, -1.0])
    assert error.value.unit == 1
    assert isinstance(error.value.__cause__, ValueError)


# A kernel that calls the C library, and Numba's runtime: an array is passed on.
PROGRAM = """
import numpy as np
from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.network import Network

graph = Graph("toy", (4, 4, 3))
graph.output(y=graph.conv(graph.input, 4, activation="tanh"))
print(Network(graph, device="cpu")(np.ones((4, 4, 3), np.float32), "serial"))
"""


@pytest.mark.slow
def test_a_process_that_compiles_nothing_runs_what_calls_the_c_library(folder):
    program = folder / "program.py"
    program.write_text(PROGRAM)
    first, second = (
        subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120) for _ in range(2)
    )
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout


def test_another_kernel_or_other_types_are_compiled(folder, monkeypatch):
    run(kernel(), [4.0])
    no_compiler(monkeypatch)
    with pytest.raises(RuntimeError, match="compiled again"):
        run(kernel(SOURCE.replace("+ shift", "- shift")), [4.0])


def test_code_that_depends_on_more_than_its_function_is_not_kept(folder):
    scope = {"table": np.arange(3.0)}
    exec("def root(unit, x, y, shift):\n    y[unit] = table[unit] + shift\n", scope)
    assert run(bc.kernel(reads=("x",), writes=("y",))(scope["root"]), [0.0, 0.0]).tolist() == [1.0, 2.0]
    assert not list(folder.rglob("t*"))


def test_a_damaged_file_is_compiled_again(folder):
    expected = run(kernel(), [4.0])
    (path,) = [path for path in folder.rglob("t*") if path.is_file()]
    path.write_bytes(path.read_bytes()[:-100])
    np.testing.assert_array_equal(run(kernel(), [4.0]), expected)


def test_a_gpus_kernel_is_compiled_once(folder, monkeypatch):
    pytest.importorskip("cuda.bindings.nvvm", reason="numba-cuda with NVIDIA's compilers is not installed")
    from brax_concurrent.backends import task_cuda
    from brax_concurrent.backends.arguments import ArgumentType

    def compiled(fastmath=False):
        kinds = [ArgumentType("float64", 1, readonly=True), ArgumentType("float64", 1), ArgumentType("float64")]
        return task_cuda.compile_task(kernel().function, kinds, (9, 0), fastmath=fastmath)

    expected = compiled()
    monkeypatch.setattr(task_cuda, "_compile_task", lambda *_: (_ for _ in ()).throw(AssertionError("compiled again")))
    assert compiled() == expected
    with pytest.raises(AssertionError, match="compiled again"):
        compiled(fastmath=True)
