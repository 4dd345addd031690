"""Somebody has read the fleet's registry, as from a backup, and wants to enrol by what it keeps of a card's token.

In 0.3.0 it kept SHA-256 of the token, and the proof was an HMAC by that: what it kept was as good as the token.
"""

from __future__ import annotations

import hashlib
import hmac
import sqlite3
from pathlib import Path

from hushfleet.aggregator.fleet.trust.registry import FILE_NAME
from hushfleet.wire.format.fleet_messages import proven_by_token, token_seed
from hushfleet.wire.format.identity import Identity
from support.desk import FEDERATION
from support.enroller import Asker, Desk

BOARD = "greenhouse-01"
HEARD = ("state", "session", "version", "seen", "health", "health_at")


def signed(board: Asker) -> bytes:
    return proven_by_token(
        federation=FEDERATION, device=board.device, csr=board.csr, public_key=board.identity.public_key
    )


def guesses(kept: bytes, board: Asker) -> list[bytes]:
    """Proofs that can be made of 32 bytes: as it was, and as it is if these were the token's hash, or its key."""
    text = signed(board)
    return [
        hmac.digest(kept, text, "sha256"),
        Identity.from_bytes(token_seed(kept)).sign(text),
        Identity.from_bytes(kept).sign(text),
    ]


def test_what_was_kept_made_the_proof() -> None:
    """The attack, by the rule as it was: the service computed the proof itself, of what it kept."""
    token, thief = b"of a card", Asker(BOARD, seed=9)
    kept = hashlib.sha256(token).digest()
    expected = hmac.digest(kept, signed(thief), "sha256")
    assert expected in guesses(kept, thief)


def test_what_is_kept_makes_no_proof(desk: Desk) -> None:
    token, thief = desk.token(BOARD), Asker(BOARD, seed=9)
    rows = desk.registry.rows("SELECT * FROM tokens")
    kept = [value for row in rows for value in row if isinstance(value, bytes)]
    assert [len(value) for value in kept] == [32]
    for value in kept:
        for proof in guesses(value, thief):
            assert desk.ask(thief, proof=proof).verdict == "refused"
    assert desk.ask(Asker(BOARD, token)).verdict == "granted"


def test_a_registry_of_0_3_0_is_brought_up_to_date_and_its_cards_still_enrol(tmp_path: Path) -> None:
    """The new key follows from the old hash, which is not left in the file."""
    desk = Desk(tmp_path)
    enrolled = Asker("greenhouse-02", desk.token("greenhouse-02"), seed=2)
    answer = desk.ask(enrolled)
    token = desk.token(BOARD)
    desk.close()
    file = desk.folder.path / FILE_NAME
    kept = hashlib.sha256(token.encode()).digest()
    as_it_was(file, token_digest=kept)
    assert kept in file.read_bytes(), "the attack"

    desk.open()
    assert desk.ask(Asker(BOARD, token)).verdict == "granted"
    assert desk.ask(enrolled).certificate == answer.certificate, "its TLS key is known from the certificate"
    desk.close()
    assert not any(kept in each.read_bytes() for each in file.parent.glob(f"{FILE_NAME}*"))


def as_it_was(file: Path, *, token_digest: bytes) -> None:
    """Makes schema 1 of the present one."""
    registry = sqlite3.connect(file, isolation_level=None)
    for statement in (
        "ALTER TABLE tokens RENAME COLUMN public_key TO digest",
        "ALTER TABLE certificates RENAME COLUMN tls_key TO request",
        "UPDATE certificates SET request = randomblob(32)",
        "ALTER TABLE refused_requests RENAME TO knocks",
        *(f"ALTER TABLE boards DROP COLUMN {name}" for name in HEARD),
        "ALTER TABLE boards RENAME COLUMN standing TO state",
        "CREATE TABLE sightings (id TEXT PRIMARY KEY, public_key BLOB NOT NULL, state TEXT NOT NULL, session INTEGER "
        "NOT NULL, version TEXT NOT NULL, seen REAL NOT NULL, health BLOB, health_at REAL) WITHOUT ROWID",
        "PRAGMA user_version = 1",
    ):
        registry.execute(statement)
    assert registry.execute("UPDATE tokens SET digest = ?", (token_digest,)).rowcount == 1
    registry.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    registry.close()
