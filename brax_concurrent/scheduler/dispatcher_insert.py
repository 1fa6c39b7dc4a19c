"""How tasks enter the dispatcher's window. See dispatcher.py.

The dispatcher's lanes are the *flights* here: bundles whose tasks enter the window, with what is to enter next. Several
tasks of a flight enter at once, a lane each: what they need of the tables is loaded for all at the same time.
"""

from __future__ import annotations

from brax_concurrent.backends import cuda_dispatch as c
from brax_concurrent.backends.cuda_device import (
    ballot,
    bit,
    device_function,
    fence_block,
    from_lane,
    join_warp,
    load_shared,
    load_table,
    lowest_bit,
    ones,
    store_shared,
    union,
    words,
)
from brax_concurrent.backends.native import WORD
from brax_concurrent.scheduler.dispatcher_work import claim, part_word

_I32, _ = words()
_KINDS, _FLIGHTS = (1 << c.TASK_KIND_BITS) - 1, (1 << c.TASK_FLIGHT_BITS) - 1


@device_function
def insert(base, table, lane, window, task, upstream, older):
    """INSERT: as long as a slot is free, the next tasks of the flights in turn; first new flights where there is room.

    Notes in OVER whether nothing will enter any more.

    Returns:
        The lane's slot, and the mask of the slots that were filled.
    """
    part, bundle = load_shared(base + c.FLIGHT_PART + 4 * lane), load_shared(base + c.FLIGHT_BUNDLE + 4 * lane)
    op, step = load_shared(base + c.FLIGHT_OP + 4 * lane), load_shared(base + c.FLIGHT_STEP + 4 * lane)
    turn, entered = load_shared(base + c.TURN), _I32(0)
    part, bundle, op, step = open_flights(base, table, lane, task, part, bundle, op, step)
    ops, steps, first, record = _I32(1), _I32(0), _I32(0), _I32(0)
    if part > 0:
        ops, steps = part_word(table, part, c.T_OPS), part_word(table, part, c.T_STEPS)
        first = part_word(table, part, c.T_FIRST_OP)
        record = _I32(part << c.PART_SHIFT | part_word(table, part, c.T_RECORD))
    free = ballot((task == c.FREE) & (lane < window))
    opened = ballot((part > 0) & (step < steps))
    while free != 0 and opened != 0:
        later = _I32(opened & ~(bit(turn + 1) - 1))
        turn = lowest_bit(later if later != 0 and turn < c.SLOTS - 1 else opened)
        count, first_op, its_step = from_lane(ops, turn), from_lane(op, turn), from_lane(step, turn)
        room = _I32(ones(free) if opened == bit(turn) else 1)
        left = _I32(count - first_op if its_step + 1 >= from_lane(steps, turn) else count)
        number = _I32(min(room, left))
        rank = _I32(min(ones(free & (bit(lane) - 1)), number - 1))
        own_op = _I32(first_op + rank)
        own_step = _I32(its_step if own_op < count else its_step + 1)
        own_op = _I32(own_op if own_op < count else own_op - count)
        row = table + 4 * (from_lane(first, turn) + c.OP_ROW_WORDS * own_op)
        taken = free
        task, upstream, older, free = enter(row, lane, number, turn, free, own_op, task, upstream, older)
        taken = _I32(taken & ~free)
        entered = _I32(entered | taken)
        its_record, its_bundle = from_lane(record, turn), from_lane(bundle, turn)
        if (taken & bit(lane)) != 0:
            store_shared(base + c.SLOT_TASK + 4 * lane, task)
            store_shared(base + c.SLOT_RECORD + 4 * lane, its_record)
            store_shared(base + c.SLOT_BUNDLE + 4 * lane, its_bundle)
            store_shared(base + c.SLOT_STEP + 4 * lane, own_step)
            store_shared(base + c.SLOT_FUNCTION + 4 * lane, load_table(row + 4 * c.OP_FUNCTION))
        if lane == turn:
            op = _I32(op + number)
            step = _I32(step + 1 if op >= ops else step)
            op = _I32(op - ops if op >= ops else op)
        opened = ballot((part > 0) & (step < steps))
    store_shared(base + c.FLIGHT_PART + 4 * lane, part)
    store_shared(base + c.FLIGHT_BUNDLE + 4 * lane, bundle)
    store_shared(base + c.FLIGHT_OP + 4 * lane, op)
    store_shared(base + c.FLIGHT_STEP + 4 * lane, step)
    if lane == 0:
        store_shared(base + c.TURN, turn)
        store_shared(base + c.OVER, 1 if opened == 0 and load_shared(base + c.ENDED) != 0 else 0)
    fence_block()  # who sees in its mail that it is granted one of them sees what they are
    join_warp()
    return task, upstream, older, entered


