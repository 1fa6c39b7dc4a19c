"""The scheduler hw on CUDA: the window inside a kernel that stays on the GPU for a whole stream.

One launch, a block on every multiprocessor. The warps of a block form *gangs*; a gang is a worker, and a task is a
kernel on a *bundle* of as many neighbouring tiles as a gang has warps. All tasks of a bundle go through the window of
the block that claimed it, so that dependencies never leave a multiprocessor.

No warp does nothing but dispatch: the dispatcher is a role. A gang that has finished a task takes the lock of the
window, retires it, lets newcomers in and is granted the next task itself. Its first warp does that, and its 32 lanes
are the 32 slots: each keeps one slot's state and upstream mask, a newcomer's conflicts are a ballot, and so are the
tasks that are ready. So a task whose upstream was finished last starts at once on the gang that finished it, nothing
has to be handed over, and no registers are kept by a warp that computes nothing.

A worker waits for tasks that run on other workers, which have begun, and for nothing else: so blocks need not be
resident at the same time. docs/protocol has a model of all this which a model checker goes through; the words in
capitals below are its steps.

A lane's share of the window is (state, upstream, task, step, seq) of the slot of its number, and (part, bundle, op,
step) of the *flight* of its number: a bundle whose tasks enter the window, and what is to enter next. Where all lanes
have the same branch to take, `uniform` says so.
"""

from __future__ import annotations

from brax_concurrent.backends import cuda_dispatch as c
from brax_concurrent.backends.cuda_device import (
    ballot,
    barrier,
    block_threads,
    clock,
    device_function,
    exchange_shared,
    fence_block,
    from_lane,
    join_warp,
    least,
    load_shared,
    load_shared_word,
    load_table,
    lowest_bit,
    sleep,
    store_shared,
    thread_index,
    uniform,
    union,
)
from brax_concurrent.backends.native import WORD
from brax_concurrent.scheduler.dispatcher_report import give_up, trace_skipped
from brax_concurrent.scheduler.dispatcher_work import claim, needed, op_word, part_word, run

