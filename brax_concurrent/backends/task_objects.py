"""Code of tasks' kernels, kept on disk between processes: machine code for the CPU, and the key for other code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from brax_concurrent.backends import cpu
from brax_concurrent.backends.arguments import ArgumentType
from brax_concurrent.backends.fingerprint import fingerprint
from brax_concurrent.backends.native import source_hash
from brax_concurrent.backends.objects import ObjectCache


def kept(function: Callable[..., Any], arguments: Sequence[ArgumentType], options: object) -> cpu.Code | None:
    """The code of an earlier process; None if there is none, or it may not be kept.

    Args:
      function: the kernel's.
      arguments: their types.
      options: what else the code depends on.
    """
    symbol = _symbol(function, arguments, options)
    code = None if symbol is None else ObjectCache().get(symbol)
    if symbol is None or code is None:
        return None
    # Code calls Numba's runtime, which Numba makes known when it first compiles. Where a name is not known, LLVM leaves
    # the others in the code unresolved as well, such as those of the C library's functions: a call is a crash.
    rtsys.initialize(cpu_target.target_context)
    return cpu.Code(symbol, code)


def keep(
    function: Callable[..., Any], arguments: Sequence[ArgumentType], options: object, entry: str, text: str
) -> cpu.Code | None:
    """Make machine code of LLVM IR that Numba has optimised, and keep it; None if it may not be kept.

    Args:
      function, arguments, options: see `kept`.
      entry: the name of the function in `text` that is the task's code.
      text: LLVM IR with all that it calls but Numba's runtime.
    """
    symbol = _symbol(function, arguments, options)
    if symbol is None or _has_environment(text):
        return None
    named = re.sub(rf'@(?:"{re.escape(entry)}"|{re.escape(entry)}\b)', f"@{symbol}", text)
    module = binding.parse_assembly(named, binding.create_context())
    machine = cpu.target_machine()
    code = machine.emit_object(module)
    ObjectCache().put(symbol, code)
    return cpu.Code(symbol, code)


def _has_environment(text: str) -> bool:
    """Whether code looks up Python objects, as `print` does: Numba gives them only to code that it loads itself."""
    names = re.findall(r'^@("?[^\s"=]*NumbaEnv[^\s"=]*"?) = ', text, re.MULTILINE)
    return any(text.count(f"@{name}") > 1 for name in names)


def _symbol(function: Callable[..., Any], arguments: Sequence[ArgumentType], options: object) -> str | None:
    key = task_key(function, arguments, (options, cpu.target(), source_hash(__file__, _COMPILER)))
    return None if key is None else f"t{key}"


def task_key(function: Callable[..., Any], arguments: Sequence[ArgumentType], made_for: object) -> str | None:
    """A hash of all that a kernel's code depends on; None if the function does not tell it all.

    The places of its lines in the source are part of it: exceptions tell where they come from.

    Args:
      function: the kernel's.
      arguments: their types.
      made_for: what else the code depends on: options, the device, compilers; equal in every process.
    """
    made_of = fingerprint(function)
    if made_of is None:
        return None
    code = function.__code__
    place = (code.co_filename, code.co_firstlineno, code.co_linetable.hex())
    content = (made_of, place, tuple(arguments), made_for)
    return hashlib.sha256(repr(content).encode()).hexdigest()[:24]


_COMPILER = __file__.replace("task_objects", "task_cpu")
