"""How a stream of tasks runs on a GPU: what is made of its tasks, once, and by which scheduler they are run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from brax_concurrent.backends import cuda_driver, task_cuda, task_link
from brax_concurrent.backends.arguments import Argument, ArgumentType, ArrayArgument
from brax_concurrent.scheduler import cuda_flags, cuda_list, cuda_list_hw, list_tables
from brax_concurrent.scheduler.arrays import MEMORY
from brax_concurrent.scheduler.kernel import Kernel
from brax_concurrent.scheduler.task import PREDICATE_BYTES
from brax_concurrent.scheduler.window import Encoded

if TYPE_CHECKING:
    from brax_concurrent.scheduler.stream import Call

Codes = Callable[[str, Callable[[Kernel, tuple[ArgumentType, ...]], Any]], list[Any]]


class CudaTasks:
    """Tasks on a GPU, as each scheduler needs them; made at its first run.

    Args:
      calls: the tasks in program order, stream after stream.
      lengths: tasks of each stream.
      codes: (target, compile) -> the code of each task's kernel, see `TaskStream._codes`.
      footprints: gives the tasks' footprints.
    """

    def __init__(self, calls: Sequence[Call], lengths: Sequence[int], codes: Codes, footprints: Callable[[], Encoded]):
        self._calls, self._lengths, self._codes, self._footprints = tuple(calls), tuple(lengths), codes, footprints
        self._device: int | None = None
        self._table: Any = None
        self._graph: Any = None
        self._flags: tuple[cuda_flags.Flags | None] | None = None
        self._near: np.ndarray | None = None
        self._hw: Any = None

    def run(
        self, scheduler: str, window: int, streams: int, windows: int, records: bool
    ) -> tuple[tuple[int, int, int] | None, np.ndarray]:
        """Run all tasks and wait for them; see `TaskStream.run`, and for what it returns `HwList.run`.

        Raises:
          ValueError, KernelError, CudaError: see `TaskStream.run`.
        """
        if self._device is None:  # all arrays that a later run has are on the GPU of the first
            self._device = task_cuda.device_of(self._addresses())
        with cuda_driver.primary_context(self._device):
            if scheduler == "hw":
                if self._hw is None:
                    self._hw = self._build_hw(cuda_driver.compute_capability(self._device))
                found: tuple[tuple[int, int, int] | None, np.ndarray] = self._hw.run(window, windows, records)
                return found
            if self._table is None:
                self._table = self._build_table(cuda_driver.compute_capability(self._device))
            launch = self._launch_of(scheduler, window, streams)
            return task_cuda.run_table(self._table.failure, launch), np.zeros((0, 4), np.int64)

    @property
    def worked(self) -> tuple[int, int] | None:
        """See `Timeline`: of the last run under "hw" that was recorded."""
        return None if self._hw is None else self._hw.worked

    def _addresses(self) -> Iterator[int]:
        """Of all arrays that have elements."""
        for call in self._calls:
            for each in (*call.arguments.values(), call.predicate):
                if isinstance(each, ArrayArgument) and each.size > 0:
                    yield each.address

    def _build_table(self, capability: tuple[int, int]) -> Any:
        """The tasks' table of launches, for the current GPU."""

        def compile_cuda(kernel: Kernel, types: tuple[ArgumentType, ...]) -> Any:
            return task_cuda.compile_task(kernel.function, types, capability, fastmath=kernel.fastmath)

        kernels = [task_cuda.load(code) for code in self._codes(str(capability), compile_cuda)]
        arguments, units = self._columns()
        return task_cuda.build_table(kernels, arguments, units, [call.predicate for call in self._calls])

    def _build_hw(self, capability: tuple[int, int]) -> Any:
        """The tables of the dispatcher on the GPU, and its program."""

        def compile_unit(kernel: Kernel, types: tuple[ArgumentType, ...]) -> Any:
            return task_link.compile_unit(kernel.function, types, capability, fastmath=kernel.fastmath)

        codes = self._codes(f"unit {capability}", compile_unit)
        functions = sorted({code.symbol: code for code in codes}.values(), key=lambda code: code.symbol)
        numbers = {code.symbol: number for number, code in enumerate(functions)}
        arguments, units = self._columns()
        predicates = [0 if call.predicate is None else call.predicate.address for call in self._calls]
        tables = list_tables.build_tables(
            self._footprints(),
            units,
            [numbers[code.symbol] for code in codes],
            [task_cuda.parameter_words(own) for own in arguments],
            predicates,
            np.array([(MEMORY, each, each + PREDICATE_BYTES * (each != 0)) for each in predicates], np.int64),
            self._lengths,
        )
        names = [call.kernel.name for call in self._calls]
        return cuda_list_hw.HwList(cuda_list_hw.load_program(functions, capability), tables, names)

    def _columns(self) -> tuple[list[tuple[Argument, ...]], list[int]]:
        return [tuple(call.arguments.values()) for call in self._calls], [call.units for call in self._calls]

    def _find_flags(self) -> tuple[cuda_flags.Flags | None]:
        """The predicates for the host to read; none if they are not in one piece of memory."""
        predicates = [0 if call.predicate is None else call.predicate.address for call in self._calls]
        flags = cuda_flags.find_flags(predicates, self._footprints())
        if flags is not None and not task_cuda.one_allocation(flags.address, flags.address + flags.size - 1):
            flags = None
        return (flags,)

    def _launch_of(self, scheduler: str, window: int, streams: int) -> Callable[[], None]:
        """What launches the table."""
        if scheduler == "serial":
            return functools.partial(task_cuda.launch_table, self._table)
        if scheduler == "sw":
            if self._flags is None:
                self._flags, self._near = self._find_flags(), cuda_list.near_masks(self._footprints())
            launch = functools.partial(cuda_list.launch_list, self._table, self._footprints(), near=self._near)
            return functools.partial(launch, flags=self._flags[0], window=window, streams=streams)
        if self._graph is None:
            self._graph = cuda_list.ListGraph(self._table, self._footprints())
        launch_graph: Callable[[], None] = self._graph.launch
        return launch_graph
