"""The project's own machinery: version bounds, house rules, records and README."""

import json
import re
import tomllib
from pathlib import Path

import _records
import check_house
import pytest
import update_readme

import brax_concurrent

ROOT = Path(__file__).parents[1]
MEASURED = {
    "device": "Chip",
    "driver": "1.2",
    "versions": {},
    "commit": "abc",
    "date": "2030-01-02T03:04:05+00:00",
}
THROUGHPUT = {"unit": "env steps/s", "spread": 1.0, "n": 3, "backend": "cuda", "scheduler": "hw"}


@pytest.fixture
def records(monkeypatch, tmp_path):
    """Appends throughput records to `.folder`, as if measured on a made-up GPU."""
    monkeypatch.setattr(_records, "provenance", lambda backend: dict(MEASURED))

    def append(case="ant", value=1.0, bench="throughput", **changes):
        return _records.append(bench, case, value, **{**THROUGHPUT, "directory": tmp_path, **changes})

    append.folder = tmp_path
    return append


def test_lower_bounds_are_the_tested_ones():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    stated = [*project["dependencies"], *(b for extra in extras if extra != "dev" for b in extras[extra])]
    bounds = {re.match(r"([\w-]+)(?:\[\w+\])?>=([\w.]+)", item).groups() for item in stated}
    lines = (ROOT / "tests/constraints-lower.txt").read_text().splitlines()
    assert bounds == {tuple(line.split("==")) for line in lines if not line.startswith("#")}


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'brax_concurrent' has no attribute 'nothing'"):
        _ = brax_concurrent.nothing
    assert set(brax_concurrent.__all__) <= set(dir(brax_concurrent))


def test_house_rules_name_file_and_line(tmp_path, capsys):
    long_function = "import math\n\ndef f() -> None:\n" + "    math.pi\n" * 69
    (tmp_path / "a.py").write_text(long_function)
    (tmp_path / "b.py").write_text("\n" * 500)
    (tmp_path / "c.py").write_text(long_function.removesuffix("    math.pi\n") + "\n" * 100)
    assert check_house.main([str(tmp_path)]) == 1
    function, file = capsys.readouterr().out.splitlines()
    assert function == f"{tmp_path}/a.py:3: f() has 70 lines; keep it under 70"
    assert file == f"{tmp_path}/b.py:500: the file has 500 lines; keep it under 500"


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("def f(a, *b, c=1, **d) -> int: ...", "a, b, c, d"),
        ("def f(): ...", "what it returns"),
        ("class A:\n    def f(self, a) -> int: ...", "a"),
        ("class A:\n    @staticmethod\n    def f(a) -> int: ...", "a"),
        ("def g() -> int:\n    async def f(a: int): ...", "what it returns"),
        ("class A:\n    def __init__(self, a: int): ...", ""),
        ("@nb.njit(nogil=True)\ndef f(a): ...", ""),
        ("@njit\ndef f(a): ...", ""),
        ("@kernel(reads=())\ndef f(m, w): ...", ""),
        ("@intrinsic\ndef g(c, a):\n    def f(x): ...", ""),
    ],
)
def test_house_rules_ask_for_types_where_numba_infers_none(tmp_path, source, missing):
    (tmp_path / "a.py").write_text(source)
    found = [problem.partition(": f() has no type for ")[2] for problem in check_house.problems(tmp_path / "a.py")]
    assert found == ([missing] if missing else [])


def test_readme_is_what_the_records_say():
    readme = (ROOT / "README.md").read_text()
    assert update_readme.render(readme, ROOT / "benchmarks") == readme, "run python scripts/update_readme.py"


def test_committed_records_keep_to_the_schema():
    for path in (ROOT / "benchmarks").glob("*.jsonl"):
        _records.read(path)


def test_a_record_comes_back_as_it_was_appended(records):
    first = records(num_envs=4096, granularity="stage", baseline="graph", ratio=1.5)
    written = [first, records(detail={"window": 8})]
    assert _records.read(records.folder / "throughput.jsonl") == written


def test_a_record_says_where_it_was_measured():
    measured = _records.provenance("cpu")
    assert measured["driver"] is None
    assert "logical processors" in measured["device"]
    assert {"python", "jax", "numba", "mujoco"} <= measured["versions"].keys()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$", measured["date"])


