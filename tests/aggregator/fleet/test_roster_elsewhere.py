"""The operator's key is on another machine: what boards may take part in secure aggregation is exported, signed there,
and taken."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from hushfleet.aggregator.fleet.page.render import render_parts
from hushfleet.aggregator.fleet.tasks.sums import _problems
from hushfleet.aggregator.fleet.trust.folder import FILE_NAME, FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.fleet.view import FleetView
from hushfleet.aggregator.fleet.watching.table import table
from hushfleet.aggregator.fleet.watching.watch import view_now
from hushfleet.aggregator.storage import board as boards
from hushfleet.aggregator.storage.identity_file import load, load_or_create
from hushfleet.aggregator.storage.membership_list_signing import MembershipListChanges
from hushfleet.errors import BadInput
from hushfleet.secure.membership_list import MembershipList
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.link.interface import LinkUp
from support.command import hushfleet
from support.desk import TASK, Board, add_enrolled, event_of, make_folder, served, until

SECURE = TASK.replace("[privacy]", '[privacy]\naccounting = "secure"')


run = partial(hushfleet, "fleet")


@dataclass
class Two:
    """The fleet's machine, and the operator's, which has a key and nothing else."""

    folder: FleetFolder
    away: Path

    @property
    def key(self) -> Path:
        return self.away / "operator.key"

    def enrol(self, *devices: str) -> None:
        add_enrolled(self.folder, *devices)

    def export(self, name: str = "list") -> Path:
        run("roster", "export", self.folder.path, "--out", self.folder.path / name)
        return Path(shutil.copy(self.folder.path / name, self.away / name))

    def sign(self, asked: Path) -> Path:
        out = asked.with_suffix(".signed")
        run("roster", "sign", asked, "--key", self.key, "--out", out, "--yes")
        return out

    def take(self, signed: Path) -> str:
        return run("roster", "import", self.folder.path, signed)

    def held(self) -> MembershipList:
        return MembershipList.from_bytes(self.folder.membership_list.read_bytes(), operator=load(self.key).public_key)

    def view(self) -> FleetView:
        return view_now(self.folder)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    away = tmp_path / "away"
    key = load_or_create(away / "operator.key")
    yield Two(make_folder(tmp_path / "plant", boards=0, task=SECURE, operator=key.public_key), away)
    assert not list((tmp_path / "plant").rglob("operator.key*")), "the fleet's machine never has it"


def test_before_a_board_has_enrolled_nothing_is_to_be_signed(two: Two) -> None:
    with pytest.raises(BadInput, match=r"no board .* has enrolled, so there is nothing to sign yet"):
        two.export()


def test_a_change_of_the_boards_waits_is_signed_elsewhere_and_holds(two: Two) -> None:
    two.enrol("plant-1", "plant-2")
    assert "added        plant-2\n" in run("roster", "export", two.folder.path, "--out", two.folder.path / "list")
    assert not two.folder.membership_list.exists()
    said = two.take(two.sign(two.export()))
    assert "of 2 boards holds from the next round on" in said
    first = two.held()
    assert first.devices == ("plant-1", "plant-2")
    assert "nothing waits to be signed" in run("roster", "export", two.folder.path, "--out", two.away / "none")
    said = run("block", two.folder.path, "plant-1", "--reason", "stolen")
    assert "1 board is to leave the membership list, which waits to be signed: hushfleet fleet roster export" in said
    assert two.held() == first, "rounds go on with it"
    two.enrol("plant-3")
    asked = two.export("next")
    shown = run("roster", "sign", asked, "--key", two.key, "--out", two.away / "out", answer="y\n")
    assert f"the last was {MembershipList.from_bytes((two.away / 'list').read_bytes()).number}\n" in shown
    assert "removed      plant-1\n" in shown
    assert "added        plant-3  " in shown
    two.take(two.away / "out")
    assert two.held().devices == ("plant-2", "plant-3")
    assert two.held().number > first.number


def test_nothing_is_signed_without_a_yes(two: Two) -> None:
    two.enrol("plant-1")
    asked = two.export()
    said = run("roster", "sign", asked, "--key", two.key, "--out", two.away / "out", answer="n\n")
    assert said.startswith("exit code 1")
    assert sorted(each.name for each in two.away.iterdir()) == ["list", "operator.key"]


def test_changed_limits_are_shown(two: Two) -> None:
    two.enrol("plant-1")
    two.take(two.sign(two.export()))
    file = two.folder.path / FILE_NAME
    file.write_text(file.read_text().replace("min_devices = 10", "min_devices = 3"))
    two.folder = FleetFolder(two.folder.path)
    shown = run("roster", "sign", two.export("next"), "--key", two.key, "--out", two.away / "out", "--yes")
    assert "no sum of fewer than 3 boards is opened (before: 10)" in shown


def test_an_older_list_is_signed_and_taken_no_more(two: Two) -> None:
    """It has a board that was locked out since, which whoever stole it would like to have back."""
    two.enrol("plant-1", "plant-2")
    older = two.export("older")
    old = two.sign(older)
    two.take(old)
    run("block", two.folder.path, "plant-1")
    two.take(two.sign(two.export("newer")))
    with pytest.raises(BadInput, match="the last that was signed here"):
        two.sign(older)
    run("unblock", two.folder.path, "plant-1")  # as if the list alone kept it out
    with pytest.raises(BadInput, match=r"is not newer than membership list .* which holds"):
        two.take(old)
    assert two.held().devices == ("plant-2",)


def test_a_lost_memory_of_what_was_signed_is_noticed(two: Two) -> None:
    two.enrol("plant-1")
    asked = two.export()
    two.sign(asked)
    (two.away / "operator.key.greenhouse.last").write_bytes(b"")
    with pytest.raises(BadInput, match=r"operator\.key\.greenhouse\.last is not a readable membership list"):
        two.sign(asked)


def test_the_fleets_machine_cannot_use_up_the_numbers(two: Two) -> None:
    """Boards take no membership list with a lower number than they know, for ever."""
    two.enrol("plant-1")
    asked = MembershipList.from_bytes(two.export().read_bytes())
    (two.away / "huge").write_bytes(replace(asked, number=(1 << 62)).to_bytes())
    with pytest.raises(BadInput, match="more than a year ahead"):
        two.sign(two.away / "huge")
    assert two.sign(two.export("again")).exists()


def test_a_list_that_was_changed_after_it_was_signed_is_refused(two: Two) -> None:
    two.enrol("plant-1", "plant-2")
    signed = two.sign(two.export())
    data = bytearray(signed.read_bytes())
    data[data.index(b"plant-1") + 6] = ord("7")
    signed.write_bytes(bytes(data))
    with pytest.raises(BadInput, match=r"the operator of .* has not signed this membership list"):
        two.take(signed)
    unsigned = two.folder.path / "list"
    with pytest.raises(BadInput, match="not signed by the operator"):
        two.take(unsigned)
    with pytest.raises(BadInput, match="is not a readable membership list"):
        run("roster", "sign", two.folder.task, "--key", two.key, "--out", two.away / "out", "--yes")
    assert not two.folder.membership_list.exists()


def test_a_list_of_another_operator_or_federation_is_refused(two: Two) -> None:
    two.enrol("plant-1")
    asked = MembershipList.from_bytes(two.export().read_bytes())
    out = two.away / "out"
    out.write_bytes(asked.content.signed(Identity.generate()).to_bytes())
    with pytest.raises(BadInput, match="signature is not one of the key"):
        two.take(out)
    other = MembershipList.of({"plant-1": asked.key(0)}, federation="shed").signed(load(two.key))
    out.write_bytes(other.to_bytes())
    with pytest.raises(BadInput, match="of the federation shed, and the fleet is greenhouse"):
        two.take(out)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (
            ("block", "plant-1", "--reason", "stolen"),
            r"plant-1 is in this membership list, and was locked out since .*stolen",
        ),
        (("forget", "plant-1"), "plant-1 is in this membership list, and is not a board of this fleet"),
        (("renew", "plant-1", "--new-card"), "plant-1 is in this membership list, and has another key now"),
    ],
)
def test_a_board_that_went_between_export_and_import_does_not_come_back(
    two: Two, command: tuple[str, ...], why: str
) -> None:
    two.enrol("plant-1", "plant-2")
    signed = two.sign(two.export())
    until(lambda: time.time() >= MembershipList.from_bytes(signed.read_bytes()).number + 1)  # numbers are seconds
    run(command[0], two.folder.path, *command[1:])
    with pytest.raises(BadInput, match=why):
        two.take(signed)
    assert not two.folder.membership_list.exists()
    two.take(two.sign(two.export("again")))
    assert two.held().devices == ("plant-2",)


def told(view: FleetView) -> tuple[str, str]:
    """The terminal's table and the page, as text."""
    console = Console(width=1000)
    with console.capture() as captured:
        console.print(table(view))
    return captured.get(), "".join(render_parts(view).values()).replace("&#39;", "'")


