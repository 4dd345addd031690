"""The state of a method's server half, as bytes in the aggregator's store."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from hushfleet.errors import StoreError
from hushfleet.methods.server import ServerArrays


def server_state_to_bytes(state: ServerArrays) -> bytes:
    out = io.BytesIO()
    arrays: dict[str, Any] = dict(state)
    np.savez(out, **arrays)
    return out.getvalue()


def server_state_from_bytes(data: bytes) -> ServerArrays:
    """Raises `StoreError` if it is not what was written."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception as error:  # NumPy and zipfile raise half a dozen kinds
        raise StoreError(f"the store's state of the method's server half does not load: {error}") from error
