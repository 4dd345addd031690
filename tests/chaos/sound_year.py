"""A year of boards that hear: new words in each quarter, false alarms that owners mark, boards that leave and come.

Clips are made by `examples/words`: each board is a speaker. In each month a board hears words that are none of its
own; what its present model takes for one of them, its owner marks (`label --wrong`), which makes it a sample of
"none". The world of `chaos.seasons` does the rest.

Boards are tested on clips in the shares of their own clips: each word is as frequent, and "none" as in their clips. A
second figure is for a test with `OTHERS_TESTED` clips of "none" and one of each word. No method promises anything
there: a third to half of such a test is of a class that has a quarter of the clips.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from chaos.seasons import Learner, SeasonYears, _below, check_seasons, task_text
from chaos.year import YearTask
from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.data.samples import FeatureSamples, Samples
from hushfleet.data.sound import write_clip
from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.learning.personalized_head import inputs_of_own, own_logits, personalized_head_of
from hushfleet.simulator.engines.fast.local_only_on_features import predict_local_only

FIRST_WORDS, MORE_WORDS = 6, 2
"""Words of the first quarter, and how many come with each further one."""
FIRST_CLIPS, FIRST_OTHERS, MORE_CLIPS, HEARD, OTHERS_TESTED = 12, 3, 3, 4, 6
"""Clips of a board at first and clips of "none" beside them, how many clips come in each month, other words that it
hears in it, and others in its test."""
NONE, OWN = "none", "own"


@cache
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_words", Path(__file__).parents[2] / "examples/words/make_data.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Month:
    """Means over boards with a model: accuracy of what they predict with, and of the best way to learn alone.

    :param own: on clips in the shares of a board's own; likewise `alone`.
    :param way: the best way to learn alone, chosen on the test itself.
    :param error: the standard error of `own` less `alone`, with boards as the unit.
    :param with_others: own heads and alone, if more of the test is "none".
    :param alarms: how many of the other words they took for one of theirs, of `heard` in the month.
    :param worst: how far a board's own accuracy lies below alone, at most; `below`: how many boards lie below.
    """

    number: int
    season: int
    classes: int
    boards: int
    own: float
    alone: float
    way: str
    error: float
    with_others: tuple[float, float]
    below: int
    worst: float
    alarms: int
    heard: int

    def __str__(self) -> str:
        return (
            f"month {self.number:2d}  season {self.season}  words {self.classes - 1:2d}  boards {self.boards}  own "
            f"{self.own:.1%}  alone {self.alone:.1%} ({self.way})  {100 * (self.own - self.alone):+.1f} "
            f"(standard error {100 * self.error:.1f})  with more "
            f"others {self.with_others[0]:.1%} and {self.with_others[1]:.1%}  boards below {self.below}, the worst by "
            f"{100 * self.worst:.0f}  false alarms {self.alarms} of {self.heard}"
        )


class Listener(Learner):
    """A board with clips of its own speaker.

    :param marked: other words that its model took for one of its own in this month, and `heard`: in all.
    """

    marked = heard = 0

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        place = int(self.name.rpartition("-")[2])
        words, self._rng = maker(), np.random.default_rng([place, self.number])
        voices = words.VOICES.split()
        self._speaker = words.Speaker.drawn(voices[place % len(voices)], np.random.default_rng(place))
        self._test: list[tuple[str, np.ndarray]] = []
        self.clips: list[tuple[str, np.ndarray]] = []
        self._hear(self.year.classes()[1:], FIRST_CLIPS)
        for _ in range(FIRST_OTHERS):
            self._keep(NONE, self._other())

    def own_data(self) -> OwnDataSection:
        return OwnDataSection("sound", str(self.path.with_name("clips")))

    def take_pictures(self, month: int, classes: int) -> None:
        """Clips come with the months."""

    def _said(self, word: str) -> np.ndarray:
        clip: np.ndarray = maker().spoken(word, self._speaker, self._rng)
        return clip

    def _other(self) -> np.ndarray:
        return self._said(str(self._rng.choice(maker().OTHER_WORDS.split())))

    def _keep(self, word: str, clip: np.ndarray) -> None:
        self.clips.append((word, clip))
        folder = self.path.with_name("clips") / word
        folder.mkdir(parents=True, exist_ok=True)
        write_clip(folder / f"{len(self.clips):03d}.wav", clip, maker().RATE)

    def _hear(self, words: Sequence[str], count: int) -> None:
        for word in self._rng.choice(words, count):
            self._keep(str(word), self._said(str(word)))

    def live_a_month(self, words: Sequence[str]) -> None:
        """Its owner labels some clips, and marks what the board took for a word and is none."""
        self._hear(words, MORE_CLIPS)
        others = [self._other() for _ in range(HEARD)] if self.model is not None else []
        found = self.predicted(others) if others else ()
        wrong = [clip for clip, said in zip(others, found, strict=True) if said]
        for clip in wrong:
            self._keep(NONE, clip)
        self.marked, self.heard = len(wrong), len(others)

    def predicted(self, clips: Sequence[np.ndarray]) -> np.ndarray:
        task, params = self.model
        own = _below(self._samples(self.clips), len(task.spec.model.class_names))
        head = personalized_head_of(params, task.model.layout, own, task.spec.signal).params
        found: np.ndarray = own_logits(head, inputs_of_own(self._samples([(NONE, clip) for clip in clips])).x).argmax(1)
        return found

    def _samples(self, clips: Sequence[tuple[str, np.ndarray]]) -> FeatureSamples:
        names = [NONE, *maker().WORDS]
        images = np.stack([clip for _, clip in clips])[:, None, None]
        labels = np.array([names.index(word) for word, _ in clips])
        made: FeatureSamples = self.model[0].features.of(Samples(images, labels, (0.0,), (1.0,)))
        return made

    def right(self, classes: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns which clips of the test are "none", and which are right, by the own head and each way alone."""
        names = [NONE, *maker().WORDS][:classes]
        known = {word for word, _ in self._test}
        self._test += [(word, self._said(word)) for word in names[1:] if word not in known]
        self._test += [(NONE, self._other()) for _ in range(0 if NONE in known else OTHERS_TESTED)]
        test = self._samples(self._test)
        (alone,) = predict_local_only([self._samples(self.clips)], test, classes=classes)
        said = {OWN: self.predicted([clip for _, clip in self._test]), **alone}
        return test.y == 0, {way: each == test.y for way, each in said.items()}

    def by_clips(self, others: np.ndarray) -> np.ndarray:
        """Returns the weight of each clip of the test, so that "none" is as frequent as in the own clips."""
        share = np.mean([word == NONE for word, _ in self.clips])
        return np.where(others, share / others.sum(), (1 - share) / (~others).sum())

    def accuracies(self, classes: int) -> tuple[float, dict[str, float]]:
        others, right = self.right(classes)
        found = {way: float(each @ self.by_clips(others)) for way, each in right.items()}
        return found.pop(OWN), found


