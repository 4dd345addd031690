"""A board's charges on its boot partition: a store that was put back with its whole file system stops at its start."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hushfleet.edge_client.board.config import DeviceConfig, FleetSection
from hushfleet.edge_client.fleet.client_files import ChargeLine
from hushfleet.edge_client.fleet.second_place import SecondPlace
from hushfleet.edge_client.fleet.slots import Slots
from hushfleet.edge_client.status import format_status, status
from hushfleet.edge_client.storage.state_files import CHARGED
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import CopiedStore
from hushfleet.firmware_profiles.cards.seed import slots_archive
from hushfleet.privacy.charge import Charge
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.identity import Identity
from support.edge import DEVICE
from support.slots import ReleaseBoard

KEY = Identity.generate().public_key.hex()
CHARGE = Charge("record", "add-or-remove", "gaussian", 2.0)


class Card(ReleaseBoard):
    """A board with slots, a store and a boot partition. `client` and `root` do what the units start."""

    def __init__(self, home: Path, config: DeviceConfig) -> None:
        self.boot = home / "boot/hushfleet"
        self.boot.mkdir(parents=True)
        super().__init__(home, boot=self.boot)
        self.fleet = FleetSection(KEY, "mqtts://localhost:1", releases=str(self.root))
        device = replace(config.device, state_dir=str(self.state))
        self.config = replace(config, device=device, simulation=None, fleet=self.fleet)

    def start(self, *, rounds: int = 0) -> None:
        """A start of the client, which takes part in this many more rounds; the timer looks once afterwards."""
        self.slots.begin()
        with DeviceStore(self.config.store_path, device=DEVICE) as store:
            second = SecondPlace(self.fleet, store, now=0.0)
            second.check()
            for _ in range(rounds):
                with store._transaction("charge"):
                    round = store.ledger.count + 1
                    store.ledger.charge(CHARGE, task="a", round=round, payload_digest=bytes(32))
            second.advance(LocalHub().link(DEVICE, None), 0.0, busy=False)
        self.slots.check()

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.state.iterdir() if path.is_file()}

    def put_back(self, files: dict[Path, bytes]) -> None:
        for path in self.files():
            path.unlink()
        for path, data in files.items():
            path.write_bytes(data)

    def said(self) -> str:
        with DeviceStore(self.config.store_path, device=DEVICE, inspect=True) as store:
            return "\n".join(format_status(status(self.config, store)))


@pytest.fixture
def card(tmp_path: Path, config: DeviceConfig) -> Card:
    return Card(tmp_path, config)


def test_an_older_state_stops_at_its_start_and_nothing_lowers_the_number(card: Card) -> None:
    card.start(rounds=1)
    old = card.files()
    card.start(rounds=2)
    card.start()
    line = ChargeLine.read(card.boot)
    assert line is not None
    assert (line.rounds, line.weight) == (3, 0.75)
    card.put_back(old)
    card.slots.check()
    assert ChargeLine.read(card.boot) == line, "the older file of the client replaces nothing"
    with pytest.raises(
        CopiedStore, match=r"this board's key has charged 3 rounds, with the sum 0.75, and this store has 1"
    ):
        card.start()
    with pytest.raises(CopiedStore, match="boot partition"):
        card.start()


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "empty"])
def test_a_line_that_the_boot_partition_lost_is_no_stop_and_is_told(card: Card, damage: str) -> None:
    card.start(rounds=2)
    assert "boot partition" not in card.said(), "of a new card"
    file = card.boot / CHARGED
    text = file.read_text()
    if damage == "missing":
        file.unlink()
    else:
        file.write_text({"cut": text[:70], "changed": text.replace(" 2 ", " 9 "), "empty": ""}[damage])
    card.slots.begin()
    assert "the boot partition had no readable number of charges" in card.said()
    card.start()
    assert file.read_text() == text, "written anew"
    card.start()
    assert "boot partition" not in card.said()


def test_the_line_of_another_store_is_ignored_and_replaced(card: Card) -> None:
    (card.boot / CHARGED).write_text(ChargeLine(KEY, 99, 99.0).text)
    card.start(rounds=1)
    line = ChargeLine.read(card.boot)
    assert line is not None
    assert line.rounds == 1


def test_the_boot_partition_is_written_once_a_round(card: Card) -> None:
    card.start(rounds=1)
    file = card.boot / CHARGED
    before = file.stat().st_mtime_ns, file.stat().st_ino
    card.start()
    card.slots.check()
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == before
    card.start(rounds=1)
    assert file.stat().st_ino != before[1] or file.stat().st_mtime_ns != before[0]


def test_a_board_without_a_boot_partition_needs_none(card: Card) -> None:
    card.slots = Slots(card.root, card.state)
    card.start(rounds=2)
    assert not (card.boot / CHARGED).exists()
    assert not (card.root / CHARGED).exists()
    assert "boot partition" not in card.said()


def test_a_boot_partition_that_cannot_be_written_ends_nothing(card: Card, capsys: pytest.CaptureFixture[str]) -> None:
    (card.boot / f"{CHARGED}.part").mkdir()
    card.start(rounds=1)
    assert "charged.txt" in capsys.readouterr().err


def test_the_archive_outside_of_releases_does_it_alone(card: Card, tmp_path: Path) -> None:
    card.start(rounds=1)
    (card.boot / CHARGED).unlink()
    (tmp_path / "slots.pyz").write_bytes(slots_archive())
    for command in ("check", "begin"):
        places = ["--root", str(card.root), "--state", str(card.state), "--boot", str(card.boot)]
        subprocess.run([sys.executable, "-I", str(tmp_path / "slots.pyz"), command, *places], check=True)
    assert (card.boot / CHARGED).read_text() == (card.root / CHARGED).read_text() == (card.state / CHARGED).read_text()
