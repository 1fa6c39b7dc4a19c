/* The dispatcher protocol with a window per SM, for SPIN.
 *
 * There is no dispatcher that only dispatches. Whoever has finished a task asks for another in its mail and tries the
 * window's lock. Who has the lock serves all that ask: it retires what they have finished, lets newcomers into the
 * window or not, and issues ready tasks to all that have none. In this file
 *
 *   a window   has SLOTS slots. It is shared memory of one SM, and there are WINDOWS of them
 *   a worker   is a gang of GANG warps. Its first warp is process `worker`, the others are processes `member`. Each
 *              window has WORKERS of them
 *   a tile     has tasks of KINDS kernels in program order (graphs.pml). Tiles share no memory. Windows claim them in
 *              groups of GROUP from a counter in global memory, and a tile's tasks enter the window that claimed it
 *   a field    of a tile consists of GANG cells. Each warp of a gang writes its cell of what the task writes, and reads
 *              all cells of what it reads, so that a warp depends on all warps of the gang before
 *
 * What SPIN shows, by trying every order in which the warps can move, every policy of choosing among ready tasks and
 * every outcome of the predicates (`begin` and `look` are in dispatcher_checks.pml):
 *
 *   - a task runs exactly once, or is skipped exactly once if its predicate is 0    (`started`, `skipped`, `init`)
 *   - it runs after all tasks that it conflicts with have finished                  (`begin`)
 *   - it reads what they wrote, and nobody overwrites that while it runs            (`look`, memory.pml)
 *   - at the end memory holds what program order leaves there                       (`init`)
 *   - nobody waits for ever. Two models say so: in one waiting blocks, and SPIN finds no deadlock; in the other
 *     (SPINNING) waiting is a loop, and SPIN finds no fair run without an end       (`terminates`)
 *
 * Lines of `printf` cost nothing while SPIN searches. They tell the story when it replays what it found.
 *
 * A mistake can be planted with -DBUG_...; README.md lists them. If you doubt the model, see what SPIN finds then.
 */

#ifndef WINDOWS
#define WINDOWS 1
#endif
#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef GANG
#define GANG 1
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef TILES
#define TILES 1
#endif
#ifndef GROUP
#define GROUP 1
#endif

#include "graphs.pml"

#define TASKS (TILES * KINDS)
#define GANGS (WINDOWS * WORKERS)
#define WARPS (GANGS * GANG)
#define CELLS (TILES * FIELDS * GANG)
#define GROUPS (TILES / GROUP)
#define CELL(tile, field, part) (((tile) * FIELDS + (field)) * GANG + (part))

#include "memory.pml"

#define NONE 255
#define ALL_SLOTS (BIT(SLOTS) - 1)

/* A task is numbered by its tile and its place in program order. */
#define TILE_OF(id) ((id) / KINDS)
#define KIND_OF(id) ((id) % KINDS)

typedef Window {
  bit lock;
  byte group;            /* the stream: the group that is entering, */
  byte entered;          /* how many of its tasks have entered, */
  bit at_end;            /* and whether there is no further group */
  byte busy;             /* masks of slots */
  byte running;
  byte task[SLOTS];
  byte upstream[SLOTS]   /* mask of the slots that a slot waits for */
}

Window window[WINDOWS];
byte claimed;            /* global memory: the next group of tiles */

/* What a worker is told, and what it asks: the slot of its task, or one of these. ASKED(i): it asks, and slot i is
 * finished. Nobody but the worker changes its mail while it runs, nobody but who has the lock while it has no task. */
byte mail[GANGS];
#define LEAVE 100
#define WAITS 101
#define ASKS 102
#define ASKED(i) (ASKS + 1 + (i))

/* A gang's barrier: the leader announces a task and whom it waits for; each member takes itself off when it is
 * through. */
byte job[GANGS];
byte absent[GANGS];

/* What the checks remember. No worker looks at these. */
int allowed;             /* mask of tasks: the predicate's value, chosen at the start; 1 where there is none */
int started;
int finished;
int skipped;
byte left;               /* workers that have left */

hidden byte k;
hidden byte f;
hidden byte p;
hidden byte s;
hidden byte right;

#include "dispatcher_checks.pml"

/* --- the steps of the protocol ------------------------------------------------------------- */

