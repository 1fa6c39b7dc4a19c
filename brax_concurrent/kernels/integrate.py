"""Time integration: semi-implicit Euler (`mj_Euler`), Runge-Kutta (`mj_RungeKutta`); and divergence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from brax_concurrent.kernels.fold import constant
from brax_concurrent.kernels.inertia import inertia_entries
from brax_concurrent.kernels.kernel import Kernel, kernel
from brax_concurrent.kernels.kinematics import FREE
from brax_concurrent.kernels.ops import absolute, both, negate, rint, sincos, sqrt, where
from brax_concurrent.kernels.symmetric import factor, solve
from brax_concurrent.kernels.vec import Vec, add, add_scaled, cross, dot, norm, normalize, quat_mul, scale, sub

_MAX_VALUE = 1e10  # MuJoCo's mjMAXVAL
_MINVAL = 1e-15  # MuJoCo's mjMINVAL

ROTATION_RULES = ("munthe-kaas", "plain")
"""How Runge-Kutta combines a free joint's angular velocities; see `rk4`."""


# ---- Positions


def integrate_positions(m: Any, qpos: Sequence[Any], qvel: Sequence[Any], h: Any) -> list[Any]:
    """qpos after a time h at the constant velocity qvel (`mj_integratePos`).

    Args:
        qpos: nq scalars. The quaternions of free joints are normalised first.
        qvel: nv scalars; a free joint's angular velocity is in the body frame.
        h: time, s.
    """
    result = list(qpos)
    for j in range(m.njnt):
        q, v = m.jnt_qposadr[j], m.jnt_dofadr[j]
        if m.jnt_type[j] == FREE:
            result[q : q + 3] = add_scaled(qpos[q : q + 3], qvel[v : v + 3], h)
            result[q + 3 : q + 7] = _turned(qpos[q + 3 : q + 7], scale(qvel[v + 3 : v + 6], h))
        else:
            result[q] = qpos[q] + qvel[v] * h
    return result


def _turned(quat: Vec, u: Vec) -> list[Any]:
    """The orientation after the rotation vector u, rad, in the body frame."""
    unit, _ = normalize(quat, (1.0, 0.0, 0.0, 0.0))
    angle = norm(u)
    small = angle < _MINVAL
    sine, cosine = sincos(0.5 * angle)
    return quat_mul(unit, [cosine, *scale(u, where(small, 0.5, sine / where(small, 1.0, angle)))])


# ---- Euler


@kernel(
    reads=("qpos", "qvel", "qacc", "qM", "qfrc_smooth", "qfrc_constraint"),
    writes=("qpos", "qvel", "qacc_warmstart"),
)
def euler(m: Any, w: Any) -> None:
    """One semi-implicit step: the velocity first, then the position with the new velocity.

    Joint damping is taken at the end of the step: (M + h diag(damping)) qacc' = qfrc_smooth + qfrc_constraint
    gives the acceleration that is integrated, while qacc itself starts the next step's solver.
    """
    h = m.opt.timestep
    qacc = _values(w.qacc, m.nv)
    implicit = _damped_acceleration(m, w, h) if _has_implicit_damping(m) else qacc
    qvel = add_scaled(_values(w.qvel, m.nv), implicit, h)
    qpos = integrate_positions(m, _values(w.qpos, m.nq), qvel, h)
    _store(w, qpos=qpos, qvel=qvel, qacc_warmstart=qacc)


def _has_implicit_damping(m: Any) -> bool:
    return m.opt.eulerdamp and any(not constant(d) or d > 0 for d in m.dof_damping)


def _damped_acceleration(m: Any, w: Any, h: Any) -> list[Any]:
    matrix = inertia_entries(m, w)
    for i in range(m.nv):
        matrix[i, i] = matrix[i, i] + m.dof_damping[i] * h
    return solve(*factor(matrix), [w.qfrc_smooth[i] + w.qfrc_constraint[i] for i in range(m.nv)])


# ---- Runge-Kutta

_REACH = (0.5, 0.5, 1.0)  # how far, in steps, a stage's rates lead to the next evaluation
_WEIGHT = (1.0 / 6.0, 1.0 / 3.0, 1.0 / 3.0, 1.0 / 6.0)


