"""A robot as constants: an MJCF file, read by the `mujoco` package, becomes a frozen `Model`."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt

from brax_concurrent.kernels.model_pairs import PairParameters, mix_pair, pair_fields
from brax_concurrent.kernels.model_support import INTEGRATORS, UnsupportedModelError, unsupported_features
from brax_concurrent.kernels.model_tree import element_names, tree_fields

__all__ = ["Model", "Option", "PairParameters", "UnsupportedModelError", "load_model", "mix_pair"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32]

#: Contacts that are kept per environment unless `nconmax` says otherwise: half as many again as the humanoid
#: was seen to need while falling at random.  All that its geometry allows would be 190.
DEFAULT_NCONMAX = 16

_SOLVERS = {
    int(mujoco.mjtSolver.mjSOL_PGS): "pgs",
    int(mujoco.mjtSolver.mjSOL_CG): "cg",
    int(mujoco.mjtSolver.mjSOL_NEWTON): "newton",
}
_SIZES = ("nq", "nv", "nu", "nbody", "njnt", "ngeom", "nmocap", "ntendon")
_Flag = mujoco.mjtDisableBit


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
    """What MJCF's `<option>` sets, as far as the kernels use it.

    Attributes:
        timestep: physics step [s].
        integrator: "euler" (semi-implicit) or "rk4".
        gravity: shape (3,) [m/s^2]; zero where the flag `gravity` is disabled.
        impratio: ratio of friction-to-normal contact impedance.
        solver: "newton", "cg" or "pgs", as the file says.  Recorded only: Newton is what runs.
        iterations: cap on the solver's iterations.
        tolerance: the solver stops at this scaled improvement or gradient.
        ls_iterations: cap on the line search's iterations.
        ls_tolerance: tolerance of the line search.
        eulerdamp: Euler integrates joint damping implicitly (flag `eulerdamp`).
        warmstart: the solver starts from `qacc_warmstart` (flag `warmstart`).
        refsafe: solref's time constant is kept above two timesteps (flag `refsafe`).
    """

    timestep: float
    integrator: str
    gravity: FloatArray
    impratio: float
    solver: str
    iterations: int
    tolerance: float
    ls_iterations: int
    ls_tolerance: float
    eulerdamp: bool
    warmstart: bool
    refsafe: bool

    def __post_init__(self) -> None:
        if self.integrator not in INTEGRATORS.values():
            raise ValueError(f"integrator: expected 'euler' or 'rk4', got {self.integrator!r}")
        object.__setattr__(self, "gravity", _constant(self.gravity))

    def __setstate__(self, state: dict[str, Any]) -> None:
        _restore(self, state)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A robot's constants.  Fields carry MuJoCo's names, order, shapes and units (m, kg, s, rad).

    Arrays are read-only copies, float64 or int32 (MuJoCo's booleans become 0 and 1).  Two models are equal,
    and hash alike, when their `fingerprint` is the same.  `dataclasses.replace` makes a changed model.

    Disabled flags are already worked into the constants, so a kernel needs no flags but those in `opt`:
    `contact` leaves no pairs, `limit` clears jnt_limited, `constraint` does both, `spring` clears
    jnt_stiffness, `damper` clears dof_damping, `gravity` clears opt.gravity, `clampctrl` clears
    actuator_ctrllimited, `actuation` (and disabled actuator groups) clear gain and bias, `filterparent` adds
    pairs.  In all else the arrays equal `mujoco.MjModel`'s.

    Attributes:
        name: the model's name in the file, or "".
        nq, nv, nu, nbody, njnt, ngeom, nmocap, ntendon: MuJoCo's sizes.  Body 0 is the world.
        nM: entries of the inertia matrix in sparse (legacy `qM`) order, see `qM_ij` and `qm_address`.
        npair: number of candidate contact pairs: geoms that some pose could bring into contact.
        nexplicit: number of explicit `<pair>` elements (MuJoCo calls this npair).
        nconmax: contacts kept per environment.
        njmax: constraint rows these can make at most (MuJoCo's `nefc`): 1 per limited joint, and per contact
            4 (condim 3) or 1 (condim 1).
        opt: the physics options.
        stat_meaninertia: mean diagonal of the inertia matrix at qpos0, scales the solver's tolerance.
        qpos0, qpos_spring: (nq,) reference pose, and the springs' rest pose.
        body_parentid, body_rootid, body_weldid, body_mocapid (-1: none), body_jntnum, body_jntadr (-1: none),
            body_dofnum, body_dofadr (-1: none): (nbody,) the tree.
        body_pos (nbody, 3), body_quat (nbody, 4): frame in the parent.
        body_mass, body_subtreemass: (nbody,).
        body_ipos (nbody, 3), body_iquat (nbody, 4), body_inertia (nbody, 3): centre of mass, principal axes
            and moments of inertia.
        body_invweight0: (nbody, 2) mean inverse inertia at qpos0: translation, rotation.
        jnt_type: (njnt,) mjtJoint: 0 free, 2 slide, 3 hinge.
        jnt_qposadr, jnt_dofadr, jnt_bodyid: (njnt,).
        jnt_pos, jnt_axis: (njnt, 3) anchor and unit axis in the body frame.
        jnt_stiffness: (njnt,).
        jnt_limited, jnt_margin: (njnt,); jnt_range, jnt_solref: (njnt, 2); jnt_solimp: (njnt, 5).  At most
            one side of a limit is active at a time: a range narrower than 2*margin is refused.
        dof_bodyid, dof_jntid, dof_parentid (-1: none), dof_Madr (address of the diagonal in qM): (nv,).
        dof_armature, dof_damping, dof_invweight0: (nv,).
        geom_type (mjtGeom: 0 plane, 2 sphere, 3 capsule; others only where they cannot touch anything),
            geom_bodyid, geom_contype, geom_conaffinity, geom_condim, geom_priority: (ngeom,).
        geom_size, geom_pos, geom_friction (slide, spin, roll): (ngeom, 3), geom_quat: (ngeom, 4).
        geom_solmix, geom_margin, geom_gap, geom_rbound (0: plane): (ngeom,); geom_solref (ngeom, 2),
            geom_solimp (ngeom, 5).
        actuator_trnid: (nu, 2) the joint in column 0.
        actuator_gear: (nu, 6) the ratio in column 0.
        actuator_gainprm, actuator_biasprm: (nu, 10).  With length l = gear*q and velocity v = gear*qdot,
            force = gainprm[0]*ctrl + biasprm[0] + biasprm[1]*l + biasprm[2]*v.
        actuator_biastype: (nu,) mjtBias: 0 none (biasprm is ignored), 1 affine.
        actuator_ctrllimited, actuator_forcelimited: (nu,); actuator_ctrlrange, actuator_forcerange: (nu, 2).
        tendon_adr, tendon_num, tendon_length0: (ntendon,) fixed tendons.
        wrap_objid (joint), wrap_prm (coefficient): (nwrap,) the tendons' terms, from tendon_adr on.
        pair_geom: (npair, 2) geom ids of each candidate pair, geom1's type never above geom2's, in the order
            in which MuJoCo lists contacts.
        pair_explicit: (npair,) index of the explicit pair, or -1: mixed from the geoms.  See `mix_pair`.
        pair_condim, pair_maxcontact: (npair,) condim of the pair's contacts and how many there can be.
        pair_dim, pair_margin, pair_gap (nexplicit,), pair_solref (nexplicit, 2), pair_friction, pair_solimp
            (nexplicit, 5): the explicit pairs' own parameters.
        body_names, jnt_names, geom_names, actuator_names, tendon_names: names in the file, "" where there is
            none.
        dof_chain: for each dof the dofs from its root down to itself.
        body_dofs: for each body all dofs that move it, from the root down.
        body_children: for each body its child bodies.
        qM_ij: for each address in qM its (row, column): row a dof, column itself or an ancestor.
    """

    name: str
    nq: int
    nv: int
    nu: int
    nbody: int
    njnt: int
    ngeom: int
    nmocap: int
    ntendon: int
    nM: int
    npair: int
    nexplicit: int
    nconmax: int
    njmax: int
    opt: Option
    stat_meaninertia: float
    qpos0: FloatArray
    qpos_spring: FloatArray
    body_parentid: IntArray
    body_rootid: IntArray
    body_weldid: IntArray
    body_mocapid: IntArray
    body_jntnum: IntArray
    body_jntadr: IntArray
    body_dofnum: IntArray
    body_dofadr: IntArray
    body_pos: FloatArray
    body_quat: FloatArray
    body_ipos: FloatArray
    body_iquat: FloatArray
    body_mass: FloatArray
    body_subtreemass: FloatArray
    body_inertia: FloatArray
    body_invweight0: FloatArray
    jnt_type: IntArray
    jnt_qposadr: IntArray
    jnt_dofadr: IntArray
    jnt_bodyid: IntArray
    jnt_pos: FloatArray
    jnt_axis: FloatArray
    jnt_stiffness: FloatArray
    jnt_limited: IntArray
    jnt_range: FloatArray
    jnt_margin: FloatArray
    jnt_solref: FloatArray
    jnt_solimp: FloatArray
    dof_bodyid: IntArray
    dof_jntid: IntArray
    dof_parentid: IntArray
    dof_Madr: IntArray
    dof_armature: FloatArray
    dof_damping: FloatArray
    dof_invweight0: FloatArray
    geom_type: IntArray
    geom_bodyid: IntArray
    geom_contype: IntArray
    geom_conaffinity: IntArray
    geom_condim: IntArray
    geom_priority: IntArray
    geom_size: FloatArray
    geom_pos: FloatArray
    geom_quat: FloatArray
    geom_friction: FloatArray
    geom_solmix: FloatArray
    geom_solref: FloatArray
    geom_solimp: FloatArray
    geom_margin: FloatArray
    geom_gap: FloatArray
    geom_rbound: FloatArray
    actuator_trnid: IntArray
    actuator_gear: FloatArray
    actuator_gainprm: FloatArray
    actuator_biasprm: FloatArray
    actuator_biastype: IntArray
    actuator_ctrllimited: IntArray
    actuator_ctrlrange: FloatArray
    actuator_forcelimited: IntArray
    actuator_forcerange: FloatArray
    tendon_adr: IntArray
    tendon_num: IntArray
    tendon_length0: FloatArray
    wrap_objid: IntArray
    wrap_prm: FloatArray
    pair_geom: IntArray
    pair_explicit: IntArray
    pair_condim: IntArray
    pair_maxcontact: IntArray
    pair_dim: IntArray
    pair_friction: FloatArray
    pair_solref: FloatArray
    pair_solimp: FloatArray
    pair_margin: FloatArray
    pair_gap: FloatArray
    body_names: tuple[str, ...]
    jnt_names: tuple[str, ...]
    geom_names: tuple[str, ...]
    actuator_names: tuple[str, ...]
    tendon_names: tuple[str, ...]
    dof_chain: tuple[tuple[int, ...], ...]
    body_dofs: tuple[tuple[int, ...], ...]
    body_children: tuple[tuple[int, ...], ...]
    qM_ij: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                object.__setattr__(self, field.name, _constant(value))

    def __setstate__(self, state: dict[str, Any]) -> None:
        _restore(self, state)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all contents, in hexadecimal: equal for equal models, in any process."""
        digest = hashlib.sha256()
        _update(digest, self)
        return digest.hexdigest()

    def qm_address(self, i: int, j: int) -> int:
        """Return the address in `qM` of entry (i, j).

        Args:
            i: a dof.
            j: the same dof or an ancestor of it.

        Returns:
            The address in [0, nM).

        Raises:
            KeyError: j is not in `dof_chain[i]`; that entry of the inertia matrix is always zero, or is
                stored as (j, i).
        """
        chain = self.dof_chain[i]
        if j not in chain:
            raise KeyError(f"(i, j): expected j among dof {i} and its ancestors {chain}, got j={j}")
        return int(self.dof_Madr[i]) + len(chain) - 1 - chain.index(j)

    def __eq__(self, other: object) -> bool:
        return self.fingerprint == other.fingerprint if isinstance(other, Model) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"Model({self.name!r}, nq={self.nq}, nv={self.nv}, nu={self.nu}, nbody={self.nbody}, "
            f"npair={self.npair}, nconmax={self.nconmax}, timestep={self.opt.timestep:g}, "
            f"integrator={self.opt.integrator!r}, fingerprint={self.fingerprint[:8]})"
        )


def load_model(
    model: str | os.PathLike[str] | mujoco.MjModel,
    *,
    nconmax: int | None = None,
    integrator: str | None = None,
) -> Model:
    """Compile a robot with MuJoCo and return what the kernels need of it.

    Supported: free, slide and hinge joints (several on a body, any anchor and axis, `ref`), with limits,
    armature, damping and springs; sphere and capsule geoms, and planes fixed to the world; other geom types
    with contype=conaffinity=0; condim 1 and 3 with the pyramidal cone; `<pair>` and `<exclude>`; motor,
    position, velocity and general actuators on hinges and slides with fixed gain, no or affine bias and no
    activation; mocap bodies; fixed tendons without force; Euler and RK4.  `solver` PGS or CG is accepted, but
    Newton is what runs.  Sensors, sites, keyframes, custom fields and all that is drawn are ignored, and so
    is `<size nconmax>`.

    Args:
        model: path of an MJCF file, or MJCF text (recognised by its first character, "<"), or a compiled
            model.
        nconmax: contacts kept per environment; contacts beyond it are counted, not simulated.  Default: what
            the geometry allows, but at most 16.  A larger number than the geometry allows is cut down to
            that.
        integrator: "euler" or "rk4" instead of the file's.

    Returns:
        The model.

    Raises:
        UnsupportedModelError: the model needs something the kernels do not have; the error lists all of it.
        FileNotFoundError: `model` is a path where there is no file.
        ValueError: MuJoCo cannot compile `model`, or an argument is out of range.
        TypeError: an argument has the wrong type.
    """
    if nconmax is not None:
        if isinstance(nconmax, bool) or not isinstance(nconmax, (int, np.integer)):
            raise TypeError(f"nconmax: expected an integer or None, got {nconmax!r}")
        if nconmax < 1:
            raise ValueError(f"nconmax: expected at least 1, got {nconmax}")
    if integrator is not None and integrator not in INTEGRATORS.values():
        raise ValueError(f"integrator: expected 'euler', 'rk4' or None, got {integrator!r}")
    mj, path = compile_mjcf(model)
    name = mj.names.split(b"\0", 1)[0].decode()
    features = unsupported_features(mj, integrator)
    if features:
        raise UnsupportedModelError(name, features, path)

    values: dict[str, Any] = {size: int(getattr(mj, size)) for size in _SIZES}
    values |= {field: np.array(getattr(mj, field)) for field in _COPIED}
    _apply_disable_flags(mj, values)
    values |= element_names(mj) | tree_fields(mj)
    values |= pair_fields(mj, DEFAULT_NCONMAX if nconmax is None else int(nconmax))
    njmax = int(np.count_nonzero(values["jnt_limited"])) + values.pop("max_contact_rows")
    meaninertia = float(mj.stat.meaninertia)
    return Model(name=name, njmax=njmax, opt=_option(mj, integrator), stat_meaninertia=meaninertia, **values)


def compile_mjcf(model: str | os.PathLike[str] | mujoco.MjModel) -> tuple[mujoco.MjModel, Path | None]:
    """The compiled model, and the path of the file that it came from; arguments and errors as in load_model."""
    if isinstance(model, mujoco.MjModel):
        return model, None
    if not isinstance(model, (str, os.PathLike)):
        given = type(model).__name__
        raise TypeError(f"model: expected an MJCF path, MJCF text or a mujoco.MjModel, got {given}")
    if isinstance(model, str) and model.lstrip().startswith("<"):
        try:
            return mujoco.MjModel.from_xml_string(model), None
        except ValueError as error:
            raise ValueError(f"model: MuJoCo cannot compile this MJCF text: {error}") from error
    path = Path(model)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "nothing"
        raise FileNotFoundError(
            f"model: expected MJCF text or the path of an MJCF file, found {found} at {str(path)!r}"
        )
    try:
        return mujoco.MjModel.from_xml_path(str(path)), path
    except ValueError as error:
        raise ValueError(f"model: MuJoCo cannot compile {str(path)!r}: {error}") from error


def _option(mj: mujoco.MjModel, integrator: str | None) -> Option:
    opt, disabled = mj.opt, mj.opt.disableflags
    return Option(
        timestep=float(opt.timestep),
        integrator=integrator or INTEGRATORS[opt.integrator],
        gravity=np.zeros(3) if disabled & _Flag.mjDSBL_GRAVITY else np.array(opt.gravity),
        impratio=float(opt.impratio),
        solver=_SOLVERS[opt.solver],
        iterations=int(opt.iterations),
        tolerance=float(opt.tolerance),
        ls_iterations=int(opt.ls_iterations),
        ls_tolerance=float(opt.ls_tolerance),
        eulerdamp=not disabled & _Flag.mjDSBL_EULERDAMP,
        warmstart=not disabled & _Flag.mjDSBL_WARMSTART,
        refsafe=not disabled & _Flag.mjDSBL_REFSAFE,
    )


def _apply_disable_flags(mj: mujoco.MjModel, arrays: dict[str, np.ndarray]) -> None:
    """Write disabled flags into the constants, so that no kernel has to ask for them."""
    clears = {
        _Flag.mjDSBL_CONSTRAINT: ("jnt_limited",),
        _Flag.mjDSBL_LIMIT: ("jnt_limited",),
        _Flag.mjDSBL_SPRING: ("jnt_stiffness",),
        _Flag.mjDSBL_DAMPER: ("dof_damping",),
        _Flag.mjDSBL_CLAMPCTRL: ("actuator_ctrllimited",),
        # Without actuation not even the force clamp runs, which could make a force out of 0.
        _Flag.mjDSBL_ACTUATION: ("actuator_gainprm", "actuator_biasprm", "actuator_forcelimited"),
    }
    for flag, names in clears.items():
        if mj.opt.disableflags & flag:
            for name in names:
                arrays[name][:] = 0
    # Of a disabled group only gain and bias go: MuJoCo still clamps these actuators' zero force.
    for i, group in enumerate(mj.actuator_group.tolist()):
        if 0 <= group <= 30 and mj.opt.disableactuator & (1 << group):
            arrays["actuator_gainprm"][i] = arrays["actuator_biasprm"][i] = 0


def _constant(array: npt.ArrayLike) -> np.ndarray:
    """Return a read-only, contiguous copy of dtype float64 or int32."""
    value = np.asarray(array)
    copy = np.array(value, np.float64 if value.dtype.kind == "f" else np.int32, order="C")
    copy.setflags(write=False)
    return copy


def _restore(instance: Any, state: dict[str, Any]) -> None:
    """Rebuild a frozen dataclass from a pickle or a deep copy, which forget that arrays are read-only."""
    for name, value in state.items():
        instance.__dict__[name] = _constant(value) if isinstance(value, np.ndarray) else value


def _update(digest: Any, value: Any) -> None:
    """Feed a value into a hash, with its type and shape, so that different contents cannot look alike."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            digest.update(field.name.encode())
            _update(digest, getattr(value, field.name))
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype.str}{value.shape}".encode())
        digest.update(value.tobytes())
    else:
        digest.update(f"{type(value).__name__} {value!r};".encode())


_COMPUTED = ("pair_geom", "pair_explicit", "pair_condim", "pair_maxcontact")

#: The arrays that MuJoCo's model has under the same name.
_COPIED = tuple(
    field.name
    for field in dataclasses.fields(Model)
    if field.type in ("FloatArray", "IntArray") and field.name not in _COMPUTED
)
