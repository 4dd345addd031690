"""Ed25519 identities: who signed a message or an update.

A device makes its key at its first start and keeps it; the aggregator does the same. Each pins the
other's public key at first sight or takes it from its configuration (docs/wire.md, "Trust").
"""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from hushfleet.errors import BadInput, BadSignature

KEY_BYTES = 32
SIGNATURE_BYTES = 64


class Identity:
    """A private key and what is done with it. Compare and store it by `to_bytes()`, 32 secret bytes."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self.public_key: bytes = private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @classmethod
    def generate(cls) -> Identity:
        """A new key from the operating system's secure source."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """The key that `to_bytes` gave. Raises `BadInput` unless it has 32 bytes."""
        if len(data) != KEY_BYTES:
            raise BadInput(f"a private key has {KEY_BYTES} bytes, not {len(data)}; the key file is damaged")
        return cls(Ed25519PrivateKey.from_private_bytes(data))

    def to_bytes(self) -> bytes:
        """Returns the private key, 32 bytes."""
        return self._private_key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())

    def sign(self, data: bytes | bytearray | memoryview) -> bytes:
        """The signature, 64 bytes; the same key and data always give the same one."""
        return self._private_key.sign(data)

    def client_id(self, name: str) -> str:
        """An MQTT client id that begins with `name`, the same after each restart, that only the key's owner can tell.

        Who connects with another's client id takes its session. A broker that binds client ids to certificates takes
        the certificate's name instead of this one; every other broker believes whatever it is told.
        """
        return f"{name}-{hashlib.sha256(b'hushfleet client id' + self.to_bytes()).hexdigest()[:16]}"

    def __repr__(self) -> str:
        return f"Identity(public_key={self.public_key.hex()})"


def verify(public_key: bytes, data: bytes | bytearray | memoryview, signature: bytes | bytearray | memoryview) -> None:
    """Raises `BadSignature` unless the owner of `public_key` (32 bytes) signed exactly `data`."""
    if len(public_key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        raise BadSignature(
            f"a key of {KEY_BYTES} and a signature of {SIGNATURE_BYTES} bytes are expected, "
            f"got {len(public_key)} and {len(signature)}"
        )
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError) as error:
        raise BadSignature(f"the signature is not one of the key {public_key.hex()[:16]}...") from error