def rk4(rotation: str = "munthe-kaas") -> tuple[Kernel, Kernel, Kernel, Kernel]:
    """The kernels that follow the four evaluations of a classical fourth-order Runge-Kutta step.

    The first three move qpos and qvel to where the next evaluation is wanted, the last to the end of the
    step. Each leaves in `qacc_warmstart` what it expects qacc to be there, see `_expect`.

    Args:
        rotation: what the rate of a free joint's rotation is at a stage whose orientation is the start's
            turned by u, when its angular velocity in the body frame is v. "munthe-kaas": the rate of u itself
            (Munthe-Kaas, 1998), as in MuJoCo 4.0, of fourth order; see `_turning_rate`. "plain": v, as in
            MuJoCo before 4.0, of lower order.

    Raises:
        ValueError: an unknown rule.
    """
    if rotation not in ROTATION_RULES:
        raise ValueError(f"rotation: expected one of {ROTATION_RULES}, got {rotation!r}")
    corrected = rotation == "munthe-kaas"
    prefix = "rk4_" if corrected else "rk4_plain_"
    kept = ("rk4_qpos", "rk4_qvel", "rk4_dq", "rk4_dv", "rk4_turn", "rk4_trend")
    rates = ("qvel", "qacc", "qacc_warmstart")
    moved = ("rk4_dq", "rk4_dv", "rk4_turn", "rk4_trend", "qpos", "qvel", "qacc_warmstart")

    def stage(k: int, reads: tuple[str, ...], writes: tuple[str, ...]) -> Kernel:
        return Kernel(f"{prefix}stage_{k + 1}", lambda m, w: _stage(m, w, k, corrected), reads, writes)

    return (
        stage(0, ("qpos", "rk4_trend", *rates), (*kept, "qpos", "qvel", "qacc_warmstart")),
        stage(1, (*kept, *rates), moved),
        stage(2, (*kept, *rates), moved),
        Kernel(
            f"{prefix}finish",
            lambda m, w: _finish(m, w, corrected),
            (*kept, *rates),
            ("rk4_trend", "qpos", "qvel", "qacc_warmstart"),
        ),
    )


def _stage(m: Any, w: Any, k: int, corrected: bool) -> None:
    """After evaluation k (0, 1, 2): add its rates to the sums, go from the start to evaluation k + 1."""
    rate, qacc = _rates(m, w, corrected and k > 0)
    _expect(m, w, k, qacc)
    dq, dv = scale(rate, _WEIGHT[k]), scale(qacc, _WEIGHT[k])
    if k == 0:
        qpos, qvel = _values(w.qpos, m.nq), rate
        _store(w, rk4_qpos=qpos, rk4_qvel=qvel, rk4_dq=dq, rk4_dv=dv)
    else:
        qpos, qvel = _values(w.rk4_qpos, m.nq), _values(w.rk4_qvel, m.nv)
        _store(w, rk4_dq=add(_values(w.rk4_dq, m.nv), dq), rk4_dv=add(_values(w.rk4_dv, m.nv), dv))
    h = m.opt.timestep * _REACH[k]
    _store(w, qpos=integrate_positions(m, qpos, rate, h), qvel=add_scaled(qvel, qacc, h))
    for i, dof in enumerate(_rotations(m) if corrected else []):
        w.rk4_turn[i] = _shorter_way(scale(rate[dof : dof + 3], h))


def _finish(m: Any, w: Any, corrected: bool) -> None:
    rate, qacc = _rates(m, w, corrected)
    mean_rate = add_scaled(_values(w.rk4_dq, m.nv), rate, _WEIGHT[3])
    mean_qacc = add_scaled(_values(w.rk4_dv, m.nv), qacc, _WEIGHT[3])
    _expect(m, w, 3, qacc)
    h = m.opt.timestep
    _store(
        w,
        qpos=integrate_positions(m, _values(w.rk4_qpos, m.nq), mean_rate, h),
        qvel=add_scaled(_values(w.rk4_qvel, m.nv), mean_qacc, h),
    )


