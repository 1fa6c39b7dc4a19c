"""The GPU's dispatcher of task lists, its device code emulated: random streams against program order."""

from __future__ import annotations

import random

import numpy as np
import pytest
from random_streams import _PREDICATES, _SEGMENTS, _task
from warp_emulator import HangError, TrapError

pytest.importorskip("cuda.bindings.nvvm", reason="numba-cuda with NVIDIA's compilers is not installed")
from list_machine import BLOCK, Run

from brax_concurrent.backends import cuda_dispatch as errors
from brax_concurrent.backends import list_layout as c
from brax_concurrent.scheduler.footprint import Footprint, Segment
from brax_concurrent.scheduler.task import Task


def random_tasks(rng, count):
    """Tasks as those of random_streams.streams, from a seed."""
    some = lambda: tuple(rng.choice(_SEGMENTS) for _ in range(rng.randrange(3)))  # noqa: E731
    return [_task(i, some(), some(), rng.randrange(4 * len(_PREDICATES)), rng.randrange(12)) for i in range(count)]


def random_run(seed, edit=None):
    """A stream of random tasks with random numbers of units, on a random machine."""
    rng = random.Random(seed)
    tasks = random_tasks(rng, rng.choice([1, 4, 12, 30]))
    units = [rng.choice([0, 1, 1, 2, 5, 9]) for _ in tasks]
    units[-1] = units[-1] or 1
    window, resident, grain = rng.choice([1, 2, 5, 32]), rng.choice([2, 3, 6]), BLOCK * rng.choice([1, 2])
    return Run([tasks], units, seed, window=window, resident=resident, grain=grain, edit=edit)


def chain(count, buffer=0):
    """Each task waits for the one before."""
    return [
        Task("chain", range(1), Footprint((Segment(buffer, 0, 4),), (Segment(buffer, 0, 4),))) for _ in range(count)
    ]


def alone(count, buffer=0):
    """Nobody waits for anybody: they only read."""
    return [Task("alone", range(1), Footprint((Segment(buffer, 0, 4),))) for _ in range(count)]


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_every_unit_runs_once_in_an_order_that_gives_what_program_order_gives(first):
    for seed in range(first, first + 20):
        random_run(seed).check()


def test_a_long_stream_never_spans_more_than_the_masks_reach():
    """A task that does not wait, but takes long, stays in the window while 64 others go by, and no more."""
    slow = Task("slow", range(1), Footprint((), (Segment(1, 0, 4),)))
    reader = Task("reader", range(1), Footprint((Segment(1, 0, 4),), (Segment(-1, 0, 4),)))
    for seed in range(3):
        run = Run(
            [[slow, *alone(c.REACH), reader, reader]], [1, *[1] * c.REACH, 1, 1], seed, slow={(0, 0): 150_000}, window=8
        )
        run.check()


def test_windows_take_streams_until_none_is_left():
    for seed in range(30):
        rng = random.Random(seed)
        streams = [chain(rng.randrange(1, 6), buffer) if rng.random() < 0.5 else alone(rng.randrange(1, 6), buffer)
                   for buffer in (-1, 0, 1)]  # fmt: skip
        count = sum(len(stream) for stream in streams)
        units = [rng.choice([0, 1, 2, 5]) for _ in range(count)]
        units[0] = 1
        windows = rng.choice([2, 3, 5])
        run = Run(streams, units, seed, windows=windows, resident=rng.choice([4, 6, 9]))
        run.check()
        assert run.shape.windows <= min(windows, 3)


def test_a_stream_that_no_log_but_one_has_room_for():
    """Logs hold their share and the largest stream, not everything: each stream finds a window all the same."""
    for seed in range(10):
        streams = [alone(1, buffer) for buffer in (-1, 0, 1)] + [alone(6, 0), alone(1, 1), alone(2, -1)]
        units = [random.Random(seed).choice([1, 9]) for stream in streams for _ in stream]
        run = Run(streams, units, seed, windows=2, resident=6)
        run.check()
        assert run.shape.room < run.tables.chunks or len(set(units)) == 1


@pytest.mark.parametrize("late", [{0: 3000}, {1: 3000}, {1: 3000, 2: 9000}, {0: 4000, 3: 4000}])
def test_blocks_that_come_late_are_not_waited_for(late):
    """Of two windows the other does everything until its dispatcher comes; workers come when others leave."""
    for seed in range(4):
        streams = [chain(6, -1), chain(6, 0), alone(9, 1)]
        Run(streams, [3] * 21, seed, windows=2, resident=6, late=late).check()


