"""The roster: who may be in a secure sum, and with which key. A blob, signed by the operator if that is wanted.

An operator also signs under which assumption: how many of the boards are honest, and how large a sum is at least. The
aggregator writes the task package, so what stands there alone is the word of whom secure sums protect against.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, fields, replace
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from hushfleet.errors import BadSignature, Malformed, OtherVersion
from hushfleet.privacy.terms import HONEST_FRACTION, MIN_DEVICES
from hushfleet.schema import Checked, Count, Share, pack, require, unpack
from hushfleet.secure.committee import corrupt_devices
from hushfleet.wire.format.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, verify
from hushfleet.wire.format.topics import Name

MAX_DEVICES = 100_000
MAX_ROSTER_BYTES = MAX_DEVICES * (KEY_BYTES + 65) + 1024
NONCE_BYTES = 32
_SIGNED = b"hushfleet roster\0"
_Content = TypeVar("_Content", bound="RosterContent")
_FIRST_FORMAT = {"devices", "keys", "signature"}


@dataclass(frozen=True)
class RosterContent(Checked):
    """The content that an operator is asked to sign.

    :param devices: ids, rising.
    :param keys: the Ed25519 public key of each, 32 bytes, one after the other.
    :param federation: whose devices these are.
    :param honest_fraction: of the devices, at least; no task may count on more.
    :param min_devices: no sum of fewer is opened, whatever a task says.
    """

    devices: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_DEVICES)]
    keys: bytes
    federation: Name
    honest_fraction: Share
    min_devices: Annotated[int, Meta(ge=2, le=MAX_DEVICES)]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(list(self.devices) == sorted(set(self.devices)), "devices", len(self.devices), "rising and distinct")
        require(len(self.keys) == KEY_BYTES * len(self.devices), "keys", len(self.keys), "32 bytes for each device")
        distinct = len({self.key(index) for index in range(len(self.devices))})
        require(distinct == len(self.devices), "keys", distinct, "another one for each device")

    @classmethod
    def of(
        cls: type[_Content],
        keys: dict[str, bytes],
        *,
        federation: str = "default",
        honest_fraction: float = HONEST_FRACTION,
        min_devices: int = MIN_DEVICES,
    ) -> _Content:
        """:param keys: device id -> Ed25519 public key."""
        devices = tuple(sorted(keys))
        return cls(devices, b"".join(keys[device] for device in devices), federation, honest_fraction, min_devices)

    @property
    def content(self) -> RosterContent:
        """The content that an operator was asked to sign, without what was settled with the signature."""
        return RosterContent(**{each.name: getattr(self, each.name) for each in fields(RosterContent)})

    @property
    def honest_devices(self) -> int:
        """Least number of honest devices."""
        return len(self.devices) - corrupt_devices(len(self.devices), honest_fraction=self.honest_fraction)

    def signed(
        self, operator: Identity, *, after: int = 0, at: float | None = None, nonce: bytes | None = None
    ) -> Roster:
        """Number, date and random bytes are settled here, on the operator's side, and nowhere else.

        :param after: the number of the roster before it, if it is at hand. Whoever has lost it still gets a higher one,
            since a number is at least the time of its signature in unix seconds.
        :param at: unix seconds; None: now.
        :param nonce: 32 bytes that nobody could know before; None draws them. They decide who is drawn in each round,
            so a device whose key is chosen last has nothing to choose it by.
        """
        date = int(time.time() if at is None else at)
        content = {each.name: getattr(self, each.name) for each in fields(RosterContent)}
        unsigned = Roster(**content, number=max(after + 1, date), date=date, nonce=nonce or os.urandom(NONCE_BYTES))
        return replace(unsigned, signature=operator.sign(unsigned._signed_bytes()))

    def key(self, index: int) -> bytes:
        """Returns the public key of the device with this index, 32 bytes."""
        return self.keys[KEY_BYTES * index : KEY_BYTES * (index + 1)]


@dataclass(frozen=True)
class Roster(RosterContent):
    """The roster that boards get: `RosterContent.signed` makes it, or `of`, where only the aggregator vouches for it.

    :param number: rises with each roster that an operator signs; of a list that is to be signed: at which it was
        written; else 0.
    :param date: of the signature, unix seconds; 0 where there is none.
    :param nonce: random bytes of the operator; zeros where nobody has signed.
    :param signature: of the operator, over all before it; empty: nobody but the aggregator vouches for the list.
    """

    number: Count = 0
    date: Count = 0
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)] = bytes(NONCE_BYTES)
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""

    @classmethod
    def to_sign(cls, content: RosterContent, *, number: int) -> Roster:
        """`content` for the machine that has the operator's key.

        :param number: above that of the roster that holds; it shows which of two lists is older.
        """
        return cls(**{each.name: getattr(content, each.name) for each in fields(RosterContent)}, number=number)

    @classmethod
    def from_bytes(cls, data: bytes, *, operator: bytes | None = None) -> Roster:
        """:param operator: the key that must have signed it; None: no signature is asked for.

        Raises `Malformed`, `OtherVersion` or `BadSignature`.
        """
        try:
            roster: Roster = unpack(cls, data, what="the roster")
        except Malformed:
            if _is_first_format(data):
                raise OtherVersion(
                    "the roster is in the format of Hushfleet 0.3, which names no assumption: have it signed anew by "
                    "this version (hushfleet fleet roster sign, or a fleet's service at its next start)"
                ) from None
            raise
        if operator is not None:
            if not roster.signature:
                raise BadSignature("the roster is not signed by the operator, which this device requires")
            verify(operator, roster._signed_bytes(), roster.signature)
        return roster

    def to_bytes(self) -> bytes:
        """Packs the roster; `from_bytes` is the inverse."""
        return pack(self)

    def digest(self) -> bytes:
        """SHA-256 of all but the signature."""
        return hashlib.sha256(self._signed_bytes()).digest()

    @property
    def name(self) -> str:
        """Name of the roster for people."""
        if not self.signature:
            return "a roster that no operator has signed"
        return f"roster {self.number} of {time.strftime('%Y-%m-%d', time.gmtime(self.date))}"

    def cohort(self, *, seed: bytes, rate: float) -> list[int]:
        """Indices of the devices that take part, rising: each with probability `rate`, by the seed alone."""
        if rate >= 1:
            return list(range(len(self.devices)))
        limit = int(rate * (1 << 64))
        return [index for index, device in enumerate(self.devices) if _draw(seed, b"cohort", device) < limit]

    def committee(self, cohort: list[int], *, seed: bytes, size: int) -> list[int]:
        """Indices of the `size` members among `cohort`, in the order in which the seed draws them."""
        drawn = sorted(cohort, key=lambda index: _draw(seed, b"committee", self.devices[index]))
        return drawn[:size]

    def _signed_bytes(self) -> bytes:
        return _SIGNED + pack(replace(self, signature=b""))


def _draw(seed: bytes, purpose: bytes, device: str) -> int:
    digest = hashlib.sha256(b"\0".join((seed, purpose, device.encode()))).digest()
    return int.from_bytes(digest[:8], "big")


def _is_first_format(data: bytes) -> bool:
    try:
        plain = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return isinstance(plain, dict) and plain.keys() == _FIRST_FORMAT
