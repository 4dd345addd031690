"""Receives updates: one open transfer per device, limited in size and in total, and resumed with the missing chunks.

A device sends its offer and then all chunks without a request. If chunks stop before the blob is complete, the device
is told which are missing. The pause that counts as a stop depends on the speed of that device's link, because a request
that is too early makes a slow device send chunks twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from hushfleet.errors import Malformed, TooLarge
from hushfleet.wire.format.chunks import Assembler, Chunk
from hushfleet.wire.format.messages import Missing, Offer

IDLE_S = 1.0
LONGEST_IDLE_S = 60.0
EXPIRE_S = 300.0
LOOK_EVERY_S = 0.1  # least time between two passes over all transfers: thousands may be open
MAX_OPEN_BYTES = 256 << 20
MAX_EARLY_BYTES = 64 << 20
MAX_EARLY_DEVICE_BYTES = 4 << 20
_PACES = 4.0
_OBJECT_BYTES = 512  # memory of a held chunk besides its payload


@dataclass
class _Transfer:
    """An update whose chunks are arriving; `wait_s` is the pause after which the device is told what is missing."""

    offer: Offer
    assembler: Assembler
    heard_at: float
    due_at: float
    wait_s: float

    @property
    def missing(self) -> Missing:
        return Missing(self.offer.task, self.offer.round, self.offer.digest, self.assembler.missing())


class EarlyChunks:
    """Chunks that arrived before their offer: MQTT keeps the order of messages only within a topic.

    For each device, the chunks of its newest update are held, up to limits per device and in total. Dropped chunks are
    requested after the offer.
    """

    def __init__(self) -> None:
        self._held: dict[str, dict[int, Chunk]] = {}
        self._bytes: dict[str, int] = {}
        self._all_bytes = 0

    def hold(self, device: str, chunk: Chunk) -> None:
        """Holds a chunk. Raises `Malformed` if too many come before an offer, or if another update had no offer."""
        held = self._held.get(device, {})
        if held and next(iter(held.values())).digest != chunk.digest:
            self.drop(device)
            self.hold(device, chunk)
            raise Malformed(f"{device} sent chunks of an update that it did not offer")
        cost = len(chunk.payload) + _OBJECT_BYTES
        if chunk.index in held or self._all_bytes + cost > MAX_EARLY_BYTES:
            return
        if self._bytes.get(device, 0) + cost > MAX_EARLY_DEVICE_BYTES:
            raise Malformed(
                f"{device} sent more than {MAX_EARLY_DEVICE_BYTES} bytes of an update that it did not offer"
            )
        self._held.setdefault(device, held)[chunk.index] = chunk
        self._bytes[device] = self._bytes.get(device, 0) + cost
        self._all_bytes += cost

    def take(self, device: str, offer: Offer) -> list[Chunk]:
        """Returns the held chunks of an update that is offered now, and drops all others of the device."""
        held = self._held.get(device, {})
        self.drop(device)
        return [chunk for chunk in held.values() if (chunk.digest, chunk.size) == (offer.digest, offer.size)]

    def drop(self, device: str) -> None:
        """Drops the held chunks of a device."""
        self._held.pop(device, None)
        self._all_bytes -= self._bytes.pop(device, 0)

    def clear(self) -> None:
        """Drops everything."""
        self._held.clear()
        self._bytes.clear()
        self._all_bytes = 0


class Transfers:
    """All open transfers; times are monotonic seconds.

    :param max_bytes: the size of the largest possible update; a larger offer is refused.
    :param max_open_bytes: the limit for all open transfers together; further offers wait for their turn.
    """

    def __init__(self, *, max_bytes: int, max_open_bytes: int = MAX_OPEN_BYTES) -> None:
        self.max_bytes = max_bytes
        self.max_open_bytes = max_open_bytes
        self._open: dict[str, _Transfer] = {}
        self._queue: dict[str, Offer] = {}
        self._early = EarlyChunks()
        self._reserved = 0
        self._look_at = self._looked_at = 0.0
        self._pace_s: dict[str, float] = {}

    def offer(self, device: str, offer: Offer, *, now: float) -> bytes | None:
        """Opens or continues the transfer of an offered update, or puts it into the queue.

        Returns the complete update if all of it has arrived before. Raises `Malformed`, and `TooLarge` before anything
        is allocated.
        """
        if offer.size > self.max_bytes:
            raise TooLarge(f"the offered update has {offer.size} bytes; at most {self.max_bytes} are accepted")
        current = self._open.get(device)
        if current is not None and current.offer == offer:
            # Offered again: the device sends nothing more by itself, so a long enough pause means that it has stopped.
            self._due(current, min(current.due_at, max(now, current.heard_at + IDLE_S)))
            return None
        if self._queue.get(device) == offer:
            return None  # it keeps its place
        early = self._early.take(device, offer)
        self.drop(device)
        if self._reserved and self._reserved + offer.size > self.max_open_bytes:
            self._queue[device] = offer
            return None
        self._begin(device, offer, now, due_at=now + self._idle_s(device))
        whole = [self.chunk(device, chunk, now=now) for chunk in early]
        return next((data for _, data in filter(None, whole)), None)

    def chunk(self, device: str, chunk: Chunk, *, now: float) -> tuple[Offer, bytes] | None:
        """Takes a chunk; returns the offer and the whole update once it is complete, with a verified digest.

        A chunk of another update than the offered one is held until that update is offered. Raises `Malformed` for
        wrong content and for too many such chunks.
        """
        transfer = self._open.get(device)
        if device in self._queue:
            return None  # there is no room yet; it is requested again in its turn
        if transfer is None or transfer.offer.digest != chunk.digest:
            self._early.hold(device, chunk)
            return None
        if transfer.assembler.add(chunk):
            if transfer.assembler.received > 1:
                pause = now - transfer.heard_at
                self._pace_s[device] = max(pause, 0.8 * self._pace_s.get(device, 0.0))
            transfer.heard_at = now
            transfer.wait_s = self._idle_s(device)
            self._due(transfer, now + transfer.wait_s)
        if not transfer.assembler.complete:
            return None
        data = transfer.assembler.blob()
        self.drop(device)
        return transfer.offer, data

    @property
    def due_at(self) -> float:
        """The time at which `gaps` may return something; inf without transfers."""
        return max(self._look_at, self._looked_at + LOOK_EVERY_S) if self._open else float("inf")

    def gaps(self, *, now: float) -> list[tuple[str, Missing]]:
        """Returns devices with the messages about their missing chunks, at growing intervals until chunks arrive."""
        told = []
        is_time = now >= self.due_at
        if is_time:
            self._look_at, self._looked_at = float("inf"), now
        for device, transfer in list(self._open.items()) if is_time else ():
            if now - transfer.heard_at > EXPIRE_S:
                self.drop(device)
            elif now >= transfer.due_at:
                told.append((device, transfer.missing))
                transfer.wait_s = min(2 * transfer.wait_s, LONGEST_IDLE_S)
                transfer.due_at = now + transfer.wait_s
            self._look_at = min(self._look_at, transfer.due_at)
        while self._queue:
            device, offer = next(iter(self._queue.items()))
            if self._reserved and self._reserved + offer.size > self.max_open_bytes:
                break
            del self._queue[device]
            # chunks that it sent while it waited were dropped, so all are requested
            told.append((device, self._begin(device, offer, now, due_at=now + IDLE_S).missing))
        return told

    def drop(self, device: str) -> None:
        """Drops a device's transfer, its place in the queue, and its early chunks."""
        transfer = self._open.pop(device, None)
        if transfer is not None:
            self._reserved -= transfer.offer.size
        self._queue.pop(device, None)
        self._early.drop(device)

    def clear(self) -> None:
        """Drops all transfers, the queue and the early chunks."""
        self._early.clear()
        self._open.clear()
        self._queue.clear()
        self._reserved = 0

    def _begin(self, device: str, offer: Offer, now: float, *, due_at: float) -> _Transfer:
        assembler = Assembler(offer.digest, offer.size, max_blob_bytes=self.max_bytes)
        self._open[device] = transfer = _Transfer(offer, assembler, now, due_at, self._idle_s(device))
        self._due(transfer, due_at)
        self._reserved += offer.size
        return transfer

    def _due(self, transfer: _Transfer, at: float) -> None:
        transfer.due_at, self._look_at = at, min(at, self._look_at)

    def _idle_s(self, device: str) -> float:
        return min(max(IDLE_S, _PACES * self._pace_s.get(device, 0.0)), LONGEST_IDLE_S)
