"""MuJoCo's contacts and constraint rows, and how they correspond to the kernels' records."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mujoco
import numpy as np
import physics

from brax_concurrent.kernels.layout import physics_fields
from brax_concurrent.kernels.model import load_model
from brax_concurrent.kernels.reference import ReferenceWorld
from brax_concurrent.kernels.specialize import ModelView

NCONMAX = 64
NUM_STATES = 1000

# The edges of the friction pyramid in terms of the basis rows, in MuJoCo's order of rows.
EDGES = np.array([(1, 1, 0), (1, -1, 0), (1, 0, 1), (1, 0, -1)])
_LIMIT = int(mujoco.mjtConstraint.mjCNSTR_LIMIT_JOINT)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What MuJoCo says of one state. Contacts are those that have rows, in MuJoCo's order.

    Attributes:
        geom (ncon, 2), dist (ncon,), pos (ncon, 3), frame (ncon, 9), dim (ncon,), friction (ncon, 2).
        address: (ncon,) first row of each contact.
        J (nefc, nv); D, aref, force, type, id (nefc,): the rows.
        qacc, qfrc_constraint (nv,), cfrc_ext (nbody, 6), niter.
    """

    geom: np.ndarray
    dist: np.ndarray
    pos: np.ndarray
    frame: np.ndarray
    dim: np.ndarray
    friction: np.ndarray
    address: np.ndarray
    J: np.ndarray
    D: np.ndarray
    aref: np.ndarray
    force: np.ndarray
    type: np.ndarray
    id: np.ndarray
    qacc: np.ndarray
    qfrc_constraint: np.ndarray
    cfrc_ext: np.ndarray
    niter: int

    def rows_of(self, k: int) -> slice:
        """The rows of contact k."""
        return slice(self.address[k], self.address[k] + (4 if self.dim[k] == 3 else 1))


# ---- Robots and states -----------------------------------------------------------------------------------------------


def robot(
    source: Any, nconmax: int = NCONMAX, prepare: Callable[[mujoco.MjModel], None] | None = None
) -> physics.Robot:
    """A robot as `physics.robot` loads it, that keeps many contacts and that MuJoCo solves with Newton's method."""
    mj = copy.copy(physics.robot(source).mj)
    mj.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
    if prepare is not None:
        prepare(mj)
    model = load_model(mj, nconmax=nconmax)
    return physics.Robot(mj, model, ModelView(model), physics_fields(model))


def converge(mj: mujoco.MjModel) -> None:
    """Let the solver go on until nothing improves."""
    mj.opt.tolerance, mj.opt.iterations = 1e-14, 200
    mj.opt.ls_tolerance, mj.opt.ls_iterations = 1e-6, 200


def states_of(robot: physics.Robot, num: int = NUM_STATES, seed: int = 0) -> physics.States:
    """`physics.random_states`, a third of which are then pressed into the floor.

    Half of the warm starts are near the solution, as in a simulation.
    """
    states = physics.random_states(robot.mj, num, seed)
    rng = np.random.default_rng(seed)
    for j in np.flatnonzero(robot.mj.jnt_type == physics.FREE):
        states.qpos[:, robot.mj.jnt_qposadr[j] + 2] -= rng.uniform(0, 0.3, num) * (rng.random(num) < 1 / 3)
    qacc = physics.mujoco_fields(robot.mj, states, ("qacc",))["qacc"]
    near = rng.random((num, 1)) < 0.5
    warm = np.where(near, qacc * (1 + 0.01 * rng.normal(size=qacc.shape)), states.qacc_warmstart)
    return dataclasses.replace(states, qacc_warmstart=warm)


# ---- MuJoCo's answers ------------------------------------------------------------------------------------------------


def answers(
    mj: mujoco.MjModel, states: physics.States, before: Callable[[mujoco.MjModel, int], None] | None = None
) -> list[Answer]:
    """MuJoCo's answer to each state: `mj_forward` and `mj_rnePostConstraint`.

    Args:
        before: changes the model before the state of that number.
    """
    data = mujoco.MjData(mj)
    found = []
    for s in range(len(states)):
        for name, value in states.items():
            getattr(data, name)[:] = value[s]
        if before is not None:
            before(mj, s)
        mujoco.mj_forward(mj, data)
        mujoco.mj_rnePostConstraint(mj, data)
        found.append(_answer(mj, data))
    return found


def _answer(mj: mujoco.MjModel, data: mujoco.MjData) -> Answer:
    con, active = data.contact, np.flatnonzero(data.contact.efc_address >= 0)
    return Answer(
        **{name: np.array(getattr(con, name)[active]) for name in ("geom", "dist", "pos", "frame", "dim")},
        friction=np.array(con.friction[active, :2]),
        address=np.array(con.efc_address[active]),
        J=np.array(data.efc_J).reshape(-1, mj.nv),
        **{name: np.array(getattr(data, f"efc_{name}")) for name in ("D", "aref", "force", "type", "id")},
        **{name: np.array(getattr(data, name)) for name in ("qacc", "qfrc_constraint", "cfrc_ext")},
        niter=int(data.solver_niter.sum()),
    )


# ---- MuJoCo's answers as inputs of kernels ---------------------------------------------------------------------------


def world_of(
    robot: physics.Robot, states: physics.States, fields: Iterable[str], known: Sequence[Answer] = ()
) -> ReferenceWorld:
    """A reference world that holds the states, MuJoCo's fields and the answers' contacts; all else is poison."""
    world = physics.world_of(robot, states)
    for name, value in physics.mujoco_fields(robot.mj, states, fields).items():
        if value.size:
            world.put(name, value.reshape(len(states), *robot.fields[name].shape))
    if known:
        _put_contacts(robot, world, known)
    return world


