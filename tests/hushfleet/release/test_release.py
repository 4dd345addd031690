"""Releases: what was packed comes out again, and nothing else does."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.errors import BadInput, BadSignature, Malformed, OtherVersion, StoreFull, TooLarge, WireError
from hushfleet.release import archive
from hushfleet.release.archive import pack, place, read_head, unpack
from hushfleet.release.manifest import HEAD_CAP, MOST_SIGNATURES, Manifest, SignedManifest, this_platform
from hushfleet.wire.format.fleet_messages import MAX_MANIFEST_BYTES
from hushfleet.wire.format.identity import Identity
from support.releases import trust_in

KEY = Identity.from_bytes(bytes(range(32)))
PUBLIC = KEY.public_key
TRUST = trust_in(PUBLIC.hex())
PYTHON, ARCH = this_platform()
MANIFEST = Manifest(
    version="0.3.1",
    python="cp313",
    arch="aarch64",
    oldest_store=1,
    store=3,
    downgrade_from=("0.4.0",),
    downgrade_serial=1790000000,
    wheels={"numpy-2.4.6-cp313-cp313-manylinux_2_27_aarch64.whl": "cd" * 32},
    payload_sha256="ab" * 32,
    payload_bytes=5,
    unpacked_bytes=7,
    entries=2,
)
PLAIN = {**vars(MANIFEST), "downgrade_from": ["0.4.0"]}  # as JSON has it


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
        **PLAIN,
        "downgrade_from": (),
        "downgrade_serial": 0,
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
    assert head[:8] == b"HR\x02\x00" + (len(head) - 8 - 97).to_bytes(4, "big")
    assert json.loads(head[8:-97]) == PLAIN
    assert head[-97:-64] == b"\x01" + PUBLIC
    assert hashlib.sha256(head).hexdigest() == "e5ede096907bc554864669eb27be6e3972184e5f830d77aec847ecc5a6164f64"
    assert SignedManifest.from_bytes(head).verify([PUBLIC.hex()]) == MANIFEST


def test_a_head_fits_into_an_offer() -> None:
    assert HEAD_CAP <= MAX_MANIFEST_BYTES


def test_several_keys_sign_one_head_each_elsewhere() -> None:
    keys = [Identity.from_bytes(bytes([number]) * 32) for number in range(MOST_SIGNATURES + 1)]
    trusted = [key.public_key.hex() for key in keys[:3]]
    here = SignedManifest.sign(MANIFEST, keys[2])
    there = SignedManifest.from_bytes(here.to_bytes()).also_signed(keys[0])
    assert there.to_bytes() == SignedManifest.sign(MANIFEST, *keys[0:3:2]).to_bytes(), "whoever signs first"
    assert SignedManifest.from_bytes(there.to_bytes()).verify(trusted, threshold=2) == MANIFEST
    for head in (here, here.also_signed(keys[2]), here.also_signed(keys[5])):  # alone; again; with a stranger
        with pytest.raises(BadSignature, match=r"by 2 of the keys .*: 1 have signed"):
            head.verify(trusted, threshold=2)
    with pytest.raises(BadSignature, match="by 2 of the keys"):
        there.verify([trusted[0], trusted[0].upper(), "", "no key"], threshold=2)  # one key, named twice
    copied = replace(there, signatures={keys[0].public_key: there.signatures[keys[2].public_key]})
    with pytest.raises(BadSignature, match="by any key"):
        copied.verify(trusted)
    with pytest.raises(BadSignature, match="by any key"):
        here.verify([], threshold=0)
    with pytest.raises(TooLarge, match="at most 8 signatures"):
        SignedManifest.sign(MANIFEST, *keys)


def test_signatures_have_one_order_and_each_key_once() -> None:
    one, two = sorted([KEY, Identity.from_bytes(bytes(32))], key=lambda key: key.public_key)
    head = SignedManifest.sign(MANIFEST, one, two).to_bytes()
    first, second = head[-192:-96], head[-96:]
    for changed in (second + first, first + first):
        with pytest.raises(Malformed, match="order of their keys"):
            SignedManifest.from_bytes(head[:-192] + changed)
    for count in (b"\x09", b"\xff"):
        with pytest.raises(Malformed, match="0 to 8 signatures"):
            SignedManifest.from_bytes(head[:-193] + count + head[-192:])
    with pytest.raises(Malformed, match="lengths"):
        SignedManifest.from_bytes(head[:-193] + b"\x01" + head[-192:])


def test_same_folder_gives_the_same_bytes(tmp_path: Path, release: Path) -> None:
    again = tmp_path / "again.hfr"
    os.utime(tmp_path / "folder" / "package" / "__init__.py", (1, 1))
    pack(tmp_path / "folder", again, key=KEY, version="1.2.0", python=PYTHON, arch=ARCH, oldest_store=1, store=3)
    assert again.read_bytes() == release.read_bytes()


def test_placed_as_packed_with_caches(tmp_path: Path, release: Path) -> None:
    manifest = place(release, tmp_path / "releases", trust=TRUST)
    whole = tmp_path / "releases" / "1.2.0"
    assert manifest.version == "1.2.0"
    assert (whole / "package" / "data" / "größe.bin").read_bytes() == bytes(3000)
    assert list((whole / "package" / "__pycache__").glob("__init__.*.pyc"))
    assert place(release, tmp_path / "releases", trust=None) == manifest  # again: nothing to do
    assert [path.name for path in (tmp_path / "releases").iterdir()] == ["1.2.0"]


@pytest.mark.parametrize("at", [0, 3, 4, 20, -40000, -1])
def test_any_changed_byte_is_found(tmp_path: Path, release: Path, at: int) -> None:
    data = bytearray(release.read_bytes())
    data[max(at, -len(data) + 300)] ^= 1
    release.write_bytes(data)
    with pytest.raises(WireError):
        place(release, tmp_path / "releases", trust=TRUST)
    assert not list((tmp_path / "releases").iterdir())


@pytest.mark.parametrize("change", [b"", b"more"])
def test_truncated_or_longer(tmp_path: Path, release: Path, change: bytes) -> None:
    data = release.read_bytes()
    release.write_bytes(data + change if change else data[:-5])
    with pytest.raises(Malformed, match="payload"):
        place(release, tmp_path / "releases", trust=TRUST)


def test_another_key_or_platform_is_refused(tmp_path: Path, release: Path) -> None:
    with pytest.raises(BadSignature, match="not signed by any key"):
        place(release, tmp_path / "releases", trust=trust_in(Identity.generate().public_key.hex()))
    with pytest.raises(BadInput, match="cp27 on"):
        place(forged(tmp_path, [], python="cp27"), tmp_path / "releases", trust=TRUST)


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
        place(forged(tmp_path, entries), tmp_path / "releases", trust=TRUST)
    assert not (tmp_path / "releases" / "0.3.1").exists()
    assert not (tmp_path / "evil").exists()


def test_bomb_is_stopped_at_what_the_manifest_says(tmp_path: Path) -> None:
    bomb = forged(tmp_path, [entry("a"), entry("b")], unpacked_bytes=7)
    with pytest.raises(TooLarge, match="more than the 7 bytes"):
        place(bomb, tmp_path / "releases", trust=TRUST)


def test_a_size_below_zero_gives_no_room_to_the_next_entry(tmp_path: Path) -> None:
    small, large = tarfile.TarInfo("a"), tarfile.TarInfo("b")
    small.size, large.size = -(1 << 20), 1000
    header = bytearray(small.tobuf(tarfile.GNU_FORMAT))
    assert tarfile.TarInfo.frombuf(header, "utf-8", "strict").size < 0
    payload = lzma.compress(bytes(header) + large.tobuf(tarfile.USTAR_FORMAT) + bytes(2048))
    with pytest.raises(Malformed, match="'a' is neither"):
        unpack(io.BytesIO(payload), replace(MANIFEST, unpacked_bytes=100), tmp_path / "folder")


@pytest.mark.parametrize("cut", [0, 100, 512, 600, 700, 1024, 1100])
def test_an_archive_that_ends_early_is_refused(tmp_path: Path, cut: int) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        file = tarfile.TarInfo("a")
        file.size = 600
        tar.addfile(file, io.BytesIO(bytes(600)))
    manifest = replace(MANIFEST, unpacked_bytes=1000)
    unpack(io.BytesIO(lzma.compress(plain.getvalue())), manifest, tmp_path / "whole")
    assert (tmp_path / "whole" / "a").read_bytes() == bytes(600)
    with pytest.raises(Malformed, match="cannot be unpacked"):
        unpack(io.BytesIO(lzma.compress(plain.getvalue()[:cut])), manifest, tmp_path / "cut")
    with pytest.raises(Malformed, match="cannot be unpacked: it is cut off"):
        unpack(io.BytesIO(lzma.compress(plain.getvalue())[: 60 + cut // 100]), manifest, tmp_path / "cut xz")


def test_mode_bits_of_the_archive_do_not_count(tmp_path: Path) -> None:
    place(forged(tmp_path, [entry("tool")]), tmp_path / "releases", trust=TRUST)
    assert (tmp_path / "releases" / "0.3.1" / "tool").stat().st_mode & 0o7777 == 0o644


def test_no_room_says_how_much_is_needed(tmp_path: Path, release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StoreFull, match="needs"):
        place(release, tmp_path / "releases", trust=TRUST)


def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path, release: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(release)
    for name in ("pipe", "link", "missing"):
        with pytest.raises(BadInput):
            place(tmp_path / name, tmp_path / "releases", trust=TRUST)
    with pytest.raises(BadInput, match="link"):
        pack(tmp_path, tmp_path / "x.hfr", key=KEY, version="1", python=PYTHON, arch=ARCH, oldest_store=1, store=1)


@pytest.mark.parametrize("name", ["x" * 101, "a\nb", "a\\b"])
def test_a_path_that_no_board_would_unpack_is_not_packed(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name).touch()
    with pytest.raises(BadInput, match="is not allowed in a release"):
        pack(tmp_path / "folder", tmp_path / "x", key=KEY, version="1.0", python="a", arch="a", oldest_store=1, store=1)


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
        ("downgrade_from", True),
        ("downgrade_from", "0.4.0"),
        ("downgrade_from", ["0.4.0", 1]),
        ("downgrade_from", ["0.4.0"] * 33),
        ("downgrade_from", []),
        ("downgrade_serial", 0),
        ("downgrade_serial", True),
        ("downgrade_serial", 2**53),
        ("wheels", ["numpy.whl"]),
        ("wheels", {"../numpy.whl": "cd" * 32}),
        ("wheels", {"numpy.whl": "cd"}),
        ("payload_sha256", "AB" * 32),
        ("payload_bytes", 2**28 + 1),
        ("entries", 1.5),
    ],
)
def test_manifest_values_are_checked(name: str, value: object) -> None:
    content = {**PLAIN, name: value}
    with pytest.raises(Malformed, match=name):
        Manifest.from_bytes(json.dumps(content).encode())


def test_manifest_keys_are_checked() -> None:
    for content in ({**PLAIN, "extra": 1}, {"version": "1.0"}, [], 5):
        with pytest.raises(Malformed, match="keys"):
            Manifest.from_bytes(json.dumps(content).encode())


def test_head_of_another_format_is_named() -> None:
    """Format 1 was that of 0.3.0; a board with slots.pyz of 0.3.0 says the same of format 2."""
    head = SignedManifest.sign(MANIFEST, KEY).to_bytes()
    with pytest.raises(OtherVersion, match=r"format 1; this software reads format 2.*write a new card"):
        SignedManifest.from_bytes(head[:2] + b"\x01" + head[3:])
    with pytest.raises(TooLarge):
        SignedManifest.from_bytes(head[:4] + b"\xff" * 4 + head[8:])


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: b"HR\x02\x00\x00\x00" + tail))
def test_random_heads_are_refused_in_words(data: bytes) -> None:
    with pytest.raises(WireError):
        SignedManifest.from_bytes(data)
    with pytest.raises(WireError):
        read_head(io.BytesIO(data))


def test_versions_compare_as_numbers() -> None:
    orders = [replace(MANIFEST, version=version).order for version in ("0.3", "0.3.0.1", "0.3.9", "0.3.10", "1.0")]
    assert orders == sorted(orders)
    assert replace(MANIFEST, version="0.3").order == replace(MANIFEST, version="0.3.0.0").order


@pytest.mark.parametrize(("machine", "named"), [("aarch64", "armv8l"), ("x86_64", "i686"), ("armv7l", "armv7l")])
def test_a_32_bit_system_on_a_64_bit_kernel_is_named_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch, machine: str, named: str
) -> None:
    monkeypatch.setattr("hushfleet.release.manifest.platform.machine", lambda: machine)
    assert this_platform()[1] == machine
    monkeypatch.setattr("hushfleet.release.manifest.sys.maxsize", 2**31 - 1)
    assert this_platform()[1] == named
    with pytest.raises(BadInput, match="32-bit system" if machine != named else "here is"):
        MANIFEST.require_platform("cp313", this_platform()[1])
