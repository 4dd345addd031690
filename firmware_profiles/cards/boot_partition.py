"""Reads and writes the FAT partition from which a board starts: mounted, or inside an image file without root rights.

Inside an image, GNU mtools reads and writes it (`mcopy -i IMAGE@@OFFSET`). Block devices are refused, because a wrong
name would destroy a disk.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hushfleet.atomic_file import write_whole
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.firmware_profiles.cards.stock_image import read_partitions

_CLUSTER = 32 * 1024  # the largest FAT cluster: the most space that a small file takes


class BootPartition(Protocol):
    """The boot partition of a card."""

    def names(self) -> set[str]:
        """Returns the names of files and folders in the root, lower-case."""

    def read(self, name: str) -> bytes | None:
        """Reads a file of the root; returns None if there is none. The name is in lower case."""

    def free_bytes(self) -> int: ...

    def write(self, folder: Path, *, remove: Sequence[str] = ()) -> None:
        """Deletes files and folders of the root, then copies the content of `folder`, and replaces files."""


class MountedBoot:
    """A boot partition that the operating system has mounted. Raises `BadInput` for anything but a folder."""

    def __init__(self, path: Path) -> None:
        _refuse_devices(path)
        if not path.is_dir():
            raise BadInput(f"{path} is not a folder: name the place where the card's boot partition is mounted")
        self.path = path

    def names(self) -> set[str]:
        return {path.name.lower() for path in self.path.iterdir()}

    def read(self, name: str) -> bytes | None:
        return (self.path / name).read_bytes() if (self.path / name).is_file() else None

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    def write(self, folder: Path, *, remove: Sequence[str] = ()) -> None:
        try:
            for name in remove:
                target = self.path / name
                if target.is_dir():
                    shutil.rmtree(target)
                else:
                    target.unlink(missing_ok=True)
            # the root's files last, because they start everything else
            for path in sorted(folder.rglob("*"), key=lambda path: (path.parent == folder and path.is_file(), path)):
                target = self.path / path.relative_to(folder)
                if path.is_dir():
                    target.mkdir(exist_ok=True)
                else:  # the next call would use a truncated cmdline.txt as the system's own
                    write_whole(target, path.read_bytes(), durable=target.parent == self.path)
            os.sync()  # the card is pulled out next
        except OSError as error:
            raise HushfleetError(f"{self.path} cannot be written: {error.strerror}") from error


class ImageBoot:
    """The first FAT partition of an image file. Raises `BadInput` if there is none."""

    def __init__(self, image: Path) -> None:
        _refuse_devices(image)
        if not image.is_file():
            raise BadInput(f"there is no image {image}")
        if shutil.which("mcopy") is None:
            raise BadInput(
                "GNU mtools is needed to write into an image file: apt install mtools, or brew install mtools"
            )
        self.partition = next((each for each in read_partitions(image) if each.is_fat), None)
        if self.partition is None:
            raise BadInput(f"{image} has no FAT partition, so no boot partition that could be prepared")
        self.image = image

    def names(self) -> set[str]:
        listed = self._mtools("mdir", "-b", "::/").decode("utf-8", "replace").splitlines()
        return {line.rstrip("/").rpartition("/")[2].lower() for line in listed if line.strip()}

    def read(self, name: str) -> bytes | None:
        return self._mtools("mtype", f"::/{name}") if name in self.names() else None

    def free_bytes(self) -> int:
        said = re.search(rb"([\d ]+) bytes free", self._mtools("mdir", "::/"))
        return int(said[1].replace(b" ", b"")) if said else 0

    def write(self, folder: Path, *, remove: Sequence[str] = ()) -> None:
        for name in self.names() & set(remove):
            self._mtools("mdeltree", f"::/{name}")
        self._mtools("mcopy", "-s", "-o", "-m", *map(str, sorted(folder.iterdir())), "::/")

    def _mtools(self, command: str, *arguments: str) -> bytes:
        assert self.partition is not None
        where = f"{self.image}@@{self.partition.start}"
        environment = {**os.environ, "LC_ALL": "C.UTF-8", "MTOOLS_SKIP_CHECK": "1", "MTOOLSRC": os.devnull}
        done = subprocess.run([command, "-i", where, *arguments], capture_output=True, env=environment, check=False)
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise HushfleetError(f"{command} failed on {self.image}: {said[-1] if said else 'it gave no reason'}")
        return done.stdout


def require_room(boot: BootPartition, folder: Path) -> None:
    """Raises `BadInput` if the free space is too small for `folder`."""
    needed = sum(path.stat().st_size + _CLUSTER for path in folder.rglob("*"))
    free = boot.free_bytes()
    if needed > free:
        raise BadInput(f"the boot partition has room for {free >> 20} MiB and needs {-(-needed >> 20)} MiB more files")


def _refuse_devices(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise BadInput(f"{path} cannot be used: {error.strerror}") from error
    if stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
        raise BadInput(
            f"{path} is a device, and hushfleet never writes to one: write the stock image with rpi-imager or dd, then "
            "name the mounted boot partition with --boot, or prepare the image file with --image"
        )