/* A slot is ready when it holds a task that does not run and waits for nobody. */
#define READY(w, i) ((window[w].busy & ~window[w].running & BIT(i)) && window[w].upstream[i] == 0)
#if SLOTS == 1
#define ANY_READY(w) READY(w, 0)
#elif SLOTS == 2
#define ANY_READY(w) (READY(w, 0) || READY(w, 1))
#elif SLOTS == 3
#define ANY_READY(w) (READY(w, 0) || READY(w, 1) || READY(w, 2))
#else
#define ANY_READY(w) (READY(w, 0) || READY(w, 1) || READY(w, 2) || READY(w, 3))
#endif

/* ACQUIRE: the lock, if nobody has it, then the fence that drops old copies, for the whole gang. Its other warps wait at the barrier. */
#ifdef SPINNING
#define AWAIT(condition) do :: (condition) -> break :: else -> skip od; skip
#else
#define AWAIT(condition) (condition)
#endif
/* (A loop may not end right before a d_step, hence the skip.) */

inline for_gang_forget(g) {
  p = 0;
  do
  :: p < GANG -> forget((g) * GANG + p); p++
  :: else -> break
  od;
  p = 0
}

/* PUBLISH: the fence before the lock is taken again. Whoever sees the task retired sees what it wrote. */
inline for_gang_publish(g) {
  p = 0;
  do
  :: p < GANG -> drain((g) * GANG + p); p++
  :: else -> break
  od;
  p = 0
}

/* RETIRE: free a slot and clear its bit from every slot's upstream mask. Each lane does so for its slot. */
inline retire(w, i) {
  printf("worker %d retires task %d from slot %d\n", g, window[w].task[i], i);
  window[w].busy = window[w].busy & ~BIT(i);
  window[w].running = window[w].running & ~BIT(i);
  window[w].task[i] = 0;
  s = 0;
  do
  :: s < SLOTS ->
     window[w].upstream[s] = window[w].upstream[s] & ~BIT(i);
     s++
  :: else -> break
  od;
  s = 0
}

/* INSERT: a pass lets in all tasks that there is room for, at any time, or none; into an empty window somebody must.
 * This is one of them, or the claim of a group of tiles if all tasks of the last have entered. The upstream mask is a
 * ballot over the busy slots. A group's tasks enter kernel by kernel, so that neighbours are of different tiles. */
#define MAY_INSERT(w) (window[w].busy != ALL_SLOTS && !window[w].at_end)

#ifdef BUG_RUNNING
#define UNFINISHED(w) (window[w].busy & ~window[w].running)   /* forgets those that run */
#else
#define UNFINISHED(w) window[w].busy
#endif

hidden byte newcomer;
hidden byte place;
inline insert(w) {
  if
  :: window[w].entered == GROUP * KINDS ->
     window[w].group = claimed;                     /* an atomic add */
     claimed++;
     printf("worker %d claims group %d\n", g, window[w].group);
     if
     :: window[w].group < GROUPS -> window[w].entered = 0
     :: else -> window[w].at_end = 1; window[w].group = 0
     fi
  :: else ->
     newcomer = (window[w].group * GROUP + window[w].entered % GROUP) * KINDS + window[w].entered / GROUP;
     window[w].entered++;
     place = NONE;
     right = 0;                                     /* the newcomer's upstream mask */
     s = 0;
     do
     :: s < SLOTS ->
        if
        :: !(window[w].busy & BIT(s)) && place == NONE -> place = s
        :: (UNFINISHED(w) & BIT(s)) && TILE_OF(window[w].task[s]) == TILE_OF(newcomer) &&
           CONFLICT(KIND_OF(window[w].task[s]), KIND_OF(newcomer)) -> right = right | BIT(s)
        :: else
        fi;
        s++
     :: else -> break
     od;
     window[w].busy = window[w].busy | BIT(place);
     window[w].task[place] = newcomer;
     window[w].upstream[place] = right;
     printf("worker %d lets task %d into slot %d, behind slots 0x%x\n", g, newcomer, place, right)
  fi
}

/* One warp's part of a task: it reads, and later, if what it read is still there, it writes. */
inline work(v, id, part) {
  d_step { look(v, id, READS(KIND_OF(id))) };
  atomic {
    d_step {
      look(v, id, READS(KIND_OF(id)));
      written_by(id, part);
      store(v, cells, (id) + 1);
      cells = 0
    };
    if
    :: printf("warp %d has run task %d; the fence will show it\n", v, id)
    :: d_step { drain(v); printf("warp %d has run task %d; everybody sees it\n", v, id) }
    fi
  }
}

/* --- the processes -------------------------------------------------------------------------- */

/* The workers of a window. */
#define FIRST(w) ((w) * WORKERS)
#define BEYOND(w) (((w) + 1) * WORKERS)

