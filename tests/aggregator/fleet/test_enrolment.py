"""Who gets a certificate, by policy, token and key; what the certificate says."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store

from hushfleet.aggregator.commands.of_fleet import members_of
from hushfleet.aggregator.fleet.trust.authority import Authority, read_revocations
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.errors import StoreError
from support.enroller import Asker, Desk

FIRST, SECOND = "greenhouse-01", "greenhouse-02"
MakeDesk = Callable[..., Desk]


@pytest.fixture
def make_desk(tmp_path: Path) -> Iterator[MakeDesk]:
    desks: list[Desk] = []

    def make(**policy: Any) -> Desk:
        desks.append(Desk(tmp_path / f"{len(desks)}", **policy))
        return desks[-1]

    yield make
    for desk in desks:
        desk.close()


def test_a_token_lets_one_board_in_once(make_desk: MakeDesk) -> None:
    desk = make_desk()
    token = desk.token(FIRST)
    board = Asker(FIRST, token)
    answer = desk.ask(board)
    assert (answer.verdict, desk.applied) == ("granted", 1)
    assert desk.ask(board) == answer, "the answer was lost: the same once more"
    assert desk.applied == 1
    other = desk.ask(Asker(FIRST, token, seed=2))
    assert other.verdict == "pending"
    assert "--new-card" in other.reason
    assert desk.state(FIRST) == "enrolled"
    assert desk.ask(Asker(FIRST)).verdict == "granted", "whose identity is known needs no token"


def test_a_token_expires_and_a_newer_one_takes_its_place(make_desk: MakeDesk) -> None:
    desk = make_desk()
    first = Asker(FIRST, desk.token(FIRST, days=2))
    desk.now += 2 * 86400 + 1
    answer = desk.ask(first)
    assert (answer.verdict, desk.state(FIRST)) == ("refused", "pending")
    assert "expired" in answer.reason
    stale, fresh = desk.token(SECOND), desk.token(SECOND)
    assert desk.ask(Asker(SECOND, stale, seed=2)).verdict == "refused"
    assert desk.ask(Asker(SECOND, fresh, seed=2)).verdict == "granted"


def test_by_hand_nobody_comes_in_before_the_operator_has_said_so(make_desk: MakeDesk) -> None:
    desk = make_desk(policy="manual")
    board, stranger = Asker(FIRST, desk.token(FIRST)), Asker(FIRST, seed=9)
    assert desk.ask(stranger).verdict == "pending"
    assert desk.ask(board).verdict == "pending"
    refused = desk.registry.refused_requests(FIRST)
    assert [(each.public_key, each.has_token) for each in refused] == [
        (board.identity.public_key, True),
        (stranger.identity.public_key, False),
    ]
    desk.registry.approve(FIRST, board.identity.public_key)
    assert desk.ask(stranger).verdict == "pending"
    assert desk.ask(board).verdict == "granted"
    assert desk.registry.refused_requests(FIRST) == []


def test_by_list_a_token_is_not_enough(make_desk: MakeDesk) -> None:
    desk = make_desk(policy="list")
    board = Asker(FIRST, desk.token(FIRST))
    assert desk.ask(board).verdict == "refused"
    desk.registry.approve(FIRST, board.identity.public_key)  # as `fleet add --csv` with a key does
    assert desk.ask(board).verdict == "granted"


def test_a_board_of_another_fleet_or_one_that_is_locked_out_gets_nothing(make_desk: MakeDesk) -> None:
    desk = make_desk()
    assert "has no board" in desk.ask(Asker("elsewhere-01")).reason
    board = Asker(FIRST, desk.token(FIRST))
    assert desk.ask(board).verdict == "granted"
    desk.registry.block(FIRST, "stolen")
    assert desk.ask(board).reason == f"{FIRST} is locked out: stolen"
    desk.registry.unblock(FIRST)
    assert desk.ask(board).verdict == "granted"


@pytest.mark.parametrize("change", ["block", "forget", "expect_new_card"])
def test_the_operators_word_holds_while_a_certificate_is_signed(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A stolen board may ask for its next certificate again and again, to be asking when it is locked out."""
    desk = make_desk()
    board = Asker("greenhouse-01", desk.token("greenhouse-01"))
    assert desk.ask(board).verdict == "granted"
    sign = desk.authority.sign_client

    def meanwhile(*arguments: Any, **named: Any) -> Any:
        with FleetRegistry(desk.folder.path) as operators:
            getattr(operators, change)("greenhouse-01", *(["stolen"] if change == "block" else []))
        return sign(*arguments, **named)

    monkeypatch.setattr(desk.authority, "sign_client", meanwhile)
    before = len(desk.registry.revoked_serials(now=desk.now))
    with pytest.raises(StoreError, match="asks again"):
        desk.ask(Asker("greenhouse-01"))  # the same board with another TLS key
    found = desk.registry.board("greenhouse-01")
    assert found is None or found.standing == {"block": "blocked", "expect_new_card": "new"}[change]
    assert len(desk.registry.revoked_serials(now=desk.now)) == before + 1, "all that was ever signed"


