"""The window's rules against sets of bytes, as plain Python, as machine code and as CUDA."""

import itertools
import random
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from random_streams import memory_of, must_wait, streams, unhurried, upstream_of
from toy_programs import pendulum

from brax_concurrent.scheduler import window as rules
from brax_concurrent.scheduler.footprint import EVERYTHING, Footprint, Segment
from brax_concurrent.scheduler.task import Task
from brax_concurrent.scheduler.window import (
    ISSUED,
    MAX_SLOTS,
    NO_SLOT,
    WAITING,
    Window,
    conflict_table,
    direct_mask,
    encode,
    free_slot,
    issue_slot,
    oldest_slot,
    ready_mask,
    retire_slots,
    segments_conflict,
    slot_bit,
    tasks_conflict,
    upstream_mask,
    upstream_mask_of_kind,
)

SIZES = st.integers(1, 6) | st.just(MAX_SLOTS)


def task(reads=(), writes=(), buffer=0):
    return Task("k", range(1), Footprint(*[tuple(Segment(buffer, *part) for part in side) for side in (reads, writes)]))


# --- encoding ----------------------------------------------------------------------------------


@unhurried
@given(streams())
def test_encoded_rows_are_the_footprints_bytes(stream):
    encoded = encode(stream)
    assert len(encoded) == len(stream)
    assert encoded.offsets.tolist() == sorted(encoded.offsets.tolist())
    assert (encoded.offsets[0], encoded.offsets[-1]) == (0, len(encoded.rows))
    for i, each in enumerate(stream):
        rows = encoded.rows[encoded.offsets[i] : encoded.offsets[i + 1]].tolist()
        assert encoded.everything[i] == each.footprint.everything
        if each.footprint.everything:
            assert rows == []
            continue
        reads, writes = memory_of(each.footprint)
        read, written = (
            [(b, byte) for b, start, stop, w in rows if w == side for byte in range(start, stop)] for side in (0, 1)
        )
        assert (set(read), set(written)) == (reads - writes, writes)
        assert len(read) + len(written) == len(reads | writes)  # no byte twice
        assert all(start < stop for _, start, stop, _ in rows)
        assert rows == sorted(rows)


def test_arrays_have_the_types_that_compiled_code_expects():
    for stream in ([], [task(writes=[(0, 4)])]):
        encoded = encode(stream)
        assert encoded.rows.dtype == encoded.offsets.dtype == np.int64
        assert encoded.everything.dtype == np.bool_
        assert encoded.rows.shape == (len(stream), 4)


# --- conflicts ---------------------------------------------------------------------------------


@unhurried
@given(*[st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(1, 3), st.integers(0, 1))] * 2)
def test_segments_conflict_when_they_share_a_written_byte(one, other):
    (b1, s1, n1, w1), (b2, s2, n2, w2) = one, other
    overlap = Segment(b1, s1, s1 + n1).overlaps(Segment(b2, s2, s2 + n2))
    assert segments_conflict(b1, s1, s1 + n1, w1, b2, s2, s2 + n2, w2) == (overlap and (w1 or w2) == 1)


@unhurried
@given(streams())
def test_tasks_conflict_when_they_share_a_written_byte(stream):
    encoded = encode(stream)
    arrays = encoded.rows, encoded.offsets, encoded.everything
    table = conflict_table([each.footprint for each in stream])
    for i, j in itertools.product(range(len(stream)), repeat=2):
        expected = must_wait(stream[i], stream[j])
        assert tasks_conflict(*arrays, i, j) == expected
        assert table[i, j] == expected


