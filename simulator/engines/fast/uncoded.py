"""Updates of a lean run: their values as they are, beside blobs that nobody has signed."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hushfleet.errors import Malformed, StoreError, StoreFull
from hushfleet.wire.format.forms import codec_of
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.update import (
    EncodedUpdate,
    UpdateFormat,
    UpdateHeader,
    payload_digest,
    read_coded,
    read_header,
    unsigned,
)

_PLACE_BYTES = 4


class UncodedUpdates(UpdateFormat):
    """FOR SIMULATION ONLY: values as the aggregator would decode them, in files that each round writes anew.

    :param folder: of the files.
    :param place: of the device in its cohort, for `encode`.
    """

    def __init__(self, folder: Path, place: int = 0) -> None:
        self._folder = folder
        self._place = place

    def encode(
        self, header: UpdateHeader, values: np.ndarray, *, counts: Sequence[int], identity: Identity
    ) -> EncodedUpdate:
        """The blob says where the values are."""
        key = header.dither_key
        sent = codec_of(header.codec).seen(values, header.coding(counts))
        path = self._folder / str(self._place)
        try:
            with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
                if file.write(b"".join((key, sent.astype("<f4", copy=False).data))) != len(key) + sent.nbytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise StoreFull(f"{path} cannot be written: {error.strerror}; free some space") from error
        return EncodedUpdate(unsigned(header, self._place.to_bytes(_PLACE_BYTES, "little")), sent)

    def authenticate(self, data: bytes, *, public_key: bytes) -> tuple[UpdateHeader, bytes]:
        return read_header(data), payload_digest(data)

    def values(self, header: UpdateHeader, data: bytes, *, counts: Sequence[int]) -> np.ndarray:
        path = self._folder / str(int.from_bytes(read_coded(data), "little"))
        try:
            with path.open("rb") as file:
                key, values = file.read(len(header.dither_key)), np.fromfile(file, "<f4", sum(counts))
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}; begin the run anew") from error
        if key != header.dither_key or len(values) != sum(counts):
            raise Malformed(f"{path} holds another update than that of {header.device} in round {header.round}")
        return values.astype(np.float32, copy=False)

    def sent_bytes(self, data: bytes) -> int:
        return 0
