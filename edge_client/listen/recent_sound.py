"""The last seconds of sound, in memory, cut into segments while they come."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hushfleet.data.sound import Pcm, loudest, segments_of

SEGMENTS = 3
"""The number of segments that are remembered."""
_STEPS = 16  # a segment's loudest place is found to this part of its length


class RecentSound:
    """The newest `SEGMENTS` segments.

    :param length: frames of a segment.
    :param hop: frames from the beginning of one segment to that of the next.
    """

    def __init__(self, length: int, hop: int) -> None:
        self._length, self._hop = length, hop
        self.heard = 0
        """The number of frames that have come."""
        self.clear()

    def clear(self) -> None:
        """Forgets all sound: no segment reaches over a gap."""
        self._kept = np.empty(0, np.int16)
        self._fresh = 0  # frames since the beginning of the next segment; negative: it begins later

    def add(self, pcm: Pcm) -> Iterator[Pcm]:
        """Yields each segment, int16 `[length]`, at its last frame."""
        while len(pcm):
            piece, pcm = np.split(pcm, [self._length - self._fresh])
            self._kept = np.concatenate((self._kept, piece))[-SEGMENTS * self._length :]
            self.heard, self._fresh = self.heard + len(piece), self._fresh + len(piece)
            if self._fresh == self._length:
                self._fresh -= self._hop
                yield self._kept[-self._length :]

    def loudest(self, frames: int) -> Pcm:
        """Returns the loudest segment of the last `frames` frames, wherever it begins, int16 `[length]`.

        :param frames: at least a segment; what is no longer remembered is left out.
        """
        recent = self._kept[-frames:]
        hop = max(1, self._length // _STEPS)
        found: Pcm = loudest(segments_of(recent[(len(recent) - self._length) % hop :], self._length, hop))[0]
        return found
