"""The GPU's dispatcher of task lists, its device code emulated: random streams against program order."""

from __future__ import annotations

import itertools
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


def random_run(seed, edit=None, **settings):
    """A stream of random tasks with random numbers of units, on a random machine."""
    rng = random.Random(seed)
    tasks = random_tasks(rng, rng.choice([1, 4, 12, 30]))
    units = [rng.choice([0, 1, 1, 2, 5, 9]) for _ in tasks]
    units[-1] = units[-1] or 1
    window, resident, grain = rng.choice([1, 2, 5, 32]), rng.choice([2, 3, 6]), BLOCK * rng.choice([1, 2])
    return Run([tasks], units, seed, window=window, resident=resident, grain=grain, edit=edit, **settings)


def chain(count, buffer=0):
    """Each task waits for the one before."""
    return [
        Task("chain", range(1), Footprint((Segment(buffer, 0, 4),), (Segment(buffer, 0, 4),))) for _ in range(count)
    ]


def handed_on(count):
    """Each task waits for the one before, and for no other. At most 7."""
    parts = [Segment(buffer, 4 * i, 4 * i + 4) for buffer in (0, 1) for i in range(4)]
    return [Task("hands on", range(1), Footprint((a,), (b,))) for a, b in itertools.pairwise(parts[: count + 1])]


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


def test_nothing_is_issued_after_an_exception():
    """By the dispatcher that has seen it; the others take no stream any more."""
    for seed in range(8):
        run = Run([chain(6)], [4] * 6, seed, fails=(2, 1))
        assert run.failure.tolist() == [7, 2, 1]
        assert not any(task > 2 for task, _ in run.began)
        streams, slow = [[*chain(2, 0), *chain(10, 1)], *(chain(1, -1) for _ in range(6))], {(12, 0): 60_000}
        run = Run(streams, [1] * 18, seed, window=1, windows=2, resident=4, fails=(1, 0), slow=slow)
        assert run.failure.tolist() == [7, 1, 0]
        assert {task for task, _ in run.began} <= {0, 1, 12, 13}  # who has no entries left takes a stream at once


