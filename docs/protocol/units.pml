/* The dispatcher protocol with one window for all, for SPIN: tasks of several units, shared out among the workers.
 *
 * The window lies in global memory, and a worker is a gang of warps of any SM, or a thread. What differs from
 * dispatcher.pml is the running slot. A task has UNITS(task) units. Its slot counts
 *
 *   next_unit    units that somebody has taken. Workers add to it without the lock
 *   done_units   units that are finished and published. Workers add to it without the lock
 *
 * so that several workers share one running slot, and the lock is taken once a task and worker instead of once a unit.
 * The worker whose unit makes done_units == units, and no other, retires the slot under the lock.
 *
 * The counters belong to a slot, and slots are used again. A worker that lost the processor between looking at a slot
 * and adding to its counters could take a unit of the slot's next tenant. Two rules keep that from happening, and
 * SPIN shows that they do:
 *
 *   1. A worker joins a slot, and takes its first unit there, under the lock.
 *   2. It takes its next unit BEFORE it reports the one that it has just run.
 *
 * Hence whoever touches the counters holds a unit that is not reported, and a slot with such a unit does not retire.
 *
 * What SPIN shows, for every order in which the workers can move and every policy of choosing among slots:
 *
 *   - each unit of each task runs exactly once                                        (`begin`, `init`)
 *   - it runs after all units of all tasks that its task conflicts with have finished (`begin`)
 *   - it reads what they wrote, and nobody overwrites that while it runs              (`look`, memory.pml)
 *   - each task retires exactly once                                                  (RETIRE)
 *   - at the end memory holds what program order leaves there                         (`init`)
 *   - nobody waits for ever, as in dispatcher.pml                                     (`terminates`)
 *
 * A field has PARTS cells. Unit u of n writes the cells u, u + n, ... of what its task writes, and reads all cells
 * of what it reads.
 */

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef PARTS
#define PARTS 2
#endif

#include "graphs.pml"

/* One tile, so a task is a kernel. The last kernel has one unit: not every task is shared out. */
#define TASKS KINDS
#define UNITS(k) (PARTS - ((k) == KINDS - 1) * (PARTS - 1))
#define WARPS WORKERS
#define CELLS (FIELDS * PARTS)
#define CELL(field, part) ((field) * PARTS + (part))

#include "memory.pml"

#define NONE 255
#define ALL_SLOTS (BIT(SLOTS) - 1)

bit lock;
byte epoch;              /* changes when there may be something to do for those who wait */
byte entered;            /* the stream: the next task to enter */
byte busy;               /* masks of slots */
byte running;
byte kind[SLOTS];
byte upstream[SLOTS];    /* mask of the slots that a slot waits for */
byte next_unit[SLOTS];
byte done_units[SLOTS];

/* What the checks remember. No worker looks at these. */
byte started[TASKS];     /* masks of units */
byte finished[TASKS];
byte retired;            /* mask of tasks */
byte left;               /* workers that have left */

hidden byte k;
hidden byte f;
hidden byte p;
hidden byte s;
hidden byte right;
hidden byte place;
hidden int cells;

/* --- the checks ---------------------------------------------------------------------------- */

/* The version of a field that program order gives to task `id`; for TASKS, the one at the end. */
inline version_for(id, field) {
  right = 0;
  k = 0;
  do
  :: k < (id) ->
     if
     :: WRITES(k) & BIT(field) -> right = k + 1
     :: else
     fi;
     k++
  :: else -> break
  od
}

/* Worker v reads all cells of what task `id` reads and must find what program order says. */
inline look(v, id) {
  f = 0;
  do
  :: f < FIELDS ->
     if
     :: READS(id) & BIT(f) ->
        version_for(id, f);
        p = 0;
        do
        :: p < PARTS -> load(v, CELL(f, p), right); p++
        :: else -> break
        od
     :: else
     fi;
     f++
  :: else -> break
  od;
  f = 0
}

/* A unit is about to run: nobody has run it before, and all units of all that its task conflicts with are over. */
inline begin(id, unit) {
  assert(!(started[id] & BIT(unit)));                          /* a unit runs twice */
  started[id] = started[id] | BIT(unit);
  k = 0;
  do
  :: k < id ->
     if
     :: CONFLICT(k, id) ->
        assert(finished[k] == BIT(UNITS(k)) - 1)               /* a task runs before its upstream has finished */
     :: else
     fi;
     k++
  :: else -> break
  od;
  k = 0
}

