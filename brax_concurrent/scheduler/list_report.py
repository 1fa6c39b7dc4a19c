"""What the dispatcher of task streams tells the host: which task was stuck, and which were skipped when."""

from __future__ import annotations

from brax_concurrent.backends import list_layout as c
from brax_concurrent.backends.cuda_device import (
    ballot,
    clock,
    device_function,
    fence_system,
    join_warp,
    least,
    load_global,
    lowest_bit,
    set_global,
    sleep,
    store_global,
    store_global_word,
    swap_global,
    trap,
)
from brax_concurrent.backends.cuda_dispatch import E_CODE, E_OP, E_SLOT, NEVER_ENDED, NEVER_READY
from brax_concurrent.backends.native import WORD

_REST = 1000  # nanoseconds
_LAST = 0x7FFFFFFF


@device_function
def trace_skipped(job, task, skipped):
    """Note when the lane's task was skipped, if it was."""
    if skipped and job[c.P_TRACE] != 0:
        store_global_word(job[c.P_SKIPPED] + WORD * task, clock())
    join_warp()


@device_function
def give_up(job, own, lane, state, seq, task):
    """The watchdog: no task has ended for too long. Name the oldest; whether it did.

    As long as no worker has drawn a ticket, none has come onto the GPU: others keep it busy, and no task is to blame.
    Tasks that wait in workers for those that run do nothing any more, as after an exception.
    """
    came = ballot(load_global(own + c.W_TICKET)) != 0
    oldest = least(seq if state != c.FREE else _LAST)
    slot = lowest_bit(ballot((state != c.FREE) & (seq == oldest)))
    if came and state == c.RUNNING:
        set_global(own + c.W_DONE + 4 * lane, c.FAILED)
    join_warp()
    if came and lane == slot:
        error = job[c.P_ERRORS]
        if swap_global(error + 4 * E_CODE, 0, NEVER_ENDED if state == c.RUNNING else NEVER_READY) == 0:
            store_global(error + 4 * E_SLOT, lane)
            store_global(error + 4 * E_OP, task)
        fence_system()
    join_warp()
    return 1 if came else 0


@device_function
def leave_or_trap(job, own, lane, state, target):
    """Wait for the tasks that run, as long again; if they do not end then, end the launch by force.

    That leaves the CUDA context unusable.
    """
    since = clock()
    while ballot((state == c.RUNNING) & (load_global(own + c.W_DONE + 4 * lane) & c.COUNT != target)) != 0:
        sleep(_REST)
        if ballot(clock() - since > job[c.P_TIMEOUT]) != 0:
            trap()
