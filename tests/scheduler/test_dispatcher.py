"""The dispatcher that stays on the GPU, its device code emulated: random programs against program order."""

from __future__ import annotations

import random

import numpy as np
import pytest
from warp_emulator import TrapError

pytest.importorskip("cuda.bindings.nvvm", reason="numba-cuda with NVIDIA's compilers is not installed")
from dispatch_machine import ROW_BYTES, Part, Run, random_part, written

from brax_concurrent.backends import cuda_dispatch as c
from brax_concurrent.backends.cuda import Function
from brax_concurrent.backends.cuda_link import DispatchPart
from brax_concurrent.backends.native import TILE

POLICIES = (c.OLDEST, c.SAME_KERNEL, c.DEPTH_FIRST)


def random_run(seed, edit=None):
    """One or two random parts on a random machine."""
    rng = random.Random(seed)
    parts = [random_part(rng, name) for name in "ab"[: rng.choice([1, 1, 2])]]
    shift = rng.choice([0, 0, 1])
    gangs = rng.choice([1, 2, 3]) if shift == 0 else rng.choice([1, 2])
    return Run(
        parts, seed, gangs=gangs, shift=shift, window=rng.choice([1, 2, 5, 32, 32]), flights=rng.choice([1, 2, 4, 32]),
        policy=rng.choice(POLICIES), dynamic=1 if len(parts) > 1 else rng.choice([0, 1]), grid=rng.choice([1, 1, 2]),
        edit=edit,
    )  # fmt: skip


def make_part(names, steps=1, tiles=1, conflicts=None, writes=None, whens=None):
    """A part of ops with these names; all of them wait for each other unless `conflicts` says which."""
    functions = tuple(Function(name, "") for name in names)
    part = DispatchPart(functions, whens or (-1,) * len(names), conflicts, 1, 2 * ROW_BYTES, steps=steps)
    return Part(part, TILE * tiles, writes or {})


def order(run):
    """(bundle, step, op) in the order in which they began."""
    return [task[1:] for task, _ in sorted(run.began.items(), key=lambda item: item[1])]


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_every_task_runs_once_and_after_what_it_conflicts_with(first):
    for seed in range(first, first + 10):
        random_run(seed).check()


def test_many_gangs_at_once():
    """They ask while another is the dispatcher, and are granted tasks by it."""
    for seed in range(2):
        Run([make_part("abcdefgh", steps=5, tiles=2, conflicts=frozenset())], seed, gangs=8).check()
        Run([make_part("abcdefgh", steps=3, tiles=2)], seed, gangs=8).check()


