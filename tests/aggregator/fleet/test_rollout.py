"""Stages, budget and offers of a roll-out, decided from what boards have said."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.fleet.service import FleetService
from hushfleet.aggregator.fleet.software import rollout as rollout_module
from hushfleet.aggregator.fleet.software.cards import ReleasePlatform, build_release, release_of
from hushfleet.aggregator.fleet.software.releases import (
    Withdrawal,
    add_release,
    check_signed,
    offered_releases,
    releases,
)
from hushfleet.aggregator.fleet.software.rollout import (
    HEARD_S,
    LONGEST_S,
    SILENT_S,
    BoardRollout,
    Rollout,
    Updating,
    begin,
    board_rollouts,
    change,
    current,
    next_step,
    rollout_view,
    stage_sizes,
)
from hushfleet.aggregator.fleet.trust.folder import FleetFolder, UpdatesPart
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.identity_file import load
from hushfleet.edge_client.fleet.slot_state import SlotsError, State, check_fits
from hushfleet.errors import BadInput, BadSignature, Malformed
from hushfleet.firmware_profiles.cards import bundle
from hushfleet.release.archive import add_signature
from hushfleet.release.manifest import Manifest
from hushfleet.schema import pack
from hushfleet.wire.format.fleet_messages import ReleaseOffer
from hushfleet.wire.format.health import Health
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Message
from hushfleet.wire.format.topics import Topics
from support.desk import adopt, make_folder
from support.slots import AARCH64, pack_files

KEY = Identity.generate()
RULES = UpdatesPart(soak_minutes=0.0)
NOW = 1_000_000.0


def release(
    folder: Path, version: str, *, python: str = "cp313", content: str = "x", key: Any = KEY, **manifest: Any
) -> Path:
    files, out = folder / f"files-{version}-{content}", folder / f"{version}-{python}-{content}.hfr"
    files.mkdir(exist_ok=True)
    (files / "a").write_text(content)
    return pack_files(files, out, version, key, **AARCH64 | {"python": python} | manifest)


def health(device: str, **changes: Any) -> Health:
    fields: dict[str, Any] = {
        "device": device, "session": 1, "version": "1.0", "uptime_s": 1, "disk_percent": None, "memory_percent": None,
        "temperature_c": None, "throttled": None, "last_decline": None, "last_error": None, "certificate_end": 0,
        "slot": "good", "platform": "cp313-aarch64",
    }  # fmt: skip
    return Health(**{**fields, **changes})


class Desk:
    def __init__(self, tmp_path: Path, boards: int) -> None:
        self.folder: FleetFolder = make_folder(tmp_path / "greenhouse", boards=boards)
        adopt(self.folder, KEY)
        self.registry = FleetRegistry(self.folder.path)
        self.registry.write("UPDATE boards SET standing = 'enrolled'")
        self.devices = [board.device for board in self.registry.boards()]
        add_release(self.folder, self.registry, release(tmp_path, "2.0"))

    def say(self, device: str, *, at: float = NOW, **changes: Any) -> None:
        self.registry.write(
            "UPDATE boards SET state = 'ready', session = 1, version = '1.0', seen = ?1, health = ?2, health_at = ?1 "
            "WHERE id = ?3",
            (at, pack(health(device, **changes)), device),
        )

    def offered(self, device: str, *, at: float) -> None:
        self.registry.write("INSERT INTO offered VALUES (1, ?, ?, NULL)", (device, at))

    def outcome(self, device: str, *, now: float = NOW) -> str:
        rollout = current(self.registry)
        assert rollout is not None
        return next(
            board.outcome for board in board_rollouts(self.registry, rollout, now=now) if board.device == device
        )


@pytest.fixture
def desk(tmp_path: Path):
    made = Desk(tmp_path, 3)
    yield made
    made.registry.close()


def test_what_a_board_says_is_what_becomes_of_it(desk: Desk) -> None:
    begin(desk.registry, None, now=NOW)
    one = desk.devices[0]
    assert desk.outcome(one) == "away"
    desk.say(one)
    assert desk.outcome(one) == "waits"
    assert desk.outcome(one, now=NOW + HEARD_S + 1) == "away"
    desk.say(one, slot="none")
    assert desk.outcome(one) == "unmanaged"
    desk.say(one, platform="cp310-aarch64")
    assert desk.outcome(one) == "no release"
    desk.offered(one, at=NOW - 10)
    for said, outcome in (
        ({}, "offered"),
        ({"version": "2.0", "slot": "trial"}, "offered"),
        ({"slot": "returned", "tried": "1.9", "attempt": 1}, "offered"),
        ({"slot": "returned", "tried": "2.0", "attempt": 0}, "offered"),
        ({"slot": "returned", "tried": "2.0", "attempt": 1}, "failed"),
        ({"version": "2.0", "tried": "2.0", "attempt": 1}, "good"),
    ):
        desk.say(one, **said)
        assert desk.outcome(one) == outcome, said
    desk.say(one)
    assert desk.outcome(one, now=NOW + SILENT_S - 1) == "offered"
    assert desk.outcome(one, now=NOW + SILENT_S + 1) == "failed"
    desk.say(one, at=NOW + LONGEST_S)
    assert desk.outcome(one, now=NOW + LONGEST_S) == "failed"


def test_a_board_that_gets_another_release_from_a_stick_has_not_failed(desk: Desk) -> None:
    begin(desk.registry, None, now=NOW)
    one, later = desk.devices[0], NOW + LONGEST_S + 60
    desk.registry.write("INSERT INTO offered VALUES (1, ?, ?, ?)", (one, NOW - 10, NOW))
    for slot, outcome in (("trial", "good"), ("good", "good"), ("returned", "failed")):
        desk.say(one, at=later, version="2.1", slot=slot, tried="2.0", attempt=1)
        assert desk.outcome(one, now=later) == outcome, slot
    desk.say(one, at=later, version="1.0")
    assert desk.outcome(one, now=later) == "failed", "it knows nothing of this roll-out"


def test_the_newest_release_is_the_one_with_the_highest_numbers(desk: Desk, tmp_path: Path) -> None:
    for version in ("2.9.0", "2.10.0", "2.9.1"):
        add_release(desk.folder, desk.registry, release(tmp_path, version))
    assert [each.version for each in releases(desk.registry)] == ["2.10.0", "2.9.1", "2.9.0", "2.0"]
    assert begin(desk.registry, None, now=NOW).version == "2.10.0"
    newest = release_of(desk.folder, desk.registry, [ReleasePlatform("3.13", "aarch64")])
    assert newest.version == "2.10.0"


def test_a_permission_to_go_back_has_a_higher_number_than_all_before(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "fetch_wheels", lambda *_, **__: [])
    adopt(desk.folder, load(desk.folder.release_key))
    target = ReleasePlatform("3.13", "aarch64")

    def made(version: str, downgrade_from: Sequence[str] = ()) -> Manifest:
        out = build_release(desk.folder, desk.registry, target, version=version, downgrade_from=downgrade_from)
        return add_release(desk.folder, desk.registry, out).manifest

    ordinary = made("3.0")
    assert (ordinary.downgrade_from, ordinary.downgrade_serial) == ((), 0)
    serials = []
    for version, now in (("2.0.1", NOW), ("2.0.2", NOW), ("2.0.3", NOW - 1000), ("2.0.4", NOW + 1000)):
        monkeypatch.setattr(time, "time", lambda now=now: now)  # also by a clock that was put back
        later = made(version, ["3.0", "3.1"])
        assert later.downgrade_from == ("3.0", "3.1")
        serials.append(later.downgrade_serial)
    assert serials == [NOW, NOW + 1, NOW + 2, NOW + 1000]


# what the operator has withdrawn


def downgrade(desk: Desk, folder: Path, version: str, *named: str, serial: int) -> None:
    path = release(folder, version, downgrade_from=named, downgrade_serial=serial)
    add_release(desk.folder, desk.registry, path)


def offered(desk: Desk) -> list[str]:
    return [each.version for each in offered_releases(desk.registry)]


def test_what_a_downgrade_withdraws_is_offered_to_nobody(desk: Desk, tmp_path: Path) -> None:
    """3.0 has a hole: neither `--newest` nor a new card may bring it back, and 2.0 is refused by who went back."""
    add_release(desk.folder, desk.registry, release(tmp_path, "3.0"))
    downgrade(desk, tmp_path, "2.0.1", "3.0", serial=5)
    assert offered(desk) == ["2.0.1"]
    assert begin(desk.registry, None, now=NOW).version == "2.0.1"
    newest = release_of(desk.folder, desk.registry, [ReleasePlatform("3.13", "aarch64")])
    assert newest.version == "2.0.1"
    for version in ("3.0", "2.0"):
        said = (
            rf"2\.0\.1 is signed as a downgrade, which withdraws all others up to 3\.0.*{version} with a version above"
        )
        with pytest.raises(BadInput, match=said):
            begin(desk.registry, version, now=NOW)
        with pytest.raises(BadInput, match=said):
            check_signed(desk.folder, desk.registry, version)
    assert current(desk.registry) == Rollout(1, "2.0.1", "running", "", 0, NOW)
    add_release(desk.folder, desk.registry, release(tmp_path, "3.1"))
    assert offered(desk) == ["3.1", "2.0.1"]
    downgrade(desk, tmp_path, "3.0.5", "3.1", serial=6)
    assert offered(desk) == ["3.0.5"]


def test_a_roll_out_of_what_was_withdrawn_meanwhile_does_not_go_on(desk: Desk, tmp_path: Path) -> None:
    add_release(desk.folder, desk.registry, release(tmp_path, "3.0"))
    begin(desk.registry, "3.0", now=NOW)
    change(desk.registry, "paused")
    downgrade(desk, tmp_path, "2.0.1", "3.0", serial=5)
    with pytest.raises(BadInput, match=r"downgrade, which withdraws all others up to 3\.0"):
        change(desk.registry, "running")
    assert change(desk.registry, "cancelled").state == "cancelled"


def test_a_roll_out_of_what_is_withdrawn_stops(desk: Desk, tmp_path: Path) -> None:
    add_release(desk.folder, desk.registry, release(tmp_path, "3.0"))
    begin(desk.registry, "3.0", now=NOW)
    serving, one = Serving(desk), desk.devices[0]
    downgrade(desk, tmp_path, "2.0.1", "3.0", serial=5)
    desk.say(one, at=NOW)
    assert (serving.look(NOW), serving.offers) == ("stopped", [])
    rollout = current(desk.registry)
    assert rollout is not None
    assert rollout.reason.startswith("release 2.0.1 is signed as a downgrade, which withdraws all others up to 3.0")


def test_the_fleet_withdraws_what_boards_refuse_that_have_followed_it(desk: Desk, tmp_path: Path) -> None:
    for version in ("1.0", "2.9", "3.0", "3.0.1"):
        add_release(desk.folder, desk.registry, release(tmp_path, version))
    state, runs = State("3.0"), "3.0"
    for serial, (to, named) in enumerate((("2.1", ("3.0",)), ("2.0.5", ("2.1",)), ("2.5", ("2.0.5",))), 1):
        downgrade(desk, tmp_path, to, *named, serial=serial)
        known = releases(desk.registry)
        (manifest,) = (each.manifest for each in known if each.version == to)
        check_fits(manifest, state, store=4)
        state, runs = State(to, floor="3.0", withdrawn="3.0", downgrade_serial=serial), to
        withdrawn = Withdrawal.of(known)
        assert withdrawn is not None
        for each in known:
            if each.version == runs:
                assert not withdrawn.includes(each.version)
            elif withdrawn.includes(each.version):
                with pytest.raises(SlotsError):
                    check_fits(each.manifest, state, store=4)
            else:
                check_fits(each.manifest, state, store=4)
    assert offered(desk) == ["3.0.1", "2.5"]


def test_a_board_that_would_refuse_the_release_is_named_and_gets_no_offer(desk: Desk, tmp_path: Path) -> None:
    """Else it would fail, and stop the roll-out for all others."""
    downgrade(desk, tmp_path, "1.5", "2.1", serial=5)
    begin(desk.registry, "1.5", now=NOW)
    one, other, strange = desk.devices
    desk.say(one, version="2.0.7")
    desk.say(other, version="2.1.0")
    desk.say(strange, version="2.x")
    assert [desk.outcome(each) for each in desk.devices] == ["no release", "waits", "waits"]
    serving = Serving(desk)
    assert (serving.look(NOW), serving.offers) == ("running", [other])
    found = board_rollouts(desk.registry, Rollout(1, "1.5", "running", "", 0, NOW), now=NOW)
    (why,) = (board.why for board in found if board.device == one)
    assert why == "it runs 2.0.7, and release 1.5 is older and not signed as a downgrade from it"


def test_what_boards_would_refuse_is_not_built(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "fetch_wheels", lambda *_, **__: [])
    adopt(desk.folder, load(desk.folder.release_key))
    target = ReleasePlatform("3.13", "aarch64")

    def made(version: str, *named: str) -> Manifest:
        out = build_release(desk.folder, desk.registry, target, version=version, downgrade_from=named)
        return add_release(desk.folder, desk.registry, out).manifest

    made("3.0")
    assert made("2.0.1", "3.0").downgrade_from == ("3.0",)
    with pytest.raises(
        BadInput, match=r"2\.0\.2 with a version above 3\.0 .*boards that run 2\.0\.1: --downgrade-from 2"
    ):
        made("2.0.2")
    assert made("2.0.2", "2.0.1").downgrade_from == ("2.0.1", "3.0"), "for boards that were away, and still run 3.0"
    assert made("3.1").downgrade_from == ()
    assert made("3.0.1", "3.1").downgrade_from == ("3.1",), "from 3.0 it is an update"
    for version, named in (("three", ()), ("3.2", ("3.x",))):
        with pytest.raises(BadInput, match="is no version of a release: write two to four numbers"):
            made(version, *named)


@pytest.mark.parametrize("way", ["new card", "forgotten"])
def test_a_new_card_months_after_the_roll_out_is_offered_the_release_as_any_board(desk: Desk, way: str) -> None:
    """Its former card had taken the release in June. The new one has an older release, and has failed nothing."""
    begin(desk.registry, None, now=NOW)
    one, months = desk.devices[0], 180 * 86400.0
    desk.offered(one, at=NOW)
    desk.say(one, version="2.0")
    if way == "new card":
        desk.registry.expect_new_card(one)
    else:
        desk.registry.forget(one)
        desk.registry.add([Board(one, "generic-x86")])
    assert desk.registry.board(one).seen is None, "the page says nothing of the new card before it is heard"
    desk.registry.write("UPDATE boards SET standing = 'enrolled'")
    desk.say(one, at=NOW + months)
    assert desk.outcome(one, now=NOW + months) == "waits"


def test_a_board_that_knows_a_later_roll_out_than_the_registry_is_no_riddle(desk: Desk) -> None:
    """The registry was put back from a backup: the board takes no offer with a number that it has passed."""
    one = desk.devices[0]
    rollout = begin(desk.registry, "2.0", now=NOW)
    desk.say(one, tried="3.0", attempt=5)
    assert desk.outcome(one) == "waits"
    desk.offered(one, at=NOW)
    assert desk.outcome(one) == "failed"
    (board,) = [board for board in board_rollouts(desk.registry, rollout, now=NOW) if board.device == one]
    assert "roll-out 5, which this registry does not know" in board.why


def test_a_new_roll_out_is_a_new_attempt(desk: Desk) -> None:
    one = desk.devices[0]
    begin(desk.registry, "2.0", now=NOW)
    desk.offered(one, at=NOW)
    desk.say(one, slot="returned", tried="2.0", attempt=1)
    assert desk.outcome(one) == "failed"
    assert begin(desk.registry, "2.0", now=NOW).number == 2
    assert desk.outcome(one) == "waits"


def test_a_roll_out_is_paused_resumed_and_cancelled(desk: Desk) -> None:
    with pytest.raises(BadInput, match="no roll-out"):
        change(desk.registry, "paused")
    with pytest.raises(BadInput, match=r"no release 9\.0 in this fleet; it has 2\.0"):
        begin(desk.registry, "9.0", now=NOW)
    begin(desk.registry, None, now=NOW)
    assert change(desk.registry, "paused").state == "paused"
    assert change(desk.registry, "running").state == "running"
    change(desk.registry, "cancelled")
    assert rollout_view(desk.registry, now=NOW) is None
    with pytest.raises(BadInput, match="no roll-out"):
        change(desk.registry, "running")


def test_a_release_is_on_the_disk_before_it_is_known(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must not leave a version that nobody can build again and a file that is empty."""
    path, synced, fsync = release(tmp_path, "3.0"), list[Path](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda h: (synced.append(Path(os.readlink(f"/proc/self/fd/{h}"))), fsync(h)))
    add_release(desk.folder, desk.registry, path)
    assert [each.parent.name for each in synced] == ["releases", desk.folder.path.name]


