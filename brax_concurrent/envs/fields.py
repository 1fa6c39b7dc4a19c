"""The fields that users see: which there are, and what they hold where no stage writes them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from brax_concurrent.kernels.layout import Field
from brax_concurrent.kernels.model import Model
from brax_concurrent.kernels.ops import where

_SCRATCH = ("contact_jar", "contact_jv", "rk4_")  # the solver's and the integrator's own


def visible_fields(fields: Mapping[str, Field]) -> dict[str, Field]:
    """The fields of a model that users may ask for, by MuJoCo's names."""
    return {name: field for name, field in fields.items() if not name.startswith(_SCRATCH)}


def unknown(name: str, known: Iterable[str]) -> str:
    """What an error says of a field that is not there."""
    known = list(known)
    return f"{name!r} is no field; nearest: {difflib.get_close_matches(name, known, 3)}, all: {sorted(known)}"


def shown(m: Model, fields: Mapping[str, Field], w: Any, name: str, index: tuple[int, ...]) -> Any:
    """A component of a field as users see it: 0 where no stage writes it."""
    zero = 0.0 if fields[name].dtype == "f" else 0
    if not m.nmocap and name.startswith("mocap_"):
        return zero
    if not m.nu and name in ("ctrl", "actuator_force"):
        return zero
    if name.startswith("limit_") and not (m.njnt and m.jnt_limited[index[0]]):
        return zero
    if name.startswith("contact_"):
        return where(index[0] < w.ncon[0], w.field(name)[index], zero) if m.npair else zero
    return w.field(name)[index]
