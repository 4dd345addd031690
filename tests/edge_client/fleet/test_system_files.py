"""What lies outside of every release is renewed, or stays: files that do not run, kills at every point, the order."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hushfleet.edge_client.fleet import slots as slots_module
from hushfleet.edge_client.fleet import system_files as module
from hushfleet.edge_client.fleet.slot_state import State
from hushfleet.edge_client.fleet.slots import STEADY_CHECKS, Slots
from hushfleet.edge_client.fleet.system_files import is_due, note, renew
from hushfleet.firmware_profiles.cards.seed import slots_archive, write_system
from hushfleet.wire.format.identity import Identity
from support.kill import KillPoints
from support.releases import ROOT
from support.slots import KEY, ReleaseBoard, pack_files

OLD = slots_archive()
UNIT = "[Unit]\nDescription=before\n[Service]\nExecStart=/bin/true\n"


def changed(text: str = "# another one\n", *, before: str = "") -> bytes:
    """`slots.pyz` of a later version, which runs `before` first."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(OLD)) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name == "__main__.py":
                data = f"{before}\n{text}".encode() + data
            target.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


class Board(ReleaseBoard):
    def __init__(self, folder: Path, new: bytes | None = None) -> None:
        super().__init__(folder)
        self.units, self.content = folder / "units", folder / "content"
        self.units.mkdir()
        self.content.mkdir()
        (self.content / "whole").write_text("whole")
        (self.root / "slots.pyz").write_bytes(OLD)
        (self.units / "hushfleet-check.timer").write_text(UNIT)
        write_system(self.content / "system")
        (self.root / "python").symlink_to(sys.executable)
        for unit in (self.content / "system" / "units").iterdir():
            unit.write_text(unit.read_text().replace("/opt/hushfleet", str(self.root)))
        (self.content / "system" / "slots.pyz").write_bytes(changed() if new is None else new)

    def packed(self, version: str, *keys: Identity, system: bool = False) -> Path:
        return pack_files(self.content, self.folder / f"{version}.hfr", version, *keys, system=system)

    def renew(self, version: str, *keys: Identity, system: bool = True) -> State:
        return self.install(self.packed(version, *keys, system=system).read_bytes())

    def run(self, command: str) -> State:
        """As the units do."""
        words = [sys.executable, "-I", str(self.root / "slots.pyz"), command, "--root", str(self.root)]
        words += ["--state", str(self.state), "--units", str(self.units)]
        environment = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"}
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return State(**json.loads(done.stdout))

    def prove_to_others(self) -> None:
        """As `prove_itself`, without what follows: renewing is still due."""
        self.prove("2.0")
        assert is_due(self.root, "2.0")

    def prove_itself(self) -> State:
        """The release on trial becomes good, as the units see to it."""
        self.run("begin")
        for _ in range(STEADY_CHECKS):
            self.healthy(str(self.slots.read().trial))
            self.run("check")
        return self.slots.read()


@pytest.fixture
def board(tmp_path: Path) -> Board:
    made = Board(tmp_path)
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/systemctl.log\n')
    (tmp_path / "systemctl").chmod(0o755)
    return made


def test_a_release_that_has_proved_itself_renews_slots_and_units(board: Board) -> None:
    assert board.renew("2.0", KEY, ROOT).trial == "2.0"
    board.run("begin")
    board.run("check")
    assert (board.root / "slots.pyz").read_bytes() == OLD, "on trial it changes nothing"
    assert board.prove_itself().good == "2.0"
    assert (board.root / "slots.pyz").read_bytes() == changed()
    assert (board.root / "slots.pyz").stat().st_mode & 0o777 == 0o755
    assert (board.units / "hushfleet-check.timer").read_text() != UNIT
    assert (board.units / "hushfleet-client.service").exists()
    assert (board.root / "before" / "slots.pyz").read_bytes() == OLD, "the way back"
    assert (board.root / "before" / "hushfleet-check.timer").read_text() == UNIT
    assert note(board.root) == {"release": "2.0", "refused": ""}
    assert (board.folder / "systemctl.log").read_text() == "daemon-reload\n", "once"
    assert board.run("back").good == "1.0"
    assert board.run("check").good == "1.0"
    assert (board.root / "slots.pyz").read_bytes() == changed(), "an older release does not bring back older files"


