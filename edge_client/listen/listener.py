"""Listens: each segment of sound is predicted, told, and kept if the owner's rule says so."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hushfleet.data.form import SampleForm
from hushfleet.data.sound import UNIT, Pcm
from hushfleet.edge_client.board.config import ListenSection
from hushfleet.edge_client.listen.kept_clips import KeptClips
from hushfleet.edge_client.listen.model_in_use import ModelInUse
from hushfleet.edge_client.listen.recent_sound import SEGMENTS, RecentSound

UNUSUAL, MOST_SCORE, UNSURE = "unusual", 9.99, (0.5, 2.0)
"""The alarm of a task that says what is unusual, the largest score in the name of a kept clip, and the scores that are
near the threshold, whose score is 1: `keep = "unsure"`."""
SILENCE_DBFS = -100.0
"""The loudness of no sound at all, which has no logarithm."""


@dataclass(frozen=True)
class Heard:
    """The news of one segment.

    :param from_s: seconds of sound that came before it.
    :param dbfs: its loudness; 0 is the loudest possible.
    :param classes: as `Prediction.classes`; empty before the first model, and for a clip that is kept when sound ends.
    :param alarm: the class that the board takes it for; empty: for none, or that the model is not sure enough of.
    :param kept: the files that were written.
    :param score: if the task says what is unusual: the error divided by the board's threshold.
    """

    from_s: float
    dbfs: float
    classes: tuple[tuple[str, float], ...]
    alarm: str
    kept: tuple[Path, ...]
    score: float | None = None

    def to_json(self, top: int) -> dict[str, Any]:
        named: dict[str, Any] = {}
        if self.classes:
            named = {"classes": dict(self.classes[: max(1, top)]), "alarm": self.alarm}
        elif self.score is not None:
            named = {"score": round(self.score, 3), "unusual": self.score > 1, "alarm": self.alarm}
        kept = {"kept": list(map(str, self.kept))} if self.kept else {}
        return {"from_s": round(self.from_s, 3), "dbfs": round(self.dbfs, 1), **named, **kept}


class SegmentListener:
    """The work for each segment.

    :param form: how sound is cut.
    :param key: is set when the owner asks for a clip (`keep = "key"`).
    """

    def __init__(
        self, form: SampleForm, rule: ListenSection, model: ModelInUse, clips: KeptClips, key: threading.Event
    ) -> None:
        self._rate, self._length = form.sample_rate, round(form.segment_s * form.sample_rate)
        self._rule, self._model, self._clips, self._key = rule, model, clips, key
        self._recent = RecentSound(self._length, form.hop)
        self._used = 0  # frames up to the end of the last segment that was kept: no sound is kept twice
        self._loud_at: int | None = None
        self._alarm = ""

    def hear(self, pcm: Pcm | None, at: float) -> Iterator[Heard]:
        """Takes some sound, or None if some is missing or it has ended, and yields what was heard in it.

        :param at: unix seconds.
        """
        if pcm is None:
            yield from self._last(at)
            self._recent.clear()
            self._used, self._loud_at = self._recent.heard, None
        else:
            yield from (self._one(segment, at) for segment in self._recent.add(pcm))

    def _last(self, at: float) -> Iterator[Heard]:
        """Keeps a loud sound after which no further segment comes."""
        if self._loud_at is not None:
            clip = self._recent.loudest(self._recent.heard - self._used)
            if (kept := self._clips.new(clip, self._rate, at)) is not None:
                yield Heard((self._loud_at - self._length) / self._rate, loudness(clip), (), "", (kept,))

    def _one(self, segment: Pcm, at: float) -> Heard:
        dbfs, kept = loudness(segment), list[Path | None]()
        classes, score = self._model.predict(segment), self._model.score(segment)
        name, probability = classes[0] if classes else ("", 0.0)
        alarm = name if name != self._rule.no_alarm and probability >= self._rule.alarm_above else ""
        if score is not None:
            alarm, probability = UNUSUAL * (score > 1), min(score, MOST_SCORE)
        if alarm and alarm != self._alarm:  # the first segment of a sound that goes on
            kept.append(self._clips.alarm(segment, self._rate, at, alarm, probability))
        self._alarm = alarm
        is_unsure = bool(classes) and probability < self._rule.unsure_below
        if score is not None:
            is_unsure = UNSURE[0] <= score <= UNSURE[1]
        if (clip := self._wanted(segment, dbfs, is_unsure)) is not None:
            kept.append(self._clips.new(clip, self._rate, at))
        from_s = (self._recent.heard - self._length) / self._rate
        return Heard(from_s, dbfs, classes, alarm, tuple(filter(None, kept)), score)

    def _wanted(self, segment: Pcm, dbfs: float, is_unsure: bool) -> Pcm | None:
        """Returns the clip that the owner's rule wants now, if any."""
        rule, heard = self._rule, self._recent.heard
        fresh = heard - self._used
        if rule.keep == "key":
            if not self._key.is_set():
                return None
            self._key.clear()
            return self._recent.loudest(SEGMENTS * self._length)
        if fresh < self._length:
            return None
        if rule.keep == "unsure" and is_unsure:
            self._used = heard
            return segment
        if rule.keep != "loud":
            return None
        if self._loud_at is None and dbfs >= rule.loud_dbfs:
            self._loud_at = heard
        if self._loud_at is None or heard < self._loud_at + self._length:
            return None  # the sound may only have begun: its loudest part is in this segment or the next
        self._used, self._loud_at = heard, None
        return self._recent.loudest(fresh)


def loudness(pcm: Pcm) -> float:
    """Returns the root of the mean square in decibels below the loudest possible value.

    >>> round(loudness(np.full(8, 1 << 14, np.int16)), 2)
    -6.02
    """
    power = float(np.square(pcm, dtype=np.float64).mean())
    return max(SILENCE_DBFS, 10 * math.log10(power / UNIT**2)) if power else SILENCE_DBFS
