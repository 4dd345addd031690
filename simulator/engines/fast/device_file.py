"""Implements a simulated device's store: one plain file instead of a board's database.

Charges, states and updates are the same as in the field, so that all models are bit-identical. If a process dies, a
file is complete or missing; a power cut may destroy it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgpack
import numpy as np

from hushfleet.atomic_file import write_whole
from hushfleet.durations import Period
from hushfleet.edge_client.storage.answers import Answers
from hushfleet.edge_client.storage.arrays import pack_arrays, unpack_arrays
from hushfleet.edge_client.storage.kept import KeptModel
from hushfleet.edge_client.storage.round_commit import OutboxEntry, RoundCommit
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import HushfleetError, LedgerError, StoreError
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.privacy.charge import Charge, Totals
from hushfleet.privacy.ledger import LedgerEntry, LedgerView, Tally
from hushfleet.schema import pack, unpack
from hushfleet.simulator.run_folder import DeviceFolder
from hushfleet.wire.format.identity import Identity

if TYPE_CHECKING:
    from hushfleet.edge_client.storage.store import DeviceStore

_LENGTH = struct.Struct("<I")


def store_of(files: DeviceFolder, device: str, *, inspect: bool = True) -> DeviceStore | DeviceFile:
    """Opens the store of a device that took part, after the run: a file, or the database of the live engine.

    :param inspect: True if the store is only read.
    """
    if files.state.exists():
        return DeviceFile(files.state, device=device)
    from hushfleet.edge_client.storage.store import DeviceStore

    return DeviceStore(files.store, device=device, durable=False, inspect=inspect)


class NotKept:
    """A placeholder for a personalized model that was not kept; raises `HushfleetError` when it is read."""

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise _not_kept()

    def __getattr__(self, name: str) -> object:
        raise _not_kept()


def _not_kept() -> HushfleetError:
    return HushfleetError(
        "a round needs the personalized model that its device had before, and a simulation keeps that only for "
        "methods whose rounds begin with it (`Method.reads_own`) and for the first devices; run it with --engine live"
    )


class _Ledger(LedgerView):
    """Holds the entries of a device's file. Only this program writes them, so nothing is verified."""

    def __init__(self, device: str, entries: list[LedgerEntry]) -> None:
        self.device = device
        self._entries = entries

    def entries(self, task: str | None = None) -> list[LedgerEntry]:
        return [entry for entry in self._entries if task in (None, entry.task)]

    def totals(self, task: str | None = None) -> Totals:
        tally = Tally()
        for entry in self.entries(task):
            tally.add(entry, new_round=True)
        return tally.totals()


class DeviceFile:
    """Keeps the content of a `DeviceStore` for one task, in a file that each round writes again. FOR SIMULATION ONLY.

    :param identity: as for `DeviceStore`; None to read only.
    :param keeps_own: False for a device whose personalized model no round reads again: in a large fleet these models
        would take most of the time and disk space.
    """

    def __init__(self, path: Path, *, device: str, identity: Identity | None = None, keeps_own: bool = True) -> None:
        self._path, self._keeps_own = path, keeps_own
        self.device = device
        self.identity = identity or Identity.from_bytes(bytes(32))
        self._version = _version(path)
        self._kept, self._own = _read(path) if path.exists() else ({}, None)
        self.ledger = _Ledger(device, [_entry(plain) for plain in self._kept.get("entries", ())])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing, because no file is open."""

    @property
    def answers(self) -> Answers:
        raise StoreError("a device of the fast engine is in no committee")

    def outbox(self, task: str, round: int) -> OutboxEntry | None:
        if self._kept.get("round") != round:
            return None
        update = self._kept["update"]
        return OutboxEntry(task, round, update, hashlib.sha256(update).digest(), self._kept["public_before"], "pending")

    def package_of(self, task: str) -> bytes | None:
        return self._kept.get("package")

    def load_state(self, task: str) -> DeviceState | None:
        if not self._kept:
            return None
        public = PublicState.from_bytes(self._kept["public"], size=self._kept["size"])
        own: Any = NotKept() if self._kept["left_out"] else self._own
        return DeviceState(public, own, unpack_arrays(self._kept["private"]))

    def own_params(self, task: str) -> np.ndarray | None:
        """Returns the parameters with which the device predicts, as `DeviceStore.own_params` does."""
        head = self._kept.get("head")
        return self._own if head is None else unpack(KeptModel, head, what="the personalized head").params

    def keep_model(self, head: KeptModel) -> None:
        self._keep({**self._kept, "head": pack(head)}, self._own)

    def load_residual(self, task: str, *, size: int) -> np.ndarray:
        kept = unpack_arrays(self._kept["residual"]) if self._kept else {}
        return kept.get("", np.zeros(size, np.float32))

    def commit_round(self, commit: RoundCommit[DeviceState]) -> OutboxEntry:
        if any(entry.round == commit.round for entry in self.ledger.entries()):
            raise LedgerError(f"round {commit.round} of task {commit.task!r} is already charged")
        digest, state = hashlib.sha256(commit.update).digest(), commit.state
        own = state.own if self._keeps_own and not isinstance(state.own, NotKept) else None
        entries = [
            *self.ledger.entries(),
            LedgerEntry(commit.task, commit.round, commit.charge, digest, commit.at, commit.window),
        ]
        kept = {
            "round": commit.round,
            "package": commit.package,
            "update": commit.update,
            "public_before": commit.public_before,
            "entries": [dataclasses.asdict(entry) for entry in entries],
            "size": int(np.asarray(state.public.mask).size),
            "public": state.public.to_bytes(),
            "private": pack_arrays(state.private),
            "residual": pack_arrays({} if commit.residual is None else {"": commit.residual}),
            "has_own": own is not None,
            "left_out": own is not state.own,
        }
        self._keep(kept, own)
        self.ledger = _Ledger(self.device, entries)
        return OutboxEntry(commit.task, commit.round, commit.update, digest, commit.public_before, "pending")

    def _keep(self, kept: dict[str, Any], own: np.ndarray | None) -> None:
        if _version(self._path) != self._version:  # for example, a Ray worker that seemed dead continues
            raise StoreError(f"{self._path} was written by another process meanwhile")
        head, values = msgpack.packb(kept), b"" if own is None else np.ascontiguousarray(own, "<f4").data
        write_whole(self._path, b"".join((_LENGTH.pack(len(head)), head, values)), durable=False)
        self._kept, self._own, self._version = kept, own, _version(self._path)


def _version(path: Path) -> tuple[int, int] | None:
    """Returns a version that changes with each write of the file; None without a file."""
    with suppress(FileNotFoundError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns
    return None


def _read(path: Path) -> tuple[dict[str, Any], np.ndarray | None]:
    """Reads the content, and the personalized model, float32 `[d]`. Raises `StoreError` if the file is damaged."""
    try:
        with path.open("rb") as file:
            kept = msgpack.unpackb(file.read(_LENGTH.unpack(file.read(_LENGTH.size))[0]))
            own = np.fromfile(file, "<f4", kept["size"]) if kept["has_own"] else None
    except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is damaged: {error}; begin the run anew") from error
    if own is not None and len(own) != kept["size"]:
        raise StoreError(f"{path} is damaged: {len(own)} of {kept['size']} own parameters; begin the run anew")
    return kept, own


def _entry(plain: dict[str, Any]) -> LedgerEntry:
    charge = Charge(**{**plain["charge"], "raw": tuple(plain["charge"]["raw"])})
    window = plain.get("window")
    timed = plain.get("at", 0), window and Period(*window)
    return LedgerEntry(plain["task"], plain["round"], charge, plain["payload_digest"], *timed)
