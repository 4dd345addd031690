"""Runs a command where aarch64 programs start by themselves, and nothing outside is changed.

    python -m arm.namespace COMMAND...
    python -m arm.namespace --root ROOT COMMAND...      inside of an arm64 root folder

Since Linux 6.7 binfmt_misc belongs to the user namespace: the handler is registered in a namespace of its own.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
PR_SET_PDEATHSIG = 1
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
# the ELF header of an aarch64 program, and which of its bits count
MAGIC = rb"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
MASK = rb"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}

libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> None:
    """Replaces this process; ends with the command's exit code."""
    root = None
    if arguments[:1] == ["--root"]:
        root, arguments = Path(arguments[1]).resolve(), arguments[2:]
    qemu = shutil.which("qemu-aarch64-static")
    if not arguments or qemu is None:
        sys.exit(__doc__ if qemu else "qemu-aarch64-static is not installed; on Debian: apt install qemu-user-static")
    uid, gid = os.getuid(), os.getgid()
    (unshared, tell_unshared), (mapped, tell_mapped) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "a user namespace cannot be made")
        os.write(tell_unshared, b"x")
        os.read(mapped, 1)
        os.setgid(0)
        os.setuid(0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of the user takes it back
        _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mounts cannot be made private")
        binfmt = b"/proc/sys/fs/binfmt_misc"
        _check(libc.mount(b"binfmt_misc", binfmt, b"binfmt_misc", 0, None), "binfmt_misc needs Linux 6.7 or newer")
        Path(os.fsdecode(binfmt), "register").write_bytes(
            b":hushfleet-aarch64:M:0:" + MAGIC + b":" + MASK + b":" + os.fsencode(qemu) + b":OCF"
        )
        if root is None:
            os.execvp(arguments[0], arguments)
        _enter(root)
        os.execvpe(arguments[0], arguments, {**ENVIRONMENT, **_given()})
    os.close(tell_unshared)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    if os.read(unshared, 1) == b"x":
        ids = "0 0 65536\n" if uid == 0 else f"0 {uid} 1\n"
        groups = "0 0 65536\n" if uid == 0 else f"0 {gid} 1\n"
        if uid != 0:
            Path(f"/proc/{child}/setgroups").write_text("deny")
        Path(f"/proc/{child}/uid_map").write_text(ids)
        Path(f"/proc/{child}/gid_map").write_text(groups)
        os.write(tell_mapped, b"x")
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _given() -> dict[str, str]:
    """What the caller passes on: variables of the form BOARD_NAME arrive as NAME."""
    prefix = "BOARD_"
    return {name.removeprefix(prefix): text for name, text in os.environ.items() if name.startswith(prefix)}


def _enter(root: Path) -> None:
    for name in ("proc", "dev"):
        inside = root / name
        inside.mkdir(exist_ok=True)
        source, target = f"/{name}".encode(), os.fsencode(inside)
        _check(libc.mount(source, target, None, MS_BIND | MS_REC, None), f"/{name} cannot be bound into {root}")
    os.chroot(root)
    os.chdir("/")


def _check(result: int, what: str) -> None:
    if result != 0:
        sys.exit(f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(sys.argv[1:])
