"""Who may import whom, read from the source.

Each layer may import those to its right:
cli, training -> envs, networks -> interop -> scheduler, kernels -> backends.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "brax_concurrent"
NAME = PACKAGE.name

# Layers with the same number do not import each other.
LAYERS = {
    "cli": 5,
    "training": 4,
    "envs": 3,
    "networks": 3,
    "interop": 2,
    "scheduler": 1,
    "kernels": 1,
    "backends": 0,
}
JAX = ("jax", "jaxlib", "optax", "orbax")
JAX_LAYERS = {"cli", "training", "envs", "networks", "interop"}
CUDA = ("numba.cuda", "numba_cuda", "cuda")
CUDA_LAYERS = {"backends"}


def violations(package: Path) -> list[str]:
    """What breaks the rules in the tree under `package`, as `path:line: reason`."""
    found = []
    for path in sorted(package.rglob("*.py")):
        layer = layer_of(path.relative_to(package))
        if layer == "":  # the package's own __init__.py: names every public home, and imports none of them
            continue
        for line, target in imports(path, package):
            reason = verdict(layer, target)
            if reason:
                found.append(f"{path.relative_to(package.parent)}:{line}: {reason}")
    return found


def layer_of(path: Path) -> str:
    """The layer of a file, by its path inside the package."""
    first = path.parts[0].removesuffix(".py")
    return {"__init__": "", "__main__": "cli"}.get(first, first)


def verdict(layer: str, target: str) -> str:
    """Why `layer` must not import `target` (a dotted name); "" if it may."""
    if layer not in LAYERS:
        return f"{layer} belongs to no layer: name it in {Path(__file__).name}"
    if within(target, JAX) and layer not in JAX_LAYERS:
        return f"{layer} imports {target}; only {', '.join(sorted(JAX_LAYERS))} may import JAX"
    if within(target, CUDA) and layer not in CUDA_LAYERS:
        return f"{layer} imports {target}; only {', '.join(sorted(CUDA_LAYERS))} may touch CUDA"
    if not within(target, (NAME,)):
        return ""
    other = target.split(".")[1] if "." in target else ""
    if other == "__version__" or other == layer:
        return ""
    if other not in LAYERS:
        return "" if layer == "cli" else f"{layer} imports {target}; name the module that defines it"
    if LAYERS[other] < LAYERS[layer]:
        return ""
    return f"{layer} imports {target}, which is not to its right"


def within(target: str, roots: tuple[str, ...]) -> bool:
    return any(target == root or target.startswith(f"{root}.") for root in roots)


def imports(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a file imports, also in functions and for type checkers."""
    here = (package.name, *path.relative_to(package).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is the file's own package, also in an __init__.py.
            base = ".".join(here[: len(here) - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) == ("numba", "cuda"):
                yield node.lineno, "numba.cuda"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            yield from ((node.lineno, name) for name in called_import(node, node.args[0].value))


def called_import(call: ast.Call, argument: object) -> list[str]:
    """What a call loads by its name in a string: a module, or the driver's library."""
    if not isinstance(argument, str):
        return []
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function in ("import_module", "__import__"):
        return [argument]
    return ["cuda"] if argument.startswith(("libcuda", "nvcuda")) else []


def test_imports_go_to_the_right():
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "said"),
    [
        ("kernels/a.py", "from brax_concurrent.scheduler import task", "not to its right"),
        ("scheduler/a.py", "import brax_concurrent.kernels.model", "not to its right"),
        ("scheduler/a.py", "from ..kernels import model", "not to its right"),
        ("scheduler/__init__.py", "from ..kernels import model", "not to its right"),
        ("backends/a.py", "from brax_concurrent.kernels import layout", "not to its right"),
        ("interop/a.py", "def f():\n    from brax_concurrent.envs import base", "not to its right"),
        ("scheduler/a.py", "from brax_concurrent import envs", "not to its right"),
        ("envs/a.py", "importlib.import_module('brax_concurrent.cli')", "not to its right"),
        ("training/a.py", "from brax_concurrent.cli import main", "not to its right"),
        ("training/a.py", "from brax_concurrent import make", "name the module"),
        ("training/a.py", "import brax_concurrent as bc", "name the module"),
        ("kernels/a.py", "import jax.numpy as jnp", "may import JAX"),
        ("scheduler/a.py", "from jax import numpy", "may import JAX"),
        ("scheduler/a.py", "def f():\n    import optax", "may import JAX"),
        ("kernels/a.py", "from numba import cuda", "may touch CUDA"),
        ("interop/a.py", "import numba.cuda as nc", "may touch CUDA"),
        ("scheduler/a.py", "import numba\nnumba.cuda.jit", "may touch CUDA"),
        ("interop/a.py", "from cuda.bindings import driver", "may touch CUDA"),
        ("interop/a.py", "import ctypes\nctypes.CDLL('libcuda.so.1')", "may touch CUDA"),
        ("helpers.py", "import math", "belongs to no layer"),
    ],
)
def test_each_rule_can_fail(tmp_path, file, source, said):
    (found,) = violations(planted(tmp_path, file, source))
    assert found.startswith(f"brax_concurrent/{file}:")
    assert said in found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cli.py", "import jax\nimport brax_concurrent as bc\nfrom brax_concurrent.training import ppo"),
        ("__main__.py", "from brax_concurrent.cli import main"),
        ("training/a.py", "import optax\nfrom brax_concurrent.kernels import model\nfrom . import rollout"),
        ("envs/__init__.py", "import jax\nfrom .base import State\nfrom ..interop import jax_ffi"),
        ("scheduler/a.py", "from brax_concurrent.scheduler import task"),
        ("interop/a.py", "from brax_concurrent import __version__"),
        ("kernels/a.py", "import numba\nfrom numba import njit\nfrom brax_concurrent import backends"),
        ("backends/a.py", "from numba import cuda\nimport ctypes\nctypes.CDLL('libcuda.so.1')"),
        ("__init__.py", "from brax_concurrent.envs import make"),
    ],
)
def test_each_rule_can_pass(tmp_path, file, source):
    assert violations(planted(tmp_path, file, source)) == []


def planted(tmp_path: Path, file: str, source: str) -> Path:
    """A package with one file."""
    path = tmp_path / NAME / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return tmp_path / NAME


def test_importing_the_package_starts_neither_cuda_nor_jax():
    code = f"import {NAME}, sys; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    heavy = ("jax", "jaxlib", "numba", "numba_cuda", "cuda", "mujoco", "numpy")
    assert [name for name in output.split() if within(name, heavy)] == []


def test_environments_need_no_numba_cuda():
    """It is an extra: what is written with it must not be loaded before a GPU is asked for."""
    found = "[m for m in sys.modules if m.startswith(('numba_cuda', 'numba.cuda'))]"
    code = f"import sys, brax_concurrent.envs; print({found})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
