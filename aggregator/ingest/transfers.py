"""Updates on their way in: one open transfer a device, bounded in size and together, resumed by what is missing.

A device sends its offer and then all chunks unasked. Where chunks stop coming before the blob is whole,
the device is told what is missing; how long a pause counts as a stop follows the pace of that device's link, since
asking a slow one too early makes it send twice what is still on its way.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from hushfleet.errors import Malformed, TooLarge
from hushfleet.wire.format.chunks import Assembler, Chunk
from hushfleet.wire.format.messages import Missing, Offer

IDLE_S = 1.0
LONGEST_IDLE_S = 60.0
EXPIRE_S = 300.0
MAX_OPEN_BYTES = 256 << 20
_PACES = 4.0


@dataclass
class _Transfer:
    """An update whose chunks are coming; `wait_s` is the pause after which the device is told what is missing.

    `listed_at` is the one entry of `Transfers._looks` that counts.
    """

    offer: Offer
    assembler: Assembler
    heard_at: float
    due_at: float
    wait_s: float
    listed_at: float = float("inf")

    @property
    def look_at(self) -> float:
        """When there is something to do about it."""
        return min(self.due_at, self.heard_at + EXPIRE_S)

    @property
    def missing(self) -> Missing:
        return Missing(self.offer.task, self.offer.round, self.offer.digest, self.assembler.missing())


class Transfers:
    """All open transfers; times are monotonic seconds.

    :param max_bytes: the largest update that can be; a larger offer is refused.
    :param max_open_bytes: of all open transfers together; further offers wait for their turn.
    """

    def __init__(self, *, max_bytes: int, max_open_bytes: int = MAX_OPEN_BYTES) -> None:
        self.max_bytes = max_bytes
        self.max_open_bytes = max_open_bytes
        self._open: dict[str, _Transfer] = {}
        # when to look at which, or earlier: thousands are open at once, and each message asks for the first
        self._looks: list[tuple[float, str]] = []
        self._queue: dict[str, Offer] = {}
        self._reserved = 0
        self._pace_s: dict[str, float] = {}

    def offer(self, device: str, offer: Offer, *, now: float) -> None:
        """Opens the transfer of an offered update, goes on with it, or puts it into the queue.

        Raises `TooLarge`, before anything is allocated.
        """
        if offer.size > self.max_bytes:
            raise TooLarge(f"an update of {offer.size} bytes is offered; at most {self.max_bytes} can be")
        current = self._open.get(device)
        if current is not None and current.offer == offer:
            # Offered again: it sends nothing by itself any more, so a pause that has lasted is the end of it.
            current.due_at = min(current.due_at, max(now, current.heard_at + IDLE_S))
            self._list(device, current)
            return
        self.drop(device)
        if self._reserved and self._reserved + offer.size > self.max_open_bytes:
            self._queue[device] = offer
        else:
            self._begin(device, offer, now, due_at=now + self._idle_s(device))

    def chunk(self, device: str, chunk: Chunk, *, now: float) -> tuple[Offer, bytes] | None:
        """Takes a chunk; the offer and the whole update once it is complete, its digest verified.

        Raises `Malformed` for a chunk of another update than the offered one, or of wrong content.
        """
        transfer = self._open.get(device)
        if device in self._queue:
            return None  # there is no room yet; it is asked for again in its turn
        if transfer is None:
            raise Malformed(f"{device} sent a chunk of an update that it has not offered")
        if transfer.assembler.add(chunk):
            if transfer.assembler.received > 1:
                pause = now - transfer.heard_at
                self._pace_s[device] = max(pause, 0.8 * self._pace_s.get(device, 0.0))
            transfer.heard_at = now
            transfer.wait_s = self._idle_s(device)
            transfer.due_at = now + transfer.wait_s
            self._list(device, transfer)
        if not transfer.assembler.complete:
            return None
        data = transfer.assembler.blob()
        self.drop(device)
        return transfer.offer, data

    @property
    def due_at(self) -> float:
        """When `gaps` may have something to say; inf without transfers."""
        while self._looks:
            at, device = self._looks[0]
            transfer = self._open.get(device)
            if transfer is None or transfer.listed_at != at:
                heapq.heappop(self._looks)
            elif transfer.look_at <= at:
                return at
            else:
                heapq.heappop(self._looks)
                transfer.listed_at = float("inf")
                self._list(device, transfer)
        return float("inf")

    def gaps(self, *, now: float) -> list[tuple[str, Missing]]:
        """Whom to tell what is missing; each is told later and later until something comes."""
        told = []
        while self.due_at <= now:
            device = self._looks[0][1]
            transfer = self._open[device]
            if now >= transfer.heard_at + EXPIRE_S:
                self.drop(device)
                continue
            told.append((device, transfer.missing))
            transfer.wait_s = min(2 * transfer.wait_s, LONGEST_IDLE_S)
            transfer.due_at = now + transfer.wait_s
        while self._queue:
            device, offer = next(iter(self._queue.items()))
            if self._reserved and self._reserved + offer.size > self.max_open_bytes:
                break
            del self._queue[device]
            # what it sent while it waited was dropped, so it is asked for everything
            told.append((device, self._begin(device, offer, now, due_at=now + IDLE_S).missing))
        return told

    def drop(self, device: str) -> None:
        """Forgets a device's transfer and its place in the queue."""
        transfer = self._open.pop(device, None)
        if transfer is not None:
            self._reserved -= transfer.offer.size
        self._queue.pop(device, None)

    def clear(self) -> None:
        self._open.clear()
        self._looks.clear()
        self._queue.clear()
        self._reserved = 0

    def _begin(self, device: str, offer: Offer, now: float, *, due_at: float) -> _Transfer:
        assembler = Assembler(offer.digest, offer.size, max_blob_bytes=self.max_bytes)
        self._open[device] = transfer = _Transfer(offer, assembler, now, due_at, self._idle_s(device))
        self._reserved += offer.size
        self._list(device, transfer)
        return transfer

    def _list(self, device: str, transfer: _Transfer) -> None:
        if transfer.look_at < transfer.listed_at:
            transfer.listed_at = transfer.look_at
            heapq.heappush(self._looks, (transfer.listed_at, device))

    def _idle_s(self, device: str) -> float:
        return min(max(IDLE_S, _PACES * self._pace_s.get(device, 0.0)), LONGEST_IDLE_S)
