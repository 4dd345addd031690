"""Shared keys from Ed25519 identities."""

from __future__ import annotations

import hashlib

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from hushfleet.errors import BadInput, BadSignature
from hushfleet.secure.agreement import KeyAgreement, _montgomery
from hushfleet.wire.format.identity import Identity, verify
from support.edwards25519 import L, torsion_keys
from support.secure_aggregation import identity


def test_both_sides_have_the_same_key_and_it_is_that_of_x25519() -> None:
    """A key's Montgomery form is the public key of the same scalar: 300 keys."""
    own = identity("own")
    for number in range(300):
        peer = identity(f"peer-{number}")
        scalar = hashlib.sha512(peer.to_bytes()).digest()[:32]
        assert (
            _montgomery(peer.public_key) == X25519PrivateKey.from_private_bytes(scalar).public_key().public_bytes_raw()
        )
        assert KeyAgreement(own).secret(peer.public_key) == KeyAgreement(peer).secret(own.public_key)


def test_a_key_converts_as_in_libsodium() -> None:
    """test/default/ed25519_convert.c of libsodium: its seed, and the Curve25519 keys that it prints."""
    seed = bytes.fromhex("421151a459faeade3d247115f94aedae42318124095afabe4d1451a559faedee")
    assert _montgomery(Identity.from_bytes(seed).public_key).hex() == (
        "f1814f0e8ff1043d8a44d25babff3cedcae6c22c3edaa48f857ae70de2baae50"
    )
    secret = X25519PrivateKey.from_private_bytes(hashlib.sha512(seed).digest()[:32])
    assert secret.public_key().public_bytes_raw().hex() == (
        "f1814f0e8ff1043d8a44d25babff3cedcae6c22c3edaa48f857ae70de2baae50"
    )


def test_keys_are_derived_as_in_rfc_5869() -> None:
    one, other = identity("one"), identity("other")
    private = X25519PrivateKey.from_private_bytes(hashlib.sha512(one.to_bytes()).digest()[:32])
    peer = X25519PrivateKey.from_private_bytes(hashlib.sha512(other.to_bytes()).digest()[:32])
    raw = private.exchange(peer.public_key())
    expected = HKDF(hashes.SHA256(), 32, salt=b"hushfleet secure sum", info=b"for this").derive(raw)
    assert KeyAgreement(one).key(other.public_key, b"for this") == expected
    own = KeyAgreement(one).secret(one.public_key)
    assert KeyAgreement(one).key(one.public_key, b"x") == HKDFExpand(hashes.SHA256(), 32, info=b"x").derive(own)
    assert own not in (KeyAgreement(other).secret(one.public_key), KeyAgreement(one).secret(other.public_key))


@pytest.mark.parametrize("key", torsion_keys(), ids=bytes.hex)
def test_points_of_small_order_are_refused(key: bytes) -> None:
    """Whoever enrols with one would know a secret with everybody, and so would anybody else."""
    with pytest.raises(BadInput):
        KeyAgreement(identity("own")).secret(key)


@pytest.mark.parametrize("key", torsion_keys(), ids=bytes.hex)
def test_nothing_is_signed_by_a_point_of_small_order(key: bytes) -> None:
    """Anybody could have done it: with R = s B the equation s B = R + h A holds as soon as h A is zero."""
    seed = identity("anybody").to_bytes()
    scalar = int.from_bytes(hashlib.sha512(seed).digest()[:32], "little") & ~7 & ((1 << 254) - 1) | 1 << 254
    forged = identity("anybody").public_key + (scalar % L).to_bytes(32, "little")
    for number in range(64):  # h is a multiple of 8 for one in eight
        with pytest.raises(BadSignature):
            verify(key, b"%d" % number, forged)


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33), b"\xff" * 32])
def test_what_is_no_key_is_refused(key: bytes) -> None:
    with pytest.raises(BadInput):
        KeyAgreement(identity("own")).secret(key)
