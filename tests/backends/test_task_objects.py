"""Tasks' kernels from the disk: the same results and exceptions, without Numba."""

import os
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
INFERENCE = """
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
    program.write_text(INFERENCE)
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


PROGRAM = """
import numpy as np
import brax_concurrent as bc
from brax_concurrent.backends import task_cpu

scope = {"np": np}
exec("def sorts(unit, x, y):\\n    np.random.seed(unit)\\n    y[unit] = np.sort(x)[unit] + np.random.random()", scope)
x, y, stream = np.array([3.0, 1.0, 2.0]), np.zeros(3), bc.TaskStream()
stream.add(bc.kernel(reads=("x",), writes=("y",))(scope["sorts"]), units=3, x=x, y=y)
if again:
    task_cpu.njit = None
stream.run("serial")
print(y.tolist())
"""


def test_a_kernel_that_makes_arrays_runs_from_the_disk_in_another_process(folder):
    """It calls Numba's runtime, which no compiler has started there."""
    found = []
    for again in (False, True):
        command = [sys.executable, "-c", f"again = {again}\n{PROGRAM}"]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(done.stdout)
    assert list(folder.rglob("t*"))
    assert found[0] == found[1]
    assert found[0].startswith("[1.")


def test_an_exception_names_its_line_after_lines_were_added_above_it(folder):
    for added in ("", "\n\n"):
        source = SOURCE.replace("    if x", f"{added}    if x")
        with pytest.raises(bc.TaskError, match=rf"<string>:{4 + len(added)}\)"):
            run(kernel(source), [-1.0])


def test_a_nans_bits_are_those_of_the_source(folder):
    scope = {}
    source = "def root(unit, x, y, shift):\n    y[unit] = k"
    for k in (np.nan, -np.nan):
        scope["k"] = k
        exec(source, scope)
        assert np.signbit(run(bc.kernel(reads=("x",), writes=("y",))(scope["root"]), [0.0])[0]) == np.signbit(k)


def test_a_kernel_that_prints_is_not_kept(folder, capfd):
    """It would look for the objects that it prints in vain, and wait for ever for Python's lock."""
    scope = {}
    exec("def root(unit, x, y, shift):\n    print(unit)\n    y[unit] = shift", scope)
    assert run(bc.kernel(reads=("x",), writes=("y",))(scope["root"]), [0.0]).tolist() == [1.0]
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
