"""Releases: what was packed comes out again, and nothing else does."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.errors import BadInput, BadSignature, Malformed, OtherVersion, StoreFull, TooLarge, WireError
from hushfleet.release import Manifest, SignedManifest, archive, pack, place, read_head, this_platform

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
PYTHON, ARCH = this_platform()
MANIFEST = Manifest(
    version="0.3.1",
    python="cp313",
    arch="aarch64",
    oldest_store=1,
    store=3,
    downgrade=False,
    payload_sha256="ab" * 32,
    payload_bytes=5,
    unpacked_bytes=7,
    entries=2,
)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    (folder / "package" / "data").mkdir(parents=True)
    (folder / "package" / "__init__.py").write_text("ANSWER = 42\n")
    (folder / "package" / "data" / "größe.bin").write_bytes(bytes(3000))
    out = tmp_path / "a.hfr"
    pack(folder, out, key=KEY, version="1.2.0", python=PYTHON, arch=ARCH, oldest_store=1, store=3)
    return out


def forged(tmp_path: Path, entries: list[tarfile.TarInfo], **changes: object) -> Path:
    """A release that its own key has signed, with these entries; each plain file has 4 bytes."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:xz") as tar:
        for entry in entries:
            entry.size = 4 if entry.isreg() else 0
            tar.addfile(entry, io.BytesIO(b"evil"))
    data = stream.getvalue()
    content = {
        **vars(MANIFEST),
        "python": PYTHON,
        "arch": ARCH,
        "payload_bytes": len(data),
        "payload_sha256": hashlib.sha256(data).hexdigest(),
        "unpacked_bytes": 100,
        "entries": 10,
        **changes,
    }
    path = tmp_path / "forged.hfr"
    path.write_bytes(SignedManifest.sign(Manifest(**content), KEY).to_bytes() + data)
    return path


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, link, 0o7777
    return made


def test_head_has_golden_bytes() -> None:
    head = SignedManifest.sign(MANIFEST, KEY).to_bytes()
    assert head[:8] == b"HR\x01\x00" + (len(head) - 72).to_bytes(4, "big")
    assert json.loads(head[8:-64]) == vars(MANIFEST)
    assert hashlib.sha256(head).hexdigest() == "da6ab79a0bf1ce43ffb5de7b1ad2b3e793213ede29ca55cff52f823acad6ea9e"
    assert SignedManifest.from_bytes(head).verify(PUBLIC) == MANIFEST


def test_same_folder_gives_the_same_bytes(tmp_path: Path, release: Path) -> None:
    again = tmp_path / "again.hfr"
    os.utime(tmp_path / "folder" / "package" / "__init__.py", (1, 1))
    pack(tmp_path / "folder", again, key=KEY, version="1.2.0", python=PYTHON, arch=ARCH, oldest_store=1, store=3)
    assert again.read_bytes() == release.read_bytes()


def test_placed_as_packed_with_caches(tmp_path: Path, release: Path) -> None:
    manifest = place(release, tmp_path / "releases", keys=[PUBLIC.hex()])
    whole = tmp_path / "releases" / "1.2.0"
    assert manifest.version == "1.2.0"
    assert (whole / "package" / "data" / "größe.bin").read_bytes() == bytes(3000)
    assert list((whole / "package" / "__pycache__").glob("__init__.*.pyc"))
    assert place(release, tmp_path / "releases", keys=None) == manifest  # again: nothing to do
    assert [path.name for path in (tmp_path / "releases").iterdir()] == ["1.2.0"]


@pytest.mark.parametrize("at", [0, 3, 4, 20, -40000, -1])
def test_any_changed_byte_is_found(tmp_path: Path, release: Path, at: int) -> None:
    data = bytearray(release.read_bytes())
    data[max(at, -len(data) + 300)] ^= 1
    release.write_bytes(data)
    with pytest.raises(WireError):
        place(release, tmp_path / "releases", keys=[PUBLIC.hex()])
    assert not list((tmp_path / "releases").iterdir())


@pytest.mark.parametrize("change", [b"", b"more"])
def test_truncated_or_longer(tmp_path: Path, release: Path, change: bytes) -> None:
    data = release.read_bytes()
    release.write_bytes(data + change if change else data[:-5])
    with pytest.raises(Malformed, match="payload"):
        place(release, tmp_path / "releases", keys=[PUBLIC.hex()])


