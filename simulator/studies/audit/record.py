"""The game for records, if each gradient is noised: DP-SGD on a device.

The adversary here sees each noised gradient, which the ledger's claim covers: it is stronger than a server, which only
knows the model at the start and at the end of a round. It does not know which records are in which batch. The score of
a record is its likelihood ratio, batch by batch: with q the sample rate and s the projections of a batch's gradients on
the record's gradient, log(1 - q + q exp(sum of (2 s - 1) / (2 sigma^2))). All gradients of a batch share its draw.

Canaries are among a device's records in one world, and not in the other; other records are absent, which is the worst
case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hushfleet.edge_client.worker.trainer import Trainer
from hushfleet.learning.own_samples import OwnSamples
from hushfleet.methods.local_round import LocalRound
from hushfleet.privacy.record import RecordMechanism
from hushfleet.simulator.studies.audit.canary import LENGTH, finite
from hushfleet.simulator.studies.audit.game import FLOOR, CanaryRound, Game, Moments, lives
from hushfleet.simulator.studies.audit.subject import Subject

GRADIENTS = "sees every noised gradient"
UPDATE = "server: update"
MEASURED = 4  # rounds without a canary in which variances are measured
_CANARIES_A_ROUND = 64  # canaries in one round
_LEAST_WIDTH = 4  # coordinates for each canary
_LARGEST_LOG = 700.0

Keep = Callable[[np.ndarray], Any]
"""Returns the part of a noised gradient, float32 `[d]`, that is kept."""


class RecordGame(Game):
    """The game, for an adversary that sees each noised gradient, and one that sees the round's update.

    Canaries of one round have disjoint coordinates; half of them are among the device's records. Each record's gradient
    is clipped separately, and each value has its own noise, so they are as independent as canaries of separate rounds,
    and need much less time.

    :param rounds: numbers of rounds that train; they are played in turn.
    """

    def __init__(self, subject: Subject, rounds: Sequence[int]) -> None:
        super().__init__(subject, rounds, {GRADIENTS: None, UPDATE: None})
        self._rng = np.random.default_rng(subject.seed)
        self._canaries = max(1, min(_CANARIES_A_ROUND, subject.spec.model.layout.size // _LEAST_WIDTH))
        length = 3 * LENGTH * finite(subject.spec.privacy.clip_norm)
        self._gradient = subject.canary_records(self._canaries, self._rng, length=length)
        self._directions, self._places = self._gradient.blocks

    def measure(self) -> None:
        """Measures the variance of each value of a canary's block, float64 `[m, b]`, without a canary, in units of a
        round's charged noise."""
        moments, first = Moments(), self.rounds[:MEASURED]
        with self.subject.device(0, (self._gradient, np.arange(0))) as trainer:
            for unit, round in ((self._signal(round) * self.subject.noise(round), round) for round in first):
                self._see(trainer, round, lambda noised: moments.add(noised.astype(np.float64) / unit))  # noqa: B023
        self._variances = (moments.spread / max(moments.count - 1, 1))[self._places]

    def trials(self, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        done = 0.0
        for life, rounds in enumerate(lives(self.rounds, 2 * count), start=1):
            if self._canaries == 1:
                included = np.array([life % 2 == 0])
            else:
                included = self._rng.permutation(self._canaries) < self._canaries // 2
            with self.subject.device(life, (self._gradient, np.flatnonzero(included))) as trainer:
                for round in rounds:
                    yield included, self._scores(trainer, round)
                    done += self._canaries / 2
                    if done >= count and self._canaries > 1:
                        return

    def _scores(self, trainer: Trainer, round: int) -> np.ndarray:
        weights, spreads = self._weights(round)
        batches, update = self._see(trainer, round, lambda noised: (noised[self._places] * weights).sum(axis=1))
        moved = (update[self._places] * -self._directions).sum(axis=1)  # a step goes against the gradient
        ratios = log_ratio(batches, self.subject.spec.privacy.sample_rate, spreads)
        return np.stack((np.broadcast_to(ratios, moved.shape), moved))

    def _weights(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the weight of each value of a canary's block, float64 `[m, b]`, and the standard deviation `[m]` of
        the weighted sum of the noise alone. The weighted sum of a canary's clipped gradient is 1."""
        signal = self._signal(round)
        expected = self._directions.astype(np.float64) * signal
        variances = np.maximum(self._variances * (signal * self.subject.noise(round)) ** 2, FLOOR * expected**2)
        weights = expected / variances
        weights /= (weights * expected).sum(axis=1, keepdims=True)
        return weights, np.sqrt((weights**2 * variances).sum(axis=1))

    def _signal(self, round: int) -> float:
        """Returns the norm that a canary's clipped gradient has in a noised mean."""
        mechanism = self.subject.method.record_mechanism(self.subject.terms(round))
        assert mechanism is not None, "the game is for the unit `record`"
        return finite(mechanism.clip_norm) / mechanism.batch_size

    def _see(self, trainer: Trainer, round: int, keep: Keep) -> tuple[list[np.ndarray], np.ndarray]:
        """Returns the adversary's view of a round requested twice: all noised gradients, and the last update."""
        watched, moved = _WatchedRound(trainer, self.subject, round, keep), list[np.ndarray]()
        trainer.observer = lambda _, __, noised: moved.append(noised.values)
        for _ in range(2):
            watched.run(self.subject.initial)
        return [np.array(batch, np.float64) for batch in watched.batches], moved[-1]


def log_ratio(batches: list[np.ndarray], rate: float, spread: np.ndarray | float) -> Any:
    """Returns the log-likelihood ratio of "it is among the records" over "it is not", summed over batches.

    :param batches: for each batch, the projections of its gradients `[g, ...]`: normal with standard deviation
        `spread`, a number or `[...]`, and mean 1 if the record is in the batch, else 0.
    """
    total: Any = 0.0
    for projections in batches:
        if not len(projections):
            continue
        exponent = ((2 * projections - 1) / (2 * np.maximum(spread, 1e-9) ** 2)).sum(axis=0)
        exponent = np.clip(exponent, -_LARGEST_LOG, _LARGEST_LOG)
        total = total + (exponent if rate == 1 else np.log1p(rate * np.expm1(exponent)))
    return total


@dataclass(frozen=True)
class _WatchedMechanism(RecordMechanism):
    """The device's own mechanism, with an adversary that receives each noised gradient.

    :param seen: for each batch, the results of `keep` for its noised gradients.
    """

    seen: list[list[Any]] = field(default_factory=list)
    keep: Keep = np.copy

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        self.seen.append([])
        return super().sample(count, rng)

    def noised_mean(self, clipped_sum: Any, noise: Any) -> Any:
        noised = super().noised_mean(clipped_sum, noise)
        self.seen[-1].append(self.keep(noised))
        return noised


class _WatchedRound(CanaryRound):
    """A round with an adversary that receives each noised gradient.

    :param keep: computes the part of a noised gradient that is kept, in `batches`.
    """

    def __init__(self, trainer: Trainer, subject: Subject, round: int, keep: Keep) -> None:
        super().__init__(trainer, subject, round)
        self.keep, self.batches = keep, list[list[Any]]()

    def begun(self, published: np.ndarray, samples: OwnSamples) -> LocalRound:
        """Returns the device's local round, with a mechanism that records its noised gradients."""
        begun = super().begun(published, samples)
        begun.record = _WatchedMechanism(**vars(begun.record), seen=self.batches, keep=self.keep)
        return begun
