"""Wanted: the attacker's software on the boards, with a release key that was stolen.

While nobody knows of the theft nothing helps but a second key (`--threshold 2`). Afterwards root names other keys, and
the thief may hold that statement back from a board, send an older one, or become the client, which hears it first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hushfleet.edge_client.fleet.slot_state import State
from hushfleet.release.statements import ReleaseKeys, Signed
from hushfleet.wire.format.identity import Identity
from support.releases import ROOT, statement
from support.slots import ReleaseBoard, pack_files

STOLEN, FRESH, SECOND = Identity.generate(), Identity.generate(), Identity.generate()


class Board(ReleaseBoard):
    def hear(self, *statements: Signed[ReleaseKeys]) -> None:
        """What the client leaves for root, or who has become the client."""
        (self.state / "release_keys").write_text("".join(f"{each.to_line()}\n" for each in statements))
        self.slots.check()


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path, "1.0", STOLEN)


def test_until_root_names_others_the_stolen_key_is_as_good_as_ever(board: Board) -> None:
    """The attack, which every signature by one key allows."""
    assert board.install("2.0", STOLEN).trial == "2.0"


def test_a_release_by_a_key_that_root_has_taken_back(board: Board) -> None:
    board.hear(statement(FRESH.public_key.hex(), number=2))
    assert "not signed" in board.install("2.0", STOLEN).reason
    assert board.install("2.0", FRESH).trial == "2.0"


def test_an_installation_hears_of_the_keys_before_it_checks(board: Board) -> None:
    """Else the minute between two checks would be the thief's."""
    (board.state / "release_keys").write_text(statement(FRESH.public_key.hex(), number=2).to_line())
    assert "not signed" in board.install("2.0", STOLEN).reason


def test_the_statement_that_named_the_stolen_key_is_sent_again(board: Board) -> None:
    old = statement(STOLEN.public_key.hex())
    board.hear(old, statement(FRESH.public_key.hex(), number=2))
    for again in ((old,), (old, old), (statement(STOLEN.public_key.hex(), number=2),)):
        board.hear(*again)
        assert "not signed" in board.install("2.0", STOLEN).reason


def test_who_has_become_the_client_names_keys_of_their_own(board: Board, tmp_path: Path) -> None:
    mine = STOLEN.public_key.hex()
    forged = [
        statement(FRESH.public_key.hex(), number=3, root=STOLEN),
        Signed(statement(mine, number=3).statement),
        Signed(statement(mine, number=3).statement, statement(mine).signatures),
    ]
    board.hear(statement(SECOND.public_key.hex(), number=2))
    before = (board.root / "release_keys").read_bytes()
    for each in forged:
        board.hear(each)
        assert (board.root / "release_keys").read_bytes() == before
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for put in (
        lambda: (board.state / "release_keys").symlink_to(secret),
        lambda: (board.state / "release_keys").mkdir(),
    ):
        (board.state / "release_keys").unlink()
        put()
        board.slots.check()
        assert (board.root / "release_keys").read_bytes() == before
    assert "not signed" in board.install("2.0", STOLEN).reason


def test_one_of_two_of_three(board: Board) -> None:
    """A thief of one key has nothing, from the beginning."""
    named = (STOLEN.public_key.hex(), FRESH.public_key.hex(), SECOND.public_key.hex())
    board.hear(statement(*named, number=2, threshold=2))
    assert "2 of the keys" in board.install("2.0", STOLEN).reason
    assert "2 of the keys" in board.install("2.0", STOLEN, Identity.generate()).reason
    assert board.install("2.0", STOLEN, SECOND).trial == "2.0"


def test_a_stolen_root_that_was_replaced(board: Board) -> None:
    heir = Identity.generate()
    board.hear(statement(FRESH.public_key.hex(), number=2, next_root=heir.public_key.hex()).with_signature(heir))
    board.hear(statement(STOLEN.public_key.hex(), number=3))
    assert "not signed" in board.install("2.0", STOLEN).reason
    board.hear(statement(SECOND.public_key.hex(), number=3, root=heir))
    assert board.install("2.0", SECOND).trial == "2.0"


def test_what_runs_as_root_is_renewed_by_root_alone(board: Board) -> None:
    """A release key, or all of them, must not reach what is above every release."""
    (board.folder / "content" / "system").mkdir(parents=True)
    (board.folder / "content" / "system" / "slots.pyz").write_bytes(b"evil")

    def renewing(*keys: Identity) -> State:
        pack_files(board.folder / "content", board.state / "incoming" / "x.hfr", "2.0", *keys, system=True)
        return board.slots.install()

    assert "root has not signed" in renewing(STOLEN).reason
    assert "root has not signed" in renewing(STOLEN, FRESH).reason
    assert "not signed" in renewing(ROOT).reason
    assert renewing(STOLEN, ROOT).trial == "2.0"
