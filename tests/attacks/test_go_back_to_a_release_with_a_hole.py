"""Wanted: a board that runs a release whose hole is known, although a later one has closed it.

The attacker has no key, but has kept whatever was signed once: releases, also those that boards may go back to. They
have taken over the client, and put a file where `slots.py`, as root, looks for a release. The attacks are those of The
Update Framework (TUF) by rollback.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hushfleet.edge_client.fleet import slots as module
from hushfleet.edge_client.fleet.slot_state import SlotsError, State, check_fits
from hushfleet.edge_client.fleet.slots import MOST_CHECKS
from hushfleet.release import archive
from hushfleet.release.manifest import Manifest
from support.slots import KEY, ReleaseBoard, pack_files

HOLE, FIRST, FIXED = "0.3.1", "0.3.0", "0.4.0"


def rule_of_0_3_0(manifest: Manifest, state: State, *, store: int | None) -> None:
    """A release that was signed as a downgrade was taken by whatever board, at whatever time."""
    older = module.version_order(manifest.version) < module.version_order(state.good)
    if manifest.version == state.good or (older and not manifest.downgrade_from):
        raise SlotsError("refused")


def rule_of_the_floor(manifest: Manifest, state: State, *, store: int | None) -> None:
    """Only what was below the highest good version needed a permission, so that version itself did not."""
    if module.version_order(manifest.version) < module.version_order(state.floor):
        check_fits(manifest, replace(state, withdrawn=""), store=store)


class Board(ReleaseBoard):
    def offer(self, version: str, *downgrade_from: str, serial: int = 0) -> State:
        return self.install(version, downgrade_from=downgrade_from, downgrade_serial=serial)

    def run(self, version: str, *downgrade_from: str, serial: int = 0) -> State:
        """It is offered, and healthy if it is taken."""
        state = self.offer(version, *downgrade_from, serial=serial)
        return state if state.trial is None else self.prove(version)


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    monkeypatch.setattr(archive.os, "sync", lambda: None)
    return Board(tmp_path, FIRST)


@pytest.fixture
def as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, board: Board) -> Board:
    monkeypatch.setattr(module, "check_fits", rule_of_0_3_0)
    return board


def attack_by_an_old_permission(board: Board) -> State:
    """Once the operator let boards go back from 0.3.1 to 0.2.9. Now they run 0.4.0, which closes the hole of 0.3.1."""
    board.run(HOLE)
    board.run(FIXED)
    board.run("0.2.9", HOLE, serial=1)
    return board.run(HOLE)


def test_the_attack_as_it_was(as_it_was: Board) -> None:
    assert attack_by_an_old_permission(as_it_was).good == HOLE


def test_rollback_by_an_old_permission(board: Board) -> None:
    state = attack_by_an_old_permission(board)
    assert (state.good, state.outcome) == (FIXED, "refused")
    assert "older than 0.4.0, which was good on this board, and is not signed as a downgrade from 0.4.0" in state.reason
    assert "not signed as a downgrade from 0.4.0" in board.run("0.2.9", HOLE, serial=1).reason


def test_rollback_upwards_after_the_operator_let_boards_go_back(board: Board) -> None:
    """0.4.0 had a fault of another kind. From 0.3.0.1 on, the release with the hole is a newer one again."""
    board.run(HOLE)
    board.run(FIXED)
    assert board.run("0.3.0.1", FIXED, serial=2).good == "0.3.0.1"
    refused = board.run(HOLE)
    assert (refused.good, refused.floor) == ("0.3.0.1", FIXED)
    assert "older than 0.4.0" in refused.reason
    assert board.run("0.4.1").good == "0.4.1", "what is newer than all is taken"
    assert board.slots.read().floor == "0.4.1"


def test_an_older_permission_after_a_newer_one(board: Board) -> None:
    """Each names the release that is good; the one that was signed first has ended with the second."""
    board.run(FIXED)
    board.run("0.3.2", FIXED, serial=2)
    state = board.run("0.2.9", "0.3.2", serial=1)
    assert (state.good, state.outcome) == ("0.3.2", "refused")
    assert "is older than the last downgrade of this board (2); sign it again" in state.reason
    assert board.run("0.2.9.1", "0.3.2", serial=3).good == "0.2.9.1", "a newer word of its operator"


def test_an_older_permission_after_a_newer_one_as_it_was(as_it_was: Board) -> None:
    as_it_was.run(FIXED)
    as_it_was.run("0.3.2", FIXED, serial=2)
    assert as_it_was.run("0.2.9", "0.3.2", serial=1).good == "0.2.9"


def test_a_permission_is_no_use_where_it_names_another_version(board: Board) -> None:
    board.run(FIXED)
    for named in ("0.4", "0.4.0.0"):  # the same version, written otherwise
        assert board.offer("0.2.9", named, serial=5).trial == "0.2.9"
        board.slots.begin()
        board.slots.back()
    for named in ("0.4.1", "0.0.4", "40.0"):
        assert board.offer("0.2.9", named, serial=5).trial is None


def test_versions_are_numbers(board: Board) -> None:
    """As texts, 0.9.0 would be newer than 0.10.0."""
    assert board.run("0.9.0").good == "0.9.0"
    state = board.run("0.10.0")
    assert (state.good, state.floor) == ("0.10.0", "0.10.0")
    assert "older than 0.10.0" in board.run("0.9.0").reason
    assert "older than 0.10.0" in board.run("0.9.9").reason
    assert "installed already" in board.run("0.10").reason
    assert board.run("0.9.1", "0.10.0", serial=1).floor == "0.10.0"
    assert "older than 0.10.0" in board.run("0.9.9").reason
    assert board.run("0.11.0").floor == "0.11.0"


@pytest.mark.parametrize("how", ["a trial that fails", "by hand", "its files are gone", "the file is damaged"])
def test_the_floor_survives(board: Board, how: str) -> None:
    board.run(HOLE)
    board.run(FIXED)
    if how == "a trial that fails":
        board.offer("0.5.0")
        board.slots.begin()
        for _ in range(MOST_CHECKS):
            board.slots.check()
        assert board.slots.read().outcome == "returned"
    elif how == "by hand":
        assert board.slots.back().good == HOLE
    elif how == "its files are gone":
        (board.root / "releases" / FIXED).rename(board.folder / "gone")
        assert board.slots.begin().good == HOLE
    else:
        fields = json.loads((board.root / "slots.json").read_text())
        (board.root / "slots.json").write_text(json.dumps({**fields, "good": 5, "previous": [], "starts": "x"}))
    state = board.slots.begin()
    assert state.floor == FIXED
    assert "older than 0.4.0" in board.offer("0.3.2").reason
    assert board.offer("0.4.1").trial == "0.4.1"


def test_a_permission_holds_for_a_second_try(board: Board) -> None:
    """A release that was on trial and went back, as after a power cut, needs no new signature."""
    board.run(FIXED)
    for _ in range(2):
        assert board.offer("0.3.2", FIXED, serial=2).trial == "0.3.2"
        board.slots.begin()
        for _ in range(MOST_CHECKS):
            board.slots.check()
        assert board.slots.read().outcome == "returned"
    assert "is older than" in board.offer("0.2.9", FIXED, serial=1).reason


def test_another_release_under_a_version_that_is_there(board: Board) -> None:
    """Else a board would say that it runs what it was given, and run what was there before."""
    board.run(HOLE)
    board.run(FIXED)
    (board.folder / "content").mkdir()
    (board.folder / "content" / "a.py").write_text("HOLE = None\n")
    out, permission = board.state / "incoming" / "new.hfr", {"downgrade_from": (FIXED,), "downgrade_serial": 1}
    pack_files(board.folder / "content", out, HOLE, KEY, **permission)
    assert "another release 0.3.1 is installed" in board.slots.install().reason
    assert board.offer(HOLE, FIXED, serial=1).trial == HOLE, "the same one, which may be gone back to now"


# a release that the operator withdrew


def attack_by_the_withdrawn_release(board: Board) -> State:
    """0.4.0 has a hole, so the operator let boards go back from it. It is as signed as before."""
    board.run(FIXED)
    assert board.run("0.3.0.1", FIXED, serial=2).good == "0.3.0.1"
    return board.run(FIXED)


def test_the_withdrawn_release_as_it_was(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "check_fits", rule_of_the_floor)
    assert attack_by_the_withdrawn_release(board).good == FIXED


def test_the_withdrawn_release(board: Board) -> None:
    state = attack_by_the_withdrawn_release(board)
    assert (state.good, state.floor, state.withdrawn) == ("0.3.0.1", FIXED, FIXED)
    assert "not newer than 0.4.0, which was withdrawn, and is not signed as a downgrade from 0.3.0.1" in state.reason
    assert "withdrawn" in board.run("0.4.0.0").reason, "the same version, written otherwise"


def test_the_withdrawn_release_on_a_board_that_never_ran_it(board: Board) -> None:
    """It was away, or in a later stage of the roll-out: it took the downgrade as an update."""
    state = board.run("0.3.0.1", FIXED, "0.4.1", serial=2)
    assert (state.good, state.previous, state.floor, state.withdrawn) == ("0.3.0.1", FIRST, "0.3.0.1", "0.4.1")
    for version in ("0.3.5", FIXED, "0.4.1"):
        assert "not newer than 0.4.1, which was withdrawn" in board.run(version).reason
    assert board.run("0.4.2").good == "0.4.2"


def test_what_is_withdrawn_is_kept_for_no_way_back(board: Board) -> None:
    """Neither a person who types `back` nor a damaged card brings it back."""
    board.run(FIXED)
    assert board.run("0.3.0.1", FIXED, serial=2).previous is None
    with pytest.raises(SlotsError, match=r"no release before 0\.3\.0\.1"):
        board.slots.back()
    assert [each.name for each in (board.root / "releases").iterdir()] == ["0.3.0.1"]


def test_after_a_downgrade_the_operator_goes_forward(board: Board) -> None:
    """To any higher version; and to lower ones, if they are signed for what runs now."""
    board.run(FIXED)
    board.run("0.3.0.1", FIXED, serial=2)
    assert "withdrawn" in board.run(FIXED, "0.3.0.2", serial=9).reason
    for between in ("0.3.0.2", HOLE, "0.3.9"):
        assert "older than 0.4.0" in board.run(between).reason
    state = board.run("0.3.0.2", "0.3.0.1", serial=3)
    assert (state.good, state.previous) == ("0.3.0.2", None)
    assert "withdrawn" in board.run(FIXED).reason
    state = board.run("0.4.0.1")
    assert (state.good, state.previous, state.floor, state.withdrawn) == ("0.4.0.1", "0.3.0.2", "0.4.0.1", FIXED)
    assert board.slots.back().good == "0.3.0.2", "what it came from was withdrawn by nobody"
    assert board.run("0.4.0.1").good == "0.4.0.1", "nor this"
    assert "older than 0.4.0.1" in board.run(FIXED).reason


def test_a_downgrade_after_a_downgrade(board: Board) -> None:
    board.run("0.5.0")
    board.run("0.3.0.1", "0.5.0", serial=1)
    state = board.run("0.2.9", "0.3.0.1", serial=2)
    assert (state.good, state.floor, state.withdrawn) == ("0.2.9", "0.5.0", "0.5.0")
    for version, names, serial in (("0.5.0", (), 0), (FIXED, (), 0), ("0.3.0.1", ("0.5.0",), 1)):
        assert board.run(version, *names, serial=serial).outcome == "refused"
    assert board.run("0.5.0.1").good == "0.5.0.1"


def test_a_downgrade_that_fails_withdraws_nothing(board: Board) -> None:
    board.run(FIXED)
    board.offer("0.3.0.1", FIXED, serial=2)
    board.slots.begin()
    state = board.slots.back()
    assert (state.good, state.withdrawn) == (FIXED, "")
    assert board.offer("0.3.0.1", FIXED, serial=2).trial == "0.3.0.1"


@pytest.mark.parametrize("how", ["a trial that fails", "back by hand", "its files are gone", "the file is damaged"])
def test_what_is_withdrawn_stays_so(board: Board, how: str) -> None:
    board.run(FIXED)
    board.run("0.3.0.1", FIXED, serial=2)
    if how == "a trial that fails":
        board.offer("0.4.2")
        board.slots.begin()
        assert board.slots.back().outcome == "returned"
    elif how == "back by hand":
        board.run("0.4.2")
        assert board.slots.back().good == "0.3.0.1"
    elif how == "its files are gone":
        (board.root / "releases" / "0.3.0.1").rename(board.folder / "gone")
        assert board.slots.first(board.folder / "first.hfr").good == FIRST
    else:
        fields = json.loads((board.root / "slots.json").read_text())
        (board.root / "slots.json").write_text(json.dumps({**fields, "good": 5, "previous": [], "starts": "x"}))
    state = board.slots.begin()
    assert state.withdrawn == FIXED
    assert board.offer(FIXED).outcome == "refused"
    assert board.offer("0.4.3").trial == "0.4.3"


@pytest.mark.parametrize("version", ["0.3.0", "later"])
@pytest.mark.parametrize("previous", [FIXED, None])
def test_a_board_that_had_gone_back_before_it_knew_of_this(board: Board, version: str, previous: str | None) -> None:
    """Its slots.json names what it went back from as the previous release, or the good one's manifest names it."""
    board.run(FIXED)
    board.run("0.3.0.1", FIXED, serial=2)
    file, manifest = board.root / "slots.json", board.root / "releases" / "0.3.0.1" / "release.json"
    fields = {**json.loads(file.read_text()), "previous": previous, "installs": 1, "reason": "kept"}
    new = {"0.3.0": ("withdrawn", "floor", "downgrade_serial"), "later": ("withdrawn",)}[version]
    file.write_text(json.dumps({name: value for name, value in fields.items() if name not in new}))
    if version == "0.3.0" and previous is not None:  # its manifests said only that they may be gone back to
        manifest.write_text(json.dumps({"store": 4, "downgrade": True}))
    state = board.slots.read()
    assert (state.good, state.previous, state.withdrawn) == ("0.3.0.1", None, FIXED)
    assert (state.installs, state.outcome, state.reason) == (1, "good", "kept")
    assert board.offer(FIXED).trial is None
    assert board.offer(HOLE).trial is None
    assert board.run("0.4.1").good == "0.4.1"