/* Whom the dispatcher of window w may serve, and RETIRE what they have finished. */
inline collect(w) {
  i = FIRST(w);
  do
  :: i < BEYOND(w) ->
#ifdef BUG_OVERWRITE
     answer[i] = mail[i];
#else
     answer[i] = NONE;
#endif
     if
     :: mail[i] >= WAITS -> without = without | BIT(i); answer[i] = WAITS
     :: else
     fi;
     if
     :: mail[i] > ASKS -> retire(w, mail[i] - ASKED(0))
     :: else
     fi;
     i++
  :: else -> break
  od;
  i = 0
}

/* What the dispatcher has to say to those who have no task. */
inline reply(w) {
  over = window[w].at_end && window[w].busy == 0;
  i = FIRST(w);
  do
  :: i < BEYOND(w) ->
     if
#ifdef BUG_END
     :: over && i == g -> mail[i] = LEAVE
#else
     :: over && answer[i] == WAITS -> mail[i] = LEAVE
#endif
     :: else ->
        if
        :: answer[i] != NONE -> mail[i] = answer[i]
        :: else
        fi
     fi;
     answer[i] = 0;
     i++
  :: else -> break
  od;
  i = 0; over = 0; without = 0
}

/* A pass of the dispatcher, by worker g, who has the lock. */
#define ANYBODY(w) (without != 0 && ANY_READY(w))
#define IS_WITHOUT(i) ((i) < BEYOND(w) && (without & BIT(i)))

/* The first warp of gang g, a worker of window w. */
proctype worker(byte g; byte w) {
  byte slot = NONE;      /* what it runs */
  byte told;             /* what it has read in its mail */
  byte answer[GANGS];    /* the dispatcher's: what it will write there */
  byte without;          /* mask of workers that have no task */
  byte to;
  byte i;
  bit over;              /* nothing runs and nothing will enter */
#ifdef BUG_LOST_DONE
  byte copy[SLOTS];
#endif

  do
  :: /* PUBLISH */
#if !defined(BUG_NO_FENCE) && !defined(BUG_LATE_FENCE)
     if
     :: slot != NONE -> d_step { for_gang_publish(g) }
     :: else
     fi;
#endif

#ifdef BUG_LOST_DONE
     /* Retires without the lock: reads all masks, and writes them back without its bit. */
     if
     :: slot != NONE ->
        d_step { s = 0; do :: s < SLOTS -> copy[s] = window[w].upstream[s] & ~BIT(slot); s++ :: else -> break od };
        d_step { s = 0; do :: s < SLOTS -> window[w].upstream[s] = copy[s]; copy[s] = 0; s++ :: else -> break od }
     :: else
     fi;
#endif

     /* ASK */
     d_step {
       told = ASKS;
       if
       :: slot != NONE -> mail[g] = ASKED(slot); slot = NONE
       :: else -> mail[g] = ASKS
       fi;
       printf("worker %d asks\n", g)
     };
#ifdef BUG_LATE_FENCE
     d_step { for_gang_publish(g) };
#endif

     do
     :: told >= ASKS ->
        if
        :: atomic { window[w].lock == 0 -> window[w].lock = 1 };
           /* ACQUIRE */
#ifndef BUG_NO_ACQUIRE
           d_step { for_gang_forget(g) };
#endif
           d_step {
             printf("worker %d is the dispatcher\n", g);
             collect(w);
#ifdef BUG_GRANTED
             without = without | BIT(g);
             answer[g] = WAITS
#endif
           };
           do
           :: MAY_INSERT(w) ->
              d_step {
                do
                :: MAY_INSERT(w) -> insert(w)
                :: else -> break
                od;
                s = 0
              }
           :: ANYBODY(w) ->
              /* ISSUE. Any ready slot and any worker will do, so what holds here holds for every policy. */
              atomic {
              if
              :: READY(w, 0) -> slot = 0
#if SLOTS > 1
              :: READY(w, 1) -> slot = 1
#endif
#if SLOTS > 2
              :: READY(w, 2) -> slot = 2
#endif
#if SLOTS > 3
              :: READY(w, 3) -> slot = 3
#endif
#ifdef BUG_PREDICATE
              /* Looks at the predicate of a task that still waits for whoever writes it. */
              :: (window[w].busy & ~window[w].running & BIT(1)) && PREDICATE(KIND_OF(window[w].task[1])) -> slot = 1
#endif
              fi;
              if
              :: IS_WITHOUT(FIRST(w)) -> to = FIRST(w)
              :: IS_WITHOUT(FIRST(w) + 1) -> to = FIRST(w) + 1
              :: IS_WITHOUT(FIRST(w) + 2) -> to = FIRST(w) + 2
              fi
              };
              if
              :: PREDICATE(KIND_OF(window[w].task[slot])) ->
                 d_step { look(g * GANG, window[w].task[slot], PREDICATE(KIND_OF(window[w].task[slot]))) }
              :: else
              fi;
              d_step {
                begin(window[w].task[slot]);
                if
                :: allowed & BIT(window[w].task[slot]) ->
                   started = started | BIT(window[w].task[slot]);
                   window[w].running = window[w].running | BIT(slot);
                   without = without & ~BIT(to);
                   answer[to] = slot;
                   printf("worker %d grants task %d in slot %d to worker %d\n", g, window[w].task[slot], slot, to)
                :: else ->        /* the predicate is 0: RETIRE at once, look again */
                   skipped = skipped | BIT(window[w].task[slot]);
                   printf("worker %d finds the predicate of task %d to be 0\n", g, window[w].task[slot]);
                   retire(w, slot)
                fi;
                slot = NONE; to = 0
              }
           :: !ANYBODY(w) && (window[w].busy || window[w].at_end) -> break
           od;
           skip;
           d_step { reply(w); told = mail[g] };
           /* RELEASE */
           printf("worker %d releases the lock\n", g);
           window[w].lock = 0
#ifdef BUG_ASK
        :: window[w].lock -> AWAIT(mail[g] < WAITS); told = mail[g]     /* whoever has the lock will see it */
#elif defined(SPINNING)
        :: else -> told = mail[g]
#else
        :: mail[g] < ASKS -> told = mail[g]
#endif
        fi
     :: told == WAITS -> AWAIT(mail[g] != WAITS); told = mail[g]
     :: told < WAITS -> break
     od;
     if
     :: told == LEAVE -> break
     :: else
     fi;
     slot = told;
#ifndef BUG_NO_ACQUIRE
     d_step { for_gang_forget(g) };
#endif

     /* Run it: through the gang's barrier, each its part, and through the barrier again. */
#ifdef BUG_GANG
     AWAIT(absent[g] == 0);    /* too late: the task before has retired */
#endif
     d_step { told = 0; job[g] = window[w].task[slot]; absent[g] = GANG - 1 };
     work(g * GANG, job[g], 0);
#ifndef BUG_GANG
     AWAIT(absent[g] == 0);
#endif
     d_step { finished = finished | BIT(job[g]) }
  od;
#ifdef BUG_GANG
  AWAIT(absent[g] == 0);
#endif
  job[g] = NONE;
  d_step { absent[g] = GANG - 1; left++; printf("worker %d leaves\n", g) }
}

