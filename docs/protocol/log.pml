/* The dispatcher of task streams, for SPIN: one window for all, that one warp alone looks after, and a log.
 *
 * A task has UNITS(task) chunks. The dispatcher keeps the window to itself. It shares with the workers
 *
 *   log      a word for each chunk: which task, which chunk, which slot, whether it is to wait. 0: not written yet
 *   ticket   how many tickets were drawn. Ticket n is place n of the log
 *   done     for each slot the chunks that were finished there, ever
 *   record   for each slot whose task was issued early: what the counters come to for which its chunks wait
 *
 * A worker draws a ticket and waits for its place of the log. The dispatcher compares done[slot] with the sum of all
 * chunks that it has issued from the slot: when they are equal, its task is finished. So nothing is used twice or set
 * back. At the end it writes a last word for each worker.
 *
 * A task may be issued early, as soon as all that it waits for was issued. Whether it is, is open here: so the code may
 * bound how many chunks wait in any way, or not at all.
 *
 * What SPIN shows, for every order in which dispatcher and workers can move and in which ready tasks are issued:
 *
 *   - each chunk of each task runs exactly once, or the task is skipped                 (`begin`, `init`)
 *   - it runs after all chunks of all tasks that its task conflicts with have finished  (`begin`)
 *   - it reads what they wrote, and nobody overwrites that while it runs                (`look`, memory.pml)
 *   - predicates are looked at when those that may write them have finished             (`ask`)
 *   - at the end memory holds what program order leaves there                           (`init`)
 *   - nobody waits for ever                                                             (`terminates`)
 *
 * A worker is one warp here: that a block's threads meet before one of them counts is for the code's own tests. The
 * dispatcher reads counters and predicates where nobody keeps copies, and so needs no fence in this model; the code has
 * those that the memory model of CUDA asks for.
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

/* The last kernel has one chunk: not every task is shared out. */
#define TASKS KINDS
#define UNITS(k) (PARTS - ((k) == KINDS - 1) * (PARTS - 1))
#define CHUNKS (PARTS * (TASKS - 1) + 1)
#define WARPS WORKERS
#define CELLS (FIELDS * PARTS)
#define CELL(field, part) ((field) * PARTS + (part))

#include "memory.pml"

#define NONE 255
#define END 254
#define WAITS 128      /* a bit of a word */
#define WORD(slot, id, unit) (1 + ((slot) * TASKS + (id)) * PARTS + (unit))
#define UNIT_OF(word) (((word) - 1) % PARTS)
#define TASK_OF(word) ((((word) - 1) / PARTS) % TASKS)
#define SLOT_OF(word) (((word) - 1) / PARTS / TASKS)

byte log[CHUNKS + WORKERS];
byte ticket;
byte done[SLOTS];
byte record[SLOTS * SLOTS];

/* What the checks remember. Neither dispatcher nor workers look at these. */
byte started[TASKS];     /* masks of chunks */
byte finished[TASKS];
byte retired;            /* masks of tasks */
byte skipped;
byte left;               /* workers that have left */

hidden byte k;
hidden byte f;
hidden byte p;
hidden byte s;
hidden byte right;
hidden byte place;
hidden byte writers;
hidden int cells;

/* --- the checks ---------------------------------------------------------------------------- */

/* The version of a field that program order gives to task `id`; for TASKS, the one at the end. */
inline version_for(id, field) {
  right = 0;
  k = 0;
  do
  :: k < (id) ->
     if
     :: (WRITES(k) & BIT(field)) && !(skipped & BIT(k)) -> right = k + 1
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

/* A chunk is about to run: nobody has run it before, and all that its task conflicts with is over. */
inline begin(id, unit) {
  assert(!(started[id] & BIT(unit)));                          /* a chunk runs twice */
  started[id] = started[id] | BIT(unit);
  k = 0;
  do
  :: k < id ->
     if
     :: CONFLICT(k, id) && !(skipped & BIT(k)) ->
        assert(finished[k] == BIT(UNITS(k)) - 1)               /* a task runs before its upstream has finished */
     :: else
     fi;
     k++
  :: else -> break
  od;
  k = 0
}

/* The dispatcher reads the predicate of task `id`. */
inline ask(id) {
  f = 0;
  do
  :: f < FIELDS ->
     if
     :: PREDICATE(id) & BIT(f) ->
        version_for(id, f);
        p = 0;
        do
        :: p < PARTS ->
           assert(memory[CELL(f, p)] == right);                /* a predicate is read before it is known */
           p++
        :: else -> break
        od
     :: else
     fi;
     f++
  :: else -> break
  od;
  f = 0
}

/* The cells that a chunk of task `id` writes. */
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

/* --- the workers --------------------------------------------------------------------------- */

#ifdef SPINNING
#define AWAIT(condition) do :: (condition) -> break :: else -> skip od; skip
#else
#define AWAIT(condition) (condition)
#endif
/* (A loop may not end right before a d_step, hence the skip.) */

/* One chunk: it reads, and later, if what it read is still there, it writes. */
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
    :: printf("worker %d has run chunk %d of task %d; the fence will show it\n", v, unit, id)
    :: d_step { drain(v); printf("worker %d has run chunk %d of task %d; everybody sees it\n", v, unit, id) }
    fi
  }
}