def _expect(m: Any, w: Any, k: int, qacc: Vec) -> None:
    """After evaluation k: what qacc is expected at the next, as the solver's start.

    Contacts are stiff: over half a step qacc changes a lot, but about as much as over the half step before. So the
    second and the fourth evaluation, half a step later than the one before, start from that one's qacc and the last
    change seen (`rk4_trend`); the third and the next step's first from the qacc of the same time. Where a start is
    bad, the solver finds it out (`solver.start`).

    In double precision the starts are MuJoCo's: all four evaluations begin at the last step's qacc. Another start ends
    elsewhere within the solver's tolerance, which contact forces tell from MuJoCo's by up to 2e-4 (Ant).
    """
    if w.precision == "f64":
        if k == 3:
            _store(w, qacc_warmstart=qacc)
        return
    expected: Sequence[Any]
    trend: Sequence[Any] = _values(w.rk4_trend, m.nv)
    if k == 0:
        expected = add(qacc, trend)
    elif k == 1:
        first = scale(_values(w.rk4_dv, m.nv), 1.0 / _WEIGHT[0])
        expected, trend = qacc, sub(qacc, first)
    elif k == 2:
        expected = add(qacc, trend)
    else:
        third = sub(_values(w.qacc_warmstart, m.nv), trend)
        expected, trend = qacc, sub(qacc, third)
    _store(w, qacc_warmstart=expected)
    if k in (1, 3):
        _store(w, rk4_trend=trend)


def _rates(m: Any, w: Any, corrected: bool) -> tuple[list[Any], list[Any]]:
    """The rates of position and velocity at an evaluation."""
    rate, qacc = _values(w.qvel, m.nv), _values(w.qacc, m.nv)
    for i, dof in enumerate(_rotations(m) if corrected else []):
        rate[dof : dof + 3] = _turning_rate(w.rk4_turn[i], rate[dof : dof + 3])
    return rate, qacc


def _shorter_way(u: Vec) -> list[Any]:
    """The rotation vector of at most half a turn that leads to the same orientation as u."""
    angle = norm(u)
    turns = rint(angle * (0.5 / math.pi))
    return scale(u, 1.0 - turns * (2.0 * math.pi) / where(turns > 0.0, angle, 1.0))


def _turning_rate(u: Vec, v: Vec) -> list[Any]:
    """du/dt of an orientation exp(u) that turns with v in its own frame: the inverse of exp's derivative.

    v + u x v / 2 + c u x (u x v) with c = (1 - (a/2) cot(a/2)) / a^2 and a = |u|; c is 1/12 for small angles.
    """
    square = dot(u, u)
    angle = sqrt(square)
    small = square < 1e-6
    sine, cosine = sincos(0.5 * angle)
    series = (1.0 - 0.5 * angle * cosine / where(small, 1.0, sine)) / where(small, 1.0, square)
    once = cross(u, v)
    return add_scaled(add_scaled(v, once, 0.5), cross(u, once), where(small, 1.0 / 12.0, series))


def _rotations(m: Any) -> list[int]:
    """First rotational dof of each free joint."""
    return [m.jnt_dofadr[j] + 3 for j in range(m.njnt) if m.jnt_type[j] == FREE]


def _values(field: Any, n: int) -> list[Any]:
    """The first n components: a field has at least one, even where the model has none."""
    return [field[i] for i in range(n)]


def _store(w: Any, **values: Sequence[Any]) -> None:
    for name, scalars in values.items():
        target = getattr(w, name)
        for i, x in enumerate(scalars):
            target[i] = x


# ---- Divergence


@kernel(reads=("qpos", "qvel", "qacc"), writes=("diverged",))
def check_state(m: Any, w: Any) -> None:
    """Set `diverged` where qpos, qvel or qacc has a NaN, an infinity or a number beyond 1e10; never clear it.

    These are the checks of `mj_checkPos`, `mj_checkVel` and `mj_checkAcc`, which make MuJoCo reset the state.
    Run after the integrator, it finds what MuJoCo finds at the start of its next step, before anybody
    observes the state.
    """
    sound: Any = True
    for field, n in ((w.qpos, m.nq), (w.qvel, m.nv), (w.qacc, m.nv)):
        for i in range(n):
            sound = both(absolute(field[i]) <= _MAX_VALUE, sound)
    with w.when(negate(sound)):
        w.diverged[0] = 1
