"""Somebody without a card wants a certificate of the fleet, or one with more rights than a board has."""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from hushfleet.aggregator.fleet.trust.members import check_board_name
from hushfleet.errors import BadInput, BadSignature, WireError
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.messages import decode_message, encode_message
from support.desk import FEDERATION
from support.enroller import Asker, Desk, signing_request

VICTIM, OTHER = "greenhouse-01", "greenhouse-02"


def test_the_token_of_another_board(desk: Desk) -> None:
    """One stolen card opens one name."""
    thief = Asker(VICTIM, desk.token(OTHER), seed=7)
    assert desk.ask(thief).verdict == "refused"
    assert desk.ask(thief, proof=thief.proof(thief.csr, device=OTHER)).verdict == "refused"


def test_a_token_that_has_let_a_board_in(desk: Desk) -> None:
    """Who copied it from the card comes when its operator expects a new card that is not written yet."""
    token = desk.token(VICTIM)
    thief = Asker(VICTIM, token, seed=7)
    assert desk.ask(Asker(VICTIM, token)).verdict == "granted"
    assert desk.ask(thief).verdict == "pending"
    desk.registry.expect_new_card(VICTIM)
    answer = desk.ask(thief)
    assert (answer.verdict, answer.certificate) == ("refused", b"")
    assert "used up" in answer.reason


def test_a_proof_of_another_federation(desk: Desk) -> None:
    board = Asker(VICTIM, desk.token(VICTIM))
    assert desk.ask(board, proof=board.proof(board.csr, federation="elsewhere")).verdict == "refused"


def test_a_recorded_request_with_a_key_of_ones_own(desk: Desk) -> None:
    """Who reads the connection to the broker has seen the request, and puts other keys into it."""
    board = Asker(VICTIM, desk.token(VICTIM))
    seen, thief = board.request(), Asker(VICTIM, seed=7)
    assert desk.ask(thief, proof=seen.proof).verdict == "refused"
    assert desk.ask(thief, proof=seen.proof, csr=seen.csr).verdict == "refused"
    # the board's identity with the thief's TLS key: nobody can sign that frame
    frame = encode_message(board.request(csr=thief.csr, proof=seen.proof), thief.identity, federation=FEDERATION)
    with pytest.raises(BadSignature):
        decode_message(frame, federation=FEDERATION)
    assert desk.enroller.answer(seen).verdict == "granted"


def test_a_recorded_request_once_more(desk: Desk) -> None:
    """It gives what it gave before: a certificate for the board's own TLS key, and takes no other token."""
    board = Asker(VICTIM, desk.token(VICTIM))
    seen = board.request()
    first = desk.enroller.answer(seen)
    assert desk.enroller.answer(seen).certificate == first.certificate
    desk.registry.expect_new_card(VICTIM)
    desk.token(VICTIM)
    assert desk.enroller.answer(seen).verdict == "refused", "the next card has another token"


@pytest.mark.parametrize("name", ["aggregator", "fleet", OTHER, "greenhouse-01\n", "*"])
def test_a_request_that_names_somebody_else(desk: Desk, name: str) -> None:
    board = Asker(VICTIM, desk.token(VICTIM))
    answer = desk.ask(board, csr=signing_request(name, board.tls_key), proof=b"")
    assert answer.verdict == "refused"
    csr = signing_request(name, board.tls_key)
    assert desk.ask(board, csr=csr, proof=board.proof(csr)).verdict == "refused"
    assert desk.registry.rows("SELECT * FROM certificates") == []


@pytest.mark.parametrize("name", ["aggregator", "fleet"])
def test_a_board_that_is_called_as_a_service(name: str) -> None:
    with pytest.raises(BadInput, match="uses this name itself"):
        check_board_name(name)


def test_a_request_for_an_authority(desk: Desk) -> None:
    """Whatever extensions are asked for, none is in the certificate."""
    board = Asker(VICTIM, desk.token(VICTIM))

    def greedy(builder: x509.CertificateSigningRequestBuilder) -> x509.CertificateSigningRequestBuilder:
        names = x509.SubjectAlternativeName([x509.DNSName("aggregator")])
        limits = x509.BasicConstraints(ca=True, path_length=None)
        return builder.add_extension(limits, critical=True).add_extension(names, critical=False)

    csr = signing_request(VICTIM, board.tls_key, also=greedy)
    certificate = x509.load_pem_x509_certificate(desk.ask(board, csr=csr, proof=board.proof(csr)).certificate)
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [VICTIM]
    assert len(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)) == 1


def test_requests_that_are_none(desk: Desk) -> None:
    board = Asker(VICTIM, desk.token(VICTIM))
    weak = signing_request(VICTIM, rsa.generate_private_key(65537, 2048))
    curve = signing_request(VICTIM, ec.generate_private_key(ec.SECP384R1()))
    broken = bytearray(board.csr)
    broken[-1] ^= 1
    for csr in (weak, curve, bytes(broken), b"\x30\x82", bytes(2048)):
        answer = desk.ask(board, csr=csr, proof=board.proof(csr))
        assert (answer.verdict, answer.certificate) == ("refused", b"")


def test_a_request_on_another_boards_topic(desk: Desk) -> None:
    """A member with a certificate cannot renew that of another, nor have it answered elsewhere."""
    hub = LocalHub()
    service = desk.service(hub)
    board = Asker(OTHER, desk.token(OTHER))
    frame = encode_message(board.request(), board.identity, federation=FEDERATION)
    with pytest.raises(WireError, match="came on the topic of"):
        service._answered(VICTIM, frame)
    assert service._answered(OTHER, frame).verdict == "granted"
