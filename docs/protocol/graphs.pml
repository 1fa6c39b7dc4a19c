/* The streams that the models run: four kernels in program order, and what each reads and writes.
 *
 * A footprint is a set of the fields A, B, C, D. Nobody writes a dependency by hand: the models derive who waits for
 * whom from these footprints, as the window does. A field that a kernel both reads and writes counts as written only. A
 * predicate is a field too, the one that a kernel's PREDICATE names (0: none), and is among what the kernel reads.
 */

#define A 1
#define B 2
#define C 4
#define D 8

#define CHAIN 1      /* 0 -> 1 -> 2 -> 3, and the last overwrites what the first wrote */
#define DIAMOND 2    /* 0 -> 1, 2 -> 3 */
#define ALONE 3      /* nobody waits for anybody */
#define OVERWRITE 4  /* write after read (1 -> 2), write after write (0 -> 2, 1 -> 3) */
#define PREDICATES 5 /* 1 and 2 may be skipped; it is 1, if it is not skipped itself, that says whether 2 is */
#define FLAGS 6      /* 2 waits for 0 and 1, but it is 0 alone that says whether it is skipped; 3 waits for 1 and 2 */

#ifndef GRAPH
#define GRAPH DIAMOND
#endif

#define KINDS 4

#if GRAPH == CHAIN
#define FIELDS 3
#define READS(k)  (((k) == 1) * A + ((k) == 2) * B + ((k) == 3) * C)
#define WRITES(k) (((k) == 0) * A + ((k) == 1) * B + ((k) == 2) * C + ((k) == 3) * A)
#define PREDICATE(k) 0
#elif GRAPH == DIAMOND
#define FIELDS 3
#define READS(k)  (((k) == 1) * A + ((k) == 2) * A + ((k) == 3) * (B + C))
#define WRITES(k) (((k) == 0) * A + ((k) == 1) * B + ((k) == 2) * C + ((k) == 3) * A)
#define PREDICATE(k) 0
#elif GRAPH == ALONE
#define FIELDS 4
#define READS(k)  0
#define WRITES(k) BIT(k)
#define PREDICATE(k) 0
#elif GRAPH == OVERWRITE
#define FIELDS 2
#define READS(k)  (((k) == 1) * A + ((k) == 3) * A)
#define WRITES(k) (((k) == 0) * A + ((k) == 1) * B + ((k) == 2) * A + ((k) == 3) * B)
#define PREDICATE(k) 0
#elif GRAPH == PREDICATES
#define FIELDS 3
#define READS(k)  (((k) == 1) * A + ((k) == 2) * B + ((k) == 3) * (B + C))
#define WRITES(k) (((k) == 0) * A + ((k) == 1) * B + ((k) == 2) * C + ((k) == 3) * A)
#define PREDICATE(k) (((k) == 1) * A + ((k) == 2) * B)
#elif GRAPH == FLAGS
#define FIELDS 3
#define READS(k)  (((k) == 1) * A + ((k) == 2) * (A + B) + ((k) == 3) * C)
#define WRITES(k) (((k) == 0) * A + ((k) == 1) * B + ((k) == 2) * C + ((k) == 3) * B)
#define PREDICATE(k) (((k) == 2) * A)
#else
#error "GRAPH must be CHAIN, DIAMOND, ALONE, OVERWRITE, PREDICATES or FLAGS"
#endif

/* Read after write, write after read and write after write. */
#define CONFLICT(j, k) ((WRITES(j) & (READS(k) | WRITES(k))) || (READS(j) & WRITES(k)))
