"""Fetches the membership list of a plan with secure aggregation, and accepts the newest one alone."""

from __future__ import annotations

from hushfleet.edge_client.download import BlobSource
from hushfleet.edge_client.storage.kept import MembershipListMark
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import Replayed, TooLarge, WireError
from hushfleet.secure.membership_list import MAX_MEMBERSHIP_LIST_BYTES, SEEN_NEWER, MembershipList
from hushfleet.wire.format.spec import BlobRef


class MembershipListSource:
    """The membership list of a plan with secure aggregation: fetched once, checked, and kept in memory.

    The store keeps only the latest for a restart: all would fill the card of a device that never trains. It also keeps
    the highest number that the operator has signed: an older membership list may name boards that were stolen since.

    :param operator: the Ed25519 key that must have signed it; None if the device trusts the aggregator.
    """

    def __init__(self, store: DeviceStore, blobs: BlobSource, *, federation: str, operator: bytes | None) -> None:
        self._store = store
        self._blobs = blobs
        self._federation = federation
        self._operator = operator
        self._latest: tuple[BlobRef, MembershipList] | None = None

    def need(self, ref: BlobRef) -> MembershipList | None:
        """Returns the membership list; None while it is being fetched.

        Raises `Malformed`, `TooLarge`, `BadSignature`, `StoreError`, or `Replayed` for a membership list that is not
        the newest.
        """
        if self._latest is None or self._latest[0] != ref:
            if ref.size > MAX_MEMBERSHIP_LIST_BYTES:
                raise TooLarge(f"a membership list of {ref.size} bytes is above the cap of {MAX_MEMBERSHIP_LIST_BYTES}")
            data = self._blobs.need(ref)
            if data is None:
                return None
            try:
                membership_list = MembershipList.from_bytes(data, operator=self._operator)
                if self._operator is not None:
                    self._pin(membership_list, self._operator)
            except WireError:
                self._drop(ref)
                raise
            before, self._latest = self._latest, (ref, membership_list)
            if before is not None:
                self._drop(before[0])
        return self._latest[1]

    def kept(self) -> set[bytes]:
        """Returns the digest of the latest membership list, which stays in the store for a restart."""
        return set() if self._latest is None else {self._latest[0].digest}

    def _pin(self, membership_list: MembershipList, operator: bytes) -> None:
        """Stores the membership list's number as the newest. Raises `Replayed` and `StoreError`."""
        if membership_list.federation != self._federation:
            raise Replayed(
                f"{membership_list.name} names the federation {membership_list.federation!r}, and this device is in "
                f"{self._federation!r}"
            )
        scope, seen = MembershipListMark.scope(self._federation, operator), MembershipListMark.of(membership_list)
        newest = self._store.newest_membership_list(scope)
        if newest is not None and seen.number < newest.number:
            raise Replayed(
                f"{membership_list.name} is older than {newest.name}, {SEEN_NEWER}: it may name boards that were "
                "locked out since, so it is not taken any more"
            )
        if newest is not None and seen.number == newest.number and seen != newest:
            raise Replayed(
                f"the operator has signed two different membership lists as {membership_list.name}: let it sign a new "
                "one"
            )
        if seen != newest:
            self._store.pin_membership_list(scope, seen)

    def _drop(self, ref: BlobRef) -> None:
        self._store.drop_blobs(keep=self._store.blob_digests() - {ref.digest})
