"""The scheduler hw of task streams on CUDA: one window for all multiprocessors, in a kernel that stays on the GPU.

The first blocks dispatch, one warp each; all others work. A dispatcher's 32 lanes are the 32 slots of its window. Each
lane keeps its slot in registers, and nobody else touches it:

    state, upstream   free, pending or running; mask of the slots that it waits for
    flag_upstream     those of them that may write its predicate
    seq, task         in which order tasks came into this window; the place of its entry
    chunks, word      how many chunks it has; the log word of the first
    predicate         address of an int32; 0: it has none, or that was found to hold
    target            what the slot's counter of finished chunks comes to when the task is finished

Program order is in the entries: a *distance mask* says of the 64 tasks before a task which it conflicts with. So a
newcomer's upstream mask is one ballot, and a window never spans more than 64 places.

A predicate is read once, when those that may write it have retired, whatever else its task waits for. If it does not
hold, the task retires at once. Nobody relies on what it was waiting for: a distance mask has all conflicts, also those
that follow from others, so whoever meets its upstream waits for that itself.

Workers are handed chunks through the window's *log*. A chunk is issued by writing its word to the next place of the
log. A worker draws a number from the ticket counter, which is the place of the log that is its own, and waits for that
word to be written; nobody else looks at it. When all threads of the block are through, it adds one to the counter of
the task's slot. The dispatcher looks at its 32 counters, which are one cache line, with one load. Tickets only grow,
and so do counters, each of which is compared with the sum of all chunks that were ever issued from its slot. So no
number is used twice, nothing is set back, and nobody has to find out who was the last. A counter's highest bit says
that a chunk of the slot raised an exception: then the dispatcher issues nothing any more.

From the end of a task over the dispatcher to its dependent are two hops between multiprocessors. So a task is issued
*early* when all that it waits for is issued before or with it, by words that are marked. First the lanes write into the
record of its slot what each counter comes to when the task that it waits for there is finished. Its workers look at the
counters until they have come to that, and begin: one hop. A record is written anew after its task has retired, when all
that read it have counted; and a counter whose slot has another task by now has come to what the record says, and stays.

Workers that wait do nothing else. So a task is issued early only if there is a worker for each of its chunks that would
have nothing to do otherwise, and if not more than P_WAITING wait then. What is beyond that is issued when its operands
are there.

A worker waits for words of the log and for chunks of older tickets, which workers hold that are there; the dispatcher
for chunks that a worker has taken or any worker will take. So those that are resident are enough, however few. What
waits for a place on the GPU holds no ticket.

What a task wrote is seen by those that waited for it. By PTX's memory model: the worker's threads meet at a barrier,
one of them counts with release; each lane of the dispatcher acquires its counter, and they meet; they fence, and write
to the log; a warp of the next worker acquires the word, and its threads meet. Each of these carries on what the one
before has seen. What has not retired when the word is written, that warp acquires from the counters. All look without
acquiring, and acquire once they have seen what they wait for: by a load whose result nobody uses, of which the compiler
keeps nothing but that it empties the L1. docs/protocol/log.pml has this as a model.
"""

from __future__ import annotations

from brax_concurrent.backends import list_layout as c
from brax_concurrent.backends.cuda_device import (
    ballot,
    block_index,
    clock,
    device_function,
    fence_gpu,
    from_lane,
    join_warp,
    keep_once,
    least,
    load_acquire,
    load_constant,
    load_constant_word,
    load_global,
    load_global_word,
    lowest_bit,
    remainder,
    store_global,
    store_global_word,
    swap_global,
    thread_index,
    total,
    uniform,
    words,
)
from brax_concurrent.backends.native import WORD
from brax_concurrent.scheduler.list_report import give_up, leave_or_trap, trace_skipped
from brax_concurrent.scheduler.list_worker import work

_I32, _ = words()  # Numba adds in 64 bits, which takes two registers for what is kept
_LANES, _MASK = 32, 0xFFFFFFFF
_WAITS = 1 << c.LOG_WAITS
_LAST = 0x7FFFFFFF
_LOOKS = 255  # at the counters between two looks at the clock, and one more


