"""The machine of one process: its disk can lose power or be full, and its clock can jump, without any privilege.

`machine.c` is preloaded into the process. It keeps, beside the disk's folder, what was synced: after `cut_power` the
folder holds that, and of what was written and not synced some blocks and not others, as a disk may have them.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import struct
from pathlib import Path

from hushfleet.models.native.build import load_library

BLOCK_BYTES = 512
_CONTROL = struct.Struct("=qq")
# The index of SQLite's log lies in shared memory: a machine that starts anew has none.
_VOLATILE = "-shm"


def build_library(cache_dir: Path) -> Path:
    """The preloaded library, built if need be. Raises `HushfleetError` where there is no C compiler."""
    source = Path(__file__).with_name("machine.c").read_text("utf-8")
    load_library(source, cache_dir=cache_dir)  # loaded from where it is built, which is not kept
    return Path(load_library(source, cache_dir=cache_dir)._name)


class Machine:
    """Made before the process starts for the first time.

    :param disk: the folder with its files, without folders in it; made if it is not there. Files that are there
        already, and those in `not_its_own`, are the simulator's and not touched.
    :param beside: a folder for what this needs, on the same file system.
    :param library: of `build_library`.
    """

    def __init__(self, disk: Path, beside: Path, *, library: Path, not_its_own: tuple[str, ...] = ()) -> None:
        disk.mkdir(parents=True, exist_ok=True)
        self.disk = disk.resolve()
        self._durable = beside.resolve() / "durable"
        self._control_path = beside.resolve() / "control"
        self._library = library
        self._others = {*not_its_own, *(path.name for path in self.disk.iterdir())}
        self._durable.mkdir(parents=True)
        self._control_path.write_bytes(bytes(_CONTROL.size))
        with self._control_path.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), _CONTROL.size)
        self._clock_s = 0.0
        self._is_full = False
        (self._durable / "listing").touch()

    @property
    def environment(self) -> dict[str, str]:
        """Of the process that runs on this machine."""
        return {
            "LD_PRELOAD": str(self._library),
            "HUSHFLEET_DISK": str(self.disk),
            "HUSHFLEET_DURABLE": str(self._durable),
            "HUSHFLEET_CONTROL": str(self._control_path),
        }

    def move_clock(self, seconds: float) -> None:
        """The wall clock jumps; monotonic clocks do not."""
        self._clock_s += seconds
        self._write_control()

    def fill_disk(self, full: bool) -> None:
        """While it is full, no file of the disk can grow."""
        self._is_full = full
        self._write_control()

    def cut_power(self, rng: random.Random, *, kept: float) -> None:
        """The machine was without power, and starts anew. Its process must be dead already.

        :param kept: the share of what was not synced that the disk has all the same: blocks of files by chance, and
            names of files all or none, as a journal has them.
        """
        listing = (self._durable / "listing").read_text("utf-8").splitlines()
        synced = {name: int(inode) for inode, _, name in (line.partition(" ") for line in listing)}
        live = {path.name: path.stat().st_ino for path in self.disk.iterdir()}
        names = live if rng.random() < kept else synced
        after = {}
        for name, inode in names.items():
            if name not in self._others and not name.endswith(_VOLATILE):
                written = self._read(f"{inode}.live") or self._of_disk(name, live, inode)
                after[name] = _torn(self._read(f"{inode}"), written, rng, kept)
        for name in live.keys() - self._others:
            (self.disk / name).unlink()
        shutil.rmtree(self._durable)
        self._durable.mkdir()
        lines = []
        for name, data in after.items():
            path = self.disk / name
            path.write_bytes(data)
            path.chmod(0o600)
            inode = path.stat().st_ino
            (self._durable / f"{inode}").write_bytes(data)
            os.link(path, self._durable / f"{inode}.live")
            lines.append(f"{inode} {name}\n")
        (self._durable / "listing").write_text("".join(lines), "utf-8")

    def _read(self, name: str) -> bytes:
        path = self._durable / name
        return path.read_bytes() if path.exists() else b""

    def _of_disk(self, name: str, live: dict[str, int], inode: int) -> bytes:
        """Of a file that was never synced, nor was its folder since it was made."""
        return (self.disk / name).read_bytes() if live.get(name) == inode else b""

    def _write_control(self) -> None:
        self._control[:] = _CONTROL.pack(int(self._clock_s * 1e9), self._is_full)


def _torn(synced: bytes, written: bytes, rng: random.Random, kept: float) -> bytes:
    """`synced`, with some of the blocks in which `written` differs; its length is one of the two."""
    size = len(written) if rng.random() < kept else len(synced)
    data = bytearray(synced[:size].ljust(size, b"\0"))
    for start in range(0, size, BLOCK_BYTES):
        block = slice(start, min(start + BLOCK_BYTES, size))
        if start < len(written) and data[block] != written[block] and rng.random() < kept:
            data[block] = written[block].ljust(block.stop - start, b"\0")
    return bytes(data)
