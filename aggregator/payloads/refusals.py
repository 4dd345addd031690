"""Counts refused messages: in memory at once, in the store once a second.

Anyone who may publish can send thousands of bad messages a second. No single message may cause its own disk write or
log line, and names that were never enrolled are counted together, so nothing grows without bound.
"""

from __future__ import annotations

import logging

from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import StoreError

FLUSH_S = 1.0
UNKNOWN = "unknown"

log = logging.getLogger("hushfleet.aggregator")


class RefusalCounter:
    """Counts refusals by device and code, and stores the counts from time to time.

    :param now: monotonic seconds.
    """

    def __init__(self, store: AggregatorStore, *, now: float) -> None:
        self._store = store
        self._counts: dict[tuple[str, str], int] = {}
        self._flushed_at = now

    def add(self, device: str | None, code: str, reason: str) -> None:
        """:param device: None for a sender that is not enrolled."""
        key = (device or UNKNOWN, code)
        if key not in self._counts:
            log.info("refused from %s (%s): %s", key[0], code, reason)
        self._counts[key] = self._counts.get(key, 0) + 1

    def flush(self, *, now: float, force: bool = False) -> dict[tuple[str, str], int]:
        """Stores the counts, at most once a second; returns those that were stored now: (device, code) -> count."""
        if not self._counts or (now - self._flushed_at < FLUSH_S and not force):
            return {}
        self._flushed_at = now
        try:
            with self._store.transaction():
                for (device, code), count in self._counts.items():
                    self._store.count_refusal(device, code, count=count)
        except StoreError as error:
            log.warning("refusals could not be stored: %s", error)
            return {}
        counts, self._counts = self._counts, {}
        return counts
