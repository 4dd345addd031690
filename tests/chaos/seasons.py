"""Two years of seasons on a virtual clock (`chaos.year`), with boards that learn and images that they learn from.

The fleet service's own part starts each season. A board predicts with the head that it chooses after the last round in
which it took part, so boards that are away keep an older one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from chaos.year import BEGINS, DEADLINE_S, Card, Year, YearTask
from chaos.year_audit import oracle
from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.fleet import descriptions
from hushfleet.aggregator.fleet.tasks.seasons import SeasonStarter
from hushfleet.aggregator.fleet.tasks.spending import Spending
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.watching.watch import FleetWatch
from hushfleet.aggregator.payloads.prepare import PreparedTask, prepare
from hushfleet.aggregator.report.readable import number, percent
from hushfleet.data.samples import FeatureSamples, Samples
from hushfleet.data.sets import load
from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.learning.personalized_head import inputs_of_own, own_logits, personalized_head_of
from hushfleet.simulator.engines.fast.local_only_on_features import predict_local_only
from support.enroller import Desk

SEASON_DAYS = 90
CLASSES = tuple(f"digit-{n}" for n in range(10))
FIRST_CLASSES = 8
IMAGES, MORE_IMAGES, TESTED = 12, 2, 100
"""Images of a board in the first season, how many come in each further one, and how many it is tested on."""
THERE = 0.97
"""Share of the boards that are there in a night; a committee of all of them allows few to be missing."""


DIGITS = """name = "arrays"
input_shape = [1, 8, 8]
values = "pixels"
"""


def task_text(
    *,
    boards: int,
    there: int,
    rounds: int,
    lifetime: float,
    epsilon: float,
    classes: Sequence[str] = CLASSES[:FIRST_CLASSES],
    features: str = "filters",
    data: str = DIGITS,
) -> str:
    """:param there: number of boards with which a round opens, and which a sum needs.
    :param data: what boards have.
    """
    names = ", ".join(f'"{name}"' for name in classes)
    return f"""
