"""What the dispatcher of task streams and the code around it agree on: its tables and memory.

A program is one kernel for a set of units' functions. What runs is in global memory: two tables, made once for a
stream, and *work memory*, which is all 0 when a run begins.

A *chunk* is what a worker takes at a time: up to R_GRAIN units of one task. A task has at most MAX_CHUNKS of them.

    the rows       of each task what its workers need: how many units it has and its function's parameters
    the entries    of each task what the window needs: what it conflicts with, its predicate, where its row is
    the streams    of each stream its first entry, how many it has, and their chunks in all
    work memory    the streams that were claimed; then for each window its ticket counter, a counter for each slot of
                   the chunks that were finished there, a record for each slot, and its log

A *log word* stands for a chunk. It says all that a worker needs to begin: where the row is (in units of ROW_BYTES),
which function, which chunk, in which slot of the window the task is, and whether it is to wait for its operands. If so,
the slot's *record* says for each counter what that comes to when they are there. 0 is a word that was not written yet.
"""

from __future__ import annotations

BLOCK = 128  # threads of a block, and the units that they take at a time
LANES = 32  # threads of a warp
SLOTS = 32  # of a window: lanes of the dispatcher's warp
REACH = 64  # bits of a distance mask: how many places of program order a window may span
MAX_CHUNKS = 4096  # of a task

# --- a row: 64-bit words, then the function's parameters --------------------------------------------------------------
ROW_BYTES = 16  # rows begin at multiples of this, and none at 0
R_UNITS, R_GRAIN, R_TASK, R_PARAMETERS = 0, 8, 16, 32  # units of the task, of a chunk; the task's number; bytes

# --- an entry: bytes --------------------------------------------------------------------------------------------------
N_MASK, N_WORD, N_PREDICATE, N_FLAG_MASK, N_CHUNKS, ENTRY_BYTES = 0, 8, 16, 24, 32, 40
"""Bit d of the mask is whether the task conflicts with the one d + 1 places before it; the log word of the task's first
chunk, but for the slot; the address of an int32, or 0; bit d is whether the task d + 1 places before may write that."""

# --- a stream: bytes --------------------------------------------------------------------------------------------------
S_FIRST, S_TASKS, S_CHUNKS, STREAM_BYTES = 0, 4, 8, 16

# --- work memory: bytes -----------------------------------------------------------------------------------------------
W_NEXT, W_WINDOWS = 0, 128  # streams that were claimed; where the windows' parts begin
RECORD_BYTES = 4 * SLOTS  # a cache line
W_TICKET, W_DONE, W_RECORDS = 0, 128, 256  # of a window's part, each in a cache line of its own
W_LOG = W_RECORDS + RECORD_BYTES * SLOTS
FAILED, COUNT = -(1 << 31), (1 << 31) - 1  # the bits of a counter: whether a chunk raised an exception; the chunks

# --- shared memory of a worker: bytes ---------------------------------------------------------------------------------
H_WORD, H_FAILED, H_TRACE, H_ROW = 0, 8, 16, 32
"""The log word of its chunk; if that waited, whether its upstream failed; if it is traced, where that is written; and a
copy of the task's row."""

# --- a log word: 64 bits ----------------------------------------------------------------------------------------------
LOG_SLOT, LOG_CHUNK, LOG_WAITS, LOG_FUNCTION = 32, 37, 49, 50  # where each begins; the row is below
MAX_FUNCTIONS = 1 << 13  # so that no word is negative
LOG_END = -1  # nothing comes any more

# --- a trace: bytes ---------------------------------------------------------------------------------------------------
Q_BEGIN, Q_END, Q_WORD, Q_PLACE, TRACE_BYTES = 0, 8, 16, 24, 32  # of a word of the log: when its chunk ran, and where

# --- the kernel's parameters, all int64 -------------------------------------------------------------------------------
P_ROWS, P_ENTRIES, P_STREAMS, P_WORK = 0, 1, 2, 3  # addresses
P_FAILURE = 4  # address of the failure cell, see task_cuda.py
P_ERRORS = 5  # address of the error cell, see cuda_dispatch.E_CODE, in memory that the host sees
P_TRACE = 6  # address of a row for each word of all logs; 0: nothing is traced
P_SKIPPED = 7  # address of an int64 for each entry: when its task was skipped
P_TIMEOUT = 8  # nanoseconds
P_WINDOWS = 9  # the first so many blocks dispatch, the others work
P_SLOTS = 10  # of a window
P_COUNT = 11  # streams
P_STRIDE = 12  # bytes of a window's part of the work memory
P_ROOM, P_WORKERS = 13, 14  # words of a log for chunks, and so many more, one for each worker of a window, for the end
P_ROW_WORDS = 15  # 64-bit words of the longest row; so many can be read from any row on
P_WAITING = 16  # chunks of a window that may wait in workers for their operands
PARAMETERS = 17

FREE, PENDING, RUNNING = 0, 1, 2  # a slot's state
