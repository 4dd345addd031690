"""Runs the method's server half in one round, and packs its state into bytes for the aggregator's store."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np

from hushfleet import array_api
from hushfleet.array_api import Array
from hushfleet.errors import BadInput, HushfleetError, StoreError
from hushfleet.methods.server import ServerArrays, mean_of
from hushfleet.methods.task_method import TaskMethod


@dataclass(frozen=True, eq=False)
class ServerRound:
    """A method's server half in one round.

    :param before: the global vector float32 `[d]` of the round.
    :param state: the state that it has kept from the round before.
    :param devices: number of devices of the task.
    """

    method: TaskMethod
    before: np.ndarray
    state: ServerArrays
    devices: int = 0

    def controls(self, round: int) -> dict[str, float]:
        """Returns the numbers that the plan of this round gives to devices."""
        return self.method.server.controls(self.state, round)

    def weight(self, sent: np.ndarray) -> float:
        """Returns the weight of an update, float32 `[d]`, in the mean."""
        return self.method.server.weight(self.state, self.before, sent, self.method.layout)

    def aggregated(self, sums: Array, weights: Array) -> np.ndarray:
        """Returns the new global vector, float32 `[d]`.

        :param sums: the weighted sum of values, float64 `[d]`.
        :param weights: the sum of weights, float64 `[d]`.
        """
        xp = array_api.array_namespace(sums)
        before = xp.asarray(self.before.astype(np.float64), device=array_api.device(sums))
        state = {**self.state, "devices": np.array(self.devices)}
        after = self.method.server.aggregate(state, before, sums, weights)
        if (shape := getattr(after, "shape", None)) != before.shape:
            found = type(after).__name__ if shape is None else f"an array of shape {tuple(shape)}"
            raise BadInput(
                f"{self.method.name}.aggregate returned {found}: must return the global vector, shape {before.shape}"
            )
        params = _on_host(after)
        if not np.isfinite(params).all():
            raise HushfleetError(f"{self.method.name}.aggregate gave values that are not finite")
        return params

    def mean(self, sums: Array, weights: Array) -> np.ndarray:
        """Returns the mean of the sent values, float32 `[d]`; parameters as for `aggregated`."""
        return _on_host(mean_of(sums, weights))


def _on_host(vector: Array) -> np.ndarray:
    """Returns the vector as float32 in NumPy."""
    xp = array_api.array_namespace(vector)
    return np.asarray(array_api.to_device(xp.astype(vector, xp.float32), "cpu"))


def server_state_to_bytes(state: ServerArrays) -> bytes:
    """Packs the server half's named arrays as an .npz file."""
    out = io.BytesIO()
    arrays: dict[str, Any] = dict(state)
    np.savez(out, **arrays)
    return out.getvalue()


def server_state_from_bytes(data: bytes) -> ServerArrays:
    """Unpacks the named arrays. Raises `StoreError` if the bytes are not such a file."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception as error:  # NumPy and zipfile raise half a dozen kinds
        raise StoreError(f"the store's state of the method's server half does not load: {error}") from error
