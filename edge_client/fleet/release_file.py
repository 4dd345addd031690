"""Keeps the chunks of an offered release in two files, so that they survive a restart."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
from pathlib import Path

from hushfleet.atomic_file import sync_folder, write_whole
from hushfleet.errors import Malformed, StoreError, StoreFull
from hushfleet.wire.format.chunks import Assembler, Ranges, chunk_count
from hushfleet.wire.format.fleet_messages import RELEASE_CHUNK_BYTES

WINDOW = 32
"""Chunks per request: only 2 MB, so that a transfer ends soon when training begins or the link is needed."""
SYNC_EVERY = 32
_OURS = re.compile(r"[0-9a-f]{64}\.(part|have)")


class ReleaseFile(Assembler):
    """Two files: `FOLDER/DIGEST.part`, and `DIGEST.have` with a byte for each chunk. There is one release at a time:
    files of other releases are deleted, because nobody would ask for them again.

    `DIGEST.have` is written after the chunks are synced. So after a power cut, present chunks may be requested again.

    :param folder: is made if it does not exist.
    :param size: bytes of the release.

    Raises `StoreFull` if the disk has no room for the release, and `StoreError`.
    """

    def __init__(self, folder: Path, digest: bytes, size: int) -> None:
        self._part, self._marks = folder / f"{digest.hex()}.part", folder / f"{digest.hex()}.have"
        self._unsynced = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in folder.iterdir():
                if _OURS.match(path.name) and not path.name.startswith(digest.hex()):
                    path.unlink()
            super().__init__(digest, size, RELEASE_CHUNK_BYTES, max_blob_bytes=size)
        except OSError as error:
            raise StoreFull(f"there is no room for a release of {size >> 20} MiB in {folder}: {error}") from error

    def add(self, frame: object) -> bool:
        """Adds a chunk, see `Assembler.add`."""
        new = super().add(frame)  # type: ignore[arg-type]
        self._unsynced += new
        if self._unsynced >= SYNC_EVERY or (new and self.complete):
            self.sync()
        return new

    def missing(self, *, limit: int = 1) -> Ranges:
        """Returns the ranges to ask for next: the first `limit` missing ones, each cut to `WINDOW` chunks."""
        return tuple((start, min(stop, start + WINDOW)) for start, stop in super().missing(limit=limit))

    def sync(self) -> None:
        """Makes the received chunks survive a restart. Raises `StoreError`."""
        self._flush()
        write_whole(self._marks, bytes(self._have), durable=False)
        self._unsynced = 0

    def finish(self, target: Path) -> None:
        """Checks the whole release, and moves it to `target`.

        Raises `Malformed` and drops all chunks if it is another release. After a `StoreError` the call may be repeated.
        """
        if not self.complete or hashlib.sha256(self._map).digest() != self.digest:
            self._marks.unlink(missing_ok=True)
            self._map.close()
            self._start()
            raise Malformed(f"the chunks of {self._part.stem[:16]}... are not the release that was offered")
        self._flush()
        try:
            with contextlib.suppress(FileNotFoundError):  # an earlier attempt moved it, and failed afterwards
                os.replace(self._part, target)
            sync_folder(target.parent)
            self._marks.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"the release cannot be handed over as {target}: {error}") from error
        self._map.close()

    def drop(self) -> None:
        """Deletes the files of a release that is no longer wanted."""
        self._map.close()
        for path in (self._part, self._marks):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the file; the received chunks stay."""
        with contextlib.suppress(StoreError):
            self.sync()
        self._map.close()

    def _flush(self) -> None:
        try:
            self._map.flush()
        except OSError as error:  # a failing SD card
            raise StoreError(f"the release cannot be written to {self._part}: {error}") from error

    def _begin(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        count = chunk_count(self.size, chunk_bytes)
        handle = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            known = os.fstat(handle).st_size == self.size
            os.posix_fallocate(handle, 0, self.size)  # else writing to the map on a full disk kills the process
            os.ftruncate(handle, self.size)
            self._map = mmap.mmap(handle, self.size)
        finally:
            os.close(handle)
        self._data = self._map  # type: ignore[assignment]
        marks = b""
        with contextlib.suppress(OSError):
            marks = self._marks.read_bytes()
        whole = known and len(marks) == count and not marks.strip(b"\0\1")
        self._have = bytearray(marks if whole else count)
        self.received = self._have.count(1)