@pytest.mark.parametrize(
    ("older", "newer", "waits"),
    [
        (task(writes=[(0, 4)]), task(reads=[(3, 8)]), True),  # read after write
        (task(reads=[(3, 8)]), task(writes=[(0, 4)]), True),  # write after read
        (task(writes=[(3, 8)]), task(writes=[(0, 4)]), True),  # write after write
        (task(reads=[(0, 4)]), task(reads=[(0, 4)]), False),
        (task(writes=[(0, 4)]), task(reads=[(4, 8)]), False),  # touching is not overlapping
        (task(writes=[(4, 8)]), task(reads=[(0, 4)]), False),
        (task(writes=[(0, 4)]), task(writes=[(0, 4)], buffer=1), False),
        (task(writes=[(3, 3)]), task(writes=[(0, 8)]), False),  # an empty segment holds no byte
        # The last of several pairs, past the end of the one that began first.
        (task(reads=[(0, 9), (20, 21)]), task(reads=[(1, 2), (3, 4)], writes=[(8, 9)]), True),
        (task(reads=[(0, 9), (20, 21)]), task(reads=[(1, 2), (3, 4)], writes=[(20, 30)]), True),
        (task(reads=[(0, 9), (20, 21)]), task(reads=[(1, 2), (3, 4)], writes=[(9, 20)]), False),
        (Task("k", range(1), EVERYTHING), task(reads=[(0, 1)]), True),
        (task(reads=[(0, 1)]), Task("k", range(1), EVERYTHING), True),
        (Task("k", range(1), EVERYTHING), Task("k", range(1), EVERYTHING), True),
        (Task("k", range(1), EVERYTHING), task(writes=[(5, 5)]), False),
    ],
)
def test_who_waits_for_whom_by_example(older, newer, waits):
    window = Window(encode([older, newer]), 2)
    first, second = window.insert(0), window.insert(1)
    assert window.upstream(second) == (1 << first if waits else 0)
    assert window.ready == (0b01 if waits else 0b11)
    window.issue(first)
    window.retire(first)
    assert window.ready == 1 << second


# --- the window --------------------------------------------------------------------------------


@unhurried
@given(streams(), SIZES, st.randoms(use_true_random=False))
def test_upstream_masks_are_what_the_bytes_say_after_every_event(stream, size, choose):
    """Compares all masks with ones made anew from the set of unfinished tasks."""
    older = upstream_of(stream)
    window, slot_of, issued, entered, finished = Window(encode(stream), size), {}, set(), 0, 0
    while finished < len(stream):
        full = len(slot_of) == size
        assert window.full == full
        blocked = {i: older[i] & set(slot_of) for i in slot_of}
        ready = [i for i in slot_of if i not in issued and not blocked[i]]
        assert window.occupied == sum(1 << slot for slot in slot_of.values())
        assert window.issued == sum(1 << slot_of[i] for i in issued)
        assert window.ready == sum(1 << slot_of[i] for i in ready)
        for i, slot in slot_of.items():
            assert window.task(slot) == i
            assert window.upstream(slot) == sum(1 << slot_of[j] for j in blocked[i])
        assert [window.task(slot) for slot in window.by_age(window.occupied)] == sorted(slot_of)
        actions = (
            ["issue"] * bool(ready) + ["retire"] * bool(issued) + ["insert"] * (entered < len(stream) and not full)
        )
        match choose.choice(actions):  # if there were none, the window would be stuck
            case "insert":
                slot = window.insert(entered)
                assert slot not in slot_of.values()
                slot_of[entered] = slot
                entered += 1
            case "issue":
                chosen = choose.choice(ready)
                if stream[chosen].predicate is not None and choose.random() < 0.5:
                    window.skip(slot_of.pop(chosen))
                    finished += 1
                else:
                    window.issue(slot_of[chosen])
                    issued.add(chosen)
            case "retire":
                chosen = choose.choice(sorted(issued))
                issued.remove(chosen)
                window.retire(slot_of.pop(chosen))
                finished += 1
    assert window.occupied == 0


def test_all_64_slots_take_part():
    stream = [task(writes=[(0, 4)]) for _ in range(MAX_SLOTS + 1)]
    window = Window(encode(stream), MAX_SLOTS)
    assert [window.insert(i) for i in range(MAX_SLOTS)] == list(range(MAX_SLOTS))
    assert window.full
    assert window.occupied == (1 << 64) - 1
    assert window.upstream(63) == (1 << 63) - 1
    window.issue(0)
    window.retire(0)
    assert window.insert(MAX_SLOTS) == 0
    assert window.upstream(0) == (1 << 64) - 2
    for slot in [*range(1, 64), 0]:
        assert window.ready == 1 << slot
        window.issue(slot)
        window.retire(slot)
    assert window.occupied == 0


