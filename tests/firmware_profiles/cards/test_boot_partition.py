"""Boot partitions: found in images by their tables, read and written alike whether mounted or not."""

from __future__ import annotations

import contextlib
import errno
import io
import lzma
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet import progress
from hushfleet.errors import BadInput, HushfleetError, StoreFull
from hushfleet.firmware_profiles.cards import stock_image
from hushfleet.firmware_profiles.cards.boot_partition import BootPartition, ImageBoot, MountedBoot, require_room
from hushfleet.firmware_profiles.cards.stock_image import System, copy_sparse, read_partitions, read_system
from support.stock import SECTOR, TRIXIE, make_image, mbr, needs_mtools, put_root, read_back


@pytest.fixture(params=["mounted", 0, 512, 4096], ids=["mounted", "mbr", "gpt", "gpt of 4096-byte sectors"])
def boot(request: pytest.FixtureRequest, tmp_path: Path) -> BootPartition:
    if request.param == "mounted":
        mount = tmp_path / "bootfs"
        mount.mkdir()
        for name, text in TRIXIE.items():
            (mount / name).write_text(text)
        return MountedBoot(mount)
    return ImageBoot(make_image(tmp_path / "stock.img", gpt=request.param))


def files_of(boot: BootPartition, folder: Path) -> dict[str, bytes]:
    if isinstance(boot, ImageBoot):
        return read_back(boot.image, folder)
    assert isinstance(boot, MountedBoot)
    return {
        each.relative_to(boot.path).as_posix(): each.read_bytes() for each in boot.path.rglob("*") if each.is_file()
    }


@needs_mtools
def test_reads_and_writes(boot: BootPartition, tmp_path: Path) -> None:
    assert boot.names() == set(TRIXIE)
    assert boot.read("cmdline.txt") == TRIXIE["cmdline.txt"].encode()
    assert boot.read("missing") is None
    free = boot.free_bytes()
    assert free > 30 << 20
    folder = tmp_path / "folder"
    (folder / "hushfleet" / "deep").mkdir(parents=True)
    (folder / "hushfleet" / "deep" / "größe und Leerzeichen.toml").write_bytes(bytes(70000))
    (folder / "user-data").write_text("new")
    for _ in range(2):  # the second time replaces the first
        boot.write(folder, remove=["hushfleet"])
    assert boot.read("user-data") == b"new"
    assert files_of(boot, tmp_path / "first")["hushfleet/deep/größe und Leerzeichen.toml"] == bytes(70000)
    (folder / "hushfleet" / "deep" / "größe und Leerzeichen.toml").rename(folder / "hushfleet" / "other")
    boot.write(folder, remove=["hushfleet", "meta-data", "never-there"])
    assert "hushfleet/deep/größe und Leerzeichen.toml" not in files_of(boot, tmp_path / "second")
    assert boot.names() == {*TRIXIE, "hushfleet"} - {"meta-data"}


@needs_mtools
def test_no_room_is_said_before_anything_is_written(boot: BootPartition, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with (folder / "large").open("wb") as file:
        file.truncate(boot.free_bytes() + 1)
    with pytest.raises(BadInput, match="has room for"):
        require_room(boot, folder)


def test_devices_and_what_is_no_partition_are_refused(tmp_path: Path) -> None:
    for kind in (MountedBoot, ImageBoot):
        with pytest.raises(BadInput, match="hushfleet never writes to one"):
            kind(Path("/dev/null"))
        with pytest.raises(BadInput):
            kind(tmp_path / "missing")
    (tmp_path / "file.img").write_bytes(bytes(4096))
    with pytest.raises(BadInput, match="not a folder"):
        MountedBoot(tmp_path / "file.img")
    with pytest.raises(BadInput, match="no image"):
        ImageBoot(tmp_path)


@needs_mtools
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (bytes(4096), "no partition table"),
        (b"", "no partition table"),
        (mbr([(0x83, 512, 512)]) + bytes(512), "no FAT partition"),
        (mbr([(0x0C, 512, 51200)]) + bytes(512), "cut off"),
        (mbr([(0xEE, 512, 512)]) + bytes(4096), "is missing"),
        (mbr([(0xEE, 512, 512)]) + b"EFI PART" + bytes(64) + (2).to_bytes(8, "little") + b"\xff" * 8, "damaged"),
    ],
)
def test_images_without_a_boot_partition(tmp_path: Path, content: bytes, said: str) -> None:
    image = tmp_path / "a.img"
    image.write_bytes(content.ljust(1024 if content else 0, b"\0"))
    with pytest.raises(BadInput, match=said):
        ImageBoot(image)


@given(
    st.lists(st.tuples(st.sampled_from([0x0B, 0x0C, 0x83, 0xEF]), st.integers(1, 50), st.integers(1, 50)), max_size=4)
)
def test_any_mbr_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, table: list[tuple[int, int, int]]
) -> None:
    image = tmp_path_factory.mktemp("mbr") / "a.img"
    image.write_bytes(mbr([(kind, at * SECTOR, size * SECTOR) for kind, at, size in table]).ljust(101 * SECTOR, b"\0"))
    found = [(each.start, each.size, each.is_fat) for each in read_partitions(image)]
    assert found == [(at * SECTOR, size * SECTOR, kind != 0x83) for kind, at, size in table]


