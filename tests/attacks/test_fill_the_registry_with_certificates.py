"""Whoever has a board's key asks for a certificate once a second, each time for another TLS key.

In 0.3.0 each request was granted: all certificates held at once, the registry grew by 95 MB a day, and a lock-out put
each of them on the list of revoked certificates, for ever.
"""

from __future__ import annotations

import time

import pytest
from cryptography import x509

from hushfleet.aggregator.fleet.trust import enrolment
from hushfleet.aggregator.fleet.trust.access import apply
from hushfleet.aggregator.fleet.trust.authority import read_revocations
from hushfleet.aggregator.fleet.trust.enrolment import MAX_TLS_KEYS
from hushfleet.aggregator.fleet.trust.registry import KEPT_AFTER_END_S
from support.enroller import Asker, Desk, signing_request

BOARD = "greenhouse-01"
DAY_S = 86400.0


def certificates(desk: Desk) -> int:
    ((count,),) = desk.registry.rows("SELECT count(*) FROM certificates")
    return int(count)


def honest(desk: Desk) -> Asker:
    board = Asker(BOARD, desk.token(BOARD))
    assert desk.ask(board).verdict == "granted"
    return board


def thief() -> Asker:
    """With the board's identity, and a TLS key of its own."""
    return Asker(BOARD)


def test_a_certificate_for_each_request(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack, by the rule as it was."""
    monkeypatch.setattr(enrolment, "MAX_TLS_KEYS", 10**9)
    monkeypatch.setattr(enrolment, "is_fresh", lambda pem, now: False)
    board = honest(desk)
    for _ in range(20):
        assert desk.ask(board, csr=signing_request(BOARD, board.tls_key)).verdict == "granted"
        assert desk.ask(thief()).verdict == "granted"
    assert certificates(desk) == 41


def test_a_board_has_certificates_for_a_few_keys(desk: Desk) -> None:
    board = honest(desk)
    answers = [desk.ask(thief()) for _ in range(20)]
    assert [answer.verdict for answer in answers] == ["granted"] * (MAX_TLS_KEYS - 1) + ["pending"] * (
        21 - MAX_TLS_KEYS
    )
    assert "fleet renew" in answers[-1].reason
    assert certificates(desk) == MAX_TLS_KEYS
    # the board itself is not kept out by that: not after a loss of power, and not when it renews
    first = desk.ask(board).certificate
    for _ in range(20):
        assert desk.ask(board, csr=signing_request(BOARD, board.tls_key)).certificate == first
    desk.now += 60 * DAY_S
    second = desk.ask(board)
    assert second.verdict == "granted"
    assert second.certificate != first
    assert certificates(desk) == MAX_TLS_KEYS + 1
    # nor a board that has lost its TLS key, when those of the thief have ended
    desk.now += 31 * DAY_S
    assert desk.ask(thief()).verdict == "granted"


def test_the_operators_word_ends_them_all(desk: Desk) -> None:
    honest(desk)
    for _ in range(20):
        desk.ask(thief())
    desk.registry.expect_new_card(BOARD)
    new = Asker(BOARD, desk.token(BOARD), seed=2)
    assert desk.ask(new).verdict == "granted"
    assert len(desk.registry.revoked_serials(now=desk.now)) == MAX_TLS_KEYS


def test_what_has_ended_is_on_no_list_and_then_in_no_registry(desk: Desk) -> None:
    desk.now = time.time() - 80 * DAY_S
    early = honest(desk)
    desk.now = time.time() - 10 * DAY_S
    assert desk.ask(early).verdict == "granted", "the next one"
    desk.registry.block(BOARD, "stolen")
    apply(desk.folder, desk.registry)
    revoked = desk.folder.broker / "revoked.pem"
    assert len(read_revocations(revoked.read_bytes()).serials) == 2
    desk.registry.write("UPDATE certificates SET not_after = not_after - ?", (60 * DAY_S,))  # 60 days later
    apply(desk.folder, desk.registry)
    (left,) = read_revocations(revoked.read_bytes()).serials
    newest = desk.registry.row("SELECT serial FROM certificates ORDER BY not_after DESC")
    assert newest == (f"{left:x}",)
    assert certificates(desk) == 2, "a clock that was wrong once must not give a revoked certificate back"
    desk.now += KEPT_AFTER_END_S + 365 * DAY_S
    other = Asker("greenhouse-02", desk.token("greenhouse-02"), seed=2)
    certificate = x509.load_pem_x509_certificate(desk.ask(other).certificate)
    assert desk.registry.rows("SELECT serial FROM certificates") == [(f"{certificate.serial_number:x}",)]


def test_a_certificate_of_a_clock_that_was_ahead_is_not_given_again(desk: Desk) -> None:
    """It holds years later only. The next one holds now, and is the one that is given from then on."""
    desk.now += 3000 * DAY_S
    board = honest(desk)
    desk.now -= 3000 * DAY_S
    second = desk.ask(board)
    assert x509.load_pem_x509_certificate(second.certificate).not_valid_before_utc.timestamp() < desk.now
    assert desk.ask(board).certificate == second.certificate
    assert certificates(desk) == 2