inline draw() {
#ifdef BUG_TICKET
  /* Looks, and then adds: two workers can draw the same. */
  mine = ticket;
  ticket = mine + 1
#else
  d_step { mine = ticket; ticket++; printf("worker %d draws ticket %d\n", me, mine) }
#endif
}

#define THERE(i, s) (done[s] >= record[(i) * SLOTS + (s)])
#if SLOTS == 1
#define OPERANDS(i) THERE(i, 0)
#elif SLOTS == 2
#define OPERANDS(i) (THERE(i, 0) && THERE(i, 1))
#else
#define OPERANDS(i) (THERE(i, 0) && THERE(i, 1) && THERE(i, 2))
#endif

proctype worker(byte me) {
  byte mine;             /* its ticket */
  byte word;

  draw();
  do
  :: AWAIT(log[mine] != 0);                             /* WAIT */
     word = log[mine];
#ifndef BUG_NO_ACQUIRE
     d_step { forget(me) };                             /* ACQUIRE */
#endif
     if
     :: word == END -> break
     :: word != END && (word & WAITS) ->
        d_step { word = word - WAITS; touch(me) };      /* meanwhile others that share the L1 read all there is */
#ifndef BUG_NO_WAIT
        AWAIT(OPERANDS(SLOT_OF(word)));
#endif
#ifndef BUG_OPERANDS
        d_step { forget(me) }                           /* ACQUIRE: what a counter says is over can be seen */
#endif
     :: else
     fi;
     work(me, TASK_OF(word), UNIT_OF(word));
     draw();
#if !defined(BUG_NO_FENCE) && !defined(BUG_LATE_FENCE)
     d_step { drain(me) };                              /* PUBLISH: before the chunk is counted */
#endif
     d_step { done[SLOT_OF(word)]++; word = 0 };        /* an atomic add */
#ifdef BUG_LATE_FENCE
     d_step { drain(me) };
#endif
  od;
  atomic { printf("worker %d leaves\n", me); left++ }
}

/* --- the dispatcher ------------------------------------------------------------------------ */

#define FINISHED(i) ((running & BIT(i)) && done[i] == target[i])
#ifdef BUG_PREDICATE
#define KNOWN(i) true
#else
#define KNOWN(i) (flags[i] == 0)
#endif
#define ASKABLE(i) ((busy & ~running & BIT(i)) && PREDICATE(kind[i]) && !(asked & BIT(i)) && KNOWN(i))
#ifdef BUG_EARLY
#define MAY_ISSUE(i) (busy & ~running & BIT(i))
#else
#define MAY_ISSUE(i) ((busy & ~running & BIT(i)) && (upstream[i] & ~running) == 0)
#endif
#define ISSUABLE(i) (MAY_ISSUE(i) && (!PREDICATE(kind[i]) || (asked & BIT(i))))
#if SLOTS == 1
#define ANY(what) what(0)
#elif SLOTS == 2
#define ANY(what) (what(0) || what(1))
#else
#define ANY(what) (what(0) || what(1) || what(2))
#endif
#define ALL_SLOTS (BIT(SLOTS) - 1)
#define MAY_INSERT (busy != ALL_SLOTS && entered < TASKS)

/* One of the slots of which something holds: any, so what holds here holds for every policy. */
#if SLOTS == 1
#define CHOOSE(what) if :: what(0) -> slot = 0 fi
#elif SLOTS == 2
#define CHOOSE(what) if :: what(0) -> slot = 0 :: what(1) -> slot = 1 fi
#else
#define CHOOSE(what) if :: what(0) -> slot = 0 :: what(1) -> slot = 1 :: what(2) -> slot = 2 fi
#endif

/* RETIRE: free a slot and clear its bit from every slot's upstream mask. */
inline retire(i) {
  assert(!(retired & BIT(kind[i])));                           /* a task retires twice */
  retired = retired | BIT(kind[i]);
  busy = busy & ~BIT(i);
  running = running & ~BIT(i);
  asked = asked & ~BIT(i);
  s = 0;
  do
  :: s < SLOTS -> upstream[s] = upstream[s] & ~BIT(i); flags[s] = flags[s] & ~BIT(i); s++
  :: else -> break
  od;
  s = 0
}

/* Write down what the chunks of a slot's task wait for. */
inline write_record(i) {
  s = 0;
  do
  :: s < SLOTS ->
     if
     :: upstream[i] & BIT(s) -> record[(i) * SLOTS + s] = target[s]
     :: else -> record[(i) * SLOTS + s] = 0
     fi;
     s++
  :: else -> break
  od;
  s = 0
}

