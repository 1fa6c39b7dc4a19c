"""Programs of the dispatcher are tables and machine code, made without a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from brax_concurrent.backends import cuda, cuda_device, nvvm
from brax_concurrent.backends.cuda_dispatch import (
    CONTROL,
    CONTROL_WORDS,
    MAX_KINDS,
    MAX_OPS,
    OP_CONFLICTS,
    OP_ROW_WORDS,
    SHARES,
    T_ARENA_BYTES,
    T_FIRST_OP,
    T_OPS,
    T_RECORD,
    T_SHARE,
    T_STEPS,
    T_WORDS,
    TABLE_FIRST_PART,
    TABLE_PARTS,
)
from brax_concurrent.backends.cuda_link import (
    MAX_PARAMETERS,
    DispatchPart,
    frame_ir,
    link_program,
    parameter_words,
    tables,
)
from brax_concurrent.backends.cuda_program import RECORD_FIRST_BUFFER
from brax_concurrent.backends.native import WORD, source_hash
from brax_concurrent.kernels.kernel import Kernel
from tests.lanes import specialized

pytest.importorskip("cuda.bindings.nvvm", reason="numba-cuda with NVIDIA's compilers is not installed")
from brax_concurrent.scheduler import cuda_dispatch, dispatcher

F, G = cuda.Function("f", ""), cuda.Function("g", "")
THREADS = 256
REGISTERS = 80  # 68 when this was written


def part(*ops, conflicts=None, buffers=1, arena_bytes=128, **arguments):
    return DispatchPart(ops, (-1,) * len(ops), conflicts, buffers, arena_bytes, **arguments)


# ---- tables


def test_the_tables_of_two_parts():
    first = part(F, G, F, conflicts=frozenset({("g", "f")}), buffers=2, arena_bytes=256, steps=3)
    first = replace(first, whens=(-1, 128, -1))
    words, functions = tables([first, part(G, share=3.0)])
    assert functions == [F, G]
    assert words[TABLE_PARTS] == 2
    one, two = (words[TABLE_FIRST_PART + T_WORDS * i :][:T_WORDS] for i in range(2))
    assert [one[i] for i in (T_OPS, T_STEPS, T_ARENA_BYTES, T_SHARE)] == [3, 3, 256, SHARES // 4]
    assert [two[i] for i in (T_OPS, T_STEPS, T_ARENA_BYTES, T_SHARE)] == [1, 1, 128, SHARES]
    # A row of an op: the function's number in the program, the kind's in the part, where its predicate lies, and the
    # kinds that it conflicts with; either order of a pair counts.
    first_op, second_op = [0, 0, -1, 0, 0b10, 0, 0, 0], [1, 1, 128, 0, 0b01, 0, 0, 0]
    assert words[one[T_FIRST_OP] : two[T_FIRST_OP]] == [*first_op, *second_op, *first_op]
    assert words[two[T_FIRST_OP] :] == [1, 0, -1, 0, 1, 0, 0, 0]
    assert one[T_RECORD] == CONTROL + WORD * CONTROL_WORDS
    assert two[T_RECORD] == one[T_RECORD] + WORD * (RECORD_FIRST_BUFFER + 2)
    assert parameter_words([first, part(G)]) == CONTROL_WORDS + 2 * RECORD_FIRST_BUFFER + 3


def test_masks_of_more_than_32_kinds():
    many = [cuda.Function(f"f{i}", "") for i in range(MAX_KINDS)]
    words, _ = tables([part(*many, conflicts=frozenset({("f0", "f39"), ("f63", "f63")}))])
    rows = words[words[TABLE_FIRST_PART + T_FIRST_OP] :]
    masks = {i: rows[OP_ROW_WORDS * i + OP_CONFLICTS :][:2] for i in range(MAX_KINDS)}
    assert {i: mask for i, mask in masks.items() if any(mask)} == {
        0: [0, 1 << 7],
        39: [1, 0],
        63: [0, 1 << 31],
    }


def test_too_much_is_refused():
    many = [cuda.Function(f"f{i}", "") for i in range(MAX_KINDS + 1)]
    with pytest.raises(ValueError, match="at most 64 kernels and 524288 ops, got 65 and 65"):
        tables([part(*many)])
    with pytest.raises(ValueError, match="at most 64 kernels and 524288 ops, got 1 and 524289"):
        tables([part(*[F] * (MAX_OPS + 1))])
    room = MAX_PARAMETERS - CONTROL_WORDS - 2 * RECORD_FIRST_BUFFER
    assert frame_ir([part(F, buffers=room - 1), part(G)], "s", "dispatch", THREADS)
    with pytest.raises(ValueError, match="arrays of all robots together: expected at most 500, got 501"):
        frame_ir([part(F, buffers=room), part(G)], "s", "dispatch", THREADS)


# ---- machine code


def copied(m, w):
    w.user.y[0] = 2.0 * w.user.x[0]


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    """A program of one small kernel, what its code needs, and where it is kept: Numba takes seconds to make it."""
    arrays = {"x": np.zeros((32, 1), np.float32), "y": np.zeros((32, 1), np.float32)}
    kernel = Kernel("copied", copied, ("user.x",), ("user.y",))
    made = cuda.functions(specialized([kernel], {}, arrays, "f32"), ["y"])
    directory, needed = tmp_path_factory.mktemp("cache"), []
    source = source_hash(*cuda_dispatch.device_sources())

    def link(parts):
        return link_program(parts, dispatcher.dispatch, source, THREADS, (9, 0), directory)

    def assemble(*arguments):
        cubin, resources = original(*arguments)
        needed.append(resources)
        return cubin, resources

    original = nvvm.assemble
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvvm, "assemble", assemble)
        program = [part(made["copied"], buffers=2)]
        symbol, cubin = link(program)
    return SimpleNamespace(program=program, symbol=symbol, cubin=cubin, needed=needed, link=link)


@pytest.mark.slow
def test_a_program_is_machine_code_of_one_kernel(linked):
    assert linked.cubin[:4] == b"\x7fELF"
    assert linked.symbol.encode() in linked.cubin
    (needed,) = linked.needed
    assert needed.registers <= REGISTERS
    assert (needed.stack, needed.spill_stores) == (0, 0)


@pytest.mark.slow
def test_it_comes_back_from_the_disk(linked, monkeypatch):
    monkeypatch.setattr(nvvm, "compile_ptx", lambda *_: pytest.fail("compiled again"))
    assert linked.link(linked.program) == (linked.symbol, linked.cubin)


@pytest.mark.slow
def test_another_program_has_the_dispatcher_that_is_there(linked, monkeypatch):
    monkeypatch.setattr(cuda_device, "device_ir", lambda *_: pytest.fail("Numba compiled again"))
    symbol, cubin = linked.link([replace(linked.program[0], steps=2)])
    assert symbol != linked.symbol
    assert cubin[:4] == b"\x7fELF"
    assert cubin != linked.cubin
