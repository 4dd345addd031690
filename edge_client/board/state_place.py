"""Finds out whether a board's state directory is forgotten at each start: its ledger would then begin anew each time.

A file system in memory is lost without power, and so is what an overlay writes where the system is read only, as with
`raspi-config`. A container's overlay is another: it stays until somebody removes the container.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.errors import BadInput

IN_MEMORY = ("tmpfs", "ramfs")
OVERLAY = "overlay"
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo.

    :param point: where it is mounted.
    :param kind: the type of its file system.
    """

    point: str
    kind: str


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """Returns the mount that has `path`, which is absolute and without links; the last of several on one place."""
    found: Mount | None = None
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 6:
            continue
        point = _ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), fields[4])
        is_above = path == point or path.startswith(f"{point.rstrip('/')}/")
        if is_above and (found is None or len(point) >= len(found.point)):
            found = Mount(point, after.split(" ")[0])
    return found


class StatePlace(NamedTuple):
    """A state directory that may be forgotten.

    :param mount: the mount that it lies on.
    :param refused: whether no client may start with it, unless its owner allows it.
    """

    mount: Mount
    refused: bool

    @property
    def words(self) -> str:
        if not self.refused:
            return (
                f"the state directory lies on the {self.mount.kind} of a container: whoever removes the container "
                "loses the ledger. Mount a volume there"
            )
        return (
            f"the state directory lies on {self.mount.point}, a file system of the type {self.mount.kind} that may "
            "forget at each start what was written: the board would spend its budget again after each. Turn the "
            "overlay off (raspi-config, Performance Options, Overlay File System), or put the state directory on a "
            "partition of its own"
        )


def volatile_place(config: DeviceConfig, *, root: Path = Path("/")) -> StatePlace | None:
    """Returns where the state directory lies if it may be forgotten; None if it lasts, or in a simulation.

    :param root: where the system's files are; another folder in tests.
    """
    if config.simulation is not None:
        return None
    try:
        mountinfo = (root / "proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    except OSError:
        return None
    mount = mount_of(os.path.realpath(config.device.state_dir), mountinfo)
    if mount is None or not (mount.kind in IN_MEMORY or mount.kind.startswith(OVERLAY)):
        return None
    return StatePlace(mount, mount.kind in IN_MEMORY or not _in_container(root))


def check_place(config: DeviceConfig, *, root: Path = Path("/")) -> str:
    """Returns a warning, or an empty text. Raises `BadInput` if the state would be forgotten and the owner has not
    allowed it."""
    place = volatile_place(config, root=root)
    if place is None:
        return ""
    if place.refused and not config.device.allow_volatile_state:
        raise BadInput(f"{place.words}. For tests only: device.allow_volatile_state = true")
    return place.words


def _in_container(root: Path) -> bool:
    if any((root / name).exists() for name in (".dockerenv", "run/.containerenv")):
        return True
    try:
        environment = (root / "proc/1/environ").read_bytes()
    except OSError:
        return False
    return any(each.startswith(b"container=") for each in environment.split(b"\0"))
