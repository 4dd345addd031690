"""Updates from an offer to its reply: offers and chunks of accepted devices.

Each offer ends in one reply by digest, `Ack` or `Refused`, and the same offer again gets the same reply. A
broker's acknowledgement says nothing; this one says that the update is in the store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from hushfleet.aggregator.ingest.checked_update import CheckedUpdate
from hushfleet.aggregator.ingest.refusals import RefusalCounter
from hushfleet.aggregator.ingest.transfers import Transfers
from hushfleet.aggregator.rounds.admission import NEXT_SUM
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.errors import StoreError, TooLarge
from hushfleet.wire.format.chunks import parse_frame
from hushfleet.wire.format.messages import Ack, Missing, Offer, Refused, RefusedCode

_MAY_COME_AGAIN = ("store-full", "state-unknown")


class Uploads:
    """Updates on their way to the engine.

    :param refusals: counts the updates that are refused.
    :param clock: monotonic seconds.
    """

    def __init__(self, engine: RoundEngine, refusals: RefusalCounter, *, clock: Callable[[], float]) -> None:
        self._engine, self._refusals, self._clock = engine, refusals, clock
        self._transfers = Transfers(max_bytes=engine.checks.max_bytes)
        self._refused: dict[str, Refused] = {}
        # the digest that each device was answered last: chunks of it that are still on their way mean nothing
        self._answered: dict[str, bytes] = {}
        self._latest = engine.store.latest_updates()

    @property
    def due_at(self) -> float:
        """Time at which `gaps` may have something to say, in seconds of the clock."""
        return self._transfers.due_at

    def offer(self, device: str, offer: Offer) -> CheckedUpdate | None:
        """Returns the update with the reply that can be given at once; None if its bytes should come.

        Raises `Malformed` where chunks that came before it are not those of the update.
        """
        update = CheckedUpdate.offered(device, offer)
        if not self._engine.admit(update):
            if self._comes_again(update):
                return None
            if update.held is not None and offer.round >= self.latest(device)[0]:
                self._latest[device] = (offer.round, update.held)
            update.reply = _reply(update, offer)
        else:
            before = self._refused.get(device)
            update.reply = before if before is not None and before.digest == offer.digest else None
        if update.reply is not None:
            self._answered[device] = offer.digest
            return update
        if self._engine.collects_updates:  # a member's answer is no update
            self._latest[device] = (offer.round, offer.digest)
        self._answered.pop(device, None)
        try:
            whole = self._transfers.offer(device, offer, now=self._clock())
        except TooLarge as error:
            return self._finished(update.refuse("malformed", str(error)), offer)
        return None if whole is None else self.take(device, offer, whole)

    def chunk(self, device: str, payload: bytes) -> CheckedUpdate | None:
        """Takes a chunk, and the update when it is whole. Raises `Malformed` or `TooLarge`."""
        chunk = parse_frame(payload, max_blob_bytes=self._transfers.max_bytes)
        if chunk.digest == self._answered.get(device):
            return None
        whole = self._transfers.chunk(device, chunk, now=self._clock())
        return None if whole is None else self.take(device, *whole)

    def take(self, device: str, offer: Offer, data: bytes) -> CheckedUpdate | None:
        """Hands a whole update to the engine; returns it with its reply, or None where it will come again."""
        try:
            update = self._engine.accept(device, data)
        except StoreError as error:
            update = CheckedUpdate(device, data).refuse("store-full", str(error))
        return None if self._comes_again(update) else self._finished(update, offer)

    def gaps(self) -> list[tuple[str, Missing]]:
        """Returns what to tell devices that have stopped sending."""
        return self._transfers.gaps(now=self._clock())

    def latest(self, device: str) -> tuple[int, bytes]:
        """Returns round and SHA-256 of the newest update that was accepted of the device, or that this process was
        offered in an open round; `(0, b"")` for none."""
        return self._latest.get(device, (0, b""))

    def forget(self, device: str) -> None:
        """Drops what is known of a name that belongs to another board now."""
        self._latest.pop(device, None)

    def drop(self, device: str) -> None:
        """Drops what is on its way from a device."""
        self._transfers.drop(device)

    def end_round(self) -> None:
        """Drops whatever is on its way, since it is late, unless rounds are buffered."""
        if not self._engine.prepared.task.round.buffered:
            self._transfers.clear()
        self._refused.clear()

    def _comes_again(self, update: CheckedUpdate) -> bool:
        """Whether nothing is answered, since the next buffered round may take the update."""
        engine = self._engine
        if update.code == NEXT_SUM:
            return True
        between = engine.plan is None and not engine.finished
        return between and engine.prepared.task.round.buffered and update.code == "late"

    def _finished(self, update: CheckedUpdate, offer: Offer) -> CheckedUpdate:
        """Gives an update its reply, counts it if it is refused, and remembers what was answered."""
        device, update.offer = update.device, offer
        update.reply = reply = _reply(update, offer)
        if isinstance(reply, Refused):
            self._refusals.add(device, reply.code, reply.reason)
            if reply.code in _MAY_COME_AGAIN:
                return update
            self._refused[device] = reply
        elif update.kind == "update":
            self._latest[device] = (offer.round, offer.digest)
        self._answered[device] = offer.digest
        return update


def _reply(update: CheckedUpdate, offer: Offer) -> Ack | Refused:
    code, reason = update.code, update.reason
    if update.acknowledged:
        if update.round == offer.round:
            return Ack(offer.task, offer.round, offer.digest)
        code, reason = "late", f"the update is of round {update.round}, which has it"
    return Refused(offer.task, offer.round, offer.digest, cast(RefusedCode, code), reason)
