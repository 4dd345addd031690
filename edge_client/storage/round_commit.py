"""Defines the result of a round in the store: the update with its charge and next state, and the waiting update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hushfleet.durations import Period
from hushfleet.edge_client.storage.answers import Answers
from hushfleet.methods.state import DeviceState
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import LedgerView
from hushfleet.wire.format.identity import Identity


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

    @property
    def written_bytes(self) -> int:
        vectors = (self.state.own, self.residual, *self.state.private.values())
        arrays_bytes = sum(int(vector.nbytes) for vector in vectors if vector is not None)
        return len(self.update) + len(self.state.public.to_bytes()) + arrays_bytes