class SoundYear(SeasonYears):
    """A fleet whose words grow with each quarter."""

    make_card = Listener

    def load(self) -> None:
        self.months: list[Month] = []

    def task_text(self, **numbers: Any) -> str:
        return task_text(**numbers, classes=self._words(1), features="sound:speech", data='name = "sound"\n')

    def _words(self, season: int) -> tuple[str, ...]:
        return (NONE, *maker().WORDS[: FIRST_WORDS + MORE_WORDS * (season - 1)])

    def classes(self) -> Sequence[str]:
        return self._words(self.season)

    def prepared(self, task: YearTask, folder: Path) -> PreparedTask:
        made = super().prepared(task, folder)
        made.features.computed = _remembered(made.features.computed)
        return made

    def month_begins(self, month: int) -> None:
        for name, card in self.cards.items():
            if self.desk.state(name) == "enrolled":
                card.live_a_month(self.classes()[1:])

    def month_ends(self, month: int) -> None:
        cards = [card for name, card in self.cards.items() if card.model is not None]
        classes = len(self._task.classes)
        tests = [(card, *card.right(classes)) for card in cards]
        own, alone, way = _compared([right for _, _, right in tests], [card.by_clips(each) for card, each, _ in tests])
        heard_own, heard_alone, _ = _compared(
            [right for _, _, right in tests], [np.full(len(each), 1 / len(each)) for _, each, _ in tests]
        )
        short = alone - own
        self.months.append(
            Month(
                number=month,
                season=self.season,
                classes=classes,
                boards=len(cards),
                own=float(own.mean()),
                alone=float(alone.mean()),
                way=way,
                error=float(short.std(ddof=1) / np.sqrt(len(short))),
                with_others=(float(heard_own.mean()), float(heard_alone.mean())),
                below=int((short > 1e-9).sum()),
                worst=max(0.0, float(short.max())),
                alarms=sum(card.marked for card in cards),
                heard=sum(card.heard for card in cards),
            )
        )
        print(self.months[-1], flush=True)


def _compared(
    right: Sequence[dict[str, np.ndarray]], weights: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns the accuracies of each board's own head and of the best way alone, and this way."""
    by_way = {
        way: np.array([each[way] @ weight for each, weight in zip(right, weights, strict=True)]) for way in right[0]
    }
    own = by_way.pop(OWN)
    best = max(by_way, key=lambda way: float(by_way[way].mean()))
    return own, by_way[best], best


def check_months(year: SoundYear, *, epsilon: float, lifetime: float, worse: float) -> None:
    """Checks the budgets, and that boards are not worse than alone; prints the months in which they are by a point, and
    by two standard errors.

    :param worse: by how much a month may be, because the mean of few boards is not sure.
    """
    check_seasons(year, epsilon=epsilon, lifetime=lifetime, worse=worse)
    short = [month.number for month in year.months if month.own < month.alone - 0.01]
    print("worse than alone by more than a point: months", short or "none")
    sure = [month.number for month in year.months if month.own < month.alone - 2 * month.error]
    print("worse than alone by more than two standard errors: months", sure or "none")
    assert all(month.own >= month.alone - worse for month in year.months)


def _remembered(computed: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Computes the features of each clip once."""
    known: dict[bytes, np.ndarray] = {}

    def of(samples: Samples, *, skips: bool) -> np.ndarray:
        keys = [image.tobytes() for image in samples.images]
        new = [place for place, key in enumerate(keys) if key not in known]
        if new:
            known.update(zip((keys[place] for place in new), computed(samples.take(new), skips=skips), strict=True))
        return np.stack([known[key] for key in keys])

    return of
