"""What a card does, by ssh: for Jetsons, and for boards that run already.

The same folder that stands on a card's boot partition goes to the board, and the same `install.sh` runs there as root.
ssh asks for passwords and checks the host as it always does; nothing is kept on the board but what is installed.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hushfleet.errors import BadInput, HushfleetError
from hushfleet.firmware_profiles.cards.boot_partition import BootPartition, MountedBoot
from hushfleet.firmware_profiles.cards.seed import FOLDER, Card, stage

_LOOK = (
    "uname -m; id -u; "
    "for p in python3.13 python3.12 python3.11 python3.10 python3; do command -v $p > /dev/null 2>&1 && "
    "$p -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])' 2> /dev/null; done"
)
_RECEIVE = 'umask 077; d=$(mktemp -d) && tar -x -C "$d" && echo "$d"'


@dataclass(frozen=True)
class Host:
    """A machine that ssh reaches.

    :param destination: as ssh takes it: `user@host`.
    :param options: of ssh, such as `-p 2222`.
    :param arch: as `uname -m` says.
    :param is_root: whether the user that logs in is root.
    :param pythons: versions that are installed, such as `3.11`.
    """

    destination: str
    options: Sequence[str]
    arch: str
    is_root: bool
    pythons: tuple[str, ...]


def look_at(destination: str, options: Sequence[str] = ()) -> Host:
    """Logs in and looks around. Raises `BadInput` for what cannot be a destination, and `HushfleetError`."""
    if destination.startswith("-") or not destination.strip():
        raise BadInput(f"{destination!r} is no destination for ssh; write user@host")
    if shutil.which("ssh") is None:
        raise BadInput("ssh was not found; install it (Debian: apt install openssh-client)")
    said = _ssh(destination, options, _LOOK).decode("utf-8", "replace").split()
    if len(said) < 2:
        raise HushfleetError(f"{destination} does not answer as a Linux system does: {' '.join(said)!r}")
    arch, user, *pythons = said
    return Host(destination, options, arch, user == "0", tuple(dict.fromkeys(pythons)))


def push(host: Host, card: Card) -> None:
    """Puts the card's folder on the board, installs from it, and removes it. Raises `HushfleetError`."""
    with tempfile.TemporaryDirectory(prefix="hushfleet-push-") as name, tempfile.TemporaryFile() as archive:
        folder = Path(name)
        stage(card, _NoWriter(), MountedBoot(folder), folder)
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(folder / FOLDER, FOLDER, filter=_owned_by_nobody)
        archive.seek(0)
        place = _ssh(host.destination, host.options, _RECEIVE, stdin=archive).decode().strip()
    become_root = "" if host.is_root else "sudo "
    install = (
        f"{become_root}sh {shlex.quote(f'{place}/{FOLDER}/install.sh')}; s=$?; rm -rf {shlex.quote(place)}; exit $s"
    )
    done = subprocess.run(["ssh", "-t", *host.options, host.destination, install], check=False)
    if done.returncode != 0:
        raise HushfleetError(
            f"the installation on {host.destination} failed ({done.returncode}); see what it said above"
        )


class _NoWriter:
    """The board has started already: nothing is for its first start."""

    name = "push"
    secrets: Sequence[str] = ()

    def files(self, card: Card, boot: BootPartition) -> dict[str, str]:
        return {}

    def afterwards(self, card: Card) -> dict[str, str]:
        return {}


def _ssh(destination: str, options: Sequence[str], command: str, *, stdin: object = subprocess.DEVNULL) -> bytes:
    done = subprocess.run(
        ["ssh", *options, destination, command],
        stdin=stdin,
        stdout=subprocess.PIPE,
        check=False,  # type: ignore[call-overload]
    )
    if done.returncode != 0:
        raise HushfleetError(f"ssh {destination} failed ({done.returncode}); try it by hand: ssh {destination}")
    output: bytes = done.stdout
    return output


def _owned_by_nobody(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