@unhurried
@given(streams(), st.integers(1, 8))
def test_direct_masks_leave_out_only_who_is_waited_for_anyway(stream, size):
    window = Window(encode(stream), size)
    slots = [window.insert(i) for i in range(min(len(stream), size))]
    upstream = np.array([window.upstream(slot) for slot in slots], np.uint64)
    for slot in slots:
        mask, direct = upstream[slot], direct_mask(upstream, upstream[slot])
        left_out = {j for j in slots if int(mask & ~direct) >> j & 1}
        assert int(direct & ~mask) == 0
        assert left_out == {j for j in slots if int(mask) >> j & 1 and any(
            int(mask) >> k & 1 and int(upstream[k]) >> j & 1 for k in slots)}  # fmt: skip


def test_age_is_the_place_in_the_stream_and_not_the_slot():
    tasks = np.array([9, 4, 7, 3], np.int64)
    assert oldest_slot(tasks, np.uint64(0b1111)) == 3
    assert oldest_slot(tasks, np.uint64(0b0111)) == 1
    assert oldest_slot(tasks, np.uint64(0b0101)) == 2
    assert oldest_slot(tasks, np.uint64(0)) == NO_SLOT
    assert free_slot(np.uint64(0b1011), 4) == 2
    assert free_slot(np.uint64(0b1111), 4) == NO_SLOT
    assert free_slot(np.uint64((1 << 64) - 1), 64) == NO_SLOT


@unhurried
@given(
    streams(5).filter(lambda kinds: kinds and not any(kind.footprint.everything for kind in kinds)),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=10),
    st.integers(0, 2**9 - 1),
)
def test_the_table_of_kinds_gives_the_same_masks(kinds, pairs, occupied):
    """Each unit has its own memory: its tasks are the kinds' on buffers of its own."""
    pairs = [(kind % len(kinds), unit) for kind, unit in pairs]
    encoded = encode([moved(kinds[kind], unit) for kind, unit in pairs])
    *inside, (kind, unit) = pairs
    kinds_inside, units = np.array(inside, np.int64).reshape(-1, 2).T
    table = conflict_table([each.footprint for each in kinds])
    arrays = encoded.rows, encoded.offsets, encoded.everything
    expected = upstream_mask(*arrays, np.arange(len(inside)), np.uint64(occupied), len(inside))
    assert upstream_mask_of_kind(table, kinds_inside, units, np.uint64(occupied), kind, unit) == expected


def moved(kind, unit):
    """The task that does for a unit what `kind` does for unit 0."""
    reads, writes = (
        tuple(Segment(part.buffer + 10 * unit, part.start, part.stop) for part in side)
        for side in (kind.footprint.reads, kind.footprint.writes)
    )
    return Task(kind.kernel, range(unit, unit + 1), Footprint(reads, writes))


@pytest.mark.parametrize("interleave", [1, 3])
def test_the_table_of_kinds_serves_tile_programs(interleave):
    program = pendulum()
    assert program.tiles_are_independent
    stream = list(program.tasks(150, interleave))  # 5 tiles, the last with 22 environments
    encoded = encode(stream)
    names = [op.kernel.name for op in program.ops[:4]]
    full_tile = {each.kernel: each.footprint for each in program.tasks(32)}
    table = conflict_table([full_tile[name] for name in names])
    choose = random.Random(42)
    for task_in in range(12, len(stream)):
        inside = np.array(choose.sample(range(task_in - 12, task_in), 8))
        occupied = np.uint64(choose.getrandbits(8))
        kinds = np.array([names.index(stream[i].kernel) for i in inside])
        units = np.array([stream[i].units.start for i in inside])
        kind, unit = names.index(stream[task_in].kernel), stream[task_in].units.start
        expected = upstream_mask(encoded.rows, encoded.offsets, encoded.everything, inside, occupied, task_in)
        assert upstream_mask_of_kind(table, kinds, units, occupied, kind, unit) == expected


