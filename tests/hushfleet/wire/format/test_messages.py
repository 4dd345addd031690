from __future__ import annotations

import math
import struct
from dataclasses import replace
from functools import partial
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.errors import BadInput, BadSignature, Malformed, OtherVersion, TooLarge
from hushfleet.wire.format import messages
from hushfleet.wire.format.fleet_messages import CarriedRounds, EnrolAnswer, EnrolRequest, ReleaseOffer
from hushfleet.wire.format.health import Health
from hushfleet.wire.format.identity import Identity, verify
from hushfleet.wire.format.messages import (
    KINDS,
    MAX_MESSAGE_BYTES,
    Ack,
    Ask,
    Birth,
    Decline,
    DifferenceRef,
    Known,
    Message,
    Missing,
    Offer,
    Refused,
    RoundPlan,
    SeenCharges,
    ServerState,
    TaskNotice,
    Want,
    peek_kind,
    type_of,
)

encode_message = partial(messages.encode_message, federation="demo")
decode_message = partial(messages.decode_message, federation="demo")
DEVICE = Identity.from_bytes(bytes(range(32)))
STRANGER = Identity.from_bytes(bytes(range(1, 33)))
DIGEST = bytes(range(32))
NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)
TASKS = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,95}", fullmatch=True)
DIGESTS = st.binary(min_size=32, max_size=32)
NONCES = st.binary(min_size=16, max_size=16)
SIZES = st.integers(1, 5 << 28)
ROUNDS = st.integers(0, 1_000_000)
RANGES = st.lists(st.integers(0, 1 << 20), unique=True, max_size=40).map(
    lambda edges: tuple(zip(*[iter(sorted(edges))] * 2, strict=False))
)
CARRIED = st.builds(
    CarriedRounds, TASKS, st.just(((1, 4), (6, 7))), st.just("device"), st.just("one device's update"),
    st.just("gaussian"), st.floats(0, 100), st.integers(1, 9), st.just(1.0), st.integers(1, 9), st.just(("accuracy",)),
)  # fmt: skip
SPENT = st.none() | st.tuples(TASKS, ROUNDS)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(ServerState, ROUNDS, st.sampled_from(["ready", "lost"]), st.just(DEVICE.public_key)),
    st.builds(TaskNotice, TASKS, DIGESTS, SIZES, ROUNDS),
    st.builds(
        RoundPlan, TASKS, st.integers(1, 9), st.integers(9, 1_000_000), st.just("open"), DIGESTS, SIZES,
        st.dictionaries(NAMES, st.binary(min_size=16, max_size=16), max_size=30), st.integers(1, 1 << 40),
        st.floats(0, 1e12), st.dictionaries(st.sampled_from(["clip_norm", "noise_multiplier"]), st.floats(-9, 9)),
    ),
    st.builds(
        RoundPlan, TASKS, st.just(1), st.just(9), st.just("open"), DIGESTS, st.just(1000), st.just({}), st.just(1),
        st.just(60.0), differences=st.lists(
            st.builds(DifferenceRef, st.binary(min_size=8, max_size=8), DIGESTS, st.integers(1, 60)), max_size=16
        ).map(tuple),
    ),
    st.builds(
        Birth, NAMES, st.integers(0, (1 << 63) - 1), st.sampled_from(["ready", "training", "sleeping", "lost"]),
        st.just("pi-zero-2w"), st.just("0.1.0"), st.just(DEVICE.public_key), st.integers(0, 1 << 40),
    ),
    st.builds(Want, DIGESTS, SIZES, RANGES),
    st.builds(Offer, TASKS, ROUNDS, DIGESTS, SIZES),
    st.builds(Decline, TASKS, ROUNDS, st.just("budget"), st.text(max_size=900)),
    st.builds(Ack, TASKS, ROUNDS, DIGESTS),
    st.builds(Missing, TASKS, ROUNDS, DIGESTS, RANGES),
    st.builds(Refused, TASKS, ROUNDS, DIGESTS, st.just("late"), st.text(max_size=900)),
    st.builds(Ask, ROUNDS, NONCES),
    st.builds(
        Known, ROUNDS, NONCES, ROUNDS, st.booleans(), TASKS, ROUNDS, st.just("open"), st.integers(1, 9), DIGESTS
    ),
    st.builds(
        Known, ROUNDS, NONCES, ROUNDS, st.booleans(), TASKS, ROUNDS, st.just("closed"), st.just(0), st.just(b""),
        st.builds(SeenCharges, st.integers(1, (1 << 63) - 1), st.floats(0, 1e18), TASKS, ROUNDS),
    ),
    st.builds(
        EnrolRequest, NAMES, st.binary(min_size=1, max_size=2048), st.just(DEVICE.public_key),
        st.sampled_from([b"", DIGEST]), NONCES, st.just("pi-zero-2w"), st.just("0.3.0"), SPENT,
    ),
    st.builds(
        EnrolAnswer, NAMES, NONCES, st.just("granted"), st.binary(min_size=1, max_size=16_384), st.text(max_size=900),
        ROUNDS, st.lists(CARRIED, max_size=3).map(tuple), SPENT,
    ),
    st.builds(EnrolAnswer, NAMES, NONCES, st.just("pending"), st.just(b""), st.text(max_size=900), ROUNDS),
    st.builds(
        Health, NAMES, ROUNDS, st.just("0.3.0"), ROUNDS, st.none() | st.integers(0, 100), st.none(),
        st.none() | st.integers(-100, 200), st.none() | st.booleans(), st.sampled_from([None, "budget"]),
        st.sampled_from([None, "disk"]), ROUNDS, st.sampled_from(["none", "trial", "returned"]),
    ),
    st.builds(
        ReleaseOffer, NAMES, st.just("0.3.1"), st.binary(min_size=1, max_size=8192), DIGESTS, st.integers(1, 1 << 28)
    ),
)  # fmt: skip


