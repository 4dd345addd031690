"""Plays the game on which a claim is defined: in one world the canary is in, in the other it is not.

Each world has its own devices, which run the code of a board: store, ledger, release, codec. A game defines what is
inserted and what the adversary sees; it yields trials, in each of which an adversary has a score, and here they are
counted. The server requests each round twice, as after a lost acknowledgement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.methods.local_round import Trained
from hushfleet.methods.state import DeviceState
from hushfleet.simulator.studies.audit.subject import Subject

MEASURED = 32  # trials of each world in which variances are measured
FLOOR = 1e-12
_ROUNDS_A_LIFE = 32  # rounds before a new store, because each entry reads the whole ledger

KeepGoing = Callable[[int], bool]
"""Called with the number of finished trials; returns whether to continue."""


class Scores(NamedTuple):
    """The adversary's scores, float64 `[trials]` in each world; a higher score means "in"."""

    inside: np.ndarray
    outside: np.ndarray


class Game(ABC):
    """The game of two worlds.

    :param rounds: numbers of rounds that all train or all ask; they are played in turn.
    :param adversaries: by the words that describe it, how many of the seen values an adversary looks at; None: all.
    """

    def __init__(self, subject: Subject, rounds: Sequence[int], adversaries: Mapping[str, int | None]) -> None:
        self.subject, self.rounds, self.adversaries = subject, rounds, adversaries

    @abstractmethod
    def measure(self) -> None:
        """Measures the noise, in trials that are not counted. It is not taken from the header, which may state noise
        that is missing."""

    @abstractmethod
    def trials(self, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields trials, `count` or more in each world: whether the canary was in, bool `[n]`, and each adversary's
        scores, float64 `[adversaries, n]`."""

    def play(self, trials: int, keep_going: KeepGoing) -> dict[str, Scores]:
        """Returns each adversary's scores: `trials` in each world, or fewer if `keep_going` returns False."""
        self.measure()
        found: dict[bool, list[np.ndarray]] = {True: [], False: []}
        done = 0
        for inside, scores in self.trials(trials):
            for world, those in found.items():
                those.append(scores[:, inside == world])
            done = min(sum(each.shape[1] for each in those) for those in found.values())
            if not keep_going(done):
                break
        of_worlds = (np.concatenate(found[world], axis=1)[:, :done] for world in (True, False))
        return dict(zip(self.adversaries, map(Scores, *of_worlds), strict=True))


def lives(rounds: Sequence[int], count: int) -> Iterator[Sequence[int]]:
    """Yields the rounds of each device of a game, in turn and `count` in all. No device has a round twice."""
    while count > 0:
        for first in range(0, len(rounds), _ROUNDS_A_LIFE):
            life = rounds[first : first + _ROUNDS_A_LIFE][: max(count, 0)]
            if life:
                yield life
            count -= len(life)


class CanaryRound(DeviceRound):
    """A round that a device starts as if it had never taken part, so that all rounds are equal.

    :param ends_with: the result that replaces training, or the answer; None to train.
    """

    def __init__(self, trainer: Trainer, subject: Subject, round: int, ends_with: Trained | None = None) -> None:
        super().__init__(trainer, subject.plan(round), subject.membership_list)
        self.ends_with = ends_with

    def state(self) -> DeviceState:
        return self.trainer.method.init_state()

    def train(self, published: np.ndarray, *arguments: Any, **more: Any) -> Trained:
        if self.ends_with is None:
            return super().train(published, *arguments, **more)
        _ = self.charge  # raises if the device declines the round
        return self.ends_with

    def answer_question(self, published: np.ndarray) -> Trained:
        assert self.ends_with is not None, "an answer protects a device, so it is scripted"
        return self.train(published)


@dataclass
class Moments:
    """Running sums of vectors, for their variances."""

    count: int = 0
    total: Any = 0.0
    squares: Any = 0.0

    def add(self, values: np.ndarray) -> None:
        self.count += 1
        self.total = self.total + values
        self.squares = self.squares + values * values

    @property
    def spread(self) -> np.ndarray:
        """Sum of squared deviations from the mean."""
        return np.maximum(self.squares - self.total**2 / self.count, 0.0)
