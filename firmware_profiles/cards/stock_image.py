"""What a stock image runs: its Python and its architecture, read from its root partition without mounting it.

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
    """:param python: `3.13`, the newest that is installed; None: not known. :param arch: as `platform.machine()`."""

    python: str | None = None
    arch: str | None = None


def read_system(image: Path) -> System:
    """Of the first root partition that can be read; both values None where none can."""
    debugfs = shutil.which("debugfs") or shutil.which("debugfs", path="/usr/sbin:/sbin")
    if debugfs is None:
        return System()
    for partition in read_partitions(image):
        if not partition.is_fat:
            where = f"{image}?offset={partition.start}"
            programs = _names(debugfs, where, "/usr/bin")
            found = [tuple(map(int, match)) for match in re.findall(r"^python(\d+)\.(\d+)$", programs, re.M)]
            if found:
                libraries = set(_names(debugfs, where, "/usr/lib").split())
                arch = next((arch for folder, arch in _ARCHITECTURES.items() if folder in libraries), None)
                return System(".".join(map(str, max(found))), arch)
    return System()


def _names(debugfs: str, where: str, folder: str) -> str:
    """One a line. `ls -p` prints /inode/mode/uid/gid/name/size/."""
    done = subprocess.run([debugfs, "-R", f"ls -p {folder}", where], capture_output=True, check=False)
    listed = done.stdout.decode("utf-8", "replace").splitlines()
    return "\n".join(line.split("/")[5] for line in listed if line.count("/") > 5)
