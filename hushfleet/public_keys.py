"""Decides which bytes are a public key, and verifies signatures: the only rule for every key and every signature.

A board's `slots.pyz` contains this module, so it imports only the standard library; `cryptography` is imported when a
signature is verified.
"""

from __future__ import annotations

import re
from functools import lru_cache

from hushfleet.errors import BadInput, BadSignature

KEY_BYTES = 32
SIGNATURE_BYTES = 64
CURVE_PRIME = (1 << 255) - 19
"""Coordinates of points of edwards25519 and curve25519 are counted modulo this prime."""
_D = -121665 * pow(121666, -1, CURVE_PRIME) % CURVE_PRIME  # edwards25519: y^2 - x^2 = 1 + d x^2 y^2 (RFC 8032)
_ORDER_8 = int.from_bytes(bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little")
_SMALL_ORDER = frozenset({0, 1, CURVE_PRIME - 1, _ORDER_8, CURVE_PRIME - _ORDER_8})
"""y of the points of order 1, 2, 4 and 8."""
KEY_TEXT = re.compile(r"[0-9a-fA-F]{64}")


@lru_cache(maxsize=1 << 14)  # the same boards sign again and again; some 4 MB if it is full
def can_have_owner(public_key: bytes) -> bool:
    """Returns whether somebody can own this key: 32 bytes that encode a point of edwards25519 of large order.

    Half of all strings are no point of the curve, and nobody can sign with them. With a point of small order anybody
    can sign, and it gives no shared secret, so one board with such a key would stop all secure aggregation of its
    fleet. A key whose y is not reduced is another spelling of a point, which no device makes.

    A sum of an owned point and one of small order is accepted. Only the owner can sign with it, and its secrets with
    others belong to places in the membership list, so it is worth no more than a second key of the same owner. To
    refuse it would take a scalar multiplication for each of the 100,000 keys that a list may have.

    >>> can_have_owner(bytes(32)), can_have_owner(b"short")
    (False, False)
    """
    y = int.from_bytes(public_key, "little") & ((1 << 255) - 1)  # without the sign of x
    if len(public_key) != KEY_BYTES or y >= CURVE_PRIME or y in _SMALL_ORDER:
        return False
    # x^2 = (y^2 - 1) / (d y^2 + 1) has a root if and only if the product of both is a square
    return _jacobi((y * y - 1) * (_D * y * y + 1), CURVE_PRIME) == 1


def _jacobi(a: int, n: int) -> int:
    """Returns the Jacobi symbol (a/n) for an odd n: 1 for squares modulo a prime.

    The power a^((n-1)/2) tells the same and takes four times as long.
    """
    a, sign = a % n, 1
    while a:
        twos = (a & -a).bit_length() - 1
        a >>= twos
        if twos & 1 and n & 7 in (3, 5):
            sign = -sign
        if a & n & 3 == 3:
            sign = -sign
        a, n = n % a, a
    return sign if n == 1 else 0


def parse_public_key(
    text: str, what: str, *, owner: str = "nobody", printed_by: str = "`hushfleet fleet key FILE`"
) -> bytes:
    """Parses a key that a person typed or that a file has, 64 hex digits. Raises `BadInput`.

    :param what: the name of the option, or of the file and its key, for the error's text.
    :param owner: such as "no board", for a key of a board.
    :param printed_by: the command that prints the right key.
    """
    if not KEY_TEXT.fullmatch(text):
        raise BadInput(f"{what} must be 64 hex digits, not {text[:80]!r}; take the key that {printed_by} prints")
    key = bytes.fromhex(text)
    if not can_have_owner(key):
        raise BadInput(f"{what} is {text!r}, which {owner} can own; take the key that {printed_by} prints")
    return key


class PublicKeyText(str):
    """A public key as text, for a field of a schema (`hushfleet.schema`)."""

    __slots__ = ()

    @classmethod
    def from_wire(cls, value: object) -> PublicKeyText:
        """Raises `ValueError` unless the value is the text of a key."""
        try:
            text = value if isinstance(value, str) else repr(value)
            parse_public_key(text, "the key", printed_by="its owner's machine")
        except BadInput as error:
            raise ValueError(str(error)) from error
        return cls(value)

    def to_wire(self) -> str:
        """Returns the text itself: msgspec encodes no class derived from `str`."""
        return str(self)


def verify(public_key: bytes, data: bytes | bytearray | memoryview, signature: bytes | bytearray | memoryview) -> None:
    """Raises `BadSignature` unless the owner of `public_key` (32 bytes) signed exactly `data`."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if len(public_key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        raise BadSignature(
            f"a key of {KEY_BYTES} and a signature of {SIGNATURE_BYTES} bytes are expected, "
            f"got {len(public_key)} and {len(signature)}"
        )
    if not can_have_owner(public_key):
        raise BadSignature(f"the key {public_key.hex()[:16]}... can have no owner")
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError) as error:
        raise BadSignature(f"the signature is not one of the key {public_key.hex()[:16]}...") from error
