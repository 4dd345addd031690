"""Checks that this store is the only one of its device, and the newest: a store cannot know this by itself.

With a restored old copy, or a second client on a copy, an update would be noised twice: the two noises average out, and
the copy's ledger lacks what was spent since. The aggregator remembers what it has received, and which rounds this
device's key has charged in all tasks and runs, so the device asks it after each connection. Before the first answer a
process neither trains nor sends an update. If an answer shows a copy, the store keeps the reason, and no client trains
with it again.
"""

from __future__ import annotations

import logging
import os
from typing import NoReturn

from hushfleet.edge_client.rate_limits import Backoff
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import CopiedStore, LedgerError, StoreError
from hushfleet.wire.format.fields import NONCE_BYTES
from hushfleet.wire.format.messages import Ask, Known

FIRST_WAIT_S = 3.0
ROUNDING = 1e-9
"""Relative error of a sum of charges, whose order differs between aggregator and ledger."""
LONGEST_WAIT_S = 900.0  # an aggregator that comes back announces it, and is asked at once

_ADVICE = (
    "So this store is an old copy that was put back, or another client uses a copy of it. To train on would noise an "
    "update a second time and charge too little, so this device has stopped for good. The rounds that this store lacks "
    "are spent, too (docs/field.md, 'A restored or copied store'). What to do: "
)

_log = logging.getLogger("hushfleet.edge")


class StoreCheck:
    """Asks the aggregator what it knows of this device, and compares the answer with the store.

    It takes a new session number from the store. If the disk is full, it tries this again before it asks.
    """

    def __init__(self, store: DeviceStore, *, now: float) -> None:
        self._store = store
        self._counted: int | None = None
        self._nonce = os.urandom(NONCE_BYTES)
        self._asking = True
        self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S, now=now)
        self.confirmed = False
        self.session = store.last_session + 1  # a device with a full disk must still start, to report it
        try:
            self._count_session()
        except StoreError as error:
            _log.error("%s", error)

    @property
    def due_at(self) -> float:
        """The time of the next question, on the monotonic clock."""
        return self._backoff.due_at if self._asking else float("inf")

    def ask_again(self, now: float, *, doubt: bool = False) -> None:
        """Asks at once; with `doubt`, nothing is trained or sent before the answer."""
        self._asking = True
        self.confirmed = self.confirmed and not doubt
        self._backoff.reset(now)

    def aggregator_is_back(self, now: float) -> None:
        """Asks again at once if a question has no answer yet."""
        self._backoff.reset(now)

    def round_begins(self, now: float) -> None:
        """Asks an unanswered question again soon, because the aggregator may know this device only now."""
        self._backoff.hasten(now)

    def question(self, now: float) -> Ask | None:
        """Returns the question that is due now, or None."""
        if now < self.due_at:
            return None
        self._backoff.tried(now)
        try:
            return Ask(self._count_session(), self._nonce)
        except StoreError as error:
            _log.error("%s", error)
            return None

    def may_train(self) -> bool:
        """Returns whether the answer has arrived. Raises `StoreError` if the disk is too full to ask."""
        self._count_session()
        return self.confirmed

    def on_known(self, known: Known, now: float) -> bool:
        """Returns whether this answers this process. Stops for good with `CopiedStore` if it shows another store."""
        if known.nonce != self._nonce:
            self.ask_again(now)  # somebody else asked in this device's name
            return False
        if not known.yours:
            self.stop(
                f"the aggregator knows session {known.session} of this device, and this process, of session "
                f"{self._counted}, is not the one"
            )
        if known.last_round:
            entry = self._store.outbox(known.task, known.last_round)
            answer = self._store.answers.of(known.task, known.last_round)  # it may have received this, too
            if not (
                (entry is not None and entry.may_be(known.last_digest))
                or (answer is not None and answer.digest == known.last_digest)
            ):
                self.stop(
                    f"the aggregator has an update of this device for round {known.last_round} of {known.task}, and "
                    f"this store {'has none' if entry is None else 'holds another one'}"
                )
        self._compare(known)
        self._asking, self.confirmed = False, True
        return True

    def _compare(self, known: Known) -> None:
        """Stops for good if the ledger lacks what the aggregator has seen this device's key charge.

        A ledger only grows, so an older copy lacks the newest round that was seen. The number and the sum do not depend
        on the order in which the aggregator has seen the rounds.
        """
        seen = known.seen
        if seen is None:
            return
        try:
            totals = self._store.ledger.totals()
        except LedgerError as error:  # it was changed: each round is declined for this
            _log.error("%s", error)
            return
        has_newest = self._store.is_charged(seen.task, seen.round)
        if totals.rounds < seen.rounds or not has_newest or totals.weight < seen.weight * (1 - ROUNDING):
            without = "" if has_newest else ", without that round"
            self.stop(
                f"the fleet has seen {seen.rounds} charged round{'s' * (seen.rounds > 1)} of this board's key, with "
                f"round {seen.round} of {seen.task} as the newest and the sum {seen.weight:.6g}, and this store has "
                f"{totals.rounds}, with the sum {totals.weight:.6g}{without}"
            )

    def stop(self, finding: str) -> NoReturn:
        """Stores the reason, and raises `CopiedStore`."""
        stop_as_copy(self._store, finding)

    def _count_session(self) -> int:
        if self._counted is None:
            self._counted = self.session = self._store.next_session()
        return self._counted


def stop_as_copy(store: DeviceStore, finding: str) -> NoReturn:
    """Stores the reason why no client may train with this store any more, and raises `CopiedStore`."""
    reason = f"{finding}. {_ADVICE}{store.way_on}"
    try:
        store.stop_for_good(reason)
    except StoreError as error:  # it will be detected again
        _log.error("%s", error)
    raise CopiedStore(reason)