def _put_contacts(robot: physics.Robot, world: ReferenceWorld, known: Sequence[Answer]) -> None:
    pairs = {tuple(ids): p for p, ids in enumerate(robot.model.pair_geom.tolist())}
    records = {name: world.get(f"contact_{name}") for name in ("dist", "pos", "frame", "pair", "mu", "force")}
    for s, answer in enumerate(known):
        count = len(answer.dist)
        records["dist"][s, :count] = answer.dist
        records["pos"][s, :count] = answer.pos
        records["frame"][s, :count] = answer.frame[:, :6]
        records["pair"][s, :count] = [pairs[tuple(ids)] for ids in answer.geom.tolist()]
        records["mu"][s, :count] = answer.friction * (answer.dim != 1)[:, None]
        for k in range(count):
            force = answer.force[answer.rows_of(k)]
            records["force"][s, k] = force if answer.dim[k] == 3 else np.repeat(force / 4, 4)
    for name, value in records.items():
        world.put(f"contact_{name}", value)
    world.put("ncon", np.array([[len(answer.dist)] for answer in known]))


def put_rows(robot: physics.Robot, world: ReferenceWorld, known: Sequence[Answer]) -> None:
    """Put the answers' constraint rows into the world, as the constraint stage would have written them."""
    contact = {name: world.get(f"contact_{name}") for name in ("J", "D", "aref")}
    limit = {name: np.zeros((len(known), robot.mj.njnt)) for name in ("sign", "D", "aref")}
    to_basis = np.linalg.pinv(EDGES)
    for s, answer in enumerate(known):
        for row in np.flatnonzero(answer.type == _LIMIT):
            j = answer.id[row]
            limit["sign"][s, j] = answer.J[row, robot.mj.jnt_dofadr[j]]
            limit["D"][s, j], limit["aref"][s, j] = answer.D[row], answer.aref[row]
        for k in range(len(answer.dist)):
            rows = answer.rows_of(k)
            smooth = answer.dim[k] == 1
            for name in ("J", "aref"):
                value = getattr(answer, name)[rows]
                contact[name][s, k] = [*value, *(0 * value), *(0 * value)] if smooth else to_basis @ value
            contact["D"][s, k] = answer.D[rows][0] * (0.25 if smooth else 1.0)
    for kind, records in (("contact", contact), ("limit", limit)):
        for name, value in records.items():
            world.put(f"{kind}_{name}", value)


# ---- The kernels' records in MuJoCo's order --------------------------------------------------------------------------


class Records:
    """Copies of a world's fields, made once: `records.qacc[s]`."""

    def __init__(self, world: ReferenceWorld):
        self._world = world

    def __getattr__(self, name: str) -> np.ndarray:
        value = self.__dict__[name] = self._world.get(name)
        return value


def contact_order(robot: physics.Robot, found: Records, answer: Answer, s: int) -> np.ndarray:
    """For each of MuJoCo's contacts in state s the kernel's contact of the same geoms, the nearest if there are two."""
    count = int(found.ncon[s, 0])
    geom = robot.model.pair_geom[found.contact_pair[s, :count]]
    assert sorted(geom.tolist()) == sorted(answer.geom.tolist()), f"state {s}: other pairs of geoms touch"
    order: list[int] = []
    for ids, pos in zip(answer.geom, answer.pos, strict=True):
        same = [k for k in range(count) if (geom[k] == ids).all() and k not in order]
        order.append(min(same, key=lambda k: np.abs(found.contact_pos[s, k] - pos).sum()))
    return np.array(order, int)


def rows(robot: physics.Robot, found: Records, answer: Answer, s: int) -> dict[str, np.ndarray]:
    """The kernels' rows of state s in MuJoCo's order and by MuJoCo's names: J, D, aref, force."""
    m = robot.model
    listed = []
    for j in np.flatnonzero(m.jnt_limited):
        sign, stiffness, aref = found.limit_sign[s, j], found.limit_D[s, j], found.limit_aref[s, j]
        if sign == 0:
            assert stiffness == 0 == aref, f"state {s}: joint {j} is inside its range"
        else:
            listed.append((sign * np.eye(m.nv)[m.jnt_dofadr[j]], stiffness, aref, found.limit_force[s, j]))
    for k, dim in zip(contact_order(robot, found, answer, s), answer.dim, strict=True):
        jacobian, aref = EDGES @ found.contact_J[s, k], EDGES @ found.contact_aref[s, k]
        force, stiffness = found.contact_force[s, k], found.contact_D[s, k]
        if dim == 1:
            assert not found.contact_J[s, k, 1:].any()
            listed.append((jacobian[0], 4 * stiffness, aref[0], force.sum()))
        else:
            listed += [(jacobian[i], stiffness, aref[i], force[i]) for i in range(4)]
    columns = zip(*listed, strict=True) if listed else ((), (), (), ())
    result = {name: np.array(column) for name, column in zip(("J", "D", "aref", "force"), columns, strict=True)}
    return result | {"J": result["J"].reshape(-1, m.nv)}


def error(found: np.ndarray, expected: np.ndarray, floor: float = 0.0) -> float:
    """The largest difference over the largest number expected, or over `floor` if that is larger."""
    assert found.shape == expected.shape, f"expected shape {expected.shape}, got {found.shape}"
    if found.size == 0:
        return 0.0
    size = max(float(np.abs(expected).max()), floor) or 1.0
    worst = float(np.abs(found - expected).max())
    return worst / size if np.isfinite(worst) else np.inf
