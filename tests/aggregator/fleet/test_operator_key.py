"""`fleet init --operator-key`: the key that signs who may take part in secure aggregation lies in the folder, or stays
elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from hushfleet.aggregator.fleet.trust import keys
from hushfleet.aggregator.fleet.trust.device_file import device_toml
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.identity_file import load_or_create
from hushfleet.edge_client.board.config import load_config
from hushfleet.errors import BadInput
from hushfleet.wire.format.identity import Identity
from support.command import hushfleet
from support.desk import TASK, make_folder


def init(folder: Path, *words: object) -> str:
    task = folder.with_name("task.toml")
    task.write_text(TASK)
    return hushfleet("fleet", "init", folder, "--broker-name", "broker.example", "--task", task, *words)


def told_to_boards(folder: FleetFolder, tmp_path: Path) -> tuple[bytes | None, bytes]:
    """The keys of operator and fleet service, as a card has them."""
    file = tmp_path / "device.toml"
    file.write_text(device_toml(folder, Board("plant-1", "generic-x86")))
    config = load_config(file)
    return config.roster_key, config.service_key


def test_by_default_it_is_in_the_folder_and_init_says_what_that_means(tmp_path: Path) -> None:
    said = init(tmp_path / "plant")
    folder = FleetFolder(tmp_path / "plant")
    key = keys.operator(folder)
    assert key is not None
    assert told_to_boards(folder, tmp_path) == (key.public_key, keys.service(folder).public_key)
    assert "no secure aggregation: server and broker see each board's update" in said
    assert "as in this fleet: operator.key" in said
    assert "to keep it elsewhere: hushfleet fleet init --help" in said


@pytest.mark.parametrize("given", ["FILE", "PUBLIC"])
def test_elsewhere_it_is_read_and_never_copied(tmp_path: Path, given: str) -> None:
    file = tmp_path / "safe" / "operator.key"
    key = load_or_create(file)
    said = init(tmp_path / "plant", "--operator-key", file if given == "FILE" else key.public_key.hex())
    folder = FleetFolder(tmp_path / "plant")
    assert keys.operator(folder) is None
    assert keys.operator_public(folder) == key.public_key
    assert told_to_boards(folder, tmp_path)[0] == key.public_key != keys.service(folder).public_key
    secret = key.to_bytes()
    for each in folder.path.rglob("*"):
        text = each.read_bytes() if each.is_file() else b""
        assert secret not in text, each
        assert secret.hex().encode() not in text, each
        assert str(file).encode() not in text, f"{each} says where the key is"
    assert file.read_bytes() == secret
    assert "operator.key" not in said.replace("--operator-key", "")
    assert "changes of the boards wait for it" in said


@pytest.mark.parametrize("wrong", ["ab" * 31, "missing.key", "."])
def test_what_is_no_key_makes_no_fleet(tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="is neither a file nor 64 hex digits"):
        init(tmp_path / "plant", "--operator-key", wrong)
    (tmp_path / "short.key").write_bytes(b"short")
    with pytest.raises(BadInput, match=r"short\.key: a private key has 32 bytes"):
        init(tmp_path / "plant", "--operator-key", tmp_path / "short.key")
    assert not (tmp_path / "plant").exists()


def test_a_key_that_boards_were_not_told_of_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "plant")
    folder.operator_key.write_bytes(Identity.generate().to_bytes())
    with pytest.raises(BadInput, match=r"is not the key of .*operator\.pub"):
        keys.operator(folder)
    folder.operator_key.unlink()
    assert keys.operator(folder) is None
    folder.operator_public.write_text("no key")
    with pytest.raises(BadInput, match="64 hex digits, not 'no key'"):
        keys.operator_public(folder)
    folder.operator_public.unlink()
    with pytest.raises(BadInput, match="write the operator's public key into it"):
        keys.operator_public(folder)


def test_a_fleet_that_an_earlier_version_made_goes_on(tmp_path: Path) -> None:
    """It has neither file, and its boards know one key."""
    folder = make_folder(tmp_path / "plant")
    folder.operator_public.unlink()
    folder.service_key.unlink()
    key = load_or_create(folder.operator_key)
    assert keys.operator_public(folder) == keys.service(folder).public_key == key.public_key
    assert told_to_boards(folder, tmp_path) == (key.public_key, key.public_key)
