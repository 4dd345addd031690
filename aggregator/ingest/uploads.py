"""Updates from an offer to its answer: what the coordinator does with offers and chunks of enrolled devices.

Each offer ends in one answer by digest, `Ack` or `Refused`, and the same offer again gets the same answer. A
broker's acknowledgement says nothing; this one says that the update is in the store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hushfleet.aggregator.ingest.refusals import Refusals
from hushfleet.aggregator.ingest.transfers import Transfers
from hushfleet.aggregator.ingest.verdicts import POLL_S, Intake
from hushfleet.aggregator.observe.round_events import update_fields
from hushfleet.aggregator.rounds.engine import RoundEngine, Verdict
from hushfleet.errors import TooLarge
from hushfleet.wire.format.chunks import parse_frame
from hushfleet.wire.format.messages import Ack, Message, Missing, Offer, Refused

_MAY_COME_AGAIN = ("store-full", "state-unknown")


class Uplink:
    """:param say: sends a message to a device; :param note: writes an event; :param clock: monotonic seconds.
    :param fault: is told of a refusal for which the device is to blame, once a round.
    """

    def __init__(
        self,
        engine: RoundEngine,
        refusals: Refusals,
        *,
        say: Callable[[str, Message], None],
        note: Callable[..., Any],
        fault: Callable[[str, Verdict], None],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._refusals = refusals
        self._say, self._note, self._fault, self._clock = say, note, fault, clock
        self._transfers = Transfers(max_bytes=engine.inbox.max_bytes)
        self._intake = Intake(engine, answer=self._on_verdict)
        self._refused: dict[str, Refused] = {}
        # the digest that each device was answered last: chunks of it that are still on their way mean nothing
        self._settled: dict[str, bytes] = {}
        self._noted_offers: dict[str, int] = {}
        self.recall_latest()

    @property
    def due_at(self) -> float:
        return min(self._transfers.due_at, self._clock() + POLL_S if self._intake.busy else float("inf"))

    def offer(self, device: str, offer: Offer) -> None:
        """Answers a device's offer, or waits for its chunks."""
        if self._intake.holds(device, offer.digest):
            return  # it is here already; its verdict is the answer
        answer = self._answer(device, offer)
        self._note_offer(device, offer)
        if answer is not None:
            self._settled[device] = offer.digest
            self._say(device, answer)
            return
        self._latest[device] = (offer.round, offer.digest)
        try:
            self._transfers.offer(device, offer, now=self._clock())
        except TooLarge as error:
            self._refuse(device, offer, "malformed", str(error))
        else:
            self._settled.pop(device, None)

    def chunk(self, device: str, payload: bytes) -> None:
        """Takes a chunk, and the update when it is whole. Raises `Malformed` or `TooLarge`."""
        chunk = parse_frame(payload, max_blob_bytes=self._transfers.max_bytes)
        if chunk.digest == self._settled.get(device) or self._intake.holds(device, chunk.digest):
            return
        data = self._transfers.chunk(device, chunk, now=self._clock())
        plan = self._engine.plan
        if data is None or plan is None:
            return
        self._intake.take(device, Offer(plan.task, plan.round, chunk.digest, chunk.size), data)

    def settle(self) -> None:
        """Answers what worker processes have decoded meanwhile."""
        self._intake.settle()

    def finish(self) -> None:
        """Answers all that came whole."""
        self._intake.finish()

    def close(self) -> None:
        self._intake.close()

    def recall_latest(self) -> None:
        """What the store knows, for those who are accepted by now."""
        self._latest = self._engine.store.latest_updates()

    def latest(self, device: str) -> tuple[int, bytes]:
        """Round and SHA-256 of the newest update that was accepted of the device, or that this process was offered in
        an open round; `(0, b"")` for none."""
        return self._latest.get(device, (0, b""))

    def tell_gaps(self, *, now: float) -> None:
        """Names the missing chunks to devices that have stopped sending."""
        for gap in self._transfers.gaps(now=now):
            self._say(gap.device, Missing(gap.offer.task, gap.offer.round, gap.offer.digest, gap.missing))

    def drop(self, device: str) -> None:
        self._transfers.drop(device)

    def end_round(self) -> None:
        """Whatever was on its way is late."""
        self._transfers.clear()
        self._refused.clear()

    def _answer(self, device: str, offer: Offer) -> Ack | Refused | None:
        """What can be said at once; None if the update should come."""
        task, plan = self._engine.spec.task, self._engine.plan
        if offer.task == task:
            known = self._engine.store.update(offer.round, device)
            if known is not None and offer.round >= self.latest(device)[0]:
                self._latest[device] = (offer.round, known.digest)
            if known is not None and known.digest == offer.digest:
                return Ack(task, offer.round, offer.digest)
            if known is not None:
                return _refused(offer, "duplicate", "another update of this device was accepted in this round")
        if offer.task != task or plan is None or plan.round != offer.round:
            return _refused(offer, "late", "this round is not open")
        if device not in plan.cohort:
            return _refused(offer, "not-in-cohort", f"{device} does not take part in round {plan.round}")
        before = self._refused.get(device)
        return before if before is not None and before.digest == offer.digest else None

    def _on_verdict(self, device: str, offer: Offer, verdict: Verdict) -> None:
        self._note_update(device, offer, verdict)
        if verdict.acknowledged and verdict.header is not None and verdict.header.round != offer.round:
            self._refuse(device, offer, "late", f"the update is of round {verdict.header.round}, which has it")
        elif verdict.acknowledged:
            self._latest[device] = (offer.round, offer.digest)
            self._settled[device] = offer.digest
            self._say(device, Ack(offer.task, offer.round, offer.digest))
        else:
            self._refuse(device, offer, verdict.code, verdict.reason)
        if verdict.faults:
            self._fault(device, verdict)

    def _refuse(self, device: str, offer: Offer, code: str, reason: str) -> None:
        self._refusals.add(device, code, reason)
        refused = _refused(offer, code, reason)
        if code not in _MAY_COME_AGAIN:
            self._refused[device] = refused
            self._settled[device] = offer.digest
        self._say(device, refused)

    def _note_offer(self, device: str, offer: Offer) -> None:
        """Once for a device and round, as devices repeat their offers: one a round is all that a sender can cause."""
        plan = self._engine.plan
        is_known = plan is not None and device in plan.cohort and (offer.task, offer.round) == (plan.task, plan.round)
        if is_known and self._noted_offers.get(device) != offer.round:
            self._noted_offers[device] = offer.round
            self._note("offer", round=offer.round, device=device, bytes=offer.size)

    def _note_update(self, device: str, offer: Offer, verdict: Verdict) -> None:
        fields = update_fields(verdict, device=device, round=offer.round, payload_bytes=offer.size)
        self._note("update", **fields)


def _refused(offer: Offer, code: Any, reason: str) -> Refused:
    return Refused(offer.task, offer.round, offer.digest, code, reason)
