"""The games for one record, where each gradient is noised: DP-SGD on a device.

The adversary here sees every noised gradient, as the ledger's claim allows it to: stronger than a server, which has
only where a round began and where it ended. Who is in which batch stays hidden from it. The score of a record is its
likelihood ratio, batch by batch: with q the sample rate and s the projections of a batch's gradients on the record's,
log(1 - q + q exp(sum of (2 s - 1) / (2 sigma^2))). All gradients of one batch share one draw of the batch.

`play` is the game of two worlds: canaries that are among a device's records, and canaries that are not; other records
are absent, which is the worst case. `play_one_run` inserts many canaries at once into a training of the
real network on real images, each by a fair coin (Steinke, Nasr and Jagielski 2023, Algorithm 1).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hushfleet.data.samples import Samples
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.trainer import Trainer
from hushfleet.methods.state import DeviceState, RoundTerms
from hushfleet.model.evaluation import LogitsOf
from hushfleet.privacy.mechanism import Charge
from hushfleet.privacy.record import RecordMechanism
from hushfleet.simulator.studies.audit.canary import LENGTH, CanaryGradient, disjoint_blocks, finite
from hushfleet.simulator.studies.audit.device import (
    DEVICE,
    FLOOR,
    ROUNDS_A_LIFE,
    FreshNoise,
    KeepGoing,
    Moments,
    Scores,
    Subject,
    limits_of,
)
from hushfleet.training.batch import GradientFunction
from hushfleet.wire.format.messages import RoundPlan

MEASURED = 4  # rounds without a canary that variances are measured in
_AT_ONCE = 64  # canaries in one round
_LEAST_WIDTH = 4  # coordinates for each
_LARGEST_LOG = 700.0


class RecordScores(NamedTuple):
    """Of whoever sees every noised gradient, and of whoever sees only where the round ended."""

    gradients: Scores
    update: Scores
    charge: Charge


class OneRun(NamedTuple):
    """Scores of all canaries of one run, and whether each was in, bool `[m]`."""

    scores: np.ndarray
    included: np.ndarray
    charge: Charge
    rounds: int


@dataclass(frozen=True)
class WatchedMechanism(RecordMechanism):
    """The device's own mechanism, with an adversary who is handed each noised gradient.

    :param batches_seen: of each batch its noised gradients, float32 `[d]`, or what `keep` makes of them.
    """

    batches_seen: list[list[np.ndarray]] = field(default_factory=list)
    keep: Any = np.copy

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        self.batches_seen.append([])
        return super().sample(count, rng)

    def noised_mean(self, clipped_sum: Any, noise: Any) -> Any:
        noised = super().noised_mean(clipped_sum, noise)
        self.batches_seen[-1].append(self.keep(noised))
        return noised


def play(subject: Subject, trials: int, keep_going: KeepGoing) -> RecordScores:
    """At least `trials` canaries in each world, or fewer where `keep_going`, asked with how many are done, says no.

    Canaries of one round lie on coordinates of their own, half of them among the device's records. Where a record's
    gradient is clipped by itself and each value has noise of its own, they are as independent as canaries of separate
    rounds, and cost a fraction. Where a batch is clipped as a whole, each has a round to itself.
    """
    game = _TwoWorlds(subject)
    weights, spreads = game.measured()
    scores: dict[bool, list[np.ndarray]] = {True: [], False: []}
    done = 0
    for included, trainer, round in game.rounds(trials):
        if not keep_going(done):
            break
        batches, update = game.seen(trainer, round, lambda noised: (noised[game.places] * weights).sum(axis=1))
        ratios = np.broadcast_to(log_ratio(batches, game.rate, spreads, game.shift), included.shape)
        moved = (update[game.places] * -game.directions).sum(axis=1)  # a step goes against the gradient
        for world in (True, False):
            scores[world].append(np.stack((ratios, moved))[:, included == world])
        done = min(sum(each.shape[1] for each in scores[world]) for world in (True, False))
    both = {world: np.concatenate(scores[world], axis=1)[:, :done] for world in scores}
    gradients, update = (Scores(both[True][which], both[False][which]) for which in (0, 1))
    return RecordScores(gradients, update, game.method.charge(game.terms))


def play_one_run(
    subject: Subject,
    samples: Samples,
    network: GradientFunction,
    logits_of: LogitsOf,
    *,
    canaries: int,
    rounds: int,
) -> OneRun | None:
    """One training of `rounds` rounds on `samples` and about half of `canaries`; None where batches are clipped."""
    rng = np.random.default_rng(subject.seed)
    included = rng.random(canaries) < 0.5
    layout, classes = subject.spec.model.layout, len(subject.spec.model.class_names)
    blocks = disjoint_blocks(layout, canaries, rng)
    gradient = CanaryGradient(
        classes=classes,
        blocks=blocks,
        length=LENGTH * finite(subject.spec.privacy.clip_norm),
        network=network,
    )
    inserted = np.flatnonzero(included) + classes
    blank = np.zeros((len(inserted), *samples.images.shape[1:]), np.uint8)
    data = Samples(
        np.concatenate((samples.images, blank)),
        np.concatenate((samples.labels, inserted)),
        samples.mean,
        samples.std,
    )
    directions, places = blocks
    with _device(subject, 1, gradient, data, logits_of) as trainer:
        method, controls = trainer.method, subject.controls(trainer.method)
        terms = RoundTerms(subject.noise_split, controls)
        mechanism = method.record_mechanism(terms)
        if mechanism.clips == "batch":
            return None
        unit = mechanism.batch_size / mechanism.clip_norm
        params = subject.initial
        moved: list[np.ndarray] = []
        trainer.observer = lambda trained: moved.append(trained.release.values)
        with _watched(trainer, lambda noised: (noised[places] * directions).sum(axis=1) * unit) as watch:
            for round in range(1, rounds + 1):
                trainer.run_round(subject.plan(round, controls), params)
                params = params + moved.pop()
        charge = method.charge(terms)
    scores = log_ratio([np.array(batch) for batch in watch], mechanism.sample_rate, mechanism.noise_multiplier, 1.0)
    return OneRun(scores, included, charge, rounds)


def log_ratio(batches: list[np.ndarray], rate: float, spread: np.ndarray | float, shift: float) -> Any:
    """Log-likelihood ratio of "it is among the records" over "it is not", summed over batches.

    :param batches: of each, the projections of its gradients `[g, ...]`: normal with standard deviation `spread`, a
        number or `[...]`, and mean `shift` where the record is in the batch, else 0.
    """
    total: Any = 0.0
    for projections in batches:
        if not len(projections):
            continue
        exponent = (shift * (2 * projections - shift) / (2 * np.maximum(spread, 1e-9) ** 2)).sum(axis=0)
        exponent = np.clip(exponent, -_LARGEST_LOG, _LARGEST_LOG)
        total = total + (exponent if rate == 1 else np.log1p(rate * np.expm1(exponent)))
    return total


class _TwoWorlds:
    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        spec, layout = subject.spec, subject.spec.model.layout
        self._rng = np.random.default_rng(subject.seed)
        with _device(subject, 0, None, None, None) as trainer:
            self.method = trainer.method
            self.controls = subject.controls(self.method)
            self.terms = RoundTerms(subject.noise_split, self.controls)
            self.mechanism = self.method.record_mechanism(self.terms)
        # Where the gradient of a batch is clipped, one record can turn it round: another one pulls the other way.
        self.turns = self.mechanism.clips == "batch"
        self.canaries = 1 if self.turns else max(1, min(_AT_ONCE, layout.size // _LEAST_WIDTH))
        self.directions, self.places = blocks = disjoint_blocks(layout, self.canaries, self._rng)
        self.rate, self.shift = self.mechanism.sample_rate, 2.0 if self.turns else 1.0
        length = LENGTH * finite(spec.privacy.clip_norm)
        others = np.zeros(layout.size, np.float32)
        if self.turns:
            others[self.places[0]] = -self.directions[0] * length
        self._gradient = CanaryGradient(
            classes=len(spec.model.class_names), blocks=blocks, length=length * 3, others=others
        )

    def measured(self) -> tuple[np.ndarray, np.ndarray]:
        """How each value of a canary's block counts, float64 `[m, b]`, and the standard deviation `[m]` of what they
        add up to by noise alone. A canary's clipped gradient adds up to 1."""
        moments = Moments()
        with self._life(0, np.zeros(0, np.int64), others=0) as trainer:
            for round in range(1, min(MEASURED, self.subject.spec.rounds) + 1):
                self.seen(trainer, round, lambda noised: moments.add(noised.astype(np.float64)))
        per_batch = 1.0 if self.turns else 1 / self.mechanism.batch_size
        expected = self.directions.astype(np.float64) * finite(self.mechanism.clip_norm) * per_batch
        variances = (moments.spread / max(moments.count - 1, 1))[self.places]
        variances = np.maximum(variances, FLOOR * expected**2)
        weights = expected / variances
        weights /= (weights * expected).sum(axis=1, keepdims=True)
        return weights, np.sqrt((weights**2 * variances).sum(axis=1))

    def rounds(self, trials: int) -> Iterator[tuple[np.ndarray, Trainer, int]]:
        """Which canaries are in, the device, and its next round; without end short of `trials` in each world."""
        lengths, done, life = min(self.subject.spec.rounds, ROUNDS_A_LIFE), 0, 0
        while done < trials:
            life += 1
            if self.canaries == 1:
                included = np.array([life % 2 == 0])
            else:
                included = self._rng.permutation(self.canaries) < self.canaries // 2
            labels = np.flatnonzero(included)
            with self._life(life, labels, others=int(self.turns)) as trainer:
                for round in range(1, lengths + 1):
                    yield included, trainer, round
                    done += self.canaries / 2
                    if done >= trials and self.canaries > 1:
                        break

    @contextmanager
    def _life(self, number: int, inserted: np.ndarray, *, others: int) -> Iterator[Trainer]:
        """A device whose records are the canaries `inserted` and `others` more."""
        model = self.subject.spec.model
        labels = np.concatenate((np.zeros(others, np.int64), inserted + len(model.class_names)))
        images = np.zeros((len(labels), *model.input_shape), np.uint8)
        samples = Samples(images, labels, model.mean, model.std)
        with _device(self.subject, number, self._gradient, samples, _no_logits, trainer=_Newcomer) as trainer:
            yield trainer

    def seen(self, trainer: Trainer, round: int, keep: Any) -> tuple[list[np.ndarray], np.ndarray]:
        """What is seen of a round that the server asked for twice: all noised gradients, and the last update."""
        moved: list[np.ndarray] = []
        trainer.observer = lambda trained: moved.append(trained.release.values)
        with _watched(trainer, keep) as watch:
            for _ in range(2):
                trainer.run_round(self.subject.plan(round, self.controls), self.subject.initial)
        offset = 1.0 if self.turns else 0.0
        return [np.array(batch, np.float64) + offset for batch in watch], moved[-1]


