"""The units that `fleet init` writes, judged by systemd itself where it is installed."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from hushfleet.aggregator.fleet.units import write_units
from support.desk import make_folder

KEYS = ("ca/ca.key", "operator.key")
OFFLINE = ("release.key", "release.key.old", "root.key", "wifi")  # commands alone read these


def test_only_the_fleet_service_sees_the_keys_of_authority_and_operator(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    texts = {file.name: file.read_text() for file in write_units(folder)}
    assert len(texts) == 4
    for name, text in texts.items():
        hidden = [key for key in KEYS if f"InaccessiblePaths=-{folder.path / key}\n" in text]
        assert hidden == ([] if name == "hushfleet-fleet.service" else list(KEYS))


def test_a_process_that_strangers_reach_sees_no_key_that_it_has_no_use_for(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    texts = {file.stem: file.read_text() for file in write_units(folder)}
    for name, hidden in {
        "hushfleet-fleet": ("aggregator/identity.key", "aggregator/cert.key", "broker/broker.key", *OFFLINE),
        "hushfleet-broker": ("aggregator", "service", *OFFLINE),
        "hushfleet-enrolment-broker": ("aggregator", "service", *OFFLINE),
        "hushfleet-aggregator": ("broker", "service", *OFFLINE),
    }.items():
        assert [key for key in hidden if f"InaccessiblePaths=-{folder.path / key}\n" not in texts[name]] == [], name


def test_the_aggregator_writes_neither_who_is_admitted_nor_by_whose_word(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    text = next(file.read_text() for file in write_units(folder) if file.stem == "hushfleet-aggregator")
    writes = [Path(line.partition("=")[2]) for line in text.splitlines() if line.startswith("ReadWritePaths=")]
    assert writes == [folder.path / name for name in ("aggregator", "runs", "cache")]
    assert "ProtectSystem=strict" in text, "all else is read-only"
    for file in (folder.admissions, folder.ca / "ca.pem", folder.membership_list):
        assert not any(file.is_relative_to(path) for path in writes)


def test_all_that_units_hide_is_there_before_a_service_starts(tmp_path: Path) -> None:
    """What is made later stays in sight of a service that runs."""
    folder = make_folder(tmp_path / "fleet")
    lines = [line for file in write_units(folder) for line in file.read_text().splitlines()]
    hidden = {line.partition("=-")[2] for line in lines if line.startswith("InaccessiblePaths=")}
    assert str(folder.path / "wifi") in hidden
    moved = folder.release_key.with_name("release.key.old")  # by `rotate`: what is hidden stays so when it is renamed
    assert [path for path in hidden if not Path(path).exists()] == [str(moved)]
    assert (folder.path / "wifi").stat().st_mode & 0o777 == 0o700


def test_a_folder_with_a_space_in_its_name_stays_one_word(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "my 100% fleet", boards=0)
    for file in write_units(folder):
        lines = [line for line in file.read_text().splitlines() if "fleet" in line and "/" in line]
        words = [word.replace("%%", "%") for line in lines for word in shlex.split(line.partition("=")[2])]
        named = [word for word in words if "my" in word]
        assert len(named) >= 5
        assert all(str(folder.path) in word for word in named)


@pytest.mark.needs("systemd")
def test_systemd_finds_no_fault_in_the_units_and_little_exposure(tmp_path: Path) -> None:
    for file in write_units(make_folder(tmp_path / "fleet")):
        judged = subprocess.run(
            ["systemd-analyze", "security", "--offline=yes", "--threshold=35", str(file)],
            capture_output=True,
            text=True,
        )
        assert judged.returncode == 0, f"{file.name}: {judged.stdout.splitlines()[-1:]} {judged.stderr}"
        checked = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True)
        ours = [line for line in checked.stderr.splitlines() if file.name in line]
        assert ours == []


def test_the_aggregator_writes_to_its_own_folders_alone(tmp_path: Path) -> None:
    """Else it could put a journal beside the registry, or a folder of its own in the place of the authority's."""
    folder = make_folder(tmp_path / "fleet")
    texts = {file.stem: file.read_text() for file in write_units(folder)}
    written = [line for line in texts["hushfleet-aggregator"].splitlines() if line.startswith("ReadWritePaths")]
    assert written == [f"ReadWritePaths={folder.path / name}" for name in ("aggregator", "runs", "cache")]
    assert all((folder.path / name).is_dir() for name in ("aggregator", "runs", "cache"))


def test_a_broker_is_started_again_however_it_ended(tmp_path: Path) -> None:
    """The signal to read its files again ends one that has just begun; to systemd that is a good end."""
    texts = {file.stem: file.read_text() for file in write_units(make_folder(tmp_path / "fleet"))}
    for name in ("hushfleet-broker", "hushfleet-enrolment-broker"):
        assert [line for line in texts[name].splitlines() if line.startswith("Restart=")][-1] == "Restart=always"
    assert "MemoryMax=256M" in texts["hushfleet-enrolment-broker"]
