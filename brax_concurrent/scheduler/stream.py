"""Streams of tasks of any application: kernels on plain arrays, in program order.

The stream records. What each task reads and writes follows from its arrays, and what may run at once from that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from brax_concurrent.backends import task_cpu
from brax_concurrent.backends.arguments import Argument, ArgumentType, ArrayArgument, Device, KernelError
from brax_concurrent.backends.cpu_program import cores
from brax_concurrent.backends.cuda_program import MAX_STREAMS
from brax_concurrent.scheduler import graph, hw_list, task_list
from brax_concurrent.scheduler.arrays import as_argument, checked_dtype, checked_shape, is_jax, segments
from brax_concurrent.scheduler.footprint import EVERYTHING, Footprint, merged
from brax_concurrent.scheduler.kernel import Kernel
from brax_concurrent.scheduler.records import TASK
from brax_concurrent.scheduler.schedule import SCHEDULERS, schedulers_on, whole
from brax_concurrent.scheduler.scratch import Scratch
from brax_concurrent.scheduler.task import Task
from brax_concurrent.scheduler.trace import Timeline, apart, checked_path
from brax_concurrent.scheduler.trace_streams import list_stream
from brax_concurrent.scheduler.window import MAX_SLOTS, Encoded, encode

Compile = Callable[[Kernel, tuple[ArgumentType, ...]], Any]
_CODE: WeakKeyDictionary[Kernel, dict[tuple[str, tuple[ArgumentType, ...]], Any]] = WeakKeyDictionary()


class TaskError(RuntimeError):
    """A kernel raised an exception, which is this one's cause; tasks that wait for its task have not run.

    Attributes:
      task: its place in the stream.
      kernel: the kernel's name.
      unit: the unit that failed.
      stream: of several that ran at once, see `run_streams`, the place of the task's.
    """

    def __init__(self, message: str, task: int, kernel: str, unit: int, stream: int = 0):
        super().__init__(message)
        self.task, self.kernel, self.unit, self.stream = task, kernel, unit, stream


@dataclass(frozen=True, eq=False)
class Call:
    """What is needed to run a task: the kernel, its arguments by name, and where its predicate is."""

    kernel: Kernel
    units: int
    arguments: dict[str, Argument]
    predicate: ArrayArgument | None

    def reads(self) -> dict[str, ArrayArgument]:
        """The arrays that it is known to read, by what messages call them."""
        found = self._named(self.kernel.reads or ())
        return found if self.predicate is None else {**found, "predicate": self.predicate}

    def writes(self) -> dict[str, ArrayArgument]:
        """The arrays that it is known to write."""
        return self._named(self.kernel.writes or ())

    def _named(self, names: Iterable[str]) -> dict[str, ArrayArgument]:
        arrays = {name: self.arguments[name] for name in sorted(names)}
        return {f"argument {name}": each for name, each in arrays.items() if isinstance(each, ArrayArgument)}

    def types(self, unprotected: Iterable[str] = ()) -> tuple[ArgumentType, ...]:
        """The arguments' types. What the kernel must not store into is read-only, except for `unprotected`."""
        return tuple(
            each.type(self._protected(name, each) and name not in unprotected) for name, each in self.arguments.items()
        )

    def _protected(self, name: str, argument: Argument) -> bool:
        if not isinstance(argument, ArrayArgument):
            return True
        return not argument.writable if self.kernel.writes is None else name not in self.kernel.writes


