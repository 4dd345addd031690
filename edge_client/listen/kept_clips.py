"""Keeps segments of sound as files where they wait for a person: new ones in the inbox, alarms below it.

Only files that this module has written are replaced by newer ones. A disk that is full is logged once: the files that
are there stay, and the board listens on.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hushfleet.data.sound import Pcm, wav_of
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.labelling.class_folders import can_be_a_folder, check_inbox, write_new
from hushfleet.edge_client.labelling.heard import ALARMS, PREFIX, heard_name
from hushfleet.errors import HushfleetError

_log = logging.getLogger("hushfleet.edge")


class KeptClips:
    """The clips that one board keeps. Raises `BadInput` if they have no place.

    :param config: has the owner's rule, `[listen]`.
    """

    def __init__(self, config: DeviceConfig) -> None:
        self._rule, self._fails = config.listen, False
        self._inbox = None if self._rule.keep == "none" and not self._rule.keep_alarms else check_inbox(config.data)

    def new(self, pcm: Pcm, sample_rate: int, at: float) -> Path | None:
        """Keeps a clip until it has a label. Returns its path; None if it could not be written.

        :param at: unix seconds.
        """
        return self._put("", heard_name(at), wav_of(pcm, sample_rate), self._rule.most_kept)

    def alarm(self, pcm: Pcm, sample_rate: int, at: float, label: str, probability: float) -> Path | None:
        """Keeps a clip that the board took for a class, if its owner wants that; returns as `new`."""
        if not self._rule.keep_alarms or not can_be_a_folder(label):
            return None
        name = f"{label}/{heard_name(at, probability)}"
        return self._put(ALARMS, name, wav_of(pcm, sample_rate), self._rule.keep_alarms)

    def _put(self, folder: str, name: str, wav: bytes, most: int) -> Path | None:
        assert self._inbox is not None
        path = self._inbox / folder / name
        try:
            path = write_new(wav, path.parent, path.name)
            kept = (self._inbox / folder).glob(f"{'*/' * bool(folder)}{PREFIX}*.wav")
            others = sorted((os.stat(each).st_mtime_ns, each) for each in kept if each != path)  # a clock may go back
            for _, old in others[: max(0, len(others) + 1 - most)]:
                old.unlink()
        except (HushfleetError, OSError) as error:
            if not self._fails:
                _log.error("a clip is not kept, and those that are there stay: %s", error)
            self._fails = True
            return None
        self._fails = False
        return path
