"""Sends an update, or a member's answer, until the aggregator acknowledges or refuses it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hushfleet.edge_client.protocol import Event
from hushfleet.edge_client.storage.answers import AnswerEntry
from hushfleet.edge_client.storage.round_commit import OutboxEntry
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.store_check import StoreCheck
from hushfleet.edge_client.upload import Upload
from hushfleet.edge_client.worker.runtime import TaskRuntime
from hushfleet.errors import Malformed
from hushfleet.methods.public_bytes import public_digest
from hushfleet.wire.format.messages import IN_PROGRESS, Ack, Message, Missing, Refused, RoundPlan

MOST_RESENDS = 20
"""How many times an update's chunks are sent again in one process: enough for a link that loses 19 of 20."""
_TRANSIENT = ("state-unknown", "store-full")

_log = logging.getLogger("hushfleet.edge")

Answer = Ack | Missing | Refused


@dataclass(eq=False)
class Sent:
    """The last upload.

    :param digest: its SHA-256; `round`: the latest round for which it was sent.
    :param resent_chunks: how many of its chunks were sent again since then.
    """

    digest: bytes | None = None
    round: int = 0
    resent_chunks: int = 0


class Sending:
    """The stored update, or answer, that is being sent: `upload`, or None.

    :param clock: monotonic seconds.
    """

    def __init__(self, device: str, store: DeviceStore, store_check: StoreCheck, clock: Callable[[], float]) -> None:
        self._device, self._store, self._store_check, self._clock = device, store, store_check, clock
        self.upload: Upload | None = None
        self._sent = Sent()

    def begin(self, plan: RoundPlan, task: TaskRuntime, entry: OutboxEntry | AnswerEntry) -> None:
        """Sends a stored update or answer."""
        if (is_first := entry.digest != self._sent.digest) or plan.round > self._sent.round:
            self._sent = Sent(entry.digest, plan.round)
        # If the plan came again, the aggregator answers which chunks it lacks, or that it has the update.
        self.upload = self._make(plan, task, entry, push=entry.pending and is_first)

    def fits(self, plan: RoundPlan, same: RoundPlan | None) -> bool:
        """Returns whether what is sent also belongs to this plan.

        :param same: the plan before, if it is of the same round.
        """
        if self.upload is None:
            return False
        if plan.max_staleness and plan.waits_for(self.upload.entry.task, self.upload.entry.round):
            return True
        goes_on = same is not None and (plan.phase, plan.secure) == (same.phase, same.secure)
        return goes_on and plan.phase in IN_PROGRESS

    def answered(self, answer: Message, plan: RoundPlan | None, task: TaskRuntime | None) -> tuple[Event, Any] | None:
        """Returns the event that an answer is, with what it is about; None if nothing follows from it.

        Raises `Malformed` for other messages.
        """
        if not isinstance(answer, Answer):
            raise Malformed(f"expected an answer to an update, got a {type(answer).__name__}")
        upload = self.upload or self._revived(answer, plan, task)
        if upload is None or not upload.concerns(answer.task, answer.round, answer.digest):
            return None
        now = self._clock()
        if isinstance(answer, Ack):
            return "acked", (upload.entry, "acked")
        if isinstance(answer, Missing):
            # a recorded answer that somebody publishes endlessly must not use up a metered link
            if answer.digest != upload.offer.digest or self._sent.resent_chunks >= MOST_RESENDS * upload.chunks:
                return None
            upload.resend(answer, now)
            self._sent.resent_chunks += upload.queued
            return "wanted", upload
        if upload.entry.status == "acked" and answer.code not in _TRANSIENT:
            _log.warning("round %d: acknowledged, so a refusal (%s) is ignored", answer.round, answer.code)
            return None
        if answer.code == "state-unknown" and isinstance(upload.entry, OutboxEntry) and not upload.with_public:
            push = not upload.entry.attached_digest
            return "wanted", self._noted(replace(upload, with_public=True, push=push, now=now))
        if answer.code == "store-full":
            _log.warning("the aggregator has no room for the update; it is offered again later")
            upload.wait_longer(now)
            return "wanted", upload
        _log.warning("round %d: refused (%s): %s", answer.round, answer.code, answer.reason)
        if answer.code == "duplicate":  # it is unclear which update the aggregator means
            self._store_check.ask_again(now, doubt=True)
        return "refused", (upload.entry, f"refused:{answer.code}")

    def conclude(self, entry: OutboxEntry | AnswerEntry, status: str) -> None:
        """Stores what became of an update or answer, and sends it no more."""
        self.upload = None
        if entry.status != status:
            is_update = isinstance(entry, OutboxEntry)
            _log.info("round %d: the %s is %s", entry.round, "update" if is_update else "member's answer", status)
            (self._store if is_update else self._store.answers).set_status(entry.task, entry.round, status)

    def _revived(self, answer: Answer, plan: RoundPlan | None, task: TaskRuntime | None) -> Upload | None:
        """Returns the upload that an answer is about, if it is not being sent: the aggregator may have lost it."""
        if plan is None or task is None or plan.phase not in IN_PROGRESS or not plan.is_of(answer.task, answer.round):
            return None
        stored = self._store.outbox if plan.phase == "open" else self._store.answers.of
        entry = stored(plan.task, plan.round)
        if entry is None or not entry.data or entry.status.startswith("refused"):
            return None
        return self._make(plan, task, entry, push=False)

    def _make(self, plan: RoundPlan, task: TaskRuntime, entry: OutboxEntry | AnswerEntry, *, push: bool) -> Upload:
        with_public = False
        if plan.secure is None and isinstance(entry, OutboxEntry):
            before = public_digest(entry.public_before, size=task.spec.model.layout.size)
            # a plan without a cohort does not name the state that the aggregator holds; if it lacks one, it says so
            with_public = plan.cohort.get(self._device, before) != before
        chunk_bytes = task.spec.wire.chunk_bytes
        return self._noted(Upload(entry, self._store.identity, chunk_bytes, with_public, push, self._clock()))

    def _noted(self, upload: Upload) -> Upload:
        """Stores the digest with the attached state before it is sent, so that the store later recognises it."""
        entry, digest = upload.entry, upload.offer.digest
        if upload.with_public and isinstance(entry, OutboxEntry) and entry.attached_digest != digest:
            self._store.note_attached(entry.task, entry.round, digest)
        return upload
