"""A run without what only a field needs: no coded bytes, no signatures, a plain file for each device's database.

Values, noise, charges and states are the field's, so that all models are the same bits. What updates would weigh on
their way is then not known; those for a secure sum stay as they are. A file is whole or not there when a process dies;
a power cut may take it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import struct
from pathlib import Path
from typing import Any, Self

import msgpack
import numpy as np

from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.atomic_file import write_whole
from hushfleet.config.schema import pack, unpack
from hushfleet.edge_client.storage.answers import Answers
from hushfleet.edge_client.storage.arrays import pack_arrays, unpack_arrays
from hushfleet.edge_client.storage.kept import KeptHead
from hushfleet.edge_client.storage.round_commit import OutboxEntry, RoundCommit
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput, HushfleetError, LedgerError, StoreError
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.privacy.ledger import LedgerEntry, LedgerView
from hushfleet.privacy.mechanism import Charge
from hushfleet.simulator.run_folder import DeviceFolder, Simulation
from hushfleet.wire.format.identity import Identity

_LENGTH = struct.Struct("<I")


def begin_lean(simulation: Simulation, store: AggregatorStore, *, lean: bool) -> None:
    """Raises `BadInput` for a run that was begun the other way."""
    before = store.get("lean") == b"1"
    if store.last_round() is not None and before != lean:
        word = "with" if before else "without"
        raise BadInput(f"the run in {simulation.folder.path} was begun {word} --lean; go on with it {word} --lean")
    store.put("lean", b"1" if lean else b"0")
    if lean:
        simulation.folder.updates.mkdir(exist_ok=True)


def end_lean(simulation: Simulation) -> None:
    """No round is open any more: their values may be as large as a cohort of models."""
    shutil.rmtree(simulation.folder.updates, ignore_errors=True)


def store_of(files: DeviceFolder, device: str, *, inspect: bool = True) -> DeviceStore | LeanStore:
    """The store of a device that took part, after the run.

    :param inspect: to read only.
    """
    if files.state.exists():
        return LeanStore(files.state, device=device)
    return DeviceStore(files.store, device=device, durable=False, inspect=inspect)


class NotKept:
    """In the place of an own model that no round should read again: what does, fails, and is told why."""

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise _not_kept()

    def __getattr__(self, name: str) -> object:
        raise _not_kept()


def _not_kept() -> HushfleetError:
    return HushfleetError(
        "a round needs the own model that its device had before, for a part of the method or since training has "
        "diverged. A lean run keeps it only for methods whose rounds begin with it (`Method.reads_own`); run it "
        "without --lean"
    )


class LeanLedger(LedgerView):
    """Entries as they are kept; nobody else writes them, so that nothing is verified."""

    def __init__(self, device: str, entries: list[LedgerEntry]) -> None:
        self.device = device
        self._entries = entries

    def entries(self, task: str | None = None) -> list[LedgerEntry]:
        return [entry for entry in self._entries if task in (None, entry.task)]


class LeanStore:
    """FOR SIMULATION ONLY: what `DeviceStore` keeps of one task's rounds, in one file that each round writes anew.

    :param identity: as for `DeviceStore`; None to read only.
    :param keeps_own: False for a device whose own model no round reads again. Of a large fleet most of the time would
        go into keeping those, and most of the disk.
    """

    def __init__(self, path: Path, *, device: str, identity: Identity | None = None, keeps_own: bool = True) -> None:
        self._path, self._keeps_own = path, keeps_own
        self.device = device
        self.identity = identity or Identity.from_bytes(bytes(32))
        self._kept, self._own = _read(path) if path.exists() else ({}, None)
        self.ledger = LeanLedger(device, [_entry(plain) for plain in self._kept.get("entries", ())])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    @property
    def answers(self) -> Answers:
        raise StoreError("a lean run has no committees")

    def outbox(self, task: str, round: int) -> OutboxEntry | None:
        if self._kept.get("round") != round:
            return None
        update = self._kept["update"]
        return OutboxEntry(task, round, update, hashlib.sha256(update).digest(), b"", "pending")

    def package_of(self, task: str) -> bytes | None:
        return self._kept.get("package")

    def load_state(self, task: str) -> DeviceState | None:
        if not self._kept:
            return None
        public = PublicState.from_bytes(self._kept["public"], size=self._kept["size"])
        own: Any = NotKept() if self._kept["left_out"] else self._own
        return DeviceState(public, own, unpack_arrays(self._kept["private"]))

    def own_params(self, task: str) -> np.ndarray | None:
        """As `DeviceStore.own_params`."""
        head = self._kept.get("head")
        return self._own if head is None else unpack(KeptHead, head, what="the own head").params

    def keep_own_head(self, head: KeptHead) -> None:
        self._keep({**self._kept, "head": pack(head)}, self._own)

    def load_residual(self, task: str, *, size: int) -> np.ndarray:
        kept = unpack_arrays(self._kept["residual"]) if self._kept else {}
        return kept.get("", np.zeros(size, np.float32))

    def commit_round(self, commit: RoundCommit) -> OutboxEntry:
        if any(entry.round == commit.round for entry in self.ledger.entries()):
            raise LedgerError(f"round {commit.round} of task {commit.task!r} is already charged")
        digest, state = hashlib.sha256(commit.update).digest(), commit.state
        own = state.own if self._keeps_own and not isinstance(state.own, NotKept) else None
        entries = [*self.ledger.entries(), LedgerEntry(commit.task, commit.round, commit.charge, digest)]
        kept = {
            "round": commit.round,
            "package": commit.package,
            "update": commit.update,
            "entries": [dataclasses.asdict(entry) for entry in entries],
            "size": int(np.asarray(state.public.mask).size),
            "public": state.public.to_bytes(),
            "private": pack_arrays(state.private),
            "residual": pack_arrays({} if commit.residual is None else {"": commit.residual}),
            "has_own": own is not None,
            "left_out": own is not state.own,
        }
        self._keep(kept, own)
        self.ledger = LeanLedger(self.device, entries)
        return OutboxEntry(commit.task, commit.round, commit.update, digest, commit.public_before, "pending")

    def _keep(self, kept: dict[str, Any], own: np.ndarray | None) -> None:
        head, values = msgpack.packb(kept), b"" if own is None else np.ascontiguousarray(own, "<f4").data
        write_whole(self._path, b"".join((_LENGTH.pack(len(head)), head, values)), durable=False)
        self._kept, self._own = kept, own


def _read(path: Path) -> tuple[dict[str, Any], np.ndarray | None]:
    """What is kept, and the own model, float32 `[d]`."""
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
    return LedgerEntry(plain["task"], plain["round"], charge, plain["payload_digest"])