@device_function
def enter(row, lane, number, flight, free, op, task, upstream, older):
    """So many tasks of a flight take the first free slots, behind the slots of the flight that they conflict with.

    Args:
        row: of the tables, for the op that the lane's slot gets.
        op: which that is.

    Returns:
        The lane's slot, and the slots that are free then.
    """
    kind, when = load_table(row + 4 * c.OP_KIND), load_table(row + 4 * c.OP_WHEN)
    low, high = load_table(row + 4 * c.OP_CONFLICTS), load_table(row + 4 * c.OP_CONFLICTS + 4)
    newcomer = _I32(op << c.TASK_OP | flight << c.TASK_FLIGHT | kind | (c.GUARDED if when >= 0 else 0))
    taken = ballot(task != c.FREE)
    same = (task != c.FREE) & (((task >> c.TASK_FLIGHT) & _FLIGHTS) == flight)
    own = _I32(task & _KINDS if same else kind)
    while number > 0:
        # Two at a time: their shuffles and ballots overlap.
        one = lowest_bit(free)
        rest = _I32(free & ~bit(one))
        other = lowest_bit(rest if number > 1 else _I32(0))
        its_low, its_high, others_low = from_lane(low, one), from_lane(high, one), from_lane(low, other)
        others_high = from_lane(high, other)
        meets = ((its_low if own < 32 else its_high) & bit(own & 31)) != 0
        others_meet = ((others_low if own < 32 else others_high) & bit(own & 31)) != 0
        first_mask = ballot(same & meets)
        second_mask = ballot((same | (lane == one)) & others_meet)
        if lane == one:
            task, upstream, older, same = newcomer, first_mask, taken, True
        taken = _I32(taken | bit(one))
        if lane == other:
            task, upstream, older, same = newcomer, second_mask, taken, True
        taken = _I32(taken | bit(other))
        free = _I32(rest & ~bit(other))
        number = _I32(number - 2)
    return task, upstream, older, free


@device_function
def open_flights(base, table, lane, task, part, bundle, op, step):
    """Free the flights whose tasks have all retired, and claim bundles for those that are free.

    A flight could be free as soon as its tasks have entered, but then a block would claim what others can run sooner.
    """
    ended = load_shared(base + c.ENDED)
    reachable = lane < load_shared(base + c.CONTROL + WORD * c.C_FLIGHTS)
    claiming = ended == 0
    while claiming:
        steps = _I32(part_word(table, part, c.T_STEPS) if part > 0 else 0)
        used = union(bit((task >> c.TASK_FLIGHT) & _FLIGHTS) if task != c.FREE else _I32(0))
        if step >= steps and (used & bit(lane)) == 0:
            part = _I32(0)
        vacant = ballot((part == 0) & reachable)
        claiming = False
        if vacant != 0:
            busy = _I32(used | ballot(part > 0))
            found, number = claim(base, table, lane, busy)
            if found > 0 and lane == lowest_bit(vacant):
                part, bundle, op, step = _I32(found), _I32(number), _I32(0), _I32(0)
            claiming = load_shared(base + c.ENDED) == 0 and found > 0
    return part, bundle, op, step