/* INSERT one task; its upstream mask is a ballot over the busy slots. */
inline insert() {
  place = NONE;
  right = 0;                                            /* the newcomer's upstream mask */
  writers = 0;                                          /* and those that may write its predicate */
  s = 0;
  do
  :: s < SLOTS ->
     if
     :: !(busy & BIT(s)) && place == NONE -> place = s
#ifdef BUG_RUNNING
     :: (busy & ~running & BIT(s)) && CONFLICT(kind[s], entered) -> right = right | BIT(s)
#else
     :: (busy & BIT(s)) && CONFLICT(kind[s], entered) -> right = right | BIT(s)
#endif
     :: else
     fi;
     if
     :: (right & BIT(s)) && (WRITES(kind[s]) & PREDICATE(entered)) -> writers = writers | BIT(s)
     :: else
     fi;
     s++
  :: else -> break
  od;
  busy = busy | BIT(place);
  kind[place] = entered;
  upstream[place] = right;
  flags[place] = writers;
  printf("worker %d, the dispatcher, lets task %d into slot %d, behind slots 0x%x\n", WORKERS, entered, place, right);
  entered++
}

active proctype dispatcher() {
  byte busy;             /* masks of slots */
  byte running;
  byte asked;            /* slots whose predicate was found to hold */
  byte kind[SLOTS];
  byte upstream[SLOTS];  /* mask of the slots that a slot waits for */
  byte flags[SLOTS];     /* those of them that may write its predicate */
  byte target[SLOTS];    /* what done comes to when the slot's task is finished */
  byte entered;          /* the stream: the next task to enter */
  byte issued;           /* words of the log */
  byte slot;
  byte unit;
  byte mark;             /* on the words of what is issued early */

  do
  :: ANY(FINISHED) ->
     CHOOSE(FINISHED);
     d_step {
       printf("worker %d, the dispatcher, retires task %d from slot %d\n", WORKERS, kind[slot], slot);
       assert(finished[kind[slot]] == BIT(UNITS(kind[slot])) - 1);   /* a task retires before all its chunks are over */
       retire(slot);
       slot = 0
     }
  :: ANY(ISSUABLE) ->                                   /* ISSUE */
     CHOOSE(ISSUABLE);
     d_step {
       if
       :: upstream[slot] != 0 ->                        /* EARLY */
          mark = WAITS;
#ifndef BUG_LATE_RECORD
          write_record(slot)
#endif
       :: else -> mark = 0
       fi;
       running = running | BIT(slot);
#ifdef BUG_FIRST
       target[slot] = target[slot] + 1;
#else
       target[slot] = target[slot] + UNITS(kind[slot]);
#endif
       unit = 0
     };
     do
     :: unit < UNITS(kind[slot]) ->
        d_step {
          log[issued] = WORD(slot, kind[slot], unit) + mark;
          printf("worker %d, the dispatcher, issues chunk %d of task %d as word %d, to wait: %d\n", WORKERS, unit, kind[slot], issued, mark != 0);
          issued++;
          unit++
        }
     :: else -> break
     od;
#ifdef BUG_LATE_RECORD
     skip;
     d_step {
       if
       :: mark == WAITS -> write_record(slot)
       :: else
       fi
     };
#endif
     unit = 0;
     mark = 0;
     slot = 0
  :: ANY(ASKABLE) ->                                    /* PREDICATE */
     CHOOSE(ASKABLE);
     d_step { ask(kind[slot]) };
     if
     :: asked = asked | BIT(slot)
     :: d_step {
          printf("worker %d, the dispatcher, skips task %d in slot %d\n", WORKERS, kind[slot], slot);
          skipped = skipped | BIT(kind[slot]);
#ifdef BUG_SKIP
          /* Frees the slot, but those that wait for it go on waiting. */
          retired = retired | BIT(kind[slot]);
          busy = busy & ~BIT(slot)
#else
          retire(slot)
#endif
        }
     fi;
     slot = 0
  :: MAY_INSERT -> d_step { insert() }
  :: entered == TASKS && busy == 0 -> break
#ifdef SPINNING
  :: else -> skip
#endif
  od;
  do
#ifdef BUG_END
  :: unit < WORKERS - 1 ->
#else
  :: unit < WORKERS ->                                  /* END: a word for each worker */
#endif
     d_step { log[issued] = END; issued++; unit++ }
  :: else -> break
  od
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
    i = 0;                                              /* the end of the launch makes everything visible */
    do
    :: i < WARPS -> drain(i); i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < TASKS ->
       assert((skipped & BIT(i)) || finished[i] == BIT(UNITS(i)) - 1);   /* a chunk is lost */
       assert(!(skipped & BIT(i)) || started[i] == 0);                   /* a task runs that was skipped */
       i++
    :: else -> break
    od;
    assert(retired == BIT(TASKS) - 1);                                   /* a task never retires */
    f = 0;
    do
    :: f < FIELDS ->
       version_for(TASKS, f);
       p = 0;
       do
       :: p < PARTS ->
          assert(memory[CELL(f, p)] == right);                           /* memory ends up wrong */
          p++
       :: else -> break
       od;
       f++
    :: else -> break
    od
  }
}
