"""Every robot's kernels compile for the GPU, without one, and need no more of it than the committed table says."""

import re

import pytest
import update_cuda_registers as table

from brax_concurrent.backends import cuda, nvvm
from brax_concurrent.envs.registry import list_envs

pytest.importorskip("cuda.bindings.nvvm", reason="numba-cuda with NVIDIA's compilers is not installed")

# What may differ from the table before a test fails: another patch release of the compilers allocates a little
# differently (from 13.0 to 13.5 by no register and 8 bytes of spills at most, over all kernels).
MORE_REGISTERS = 8
MORE_SPILLS = 0.1
MORE_BYTES = 32

# These tests share compiled code.
HALFCHEETAH = pytest.mark.xdist_group("cuda_halfcheetah")


def excess(kernel, entry):
    """What a kernel needs beyond its entry in the table, by name: (needed, in the table)."""
    found = {}
    for name, known in entry.items():
        needed = getattr(kernel.resources, name)
        allowed = known + MORE_REGISTERS if name == "registers" else known * (1 + MORE_SPILLS) + MORE_BYTES
        if needed > allowed:
            found[name] = (needed, known)
    return found


def inexact(ptx):
    """Arithmetic in PTX that is not single precision, or that the assembler may contract or round in another way."""
    arithmetic = set(re.findall(r"\b(?:add|sub|mul|mad|fma|div|rcp|sqrt)\.[\w.]*f\d\d", ptx))
    return {op for op in arithmetic if not op.endswith(".rn.ftz.f32")} | set(re.findall(r"\.f64", ptx))


@pytest.mark.slow
@pytest.mark.parametrize("robot", list_envs())
def test_kernels_are_what_the_table_says_and_round_as_written(robot):
    """One test for both, so that no kernel is compiled twice."""
    kernels, entries = table.compiled(robot), table.read()["kernels"][robot]
    assert {name: found for name in kernels if (found := inexact(kernels[name].ptx))} == {}
    assert kernels.keys() == entries.keys(), "run python scripts/update_cuda_registers.py"
    beyond = {name: found for name in kernels if (found := excess(kernels[name], entries[name]))}
    compilers = table.made_with(next(iter(kernels.values())).ptx)
    assert beyond == {}, f"table made with {table.read()['made_with']}, this is {compilers}"


def test_the_table_has_the_robots_that_there_are():
    assert sorted(table.read()["kernels"]) == list_envs()


def test_the_comparisons_can_fail():
    resources = nvvm.Resources(registers=120, stack=64, spill_stores=0, spill_loads=2000)
    kernel = cuda.CudaKernel("k", "k", "", b"", (), resources)
    entry = {"registers": 111, "stack": 64, "spill_stores": 0, "spill_loads": 1700}
    assert excess(kernel, entry) == {"registers": (120, 111), "spill_loads": (2000, 1700)}
    assert excess(kernel, entry | {"registers": 112, "spill_loads": 1900}) == {}
    assert inexact("mul.rn.ftz.f32 %f1; add.rn.f32 %f2; mul.ftz.f32; cvt.f64.f32; fma.rn.f64") == {
        "add.rn.f32",
        "mul.ftz.f32",
        "fma.rn.f64",
        ".f64",
    }


@HALFCHEETAH
@pytest.mark.slow
def test_double_precision_compiles():
    kernels = table.compiled("halfcheetah", "f64")
    assert kernels.keys() == table.compiled("halfcheetah").keys()
    assert "fma.rn.f64" in kernels["kinematics"].ptx


@HALFCHEETAH
def test_a_kernel_is_machine_code_with_its_arguments():
    kernel = cuda.compile_kernel(table.specialized("halfcheetah").programs["control"])
    assert kernel.cubin[:4] == b"\x7fELF"
    assert kernel.arguments == ("action", "bad_actions")
    assert kernel.ptx.count(".param .u64 kernel_param_") == 6  # arena, num_envs, lanes, stamp, two arrays
    assert kernel.resources.registers > 0


@HALFCHEETAH
def test_compiled_kernels_come_back_from_the_disk(tmp_path, monkeypatch):
    special = table.specialized("halfcheetah")
    first = cuda.compile_programs(special, cache_directory=tmp_path)
    assert {name for name, program in special.programs.items() if program.root.body} == first.keys()
    assert len(list(tmp_path.rglob("k*"))) == len({code.symbol for code in first.values()})
    monkeypatch.setattr(nvvm, "compile_ptx", lambda *_: pytest.fail("compiled again"))
    assert cuda.compile_programs(special, cache_directory=tmp_path) == first


@HALFCHEETAH
def test_errors_name_the_kernel(monkeypatch):
    program = table.specialized("halfcheetah").programs["control"]
    with pytest.raises(nvvm.CompileError, match=r"kernel control: NVVM says .*compute_990 is an unsupported option"):
        cuda.compile_kernel(program, (99, 0))
    monkeypatch.setattr(nvvm, "compile_ptx", lambda *_: ".version 8.0\n.target sm_90\n.address_size 64\nnonsense")
    with pytest.raises(
        nvvm.CompileError, match=r"(?s)kernel control \(NVVM .*nvJitLink .*Parsing error near 'nonsense'"
    ):
        cuda.compile_kernel(program)


def test_without_the_compilers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(ImportError, match=r"pip install 'brax-concurrent\[cuda13\]'"):
        nvvm.compile_ptx("", "k", (9, 0))