def frame(kind: int, body: bytes, identity: Identity = DEVICE, *, version: int = 3) -> bytes:
    """A signed frame written without the module under test."""
    signed = struct.pack("<2sBBI", b"HF", version, kind, len(body)) + body
    return signed + identity.sign(b"hushfleet demo\0" + signed)


def offer_body(**changes: Any) -> bytes:
    return msgpack.packb({"task": "t", "round": 3, "digest": DIGEST, "size": 9, **changes})


@given(MESSAGES)
def test_every_message_comes_back_equal(message: Message) -> None:
    data = encode_message(message, DEVICE)
    assert len(data) <= MAX_MESSAGE_BYTES
    assert peek_kind(data) is type(message)
    assert decode_message(data, public_key=DEVICE.public_key) == message


def test_the_kinds_have_the_numbers_of_the_specification() -> None:
    names = [type_of(number).__name__ for number in range(1, len(KINDS) + 1)]
    assert names == [
        "ServerState", "TaskNotice", "RoundPlan", "Birth", "Want", "Offer", "Decline", "Ack", "Missing", "Refused",
        "NotEnrolled", "Ask", "Known", "EnrolRequest", "EnrolAnswer", "Health", "ReleaseOffer", "ReleaseNews",
    ]  # fmt: skip
    assert len(KINDS) == 18


def test_a_frame_written_by_hand_is_read() -> None:
    assert decode_message(frame(6, offer_body()), public_key=DEVICE.public_key) == Offer("t", 3, DIGEST, 9)


def test_any_changed_bit_is_noticed() -> None:
    data = encode_message(Ack("t", 1, DIGEST), DEVICE)
    for position in range(8 * len(data)):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises((Malformed, BadSignature)):
            decode_message(bytes(changed), public_key=DEVICE.public_key)


def test_only_the_named_sender_is_believed() -> None:
    data = encode_message(Ack("t", 1, DIGEST), DEVICE)
    with pytest.raises(BadSignature):
        decode_message(data, public_key=STRANGER.public_key)
    with pytest.raises(BadSignature, match="not known yet"):
        decode_message(data)


def test_what_was_signed_for_one_federation_verifies_in_no_other() -> None:
    for message in (Ack("t", 1, DIGEST), ServerState(2, "ready", DEVICE.public_key)):
        data = messages.encode_message(message, DEVICE, federation="demo2")
        assert len(data) == len(encode_message(message, DEVICE))
        with pytest.raises(BadSignature, match="for the federation 'demo'"):
            decode_message(data, public_key=DEVICE.public_key)
    with pytest.raises(BadSignature, match="for the federation"):
        decode_message(data)


