"""Fused kernels: one kernel made of many gives the bits of the many."""

from __future__ import annotations

from typing import Any

import numpy as np
import physics
import pytest

from brax_concurrent.backends import cuda
from brax_concurrent.backends.program import Barrier, walk
from brax_concurrent.kernels import step
from brax_concurrent.kernels.fuse import Choose, Repeat, fused, unrolled
from brax_concurrent.kernels.kernel import Kernel, kernel
from brax_concurrent.kernels.layout import Field
from tests.lanes import run_compiled

STATE = ("qpos", "qvel", "ctrl", "qacc_warmstart", "mocap_pos", "mocap_quat")


def _columns(robot: physics.Robot, name: str) -> int:
    return int(np.prod(robot.fields[name].shape))


def _load(m: Any, w: Any) -> None:
    for name in STATE:
        _copy(w, name, lambda flat, index, name=name: w.field(name).__setitem__(index, getattr(w.user, name)[flat]))
    w.ncon_lost[0] = 0
    w.diverged[0] = 0


def _store(m: Any, w: Any) -> None:
    for name in (*STATE[:2], "qacc_warmstart"):
        _copy(w, name, lambda flat, index, name=name: getattr(w.user, name).__setitem__(flat, w.field(name)[index]))


def _copy(w: Any, name: str, move: Any) -> None:
    shape = w._fields[name].shape
    for flat, index in enumerate(np.ndindex(*shape)):
        move(flat, index)


def _ends() -> tuple[Kernel, Kernel]:
    user = tuple("user." + name for name in STATE)
    load = Kernel("load", _load, user, (*STATE, "ncon_lost", "diverged"))
    return load, Kernel("store", _store, STATE, user)


@pytest.mark.parametrize("name", physics.ROBOTS)
def test_a_fused_step_gives_the_same_bits(name: str) -> None:
    robot = physics.robot(name)
    states = physics.random_states(robot.mj, 48, seed=3)
    arrays = {k: np.ascontiguousarray(v.reshape(48, -1), np.float32) for k, v in states.items()}
    arrays = {k: v if v.shape[1] else np.zeros((48, _columns(robot, k)), np.float32) for k, v in arrays.items()}
    load, store = _ends()
    recipe = [load, Repeat(2, tuple(step.physics_recipe(robot.model))), store]
    plain = {k: v.copy() for k, v in arrays.items()}
    run_compiled(list(unrolled(recipe)), robot.fields, plain, model=robot.model)
    once = {k: v.copy() for k, v in arrays.items()}
    run_compiled([fused("all", recipe)], robot.fields, once, model=robot.model)
    for k in ("qpos", "qvel", "qacc_warmstart"):
        assert not np.array_equal(plain[k], arrays[k])
        np.testing.assert_array_equal(once[k], plain[k], err_msg=k)


def test_products_are_not_contracted_across_kernels() -> None:
    """Through memory the product is rounded; fusing must not change that, though the sum could swallow it."""

    @kernel(reads=("user.x",), writes=("b",))
    def multiply(m: Any, w: Any) -> None:
        w.b[0] = w.user.x[0] * w.user.x[1]

    @kernel(reads=("b", "user.x"), writes=("user.y",))
    def accumulate(m: Any, w: Any) -> None:
        w.user.y[0] = w.user.x[2] + w.b[0]

    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    x[:, 2] = -x[:, 0] * x[:, 1]
    results = []
    for kernels in ([multiply, accumulate], [fused("both", [multiply, accumulate])]):
        arrays = {"x": x.copy(), "y": np.ones((64, 1), np.float32)}
        special = run_compiled(kernels, {"b": Field((1,), "test")}, arrays)
        results.append(arrays["y"])
    np.testing.assert_array_equal(results[0], 0)
    np.testing.assert_array_equal(results[1], 0)
    assert special.layout.num_rows == 0, "a value that stays inside the kernel needs no memory"
    assert any(getattr(v, "op", "") == "mul" for v in walk(special.programs["both"].root))


def test_turns_choose_their_kernel() -> None:
    def put(i: int) -> Kernel:
        return Kernel(f"put{i}", lambda m, w: w.b.__setitem__(0, w.b[0] * 10.0 + i), ("b",), ("b",))

    @kernel(writes=("b",))
    def start(m: Any, w: Any) -> None:
        w.b[0] = 0.0

    @kernel(reads=("b",), writes=("user.y",))
    def end(m: Any, w: Any) -> None:
        w.user.y[0] = w.b[0]

    recipe = [start, Repeat(3, (Choose((put(1), put(2), put(3))),)), end]
    assert [k.name for k in unrolled(recipe)] == ["start", "put1", "put2", "put3", "end"]
    for kernels in (list(unrolled(recipe)), [fused("all", recipe)]):
        arrays = {"y": np.zeros((5, 1), np.float32)}
        run_compiled(kernels, {"b": Field((1,), "test")}, arrays)
        assert (arrays["y"] == 123).all()


def test_a_barrier_parts_the_stages_on_a_gpu_and_changes_no_lane() -> None:
    """What keeps warps together: one before every stage, in every turn of a repetition; none of it is pruned."""

    @kernel(writes=("b",))
    def start(m: Any, w: Any) -> None:
        w.b[0] = 1.0

    @kernel(reads=("b",), writes=("b",))
    def double(m: Any, w: Any) -> None:
        w.b[0] = w.b[0] * 2.0

    @kernel(reads=("b",), writes=("user.y",))
    def end(m: Any, w: Any) -> None:
        w.user.y[0] = w.b[0]

    arrays = {"y": np.zeros((5, 1), np.float32)}
    special = run_compiled([fused("all", [start, Repeat(3, (double,)), end])], {"b": Field((1,), "test")}, arrays)
    assert (arrays["y"] == 8).all()
    program = special.programs["all"]
    assert sum(isinstance(item, Barrier) for item in walk(program.root)) == 4  # start, the loop, double, end
    ptx = cuda.compile_kernel(program).ptx
    assert "bar.sync" in ptx
    assert "exit;" in ptx  # threads without an environment leave, or the others would wait for them
    assert ptx.count("%globaltimer") == 2


def test_a_barrier_that_not_all_lanes_reach_is_refused() -> None:
    def stray(m: Any, w: Any) -> None:
        with w.when(w.user.y[0] > 0.0):
            w.barrier()

    with pytest.raises(ValueError, match=r"a barrier must not stand under w.when"):
        run_compiled([Kernel("stray", stray, ("user.y",), ())], {}, {"y": np.zeros((5, 1), np.float32)})
