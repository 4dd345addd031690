"""Plays the game on which a claim is defined: in one world the canary is in, in the other it is not.

Each world has its own devices, which run the code of a board: store, ledger, release, codec. The server requests each
round twice, as after a lost acknowledgement; if the bytes differ, it uses the mean of both.

The score is the likelihood ratio of two normal distributions with the same variances: the projection on the values that
the method sends without noise, weighted by each value's precision; a round with more noise than another has less
weight. Variances are measured in trials that are not counted. They are not taken from the header, which may state noise
that is missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from hushfleet.edge_client.worker.trainer import Trainer
from hushfleet.simulator.studies.audit.subject import Subject

MEASURED = 32  # trials of each world in which variances are measured
FLOOR = 1e-12
_ROUNDS_A_LIFE = 32  # rounds before a new store, because each entry reads the whole ledger
_SHOWN_OUTRIGHT = 1e6
_LEAST_FACTOR = 1e-4

KeepGoing = Callable[[int], bool]
"""Called with the number of finished trials; returns whether to continue."""


class Scores(NamedTuple):
    """The adversary's scores, float64 `[trials]` in each world; a higher score means "in"."""

    inside: np.ndarray
    outside: np.ndarray


class Seen(NamedTuple):
    """The server's view of a round: float64 values `[n]`, and the header's fields about the noise."""

    round: int
    vector: np.ndarray
    header: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Canary:
    """The canary in the rounds with the same terms.

    :param expected: float64 `[n]`, the server's view of it without noise.
    :param noise: standard deviation of the charged noise, up to a factor that all rounds have in common.
    :param weight: of these rounds in the score; 1 for those with the least noise.
    """

    expected: np.ndarray
    noise: float
    weight: float


AnyCanary = TypeVar("AnyCanary", bound=Canary)


class TwoWorlds(ABC, Generic[AnyCanary]):
    """A game for a device that sends one update, or answer, a round.

    :param rounds: numbers of rounds that all train or all ask; they are played in turn.
    :param adversaries: by the words that describe it, the number of values that an adversary sees; None: all, and the
        header.
    """

    first_life = 1

    def __init__(self, subject: Subject, rounds: Sequence[int], adversaries: Mapping[str, int | None]) -> None:
        self.subject, self.rounds, self.adversaries = subject, rounds, adversaries
        self._least_noise = min(map(subject.noise, rounds))
        self._canaries: dict[Hashable, AnyCanary] = {}

    @abstractmethod
    def device(self, life: int, *, inside: bool) -> AbstractContextManager[Trainer]:
        """Opens a device of one world."""

    @abstractmethod
    def make_canary(self, round: int) -> AnyCanary: ...

    @abstractmethod
    def see(self, trainer: Trainer, round: int, *, inside: bool) -> Seen:
        """Plays a round that is requested twice."""

    def canary(self, round: int) -> AnyCanary:
        key = self.subject.kind(round)
        if key not in self._canaries:
            self._canaries[key] = self.make_canary(round)
        return self._canaries[key]

    def noise_and_weight(self, round: int, values: np.ndarray) -> tuple[float, float]:
        """:param values: the noised ones of `Canary.expected`."""
        noise = self.subject.noise(round)
        return float(np.linalg.norm(values)) * noise, (self._least_noise / noise) ** 2

    def play(self, trials: int, keep_going: KeepGoing) -> dict[str, Scores]:
        """Returns each adversary's scores: `trials` rounds in each world, or fewer if `keep_going` returns False."""
        measured, headers = MeasuredNoise(), defaultdict[tuple[int, bool], set[tuple[float, ...]]](set)
        for seen, inside in self._trials(1, MEASURED, lambda _: True):
            canary = self.canary(seen.round)
            measured.add(self.subject.kind(seen.round), inside, (seen.vector - canary.expected * inside) / canary.noise)
            headers[seen.round, inside].add(seen.header)
        scores: dict[bool, list[list[float]]] = {True: [], False: []}
        for seen, inside in self._trials(2, trials, keep_going):
            with_canary, without = headers[seen.round, True], headers[seen.round, False]
            tells = len(with_canary) == len(without) == 1 and seen.header in with_canary - without
            scores[inside].append(self._score(seen, measured, _SHOWN_OUTRIGHT * tells))
        found = (np.array(scores[world]).reshape(-1, len(self.adversaries)).T for world in (True, False))
        return dict(zip(self.adversaries, map(Scores, *found), strict=True))

    def _score(self, seen: Seen, measured: MeasuredNoise, told: float) -> list[float]:
        """Returns each adversary's score: without noise 1/2 for the canary and -1/2 for an empty update, in a round
        with the least noise."""
        canary, factor = self.canary(seen.round), measured.factor(self.subject.kind(seen.round))
        means, floor = canary.expected, np.maximum(FLOOR * canary.expected**2, 1e-300)
        weights = means / np.maximum(measured.variances * factor * canary.noise**2, floor)
        projected, signal = weights * seen.vector, weights * means
        ends = self.adversaries.values()
        shares = (float(projected[:end].sum() / max(signal[:end].sum(), 1e-300)) for end in ends)
        scores = [canary.weight / factor * (share - 0.5) for share in shares]
        return [score + told * (end is None) for score, end in zip(scores, ends, strict=True)]

    def _trials(self, stage: int, count: int, keep_going: KeepGoing) -> Iterator[tuple[Seen, bool]]:
        """Yields trials of both worlds in turn, and whether the canary was in."""
        life, done = (stage << 32) + self.first_life, 0
        for rounds in lives(self.rounds, count):
            with self.device(life, inside=True) as one, self.device(life + 1, inside=False) as other:
                for round in rounds:
                    if not keep_going(done):
                        return
                    yield self.see(one, round, inside=True), True
                    yield self.see(other, round, inside=False), False
                    done += 1
            life += 2


def lives(rounds: Sequence[int], count: int) -> Iterator[Sequence[int]]:
    """Yields the rounds of each device of a game, in turn and `count` in all. No device has a round twice."""
    while count > 0:
        for first in range(0, len(rounds), _ROUNDS_A_LIFE):
            life = rounds[first : first + _ROUNDS_A_LIFE][: max(count, 0)]
            if life:
                yield life
            count -= len(life)


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


class MeasuredNoise:
    """Measures the noise of a game's rounds, in units of the noise that is charged.

    Each value has a variance, measured in rounds of all kinds; each kind has a factor on it, measured in all values.
    """

    def __init__(self) -> None:
        self._worlds = {True: Moments(), False: Moments()}
        self._kinds: defaultdict[Hashable, list[float]] = defaultdict(list)

    def add(self, kind: Hashable, inside: bool, noise: np.ndarray) -> None:
        """:param noise: float64 `[n]`, in units of the charged noise."""
        self._worlds[inside].add(noise)
        self._kinds[kind].append(float(np.mean(noise * noise)))

    @cached_property
    def variances(self) -> np.ndarray:
        """The variance of each value, float64 `[n]`, over rounds of all kinds."""
        inside, outside = self._worlds[True], self._worlds[False]
        return (inside.spread + outside.spread) / (inside.count + outside.count - 2)

    def factor(self, kind: Hashable) -> float:
        """Returns the factor for rounds of this kind; 1 if none of them was measured."""
        every = [square for squares in self._kinds.values() for square in squares]
        mean = sum(every) / len(every)
        own = self._kinds[kind] or [mean]
        return max(sum(own) / len(own) / mean, _LEAST_FACTOR) if mean > 0 else 1.0
