"""Turns a round and a state with arrays into the bytes that the store keeps, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgpack
import numpy as np
from numpy.typing import ArrayLike

from hushfleet.durations import Period
from hushfleet.edge_client.storage.answers import Answers
from hushfleet.edge_client.storage.round_commit import CodedRound, OutboxEntry, StoredState
from hushfleet.errors import StoreError
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.privacy.charge import Charge
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


@dataclass(frozen=True)
class RoundCommit:
    """The result of a round, to be stored whole or not at all.

    :param update: the encoded update.
    :param public_before: `PublicState.to_bytes()` before the update.
    :param residual: float32 `[d]`, for `load_residual`; None if the updates' encoding carries no error.
    :param context: context of the secure sum that it is masked for (`SecureRound.context`); None if it is not masked.
    :param package: SHA-256 of the task package that it was trained for, for `DeviceStore.package_of`.
    :param at: the counted time of the charge, unix seconds; 0: no time is counted.
    :param window: as in `LedgerEntry`.
    """

    task: str
    round: int
    charge: Charge
    state: DeviceState
    update: bytes
    public_before: bytes
    residual: np.ndarray | None = None
    context: bytes | None = None
    package: bytes | None = None
    at: int = 0
    window: Period | None = None

    def coded(self) -> CodedRound:
        """Returns the round as bytes."""
        state, residual = self.state, {} if self.residual is None else {RESIDUAL: self.residual}
        stored = StoredState(
            int(np.asarray(state.public.mask).size),
            state.public.to_bytes(),
            None if state.own is None else np.ascontiguousarray(state.own, "<f4").tobytes(),
            pack_arrays({**state.private, **residual}),
        )
        fields = (self.task, self.round, self.charge, stored, self.update, self.public_before)
        return CodedRound(*fields, self.context, self.package, self.at, self.window)


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

    def commit_round(self, commit: RoundCommit) -> OutboxEntry:
        """Stores ledger entry, encoded update and new state: all or nothing. Raises `LedgerError` and `StoreError`."""
        ...
