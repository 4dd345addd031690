"""Defines the update format of simulations: values without encoding in files, and unsigned blobs beside them.

The values equal those that an aggregator would decode, to the last bit. A fixed sample of an update's values is
encoded to determine its size on the wire.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hushfleet.errors import Malformed, StoreError, StoreFull
from hushfleet.wire.format.codecs import codec_of
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.symbols import BLOCK
from hushfleet.wire.format.update import UpdateHeader, payload_digest, read_header
from hushfleet.wire.format.update_values import EncodedUpdate, UpdateFormat, read_coded, unsigned

_CODED = struct.Struct("<II")
"""The blob's values section: the number of the file, and the bytes that the encoded values would take."""


class UncodedUpdates(UpdateFormat):
    """Writes each update's values into a file, which later rounds overwrite. FOR SIMULATION ONLY.

    :param folder: holds the files.
    :param place: the number of the device in its cohort, for `encode`.
    """

    def __init__(self, folder: Path, place: int = 0) -> None:
        self._folder = folder
        self._place = place

    def encode(
        self, header: UpdateHeader, values: np.ndarray, *, counts: Sequence[int], identity: Identity | None
    ) -> EncodedUpdate:
        """Writes the file; the blob contains its number. Raises `StoreFull` and the errors of `UpdateFormat.encode`."""
        key = header.dither_key
        sent = codec_of(header.codec).seen(values, header.coding(counts))
        path = self._folder / str(self._place)
        try:
            with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
                if file.write(b"".join((key, sent.astype("<f4", copy=False).data))) != len(key) + sent.nbytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise StoreFull(f"{path} cannot be written: {error.strerror}; free some space") from error
        coded = _CODED.pack(self._place, coded_bytes(header, values, counts))
        return EncodedUpdate(unsigned(header, coded), sent)

    def authenticate(self, data: bytes, *, public_key: bytes) -> tuple[UpdateHeader, bytes]:
        return read_header(data), payload_digest(data)

    def values(self, header: UpdateHeader, data: bytes, *, counts: Sequence[int]) -> np.ndarray:
        path = self._folder / str(_CODED.unpack(read_coded(data))[0])
        try:
            with path.open("rb") as file:
                key, values = file.read(len(header.dither_key)), np.fromfile(file, "<f4", sum(counts))
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}; begin the run anew") from error
        if key != header.dither_key or len(values) != sum(counts):
            raise Malformed(f"{path} holds another update than that of {header.device} in round {header.round}")
        return values.astype(np.float32, copy=False)

    def sent_bytes(self, data: bytes) -> int:
        """Returns the bytes of the encoded and signed blob, estimated from the sample."""
        return len(data) - _CODED.size + _CODED.unpack(read_coded(data))[1]


def coded_bytes(header: UpdateHeader, values: np.ndarray, counts: Sequence[int]) -> int:
    """Returns how many bytes the codec needs for `values` float32 `[k]`, estimated from one block of values.

    The sample is every n-th value of each layer. Up to 65,536 values are encoded completely, so their size is exact.
    """
    stride = -(-values.size // BLOCK) or 1
    parts = [part[::stride] for part in np.split(values, np.cumsum(counts)[:-1])]
    sample = np.concatenate(parts)
    coding = header.coding([len(part) for part in parts])
    coded = codec_of(header.codec).encode(sample, coding, np.empty_like(sample))
    return round(len(coded) * values.size / max(1, sample.size))
