"""Packs the payload of a release for the operator, and checks and unpacks it on a board.

A payload is not read before its length and SHA-256 match the manifest. Then only plain files and folders with plain
relative names are accepted, no more than the manifest says: no links, no devices, no owners. The archive has POSIX's
first format (ustar), in which an entry has one header of 512 bytes, because `tarfile` reads the long names and other
attributes of later formats into memory as a whole, without a limit on their size.
"""

from __future__ import annotations

import compileall
import hashlib
import io
import itertools
import lzma
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from hushfleet.atomic_file import read_object, sync_folder, write_whole
from hushfleet.errors import BadInput, Malformed, StoreFull, TooLarge
from hushfleet.release.manifest import (
    HEAD_CAP,
    RELEASE_CAP,
    Manifest,
    SignedManifest,
    Signer,
    this_platform,
)
from hushfleet.release.statements import Trust

MANIFEST_NAME = "release.json"
"""Name of the manifest in the folder of a release; `slots.py` reads it."""
_BLOCK = 1 << 18
_NAME_CAP, _DEPTH_CAP = 240, 24  # bytes of a path, and number of its parts
_PRESET = 6  # a board needs 8 MiB to unpack it; preset 8 with extreme: 64 MiB, twice the time, and 1 % smaller
_XZ_MEMORY_BYTES = 1 << 25