class TaskStream:
    """Tasks in program order, on arrays of one device.

    It holds on to the arrays, and reads and writes them where they are. A stream is not thread-safe.
    """

    def __init__(self) -> None:
        self._tasks: list[Task] = []
        self._calls: list[Call] = []
        self._scratch: list[Scratch] = []
        self._checked = 0  # tasks that were held against the scratch memory
        self._device: Device | None = None
        self._lengths: tuple[int, ...] = ()  # of several streams that are independent; (): one
        self._joined: Any = None  # see run_streams.py
        # Made of the tasks when they are first run, and forgotten when one is added.
        self._table: Any = None
        self._encoded: Encoded | None = None
        self._cuda: Any = None

    def __len__(self) -> int:
        return len(self._tasks)

    def __repr__(self) -> str:
        return f"TaskStream(tasks={len(self)}, device={self.device!r})"

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks with their footprints. Segments are addresses of memory."""
        return tuple(self._tasks)

    @property
    def device(self) -> Device | None:
        """Where the stream's arrays are; None: no array yet."""
        return self._device

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float64, device: Device = "cpu") -> Any:
        """Scratch memory for tasks: an array that is not initialised.

        A task that reads a byte of it which no earlier task of the stream writes is an error when the stream runs.

        Returns:
          A NumPy array, or with device="cuda" one of Numba's on the current GPU.

        Raises:
          TypeError: the shape is no whole number or tuple of them, or kernels take no such dtype.
          ValueError: there is no such device, or the shape is negative.
          CudaError: there is no GPU.
        """
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device: expected cpu or cuda, got {device!r}")
        sizes, items = checked_shape("shape", shape), checked_dtype("dtype", dtype)
        if device == "cpu":
            array = np.empty(sizes, items)
        else:
            from brax_concurrent.backends import task_cuda

            array = task_cuda.empty(sizes, items)
        argument = as_argument(array, "TaskStream.empty")
        if isinstance(argument, ArrayArgument):
            self._scratch.append(Scratch(argument))
        return array

    def add(self, kernel: Kernel, /, *, units: int, predicate: Any = None, **arguments: Any) -> int:
        """Record a task: `kernel` called for the units 0 to units - 1.

        Args:
          kernel: see `bc.kernel`.
          units: how many; 0 is allowed.
          predicate: an array of one int32 on the stream's device: if it is 0 when the task's turn comes, the task is
            skipped. None: it always runs.
          arguments: the kernel's, by name. Arrays are shared, never copied; numbers are every unit's.

        Returns:
          The task's place in the stream.

        Raises:
          TypeError: the kernel is none, units is no whole number, arguments are missing or unknown, or one has an
            unsupported type.
          ValueError: an argument does not fit the kernel's declaration, is read-only but written, or is on another
            device; units is negative; the task writes its predicate.
        """
        if not isinstance(kernel, Kernel):
            raise TypeError(f"kernel: expected a function declared with @bc.kernel, got {type(kernel).__name__}")
        label = f"kernel {kernel.name}"
        count = whole(f"{label}: units", units)
        if not 0 <= count < 1 << 63:
            raise ValueError(f"{label}: units must be from 0 to {(1 << 63) - 1}, got {units}")
        if set(arguments) != set(kernel.parameters):
            expected, got = ", ".join(kernel.parameters), ", ".join(arguments)
            raise TypeError(f"{label}: expected the arguments ({expected}), got ({got})")
        call = Call(
            kernel,
            count,
            {name: as_argument(arguments[name], f"{label}: argument {name}") for name in kernel.parameters},
            None if predicate is None else _as_predicate(predicate, f"{label}: predicate"),
        )
        for name, each in call.arguments.items():
            _check_declared(kernel, name, each, arguments[name])
        device = self._one_device(call)
        task = _task(call)
        self._device = device
        self._tasks.append(task)
        self._calls.append(call)
        self._table = self._encoded = self._cuda = None
        return len(self._tasks) - 1

    def run(
        self,
        scheduler: str = "sw",
        *,
        window: int = 32,
        streams: int = 4,
        threads: int = 0,
        trace: str | os.PathLike[str] | None = None,
    ) -> Timeline | None:
        """Run all tasks; returns when they have finished. A stream may be run again, and be added to in between.

        The results are those of program order, bit for bit, whatever the arguments.

        Args:
          scheduler: "serial": in program order, one task after the other. "sw": through the out-of-order window. "hw":
            on the CPU, as "sw", but threads that find no task share the units of one that runs; on a GPU, the window
            is inside a kernel that stays there for the run. "graph": on a GPU, as a CUDA graph, which is made at the
            first run after tasks were added.
          window: of "sw" and "hw": how many unfinished tasks it looks at, 1 to 64; of "hw" on a GPU at most 32.
          streams: of "sw" on a GPU: how many CUDA streams, 1 to 16.
          threads: of "sw" and "hw" on the CPU: how many threads, 0 for one per core.
          trace: a file for the timeline of the tasks, also if one raises an exception; None: nothing is recorded.
            Finding what each task waits for takes time that grows with the square of their number.

        Returns:
          The timeline if there is a trace, else None.

        Raises:
          TypeError: a number is no whole one, or trace is no path.
          ValueError: an argument is out of range, the stream's device has no such scheduler, or a task reads scratch
            memory that none before it writes, the trace cannot be written there, or the stream is on a GPU and the
            scheduler, which is not "hw", cannot be traced.
          OSError: the trace could not be written.
          KernelError: a kernel does not compile, or stores into an array that it does not declare.
          TaskError: a kernel raised an exception. What was written until then stays.
          RuntimeError: of "sw" and "hw": no task ended for 120 seconds, or for BRAX_CONCURRENT_TIMEOUT seconds if that
            is set in the environment. The message names what was waited for; it goes on running, and on the CPU keeps
            its arrays alive.
          KeyboardInterrupt: of "sw" and "hw" on the CPU: when the tasks have ended that ran as it came. A second one
            does not wait for them.
          CudaError: the driver refused something; a launch that failed is named.
        """
        return self._run(scheduler, window, streams, threads, trace, 1)

    def to_dot(self, name: str = "stream") -> str:
        """The graph of tasks that wait for each other, in the DOT language, for Graphviz."""
        upstream = [task.waits_for for task in list_stream(self._tasks, self._footprints())]
        return graph.to_dot(self._tasks, upstream, name=name)

    # -- recording --

    def _one_device(self, call: Call) -> Device | None:
        """The device of the stream, with this call in it."""
        arrays = {f"argument {name}": each for name, each in call.arguments.items()}
        found, whose = self._device, "the stream's arrays"
        for name, each in [*arrays.items(), ("predicate", call.predicate)]:
            if isinstance(each, ArrayArgument):
                if found is not None and each.device != found:
                    raise ValueError(
                        f"kernel {call.kernel.name}: {name}: expected an array on the {found} like {whose}, "
                        f"got one on the {each.device}"
                    )
                if found is None:
                    found, whose = each.device, name
        return found

    def _check_scratch(self) -> None:
        """Hold tasks that are new since the last time against the scratch memory.

        Raises:
          ValueError: a task reads what no task before it writes.
        """
        while self._scratch and self._checked < len(self._calls):
            call = self._calls[self._checked]
            for name, each in call.reads().items():
                if call.units == 0 and name != "predicate":  # only that is looked at
                    continue
                if not all(scratch.written(each) for scratch in self._scratch):
                    raise ValueError(
                        f"task {self._checked}, kernel {call.kernel.name}: {name}: reads memory of TaskStream.empty "
                        "that no task before it writes"
                    )
            for scratch in self._scratch if call.units else ():
                if not call.kernel.declared:
                    scratch.write_all()
                for each in call.writes().values():
                    scratch.write(each)
            self._checked += 1

    # -- running --

    def _run(
        self,
        scheduler: str,
        window: int,
        streams: int,
        threads: int,
        trace: str | os.PathLike[str] | None,
        windows: int,
    ) -> Timeline | None:
        """See `run`; `windows` are those of "hw" on a GPU, 0: as many as there are streams or multiprocessors."""
        if not isinstance(scheduler, str) or scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler: expected one of {', '.join(SCHEDULERS)}, got {scheduler!r}")
        device = self._device or "cpu"
        if scheduler not in schedulers_on(device):
            offered = ", ".join(schedulers_on(device))
            raise ValueError(f"scheduler: expected one of {offered} for arrays on the {device}, got {scheduler!r}")
        _check_numbers(window, streams, threads)
        path = None if trace is None else checked_path("trace", trace)
        if path is not None and device == "cuda" and scheduler != "hw":
            raise ValueError(f"trace: on a GPU only hw records tasks, and this stream is run by {scheduler!r}")
        self._check_scratch()
        records = None if path is None else np.full((len(self._tasks), task_list.RECORD_COLUMNS), -1, np.int64)
        failure = None
        try:
            if device == "cuda":
                self._run_cuda(scheduler, window, streams, windows, records)
            else:
                self._run_cpu(scheduler, window, threads, records)
        except TaskError as error:  # the trace shows how far the tasks came
            failure = error
        timeline = None
        if records is not None and path is not None:
            timeline = self._timeline(records, 1 if scheduler == "serial" else threads or cores())
            timeline.write(path)
        if failure is not None:
            raise failure
        return timeline

    def _timeline(self, records: np.ndarray, threads: int) -> Timeline:
        ran = records[records[:, TASK] >= 0]
        rows = np.concatenate((ran, np.zeros((len(ran), 1), np.int64)), axis=1)  # all of run 0
        if self._device == "cuda":  # of as many blocks as began tasks
            worked = None if self._cuda is None else self._cuda.worked
            return Timeline(list_stream(self._tasks), apart(rows), lane_name="block", worked=worked)
        return Timeline(list_stream(self._tasks), apart(rows), threads, lane_name="thread")

    def _run_cpu(self, scheduler: str, window: int, threads: int, records: np.ndarray | None = None) -> None:
        table = self._table
        if table is None:
            predicates = [0 if call.predicate is None else call.predicate.address for call in self._calls]
            table = self._table = task_cpu.build_table(self._codes("cpu", _compile_cpu), *self._columns(), predicates)
        if scheduler == "serial" and records is None:
            failure = task_cpu.run_in_order(table)
        else:
            if scheduler == "serial":  # what records tasks runs them in program order, too
                window, threads = 1, 1
            names = tuple(task.kernel for task in self._tasks)
            columns = (table.code, table.args, table.first_unit, table.num_units, table.predicate)
            # A task that never ends outlives the run and the stream, and writes to its arrays.
            listed = task_list.TaskTable(*columns, names, (table.owners, *self._calls), table.args_words)
            engine = hw_list.SHARED if scheduler == "hw" else task_list.ONE_THREAD_A_TASK
            numbers = {"threads": threads, "window": window}
            failure = task_list.run_tasks(listed, self._footprints(), **numbers, records=records, engine=engine)
        if failure is not None:
            index, code = failure
            cause, place = task_cpu.exception_of(code)
            said = f"{type(cause).__name__}: {cause}" + (f" ({place})" if place else "")
            raise self._failure(index, task_cpu.failed_unit(table, index), said) from cause

    def _run_cuda(self, scheduler: str, window: int, streams: int, windows: int, records: np.ndarray | None) -> None:
        from brax_concurrent.scheduler.stream_cuda import CudaTasks  # needs numba-cuda

        if self._cuda is None:
            lengths = self._lengths or (len(self._calls),)
            self._cuda = CudaTasks(self._calls, lengths, self._codes, self._footprints)
        failure, rows = self._cuda.run(scheduler, window, streams, windows, records is not None)
        if records is not None:
            records[: len(rows)] = rows
        if failure is not None:
            code, index, unit = failure
            raise self._failure(index, unit, f"raised an exception, Numba's number {code}")

    def _footprints(self) -> Encoded:
        """The tasks' footprints as arrays."""
        if self._encoded is None:
            self._encoded = encode(self._tasks)
        return self._encoded

    def _columns(self) -> tuple[list[tuple[Argument, ...]], list[int]]:
        """All tasks' arguments and numbers of units."""
        return [tuple(call.arguments.values()) for call in self._calls], [call.units for call in self._calls]

    def _codes(self, target: str, compile_types: Compile) -> list[Any]:
        """The code of each task's kernel for its arguments, compiled once per process, target and types."""
        codes = []
        for index, call in enumerate(self._calls):
            known, key = _CODE.setdefault(call.kernel, {}), (target, call.types())
            if key not in known:
                try:
                    known[key] = compile_types(call.kernel, call.types())
                except KernelError as error:
                    raise _explained(call, index, error, compile_types) from error
            codes.append(known[key])
        return codes

    def _failure(self, index: int, unit: int, said: str) -> TaskError:
        call = self._calls[index]
        names = ", ".join(name for name, each in call.arguments.items() if isinstance(each, ArrayArgument))
        message = f"task {index}, kernel {call.kernel.name} on the arrays ({names}), unit {unit}: {said}"
        return TaskError(message, index, call.kernel.name, unit)