def test_a_release_that_does_not_say_so_renews_nothing(board: Board) -> None:
    """Else release keys alone would reach what runs as root: the folder is there, and root has signed nothing."""
    assert board.renew("2.0", KEY, system=False).trial == "2.0"
    board.prove_itself()
    assert (board.root / "slots.pyz").read_bytes() == OLD
    assert not is_due(board.root, "2.0")


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (b"", "cannot be tried"),
        (b"no program", "fails at `show`"),
        (changed("raise SystemExit('it does not start here')\n"), "it does not start here"),
        (changed(before="import a_module_that_is_not_here"), "a_module_that_is_not_here"),
        (changed(before="import sys\nif 'check' in sys.argv: raise SystemExit('no check')"), "no check"),
        (
            changed(before="import sys\nif 'begin' in sys.argv: print('{\"good\": \"2.0\"}'), sys.exit(0)"),
            "cannot be tried",
        ),
        (changed(before='print(\'{"good": "1.0"}\')\nraise SystemExit'), "another release is good"),
    ],
)
def test_a_new_slots_that_does_not_run_is_not_taken(tmp_path: Path, new: bytes, why: str) -> None:
    board = Board(tmp_path, new)
    board.renew("2.0", KEY, ROOT)
    assert board.prove_itself().good == "2.0"
    assert (board.root / "slots.pyz").read_bytes() == OLD
    assert (board.units / "hushfleet-check.timer").read_text() == UNIT
    assert why in note(board.root)["refused"]
    assert not list(board.root.glob(".rehearsal*"))
    assert not is_due(board.root, "2.0"), "it is not tried each minute"


@pytest.mark.needs("systemd")
def test_a_unit_that_systemd_refuses_is_not_taken(board: Board) -> None:
    (board.content / "system" / "units" / "hushfleet-client.service").write_text("[Service]\nUser=hushfleet\n")
    board.renew("2.0", KEY, ROOT)
    board.prove_itself()
    assert "systemd refuses a new unit" in note(board.root)["refused"]
    assert (board.root / "slots.pyz").read_bytes() == OLD


def test_a_card_s_own_release_changes_nothing(tmp_path: Path) -> None:
    """The card brought its slots.pyz and units, which may be newer than those in the release."""
    board = Board(tmp_path)
    other = Slots(tmp_path / "other", board.state)
    other.first(board.packed("2.0", KEY, ROOT, system=True))
    assert not is_due(tmp_path / "other", "2.0")


NAMED = {
    "a file is kept, or the note written": ("replace", ("write_whole",)),
    "a file is put in its place": (
        "replace",
        (
            "write_whole",
            "_put",
        ),
    ),
}


def test_killed_at_any_point_there_is_one_slots_that_runs_and_the_next_check_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module.os, "fsync", lambda *_: None)  # the machine lives on
    monkeypatch.setattr(slots_module.os, "sync", lambda: None)
    monkeypatch.setattr(module, "_rehearsed", lambda *_: _tried())  # it has tests of its own, and takes a second
    board = Board(tmp_path / "board")
    board.renew("2.0", KEY, ROOT)
    board.prove_to_others()
    points, result = (
        KillPoints(("edge_client/fleet", "hushfleet"), NAMED),
        tmp_path / "result",
    )
    at = tmp_path / "at"

    def fresh() -> None:
        shutil.rmtree(at, ignore_errors=True)
        shutil.copytree(board.folder, at, symlinks=True)

    def play() -> None:
        renew(at / "opt", "2.0", units=at / "units")

    fresh()
    labels = points.labels(play, result)
    for point, what in points.chosen(labels, spread=min(40, len(labels))).items():
        fresh()
        points.kill(play, point, result)
        assert (at / "opt" / "slots.pyz").read_bytes() in (OLD, changed()), what
        assert is_due(at / "opt", "2.0") or (at / "opt" / "slots.pyz").read_bytes() == changed(), what
        if is_due(at / "opt", "2.0"):
            play()
        assert (at / "opt" / "slots.pyz").read_bytes() == changed(), what
        assert (at / "opt" / "before" / "slots.pyz").read_bytes() in (OLD, changed()), what
        for unit in (board.content / "system" / "units").iterdir():
            assert (at / "units" / unit.name).read_bytes() == unit.read_bytes(), what


def _tried() -> str:
    return ""


def test_whatever_is_renamed_was_synced_before_and_its_folder_is_afterwards(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.renew("2.0", KEY, ROOT)
    board.prove_to_others()
    events: list[tuple[str, ...]] = []

    def noted(name: str) -> None:
        call = getattr(os, name)

        def wrapper(*arguments: int | Path) -> None:
            paths = [os.readlink(f"/proc/self/fd/{a}") if isinstance(a, int) else str(a) for a in arguments]
            events.append((name, *paths))
            call(*arguments)

        monkeypatch.setattr(slots_module.os, name, wrapper)

    for name in ("fsync", "replace"):
        noted(name)
    assert renew(board.root, "2.0", units=board.units)
    renamed = [at for at, event in enumerate(events) if event[0] == "replace"]
    assert {Path(events[at][2]).name for at in renamed} >= {"slots.pyz", "system.json", "hushfleet-check.timer"}
    assert Path(events[renamed[0]][2]) == board.root / "before" / "slots.pyz", "kept first"
    for at in renamed:
        _, source, target = events[at]
        assert events[at - 1] == ("fsync", source)
        assert events[at + 1] == ("fsync", str(Path(target).parent))
