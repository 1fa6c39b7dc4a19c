"""What the dispatcher tells the host: when tasks ran, and which one was stuck. See dispatcher.py."""

from __future__ import annotations

from brax_concurrent.backends import cuda_dispatch as c
from brax_concurrent.backends.cuda_device import (
    add_global,
    ballot,
    clock,
    device_function,
    fence_device,
    join_warp,
    least,
    load_global,
    load_shared,
    load_shared_word,
    lowest_bit,
    store_global,
    store_global_word,
    store_shared,
    swap_global,
    trap,
)
from brax_concurrent.backends.native import WORD

_LAST = 0x7FFFFFFF
_FLIGHTS = (1 << c.TASK_FLIGHT_BITS) - 1


@device_function
def write_trace(base, trace, part, bundle, step, op, place, begin):
    """Note when and where a task ran."""
    index = add_global(trace + c.TRACE_COUNT, 1)
    if index < load_global(trace + c.TRACE_CAPACITY):
        row = trace + c.TRACE_FIRST + c.R_BYTES * index
        store_global_word(row + c.R_BEGIN, begin)
        store_global_word(row + c.R_END, clock())
        store_global(row + c.R_PART, part - 1)
        store_global(row + c.R_BUNDLE, bundle)
        store_global(row + c.R_STEP, step)
        store_global(row + c.R_OP, op)
        store_global(row + c.R_PLACE, place)
        store_global(row + c.R_RUN, load_shared(base + c.CONTROL + WORD * c.C_RUN))


@device_function
def trace_skipped(base, part, bundle, step, op, lane):
    """Note that a task retired without running."""
    trace = load_shared_word(base + c.CONTROL + WORD * c.C_TRACE)
    if trace != 0 and lane == 0:
        write_trace(base, trace, part, bundle, step, op, c.SKIPPED_PLACE, clock())


@device_function
def give_up(base, lane):
    """The watchdog: nothing has become ready for too long. Say which task is to blame, and end the launch.

    Whoever calls has the window's lock. All workers leave when they next look. A task that runs and does not end keeps
    its block: after as long again the launch is ended by force, which leaves the CUDA context unusable.
    """
    state = load_shared(base + c.SLOT_STATE + 4 * lane)
    key = load_shared(base + c.SLOT_SEQ + 4 * lane) if state != c.FREE else _LAST
    oldest = least(key)
    slot = lowest_bit(ballot((state != c.FREE) & (key == oldest)))
    running = ballot(state == c.RUNNING) != 0
    error = load_shared_word(base + c.CONTROL + WORD * c.C_ERROR)
    if lane == slot and error != 0:
        code = c.NEVER_ENDED if state == c.RUNNING else c.NEVER_READY
        task = load_shared(base + c.SLOT_TASK + 4 * lane)
        flight = 4 * ((task >> c.TASK_FLIGHT) & _FLIGHTS)
        if swap_global(error + 4 * c.E_CODE, 0, code) == 0:
            store_global(error + 4 * c.E_SLOT, lane)
            store_global(error + 4 * c.E_PART, load_shared(base + c.FLIGHT_PART + flight) - 1)
            store_global(error + 4 * c.E_BUNDLE, load_shared(base + c.FLIGHT_BUNDLE + flight))
            store_global(error + 4 * c.E_OP, task >> c.TASK_OP)
            store_global(error + 4 * c.E_STEP, load_shared(base + c.SLOT_STEP + 4 * lane))
        fence_device()
    join_warp()
    if load_shared(base + c.ABORT) != 0 and running:
        trap()
    join_warp()
    if lane == 0:
        store_shared(base + c.ABORT, 1)
        store_shared(base + c.EPOCH, load_shared(base + c.EPOCH) + (0 if running else 1))
