"""Whole updates to their verdicts: at once in this process, or through worker processes where a cohort is large.

What is being decoded is nowhere but in memory: it was not acknowledged, so after a crash the device sends it again.
Each update is admitted before it is decoded and committed after, both in this process. Where all slots of the pool are
taken, the update at hand is decoded here, which is also what holds back those behind it: memory does not grow.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import NamedTuple

from hushfleet.aggregator.ingest.checks import Admitted, Verdict
from hushfleet.aggregator.ingest.decoding import Decoded, Refusal
from hushfleet.aggregator.ingest.decoding_pool import DecodingPool, workers_for
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.errors import StoreError
from hushfleet.wire.format.messages import Offer

POOL_VALUES = 1 << 26
"""Values of a whole cohort from which a pool pays: 56 updates of the Fashion-MNIST CNN. To decode these takes the half
second or so of processor time that a worker takes to start; a smaller round is over before it is of use."""
POLL_S = 0.005
STUCK_S = 30.0

log = logging.getLogger("hushfleet.aggregator")


class _Inside(NamedTuple):
    """An update that is being decoded."""

    device: str
    offer: Offer
    admitted: Admitted


class Intake:
    """:param answer: gets each update's sender, offer and verdict, once; it may raise, and nothing is lost.
    :param cores: of this machine; by default what this process may use.
    """

    def __init__(
        self, engine: RoundEngine, *, answer: Callable[[str, Offer, Verdict], None], cores: int | None = None
    ) -> None:
        self._engine = engine
        self._answer = answer
        self._cores = _usable_cores() if cores is None else cores
        self._pool: DecodingPool[_Inside] | None = None
        self._inside: dict[tuple[str, bytes], _Inside] = {}

    @property
    def busy(self) -> bool:
        """Whether verdicts are still to come."""
        return bool(self._inside)

    def holds(self, device: str, digest: bytes) -> bool:
        """Whether this update of the device is being decoded."""
        return (device, digest) in self._inside

    def take(self, device: str, offer: Offer, data: bytes) -> None:
        """Takes a whole update; its verdict is given now or by a later `settle`."""
        admitted = self._engine.admit(device, data)
        if isinstance(admitted, Verdict):
            self._answer(device, offer, admitted)
            return
        update = _Inside(device, offer, admitted)
        pool = self._pool_of_round()
        if pool is not None and pool.has_room:
            self._inside[device, offer.digest] = update
            pool.put(update, data, counts=admitted.counts)
        else:
            self._settle(update, self._engine.decode(admitted))

    def settle(self, *, wait_s: float = 0.0) -> None:
        """Gives the verdicts on what has been decoded; with none yet, waits for one at most `wait_s` seconds."""
        if self._pool is not None and self._inside:
            self._pool.collect(wait_s=wait_s)

    def finish(self) -> None:
        """Gives all verdicts: what was whole before the end of a round belongs to it. A stuck worker is killed."""
        while self._inside and self._pool is not None:
            before = len(self._inside)
            self._pool.collect(wait_s=STUCK_S)
            if len(self._inside) == before:
                log.warning("decoding has made no progress for %g s", STUCK_S)
                self._pool.kill_busy()

    def close(self) -> None:
        """Ends the workers; what has no verdict yet is sent again to whoever comes next."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None
        self._inside.clear()

    def _pool_of_round(self) -> DecodingPool[_Inside] | None:
        """Once a round of the task was large enough, the pool stays."""
        plan, size = self._engine.plan, self._engine.layout.size
        if self._pool is not None or plan is None or len(plan.cohort) * size < POOL_VALUES:
            return self._pool
        max_bytes = self._engine.inbox.max_bytes
        workers = workers_for(cores=self._cores, max_bytes=max_bytes, max_values=size)
        if workers:
            self._pool = DecodingPool(workers=workers, max_bytes=max_bytes, max_values=size, done=self._decoded)
        return self._pool

    def _decoded(self, update: _Inside, decoded: Decoded | Refusal | None) -> None:
        del self._inside[update.device, update.offer.digest]
        if decoded is None:
            decoded = self._engine.decode(update.admitted)
        self._settle(update, decoded)

    def _settle(self, update: _Inside, decoded: Decoded | Refusal) -> None:
        try:
            verdict = self._engine.settle(update.admitted, decoded)
        except StoreError as error:
            verdict = Verdict("store-full", str(error), False)
        self._answer(update.device, update.offer, verdict)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
