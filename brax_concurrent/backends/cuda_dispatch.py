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
T_CONFLICTS = 5  # place of, for each kind of the part, a mask of 64 bits of the kinds that it conflicts with
T_SHARE = 6  # where the part's blocks end, in 1/SHARES of the grid
T_WORDS = 8
SHARES = 1 << 16
OP_FUNCTION, OP_KIND, OP_WHEN, OP_ROW_WORDS = 0, 1, 2, 4  # which function; its kind; bytes from an arena's start to a
# row of 32 int32, all 0 where the op is not needed, or -1

# --- shared memory: bytes ---------------------------------------------------------------------------------------------
LOCK, EPOCH, ABORT, NEXT_SEQ, TURN, VISITS, CLAIMS, ENDED = range(0, 32, 4)
SLOTS = 32  # of a window
SLOT_STATE = 64  # 0: free, PENDING or RUNNING
SLOT_UPSTREAM = SLOT_STATE + 4 * SLOTS
SLOT_TASK = SLOT_UPSTREAM + 4 * SLOTS  # op << TASK_OP | flight << TASK_FLIGHT | kind
SLOT_STEP = SLOT_TASK + 4 * SLOTS
SLOT_SEQ = SLOT_STEP + 4 * SLOTS  # in which order they came
FLIGHT_PART = SLOT_SEQ + 4 * SLOTS  # 0: free, else the part's number and 1
FLIGHT_BUNDLE = FLIGHT_PART + 4 * SLOTS
FLIGHT_OP = FLIGHT_BUNDLE + 4 * SLOTS  # the next to enter,
FLIGHT_STEP = FLIGHT_OP + 4 * SLOTS  # in which step
MAIL = FLIGHT_STEP + 4 * SLOTS  # of each gang: what it is to do next
MAIL_OP, MAIL_PART, MAIL_BUNDLE, MAIL_STEP, MAIL_SLOT, MAIL_BYTES = 0, 4, 8, 12, 16, 32
MAX_GANGS = 16
STATE_BYTES = MAIL + MAIL_BYTES * MAX_GANGS
CONTROL = STATE_BYTES  # the kernel's parameters, 8 bytes each: first those of the call. A gang has 1 << C_GANG warps
C_COUNTERS, C_ERROR, C_TRACE, C_RUN, C_TIMEOUT, C_GANG, C_FLIGHTS, C_POLICY, C_DYNAMIC, C_WINDOW = range(10)
CONTROL_WORDS = 10

FREE, PENDING, RUNNING = 0, 1, 2
TASK_KIND_BITS, TASK_FLIGHT_BITS = 6, 5
TASK_FLIGHT, TASK_OP = TASK_KIND_BITS, TASK_KIND_BITS + TASK_FLIGHT_BITS
MAX_KINDS, MAX_OPS = 1 << TASK_KIND_BITS, 1 << 20

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
