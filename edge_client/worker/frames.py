"""The messages of the pipe between guardian and worker: a length, a kind, and a value as msgpack."""

from __future__ import annotations

import mmap
import struct
from typing import Any, TypeVar

import msgspec

from hushfleet.edge_client.worker.job import Applied, Failed, Finished, HeadChosen, Job, NeedsFeatures, Told
from hushfleet.errors import Malformed
from hushfleet.schema import from_plain, to_plain

_HEAD = struct.Struct("<BI")
_KINDS: tuple[type, ...] = (Job, Told, Finished, HeadChosen, Applied, Failed, NeedsFeatures)
_MAX_TOLD_BYTES = 1 << 16
_ENCODER = msgspec.msgpack.Encoder()

Message = Job | Told | Finished | HeadChosen | Applied | Failed | NeedsFeatures
M = TypeVar("M", bound=Message)


def frame(message: Message) -> bytearray:
    """Encodes a message, once: it has megabytes."""
    data = bytearray(_HEAD.size)
    _ENCODER.encode_into(to_plain(message), data, _HEAD.size)
    _HEAD.pack_into(data, 0, _KINDS.index(type(message)), len(data) - _HEAD.size)
    return data


class Frames:
    """Cuts messages out of the bytes that come from a worker.

    :param most_bytes: the largest outcome; what a worker tells besides is shorter.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._data = bytearray()

    @property
    def is_full(self) -> bool:
        """True if a whole message may be there, and no more is read before it is taken."""
        return len(self._data) > self._most_bytes

    @property
    def is_empty(self) -> bool:
        return not self._data

    def add(self, data: bytes) -> None:
        self._data += data

    def next(self) -> Message | None:
        """Returns the next whole message, or None. Raises `Malformed` for anything that no worker sends."""
        if len(self._data) < _HEAD.size:
            return None
        kind, length = _HEAD.unpack_from(self._data)
        if not 0 < kind < len(_KINDS) or length > (_MAX_TOLD_BYTES if _KINDS[kind] is Told else self._most_bytes):
            raise Malformed(f"a worker has sent a message of kind {kind} and {length} bytes")
        end = _HEAD.size + length
        if len(self._data) < end:
            return None
        with memoryview(self._data) as whole, whole[_HEAD.size : end] as data:  # an outcome has megabytes
            message: Message = read(_KINDS[kind], data)
        del self._data[:end]
        return message


def read_job(data: bytearray | mmap.mmap) -> Job:
    """Decodes the only kind of message that a worker gets."""
    with memoryview(data) as whole, whole[_HEAD.size :] as job:
        return read(Job, job)


def read(kind: type[M], data: bytes | memoryview) -> M:
    """Decodes a value. Raises `Malformed`."""
    try:
        plain: Any = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Malformed(f"a worker's message is not msgpack: {error}") from error
    return from_plain(kind, plain)
