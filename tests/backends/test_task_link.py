"""Programs of the dispatcher of task streams, compiled without a GPU."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numba
import numpy as np
import pytest
from task_kernels import EVERY_KIND, answers, axpy, copy, every_kind, fallible, fill, undeclared

from brax_concurrent.backends.arguments import ArgumentType, KernelError

pytest.importorskip("cuda.bindings.nvvm", reason="numba-cuda with NVIDIA's compilers is not installed")
from brax_concurrent.backends import cuda_device, nvvm, task_cuda, task_link
from brax_concurrent.backends.objects import ObjectCache
from brax_concurrent.scheduler import cuda_list_hw, list_dispatcher, list_worker
from brax_concurrent.scheduler.arrays import as_argument

CAPABILITY = (9, 0)
ARRAY, READ = ArgumentType("float64", 1), ArgumentType("float64", 1, readonly=True)
NUMBER = ArgumentType("float64")
REGISTERS = 72  # so that seven blocks fit a multiprocessor


@numba.njit
def twice(x):
    return 2 * x


def compile_unit(function, types, fastmath=False):
    """Never from the disk."""
    return task_link._compile_unit(function, types, CAPABILITY, fastmath)


# ---- units' functions


def test_code_is_named_by_its_content_and_not_by_when_it_was_compiled():
    first, again = (compile_unit(copy.function, [READ, ARRAY]) for _ in range(2))
    assert first == again
    assert compile_unit(copy.function, [ARRAY, ARRAY]).symbol != first.symbol
    assert compile_unit(copy.function, [READ, ARRAY], fastmath=True).symbol != first.symbol
    assert f'@"{first.symbol}"' in first.texts[0]
    assert all("ModuleID" not in text for text in first.texts)


def test_a_units_code_comes_back_from_the_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("BRAX_CONCURRENT_CACHE", str(tmp_path))
    first = task_link.compile_unit(copy.function, [READ, ARRAY], CAPABILITY)
    monkeypatch.setattr(task_link, "compile_cuda", None)
    assert task_link.compile_unit(copy.function, [READ, ARRAY], CAPABILITY) == first
    with pytest.raises(KernelError):  # it would have to be compiled
        task_link.compile_unit(copy.function, [READ, ARRAY], CAPABILITY, fastmath=True)


def test_what_a_kernel_calls_is_its_own(monkeypatch):
    """Two programs' functions may have got the same number from Numba: none is taken for the other."""
    # Numba asks the current GPU what it is.
    monkeypatch.setattr(
        "numba.cuda.dispatcher.get_current_device", lambda: SimpleNamespace(compute_capability=CAPABILITY)
    )

    def one(unit, x, y):
        y[unit] = twice(x[unit])

    code = compile_unit(one, [READ, ARRAY])
    defined = [line for text in code.texts for line in text.splitlines() if line.startswith("define")]
    assert len(defined) == 3
    assert all(code.symbol in line for line in defined)


@pytest.mark.parametrize(
    ("kernel", "types", "message"),
    [
        (undeclared, [READ, ARRAY, READ], "readonly array"),
        (answers, [ARRAY], "it returns int64: a kernel returns nothing"),
    ],
)
def test_kernels_that_do_not_compile(kernel, types, message):
    with pytest.raises(KernelError, match=message):
        compile_unit(kernel.function, types)


def test_arguments_are_loaded_as_the_words_of_parameters_lie():
    text = compile_unit(every_kind, EVERY_KIND).texts[0]
    kinds = {0: "float", 8 * (1 + 4): "i64", 8 * (8 + 4): "i64", 8 * 17: "i8", 8 * 18: "float", 8 * 19: "float"}
    for place, kind in kinds.items():
        (line,) = re.findall(rf'add i64 %"parameters", {place}\n(.*)', text)
        assert f"to {kind} addrspace(3)*" in line  # shared memory


def test_parameters_are_as_many_words_as_are_passed():
    arguments = [np.zeros((2, 3)), np.float32(1), np.zeros(4, np.int32), np.complex64(1j), np.int64(2)]
    found = [as_argument(each, "x") for each in arguments]
    types = [each.type(readonly=True) for each in found]
    assert task_link._words(types) == len(task_cuda.parameter_words(found)) == 9 + 1 + 7 + 2 + 1


