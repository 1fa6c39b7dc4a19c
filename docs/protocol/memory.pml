/* Memory as a GPU or a CPU shows it to several warps, or threads: late, and in old copies.
 *
 * A memory where every store is seen by all at once would hide the very mistakes that this model is to find. So a cell
 * holds a version, which is 1 + the number of the task that wrote it last (0: as at the start), and every warp has
 *
 *   pending, version   its stores that nobody else can see yet: a store buffer, or an L1 cache written back late
 *   copies             the cells that it has read since its last acquire: lines in a cache that nobody keeps coherent
 *   stale              those of its copies that memory has overtaken since
 *
 * `publish` is the fence before a release: it makes pending stores visible. `forget` is the fence after an acquire: it
 * drops the copies. A store becomes visible at its fence or at once, whichever SPIN likes. The moments between need not
 * be tried: a store that is seen too late is worst at the fence, one that overwrites too early is worst at once.
 *
 * What includes this file defines CELLS and WARPS first.
 */

#define BIT(i) (1 << (i))

typedef Warp {
  int pending;
  byte version;
  int copies;
  int stale
}

byte memory[CELLS];
Warp warp[WARPS];

/* Scratch for loops. Hidden variables are no part of a state, so they are used within a d_step only, which is one. */
hidden byte cell;
hidden byte other;

/* Everything in the store buffer of warp v reaches memory. */
inline drain(v) {
  cell = 0;
  do
  :: cell < CELLS ->
     if
     :: warp[v].pending & BIT(cell) ->
        memory[cell] = warp[v].version;
        other = 0;
        do
        :: other < WARPS ->
           if
           :: other != v && (warp[other].copies & BIT(cell)) -> warp[other].stale = warp[other].stale | BIT(cell)
           :: else
           fi;
           other++
        :: else -> break
        od
     :: else
     fi;
     cell++
  :: else -> break
  od;
  warp[v].pending = 0;
  warp[v].version = 0
}

/* Warp v stores a version to a set of cells. The buffer holds one task's stores: what a task before has left there
 * without a fence drains now. */
inline store(v, cells, what) {
  drain(v);
  warp[v].pending = cells;
  warp[v].version = what
}

/* Warp v loads a cell and must find the version that program order says. A warp sees its own stores at once. */
inline load(v, which, right) {
  if
  :: warp[v].pending & BIT(which) ->
     assert(warp[v].version == right)         /* a worker reads its own stores, and they are not the right ones */
  :: else ->
     assert(!(warp[v].stale & BIT(which)));   /* a task reads an old copy */
     assert(memory[which] == right);          /* a task reads what is not there yet, or not there any more */
     warp[v].copies = warp[v].copies | BIT(which)
  fi
}

/* Warp v gets copies of all cells, whatever is in them. */
inline touch(v) {
  warp[v].copies = BIT(CELLS) - 1
}

inline forget(v) {
  warp[v].copies = 0;
  warp[v].stale = 0
}