/* Another warp of gang g. GANG is at most 2, so it is the only one. */
proctype member(byte g) {
  do
  :: AWAIT(absent[g] != 0);
     if
     :: job[g] == NONE -> break
     :: else -> work(g * GANG + 1, job[g], 1); absent[g] = 0
     fi
  od
}

ltl terminates { <> (left == GANGS) }

init {
  byte i;
  atomic {
    /* The predicates' values: every combination. */
    do
    :: i < TASKS ->
       if
       :: allowed = allowed | BIT(i)
       :: PREDICATE(KIND_OF(i)) -> skip
       fi;
       i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < WINDOWS -> window[i].entered = GROUP * KINDS; i++     /* all of no group has entered */
    :: else -> break
    od;
    i = 0;
    do
    :: i < GANGS ->
       run worker(i, i / WORKERS);
       if
       :: GANG > 1 -> run member(i)
       :: else
       fi;
       i++
    :: else -> break
    od;
    i = 0
  };
  left == GANGS;
  d_step {
    /* The end of a launch, and the join of threads, make everything visible. */
    i = 0;
    do
    :: i < WARPS -> drain(i); i++
    :: else -> break
    od;
    i = 0;
    assert((started ^ skipped) == BIT(TASKS) - 1);   /* a task is lost */
    assert(started == allowed);                      /* a task is skipped that should run, or the reverse */
    assert(finished == started);                     /* a task never ends */
    do
    :: i < TILES ->
       f = 0;
       do
       :: f < FIELDS ->
          version_for(i, KINDS, f);
          p = 0;
          do
          :: p < GANG ->
             assert(memory[CELL(i, f, p)] == right);   /* memory ends up wrong */
             p++
          :: else -> break
          od;
          f++
       :: else -> break
       od;
       i++
    :: else -> break
    od
  }
}
