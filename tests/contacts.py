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


# ---- Models with other constraint parameters than the robots' --------------------------------------------------------

_ARMS = """
<mujoco>
  <compiler angle="radian"/>
  <option {option}><flag {flag}/></option>
  <default>
    <geom type="capsule" size="0.06 0.15" {geom}/>
    <joint damping="0.5" limited="true" range="-0.5 0.7" {joint}/>
    <pair {pair_default}/>
  </default>
  <worldbody>
    <geom name="floor" type="plane" size="1 1 1" {floor}/>
    <body name="trunk" pos="0 0 0.3">
      <freejoint/>
      <geom name="trunk" type="sphere" size="0.15" {trunk}/>
      <body name="arm" pos="0.2 0 0">
        <joint axis="0 1 0"/>
        <geom name="arm" pos="0.15 0 0" zaxis="1 0 0" {arm}/>
        <body name="hand" pos="0.35 0 0">
          <joint axis="0 1 0.5"/>
          <joint type="slide" axis="1 0 0" range="-0.1 0.1"/>
          <geom name="hand" type="sphere" size="0.08" {hand}/>
        </body>
      </body>
      <body name="leg" pos="-0.2 0 0">
        <joint axis="1 0 0"/>
        <geom name="leg" pos="0 0 -0.15" {leg}/>
      </body>
    </body>
    <body name="ball" pos="0.5 0 0.3">
      <freejoint/>
      <geom name="ball" type="sphere" size="0.2" {ball}/>
    </body>
  </worldbody>
  <contact>{contact}</contact>
</mujoco>
"""


class _Blanks(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return ""


def arms(**parts: str) -> str:
    """MJCF of a robot with limits, next to a ball on a floor; `parts` are attributes of its elements."""
    return _ARMS.format_map(_Blanks(parts))


_PAIRS = """
<pair geom1="floor" geom2="ball" condim="3" friction="0.7 0.3 0.1 0.1 0.1" margin="0.03" gap="0.01"/>
<pair geom1="ball" geom2="hand" condim="1" solref="0.03 0.8" solimp="0.5 0.9 0.01 0.3 3"/>
<pair geom1="arm" geom2="ball" condim="3" solref="-900 -30" friction="0.2 1.5 0.1 0.1 0.1"/>
"""

VARIANTS = {
    "plain": arms(),
    "explicit pairs": arms(contact=_PAIRS),
    "priority": arms(ball='priority="2" friction="0.2" condim="1"', hand='priority="1" solref="0.05 1"'),
    "priority of the floor": arms(floor='priority="1" friction="0.3" solref="0.04 2" condim="3"', geom='condim="1"'),
    "friction and condim of either geom": arms(
        floor='friction="0.4" condim="1"', ball='friction="0.9" condim="3"', geom='condim="1"', arm='condim="3"'
    ),
    "no friction": arms(geom='condim="1"', floor='condim="1"', trunk='friction="0"'),
    "friction at its lower bound": arms(geom='friction="0"', floor='friction="0"'),
    "solmix": arms(floor='solmix="3" solref="0.05 1"', ball='solmix="0.5" solimp="0.8 0.99 0.01 0.4 4"'),
    "solmix near zero": arms(ball='solmix="3e-15" solref="0.05 0.7"', hand='solmix="8e-16"', floor='solmix="0"'),
    "solmix zero on both sides": arms(geom='solmix="0"', floor='solmix="0" solref="0.04 2"'),
    "direct solref": arms(geom='solref="-1000 -50"', floor='solref="-500 -80"', joint='solreflimit="-300 -20"'),
    "direct solref on one side": arms(ball='solref="-1000 -50"'),
    "margin and gap": arms(geom='margin="0.02" gap="0.01"', floor='margin="0.01" gap="0.03"', joint='margin="0.05"'),
    "solimp power 1": arms(geom='solimp="0.3 0.95 0.05 0.5 1"', joint='solimplimit="0.2 0.9 0.1 0.5 1"'),
    "solimp power 3": arms(geom='solimp="0.3 0.95 0.2 0.3 3"', joint='solimplimit="0.2 0.9 0.4 0.7 2.5"'),
    "solimp without width": arms(geom='solimp="0.3 0.8 0 0.5 2"', joint='solimplimit="0.9 0.5 0 0.5 2"'),
    "flat solimp": arms(geom='solimp="0.8 0.8 0.01 0.5 2"', joint='solimplimit="0.7 0.7 0.1 0.5 2"'),
    "falling solimp": arms(geom='solimp="0.95 0.3 0.05 0.5 2"'),
    "solimp out of bounds": arms(geom='solimp="0 1 0.05 0 0.5"', joint='solimplimit="1 0 0.1 1 1"'),
    "impratio": arms(option='impratio="5"'),
    "fast solref": arms(geom='solref="0.001 1"', joint='solreflimit="0.0005 1"'),
    "fast solref as it is": arms(geom='solref="0.003 1"', joint='solreflimit="0.002 1"', flag='refsafe="disable"'),
    "no limits": arms(flag='limit="disable"'),
    "no contacts": arms(flag='contact="disable"'),
    "no constraints": arms(flag='constraint="disable"'),
    "cold start": arms(flag='warmstart="disable"'),
}
