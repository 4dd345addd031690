"""The list of devices and keys: what it refuses, who signs it, and who is drawn from it."""

from __future__ import annotations

import msgspec
import pytest

from hushfleet.errors import BadSignature, Malformed
from hushfleet.secure.roster import Roster
from support.secure_sums import identity

KEYS = {f"pi-{number}": identity(f"pi-{number}").public_key for number in range(5)}
OPERATOR, AGGREGATOR = identity("operator"), identity("aggregator")


def test_bytes_and_back() -> None:
    roster = Roster.of(KEYS).signed(OPERATOR)
    assert Roster.from_bytes(roster.to_bytes(), operator=OPERATOR.public_key) == roster
    assert [roster.key(index) for index in range(5)] == [KEYS[device] for device in roster.devices]
    assert roster.digest() == Roster.of(KEYS).digest()


def test_only_the_operators_signature_over_this_very_list_counts() -> None:
    more = Roster.of({**KEYS, "sybil": identity("sybil").public_key})
    for roster in (
        more,
        more.signed(AGGREGATOR),
        Roster(more.devices, more.keys, Roster.of(KEYS).signed(OPERATOR).signature),
    ):
        Roster.from_bytes(roster.to_bytes())
        with pytest.raises(BadSignature):
            Roster.from_bytes(roster.to_bytes(), operator=OPERATOR.public_key)


@pytest.mark.parametrize(
    ("devices", "keys", "words"),
    [
        (("b", "a"), bytes(31) + b"\1" + bytes(32), "rising"),
        (("a", "a"), bytes(31) + b"\1" + bytes(32), "rising"),
        (("a", "b"), bytes(63), "32 bytes for each"),
        (("a", "b"), bytes(64), "another one for each"),
        ((), b"", "devices"),
        (("a/b",), bytes(32), "devices"),
    ],
)
def test_hostile_lists(devices: tuple[str, ...], keys: bytes, words: str) -> None:
    data = msgspec.msgpack.encode({"devices": devices, "keys": keys, "signature": b""})
    with pytest.raises(Malformed, match=words):
        Roster.from_bytes(data)


def test_a_list_has_one_form() -> None:
    """Otherwise who has a signed list could write it in many ways, and choose."""
    data = Roster.of(KEYS).signed(OPERATOR).to_bytes()
    fields = msgspec.msgpack.decode(data)
    turned = msgspec.msgpack.encode(dict(reversed(fields.items()))) if isinstance(fields, dict) else data + b"\xc0"
    for other in (turned, data + b"\0", data[:-1]):
        with pytest.raises(Malformed):
            Roster.from_bytes(other, operator=OPERATOR.public_key)


def test_who_is_drawn_follows_from_the_seed_alone() -> None:
    roster = Roster.of({f"d{number}": identity(str(number)).public_key for number in range(400)})
    some = roster.cohort(seed=b"s", rate=0.25)
    assert some == sorted(some)
    assert 60 < len(some) < 140
    assert set(some) <= set(roster.cohort(seed=b"s", rate=0.5))  # a larger rate adds devices, and changes nobody's draw
    assert some != roster.cohort(seed=b"t", rate=0.25)
    assert roster.cohort(seed=b"s", rate=1.0) == list(range(400))
    members = roster.committee(some, seed=b"s", size=20)
    assert set(members) <= set(some)
    assert len(set(members)) == 20
    assert members == roster.committee(some[::-1], seed=b"s", size=20)
    counted = [0] * 400
    for number in range(300):
        for member in roster.committee(list(range(400)), seed=b"%d" % number, size=40):
            counted[member] += 1
    assert max(counted) < 65  # 30 on average, with a deviation of 5.2