def run_list(
    base: int,
    rows: int,
    entries: int,
    streams: int,
    memory: int,
    failure: int,
    errors: int,
    trace: int,
    skipped: int,
    timeout: int,
    windows: int,
    slots: int,
    count: int,
    stride: int,
    room: int,
    workers: int,
    row_words: int,
    waiting: int,
) -> int:
    """The whole kernel: what every thread of it runs.

    Args:
        base: offset of the shared memory, see list_layout.H_WORD.
        rows, entries, streams, memory, failure, errors, trace, skipped, timeout, windows, slots, count, stride, room,
            workers, row_words, waiting: see list_layout.P_ROWS.
    """
    job = (rows, entries, streams, memory, failure, errors, trace, skipped, timeout, windows, slots, count, stride,
           room, workers, row_words, waiting)  # fmt: skip
    block = block_index()
    number = uniform(remainder(block, windows))
    own = memory + c.W_WINDOWS + stride * number
    if uniform(block) >= windows:
        work(job, base, own, number)
    elif thread_index() < _LANES:
        dispatch(job, own, thread_index())
    return 0


@device_function
def dispatch(job, own, lane):
    """Be a window's dispatcher until no stream is left.

    Args:
        job: the kernel's parameters.
        own: the window's part of the work memory.
        lane: this thread's slot.
    """
    none = _I32(0)
    state, upstream, flag_upstream, seq, task, chunks, target = none, none, none, none, none, none, none
    word, predicate, coming, end, newest, planned = 0, 0, none, none, none, none
    until, a_mask, a_flags, a_word, a_predicate, a_chunks = none, 0, 0, 0, 0, none
    issued, looks, since, stuck, running, failed, more = none, none, 0, none, True, False, True
    while running:
        counter = load_global(own + c.W_DONE + 4 * lane)
        failed, done = failed or ballot(counter < 0) != 0, _I32(counter & c.COUNT)
        finished = ballot((state == c.RUNNING) & (done == target))
        if finished != 0:  # RETIRE
            load_acquire(own + c.W_DONE + 4 * lane)
            join_warp()
            state = _I32(c.FREE if (finished >> lane) & 1 != 0 else state)
            upstream, flag_upstream = _I32(upstream & ~finished), _I32(flag_upstream & ~finished)
            looks, since, more = none, 0, True
        if failed:  # nothing begins after an exception
            state, more = _I32(c.FREE if state == c.PENDING else state), False
        changed, more = more, False
        while changed:
            changed = False
            ready = (state == c.PENDING) & (upstream == 0) & (predicate == 0)
            left = target - done + (chunks if ready else 0)
            may_wait, early = choose_early(job, ready, state, upstream, seq, chunks, predicate, left)
            chosen, more = ready | early, more or may_wait != 0
            if ballot(chosen) != 0:  # ISSUE
                target, more = _I32(target + (chunks if chosen else 0)), True
                record(own, lane, early, upstream, target)
                issued = issue(own, lane, chosen, seq, chunks, word | (_WAITS if early else 0), issued)
                state = _I32(c.RUNNING if chosen else state)
            asking = (state == c.PENDING) & (predicate != 0) & (flag_upstream == 0)
            if ballot(asking) != 0:
                skipped, changed = ask(job, asking, predicate, task), True
                predicate = 0 if asking else predicate
                state = _I32(c.FREE if (skipped >> lane) & 1 != 0 else state)
                upstream, flag_upstream = _I32(upstream & ~skipped), _I32(flag_upstream & ~skipped)
            before = newest
            (state, upstream, flag_upstream, seq, task, chunks, word, predicate), (coming, end, newest, planned), (
                until, a_mask, a_flags, a_word, a_predicate, a_chunks
            ) = insert(
                job, lane, (state, upstream, flag_upstream, seq, task, chunks, word, predicate),
                (coming, end, newest, planned), (until, a_mask, a_flags, a_word, a_predicate, a_chunks),
            )  # fmt: skip
            changed = changed or newest != before
        running = ballot(state != c.FREE) != 0
        looks = _I32(looks + 1)
        if running and looks & _LOOKS == 0:
            now = clock()
            since = now if since == 0 else since
            if ballot(now - since > job[c.P_TIMEOUT]) != 0:
                stuck = _I32(give_up(job, own, lane, state, seq, task))
                since, running = 0, stuck == 0
    close(job, own, lane, issued)
    if stuck != 0:
        leave_or_trap(job, own, lane, state, target)


