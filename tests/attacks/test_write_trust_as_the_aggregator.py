"""A process with all rights of a fleet's aggregator wants a board in that the fleet has not let in, or has locked out.

It may write everything below the aggregator's folder, its file of activity above all, and it may have kept old
admission lists. It has neither the authority's key, nor the right to write beside `admissions` (`test_units`). Before
version 5 of that file the list of devices was in it: one UPDATE gave a locked-out board its place back.
"""

from __future__ import annotations

import datetime
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app
from hushfleet.aggregator.commands.of_fleet import members_of
from hushfleet.aggregator.fleet.trust.access import apply
from hushfleet.aggregator.fleet.trust.authority import Authority
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry, boards_of
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.enrolment import Enrolment, NotAccepted
from hushfleet.errors import BadInput
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Birth, encode_message
from support.desk import make_folder
from support.members import FEDERATION, SignedMembers, member

GOOD, STOLEN, STRANGER = (Identity.generate() for _ in range(3))
BOTH = member("good", GOOD.public_key), member("stolen", STOLEN.public_key)
LOCKED_OUT = BOTH[0], Board("stolen").blocked("lost in a tram")


@pytest.fixture
def members(tmp_path: Path) -> SignedMembers:
    """A fleet that has locked one board out."""
    made = SignedMembers(tmp_path / "fleet")
    made.write(BOTH)
    with made.open() as known:
        assert [board.standing for board in known.devices()] == ["enrolled"] * 2
    made.write(LOCKED_OUT)
    return made


@pytest.fixture
def enrolment(members: SignedMembers, make_fleet: Callable[..., Any]) -> Iterator[Enrolment]:
    """The aggregator's process that has not been told anything yet."""
    with members.open() as known:
        yield Enrolment(make_fleet().store, known)


def comes(enrolment: Enrolment, device: str, identity: Identity) -> None:
    """Its birth is taken, or refused by `NotAccepted`."""
    birth = Birth(device, 1, "ready", "generic-x86", "0.3.0", identity.public_key, 512)
    enrolment.take(device, encode_message(birth, identity, federation=FEDERATION), federation=FEDERATION)
    enrolment.settle()


def is_in(members: SignedMembers, make_fleet: Callable[..., Any], device: str, identity: Identity) -> bool:
    """Whether the board takes part after a start of the aggregator with what lies in its files now."""
    with members.open() as known:
        enrolment = Enrolment(make_fleet().store, known)
        try:
            comes(enrolment, device, identity)
        except NotAccepted:
            return False
        return enrolment.key(device) == identity.public_key


def test_its_own_file_lets_nobody_in(members: SignedMembers, make_fleet: Callable[..., Any]) -> None:
    file = members.folder / "aggregator" / "devices.sqlite"
    rows = [("stolen", STOLEN.public_key), ("stranger", STRANGER.public_key)]
    with sqlite3.connect(file) as own:
        own.execute("DELETE FROM devices")
        own.executemany("INSERT INTO devices VALUES (?, ?, 0, NULL)", rows)
    assert not is_in(members, make_fleet, "stolen", STOLEN)
    assert not is_in(members, make_fleet, "stranger", STRANGER)
    assert not is_in(members, make_fleet, "good", STRANGER)
    assert is_in(members, make_fleet, "good", GOOD)


@pytest.mark.parametrize("change", ["pin", "take_over", "unblock"])
def test_nor_do_the_ways_of_its_own_code(change: str, members: SignedMembers, make_fleet: Callable[..., Any]) -> None:
    with members.open() as known:
        if change == "pin":
            known.pin({"stolen": STOLEN.public_key, "stranger": STRANGER.public_key}, may_add=True)
        elif change == "take_over":
            known.take_over([member("stolen", STOLEN.public_key), member("stranger", STRANGER.public_key)])
        else:
            known.unblock("stolen")
    assert not is_in(members, make_fleet, "stolen", STOLEN)
    assert not is_in(members, make_fleet, "stranger", STRANGER)


def test_a_board_that_is_locked_out_while_rounds_run_is_out_and_stays_out(
    members: SignedMembers, make_fleet: Callable[..., Any]
) -> None:
    members.write(BOTH)
    now = [0.0]
    with members.open() as known:
        enrolment = Enrolment(make_fleet().store, known, clock=lambda: now[0])
        comes(enrolment, "stolen", STOLEN)
        assert enrolment.key("stolen") == STOLEN.public_key
        members.write(LOCKED_OUT)
        with sqlite3.connect(members.folder / "aggregator" / "devices.sqlite") as own:
            own.execute("INSERT OR REPLACE INTO devices VALUES ('stolen', ?, 0, NULL)", (STOLEN.public_key,))
        now[0] += 2.0
        assert enrolment.take_changes().out["stolen"][0] == STOLEN.public_key
        with pytest.raises(NotAccepted, match="by the fleet's operator: lost in a tram"):
            comes(enrolment, "stolen", STOLEN)


