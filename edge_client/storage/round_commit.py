"""Defines the result of a round, the update with its charge and next state; and the waiting update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from hushfleet.durations import Period
from hushfleet.privacy.charge import Charge

if TYPE_CHECKING:
    import numpy as np

S = TypeVar("S")


@dataclass(frozen=True)
class StoredState:
    """A device's state of one task as bytes.

    :param size: the number of parameters, d.
    :param public: `PublicState.to_bytes()`.
    :param own: the personalized model, little-endian float32; None before the first training.
    :param private: the method's arrays and the encoding error, by `pack_arrays`.
    """

    size: int
    public: bytes
    own: bytes | None
    private: bytes


@dataclass(frozen=True)
class RoundCommit(Generic[S]):
    """The result of a round, to be stored whole or not at all.

    :param state: the next one: arrays (`DeviceState`), or bytes.
    :param update: the encoded update.
    :param public_before: `PublicState.to_bytes()` before the update.
    :param residual: float32 `[d]`, for `load_residual`; None if the updates' encoding carries no error, or in `state`.
    :param context: context of the secure aggregation that it is masked for (`SecureRound.context`); None if it is not
        masked.
    :param package: SHA-256 of the task package that it was trained for, for `DeviceStore.package_of`.
    :param at: the counted time of the charge, unix seconds; 0: no time is counted.
    :param window: as in `LedgerEntry`.
    """

    task: str
    round: int
    charge: Charge
    state: S
    update: bytes
    public_before: bytes
    residual: np.ndarray | None = None
    context: bytes | None = None
    package: bytes | None = None
    at: int = 0
    window: Period | None = None


CodedRound = RoundCommit[StoredState]


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
    :param context: context of the secure aggregation that it is masked for (`SecureRound.context`); None if it is not
        masked.
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
