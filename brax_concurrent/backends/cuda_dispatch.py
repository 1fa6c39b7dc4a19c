"""What the dispatcher and the code around it agree on: tables in a program's code, and the shared memory of a block.

A program of the dispatcher is one kernel. Its tables (int32 words) are constants in its code: they say which kernels
the control step of each part consists of. What differs from call to call are the kernel's parameters, int64: control
words, and for each part a *record* (the words of cuda_program.RECORD_*). The kernel's first instructions copy them into
the block's shared memory, where kernels find them; the dispatcher's own state lies before them.
"""

from __future__ import annotations

# --- tables: int32 words ----------------------------------------------------------------------------------------------
TABLE_PARTS, TABLE_FIRST_PART = 0, 4
T_OPS, T_FIRST_OP = 0, 1  # number of ops of a step; place of the first
T_STEPS = 2
T_RECORD = 3  # offset of the part's record in shared memory, bytes
T_ARENA_BYTES = 4  # of one tile
T_SHARE = 5  # where the part's blocks end, in 1/SHARES of the grid
T_WORDS = 8
SHARES = 1 << 16
# Which function; its kind; bytes from an arena's start to a row of 32 int32, all 0 where the op is not needed, or -1;
# the kinds of the part that it conflicts with, a mask of 64 bits
OP_FUNCTION, OP_KIND, OP_WHEN, OP_CONFLICTS, OP_ROW_WORDS = 0, 1, 2, 4, 8

# --- shared memory: bytes ---------------------------------------------------------------------------------------------
LOCK, ABORT, PASSES, TURN, VISITS, CLAIMS, ENDED, OVER = range(0, 32, 4)  # PASSES: how often somebody was dispatcher
SLOTS = 32  # of a window
SLOT_TASK = 64  # op << TASK_OP | GUARDED | flight << TASK_FLIGHT | kind, or FREE
SLOT_UPSTREAM = SLOT_TASK + 4 * SLOTS  # the slots that it waits for; itself, unless it holds a task that does not run
SLOT_OLDER = SLOT_UPSTREAM + 4 * SLOTS  # the slots whose tasks came before
SLOT_RECORD = SLOT_OLDER + 4 * SLOTS  # the part's number and 1 << PART_SHIFT | offset of its record in shared memory
SLOT_BUNDLE = SLOT_RECORD + 4 * SLOTS
SLOT_STEP = SLOT_BUNDLE + 4 * SLOTS
SLOT_FUNCTION = SLOT_STEP + 4 * SLOTS
FLIGHT_PART = SLOT_FUNCTION + 4 * SLOTS  # 0: free, else the part's number and 1
FLIGHT_BUNDLE = FLIGHT_PART + 4 * SLOTS
FLIGHT_OP = FLIGHT_BUNDLE + 4 * SLOTS  # the next to enter,
FLIGHT_STEP = FLIGHT_OP + 4 * SLOTS  # in which step
MAIL = FLIGHT_STEP + 4 * SLOTS  # of each gang: the slot of its task, or what follows
LEAVE, WAITS, ASKS = -1, -2, -3  # ASKS: nothing was finished; ASKS - 1 - slot: that slot's task was
LAST = MAIL + 4 * SLOTS  # of each gang: the op that it ran last, where the policy is SAME_KERNEL
RANKS = LAST + 4 * SLOTS  # within a pass that grants several tasks at once: the slots by age
STATE_BYTES = RANKS + 4 * SLOTS
CONTROL = STATE_BYTES  # the kernel's parameters, 8 bytes each: first those of the call. A gang has 1 << C_GANG warps
C_COUNTERS, C_ERROR, C_TRACE, C_RUN, C_TIMEOUT, C_GANG, C_FLIGHTS, C_POLICY, C_DYNAMIC, C_WINDOW = range(10)
CONTROL_WORDS = 10

FREE = -1
PART_SHIFT = 16
TASK_KIND_BITS, TASK_FLIGHT_BITS = 6, 5
TASK_FLIGHT, GUARDED = TASK_KIND_BITS, 1 << TASK_KIND_BITS + TASK_FLIGHT_BITS  # GUARDED: it has a predicate
TASK_OP = TASK_KIND_BITS + TASK_FLIGHT_BITS + 1
MAX_KINDS, MAX_OPS = 1 << TASK_KIND_BITS, 1 << 19

OLDEST, SAME_KERNEL, DEPTH_FIRST = range(3)

# --- the error cell: int32 words --------------------------------------------------------------------------------------
E_CODE, E_SLOT, E_PART, E_BUNDLE, E_OP, E_STEP, ERROR_WORDS = 0, 1, 2, 3, 4, 5, 8
NEVER_READY, NEVER_ENDED = 1, 2

# --- the trace: bytes -------------------------------------------------------------------------------------------------
TRACE_COUNT, TRACE_CAPACITY, TRACE_FIRST = 0, 4, 16
R_BEGIN, R_END, R_PART, R_BUNDLE, R_STEP, R_OP, R_PLACE, R_RUN, R_BYTES = 0, 8, 16, 20, 24, 28, 32, 36, 40
PLACE_GANG_BITS = 8  # a place is a multiprocessor's number and a gang's
SKIPPED_PLACE = -1

RUN_TASK = "brax_run_task"  # the symbol of what runs a kernel by its number

COUNTERS_BYTES = 256  # of global memory: for each part how many of its bundles were claimed, int32
REGROUP_THREADS = 1024  # of the one block that orders environments by their work
MAX_PARTS = COUNTERS_BYTES // 4
