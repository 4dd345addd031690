"""Defines the result of a round in the store, as bytes: the update with its charge and next state; and the waiting
update. `arrays.RoundCommit` is the same with arrays."""

from __future__ import annotations

from dataclasses import dataclass

from hushfleet.durations import Period
from hushfleet.privacy.charge import Charge


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