@pytest.mark.parametrize("how", ["another authority", "a bit", "cut off", "empty", "another fleet", "its own key"])
def test_a_forged_list_is_refused_and_the_one_before_it_stays(
    how: str, members: SignedMembers, make_fleet: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = [*BOTH, member("stranger", STRANGER.public_key)]
    honest = members.signed(wanted)
    forger = SignedMembers(members.folder.parent / "forger")
    forged = {
        "another authority": forger.signed(wanted, number=1 << 40),
        "a bit": honest[:-1] + bytes([honest[-1] ^ 1]),
        "cut off": honest[:40],
        "empty": b"",
        "another fleet": members.signed(wanted, federation="shed"),
        "its own key": bytes([64]) + STRANGER.sign(honest[1 + honest[0] :]) + honest[1 + honest[0] :],
    }[how]
    with members.open() as known:
        before = known.devices()
        assert {board.device for board in before} == {"good", "stolen"}
        members.file.write_bytes(forged)
        assert known.devices() == before
    assert "the one before it stays" in caplog.text
    assert not is_in(members, make_fleet, "stranger", STRANGER), "nor after a start"


def test_an_old_list_is_refused_also_after_a_restart(members: SignedMembers, make_fleet: Callable[..., Any]) -> None:
    """The board was a member when it was signed."""
    old = members.signed(BOTH)
    members.write(LOCKED_OUT)
    assert is_in(members, make_fleet, "good", GOOD)
    newest = members.file.read_bytes()
    members.file.write_bytes(old)
    assert not is_in(members, make_fleet, "stolen", STOLEN)
    members.file.write_bytes(newest)
    assert is_in(members, make_fleet, "good", GOOD), "and the newest is taken again"


def test_without_a_list_nobody_takes_part(members: SignedMembers, make_fleet: Callable[..., Any]) -> None:
    members.file.unlink()
    assert not is_in(members, make_fleet, "good", GOOD)


def test_what_it_writes_admits_nobody_to_the_fleet_or_to_its_membership_list(tmp_path: Path) -> None:
    """The fleet reads what the aggregator has written: charges, and whom it has blocked; no key, and no standing."""
    folder = make_folder(tmp_path / "fleet", boards=2)
    with FleetRegistry(folder.path) as registry:
        one, two = (board.device for board in registry.boards())
        registry.write("UPDATE boards SET standing = 'enrolled', public_key = ? WHERE id = ?", (GOOD.public_key, one))
        registry.block(two, "stolen")
        apply(folder, registry)
        before = folder.membership_list.read_bytes(), folder.admissions.read_bytes()
        with ActivityStore(folder.aggregator) as own:
            own.write("INSERT INTO devices VALUES (?, ?, 0, NULL)", (two, STOLEN.public_key))
            own.write("INSERT INTO devices VALUES ('stranger', ?, 0, NULL)", (STRANGER.public_key,))
        apply(folder, registry)
        assert (folder.membership_list.read_bytes(), folder.admissions.read_bytes()) == before
        assert registry.key_of(two) is None, "nothing that it signs is heard, either"
    assert [(board.standing, board.public_key) for board in boards_of(folder)] == [
        ("enrolled", GOOD.public_key),
        ("blocked", None),
    ]


def test_a_folder_that_was_restored_is_followed_once_its_service_starts(tmp_path: Path) -> None:
    """The aggregator has seen a newer list than the copy has; the service signs anew at its start."""
    folder = make_folder(tmp_path / "fleet", boards=1)
    with FleetRegistry(folder.path) as registry:
        apply(folder, registry)
        copy = folder.admissions.read_bytes()
        for _ in range(3):
            apply(folder, registry, anew=True)
        with members_of(folder) as known:
            known.devices()
        folder.admissions.write_bytes(copy)
        apply(folder, registry)
        assert folder.admissions.read_bytes() == copy, "nothing has changed"
        apply(folder, registry, anew=True)
    assert folder.admissions.read_bytes() != copy


def test_the_aggregator_opens_no_registry(tmp_path: Path) -> None:
    """Its unit hides the file, so an aggregator that wants it would not start."""
    folder = make_folder(tmp_path / "fleet", boards=2)
    with FleetRegistry(folder.path) as registry:
        apply(folder, registry)
    with (
        patch.object(FleetRegistry, "__init__", side_effect=AssertionError("it opened the registry")),
        patch("hushfleet.aggregator.commands.field_run.MqttLink", side_effect=BadInput("as far as to the broker")),
    ):
        outcome = CliRunner().invoke(build_app(), ["aggregator", "--fleet", str(folder.path)])
    assert str(outcome.exception) == "as far as to the broker"


def test_the_authority_is_asked_and_no_certificate_of_it(members: SignedMembers) -> None:
    """A board's certificate is of the same authority, and its key signs nothing that counts."""
    other = Authority.create(FEDERATION, now=datetime.datetime.now(datetime.UTC))
    members.file.write_bytes(bytes([70]) + other.sign(members.file.read_bytes())[:70] + members.file.read_bytes()[71:])
    with members.open() as known:
        assert known.devices() == []
