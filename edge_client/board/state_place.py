"""Finds out whether a board's state directory is forgotten at each start: its ledger would then begin anew each time.

A file system in memory is lost without power, and so is what an overlay writes where the system is read only, as with
`raspi-config`. A container's overlay is another: it stays until somebody removes the container.
"""

from __future__ import annotations

import contextlib
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


class VolatilePlace(NamedTuple):
    """Describes why a state directory may be forgotten.

    :param words: empty if it lasts.
    :param refused: whether no client may start with it, unless its owner allows it.
    """

    words: str = ""
    refused: bool = False


def volatile_place(config: DeviceConfig, *, root: Path = Path("/")) -> VolatilePlace:
    """Returns what is wrong with the place of the state directory; nothing is in a simulation.

    :param root: where the system's files are; another folder in tests.
    """
    mount = None
    if config.simulation is None:
        with contextlib.suppress(OSError):
            mountinfo = (root / "proc/self/mountinfo").read_text("utf-8", "surrogateescape")
            mount = mount_of(os.path.realpath(config.device.state_dir), mountinfo)
    if mount is None or not (mount.kind in IN_MEMORY or mount.kind.startswith(OVERLAY)):
        return VolatilePlace()
    if mount.kind not in IN_MEMORY and _in_container(root):
        return VolatilePlace(
            f"the state directory lies on the {mount.kind} of a container: whoever removes the container loses the "
            "ledger. Mount a volume there"
        )
    return VolatilePlace(
        f"the state directory lies on {mount.point}, a file system of the type {mount.kind} that may forget at each "
        "start what was written: the board would spend its budget again after each. Turn the overlay off "
        "(raspi-config, Performance Options, Overlay File System), or put the state directory on a partition of its "
        "own",
        refused=True,
    )


def check_place(config: DeviceConfig, *, root: Path = Path("/")) -> str:
    """Returns a warning, or an empty text. Raises `BadInput` if the state would be forgotten and the owner has not
    allowed it."""
    words, refused = volatile_place(config, root=root)
    if refused and not config.device.allow_volatile_state:
        raise BadInput(f"{words}. For tests only: device.allow_volatile_state = true")
    return words


def _in_container(root: Path) -> bool:
    environment = b""
    with contextlib.suppress(OSError):
        environment = (root / "proc/1/environ").read_bytes()
    marks = [(root / name).exists() for name in (".dockerenv", "run/.containerenv")]
    return any(marks) or any(each.startswith(b"container=") for each in environment.split(b"\0"))
