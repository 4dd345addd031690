"""Serving content-addressed blobs: many devices ask, each chunk is broadcast once for all of them.

When a round opens the whole cohort asks for the same model within a moment. So a `Want` only marks chunks; a
pass over the marked ones begins a little later, and what is marked while it runs ahead costs nothing more.
A pass goes to all who are still subscribed, those among them who have their chunks on the way already. So while
a blob goes on being asked for, each pass waits twice as long for more to ask as the one before: with 500 devices that
ask over seconds, a fixed wait sent most of them the same chunk ten times and more.
A device is bounded: beyond `PER_MINUTE` times a minute it cannot have the same chunk sent again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hushfleet.errors import Malformed
from hushfleet.wire.format.chunks import chunk_count, expand, split
from hushfleet.wire.format.messages import Want

COALESCE_S = 0.05
LONGEST_COALESCE_S = 1.6  # well before devices ask again by themselves
PER_MINUTE = 6
_MINUTE_S = 60.0


class Frame(NamedTuple):
    """One chunk to be published on the topic of the blob with this SHA-256."""

    digest: bytes
    data: bytes


@dataclass
class _Pass:
    """The chunks of one blob that are to be sent; `at` is how far the running pass has come."""

    blob: bytes
    wanted: bytearray
    due_at: float
    at: int = 0


@dataclass
class _Pace:
    """How long the next pass of one blob waits for more to ask, and when the last one ended."""

    wait_s: float = COALESCE_S
    ended_at: float = -math.inf

    def due_at(self, now: float) -> float:
        """Of a pass that is first asked for at `now`."""
        if now - self.ended_at > LONGEST_COALESCE_S:
            self.wait_s = COALESCE_S
        return now + self.wait_s

    def ended(self, now: float) -> None:
        self.ended_at = now
        self.wait_s = min(2 * self.wait_s, LONGEST_COALESCE_S)


@dataclass
class _Window:
    """What each device asked for in this minute: (device, digest) -> how often each chunk."""

    began_at: float = -math.inf
    asked: dict[tuple[str, bytes], bytearray] = field(default_factory=dict)


class ChunkServer:
    """Answers `Want`s; times are monotonic seconds.

    :param find: a blob by its SHA-256, or None if it is not (or no longer) available.
    :param chunk_bytes: payload of one chunk.
    """

    def __init__(self, find: Callable[[bytes], bytes | None], *, chunk_bytes: int) -> None:
        self._find = find
        self._chunk_bytes = chunk_bytes
        self._passes: dict[bytes, _Pass] = {}
        self._paces: dict[bytes, _Pace] = {}
        self._window = _Window()

    def want(self, device: str, want: Want, *, now: float) -> bool:
        """Marks what a device asks for; False if there is no such blob here.

        Raises `Malformed` for another size than the blob's, or chunks that it does not have.
        """
        blob = self._find(want.digest)
        if blob is None:
            return False
        if want.size != len(blob):
            raise Malformed(f"{want.size} bytes of {want.digest.hex()[:16]}... were asked for, it has {len(blob)}")
        count = chunk_count(len(blob), self._chunk_bytes)
        indices = expand(want.missing, count)
        asked = self._asked(device, want.digest, count, now)
        running = self._passes.get(want.digest)
        for index in indices:
            if asked[index] >= PER_MINUTE or (running is not None and running.wanted[index]):
                continue
            asked[index] += 1
            if running is None:
                due_at = self._paces.setdefault(want.digest, _Pace()).due_at(now)
                running = self._passes[want.digest] = _Pass(blob, bytearray(count), due_at)
            running.wanted[index] = 1
        return True

    @property
    def due_at(self) -> float:
        """When there is something to send; inf if nothing was asked for."""
        return min((each.due_at for each in self._passes.values()), default=math.inf)

    def frames(self, *, now: float, limit: int) -> Iterator[Frame]:
        """At most `limit` chunks that are due, each taken off the list as it is given out."""
        for digest in [digest for digest, each in self._passes.items() if each.due_at <= now]:
            running = self._passes[digest]
            while limit > 0:
                index = running.wanted.find(1, running.at)
                if index < 0:
                    self._end_pass(digest, running, now)
                    break
                running.wanted[index], running.at = 0, index + 1
                limit -= 1
                yield Frame(digest, next(split(running.blob, self._chunk_bytes, (index,), digest=digest)))

    def forget(self, digest: bytes) -> None:
        """A blob is obsolete: what of it is still to be sent is not."""
        self._passes.pop(digest, None)
        self._paces.pop(digest, None)

    def clear(self) -> None:
        """The connection was lost: who still wants something asks again."""
        self._passes.clear()

    def _end_pass(self, digest: bytes, running: _Pass, now: float) -> None:
        pace = self._paces[digest]
        pace.ended(now)
        if running.wanted.find(1) < 0:
            del self._passes[digest]
        else:  # chunks behind the pass were asked for again
            running.at, running.due_at = 0, pace.due_at(now)

    def _asked(self, device: str, digest: bytes, count: int, now: float) -> bytearray:
        if now - self._window.began_at >= _MINUTE_S:
            self._window = _Window(now)
        return self._window.asked.setdefault((device, digest), bytearray(count))
