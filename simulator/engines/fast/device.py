"""Implements the store of a device of the fast engine, on what `CohortStore` keeps. FOR SIMULATION ONLY.

Charges, states and updates are the same as in the field, so that all models are bit-identical.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hushfleet.edge_client.storage.answers import Answers
from hushfleet.edge_client.storage.arrays import pack_arrays, unpack_arrays
from hushfleet.edge_client.storage.kept import KeptModel
from hushfleet.edge_client.storage.round_commit import OutboxEntry, RoundCommit
from hushfleet.errors import HushfleetError, StoreError
from hushfleet.methods import method_of
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.privacy.charge import Charge, Totals
from hushfleet.privacy.ledger import LedgerEntry, LedgerView, epsilon_server_of
from hushfleet.privacy.terms import Accountant
from hushfleet.schema import unpack
from hushfleet.simulator.cohort_store import Carried, ChargeKind, CohortStore, StateRow, StateSlots, index_of
from hushfleet.simulator.engines.fast.sums import nobody
from hushfleet.simulator.run_folder import RunFolder
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.spec import BlobRef, TaskSpec

if TYPE_CHECKING:
    from hushfleet.edge_client.storage.store import DeviceStore

_SMALL_BYTES = 1024
"""Arrays of at most this size are in the records."""
OWN, _RESIDUAL, _MASK, _PRIVATE = "own", "residual", "mask", "private-"


class NotKept:
    """A placeholder for a personalized model that was not kept; raises `HushfleetError` when it is read."""

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise _not_kept()

    def __getattr__(self, name: str) -> object:
        raise _not_kept()


@lru_cache(maxsize=1024)
def _epsilon_of(totals: Totals, extra: Charge | None, delta: float, accountant: Accountant) -> float:
    """Returns the epsilon of these charges: many devices have the same."""
    charges = totals.charges if extra is None else [*totals.charges, extra]
    return epsilon_server_of(charges, delta=delta, accountant=accountant)


def _not_kept() -> HushfleetError:
    return HushfleetError(
        "a round needs the personalized model that its device had before, and a simulation keeps that only for "
        "methods whose rounds begin with it (`Method.reads_own`) and for the first devices; run it with --engine live"
    )


class CountedCharges(LedgerView):
    """The charges of a device, as totals by kind. Only this program writes them, so nothing is verified."""

    def __init__(
        self, device: str, task: str, carried: Carried | None, listed: Callable[[], list[LedgerEntry]]
    ) -> None:
        self.device = device
        self._task, self._listed = task, listed
        self._totals = Totals() if carried is None else carried.totals

    def entries(self, task: str | None = None) -> list[LedgerEntry]:
        return self._listed() if task in (None, self._task) else []

    def totals(self, task: str | None = None) -> Totals:
        return self._totals if task in (None, self._task) else Totals()

    def epsilon_server(
        self,
        *,
        delta: float,
        task: str | None = None,
        extra: Charge | None = None,
        accountant: Accountant = "exact",
    ) -> float:
        return _epsilon_of(self.totals(task), extra, delta, accountant)


class CohortDevice:
    """A device's part of a `CohortStore`: `RoundStore` for one round, or for reading.

    :param newcomer: the state of a device that has not taken part.
    :param make_identity: makes the key that signs updates.
    :param keeps_own: False for a device whose personalized model no round reads again: in a large fleet these models
        would take most of the time and disk space.
    :param listed: returns the entries of the ledger, if they can be listed.
    """

    def __init__(
        self,
        device: str,
        index: int,
        carried: Carried | None,
        slots: StateSlots,
        *,
        task: str,
        package: bytes,
        newcomer: PublicState,
        make_identity: Callable[[], Identity],
        keeps_own: bool = True,
        listed: Callable[[], list[LedgerEntry]] = list,
    ) -> None:
        self.device, self.index = device, index
        self._carried, self._slots, self._newcomer = carried, slots, newcomer
        self._package, self.keeps_own, self._make_identity = package, keeps_own, make_identity
        self.ledger = CountedCharges(device, task, carried, listed)
        self.row: StateRow | None = None
        self._after: PublicState | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing, because no file is open."""

    @cached_property
    def identity(self) -> Identity:
        return self._make_identity()

    @property
    def answers(self) -> Answers:
        raise StoreError("a device of the fast engine is in no committee")

    def outbox(self, task: str, round: int) -> OutboxEntry | None:
        """Returns None: a round that was not committed is trained again, and then the bits are the same."""
        return None

    def package_of(self, task: str) -> bytes | None:
        return None if self._carried is None else self._package

    def load_state(self, task: str) -> DeviceState | None:
        carried = self._carried
        if carried is None:
            return None
        own: Any = NotKept() if carried.left_out else self._array(OWN)
        names = [name for name, *_ in carried.arrays if name.startswith(_PRIVATE)]
        private: dict[str, Any] = {name.removeprefix(_PRIVATE): self._array(name) for name in names}
        return DeviceState(self.public, own, {**unpack_arrays(carried.small), **private} if carried.small else private)

    def own_params(self, task: str) -> np.ndarray | None:
        """Returns the parameters with which the device predicts, as `DeviceStore.own_params` does."""
        if self._carried is not None and self._carried.head:
            return unpack(KeptModel, self._carried.head, what="the personalized head").params
        return self._array(OWN)

    def load_residual(self, task: str, *, size: int) -> np.ndarray:
        residual = self._array(_RESIDUAL)
        return np.zeros(size, np.float32) if residual is None else residual

    def commit_round(self, commit: RoundCommit[DeviceState]) -> OutboxEntry:
        """Writes the large arrays to the place that is not valid, and keeps the row that makes it valid."""
        digest, state = hashlib.sha256(commit.update).digest(), commit.state
        own = state.own if self.keeps_own and not isinstance(state.own, NotKept) else None
        arrays, small = dict[str, np.ndarray](), dict[str, np.ndarray]()
        if own is not None:
            arrays[OWN] = np.asarray(own, np.float32)
        if commit.residual is not None:
            arrays[_RESIDUAL] = commit.residual
        if not _same(state.public.mask, self._newcomer.mask):
            arrays[_MASK] = np.packbits(state.public.mask)
        for name, value in state.private.items():
            array = np.asarray(value)
            if array.nbytes > _SMALL_BYTES:
                arrays[f"{_PRIVATE}{name}"] = array
            else:
                small[name] = array
        self._after = state.public
        self.row = committed(
            self.index,
            self._carried,
            self._slots,
            arrays,
            round=commit.round,
            charge=ChargeKind(commit.charge, commit.window),
            digest=digest,
            participations=state.public.participations,
            small=pack_arrays(small) if small else b"",
            left_out=own is not state.own,
        )
        return OutboxEntry(commit.task, commit.round, commit.update, digest, commit.public_before, "pending")

    @cached_property
    def public(self) -> PublicState:
        """The device's public state before the round."""
        carried, newcomer, bits = self._carried, self._newcomer, self._array(_MASK)
        if carried is None or bits is None:
            return newcomer if carried is None else newcomer.counted(carried.participations)
        mask = np.unpackbits(bits)[: newcomer.mask.size].astype(bool)
        return PublicState(mask, carried.participations)

    @property
    def changed_state(self) -> bytes | None:
        """The device's public state after the round, if its mask has changed."""
        after = self._after
        return None if after is None or _same(after.mask, self.public.mask) else after.to_bytes()

    def _array(self, name: str) -> np.ndarray | None:
        """Returns a large array of the last round; None if it has none of this name."""
        carried = self._carried
        for found, dtype, shape in () if carried is None else carried.arrays:
            if found == name and carried is not None:
                return self._slots.read(self.index, carried.slot, name, dtype, shape, round=carried.round)
        return None


