"""What the kernels can simulate, and a complete list of what a model asks for beyond that.

A model is refused once, when it is loaded, with every reason at once, each in MJCF's own words.  Nothing that
changes the motion is dropped silently.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import mujoco
import numpy as np

from brax_concurrent.kernels.model_pairs import CAPSULE, PLANE, SPHERE

_Flag = mujoco.mjtDisableBit
_Enable = mujoco.mjtEnableBit
_Obj = mujoco.mjtObj

#: The integrators that the kernels have, by mjtIntegrator.
INTEGRATORS = {int(mujoco.mjtIntegrator.mjINT_EULER): "euler", int(mujoco.mjtIntegrator.mjINT_RK4): "rk4"}

#: Disable flags that are honoured, or that concern features no accepted model has.
_KNOWN_DISABLE = (1 << int(_Flag.mjNDISABLE)) - 1

#: Enable flags that only add outputs which the kernels do not compute.
_HARMLESS_ENABLE = int(_Enable.mjENBL_ENERGY | _Enable.mjENBL_FWDINV | _Enable.mjENBL_INVDISCRETE)

# Plain integers: an enumerator of MuJoCo's is not found among numpy's integers, nor the other way round.
_GEOM_TYPES = (PLANE, SPHERE, CAPSULE)
_CONDIMS = (1, 3)
_FREE, _BALL = int(mujoco.mjtJoint.mjJNT_FREE), int(mujoco.mjtJoint.mjJNT_BALL)
_JOINT_TRANSMISSIONS = (int(mujoco.mjtTrn.mjTRN_JOINT), int(mujoco.mjtTrn.mjTRN_JOINTINPARENT))
_BIASES = (int(mujoco.mjtBias.mjBIAS_NONE), int(mujoco.mjtBias.mjBIAS_AFFINE))


class UnsupportedModelError(ValueError):
    """A model uses features that the kernels do not have.

    Attributes:
        features: one line per feature and element, in MJCF's words, e.g. "joint 'hip' type='ball'".
    """

    def __init__(self, model_name: str, features: list[str], path: os.PathLike[str] | None = None) -> None:
        self.features = tuple(features)
        listing = "\n".join(f"  - {feature}" for feature in features)
        file = "" if path is None else f" of {os.fspath(path)}"
        super().__init__(f"model {model_name!r}{file} uses {len(features)} unsupported feature(s):\n{listing}")


def unsupported_features(mj: mujoco.MjModel, integrator: str | None = None) -> list[str]:
    """List everything in a compiled model that the kernels cannot simulate.

    Args:
        mj: a compiled model.
        integrator: "euler" or "rk4" where the caller overrides the model's integrator, else None.

    Returns:
        One line per feature and element; empty if the model is supported.
    """
    return [line for check in _CHECKS for line in check(mj)] + list(_integrator(mj, integrator))


def _name(mj: mujoco.MjModel, kind: mujoco.mjtObj, tag: str, index: int) -> str:
    """Return an element as a user would look for it: "joint 'hip'", or "joint #3" without a name."""
    name = mujoco.mj_id2name(mj, kind, int(index))
    return f"{tag} {name!r}" if name else f"{tag} #{index}"


def _enum(value: int, enum: type, prefix: str) -> str:
    """Return an enumerator as MJCF spells it: mjtGeom.mjGEOM_BOX with prefix "mjGEOM_" is "box"."""
    for name, member in enum.__members__.items():  # type: ignore[attr-defined]
        if int(member) == int(value) and name.startswith(prefix):
            return str(name[len(prefix) :].lower())
    return str(value)


def _integrator(mj: mujoco.MjModel, override: str | None) -> Iterator[str]:
    if override is None and mj.opt.integrator not in INTEGRATORS:
        given = _enum(mj.opt.integrator, mujoco.mjtIntegrator, "mjINT_")
        yield f"option integrator='{given}' (supported: Euler, RK4)"


def _options(mj: mujoco.MjModel) -> Iterator[str]:
    opt = mj.opt
    if opt.cone != int(mujoco.mjtCone.mjCONE_PYRAMIDAL):
        yield f"option cone='{_enum(opt.cone, mujoco.mjtCone, 'mjCONE_')}' (supported: pyramidal)"
    if opt.density != 0:
        yield f"option density={opt.density:g} (fluid forces)"
    if opt.viscosity != 0:
        yield f"option viscosity={opt.viscosity:g} (fluid forces)"
    if opt.noslip_iterations > 0:
        yield f"option noslip_iterations={opt.noslip_iterations}"
    for name, bit in _Enable.__members__.items():
        if name.startswith("mjENBL_") and opt.enableflags & int(bit) & ~_HARMLESS_ENABLE:
            yield f"option flag {name[7:].lower()}='enable'"
    if opt.disableflags & ~_KNOWN_DISABLE:
        yield f"option disableflags={opt.disableflags} (bits unknown to this version)"


def _whole_model(mj: mujoco.MjModel) -> Iterator[str]:
    if mj.nv == 0:
        yield "no joints: the model has no degree of freedom to simulate"
    for i in range(mj.nflex):
        yield _name(mj, _Obj.mjOBJ_FLEX, "flex", i)
    for i in range(mj.nplugin):
        yield _name(mj, _Obj.mjOBJ_PLUGIN, "plugin", i)
    if not mj.opt.disableflags & _Flag.mjDSBL_EQUALITY:
        for i in range(mj.neq):
            kind = _enum(mj.eq_type[i], mujoco.mjtEq, "mjEQ_")
            yield f"{_name(mj, _Obj.mjOBJ_EQUALITY, 'equality', i)} ({kind})"


def _bodies(mj: mujoco.MjModel) -> Iterator[str]:
    for i in np.flatnonzero(mj.body_gravcomp).tolist():
        yield f"{_name(mj, _Obj.mjOBJ_BODY, 'body', i)} gravcomp={mj.body_gravcomp[i]:g}"


def _joints(mj: mujoco.MjModel) -> Iterator[str]:
    for j in range(mj.njnt):
        joint = _name(mj, _Obj.mjOBJ_JOINT, "joint", j)
        kind = mj.jnt_type[j]
        if kind == _BALL:
            yield f"{joint} type='ball' (supported: free, slide, hinge)"
            continue
        if kind == _FREE and mj.jnt_stiffness[j] != 0:
            yield f"{joint} type='free' with stiffness={mj.jnt_stiffness[j]:g}"
        if mj.jnt_stiffnesspoly[j].any():
            yield f"{joint} stiffness with polynomial coefficients"
        if mj.jnt_springyield[j] != 0:
            yield f"{joint} springyield={mj.jnt_springyield[j]:g}"
        if mj.jnt_actfrclimited[j]:
            yield f"{joint} actuatorfrcrange"
        if mj.jnt_limited[j]:
            yield from _limit(mj, j, joint)


def _limit(mj: mujoco.MjModel, j: int, joint: str) -> Iterator[str]:
    """A joint has one limit row in the kernels, so both of its sides must not be active in one pose."""
    lower, upper = mj.jnt_range[j]
    if 2 * mj.jnt_margin[j] > upper - lower:
        yield (
            f"{joint} margin={mj.jnt_margin[j]:g} with a range {upper - lower:g} wide: both limits could be "
            "active at once (supported: 2*margin <= width)"
        )
    if _mixed_solref(mj.jnt_solref[j]):
        yield f"{joint} solreflimit='{_numbers(mj.jnt_solref[j])}' (one positive, one not)"


def _dofs(mj: mujoco.MjModel) -> Iterator[str]:
    ignored = mj.opt.disableflags & _Flag.mjDSBL_FRICTIONLOSS
    frictionloss = np.zeros(mj.nv) if ignored else mj.dof_frictionloss
    for j in range(mj.njnt):
        first = mj.jnt_dofadr[j]
        dofs = slice(first, first + _dofnum(mj, j))
        joint = _name(mj, _Obj.mjOBJ_JOINT, "joint", j)
        if frictionloss[dofs].any():
            yield f"{joint} frictionloss={frictionloss[dofs].max():g}"
        if mj.dof_dampingpoly[dofs].any():
            yield f"{joint} damping with polynomial coefficients"


def _dofnum(mj: mujoco.MjModel, j: int) -> int:
    return {_FREE: 6, _BALL: 3}.get(int(mj.jnt_type[j]), 1)


def _geoms(mj: mujoco.MjModel) -> Iterator[str]:
    in_pair = set(mj.pair_geom1.tolist()) | set(mj.pair_geom2.tolist())
    for g in range(mj.ngeom):
        masks = mj.geom_contype[g] or mj.geom_conaffinity[g]
        if not masks and g not in in_pair:
            continue
        geom = _name(mj, _Obj.mjOBJ_GEOM, "geom", g)
        if mj.geom_type[g] not in _GEOM_TYPES:
            kind = _enum(mj.geom_type[g], mujoco.mjtGeom, "mjGEOM_")
            yield f"{geom} type='{kind}' (supported: plane, sphere, capsule; any with contype=conaffinity=0)"
        elif mj.geom_type[g] == PLANE and mj.body_weldid[mj.geom_bodyid[g]] != 0:
            yield f"{geom} type='plane' on a body that is not fixed to the world"
        if masks and mj.geom_condim[g] not in _CONDIMS:
            yield f"{geom} condim={mj.geom_condim[g]} (supported: 1, 3)"
        if masks and _mixed_solref(mj.geom_solref[g]):
            yield f"{geom} solref='{_numbers(mj.geom_solref[g])}' (one positive, one not)"
        if mj.geom_adhesion[g] != 0:
            yield f"{geom} adhesion={mj.geom_adhesion[g]:g}"
        if mj.geom_surfacevel[g].any():
            yield f"{geom} surfacevel='{_numbers(mj.geom_surfacevel[g])}'"


def _pairs(mj: mujoco.MjModel) -> Iterator[str]:
    for k in range(mj.npair):
        pair = _name(mj, _Obj.mjOBJ_PAIR, "pair", k)
        if mj.pair_dim[k] not in _CONDIMS:
            yield f"{pair} condim={mj.pair_dim[k]} (supported: 1, 3)"
        if _mixed_solref(mj.pair_solref[k]):
            yield f"{pair} solref='{_numbers(mj.pair_solref[k])}' (one positive, one not)"
        if mj.pair_adhesion[k] != 0:
            yield f"{pair} adhesion={mj.pair_adhesion[k]:g}"


def _mixed_solref(solref: np.ndarray) -> bool:
    """Return whether MuJoCo would warn and put its default in place, at run time, of this solref."""
    return bool((solref[0] > 0) != (solref[1] > 0))


def _numbers(values: np.ndarray) -> str:
    return " ".join(f"{value:g}" for value in values)


def _actuators(mj: mujoco.MjModel) -> Iterator[str]:
    for i in range(mj.nactuator):
        actuator = _name(mj, _Obj.mjOBJ_ACTUATOR, "actuator", i)
        yield from (f"{actuator} {what}" for what in _transmission(mj, i))
        yield from (f"{actuator} {what}" for what in _force_law(mj, i))
        if mj.actuator_plugin[i] >= 0:
            yield f"{actuator} plugin"
        if mj.actuator_delay[i] != 0:
            yield f"{actuator} delay={mj.actuator_delay[i]:g}"
        if mj.actuator_damping[i] != 0 or mj.actuator_dampingpoly[i].any():
            yield f"{actuator} damping={mj.actuator_damping[i]:g} (supported on joints)"
        if mj.actuator_armature[i] != 0:
            yield f"{actuator} armature={mj.actuator_armature[i]:g} (supported on joints)"


def _transmission(mj: mujoco.MjModel, i: int) -> Iterator[str]:
    kind = mj.actuator_trntype[i]
    if kind not in _JOINT_TRANSMISSIONS:
        yield f"transmission='{_enum(kind, mujoco.mjtTrn, 'mjTRN_')}' (supported: joint)"
    elif mj.jnt_type[mj.actuator_trnid[i, 0]] in (_FREE, _BALL):
        joint = _name(mj, _Obj.mjOBJ_JOINT, "joint", mj.actuator_trnid[i, 0])
        yield f"acts on {joint}, which is neither hinge nor slide"


def _force_law(mj: mujoco.MjModel, i: int) -> Iterator[str]:
    gain, bias, dyn = mj.actuator_gaintype[i], mj.actuator_biastype[i], mj.actuator_dyntype[i]
    if gain != int(mujoco.mjtGain.mjGAIN_FIXED):
        yield f"gaintype='{_enum(gain, mujoco.mjtGain, 'mjGAIN_')}' (supported: fixed)"
    if bias not in _BIASES:
        yield f"biastype='{_enum(bias, mujoco.mjtBias, 'mjBIAS_')}' (supported: none, affine)"
    if dyn != int(mujoco.mjtDyn.mjDYN_NONE):
        yield f"dyntype='{_enum(dyn, mujoco.mjtDyn, 'mjDYN_')}' (supported: none)"
    elif mj.actuator_actnum[i] > 0:
        yield f"actdim={mj.actuator_actnum[i]} (supported: no activation)"
    if mj.actuator_ctrlnum[i] != 1 or mj.actuator_outnum[i] != 1:
        counts = f"{mj.actuator_ctrlnum[i]} controls and {mj.actuator_outnum[i]} outputs"
        yield f"with {counts} (supported: 1 and 1)"


def _tendons(mj: mujoco.MjModel) -> Iterator[str]:
    """Fixed tendons without any force are kept: their length and velocity are information."""
    coefficients = (
        "stiffness",
        "stiffnesspoly",
        "damping",
        "dampingpoly",
        "frictionloss",
        "armature",
        "springyield",
    )
    for t in range(mj.ntendon):
        tendon = _name(mj, _Obj.mjOBJ_TENDON, "tendon", t)
        parts = mj.wrap_type[mj.tendon_adr[t] : mj.tendon_adr[t] + mj.tendon_num[t]]
        if (parts != int(mujoco.mjtWrap.mjWRAP_JOINT)).any():
            yield f"{tendon} is spatial (supported: fixed)"
        if mj.tendon_limited[t]:
            yield f"{tendon} limited='true'"
        if mj.tendon_actfrclimited[t]:
            yield f"{tendon} actuatorfrcrange"
        for field in coefficients:
            values = np.atleast_1d(getattr(mj, f"tendon_{field}")[t])
            if values.any():
                yield f"{tendon} {field}='{_numbers(values)}'"


_CHECKS: tuple[Callable[[mujoco.MjModel], Iterator[str]], ...] = (
    _options,
    _whole_model,
    _bodies,
    _joints,
    _dofs,
    _geoms,
    _pairs,
    _actuators,
    _tendons,
)
