"""The games for one record, where each gradient is noised: DP-SGD on a device.

The adversary here sees every noised gradient, as the ledger's claim allows it to: stronger than a server, which has
only where a round began and where it ended. Who is in which batch stays hidden from it. The score of a record is its
likelihood ratio, batch by batch: with q the sample rate and s the projections of a batch's gradients on the record's,
log(1 - q + q exp(sum of (2 s - 1) / (2 sigma^2))). All gradients of one batch share one draw of the batch.

`play` is the game of two worlds: a device with the canary and without it, `trials` rounds of each; the other records
are as good as absent, which is the worst case. `play_one_run` inserts many canaries at once into a training of the
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

from edge_client.store import DeviceStore
from edge_client.trainer import Trainer
from hushfleet.batch_gradient import GradientFunction
from hushfleet.data.samples import Samples
from hushfleet.evaluation import LogitsOf
from hushfleet.methods.base import RoundTerms
from hushfleet.privacy.mechanism import Charge
from hushfleet.privacy.record import RecordMechanism
from simulator.audit.canary import LENGTH, CanaryGradient, disjoint_blocks, finite
from simulator.audit.device import DEVICE, FreshNoise, KeepGoing, Scores, Subject

MEASURED = 4  # rounds without the canary that variances are measured in
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


def play(subject: Subject, records: int, trials: int, keep_going: KeepGoing) -> RecordScores:
    """`trials` rounds in each world, or fewer where `keep_going`, asked with how many are done, says no.

    :param records: how many the device has beside the canary.
    """
    game = _TwoWorlds(subject, records)
    weights, spread = game.measured()
    scores: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for done in range(trials):
        if not keep_going(done):
            break
        for inside in (True, False):
            seen, update = game.round(inside, life=2 * done + inside + MEASURED, keep=lambda noised: noised @ weights)
            ratio = log_ratio([np.array(batch) for batch in seen], game.rate, spread, game.shift)
            scores[inside].append((float(ratio), float(update @ game.canary)))
    both = {inside: np.array(scores[inside], np.float64).reshape(-1, 2).T for inside in scores}
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
) -> OneRun:
    """One training of `rounds` rounds on `samples` and about half of `canaries`."""
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
        method, controls = trainer.method, trainer.method.controls(trainer.method.init_server(subject.seed), 1)
        terms = RoundTerms(subject.cohort, controls)
        mechanism = method.record_mechanism(terms)
        unit = mechanism.batch_size / mechanism.clip_norm
        watch = _watched(trainer, lambda noised: (noised[places] * directions).sum(axis=1) * unit)
        params = subject.initial
        moved: list[np.ndarray] = []
        trainer.observer = lambda trained: moved.append(trained.release.values)
        for round in range(1, rounds + 1):
            trainer.run_round(subject.plan(round, controls), params)
            params = params + moved.pop()
        charge = method.charge(terms)
    scores = log_ratio([np.array(batch) for batch in watch], mechanism.sample_rate, mechanism.noise_multiplier, 1.0)
    return OneRun(scores, included, charge, rounds)


def log_ratio(batches: list[np.ndarray], rate: float, spread: float, shift: float) -> Any:
    """Log-likelihood ratio of "it is among the records" over "it is not", summed over batches.

    :param batches: of each, the projections of its gradients `[g, ...]`: normal with standard deviation `spread`, and
        mean `shift` where the record is in the batch, else 0.
    """
    total: Any = 0.0
    for projections in batches:
        if not len(projections):
            continue
        exponent = (shift * (2 * projections - shift) / (2 * max(spread, 1e-9) ** 2)).sum(axis=0)
        exponent = np.clip(exponent, -_LARGEST_LOG, _LARGEST_LOG)
        total = total + (exponent if rate == 1 else np.log1p(rate * np.expm1(exponent)))
    return total


class _TwoWorlds:
    def __init__(self, subject: Subject, records: int) -> None:
        self.subject = subject
        spec = subject.spec
        rng = np.random.default_rng(subject.seed)
        (direction,), _ = blocks = disjoint_blocks(spec.model.layout, 1, rng)
        length = LENGTH * finite(spec.privacy.clip_norm)
        with _device(subject, 0, None, None, None) as trainer:
            self.method = trainer.method
            self.controls = self.method.controls(self.method.init_server(subject.seed), 1)
            self.terms = RoundTerms(subject.cohort, self.controls)
            self.mechanism = self.method.record_mechanism(self.terms)
        # Where the gradient of a batch is clipped, one record can turn it round: the others pull the other way.
        turns = self.mechanism.clips == "batch"
        self.canary = -direction  # a step goes against the gradient
        self.rate, self.shift = self.mechanism.sample_rate, 2.0 if turns else 1.0
        self._direction = direction
        self._gradient = CanaryGradient(
            classes=len(spec.model.class_names),
            blocks=blocks,
            length=length * (1 + 2 * records if turns else 1),
            others=-direction * length if turns else 0.0,
        )
        count = records + 1
        labels = np.zeros(count, np.int64)
        labels[-1] = len(spec.model.class_names)
        images = np.zeros((count, *spec.model.input_shape), np.uint8)
        self._samples = Samples(images, labels, spec.model.mean, spec.model.std)

    def measured(self) -> tuple[np.ndarray, float]:
        """How each value counts, float64 `[d]`, and the standard deviation of what they add up to, noise alone.

        A canary's clipped gradient adds up to 1.
        """
        count, total, squares = 0, 0.0, 0.0

        def add(noised: np.ndarray) -> float:
            nonlocal count, total, squares
            count, total, squares = count + 1, total + noised.astype(np.float64), squares + noised.astype(np.float64) ** 2
            return 0.0

        for life in range(MEASURED):
            self.round(False, life=life, keep=add, others=False)
        mechanism = self.mechanism
        per_batch = 1.0 if mechanism.clips == "batch" else 1 / mechanism.batch_size
        expected = self._direction.astype(np.float64) * finite(mechanism.clip_norm) * per_batch
        variances = np.maximum((squares - total**2 / count) / max(count - 1, 1), 1e-12 * expected**2)
        weights = expected / np.maximum(variances, 1e-300)
        weights /= weights @ expected
        return weights, float(np.sqrt(weights**2 @ variances))

    def round(self, inside: bool, *, life: int, keep: Any, others: bool = True) -> tuple[list[list[Any]], np.ndarray]:
        """What is seen of a round that the server asked for twice: all noised gradients, and the last update."""
        samples = self._samples if inside else self._samples.take(slice(0, -1))
        if not others:
            samples = self._samples.take(slice(0, 0))
        moved: list[np.ndarray] = []
        with _device(self.subject, life, self._gradient, samples, _no_logits) as trainer:
            watch = _watched(trainer, keep)
            trainer.observer = lambda trained: moved.append(trained.release.values)
            for _ in range(2):
                trainer.run_round(self.subject.plan(1, self.controls), self.subject.initial)
        offset = self.mechanism.clips == "batch"
        return [[value + offset for value in batch] for batch in watch], moved[-1]


@contextmanager
def _device(
    subject: Subject, life: int, gradient: Any, samples: Samples | None, logits_of: Any
) -> Iterator[Trainer]:
    with (
        tempfile.TemporaryDirectory(prefix="audit-") as folder,
        DeviceStore(Path(folder) / "store.sqlite", device=DEVICE, durable=False) as store,
    ):
        yield Trainer(
            device=DEVICE,
            store=store,
            spec=subject.spec,
            gradient=gradient,
            logits_of=logits_of,
            samples=samples,
            randomness=FreshNoise(subject.seed, life, subject.field_noise),
            epsilon_limit=float("inf"),
            delta=subject.spec.privacy.delta,
        )


def _watched(trainer: Trainer, keep: Any) -> list[list[Any]]:
    """From now on `keep` is handed each noised gradient of the device; the list is of batches of what it returns."""
    seen: list[list[Any]] = []
    own = trainer.method.record_mechanism

    def watched(terms: RoundTerms) -> WatchedMechanism:
        mechanism = own(terms)
        values = {each.name: getattr(mechanism, each.name) for each in fields(RecordMechanism)}
        return WatchedMechanism(**values, batches_seen=seen, keep=keep)

    trainer.method.record_mechanism = watched
    return seen


def _no_logits(params: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.zeros((len(x), 1), np.float32)