def test_only_sound_releases_of_the_fleets_key_are_taken(desk: Desk, tmp_path: Path) -> None:
    def add(path: Path) -> None:
        add_release(desk.folder, desk.registry, path)

    with pytest.raises(BadSignature):
        add(release(tmp_path, "3.0", key=Identity.generate()))
    whole = release(tmp_path, "3.0")
    cut = tmp_path / "cut.hfr"
    cut.write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(Malformed, match="bytes of payload"):
        add(cut)
    add(whole)
    add(whole)
    with pytest.raises(BadInput, match="higher version"):
        add(release(tmp_path, "3.0", content="y"))
    add(release(tmp_path, "3.0", python="cp311"))
    found = [(each.version, each.platform) for each in releases(desk.registry)]
    assert found == [("3.0", "cp313-aarch64"), ("3.0", "cp311-aarch64"), ("2.0", "cp313-aarch64")]
    assert begin(desk.registry, None, now=NOW).version == "3.0"


# when nobody listened


class Serving:
    """The part of the fleet service, at a moment of the wall clock."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.now, self.ticks, self.offers = desk, NOW, 0.0, list[str]()
        self.digests = list[bytes]()
        self.restart()

    def restart(self) -> None:
        self.part = Updating(self.desk.folder, self.desk.registry, wall=lambda: self.now)

    def publish(self, topic: str, message: Message, *, retain: bool = False) -> None:
        assert isinstance(message, ReleaseOffer)
        self.offers.append(message.device)
        self.digests.append(message.digest)

    topics = Topics("greenhouse")

    def look(self, at: float) -> str:
        """Looks once; the state of the roll-out then."""
        self.now, self.ticks = at, self.ticks + 2
        self.part.advance(cast(FleetService, self), self.ticks)
        rollout = current(self.desk.registry)
        assert rollout is not None
        return rollout.state


def test_a_night_without_the_fleet_service_is_no_fault_of_the_boards(desk: Desk) -> None:
    begin(desk.registry, None, now=NOW)
    serving, one = Serving(desk), desk.devices[0]
    desk.say(one, at=NOW)
    assert (serving.look(NOW), serving.offers) == ("running", [one])
    desk.say(one, at=NOW + 60)
    assert serving.look(NOW + 60) == "running"
    serving.restart()
    night = NOW + 12 * 3600
    assert serving.look(night) == "running"
    for second in range(1, int(SILENT_S), 50):
        assert serving.look(night + second) == "running"
    for second in range(int(SILENT_S), int(SILENT_S) + 100, 50):
        state = serving.look(night + second)
    assert state == "stopped", "silent for so long while it was listened to"
    later = night + 2 * SILENT_S  # the broker was away: the service runs, and hears nobody
    change(desk.registry, "running")
    assert serving.look(later) == "running"
    assert serving.look(later + 7 * 3600) == "running"


@pytest.mark.parametrize("is_heard", [False, True], ids=["silent", "slow"])
def test_a_service_that_is_restarted_often_still_finds_who_is_lost(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, is_heard: bool
) -> None:
    monkeypatch.setattr(rollout_module, "SILENT_S", 1000.0)
    monkeypatch.setattr(rollout_module, "LONGEST_S", 1000.0)
    begin(desk.registry, None, now=NOW)
    serving, one = Serving(desk), desk.devices[0]
    desk.say(one, at=NOW)
    serving.look(NOW)
    for second in range(2, 1000, 49):
        if is_heard or second == 2:
            desk.say(one, at=NOW + second)
        assert serving.look(NOW + second) == "running"
        serving.restart()
    desk.say(one, at=NOW + (1040 if is_heard else 2))
    assert serving.look(NOW + 1040) == "stopped"


def test_a_new_roll_out_has_its_own_times(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_module, "LONGEST_S", 1000.0)
    serving, one = Serving(desk), desk.devices[0]
    for begun in (NOW, NOW + 900):
        begin(desk.registry, None, now=begun)
        for second in range(0, 900, 50):
            desk.say(one, at=begun + second)
            assert serving.look(begun + second) == "running"
        serving.restart()
    for second in (900, 950, 1000, 1050):
        desk.say(one, at=begun + second)
        state = serving.look(begun + second)
    assert state == "stopped"


def test_a_roll_out_that_was_paused_for_a_day_goes_on(desk: Desk) -> None:
    begin(desk.registry, None, now=NOW)
    serving, one = Serving(desk), desk.devices[0]
    desk.say(one, at=NOW)
    assert serving.look(NOW) == "running"
    change(desk.registry, "paused")
    later = NOW + LONGEST_S + 3600
    for at in (later - 2, later - 1):
        assert serving.look(at) == "paused"
    change(desk.registry, "running")
    desk.say(one, at=later)
    assert (serving.look(later), serving.offers) == ("running", [one, one])


def test_a_pause_that_ends_while_the_service_is_restarted_was_a_pause(desk: Desk) -> None:
    begin(desk.registry, None, now=NOW)
    serving, one = Serving(desk), desk.devices[0]
    desk.say(one, at=NOW)
    serving.look(NOW)
    change(desk.registry, "paused")
    later = NOW + LONGEST_S + 3600
    assert serving.look(later - 2) == "paused"
    serving.restart()
    change(desk.registry, "running")
    desk.say(one, at=later)
    assert serving.look(later) == "running"


def test_a_clock_that_is_set_back_holds_up_no_roll_out(desk: Desk) -> None:
    begin(desk.registry, None, now=NOW)
    serving, (one, other, _) = Serving(desk), desk.devices
    ahead = NOW + 365 * 86400
    desk.say(one, at=ahead)
    assert serving.look(ahead) == "running"
    desk.say(one, at=NOW)
    serving.look(NOW)
    assert serving.offers == [one, one], "an offer may be lost, so it is said again"
    desk.say(one, at=ahead, version="2.0", tried="2.0", attempt=1)
    serving.look(ahead)
    for at in (NOW + 100, NOW + 130, NOW + 160):
        desk.say(other, at=at)
        serving.look(at)
    assert other not in serving.offers
    for second in range(160, 160 + 660, 50):
        desk.say(other, at=NOW + second)
        serving.look(NOW + second)
    assert other in serving.offers, "after the ten minutes of the first stage"


def test_a_release_that_is_signed_anew_is_served_in_the_roll_out_that_runs(desk: Desk) -> None:
    """Its head is another, so its digest is; boards that have heard of new release keys take this one alone."""
    begin(desk.registry, None, now=NOW)
    serving, one = Serving(desk), desk.devices[0]
    desk.say(one, at=NOW)
    serving.look(NOW)
    (before,) = releases(desk.registry)
    kept = desk.folder.releases / before.file
    add_signature(kept, Identity.generate())
    serving.restart()
    serving.look(NOW + 1)  # the file and its row do not fit each other now
    add_release(desk.folder, desk.registry, kept)
    desk.say(one, at=NOW + 2)
    serving.look(NOW + 2)
    (after,) = releases(desk.registry)
    assert after.digest != before.digest
    assert serving.digests[-1] == after.digest
    assert serving.part._files[after.digest] == kept.read_bytes()


def test_who_was_heard_by_a_clock_that_was_ahead_is_not_there(desk: Desk) -> None:
    begin(desk.registry, None, now=NOW)
    serving, (one, other, third), ahead = Serving(desk), desk.devices, NOW + 365 * 86400
    desk.say(one, at=ahead)
    serving.look(ahead)
    for device in (one, other):
        desk.say(device, at=ahead + 10)
    serving.look(NOW)
    assert [desk.outcome(device) for device in (one, other)] == ["offered", "away"]
    desk.say(third, at=NOW)
    later = NOW + SILENT_S + 1
    assert [desk.outcome(device, now=later) for device in (one, other)] == ["failed", "away"]


# stages


def board(number: int, outcome: str, *, offered: bool = False, good_at: float | None = None) -> BoardRollout:
    return BoardRollout(f"b{number}", outcome, offered, good_at)


def running(stage: int = 0) -> Rollout:
    return Rollout(1, "2.0", "running", "", stage, NOW)


def test_one_board_then_a_tenth_then_all() -> None:
    assert stage_sizes(40, RULES) == (1, 4, 40)
    boards = {number: board(number, "waits") for number in range(40)}
    rollout, offers = running(), []
    while True:
        step = next_step(rollout, list(boards.values()), RULES, now=NOW)
        if not step.offer:
            break
        offers.append(len(step.offer))
        rollout = running(step.stage)
        for device in step.offer:
            boards[int(device[1:])] = board(int(device[1:]), "good", offered=True, good_at=NOW)
    assert offers == [1, 3, 36]


def test_the_next_stage_waits_for_the_soak_and_for_each_board() -> None:
    rules = UpdatesPart(soak_minutes=10.0)
    others = [board(number, "waits") for number in range(1, 20)]
    first = board(0, "good", offered=True, good_at=NOW)
    assert next_step(running(), [first, *others], rules, now=NOW + 599).offer == ()
    assert len(next_step(running(), [first, *others], rules, now=NOW + 600).offer) == 1
    busy = board(0, "offered", offered=True)
    assert next_step(running(), [busy, *others], rules, now=NOW + 9999).offer == ("b0",), "it is said again"


def test_a_board_that_fails_stops_the_first_stage_and_few_do_not_stop_the_last() -> None:
    failed = board(0, "failed", offered=True)
    assert "1 boards have failed" in next_step(running(), [failed, board(1, "waits")], RULES, now=NOW).stop
    good = [board(number, "good", offered=True, good_at=NOW) for number in range(1, 38)]
    rest = [board(38, "waits"), board(39, "away")]
    step = next_step(running(2), [failed, *good, *rest], RULES, now=NOW)
    assert (step.stop, step.offer) == ("", ("b38",))
    three = [board(number, "failed", offered=True) for number in (0, 1, 2)]
    assert "3 boards have failed" in next_step(running(2), [*three, *good[2:], *rest], RULES, now=NOW).stop


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(["away", "waits", "offered", "good", "failed", "unmanaged"]), st.booleans())),
    st.integers(0, 2),
    st.floats(0, 0.9),
)
def test_never_more_boards_than_the_stage_has_and_never_a_failed_one(
    found: list[tuple[str, bool]], stage: int, budget: float
) -> None:
    rules = UpdatesPart(soak_minutes=0.0, error_budget=budget)
    boards = [board(i, outcome, offered=offered, good_at=NOW) for i, (outcome, offered) in enumerate(found)]
    step = next_step(running(stage), boards, rules, now=NOW)
    managed = [each for each in boards if each.outcome != "unmanaged"]
    taking = [each for each in managed if each.offered]
    known = {each.device: each for each in boards}
    counts = Counter(known[device].outcome for device in step.offer)
    assert set(counts) <= {"offered", "waits"}
    new = counts["waits"] - sum(known[device].outcome == "waits" and known[device].offered for device in step.offer)
    assert stage <= step.stage <= stage + 1
    assert new == 0 or len(taking) + new <= stage_sizes(len(managed), rules)[step.stage]
    failures = sum(each.outcome == "failed" for each in taking)
    if failures > budget * stage_sizes(len(managed), rules)[stage]:
        assert step.stop
        assert not step.offer