def test_status_and_page_say_by_whom_sums_are_protected_and_what_waits(two: Two, tmp_path: Path) -> None:
    two.enrol("plant-1", "plant-2")
    for text in told(two.view()):
        assert "unless whoever runs it also holds the operator's key" in text
        assert "operator.key" not in text
        assert "no membership list is signed yet, so no round of secure aggregation begins" in text
        assert "2 boards wait for a signed membership list" in text
        assert "hushfleet fleet roster export DIR --out FILE, and have it signed where the operator's key is." in text
    two.take(two.sign(two.export()))
    run("block", two.folder.path, "plant-1")
    for text in told(two.view()):
        assert f"{two.held().name}: 2 boards, 2 of them honest at least, no sum of fewer than 10" in text
        assert "1 board is to leave the membership list, which waits to be signed" in text
    here = Two(make_folder(tmp_path / "one", boards=0, task=SECURE), two.away)
    here.enrol("plant-1")
    for text in told(here.view()):
        assert "as in this fleet: operator.key" in text
    plain = Two(make_folder(tmp_path / "plain", boards=0), two.away)
    assert plain.view().sums is None
    assert all("nothing but sums" not in text for text in told(plain.view()))


def test_so_many_boards_are_out_that_no_sum_opens(two: Two) -> None:
    names = [f"plant-{number:02}" for number in range(10)]
    two.enrol(*names)
    two.take(two.sign(two.export()))
    words = "no sum opens until one is signed"
    assert all(words not in text for text in told(two.view()))
    run("block", two.folder.path, names[0])
    assert all(words in text for text in told(two.view())), "nine are fewer than the ten that a sum needs"


