"""Which parameters a device's own data makes important: the diagonal of the Fisher information, normalised by parts.

FedDPA, FedADDP and DP-FedSim keep a parameter where its normalised value reaches a threshold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import array_api_compat

from hushfleet.methods.base import Array, DeviceState

Normalisation = Literal["min-max", "sum"]

PERSONAL = "personal"  # in `private` from `prepare` to `advance`: bool `[..., d]`, what is kept of the own model


def normalised(fisher: Array, parts: Iterable[slice], how: Normalisation) -> Array:
    """Each part of `fisher [..., d]`, which is not negative, on a scale of its own.

    :param parts: layers or tensors; together they cover the vector.
    :param how: `min-max` sends a part's smallest value to 0 and its largest to 1; `sum` divides by the part's sum.
        A part whose values are all alike, or all zero, becomes 0.
    """
    xp = array_api_compat.array_namespace(fisher)
    out = xp.empty_like(fisher)
    for part in parts:
        values = fisher[..., part]
        if how == "min-max":
            least = xp.min(values, axis=-1, keepdims=True)
            values, scale = values - least, xp.max(values, axis=-1, keepdims=True) - least
        else:
            scale = xp.sum(values, axis=-1, keepdims=True)
        known = scale > 0
        out[..., part] = xp.where(known, values, 0.0) / xp.where(known, scale, 1.0)
    return out


def personal_of(state: DeviceState, like: Array) -> Array:
    """What `prepare` chose, bool `[..., d]`; without it nothing is personal."""
    xp = array_api_compat.array_namespace(like)
    return state.private.get(PERSONAL, xp.zeros_like(like, dtype=xp.bool))


def started(state: DeviceState, global_params: Array) -> Array:
    """The personal entries of the device's own model, the rest of the global one; a copy."""
    xp = array_api_compat.array_namespace(global_params)
    if state.own is None:
        return xp.asarray(global_params, copy=True)
    return xp.where(personal_of(state, global_params), state.own, global_params)


def with_private(state: DeviceState, **arrays: Array) -> DeviceState:
    """The state with more private arrays."""
    return replace(state, private=dict(state.private, **arrays))
