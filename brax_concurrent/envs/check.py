"""Agreement with MuJoCo C: the compiled stages against `mj_forward`, and a whole step against `mj_step`.

Both engines get the same states, rounded to the precision that is checked. MuJoCo computes in double precision and lets
its Newton solver converge; this engine runs as it is shipped, with the model's own tolerances.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import mujoco
import numpy as np

from brax_concurrent.envs.simulator import Simulator
from brax_concurrent.kernels import contact_forces, step
from brax_concurrent.kernels.model import Model, load_model

FREE, SLIDE, HINGE = (int(getattr(mujoco.mjtJoint, f"mjJNT_{kind}")) for kind in ("FREE", "SLIDE", "HINGE"))
_CAPSULE = int(mujoco.mjtGeom.mjGEOM_CAPSULE)
_LIMIT_ROW = int(mujoco.mjtConstraint.mjCNSTR_LIMIT_JOINT)
# MuJoCo's four rows of a contact from the kernels' three basis rows, see kernels/constraint.py.
_EDGES = np.array([(1, 1, 0), (1, -1, 0), (1, 0, 1), (1, 0, -1)])
_TO_BASIS = np.linalg.pinv(_EDGES)

Arrays = dict[str, np.ndarray]

EXACT, SOLVED = 1e-9, 1e-6
"""float64 tolerances, of the worst state: of formulas, and of what the solver's tolerance ends."""

SINGLE = 1e-4
"""float32 tolerance, of 99 states in 100: in single precision a geom may just touch that just does not in double."""

_SOLVED_STAGES = ("solve", "rne_post_constraint", "step")
_STEP_NCONMAX = 64  # Runge-Kutta's later evaluations may have more contacts than the first one tells of


