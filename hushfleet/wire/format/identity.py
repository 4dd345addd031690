"""Provides Ed25519 identities, which prove who signed a message or an update.

A device makes its key at its first start and keeps it; the aggregator does the same. Each pins the
other's public key at first contact or reads it from its configuration (docs/wire.md, "Trust").
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from hushfleet.at_need import at_need
from hushfleet.errors import BadInput
from hushfleet.public_keys import KEY_BYTES, SIGNATURE_BYTES, can_have_owner, verify

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ed25519
else:
    ed25519 = at_need("cryptography.hazmat.primitives.asymmetric.ed25519")

__all__ = ["KEY_BYTES", "SIGNATURE_BYTES", "Identity", "can_have_owner", "verify"]


class Identity:
    """A private key and its operations. Compare and store it as `to_bytes()`, 32 secret bytes."""

    def __init__(self, private_key: ed25519.Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self.public_key: bytes = private_key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Identity:
        """Generates a new key from the operating system's secure random source."""
        return cls(ed25519.Ed25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """Loads a key that `to_bytes` returned. Raises `BadInput` unless it has 32 bytes."""
        if len(data) != KEY_BYTES:
            raise BadInput(f"a private key has {KEY_BYTES} bytes, not {len(data)}; the key file is damaged")
        return cls(ed25519.Ed25519PrivateKey.from_private_bytes(data))

    def to_bytes(self) -> bytes:
        """Returns the private key, 32 bytes."""
        return self._private_key.private_bytes_raw()

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
