"""Keeps what the devices of a run of the fast engine carry from round to round: one file, with a record per round.
FOR SIMULATION ONLY.

A record holds columns: a value of each device that took part in the round. It has a length and a checksum; a process
that dies leaves at most a torn last record, which is dropped when the file is opened again. The open round is then
trained again: its randomness is seeded, so the bits are the same. A power cut may destroy the file.

Large arrays, such as personalized models, are not in the records but in `StateSlots`: each device has two places for
each array, and the committed record names the valid one.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np

from hushfleet.durations import Period
from hushfleet.errors import StoreError
from hushfleet.privacy.charge import Charge, Totals

_HEAD = b"HFC\x01"
"""Marks the file; the last byte is the version of its format. Random bytes follow, which distinguish two runs."""
_HEAD_BYTES = len(_HEAD) + 8
_FRAME = struct.Struct("<II")  # length and checksum
_PAGE = 4096
_ROUND = struct.Struct("<q")
_MOST_TOTALS = 4096


class ChargeKind(NamedTuple):
    """A kind of charges: the charge, and the window of data that the round trained on."""

    charge: Charge
    window: Period | None


class Carried(NamedTuple):
    """The state of a device after its last round.

    :param totals: of its charges.
    :param participations: number of its updates so far.
    :param slot: the place of its large arrays, 0 or 1.
    :param arrays: name, type and shape of each large array.
    :param small: its small arrays, packed.
    :param round: the round in which it trained last.
    :param left_out: whether it has a personalized model that was not kept.
    :param head: the personalized head that it chose after the last round, packed; empty without one.
    """

    totals: Totals
    participations: int
    slot: int
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]
    small: bytes
    round: int
    left_out: bool
    head: bytes = b""


class StateRow(NamedTuple):
    """The traces of a device's round: its charge, the SHA-256 of its update, and the fields of `Carried`."""

    kind: ChargeKind
    digest: bytes
    participations: int
    slot: int
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]
    small: bytes
    left_out: bool


@dataclass
class _Record:
    """A round as columns.

    :param devices: numbers of the devices, uint32 `[n]`; `kinds`: of their charges, uint16 `[n]`.
    """

    round: int
    devices: np.ndarray
    kinds: np.ndarray
    digests: bytes


