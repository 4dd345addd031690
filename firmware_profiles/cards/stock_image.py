"""Reads a stock image's Python versions, architecture and cloud-init, without mounting its root partition.

It uses `debugfs` of e2fsprogs, which reads ext4 inside a file. Without it, nothing is known about an ext4 root, and the
board's profile is used.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hushfleet.firmware_profiles.cards.partition_table import read_partitions

_ARCHITECTURES = {"aarch64-linux-gnu": "aarch64", "arm-linux-gnueabihf": "armhf", "x86_64-linux-gnu": "x86_64"}
_MAGIC = {"squashfs": (0, b"hsqs"), "erofs": (1024, b"\xe2\xe1\xf5\xe0"), "ext4": (0x438, b"\x53\xef")}


@dataclass(frozen=True)
class System:
    """The system of an image.

    :param pythons: the installed versions, such as `3.13`, newest first; empty: not known.
    :param arch: as in `platform.machine()`.
    :param cloud_init: whether cloud-init is installed.
    :param name: its own name, such as `Debian GNU/Linux 13 (trixie)`.
    :param foreign: why the image cannot contain a system for the client; empty: it can.
    """

    pythons: Sequence[str] = ()
    arch: str | None = None
    cloud_init: bool = False
    name: str = ""
    foreign: str = ""


def read_system(image: Path) -> System:
    """Returns the system of the first root partition that has Python."""
    debugfs = shutil.which("debugfs") or shutil.which("debugfs", path="/usr/sbin:/sbin")
    kinds = []
    for partition in read_partitions(image):
        kind = "" if partition.is_fat else _file_system(image, partition.start)
        if kind == "ext4" and debugfs is None:
            return System()
        if kind == "ext4" and debugfs is not None:
            where = f"{image}?offset={partition.start}"
            programs, libraries = _names(debugfs, where, "/usr/bin"), _names(debugfs, where, "/usr/lib")
            found = [match.groups() for name in programs if (match := re.fullmatch(r"python(\d+)\.(\d+)", name))]
            if found:
                newest_first = sorted((tuple(map(int, numbers)) for numbers in found), reverse=True)
                release = _debugfs(debugfs, where, "cat /usr/lib/os-release")
                named = re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.MULTILINE)
                return System(
                    pythons=tuple(".".join(map(str, numbers)) for numbers in newest_first),
                    arch=next((arch for folder, arch in _ARCHITECTURES.items() if folder in libraries), None),
                    cloud_init="cloud-init" in programs,
                    name=named[1] if named else "",
                )
        kinds += [f"{kind} without Python" if kind == "ext4" else kind] if kind else []
    return System(foreign=f"its partitions hold {', '.join(dict.fromkeys(kinds))}" if kinds else "")


def _file_system(image: Path, start: int) -> str:
    """Returns the name of the file system if it is in `_MAGIC`; empty for another, or none."""
    with image.open("rb") as file:
        file.seek(start)
        head = file.read(2048)
    return next((name for name, (at, magic) in _MAGIC.items() if head[at : at + len(magic)] == magic), "")


def _names(debugfs: str, where: str, folder: str) -> set[str]:
    """Returns the names in a folder. `ls -p` prints /inode/mode/uid/gid/name/size/."""
    listed = _debugfs(debugfs, where, f"ls -p {folder}").splitlines()
    return {line.split("/")[5] for line in listed if line.count("/") > 5}


def _debugfs(debugfs: str, where: str, request: str) -> str:
    done = subprocess.run([debugfs, "-R", request, where], capture_output=True, check=False)
    return done.stdout.decode("utf-8", "replace")