_LANES = 32
_LAST, _MASK = 0x7FFFFFFF, 0xFFFFFFFF
_KINDS, _FLIGHTS = (1 << c.TASK_KIND_BITS) - 1, (1 << c.TASK_FLIGHT_BITS) - 1
_REST = 100  # nanoseconds between two looks of a gang that has nothing to do


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
    shift = uniform(load_shared(base + c.CONTROL + WORD * c.C_GANG))
    size = 1 << shift
    warp, lane = uniform(thread // _LANES), thread & (_LANES - 1)
    gang = warp >> shift  # a division may call a function, after which the compiler takes all for diverged
    member = warp - gang * size
    mail = base + c.MAIL + c.MAIL_BYTES * gang
    finished, last = -1, -1
    while True:
        if member == 0:
            finished = serve(base, table, gang, lane, finished, last)
        join_gang(gang, size)
        op = uniform(load_shared(mail + c.MAIL_OP))
        if op < 0:
            return 0
        last = op
        run(base, table, mail, gang, member, lane, size)
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
def serve(base, table, gang, lane, finished, last):
    """Be the dispatcher until there is a task for this gang, which goes into its mail; the task's slot.

    Args:
        finished: the slot of the task that the gang has finished, -1: none.
        last: the op that it was.
    """
    waiting_since = 0
    while True:
        acquire(base, lane)
        epoch = load_shared(base + c.EPOCH)
        state, upstream, task, step, seq = load_slots(base, lane)
        part, bundle, flight_op, flight_step = load_flights(base, lane)
        if finished >= 0:  # RETIRE
            upstream &= ~(1 << finished)
            state = c.FREE if lane == finished else state
        picked, ended, retiring = -1, False, True
        while retiring:
            state, upstream, task, step, seq, part, bundle, flight_op, flight_step, ended = insert(
                base, table, lane, (state, upstream, task, step, seq), (part, bundle, flight_op, flight_step)
            )
            picked, retiring = -1, False
            ready = (state == c.PENDING) & (upstream == 0)
            if ballot(ready) != 0:  # ISSUE
                picked = choose(base, ready, task, seq, last)
                chosen, of = from_lane(task, picked), (from_lane(task, picked) >> c.TASK_FLIGHT) & _FLIGHTS
                its_part, its_bundle = from_lane(part, of), from_lane(bundle, of)
                if needed(base, table, its_part, its_bundle, chosen >> c.TASK_OP, lane):
                    state = c.RUNNING if lane == picked else state
                else:
                    trace_skipped(base, its_part, its_bundle, from_lane(step, picked), chosen >> c.TASK_OP, lane)
                    upstream &= ~(1 << picked)
                    state = c.FREE if lane == picked else state
                    picked, retiring = -1, True
        others = ballot((state == c.PENDING) & (upstream == 0))
        aborted = load_shared(base + c.ABORT) != 0
        store_slots(base, lane, (state, upstream, task, step, seq))
        store_flights(base, lane, (part, bundle, flight_op, flight_step))
        if (others != 0 or ended) and lane == 0:
            store_shared(base + c.EPOCH, epoch + 1)
        leaving = ended or aborted
        if picked >= 0 and not aborted:
            chosen = from_lane(task, picked)
            of = (chosen >> c.TASK_FLIGHT) & _FLIGHTS
            post(base, gang, lane, chosen >> c.TASK_OP, (from_lane(part, of), from_lane(bundle, of)),
                 from_lane(step, picked))  # fmt: skip
        elif leaving:
            post(base, gang, lane, -1, (0, 0), 0)
        release(base, lane)
        if picked >= 0 or leaving:
            return picked
        finished = -1
        waiting_since = wait(base, lane, epoch, waiting_since)


@device_function
def insert(base, table, lane, slots, flights):
    """INSERT: as long as a slot is free, the next task of the flights in turn; new flights where there is room.

    Returns:
        The lane's slot and flight, and whether the stream is at its end and nothing is left in the window.
    """
    state, upstream, task, step, seq = slots
    part, bundle, flight_op, flight_step = flights
    ops, steps, ended, inserting = 0, 0, False, True
    if part > 0:
        ops, steps = part_word(table, part, c.T_OPS), part_word(table, part, c.T_STEPS)
    while inserting:
        free = ballot((state == c.FREE) & (lane < load_shared(base + c.CONTROL + WORD * c.C_WINDOW)))
        opened = ballot((part > 0) & (flight_step < steps))
        used = union((1 << ((task >> c.TASK_FLIGHT) & _FLIGHTS)) if state != c.FREE else 0)
        if (part > 0) & (flight_step >= steps) & (((used >> lane) & 1) == 0):
            part = 0
        vacant = ballot((part == 0) & (lane < load_shared(base + c.CONTROL + WORD * c.C_FLIGHTS)))
        if vacant != 0 and load_shared(base + c.ENDED) == 0:
            found, number = claim(base, table, lane, used | opened)
            if found > 0 and lane == lowest_bit(vacant):
                part, bundle, flight_op, flight_step = found, number, 0, 0
                ops, steps = part_word(table, part, c.T_OPS), part_word(table, part, c.T_STEPS)
            if found > 0 or load_shared(base + c.ENDED) != 0:
                continue
        if free == 0 or opened == 0:
            inserting = False
            ended = opened == 0 and used == 0 and load_shared(base + c.ENDED) != 0
            continue
        flight, slot = next_flight(base, opened), lowest_bit(free)
        new_op, new_step = from_lane(flight_op, flight), from_lane(flight_step, flight)
        kind = op_word(table, from_lane(part, flight), new_op, c.OP_KIND)
        mask = conflicts(table, from_lane(part, flight), kind, flight, state, task)
        number = load_shared(base + c.NEXT_SEQ)
        join_warp()
        if lane == slot:
            state, upstream, step, seq = c.PENDING, mask, new_step, number
            task = (new_op << c.TASK_OP) | (flight << c.TASK_FLIGHT) | kind
            store_shared(base + c.NEXT_SEQ, number + 1)
            store_shared(base + c.TURN, flight)
        if lane == flight:
            flight_op += 1
            if flight_op == ops:
                flight_op, flight_step = 0, flight_step + 1
        join_warp()
    return state, upstream, task, step, seq, part, bundle, flight_op, flight_step, ended


@device_function
def next_flight(base, opened):
    """The flight whose turn it is, of those that have tasks left."""
    turn = load_shared(base + c.TURN)
    later = opened & _MASK & ~((2 << turn) - 1)
    return lowest_bit(later if later != 0 else opened)


@device_function
def conflicts(table, part, kind, flight, state, task):
    """The upstream mask of a newcomer: the slots of its flight whose kernels conflict with its own."""
    meets = table + 4 * (part_word(table, part, c.T_CONFLICTS) + 2 * kind)
    own = task & _KINDS
    bits = load_table(meets + 4 * (own >> 5)) >> (own & 31)
    same = ((task >> c.TASK_FLIGHT) & _FLIGHTS) == flight
    return ballot((state != c.FREE) & same & ((bits & 1) != 0)) & _MASK


@device_function
def choose(base, ready, task, seq, last):
    """The slot of the ready task that is to run: by the policy, and of equals the oldest."""
    policy = load_shared(base + c.CONTROL + WORD * c.C_POLICY)
    key = seq
    if policy == c.SAME_KERNEL and last >= 0:
        key = seq if (task >> c.TASK_OP) == last else seq | (1 << 30)
    elif policy == c.DEPTH_FIRST:
        key = seq & 0xFFFFF | (((task >> c.TASK_FLIGHT) & _FLIGHTS) << 20)
    key = key if ready else _LAST
    best = least(key)
    return lowest_bit(ballot(ready & (key == best)))


# --- shared memory ----------------------------------------------------------------------------------------------------


@device_function
def acquire(base, lane):
    """ACQUIRE: take the window's lock."""
    if lane == 0:
        while exchange_shared(base + c.LOCK, 1) != 0:
            pass
    join_warp()
    fence_block()


@device_function
def release(base, lane):
    """RELEASE: let the next one have the window."""
    fence_block()
    join_warp()
    if lane == 0:
        exchange_shared(base + c.LOCK, 0)


@device_function
def wait(base, lane, epoch, since):
    """WAIT until something has become ready; since when the gang has waited in vain, in nanoseconds of the clock."""
    now, entered = clock(), load_shared(base + c.NEXT_SEQ)
    since = now if since == 0 else since
    while load_shared(base + c.EPOCH) == epoch and since != 0:
        sleep(_REST)
        if load_shared(base + c.NEXT_SEQ) != entered:  # others go on
            since, entered = clock(), load_shared(base + c.NEXT_SEQ)
        if clock() - since > load_shared_word(base + c.CONTROL + WORD * c.C_TIMEOUT):
            acquire(base, lane)
            give_up(base, lane)
            release(base, lane)
            since = 0
    return since if load_shared(base + c.EPOCH) == epoch else 0


@device_function
def post(base, gang, lane, op, bundle, step):
    """Tell a gang what it is to do; `bundle` is (the part's number and 1, the bundle's)."""
    mail = base + c.MAIL + c.MAIL_BYTES * gang
    if lane == 0:
        store_shared(mail + c.MAIL_OP, op)
        store_shared(mail + c.MAIL_PART, bundle[0])
        store_shared(mail + c.MAIL_BUNDLE, bundle[1])
        store_shared(mail + c.MAIL_STEP, step)


@device_function
def load_slots(base, lane):
    """(state, upstream, task, step, seq) of the lane's slot."""
    return (
        load_shared(base + c.SLOT_STATE + 4 * lane),
        load_shared(base + c.SLOT_UPSTREAM + 4 * lane) & _MASK,
        load_shared(base + c.SLOT_TASK + 4 * lane),
        load_shared(base + c.SLOT_STEP + 4 * lane),
        load_shared(base + c.SLOT_SEQ + 4 * lane),
    )


@device_function
def store_slots(base, lane, slot):
    """Write what `load_slots` reads."""
    store_shared(base + c.SLOT_STATE + 4 * lane, slot[0])
    store_shared(base + c.SLOT_UPSTREAM + 4 * lane, slot[1])
    store_shared(base + c.SLOT_TASK + 4 * lane, slot[2])
    store_shared(base + c.SLOT_STEP + 4 * lane, slot[3])
    store_shared(base + c.SLOT_SEQ + 4 * lane, slot[4])


@device_function
def load_flights(base, lane):
    """(part's number and 1 or 0, bundle, op, step) of the lane's flight."""
    return (
        load_shared(base + c.FLIGHT_PART + 4 * lane),
        load_shared(base + c.FLIGHT_BUNDLE + 4 * lane),
        load_shared(base + c.FLIGHT_OP + 4 * lane),
        load_shared(base + c.FLIGHT_STEP + 4 * lane),
    )


@device_function
def store_flights(base, lane, flight):
    """Write what `load_flights` reads."""
    store_shared(base + c.FLIGHT_PART + 4 * lane, flight[0])
    store_shared(base + c.FLIGHT_BUNDLE + 4 * lane, flight[1])
    store_shared(base + c.FLIGHT_OP + 4 * lane, flight[2])
    store_shared(base + c.FLIGHT_STEP + 4 * lane, flight[3])