def committed(
    index: int,
    carried: Carried | None,
    slots: StateSlots,
    arrays: Mapping[str, np.ndarray],
    *,
    round: int,
    charge: ChargeKind,
    digest: bytes,
    participations: int,
    small: bytes = b"",
    left_out: bool = False,
) -> StateRow:
    """Writes a device's large arrays to the place that is not valid; returns the row that makes it valid.

    :param index: number of the device.
    """
    slot = 1 if carried is not None and carried.slot == 0 else 0
    for name, array in arrays.items():
        slots.write(index, slot, name, array, round=round)
    shapes = tuple((name, array.dtype.str, array.shape) for name, array in arrays.items())
    return StateRow(charge, digest, participations, slot, shapes, small, left_out)


def _same(one: Any, other: Any) -> bool:
    """Returns whether two masks are equal; most are the same object."""
    return one is other or bool(np.array_equal(one, other))


def store_of(folder: RunFolder, device: str, *, inspect: bool = True) -> DeviceStore | CohortDevice:
    """Opens the store of a device that took part, after the run: its part of the run's store, or the live engine's
    database.

    :param inspect: True if the store is only read.
    """
    files = folder.device(device)
    if files.store.exists():
        from hushfleet.edge_client.storage.store import DeviceStore

        return DeviceStore(files.store, device=device, durable=False, inspect=inspect)
    (spec, newcomer, package), store, index = _task(folder.package), CohortStore.read(folder.cohort), index_of(device)
    return CohortDevice(
        device,
        index,
        store.carried(index),
        StateSlots(folder.states),
        task=spec.task,
        package=package,
        newcomer=newcomer,
        make_identity=nobody,
        listed=lambda: [
            LedgerEntry(spec.task, round, kind.charge, digest, 0, kind.window)
            for round, kind, digest in store.entries(index)
        ],
    )


@lru_cache(maxsize=2)
def _task(package: Path) -> tuple[TaskSpec, PublicState, bytes]:
    """Returns a run's task, the state of its devices before they take part, and SHA-256 of the package."""
    data = package.read_bytes()
    spec = TaskSpec.from_bytes(data)
    return spec, method_of(spec).init_state().public, BlobRef.of(data).digest