@given(st.binary(max_size=3000))
def test_random_tables_are_refused_in_words(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    image = tmp_path_factory.mktemp("random") / "a.img"
    image.write_bytes(mbr([(0xEE, 512, 512)]) + b"EFI PART" + data)
    with contextlib.suppress(BadInput):
        read_partitions(image)


def test_copies_take_no_room_for_zeros(tmp_path: Path) -> None:
    image, copy = tmp_path / "a.img", tmp_path / "b.img"
    with image.open("wb") as file:
        file.write(b"begin")
        file.seek(50 << 20)
        file.write(b"middle")
        file.truncate(100 << 20)
    copy_sparse(image, copy)
    assert os.path.getsize(copy) == 100 << 20
    assert copy.stat().st_blocks * 512 < 4 << 20
    with copy.open("rb") as file:
        assert file.read(5) == b"begin"
        file.seek(50 << 20)
        assert file.read(6) == b"middle"


def test_unpacking_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, works = os.urandom(3 << 20), []
    (tmp_path / "a.img.xz").write_bytes(lzma.compress(content, preset=0))

    @contextlib.contextmanager
    def watched(*words: Any, **more: Any) -> Iterator[progress.Work]:
        with progress.doing(*words, **more) as work:
            works.append(work)
            yield work

    monkeypatch.setattr(stock_image, "doing", watched)
    copy_sparse(tmp_path / "a.img.xz", tmp_path / "a.img")
    assert (tmp_path / "a.img").read_bytes() == content
    assert [(work.done, work.total) for work in works] == [(3, 3)]


def test_a_full_disk_is_told_with_what_was_written(tmp_path: Path) -> None:
    image, part = tmp_path / "a.img", tmp_path / "b.img.part"
    image.write_bytes(b"x" * 5000)
    part.symlink_to("/dev/full")
    with pytest.raises(StoreFull, match=r"b\.img cannot be written: No space left on device; free some space"):
        copy_sparse(image, tmp_path / "b.img")
    assert [path.name for path in tmp_path.iterdir()] == ["a.img"]


def test_an_image_that_cannot_be_read_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(io.BytesIO):
        def read(self, *_: object) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    image, opened = tmp_path / "a.img", Path.open
    image.touch()
    monkeypatch.setattr(Path, "open", lambda path, *how: Failing() if path == image else opened(path, *how))
    with pytest.raises(HushfleetError, match=r"a\.img cannot be copied to .*b\.img: Input/output error$") as told:
        copy_sparse(image, tmp_path / "b.img")
    assert not isinstance(told.value, StoreFull)
    assert [path.name for path in tmp_path.iterdir()] == ["a.img"]


def test_the_systems_own_files_are_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """The next call reads cmdline.txt again: without its root= the card would never start."""
    card, seed = tmp_path / "bootfs", tmp_path / "seed"
    card.mkdir()
    seed.mkdir()
    (card / "cmdline.txt").write_text("console=tty1 root=PARTUUID=9710ec8c-02 rootwait")
    (seed / "cmdline.txt").write_text("console=tty1 root=PARTUUID=9710ec8c-02 rootwait cgroup_enable=memory\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # as a card that is pulled out, or full
    try:
        with pytest.raises(HushfleetError, match=r"cmdline\.txt cannot be written"):
            MountedBoot(card).write(seed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (card / "cmdline.txt").read_text() == "console=tty1 root=PARTUUID=9710ec8c-02 rootwait"
    MountedBoot(card).write(seed)
    assert [path.name for path in card.iterdir()] == ["cmdline.txt"]
    assert (card / "cmdline.txt").read_text().endswith("cgroup_enable=memory\n")


@pytest.mark.parametrize(
    "content", [b"\xfd7zXZ\0" + bytes(50), lzma.compress(bytes(5000))[:50]], ids=["damaged", "cut off"]
)
def test_damaged_xz_is_named_and_leaves_nothing(content: bytes, tmp_path: Path) -> None:
    image = tmp_path / "a.img.xz"
    image.write_bytes(content)
    with pytest.raises(BadInput, match="cannot be unpacked"):
        copy_sparse(image, tmp_path / "b.img")
    assert [path.name for path in tmp_path.iterdir()] == ["a.img.xz"]


@needs_mtools
@pytest.mark.needs("e2fsprogs")
def test_system_is_read_from_the_root_partition(tmp_path: Path) -> None:
    image = make_image(tmp_path / "a.img")
    assert read_system(image) == System()
    names = ["bin/python3.9", "bin/python3.13", "bin/python3", "bin/cloud-init", "lib/aarch64-linux-gnu/libc.so"]
    put_root(image, *names)
    assert read_system(image) == System(("3.13", "3.9"), "aarch64", True)
    put_root(image, *names, files={"lib/os-release": 'NAME="Arch"\nPRETTY_NAME="Arch Linux ARM"\n'})
    assert read_system(image) == System(("3.13", "3.9"), "aarch64", True, "Arch Linux ARM")


@needs_mtools
@pytest.mark.needs("e2fsprogs")
def test_what_holds_no_system_with_python_is_named(tmp_path: Path) -> None:
    image = make_image(tmp_path / "a.img", gpt=4096)
    put_root(image, "bin/busybox")
    assert read_system(image) == System(foreign="its partitions hold ext4 without Python")
    with image.open("r+b") as file:
        file.seek(read_partitions(image)[1].start)
        file.write(b"hsqs".ljust(4096, b"\0"))
    assert read_system(image) == System(foreign="its partitions hold squashfs")
