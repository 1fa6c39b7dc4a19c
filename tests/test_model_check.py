"""The dispatcher protocol as SPIN sees it, and the script that asks SPIN."""

import re
import shutil

import model_check
import pytest
from model_check import BUGS, LIVENESS, MODELS, SAFETY, SIZES, SMALL, Result, Run

needs_spin = pytest.mark.skipif(not (shutil.which("spin") and shutil.which("gcc")), reason="needs spin and gcc")


SMALL_SIZES = {size for size, safety, _ in SIZES if safety == SMALL}


def result(found=model_check.CLEAN, bug="", looks_for=SAFETY, untried=(), size="units GRAPH=CHAIN"):
    return Result(Run(size, looks_for, bug), found, 10, 1.0, 0.1, frozenset(untried), "")


@needs_spin
@pytest.mark.slow
def test_spin_finds_no_error_but_every_planted_one(capsys):
    assert model_check.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith(("| dispatcher", "| units", "| log"))]
    assert sum("`BUG_" in line for line in rows) >= len(BUGS)
    assert all("no error" in line for line in rows if "`BUG_" not in line)
    assert {line.split(" | ")[0][2:] for line in rows} == SMALL_SIZES


@needs_spin
def test_an_error_in_the_protocol_is_reported_with_its_story():
    # The mistake is part of the size here, so nobody expects it.
    found = model_check.search(Run("dispatcher GRAPH=DIAMOND BUG_NO_FENCE", SAFETY), gigabytes=1)
    assert not found.is_right
    assert found.found == "a task reads what is not there yet, or not there any more"
    assert re.match(r"worker \d asks\n(?s:.*)worker \d claims group 0\nworker \d lets task 0 into slot 0", found.story)
    assert re.search(r"worker \d grants task \d in slot \d to worker \d", found.story)


@needs_spin
def test_a_search_that_runs_out_of_memory_or_depth_is_not_finished(monkeypatch):
    command = model_check._command

    def shallow(words, folder):
        return command(["./pan", "-m50"] if words[0] == "./pan" else words, folder)

    monkeypatch.setattr(model_check, "_command", shallow)
    found = model_check.search(Run("units GRAPH=DIAMOND", SAFETY), gigabytes=1)
    assert found.found == model_check.INCOMPLETE
    assert not found.is_right


@pytest.mark.parametrize(
    ("there", "said"), [({"gcc"}, "needs spin, which is not"), (set(), "needs spin and gcc, which are not")]
)
def test_without_spin_it_says_how_to_install_it(monkeypatch, capsys, there, said):
    monkeypatch.setattr(shutil, "which", lambda name: name if name in there else None)
    assert model_check.main([]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "apt-get install spin gcc" in message


def test_a_planted_mistake_that_is_not_found_is_an_error(capsys):
    assert model_check.verdict([result(), result("a task runs twice", bug="UNITS")], is_whole=True) == 0
    assert model_check.verdict([result(), result(bug="UNITS")], is_whole=True) == 1
    assert "wrong: | units GRAPH=CHAIN | `BUG_UNITS` | safety | **no error** | 10 |" in capsys.readouterr().out
    assert model_check.verdict([result("a task runs twice")], is_whole=True) == 1
    assert model_check.verdict([result(model_check.INCOMPLETE, bug="UNITS")], is_whole=True) == 1
    assert model_check.verdict([], is_whole=False) == 1


def test_lines_that_no_size_reaches_are_an_error(capsys):
    some = [result(untried={"units.pml:7", "units.pml:9"}), result(untried={"units.pml:9"})]
    assert model_check.verdict([*some, result(untried=())], is_whole=True) == 0
    # Neither a planted mistake nor a search for fair runs counts.
    others = [result("a task runs twice", bug="UNITS"), result(looks_for=LIVENESS)]
    assert model_check.verdict([*some, *others], is_whole=True) == 1
    assert "no size reaches these lines of units.pml: units.pml:9" in capsys.readouterr().out


def test_every_mistake_that_the_models_know_is_planted_and_described():
    readme = (MODELS / "README.md").read_text()
    for model in ("dispatcher", "units", "log"):
        known = set(re.findall(r"\bBUG_(\w+)", (MODELS / f"{model}.pml").read_text()))
        assert known == {bug for bug, size in BUGS if size.startswith(model)}
        assert all(f"`BUG_{bug}`" in readme for bug in known)
    assert {size for _, size in BUGS} <= SMALL_SIZES


def test_every_assertion_of_the_models_says_what_it_means():
    for path in MODELS.glob("*.pml"):
        for line in path.read_text().splitlines():
            assert "assert(" not in line or re.search(r"/\* an? .+ \*/|/\* memory ends up wrong \*/", line), line
