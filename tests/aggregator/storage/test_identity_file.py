"""The aggregator's key outlives a run, is secret, and is never replaced."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hushfleet.aggregator.storage.identity_file import default_path, load_or_create, next_epoch
from hushfleet.errors import BadInput, StoreError


def test_the_key_is_made_once_and_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.key"
    first = load_or_create(path)
    assert load_or_create(path).public_key == first.public_key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["a.key"]


def test_starting_at_once_ends_in_one_key(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    script = "import sys; from pathlib import Path; "
    script += "from hushfleet.aggregator.storage.identity_file import load_or_create as l; "
    script += "print(l(Path(sys.argv[1])).public_key.hex())"

    def start(_: int) -> str:
        return subprocess.run(
            [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
        ).stdout.strip()

    with ThreadPoolExecutor(4) as pool:
        keys = set(pool.map(start, range(4)))
    assert keys == {load_or_create(path).public_key.hex()}


def test_a_damaged_key_is_reported_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    path.write_bytes(b"short")
    with pytest.raises(BadInput, match="32 bytes, not 5"):
        load_or_create(path)
    assert path.read_bytes() == b"short"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/a\.key"):
        load_or_create(tmp_path / "file" / "a.key")


def test_each_federation_has_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_path("orchard") == tmp_path / "hushfleet" / "orchard.key"
    assert default_path("orchard") != default_path("default")


def test_each_start_of_a_key_has_a_higher_number_than_all_before(tmp_path: Path) -> None:
    path, counter = tmp_path / "a.key", tmp_path / "a.key.epoch"
    assert next_epoch(path, clock=lambda: 1000.7) == 1000
    assert next_epoch(path, clock=lambda: 1000.7) == 1001
    assert next_epoch(path, clock=lambda: 5.0) == 1002  # the clock went back
    assert next_epoch(path, clock=lambda: 9e9) == 9_000_000_000  # it is years ahead
    assert next_epoch(path, clock=lambda: 2000.0) == 9_000_000_001
    assert counter.stat().st_mode & 0o777 == 0o600
    counter.write_text("4000")  # what a person wrote, as the board's log advises
    assert next_epoch(path, clock=lambda: 2000.0) == 4001
    for lost in (b"", b"\xff\x00 damaged", b"9" * 40):
        counter.write_bytes(lost)
        assert next_epoch(path, clock=lambda: 5000.0) == 5000
    counter.unlink()
    assert next_epoch(path, clock=lambda: 6000.0) == 6000
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="counter of starts"):
        next_epoch(tmp_path / "file" / "a.key")