# --- misuse ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 65, 1000])
def test_a_size_out_of_range_is_refused(size):
    with pytest.raises(ValueError, match=rf"window size must be from 1 to 64, got {size}"):
        Window(encode([]), size)


def test_a_size_is_a_whole_number():
    with pytest.raises(TypeError):
        Window(encode([]), 2.0)


@pytest.fixture
def chain():
    """Two tasks in a window of 3: the newer waits for the older."""
    window = Window(encode([task(writes=[(0, 4)])] * 5), 3)
    window.insert(0)
    window.insert(1)
    return window


def test_retiring_twice(chain):
    chain.issue(0)
    chain.retire(0)
    with pytest.raises(RuntimeError, match="cannot retire slot 0: it is free"):
        chain.retire(0)


def test_retiring_what_was_not_issued(chain):
    with pytest.raises(RuntimeError, match="cannot retire slot 0: its task 0 was not issued"):
        chain.retire(0)
    with pytest.raises(RuntimeError, match="cannot retire slot 2: it is free"):
        chain.retire(2)


@pytest.mark.parametrize("what", ["issue", "skip"])
def test_issuing_too_early_or_twice(chain, what):
    with pytest.raises(RuntimeError, match=rf"cannot {what} slot 1: its task 1 waits for tasks \[0\]"):
        getattr(chain, what)(1)
    with pytest.raises(RuntimeError, match=f"cannot {what} slot 2: it is free"):
        getattr(chain, what)(2)
    chain.issue(0)
    with pytest.raises(RuntimeError, match=f"cannot {what} slot 0: its task 0 runs already"):
        getattr(chain, what)(0)


def test_inserting_into_a_full_window_or_out_of_order(chain):
    with pytest.raises(RuntimeError, match="cannot insert task 1: it comes after 1, against program order"):
        chain.insert(1)
    with pytest.raises(ValueError, match="task must be from 0 to 4, got 5"):
        chain.insert(5)
    with pytest.raises(ValueError, match="task must be from 0 to 4, got -1"):
        chain.insert(-1)
    chain.insert(2)
    with pytest.raises(RuntimeError, match="cannot insert task 3: the window of 3 slots is full"):
        chain.insert(3)
    assert chain.occupied == 0b111


@pytest.mark.parametrize("method", ["issue", "skip", "retire", "upstream", "task"])
@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_that_does_not_exist(chain, method, slot):
    with pytest.raises(ValueError, match=f"slot must be from 0 to 2, got {slot}"):
        getattr(chain, method)(slot)


# --- the same lines, compiled ------------------------------------------------------------------


def drive(rows, offsets, everything, upstream, tasks, masks, choices, log):
    """Run a stream through a window as the choices (numbers from 0 to 3) say, and log the state after each event.

    0: retire the oldest issued task, 1: issue the oldest ready one, 2: skip it, 3: insert. What is impossible is
    replaced by what is not.
    """
    size, count, entered, events = len(tasks), len(everything), 0, 0
    while entered < count or masks[WAITING] | masks[ISSUED] != np.uint64(0):
        choice = choices[events % len(choices)]
        ready = oldest_slot(tasks, ready_mask(upstream, masks[WAITING]))
        running = oldest_slot(tasks, masks[ISSUED])
        slot = NO_SLOT
        if choice == 3 and entered < count:
            slot = rules.insert_task(rows, offsets, everything, upstream, tasks, masks, entered)
            entered += slot != NO_SLOT
        if slot == NO_SLOT and running != NO_SLOT and (choice == 0 or ready == NO_SLOT):
            retire_slots(upstream, masks, slot_bit(running))
        elif slot == NO_SLOT and ready != NO_SLOT:
            if choice == 2:
                retire_slots(upstream, masks, slot_bit(ready))
            else:
                issue_slot(masks, ready)
        elif slot == NO_SLOT and entered < count:
            rules.insert_task(rows, offsets, everything, upstream, tasks, masks, entered)
            entered += 1
        log[events, 0], log[events, 1] = masks[WAITING], masks[ISSUED]
        for each in range(size):
            log[events, 2 + each] = upstream[each]
            log[events, 2 + size + each] = direct_mask(upstream, upstream[each])
        events += 1
    return events


