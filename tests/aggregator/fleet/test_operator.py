"""What operators do in an order that nobody planned, and where it can end in the middle."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from hushfleet.aggregator.commands.of_fleet import members_of
from hushfleet.aggregator.fleet.lock_out import LockOut
from hushfleet.aggregator.fleet.service import FleetService
from hushfleet.aggregator.fleet.software.cards import choose_boards
from hushfleet.aggregator.fleet.trust.access import apply
from hushfleet.aggregator.fleet.trust.authority import Authority, read_revocations
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.members import counted
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry, RefusedRequest
from hushfleet.aggregator.fleet.watching import columns
from hushfleet.aggregator.fleet.watching.watch import FleetWatch, view_now
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.firmware_profiles.cards.wifi import read_wifi
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.topics import Topics
from support.command import hushfleet
from support.desk import TASK, make_folder

KEY = Identity.from_bytes(bytes([7]) * 32).public_key
ONE, OTHER = "greenhouse-01", "greenhouse-02"


fleet = partial(hushfleet, "fleet")


@pytest.fixture
def folder(tmp_path: Path) -> FleetFolder:
    return make_folder(tmp_path / "greenhouse")


@pytest.fixture
def registry(folder: FleetFolder) -> Iterator[FleetRegistry]:
    with FleetRegistry(folder.path) as opened:
        yield opened


def enrol(registry: FleetRegistry, device: str, key: bytes = KEY) -> None:
    registry.write("UPDATE boards SET standing = 'enrolled', enrolled = 1, public_key = ? WHERE id = ?", (key, device))


def test_who_is_locked_out_is_not_let_in_by_approving_its_key(folder: FleetFolder, registry: FleetRegistry) -> None:
    registry.add_refused_request(RefusedRequest(ONE, KEY, False, "waits", time.time()))
    fleet("block", folder.path, ONE, "--reason", "stolen")
    with pytest.raises(BadInput, match=rf"locked out \(stolen\).* fleet unblock {folder.path} {ONE}"):
        fleet("approve", folder.path, ONE)
    board = registry.board(ONE)
    assert (board.standing, board.reason, board.public_key) == ("blocked", "stolen", None)
    fleet("unblock", folder.path, ONE)
    assert KEY.hex() in fleet("approve", folder.path, ONE)


def test_the_key_of_another_board_is_not_approved(folder: FleetFolder, registry: FleetRegistry) -> None:
    """What SQLite says of it, `UNIQUE constraint failed`, sounded like a broken file."""
    enrol(registry, OTHER)
    registry.add_refused_request(RefusedRequest(ONE, KEY, False, "waits", time.time()))
    with pytest.raises(BadInput, match=f"{ONE} asks with the key of {OTHER}; each board needs"):
        fleet("approve", folder.path, ONE)
    assert registry.board(ONE).public_key is None


def test_what_no_clock_could_reach_is_refused_for_tokens(folder: FleetFolder) -> None:
    """`flash` ended with a traceback once the cards were written: no calendar has that day."""
    file = folder.path / "fleet.toml"
    file.write_text(file.read_text().replace("token_days = 90.0", "token_days = 1e15"))
    with pytest.raises(BadInput, match=r"enrolment\.token_days = .*: must be days, more than 0 and at most 7300"):
        FleetFolder(folder.path)


def test_what_is_advised_of_a_board_that_the_aggregator_has_blocked_helps(
    folder: FleetFolder, registry: FleetRegistry
) -> None:
    enrol(registry, ONE)
    apply(folder, registry)
    with ActivityStore(folder.aggregator) as register:
        register.block(ONE, "its updates were refused in 3 rounds, the last as below-noise")
    watch = FleetWatch(folder)
    (problem,) = next(board for board in watch.view().boards if board.device == ONE).problems
    assert problem.advice == f"To take it back: hushfleet fleet unblock DIR {ONE}"
    fleet("unblock", folder.path, ONE)
    assert {board.standing for board in watch.view().boards if board.device == ONE} == {"enrolled"}
    watch.close()
    with pytest.raises(BadInput, match="is not locked out; it is enrolled"):
        fleet("unblock", folder.path, ONE)


def test_a_lock_out_before_the_first_card_leaves_nothing_that_takes_any_key(folder: FleetFolder) -> None:
    fleet("block", folder.path, ONE)
    fleet("unblock", folder.path, ONE)
    with members_of(folder) as members:
        assert members.devices() == []
        members.block(ONE, "by hand")
        fleet("block", folder.path, OTHER)
        assert members.blocked() == {ONE: "by hand"}, "what others have blocked stays"


def test_a_lock_out_by_others_before_the_first_card_holds_when_that_comes(
    folder: FleetFolder, registry: FleetRegistry
) -> None:
    with ActivityStore(folder.aggregator) as register:
        register.block(ONE, "by hand")
    enrol(registry, ONE)
    apply(folder, registry)
    with members_of(folder) as members:
        assert members.device(ONE).reason == "by hand"
        fleet("unblock", folder.path, ONE)
        assert (members.device(ONE).is_blocked, members.device(ONE).public_key) == (False, KEY)


def test_a_new_card_ends_a_lock_out_from_before_the_first_card(folder: FleetFolder) -> None:
    with ActivityStore(folder.aggregator) as register:
        register.block(ONE, "by hand")
    assert "locked out (by hand), and its next card is not" in fleet("renew", folder.path, ONE, "--new-card")
    with members_of(folder) as members:
        assert (members.devices(), members.blocked()) == ([], {})


@pytest.mark.parametrize("by", ["operator", "aggregator"])
def test_a_new_card_for_a_board_that_is_locked_out_says_that_it_comes_in(
    by: str, folder: FleetFolder, registry: FleetRegistry
) -> None:
    enrol(registry, ONE)
    apply(folder, registry)
    if by == "operator":
        fleet("block", folder.path, ONE, "--reason", "stolen")
    else:
        with ActivityStore(folder.aggregator) as register:
            register.block(ONE, "its updates were stolen")
    assert "stolen), and its next card is not" in fleet("renew", folder.path, ONE, "--new-card")
    enrol(registry, ONE, key=Identity.from_bytes(bytes([8]) * 32).public_key)
    apply(folder, registry)
    with members_of(folder) as members:
        assert not members.device(ONE).is_blocked
    assert "locked out" not in fleet("renew", folder.path, ONE, "--new-card")


def test_a_board_whose_key_was_given_gets_no_card_by_counting(
    folder: FleetFolder, registry: FleetRegistry, tmp_path: Path
) -> None:
    """Under another key than the one that is known it would never come in."""
    listed = tmp_path / "boards.csv"
    listed.write_text(f"id,board,key\nbench,generic-x86,{KEY.hex()}\n")
    fleet("add", folder.path, "--csv", listed)
    assert [board.device for board in choose_boards(registry, now=time.time())] == [ONE, OTHER]


def test_a_list_of_revoked_certificates_from_a_clock_that_was_ahead_is_written_anew(
    folder: FleetFolder, registry: FleetRegistry
) -> None:
    """OpenSSL takes no connection at all by a list that is not valid yet."""
    apply(folder, registry)
    now, file = datetime.datetime.now(datetime.UTC), folder.broker / "revoked.pem"
    authority = Authority.load(folder.ca)
    file.write_bytes(authority.revocation_list({5}, now=now + datetime.timedelta(days=365)))
    registry.write("INSERT INTO certificates VALUES ('5', ?, ?, ?, ?, 0, 2)", (ONE, KEY, KEY, b""))
    apply(folder, registry)
    assert read_revocations(file.read_bytes()).date <= datetime.datetime.now(datetime.UTC)
    written = file.read_bytes()
    apply(folder, registry)
    assert file.read_bytes() == written


# making a fleet, and naming its boards


@pytest.fixture
def words(tmp_path: Path) -> tuple[object, ...]:
    (tmp_path / "task.toml").write_text(TASK)
    return "--broker-name", "broker.example", "--task", tmp_path / "task.toml"


def test_a_fleet_has_the_files_that_its_first_task_names(tmp_path: Path, words: tuple[object, ...]) -> None:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets/start.npz").write_bytes(b"read when the run begins")
    task = tmp_path / "task.toml"
    for named in ("nets/start.npz", "../task.toml", "operator.key", "missing.npz"):
        (tmp_path / "operator.key").touch()
        task.write_text(TASK.replace("[model]", f'[model]\nshare = "head"\nweights = "{named}"'))
        if named == "nets/start.npz":
            fleet("init", tmp_path / "plant", *words)
            assert (tmp_path / "plant" / named).read_bytes() == b"read when the run begins"
        else:
            with pytest.raises(BadInput, match=r"put it beside|rename .*operator\.key|does not exist"):
                fleet("init", tmp_path / "other", *words)
            assert not (tmp_path / "other").exists()


def test_what_fails_after_the_folder_was_made_leaves_nothing(tmp_path: Path, words: tuple[object, ...]) -> None:
    """Else the same command again would find the folder, and nothing else writes the units."""
    (tmp_path / "systemd").touch()  # in the way of the units
    task = tmp_path / "task.toml"
    task.write_text(TASK.replace("[model]", '[model]\nshare = "head"\nweights = "systemd"'))
    with pytest.raises(HushfleetError, match="systemd"):
        fleet("init", tmp_path / "plant", *words)
    assert {path.name for path in tmp_path.iterdir()} == {"systemd", "task.toml"}
    (tmp_path / "disk").mkdir()
    (tmp_path / "plant").symlink_to("disk")
    with pytest.raises(HushfleetError, match="systemd"):
        fleet("init", tmp_path / "plant", *words)
    assert not (tmp_path / "disk").exists()


def with_data(path: str, network: str) -> str:
    """A task with its data in a folder."""
    data = f'name = "folder"\nclass_names = ["a", "b"]\ninput_shape = [1, 8, 8]\npath = "{path}"'
    return TASK.replace('name = "digits"', data).replace('name = "digits-cnn"', f'name = "{network}"')


def test_a_network_in_the_tasks_folder_of_data_comes_with_it(tmp_path: Path, words: tuple[object, ...]) -> None:
    (tmp_path / "own/a").mkdir(parents=True)
    (tmp_path / "own/net.py").write_text("the network")
    (tmp_path / "task.toml").write_text(with_data("./own", "own/net.py:Net"))
    fleet("init", tmp_path / "plant", *words)
    assert (tmp_path / "plant/own/net.py").read_text() == "the network"
    assert (tmp_path / "plant/own/a").is_dir()


@pytest.mark.parametrize(
    ("data", "fleets"), [(".", "plant"), (".", "../plant"), ("own", "own/plant")], ids=["here", "beside", "in data"]
)
def test_a_folder_of_data_that_cannot_be_copied_is_told(
    data: str, fleets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks/own").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "tasks")
    Path("task.toml").write_text(with_data(data, "linear"))
    with pytest.raises(BadInput, match=r"must not be the folder of the task"):
        fleet("init", fleets, "--broker-name", "broker.example", "--task", "task.toml")
    assert {path.name for path in tmp_path.rglob("*")} == {"tasks", "own", "task.toml"}


def test_the_folder_that_one_is_in_cannot_be_the_fleets(
    tmp_path: Path, words: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plant").mkdir()
    monkeypatch.chdir(tmp_path / "plant")
    with pytest.raises(BadInput, match="is the current folder"):
        fleet("init", ".", *words)


def test_boards_are_added_with_their_network_or_not_at_all(
    folder: FleetFolder, registry: FleetRegistry, tmp_path: Path
) -> None:
    wifi, before = tmp_path / "home.toml", registry.boards()
    add = ("add", folder.path, "--count", 2, "--board", "generic-x86", "--wifi", wifi)
    wifi.write_text('ssid = "home"\npasswort = "correct horse"\ncountry = "DE"\n')
    with pytest.raises(BadInput, match=r"home\.toml: unknown field 'passwort'"):
        fleet(*add)
    wifi.write_text('ssid = "home"\npassword = "correct horse"\ncountry = "DE"\n')
    (folder.path / "wifi/home.toml").mkdir()  # it cannot be written, as on a full disk
    with pytest.raises(HushfleetError, match=r"home\.toml cannot be written"):
        fleet(*add)
    assert registry.boards() == before
    (folder.path / "wifi/home.toml").rmdir()
    fleet(*add)
    assert folder.wifi("home").stat().st_mode & 0o777 == 0o600
    kept = folder.wifi("home").read_bytes()
    assert read_wifi(folder.wifi("home")) == read_wifi(wifi)
    wifi.write_text('ssid = "home"\npassword = "another horse"\ncountry = "DE"\n')
    listed = tmp_path / "boards.csv"
    listed.write_text(f"id,board\n{ONE},generic-x86\n")
    with pytest.raises(BadInput, match="nothing was added"):
        fleet("add", folder.path, "--csv", listed, "--wifi", wifi)
    assert folder.wifi("home").read_bytes() == kept


def test_a_network_is_kept_as_toml_in_whatever_form_it_came(folder: FleetFolder, tmp_path: Path) -> None:
    """A profile in JSON was kept as it was, in a file that is read as TOML."""
    wifi = tmp_path / "shed.json"
    wifi.write_text('{"ssid": "📶 Shed", "password": "correct horse", "country": "GB"}')
    fleet("add", folder.path, "--count", 1, "--board", "generic-x86", "--wifi", wifi)
    assert read_wifi(folder.wifi("shed")) == read_wifi(wifi)


class Clearing(FleetService):
    def __init__(self, topics: Topics) -> None:
        self.topics, self.cleared = topics, list[str]()

    def clear(self, topic: str) -> None:
        self.cleared.append(topic)


def test_who_was_locked_out_last_is_cut_off_first(
    folder: FleetFolder, registry: FleetRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """A service that starts takes over the sessions of all that were ever locked out, one after the other."""
    registry.add(counted("a", 4, known=[], board="generic-x86"))
    for number in range(1, 5):
        registry.block(f"a-{number:02d}", "long ago")
    part, service = LockOut(folder, registry), Clearing(Topics(folder.config.federation))
    caplog.set_level(logging.WARNING)
    part.advance(service, 0.0)
    part.advance(service, 10.0)
    registry.block(OTHER, "stolen")
    for now in (40.0, 60.0, 80.0):  # nothing listens here, so each is given up
        part.advance(service, now)
    told = [each.getMessage().split()[1] for each in caplog.records if "still connected" in each.getMessage()]
    assert told == ["a-01", "a-02", OTHER]
    assert [service.topics.state(device) in service.cleared for device in told] == [True] * 3


def test_a_release_that_waits_for_signatures_is_not_built_again(folder: FleetFolder) -> None:
    """Its second build would have other bytes, and lose the signatures that the first has."""
    waits = folder.unsigned / "hushfleet-9.9-cp313-aarch64.hfr"
    waits.parent.mkdir(exist_ok=True)
    waits.write_bytes(b"one of two signatures")
    told = rf"waits for signatures.* release add {folder.path} {waits}\. To build it anew"
    with pytest.raises(BadInput, match=told):
        hushfleet("release", "make", folder.path, "--version", "9.9", "--python", "3.13")
    assert waits.read_bytes() == b"one of two signatures"


def test_an_approved_board_is_told_as_one_that_has_not_asked_again_yet(
    folder: FleetFolder, registry: FleetRegistry
) -> None:
    """W11: it was told as waiting for approval, until it asked again minutes later."""

    def state() -> tuple[str, int, int]:
        view = view_now(folder)
        board = next(each for each in view.boards if each.device == ONE)
        return columns.state(board), len(view.pending), len(board.problems)

    registry.add_refused_request(RefusedRequest(ONE, KEY, False, "waits for its operator", time.time()))
    assert state() == ("waits for approval", 1, 1)
    fleet("approve", folder.path, ONE)
    assert state() == ("approved, waits for the board", 0, 0)