def test_a_new_card_comes_in_by_the_operators_word_alone(make_desk: MakeDesk) -> None:
    desk = make_desk()
    old, new = Asker(FIRST, desk.token(FIRST)), Asker(FIRST, desk.token(FIRST), seed=2)
    old.token = new.token
    assert desk.ask(old).verdict == "granted"
    new.token = desk.token(FIRST)
    assert desk.ask(new).verdict == "pending"
    desk.registry.expect_new_card(FIRST)
    serials = desk.registry.revoked_serials(now=desk.now)
    assert len(serials) == 1
    assert desk.ask(old).verdict == "refused", "its token has served"
    assert desk.ask(new).verdict == "granted"
    with members_of(desk.folder) as members:
        assert members.device(FIRST).public_key == new.identity.public_key
    revoked = read_revocations((desk.folder.broker / "revoked.pem").read_bytes())
    assert revoked.serials == serials


def test_the_token_of_a_stolen_card_does_not_serve_again_when_a_new_card_is_expected(make_desk: MakeDesk) -> None:
    """It was stolen before its first start, and its board was locked out."""
    desk = make_desk()
    thief = Asker(FIRST, desk.token(FIRST))
    desk.registry.block(FIRST, "stolen")
    assert "locked out" in desk.ask(thief).reason
    desk.registry.expect_new_card(FIRST)
    assert desk.ask(thief).verdict == "refused"
    assert desk.ask(Asker(FIRST, desk.token(FIRST), seed=2)).verdict == "granted"


def test_certificates_pass_a_strict_verifier_and_name_the_device_alone(make_desk: MakeDesk) -> None:
    desk = make_desk()
    pem = desk.ask(Asker(FIRST, desk.token(FIRST))).certificate
    at = datetime.datetime.fromtimestamp(desk.now, datetime.UTC)
    roots = Store([x509.load_pem_x509_certificate((desk.folder.ca / "ca.pem").read_bytes())])
    policy = PolicyBuilder().store(roots).time(at)
    device = x509.load_pem_x509_certificate(pem)
    verified = policy.build_client_verifier().verify(device, [])
    assert [name.value for name in verified.subjects or []] == [FIRST]
    broker = x509.load_pem_x509_certificate((desk.folder.broker / "broker.pem").read_bytes())
    for name in (x509.DNSName("localhost"),):
        policy.build_server_verifier(name).verify(broker, [])
    with pytest.raises(x509.verification.VerificationError):
        policy.build_server_verifier(x509.DNSName(FIRST)).verify(device, [])
    days = (device.not_valid_after_utc - at).days
    assert days == desk.folder.config.enrolment.certificate_days


def test_an_authority_never_signs_beyond_its_own_end() -> None:
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    authority = Authority.create("greenhouse", now=now)
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    ends = x509.load_pem_x509_certificate(authority.pem).not_valid_after_utc
    for days in (1e5, 1e7):  # the latter is beyond what a date can be
        assert authority.sign_client("a", key, days=days, now=now).not_after == ends.timestamp()