compiled_drive = njit(drive)


@unhurried
@given(streams(), st.integers(1, 6) | st.just(MAX_SLOTS), st.lists(st.integers(0, 3), min_size=1))
def test_compiled_and_plain_forms_agree_bit_for_bit(stream, size, choices):
    encoded = encode(stream)
    results = []
    for function in (drive, compiled_drive):
        state = np.zeros(size, np.uint64), np.zeros(size, np.int64), np.zeros(2, np.uint64)
        log = np.zeros((3 * len(stream) + 1, 2 + 2 * size), np.uint64)
        arrays = encoded.rows, encoded.offsets, encoded.everything
        events = function(*arrays, *state, np.array(choices), log)
        results.append((events, log.tobytes(), *(part.tobytes() for part in state)))
    assert results[0] == results[1]


@unhurried
@given(streams())
def test_compiled_conflicts_are_those_of_the_bytes(stream):
    encoded = encode(stream)
    table = compiled_conflicts(encoded.rows, encoded.offsets, encoded.everything)
    expected = [[must_wait(one, other) for other in stream] for one in stream]
    assert table.tolist() == expected


@njit
def compiled_conflicts(rows, offsets, everything):
    count = len(everything)
    table = np.zeros((count, count), np.bool_)
    for i in range(count):
        for j in range(count):
            table[i, j] = tasks_conflict(rows, offsets, everything, i, j)
    return table


def test_masks_of_kinds_compiled():
    table = np.array([[True, False], [False, True]])
    kinds, units = np.array([0, 1, 0] * 20), np.array([0, 0, 1] * 20)
    for occupied in (0, (1 << 60) - 1, 0x5555555):
        arguments = table, kinds, units, np.uint64(occupied), 0, 1
        assert njit(upstream_mask_of_kind)(*arguments) == upstream_mask_of_kind(*arguments)


def test_the_rules_compile_for_cuda(monkeypatch):
    """A warp's dispatcher, lane = slot, and a thread that keeps a whole window; neither may use floating point."""
    pytest.importorskip("numba_cuda")
    import numba.cuda
    import numba.cuda.dispatcher
    import numba.cuda.types as nt

    device = types.SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: device)

    def warp(rows, offsets, everything, table, tasks, units, out):
        lane = numba.cuda.laneid
        mask = numba.cuda.ballot_sync(0xFFFFFFFF, tasks_conflict(rows, offsets, everything, tasks[lane], tasks[0]))
        own = np.uint64(np.uint32(mask))  # a ballot may be signed
        out[lane] = own & ~slot_bit(lane)
        out[lane] |= upstream_mask_of_kind(table, tasks, units, own, 0, 1)

    def thread(rows, offsets, everything, choices, log):
        upstream = numba.cuda.local.array(64, nt.uint64)
        tasks = numba.cuda.local.array(64, nt.int64)
        masks = numba.cuda.local.array(2, nt.uint64)
        drive(rows, offsets, everything, upstream, tasks, masks, choices, log)

    drive = numba.cuda.jit(globals()["drive"], device=True)
    stream = nt.int64[:, ::1], nt.int64[::1], nt.boolean[::1]
    signatures = {
        warp: (*stream, nt.boolean[:, ::1], nt.int64[::1], nt.int64[::1], nt.uint64[::1]),
        thread: (*stream, nt.int64[::1], nt.uint64[:, ::1]),
    }
    for kernel, signature in signatures.items():
        ptx, _ = numba.cuda.compile(kernel, nt.void(*signature), device=False, cc=(9, 0), abi="numba")
        assert ".entry" in ptx
        assert ".f64" not in ptx
        assert ".f32" not in ptx
