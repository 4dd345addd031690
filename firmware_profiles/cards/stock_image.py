"""What a stock image runs: its Python, its architecture, cloud-init; read from its root partition without mounting it.

By `debugfs` of e2fsprogs, which reads ext4 inside of a file. Where it is missing, or the root is of another kind,
nothing is known, and the board's profile decides.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hushfleet.firmware_profiles.cards.partition_table import read_partitions

_ARCHITECTURES = {"aarch64-linux-gnu": "aarch64", "arm-linux-gnueabihf": "armhf", "x86_64-linux-gnu": "x86_64"}


@dataclass(frozen=True)
class System:
    """:param python: `3.13`, the newest that is installed; None: not known.
    :param arch: as `platform.machine()`.
    :param cloud_init: whether it is installed.
    """

    python: str | None = None
    arch: str | None = None
    cloud_init: bool = False


def read_system(image: Path) -> System:
    """Of the first root partition that can be read; nothing is known where none can."""
    debugfs = shutil.which("debugfs") or shutil.which("debugfs", path="/usr/sbin:/sbin")
    if debugfs is None:
        return System()
    for partition in read_partitions(image):
        if not partition.is_fat:
            where = f"{image}?offset={partition.start}"
            programs, libraries = _names(debugfs, where, "/usr/bin"), _names(debugfs, where, "/usr/lib")
            found = [match.groups() for name in programs if (match := re.fullmatch(r"python(\d+)\.(\d+)", name))]
            if found:
                newest = max(tuple(map(int, numbers)) for numbers in found)
                arch = next((arch for folder, arch in _ARCHITECTURES.items() if folder in libraries), None)
                return System(".".join(map(str, newest)), arch, "cloud-init" in programs)
    return System()


def _names(debugfs: str, where: str, folder: str) -> set[str]:
    """In a folder. `ls -p` prints /inode/mode/uid/gid/name/size/."""
    done = subprocess.run([debugfs, "-R", f"ls -p {folder}", where], capture_output=True, check=False)
    listed = done.stdout.decode("utf-8", "replace").splitlines()
    return {line.split("/")[5] for line in listed if line.count("/") > 5}
