"""Installs the client on a board by ssh, as a card does: for Jetsons, and for boards that run already.

The folder of a card's boot partition is copied to the board, and its `install.sh` runs there as root. ssh asks for
passwords and checks the host as it always does. Only what is installed stays on the board. The command may be
interrupted anywhere and started again.
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
from typing import IO

from hushfleet.errors import BadInput, HushfleetError
from hushfleet.firmware_profiles.cards.bundle import PYTHONS
from hushfleet.firmware_profiles.cards.seed import FOLDER, Card, stage

_SAYS = "hushfleet looks around:"  # a login may print other things before
_LOOK = (
    f"echo '{_SAYS}'; uname -m; getconf LONG_BIT || echo 64; id -u; "
    f"for p in {' '.join(f'python{each}' for each in reversed(PYTHONS))} python3; do "
    "$p -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])' 2> /dev/null; done; :"
)
_PLACE = ".hushfleet-push"  # in the home of the user that logs in; an old one is replaced
_CLEANED = f"trap 'rm -rf {_PLACE}' EXIT; trap 'exit 130' HUP INT TERM; "
_RECEIVE = f"umask 077; {_CLEANED}rm -rf {_PLACE}; mkdir {_PLACE} && tar -x -C {_PLACE} && trap - EXIT"
_INSTALL = f"{_CLEANED}%ssh {_PLACE}/{FOLDER}/install.sh"
_UNREACHED, _INTERRUPTED = 255, 130  # exit codes of ssh


@dataclass(frozen=True)
class SshHost:
    """A machine that ssh reaches.

    :param destination: as ssh takes it: `user@host`.
    :param options: of ssh, such as `-p 2222`.
    :param arch: as `uname -m` says; :param bits: of its programs, which may be 32 on a 64-bit kernel.
    :param is_root: whether the user that logs in is root.
    :param pythons: versions that are installed, such as `3.11`.
    """

    destination: str
    options: Sequence[str]
    arch: str
    bits: str
    is_root: bool
    pythons: tuple[str, ...]


def look_at(destination: str, options: Sequence[str] = ()) -> SshHost:
    """Logs in and reads the properties of the machine.

    Raises `BadInput` for an invalid destination, and `HushfleetError`.
    """
    if destination.startswith("-") or not destination.strip():
        raise BadInput(f"{destination!r} is not a destination for ssh; write user@host")
    if shutil.which("ssh") is None:
        raise BadInput("ssh was not found; install it (Debian: apt install openssh-client)")
    output = _ssh(destination, options, _LOOK, stdout=subprocess.PIPE)
    said = output.decode("utf-8", "replace").partition(_SAYS)[2].split()
    if len(said) < 3:
        raise HushfleetError(f"{destination} does not answer as a Linux system does: {output[:200]!r}")
    arch, bits, user, *pythons = said
    return SshHost(destination, options, arch, bits, user == "0", tuple(dict.fromkeys(pythons)))


def push(host: SshHost, card: Card) -> None:
    """Puts the card's folder on the board, installs from it, and removes it. Raises `HushfleetError`."""
    with tempfile.TemporaryDirectory(prefix="hushfleet-push-") as name, tempfile.TemporaryFile() as archive:
        folder = Path(name)
        stage(card, folder)
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(folder / FOLDER, FOLDER, filter=_owned_by_nobody)
        # Only one line per step: ssh may be asking for a password on this terminal.
        print(f"copying {archive.tell() / 1e6:.0f} MB to {host.destination}", flush=True)
        archive.seek(0)
        _ssh(host.destination, host.options, _RECEIVE, stdin=archive)
    print("installing there", flush=True)
    install = _INSTALL % ("" if host.is_root else "sudo ")
    _ssh(host.destination, ["-t", *host.options], install, stdin=None)


def _ssh(
    destination: str,
    options: Sequence[str],
    script: str,
    *,
    stdin: IO[bytes] | int | None = subprocess.DEVNULL,
    stdout: int | None = None,
) -> bytes:
    """Runs a script with sh, whatever the login shell is. ssh prints errors on this terminal.

    Raises `HushfleetError`; `KeyboardInterrupt` if Ctrl-C was pressed while ssh had the terminal for itself.
    """
    command = ["ssh", *options, destination, f"exec sh -c {shlex.quote(script)}"]  # exec: Ctrl-C ends it with a code
    done = subprocess.run(command, stdin=stdin, stdout=stdout, check=False)
    if done.returncode == _INTERRUPTED:
        raise KeyboardInterrupt
    if done.returncode == _UNREACHED:
        by_hand = shlex.join(["ssh", *(each for each in options if each != "-t"), destination])
        raise HushfleetError(
            f"ssh could not reach {destination}, or lost the connection; its message is above. Try it by hand: "
            f"{by_hand}"
        )
    if done.returncode != 0:
        raise HushfleetError(
            f"the installation on {destination} failed with exit code {done.returncode}; its message is above. "
            "Correct that, and push again"
        )
    return done.stdout or b""


def _owned_by_nobody(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