def test_another_key_or_platform_is_refused(tmp_path: Path, release: Path) -> None:
    with pytest.raises(BadSignature, match="not signed by any key"):
        place(release, tmp_path / "releases", keys=[bytes(32).hex()])
    with pytest.raises(BadInput, match="cp27 on"):
        place(forged(tmp_path, [], python="cp27"), tmp_path / "releases", keys=[PUBLIC.hex()])


@pytest.mark.parametrize(
    "entries",
    [
        [entry("../evil")],
        [entry("/etc/evil")],
        [entry("a", tarfile.DIRTYPE), entry("a/../../evil")],
        [entry("a//evil")],
        [entry("link", tarfile.SYMTYPE, "/etc"), entry("link/evil")],
        [entry("link", tarfile.LNKTYPE, "/etc/passwd")],
        [entry("pipe", tarfile.FIFOTYPE)],
        [entry("disk", tarfile.BLKTYPE)],
        [entry("twice"), entry("twice")],
        [entry("no-folder/evil")],
        [entry("x" * 300)],
        [entry(f"n{i}") for i in range(11)],
    ],
)
def test_hostile_entries_leave_nothing(tmp_path: Path, entries: list[tarfile.TarInfo]) -> None:
    with pytest.raises((Malformed, TooLarge)):
        place(forged(tmp_path, entries), tmp_path / "releases", keys=[PUBLIC.hex()])
    assert not (tmp_path / "releases" / "0.3.1").exists()
    assert not (tmp_path / "evil").exists()


def test_bomb_is_stopped_at_what_the_manifest_says(tmp_path: Path) -> None:
    bomb = forged(tmp_path, [entry("a"), entry("b")], unpacked_bytes=7)
    with pytest.raises(TooLarge, match="more than the 7 bytes"):
        place(bomb, tmp_path / "releases", keys=[PUBLIC.hex()])


def test_mode_bits_of_the_archive_do_not_count(tmp_path: Path) -> None:
    place(forged(tmp_path, [entry("tool")]), tmp_path / "releases", keys=[PUBLIC.hex()])
    assert (tmp_path / "releases" / "0.3.1" / "tool").stat().st_mode & 0o7777 == 0o644


def test_no_room_says_how_much_is_needed(tmp_path: Path, release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StoreFull, match="needs"):
        place(release, tmp_path / "releases", keys=[PUBLIC.hex()])


def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path, release: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(release)
    for name in ("pipe", "link", "missing"):
        with pytest.raises(BadInput):
            place(tmp_path / name, tmp_path / "releases", keys=[PUBLIC.hex()])
    with pytest.raises(BadInput, match="link"):
        pack(tmp_path, tmp_path / "x.hfr", key=KEY, version="1", python=PYTHON, arch=ARCH, oldest_store=1, store=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", "../evil"),
        ("version", "1"),
        ("version", "1.0-rc"),
        ("version", "1.0\n"),
        ("python", "cp3.13"),
        ("arch", 5),
        ("store", True),
        ("store", 0),
        ("oldest_store", 4),
        ("downgrade", 1),
        ("payload_sha256", "AB" * 32),
        ("payload_bytes", 2**28 + 1),
        ("entries", 1.5),
    ],
)
def test_manifest_values_are_checked(name: str, value: object) -> None:
    content = {**vars(MANIFEST), name: value}
    with pytest.raises(Malformed, match=name):
        Manifest.from_bytes(json.dumps(content).encode())


def test_manifest_keys_are_checked() -> None:
    for content in ({**vars(MANIFEST), "extra": 1}, {"version": "1.0"}, [], 5):
        with pytest.raises(Malformed, match="keys"):
            Manifest.from_bytes(json.dumps(content).encode())


def test_head_of_another_format_is_named() -> None:
    head = SignedManifest.sign(MANIFEST, KEY).to_bytes()
    with pytest.raises(OtherVersion, match="format 2"):
        SignedManifest.from_bytes(head[:2] + b"\x02" + head[3:])
    with pytest.raises(TooLarge):
        SignedManifest.from_bytes(head[:4] + b"\xff" * 4 + head[8:])


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: b"HR\x01\x00\x00\x00" + tail))
def test_random_heads_are_refused_in_words(data: bytes) -> None:
    with pytest.raises(WireError):
        SignedManifest.from_bytes(data)
    with pytest.raises(WireError):
        read_head(io.BytesIO(data))


def test_versions_compare_as_numbers() -> None:
    orders = [replace(MANIFEST, version=version).order for version in ("0.3", "0.3.0.1", "0.3.9", "0.3.10", "1.0")]
    assert orders == sorted(orders)
    assert replace(MANIFEST, version="0.3").order == replace(MANIFEST, version="0.3.0.0").order