@pytest.mark.parametrize("seed", range(3))
def test_any_life_of_a_board(board: Board, seed: int) -> None:
    """Against what is written in the history of its good releases and trials alone."""
    draw = random.Random(seed)
    good: list[tuple[tuple[int, ...], list[tuple[int, ...]]]] = [((0, 3, 0, 0), [])]
    serials, known = [0], [f"0.{minor}.{patch}" for minor in range(2, 5) for patch in range(3)]
    for step in range(1, 60):
        version = draw.choice(known)
        before = board.slots.read()
        if version == before.previous:  # another release of a version that is there is refused for that
            continue
        names = tuple(sorted({draw.choice(known), before.good})) if draw.random() < 0.4 else ()
        serial = draw.choice([step, max(1, step - 9)]) if names else 0
        number = module.version_order(version)
        barred = number < max(each for each, _ in good)
        barred |= any(number <= name for _, named in good for name in named)
        permitted = good[-1][0] in map(module.version_order, names) and serial >= max(serials)
        takes = number != good[-1][0] and (permitted or not barred)
        state = board.offer(version, *names, serial=serial)
        assert (state.trial == version) == takes, (version, names, serial, good, state.reason)
        if takes:
            serials.append(serial)
            if draw.random() < 0.3:
                board.slots.begin()
                board.slots.back()
            else:
                board.prove(version)
                good.append((number, [module.version_order(each) for each in names]))
