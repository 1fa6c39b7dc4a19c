"""What the dispatcher tells the host: when tasks ran, and which one was stuck. See dispatcher.py."""

from __future__ import annotations

from brax_concurrent.backends import cuda_dispatch as c
from brax_concurrent.backends.cuda_device import (
    add_global,
    ballot,
    bit,
    clock,
    device_function,
    fence_device,
    join_warp,
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


@device_function
def write_trace(base, slot, op, place, begin):
    """Note when and where a slot's task ran."""
    trace = load_shared_word(base + c.CONTROL + WORD * c.C_TRACE)
    index = add_global(trace + c.TRACE_COUNT, 1)
    if index < load_global(trace + c.TRACE_CAPACITY):
        row = trace + c.TRACE_FIRST + c.R_BYTES * index
        store_global_word(row + c.R_BEGIN, begin)
        store_global_word(row + c.R_END, clock())
        store_global(row + c.R_PART, (load_shared(base + c.SLOT_RECORD + 4 * slot) >> c.PART_SHIFT) - 1)
        store_global(row + c.R_BUNDLE, load_shared(base + c.SLOT_BUNDLE + 4 * slot))
        store_global(row + c.R_STEP, load_shared(base + c.SLOT_STEP + 4 * slot))
        store_global(row + c.R_OP, op)
        store_global(row + c.R_PLACE, place)
        store_global(row + c.R_RUN, load_shared(base + c.CONTROL + WORD * c.C_RUN))


@device_function
def trace_skipped(base, slot, op, lane):
    """Note that a slot's task retired without running."""
    if load_shared_word(base + c.CONTROL + WORD * c.C_TRACE) != 0 and lane == 0:
        write_trace(base, slot, op, c.SKIPPED_PLACE, clock())


@device_function
def give_up(base, lane):
    """The watchdog: nothing has become ready for too long. Say which task is to blame, and end the launch.

    Whoever calls has the window's lock. All workers leave when they next look. A task that runs and does not end keeps
    its block: after as long again the launch is ended by force, which leaves the CUDA context unusable.
    """
    task, upstream = load_shared(base + c.SLOT_TASK + 4 * lane), load_shared(base + c.SLOT_UPSTREAM + 4 * lane)
    occupied, older = ballot(task != c.FREE), load_shared(base + c.SLOT_OLDER + 4 * lane)
    slot = lowest_bit(ballot((task != c.FREE) & ((older & occupied) == 0)))
    runs = (task != c.FREE) & (upstream == bit(lane))
    running = ballot(runs) != 0
    error = load_shared_word(base + c.CONTROL + WORD * c.C_ERROR)
    if lane == slot and error != 0:
        if swap_global(error + 4 * c.E_CODE, 0, c.NEVER_ENDED if runs else c.NEVER_READY) == 0:
            store_global(error + 4 * c.E_SLOT, lane)
            store_global(error + 4 * c.E_PART, (load_shared(base + c.SLOT_RECORD + 4 * lane) >> c.PART_SHIFT) - 1)
            store_global(error + 4 * c.E_BUNDLE, load_shared(base + c.SLOT_BUNDLE + 4 * lane))
            store_global(error + 4 * c.E_OP, task >> c.TASK_OP)
            store_global(error + 4 * c.E_STEP, load_shared(base + c.SLOT_STEP + 4 * lane))
        fence_device()
    join_warp()
    if load_shared(base + c.ABORT) != 0 and running:
        trap()
    join_warp()
    if lane == 0:
        store_shared(base + c.ABORT, 1)
    if not running and load_shared(base + c.MAIL + 4 * lane) <= c.WAITS:
        store_shared(base + c.MAIL + 4 * lane, c.LEAVE)