def test_births_and_server_states_vouch_for_themselves_but_not_for_another_key() -> None:
    birth = Birth("pi", 4, "ready", "pi-4", "0.1", DEVICE.public_key, 512)
    state = ServerState(2, "ready", DEVICE.public_key)
    for message in (birth, state):
        assert decode_message(encode_message(message, DEVICE)) == message
        forged = encode_message(message, STRANGER)
        with pytest.raises(BadSignature):
            decode_message(forged)
        with pytest.raises(BadSignature, match="another key"):
            decode_message(forged, public_key=STRANGER.public_key)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (6, offer_body(extra=1)),
        (6, offer_body(round=True)),
        (6, offer_body(round=3.0)),
        (6, offer_body(round=-1)),
        (6, offer_body(round=1_000_001)),
        (6, offer_body(size=0)),
        (6, offer_body(size=(5 << 28) + 1)),
        (6, offer_body(digest=bytes(31))),
        (6, offer_body(digest="x" * 32)),
        (6, offer_body(task="../t")),
        (6, offer_body(task="t\n")),
        (6, offer_body(task=b"t")),
        (6, offer_body()[:-1]),
        (6, offer_body() + b"\0"),
        (6, b""),
        (6, b"\xc0"),
        (6, msgpack.packb([1, 2])),
        (6, msgpack.packb({"task": "t", "round": 3, "digest": DIGEST})),
        (6, msgpack.packb({"round": 3, "task": "t", "digest": DIGEST, "size": 9})),  # another order
        (6, offer_body().replace(b"\xa4size\x09", b"\xa4size\xcc\x09")),  # a padded integer
        (6, b"\x85" + offer_body()[1:] + b"\xa4size\x09"),  # a repeated key
        (6, b"\x84" + b"\xa4task\xa1\xff" + offer_body()[8:]),  # not UTF-8
        (6, b"\xdd\xff\xff\xff\xff"),  # four billion items
        (6, b"\xdb\xff\xff\xff\xff"),
        (6, b"\xc6\xff\xff\xff\xff"),
        (6, b"\xdf\xff\xff\xff\xff"),
        (6, b"\xc7\x01\x05\x00"),  # an extension type
        (6, b"\x91" * 60_000),
        (5, msgpack.packb({"digest": DIGEST, "size": 9, "missing": [[0, 2], [2, 4]]})),
        (5, msgpack.packb({"digest": DIGEST, "size": 9, "missing": [[4, 5], [0, 2]]})),
        (5, msgpack.packb({"digest": DIGEST, "size": 9, "missing": [[3, 3]]})),
        (5, msgpack.packb({"digest": DIGEST, "size": 9, "missing": [[-1, 3]]})),
        (5, msgpack.packb({"digest": DIGEST, "size": 9, "missing": [[0, (1 << 20) + 1]]})),
        (5, msgpack.packb({"digest": DIGEST, "size": 9, "missing": [[2 * i, 2 * i + 1] for i in range(2049)]})),
        (7, msgpack.packb({"task": "t", "round": 1, "code": "because", "reason": ""})),
        (7, msgpack.packb({"task": "t", "round": 1, "code": "disk", "reason": "a\nforged line of the log"})),
        (7, msgpack.packb({"task": "t", "round": 1, "code": "disk", "reason": "x" * 401})),
        (14, offer_body()),
        (0, offer_body()),
    ],
)
def test_what_breaks_a_rule_is_malformed_though_correctly_signed(kind: int, body: bytes) -> None:
    with pytest.raises(Malformed):
        decode_message(frame(kind, body), public_key=DEVICE.public_key)


@pytest.mark.parametrize("deadline_s", [math.nan, math.inf, -1.0, 1e13])
def test_times_are_finite_and_in_range(deadline_s: float) -> None:
    plan = {
        "task": "t", "round": 1, "rounds": 3, "phase": "open", "global_digest": DIGEST, "global_bytes": 4,
        "cohort": {}, "noise_split": 1, "deadline_s": deadline_s,
    }  # fmt: skip
    with pytest.raises(Malformed):
        decode_message(frame(3, msgpack.packb(plan)), public_key=DEVICE.public_key)
    good = frame(3, msgpack.packb({**plan, "deadline_s": 60.0}))
    assert decode_message(good, public_key=DEVICE.public_key).deadline_s == 60.0


def test_another_version_says_so() -> None:
    for version, who in ((2, "the sender"), (4, "this side")):
        with pytest.raises(OtherVersion, match=f"wire version {version}, this side speaks 3; update {who}"):
            decode_message(frame(6, offer_body(), version=version), public_key=DEVICE.public_key)


def test_a_board_of_the_former_version_can_still_be_updated() -> None:
    """What it says of itself, and what it is offered, have the version that they had."""
    want = msgpack.packb({"digest": DIGEST, "size": 5, "missing": []})
    assert decode_message(frame(5, want, version=2), public_key=DEVICE.public_key) == Want(DIGEST, 5, ())
    for message in (Want(DIGEST, 5, ()), ReleaseOffer("pi-1", "0.4.0", b"manifest", DIGEST, 5000)):
        assert encode_message(message, DEVICE)[2] == 2
    assert encode_message(Ack("t", 1, DIGEST), DEVICE)[2] == 3


