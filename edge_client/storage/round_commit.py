"""The result of a round in the store: the update with its charge and the next state, and the update as it waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hushfleet.edge_client.storage.answers import Answers
from hushfleet.methods.state import DeviceState
from hushfleet.privacy.ledger import LedgerView
from hushfleet.privacy.mechanism import Charge
from hushfleet.privacy.periods import Period
from hushfleet.wire.format.identity import Identity


@dataclass(frozen=True)
class OutboxEntry:
    """An update that was clipped, noised, charged and stored; its bytes never change.

    :param data: the encoded update; empty once a later round was committed.
    :param digest: SHA-256 of `data`.
    :param public_before: `PublicState.to_bytes()` from before this update, as the aggregator should hold it; empty as
        `data` is.
    :param status: `pending`, `acked`, or `refused:<code>`; `refused:owner`: its owner has come to forbid it.
    :param attached_digest: SHA-256 of it with the public state attached; None if it was never sent so, empty if it is
        of a time when that was not noted.
    :param context: of the secure sum that it is masked for (`SecureRound.context`); None where it is not masked.
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
        """Whether the update with this SHA-256 is this one, in either form; where that was not noted, it may be."""
        return digest in (self.digest, self.attached_digest) or self.attached_digest == b""


class RoundStore(Protocol):
    """A store of a device's rounds: `DeviceStore`, and in simulations something lighter."""

    @property
    def identity(self) -> Identity: ...

    @property
    def ledger(self) -> LedgerView: ...

    @property
    def answers(self) -> Answers: ...

    def outbox(self, task: str, round: int) -> OutboxEntry | None:
        """Gives the stored update of a round, or None where none was made."""
        ...

    def package_of(self, task: str) -> bytes | None:
        """Gives SHA-256 of the package for which the rounds of this task were trained; None before the first."""
        ...

    def load_state(self, task: str) -> DeviceState | None:
        """Gives the state after the last committed round of the task, or None before the first."""
        ...

    def load_residual(self, task: str, *, size: int) -> np.ndarray:
        """Gives what the form of the updates has left out of them so far, float32 `[size]`; zeros before the first."""
        ...

    def commit_round(self, commit: RoundCommit) -> OutboxEntry:
        """Stores ledger entry, encoded update and new state: all, or nothing. Raises `LedgerError` and `StoreError`."""
        ...


@dataclass(frozen=True)
class RoundCommit:
    """The result of a round, to be stored whole or not at all.

    :param update: the encoded update.
    :param public_before: `PublicState.to_bytes()` from before it.
    :param residual: float32 `[d]`, for `load_residual`; None where the form of the updates leaves nothing to carry.
    :param context: of the secure sum that the update is masked for (`SecureRound.context`); None where it is not.
    :param package: SHA-256 of the task package that it was trained for, for `DeviceStore.package_of`.
    :param at, window: as in `LedgerEntry`.
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

    @property
    def written_bytes(self) -> int:
        vectors = (self.state.own, self.residual, *self.state.private.values())
        arrays_bytes = sum(int(vector.nbytes) for vector in vectors if vector is not None)
        return len(self.update) + len(self.state.public.to_bytes()) + arrays_bytes
