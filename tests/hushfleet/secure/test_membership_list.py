"""The list of devices and keys: what it refuses, who signs it, and who is drawn from it."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest

from hushfleet.errors import BadSignature, Malformed, OtherVersion
from hushfleet.secure.membership_list import MembershipList, MembershipListContent
from support.secure_aggregation import identity

KEYS = {f"pi-{number}": identity(f"pi-{number}").public_key for number in range(5)}
OTHER = {"federation": "b", "honest_fraction": 1.0, "min_devices": 2, "number": 1 << 40, "date": 0, "nonce": bytes(32)}
OPERATOR, AGGREGATOR = identity("operator"), identity("aggregator")


FIELDS = msgspec.msgpack.decode(MembershipList.of(KEYS).to_bytes())


def test_bytes_and_back() -> None:
    membership_list = MembershipList.of(KEYS).signed(OPERATOR)
    assert MembershipList.from_bytes(membership_list.to_bytes(), operator=OPERATOR.public_key) == membership_list
    assert [membership_list.key(index) for index in range(5)] == [KEYS[device] for device in membership_list.devices]
    assert membership_list.content == MembershipListContent.of(KEYS)


def test_only_the_operators_signature_over_this_very_list_counts() -> None:
    more = MembershipList.of({**KEYS, "sybil": identity("sybil").public_key})
    for membership_list in (
        more,
        more.signed(AGGREGATOR),
        replace(MembershipList.of(KEYS).signed(OPERATOR), devices=more.devices, keys=more.keys),
        *(replace(MembershipList.of(KEYS).signed(OPERATOR), **{name: value}) for name, value in OTHER.items()),
    ):
        MembershipList.from_bytes(membership_list.to_bytes())
        with pytest.raises(BadSignature):
            MembershipList.from_bytes(membership_list.to_bytes(), operator=OPERATOR.public_key)


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
    data = msgspec.msgpack.encode({**FIELDS, "devices": devices, "keys": keys})
    with pytest.raises(Malformed, match=words):
        MembershipList.from_bytes(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("federation", "a/b"), ("honest_fraction", 0.0), ("honest_fraction", 1.5), ("honest_fraction", math.nan),
        ("min_devices", 1), ("number", -1), ("date", -1), ("nonce", bytes(31)), ("signature", bytes(65)),
    ],
)  # fmt: skip
def test_hostile_fields(field: str, value: object) -> None:
    with pytest.raises(Malformed, match=field):
        MembershipList.from_bytes(msgspec.msgpack.encode({**FIELDS, field: value}))


def test_a_list_of_an_earlier_version_says_what_to_do() -> None:
    data = msgspec.msgpack.encode({name: FIELDS[name] for name in ("devices", "keys", "signature")})
    with pytest.raises(OtherVersion, match=r"format of Hushfleet 0\.3.*signed anew"):
        MembershipList.from_bytes(data)


def test_each_signature_settles_a_higher_number_and_other_random_bytes() -> None:
    content = MembershipListContent.of(KEYS)
    first = content.signed(OPERATOR, at=1000.7)
    assert (first.number, first.date) == (1000, 1000)
    second = content.signed(OPERATOR, after=first.number, at=1000.7)
    assert (second.number, second.date) == (1001, 1000)
    assert content.signed(OPERATOR, after=second.number, at=900).number == 1002  # a clock that was set back
    assert content.signed(OPERATOR, at=2000).number == 2000  # whoever has lost the last one
    assert len({first.nonce, second.nonce, bytes(32)}) == 3
    assert first.digest() != second.digest()


@pytest.mark.parametrize(("devices", "fraction", "honest"), [(100, 0.9, 90), (12, 0.9, 11), (10, 0.8, 8), (3, 1.0, 3)])
def test_how_many_are_honest(devices: int, fraction: float, honest: int) -> None:
    keys = {str(number): identity(str(number)).public_key for number in range(devices)}
    assert MembershipListContent.of(keys, honest_fraction=fraction).honest_devices == honest


def test_a_list_has_one_form() -> None:
    """Otherwise who has a signed list could write it in many ways, and choose."""
    data = MembershipList.of(KEYS).signed(OPERATOR).to_bytes()
    fields = msgspec.msgpack.decode(data)
    turned = msgspec.msgpack.encode(dict(reversed(fields.items()))) if isinstance(fields, dict) else data + b"\xc0"
    for other in (turned, data + b"\0", data[:-1]):
        with pytest.raises(Malformed):
            MembershipList.from_bytes(other, operator=OPERATOR.public_key)


def test_who_is_drawn_follows_from_the_seed_alone() -> None:
    membership_list = MembershipList.of({f"d{number}": identity(str(number)).public_key for number in range(400)})
    some = membership_list.cohort(seed=b"s", rate=0.25)
    assert some == sorted(some)
    assert 60 < len(some) < 140
    # a larger rate adds devices, and changes nobody's draw
    assert set(some) <= set(membership_list.cohort(seed=b"s", rate=0.5))
    assert some != membership_list.cohort(seed=b"t", rate=0.25)
    assert membership_list.cohort(seed=b"s", rate=1.0) == list(range(400))
    members = membership_list.committee(some, seed=b"s", size=20)
    assert set(members) <= set(some)
    assert len(set(members)) == 20
    assert members == membership_list.committee(some[::-1], seed=b"s", size=20)
    counted = [0] * 400
    for number in range(300):
        for member in membership_list.committee(list(range(400)), seed=b"%d" % number, size=40):
            counted[member] += 1
    assert max(counted) < 65  # 30 on average, with a deviation of 5.2
