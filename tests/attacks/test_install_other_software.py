"""Wanted: a board that runs the attacker's software.

Whoever has broken the broker, the aggregator or the fleet service can send a board what they like, and who has taken
over the client can put any file where `slots.py`, as root, looks for a release.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import tarfile
from pathlib import Path
from typing import BinaryIO

import pytest

from hushfleet.edge_client.fleet.slot_state import State
from hushfleet.edge_client.fleet.slots import Slots
from hushfleet.release import archive
from hushfleet.release.manifest import Manifest, SignedManifest, this_platform
from hushfleet.wire.format.identity import Identity
from support.slots import KEY, ReleaseBoard, pack_files, packed

STRANGER = Identity.generate()
PYTHON, ARCH = this_platform()


def around(entries: list[tarfile.TarInfo], *, unpacked: int = 1000, count: int = 10) -> bytes:
    """A release with the right signature around an archive that no honest builder writes."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for entry in entries:
            tar.addfile(entry, io.BytesIO(bytes(entry.size)))
    payload = lzma.compress(archive.getvalue())
    digest = hashlib.sha256(payload).hexdigest()
    manifest = Manifest("2.0", PYTHON, ARCH, 1, 3, (), 0, {}, digest, len(payload), unpacked, count)
    return SignedManifest.sign(manifest, KEY).to_bytes() + payload


def entry(name: str, *, size: int = 0, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.type, made.linkname = size, kind, target
    return made


@pytest.fixture
def slots(tmp_path: Path) -> Slots:
    return ReleaseBoard(tmp_path).slots


def offered(slots: Slots, tmp_path: Path, data: bytes) -> State:
    before = {path for path in tmp_path.rglob("*") if "incoming" not in path.parts}
    (tmp_path / "state" / "incoming" / "x.hfr").write_bytes(data)
    state = slots.install()
    after = {path for path in tmp_path.rglob("*") if "incoming" not in path.parts and not path.name.startswith(".")}
    assert state.trial is not None or after <= before | {tmp_path / "opt" / "slots.json"}, "nothing of it stays"
    return state


def test_what_another_key_has_signed(slots: Slots, tmp_path: Path) -> None:
    assert "not signed" in offered(slots, tmp_path, packed("2.0", STRANGER)).reason


def test_an_older_release_with_a_known_hole(slots: Slots, tmp_path: Path) -> None:
    assert "older" in offered(slots, tmp_path, packed("0.9")).reason
    wanted = packed("0.9", downgrade_from=("1.0",), downgrade_serial=1)
    assert offered(slots, tmp_path, wanted).trial == "0.9", "its signer wants that"


def test_a_release_with_other_content_or_cut_off(slots: Slots, tmp_path: Path) -> None:
    data = packed("2.0")
    for changed in (data[:-1], data + b"x", data[:-20] + bytes([data[-20] ^ 1]) + data[-19:], data[:50], b""):
        assert offered(slots, tmp_path, changed).outcome == "refused"
    for place in range(8, data.index(b"\xfd7zXZ"), 17):  # manifest and signature
        changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        assert offered(slots, tmp_path, changed).outcome == "refused"


@pytest.mark.parametrize(
    "entries",
    [
        [entry("../slots.json", size=5)],
        [entry("a/../../slots.json", size=5)],
        [entry("/etc/cron.d/x", size=5)],
        [entry("a", kind=tarfile.SYMTYPE, target="/etc"), entry("a/passwd", size=5)],
        [entry("a", kind=tarfile.LNKTYPE, target="../../release_keys")],
        [entry("a", kind=tarfile.FIFOTYPE)],
        [entry("a", kind=tarfile.BLKTYPE)],
        [entry("a", size=1 << 24)],
        [entry(f"a{i}", size=600) for i in range(5)],
        [entry(f"a{i}") for i in range(20)],
        [entry("a", size=1), entry("a", size=2)],
    ],
)
def test_an_archive_that_writes_elsewhere_or_without_end(
    entries: list[tarfile.TarInfo], slots: Slots, tmp_path: Path
) -> None:
    """Even with the release key's signature."""
    assert offered(slots, tmp_path, around(entries)).outcome == "refused"
    assert slots.begin().good == "1.0"


@pytest.mark.parametrize("after", ["read_head", "check_payload"])
def test_a_file_that_changes_after_it_was_checked(
    slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """The client owns the file that root checks and unpacks, and so can write another into it at any time."""
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "whole").write_text("evil")
    evil = pack_files(tmp_path / "evil", tmp_path / "evil.hfr", "2.0", STRANGER)
    path = tmp_path / "state" / "incoming" / "x.hfr"
    path.write_bytes(packed("2.0"))
    check = getattr(archive, after)

    def check_then_lose_the_race(file: BinaryIO, *arguments: Manifest) -> object:
        result = check(file, *arguments)
        at = path.read_bytes().index(b"\xfd7zXZ")
        with path.open("r+b") as same:  # as mapped by the client: the same file, and not another of its name
            same.seek(at)
            same.write(evil.read_bytes()[-evil.stat().st_size + evil.read_bytes().index(b"\xfd7zXZ") :])
            same.truncate()
        return result

    monkeypatch.setattr(archive, after, check_then_lose_the_race)
    assert slots.install().trial == "2.0"
    assert (tmp_path / "opt" / "releases" / "2.0" / "whole").read_text() == "2.0"


def test_a_link_in_place_of_the_release(slots: Slots, tmp_path: Path) -> None:
    """Whoever is the client may want root to read, or delete, another file."""
    secret = tmp_path / "shadow"
    secret.write_text("secret")
    (tmp_path / "state" / "incoming" / "x.hfr").symlink_to(secret)
    assert "secret" not in slots.install().reason
    os.rmdir(tmp_path / "state" / "incoming")
    (tmp_path / "state" / "incoming").symlink_to(tmp_path)
    assert slots.install().outcome == "refused"
    assert secret.read_text() == "secret"
    assert (tmp_path / "first.hfr").exists()
