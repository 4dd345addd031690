"""Which parameters a device's own data makes important: the diagonal of the Fisher information, normalised by parts.

FedDPA, FedADDP and DP-FedSim keep a parameter where its normalised value reaches a threshold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from hushfleet import array_api
from hushfleet.methods.base import Array, DeviceState, OwnData

Normalisation = Literal["min-max", "sum"]

# What methods keep in `private`, each `[..., d]`.
PERSONAL = "personal"  # bool, from `prepare` to `advance`: what is kept of the own model
GLOBAL = "global"  # float32, from `prepare` to `advance`: the model that the round began with
MOVED = "moved"  # float32, with the unit `record`: the last update


def normalised(fisher: Array, parts: Iterable[slice], how: Normalisation) -> Array:
    """Each part of `fisher [..., d]`, which is not negative, on a scale of its own.

    :param parts: layers or tensors; together they cover the vector.
    :param how: `min-max` sends a part's smallest value to 0 and its largest to 1; `sum` divides by the part's sum.
        A part whose values are all alike, or all zero, becomes 0 by the first; by the second only the latter does.
    """
    xp = array_api.array_namespace(fisher)
    out = xp.empty_like(fisher)
    for part in parts:
        values = fisher[..., part]
        if how == "min-max":
            values = values - xp.min(values, axis=-1, keepdims=True)
            scale = xp.max(values, axis=-1, keepdims=True)
        else:
            scale = xp.sum(values, axis=-1, keepdims=True)
        out[..., part] = values / xp.where(scale > 0, scale, 1.0)
    return out


def squared_gradient(state: DeviceState, at: Array, data: OwnData, *, unit: str) -> Array:
    """Fisher values at `at [d]`; with the unit `record`, squares of the last update, which is noised already.

    A device without a last update has zeros.
    """
    if unit == "device":
        return data.squared_gradient(at)
    xp = array_api.array_namespace(at)
    return state.private.get(MOVED, xp.zeros_like(at)) ** 2


def personal_of(state: DeviceState, like: Array) -> Array:
    """What `prepare` chose, bool `[..., d]`; without it nothing is personal."""
    xp = array_api.array_namespace(like)
    return state.private.get(PERSONAL, xp.zeros_like(like, dtype=xp.bool))


def started(state: DeviceState, global_params: Array) -> Array:
    """The personal entries of the device's own model, the rest of the global one; a copy."""
    xp = array_api.array_namespace(global_params)
    if state.own is None:
        return xp.asarray(global_params, copy=True)
    return xp.where(personal_of(state, global_params), state.own, global_params)


def with_private(state: DeviceState, **arrays: Array) -> DeviceState:
    """The state with more private arrays."""
    return replace(state, private=dict(state.private, **arrays))
