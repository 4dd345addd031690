"""What root says of release keys: what a board takes, in which order, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hushfleet.errors import BadInput, BadSignature, HushfleetError, Malformed, TooLarge
from hushfleet.release.statements import (
    KEYS_FILE,
    LINE_CAP,
    ROOT_FILE,
    TEXT_CAP,
    Newest,
    ReleaseKeys,
    Signed,
    Trust,
    read_keys,
)
from hushfleet.wire.format.identity import Identity
from support.releases import DAILY, ROOT, put_trust, statement, trust_in

KEYS = tuple(Identity.from_bytes(bytes([number] * 32)) for number in range(1, 5))
A, B, C, D = (key.public_key.hex() for key in KEYS)
GOLDEN_LINE = (
    '{"signatures":{"03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8":"SIGNATURE"},"statement":'
    '{"keys":["KEY"],"newest_key":"DAILY","next_root":"","number":7,"root":'
    '"03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8","threshold":1}}'
)


GOLDEN_SIGNATURE = (
    "f1b1cbb4861e61cdf5407abf9f2e4ac659cc8e963cb5e4953f916ff0b8ac1a9a"
    "e9a562881d4efcd2c3c1a3747a7b7a0cd77f953e104adeba18dc3a5ab1814b00"
)


def fresh() -> Trust:
    return Trust(ROOT.public_key.hex())


def test_a_statement_has_golden_bytes() -> None:
    root = Identity.from_bytes(bytes(range(32)))
    signed = Signed(ReleaseKeys(7, root.public_key.hex(), (A,), 1, B)).with_signature(root)
    line = GOLDEN_LINE.replace("SIGNATURE", GOLDEN_SIGNATURE).replace("KEY", A).replace("DAILY", B)
    assert signed.to_line() == line
    assert Signed.from_line(ReleaseKeys, line) == signed


def test_newer_statements_are_taken_and_older_ones_are_not() -> None:
    first, second = statement(A).to_line(), statement(B, number=2).to_line()
    trust = fresh().after(first).after(second)
    assert trust.in_force().keys == (B,)
    assert trust.after(first) == trust
    assert trust.after(f"{first}\n{second}\n") == trust
    assert fresh().after(f"{first}\n{second}\n") == trust


def test_without_a_statement_no_release_is_taken() -> None:
    with pytest.raises(BadInput, match="named no release keys"):
        fresh().in_force()


def test_a_statement_that_root_has_not_signed_is_refused() -> None:
    stranger = Identity.generate()
    forged = [
        statement(B, number=2, root=stranger),
        Signed(statement(B, number=2).statement),
        Signed(statement(B, number=2).statement, statement(C, number=2).signatures),
        Signed(statement(B, number=2).statement).with_signature(stranger),
        statement(B, number=2, root=stranger, next_root=ROOT.public_key.hex()),
    ]
    for each in forged:
        with pytest.raises(BadSignature, match="not signed by the root"):
            trust_in(A).after(each.to_line())


def test_root_is_followed_by_the_root_that_it_names() -> None:
    heir, third = Identity.generate(), Identity.generate()
    named = statement(A, number=2, next_root=heir.public_key.hex())
    with pytest.raises(BadSignature):  # the new root must show that it is there
        trust_in(A).after(named.to_line())
    named = named.with_signature(heir)
    trust = trust_in(A).after(named.to_line())
    assert trust.root == heir.public_key.hex()
    with pytest.raises(BadSignature):
        trust.after(statement(B, number=3).to_line())
    further = statement(B, number=3, root=heir, next_root=third.public_key.hex()).with_signature(third)
    last = statement(C, number=4, root=third)
    chain = "".join(f"{each.to_line()}\n" for each in (named, further, last))
    assert trust_in(A).after(chain).in_force().keys == (C,), "a board that was away goes from root to root"
    with pytest.raises(BadSignature):
        trust_in(A).after(last.to_line())
    # a card that is written now has the root that signs next, and the statement that named it
    assert Trust(heir.public_key.hex()).after(named.to_line()).root == heir.public_key.hex()


def test_what_was_taken_is_read_again(tmp_path: Path) -> None:
    put_trust(tmp_path, A)
    assert Trust.of_board(tmp_path) == trust_in(A)
    (tmp_path / KEYS_FILE).write_text("damaged")
    assert Trust.of_board(tmp_path) == fresh(), "the next statement mends it"
    (tmp_path / KEYS_FILE).unlink()
    assert Trust.of_board(tmp_path) == fresh()
    for text in ("", "ab" * 31, "g" * 64):
        (tmp_path / ROOT_FILE).write_text(text)
        with pytest.raises(BadInput, match="64 hex digits"):
            Trust.of_board(tmp_path)
    (tmp_path / ROOT_FILE).unlink()
    with pytest.raises(BadInput, match="unknown"):
        Trust.of_board(tmp_path)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"number": 0}, "number"),
        ({"number": True}, "number"),
        ({"number": "1"}, "number"),
        ({"number": 2**60}, "number"),
        ({"keys": ()}, "keys"),
        ({"keys": "ab"}, "keys"),
        ({"keys": tuple(f"{i:064x}" for i in range(9))}, "keys"),
        ({"keys": (A, A)}, "keys"),
        ({"keys": (A.upper(),)}, "a key"),
        ({"keys": (3,)}, "a key"),
        ({"keys": (A, D)}, "keys"),  # the daily key lies online, and must not sign releases
        ({"newest_key": ""}, "a key"),
        ({"next_root": None}, "a key"),
        ({"root": A}, "keys"),
        ({"threshold": 0}, "threshold"),
        ({"threshold": 3}, "threshold"),
        ({"threshold": 1.0}, "threshold"),
    ],
)
def test_statements_that_break_a_rule(changes: dict[str, Any], what: str) -> None:
    fields = {"number": 1, "root": C, "keys": (A, B), "threshold": 1, "newest_key": D, **changes}
    with pytest.raises(Malformed, match=what):
        ReleaseKeys(**fields)


def test_only_the_form_that_was_signed_is_read() -> None:
    line = statement(A).to_line()
    content = json.loads(line)
    others = [
        json.dumps(content, sort_keys=True),
        line + " ",
        json.dumps({**content, "more": 1}, sort_keys=True, separators=(",", ":")),
        json.dumps({**content, "signatures": []}, sort_keys=True, separators=(",", ":")),
        line.replace('"threshold":1', '"threshold":1,"x":2'),
        line.replace('"threshold":1', '"threshold":1.0'),
        line.replace('"number":1', '"number":1,"number":1'),
        "[]",
        "3",
        "[" * 5000,
        "",
        line[:-1],
    ]
    for each in others:
        with pytest.raises(Malformed):
            Signed.from_line(ReleaseKeys, each)
    with pytest.raises(TooLarge):
        Signed.from_line(ReleaseKeys, " " * (LINE_CAP + 1))
    with pytest.raises(TooLarge):
        read_keys("\n" * (TEXT_CAP + 1))


def test_a_signature_of_one_kind_is_none_of_another() -> None:
    word = Signed(Newest(5, {"cp313-aarch64": "0.3.1"})).with_signature(DAILY)
    assert word.is_signed_by(DAILY.public_key.hex())
    stolen = Signed(statement(A).statement, {DAILY.public_key.hex(): word.signatures[DAILY.public_key.hex()]})
    assert not stolen.is_signed_by(DAILY.public_key.hex())
    assert Signed.from_line(Newest, word.to_line()) == word


@pytest.mark.parametrize(
    "changes", [{"said_at": 0}, {"said_at": "now"}, {"versions": []}, {"versions": {"vax": "1.0"}}]
)
def test_words_that_break_a_rule(changes: dict[str, Any]) -> None:
    with pytest.raises(HushfleetError):
        Newest(**{"said_at": 5, "versions": {"cp313-aarch64": "0.3.1"}, **changes})
