"""Fetches content-addressed blobs from the aggregator, and a plan's global model (perhaps as differences).

A device subscribes to a blob's topic before it asks, so that it also uses chunks that another device asked for. It
fetches one blob at a time, because memory is short; the differences of a plan, which are together smaller than its
model, it fetches at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from hushfleet.edge_client.rate_limits import Backoff
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import Malformed, WireError
from hushfleet.wire.format.chunks import Assembler
from hushfleet.wire.format.messages import BASE_BYTES, DifferenceRef, RoundPlan, Want
from hushfleet.wire.format.spec import BlobRef, TaskSpec
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Link

FIRST_WAIT_S = 3.0
LONGEST_WAIT_S = 60.0
MOST_ASKS = 4
"""Most requests for a difference without an answer: with the waits in between, 45 s of a link that is up."""

_log = logging.getLogger("hushfleet.edge")


class Fetch:
    """The blob that is being fetched: its chunks, in any order, and the next request.

    :param ref: SHA-256 and size, from a signed message or a verified blob.
    :param most_asks: the most requests without any progress; None for no limit.
    """

    def __init__(self, ref: BlobRef, *, now: float, most_asks: int | None = None) -> None:
        self.ref = ref
        self._most_asks = most_asks
        self._asked = 0
        self._assembler = Assembler(ref.digest, ref.size, max_blob_bytes=ref.size)
        self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S, now=now)

    @property
    def due_at(self) -> float:
        """The time of the next request, on the monotonic clock."""
        return self._backoff.due_at

    @property
    def hopeless(self) -> bool:
        """True if the most requests without progress were made."""
        return self._most_asks is not None and self._asked >= self._most_asks

    def ask_at_once(self, now: float) -> None:
        """Makes a request due, because the link or the aggregator came back."""
        self._progress(now, wait=False)

    def want(self, now: float) -> Want:
        """Returns a request for the missing chunks; the wait for the next one grows while nothing arrives."""
        self._backoff.tried(now)
        self._asked += 1
        return Want(self.ref.digest, self.ref.size, self._assembler.missing())

    def add(self, frame: bytes, now: float) -> bytes | None:
        """Adds one chunk; returns the verified blob once it is complete.

        Raises `Malformed` or `TooLarge`. If the complete blob does not fit its digest, all of it is requested again.
        """
        if self._assembler.add(frame):
            self._progress(now, wait=True)
        if not self._assembler.complete:
            return None
        try:
            return self._assembler.blob()
        except Malformed:
            self._progress(now, wait=True)
            self._asked = self._most_asks or 0
            raise

    def _progress(self, now: float, *, wait: bool) -> None:
        self._backoff.reset(now, wait=wait)
        self._asked = 0


class BlobSource:
    """The store's blobs, and those that are being fetched into it.

    :param clock: monotonic seconds.
    """

    def __init__(self, store: DeviceStore, link: Link, topics: Topics, clock: Callable[[], float]) -> None:
        self._store = store
        self._link = link
        self._topics = topics
        self._clock = clock
        self._fetches: dict[bytes, Fetch] = {}
        self._given_up: BlobRef | None = None

    @property
    def is_fetching(self) -> bool:
        return bool(self._fetches)

    @property
    def due_at(self) -> float:
        """The time of the next request, on the monotonic clock; infinite if nothing is fetched."""
        return min((fetch.due_at for fetch in self._fetches.values()), default=math.inf)

    def need(self, ref: BlobRef, *, most_asks: int | None = None) -> bytes | None:
        """Returns the blob from the store; otherwise None, and fetches it, as `fetch`. Raises `StoreError`."""
        data = self._store.blob(ref.digest)
        if data is None:
            self.fetch([ref], most_asks=most_asks)
        return data

    def fetch(self, refs: Sequence[BlobRef], *, most_asks: int | None = None) -> None:
        """Fetches these blobs, and no others any more.

        :param most_asks: after this many requests without progress, or if other bytes come instead, a blob is given up,
            and the others with it: the next call raises `Malformed`.
        """
        if self._given_up is not None and self._given_up in refs:
            given_up, self._given_up = self._given_up, None
            raise Malformed(f"the blob {given_up.digest.hex()[:16]}... did not arrive")
        self.drop(keep={ref.digest for ref in refs})
        for ref in refs:
            if ref.digest not in self._fetches:
                self._fetches[ref.digest] = Fetch(ref, now=self._clock(), most_asks=most_asks)
                self._link.subscribe(self._topics.blob(ref.digest))

    def ask_at_once(self) -> None:
        """Makes all requests due, because the link or the aggregator came back."""
        for fetch in self._fetches.values():
            fetch.ask_at_once(self._clock())

    def want(self, now: float) -> Want | None:
        """Returns a request that is due now, or None."""
        fetch = next((fetch for fetch in self._fetches.values() if now >= fetch.due_at), None)
        if fetch is None:
            return None
        if fetch.hopeless:
            self._given_up = fetch.ref
            self.drop()
            return None
        return fetch.want(now)

    def on_chunk(self, digest: bytes, frame: bytes) -> None:
        """Adds a chunk. Raises a `WireError` for a bad frame, and `StoreError` if a complete blob cannot be stored."""
        fetch = self._fetches.get(digest)
        blob = None if fetch is None else fetch.add(frame, self._clock())
        if blob is not None:
            self.drop(keep=self._fetches.keys() - {digest})
            self._store.put_blob(digest, blob)

    def drop(self, *, keep: Set[bytes] = frozenset()) -> None:
        """Ends the fetches of blobs that have arrived or are no longer needed."""
        for digest in self._fetches.keys() - keep:
            self._link.unsubscribe(self._topics.blob(digest))
            del self._fetches[digest]


@dataclass(frozen=True)
class DifferenceChain:
    """Differences that lead from a model to the plan's.

    :param base: the model in its wire form.
    :param counts: how many values each layer has, in order.
    """

    plan: RoundPlan
    base: bytes
    differences: tuple[bytes, ...]
    counts: tuple[int, ...]


class GlobalModel:
    """The global model of a plan: from the store, from a stored model and its differences, or fetched as a whole.

    Differences are fetched into the store, and applied when all are there. The store then holds the new model beside
    the old one, so a device can continue after any interruption. If a difference does not arrive or does not fit, the
    whole model is fetched.

    :param add: adds differences up, or begins to. `added`: returns the sum, of which nothing is believed but that its
        digest is the plan's; None: not yet. Both raise a `WireError`.
    """

    def __init__(
        self,
        store: DeviceStore,
        blobs: BlobSource,
        *,
        add: Callable[[DifferenceChain], bytes | None],
        added: Callable[[], bytes | None],
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._add, self._added = add, added
        self._adding: bytes | None = None
        """SHA-256 of the global model that is being added up."""
        self._difference_bytes = 0
        self._whole: bytes | None = None
        """SHA-256 of the global model whose differences have failed: they are tried once for each model."""

    @property
    def is_adding(self) -> bool:
        """True while differences are added up, and `need` must be asked again."""
        return self._adding is not None

    def need(self, plan: RoundPlan, spec: TaskSpec, *, most_asks: int | None = None) -> bytes | None:
        """Returns the model in its wire form, float32 `[d]`, and the vectors behind it; None while a part is fetched,
        or differences are added up.

        Raises `StoreError`.

        :param most_asks: the limit for a whole model, as in `BlobSource.need`.
        """
        model = self._store.blob(plan.global_digest)
        if model is None and plan.global_digest != self._whole:
            try:
                if self._adding != plan.global_digest:
                    held = self._store.blob_digests()
                    chain = plan.differences_from(held)
                    lacking = [BlobRef(ref.digest, ref.size) for ref in chain or () if ref.digest not in held]
                    if lacking:
                        self._blobs.fetch(lacking, most_asks=MOST_ASKS)
                        return None
                    self._adding = plan.global_digest if chain else None
                    model = self._add(self._chain(plan, spec, chain)) if chain else None
                else:
                    model = self._added()
                if self.is_adding:
                    if model is None:
                        return None
                    self._keep(plan, model)
            except WireError as error:
                _log.warning("round %d: the whole global model is fetched: %s", plan.round, error)
                self._whole, model = plan.global_digest, None
            self._adding = None
        return model or self._blobs.need(BlobRef(plan.global_digest, plan.global_bytes), most_asks=most_asks)

    def _chain(self, plan: RoundPlan, spec: TaskSpec, chain: tuple[DifferenceRef, ...]) -> DifferenceChain:
        """Returns the differences with the stored model that they start from. Raises a `WireError`."""
        base, layout = self._base(chain[0], plan.global_bytes), spec.model.layout
        # a method's vectors lie behind the model, each with the model's layers
        counts = [layer.size for layer in layout.layers] * (plan.global_bytes // (4 * layout.size))
        differences: list[bytes] = []
        for ref in chain:
            data = self._store.blob(ref.digest)
            if data is None:
                raise Malformed(f"the difference {ref.digest.hex()[:16]}... is damaged in the store")
            differences.append(data)
        self._difference_bytes = sum(map(len, differences))
        return DifferenceChain(plan, base, tuple(differences), tuple(counts))

    def _keep(self, plan: RoundPlan, model: bytes) -> None:
        if BlobRef.of(model).digest != plan.global_digest:
            raise Malformed("the differences lead to another model than the plan names")
        self._store.put_blob(plan.global_digest, model)
        _log.info("round %d: the global model came as %d bytes of differences", plan.round, self._difference_bytes)

    def _base(self, first: DifferenceRef, size: int) -> bytes:
        for digest in self._store.blob_digests():
            data = self._store.blob(digest) if digest[:BASE_BYTES] == first.base else None
            if data is not None and len(data) == size:
                return data
        raise Malformed("the model that the differences begin with is damaged in the store")
