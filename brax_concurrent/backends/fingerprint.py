"""What a Python function computes, as text that is equal in every process: a key for code made of it.

Not every function has one: what it computes must follow from its own code and from constants. One that calls other
functions of the program, or reads global arrays, would need all of those in its key.
"""

from __future__ import annotations

import builtins
import struct
import sys
import types
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

from brax_concurrent.backends.native import source_hash

_MODULES = ("math", "numpy")
_OWN_MODULES = ("brax_concurrent.backends.gpu_units",)  # whose content counts
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


def fingerprint(function: Callable[..., Any]) -> str | None:
    """The function's code and constants, with the versions of Python, NumPy and Numba; None if they do not tell it all.

    Global names may be the modules math, numpy and gpu_units, built-in functions and numbers. A function with variables
    of enclosing functions, or with functions inside, has no fingerprint.
    """
    code = function.__code__
    if code.co_freevars or any(isinstance(each, types.CodeType) for each in code.co_consts):
        return None
    parts = [
        f"Python {sys.version_info[:2]}",
        *_versions(),
        function.__name__,
        code.co_code.hex(),
        repr(code.co_varnames),
    ]
    parts += [
        str(code.co_argcount),
        repr(code.co_names),
        code.co_exceptiontable.hex(),
        *(_constant(each) for each in code.co_consts),
    ]
    for name in code.co_names:
        if name in function.__globals__:
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType) and value.__name__ in _MODULES:
                parts.append(f"{name} is {value.__name__}")
            elif isinstance(value, types.ModuleType) and value.__name__ in _OWN_MODULES:
                parts.append(f"{name} is {value.__name__} {source_hash(str(value.__file__))}")
            elif type(value) in _CONSTANTS or isinstance(value, (np.number, np.bool_)):
                parts.append(f"{name} is {_constant(value)}")
            elif getattr(builtins, name, None) is not value:
                return None
    return "\n".join(parts)


def _constant(value: Any) -> str:
    """A constant as text: numbers to the last bit, and 1 is not True, 1.0 or an int32."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    bits = value.tobytes().hex() if isinstance(value, np.generic) else ""
    if isinstance(value, (float, complex)):  # of a NaN, too
        parts = (value.real, value.imag)
        return f"{type(value).__name__} {struct.pack('<2d', *map(float, parts)).hex()} {bits}"
    return f"{type(value).__module__}.{type(value).__name__} {value!r} {bits}"


def _versions() -> list[str]:
    found = []
    for package in ("numpy", "numba", "numba-cuda", "llvmlite"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return found
