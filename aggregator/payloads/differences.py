"""Keeps the differences between the last global models in the run's store, with the round that made each of them."""

from __future__ import annotations

import hashlib
import logging
from typing import NamedTuple

from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import WireError
from hushfleet.wire.format.difference import DifferenceHeader, EncodedDifference, read_difference_header
from hushfleet.wire.format.messages import BASE_BYTES, MAX_DIFFERENCES, DifferenceRef

log = logging.getLogger("hushfleet.aggregator")


class _Offered(NamedTuple):
    round: int
    ref: DifferenceRef
    data: bytes


class Differences:
    """Differences that are offered to devices, oldest first; together they are smaller than one model.

    :param full_bytes: size of a whole model.
    """

    def __init__(self, store: AggregatorStore, *, full_bytes: int) -> None:
        self._store = store
        self._full_bytes = full_bytes
        self._offered: list[_Offered] = []

    @property
    def refs(self) -> tuple[DifferenceRef, ...]:
        """References for a plan; the last one gives the current model."""
        return tuple(each.ref for each in self._offered)

    def find(self, digest: bytes) -> bytes | None:
        """Returns the blob with this SHA-256, or None if it is not offered."""
        return next((each.data for each in self._offered if each.ref.digest == digest), None)

    def load(self, current: bytes) -> None:
        """Offers the unbroken chain of undamaged differences that leads to the model with the SHA-256 `current`."""
        self._offered, wanted = [], current
        for digest, data in self._store.differences():
            try:
                header = read_difference_header(data)
            except WireError as error:
                log.warning("a difference is not offered: %s", error)
                continue
            if header.result == wanted and hashlib.sha256(data).digest() == digest:
                self._offered.insert(0, _offer(header, data))
                wanted = header.base

    def write(self, new: EncodedDifference | None) -> None:
        """Stores what will be offered after `advance`; call it inside the transaction that closes the round."""
        kept = self._with(new)
        self._store.drop_differences(before=kept[0].round if kept else None)
        for each in kept[-1:]:
            self._store.put_difference(each.round, each.ref.digest, each.data)

    def advance(self, new: EncodedDifference | None) -> None:
        """Makes the result of `new` the current model; `new` is None if no difference leads to that model."""
        self._offered = self._with(new)

    def _with(self, new: EncodedDifference | None) -> list[_Offered]:
        """Returns the newest differences that are together cheaper than a whole model."""
        together, kept = 0, list[_Offered]()
        candidates = [] if new is None else [*self._offered, _offer(new.header, new.data)]
        for each in reversed(candidates[-MAX_DIFFERENCES:]):
            together += each.ref.size
            if together >= self._full_bytes:
                break
            kept.insert(0, each)
        return kept


def _offer(header: DifferenceHeader, data: bytes) -> _Offered:
    return _Offered(
        header.round, DifferenceRef(header.base[:BASE_BYTES], hashlib.sha256(data).digest(), len(data)), data
    )
