"""The membership list lists the devices that may take part in secure aggregation, with their keys. The operator can
sign this blob.

An operator also signs the assumptions: how many of the boards are honest, and the smallest size of a sum. The
aggregator writes the task package, so assumptions that are only there come from the party that secure aggregation
protects against.
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
from hushfleet.wire.format.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, can_have_owner, verify
from hushfleet.wire.format.topics import Name

MAX_DEVICES = 100_000
MAX_MEMBERSHIP_LIST_BYTES = MAX_DEVICES * (KEY_BYTES + 65) + 1024
NONCE_BYTES = 32
_SIGNED = b"hushfleet roster\0"
_Content = TypeVar("_Content", bound="MembershipListContent")
_FIRST_FORMAT = {"devices", "keys", "signature"}


SEEN_NEWER = "which this device has seen"
"""Words in the reason of a decline that tell the operator: its list of boards is older than one that a board knows."""


@dataclass(frozen=True)
class MembershipListContent(Checked):
    """The content that an operator is asked to sign.

    :param devices: ids, in rising order.
    :param keys: the Ed25519 public key of each device, 32 bytes, one after the other.
    :param federation: name of the federation of these devices.
    :param honest_fraction: smallest honest share of the devices; no task may assume more.
    :param min_devices: no sum of fewer devices is opened, even if a task allows it.
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
    def content(self) -> MembershipListContent:
        """The content that an operator was asked to sign, without the values that the signing added."""
        return MembershipListContent(**{each.name: getattr(self, each.name) for each in fields(MembershipListContent)})

    @property
    def honest_devices(self) -> int:
        """Smallest number of honest devices."""
        return len(self.devices) - corrupt_devices(len(self.devices), honest_fraction=self.honest_fraction)

    def signed(
        self, operator: Identity, *, after: int = 0, at: float | None = None, nonce: bytes | None = None
    ) -> MembershipList:
        """Returns the signed roster. Number, date and random bytes are set only here, on the operator's side.

        :param after: the number of the previous membership list, if it is known. If it is lost, the new number is still
            higher, because a number is at least the time of its signature in unix seconds.
        :param at: unix seconds; None: now.
        :param nonce: 32 bytes that nobody could know before; None draws them. They decide which devices are drawn in
            each round, so nobody can choose a device's key in advance to influence the draw.
        """
        date = int(time.time() if at is None else at)
        content = {each.name: getattr(self, each.name) for each in fields(MembershipListContent)}
        unsigned = MembershipList(
            **content, number=max(after + 1, date), date=date, nonce=nonce or os.urandom(NONCE_BYTES)
        )
        return replace(unsigned, signature=operator.sign(unsigned._signed_bytes()))

    def key(self, index: int) -> bytes:
        """Returns the public key of the device with this index, 32 bytes."""
        return self.keys[KEY_BYTES * index : KEY_BYTES * (index + 1)]


@dataclass(frozen=True)
class MembershipList(MembershipListContent):
    """The membership list that boards get: `MembershipListContent.signed` makes it, or `of` if only the aggregator
    vouches for it.

    :param number: rises with each membership list that an operator signs; for a list that is to be signed, the number
        given to `to_sign`; else 0.
    :param date: of the signature, unix seconds; 0 without a signature.
    :param nonce: random bytes of the operator; zeros without a signature.
    :param signature: of the operator, over everything else; empty: only the aggregator vouches for the list.
    """

    number: Count = 0
    date: Count = 0
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)] = bytes(NONCE_BYTES)
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""

    @classmethod
    def to_sign(cls, content: MembershipListContent, *, number: int) -> MembershipList:
        """Returns `content` as a list to sign, for the machine that has the operator's key.

        :param number: higher than the number of the valid membership list; it shows which of two lists is older.
        """
        return cls(**{each.name: getattr(content, each.name) for each in fields(MembershipListContent)}, number=number)

    @classmethod
    def from_bytes(cls, data: bytes, *, operator: bytes | None = None) -> MembershipList:
        """Unpacks a membership list, and checks its keys: a device whose key nobody can own would stop all secure
        aggregation.

        :param operator: the key that must have signed it; None: no signature is required.

        Raises `Malformed`, `OtherVersion` or `BadSignature`.
        """
        try:
            membership_list: MembershipList = unpack(cls, data, what="the membership list")
        except Malformed:
            if _is_first_format(data):
                raise OtherVersion(
                    "the membership list is in the format of Hushfleet 0.3, which names no assumption: have it signed "
                    "anew by this version (hushfleet fleet roster sign, or a fleet's service at its next start)"
                ) from None
            raise
        if operator is not None:
            if not membership_list.signature:
                raise BadSignature("the membership list is not signed by the operator, which this device requires")
            verify(operator, membership_list._signed_bytes(), membership_list.signature)
        for index, device in enumerate(membership_list.devices):
            if not can_have_owner(key := membership_list.key(index)):
                raise Malformed(f"the key of {device} in the membership list is {key.hex()}, which no board can own")
        return membership_list

    def to_bytes(self) -> bytes:
        """Packs the membership list; `from_bytes` is the inverse."""
        return pack(self)

    def digest(self) -> bytes:
        """Returns the SHA-256 of everything except the signature."""
        return hashlib.sha256(self._signed_bytes()).digest()

    @property
    def name(self) -> str:
        """Name of the membership list for display."""
        if not self.signature:
            return "a membership list that no operator has signed"
        return f"membership list {self.number} of {time.strftime('%Y-%m-%d', time.gmtime(self.date))}"

    def cohort(self, *, seed: bytes, rate: float) -> list[int]:
        """Returns the indices of the participating devices, rising: each with probability `rate`, by the seed alone."""
        if rate >= 1:
            return list(range(len(self.devices)))
        limit = int(rate * (1 << 64))
        return [index for index, device in enumerate(self.devices) if _draw(seed, b"cohort", device) < limit]

    def committee(self, cohort: list[int], *, seed: bytes, size: int) -> list[int]:
        """Returns the indices of the `size` members among `cohort`, in the order in which the seed draws them."""
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