@dataclasses.dataclass(frozen=True)
class Row:
    """How well one field agrees.

    Attributes:
        stage: the kernel that computes the field, or "step".
        field: its name: MuJoCo's, or the kernels' (kernels/layout.py) for contacts and limits.
        median, p99, worst: of the states' relative errors.
        tolerance: what the judged one of these must not exceed.
        ok: whether it does not.
    """

    stage: str
    field: str
    median: float
    p99: float
    worst: float
    tolerance: float
    ok: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        rows: the fields, in the order in which a step computes them.
        num_states: states that were compared.
        left_out: states that were not, having more contacts than the engine keeps (nconmax).
        num_contacts: contacts in the states that were compared.
        judged: "p99" or "worst", the error that must keep to the tolerance.
    """

    rows: tuple[Row, ...]
    num_states: int
    left_out: int
    num_contacts: int
    judged: str

    @property
    def ok(self) -> bool:
        """Whether there was something to compare, and every field keeps to its tolerance."""
        return self.num_states > 0 and all(row.ok for row in self.rows)


def check(
    model: str | os.PathLike[str] | mujoco.MjModel,
    *,
    dtype: str = "float32",
    num_states: int = 1000,
    seed: int = 0,
    backend: str = "auto",
    threads: int = 0,
) -> Report:
    """Compare this engine with MuJoCo C on random states, field by field.

    A state's error is the largest difference of a component over the field's size, see `relative_errors`.

    Args:
        model: MJCF path, MJCF text or mujoco.MjModel.
        dtype: the engine's precision. Meanwhile JAX's 64-bit mode is on for "float64" and off for "float32".
        num_states: random states, at least 1.
        seed: of the states.
        backend, threads: see Simulator.

    Raises:
        UnsupportedModelError, ValueError, FileNotFoundError: see Simulator.
    """
    if isinstance(num_states, bool) or not isinstance(num_states, int) or num_states < 1:
        raise ValueError(f"num_states: expected a whole number of at least 1, got {num_states!r}")
    mj = _as_mujoco(model)
    fields = checked_fields(load_model(mj))
    with jax.enable_x64(dtype == "float64"):
        names = [*(name for _, name in fields), "contact_pair", "ncon_lost"]
        setting: dict[str, Any] = {"backend": backend, "dtype": dtype, "threads": threads}
        sim = Simulator(mj, num_states, names, **setting)
        stepper = Simulator(mj, num_states, nconmax=_STEP_NCONMAX, **setting)
        states = random_states(mj, num_states, seed).rounded(dtype)
        found, stepped = _our_answers(sim, stepper, states)
    _clear_unused(sim.model, found)
    kept = found["ncon_lost"].ravel() == 0
    expected, after = _mujoco_answers(_converging(mj), sim.model, states, found)
    table = [(stage, name, found[name], expected[name]) for stage, name in fields]
    table += [("step", name, stepped[name], after[name]) for name in ("qpos", "qvel")]
    judged = "worst" if dtype == "float64" else "p99"
    rows = tuple(
        _row(stage, name, relative_errors(ours[kept], theirs[kept], _SIZES.get(name, _none)(mj)), judged)
        for stage, name, ours, theirs in table
    )
    return Report(rows, int(kept.sum()), int((~kept).sum()), int(expected["ncon"][kept].sum()), judged)


def checked_fields(model: Model) -> list[tuple[str, str]]:
    """(stage, field) of all that is compared, in the order in which it is computed."""
    has = {
        "limit": bool(model.jnt_limited.any()),
        "contact": bool(model.npair),
        "actuator": bool(model.nu),
    }
    found = []
    for kernel in (*step.forward(model), contact_forces.rne_post_constraint):
        for name in kernel.writes:
            part = name.split("_")[0]
            comparable = hasattr(mujoco.MjData, name) or name in _OWN_FIELDS
            if comparable and name != "solver_niter" and has.get(part, True) and (kernel.name, name) not in found:
                found.append((kernel.name, name))
    return found


def relative_errors(found: np.ndarray, expected: np.ndarray, size: float | None = None) -> np.ndarray:
    """For each state the largest difference over the field's size in that state.

    A field's size is its largest absolute component, so that components which cancel to nearly 0, and have no digits of
    their own, count as what they are. Where a whole field nearly cancels, a thousandth of its largest size over all
    states takes the place of its size.

    Args:
        found, expected: (num, ...). A NaN or infinity in either is an infinite error.
        size: the size, where the field's own says nothing (a distance that is 0 at contact).
    """
    if found.size == 0:
        return np.zeros(len(found))
    found, expected = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (found, expected))
    sizes = np.abs(expected).max(axis=1) if size is None else np.full(len(expected), size)
    sizes = np.maximum(sizes, 1e-3 * sizes.max(initial=0.0, where=np.isfinite(sizes)))
    sizes[sizes == 0] = 1.0  # the field is 0 everywhere
    with np.errstate(invalid="ignore"):
        errors = np.abs(found - expected).max(axis=1) / sizes
    return np.where(np.isfinite(errors), errors, np.inf)


def _row(stage: str, name: str, errors: np.ndarray, judged: str) -> Row:
    errors = errors if len(errors) else np.zeros(1)
    median, p99, worst = (float(np.quantile(errors, q, method="higher")) for q in (0.5, 0.99, 1.0))
    tolerance = SINGLE if judged == "p99" else SOLVED if stage in _SOLVED_STAGES else EXACT
    return Row(stage, name, median, p99, worst, tolerance, (p99 if judged == "p99" else worst) <= tolerance)


def _none(mj: mujoco.MjModel) -> None:
    return None


_SIZES: dict[str, Callable[[mujoco.MjModel], float | None]] = {
    "ncon": lambda mj: 1.0,
    "contact_dist": lambda mj: float(mj.stat.extent),
}
_OWN_FIELDS = (
    *("qM", "ncon", "contact_dist", "contact_pos", "contact_frame", "limit_sign", "limit_D", "limit_aref"),
    *("contact_J", "contact_D", "contact_aref", "contact_force", "limit_force"),
)
"""Compared fields that MjData does not have as they are."""


# ---- Models ----------------------------------------------------------------------------------------------------------


def _as_mujoco(model: str | os.PathLike[str] | mujoco.MjModel) -> mujoco.MjModel:
    """A model of our own, to be solved by Newton's method: of all of MuJoCo's solvers the one that this engine has."""
    if isinstance(model, mujoco.MjModel):
        mj = copy.copy(model)
    elif isinstance(model, str) and model.lstrip().startswith("<"):
        mj = mujoco.MjModel.from_xml_string(model)
    else:
        mj = mujoco.MjModel.from_xml_path(os.fspath(model))
    mj.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
    return mj


def _converging(mj: mujoco.MjModel) -> mujoco.MjModel:
    """The model with a solver that goes on until nothing improves, and constraint rows that are easy to read."""
    mj = copy.copy(mj)
    mj.opt.tolerance, mj.opt.iterations = 1e-14, 200
    mj.opt.ls_tolerance, mj.opt.ls_iterations = 1e-6, 200
    mj.opt.jacobian = mujoco.mjtJacobian.mjJAC_DENSE
    return mj


# ---- States ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class States:
    """Inputs of a physics step, each of shape (num, ...)."""

    qpos: np.ndarray
    qvel: np.ndarray
    ctrl: np.ndarray
    qacc_warmstart: np.ndarray
    mocap_pos: np.ndarray
    mocap_quat: np.ndarray

    def rounded(self, dtype: str) -> States:
        """The states as numbers of this precision."""
        return States(*(getattr(self, field.name).astype(dtype) for field in dataclasses.fields(self)))


def random_states(mj: mujoco.MjModel, num: int, seed: int = 0) -> States:
    """Poses of all kinds, each with a speed and a control.

    A third of the states are near qpos0, a third have any orientation and joint angles inside their limits, a third
    also go beyond the limits. Two thirds are then lifted or lowered until the lowest geom is within 5 cm of touching
    z = 0: standing, sitting, lying. Speeds run from slow to 10 rad/s, controls beyond their range. Quaternions are not
    normalised, as after a reset with noise.
    """
    rng = np.random.default_rng(seed)
    data = mujoco.MjData(mj)
    qpos = np.tile(mj.qpos0, (num, 1))
    mocap_pos = np.tile(data.mocap_pos, (num, 1, 1)) + rng.normal(size=(num, mj.nmocap, 3)) * 0.3
    mocap_quat = np.tile(data.mocap_quat, (num, 1, 1)) + rng.normal(size=(num, mj.nmocap, 4)) * 0.3
    for s in range(num):
        _randomise(mj, qpos[s], s % 3, rng)
        if s % 9 < 6:
            data.mocap_pos[:], data.mocap_quat[:] = mocap_pos[s], mocap_quat[s]
            _put_on_floor(mj, data, qpos[s], rng.uniform(-0.05, 0.05))
    speed = 10 ** rng.uniform(-2, 1, size=(num, 1))
    low, high = np.where(mj.actuator_ctrllimited[:, None], mj.actuator_ctrlrange, (-1.0, 1.0)).reshape(-1, 2).T
    return States(
        qpos=qpos,
        qvel=rng.normal(size=(num, mj.nv)) * speed,
        ctrl=low + (high - low) * rng.uniform(-0.25, 1.25, size=(num, mj.nu)),
        qacc_warmstart=rng.normal(size=(num, mj.nv)),
        mocap_pos=mocap_pos,
        mocap_quat=mocap_quat,
    )


def _randomise(mj: mujoco.MjModel, qpos: np.ndarray, kind: int, rng: np.random.Generator) -> None:
    """Kind 0 is near qpos0, 1 anywhere inside the joints' limits, 2 also beyond them."""
    for j in range(mj.njnt):
        q = mj.jnt_qposadr[j]
        if mj.jnt_type[j] == FREE:
            qpos[q : q + 3] += rng.normal(size=3) * (0.05 if kind == 0 else 0.5)
            turn = rng.normal(size=4) * (0.1 if kind == 0 else 1.0)
            qpos[q + 3 : q + 7] = qpos[q + 3 : q + 7] * (kind == 0) + turn
        elif kind == 0:
            qpos[q] += rng.normal() * 0.1
        elif mj.jnt_limited[j]:
            low, high = mj.jnt_range[j]
            beyond = 0.1 * (high - low) * (kind == 2)
            qpos[q] = rng.uniform(low - beyond, high + beyond)
        else:
            qpos[q] += rng.uniform(-1, 1) * (np.pi if mj.jnt_type[j] == HINGE else 0.5)


