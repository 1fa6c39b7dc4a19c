"""The house rules that no linter knows, run by `make lint`.

Files stay under 500 lines and functions under 70, and every function is annotated unless Numba compiles it
and infers its types. Prints `file:line: what is wrong` and exits 1 if anything is.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LIMIT = 500
FUNCTION_LIMIT = 70
PACKAGE = Path(__file__).parents[1] / "brax_concurrent"
# What a function is decorated with, the last part of the name, if it is compiled.
COMPILED = {"njit", "jit", "cfunc", "intrinsic", "overload", "kernel", "device_function"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def problems(path: Path) -> list[str]:
    """What breaks the rules in one Python file."""
    text = path.read_text()
    lines = len(text.splitlines())
    found = []
    if lines >= FILE_LIMIT:
        found.append(f"{path}:{lines}: the file has {lines} lines; keep it under {FILE_LIMIT}")
    tree = ast.parse(text, str(path))
    for node in ast.walk(tree):
        if isinstance(node, Function):
            # From its `def` to its last line, docstring included.
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length >= FUNCTION_LIMIT:
                what = f"{node.name}() has {length} lines; keep it under {FUNCTION_LIMIT}"
                found.append(f"{path}:{node.lineno}: {what}")
    for function, missing in unannotated(tree):
        found.append(f"{path}:{function.lineno}: {function.name}() has no type for {', '.join(missing)}")
    return found


def unannotated(node: ast.AST, in_class: bool = False) -> Iterator[tuple[Function, list[str]]]:
    """Functions that lack type hints, and for what; not compiled ones, nor what is written inside those."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            if any(_decorator(item) in COMPILED for item in child.decorator_list):
                continue
            if missing := _missing(child, in_class):
                yield child, missing
        yield from unannotated(child, isinstance(child, ast.ClassDef))


def _decorator(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _missing(function: Function, is_method: bool) -> list[str]:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    static = any(_decorator(item) == "staticmethod" for item in function.decorator_list)
    if is_method and not static:
        positional = positional[1:]
    others = [item for item in (given.vararg, *given.kwonlyargs, given.kwarg) if item is not None]
    missing = [item.arg for item in (*positional, *others) if item.annotation is None]
    if function.returns is None and function.name != "__init__":
        missing.append("what it returns")
    return missing


def main(roots: list[str]) -> int:
    """Check every Python file under `roots`, by default the package."""
    paths = [path for root in roots or [str(PACKAGE)] for path in sorted(Path(root).rglob("*.py"))]
    found = [problem for path in paths for problem in problems(path)]
    print("\n".join(found) if found else f"house rules: {len(paths)} files keep them")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
