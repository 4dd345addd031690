"""Fetching one content-addressed blob: ask, collect chunks in any order, ask again for what is missing.

The device subscribes to the blob's topic first, so that chunks which another device asked for count too.
"""

from __future__ import annotations

from collections.abc import Callable

from hushfleet.config.spec import BlobRef
from hushfleet.edge_client.net.backoff import Patience
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import Malformed
from hushfleet.wire.format.chunks import Assembler
from hushfleet.wire.format.messages import Want
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Link

FIRST_WAIT_S = 3.0
LONGEST_WAIT_S = 60.0


class Fetch:
    """A fetch in progress; the agent sends what `want` gives when `due` says so.

    :param ref: SHA-256 and size, from a signed message or a verified blob.
    :param most_asks: how often it is asked for without any progress; None for as long as it takes.
    """

    def __init__(self, ref: BlobRef, *, now: float, most_asks: int | None = None) -> None:
        self.ref = ref
        self._most_asks = most_asks
        self._asked = 0
        self._assembler = Assembler(ref.digest, ref.size, max_blob_bytes=ref.size)
        self._patience = Patience(FIRST_WAIT_S, LONGEST_WAIT_S, now=now)

    @property
    def due_at(self) -> float:
        """When to ask (again), on the monotonic clock."""
        return self._patience.due_at

    @property
    def hopeless(self) -> bool:
        """It was asked for in vain as often as it may be."""
        return self._most_asks is not None and self._asked >= self._most_asks

    def restart_clock(self, now: float) -> None:
        """Ask at once: the fetch is new, the link came back, or the aggregator did."""
        self._patience.reset(now, wait=False)
        self._asked = 0

    def want(self, now: float) -> Want:
        """What to ask for now; the next time comes later and later while nothing arrives."""
        self._patience.tried(now)
        self._asked += 1
        return Want(self.ref.digest, self.ref.size, self._assembler.missing())

    def add(self, frame: bytes, now: float) -> bytes | None:
        """Takes one chunk; the verified blob once it is whole.

        Raises `Malformed` or `TooLarge`. If the whole does not fit its digest, all is asked for anew.
        """
        if self._assembler.add(frame):
            self._patience.reset(now, wait=True)
            self._asked = 0
        if not self._assembler.complete:
            return None
        try:
            return self._assembler.blob()
        except Malformed:
            self._patience.reset(now, wait=True)
            self._asked = self._most_asks or 0
            raise


class BlobSource:
    """The store's blobs, and the one that is on its way into it: one at a time, since memory is short.

    :param clock: monotonic seconds.
    """

    def __init__(self, store: DeviceStore, link: Link, topics: Topics, clock: Callable[[], float]) -> None:
        self._store = store
        self._link = link
        self._topics = topics
        self._clock = clock
        self.fetch: Fetch | None = None
        self._given_up: BlobRef | None = None

    def need(self, ref: BlobRef, *, most_asks: int | None = None) -> bytes | None:
        """The blob from the store; else None, and it is being fetched. Raises `StoreError`.

        :param most_asks: after so many without any progress, or if other bytes come in its place, it is given up: the
            next call raises `Malformed`.
        """
        data = self._store.blob(ref.digest)
        if data is None and self._given_up == ref:
            self._given_up = None
            raise Malformed(f"the blob {ref.digest.hex()[:16]}... does not come")
        if data is None and (self.fetch is None or self.fetch.ref != ref):
            self.drop()
            self.fetch = Fetch(ref, now=self._clock(), most_asks=most_asks)
            self._link.subscribe(self._topics.blob(ref.digest))
        return data

    def want(self, now: float) -> Want | None:
        """What is to be asked for now, if anything is due."""
        fetch = self.fetch
        if fetch is None or now < fetch.due_at:
            return None
        if fetch.hopeless:
            self._given_up = fetch.ref
            self.drop()
            return None
        return fetch.want(now)

    def on_chunk(self, digest: bytes, frame: bytes) -> None:
        """Raises a `WireError` for a bad frame, and `StoreError` when a whole blob cannot be kept."""
        if self.fetch is None or digest != self.fetch.ref.digest:
            return
        blob = self.fetch.add(frame, self._clock())
        if blob is not None:
            self.drop()
            self._store.put_blob(digest, blob)

    def drop(self) -> None:
        """Nobody needs any more what is being fetched, or it is there."""
        if self.fetch is not None:
            self._link.unsubscribe(self._topics.blob(self.fetch.ref.digest))
            self.fetch = None
