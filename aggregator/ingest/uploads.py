"""Updates from an offer to its answer: offers and chunks of accepted devices.

Each offer ends in one answer by digest, `Ack` or `Refused`, and the same offer again gets the same answer. A
broker's acknowledgement says nothing; this one says that the update is in the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from hushfleet.aggregator.ingest.checks import Verdict
from hushfleet.aggregator.ingest.transfers import Transfers
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.errors import StoreError, TooLarge
from hushfleet.wire.format.chunks import parse_frame
from hushfleet.wire.format.messages import Ack, Missing, Offer, Refused, RefusedCode

_MAY_COME_AGAIN = ("store-full", "state-unknown")


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


class Uploads:
    """What is on its way to the engine.

    :param clock: monotonic seconds.
    """

    def __init__(self, engine: RoundEngine, *, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._transfers = Transfers(max_bytes=engine.checks.max_bytes)
        self._refused: dict[str, Refused] = {}
        # the digest that each device was answered last: chunks of it that are still on their way mean nothing
        self._answered: dict[str, bytes] = {}
        self._latest = engine.store.latest_updates()

    @property
    def due_at(self) -> float:
        return self._transfers.due_at

    def offer(self, device: str, offer: Offer) -> Answer | None:
        """What can be said of an offer at once; None if the update should come.

        Raises `Malformed` where chunks that came before it are not those of the update.
        """
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
        if self._engine.collects_updates:  # a member's answer is no update
            self._latest[device] = (offer.round, offer.digest)
        self._answered.pop(device, None)
        try:
            whole = self._transfers.offer(device, offer, now=self._clock())
        except TooLarge as error:
            return self._answer(device, offer, Verdict("malformed", str(error)), came=False)
        return None if whole is None else self.take(device, offer, whole)

    def chunk(self, device: str, payload: bytes) -> Answer | None:
        """Takes a chunk, and the update when it is whole. Raises `Malformed` or `TooLarge`."""
        chunk = parse_frame(payload, max_blob_bytes=self._transfers.max_bytes)
        if chunk.digest == self._answered.get(device):
            return None
        whole = self._transfers.chunk(device, chunk, now=self._clock())
        return None if whole is None else self.take(device, *whole)

    def take(self, device: str, offer: Offer, data: bytes) -> Answer:
        """Takes a whole update."""
        try:
            verdict = self._engine.accept(device, data)
        except StoreError as error:
            verdict = Verdict("store-full", str(error))
        return self._answer(device, offer, verdict)

    def gaps(self) -> list[tuple[str, Missing]]:
        """What to tell devices that have stopped sending."""
        return self._transfers.gaps(now=self._clock())

    def latest(self, device: str) -> tuple[int, bytes]:
        """Round and SHA-256 of the newest update that was accepted of the device, or that this process was offered in
        an open round; `(0, b"")` for none."""
        return self._latest.get(device, (0, b""))

    def forget(self, device: str) -> None:
        """The name belongs to another board by now."""
        self._latest.pop(device, None)

    def drop(self, device: str) -> None:
        self._transfers.drop(device)

    def end_round(self) -> None:
        """Whatever was on its way is late."""
        self._transfers.clear()
        self._refused.clear()

    def _answer(self, device: str, offer: Offer, verdict: Verdict, *, came: bool = True) -> Answer:
        """:param came: whether the verdict is on the update itself, not only on its offer."""
        header = verdict.header
        if verdict.acknowledged and header is not None and header.round != offer.round:
            reason = f"the update is of round {header.round}, which has it"
            message: Ack | Refused = Refused(offer.task, offer.round, offer.digest, "late", reason)
        else:
            message = _message(offer, verdict)
        if isinstance(message, Ack):
            if verdict.of == "update":
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
