"""Counts a device's new samples since its last update, if its owner allows it to report that they are too few.

If a device decides by its data whether to take part, this reveals something about the data, and no charge covers it
(docs/privacy.md, "New samples"). So a device counts only if its owner has set `limits.tell_new`; all others always take
part. Samples are recognised by content, not by time: neither a changed clock nor a deleted old image hides a new one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hushfleet import atomic_file
from hushfleet.edge_client.storage.state_files import TRAINED_SAMPLES
from hushfleet.errors import StoreFull

if TYPE_CHECKING:
    from hushfleet.data.samples import LabelledSamples

_DIGEST_BYTES = 8

_log = logging.getLogger("hushfleet.edge")


class NewSamples:
    """The digests of the last update's samples, in a file beside the store.

    :param state_dir: the device's state directory.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / TRAINED_SAMPLES

    @property
    def known(self) -> bytes:
        """The task and the digests of the last update's samples; empty before the first update."""
        try:
            return self._path.read_bytes()
        except OSError:
            return b""

    def note(self, digests: bytes, *, task: str) -> None:
        """Stores the samples that were counted for an update, once it is committed.

        A sample that arrived during the training is not among them, and counts as new in the next round. If the file
        cannot be written, all count as new again.
        """
        try:
            atomic_file.write_whole(self._path, task.encode() + b"\n" + digests, durable=False)
        except StoreFull as error:  # the update is sent anyway
            _log.warning("%s", error)


def count_new(digests: Sequence[bytes], known: bytes, *, task: str) -> int:
    """Returns how many samples were not in the last update for the task; all before the first update.

    :param known: as `NewSamples.known`.
    """
    if not known:
        return len(digests)
    begin, _, others = known.partition(b"\n")
    return len(set(digests) - (set(_pieces(others)) if begin == task.encode() else set()))


def digests_of(samples: LabelledSamples) -> list[bytes]:
    """Returns a short digest of each sample with its target."""
    return [
        hashlib.blake2b(value.tobytes() + target.tobytes(), digest_size=_DIGEST_BYTES).digest()
        for value, target in zip(samples.kept, samples.labels, strict=True)
    ]


def _pieces(digests: bytes) -> list[bytes]:
    return [digests[at : at + _DIGEST_BYTES] for at in range(0, len(digests), _DIGEST_BYTES)]
