"""Defines the result of a round in the store, as bytes: the update with its charge and next state; and the waiting
update. `arrays.RoundCommit` is the same with arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hushfleet.durations import Period
from hushfleet.edge_client.storage.answers import Answers
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import LedgerView
from hushfleet.wire.format.identity import Identity

if TYPE_CHECKING:
    import numpy as np

    from hushfleet.edge_client.storage.arrays import RoundCommit
    from hushfleet.methods.state import DeviceState


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