def _check_numbers(window: int, streams: int, threads: int) -> None:
    """Hold the numbers of a run against their ranges."""
    for name, value, most in (("window", window, MAX_SLOTS), ("streams", streams, MAX_STREAMS)):
        if not 1 <= whole(name, value) <= most:
            raise ValueError(f"{name} must be from 1 to {most}, got {value}")
    if whole("threads", threads) < 0:
        raise ValueError(f"threads must not be negative, got {threads}")


def _as_predicate(value: Any, what: str) -> ArrayArgument:
    argument = as_argument(value, what)
    if not isinstance(argument, ArrayArgument) or argument.dtype != "int32" or argument.size != 1:
        got = f"{argument.dtype}{list(argument.shape)}" if isinstance(argument, ArrayArgument) else "a number"
        raise ValueError(f"{what}: expected an array of one int32, got {got}")
    return argument


def _check_declared(kernel: Kernel, name: str, argument: Argument, value: Any) -> None:
    """Hold one argument against the kernel's declaration."""
    if kernel.reads is None or kernel.writes is None:
        return
    what, array = f"kernel {kernel.name}: argument {name}", isinstance(argument, ArrayArgument)
    named = name in kernel.reads or name in kernel.writes
    if array and not named:
        has = f"{sorted(kernel.reads)} and {sorted(kernel.writes)}"
        raise ValueError(f"{what}: is an array; expected it to be named in the kernel's reads or writes, got {has}")
    if named and not array:
        raise ValueError(f"{what}: is named in reads or writes; expected an array, got the number {value!r}")
    if name in kernel.writes and isinstance(argument, ArrayArgument) and not argument.writable:
        why = (
            "JAX arrays always are: pass np.array(x), a copy, and make a JAX array of the result"
            if is_jax(value)
            else "pass a writable one"
        )
        raise ValueError(f"{what}: the kernel writes it, but the array is read-only ({why})")


