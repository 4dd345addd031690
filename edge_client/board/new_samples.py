"""Counts a device's new samples since its last update, if its owner allows it to report that they are too few.

If a device decides by its data whether to take part, this reveals something about the data, and no charge covers it
(docs/privacy.md, "New samples"). So a device counts only if its owner has set `limits.tell_new`; all others always take
part. Samples are recognised by content, not by time: neither a changed clock nor a deleted old image hides a new one.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from pathlib import Path

import numpy as np

from hushfleet import atomic_file
from hushfleet.data.samples import LabelledSamples
from hushfleet.edge_client.declines import Declined
from hushfleet.edge_client.state_files import TRAINED_SAMPLES
from hushfleet.errors import StoreFull

_DIGEST_BYTES = 8

_log = logging.getLogger("hushfleet.edge")


class NewSamples:
    """The digests of the last update's samples, in a file beside the store.

    :param state_dir: the device's state directory.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / TRAINED_SAMPLES
        self._counted: list[bytes] = []

    @classmethod
    def of(cls, state_dir: Path, *, tell: bool) -> NewSamples | None:
        """Returns None if the owner does not allow the device to report; earlier notes are then deleted."""
        if tell:
            return cls(state_dir)
        with suppress(OSError):
            (state_dir / TRAINED_SAMPLES).unlink(missing_ok=True)
        return None

    def check(self, samples: LabelledSamples, *, task: str, wanted: int) -> None:
        """Raises `Declined` if fewer of these samples are new than the task wants."""
        if self.count(samples, task=task) < wanted:
            reason = f"fewer than {wanted} new samples since the last update; this device's owner lets it say so"
            raise Declined("paused", reason)

    def count(self, samples: LabelledSamples, *, task: str) -> int:
        """Returns how many of these samples were not in the last update for the task; all before the first update."""
        self._counted = _digests(samples)
        try:
            begin, _, digests = self._path.read_bytes().partition(b"\n")
        except OSError:
            return len(samples)
        known = set(_pieces(digests)) if begin == task.encode() else set()
        return len(set(self._counted) - known)

    def note(self, *, task: str) -> None:
        """Stores the samples that were counted last, before the update that is committed now.

        A sample that arrived during the training is not among them, and counts as new in the next round. If the file
        cannot be written, all count as new again.
        """
        try:
            atomic_file.write_whole(self._path, task.encode() + b"\n" + b"".join(self._counted), durable=False)
        except StoreFull as error:  # the update is sent anyway
            _log.warning("%s", error)


def _digests(samples: LabelledSamples) -> list[bytes]:
    targets = np.ascontiguousarray(samples.labels)
    return [
        hashlib.blake2b(value.tobytes() + target.tobytes(), digest_size=_DIGEST_BYTES).digest()
        for value, target in zip(samples.kept, targets, strict=True)
    ]


def _pieces(digests: bytes) -> list[bytes]:
    return [digests[at : at + _DIGEST_BYTES] for at in range(0, len(digests), _DIGEST_BYTES)]
