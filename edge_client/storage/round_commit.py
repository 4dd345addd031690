"""Defines the result of a round in the store: the update with its charge and next state, and the waiting update.

The store writes bytes (`CodedRound`), as a worker hands them over; `RoundCommit` is the same with arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hushfleet.array_api import np
from hushfleet.durations import Period
from hushfleet.edge_client.storage.answers import Answers
from hushfleet.edge_client.storage.arrays import pack_arrays, unpack_arrays
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import LedgerView
from hushfleet.wire.format.identity import Identity

RESIDUAL = "wire:residual"
"""The encoding error among the arrays of a stored state; the method's own arrays have identifiers as names."""


@dataclass(frozen=True)
class StoredState:
    """A device's state of one task as bytes.

    :param size: the number of parameters, d.
    :param public: `PublicState.to_bytes()`.
    :param own: the own model, little-endian float32; None before the first training.
    :param private: the method's arrays and the encoding error, by `pack_arrays`.
    """

    size: int
    public: bytes
    own: bytes | None
    private: bytes


@dataclass(frozen=True)
class CodedRound:
    """The result of a round as bytes, to be stored whole or not at all; the fields are those of `RoundCommit`."""

    task: str
    round: int
    charge: Charge
    state: StoredState
    update: bytes
    public_before: bytes
    context: bytes | None = None
    package: bytes | None = None
    at: int = 0
    window: Period | None = None


@dataclass(frozen=True)
class OutboxEntry:
    """An update that was clipped, noised, charged and stored; its bytes never change.

    :param data: the encoded update; empty after a later round was committed.
    :param digest: SHA-256 of `data`.
    :param public_before: `PublicState.to_bytes()` before this update, which the aggregator should hold; empty if `data`
        is.
    :param status: `pending`, `acked`, or `refused:<code>`; `refused:owner` if the owner no longer allows it.
    :param attached_digest: SHA-256 of it with the public state attached; None if it was never sent in this form, empty
        if an earlier version, which did not note this, stored it.
    :param context: context of the secure sum that it is masked for (`SecureRound.context`); None if it is not masked.
    """

    task: str
    round: int
    data: bytes
    digest: bytes
    public_before: bytes
    status: str
    attached_digest: bytes | None = None
    context: bytes | None = None

    @property
    def pending(self) -> bool:
        return self.status == "pending"

    def may_be(self, digest: bytes) -> bool:
        """Returns whether this SHA-256 may belong to this update, in either form; True if one form was not noted."""
        return digest in (self.digest, self.attached_digest) or self.attached_digest == b""


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