def _task(call: Call) -> Task:
    """The task of a call: its footprint from its arrays."""
    name, kernel, predicate = f"kernel {call.kernel.name}", call.kernel, None
    if call.predicate is not None:
        (predicate,) = segments(call.predicate)
    if kernel.reads is None or kernel.writes is None:
        return Task(kernel.name, range(call.units), EVERYTHING, predicate)
    reads, writes = (
        merged(segment for each in arrays.values() for segment in segments(each))
        for arrays in (call.reads(), call.writes())
    )
    footprint = Footprint(reads, writes)
    if predicate is not None and any(predicate.overlaps(write) for write in footprint.writes):
        raise ValueError(f"{name}: predicate: the task itself writes it; give another memory")
    return Task(kernel.name, range(call.units), footprint, predicate)


def _compile_cpu(kernel: Kernel, types: tuple[ArgumentType, ...]) -> task_cpu.TaskCode:
    return task_cpu.compile_task(kernel.function, types, boundscheck=kernel.boundscheck, fastmath=kernel.fastmath)


def _explained(call: Call, index: int, error: KernelError, compile_types: Compile) -> KernelError:
    """Why a kernel does not compile: because it stores into arrays that it must not, or as Numba says."""

    def compiles(unprotected: set[str]) -> bool:
        try:
            compile_types(call.kernel, call.types(unprotected))
        except KernelError:
            return False
        return True

    names, what = set(call.arguments), f"task {index}, kernel {call.kernel.name}"
    guarded = {
        name for name, one, other in zip(call.arguments, call.types(), call.types(names), strict=True) if one != other
    }
    stored = sorted(name for name in guarded if not compiles(names - {name})) if guarded and compiles(names) else []
    if not stored:
        return KernelError(f"{what}: {error}")
    if call.kernel.writes is None:
        return KernelError(f"{what}: stores into {', '.join(stored)}, but the array is read-only")
    writes = sorted(call.kernel.writes)
    return KernelError(f"{what}: stores into {', '.join(stored)}; expected only what its writes name: {writes}")