@dataclass
class CohortStore:
    """The devices of a run: what they carry, by number.

    :param records: the rounds so far; only a store that is read has them, so that a run's memory does not grow.
    """

    path: Path
    kinds: list[ChargeKind] = field(default_factory=list)
    records: list[_Record] = field(default_factory=list)
    _shapes: list[tuple[Any, ...]] = field(default_factory=list)
    _carried: dict[int, _Device] = field(default_factory=dict)
    _totals: dict[tuple[Any, ...], Totals] = field(default_factory=dict)
    _end: int = 0

    @classmethod
    def open(cls, path: Path, *, closed: int) -> CohortStore:
        """Opens the store of a run that goes on; drops what follows its last closed round, and a torn record."""
        store = cls(path)
        if path.exists() and path.stat().st_size >= _HEAD_BYTES:
            store._read(until=closed, keep=False)
            os.truncate(path, store._end)
        if not store._end:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(_HEAD + os.urandom(_HEAD_BYTES - len(_HEAD)))
            store._end = _HEAD_BYTES
        return store

    @classmethod
    def read(cls, path: Path) -> CohortStore:
        """Reads a run's store whole; if this process has read it before, only what is new. Raises `StoreError`."""
        try:
            with path.open("rb") as file:
                head, size = file.read(_HEAD_BYTES), os.fstat(file.fileno()).st_size
        except FileNotFoundError as error:
            raise StoreError(f"{path} is not there: no device has taken part, or an earlier version ran it") from error
        known = _READ.get(head)
        if known is None or known.path != path or known._end > size:
            _READ.clear()
            known = _READ[head] = cls(path)
        known._read(until=None, keep=True)
        return known

    def carried(self, device: int) -> Carried | None:
        """Returns what a device carries, by its number; None if it has not taken part."""
        found = self._carried.get(device)
        return None if found is None else found.carried(self._totals_of(found), self._shapes)

    def _totals_of(self, device: _Device) -> Totals:
        """Returns the totals of a device's charges, one object for all devices with the same."""
        key = *device.counts.items(), device.window
        if key not in self._totals:
            if len(self._totals) >= _MOST_TOTALS:
                self._totals.clear()
            counts = Counter[Charge]()
            for kind, count in device.counts.items():
                counts[self.kinds[kind].charge] += count
            self._totals[key] = Totals(tuple(counts.items()), counts.total(), device.window)
        return self._totals[key]

    def has(self, device: int) -> bool:
        """Returns whether a device has taken part, by its number."""
        return device in self._carried

    def entries(self, device: int) -> Iterator[tuple[int, ChargeKind, bytes]]:
        """Yields round, kind and update digest of each charge of a device; only of a store that is read."""
        for record in self.records:
            for place in np.flatnonzero(record.devices == device):
                yield record.round, self.kinds[record.kinds[place]], record.digests[32 * place : 32 * place + 32]

    def append(self, round: int, rows: Mapping[int, StateRow]) -> None:
        """Commits a round: one row of each device that took part."""
        kinds, shapes = len(self.kinds), len(self._shapes)
        each = list(rows.values())
        plain = {
            "round": round,
            "devices": np.array(list(rows), "<u4").tobytes(),
            "kinds": np.array([_place(self.kinds, row.kind) for row in each], "<u2").tobytes(),
            "digests": b"".join(row.digest for row in each),
            "participations": np.array([row.participations for row in each], "<u4").tobytes(),
            "slots": bytes(row.slot for row in each),
            "shapes": np.array([_place(self._shapes, row.arrays) for row in each], "<u2").tobytes(),
            "left_out": bytes(row.left_out for row in each),
            "small": [row.small for row in each],
            "new_kinds": [[dataclasses.asdict(charge), window] for charge, window in self.kinds[kinds:]],
            "new_shapes": self._shapes[shapes:],
        }
        del self.kinds[kinds:], self._shapes[shapes:]
        self._append(plain)

    def append_heads(self, round: int, heads: Mapping[int, bytes]) -> None:
        """Stores the personalized heads that devices chose after the last round, packed."""
        self._append({"round": round, "heads": [list(heads), list(heads.values())]})

    def _append(self, plain: dict[str, Any]) -> None:
        data = zlib.compress(msgpack.packb(plain), 1)
        framed = _FRAME.pack(len(data), zlib.crc32(data)) + data
        with self.path.open("r+b") as file:
            file.seek(self._end)
            file.write(framed)
        self._end += len(framed)
        self._take(plain)

    def _read(self, *, until: int | None, keep: bool) -> None:
        """Reads the records after the known ones; with `keep`, all must be whole."""
        with self.path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            if head and (len(head) < _HEAD_BYTES or not head.startswith(_HEAD)):
                raise StoreError(f"{self.path} is damaged, or of another version; begin the run anew")
            self._end = max(self._end, len(head))
            file.seek(self._end)
            while len(frame := file.read(_FRAME.size)) == _FRAME.size:
                length, checksum = _FRAME.unpack(frame)
                data = file.read(length)
                if len(data) < length or zlib.crc32(data) != checksum:
                    break
                plain = msgpack.unpackb(zlib.decompress(data))
                if until is not None and plain["round"] > until:
                    break
                self._take(plain, keep=keep)
                self._end += len(frame) + length
        if keep and self._end != self.path.stat().st_size:
            raise StoreError(f"{self.path} is damaged at byte {self._end}; begin the run anew, or go on by --resume")

    def _take(self, plain: dict[str, Any], *, keep: bool = False) -> None:
        if "heads" in plain:
            for device, head in zip(*plain["heads"], strict=True):
                self._carried[device].head = head
            return
        self.kinds += [
            ChargeKind(Charge(**{**charge, "raw": tuple(charge["raw"])}), window and Period(*window))
            for charge, window in plain["new_kinds"]
        ]
        for each in plain["new_shapes"]:
            self._shapes.append(tuple((name, dtype, tuple(shape)) for name, dtype, shape in each))
        devices, kinds = np.frombuffer(plain["devices"], "<u4"), np.frombuffer(plain["kinds"], "<u2")
        columns = (
            devices.tolist(),
            kinds.tolist(),
            np.frombuffer(plain["participations"], "<u4").tolist(),
            plain["slots"],
            np.frombuffer(plain["shapes"], "<u2").tolist(),
            plain["left_out"],
            plain["small"],
        )
        for number, kind, *state in zip(*columns, strict=True):
            device = self._carried.setdefault(number, _Device())
            device.counts[kind] = device.counts.get(kind, 0) + 1
            device.window = self.kinds[kind].window or device.window
            device.state = (*state, plain["round"])
        if keep:
            self.records.append(_Record(plain["round"], devices, kinds, plain["digests"]))