def test_lengths_are_capped_before_anything_is_parsed() -> None:
    with pytest.raises(TooLarge):
        decode_message(bytes(MAX_MESSAGE_BYTES + 1), public_key=DEVICE.public_key)
    with pytest.raises(TooLarge):
        peek_kind(bytes(MAX_MESSAGE_BYTES + 1))


def test_a_cohort_too_large_for_one_message_is_refused_by_the_sender() -> None:
    def plan(devices: int) -> RoundPlan:
        cohort = {f"device-{index:056d}": bytes(16) for index in range(devices)}
        return RoundPlan("t", 1, 3, "open", DIGEST, 4, cohort, devices, 60.0)

    assert decode_message(encode_message(plan(750), DEVICE), public_key=DEVICE.public_key) == plan(750)
    with pytest.raises(TooLarge, match="fewer or shorter device ids"):
        encode_message(plan(900), DEVICE)


def test_reasons_become_one_short_line_whatever_they_were() -> None:
    decline = Decline("t", 1, "error", "first\nsecond\x1b[31m" + "x" * 1000 + "\ud800")
    assert "\n" not in decline.reason
    assert "\x1b" not in decline.reason
    assert len(decline.reason) == 400
    assert decode_message(encode_message(decline, DEVICE), public_key=DEVICE.public_key) == decline
    assert Decline("t", 1, "error", "lone \ud800 half").reason == "lone   half"


def test_keys_of_another_length_are_refused() -> None:
    with pytest.raises(BadInput, match="32 bytes, not 31"):
        Identity.from_bytes(bytes(31))
    with pytest.raises(BadSignature):
        verify(bytes(31), b"", bytes(64))
    with pytest.raises(BadSignature):
        verify(DEVICE.public_key, b"", bytes(63))


def test_an_identity_keeps_its_key_and_does_not_show_it() -> None:
    identity = Identity.generate()
    again = Identity.from_bytes(identity.to_bytes())
    assert again.public_key == identity.public_key
    assert again.sign(b"data") == identity.sign(b"data")
    assert identity.to_bytes().hex() not in repr(identity)
    verify(identity.public_key, b"data", identity.sign(b"data"))


def test_ed25519_is_the_one_of_rfc_8032() -> None:
    """Test vector 2 of RFC 8032, section 7.1."""
    identity = Identity.from_bytes(bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"))
    assert identity.public_key.hex() == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert identity.sign(b"\x72").hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )


def test_what_a_plan_need_not_say_costs_no_byte_and_what_it_says_comes_back() -> None:
    plain = RoundPlan("t", 1, 2, "open", bytes(32), 4, {}, 1, 1.0)
    assert b"controls" not in encode_message(plain, DEVICE)
    steered = replace(plain, controls={"clip_norm": 0.25, "noise_multiplier": 3.0})
    assert decode_message(encode_message(steered, DEVICE), public_key=DEVICE.public_key) == steered
    for controls in ({"clip norm": 1.0}, {"x" * 33: 1.0}, {"a": math.inf}, {f"c{i}": 1.0 for i in range(17)}):
        with pytest.raises(ValueError, match="controls"):
            replace(plain, controls=controls)


def test_no_round_before_the_first_is_open() -> None:
    """A device would take it for one more round than its task has."""
    first = RoundPlan("t", 1, 2, "open", bytes(32), 4, {}, 1, 1.0)
    for phase in ("closed", "finished"):
        assert replace(first, round=0, phase=phase).round == 0
    with pytest.raises(ValueError, match="round = 0: must be 1 or more in the phase 'open'"):
        replace(first, round=0)


def test_a_buffered_plan_names_nobody_and_takes_updates_of_some_earlier_rounds() -> None:
    plain = RoundPlan("t", 5, 9, "open", bytes(32), 4, {}, 1, 1.0)
    buffered = replace(plain, max_staleness=2)
    assert b"max_staleness" not in encode_message(plain, DEVICE)
    assert decode_message(encode_message(buffered, DEVICE), public_key=DEVICE.public_key) == buffered
    assert [round for round in range(9) if buffered.takes("t", round)] == [3, 4, 5]
    assert [round for round in range(9) if plain.takes("t", round)] == [5]
    assert not buffered.takes("another task", 5)
    assert (buffered.names("anybody"), plain.names("anybody")) == (True, False)
    for changes in ({"cohort": {"a": bytes(16)}}, {"max_staleness": 1001}, {"max_staleness": -1}):
        with pytest.raises(ValueError, match="max_staleness"):
            replace(buffered, **changes)
