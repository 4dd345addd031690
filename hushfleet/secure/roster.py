"""The roster: who may be in a secure sum, and with which key. A blob, signed by the operator if that is wanted."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from hushfleet.config.schema import Checked, pack, require, unpack
from hushfleet.errors import BadSignature
from hushfleet.wire.format.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, verify
from hushfleet.wire.format.topics import Name

MAX_DEVICES = 100_000
MAX_ROSTER_BYTES = MAX_DEVICES * (KEY_BYTES + 65) + 1024
_SIGNED = b"hushfleet roster\0"


@dataclass(frozen=True)
class Roster(Checked):
    """Devices and their public keys.

    :param devices: ids, rising.
    :param keys: the Ed25519 public key of each, 32 bytes, one after the other.
    :param signature: of the operator, over all before it; empty: nobody but the aggregator vouches for the list.
    """

    devices: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_DEVICES)]
    keys: bytes
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(list(self.devices) == sorted(set(self.devices)), "devices", len(self.devices), "rising and distinct")
        require(len(self.keys) == KEY_BYTES * len(self.devices), "keys", len(self.keys), "32 bytes for each device")
        distinct = len(set(self._each_key()))
        require(distinct == len(self.devices), "keys", distinct, "another one for each device")

    @classmethod
    def of(cls, keys: dict[str, bytes]) -> Roster:
        """:param keys: device id -> Ed25519 public key."""
        devices = tuple(sorted(keys))
        return cls(devices, b"".join(keys[device] for device in devices))

    @classmethod
    def from_bytes(cls, data: bytes, *, operator: bytes | None = None) -> Roster:
        """:param operator: the key that must have signed it; None: no signature is asked for.

        Raises `Malformed` or `BadSignature`.
        """
        roster: Roster = unpack(cls, data, what="the roster")
        if operator is not None:
            if not roster.signature:
                raise BadSignature("the roster is not signed by the operator, and this device asks for it")
            verify(operator, roster._content(), roster.signature)
        return roster

    def to_bytes(self) -> bytes:
        return pack(self)

    def signed(self, operator: Identity) -> Roster:
        return replace(self, signature=operator.sign(self._content()))

    def digest(self) -> bytes:
        """SHA-256 of the list, whether it is signed or not."""
        return hashlib.sha256(self._content()).digest()

    def key(self, index: int) -> bytes:
        return self.keys[KEY_BYTES * index : KEY_BYTES * (index + 1)]

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

    def _content(self) -> bytes:
        return _SIGNED + pack(replace(self, signature=b""))

    def _each_key(self) -> list[bytes]:
        return [self.key(index) for index in range(len(self.devices))]


def _draw(seed: bytes, purpose: bytes, device: str) -> int:
    digest = hashlib.sha256(b"\0".join((seed, purpose, device.encode()))).digest()
    return int.from_bytes(digest[:8], "big")
