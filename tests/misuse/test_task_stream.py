"""Kernels and tasks that cannot be right are refused: messages name kernel, argument, expected and got."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from numba import njit
from task_kernels import answers, anything, axpy, copy, fill, on_gpu, through_a_view, undeclared, unknown_name

import brax_concurrent as bc
from brax_concurrent.backends.cuda_driver import device_count
from brax_concurrent.scheduler.schedule import Schedule

X, Y = np.ones(4), np.zeros(4)
READONLY = np.zeros(4)
READONLY.flags.writeable = False


def good(unit, x, y):
    y[unit] = x[unit]


def with_default(unit, x=1): ...


def with_many(unit, *x): ...


def with_keyword(unit, *, x): ...


def with_units(unit, units): ...


def nothing(): ...


@pytest.mark.parametrize(
    ("declare", "error", "message"),
    [
        (lambda: bc.kernel(reads=("z",))(good), ValueError, "kernel good: reads: 'z' is no parameter .*'x', 'y'"),
        (lambda: bc.kernel(writes=("unit",))(good), ValueError, "kernel good: writes: 'unit' is no parameter"),
        (lambda: bc.kernel(reads="x")(good), TypeError, r"kernel good: reads: expected a tuple of names .*, got \'x\'"),
        (
            lambda: bc.kernel(writes=(1,))(good),
            TypeError,
            r"kernel good: writes: expected a tuple of names .*, got \(1,\)",
        ),
        *(
            (
                lambda what=what, names=names: bc.kernel(**{what: names})(good),
                TypeError,
                f"kernel good: {what}: expected a tuple of names .*, got {names!r}$",
            )
            for what in ("reads", "writes")
            for names in (5, 0, "", b"x", False)
        ),
        *(
            (
                lambda what=what, flag=flag: bc.kernel(reads=("x",), **{what: flag})(good),
                TypeError,
                f"kernel good: {what}: expected True or False, got {flag!r}$",
            )
            for what in ("boundscheck", "fastmath")
            for flag in ("no", 1, None)
        ),
        (lambda: bc.kernel(njit(good)), TypeError, "expected a Python function, got CPUDispatcher: give the plain"),
        (lambda: bc.kernel("x"), TypeError, "kernel: expected a Python function, got str"),
        (lambda: bc.kernel(nothing), TypeError, "kernel nothing: expected the unit as first parameter"),
        (
            lambda: bc.kernel(with_default),
            TypeError,
            "with_default: expected plain parameters without defaults, got x=1",
        ),
        (lambda: bc.kernel(with_many), TypeError, r"with_many: expected plain parameters without defaults, got \*x"),
        (lambda: bc.kernel(with_keyword), TypeError, "with_keyword: expected plain parameters without defaults, got x"),
        (lambda: bc.kernel(with_units), ValueError, "with_units: a parameter cannot be called units"),
    ],
)
def test_declarations(declare, error, message):
    with pytest.raises(error, match=message):
        declare()


FLAG = np.ones(1, np.int32)
PREDICATE = "kernel copy: predicate: expected an array of one int32, got"


@pytest.mark.parametrize(
    ("kernel", "arguments", "error", "message"),
    [
        (good, {"units": 1}, TypeError, r"kernel: expected a function declared with @bc.kernel, got function"),
        (copy, {"units": -1, "x": X, "y": Y}, ValueError, "kernel copy: units must be from 0 to .*, got -1"),
        *(
            (copy, {"units": units, "x": X, "y": Y}, TypeError, f"copy: units: expected a whole number, got {units!r}$")
            for units in (1.5, "3", None, True)
        ),
        (copy, {"units": 1, "x": X}, TypeError, r"kernel copy: expected the arguments \(x, y\), got \(x\)"),
        (copy, {"units": 1, "x": X, "z": Y}, TypeError, r"kernel copy: expected the arguments \(x, y\), got \(x, z\)"),
        (
            copy,
            {"units": 1, "x": 1.0, "y": Y},
            ValueError,
            "kernel copy: argument x: .* expected an array, got the number",
        ),
        (
            fill,
            {"units": 1, "value": X, "y": Y},
            ValueError,
            r"kernel fill: argument value: is an array; expected it to be named",
        ),
        (
            copy,
            {"units": 1, "x": X, "y": READONLY},
            ValueError,
            "kernel copy: argument y: .*is read-only .pass a writable",
        ),
        (
            copy,
            {"units": 1, "x": X, "y": jnp.zeros(4)},
            ValueError,
            r"copy: argument y: .*JAX arrays always are: pass np.arr",
        ),
        (
            copy,
            {"units": 1, "x": X, "y": [1.0]},
            TypeError,
            "kernel copy: argument y: expected a number, or an arr.* got list",
        ),
        (
            copy,
            {"units": 1, "x": X.astype(object), "y": Y},
            TypeError,
            "copy: argument x: expected a dtype of .*, got object",
        ),
        (
            copy,
            {"units": 1, "x": X.astype(">f8"), "y": Y},
            TypeError,
            "copy: argument x: expected a dtype of .*, got >f8",
        ),
        (copy, {"units": 1, "x": jnp.zeros(4, jnp.bfloat16), "y": Y}, TypeError, "kernel copy: argument x: .*"),
        (copy, {"units": 1, "x": np.zeros(4, "M8[s]"), "y": Y}, TypeError, "copy: argument x: .*, got datetime64"),
        (
            fill,
            {"units": 1, "value": 1 << 63, "y": Y},
            ValueError,
            "fill: argument value: expected an integer of 64 bits",
        ),
        (
            copy,
            {"units": 1, "x": np.zeros(33, np.uint8)[1:].view(np.float64), "y": Y},
            ValueError,
            "copy: argument x: expected an address and strides that are multiples of 8",
        ),
        (
            copy,
            {"units": 1, "x": X, "y": on_gpu(Y)},
            ValueError,
            "copy: argument y: .* on the cpu like argument x, got .*cuda",
        ),
        (copy, {"units": 1, "x": X, "y": Y, "predicate": 1}, ValueError, f"{PREDICATE} a number"),
        (copy, {"units": 1, "x": X, "y": Y, "predicate": np.ones(2, np.int32)}, ValueError, rf"{PREDICATE} int32\[2\]"),
        (copy, {"units": 1, "x": X, "y": Y, "predicate": np.ones(1)}, ValueError, rf"{PREDICATE} float64\[1\]"),
        (
            copy,
            {"units": 1, "x": X, "y": Y, "predicate": on_gpu(FLAG)},
            ValueError,
            "copy: predicate: .*on the cpu.*cuda",
        ),
        (
            fill,
            {"units": 1, "value": 0, "y": FLAG, "predicate": FLAG},
            ValueError,
            "fill: predicate: the task itself wri",
        ),
    ],
)
def test_tasks(kernel, arguments, error, message):
    stream = bc.TaskStream()
    with pytest.raises(error, match=message):
        stream.add(kernel, **arguments)
    assert (stream.tasks, stream.device) == ((), None)


def test_one_stream_is_on_one_device():
    stream = bc.TaskStream()
    stream.add(fill, units=1, value=1.0, y=Y)
    with pytest.raises(
        ValueError, match="kernel fill: argument y: .*on the cpu like the stream's arrays, got one on the cuda"
    ):
        stream.add(fill, units=1, value=1.0, y=on_gpu(Y))


@pytest.mark.parametrize(
    ("kernel", "arguments", "message"),
    [
        (undeclared, {"x": X, "y": Y, "z": Y}, r"task 1, kernel undeclared: stores into z; expected only .*\['y'\]"),
        (through_a_view, {"x": X, "y": Y}, r"task 1, kernel through_a_view: stores into x; expected only .*\['y'\]"),
        (anything, {"x": X, "y": READONLY}, "task 1, kernel anything: stores into y, but the array is read-only"),
        (answers, {"y": Y}, "task 1, kernel answers: it returns int64: a kernel returns nothing"),
        (unknown_name, {"y": Y}, "task 1, kernel unknown_name: .*NameError: name 'missing'"),
    ],
)
def test_kernels_that_do_not_compile(kernel, arguments, message):
    stream, before = bc.TaskStream(), np.zeros(4)
    stream.add(fill, units=4, value=1.0, y=before)
    stream.add(kernel, units=4, **arguments)
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        stream.run()
    assert (before == 0).all()  # nothing has run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheduler": "fast"}, "scheduler: expected one of .*serial.*, got 'fast'"),
        ({"window": 0}, "window must be from 1 to 64, got 0"),
        ({"window": 65}, "window must be from 1 to 64, got 65"),
        ({"streams": 0}, "streams must be from 1 to 16, got 0"),
        ({"streams": 17}, "streams must be from 1 to 16, got 17"),
        ({"scheduler": "graph"}, "scheduler: expected one of serial, sw, hw for arrays on the cpu, got 'graph'"),
        ({"threads": -1}, "threads must not be negative, got -1"),
    ],
)
def test_runs(arguments, message):
    with pytest.raises(ValueError, match=message):
        bc.TaskStream().run(**arguments)


@pytest.mark.parametrize("name", ["window", "streams", "threads"])
@pytest.mark.parametrize("value", [2.5, "3", True, None])
def test_numbers_of_a_run_are_whole(name, value):
    with pytest.raises(TypeError, match=f"^{name}: expected a whole number, got {value!r}$"):
        bc.TaskStream().run(**{name: value})


def test_a_scheduler_is_a_name():
    with pytest.raises(ValueError, match=r"^scheduler: expected one of serial, sw, hw, graph, got array\("):
        bc.TaskStream().run(np.array(["sw", "serial"]))
    with pytest.raises(ValueError, match=r"^scheduler: expected one of .*, got array\("):
        Schedule(np.array(["sw", "serial"]))


def test_names_may_come_from_a_generator():
    decorator = bc.kernel(reads=(name for name in "x"), writes=(name for name in "y"))
    for _ in range(2):
        kernel = decorator(good)
        assert (kernel.reads, kernel.writes) == ({"x"}, {"y"})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1,), ValueError, "shape: expected sizes of 0 or more, got -1"),
        (((2, -1),), ValueError, r"shape: expected sizes of 0 or more, got \(2, -1\)"),
        *(((shape,), TypeError, f"shape: expected a whole number, got {shape!r}") for shape in (None, "x", 2.5, True)),
        ((4, "nope"), TypeError, "dtype: expected a dtype of bool, .*, got 'nope'"),
        ((4, object), TypeError, "dtype: expected a dtype of bool, .*, got object"),
    ],
)
def test_scratch_memory_that_cannot_be(arguments, error, message):
    stream = bc.TaskStream()
    with pytest.raises(error, match=f"^{message}$"):
        stream.empty(*arguments)
    assert stream.empty((2, 3), "int16").shape == (2, 3)


@pytest.mark.skipif(device_count() > 0, reason="there is a GPU")
def test_scratch_memory_on_no_gpu():
    with pytest.raises(RuntimeError, match="^device: expected cpu, for there is no GPU, got 'cuda'$"):
        bc.TaskStream().empty(4, device="cuda")


def test_scratch_memory_that_nobody_wrote():
    stream = bc.TaskStream()
    scratch = stream.empty(4)
    stream.add(axpy, units=4, a=1.0, x=X, y=scratch)
    with pytest.raises(
        ValueError, match="task 0, kernel axpy: argument y: reads memory of TaskStream.empty that no task"
    ):
        stream.run()
    flagged = bc.TaskStream()
    flagged.add(copy, units=1, x=X, y=Y, predicate=flagged.empty(1, np.int32))
    with pytest.raises(ValueError, match="task 0, kernel copy: predicate: reads memory of TaskStream.empty"):
        flagged.run()
    with pytest.raises(ValueError, match="device: expected cpu or cuda, got 'tpu'"):
        stream.empty(1, device="tpu")


@pytest.mark.parametrize("kernel", [copy, anything])
def test_a_task_of_no_units_writes_no_scratch_memory(kernel):
    stream = bc.TaskStream()
    scratch = stream.empty(4)
    stream.add(kernel, units=0, x=scratch, y=scratch)
    stream.run()
    stream.add(copy, units=4, x=scratch, y=Y)
    with pytest.raises(ValueError, match="task 1, kernel copy: argument x: reads memory of TaskStream.empty"):
        stream.run()


def test_scratch_memory_is_checked_byte_by_byte():
    stream = bc.TaskStream()
    scratch = stream.empty((600, 2))  # a column is in more pieces than a footprint keeps
    stream.add(fill, units=600, value=1.0, y=scratch[:, 0])
    stream.add(copy, units=600, x=scratch[:, 0], y=np.zeros(600))
    stream.run()
    stream.add(copy, units=600, x=scratch[:, 1], y=np.zeros(600))
    with pytest.raises(ValueError, match="task 2, kernel copy: argument x: reads memory"):
        stream.run()