name = "leaf"
[model]
name = "linear"
features = "{features}"
[method]
name = "hush"
[privacy]
accounting = "secure"
[data]
{data}class_names = [{names}]
devices = {boards}
[round]
rounds = {rounds}
min_devices = {there}
min_updates = {there}
deadline_s = {DEADLINE_S}
[schedule]
every = "7d"
between = "01:00-05:00"
timezone = "Europe/Berlin"
[season]
every = "{SEASON_DAYS}d"
epsilon = {epsilon}
lifetime = {lifetime}
classes = "classes.txt"
"""


@dataclass(frozen=True)
class SeasonEnd:
    """What is true at the end of a season.

    :param own: mean accuracy of what boards predict with, on images with their own mix of classes; `alone`: of the
        best way to learn alone, on the same images.
    :param season: epsilon of this season, of the board that has spent least, the median and most; `in_all`: likewise.
    :param took_part: number of boards that have trained in it.
    :param sentences: what the fleet does, waits for, has spent, and until when it learns.
    """

    number: int
    task: str
    classes: int
    boards: int
    took_part: int
    own: float
    alone: float
    season: tuple[float, float, float]
    in_all: tuple[float, float, float]
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        spent = ("/".join(number(each) for each in of) for of in (self.season, self.in_all))
        told = "".join(f"\n    {sentence}" for sentence in self.sentences)
        return (
            f"season {self.number} ({self.task}, {self.classes} classes): personalized head {percent(self.own)}, alone "
            f"{percent(self.alone)}; {self.took_part} of {self.boards} boards took part; epsilon of least/median/most "
            f"board: in the season {next(spent)}, in all {next(spent)}{told}"
        )


class Learner(Card):
    """A board with digits of its own mix of classes, and the model with which it predicts.

    :param model: the newest shared model that it has seen: its task, and the flat vector.
    """

    model: tuple[PreparedTask, np.ndarray] | None = None

    def stream(self, samples: Samples, count: int, classes: int, salt: int) -> Samples:
        """The first images of this board, of the classes that its fleet knows."""
        rng = np.random.default_rng([int(self.name.rpartition("-")[2]), salt])
        mix = np.random.default_rng(int(self.name.rpartition("-")[2])).dirichlet(np.full(len(CLASSES), 0.5))
        weight = (mix[samples.y] / np.bincount(samples.y)[samples.y]) * (samples.y < classes)
        return samples.take(rng.choice(len(samples), count, p=weight / weight.sum()))

    def take_pictures(self, month: int, classes: int) -> None:
        season = self.year.season
        if season == self._months:
            return
        self._months = season
        own = self.stream(self.year.train, IMAGES + MORE_IMAGES * (season - 1), classes, 1)
        np.savez(self.path, images=own.images, labels=own.y)

    def accuracies(self, classes: int) -> tuple[float, dict[str, float]]:
        """Returns the accuracy of its personalized head, and of each way to learn alone."""
        task, params = self.model
        test = task.features.of(self.stream(self.year.test, TESTED, classes, 2))
        own = task.features.of(self.stream(self.year.train, IMAGES + MORE_IMAGES * (self.year.season - 1), classes, 1))
        known = len(task.spec.model.class_names)
        head = personalized_head_of(params, task.model.layout, _below(own, known), task.spec.signal).params
        right = own_logits(head, inputs_of_own(test).x).argmax(1) == test.y
        (alone,) = predict_local_only([own], test, classes=classes)
        return float(right.mean()), {way: float((said == test.y).mean()) for way, said in alone.items()}


def _below(samples: FeatureSamples, classes: int) -> FeatureSamples:
    """The samples of classes that an older model knows."""
    return samples.take(np.flatnonzero(samples.y < classes))


class SeasonYears(Year):
    """A fleet that repeats its task.

    :param late: number of boards that come after two seasons; `lost`: that are blocked after three; `off`: that are off
        in the fourth and the fifth season.
    :param new_classes: the season before which the operator adds two classes; 0: never.
    """

    make_card = Learner

    def __init__(
        self,
        path: Path,
        *,
        boards: int,
        there: int,
        rounds: int,
        lifetime: float,
        epsilon: float = 2.0,
        late: int = 0,
        lost: int = 0,
        off: int = 0,
        new_classes: int = 0,
    ) -> None:
        self.load()
        self.late, self.lost, self.off, self.new_classes = late, lost, off, new_classes
        self._text = self.task_text(boards=boards, there=there, rounds=rounds, lifetime=lifetime, epsilon=epsilon)
        self.season = 1
        self.ends: list[SeasonEnd] = []
        self._there = there
        super().__init__(path, boards=boards, every_days=7)

    def load(self) -> None:
        digits = load("digits")
        self.train, self.test = digits.train, digits.test

    def task_text(self, **numbers: Any) -> str:
        return task_text(**numbers)

    def classes(self) -> Sequence[str]:
        """Of the present season, as the operator writes them."""
        return CLASSES if 0 < self.new_classes <= self.season else CLASSES[:FIRST_CLASSES]

    def month_begins(self, month: int) -> None:
        """Called on every thirtieth day."""

    def month_ends(self, month: int) -> None:
        """Likewise, before the fleet goes on."""

    def make_desk(self, path: Path, boards: int) -> Desk:
        path.joinpath("classes.txt").write_text("\n".join(self.classes()))
        desk = Desk(path, boards=boards, certificate_days=120, task=self._text)
        file = desk.folder.path / "fleet.toml"
        file.write_text(file.read_text().replace("min_devices = 10", "min_devices = 2"))
        desk.folder = FleetFolder(desk.folder.path)
        self.limits = LimitsSection(
            **desk.folder.config.device["limits"], memory_mib=500, min_devices=self._there, constant_time=False
        )
        return desk

    def first_task(self) -> YearTask:
        return self._named()

    def _named(self) -> YearTask:
        task = load_task(self.desk.folder.task)
        return YearTask(task.name, 0, task.class_names)

    def prepared(self, task: YearTask, folder: Path) -> PreparedTask:
        made = prepare(load_task(folder / "task.toml"), run_id="1")
        return replace(made, evaluate_global=None)

    def _place(self, name: str) -> int:
        return len(self.names) - 1 - self.names.index(name)

    def has_card(self, name: str, *, day: int) -> bool:
        return self._place(name) >= self.late or day >= 2 * SEASON_DAYS

    def takes_part(self, name: str) -> bool:
        place = self._place(name)
        if name not in self.cards or (self.late <= place < self.late + self.lost and self.season > 3):
            return False
        away = self.season in (4, 5) and self.late + self.lost <= place < self.late + self.lost + self.off
        return self.random.random() < THERE and not away

    def play(self, seasons: int) -> None:
        """Plays so many seasons, with nobody who does anything but what the docstring of the class says."""
        folder = self.desk.folder
        starter = SeasonStarter(folder, clock=self.wall)
        for day in range(seasons * SEASON_DAYS + 1):
            if day and day % 30 == 0:
                self.month_ends(day // 30)
            if day and day % SEASON_DAYS == 0:
                self.ends.append(self._end())
                self.season += 1
                self._changes(day)
            self.skip_to(self.at(day, 0.99))
            starter.advance(None, self.clock.now)
            if self._named().name != self._task.name:
                self.begin_task(self._named())
            if day % 30 == 0:
                self.renew_certificates()
                self.month_begins(day // 30)
            if day < seasons * SEASON_DAYS and self.night(day):
                self._keep_models()

    def _changes(self, day: int) -> None:
        for name in self.names:
            if name not in self.cards and self.has_card(name, day=day):
                self.insert_card(name)
        if self.season == 4:
            for name in [each for each in self.names if self.late <= self._place(each) < self.late + self.lost]:
                self.lock_out(name)
        self.desk.folder.path.joinpath("classes.txt").write_text("\n".join(self.classes()))

    def _keep_models(self) -> None:
        """Boards that were there see the model of the round that has closed."""
        task, digest = self.server.prepared, self.engine.announcement.global_digest
        flat = np.frombuffer(self.blob(digest), "<f4", count=task.model.layout.size)
        for name in self.heard:
            self.cards[name].model = task, flat

    def _end(self) -> SeasonEnd:
        task, classes = self._named(), len(self._task.classes)
        cards = [card for card in self.cards.values() if card.model is not None]
        own, ways = zip(*(card.accuracies(classes) for card in cards), strict=True)
        alone = max(float(np.mean([each[way] for each in ways])) for way in ways[0])
        entries = {card.name: card.entries for card in self.cards.values()}
        began = self.at((self.season - 1) * SEASON_DAYS) + BEGINS.timestamp()
        here = {name: [each for each in found if each.at >= began] for name, found in entries.items()}
        spent = []
        for of in (here, entries):
            epsilons = [oracle([entry.charge for entry in each]) for each in of.values()]
            spent.append((min(epsilons), median(epsilons), max(epsilons)))
        return SeasonEnd(
            number=self.season,
            task=task.name,
            classes=classes,
            boards=len(self.cards),
            took_part=sum(bool(each) for each in here.values()),
            own=float(np.mean(own)),
            alone=alone,
            season=spent[0],
            in_all=spent[1],
            sentences=self.sentences(),
        )

    def sentences(self) -> tuple[str, ...]:
        """What the fleet does, waits for, has spent, and until when it learns."""
        folder = self.desk.folder
        watch = FleetWatch(folder)
        watch._spending = Spending(folder.config.device["limits"], clock=self.wall)
        view = watch.view(self.wall())
        watch.close()
        assert view.run is not None
        assert view.season is not None
        waits = descriptions.next_round(view) or "; ".join(each.what for each in view.problems if "waits" in each.what)
        return (
            descriptions.progress(view.run, view.season),
            waits or "waits for nothing",
            descriptions.privacy_left(view),
            descriptions.season(view.season, now=view.at),
        )


def check_seasons(year: SeasonYears, *, epsilon: float, lifetime: float, worse: float) -> None:
    """Checks that no limit was exceeded, and that what boards predict with is not worse than alone.

    :param worse: by how much it may be, because the mean of few boards is not sure, and `alone` is the best of several
        ways on the test itself.
    """
    for end in year.ends:
        assert end.season[2] <= epsilon * 1.0001
        assert end.in_all[2] <= lifetime * 1.0001
        assert end.own >= end.alone - worse, f"season {end.number}: worse than alone"
    for card in year.cards.values():
        own = [(entry.task, entry.round) for entry in card.entries]
        assert own == list(dict.fromkeys(card.committed)), "each round once, none twice"
    began = [end.task for end in year.ends]
    assert began == sorted(began, key=lambda name: int(name.partition("-")[2] or 1))