def _put_on_floor(mj: mujoco.MjModel, data: mujoco.MjData, qpos: np.ndarray, gap: float) -> None:
    """Lift each root that can be lifted until the lowest point of what it carries is `gap` above z = 0."""
    data.qpos[:] = qpos
    mujoco.mj_kinematics(mj, data)
    for j in range(mj.njnt):
        body, q = mj.jnt_bodyid[j], mj.jnt_qposadr[j]
        free = mj.jnt_type[j] == FREE
        lift = mj.jnt_type[j] == SLIDE and mj.body_parentid[body] == 0 and abs(data.xaxis[j, 2]) > 0.99
        bottoms = [_bottom(mj, data, g) for g in range(mj.ngeom) if mj.body_rootid[mj.geom_bodyid[g]] == body]
        if bottoms and (free or lift):
            up = 1.0 if free else np.sign(data.xaxis[j, 2])
            qpos[q + 2 * free] += (gap - min(bottoms)) * up


def _bottom(mj: mujoco.MjModel, data: mujoco.MjData, g: int) -> float:
    half = mj.geom_size[g, 1] * abs(data.geom_xmat[g, 8]) if mj.geom_type[g] == _CAPSULE else 0.0
    return float(data.geom_xpos[g, 2] - mj.geom_size[g, 0] - half)


