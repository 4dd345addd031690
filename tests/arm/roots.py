"""Roots of Debian arm64, made of its packages and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SUITE = "trixie"  # as Raspberry Pi OS of 2025; Python 3.13
BOARD_PACKAGES = (
    "base-files base-passwd bash ca-certificates coreutils dash debianutils diffutils findutils grep gzip hostname "
    "init-system-helpers libc-bin libstdc++6 login mount passwd procps python3 sed tar util-linux xz-utils"
)
CARD_PACKAGES = (
    "ca-certificates cloud-init dbus iproute2 kmod netplan.io passwd python3 sudo systemd-resolved systemd-sysv "
    "systemd-timesyncd udev"
)
KERNEL_PACKAGES = "busybox-static linux-image-arm64"
_LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*")


def cache_folder() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HUSHFLEET_ARM_CACHE") or home / "hushfleet-arm")


def board_root() -> Path:
    """For programs under qemu-user: packages unpacked, and what their scripts would do done from here. Seconds."""
    return _made("board", BOARD_PACKAGES, variant="extract", finish=_configure)


def kernel_root() -> Path:
    """Debian's kernel for arm64, its modules, and busybox. Seconds."""
    return _made("kernel", KERNEL_PACKAGES, variant="extract", finish=None)


def card_root() -> Path:
    """A complete system with systemd and cloud-init, each package configured under emulation: some ten minutes."""
    return _made("card", CARD_PACKAGES, variant="minbase", finish=None)


def _made(name: str, packages: str, *, variant: str, finish: object) -> Path:
    mark = hashlib.sha256(f"{SUITE} {variant} {packages}".encode()).hexdigest()[:12]
    folder = cache_folder() / f"{name}-{mark}"
    if folder.exists():
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"making {folder} of Debian's packages for arm64", file=sys.stderr, flush=True)
    command = [
        "mmdebstrap", "--mode=root", "--arch=arm64", f"--variant={variant}", "--format=directory",
        '--aptopt=APT::Install-Recommends "false"', "--dpkgopt=force-unsafe-io",
        *(f"--dpkgopt=path-exclude={path}" for path in _LEFT_OUT),
        f"--include={packages.replace(' ', ',')}", SUITE, str(unfinished), _mirror(),
    ]  # fmt: skip
    if variant == "extract":
        command.insert(1, "--skip=check/qemu")
    else:
        command = [sys.executable, str(Path(__file__).with_name("namespace.py")), *command]
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    if callable(finish):
        finish(unfinished)
    unfinished.rename(folder)
    return folder


def _mirror() -> str:
    """The one that this machine's own packages come from."""
    for path in [*Path("/etc/apt/sources.list.d").glob("*.sources"), Path("/etc/apt/sources.list")]:
        text = path.read_text() if path.exists() else ""
        if found := re.search(r"^(?:URIs:\s*|deb (?:\[.*\] )?)(https?://\S+)", text, re.MULTILINE):
            return found[1]
    return "http://deb.debian.org/debian"


def _configure(root: Path) -> None:
    """What an unpacked system lacks because no package's script has run."""
    master = root / "usr/share/base-passwd"
    for name, shadow in (("passwd", "shadow"), ("group", "gshadow")):
        file = root / "etc" / name
        if not file.exists():
            shutil.copy(master / f"{name}.master", file)
        users = [line.split(":")[0] for line in file.read_text().splitlines()]
        lines = [f"{user}:*:20000:0:99999:7:::" if shadow == "shadow" else f"{user}:*::" for user in users]
        (root / "etc" / shadow).write_text("\n".join(lines) + "\n")
    names = root / "etc/nsswitch.conf"
    if not names.exists():
        names.write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n")
    for folder in (
        "root",
        "home",
        "opt",
        "srv",
        "proc",
        "sys",
        "dev",
        "run",
        "tmp",
        "boot/firmware",
        "var/lib",
        "var/log",
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc/hostname").write_text("raspberrypi\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    resolver = root / "etc/resolv.conf"
    if not resolver.exists():
        resolver.write_text("")