class _Newcomer(Trainer):
    """A device that begins each round as if it had never taken part, so that rounds are alike."""

    def state_for(self, plan: RoundPlan) -> DeviceState:
        super().state_for(plan)
        return self.method.init_state()


@contextmanager
def _device(
    subject: Subject,
    life: int,
    gradient: Any,
    samples: Samples | None,
    logits_of: Any,
    trainer: type[Trainer] = Trainer,
) -> Iterator[Trainer]:
    with (
        tempfile.TemporaryDirectory(prefix="audit-") as folder,
        DeviceStore(Path(folder) / "store.sqlite", device=DEVICE, durable=False) as store,
    ):
        yield trainer(
            device=DEVICE,
            store=store,
            spec=subject.spec,
            gradient=gradient,
            logits_of=logits_of,
            samples=lambda: samples,
            randomness=FreshNoise(subject.seed, life, subject.field_noise),
            limits=limits_of(subject.spec),
        )


@contextmanager
def _watched(trainer: Trainer, keep: Any) -> Iterator[list[list[Any]]]:
    """Inside, `keep` is handed each noised gradient of the device; the list is of batches of what it returns."""
    seen: list[list[Any]] = []
    own = trainer.method.record_mechanism

    def watched(terms: RoundTerms) -> WatchedMechanism:
        mechanism = own(terms)
        values = {each.name: getattr(mechanism, each.name) for each in fields(RecordMechanism)}
        return WatchedMechanism(**values, batches_seen=seen, keep=keep)

    trainer.method.record_mechanism = watched
    try:
        yield seen
    finally:
        del trainer.method.record_mechanism


def _no_logits(params: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.zeros((len(x), 1), np.float32)


