"""Derives keys that two boards share, without a message, from the Ed25519 identities that they already have.

An Ed25519 key gives an X25519 key by the birational map between the curves (RFC 7748, section 4.1). Thormarker shows
that one key may serve both ("On using the same key pair for Ed25519 and an X25519 based KEM", 2021).
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from hushfleet.errors import BadInput
from hushfleet.public_keys import CURVE_PRIME, can_have_owner
from hushfleet.wire.format.identity import Identity

_LABEL = b"hushfleet secure sum"


class KeyAgreement:
    """Secrets that one board shares with others.

    :param task: SHA-256 of the task package. The keys depend on it: each device relies on the noise of the others, so
        a sum of devices with different packages must not open.

    Shared secrets are kept in memory: an exchange takes about 0.1 ms, and a round needs one for each pair.
    """

    def __init__(self, identity: Identity, *, task: bytes = b"") -> None:
        self._task = task
        self._seed = identity.to_bytes()
        self._own_key = identity.public_key
        self._private = X25519PrivateKey.from_private_bytes(hashlib.sha512(self._seed).digest()[:32])
        self._secrets: dict[bytes, bytes] = {}

    def secret(self, peer: bytes) -> bytes:
        """Returns 32 bytes that this board shares with the owner of the Ed25519 key `peer`; for its own key, bytes that
        only this board knows. Raises `BadInput` for a key that is no point of large order.
        """
        known = self._secrets.get(peer)
        if known is None:
            if peer == self._own_key:
                raw = hmac.digest(self._seed, _LABEL, "sha256")
            else:
                try:
                    raw = self._private.exchange(X25519PublicKey.from_public_bytes(_montgomery(peer)))
                except ValueError as error:
                    raise BadInput(f"the key {peer.hex()[:16]}... gives no shared secret") from error
            known = self._secrets[peer] = hmac.digest(_LABEL, raw, "sha256")  # HKDF-Extract (RFC 5869)
        return known

    def key(self, peer: bytes, info: bytes) -> bytes:
        """Returns a key of 32 bytes for one purpose: HKDF-Expand (RFC 5869) of the secret."""
        return hmac.digest(self.secret(peer), info + self._task + b"\x01", "sha256")


def _montgomery(public_key: bytes) -> bytes:
    """Returns u = (1 + y) / (1 - y) of an Ed25519 public key."""
    if not can_have_owner(public_key):
        raise BadInput(f"the key {public_key.hex()[:16]}... can have no owner, so nobody shares a secret with it")
    y = int.from_bytes(public_key, "little") & ((1 << 255) - 1)
    return ((1 + y) * pow(1 - y, -1, CURVE_PRIME) % CURVE_PRIME).to_bytes(32, "little")