def test_a_committee_of_a_large_membership_list_has_few_of_the_boards_that_are_out() -> None:
    """Eleven of a thousand are about one of a committee's 96 members, of whom ten may be missing."""
    keys = {f"plant-{number:04}": number.to_bytes(32, "big") for number in range(1000)}
    holds = MembershipList.of(keys)

    def found(out: int) -> list[str]:
        left = MembershipList.of(dict(list(keys.items())[out:]))
        return [problem.what for problem in _problems(holds, MembershipListChanges.between(holds, left))]

    waits = "boards are to leave the membership list, which waits to be signed"
    assert found(0) == []
    assert (found(11), found(100)) == ([f"11 {waits}"], [f"100 {waits}"])
    assert "no sum opens until one is signed" in found(110)[1]


def test_boards_enrol_and_the_service_works_without_the_operators_key(
    two: Two, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With real brokers. The list waits, and the service's log says so."""
    caplog.set_level(logging.WARNING, "hushfleet.fleet")
    with FleetRegistry(two.folder.path) as registry:
        registry.add([boards.Board("plant-1", "generic-x86")])
    with served(two.folder):
        board = Board(two.folder, tmp_path / "board", "plant-1")
        assert board.enrol()
        link = board.link(board.topics.fleet("plant-1"))
        event_of(link, LinkUp)
        link.close()
        until(lambda: "1 board waits for a signed membership list" in caplog.text)
        assert not two.folder.membership_list.exists()
        two.take(two.sign(two.export()))
        assert two.held().key(0) == board.store.identity.public_key
        assert board.config.roster_key == load(two.key).public_key