def test_times_of_chunks_and_of_tasks_that_were_skipped():
    flag, out = Segment(0, 4, 8), Segment(0, 0, 4)
    write = Task("write", range(1), Footprint((), (out,)))
    unflag = Task("unflag", range(1), Footprint((out,), (flag,)))
    skipped = Task("skipped", range(1), Footprint((flag,), (Segment(1, 0, 4),)), flag)
    after = Task("after", range(1), Footprint((Segment(1, 0, 4),), (out,)))
    run = Run([[write, unflag, skipped, after]], [4, 1, 1, 2], 3, trace=True)
    run.check()
    assert run.memory.flags[1, 1] == 0
    ran = run.trace[run.trace[:, c.Q_END // 8] > 0]
    assert len(ran) == 4  # of three tasks, two chunks of the first
    assert (ran[:, c.Q_BEGIN // 8] < ran[:, c.Q_END // 8]).all()
    assert set(ran[:, c.Q_PLACE // 8].tolist()) <= set(range(1, run.shape.blocks))
    places = run.tables.entries["word"] & 0xFFFFFFFF
    begin, end = ran[:, c.Q_BEGIN // 8], ran[:, c.Q_END // 8]
    own = [ran[:, c.Q_WORD // 8] & 0xFFFFFFFF == place for place in places]
    assert end[own[0]].max() <= begin[own[1]].min()
    assert end[own[1]].max() <= run.skipped[2] <= begin[own[3]].min()
    assert run.skipped[[0, 1, 3]].tolist() == [0, 0, 0]


def test_a_predicate_is_read_as_soon_as_it_is_known():
    """Whatever else its task waits for: so the end of what it was to write is not waited for twice."""
    slow = Task("slow", range(1), Footprint((), (Segment(1, 0, 4),)))
    flag = Segment(0, 4, 8)  # nobody writes it: 0
    skipped = Task("skipped", range(1), Footprint((flag, Segment(1, 0, 4)), (Segment(-1, 0, 4),)), flag)
    after = Task("after", range(1), Footprint((Segment(-1, 0, 4),), (Segment(0, 0, 4),)))
    for seed in range(4):
        run = Run([[slow, skipped, after]], [1] * 3, seed, slow={(0, 0): 30_000})
        run.check()
        assert run.began[2, 0] < run.began[0, 0] + 30_000


# ---- tasks that wait in a worker


def marked(run):
    """The tasks of which a chunk was issued to wait in a worker."""
    log = run.work[c.W_WINDOWS + c.W_LOG :].view(np.int64)[: run.shape.log_words]
    places = [int(word) & 0xFFFFFFFF for word in log if word > 0 and int(word) >> c.LOG_WAITS & 1]
    entries = (run.tables.entries["word"] & 0xFFFFFFFF).tolist()
    return [int(run.tables.tasks[entries.index(place)]) for place in places]


def readers(count, *read):
    """Tasks that wait for those that write what they read, and for nobody else."""
    return [Task("reader", range(1), Footprint(read)) for _ in range(count)]


def test_dependents_wait_in_workers_whatever_the_dispatcher_does():
    for seed in range(4):
        run = Run([chain(8)], [1] * 8, seed, slow={(0, 0): 30_000}, resident=9)
        run.check()
        assert len(marked(run)) >= 4


@pytest.mark.parametrize("waiting", [lambda shape: 0, lambda shape: shape.waiting, lambda shape: shape.workers])
def test_whatever_number_of_workers_may_wait_order_is_kept(waiting):
    for seed in range(200, 220):
        random_run(seed, waiting=waiting).check()
    run = Run([chain(8)], [1] * 8, 1, slow={(0, 0): 30_000}, resident=9, waiting=waiting)
    run.check()
    assert len(marked(run)) >= 4 or waiting(run.shape) == 0 == len(marked(run))


def half_of_the_workers(edit=None):
    """Five workers, one task that takes long, six that wait for it, and one slot for six others to come through."""
    slow, out, other = Task("slow", range(1), Footprint((), (Segment(1, 0, 4),))), Segment(1, 0, 4), Segment(0, 0, 4)
    tasks = [slow, *readers(6, out), *readers(6, other)]
    for seed in range(4):
        run = Run([tasks], [1] * 13, seed, slow={(0, 0): 60_000}, window=8, resident=6, edit=edit)
        run.check()
        assert len(marked(run)) == 2
        assert max(run.began[task, 0] for task in range(7, 13)) < run.began[0, 0] + 60_000


def none_without_work(edit=None):
    """All five workers have something to do when a task could wait, until it need not any more."""
    slow = [Task("slow", range(1), Footprint((), (Segment(1, 2 * i, 2 * i + 2),))) for i in range(5)]
    for seed in range(4):
        long = {(i, 0): 60_000 for i in range(1, 5)} | {(0, 0): 30_000}
        run = Run([[*slow, *readers(1, Segment(1, 0, 2))]], [1] * 6, seed, slow=long, resident=6, sleepy=0, edit=edit)
        run.check()
        assert marked(run) == []


def large_ones(edit=None):
    """Of eight workers four may wait: not those of five chunks, nor two times those of three, but one more for one."""
    slow, out = Task("slow", range(1), Footprint((), (Segment(1, 0, 4),))), Segment(1, 0, 4)
    units = [1, 5 * BLOCK, 3 * BLOCK, 3 * BLOCK, 1]
    for seed in range(4):
        run = Run([[slow, *readers(4, out)]], units, seed, slow={(0, 0): 30_000}, resident=9, edit=edit)
        run.check()
        assert sorted(marked(run)) == [2, 2, 2, 4]


def test_so_many_chunks_wait_as_workers_would_have_nothing_to_do_and_half_at_most():
    half_of_the_workers()
    none_without_work()
    large_ones()


@pytest.mark.parametrize(
    ("check", "old", "new"),
    [
        (half_of_the_workers, "_I32(job[c.P_WAITING])", "_I32(job[c.P_WORKERS])"),
        (half_of_the_workers, "most - total(chunks if runs & (upstream != 0) else 0)", "most"),
        (none_without_work, "min(idle, most", "min(most, most"),
        (large_ones, "first & (chunks <= room)", "first"),
    ],
)
def test_bounds_that_are_off_are_found(check, old, new):
    planted = []

    def edit(source):
        planted.extend([True] * source.count(old))
        return source.replace(old, new)

    with pytest.raises(AssertionError):
        check(edit)
    assert planted


def test_what_waits_in_a_worker_does_nothing_after_an_exception():
    for seed in range(8):
        run = Run([handed_on(7)], [1] * 7, seed, fails=(0, 0), slow={(0, 0): 30_000}, resident=9)
        assert len(marked(run)) > 1  # the second waits for the first only
        assert run.failure.tolist() == [7, 0, 0]
        assert set(run.began) == {(0, 0)}


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


def test_what_waits_in_a_worker_does_nothing_after_the_watchdog():
    """The task ends after it was named, and the launch ends with it."""
    for seed in range(4):
        settings = {"endless": 0, "named": True, "timeout": 60_000, "waiting": lambda shape: shape.workers}
        run = Run([handed_on(3)], [1] * 3, seed, **settings)
        assert marked(run) == [1, 2]
        assert run.errors[[errors.E_CODE, errors.E_OP]].tolist() == [errors.NEVER_ENDED, 0]
        assert set(run.began) == {(0, 0)}
        assert not run.failure.any()


def test_the_watchdog_waits_as_long_as_no_worker_has_come():
    """Others keep the GPU: nobody is to blame."""
    run = Run([chain(3)], [1, 1, 1], 1, resident=3, late={1: 80_000}, timeout=60_000)
    run.check()
    assert run.errors[errors.E_CODE] == 0


# ---- planted mistakes

MISTAKES = {
    "a skipped task is not retired from the others": ("_I32(upstream & ~skipped), ", "upstream, "),
    "a skipped task is not retired from those that it might have told": (
        ", _I32(flag_upstream & ~skipped)\n",
        ", flag_upstream\n",
    ),
    "a finished task is not retired from those that it might have told": (
        ", _I32(flag_upstream & ~finished)\n",
        ", flag_upstream\n",
    ),
    "predicates are read before they are known": (" & (flag_upstream == 0)", ""),
    "a predicate is known when one that may write it is not in the window": (
        "_I32(c.PENDING), mask, flag_mask,",
        "_I32(c.PENDING), mask, flag_mask & (flag_mask - 1),",
    ),
    "a predicate that holds is read again": ("predicate = 0 if asking else predicate", "pass"),
    "a skipped task keeps its slot": ("state = _I32(c.FREE if (skipped >> lane) & 1 != 0 else state)", "pass"),
    "counted before all threads are through": (
        "            barrier(0, c.BLOCK)\n            if thread == 0:\n",
        "            if thread == 0:\n",
    ),
    "begun before the operands can be seen": (
        "            barrier(0, c.BLOCK)\n            if waits",
        "            if waits",
    ),
    "retired when the first chunk is finished": (
        "_I32(target + (chunks if chosen else 0))",
        "_I32(target + (1 if chosen else 0))",
    ),
    "not published": ("count_release(counter", "add_global(counter"),
    "what was read before is read again": (
        "                load_acquire_word(own + c.W_LOG + WORD * ticket)  # ACQUIRE\n",
        "",
    ),
    "a worker does not wait for operands": ("while done & c.COUNT < goal:", "while False:"),
    "operands that were read before are read again": ("            load_acquire(counter)  # OPERANDS\n", ""),
    "a record has what a counter comes to with a later task": (
        "target if awaited else 0)",
        "target + 1 if awaited else 0)",
    ),
    "a record has what a counter came to with the task before": (
        "target if awaited else 0)",
        "target - 1 if awaited else 0)",
    ),
    "a record is seen later than the word": ("    fence_gpu()\n    place", "    place"),
    "a task is issued early whose upstream is not issued": (
        "first = able & (upstream & ~others == 0)",
        "first = able",
    ),
    "a task is issued early with one that it waits for, whatever that is": (
        "early = able & (upstream & ~others == 0)",
        "early = able",
    ),
    "a record has what a counter came to before tasks that are issued at once": (
        "record(own, lane, early, upstream, target)\n",
        "record(own, lane, early, upstream, _I32(target - (chunks if chosen else 0)))\n",
    ),
    "a task is issued early whose predicate is not known": (
        " & (predicate == 0) & (chunks <= most)",
        " & (chunks <= most)",
    ),
    "the window spans too much": ("newest - oldest <= c.REACH", "newest - oldest <= 2 * c.REACH"),
    "distances are one off": ("(newest - seq - 1)", "(newest - seq)"),
    "two tasks get one place of the log": ("before = _I32(before + (size if its_seq < seq else 0))", "pass"),
    "a newcomer waits for pending tasks only": (
        "(newest - seq - 1) & (c.REACH - 1), state != c.FREE",
        "(newest - seq - 1) & (c.REACH - 1), state == c.PENDING",
    ),
    "one end too few": ("range(lane, job[c.P_WORKERS], _LANES)", "range(lane, job[c.P_WORKERS] - 1, _LANES)"),
    "a stream is taken by two windows": ("if seen == taken:", "if True:"),
    "a stream is taken without room in the log": ("if planned + its_chunks <= job[c.P_ROOM]:", "if True:"),
    "predicates are not looked at": (
        "value = load_global(predicate)",
        "value = 1",
    ),
    "entries of the stream before are kept": (
        "_I32(planned + its_chunks), _I32(0)\n",
        "_I32(planned + its_chunks), until\n",
    ),
}


def chosen_runs(edit):
    """Runs made for some mistakes."""
    for seed in range(8):
        yield lambda seed=seed: Run([chain(8)], [1] * 8, seed, resident=9, edit=edit)
    large = [*handed_on(4), *readers(1, Segment(0, 4, 8))]  # the second is too large to be issued early
    for seed in range(4):
        units, slow = [1, 5 * BLOCK, 1, 1, 1], {(0, 0): 30_000}
        yield lambda seed=seed, u=units, slow=slow: Run([large], u, seed, slow=slow, resident=9, edit=edit)
    out, near = Segment(1, 0, 4), Segment(1, 4, 8)  # of one line
    tells = Task("tells", range(1), Footprint((out,), (Segment(0, 0, 4),)))
    told = [Task("told", range(1), Footprint((), (out,))), tells, *readers(12, near)]
    for seed in range(8):
        yield lambda seed=seed: Run([told], [1] * 14, seed, slow={(0, 0): 30_000}, window=3, resident=6, edit=edit)
    yield lambda: Run([chain(4)], [2] * 4, 0, slow={(0, 1): 20_000}, edit=edit)
    one, other = Segment(0, 0, 4), Segment(0, 4, 8)  # of one line
    line = [Task("reads", range(1), Footprint((one,))), Task("writes", range(1), Footprint((), (other,))),
            Task("reads", range(1), Footprint((other,), (Segment(1, 0, 4),)))]  # fmt: skip
    for seed in range(20):
        yield lambda seed=seed: Run([line], [1] * 3, seed, slow={(0, 0): 30_000}, resident=4, edit=edit)
    streams = [chain(4, -1), chain(4, 0), chain(4, 1), alone(6, 1)]
    for seed in range(8):
        for late in ({}, {0: 20_000, 1: 20_000}):
            settings = {"windows": 3, "resident": 9, "edit": edit, "late": late}
            yield lambda seed=seed, settings=settings: Run(streams, [5] * 18, seed, **settings)
    slow = Task("slow", range(1), Footprint((), (Segment(1, 0, 4),)))
    reader = Task("reader", range(1), Footprint((Segment(1, 0, 4),), (Segment(-1, 0, 4),)))
    yield lambda: Run([[slow, *alone(2), reader]], [1] * 4, 0, slow={(0, 0): 30_000}, window=2, edit=edit)
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
    pytest.fail("nobody noticed" if planted else "the code is not written like that any more")


def test_the_runs_that_find_mistakes_find_none_without():
    for run in chosen_runs(None):
        run().check()


def test_tables():
    from brax_concurrent.scheduler.list_tables import build_tables, chunks_of, shape_of
    from brax_concurrent.scheduler.window import encode

    tasks = [*chain(3), *alone(2, 1), *chain(1)]
    units = [1, 0, 300, 129, c.BLOCK * c.MAX_CHUNKS + 1, 1]
    functions, parameters = [0, 0, 2, 1, 1, 0], [[1], [], [2, 3, 4], [], [-1], [5]]
    flags = [(0, 0, 0)] * 2 + [(0, 0, 4)] + [(0, 0, 0)] * 3
    tables = build_tables(
        encode(tasks), units, functions, parameters, [0, 0, 64, 0, 0, 0], np.array(flags), [3, 0, 2, 1]
    )
    assert tables.tasks.tolist() == [0, 2, 3, 4, 5]
    assert tables.entries["chunks"].tolist() == [1, 3, 2, c.MAX_CHUNKS // 2 + 1, 1]
    assert tables.entries["mask"].tolist() == [0, 1, 0, 0, 0]  # the task without units is nowhere
    assert tables.entries["predicate"].tolist() == [0, 64, 0, 0, 0]
    assert tables.entries["flag_mask"].tolist() == [0, 1, 0, 0, 0]
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
    few = build_tables(encode(chain(3)), [1] * 3, [0] * 3, [[]] * 3, [0] * 3, np.zeros((3, 3)), [3])
    assert shape_of(few, 1, 100).blocks == 1 + 3
