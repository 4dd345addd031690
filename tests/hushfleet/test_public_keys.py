"""The one rule of public keys, against the curve's own formulas; and that there is no other."""

from __future__ import annotations

import ast
import hashlib
import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from hushfleet.errors import BadInput, BadSignature
from hushfleet.firmware_profiles.cards.seed import slots_archive
from hushfleet.public_keys import CURVE_PRIME, PublicKeyText, _jacobi, can_have_owner, parse_public_key, verify
from hushfleet.secure.agreement import KeyAgreement
from hushfleet.wire.format.identity import Identity
from support.edwards25519 import OFF_CURVE, ZERO, L, P, add, decode, encode, times, torsion, torsion_keys

ROOT = Path(__file__).resolve().parents[2]
OWNER = Identity.from_bytes(bytes(range(32)))


@cache
def strings() -> list[bytes]:
    """Keys that somebody owns, all of small order, sums of both, random strings, and lengths that are none."""
    draw = random.Random(7)
    owned = [Identity.from_bytes(draw.randbytes(32)).public_key for _ in range(20)]
    unreduced = [(P + y).to_bytes(32, "little") for y in range(2, 19)]
    mixed = [encode(add(point_of(owned[0]), point)) for point in torsion()]
    return [*owned, *torsion_keys(), *mixed, *unreduced, *(draw.randbytes(32) for _ in range(300))]


def point_of(key: bytes) -> tuple[int, int]:
    point = decode(key)
    assert point is not None
    return point


def is_of_large_order(key: bytes) -> bool:
    point = decode(key)
    return point is not None and times(8, point) != ZERO


def test_a_key_is_a_point_of_large_order_in_its_one_form() -> None:
    said = [can_have_owner(key) for key in strings()]
    assert said == [is_of_large_order(key) for key in strings()]
    assert 150 < sum(said) < 200, "half of the random strings, and all that somebody owns"
    for key in (b"", bytes(31), bytes(33), OWNER.public_key + b"\0"):
        assert not can_have_owner(key)


def test_squares_are_found_as_by_eulers_criterion() -> None:
    draw = random.Random(8)
    for number in [0, 1, 2, CURVE_PRIME - 1, *(draw.randrange(CURVE_PRIME) for _ in range(300))]:
        power = pow(number, (CURVE_PRIME - 1) // 2, CURVE_PRIME)
        assert _jacobi(number, CURVE_PRIME) % CURVE_PRIME == power
    for (number, modulus), symbol in {(2, 15): 1, (7, 15): -1, (5, 15): 0, (1001, 9907): -1}.items():
        assert _jacobi(number, modulus) == symbol


def test_a_sum_with_a_point_of_small_order_belongs_to_the_same_owner() -> None:
    """It is accepted: with such a key only its owner can sign, and not even most messages."""
    seed = hashlib.sha512(OWNER.to_bytes()).digest()
    scalar = int.from_bytes(seed[:32], "little") & ~7 & ((1 << 254) - 1) | 1 << 254
    signed = OWNER.sign(b"of the owner's key")
    for point in torsion():
        key = encode(add(point_of(OWNER.public_key), point))
        assert can_have_owner(key)
        if point == ZERO:
            continue
        with pytest.raises(BadSignature):
            verify(key, b"of the owner's key", signed)
        verify(key, *by_scalar(scalar, key))
        with pytest.raises(AssertionError, match="no message"):
            by_scalar(scalar + 1, key)  # who does not know the scalar


def by_scalar(scalar: int, key: bytes) -> tuple[bytes, bytes]:
    """A message that this secret number signs for `key`, and the signature (RFC 8032, 5.1.6)."""
    base = point_of((4 * pow(5, -1, P) % P).to_bytes(32, "little"))
    nonce = encode(times(12345, base))
    for number in range(64):
        message = b"%d" % number
        challenge = int.from_bytes(hashlib.sha512(nonce + key + message).digest(), "little") % L
        signature = nonce + ((12345 + challenge * scalar) % L).to_bytes(32, "little")
        try:
            verify(key, message, signature)
        except BadSignature:
            continue
        return message, signature
    raise AssertionError("no message")


def test_two_places_in_a_membership_list_have_two_masks_though_their_owner_is_one() -> None:
    """Else a key of a board, moved by a point of small order, would take the board's own mask out of a sum."""
    other = Identity.from_bytes(bytes(range(1, 33)))
    agreement = KeyAgreement(other, task=b"task")
    moved = encode(add(point_of(OWNER.public_key), torsion()[-1]))
    assert agreement.secret(moved) == agreement.secret(OWNER.public_key)
    assert agreement.key(moved, b"device 3 member 1") != agreement.key(OWNER.public_key, b"device 2 member 1")


@pytest.mark.parametrize("key", [*torsion_keys(), OFF_CURVE], ids=bytes.hex)
def test_what_nobody_owns_is_refused_in_words(key: bytes) -> None:
    with pytest.raises(BadInput, match=f"--key is '{key.hex()}', which nobody can own; take the key that `.*` prints"):
        parse_public_key(key.hex(), "--key")
    with pytest.raises(ValueError, match="nobody can own"):
        PublicKeyText.from_wire(key.hex())
    with pytest.raises(BadSignature):
        verify(key, b"", bytes(64))


@pytest.mark.parametrize(
    "text", ["", "ab", "ab" * 33, "zz" * 32, " ".join(["ab"] * 22)[:64], "\N{DEVANAGARI DIGIT ONE}" * 64]
)
def test_what_is_no_text_of_a_key_is_refused_in_words(text: str) -> None:
    with pytest.raises(BadInput, match="--key must be 64 hex digits, not"):
        parse_public_key(text, "--key")


def test_either_case_is_read() -> None:
    text = OWNER.public_key.hex()
    assert parse_public_key(text, "") == parse_public_key(text.upper(), "") == OWNER.public_key
    assert PublicKeyText.from_wire(text) == text


def test_what_is_outside_of_all_releases_has_the_same_rule(tmp_path: Path) -> None:
    """`slots.pyz` runs without any package; only a signature needs one."""
    (tmp_path / "slots.pyz").write_bytes(slots_archive())
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from hushfleet.public_keys import __file__, can_have_owner\n"
        "assert 'slots.pyz' in __file__\n"
        "print(*(int(can_have_owner(bytes.fromhex(line.strip()))) for line in sys.stdin))\n"
    )
    lines = "".join(f"{key.hex()}\n" for key in strings())
    command = [sys.executable, "-I", "-S", "-c", code, str(tmp_path / "slots.pyz")]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    assert [bool(int(each)) for each in done.stdout.split()] == [can_have_owner(key) for key in strings()]


def test_there_is_one_verifier() -> None:
    """A second one would have a rule of its own, or none."""
    users = [
        file.relative_to(ROOT).as_posix()
        for folder in ("hushfleet", "edge_client", "aggregator", "firmware_profiles", "models", "simulator")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.alias) and node.name == "Ed25519PublicKey"
    ]
    assert users == ["hushfleet/public_keys.py"]