def test_a_gpu_without_room_for_all():
    with pytest.raises(ValueError, match="hw needs two blocks of 128 threads on the GPU at once, it can hold 1"):
        Run([chain(2)], [1, 1], 0, resident=1)


def test_no_task_begins_after_an_exception():
    for seed in range(8):
        run = Run([chain(6)], [4] * 6, seed, fails=(2, 1))
        assert run.failure.tolist() == [7, 2, 1]
        assert not any(task > 2 for task, _ in run.began)


def test_times_of_chunks_and_of_tasks_that_were_skipped():
    write = Task("write", range(1), Footprint((), (Segment(0, 0, 4),)))
    flag = Segment(0, 4, 8)  # nobody writes it: 0
    skipped = Task("skipped", range(1), Footprint((flag,), (Segment(0, 0, 4),)), flag)
    run = Run([[write, skipped, write]], [4, 1, 2], 3, trace=True)
    run.check()
    ran = run.trace[run.trace[:, c.Q_END // 8] > 0]
    assert len(ran) == 3  # two chunks and one
    assert (ran[:, c.Q_BEGIN // 8] < ran[:, c.Q_END // 8]).all()
    assert set(ran[:, c.Q_PLACE // 8].tolist()) <= set(range(1, run.shape.blocks))
    places = run.tables.entries["word"] & 0xFFFFFFFF
    begin, end = ran[:, c.Q_BEGIN // 8], ran[:, c.Q_END // 8]
    own = [ran[:, c.Q_WORD // 8] & 0xFFFFFFFF == place for place in places]
    assert end[own[0]].max() <= run.skipped[1] <= begin[own[2]].min()
    assert run.skipped[[0, 2]].tolist() == [0, 0]


# ---- the watchdog


def test_a_task_that_does_not_end_is_named_and_ends_the_launch(monkeypatch):
    seen = []
    original = Run.__init__

    def keep(self, *arguments, **settings):
        seen.append(self)
        original(self, *arguments, **settings)

    monkeypatch.setattr(Run, "__init__", keep)
    with pytest.raises(TrapError):
        Run([chain(3)], [1, 2, 1], 1, endless=1, timeout=60_000)
    found = seen[0].errors
    assert found[[errors.E_CODE, errors.E_OP]].tolist() == [errors.NEVER_ENDED, 1]
    assert 0 <= found[errors.E_SLOT] < 32
    assert not any(task == 2 for task, _ in seen[0].began)


def test_the_watchdog_waits_as_long_as_no_worker_has_come():
    """Others keep the GPU: nobody is to blame."""
    run = Run([chain(3)], [1, 1, 1], 1, resident=3, late={1: 80_000}, timeout=60_000)
    run.check()
    assert run.errors[errors.E_CODE] == 0


# ---- planted mistakes

MISTAKES = {
    "a skipped task is not retired from the others": ("                    upstream = _I32(upstream & ~skipped)\n", ""),
    "a skipped task keeps its slot": ("state = _I32(c.FREE if (skipped >> lane) & 1 != 0 else state)", "pass"),
    "counted before all threads are through": (
        "            barrier(0, c.BLOCK)\n            if thread == 0:\n                if trace",
        "            if thread == 0:\n                if trace",
    ),
    "retired when the first chunk is finished": (
        "target = _I32(target + (chunks if at_once else 0))",
        "target = _I32(target + (1 if at_once else 0))",
    ),
    "not published": ("                fence_gpu()  # PUBLISH\n", ""),
    "what was read before is read again": ("            fence_gpu()\n            begin", "            begin"),
    "the window spans too much": ("newest - oldest <= c.REACH", "newest - oldest <= 2 * c.REACH"),
    "distances are one off": ("(newest - seq - 1)", "(newest - seq)"),
    "two tasks get one place of the log": ("before = _I32(before + (size if its_seq < seq else 0))", "pass"),
    "a newcomer waits for pending tasks only": (
        "(state != c.FREE) & (meets != 0)",
        "(state == c.PENDING) & (meets != 0)",
    ),
    "one end too few": ("range(lane, job[c.P_WORKERS], _LANES)", "range(lane, job[c.P_WORKERS] - 1, _LANES)"),
    "a stream is taken by two windows": ("if seen == taken:", "if True:"),
    "a stream is taken without room in the log": ("if planned + its_chunks <= job[c.P_ROOM]:", "if True:"),
    "predicates are not looked at": (
        "                    value = load_global(predicate)\n",
        "                    value = 1\n",
    ),
    "entries of the stream before are kept": (
        "_I32(planned + its_chunks), _I32(0)\n",
        "_I32(planned + its_chunks), until\n",
    ),
}


def chosen_runs(edit):
    """Runs made for some mistakes."""
    yield lambda: Run([chain(4)], [2] * 4, 0, slow={(0, 1): 20_000}, edit=edit)
    one, other = Segment(0, 0, 4), Segment(0, 4, 8)  # of one line
    line = [Task("reads", range(1), Footprint((one,))), Task("writes", range(1), Footprint((), (other,))),
            Task("reads", range(1), Footprint((other,), (Segment(1, 0, 4),)))]  # fmt: skip
    for seed in range(12):
        yield lambda seed=seed: Run([line], [1] * 3, seed, slow={(0, 0): 30_000}, resident=4, edit=edit)
    streams = [chain(4, -1), chain(4, 0), chain(4, 1), alone(6, 1)]
    for seed in range(8):
        for late in ({}, {0: 20_000, 1: 20_000}):
            settings = {"windows": 3, "resident": 9, "edit": edit, "late": late}
            yield lambda seed=seed, settings=settings: Run(streams, [5] * 18, seed, **settings)
    slow = Task("slow", range(1), Footprint((), (Segment(1, 0, 4),)))
    reader = Task("reader", range(1), Footprint((Segment(1, 0, 4),), (Segment(-1, 0, 4),)))
    tasks = [slow, *alone(c.REACH), reader, reader]
    yield lambda: Run([tasks], [1, *[1] * c.REACH, 1, 1], 0, slow={(0, 0): 150_000}, window=8, edit=edit)


def random_runs(edit, seeds):
    for seed in seeds:
        yield lambda seed=seed: random_run(seed, edit)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(mistake):
    old, new = MISTAKES[mistake]
    planted = []

    def edit(source):
        if old in source:
            planted.append(source)
            assert source.count(old) == 1
            return source.replace(old, new)
        return source

    for run in (*random_runs(edit, range(8)), *chosen_runs(edit), *random_runs(edit, range(8, 40))):
        try:
            run().check()
        except (AssertionError, HangError, TrapError):
            assert planted
            return
    pytest.fail("nobody noticed")


def test_the_runs_that_find_mistakes_find_none_without():
    for run in chosen_runs(None):
        run().check()


def test_tables():
    from brax_concurrent.scheduler.list_tables import build_tables, chunks_of, shape_of
    from brax_concurrent.scheduler.window import encode

    tasks = [*chain(3), *alone(2, 1), *chain(1)]
    units = [1, 0, 300, 129, c.BLOCK * c.MAX_CHUNKS + 1, 1]
    functions, parameters = [0, 0, 2, 1, 1, 0], [[1], [], [2, 3, 4], [], [-1], [5]]
    tables = build_tables(encode(tasks), units, functions, parameters, [0, 0, 64, 0, 0, 0], [3, 0, 2, 1])
    assert tables.tasks.tolist() == [0, 2, 3, 4, 5]
    assert tables.entries["chunks"].tolist() == [1, 3, 2, c.MAX_CHUNKS // 2 + 1, 1]
    assert tables.entries["mask"].tolist() == [0, 1, 0, 0, 0]  # the task without units is nowhere
    assert tables.entries["predicate"].tolist() == [0, 64, 0, 0, 0]
    assert (tables.entries["word"] >> c.LOG_FUNCTION).tolist() == [0, 2, 1, 1, 0]
    rows = [tables.rows[c.ROW_BYTES // 8 * (word & 0xFFFFFFFF) :] for word in tables.entries["word"].tolist()]
    assert rows[1][:7].tolist() == [300, 128, 2, 0, 2, 3, 4]
    assert rows[3][:5].tolist() == [units[4], 256, 4, 0, -1]
    assert [tuple(stream) for stream in tables.streams.tolist()] == [
        (0, 2, 4),
        (2, 2, 2 + c.MAX_CHUNKS // 2 + 1),
        (4, 1, 1),
    ]
    grain, chunks = chunks_of(np.array([1, 128, 129, 1 << 40]))
    assert (grain % c.BLOCK == 0).all()
    assert chunks.tolist() == [1, 1, 2, c.MAX_CHUNKS]
    shape = shape_of(tables, 8, 100)
    assert shape.windows == 3
    assert shape.blocks == 100
    assert shape.workers == 33
    assert shape.stride % 128 == 0
    few = build_tables(encode(chain(3)), [1] * 3, [0] * 3, [[]] * 3, [0] * 3, [3])
    assert shape_of(few, 1, 100).blocks == 1 + 3
