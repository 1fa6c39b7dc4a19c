"""Acceleration without constraints (`mj_fwdAcceleration`)."""

from __future__ import annotations

from typing import Any

from brax_concurrent.kernels.inertia import factor_entries
from brax_concurrent.kernels.kernel import kernel
from brax_concurrent.kernels.symmetric import solve


@kernel(
    reads=("qfrc_passive", "qfrc_bias", "qfrc_actuator", "qLD", "qLDiagInv"),
    writes=("qfrc_smooth", "qacc_smooth"),
)
def acceleration(m: Any, w: Any) -> None:
    """qfrc_smooth, the sum of all forces but the constraints', and M qacc_smooth = qfrc_smooth."""
    smooth = [w.qfrc_passive[i] - w.qfrc_bias[i] + w.qfrc_actuator[i] for i in range(m.nv)]
    qacc = solve(*factor_entries(m, w), smooth)
    for i in range(m.nv):
        w.qfrc_smooth[i], w.qacc_smooth[i] = smooth[i], qacc[i]
