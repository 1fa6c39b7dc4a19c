"""What the workers of hw on task streams do: draw a ticket, wait for its word in the log, run the chunk, count it.

A worker is a block of 128 threads. Its last warp fetches: it draws tickets and waits for words. The first thread counts
what was finished, while the last warp fetches the next. See list_dispatcher.py.
"""

from __future__ import annotations

from brax_concurrent.backends import list_layout as c
from brax_concurrent.backends.cuda_device import (
    add_global,
    ballot,
    barrier,
    block_index,
    clock,
    count_release,
    device_function,
    external,
    from_lane,
    join_warp,
    keep_once,
    load_acquire,
    load_acquire_word,
    load_constant_word,
    load_global,
    load_global_word,
    load_shared_word,
    set_global,
    sleep,
    store_global_word,
    store_shared_word,
    swap_global_word,
    thread_index,
    uniform,
    words,
)
from brax_concurrent.backends.native import WORD

_I32, _I64 = words()
_MASK = 0xFFFFFFFF
_NEAR = 32  # places of the log: who is that near to its end looks without rest
_REST = 200  # nanoseconds between two looks of the others
RUN_TASK = "brax_run_unit"  # the symbol of what calls a unit's function by its number

run_unit = external(RUN_TASK, _I64, (_I32, _I64, _I64))
"""(function, offset of its parameters, unit): 0, or the number of the exception that it raised."""


@device_function
def work(job, base, own, number):
    """Be a worker of a window until its log ends.

    Args:
        job: the kernel's parameters.
        base: offset of the shared memory.
        own: the window's part of the work memory.
        number: the window's.
    """
    thread, trace, running, ticket = thread_index(), job[c.P_TRACE], True, _I32(0)
    fetching, lane = uniform(thread & -c.LANES) == c.BLOCK - c.LANES, thread & (c.LANES - 1)
    while running:
        if fetching:
            ticket = draw(own, lane)
            fetched = wait(own, ticket)
            if lane == 0:
                store_shared_word(base + c.H_WORD, fetched)
            join_warp()
        barrier(0, c.BLOCK)
        word = load_shared_word(base + c.H_WORD)
        low, high = uniform(word & _MASK), uniform(word >> 32)
        running = high >= 0
        if running:
            row, counter = job[c.P_ROWS] + c.ROW_BYTES * (low & _MASK), own + c.W_DONE + 4 * (high & (c.SLOTS - 1))
            waits = high & (1 << (c.LOG_WAITS - 32))
            # Nobody writes the row. So it comes while the last warp makes sure that the operands can be seen.
            copy_row(base, row, job[c.P_ROW_WORDS], thread)
            if fetching:
                load_acquire_word(own + c.W_LOG + WORD * ticket)  # ACQUIRE
                if waits != 0:
                    await_operands(base, own, high & (c.SLOTS - 1), counter, lane)
                if trace != 0 and lane == 0:
                    place = (job[c.P_ROOM] + job[c.P_WORKERS]) * number + ticket
                    store_shared_word(base + c.H_TRACE, begin_trace(trace + c.TRACE_BYTES * place, word))
                join_warp()
            barrier(0, c.BLOCK)
            if waits == 0 or load_shared_word(base + c.H_FAILED) == 0:
                run_chunk(job, counter, base + c.H_ROW, high, thread)
            barrier(0, c.BLOCK)
            if thread == 0:
                end = clock()
                count_release(counter, 1)  # PUBLISH
                if trace != 0:
                    store_global_word(load_shared_word(base + c.H_TRACE) + c.Q_END, end)


@device_function
def draw(own, lane):
    """The next ticket."""
    drawn = _I32(0)
    if lane == 0:
        drawn = add_global(own + c.W_TICKET, 1)
    return from_lane(drawn, 0)


@device_function
def wait(own, ticket):
    """The word of a ticket, as soon as it is there.

    These looks do not acquire: that would take the L1 from the others on this multiprocessor, again and again.
    """
    place = own + c.W_LOG + WORD * ticket
    word = load_global_word(place)
    while ballot(word == 0) != 0:
        front = 1
        if ticket >= _NEAR:
            front = load_global_word(place - WORD * _NEAR)
        word = load_global_word(place)
        if ballot(front == 0) != 0:
            sleep(_REST)
    return word


@device_function
def await_operands(base, own, slot, own_counter, lane):
    """Wait until each counter has come to what the slot's record says. If a chunk of those failed, so does this one.

    Counters only grow. So one whose slot has another task by now has come to it, and stays so.
    """
    failed, other = False, lane
    while other < c.SLOTS:  # once with 32 lanes, which the compiler does not see in a range
        counter = own + c.W_DONE + 4 * other
        goal = load_global(own + c.W_RECORDS + c.RECORD_BYTES * slot + 4 * other)
        done = load_global(counter)
        if goal != 0:
            while done & c.COUNT < goal:
                done = load_global(counter)
            failed = failed or done < 0
            load_acquire(counter)  # OPERANDS
        other += c.LANES
    join_warp()
    any_failed = ballot(failed)
    if lane == 0:
        store_shared_word(base + c.H_FAILED, any_failed)
        if any_failed != 0:
            set_global(own_counter, c.FAILED)
    join_warp()


@device_function
def copy_row(base, row, words, thread):
    """Copy a task's row to shared memory, where all threads find their parameters at once."""
    word = thread
    while word < words:
        store_shared_word(base + c.H_ROW + WORD * word, load_constant_word(row + WORD * word))
        word += c.BLOCK
        keep_once()


@device_function
def run_chunk(job, counter, row, high, thread):
    """Run the units of a chunk.

    Parameters are read anew for each unit, as if it were the only one: what a loop over units could compute once might
    round otherwise than it does in a kernel of its own.

    Args:
        job, thread: see `work`.
        counter: address of the slot's.
        row: offset of the copy of the task's.
        high: the upper half of the log word.
    """
    units, grain = load_shared_word(row + c.R_UNITS), load_shared_word(row + c.R_GRAIN)
    chunk = (high >> (c.LOG_CHUNK - 32)) & ((1 << (c.LOG_WAITS - c.LOG_CHUNK)) - 1)
    function = high >> (c.LOG_FUNCTION - 32)
    first = grain * chunk
    stop = min(first + grain, units)
    while first < stop:
        unit = first + thread
        if unit < stop:
            code = run_unit(function, row + c.R_PARAMETERS, unit)
            if code != 0:
                fail(job[c.P_FAILURE], counter, code, load_shared_word(row + c.R_TASK), unit)
        first += c.BLOCK
        keep_once()


@device_function
def fail(cell, counter, code, task, unit):
    """Note the first exception. Whoever sees the chunk counted sees that there was one."""
    set_global(counter, c.FAILED)
    if swap_global_word(cell, 0, code) == 0:
        store_global_word(cell + WORD, task)
        store_global_word(cell + 2 * WORD, unit)


@device_function
def begin_trace(row, word):
    """Note when and where a chunk begins; the row again."""
    store_global_word(row + c.Q_BEGIN, clock())
    store_global_word(row + c.Q_WORD, word)
    store_global_word(row + c.Q_PLACE, block_index())
    return row
