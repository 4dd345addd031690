"""The differences between the last global models, beside the checkpoints: a file each, named by its SHA-256.

A file is written whole before the transaction that closes its round. After a restart only what leads to the current
model, unbroken and undamaged, is offered again; without the rest, devices fetch the whole model.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from pathlib import Path
from typing import NamedTuple

from hushfleet.aggregator.storage.atomic_file import write_whole
from hushfleet.errors import WireError
from hushfleet.wire.format.difference import DifferenceHeader, read_difference_header
from hushfleet.wire.format.messages import BASE_BYTES, MAX_DIFFERENCES, DifferenceRef

_NAME = re.compile(r"difference-(\d+)-([0-9a-f]{64})\.bin")

log = logging.getLogger("hushfleet.aggregator")


class _Offered(NamedTuple):
    ref: DifferenceRef
    data: bytes
    path: Path


class DifferenceFiles:
    """Those that are offered, in memory and in a folder; together they are smaller than one model.

    :param full_bytes: of a whole model.
    :param durable: False leaves syncing to the operating system: for simulations only.
    """

    def __init__(self, folder: Path, *, full_bytes: int, durable: bool = True) -> None:
        self._folder = Path(folder)
        self._full_bytes = full_bytes
        self._durable = durable
        self._offered: list[_Offered] = []

    @property
    def refs(self) -> tuple[DifferenceRef, ...]:
        """For a plan, oldest first; the last one gives the current model."""
        return tuple(each.ref for each in self._offered)

    def find(self, digest: bytes) -> bytes | None:
        """The blob with this SHA-256, if it is offered."""
        return next((each.data for each in self._offered if each.ref.digest == digest), None)

    def resume(self, current: bytes) -> None:
        """Offers what the folder has that leads to the model with the SHA-256 `current`; deletes all else."""
        self._offered = []
        wanted = current
        for path, _, digest in sorted(self._found(), key=lambda found: found[1], reverse=True):
            read = _read(path, digest)
            if read is not None and read[0].result == wanted:
                self._offered.insert(0, _offer(path, *read))
                wanted = read[0].base
        self._trim()

    def write(self, data: bytes, header: DifferenceHeader) -> None:
        """Before the transaction that makes its result the current model. Raises `StoreFull`."""
        write_whole(self._path(data, header), data, durable=self._durable)

    def advance(self, data: bytes, header: DifferenceHeader) -> None:
        """Its result is the current model now."""
        self._offered.append(_offer(self._path(data, header), header, data))
        self._trim()

    def clear(self) -> None:
        """The current model came without a difference, so that none leads to it."""
        self._offered = []
        self._trim()

    def _trim(self) -> None:
        """Offers as many as are cheaper than a whole model, and deletes the files of all others."""
        together, kept = 0, list[_Offered]()
        for each in reversed(self._offered[-MAX_DIFFERENCES:]):
            together += each.ref.size
            if together >= self._full_bytes:
                break
            kept.insert(0, each)
        self._offered = kept
        paths = {each.path for each in kept}
        for path, _, _ in self._found():
            if path not in paths:
                with contextlib.suppress(OSError):  # it is deleted another time
                    path.unlink()

    def _path(self, data: bytes, header: DifferenceHeader) -> Path:
        return self._folder / f"difference-{header.round}-{hashlib.sha256(data).hexdigest()}.bin"

    def _found(self) -> list[tuple[Path, int, str]]:
        """Files with the rounds and digests that their names say."""
        named = [(path, _NAME.fullmatch(path.name)) for path in self._folder.iterdir()]
        return [(path, int(name[1]), name[2]) for path, name in named if name is not None]


def _offer(path: Path, header: DifferenceHeader, data: bytes) -> _Offered:
    ref = DifferenceRef(header.base[:BASE_BYTES], hashlib.sha256(data).digest(), len(data))
    return _Offered(ref, data, path)


def _read(path: Path, digest: str) -> tuple[DifferenceHeader, bytes] | None:
    """None for a file that is damaged or cannot be read."""
    try:
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() == digest:
            return read_difference_header(data), data
        log.warning("%s is damaged and not offered", path)
    except (OSError, WireError) as error:
        log.warning("%s is not offered: %s", path, error)
    return None
