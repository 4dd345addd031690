"""Updates from an offer to its answer: offers and chunks of accepted devices, and worker processes for large cohorts.

Each offer ends in one answer by digest, `Ack` or `Refused`, and the same offer again gets the same answer. A
broker's acknowledgement says nothing; this one says that the update is in the store.

What is being decoded is nowhere but in memory: it was not acknowledged, so after a crash the device sends it again.
Where the pool is full, the update at hand is decoded in this process, which is also what holds back those behind it:
memory does not grow.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import NamedTuple, cast

from hushfleet.aggregator.ingest.checks import Admitted, Verdict
from hushfleet.aggregator.ingest.decoding import Decoded, Refusal, decode
from hushfleet.aggregator.ingest.decoding_pool import DecodingPool, workers_for
from hushfleet.aggregator.ingest.transfers import Transfers
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.errors import StoreError, TooLarge
from hushfleet.wire.format.chunks import parse_frame
from hushfleet.wire.format.messages import Ack, Missing, Offer, Refused, RefusedCode

POOL_VALUES = 1 << 26
"""Values of a whole cohort from which a pool pays: 56 updates of the Fashion-MNIST CNN. To decode these takes the half
second or so of processor time that a worker takes to start; a smaller round is over before it is of use."""
POOL_FORMS = ("quantized",)
"""Forms that take longer to decode (7 ms for that network) than bytes and values take to a worker and back (3 ms)."""
POLL_S = 0.005
STUCK_S = 30.0
_MAY_COME_AGAIN = ("store-full", "state-unknown")

log = logging.getLogger("hushfleet.aggregator")


@dataclass(frozen=True)
class Answer:
    """What a device is to be told of its offer.

    :param verdict: on the update that came; None where the offer alone is answered.
    :param counts: whether it is a refusal that is counted.
    """

    device: str
    offer: Offer
    message: Ack | Refused
    verdict: Verdict | None = None
    counts: bool = False


class _Decoding(NamedTuple):
    """An update that a worker decodes."""

    device: str
    offer: Offer
    admitted: Admitted
    future: Future[Decoded | Refusal]


class Uploads:
    """What is on its way to the engine.

    :param clock: monotonic seconds.
    :param cores: of this machine; by default what this process may use.
    """

    def __init__(self, engine: RoundEngine, *, clock: Callable[[], float], cores: int | None = None) -> None:
        self._engine = engine
        self._clock = clock
        self._cores = _usable_cores() if cores is None else cores
        self._transfers = Transfers(max_bytes=engine.checks.max_bytes)
        self._pool: DecodingPool | None = None
        self._decoding: dict[tuple[str, bytes], _Decoding] = {}
        self._refused: dict[str, Refused] = {}
        # the digest that each device was answered last: chunks of it that are still on their way mean nothing
        self._answered: dict[str, bytes] = {}
        self.recall_latest()

    @property
    def due_at(self) -> float:
        return min(self._transfers.due_at, self._clock() + POLL_S if self._decoding else math.inf)

    @property
    def busy(self) -> bool:
        """Whether updates are being decoded."""
        return bool(self._decoding)

    def offer(self, device: str, offer: Offer) -> Answer | None:
        """What can be said of an offer at once; None if the update should come, or is being decoded."""
        if (device, offer.digest) in self._decoding:
            return None
        verdict = self._engine.admission(device, task=offer.task, round=offer.round, digest=offer.digest)
        before = self._refused.get(device)
        if verdict is not None:
            self._answered[device] = offer.digest
            if verdict.held is not None and offer.round >= self.latest(device)[0]:
                self._latest[device] = (offer.round, verdict.held)
            return Answer(device, offer, _message(offer, verdict))
        if before is not None and before.digest == offer.digest:
            self._answered[device] = offer.digest
            return Answer(device, offer, before)
        self._latest[device] = (offer.round, offer.digest)
        try:
            self._transfers.offer(device, offer, now=self._clock())
        except TooLarge as error:
            return self._answer(device, offer, Verdict("malformed", str(error)), came=False)
        self._answered.pop(device, None)
        return None

    def chunk(self, device: str, payload: bytes) -> Answer | None:
        """Takes a chunk, and the update when it is whole. Raises `Malformed` or `TooLarge`."""
        chunk = parse_frame(payload, max_blob_bytes=self._transfers.max_bytes)
        if chunk.digest == self._answered.get(device) or (device, chunk.digest) in self._decoding:
            return None
        whole = self._transfers.chunk(device, chunk, now=self._clock())
        return None if whole is None else self.take(device, *whole)

    def take(self, device: str, offer: Offer, data: bytes) -> Answer | None:
        """Takes a whole update; None if it is decoded by a worker, so that the answer comes by `answers`."""
        admitted = self._engine.admit(device, data)
        if isinstance(admitted, Verdict):
            return self._answer(device, offer, admitted)
        pool = self._pool_of_round()
        future = None if pool is None else pool.submit(data, admitted.counts)
        if future is None:
            return self._settled(device, offer, admitted, decode(data, admitted.counts))
        self._decoding[device, offer.digest] = _Decoding(device, offer, admitted, future)
        return None

    def answers(self) -> Iterator[Answer]:
        """To what was decoded meanwhile. Who stops in between loses none of the others."""
        for key, (device, offer, admitted, future) in list(self._decoding.items()):
            if future.done():
                del self._decoding[key]
                decoded = DecodingPool.result(future, admitted.data, admitted.counts)
                yield self._settled(device, offer, admitted, decoded)

    def finish(self) -> Iterator[Answer]:
        """To all that came whole: it belongs to the round that is about to end. A worker that hangs is killed."""
        while self._decoding:
            done, _ = wait([each.future for each in self._decoding.values()], STUCK_S, FIRST_COMPLETED)
            if not done and self._pool is not None:
                log.warning("decoding has made no progress for %g s", STUCK_S)
                self._pool.kill()
            yield from self.answers()

    def gaps(self) -> list[tuple[str, Missing]]:
        """What to tell devices that have stopped sending."""
        return self._transfers.gaps(now=self._clock())

    def latest(self, device: str) -> tuple[int, bytes]:
        """Round and SHA-256 of the newest update that was accepted of the device, or that this process was offered in
        an open round; `(0, b"")` for none."""
        return self._latest.get(device, (0, b""))

    def recall_latest(self) -> None:
        """What the store knows, for those who are accepted by now."""
        self._latest = self._engine.store.latest_updates()

    def drop(self, device: str) -> None:
        self._transfers.drop(device)

    def end_round(self) -> None:
        """Whatever was on its way is late."""
        self._transfers.clear()
        self._refused.clear()

    def close(self) -> None:
        """Ends the workers; what has no answer yet is sent again to whoever comes next."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None
        self._decoding.clear()

    def _pool_of_round(self) -> DecodingPool | None:
        """Once a round of the task was large enough, the pool stays."""
        plan, size = self._engine.plan, self._engine.layout.size
        is_worth_it = plan is not None and len(plan.cohort) * size >= POOL_VALUES
        if self._pool is None and is_worth_it and self._engine.spec.wire.codec in POOL_FORMS:
            workers = workers_for(cores=self._cores, update_bytes=self._engine.checks.max_bytes + 4 * size)
            self._pool = DecodingPool(workers) if workers else None
        return self._pool

    def _settled(self, device: str, offer: Offer, admitted: Admitted, decoded: Decoded | Refusal) -> Answer:
        try:
            verdict = self._engine.settle(admitted, decoded)
        except StoreError as error:
            verdict = Verdict("store-full", str(error))
        return self._answer(device, offer, verdict)

    def _answer(self, device: str, offer: Offer, verdict: Verdict, *, came: bool = True) -> Answer:
        """:param came: whether the verdict is on the update itself, not only on its offer."""
        header = verdict.header
        if verdict.acknowledged and header is not None and header.round != offer.round:
            reason = f"the update is of round {header.round}, which has it"
            message: Ack | Refused = Refused(offer.task, offer.round, offer.digest, "late", reason)
        else:
            message = _message(offer, verdict)
        if isinstance(message, Ack):
            self._latest[device] = (offer.round, offer.digest)
            self._answered[device] = offer.digest
        elif message.code not in _MAY_COME_AGAIN:
            self._refused[device] = message
            self._answered[device] = offer.digest
        return Answer(device, offer, message, verdict if came else None, counts=isinstance(message, Refused))


def _message(offer: Offer, verdict: Verdict) -> Ack | Refused:
    if verdict.acknowledged:
        return Ack(offer.task, offer.round, offer.digest)
    return Refused(offer.task, offer.round, offer.digest, cast(RefusedCode, verdict.code), verdict.reason)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