# ---- programs


@pytest.fixture(scope="module")
def functions():
    return [
        compile_unit(fallible.function, [READ, ARRAY]),
        compile_unit(axpy.function, [NUMBER, READ, ARRAY]),
        compile_unit(fill.function, [NUMBER, ARRAY]),
    ]


@pytest.fixture(scope="module")
def ptx(functions, tmp_path_factory):
    store = ObjectCache(tmp_path_factory.mktemp("cache"))
    return task_link.program_ptx(
        functions, list_dispatcher.run_list, list_worker.RUN_TASK, "test", CAPABILITY, "program", store
    )


@pytest.mark.slow
def test_a_program_is_one_kernel_in_which_everything_is_inlined(ptx):
    assert ptx.count(".entry") == 1
    assert ".func" not in ptx
    assert ".maxntid 128" in ptx
    _, resources = nvvm.assemble(ptx, "program", CAPABILITY)
    assert resources.registers <= REGISTERS
    assert (resources.stack, resources.spill_stores) == (0, 0)


@pytest.mark.slow
def test_nothing_is_read_as_if_nobody_wrote_it_meanwhile(ptx):
    """What one task writes another reads, in one launch: a load through the texture cache would not see it."""
    assert "ld.global.nc" not in ptx
    assert "ld.global" in ptx


@pytest.mark.slow
def test_subnormal_numbers_and_contractions_are_those_of_a_kernel_of_its_own(ptx, functions):
    alone = [
        task_cuda.compile_task(kernel.function, types, CAPABILITY).ptx
        for kernel, types in ((fallible, [READ, ARRAY]), (axpy, [NUMBER, READ, ARRAY]), (fill, [NUMBER, ARRAY]))
    ]
    for operation in ("fma.rn.f64", "mul.rn.f64", "add.rn.f64", "div.rn.f64", "sqrt.rn.f64", ".ftz"):
        assert ptx.count(operation) == sum(text.count(operation) for text in alone), operation
    assert ptx.count("fma.rn.f64") > 0


@pytest.mark.slow
def test_programs_come_back_from_the_disk(functions, monkeypatch, tmp_path):
    monkeypatch.setenv("BRAX_CONCURRENT_CACHE", str(tmp_path))
    first = cuda_list_hw.link(functions, CAPABILITY)
    assert first.cubin[:4] == b"\x7fELF"
    assert first.symbol.encode() in first.cubin
    assert first.resources is not None
    monkeypatch.setattr(nvvm, "compile_ptx", lambda *_: pytest.fail("compiled again"))
    again = cuda_list_hw.link(functions, CAPABILITY)
    assert (again.symbol, again.cubin, again.resources) == (first.symbol, first.cubin, None)
    monkeypatch.undo()
    monkeypatch.setenv("BRAX_CONCURRENT_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_device, "device_ir", lambda *_: pytest.fail("Numba compiled again"))
    other = cuda_list_hw.link(functions[1:], CAPABILITY)
    assert other.symbol != first.symbol


def test_too_many_kernels():
    code = task_link.UnitCode("one", "u", (), False, 1)
    with pytest.raises(ValueError, match="at most 8192 kernels, .* got 8193"):
        cuda_list_hw.link([code] * 8193, CAPABILITY)


def test_too_many_arguments():
    code = task_link.UnitCode("many", "u", (), False, 1501)
    with pytest.raises(ValueError, match="kernel many: its arguments take 1501 words of 8 bytes; .* may be 1500"):
        cuda_list_hw.link([code], CAPABILITY)


def test_fast_arithmetic_only_if_all_want_it(monkeypatch):
    seen = []
    monkeypatch.setattr(task_link, "device_module", lambda *_: ("f", ""))
    monkeypatch.setattr(nvvm, "compile_ptx", lambda texts, name, capability, options, library: seen.append(options))
    plain, fast = (task_link.UnitCode("one", f"u{flag}", (), flag, 1) for flag in (False, True))
    for functions in ([plain], [plain, fast], [fast]):
        task_link.program_ptx(functions, None, "run", "", CAPABILITY, "p", None)
    assert seen == [(), (), ("-ftz=1", "-prec-div=0", "-prec-sqrt=0")]
