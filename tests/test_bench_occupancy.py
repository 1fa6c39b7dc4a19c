"""scripts/bench_occupancy.py: what it makes of Nsight Compute's output. No GPU is needed."""

from pathlib import Path
from types import SimpleNamespace

import bench_occupancy as b
import pytest

ROWS = [dict.fromkeys(b.METRICS, 10.0) | {b.TIME: 3000.0, b.INSTRUCTIONS: 100.0, b.OCCUPANCY: 12.5}]
ROWS += [dict.fromkeys(b.METRICS, 40.0) | {b.TIME: 1000.0, b.INSTRUCTIONS: 1900.0, b.OCCUPANCY: 1.5}]


def printed(rows):
    """As ncu prints it: a line of its own before the table, names, units, and numbers with commas."""
    names = ["ID", "Kernel Name", *(own for own, *_ in b.METRICS.values())]
    lines = [names, ["", "", *["ns"] * len(b.METRICS)]]
    for i, row in enumerate(rows):
        numbers = [f"{row[name] / factor:,.2f}" for name, (_, _, factor) in b.METRICS.items()]
        lines.append([str(i), "k0", *numbers])
    return "==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)


def test_the_rows_of_ncus_table_are_read_by_name():
    assert b.rows_of(printed(ROWS)) == [pytest.approx(row) for row in ROWS]
    assert b.rows_of("==ERROR== no permission\n") == []


def test_kernels_are_put_together_by_time_or_by_instructions():
    found = b.together(ROWS)
    assert found[b.TIME] == 4000
    assert found["DRAM bytes read"] == 50
    assert found[b.OCCUPANCY] == pytest.approx((12.5 * 3 + 1.5) / 4)
    assert found["active lanes of an instruction"] == pytest.approx((10 * 100 + 40 * 1900) / 2000)


@pytest.mark.parametrize("lost", [0, 1])
def test_each_case_has_its_own_kernels(lost, monkeypatch):
    def run(command, **_):
        Path(command[command.index("--log-file") + 1]).write_text(printed([*ROWS, ROWS[1]][: 3 - lost]))
        return SimpleNamespace(returncode=0, stdout='ready\n["one", 2]\n["two", 1]\n', stderr="")

    monkeypatch.setattr(b.subprocess, "run", run)
    if lost:
        with pytest.raises(RuntimeError, match="2 kernels profiled of"):
            b.counters([])
    else:
        found = b.counters([])
        assert found["one"] == pytest.approx(b.together(ROWS))
        assert found["two"] == pytest.approx(ROWS[1])


def test_a_case_is_what_make_is_given(monkeypatch):
    made = []
    monkeypatch.setattr(b.bc, "make", lambda *names, **settings: made.append((names, settings)))
    b.Case("ant:4096:hw:step").make(trace="x")
    assert made == [
        (("ant", 4096), {"scheduler": "hw", "granularity": "step", "backend": "cuda", "trace": "x"}),
    ]
