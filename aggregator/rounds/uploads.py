"""Handles updates from an offer to its reply: offers and chunks of accepted devices.

Each offer gets one reply for its digest, `Ack` or `Refused`, and a repeated offer gets the same reply. A broker's
acknowledgement proves nothing; this `Ack` says that the update is in the store. Updates that have arrived are stored
together (`take_arrived`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate
from hushfleet.aggregator.payloads.refusals import RefusalCounter
from hushfleet.aggregator.payloads.transfers import Transfers
from hushfleet.aggregator.rounds.admission import NEXT_SUM
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.errors import StoreError, TooLarge
from hushfleet.wire.format.chunks import parse_frame
from hushfleet.wire.format.messages import Ack, Missing, Offer, Refused, RefusedCode

MOST_TOGETHER = 64
MOST_VALUES = 1 << 22
"""So many values of updates are in memory before they are stored, unless a single update has more."""
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
        # for each device, the digest of the last reply: chunks of it that arrive later are ignored
        self._answered: dict[str, bytes] = {}
        self._latest = engine.store.latest_updates()
        self._arrived: dict[str, tuple[Offer, bytes]] = {}
        self._most = max(1, min(MOST_TOGETHER, MOST_VALUES // engine.layout.size))

    @property
    def due_at(self) -> float:
        """The time at which `gaps` may return something, in seconds of the clock."""
        return self._transfers.due_at

    def offer(self, device: str, offer: Offer) -> CheckedUpdate | None:
        """Returns the update with its reply if one is possible at once; None if the device should send its bytes.

        Raises `Malformed` if chunks that arrived before the offer do not belong to the update.
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
        if whole is not None:
            self._arrived[device] = offer, whole
        return None

    def chunk(self, device: str, payload: bytes) -> None:
        """Takes a chunk. Raises `Malformed` or `TooLarge`."""
        chunk = parse_frame(payload, max_blob_bytes=self._transfers.max_bytes)
        if chunk.digest == self._answered.get(device) or self.has_arrived(device):
            return
        whole = self._transfers.chunk(device, chunk, now=self._clock())
        if whole is not None:
            self._arrived[device] = whole

    def has_arrived(self, device: str) -> bool:
        """Returns whether an update of the device is complete, and waits for `take_arrived`."""
        return device in self._arrived

    @property
    def is_full(self) -> bool:
        """True if the complete updates should be taken before others: they are many, or may close the round."""
        return len(self._arrived) >= min(self._most, self._engine.responses.missing)

    def take_arrived(self) -> list[CheckedUpdate]:
        """Passes all complete updates to the engine; returns those that do not come again, each with its reply."""
        arrived, self._arrived = self._arrived, {}
        try:
            updates = self._engine.accept_many([(device, data) for device, (_, data) in arrived.items()])
        except StoreError as error:
            updates = [
                CheckedUpdate(device, data).refuse("store-full", str(error)) for device, (_, data) in arrived.items()
            ]
        return [
            self._finished(update, arrived[update.device][0]) for update in updates if not self._comes_again(update)
        ]

    def gaps(self) -> list[tuple[str, Missing]]:
        """Returns the messages for devices that have stopped sending."""
        return self._transfers.gaps(now=self._clock())

    def latest(self, device: str) -> tuple[int, bytes]:
        """Returns round and SHA-256 of the newest update that was accepted from the device, or that it offered to this
        process in an open round; `(0, b"")` for none."""
        return self._latest.get(device, (0, b""))

    def forget(self, device: str) -> None:
        """Deletes what is known about a name that now belongs to another board."""
        self._latest.pop(device, None)

    def drop(self, device: str) -> None:
        """Drops an update of a device that is not stored."""
        self._transfers.drop(device)
        self._arrived.pop(device, None)

    def end_round(self) -> None:
        """Drops all incomplete updates, because they are late, unless a later sum takes them."""
        if not self._engine.announcement.max_staleness:
            self._transfers.clear()
        self._refused.clear()

    def _comes_again(self, update: CheckedUpdate) -> bool:
        """Returns whether the update gets no answer, because the sum of the next round may take it."""
        engine = self._engine
        if update.code == NEXT_SUM:
            return True
        is_between = engine.plan is None and update.code == "late"
        return is_between and engine.announcement.waits_for(update.task, update.round)

    def _finished(self, update: CheckedUpdate, offer: Offer) -> CheckedUpdate:
        """Sets the reply of an update, counts it if it is refused, and remembers the reply."""
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
