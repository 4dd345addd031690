"""Provides Ed25519 identities, which prove who signed a message or an update.

A device makes its key at its first start and keeps it; the aggregator does the same. Each pins the
other's public key at first contact or reads it from its configuration (docs/wire.md, "Trust").
"""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from hushfleet.errors import BadInput, BadSignature

KEY_BYTES = 32
SIGNATURE_BYTES = 64
CURVE_PRIME = (1 << 255) - 19
"""Coordinates of points of edwards25519 and curve25519 are counted modulo this prime."""
_ORDER_8 = int.from_bytes(bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little")
_SMALL_ORDER = frozenset({0, 1, CURVE_PRIME - 1, _ORDER_8, CURVE_PRIME - _ORDER_8})
"""y of the points of order 1, 2, 4 and 8."""


class Identity:
    """A private key and its operations. Compare and store it as `to_bytes()`, 32 secret bytes."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self.public_key: bytes = private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @classmethod
    def generate(cls) -> Identity:
        """Generates a new key from the operating system's secure random source."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """Loads a key that `to_bytes` returned. Raises `BadInput` unless it has 32 bytes."""
        if len(data) != KEY_BYTES:
            raise BadInput(f"a private key has {KEY_BYTES} bytes, not {len(data)}; the key file is damaged")
        return cls(Ed25519PrivateKey.from_private_bytes(data))

    def to_bytes(self) -> bytes:
        """Returns the private key, 32 bytes."""
        return self._private_key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())

    def sign(self, data: bytes | bytearray | memoryview) -> bytes:
        """Returns the signature, 64 bytes; the same key and data always give the same signature."""
        return self._private_key.sign(data)

    def client_id(self, name: str) -> str:
        """Returns an MQTT client id that starts with `name`. It is the same after each restart, and secret.

        Only the key's owner can compute it, because anyone who connects with a client's id takes over its session. A
        broker that binds client ids to certificates uses the certificate's name instead; other brokers accept any id.
        """
        return f"{name}-{hashlib.sha256(b'hushfleet client id' + self.to_bytes()).hexdigest()[:16]}"

    def __repr__(self) -> str:
        return f"Identity(public_key={self.public_key.hex()})"


def can_have_owner(public_key: bytes) -> bool:
    """Returns whether somebody can own this key of 32 bytes.

    Nobody owns a key of small order: anybody can sign with it, and it gives no shared secret, so one board with such a
    key would stop all secure sums of its fleet. Nor does a device make a key whose y is not reduced.
    """
    y = int.from_bytes(public_key, "little") & ((1 << 255) - 1)  # without the sign of x
    return y < CURVE_PRIME and y not in _SMALL_ORDER


def verify(public_key: bytes, data: bytes | bytearray | memoryview, signature: bytes | bytearray | memoryview) -> None:
    """Raises `BadSignature` unless the owner of `public_key` (32 bytes) signed exactly `data`."""
    if len(public_key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        raise BadSignature(
            f"a key of {KEY_BYTES} and a signature of {SIGNATURE_BYTES} bytes are expected, "
            f"got {len(public_key)} and {len(signature)}"
        )
    if not can_have_owner(public_key):
        raise BadSignature(f"the key {public_key.hex()[:16]}... can have no owner: anybody can sign with it")
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError) as error:
        raise BadSignature(f"the signature is not one of the key {public_key.hex()[:16]}...") from error
