"""Turns a round and a state with arrays into the bytes that the store keeps, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, cast

import msgpack
import numpy as np
from numpy.typing import ArrayLike

from hushfleet.edge_client.storage.answers import Answers
from hushfleet.edge_client.storage.round_commit import CodedRound, OutboxEntry, RoundCommit, StoredState
from hushfleet.errors import StoreError
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.privacy.ledger import LedgerView
from hushfleet.wire.format.identity import Identity

RESIDUAL = "wire:residual"
"""The encoding error among the arrays of a stored state; the method's own arrays have identifiers as names."""
_NUMBERS = re.compile(r"[<|][fiub]\d{1,2}")


def pack_arrays(arrays: Mapping[str, ArrayLike]) -> bytes:
    """Packs arrays, little-endian on every machine. Raises `StoreError` for anything but numbers."""
    packed = {}
    for name, value in arrays.items():
        array = np.asarray(value)
        if array.dtype.kind not in "fiub":
            raise StoreError(f"the private array {name!r} has the type {array.dtype}; only numbers can be stored")
        stored = array.astype(array.dtype.newbyteorder("<"))
        packed[name] = [stored.dtype.str, list(array.shape), stored.tobytes()]
    data: bytes = msgpack.packb(packed)
    return data


def unpack_arrays(data: bytes) -> dict[str, np.ndarray]:
    """Unpacks the bytes of `pack_arrays`; raises ValueError or TypeError for other bytes."""
    try:
        arrays, packed = {}, msgpack.unpackb(data)
    except ValueError as error:  # some errors have an empty text
        raise ValueError(f"they are not msgpack: {str(error) or type(error).__name__}") from error
    if not isinstance(packed, dict):
        raise TypeError(f"expected a map of named arrays, got {type(packed).__name__}")
    for name, (dtype, shape, raw) in packed.items():
        if not _NUMBERS.fullmatch(dtype):  # NumPy parses another text as Python, and raises SyntaxError
            raise ValueError(f"{dtype!r} is not a type of numbers")
        array = np.frombuffer(raw, np.dtype(dtype)).reshape(shape)
        arrays[name] = array.astype(array.dtype.newbyteorder("="))
    return arrays


def coded(commit: RoundCommit[DeviceState]) -> CodedRound:
    """Returns a round with its state, and the encoding error in it, as bytes."""
    state, residual = commit.state, {} if commit.residual is None else {RESIDUAL: commit.residual}
    stored = StoredState(
        int(np.asarray(state.public.mask).size),
        state.public.to_bytes(),
        None if state.own is None else np.ascontiguousarray(state.own, "<f4").tobytes(),
        pack_arrays({**state.private, **residual}),
    )
    return replace(cast("CodedRound", commit), state=stored, residual=None)


def decoded_state(stored: StoredState) -> DeviceState:
    """Returns a stored state with arrays. Raises `Malformed`, `ValueError` or `TypeError` for damaged bytes."""
    state = DeviceState(
        PublicState.from_bytes(stored.public, size=stored.size),
        None if stored.own is None else np.frombuffer(stored.own, "<f4").astype(np.float32, copy=False),
        {name: array for name, array in unpack_arrays(stored.private).items() if name != RESIDUAL},
    )
    if state.own is not None and state.own.shape != (stored.size,):
        raise ValueError(f"{state.own.size} own parameters where {stored.size} are expected")
    return state


def residual_of(stored: StoredState | None, *, size: int) -> np.ndarray:
    """Returns the encoding error in a stored state, float32 `[size]`; zeros without one. Raises as `decoded_state`."""
    residual = None if stored is None else unpack_arrays(stored.private).get(RESIDUAL)
    if residual is None:
        return np.zeros(size, np.float32)
    if residual.shape != (size,) or residual.dtype != np.float32:
        raise ValueError(f"{residual.dtype} of shape {residual.shape} where {size} float32 values are expected")
    return residual


class RoundStore(Protocol):
    """A store of a device's rounds: `DeviceStore`, or a lighter store in simulations."""

    @property
    def identity(self) -> Identity: ...

    @property
    def ledger(self) -> LedgerView: ...

    @property
    def answers(self) -> Answers: ...

    def outbox(self, task: str, round: int) -> OutboxEntry | None:
        """Returns the stored update of a round, or None if there is none."""
        ...

    def package_of(self, task: str) -> bytes | None:
        """Returns SHA-256 of the package for which the rounds of this task were trained; None before the first."""
        ...

    def load_state(self, task: str) -> DeviceState | None:
        """Returns the state after the last committed round of the task, or None before the first."""
        ...

    def load_residual(self, task: str, *, size: int) -> np.ndarray:
        """Returns the encoding error that the updates have left so far, float32 `[size]`; zeros before the first."""
        ...

    def commit_round(self, commit: RoundCommit[DeviceState]) -> OutboxEntry:
        """Stores ledger entry, encoded update and new state: all or nothing. Raises `LedgerError` and `StoreError`."""
        ...
