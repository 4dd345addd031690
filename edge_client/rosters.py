"""Fetches the roster of a plan with a secure sum, and accepts the newest one alone."""

from __future__ import annotations

from hushfleet.edge_client.download import BlobSource
from hushfleet.edge_client.storage.kept import RosterMark
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import Replayed, TooLarge, WireError
from hushfleet.secure.roster import MAX_ROSTER_BYTES, SEEN_NEWER, Roster
from hushfleet.wire.format.spec import BlobRef


class RosterSource:
    """The roster of a plan with a secure sum: fetched once, checked, and kept in memory.

    The store keeps only the latest for a restart: all would fill the card of a device that never trains. It also keeps
    the highest number that the operator has signed: an older roster may name boards that were stolen since.

    :param operator: the Ed25519 key that must have signed it; None if the device trusts the aggregator.
    """

    def __init__(self, store: DeviceStore, blobs: BlobSource, *, federation: str, operator: bytes | None) -> None:
        self._store = store
        self._blobs = blobs
        self._federation = federation
        self._operator = operator
        self._latest: tuple[BlobRef, Roster] | None = None

    def need(self, ref: BlobRef) -> Roster | None:
        """Returns the roster; None while it is being fetched.

        Raises `Malformed`, `TooLarge`, `BadSignature`, `StoreError`, or `Replayed` for a roster that is not the newest.
        """
        if self._latest is None or self._latest[0] != ref:
            if ref.size > MAX_ROSTER_BYTES:
                raise TooLarge(f"a roster of {ref.size} bytes is above the cap of {MAX_ROSTER_BYTES}")
            data = self._blobs.need(ref)
            if data is None:
                return None
            try:
                roster = Roster.from_bytes(data, operator=self._operator)
                if self._operator is not None:
                    self._pin(roster, self._operator)
            except WireError:
                self._drop(ref)
                raise
            before, self._latest = self._latest, (ref, roster)
            if before is not None:
                self._drop(before[0])
        return self._latest[1]

    def kept(self) -> set[bytes]:
        """Returns the digest of the latest roster, which stays in the store for a restart."""
        return set() if self._latest is None else {self._latest[0].digest}

    def _pin(self, roster: Roster, operator: bytes) -> None:
        """Stores the roster's number as the newest. Raises `Replayed` and `StoreError`."""
        if roster.federation != self._federation:
            raise Replayed(
                f"{roster.name} names the federation {roster.federation!r}, and this device is in {self._federation!r}"
            )
        scope, seen = RosterMark.scope(self._federation, operator), RosterMark.of(roster)
        newest = self._store.newest_roster(scope)
        if newest is not None and seen.number < newest.number:
            raise Replayed(
                f"{roster.name} is older than {newest.name}, {SEEN_NEWER}: it may name boards that were "
                "locked out since, so it is not taken any more"
            )
        if newest is not None and seen.number == newest.number and seen != newest:
            raise Replayed(f"the operator has signed two different rosters as {roster.name}: let it sign a new one")
        if seen != newest:
            self._store.pin_roster(scope, seen)

    def _drop(self, ref: BlobRef) -> None:
        self._store.drop_blobs(keep=self._store.blob_digests() - {ref.digest})