@device_function
def ask(job, asking, predicate, task):
    """PREDICATE: read those of the asking lanes, all in one latency; mask of the slots whose tasks are skipped."""
    value = 1
    if asking:
        value = load_global(predicate)
    join_warp()
    skipped = ballot(asking & (value == 0))
    if skipped != 0:
        trace_skipped(job, task, asking & (value == 0))
    return skipped


@device_function
def choose_early(job, ready, state, upstream, seq, chunks, predicate, left):
    """EARLY: choose tasks whose upstream is issued, to wait in workers, and those that wait for these, and so on.

    If there is no room for all of them, choose the oldest for which there is and whose upstream is issued already.

    Args:
        job, state, upstream, seq, chunks, predicate: see `dispatch`.
        ready: whether the lane's task is about to be issued.
        left: chunks of the lane's slot that are issued and not finished, as far as is known.

    Returns:
        Mask of slots that may be issued early, if there is room; whether the lane's is chosen.
    """
    runs, most = (state == c.RUNNING) | ready, _I32(job[c.P_WAITING])
    able = (state == c.PENDING) & (upstream != 0) & (predicate == 0) & (chunks <= most)
    others = ballot(runs)
    first = able & (upstream & ~others == 0)
    found, early = ballot(first), first
    if found != 0:
        added = found
        while added != 0:
            others = _I32(others | added)
            early = able & (upstream & ~others == 0)
            added = _I32(ballot(early) & ~others)
        idle = _I32(job[c.P_WORKERS]) - total(left)
        room = _I32(min(idle, most - total(chunks if runs & (upstream != 0) else 0)))
        if total(chunks if early else 0) > room:
            early = first & (chunks <= room)
            early = early & (seq == least(seq if early else _LAST))
    return found, early


@device_function
def record(own, lane, early, upstream, target):
    """Write down for each chosen slot what its workers wait for: what its upstream's counters come to."""
    rest = ballot(early)
    while rest != 0:
        slot = lowest_bit(rest)
        rest = _I32(rest & (rest - 1))
        awaited = (from_lane(upstream, slot) >> lane) & 1 != 0
        store_global(own + c.W_RECORDS + c.RECORD_BYTES * slot + 4 * lane, target if awaited else 0)
    join_warp()


@device_function
def word_from_lane(value, lane):
    """The int64 of the lane with that number."""
    return (from_lane(value >> 32, lane) << 32) | (from_lane(value & _MASK, lane) & _MASK)


@device_function
def insert(job, lane, slots, stream, ahead):
    """INSERT: take in tasks as long as a slot is free for them and the window does not become too long.

    Args:
        job, lane: see `dispatch`.
        slots: the lane's slot.
        stream: the next entry, the end of its stream, what `seq` the next task gets, chunks of all streams so far.
        ahead: entries that were read ahead: where they end, and the words of this lane's.

    Returns:
        slots, stream and ahead.
    """
    state, upstream, flag_upstream, seq, task, chunks, word, predicate = slots
    coming, end, newest, planned = stream
    until, a_mask, a_flags, a_word, a_predicate, a_chunks = ahead
    inserting = True
    while inserting:
        if coming == end:
            first, tasks, its_chunks = claim(job, lane, planned)
            coming, end, planned, until = first, _I32(first + tasks), _I32(planned + its_chunks), _I32(0)
        free = ballot((state == c.FREE) & (lane < job[c.P_SLOTS]))
        oldest = least(seq if state != c.FREE else newest)
        inserting = coming != end and free != 0 and newest - oldest <= c.REACH
        if inserting:
            if coming >= until:
                until = _I32(coming + _LANES)
                if coming + lane < end:
                    entry = job[c.P_ENTRIES] + c.ENTRY_BYTES * (coming + lane)
                    a_mask, a_word = load_constant_word(entry + c.N_MASK), load_constant_word(entry + c.N_WORD)
                    a_predicate = load_constant_word(entry + c.N_PREDICATE)
                    a_flags = load_constant_word(entry + c.N_FLAG_MASK)
                    a_chunks = load_constant(entry + c.N_CHUNKS)
                join_warp()
            holder, slot = coming - until + _LANES, lowest_bit(free)
            distance, used = (newest - seq - 1) & (c.REACH - 1), state != c.FREE
            mask = ballot(used & ((word_from_lane(a_mask, holder) >> distance) & 1 != 0))
            flag_mask = ballot(used & ((word_from_lane(a_flags, holder) >> distance) & 1 != 0))
            its_word, its_predicate = word_from_lane(a_word, holder), word_from_lane(a_predicate, holder)
            its_chunks = from_lane(a_chunks, holder)
            if lane == slot:
                state, upstream, flag_upstream, seq, task = _I32(c.PENDING), mask, flag_mask, newest, coming
                chunks, word, predicate = its_chunks, its_word | (lane << c.LOG_SLOT), its_predicate
            coming, newest = _I32(coming + 1), _I32(newest + 1)
    return (
        (state, upstream, flag_upstream, seq, task, chunks, word, predicate),
        (coming, end, newest, planned),
        (until, a_mask, a_flags, a_word, a_predicate, a_chunks),
    )