# ---- This engine's answers -------------------------------------------------------------------------------------------


def _our_answers(fields: Simulator, stepper: Simulator, states: States) -> tuple[Arrays, Arrays]:
    """The fields that `fields` was asked for, and qpos and qvel after a step of `stepper`."""
    mocap = {"mocap_pos": states.mocap_pos, "mocap_quat": states.mocap_quat} if fields.model.nmocap else {}

    def start(sim: Simulator) -> Any:
        state = sim.reset_to(states.qpos, states.qvel)
        return state.replace(internal=state.internal | {"qacc_warmstart": jax.numpy.asarray(states.qacc_warmstart)})

    evaluated = fields.forward(start(fields), states.ctrl, **mocap)
    stepped = stepper.step(start(stepper), states.ctrl, **mocap)
    return (
        {name: np.array(value) for name, value in evaluated.fields.items()},
        {"qpos": np.asarray(stepped.qpos), "qvel": np.asarray(stepped.qvel)},
    )


def _clear_unused(model: Model, found: Arrays) -> None:
    """Write 0 where the kernels leave what was there: records of no contact, limits of joints without any."""
    for name, value in found.items():
        if name.startswith("limit_"):
            value[:, model.jnt_limited == 0] = 0
        elif name.startswith("contact_"):
            value[np.arange(value.shape[1]) >= found["ncon"]] = 0


# ---- MuJoCo's answers ------------------------------------------------------------------------------------------------


def _mujoco_answers(mj: mujoco.MjModel, model: Model, states: States, found: Arrays) -> tuple[Arrays, Arrays]:
    """What MuJoCo says: the fields by the kernels' names, and qpos and qvel after a step.

    Contacts are put in the order in which this engine found them; where it found others than MuJoCo, they are NaN.
    """
    data = mujoco.MjData(mj)
    rows: dict[str, list[np.ndarray]] = {name: [] for name in found if name not in ("contact_pair", "ncon_lost")}
    after: dict[str, list[np.ndarray]] = {"qpos": [], "qvel": []}
    for s in range(len(states.qpos)):
        _put(data, states, s)
        mujoco.mj_forward(mj, data)
        mujoco.mj_rnePostConstraint(mj, data)
        records = _constraints(mj, data, model, {name: value[s] for name, value in found.items()})
        for name, column in rows.items():
            column.append(records[name] if name in records else _field(mj, data, name))
        mujoco.mj_resetData(mj, data)
        _put(data, states, s)
        mujoco.mj_step(mj, data)
        for name, column in after.items():
            column.append(getattr(data, name).copy())
    return _stacked(rows), _stacked(after)