@dataclass(slots=True)
class _Device:
    """One device: counts of its charges by number of their kind, and the other columns of its last round."""

    counts: dict[int, int] = field(default_factory=dict)
    state: tuple[Any, ...] = ()
    window: Period | None = None
    head: bytes = b""

    def carried(self, totals: Totals, shapes: Sequence[Any]) -> Carried:
        participations, slot, shape, left_out, small, round = self.state
        return Carried(totals, participations, slot, shapes[shape], small, round, bool(left_out), self.head)


class StateSlots:
    """Large arrays of devices, in one file for each name: two places for each device, of which one is valid.

    :param folder: holds the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, device: int, slot: int, name: str, array: np.ndarray, *, round: int) -> None:
        """Writes an array to a place of a device. The file is sparse: places that are never used take no room."""
        data = np.ascontiguousarray(array)
        file = os.open(self._path(name, data.nbytes), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            parts = data.reshape(-1).view(np.uint8).data, _ROUND.pack(round)
            if os.pwritev(file, parts, _at(device, slot, data.nbytes)) != sum(map(len, parts)):
                raise StoreError(f"{self._folder} has no room; free some space")
        except OSError as error:
            raise StoreError(f"{self._folder} cannot be written: {error.strerror}") from error
        finally:
            os.close(file)

    def read(self, device: int, slot: int, name: str, dtype: str, shape: Sequence[int], *, round: int) -> np.ndarray:
        """Reads an array. Raises `StoreError` if it is not that of this round."""
        array = np.empty(shape, dtype)
        path, tail = self._path(name, array.nbytes), bytearray(_ROUND.size)
        try:
            file = os.open(path, os.O_RDONLY)
            try:
                found = os.preadv(file, [array.reshape(-1).view(np.uint8).data, tail], _at(device, slot, array.nbytes))
            finally:
                os.close(file)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}; begin the run anew") from error
        if found != array.nbytes + len(tail) or _ROUND.unpack(tail)[0] != round:
            raise StoreError(f"{path} does not hold {name} of round {round} of device {device}; begin the run anew")
        return array

    def _path(self, name: str, nbytes: int) -> str:
        return f"{self._folder}/{name}.{nbytes}"  # a `Path` takes as long as the reading


def index_of(device: str) -> int:
    """Returns the number of a simulated device, by its name."""
    return int(device.rpartition("-")[2])


def _at(device: int, slot: int, nbytes: int) -> int:
    return (2 * device + slot) * (-(-(nbytes + _ROUND.size) // _PAGE) * _PAGE)


def _place(known: list[Any], value: Any) -> int:
    """Returns the place of a value in a short list, to which it is added if it is new."""
    if value not in known:
        known.append(value)
    return known.index(value)


_READ: dict[bytes, CohortStore] = {}
"""The store that this process has read last, by the start of its file."""