def pack(folder: Path, out: Path, *, key: Signer | None, **fields: Any) -> Manifest:
    """Writes `folder` as the release `out`, signed with `key` (None: not signed yet).

    The same folder gives the same bytes: names are sorted, times and owners are left out. Raises `BadInput` for a link,
    or a path that is too long.

    :param fields: of the manifest, without those that the payload determines. Downgrades, wheels and `system` may be
        missing.
    """
    payload = io.BytesIO()
    unpacked = entries = 0
    with (
        lzma.open(payload, "wb", preset=_PRESET) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for path in sorted(folder.rglob("*")):
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise BadInput(f"{path} is a link or a special file: a release holds plain files and folders only")
            entry = _entry(path.relative_to(folder).as_posix())
            entries += 1
            if path.is_dir():
                entry.type = tarfile.DIRTYPE
                tar.addfile(entry)
                continue
            entry.size = path.stat().st_size
            unpacked += entry.size
            with path.open("rb") as file:
                tar.addfile(entry, file)
    data = payload.getvalue()
    given: dict[str, Any] = {"downgrade_from": (), "downgrade_serial": 0, "wheels": {}, **fields}
    manifest = Manifest(
        **given,
        payload_sha256=hashlib.sha256(data).hexdigest(),
        payload_bytes=len(data),
        unpacked_bytes=unpacked,
        entries=entries,
    )
    out.write_bytes(SignedManifest.sign(manifest, *filter(None, [key])).to_bytes() + data)
    return manifest


def add_signature(path: Path, key: Signer) -> SignedManifest:
    """Checks that a release is complete, signs it in place, and returns its new head. Raises `Malformed`."""
    with path.open("rb") as file:
        head = read_head(file)
        check_payload(file, head.manifest)
        signed = head.also_signed(key)
        write_whole(path, signed.to_bytes() + file.read(), durable=True)
    return signed


def _entry(name: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    try:
        _plain_name(name)
        entry.tobuf(tarfile.USTAR_FORMAT)
    except (Malformed, ValueError) as error:
        raise BadInput(f"the path {name!r} is not allowed in a release: {error}") from error
    return entry


def read_head(file: BinaryIO) -> SignedManifest:
    """Reads the head of an open release; its signatures are not checked yet. The file is then at the payload."""
    data = file.read(HEAD_CAP)
    head, length = SignedManifest.read(data)
    file.seek(length - len(data), os.SEEK_CUR)
    return head


def check_payload(file: BinaryIO, manifest: Manifest) -> None:
    """Raises `Malformed` if the rest of `file` is not the payload; afterwards the file is at the payload again."""
    begin, seen, digest = file.tell(), 0, hashlib.sha256()
    while block := file.read(_BLOCK):
        seen += len(block)
        digest.update(block)
    if seen != manifest.payload_bytes:
        raise Malformed(
            f"release {manifest.version} has {seen} bytes of payload; its manifest says {manifest.payload_bytes}"
        )
    if digest.hexdigest() != manifest.payload_sha256:
        raise Malformed(
            f"release {manifest.version} is damaged: its payload has another SHA-256 than its manifest says"
        )
    file.seek(begin)


def unpack(file: BinaryIO, manifest: Manifest, folder: Path) -> None:
    """Unpacks a payload, already checked by `check_payload`, into the new `folder`. Raises `Malformed`, `TooLarge`."""
    folder.mkdir(mode=0o755)
    left = manifest.unpacked_bytes
    try:
        stream = io.BufferedReader(_Unpacked(file), _BLOCK)
        for entry in _headers(stream, manifest.entries):
            path = folder / _plain_name(entry.name)
            if entry.type == tarfile.DIRTYPE:
                path.mkdir(mode=0o755)
                continue
            if entry.type != tarfile.REGTYPE or entry.size < 0:
                raise Malformed(f"the release's entry {entry.name!r} is neither a plain file nor a folder")
            left -= entry.size
            if left < 0:
                raise TooLarge(
                    f"the release unpacks to more than the {manifest.unpacked_bytes} bytes that its manifest says"
                )
            with path.open("xb") as target:
                _copy_some(stream, target, entry.size)
            path.chmod(0o644)
            stream.read(-entry.size % tarfile.BLOCKSIZE)
    except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
        raise Malformed(f"the payload of release {manifest.version} cannot be unpacked: {error}") from error
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise Malformed(f"the payload of release {manifest.version} contradicts itself at {error.filename}") from error


def place(source: Path, releases: Path, *, trust: Trust | None) -> Manifest:
    """Puts a release into `releases/VERSION`, complete and with compiled caches, or leaves nothing.

    Another user may own `source` and change it meanwhile, so a copy is checked and unpacked. If a folder of that
    version already exists, it is complete, and stays.

    :param trust: the keys that must have signed it; None: only the hash is checked, for the first start of a memory
        card: there is no `cryptography` yet, and the release and the keys to verify it are on the same card.
    Raises `BadSignature`, `Malformed`, `TooLarge`, `BadInput` for another platform, `StoreFull`.
    """
    releases.mkdir(mode=0o755, parents=True, exist_ok=True)
    with _open_plain(source) as theirs, tempfile.TemporaryFile(dir=releases) as file:
        _copy(theirs, file)
        head = read_head(file)
        manifest = head.manifest if trust is None else trust.verify(head)
        manifest.require_platform(*this_platform())
        check_payload(file, manifest)
        whole, part = releases / manifest.version, releases / f".{manifest.version}.part"
        if whole.is_dir():
            if not _has_payload(whole, manifest.payload_sha256):
                raise BadInput(f"another release {manifest.version} is installed; give this one another version")
            return manifest
        if shutil.disk_usage(releases).free < 2 * manifest.unpacked_bytes:  # the caches are smaller than the files
            raise StoreFull(f"release {manifest.version} needs {2 * manifest.unpacked_bytes >> 20} MiB on {releases}")
        shutil.rmtree(part, ignore_errors=True)
        unpack(file, manifest, part)
    (part / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    compileall.compile_dir(part, quiet=2, stripdir=str(part), prependdir=str(whole))
    os.sync()  # thousands of files: one sync of all is faster than one per file
    part.rename(whole)
    sync_folder(releases)
    return manifest


def _has_payload(whole: Path, digest: str) -> bool:
    """Returns whether the folder of a release was unpacked from the payload with this SHA-256."""
    return read_object(whole / MANIFEST_NAME).get("payload_sha256") == digest


def _copy(theirs: BinaryIO, ours: BinaryIO) -> None:
    """Copies the whole file, and rewinds `ours`. Raises `TooLarge`, also for a file that grows meanwhile."""
    while block := theirs.read(_BLOCK):
        ours.write(block)
        if ours.tell() > RELEASE_CAP:
            raise TooLarge(f"a release has at most {RELEASE_CAP >> 20} MiB")
    ours.seek(0)


def _open_plain(path: Path) -> BinaryIO:
    """Opens a plain file. Raises `BadInput` for anything else, such as a link or a pipe, without waiting for it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadInput(f"{path} cannot be read as a release: {error.strerror}") from error
    file = os.fdopen(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise BadInput(f"{path} is not a plain file")
    return file


class _Unpacked(io.RawIOBase):
    """Reads the content of an xz file, without more memory than `_PRESET` needs."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._xz = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._xz.eof:
            packed = self._file.read(_BLOCK) if self._xz.needs_input else b""
            if self._xz.needs_input and not packed:
                raise EOFError("it is cut off")
            if data := self._xz.decompress(packed, len(buffer)):
                buffer[: len(data)] = data
                return len(data)
        return 0


def _headers(stream: BinaryIO, cap: int) -> Iterator[tarfile.TarInfo]:
    """Yields the header of each entry; the caller reads its content before the next."""
    for count in itertools.count(1):
        header = stream.read(tarfile.BLOCKSIZE)
        if header == bytes(tarfile.BLOCKSIZE):
            return
        if count > cap:
            raise TooLarge(f"the release has more than the {cap} entries that its manifest says")
        yield tarfile.TarInfo.frombuf(header, "utf-8", "strict")


def _copy_some(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size:
        block = source.read(min(size, _BLOCK))
        if not block:
            raise EOFError("it ends within an entry")
        target.write(block)
        size -= len(block)


def _plain_name(name: str) -> PurePosixPath:
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") and part.isprintable() and "\\" not in part for part in parts)
    if not plain or len(parts) > _DEPTH_CAP or len(name.encode("utf-8", "replace")) > _NAME_CAP:
        raise Malformed(f"the release has an entry with the name {name[:80]!r}")
    return PurePosixPath(*parts)
