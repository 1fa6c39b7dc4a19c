"""The scheduler hw on CUDA: the window inside a kernel that stays on the GPU for a whole stream.

One launch, a block on every multiprocessor. The warps of a block form *gangs*; a gang is a worker, and a task is a
kernel on a *bundle* of as many neighbouring tiles as a gang has warps. All tasks of a bundle go through the window of
the block that claimed it, so that dependencies never leave a multiprocessor.

No warp does nothing but dispatch: the dispatcher is a role. A gang that has finished a task asks for another by a word
of shared memory, its mail, and tries the window's lock. Who has the lock serves all that ask: it retires what they have
finished, grants ready tasks to them and to those that wait, to itself first, and now and then lets newcomers in. So a
task whose upstream was finished last starts at once on the gang that finished it; gangs that come at the same time
share one pass, of which most is the same for one and for many; and no registers are kept by a warp that computes
nothing.

The 32 lanes of the dispatcher's warp are the 32 slots: each keeps one slot's task and two masks of slots, `upstream`
(those that it waits for) and `older` (those whose tasks came before: an age matrix). The tasks that are ready are a
ballot, the oldest of them another. A slot whose task runs, and one without a task, waits for itself. Lanes are also
the gangs, by their mail, and in dispatcher_insert.py the *flights*.

A worker waits for tasks that run on other workers, which have begun, and for nothing else: so blocks need not be
resident at the same time. docs/protocol has a model of all this which a model checker goes through; the words in
capitals below are its steps.

Where all lanes have the same branch to take, `uniform` says so. Numba's integers grow to 64 bits with every operation;
`_I32` says where 32 are meant, which halves the instructions.
"""

from __future__ import annotations

from brax_concurrent.backends import cuda_dispatch as c
from brax_concurrent.backends.cuda_device import (
    ballot,
    barrier,
    bit,
    block_threads,
    clock,
    device_function,
    exchange_shared,
    fence_block,
    from_lane,
    highest_bit,
    join_warp,
    least,
    load_shared,
    load_shared_word,
    lowest_bit,
    ones,
    sleep,
    store_shared,
    thread_index,
    uniform,
    union,
    words,
)
from brax_concurrent.backends.native import WORD
from brax_concurrent.scheduler.dispatcher_insert import insert
from brax_concurrent.scheduler.dispatcher_report import give_up, trace_skipped
from brax_concurrent.scheduler.dispatcher_work import needed, run

_I32, _ = words()
_LANES, _LANE_BITS = 32, 5
_FLIGHTS = (1 << c.TASK_FLIGHT_BITS) - 1
# Nanoseconds between two looks of a gang that has nothing to do: more and more, since its looks take turns with the
# instructions of the warps that work. With the longest it also asks whether the others go on.
_REST, _LONGEST_REST = 20, 640
_BATCH = 4  # newcomers enter when there is room for a window's fourth: what they cost together is less than one by one


