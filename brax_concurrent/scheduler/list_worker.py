"""What the workers of hw on task streams do: draw a ticket, wait for its word in the log, run the chunk, count it.

A worker is a block of 128 threads. See list_dispatcher.py.
"""

from __future__ import annotations

from brax_concurrent.backends import list_layout as c
from brax_concurrent.backends.cuda_device import (
    add_global,
    ballot,
    barrier,
    block_index,
    clock,
    count_global,
    device_function,
    external,
    fence_gpu,
    keep_once,
    load_constant_word,
    load_global,
    load_global_word,
    load_shared_word,
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
_REST, _LONGEST_REST = 20, 200  # nanoseconds between two looks at the log
RUN_TASK = "brax_run_unit"  # the symbol of what calls a unit's function by its number

run_unit = external(RUN_TASK, _I64, (_I32, _I64, _I64))
"""(function, address of its parameters, unit): 0, or the number of the exception that it raised."""


@device_function
def work(job, base, own, number):
    """Be a worker of a window until its log ends.

    Args:
        job: the kernel's parameters.
        base: offset of 8 bytes of shared memory.
        own: the window's part of the work memory.
        number: the window's.
    """
    thread, trace, running, ticket, begin = thread_index(), job[c.P_TRACE], True, _I32(0), 0
    if thread == 0:
        ticket = add_global(own + c.W_TICKET, 1)
    while running:
        if thread == 0:
            store_shared_word(base, wait(own + c.W_LOG + WORD * ticket))
            fence_gpu()
            begin = clock() if trace != 0 else 0
        barrier(0, c.BLOCK)
        word = load_shared_word(base)
        low, high = uniform(word & _MASK), uniform(word >> 32)
        running = high >= 0
        if running:
            run_chunk(job, low & _MASK, high, thread)
            barrier(0, c.BLOCK)
            if thread == 0:
                if trace != 0:
                    log_words = job[c.P_ROOM] + job[c.P_WORKERS]
                    write_trace(trace + c.TRACE_BYTES * (log_words * number + ticket), begin, word)
                ticket = add_global(own + c.W_TICKET, 1)  # comes back while the fence waits for the stores
                fence_gpu()  # PUBLISH
                count_global(own + c.W_DONE + 4 * (high & (c.SLOTS - 1)), 1)


@device_function
def wait(place):
    """The word at a place of the log, as soon as it is there."""
    word, rest = load_global_word(place), _REST
    while word == 0:
        sleep(rest)
        rest = min(rest + _REST, _LONGEST_REST)
        word = load_global_word(place)
    return word


@device_function
def run_chunk(job, low, high, thread):
    """Run the units of a chunk: `low` and `high` are the halves of its log word.

    Threads that begin after an exception do nothing. Parameters are read anew for each unit, as if it were the only
    one: what a loop over units could compute once might round otherwise than it does in a kernel of its own.
    """
    row = job[c.P_ROWS] + c.ROW_BYTES * low
    chunk = (high >> (c.LOG_CHUNK - 32)) & ((1 << (c.LOG_FUNCTION - c.LOG_CHUNK)) - 1)
    function = high >> (c.LOG_FUNCTION - 32)
    units, grain = load_constant_word(row + c.R_UNITS), load_constant_word(row + c.R_GRAIN)
    first = grain * chunk
    stop = min(first + grain, units)
    if ballot(load_global(job[c.P_FAILURE])) != 0:
        stop = first
    while first < stop:
        unit = first + thread
        if unit < stop:
            code = run_unit(function, row + c.R_PARAMETERS, unit)
            if code != 0:
                fail(job[c.P_FAILURE], code, load_constant_word(row + c.R_TASK), unit)
        first += c.BLOCK
        keep_once()


@device_function
def fail(cell, code, task, unit):
    """Note the first exception."""
    if swap_global_word(cell, 0, code) == 0:
        store_global_word(cell + WORD, task)
        store_global_word(cell + 2 * WORD, unit)


@device_function
def write_trace(row, begin, word):
    """Note when and where a chunk ran."""
    store_global_word(row + c.Q_BEGIN, begin)
    store_global_word(row + c.Q_END, clock())
    store_global_word(row + c.Q_WORD, word)
    store_global_word(row + c.Q_PLACE, block_index())