@device_function
def claim(job, lane, planned):
    """The next stream: its first entry, how many it has, their chunks; of no tasks if there is none for this window.

    No stream is taken after an exception. A window takes no stream for whose chunks its log has no room. The host gives
    each log so much that all logs cannot be too full for a stream at once.
    """
    number = _I32(-1)
    if lane == 0:
        counter = job[c.P_WORK] + c.W_NEXT
        taken, trying = load_global(counter), True
        while trying:
            trying = False
            if taken < job[c.P_COUNT] and load_global_word(job[c.P_FAILURE]) == 0:
                its_chunks = load_constant(job[c.P_STREAMS] + c.STREAM_BYTES * taken + c.S_CHUNKS)
                if planned + its_chunks <= job[c.P_ROOM]:
                    seen = swap_global(counter, taken, _I32(taken + 1))
                    if seen == taken:
                        number = taken
                    else:
                        taken, trying = seen, True
    join_warp()
    number = from_lane(number, 0)
    first, tasks, chunks = _I32(0), _I32(0), _I32(0)
    if number >= 0:
        stream = job[c.P_STREAMS] + c.STREAM_BYTES * number
        first, tasks = load_constant(stream + c.S_FIRST), load_constant(stream + c.S_TASKS)
        chunks = load_constant(stream + c.S_CHUNKS)
    return first, tasks, chunks


@device_function
def issue(own, lane, chosen, seq, chunks, word, issued):
    """Write the chunks of the chosen slots' tasks to the log, the oldest task first; how many it has now."""
    rest, before, total = ballot(chosen), _I32(0), _I32(0)
    while rest != 0:
        other = lowest_bit(rest)
        rest = _I32(rest & (rest - 1))
        size, its_seq = from_lane(chunks, other), from_lane(seq, other)
        before = _I32(before + (size if its_seq < seq else 0))
        total = _I32(total + size)
    fence_gpu()
    place = own + c.W_LOG + WORD * (issued + before)
    if chosen:
        store_global_word(place, word)
    join_warp()
    rest = ballot(chosen & (chunks > 1))
    while rest != 0:  # all lanes write the other chunks of a large task
        other = lowest_bit(rest)
        rest = _I32(rest & (rest - 1))
        size, at, first = from_lane(chunks, other), word_from_lane(place, other), word_from_lane(word, other)
        chunk = _I32(1 + lane)
        while chunk < size:
            store_global_word(at + WORD * chunk, first + (chunk << c.LOG_CHUNK))
            chunk = _I32(chunk + _LANES)
            keep_once()
        join_warp()
    return _I32(issued + total)


@device_function
def close(job, own, lane, issued):
    """The last words of the log, one for each worker: leave."""
    for worker in range(lane, job[c.P_WORKERS], _LANES):
        store_global_word(own + c.W_LOG + WORD * (issued + worker), c.LOG_END)
        keep_once()
    join_warp()
