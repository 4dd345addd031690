"""Serves content-addressed blobs: many devices ask, and each chunk is broadcast once for all of them.

When a round opens, the whole cohort asks for the same model within a moment. So a `Want` only marks chunks; a pass over
the marked chunks begins a little later, and chunks that are marked ahead of the running pass cost nothing more.
A pass reaches all devices that are still subscribed, also those whose chunks are already on the way. So while devices
continue to ask for a blob, each pass waits twice as long for more requests as the one before: with 500 devices that
ask over several seconds, a fixed wait sent most of them the same chunk ten times or more. A pass waits no longer than
the blob is on its way to a slow device: a small difference, which cohorts drawn from a fleet ask for in round after
round, is sent at once.
A device is limited: it cannot make the same chunk be sent more than `PER_MINUTE` times a minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hushfleet.errors import Malformed
from hushfleet.wire.format.chunks import chunk_count, expand, split
from hushfleet.wire.format.messages import Want

COALESCE_S = 0.05
LONGEST_COALESCE_S = 1.6  # well before devices ask again by themselves
SLOW_LINK_BYTES_S = 250_000  # 2 Mbit/s
PER_MINUTE = 6
_MINUTE_S = 60.0


class Frame(NamedTuple):
    """One chunk to be published on the topic of the blob with this SHA-256."""

    digest: bytes
    data: bytes


@dataclass
class _Pass:
    """One pass over a blob: the chunks to send, and how long the next pass waits for more requests.

    :param wanted: one byte for each chunk, 1 if it is wanted.
    :param at: index of the next chunk of the running pass.
    :param due_at: time at which the pass begins; inf if nothing is wanted.
    """

    blob: bytes | memoryview
    wanted: bytearray
    at: int = 0
    due_at: float = math.inf
    wait_s: float = COALESCE_S
    ended_at: float = -math.inf

    def plan(self, now: float) -> None:
        """Schedules another pass."""
        if now - self.ended_at > self._longest_s:
            self.wait_s = COALESCE_S
        self.at, self.due_at = 0, now + self.wait_s

    def end(self, now: float) -> None:
        self.due_at, self.ended_at = math.inf, now
        self.wait_s = min(2 * self.wait_s, self._longest_s)
        if self.wanted.find(1) >= 0:  # chunks behind the pass were asked for again
            self.plan(now)

    @property
    def _longest_s(self) -> float:
        return min(COALESCE_S + len(self.blob) / SLOW_LINK_BYTES_S, LONGEST_COALESCE_S)


class ChunkServer:
    """Answers `Want`s; times are monotonic seconds.

    :param find: returns a blob by its SHA-256, or None if it is not (or no longer) available.
    :param chunk_bytes: payload of one chunk.
    """

    def __init__(self, find: Callable[[bytes], bytes | memoryview | None], *, chunk_bytes: int) -> None:
        self._find = find
        self._chunk_bytes = chunk_bytes
        self._passes: dict[bytes, _Pass] = {}
        # how often each device asked for each chunk of a blob in this minute
        self._asked: dict[tuple[str, bytes], bytearray] = {}
        self._minute_began_at = -math.inf

    def want(self, device: str, want: Want, *, now: float) -> bool:
        """Marks the chunks that a device asks for; returns False if there is no such blob here.

        A device asks for chunks that the blob does not have after a forged chunk that named another chunk size: then
        everything is sent, and the device starts again. Raises `Malformed` for another size than the blob's size.
        """
        blob = self._find(want.digest)
        if blob is None:
            return False
        if want.size != len(blob):
            raise Malformed(
                f"{want.size} bytes of the blob {want.digest.hex()[:16]}... were asked for, which has {len(blob)}"
            )
        count = chunk_count(len(blob), self._chunk_bytes)
        fits = not want.missing or want.missing[-1][1] <= count
        indices = expand(want.missing if fits else (), count)
        if now - self._minute_began_at >= _MINUTE_S:
            self._asked, self._minute_began_at = {}, now
        asked = self._asked.setdefault((device, want.digest), bytearray(count))
        running = self._passes.setdefault(want.digest, _Pass(blob, bytearray(count)))
        for index in indices:
            if asked[index] >= PER_MINUTE or running.wanted[index]:
                continue
            asked[index] += 1
            running.wanted[index] = 1
            if running.due_at == math.inf:
                running.plan(now)
        return True

    def is_marked(self, want: Want) -> bool:
        """Returns whether all these chunks are about to be sent, so that `want` would change nothing."""
        running = self._passes.get(want.digest)
        if running is None or want.size != len(running.blob):
            return False
        if want.missing and want.missing[-1][1] > len(running.wanted):
            return False
        places = [slice(*span) for span in want.missing] or [slice(None)]
        return all(0 not in running.wanted[place] for place in places)

    @property
    def due_at(self) -> float:
        """Time of the next chunk; inf if nothing was asked for."""
        return min((each.due_at for each in self._passes.values()), default=math.inf)

    def frames(self, *, now: float, limit: int) -> Iterator[Frame]:
        """Yields at most `limit` chunks that are due, and unmarks each chunk when it is yielded."""
        for digest, running in [(digest, each) for digest, each in self._passes.items() if each.due_at <= now]:
            while limit > 0:
                index = running.wanted.find(1, running.at)
                if index < 0:
                    running.end(now)
                    break
                running.wanted[index], running.at = 0, index + 1
                limit -= 1
                yield Frame(digest, next(split(running.blob, self._chunk_bytes, (index,), digest=digest)))

    def forget(self, digest: bytes) -> None:
        """Drops the unsent chunks of an obsolete blob."""
        self._passes.pop(digest, None)

    def clear(self) -> None:
        """Drops all unsent chunks after a lost connection, because devices ask again."""
        for each in self._passes.values():
            each.wanted[:], each.due_at = bytes(len(each.wanted)), math.inf
