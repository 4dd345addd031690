"""Defines an incoming update, one object from the offer to the acknowledgement, and the reasons for a refusal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hushfleet.aggregator.storage.store import ChargeRow, UpdateRow
from hushfleet.methods.state import PublicState
from hushfleet.wire.format.messages import Ack, Offer, Refused
from hushfleet.wire.format.update import UpdateHeader
from hushfleet.wire.format.update_values import Summed

FAULTS = frozenset({"malformed", "wrong-shape", "non-finite", "out-of-bounds", "below-noise"})
"""Codes of final refusals that are the device's fault: no honest device sends such an update."""


class Refusal(Exception):
    """An update is not accepted. Every check raises this; `RoundEngine` writes it into the update.

    :param code: a code of docs/wire.md.
    :param reason: the same in words.
    :param final: whether the device signed it for this round, so that sending it again does not help.
    """

    def __init__(self, code: str, reason: str, final: bool = True) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.final = final

    @property
    def is_fault(self) -> bool:
        """True if only the device that signed the update can be responsible."""
        return self.final and self.code in FAULTS


@dataclass(eq=False)
class CheckedUpdate:
    """An incoming update, or a committee member's answer. Each step fills in its results.

    The sender gives:

    :param device: its name.
    :param data: the signed blob; empty while it is only offered.
    :param kind: `offer` while only the offer is known.
    :param task: that of the offer; later that of the header.
    :param round: that of the offer; later that of the header.
    :param digest: that of the offer; later that of header and values.
    :param offer: the offer; None without a network.

    The signature and the checks give:

    :param header: the authenticated header.
    :param before: the device's public state before this update.
    :param after: the device's public state after it.
    :param counts: number of values in each layer.
    :param shared: bool `[d]`, True where a value was sent.
    :param values: float32 `[d]`, zero where nothing was sent; in secure aggregation masked integers and corrections.
    :param peaks: the largest magnitude in each layer; empty if it was not measured.
    :param squares: the sum of squares in each layer.
    :param summed: given if the values are in a partial sum already; then `values` is not set.
    :param row: the row that the store keeps.
    :param charge: the stored charge.
    :param staleness: the number of rounds by which it is older than the sum's round; 0 except in buffered rounds.

    The result is:

    :param code: `accepted`, `duplicate`, or another code of docs/wire.md.
    :param acknowledged: whether the update is in the store, from this call or an earlier one.
    :param held: SHA-256 of the update that the store has of this device and round.
    :param faults: number of rounds with a fault of this device; 0 unless this is the round's first one.
    :param reply: the reply to the device.
    """

    device: str
    data: bytes = field(default=b"", repr=False)
    kind: Literal["offer", "update", "answer"] = "update"
    task: str = ""
    round: int = 0
    digest: bytes = b""
    offer: Offer | None = None

    header: UpdateHeader = field(init=False, repr=False)
    before: PublicState = field(init=False, repr=False)
    after: PublicState = field(init=False, repr=False)
    counts: tuple[int, ...] = field(default=(), repr=False)
    shared: np.ndarray = field(init=False, repr=False)
    values: Any = field(init=False, repr=False)
    peaks: tuple[float, ...] = field(default=(), repr=False)
    squares: tuple[float, ...] = field(default=(), repr=False)
    summed: Summed | None = None
    row: UpdateRow | None = None
    charge: ChargeRow | None = None
    staleness: int = 0

    code: str = ""
    reason: str = ""
    acknowledged: bool = False
    held: bytes | None = None
    faults: int = 0
    reply: Ack | Refused | None = None

    @classmethod
    def offered(cls, device: str, offer: Offer) -> CheckedUpdate:
        """Returns an update of which only the offer is known."""
        return cls(device, kind="offer", task=offer.task, round=offer.round, digest=offer.digest, offer=offer)

    def refuse(self, code: str, reason: str) -> CheckedUpdate:
        """Sets the code and the reason; returns the update."""
        self.code, self.reason = code, reason
        return self

    def acknowledge(self, code: Literal["accepted", "duplicate"]) -> None:
        """Marks the update as one that is in the store."""
        self.code, self.acknowledged = code, True