def dispatch(base: int, table: int) -> int:
    """The whole kernel: what every thread of it runs.

    Args:
        base: offset of the block's shared memory.
        table: address of the program's tables.
    """
    thread = thread_index()
    for word in range(thread, c.STATE_BYTES // 4, block_threads()):
        store_shared(base + 4 * word, 0)
    barrier(0, block_threads())
    if thread < _LANES:
        store_shared(base + c.SLOT_TASK + 4 * thread, c.FREE)
        store_shared(base + c.SLOT_UPSTREAM + 4 * thread, bit(thread))
    barrier(0, block_threads())
    shift = uniform(load_shared(base + c.CONTROL + WORD * c.C_GANG))
    size, warp, lane = bit(shift), uniform(_I32(thread >> _LANE_BITS)), _I32(thread & (_LANES - 1))
    gang = _I32(warp >> shift)  # a division may call a function, after which the compiler takes all for diverged
    member = _I32(warp & (size - 1))
    mail = base + c.MAIL + 4 * gang
    slot = _I32(-1)
    while True:
        if member == 0:
            slot = serve(base, table, gang, lane, slot)
        if size > 1:
            join_gang(gang, size)
            slot = uniform(load_shared(mail))
        if slot < 0:
            return 0
        run(base, table, slot, gang, member, lane, size)
        slot = load_shared(mail)  # kept there, not in a register of the kernels
        fence_block()  # PUBLISH
        join_gang(gang, size)


@device_function
def join_gang(gang, size):
    """Wait for the other warps of the gang. The first barriers of a block are theirs."""
    if size > 1:
        barrier(gang, size * _LANES)
    else:
        join_warp()


@device_function
def serve(base, table, gang, lane, finished):
    """Ask for a task, and be the dispatcher if nobody is, until there is one: its slot, or LEAVE.

    Args:
        finished: the slot of the task that the gang has finished, -1: none.
    """
    mail = base + c.MAIL + 4 * gang
    told, since, passes, rest = _I32(c.ASKS), 0, _I32(0), _I32(_REST)
    if lane == 0:
        store_shared(mail, c.ASKS - 1 - finished)  # ASK
    while told < c.LEAVE:
        if told != c.WAITS and acquire(base, lane):
            told = hand_out(base, table, gang, lane, finished)
            release(base, lane)
        else:
            told = _told(mail)
        if told == c.WAITS:  # WAIT
            sleep(rest)
            if rest < _LONGEST_REST:
                rest = _I32(2 * rest)
                continue
            seen = from_lane(load_shared(base + c.PASSES), 0)
            if since == 0 or seen != passes:  # others go on
                since, passes = clock(), seen
            elif ballot(clock() - since > load_shared_word(base + c.CONTROL + WORD * c.C_TIMEOUT)) != 0:
                while not acquire(base, lane):
                    pass
                give_up(base, lane)
                release(base, lane)
                since = 0
    return told


@device_function
def _told(mail):
    """A gang's mail: ASKS as long as nobody has seen that it asks, whatever it has finished."""
    told = from_lane(max(load_shared(mail), c.ASKS), 0)
    if told != c.WAITS:
        fence_block()
    return told


@device_function
def hand_out(base, table, gang, lane, finished):
    """A pass of the dispatcher: retire what is finished, and grant tasks to all gangs that have none.

    Returns:
        What the dispatcher's own mail then says.
    """
    mail, task = load_shared(base + c.MAIL + 4 * lane), load_shared(base + c.SLOT_TASK + 4 * lane)
    upstream, older = load_shared(base + c.SLOT_UPSTREAM + 4 * lane), load_shared(base + c.SLOT_OLDER + 4 * lane)
    aborted, over = load_shared(base + c.ABORT), load_shared(base + c.OVER)
    passes, window = load_shared(base + c.PASSES), load_shared(base + c.CONTROL + WORD * c.C_WINDOW)
    policy = load_shared(base + c.CONTROL + WORD * c.C_POLICY)
    task, upstream, older = retire(lane, retired_by(mail, gang, finished), task, upstream, older)
    without, occupied = ballot(mail <= c.WAITS), ballot(task != c.FREE)
    idle, looking = _I32(0 if aborted != 0 else without), aborted == 0
    while looking:
        guarded = ballot((task & c.GUARDED) != 0)
        ready = ballot(upstream == 0)
        several = _I32(ready & (ready - 1)) != 0 and _I32(idle & (idle - 1)) != 0
        if several and policy == c.OLDEST and (ready & guarded) == 0:  # ISSUE, as many as there are
            mail, upstream = grant_several(base, gang, lane, ready, idle, mail, upstream, older)
            ready, idle = ballot(upstream == 0), ballot(mail <= c.WAITS)
        while ready != 0 and idle != 0:  # ISSUE, one by one
            to = gang if (idle & bit(gang)) != 0 else lowest_bit(idle)
            picked = choose(base, policy, to, lane, ready, task, upstream, older)
            ready = _I32(ready & ~bit(picked))
            if (guarded & bit(picked)) != 0 and not needed(base, table, picked, op_of(task, picked), lane):
                trace_skipped(base, picked, op_of(task, picked), lane)
                task, upstream, older = retire(lane, bit(picked), task, upstream, older)
                ready = ballot(upstream == 0)
                occupied = _I32(occupied & ~bit(picked))
            else:
                idle = _I32(idle & ~bit(to))
                upstream = bit(lane) if lane == picked else upstream
                mail = picked if lane == to else mail
                if policy == c.SAME_KERNEL and lane == picked:
                    store_shared(base + c.LAST + 4 * to, 1 + (task >> c.TASK_OP))
        looking = False
        if over == 0 and _I32(_BATCH * ones(occupied)) <= _I32((_BATCH - 1) * window):  # INSERT
            task, upstream, older, entered = insert(base, table, lane, window, task, upstream, older)
            occupied, over = _I32(occupied | entered), load_shared(base + c.OVER)
            looking = entered != 0 and idle != 0
    if aborted != 0 or (over != 0 and occupied == 0):
        mail = _I32(c.LEAVE if mail <= c.WAITS else mail)
    else:
        mail = _I32(c.WAITS if mail <= c.ASKS else mail)
    store_shared(base + c.SLOT_TASK + 4 * lane, task)
    store_shared(base + c.SLOT_UPSTREAM + 4 * lane, upstream)
    store_shared(base + c.SLOT_OLDER + 4 * lane, older)
    if lane == 0:
        store_shared(base + c.PASSES, passes + 1)
    if (without & bit(lane)) != 0:  # the others may ask at this moment
        store_shared(base + c.MAIL + 4 * lane, mail)
    return from_lane(mail, gang)


@device_function
def grant_several(base, gang, lane, ready, idle, mail, upstream, older):
    """Grant the oldest ready tasks to the gangs that have none, all at once: the dispatcher gets the oldest.

    Returns:
        The lane's mail, and its slot's upstream mask.
    """
    number, rank = _I32(min(ones(ready), ones(idle))), ones(ready & older)
    if (ready & bit(lane)) != 0 and rank < number:
        store_shared(base + c.RANKS + 4 * rank, lane)
        upstream = bit(lane)
    join_warp()
    # A dispatcher that has a task already is none of them.
    place = _I32(ones(idle & (bit(lane) - 1)) + (1 if lane < gang and (idle & bit(gang)) != 0 else 0))
    place = _I32(place if lane != gang else 0)
    if (idle & bit(lane)) != 0 and place < number:
        mail = load_shared(base + c.RANKS + 4 * place)
    join_warp()
    return mail, upstream


@device_function
def retired_by(mail, gang, finished):
    """The slots that those who ask have finished. Most often that is the dispatcher alone, which need not be asked."""
    asking = ballot(mail <= c.ASKS)
    if (asking & ~bit(gang)) != 0:
        fence_block()  # whom the dispatcher grants tasks must see what the others have written
        return union(bit(c.ASKS - 1 - mail) if mail <= c.ASKS else _I32(0))
    return bit(finished) if asking != 0 else _I32(0)


@device_function
def retire(lane, slots, task, upstream, older):
    """RETIRE the tasks of some slots."""
    upstream, older = _I32(upstream & ~slots), _I32(older & ~slots)
    if (slots & bit(lane)) != 0:
        task, upstream = _I32(c.FREE), bit(lane)
    return task, upstream, older


@device_function
def choose(base, policy, to, lane, ready, task, upstream, older):
    """The slot of the ready task that a gang is to run: by the policy, and of equals the oldest."""
    mine = (ready & bit(lane)) != 0
    if policy == c.SAME_KERNEL:
        same = ballot(mine & ((task >> c.TASK_OP) + 1 == load_shared(base + c.LAST + 4 * to)))
        ready = same if same != 0 else ready
    elif policy == c.DEPTH_FIRST:
        flight = _I32((task >> c.TASK_FLIGHT) & _FLIGHTS)
        ready = ballot(mine & (flight == least(flight if mine else _I32(_LANES))))
    return highest_bit(ballot(((ready & bit(lane)) != 0) & ((older & ready) == 0)))  # there is but one


@device_function
def op_of(task, slot):
    """The op of a slot's task."""
    return _I32(from_lane(task, slot) >> c.TASK_OP)


@device_function
def acquire(base, lane):
    """ACQUIRE: take the window's lock if nobody has it; whether that is so."""
    taken = _I32(0)
    if lane == 0:
        taken = exchange_shared(base + c.LOCK, 1)
    found = ballot(taken) == 0
    fence_block()
    return found


@device_function
def release(base, lane):
    """RELEASE: let the next one have the window."""
    fence_block()
    join_warp()
    if lane == 0:
        store_shared(base + c.LOCK, 0)