/* The cells that a unit of task `id` writes. */
inline written_by(id, unit) {
  cells = 0;
  f = 0;
  do
  :: f < FIELDS ->
     p = unit;
     do
     :: p < PARTS ->
        if
        :: WRITES(id) & BIT(f) -> cells = cells | BIT(CELL(f, p))
        :: else
        fi;
        p = p + UNITS(id)
     :: else -> break
     od;
     f++
  :: else -> break
  od
}

/* --- the steps of the protocol ------------------------------------------------------------- */

/* A slot is ready when it holds a task that does not run and waits for nobody; it is open while it runs and has units
 * that nobody has taken. Either is something to do. */
#define READY(i) ((busy & ~running & BIT(i)) && upstream[i] == 0)
#define OPEN(i) ((running & BIT(i)) && next_unit[i] < UNITS(kind[i]))
#define WORK_IN(i) (READY(i) || OPEN(i))
#if SLOTS == 1
#define ANY_WORK WORK_IN(0)
#elif SLOTS == 2
#define ANY_WORK (WORK_IN(0) || WORK_IN(1))
#else
#define ANY_WORK (WORK_IN(0) || WORK_IN(1) || WORK_IN(2))
#endif

/* ACQUIRE: the lock, then the fence that drops old copies. */
#ifdef SPINNING
#define TAKE do :: atomic { lock == 0 -> lock = 1 }; break :: else -> skip od; skip
#define AWAIT(condition) do :: (condition) -> break :: else -> skip od; skip
#else
#define TAKE atomic { lock == 0 -> lock = 1 }
#define AWAIT(condition) (condition)
#endif
/* (A loop may not end right before a d_step, hence the skip.) */

/* RETIRE: free a slot and clear its bit from every slot's upstream mask. */
inline retire(i) {
  printf("worker %d retires task %d from slot %d\n", me, kind[i], i);
  assert((busy & running & BIT(i)) && !(retired & BIT(kind[i])));   /* a task retires twice */
  assert(finished[kind[i]] == BIT(UNITS(kind[i])) - 1);             /* a task retires before all its units are over */
  retired = retired | BIT(kind[i]);
  busy = busy & ~BIT(i);
  running = running & ~BIT(i);
  s = 0;
  do
  :: s < SLOTS ->
     if
     :: upstream[s] == BIT(i) -> became = 1
     :: else
     fi;
     upstream[s] = upstream[s] & ~BIT(i);
     s++
  :: else -> break
  od;
  s = 0
}

/* INSERT one task; its upstream mask is a ballot over the busy slots, and its counters start anew. */
#define MAY_INSERT (busy != ALL_SLOTS && entered < TASKS)
inline insert() {
  place = NONE;
  right = 0;                                        /* the newcomer's upstream mask */
  s = 0;
  do
  :: s < SLOTS ->
     if
     :: !(busy & BIT(s)) && place == NONE -> place = s
     :: (busy & BIT(s)) && CONFLICT(kind[s], entered) -> right = right | BIT(s)
     :: else
     fi;
     s++
  :: else -> break
  od;
  busy = busy | BIT(place);
  kind[place] = entered;
  upstream[place] = right;
  printf("worker %d lets task %d into slot %d, behind slots 0x%x\n", me, entered, place, right);
  next_unit[place] = 0;
  done_units[place] = 0;
  entered++;
  if
  :: right == 0 -> became = 1
  :: else
  fi
}

/* One unit: it reads, and later, if what it read is still there, it writes. */
inline work(v, id, unit) {
  d_step { begin(id, unit); look(v, id) };
  atomic {
    d_step {
      look(v, id);
      written_by(id, unit);
      store(v, cells, (id) + 1);
      cells = 0;
      finished[id] = finished[id] | BIT(unit)
    };
    if
    :: printf("worker %d has run unit %d of task %d; the fence will show it\n", v, unit, id)
    :: d_step { drain(v); printf("worker %d has run unit %d of task %d; everybody sees it\n", v, unit, id) }
    fi
  }
}

/* --- the processes -------------------------------------------------------------------------- */

