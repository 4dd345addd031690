"""A pull towards a reference vector, as the local objectives of FedProx and Ditto have it."""

from __future__ import annotations

from hushfleet.blocks import blocks
from hushfleet.methods.base import Array


def add_pull(gradient: Array, params: Array, reference: Array, weight: float) -> None:
    """Adds the gradient of (weight / 2) |params - reference|^2 to `gradient [..., d]`, in place."""
    if weight == 0:
        return
    for part in blocks(params):
        gradient[..., part] += weight * (params[..., part] - reference[..., part])