MISTAKES = {
    "the dispatcher writes the mail of those that run: it may have become a question meanwhile":
        ("if (without & bit(lane)) != 0:", "if True:"),
    "it believes that only it has finished something": ("if (asking & ~bit(gang)) != 0:", "if False:"),
    "a newcomer does not wait for one that comes with it": ("ballot((same | (lane == one)) & others_meet)",
                                                            "ballot(same & others_meet)"),
    "nor for those of the batch before": ("newcomer, second_mask, taken, True", "newcomer, second_mask, taken, same"),
    "a slot is used again before those behind it have heard": ("_I32(upstream & ~slots), _I32(older & ~slots)",
                                                               "upstream, _I32(older & ~slots)"),
    "the next step begins before the last op of this one": ("own_op < count else its_step + 1", "True else its_step"),
    "a predicate is not looked at": ("!= 0 and not needed(", "!= 0 and False and not needed("),
    "who asks waits for an answer, and does not try the lock again":
        ("told = _told(mail)", "told = _told(mail) if _told(mail) != c.ASKS else _I32(c.WAITS)"),
    "two gangs are granted one task": ("(1 if lane < gang and (idle", "(1 if lane > gang and (idle"),
    "a task's rank counts those that are not ready": ("ones(ready & older)", "ones(older)"),
    "nobody says that it is over": ("(over != 0 and occupied == 0)", "False"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_device_code_is_found(mistake):
    right, wrong = MISTAKES[mistake]
    edited = []

    def edit(source):
        edited.append(right in source)
        return source.replace(right, wrong)

    def fails(seed):
        try:
            random_run(seed, edit).check()
        except (AssertionError, IndexError, KeyError, TrapError):
            return True
        return False

    assert any(fails(seed) for seed in range(40))
    assert any(edited)


# ---- policies: one gang does everything in the order in which it is granted


def test_of_ready_tasks_the_oldest_runs_first():
    run = Run([make_part("abc", steps=4, conflicts=frozenset())], 1, gangs=1)
    assert order(run) == [(0, step, op) for step in range(4) for op in range(3)]


def test_the_kernel_that_ran_last_runs_again():
    run = Run([make_part("abc", steps=4, conflicts=frozenset())], 1, gangs=1, policy=c.SAME_KERNEL)
    assert order(run) == [(0, step, op) for op in range(3) for step in range(4)]


def test_depth_first_finishes_a_bundle_before_the_next():
    run = Run([make_part("abc", steps=2, tiles=3, conflicts=frozenset())], 1, gangs=1, policy=c.DEPTH_FIRST)
    assert order(run) == [(bundle, step, op) for bundle in range(3) for step in range(2) for op in range(3)]
    breadth = order(Run([make_part("abc", steps=2, tiles=3, conflicts=frozenset())], 1, gangs=1))
    assert {bundle for bundle, *_ in breadth[:3]} == {0, 1, 2}


@pytest.mark.parametrize(("window", "gone"), [(1, 1), (2, 5), (3, 5), (4, 9), (8, 9)])
def test_tasks_enter_as_far_as_the_window_reaches(window, gone):
    """While the first does not end, the others go by until those that wait for it fill the window."""
    names = [f"f{i}" for i in range(6)]
    held = frozenset({("f0", "f5"), *((name, name) for name in names)})
    run = Run(
        [make_part(names, steps=2, conflicts=held)], 1, gangs=2, window=window, endless=0, lasts=100_000
    )  # fmt: skip
    run.check()
    first = run.ended[0, 0, 0, 0]
    assert sum(began < first for began in run.began.values()) == gone


# ---- reports


def test_times_of_tasks_that_ran_and_of_those_that_were_skipped():
    part = make_part("wsr", steps=4, tiles=2, writes={0: 0}, whens=(-1, 0, -1))
    run = Run([part], 3, gangs=2, trace=True)
    run.check()
    head = c.TRACE_FIRST // 4
    assert run.trace[c.TRACE_COUNT // 4] == len(run.tasks()) == run.trace[c.TRACE_CAPACITY // 4]
    rows = run.trace[head:].reshape(-1, c.R_BYTES // 4)
    times = np.ascontiguousarray(rows[:, :4]).view(np.int64)
    fields = rows[:, [c.R_PART // 4, c.R_BUNDLE // 4, c.R_STEP // 4, c.R_OP // 4]]
    found = {tuple(map(int, row)): (int(begin), int(end)) for row, (begin, end) in zip(fields, times, strict=True)}
    assert set(found) == set(run.tasks())
    skipped = {tuple(map(int, row)) for row in fields[rows[:, c.R_PLACE // 4] == c.SKIPPED_PLACE]}
    assert skipped == {task for task in run.tasks() if task[3] == 1 and not written(0, task[2], task[1])}
    assert skipped
    assert set(rows[:, c.R_RUN // 4].tolist()) == {5}
    for older, later in zip(run.tasks(), run.tasks()[1:], strict=False):
        assert found[older][0] <= found[older][1]
        assert older[:2] != later[:2] or found[older][1] <= found[later][0]


def stuck(monkeypatch, **settings):
    """A chain of three tasks of which the second does not end in time: the run, and whether it ended by force."""
    seen = []
    original = Run.__init__

    def keep(self, *arguments, **more):
        seen.append(self)
        original(self, *arguments, **more)

    monkeypatch.setattr(Run, "__init__", keep)
    try:
        Run([make_part("abc", tiles=2)], 1, gangs=3, endless=1, timeout=200_000, **settings)
    except TrapError:
        return seen[0], True
    return seen[0], False


def test_a_task_that_does_not_end_is_named_and_ends_the_launch(monkeypatch):
    run, forced = stuck(monkeypatch)
    assert forced
    assert run.errors[[c.E_CODE, c.E_PART, c.E_OP, c.E_STEP]].tolist() == [c.NEVER_ENDED, 0, 1, 0]
    assert run.errors[c.E_BUNDLE] in (0, 1)
    assert not any(op == 2 for *_, op in run.began)


def test_one_that_ends_late_is_named_and_everybody_leaves(monkeypatch):
    run, forced = stuck(monkeypatch, lasts=60_000)
    assert not forced
    assert run.errors[[c.E_CODE, c.E_OP]].tolist() == [c.NEVER_ENDED, 1]
    assert not any(op == 2 for *_, op in run.began)