def _stacked(columns: dict[str, list[np.ndarray]]) -> Arrays:
    return {name: np.array(column) for name, column in columns.items()}


def _put(data: mujoco.MjData, states: States, s: int) -> None:
    for field in dataclasses.fields(states):
        getattr(data, field.name)[:] = getattr(states, field.name)[s]


def _field(mj: mujoco.MjModel, data: mujoco.MjData, name: str) -> np.ndarray:
    """A field of MjData; qM and qLD in the kernels' order: from each dof up through its ancestors."""
    if name not in ("qM", "qLD"):
        return np.array(getattr(data, name))
    entries = np.zeros((mj.nv, mj.nv))
    if name == "qM":
        mujoco.mj_fullM(mj, data, entries)
    else:
        for i in range(mj.nv):
            stored = slice(mj.M_rowadr[i], mj.M_rowadr[i] + mj.M_rownnz[i])
            entries[i, mj.M_colind[stored]] = data.qLD[stored]
    listed = []
    for i in range(mj.nv):
        j = i
        while j >= 0:
            listed.append(entries[i, j])
            j = int(mj.dof_parentid[j])
    return np.array(listed)


def _constraints(mj: mujoco.MjModel, data: mujoco.MjData, model: Model, found: Arrays) -> Arrays:
    """MuJoCo's contacts and constraint rows of one state as the kernels keep them."""
    expected = {name: np.zeros(value.shape) for name, value in found.items() if name.split("_")[0] in _KEPT_BY_US}
    if "limit_sign" in expected:
        for row in np.flatnonzero(data.efc_type == _LIMIT_ROW):
            j = data.efc_id[row]
            expected["limit_sign"][j] = data.efc_J.reshape(-1, mj.nv)[row, mj.jnt_dofadr[j]]
            for name in ("D", "aref", "force"):
                expected[f"limit_{name}"][j] = getattr(data, f"efc_{name}")[row]
    active = np.flatnonzero(data.contact.efc_address >= 0)
    expected["ncon"][0] = len(active)
    if "contact_dist" not in expected:
        return expected
    order = _matching(data, model, found, active)
    if order is None:
        for name, value in expected.items():
            if name.startswith("contact_"):
                value[...] = np.nan
        return expected
    for k, c in enumerate(order):
        _put_contact(mj, data, expected, k, c)
    return expected


_KEPT_BY_US = ("limit", "contact", "ncon")


def _matching(data: mujoco.MjData, model: Model, found: Arrays, active: np.ndarray) -> list[int] | None:
    """For each of our contacts MuJoCo's of the same geoms, the nearest if there are several; None if they differ."""
    left = [int(c) for c in active]
    order = []
    for k in range(int(found["ncon"][0])):
        geoms = model.pair_geom[found["contact_pair"][k]].tolist()
        same = [c for c in left if data.contact.geom[c].tolist() == geoms]
        if not same:
            return None
        near = min(same, key=lambda c: float(np.abs(data.contact.pos[c] - found["contact_pos"][k]).sum()))
        left.remove(near)
        order.append(near)
    return None if left else order


def _put_contact(mj: mujoco.MjModel, data: mujoco.MjData, expected: Arrays, k: int, c: int) -> None:
    """MuJoCo's contact c as the kernels' contact k."""
    smooth = data.contact.dim[c] == 1
    first = data.contact.efc_address[c]
    rows = slice(first, first + (1 if smooth else 4))
    expected["contact_dist"][k] = data.contact.dist[c]
    expected["contact_pos"][k] = data.contact.pos[c]
    expected["contact_frame"][k] = data.contact.frame[c][:6]
    expected["contact_D"][k] = data.efc_D[first] * (0.25 if smooth else 1.0)
    expected["contact_force"][k] = np.repeat(data.efc_force[rows] / 4, 4) if smooth else data.efc_force[rows]
    for name, value in (("J", data.efc_J.reshape(-1, mj.nv)), ("aref", data.efc_aref)):
        part = value[rows]
        expected[f"contact_{name}"][k] = [*part, *(0 * part), *(0 * part)] if smooth else _TO_BASIS @ part
