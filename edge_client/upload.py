"""Sends one stored update or member's answer: offer, chunks, and then the chunks that the aggregator still lacks.

The bytes come from the store and never change. The link is read between any two chunks, so that an answer (`Ack`,
`Refused`) or a new round ends a long upload at once.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import InitVar, dataclass

from hushfleet.edge_client.rate_limits import Backoff
from hushfleet.edge_client.storage.answers import AnswerEntry
from hushfleet.edge_client.storage.round_commit import OutboxEntry
from hushfleet.wire.format.chunks import chunk_count, expand, split
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Missing, Offer
from hushfleet.wire.format.update import attach_public

FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 60.0


@dataclass(eq=False)
class Upload:
    """An update, or a member's answer, that is being sent.

    :param entry: the stored update or answer.
    :param chunk_bytes: payload of one chunk.
    :param with_public: attach the device's public state, because the aggregator holds another one.
    :param push: send all chunks at once after the offer; otherwise wait until the aggregator asks for chunks.
    :param now: monotonic seconds.
    """

    entry: OutboxEntry | AnswerEntry
    identity: Identity
    chunk_bytes: int
    with_public: bool
    push: InitVar[bool]
    now: InitVar[float]

    def __post_init__(self, push: bool, now: float) -> None:
        entry = self.entry
        self._data = entry.data
        if self.with_public and isinstance(entry, OutboxEntry):
            self._data = attach_public(entry.data, entry.public_before, identity=self.identity)
        # The signature is deterministic, so each of the two forms has one digest, also after a crash in between.
        self.offer = Offer(entry.task, entry.round, hashlib.sha256(self._data).digest(), len(self._data))
        self.offer_due, self._is_offered = True, False
        self.chunks = chunk_count(len(self._data), self.chunk_bytes)
        self._queue = deque(range(self.chunks) if push else ())
        self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S, now=now)

    def concerns(self, task: str, round: int, digest: bytes) -> bool:
        """Returns whether an answer is about this upload, with or without the public section."""
        ours = (self.offer.digest, self.entry.digest)
        return (task, round) == (self.entry.task, self.entry.round) and digest in ours

    @property
    def queued(self) -> int:
        """The number of chunks in the queue."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """True if there is something to send at once."""
        return self.offer_due or bool(self._queue)

    @property
    def due_at(self) -> float:
        """The time of the next offer if no answer arrives, on the monotonic clock."""
        return self._backoff.due_at

    def offer_again(self) -> None:
        """Sends only the offer: the aggregator names the chunks that it lacks, so nothing is sent twice.

        If no offer was sent yet, because the link was away, all chunks follow it.
        """
        if self._is_offered:
            self._queue.clear()
        self.offer_due = True

    def offered(self, now: float) -> None:
        self.offer_due, self._is_offered = False, True
        self._backoff.tried(now)

    def wait_longer(self, now: float) -> None:
        """Waits longer, because the aggregator cannot take the upload at present."""
        self._queue.clear()
        self._backoff.tried(now)

    def resend(self, message: Missing, now: float) -> None:
        """Queues the chunks that the aggregator lacks. Raises `Malformed` for chunks that do not exist."""
        self._queue = deque(expand(message.missing, self.chunks))
        self._backoff.reset(now, wait=True)

    def next_chunk(self) -> bytes | None:
        """Returns the next frame without removing it from the queue: the link may be lost before it is sent."""
        if not self._queue:
            return None
        return next(split(self._data, self.chunk_bytes, (self._queue[0],), digest=self.offer.digest))

    def chunk_sent(self, now: float) -> None:
        self._queue.popleft()
        self._backoff.reset(now, wait=True)