proctype worker(byte me) {
  byte slot = NONE;      /* where it works, and then what it has to retire */
  byte unit;             /* the unit that it holds */
  byte following;        /* the one that it has taken in advance */
  byte now;              /* the kernel that it runs: it has looked that up when it joined the slot */
  byte seen;             /* the epoch when it last had the lock */
  bit became;            /* something became ready while it had the lock */
  bit over;              /* nothing runs and nothing will enter */
  bit last;              /* its unit was the last to be reported */

  do
  :: /* ACQUIRE */
     TAKE;
#ifndef BUG_NO_ACQUIRE
     d_step { forget(me) };
#endif

     /* RETIRE */
     if
     :: last -> d_step { retire(slot); last = 0 }
     :: else
     fi;
     slot = NONE;

     /* INSERT */
     do
     :: MAY_INSERT -> d_step { insert() }
     :: else -> break
     od;

     do
     :: /* ISSUE a ready slot, or join an open one. Any will do, so what holds here holds for every policy. */
        if
        :: WORK_IN(0) -> slot = 0
#if SLOTS > 1
        :: WORK_IN(1) -> slot = 1
#endif
#if SLOTS > 2
        :: WORK_IN(2) -> slot = 2
#endif
        :: else -> slot = NONE; break
        fi;
#ifdef BUG_JOIN
        /* Breaks rule 1: joins now and takes its first unit later, without the lock. */
        d_step { running = running | BIT(slot); now = kind[slot]; unit = NONE };
        break
#else
        /* Others add to next_unit all the while: between looking and adding, the last unit may have gone. */
        d_step {
          running = running | BIT(slot);
          now = kind[slot];
          unit = next_unit[slot];                   /* an atomic add */
          next_unit[slot]++;
          printf("worker %d takes unit %d of task %d in slot %d\n", me, unit, now, slot)
        };
        if
        :: unit < UNITS(now) -> break
        :: else -> skip
        fi
#endif
     od;

     /* RELEASE. Those who wait must hear of what became ready and is left, and of the end. */
     over = slot == NONE && entered == TASKS && busy == 0;
     d_step {
       if
       :: became && ANY_WORK -> epoch++
#ifndef BUG_END
       :: over -> epoch++
#endif
       :: else
       fi;
       became = 0;
       seen = epoch;
       printf("worker %d releases the lock at epoch %d\n", me, epoch)
     };
     lock = 0;
#ifdef BUG_EPOCH
     seen = epoch;
#endif

     if
     :: slot != NONE ->
        seen = 0;
#ifdef BUG_JOIN
        d_step { unit = next_unit[slot]; next_unit[slot]++ };
#endif
        do
        :: unit < UNITS(now) ->
           work(me, now, unit);
#if !defined(BUG_NO_FENCE) && !defined(BUG_LATE_FENCE)
           /* PUBLISH: before the unit is reported, because whoever reports the last one retires for all. */
           d_step { drain(me) };
#endif
#ifndef BUG_REPORT
           /* Rule 2: an atomic add. */
           d_step { following = next_unit[slot]; next_unit[slot]++ };
#endif
#ifdef BUG_UNITS
           /* Adds, and then looks: two workers can both find that all units are done. */
           done_units[slot]++;
           last = done_units[slot] == UNITS(now);
#else
           /* An atomic add, which says what the counter was: one worker only finds that it was the last. */
           d_step { done_units[slot]++; last = done_units[slot] == UNITS(now) };
#endif
#ifdef BUG_LATE_FENCE
           d_step { drain(me) };
#endif
#ifdef BUG_REPORT
           /* Breaks rule 2: the slot may have another tenant by now. */
           if
           :: last -> following = NONE
           :: else -> d_step { following = next_unit[slot]; next_unit[slot]++ }
           fi;
#endif
           d_step {
             unit = following;
             following = 0;
             if
             :: unit < UNITS(now) ->
                printf("worker %d takes unit %d of slot %d, where task %d is now\n", me, unit, slot, kind[slot])
             :: else
             fi
           }
        :: else -> break
        od;
        unit = 0;
        now = 0
     :: else ->
        if
        :: over -> break
        :: else -> AWAIT(epoch != seen)             /* WAIT */
        fi
     fi
  od;
  atomic { printf("worker %d leaves\n", me); left++ }
}

ltl terminates { <> (left == WORKERS) }

init {
  byte i;
  atomic {
    do
    :: i < WORKERS -> run worker(i); i++
    :: else -> break
    od;
    i = 0
  };
  left == WORKERS;
  d_step {
    /* The end of a launch, and the join of threads, make everything visible. */
    i = 0;
    do
    :: i < WARPS -> drain(i); i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < TASKS ->
       assert(started[i] == BIT(UNITS(i)) - 1 && finished[i] == started[i]);   /* a unit is lost */
       i++
    :: else -> break
    od;
    assert(retired == BIT(TASKS) - 1);                                         /* a task never retires */
    f = 0;
    do
    :: f < FIELDS ->
       version_for(TASKS, f);
       p = 0;
       do
       :: p < PARTS ->
          assert(memory[CELL(f, p)] == right);                                 /* memory ends up wrong */
          p++
       :: else -> break
       od;
       f++
    :: else -> break
    od
  }
}