def test_summary_is_median_and_half_range():
    assert _records.summary([4.0, 1.0, 2.0]) == {"value": 2.0, "spread": 1.5, "n": 3}
    with pytest.raises(ValueError, match="samples is empty"):
        _records.summary([])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bench": "speed"}, "bench is 'speed'"),
        ({"backend": "gpu"}, "backend is 'gpu'"),
        ({"granularity": "fine"}, "granularity is 'fine'"),
        ({"value": float("nan")}, "value is nan"),
        ({"value": "1"}, "value is '1'"),
        ({"n": True}, "n is True"),
        ({"n": 0}, "n is 0"),
        ({"num_envs": 0}, "num_envs is 0"),
        ({"spread": -1.0}, "spread is -1.0"),
        ({"unit": ""}, "unit is empty"),
        ({"num_envs": 1, "batch": 1}, "at most one of them"),
        ({"ratio": 2.0}, "baseline and ratio belong together"),
    ],
)
def test_a_record_that_breaks_the_schema_is_refused(records, changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        records(**changes)
    assert not list(records.folder.iterdir())


def test_a_broken_line_is_named(records):
    record = records()
    path = records.folder / "throughput.jsonl"
    path.write_text(path.read_text() + json.dumps({**record, "mood": 1}) + "\n")
    with pytest.raises(ValueError, match=r"throughput.jsonl:2: missing fields \[\], unknown .*\['mood'\]"):
        _records.read(path)


def test_readme_compares_schedulers(records):
    hw = {"num_envs": 4096, "baseline": "serial", "ratio": 2.0}
    records(value=1e6, **hw)
    records(value=3456789.0, granularity="stage", **hw)  # the better granularity is shown
    records(value=2e6, **hw)  # newer than the first: replaces it
    records(value=1700.0, num_envs=4096, scheduler="serial")
    records(case="all", value=12345.0, num_envs=64)
    records(case="ant", value=5.0, num_envs=4096, detail={"integrator": "euler"})
    records(value=9.0, num_envs=4096, backend="cpu", unit="other")
    text = "<!-- results:throughput backend=cuda -->\nold\n<!-- /results:throughput -->\n"
    assert update_readme.render(text, records.folder) == (
        "<!-- results:throughput backend=cuda -->\n"
        "Throughput, env steps/s, on Chip, driver 1.2 (measured 2030-01-02 at commit abc):\n\n"
        "| case | environments | settings | serial | hw |\n| --- | --- | --- | --- | --- |\n"
        "| ant | 4,096 |  | 1,700 | 3.46M (2x serial) |\n"
        "| ant | 4,096 | integrator euler |  | 5 |\n"
        "| all | 64 |  |  | 12.3k |\n"
        "<!-- /results:throughput -->\n"
    )


def test_readme_names_all_commits_that_a_tables_numbers_are_of(records, monkeypatch):
    records(num_envs=64)
    monkeypatch.setattr(_records, "provenance", lambda backend: {**MEASURED, "commit": "def", "date": "2030-01-03"})
    records(num_envs=128)
    text = "<!-- results:throughput -->\n<!-- /results:throughput -->\n"
    assert "(measured 2030-01-02 to 2030-01-03 at commits abc, def; a row's" in update_readme.render(
        text, records.folder
    )


def test_readme_lists_other_results(records):
    records(bench="transfer", value=5000.0, unit="return", spread=12.5, detail={"seed": 1})
    records(bench="transfer", value=0.5, unit="return", detail={"seed": 2}, baseline="gymnasium", ratio=0.999)
    one, two = (
        update_readme.render(f"<!-- results:transfer {only} -->\n<!-- /results:transfer -->\n", records.folder)
        for only in ("detail.seed=1", "detail.seed=2")
    )
    assert "| ant | seed 1 | cuda | hw | 5,000 ± 12.5 | 3 |\n<!--" in one
    assert "| ant | seed 2 | cuda | hw | 0.5 ± 1 | 3 | 0.999x gymnasium |\n<!--" in two


def test_readme_shows_the_shortest_time(records):
    for granularity, value in (("stage", 300.0), ("step", 200.0)):
        records(bench="dispatch", value=value, unit="ns/task", granularity=granularity)
    text = "<!-- results:dispatch -->\n<!-- /results:dispatch -->\n"
    assert "| ant | 200 |" in update_readme.render(text, records.folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- results:speed -->\n<!-- /results:speed -->\n", "results:speed is no benchmark"),
        ("<!-- results:cpu -->\n", "lacks its partner"),
    ],
)
def test_a_wrong_marker_is_refused(tmp_path, text, said):
    with pytest.raises(ValueError, match=said):
        update_readme.render(text, tmp_path)


def test_the_architecture_names_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text()
    modules = [path.name for path in (ROOT / "brax_concurrent").rglob("*.py") if path.name != "__init__.py"]
    assert [name for name in modules if not re.search(rf"(?<![\w.]){re.escape(name)}", text)] == []
